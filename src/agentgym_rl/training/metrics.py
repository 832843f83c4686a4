"""What is said of a step's episodes. docs/reference/run-directory.md defines every name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import pairwise
from statistics import fmean

from agentgym_rl.types import Group, StopReason, Trajectory

TURNS_SHOWN = 8
"""Turns with a metric of their own; all later ones share one, so that a long horizon does not flood the log."""
WORDS_COMPARED = 64
"""Of a long reply only the first and the last words are compared, half and half."""

CHANCE_REPLIES = 2.0
"""Replies, as if added to a step's, that differ for no reason: where nearly all replies are equal, the few others do
not make it look like dependence."""


def episode_metrics(groups: list[Group], environments: Collection[str] = ()) -> dict[str, float]:
    """Means over the usable episodes of a step, for all environments together and, if the run has several, for each.

    `environments` are the run's: a step may have drawn tasks of one of them only.
    """
    trajectories = [t for g in groups for t in g.trajectories]
    usable = [t for g in groups for t in g.usable]
    metrics = {
        "episodes/usable": float(len(usable)),
        "episodes/error": float(len(trajectories) - len(usable)),
        "episodes/timeout": float(sum(t.timed_out for t in trajectories)),
    }
    if not usable:
        return metrics
    metrics |= _means(usable) | surprise(usable)
    played = {t.task.env for t in usable}
    if len({*environments, *played}) > 1:
        for env in sorted(played):
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
    """Minus the mean log-probability the sampler gave its tokens, of all turns and of each: its estimate of entropy.

    It needs no learner, so it is there even in a step in which nothing could be learned.
    """
    logprobs: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        replies = [m for m in trajectory.messages if m.role == "assistant"]
        for turn, message in enumerate(replies, 1):
            logprobs["mean"] += message.logprobs or []
            logprobs[turn_name(turn)] += message.logprobs or []
    return {f"surprise/{name}": -fmean(values) for name, values in logprobs.items() if values}


def turn_name(turn: int) -> str:
    """`turn_3`; `turn_9+` for the ninth and all later ones."""
    return f"turn_{turn}" if turn <= TURNS_SHOWN else f"turn_{TURNS_SHOWN + 1}+"


def input_dependence(trajectories: list[Trajectory]) -> float | None:
    """How much replies depend on what they answer: (D_other - D_same) / D_other, from texts alone.

    D_same is the mean distance between two replies to the same input, D_other between two replies to different inputs
    of the same environment and turn (an agreement coefficient such as Krippendorff's alpha). An input is the task and
    the observation answered; two tasks that show the same text, as a game's first screen does, are not compared.
    A reply that is a function of its input gives 1, one drawn without looking 0 in expectation, whatever the number of
    actions; the same reply to everything 0. None when no input came twice or there was only one.
    """
    turns: dict[tuple[str, int], dict[_Input, _Sum]] = defaultdict(lambda: defaultdict(_Sum))
    for trajectory in trajectories:
        observation, turn = "", 0
        for message in trajectory.messages:
            if message.role == "assistant":
                given = (trajectory.task.item, observation)
                turns[trajectory.task.env, turn][given].add(_words(message.content))
                turn += 1
            elif message.role == "user":
                observation = message.content
    compared = [result for inputs in turns.values() if (result := _compare(inputs))]
    if not compared:
        return None
    gain = sum(replies * (same - other) for replies, same, other in compared)
    return gain / (sum(replies * (1.0 - other) for replies, _, other in compared) + CHANCE_REPLIES)


_Input = tuple[int, str]
"""A task's item and the observation to answer."""


class _Sum:
    """A sum of unit vectors: its square holds the cosines of all their pairs, so that none has to be formed."""

    def __init__(self) -> None:
        self.count = 0
        self._vector: dict[str, float] = defaultdict(float)

    def add(self, vector: Mapping[str, float], count: int = 1) -> None:
        self.count += count
        for name, value in vector.items():
            self._vector[name] += value

    def add_sum(self, other: _Sum) -> None:
        self.add(other._vector, other.count)

    def square(self) -> float:
        return sum(value * value for value in self._vector.values())


def _compare(inputs: Mapping[_Input, _Sum]) -> tuple[int, float, float] | None:
    """Of one turn: replies compared, mean cosine of two to the same input, mean cosine of two to different texts.

    Only inputs that were answered twice or more take part, in both means, so that both are of the same replies.
    """
    cells = {given: replies for given, replies in inputs.items() if replies.count > 1}
    everything = _Sum()
    by_text: dict[str, _Sum] = defaultdict(_Sum)
    for (_, observation), replies in cells.items():
        everything.add_sum(replies)
        by_text[observation].add_sum(replies)
    if len(by_text) < 2:
        return None
    same = sum((cell.square() - cell.count) / (cell.count - 1) for cell in cells.values()) / everything.count
    pairs = everything.count**2 - sum(text.count**2 for text in by_text.values())
    other = (everything.square() - sum(text.square() for text in by_text.values())) / pairs
    return everything.count, same, other


def _words(reply: str) -> dict[str, float]:
    """A reply's words and pairs of words, each once and in order (sums must not depend on hashes), as a unit vector."""
    words = reply.split()
    if len(words) > WORDS_COMPARED:
        words = words[: WORDS_COMPARED // 2] + words[-WORDS_COMPARED // 2 :]
    features = dict.fromkeys([*words, *(f"{a} {b}" for a, b in pairwise(words))] or [""])
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
