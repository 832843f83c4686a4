"""Weights & Biases and MLflow as trackers, with the real packages and without a network."""

from __future__ import annotations

import json
import logging
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentgym_rl.errors import ConfigError
from agentgym_rl.run.log import RunLog, read_metrics
from agentgym_rl.run.trackers import TRACKERS

CONFIG = {"name": "tiny", "seed": 3, "environments": [{"name": "babyai"}], "rl": {"steps": 4}}


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    package = pytest.importorskip("wandb", reason="the tracker wandb needs pip install 'agentgym-rl[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield package
    package.teardown()


@pytest.fixture(scope="module")
def mlflow_store(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """Return (address, client) of a database. It is shared because creating its tables takes seconds."""
    package = pytest.importorskip("mlflow", reason="the tracker mlflow needs pip install 'agentgym-rl[mlflow]'")
    pytest.importorskip("sqlalchemy", reason="MLflow's local store needs pip install 'agentgym-rl[mlflow]'")
    address = f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    return address, package.MlflowClient(address)


@pytest.fixture
def mlflow(mlflow_store: tuple[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_store[0])
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", tmp_path.name)
    return mlflow_store[1]


def log_and_resume(root: Path, tracker: str) -> None:
    """Log three steps, then resume from step 2."""
    with RunLog.create(root, CONFIG, trackers=(tracker,)) as log:
        for step in (1, 2, 3):
            log.log(step, {"reward/mean": step / 10, "note": "x"})
    with RunLog.create(root, CONFIG, resume=True, trackers=(tracker,)) as log:
        log.truncate_after(2)
        log.log(3, {"reward/mean": 0.9})
        log.log(4, {"reward/mean": math.nan})


def log_entries(data: bytes) -> Iterator[bytes]:
    """Yield the entries of W&B's file: a header of 7 bytes, then LevelDB's log format."""
    offset, entry = 7, b""
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:  # the rest of a block is too short for a header
            offset += 32768 - offset % 32768
            continue
        size, kind = struct.unpack_from("<HB", data, offset + 4)
        entry += data[offset + 7 : offset + 7 + size]
        offset += 7 + size
        if kind in (1, 4):  # a full entry, or its last part
            yield entry
            entry = b""


def offline_points(folder: Path, name: str) -> list[tuple[int, float]]:
    """Return (step, value) of a metric in the file that `wandb sync` uploads."""
    from wandb.proto.wandb_internal_pb2 import Record

    points = []
    for entry in log_entries(next(folder.glob("run-*.wandb")).read_bytes()):
        record = Record()
        record.ParseFromString(entry)
        values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        if name in values:
            points.append((record.history.step.num, float(json.loads(values[name]))))
    return points


def test_wandb_gets_the_metrics_and_a_resumed_run_gets_all_of_them(wandb: Any, tmp_path: Path) -> None:
    log_and_resume(tmp_path / "run", "wandb")
    wandb.teardown()  # its process flushes the files when it ends
    second = (tmp_path / "run" / "wandb" / "latest-run").resolve()
    (first,) = set((tmp_path / "run" / "wandb").resolve().glob("offline-run-*")) - {second}
    assert offline_points(first, "reward/mean") == [(1, 0.1), (2, 0.2), (3, 0.3)]
    resumed = offline_points(second, "reward/mean")
    assert resumed[:3] == [(1, 0.1), (2, 0.2), (3, 0.9)]
    assert resumed[3][0] == 4
    assert math.isnan(resumed[3][1])


def test_mlflow_gets_the_metrics_and_a_resumed_run_gets_all_of_them(mlflow: Any, tmp_path: Path) -> None:
    log_and_resume(tmp_path / "run", "mlflow")
    experiment = mlflow.get_experiment_by_name(tmp_path.name)
    second, first = mlflow.search_runs([experiment.experiment_id], order_by=["start_time DESC"])
    points = {
        run.info.run_id: [(m.step, m.value) for m in mlflow.get_metric_history(run.info.run_id, "reward/mean")]
        for run in (first, second)
    }
    assert sorted(points[first.info.run_id]) == [(1, 0.1), (2, 0.2), (3, 0.3)]
    resumed = sorted(points[second.info.run_id])
    assert resumed[:3] == [(1, 0.1), (2, 0.2), (3, 0.9)]
    assert resumed[3][0] == 4
    assert math.isnan(resumed[3][1])
    assert second.info.status == "FINISHED"
    assert second.info.run_name == "run"
    assert second.data.params["environments.0.name"] == "babyai"
    assert second.data.params["rl.steps"] == "4"


def test_a_failed_run_is_marked_failed_in_mlflow(mlflow: Any, tmp_path: Path) -> None:
    def run() -> None:
        with RunLog.create(tmp_path / "run", CONFIG, trackers=("mlflow",)):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    experiment = mlflow.get_experiment_by_name(tmp_path.name)
    (run_record,) = mlflow.search_runs([experiment.experiment_id])
    assert run_record.info.status == "FAILED"


def test_a_tracker_that_cannot_start_leaves_no_run(wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"(?s)wandb tracker cannot start.*WANDB_MODE=offline"):
        RunLog.create(tmp_path / "run", CONFIG, trackers=("wandb",))
    with RunLog.create(tmp_path / "run", CONFIG) as log:
        log.log(1, {"reward/mean": 1.0})


def test_a_failing_tracker_is_dropped_and_the_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Offended:
        def __init__(self, root: Path, config: Any) -> None:
            self.calls = 0

        def log(self, step: int, values: Any) -> None:
            if step == 2:
                raise ConnectionError("the server left")

        def resume(self, step: int, rows: Any) -> None: ...

        def close(self, state: str) -> None:
            raise AssertionError("it was left out")

    monkeypatch.setitem(TRACKERS, "json", Offended)  # a name that can be imported
    messages: list[str] = []
    with RunLog.create(tmp_path, CONFIG, trackers=("json",), say=messages.append) as log:
        for step in (1, 2, 3):
            log.log(step, {"reward/mean": 1.0})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    (event,) = read_metrics(tmp_path / "events.jsonl")
    assert event["kind"] == "tracker_failed"
    assert messages == [event["message"]]
    assert "json failed" in messages[0]
    assert "the server left" in messages[0]
