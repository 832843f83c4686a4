"""Groups whose tokens stay in another process. The loop of RL sees numbers, learners read arrays.

`store` turns a group that was played elsewhere into a few arrays, which are one object of the cluster's store:

    group         the light group, pickled: rewards, infos, ids and digests, all that the loop reads; no messages
    text          the trajectories as JSON, for the log and for checkpoints
    ends, ...     the samples, for the learners that train on them: a field of all samples is one array

The driver of a run pays for each object and each array that arrives, and not for what is in it.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy

from agentgym_rl.training.batch import to_samples
from agentgym_rl.training.metrics import digest_of, reply_cells, reply_distances
from agentgym_rl.types import Group, Sample

FIELDS = {
    "token_ids": numpy.int32,
    "loss_mask": numpy.bool_,
    "logprobs": numpy.float64,
    "turn_index": numpy.int32,
    "versions": numpy.int32,
}
"""Fields of a sample that are stored, with their types."""
_NO_INFO: dict[str, Any] = {}
Arrays = dict[str, numpy.ndarray]
"""A group as arrays by name. `ends` (fields, samples) says where each sample ends in the array of each field."""


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
    """Index among the group's samples."""
    arrays: Any = None
    """Reference to the group's arrays."""
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
    arrays: Any = None
    """View of the arrays, which keeps a copy on this node."""

    def lines(self) -> list[memoryview]:
        view = memoryview(self.arrays["text"])
        return [view[a:b] for a, b in zip([0, *self.line_ends], self.line_ends, strict=False)]


def store(group: Group, *, keep_tail: bool, compare: bool, keep_infos: bool = True) -> Arrays:
    """Return the group as arrays. `keep_tail`: see `batch.to_samples`. `compare`: whether the words of its replies are
    kept for `metrics.input_dependence`. `keep_infos`: whether the light group has the infos of all turns; else only the
    last turn's."""
    samples: list[Sample] = []
    light, lines = [], group.lines()
    trainable = {id(t) for t in group.trainable}
    for trajectory in group.trajectories:
        digest = digest_of(trajectory)
        own = to_samples(trajectory, keep_tail=keep_tail) if id(trajectory) in trainable else []
        digest.samples = [_light(sample, index) for index, sample in enumerate(own, len(samples))]
        samples += own
        infos = trajectory.infos if keep_infos else [*[_NO_INFO] * len(trajectory.infos[1:]), *trajectory.infos[-1:]]
        light.append(replace(trajectory, messages=[], tools=[], infos=infos, digest=digest))
    line_ends = numpy.cumsum([len(line) for line in lines]).tolist()
    stored = StoredGroup(reply_distances(group), line_ends, reply_cells(group) if compare else {})
    fields = {name: [getattr(sample, name) for sample in samples] for name in FIELDS}
    return {
        "group": _bytes(pickle.dumps(Group(group.task, light, stored), pickle.HIGHEST_PROTOCOL)),
        "text": _bytes(b"".join(lines)),
        "ends": numpy.cumsum([[len(values) for values in rows] for rows in fields.values()], axis=1, dtype=numpy.int64),
        **{name: numpy.array([*chain(*rows)], FIELDS[name]) for name, rows in fields.items()},
    }


def unpack(arrays: Arrays, reference: Any) -> Group:
    """Return the light group. `reference` stands for the arrays, for learners."""
    group: Group = pickle.loads(arrays["group"].data)
    group.stored.arrays = arrays
    for sample in (sample for trajectory in group.trajectories for sample in trajectory.digest.samples):
        sample.stored.arrays = reference
    return group


def load(samples: Iterable[Sample], fetch: Callable[[Any], Arrays]) -> None:
    """Fill in the tokens of stored samples. `fetch` returns the arrays that a reference stands for."""
    fetched: dict[Any, Arrays] = {}
    for sample in samples:
        if sample.stored is not None and not sample.token_ids:
            reference, index = sample.stored.arrays, sample.stored.index
            if reference not in fetched:
                fetched[reference] = fetch(reference)
            arrays = fetched[reference]
            for name, ends in zip(FIELDS, arrays["ends"], strict=True):
                start = ends[index - 1] if index else 0
                setattr(sample, name, arrays[name][start : ends[index]].tolist())


def _bytes(data: bytes) -> numpy.ndarray:
    return numpy.frombuffer(data, dtype=numpy.uint8)


def _light(sample: Sample, index: int) -> Sample:
    counts = numpy.bincount(sample.turn_index).tolist()
    stored = StoredSample(len(sample.token_ids), len(sample.turn_index), counts, dict(Counter(sample.versions)), index)
    return Sample([], [], trajectory_id=sample.trajectory_id, order=sample.order, stored=stored)
