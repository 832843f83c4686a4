"""Metrics of a step's episodes. docs/reference/run-directory.md defines every name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import pairwise
from math import comb
from statistics import fmean, pstdev

from agentgym_rl.types import ENVIRONMENT, Group, StopReason, Trajectory

TURNS_SHOWN = 8
"""Turns with their own metric. All later turns share one, so that a long horizon does not flood the log."""
WORDS_COMPARED = 64
"""Words compared of a long reply: half from its start, half from its end."""

CHANCE_REPLIES = 2.0
"""Pseudo-count of replies that differ by chance. A few different replies among equal ones are then no dependence."""


def episode_metrics(groups: list[Group], environments: Collection[str] = ()) -> dict[str, float]:
    """Return means over the usable episodes of a step: over all environments and, if the run has several, for each.

    `environments` are those of the run. A step may have tasks of only one of them.
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
    metrics |= _means(usable) | surprise(usable) | group_metrics(groups)
    metrics |= tree_metrics(usable) | attempt_metrics(groups) | role_metrics(usable)
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
        "tokens/per_episode": _mean(sum(len(s.token_ids) for s in t.segments) for t in trajectories),
        "tokens/sampled": float(sum(len(m.token_ids) for m in replies)),
    }
    if any(t.num_segments > 1 for t in trajectories):
        metrics["segments/per_episode"] = _mean(t.num_segments for t in trajectories)
    metrics |= judged_means(trajectories)
    dependence = input_dependence(trajectories)
    return metrics if dependence is None else metrics | {"replies/dependence": dependence}


def group_metrics(groups: list[Group]) -> dict[str, float]:
    """Return how much the episodes of a group differ, on average: in reward (standard deviation) and in their replies.

    `replies/diversity` is the mean distance between replies of two episodes at the same turn: 0 if all are equal.
    """
    spreads = [spread for g in groups if len(g.trainable) > 1 for spread in [reward_spread(g)]]
    metrics = {"reward/spread": fmean(spreads)} if spreads else {}
    distances: list[tuple[float, int]] = []
    for group in groups:
        by_turn: dict[int, _Sum] = defaultdict(_Sum)
        for trajectory in group.usable:
            for turn, reply in list(enumerate(_replies(trajectory)))[trajectory.shared_turns :]:
                by_turn[turn].add(_words(reply))
        for replies in (replies for replies in by_turn.values() if replies.count > 1):
            same = (replies.square() - replies.count) / (replies.count * (replies.count - 1))
            distances.append((1.0 - same, replies.count))
    if distances:
        total = sum(count for _, count in distances)
        metrics["replies/diversity"] = sum(distance * count for distance, count in distances) / total
    return metrics


def reward_spread(group: Group) -> float:
    """Return the standard deviation of the rewards that a group is trained on; 0 if there are fewer than two."""
    rewards = [t.training_reward for t in group.trainable]
    return pstdev(rewards) if len(rewards) > 1 else 0.0


def tree_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """Return the share of turns that branches took over from their parents; empty without trees."""
    shared = sum(t.shared_turns for t in trajectories)
    return {"tree/shared_rate": shared / sum(t.num_turns for t in trajectories)} if shared else {}


def role_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """Return reward, success and turns of each role that the learner plays; empty for a single agent."""
    metrics: dict[str, float] = {}
    for role in sorted({t.role for t in trajectories if t.role}):
        of_role = [t for t in trajectories if t.role == role]
        metrics[f"roles/{role}_reward"] = _mean(t.reward for t in of_role)
        metrics[f"roles/{role}_success"] = _mean(t.success for t in of_role)
        metrics[f"roles/{role}_turns"] = _mean(t.num_turns for t in of_role)
    return metrics


def attempts_of(trajectory: Trajectory) -> list[int]:
    """Return K: the attempt of each turn, from 1. A reflection belongs to the attempt that it prepares."""
    return [int(info.get("attempt", 1)) + bool(info.get("reflection")) for info in trajectory.infos]


def attempt_metrics(groups: list[Group]) -> dict[str, float]:
    """Return the success of every attempt of style reflect, and of the first attempts sampled twice (pass@2).

    The last attempt must beat the latter to be worth its tokens. An attempt that was not needed counts as its
    predecessor. Empty without attempts.
    """
    rows = [[outcome for t in g.usable if (outcome := _attempt_successes(t))] for g in groups]
    episodes = [row for group in rows for row in group]
    if not episodes:
        return {}
    most = max(map(len, episodes))
    whole = [[*row, *[row[-1]] * (most - len(row))] for row in episodes]
    pairs = [(len(group), sum(row[0] for row in group)) for group in rows if len(group) > 1]
    metrics = {f"attempts/success_{k + 1}": _mean(row[k] for row in whole) for k in range(most)}
    metrics["attempts/wrong_to_right"] = _mean(not row[0] and row[-1] for row in whole)
    metrics["attempts/right_to_wrong"] = _mean(row[0] and not row[-1] for row in whole)
    if pairs:
        metrics["attempts/sampled_twice"] = _mean(1.0 - comb(n - c, 2) / comb(n, 2) for n, c in pairs)
    return metrics


def _attempt_successes(trajectory: Trajectory) -> list[bool]:
    return [bool(info["attempt_success"]) for info in trajectory.infos if "attempt_success" in info]


def judged_means(trajectories: list[Trajectory]) -> dict[str, float]:
    """Return the mean score of every source of rewards, unweighted, and the weighted sums, of [[rewards]]."""
    judged = [t for t in trajectories if t.verdicts and not t.judge_error]
    failed = sum(bool(t.judge_error) for t in trajectories)
    if not judged:
        return {"judged/failed": float(failed)} if failed else {}
    others = [[v for v in t.verdicts if v.source != ENVIRONMENT] for t in judged]
    metrics = {
        "judged/failed": float(failed),
        "judged/total": _mean(t.training_reward for t in judged),
        "judged/mean": _mean(sum(v.weight * sum(v.scores) for v in verdicts) for verdicts in others),
    }
    sources: dict[str, list[float]] = defaultdict(list)
    for verdict in (v for verdicts in others for v in verdicts):
        sources[verdict.source].append(sum(verdict.scores))
    return metrics | {f"judged/{source}": _mean(scores) for source, scores in sources.items()}


def surprise(trajectories: list[Trajectory]) -> dict[str, float]:
    """Return minus the sampler's mean log-probability, of all turns and of each: an estimate of the entropy.

    It needs no learner, so it exists even for a step without an update.
    """
    logprobs: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        replies = [m for m in trajectory.messages if m.is_reply]
        for turn, message in enumerate(replies, 1):
            logprobs["mean"] += message.logprobs or []
            logprobs[turn_name(turn)] += message.logprobs or []
    return {f"surprise/{name}": -fmean(values) for name, values in logprobs.items() if values}


def turn_name(turn: int) -> str:
    """Return `turn_3` for turn 3, and `turn_9+` for the ninth and all later turns."""
    return f"turn_{turn}" if turn <= TURNS_SHOWN else f"turn_{TURNS_SHOWN + 1}+"


def input_dependence(trajectories: list[Trajectory]) -> float | None:
    """Return how much replies depend on their input: (D_other - D_same) / D_other, from the texts alone.

    D_same is the mean distance between two replies to the same input, D_other between two replies to different inputs
    of the same environment and turn (an agreement coefficient such as Krippendorff's alpha). An input is the task and
    the observation answered. Two tasks with the same text, such as a game's first screen, are not compared.
    A reply that is a function of its input gives 1. Random replies give 0 in expectation, whatever the number of
    actions, and so does one reply to everything. None if no input occurred twice or there was only one.
    """
    turns: dict[tuple[str, int], dict[_Input, _Sum]] = defaultdict(lambda: defaultdict(_Sum))
    for trajectory in trajectories:
        observation, turn = "", 0
        for message in trajectory.messages:
            if message.purpose:
                continue
            if message.role == "assistant":
                if turn >= trajectory.shared_turns:  # a shared reply counts once
                    turns[trajectory.task.env, turn][trajectory.task.item, observation].add(_words(message.text))
                turn, observation = turn + 1, ""
            elif message.role != "system":
                observation += message.content
    comparisons = [comparison for inputs in turns.values() if (comparison := _compare(inputs))]
    if not comparisons:
        return None
    gain = sum(replies * (same - other) for replies, same, other in comparisons)
    return gain / (sum(replies * (1.0 - other) for replies, _, other in comparisons) + CHANCE_REPLIES)


_Input = tuple[int, str]
"""A task's item and the observation to answer."""


class _Sum:
    """A sum of unit vectors. Its square is the sum of the cosines of all pairs, which need not be formed."""

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
    """Return (replies compared, mean cosine of replies to the same input, of replies to different texts) of a turn.

    Both means use only inputs with two or more replies, so that both are over the same replies.
    """
    cells = {key: replies for key, replies in inputs.items() if replies.count > 1}
    total = _Sum()
    by_text: dict[str, _Sum] = defaultdict(_Sum)
    for (_, observation), replies in cells.items():
        total.add_sum(replies)
        by_text[observation].add_sum(replies)
    if len(by_text) < 2:
        return None
    same = sum((cell.square() - cell.count) / (cell.count - 1) for cell in cells.values()) / total.count
    pairs = total.count**2 - sum(text.count**2 for text in by_text.values())
    other = (total.square() - sum(text.square() for text in by_text.values())) / pairs
    return total.count, same, other


def _words(reply: str) -> dict[str, float]:
    """Return a reply's words and word pairs as a unit vector, in order, because sums must not depend on hashes."""
    words = reply.split()
    if len(words) > WORDS_COMPARED:
        words = words[: WORDS_COMPARED // 2] + words[-WORDS_COMPARED // 2 :]
    features = dict.fromkeys([*words, *(f"{a} {b}" for a, b in pairwise(words))] or [""])
    return dict.fromkeys(features, len(features) ** -0.5)


def _replies(trajectory: Trajectory) -> list[str]:
    return [m.text for m in trajectory.messages if m.is_reply]


def _repeated(trajectories: list[Trajectory]) -> float:
    """Return the share of replies, from the second on, that equal the reply before."""
    return _mean(a == b for t in trajectories for a, b in pairwise(_replies(t)))


def _alternating(trajectories: list[Trajectory]) -> float:
    """Return the share of replies, from the fourth on, that close a loop of two: A B A B."""
    replies = [_replies(t) for t in trajectories]
    windows = (window for r in replies for window in zip(r, r[1:], r[2:], r[3:], strict=False))
    return _mean(a == c and b == d and a != b for a, b, c, d in windows)


def _mean(values: Iterable[float]) -> float:
    numbers = [float(v) for v in values]
    return fmean(numbers) if numbers else 0.0


def _share(trajectories: list[Trajectory], condition: Callable[[Trajectory], bool]) -> float:
    return _mean(condition(t) for t in trajectories)
