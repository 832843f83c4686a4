"""Groups whose tokens stay in another process. The loop of RL sees numbers, learners read arrays.

`store` divides a group that was played elsewhere into

    a light group     rewards, infos, ids and digests: all that the loop reads; no messages
    contents          the samples as arrays, for the learners that train on them
    text              the trajectories as JSON, for the log and for checkpoints
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy

from agentgym_rl.training.batch import to_samples
from agentgym_rl.training.metrics import digest_of, reply_cells, reply_distances
from agentgym_rl.types import Group, Sample

ARRAYS = {
    "token_ids": numpy.int32,
    "loss_mask": numpy.bool_,
    "logprobs": numpy.float64,
    "turn_index": numpy.int32,
    "versions": numpy.int32,
}
"""Fields of a sample that are stored, with their types."""
_NO_INFO: dict[str, Any] = {}
Contents = list[dict[str, numpy.ndarray]]
"""The arrays of a group's samples."""


@dataclass(slots=True)
class StoredSample:
    """The place of a sample's tokens, and the numbers of them that a batch needs."""

    num_tokens: int
    num_actions: int
    turn_counts: list[int]
    """Action tokens of each turn, up to the last turn with any."""
    version_counts: dict[int, int]
    """Action tokens by the version of the weights that sampled them."""
    index: int
    """Index in the group's contents."""
    contents: Any = None
    """Reference to the group's contents."""
    learned_line: bytes = b""
    """Line of the log, after a learner has trained on it."""


@dataclass(slots=True)
class StoredGroup:
    """The place of a group's parts."""

    distances: list[tuple[float, int]]
    """Result of `metrics.reply_distances`."""
    line_ends: list[int]
    """End of each trajectory in `text`."""
    cells: dict[Any, Any]
    """Result of `metrics.reply_cells`; empty if the replies of other groups are compared."""
    text: Any = None
    """Lines of JSON, one after the other: bytes as an array."""
    contents: Any = None
    """View of the contents, which keeps a copy on this node."""

    def lines(self) -> list[memoryview]:
        view = memoryview(self.text)
        return [view[a:b] for a, b in zip([0, *self.line_ends], self.line_ends, strict=False)]


def store(
    group: Group, *, keep_tail: bool, compare: bool, keep_infos: bool = True
) -> tuple[Group, Contents, numpy.ndarray]:
    """Return (the light group, its contents, its text). `keep_tail`: see `batch.to_samples`. `compare`: whether the
    words of its replies are kept for `metrics.input_dependence`. `keep_infos`: whether the light group has the infos of
    all turns; else only the last turn's."""
    contents: Contents = []
    light, lines = [], group.lines()
    trainable = {id(t) for t in group.trainable}
    for trajectory in group.trajectories:
        digest = digest_of(trajectory)
        samples = to_samples(trajectory, keep_tail=keep_tail) if id(trajectory) in trainable else []
        digest.samples = [_light(sample, len(contents) + i) for i, sample in enumerate(samples)]
        contents += [{n: numpy.array(getattr(s, n), dtype) for n, dtype in ARRAYS.items()} for s in samples]
        infos = trajectory.infos if keep_infos else [*[_NO_INFO] * len(trajectory.infos[1:]), *trajectory.infos[-1:]]
        light.append(replace(trajectory, messages=[], tools=[], infos=infos, digest=digest))
    line_ends = numpy.cumsum([len(line) for line in lines]).tolist()
    stored = StoredGroup(reply_distances(group), line_ends, reply_cells(group) if compare else {})
    return Group(group.task, light, stored), contents, numpy.frombuffer(b"".join(lines), dtype=numpy.uint8)


def attach(group: Group, contents: Contents, text: numpy.ndarray, reference: Any) -> Group:
    """Tell a light group where its parts are. `reference` is that of the contents, for learners."""
    group.stored.contents, group.stored.text = contents, text
    for sample in (sample for trajectory in group.trajectories for sample in trajectory.digest.samples):
        sample.stored.contents = reference
    return group


def load(samples: Iterable[Sample], fetch: Callable[[Any], Contents]) -> None:
    """Fill in the tokens of stored samples. `fetch` returns the contents that a reference stands for."""
    contents: dict[Any, Contents] = {}
    for sample in samples:
        if sample.stored is not None and not sample.token_ids:
            reference = sample.stored.contents
            if reference not in contents:
                contents[reference] = fetch(reference)
            for name, values in contents[reference][sample.stored.index].items():
                setattr(sample, name, values.tolist())


def _light(sample: Sample, index: int) -> Sample:
    counts = numpy.bincount(sample.turn_index).tolist()
    stored = StoredSample(len(sample.token_ids), len(sample.turn_index), counts, dict(Counter(sample.versions)), index)
    return Sample([], [], trajectory_id=sample.trajectory_id, order=sample.order, stored=stored)
