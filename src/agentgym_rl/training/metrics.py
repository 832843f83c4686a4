"""Metrics of a step's episodes. docs/reference/run-directory.md defines every name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, pairwise, zip_longest
from math import comb, fsum
from operator import mul
from statistics import fmean, median, pstdev

from agentgym_rl.types import ENVIRONMENT, Group, Sample, StopReason, Task, Trajectory

TURNS_SHOWN = 8
"""Turns with their own metric. All later turns share one, so that a long horizon does not flood the log."""
WORDS_COMPARED = 64
"""Words compared of a long reply: half from its start, half from its end."""

CHANCE_REPLIES = 2.0
"""Pseudo-count of replies that differ by chance. A few different replies among equal ones are then no dependence."""
DEPENDENCE_GROUPS = 32
"""Groups of a step, from all environments in turn, whose replies `replies/dependence` compares: enough for it."""


@dataclass(slots=True)
class Digest:
    """Numbers of an episode's messages: all that metrics and batches need of them."""

    sampled: list[int]
    """Tokens of each sampled message."""
    reply_tokens: list[int]
    """K: tokens of each reply."""
    tokens: int
    """Tokens of all segments."""
    segments: int
    invalid: tuple[int, int]
    """(actions that were not valid, actions)."""
    repeated: tuple[int, int]
    """(replies that equal the reply before, replies from the second on)."""
    alternating: tuple[int, int]
    """(replies that close a loop of two, replies from the fourth on)."""
    logprobs: dict[str, tuple[float, int]]
    """(sum, count) of the sampler's log-probabilities: of all turns (`mean`) and of each."""
    last_observation_missing: bool
    """Whether the state that the episode ended in has no tokens."""
    samples: list[Sample] = field(default_factory=list)
    """Samples whose tokens are stored elsewhere (stored.py)."""


def digest_of(trajectory: Trajectory) -> Digest:
    """Return the digest of an episode: the one that came with it, or one made from its messages."""
    if trajectory.digest is not None:
        return trajectory.digest
    messages, replies = trajectory.messages, _replies(trajectory)
    pairs = [a == b for a, b in pairwise(replies)]
    windows = zip(replies, replies[1:], replies[2:], replies[3:], strict=False)
    loops = [a == c and b == d and a != b for a, b, c, d in windows]
    logprobs: dict[str, list[float]] = defaultdict(list)
    for turn, message in enumerate((m for m in messages if m.is_reply), 1):
        logprobs["mean"] += message.logprobs or []
        logprobs[turn_name(turn)] += message.logprobs or []
    sampled = [len(m.token_ids) for m in messages if m.logprobs is not None]
    reply_tokens = [len(m.token_ids) for m in messages if m.is_reply]
    return Digest(
        sampled=sampled,
        reply_tokens=sampled if sampled == reply_tokens else reply_tokens,  # one object is sent once
        tokens=sum(len(m.token_ids) + (m.prefix[1] if m.prefix is not None else 0) for m in messages),
        segments=trajectory.num_segments,
        invalid=(sum(not info.get("valid", True) for info in trajectory.infos), len(trajectory.infos)),
        repeated=(sum(pairs), len(pairs)),
        alternating=(sum(loops), len(loops)),
        logprobs={name: (fsum(values), len(values)) for name, values in logprobs.items() if values},
        last_observation_missing=last_observation_missing(trajectory),
    )


def last_observation_missing(trajectory: Trajectory) -> bool:
    """Return whether the last observation did not fit into the context or did not arrive before the deadline.

    The sample then ends with a whole reply. No token is ever sampled there, so the critic learns no value for it. The
    same holds if the observation started a new segment, because a segment without a reply is no sample."""
    if trajectory.digest is not None:
        return trajectory.digest.last_observation_missing
    last = trajectory.messages[-1:]
    not_encoded = any(m.role != "assistant" and (not m.token_ids or m.prefix is not None) for m in last)
    return trajectory.stop is StopReason.TIMEOUT or not_encoded


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
    digests = {id(t): digest_of(t) for t in usable}
    metrics |= _means(groups, digests) | _surprise(digests.values()) | group_metrics(groups)
    metrics |= tree_metrics(usable) | attempt_metrics(groups) | role_metrics(usable)
    played = {t.task.env for t in usable}
    if len({*environments, *played}) > 1:
        for env in sorted(played):
            of_env = _means([g for g in groups if g.task.env == env], digests)
            metrics |= {f"{env}/{name}": value for name, value in of_env.items()}
    return metrics


def _means(groups: list[Group], digests: Mapping[int, Digest]) -> dict[str, float]:
    trajectories = [t for g in groups for t in g.usable]
    own = [digests[id(t)] for t in trajectories]
    sampled = [tokens for digest in own for tokens in digest.sampled]
    metrics = {
        "reward/mean": _mean(t.reward for t in trajectories),
        "success/mean": _mean(t.success for t in trajectories),
        "turns/mean": _mean(t.num_turns for t in trajectories),
        "turns/median": float(median(t.num_turns for t in trajectories)),
        "turns/max": float(max(t.num_turns for t in trajectories)),
        "truncated/rate": _share(trajectories, lambda t: t.stop is not None and t.stop.truncated),
        "truncated/horizon_rate": _share(trajectories, lambda t: t.stop is StopReason.MAX_TURNS),
        "truncated/length_rate": _share(trajectories, lambda t: t.stop is StopReason.LENGTH),
        "truncated/context_rate": _share(trajectories, lambda t: t.stop is StopReason.MAX_CONTEXT),
        "actions/invalid_rate": _rate(digest.invalid for digest in own),
        "actions/repeated_rate": _rate(digest.repeated for digest in own),
        "actions/alternating_rate": _rate(digest.alternating for digest in own),
        "tokens/per_reply": sum(sampled) / max(1, len(sampled)),
        "tokens/per_episode": _mean(digest.tokens for digest in own),
        "tokens/sampled": float(sum(sampled)),
    }
    if any(digest.segments > 1 for digest in own):
        metrics["segments/per_episode"] = _mean(digest.segments for digest in own)
    metrics |= judged_means(trajectories)
    dependence = _dependence(groups)
    return metrics if dependence is None else metrics | {"replies/dependence": dependence}


def group_metrics(groups: list[Group]) -> dict[str, float]:
    """Return how much the episodes of a group differ, on average: in reward (standard deviation) and in their replies.

    `replies/diversity` is the mean distance between replies of two episodes at the same turn: 0 if all are equal.
    """
    rewards = [[t.training_reward for t in g.trainable if t.num_turns] for g in groups]
    spreads = [pstdev(of_group) for of_group in rewards if len(of_group) > 1]
    metrics = {"reward/spread": fmean(spreads)} if spreads else {}
    distances = [distance for group in groups for distance in reply_distances(group)]
    if distances:
        total = sum(count for _, count in distances)
        metrics["replies/diversity"] = sum(distance * count for distance, count in distances) / total
    return metrics


def reply_distances(group: Group) -> list[tuple[float, int]]:
    """Return (mean distance between the replies of two episodes, replies) of every turn with at least two."""
    if group.stored is not None:
        return group.stored.distances
    distances: list[tuple[float, int]] = []
    by_turn: dict[int, _Sum] = defaultdict(_Sum)
    for trajectory in group.usable:
        for turn, reply in list(enumerate(_replies(trajectory)))[trajectory.shared_turns :]:
            by_turn[turn].add(_words(reply))
    for replies in (replies for replies in by_turn.values() if replies.count > 1):
        same = (replies.square() - replies.count) / (replies.count * (replies.count - 1))
        distances.append((1.0 - same, replies.count))
    return distances


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
    """Return K: the attempt of each turn, from 1. A reflection belongs to the attempt that it prepares.

    The environment says nothing about a reply that was cut, so such a turn continues what came before it.
    """
    attempts, current = [], 1
    for info in trajectory.infos:
        current = int(info.get("attempt", current)) + bool(info.get("reflection"))
        attempts.append(current)
        current += "attempt_success" in info
    return attempts


def attempt_metrics(groups: list[Group]) -> dict[str, float]:
    """Return the success of every attempt of style reflect, and of the first attempts sampled twice (pass@2).

    The last attempt must beat the latter to be worth its tokens. An attempt that was not needed counts as its
    predecessor, one that was cut off as failed. Empty without attempts.
    """
    tries = [[(_attempt_successes(t), t.success) for t in g.usable] for g in groups]
    most = max((len(row) for group in tries for row, _ in group), default=0)
    if not most:
        return {}
    rows = [[[*row, *[success] * (most - len(row))] for row, success in group] for group in tries]
    whole = [row for group in rows for row in group]
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
    return _surprise(digest_of(trajectory) for trajectory in trajectories)


def _surprise(digests: Iterable[Digest]) -> dict[str, float]:
    sums: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for digest in digests:
        for name, part in digest.logprobs.items():
            sums[name].append(part)
    return {f"surprise/{name}": -fsum(s for s, _ in parts) / sum(n for _, n in parts) for name, parts in sums.items()}


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
    by_task: dict[Task, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        by_task[trajectory.task].append(trajectory)
    return _dependence([Group(task, own) for task, own in by_task.items()])


def _dependence(groups: list[Group]) -> float | None:
    """Return `input_dependence` of the usable episodes of at most DEPENDENCE_GROUPS groups."""
    by_env: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_env[group.task.env].append(group)
    in_turn = [group for group in chain(*zip_longest(*by_env.values())) if group is not None]
    turns: dict[tuple[str, int], dict[_Input, _Sum]] = defaultdict(dict)
    for group in in_turn[:DEPENDENCE_GROUPS]:
        for (turn, observation), replies in reply_cells(group).items():
            inputs, key = turns[group.task.env, turn], (group.task.item, observation)
            inputs[key] = replies if key not in inputs else _joined([inputs[key], replies])
    comparisons = [comparison for inputs in turns.values() if (comparison := _compare(inputs))]
    if not comparisons:
        return None
    gain = sum(replies * (same - other) for replies, same, other in comparisons)
    return gain / (sum(replies * (1.0 - other) for replies, _, other in comparisons) + CHANCE_REPLIES)


def reply_cells(group: Group) -> dict[tuple[int, bytes], _Sum]:
    """Return the words of a group's replies by (turn, hash of the observation answered)."""
    if group.stored is not None:
        return group.stored.cells
    cells: dict[tuple[int, bytes], _Sum] = defaultdict(_Sum)
    for trajectory in group.usable:
        observation, turn = "", 0
        for message in trajectory.messages:
            if message.purpose:
                continue
            if message.role == "assistant":
                if turn >= trajectory.shared_turns:  # a shared reply counts once
                    cells[turn, blake2b(observation.encode(), digest_size=8).digest()].add(_words(message.text))
                turn, observation = turn + 1, ""
            elif message.role != "system":
                observation += message.content
    for cell in cells.values():
        cell.square()
    return cells


_Input = tuple[int, bytes]
"""A task's item and a hash of the observation to answer."""


class _Sum:
    """A sum of unit vectors. Its square is the sum of the cosines of all pairs, which need not be formed."""

    def __init__(self) -> None:
        self.count = 0
        self._vector: dict[str, float] = defaultdict(float)
        self._square: float | None = None

    def add(self, vector: Mapping[str, float], count: int = 1) -> None:
        self.count += count
        self._square, own = None, self._vector
        for name, value in vector.items():
            own[name] += value

    def square(self) -> float:
        """Return the square, which travels with a sum that is sent to another process."""
        if self._square is None:
            self._square = sum(map(mul, self._vector.values(), self._vector.values()))
        return self._square


def _joined(parts: list[_Sum]) -> _Sum:
    """Return the sum of the parts, which stay as they are."""
    if len(parts) == 1:
        return parts[0]
    result = _Sum()
    for part in parts:
        result.add(part._vector, part.count)
    return result


def _compare(inputs: Mapping[_Input, _Sum]) -> tuple[int, float, float] | None:
    """Return (replies compared, mean cosine of replies to the same input, of replies to different texts) of a turn.

    Both means use only inputs with two or more replies, so that both are over the same replies.
    """
    cells = {key: replies for key, replies in inputs.items() if replies.count > 1}
    total = _Sum()
    by_observation: dict[bytes, list[_Sum]] = defaultdict(list)
    for (_, observation), replies in cells.items():
        total.add(replies._vector, replies.count)
        by_observation[observation].append(replies)
    by_text = {observation: _joined(sums) for observation, sums in by_observation.items()}
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


def _rate(parts: Iterable[tuple[int, int]]) -> float:
    """Return the sum of the first numbers over that of the second; 0 if that is 0."""
    counts = list(parts)
    return sum(n for n, _ in counts) / max(1, sum(n for _, n in counts))


def _mean(values: Iterable[float]) -> float:
    numbers = [float(v) for v in values]
    return fmean(numbers) if numbers else 0.0


def _share(trajectories: list[Trajectory], condition: Callable[[Trajectory], bool]) -> float:
    return _mean(condition(t) for t in trajectories)
