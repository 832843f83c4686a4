"""What is said of a step's episodes. docs/runs.md defines every name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from statistics import fmean

from agentgym_rl.types import Group, StopReason, Trajectory

TURNS_SHOWN = 8
"""Turns with a metric of their own; all later ones share one, so that a long horizon does not flood the log."""
WORDS_COMPARED = 64
"""Of a long reply only the first and the last words are compared, half and half."""


def episode_metrics(groups: list[Group]) -> dict[str, float]:
    """Means over the usable episodes of a step, for all environments together and, if several, for each."""
    trajectories = [t for g in groups for t in g.trajectories]
    usable = [t for g in groups for t in g.usable]
    metrics = {"episodes/usable": float(len(usable)), "episodes/error": float(len(trajectories) - len(usable))}
    if not usable:
        return metrics
    metrics |= _means(usable) | surprise(usable)
    environments = sorted({t.task.env for t in usable})
    if len(environments) > 1:
        for env in environments:
            of_env = _means([t for t in usable if t.task.env == env])
            metrics |= {f"{env}/{name}": value for name, value in of_env.items()}
    return metrics


def _means(trajectories: list[Trajectory]) -> dict[str, float]:
    turns = [info for t in trajectories for info in t.infos]
    replies = [m for t in trajectories for m in t.messages if m.logprobs is not None]
    metrics = {
        "reward/mean": _mean(t.reward for t in trajectories),
        "success/mean": _mean(t.success for t in trajectories),
        "turns/mean": _mean(t.num_turns for t in trajectories),
        "truncated/rate": _share(trajectories, lambda t: t.stop is not None and t.stop.truncated),
        "truncated/horizon_rate": _share(trajectories, lambda t: t.stop is StopReason.MAX_TURNS),
        "truncated/length_rate": _share(trajectories, lambda t: t.stop is StopReason.LENGTH),
        "truncated/context_rate": _share(trajectories, lambda t: t.stop is StopReason.MAX_CONTEXT),
        "actions/invalid_rate": _mean(not info.get("valid", True) for info in turns),
        "actions/repeated_rate": _repeated(trajectories),
        "actions/alternating_rate": _alternating(trajectories),
        "tokens/per_reply": _mean(len(m.token_ids) for m in replies),
        "tokens/per_episode": _mean(len(t.token_ids) for t in trajectories),
        "tokens/sampled": float(sum(len(m.token_ids) for m in replies)),
    }
    dependence = input_dependence(trajectories)
    return metrics if dependence is None else metrics | {"replies/dependence": dependence}


def surprise(trajectories: list[Trajectory]) -> dict[str, float]:
    """`surprise/turn_K`: minus the mean log-probability the sampler gave the tokens of turn K, from 1 on."""
    logprobs: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        replies = [m for m in trajectory.messages if m.role == "assistant"]
        for turn, message in enumerate(replies, 1):
            logprobs[turn_name(turn)] += message.logprobs or []
    return {f"surprise/{name}": -fmean(values) for name, values in logprobs.items() if values}


def turn_name(turn: int) -> str:
    """`turn_3`; `turn_9+` for the ninth and all later ones."""
    return f"turn_{turn}" if turn <= TURNS_SHOWN else f"turn_{TURNS_SHOWN + 1}+"


def input_dependence(trajectories: list[Trajectory]) -> float | None:
    """How much replies depend on what they answer: 1 - D_same / D_other, from texts alone.

    D_same is the mean distance between two replies to the same input, D_other between two replies to different inputs
    of the same environment and turn (an agreement coefficient such as Krippendorff's alpha). An input is the task and
    the observation answered; two tasks that show the same text, as a game's first screen does, are not compared.
    A reply that is a function of its input gives 1, one drawn without looking 0 in expectation, whatever the number of
    actions; the same reply to everything 0. None when no input came twice or there was only one.
    """
    turns: dict[tuple[str, int], _Turn] = defaultdict(_Turn)
    for trajectory in trajectories:
        observation, turn = "", 0
        for message in trajectory.messages:
            if message.role == "assistant":
                turns[trajectory.task.env, turn].add(trajectory.task.item, observation, _words(message.content))
                turn += 1
            elif message.role == "user":
                observation = message.content
    compared = [replies for replies in turns.values() if replies.comparable]
    if not compared:
        return None
    gain = spread = 0.0
    for replies in compared:
        same, other = replies.similarity_same(), replies.similarity_other()
        gain += replies.repeated_inputs * (same - other)
        spread += replies.repeated_inputs * (1.0 - other)
    # Where all replies are the same there is nothing that could depend on anything.
    return gain / spread if spread > 1e-9 else 0.0


class _Turn:
    """The replies of one environment and turn as unit vectors, summed by input: mean cosines in linear time."""

    def __init__(self) -> None:
        self._by_input: dict[tuple[int, str], _Sum] = defaultdict(_Sum)
        self._by_observation: dict[str, _Sum] = defaultdict(_Sum)
        self._all = _Sum()

    def add(self, item: int, observation: str, vector: Mapping[str, float]) -> None:
        for total in (self._by_input[item, observation], self._by_observation[observation], self._all):
            total.add(vector)

    @property
    def repeated_inputs(self) -> int:
        """Replies to an input that was answered at least twice."""
        return sum(cell.count for cell in self._by_input.values() if cell.count > 1)

    @property
    def comparable(self) -> bool:
        return self.repeated_inputs > 0 and len(self._by_observation) > 1

    def similarity_same(self) -> float:
        """Mean cosine of two replies to the same input; every reply counts alike."""
        cells = [cell for cell in self._by_input.values() if cell.count > 1]
        pairs = sum((cell.square() - cell.count) / (cell.count - 1) for cell in cells)
        return pairs / self.repeated_inputs

    def similarity_other(self) -> float:
        """Mean cosine of two replies to different observations."""
        same_text = list(self._by_observation.values())
        pairs = self._all.count**2 - sum(some.count**2 for some in same_text)
        return (self._all.square() - sum(some.square() for some in same_text)) / pairs


class _Sum:
    """A sum of unit vectors."""

    def __init__(self) -> None:
        self.count = 0
        self._vector: dict[str, float] = defaultdict(float)

    def add(self, vector: Mapping[str, float]) -> None:
        self.count += 1
        for name, value in vector.items():
            self._vector[name] += value

    def square(self) -> float:
        return sum(value * value for value in self._vector.values())


def _words(reply: str) -> dict[str, float]:
    """A reply's words and pairs of words, each once, as a unit vector."""
    words = reply.split()
    if len(words) > WORDS_COMPARED:
        words = words[: WORDS_COMPARED // 2] + words[-WORDS_COMPARED // 2 :]
    features = {*words, *(f"{a} {b}" for a, b in pairwise(words))} or {""}
    return dict.fromkeys(features, len(features) ** -0.5)


def _replies(trajectory: Trajectory) -> list[str]:
    return [m.content for m in trajectory.messages if m.role == "assistant"]


def _repeated(trajectories: list[Trajectory]) -> float:
    """Share of replies, from the second on, that say the same as the reply before."""
    return _mean(a == b for t in trajectories for a, b in pairwise(_replies(t)))


def _alternating(trajectories: list[Trajectory]) -> float:
    """Share of replies, from the fourth on, that close a loop of two: A B A B."""
    said = [_replies(t) for t in trajectories]
    fours = (four for r in said for four in zip(r, r[1:], r[2:], r[3:], strict=False))
    return _mean(a == c and b == d and a != b for a, b, c, d in fours)


def _mean(values: Iterable[float]) -> float:
    listed = [float(v) for v in values]
    return fmean(listed) if listed else 0.0


def _share(trajectories: list[Trajectory], holds: Callable[[Trajectory], bool]) -> float:
    return _mean(holds(t) for t in trajectories)
