"""Trackers: copies of a run's metrics for TensorBoard, Weights & Biases and MLflow. metrics.jsonl remains the source.

A tracker that fails is dropped by the run log, and the run continues. Neither W&B nor MLflow can take a point back, so
every process of a run starts a run of theirs, and a resumed one copies the steps before its checkpoint into it.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from agentgym_rl.errors import ConfigError

PROJECT = "agentgym-rl"
"""W&B's project and MLflow's experiment, unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME says otherwise."""
MLFLOW_PARAMS_PER_CALL = 100
"""Most metrics that MLflow's REST API accepts in one call."""
Row = Mapping[str, Any]
"""A line of metrics.jsonl."""


class Tracker(Protocol):
    """A copy of a run's metrics in a dashboard."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add the metrics of a step."""

    def resume(self, step: int, rows: Iterable[Row]) -> None:
        """Continue after `step`; `rows` are the metrics up to it. Called before anything is logged."""

    def close(self, state: str) -> None:
        """Flush and close. `state` is that of status.json."""


class TensorBoard:
    """Event files in the run directory, written without torch."""

    def __init__(self, root: Path, config: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._session_log, self._summary = Event, SessionLog, Summary
        self._writer = EventFileWriter(str(root / "tensorboard"), flush_secs=10)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        summary = self._summary(value=[self._summary.Value(tag=n, simple_value=v) for n, v in values.items()])
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=summary))
        self._writer.flush()

    def resume(self, step: int, rows: Iterable[Row]) -> None:
        """Make readers drop what earlier files hold after `step`."""
        session = self._session_log(status=self._session_log.START)
        self._writer.add_event(self._event(step=step + 1, wall_time=time.time(), session_log=session))
        self._writer.flush()

    def close(self, state: str) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases; with WANDB_MODE=offline a folder in the run directory that `wandb sync` uploads."""

    def __init__(self, root: Path, config: Mapping[str, Any]) -> None:
        import wandb

        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=root.name,
                group=root.name,
                dir=str(root),
                config=dict(config),
                # The progress bar is not a log, and the console has a summary already.
                settings=wandb.Settings(console="off", quiet=True),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"the wandb tracker cannot start ({error}): run `wandb login`, set WANDB_MODE=offline, or leave it out "
                "of trackers"
            ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def resume(self, step: int, rows: Iterable[Row]) -> None:
        for row in rows:
            self.log(row["step"], _numbers(row))

    def close(self, state: str) -> None:
        self._run.finish(exit_code=1 if state == "failed" else 0)


class MLflow:
    """A run of MLflow, on the server of MLFLOW_TRACKING_URI or in mlflow.db of the current folder."""

    def __init__(self, root: Path, config: Mapping[str, Any]) -> None:
        # MLflow's own defaults try for minutes, and each step waits for its metrics.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        logging.getLogger("alembic").setLevel(logging.WARNING)
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._metric = Metric
        try:
            self._client = MlflowClient()
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            existing = self._client.get_experiment_by_name(name)
            experiment = existing.experiment_id if existing is not None else self._client.create_experiment(name)
            self._id = self._client.create_run(experiment, run_name=root.name).info.run_id
            params = [Param(_mlflow_name(key), str(value)) for key, value in _flat(config)]
            for first in range(0, len(params), MLFLOW_PARAMS_PER_CALL):
                self._client.log_batch(self._id, params=params[first : first + MLFLOW_PARAMS_PER_CALL])
        except MlflowException as error:
            raise ConfigError(
                f"the mlflow tracker cannot start ({str(error).splitlines()[0]}): check MLFLOW_TRACKING_URI, or leave "
                "it out of trackers"
            ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(_mlflow_name(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def resume(self, step: int, rows: Iterable[Row]) -> None:
        for row in rows:
            self.log(row["step"], _numbers(row))

    def close(self, state: str) -> None:
        ended = {"finished": "FINISHED", "failed": "FAILED"}.get(state, "KILLED")
        self._client.set_terminated(self._id, ended)


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}
"""Trackers by the name of their package, which is also the name of their extra."""


def require_trackers(names: Collection[str]) -> None:
    """Raise ConfigError if a tracker is unknown or its package is missing."""
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"unknown tracker {name!r}: known are {', '.join(TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"the {name} tracker needs the package {name}, which is not installed: "
                f"pip install 'agentgym-rl[{name}]', or leave it out of trackers"
            )


def start_trackers(names: Collection[str], root: Path, config: Mapping[str, Any]) -> dict[str, Tracker]:
    """Start every tracker of a run in `root`, or none if one cannot start."""
    started: dict[str, Tracker] = {}
    try:
        for name in names:
            started[name] = TRACKERS[name](root, config)
    except BaseException:
        for tracker in started.values():
            tracker.close("failed")
        raise
    return started


def _numbers(row: Row) -> dict[str, float]:
    """Return the metrics of a line of metrics.jsonl as they were logged. Values that were not finite are null there."""
    values = {name: math.nan if value is None else value for name, value in row.items() if name not in ("step", "time")}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w. /-]", "_", name)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Return nested tables and lists of tables with dotted keys: `environments.0.name`."""
    for key, value in config.items():
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            value = {str(number): item for number, item in enumerate(value)}
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
