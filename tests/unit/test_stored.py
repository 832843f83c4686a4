"""Groups whose tokens stay in another process give the metrics, batches, logs and checkpoints of whole groups."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from test_segment_batch import LIMITS, SETTINGS, fill, split_groups
from training_for_tests import varied_groups

from agentgym_rl.run.log import RunLog
from agentgym_rl.training import stored
from agentgym_rl.training.batch import estimate, gather, split_batch
from agentgym_rl.training.group_queue import QueuedGroup
from agentgym_rl.training.metrics import episode_metrics
from agentgym_rl.training.rl import _sampled_tokens, _staleness
from agentgym_rl.training.settings import RLSettings
from agentgym_rl.types import Group, Sample, StopReason


def sent(value: Any) -> Any:
    """Return a value as another process gets it."""
    return pickle.loads(pickle.dumps(value, 5))


class Store:
    """Objects by reference, as a cluster keeps them."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}

    def put(self, group: Group, *, keep_tail: bool) -> Group:
        reference = f"group {len(self.objects)}"
        self.objects[reference] = sent(stored.store(group, keep_tail=keep_tail, compare=True))
        return stored.unpack(self.objects[reference], reference)


def of_sample(sample: Sample) -> dict[str, Any]:
    return {f.name: getattr(sample, f.name) for f in fields(Sample) if f.name != "stored"}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("segments", [False, True])
def test_ranks_get_the_samples_of_whole_groups(name: str, segments: bool) -> None:
    settings = replace(RLSettings(zero_variance="keep"), **SETTINGS[name])  # type: ignore[arg-type]
    groups = split_groups(varied_groups()) if segments else varied_groups()
    store, whole = Store(), gather(groups, settings, LIMITS)
    light = gather([store.put(group, keep_tail=settings.algorithm == "ppo") for group in groups], settings, LIMITS)
    assert all(not sample.token_ids and not sample.logprobs for sample in light.samples)
    fill(whole)
    for a, b in zip(light.samples, whole.samples, strict=True):
        a.values, a.last_value = b.values, b.last_value
        a.old_logprobs, a.reference_logprobs = b.old_logprobs, b.reference_logprobs
    shares = [split_batch(estimate(batch, settings, 0.1), 3, 2, seed=4) for batch in (whole, light)]
    assert shares[0][1] == shares[1][1]
    for expected, share in zip(shares[0][0], sent(shares[1][0]), strict=True):
        stored.load(share.samples, store.objects.__getitem__)
        assert (share.weights, share.parts) == (expected.weights, expected.parts)
        assert [of_sample(s) for s in share.samples] == [of_sample(s) for s in expected.samples]


@pytest.mark.parametrize("segments", [False, True])
def test_metrics_lines_and_checkpoints_are_those_of_whole_groups(segments: bool, tmp_path: Path) -> None:
    groups = split_groups(varied_groups()) if segments else varied_groups()
    store, settings = Store(), RLSettings(zero_variance="keep")
    light = [store.put(group, keep_tail=False) for group in groups]
    assert episode_metrics(light) == episode_metrics(groups)
    assert _sampled_tokens(light) == _sampled_tokens(groups) > 0
    ages = [_staleness(gather(played, settings).samples, 3, 9) for played in (light, groups)]
    assert ages[0] == ages[1] != {}
    assert [group.lines() for group in light] == [group.lines() for group in groups]
    rows = [QueuedGroup(g.task, 3, 0, g).to_json() for g in light]
    restored = [QueuedGroup.from_json(sent(row)).group for row in rows]
    assert restored == groups
    logs = []
    for name, played in (("light", light), ("whole", groups)):
        log = RunLog.create(tmp_path / name, {})
        for group in played:
            log.write_lines(1, group.lines())
        log.close()
        logs.append(log.trajectories_path(1).read_bytes())
    assert logs[0] == logs[1]
    assert logs[0].startswith(b'{"step": 1, "kind": "train", "id"')


def test_a_light_group_is_small_and_has_no_tokens() -> None:
    (group, *_) = varied_groups()
    for trajectory in group.trajectories:
        for message in trajectory.messages:
            if message.role == "user":
                message.token_ids, message.content = message.token_ids * 2000, message.content * 2000
    arrays = stored.store(group, keep_tail=False, compare=False)
    assert all(not t.messages for t in stored.unpack(arrays, "").trajectories)
    assert arrays["group"].nbytes < len(pickle.dumps(group, 5)) / 10
    assert sum(arrays[name].nbytes for name in stored.FIELDS) > 50_000


def test_a_group_is_few_arrays_however_many_samples_it_has() -> None:
    """The driver pays for each array that arrives. Samples without tokens and groups without samples work too."""
    (group, *_) = split_groups(varied_groups())
    sizes = []
    for count in (1, len(group.trajectories)):
        buffers: list[Any] = []
        arrays = stored.store(Group(group.task, group.trajectories[:count]), keep_tail=False, compare=False)
        pickle.dumps(arrays, 5, buffer_callback=buffers.append)
        sizes.append(len(buffers))
    assert sizes == [3 + len(stored.FIELDS)] * 2
    failed = Group(group.task, [replace(t, stop=StopReason.ERROR, error="lost") for t in group.trajectories])
    store = Store()
    light = store.put(failed, keep_tail=False)
    assert store.objects["group 0"]["ends"].shape == (len(stored.FIELDS), 0)
    assert [t.digest.samples for t in light.trajectories] == [[] for _ in failed.trajectories]
    assert light.lines() == failed.lines()
    rows = {name: numpy.array([7, 7, 9], dtype) for name, dtype in stored.FIELDS.items()}
    ends = numpy.array([[2, 2, 3]] * len(stored.FIELDS))
    samples = [Sample([], [], stored=stored.StoredSample(0, 0, [], {}, index, "a")) for index in range(3)]
    stored.load(samples, lambda _: rows | {"ends": ends})
    assert [sample.token_ids for sample in samples] == [[7, 7], [], [9]]


@pytest.mark.long
def test_the_driver_benchmark_runs_in_small(tmp_path: Path) -> None:
    script, out = Path(__file__).parents[2] / "benchmarks" / "driver.py", tmp_path / "driver.json"
    sizes = ("--episodes", "16", "--tokens", "64", "--turns", "4", "--ranks", "2", "--of", "16", "--repeats", "1")
    subprocess.run([sys.executable, str(script), *sizes, "--no-weights", "--out", str(out)], check=True)
    assert sum(json.loads(out.read_text())["seconds"].values()) > 0
