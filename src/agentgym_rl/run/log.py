"""The run directory: everything a run leaves on disk, except what is inside its checkpoints.

    <root>/config.toml                      the resolved config
    <root>/metrics.jsonl                    one JSON object per line, with `step` and `time`
    <root>/doctor.jsonl                     one JSON object per warning of the doctor; absent until there is one
    <root>/events.jsonl                     events of the run: workers lost and replaced, checkpoints that could not
                                            be written, a stop; absent until there is one
    <root>/trajectories/step_000012.jsonl   every training episode of step 12, before any filtering
    <root>/trajectories/learned_000012.jsonl  data trained on in step 12: advantages, entropies and the learner's
                                            log-probabilities of every sampled token
    <root>/trajectories/eval_000012.jsonl   the episodes of an evaluation after step 12
    <root>/checkpoints/                     written by the trainer
    <root>/status.json                      running, finished, stopped or failed; replaced atomically
    <root>/summary.json, curve.png          written at the end
    <root>/tensorboard/, wandb/             only with the trackers of these names

A group's lines are appended with one write, so a killed process leaves at most one torn line, the last; readers
skip it and a resumed run removes it. Data that a full disk refuses waits in memory (disk.py), and the run continues.
docs/reference/run-directory.md defines every file and metric.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import os
import socket
import time
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import orjson
import tomli_w

from agentgym_rl.common.files import lock_folder, write_atomically
from agentgym_rl.errors import ConfigError, WorkerLost
from agentgym_rl.run import disk
from agentgym_rl.run.trackers import Tracker, require_trackers, start_trackers
from agentgym_rl.types import Sample, Trajectory, in_order

Kind = Literal["train", "eval", "warmstart", "data"]
State = Literal["running", "finished", "stopped", "failed"]

_FILE_PREFIX: dict[Kind, str] = {"train": "step", "eval": "eval", "warmstart": "warmstart", "data": "data"}
_BEFORE_THE_CONFIG = frozenset({"trajectories", "checkpoints", "tensorboard", "wandb"})
"""Folders that a process leaves behind if it ends before it writes config.toml."""
LINES_PER_WRITE = 64
"""Most lines of one write. Systems take 1,024 parts, of which a line has three, and 2 GiB."""
_RESERVED = frozenset({"step", "time", "nonfinite"})


class RunLog:
    """Writes one run directory. Use it as a context manager, which records the end in status.json."""

    def __init__(
        self,
        root: Path,
        *,
        resumed: bool,
        lock: BinaryIO | None,
        trackers: Mapping[str, Tracker],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.root = root
        self.resumed = resumed
        """Whether the directory held a run already."""
        self.metrics_path = root / "metrics.jsonl"
        self.doctor_path = root / "doctor.jsonl"
        self.events_path = root / "events.jsonl"
        self.trajectories_dir = root / "trajectories"
        self.checkpoints_dir = root / "checkpoints"
        self.summary_path = root / "summary.json"
        self.status_path = root / "status.json"
        self.curve_path = root / "curve.png"
        self._lock = lock
        self._trackers = dict(trackers)
        self._say = say
        self._writer = disk.RetryingWriter(self._disk_is_full)
        self._begun: set[str] = set()
        self._status_is_written = False
        self._status: dict[str, Any] = {
            "state": "running",
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": round(time.time(), 3),
        }

    @classmethod
    def create(
        cls,
        root: Path,
        config: Mapping[str, Any],
        *,
        resume: bool = False,
        may_change: Collection[str] = (),
        completed: Callable[[dict[str, Any]], Mapping[str, Any]] = lambda saved: saved,
        trackers: Collection[str] = (),
        say: Callable[[str], None] = lambda text: None,
    ) -> RunLog:
        """Create `root` with its config.toml, or with `resume` continue the run in it.

        A resumed run must have the saved config; keys in `may_change` (dotted; a table covers its keys) may differ, and
        `completed` adds to a saved config what had no key yet when it was saved.
        `resume` on a directory without a run starts one, so that the same command is right after any kill. `say` is
        called at once with messages that may not reach events.jsonl because the disk is full.
        """
        require_trackers(trackers)
        root = Path(root)
        config_path = root / "config.toml"
        exists = config_path.is_file()
        require_place(root, resume=resume)
        resolved = _without_none(config)
        if exists:
            _require_same(config_path, resolved, may_change, completed)
        for folder in (root, root / "trajectories", root / "checkpoints"):
            _make(folder)
        lock = lock_folder(root)
        for leftover in root.glob(".*.tmp"):
            leftover.unlink()
        try:
            started = start_trackers(trackers, root, resolved)  # before config.toml: if one fails, there is no run yet
        except BaseException:
            if lock:
                lock.close()
            raise
        write_atomically(config_path, tomli_w.dumps(resolved).encode())
        log = cls(root, resumed=exists, lock=lock, trackers=started, say=say)
        for path in (log.metrics_path, log.doctor_path, log.events_path):
            if path.is_file():
                _rewrite_metrics(path, read_metrics(path))
        log.set_status("running")
        return log

    def log(self, step: int, metrics: Mapping[str, float | int | str], steps: int | None = None) -> None:
        """Append one line to metrics.jsonl. NaN and infinities become null and are listed under `nonfinite`.

        `steps`: a better estimate of the number of steps.
        """
        values = {name: _plain_metric(name, value) for name, value in metrics.items()}
        nonfinite = sorted(n for n, v in values.items() if isinstance(v, float) and not math.isfinite(v))
        row: dict[str, Any] = {"step": step, "time": round(time.time(), 3), **values}
        if nonfinite:
            row |= dict.fromkeys(nonfinite) | {"nonfinite": nonfinite}
        self._writer.append(self.metrics_path, orjson.dumps(row) + b"\n")
        scalars = {name: float(value) for name, value in values.items() if not isinstance(value, str)}
        self._call_trackers(lambda tracker: tracker.log(step, scalars))
        self.set_status("running", step=step, steps=steps)
        self._retry_writes()

    def metrics(self) -> list[dict[str, Any]]:
        """Return every line of metrics.jsonl, also those that wait for space on the disk."""
        written = read_metrics(self.metrics_path) if self.metrics_path.is_file() else []
        return written + [orjson.loads(line) for line in self._writer.pending(self.metrics_path)]

    def log_finding(self, finding: Mapping[str, Any]) -> None:
        """Append one line to doctor.jsonl: `step`, `rule`, `severity`, `message`, `since`."""
        self._writer.append(self.doctor_path, orjson.dumps(dict(finding)) + b"\n")

    def log_event(self, kind: str, message: str, **detail: Any) -> None:
        """Append one line to events.jsonl: `time`, `kind`, `message` and more. A resumed run appends to the file."""
        row = {"time": round(time.time(), 3), "kind": kind, "message": message, **detail}
        self._writer.append(self.events_path, orjson.dumps(row) + b"\n")

    @contextlib.contextmanager
    def skip_if_disk_full(self, what: str) -> Iterator[None]:
        """Wrap an optional write: if the disk is full it is skipped and the run continues."""
        try:
            yield
        except OSError as error:
            if error.errno not in disk.FULL:
                raise
            message = f"{what}: not written, no space on the disk ({disk.free_space(self.root)})"
            self.log_event("not_written", message, step=self._status.get("step", 0))
            self._say(message)

    def _call_trackers(self, call: Callable[[Tracker], None]) -> None:
        """Call every tracker. A tracker that raises any error is dropped."""
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:
                del self._trackers[name]
                reason = (str(error) or type(error).__name__).splitlines()[0]
                message = f"tracker {name} failed and is left out from now on, metrics.jsonl has everything: {reason}"
                self.log_event("tracker_failed", message, step=self._status.get("step", 0))
                self._say(message)

    def _disk_is_full(self, reason: str) -> None:
        message = (
            f"no space on the disk of {self.root} ({reason}; {disk.free_space(self.root)}): what the run writes waits "
            f"in memory until there is, of episodes the last {disk.MAX_PENDING_BYTES >> 20} MiB: free some space"
        )
        self.log_event("disk_full", message, step=self._status.get("step", 0))
        self._say(message)

    def _retry_writes(self) -> None:
        """Write what waits for space, after a step on a disk that was full."""
        if self._writer.full and self._writer.write_pending() and self._status_is_written:
            lost = self._writer.num_dropped
            self._writer.full = False
            message = f"there is space on the disk again ({disk.free_space(self.root)}): what waited is written" + (
                f", but for {lost} lines of trajectories" if lost else ""
            )
            self.log_event("disk_room", message, step=self._status.get("step", 0), lines_not_written=lost)
            self._say(message)

    def write_trajectory(self, step: int, trajectory: Trajectory, kind: Kind = "train") -> None:
        """Append one episode to the file of its step and kind.

        The first write of a process to a file truncates it: a step that is played again after a kill replaces what the
        killed process left of it.
        """
        self.write_lines(step, [trajectory.to_json().encode()], kind)

    def write_lines(self, step: int, lines: Sequence[bytes | memoryview], kind: Kind = "train") -> None:
        """Append the JSON of several episodes, as `write_trajectory` does. A group takes one write."""
        path = self.trajectories_path(step, kind)
        if path.name not in self._begun:  # names take less memory than paths, and all are kept
            path.unlink(missing_ok=True)
            self._writer.discard(path)
            self._begun.add(path.name)
        start = f'{{"step": {step}, "kind": "{kind}", '.encode()
        for few in (lines[i : i + LINES_PER_WRITE] for i in range(0, len(lines), LINES_PER_WRITE)):
            parts = [part for line in few for part in (start, memoryview(line)[1:], b"\n")]
            self._writer.append(path, *parts, droppable=True)

    def write_learned(self, step: int, samples: Iterable[Sample]) -> None:
        """Write one line per trained trajectory: values of its trained tokens, with 5 significant digits."""
        segments: dict[str, list[Sample]] = {}
        for sample in samples:
            segments.setdefault(sample.trajectory_id, []).append(sample)
        lines = (
            (own[0].stored is not None and own[0].stored.learned_line) or learned_line(name, own)
            for name, own in segments.items()
        )
        path = self.trajectories_dir / f"learned_{step:06d}.jsonl"
        self._writer.replace(path, *lines, droppable=True)

    def trajectories_path(self, step: int, kind: Kind = "train") -> Path:
        return self.trajectories_dir / f"{_FILE_PREFIX[kind]}_{step:06d}.jsonl"

    def truncate_after(self, step: int, keep: Collection[Path] = ()) -> None:
        """Remove everything after `step`, a checkpoint's, because it is played again. Files in `keep` remain."""
        for path in self.trajectories_dir.glob("*_*.jsonl"):
            if int(path.stem.rpartition("_")[2]) > step and path not in keep:
                path.unlink()
                self._writer.discard(path)
                self._begun.discard(path.name)
        for path in (self.metrics_path, self.doctor_path):
            if path.is_file():
                _rewrite_metrics(path, [row for row in read_metrics(path) if row["step"] <= step])
        kept = self.metrics()
        self._call_trackers(lambda tracker: tracker.resume(step, kept))
        self.set_status("running", step=step)

    def set_status(
        self, state: State, *, step: int | None = None, steps: int | None = None, error: str | None = None
    ) -> None:
        """Update status.json. Fields that are not given keep their values."""
        given = {"state": state, "step": step, "steps": steps, "error": error}
        self._status |= {name: value for name, value in given.items() if value is not None}
        self._status["updated"] = round(time.time(), 3)
        data = orjson.dumps(self._status, option=orjson.OPT_INDENT_2) + b"\n"
        try:
            write_atomically(self.status_path, data)
        except OSError as error:
            if error.errno not in disk.FULL:
                raise
            self._status_is_written = False
            with contextlib.suppress(OSError):  # the status must be right on a full disk, too
                disk.write_in_place(self.status_path, data)
            self._writer.mark_full(error.strerror or str(error))
        else:
            self._status_is_written = True

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        self._writer.replace(self.summary_path, orjson.dumps(dict(summary), option=orjson.OPT_INDENT_2) + b"\n")

    def close(self) -> None:
        """Close the trackers and release the lock."""
        self._call_trackers(lambda tracker: tracker.close(self._status["state"]))
        self._trackers = {}
        if not self._writer.write_pending():
            lost = self._writer.pending_paths()
            names = sorted(path.name for path in lost if path.parent == self.root)
            episodes = len(lost) - len(names)
            names += [f"{episodes} files of trajectories"] if episodes else []
            self._say(
                f"no space on the disk until the end ({disk.free_space(self.root)}): lost are the last lines of "
                + ", ".join(names)
            )
        if self._lock:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.set_status("finished")
        elif isinstance(error, Exception):
            event = "worker_lost" if isinstance(error, WorkerLost) else "failed"
            self.log_event(event, str(error) or type(error).__name__, step=self._status.get("step", 0))
            self.set_status("failed", error=f"{type(error).__name__}: {error}")
        else:  # KeyboardInterrupt, SystemExit, CancelledError, Stopped: requested
            self.set_status("stopped", error=type(error).__name__)
        self.close()


def learned_line(trajectory_id: str, samples: Sequence[Sample]) -> bytes:
    """Return the line of `write_learned` for the samples of one episode."""
    names = {"advantages": "advantages", "entropies": "entropies", "logprobs": "old_logprobs"}
    values = {key: [float(f"{x:.5g}") for x in in_order(samples, field)] for key, field in names.items()}
    return orjson.dumps({"id": trajectory_id, **values}, option=orjson.OPT_APPEND_NEWLINE)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl or doctor.jsonl, without a torn last line. Steps may repeat."""
    return [orjson.loads(line) for line in _whole_lines(path)]


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Yield the episodes of one file of `trajectories/`, without a torn last line."""
    for number, line in enumerate(_whole_lines(path), start=1):
        try:
            yield Trajectory.from_json(line.decode())
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} line {number} is not a trajectory: {error!r:.200}") from error


def horizon_stages(metrics: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the stages of a run, from its metrics: one per environment and span of equal horizon.

    `{"env": "babyai", "turns": 3, "first_step": 21, "last_step": 40, "success": 0.31, "turns_used": 2.4}`, in order of
    first_step; success and turns_used are means over the stage's steps, of this environment if the run has several. A
    plain `horizon` metric gives env "".
    """
    stages: list[dict[str, Any]] = []
    open_stages: dict[str, dict[str, Any]] = {}
    for row in metrics:
        named = {name: turns for name, turns in row.items() if name == "horizon" or name.startswith("horizon/")}
        for name, turns in named.items():
            env = name.partition("/")[2]
            prefix = f"{env}/" if len(named) > 1 else ""
            stage = open_stages.get(env)
            if stage is None or stage["turns"] != turns:
                stage = {"env": env, "turns": turns, "first_step": row["step"], "successes": [], "used": []}
                open_stages[env] = stage
                stages.append(stage)
            stage["last_step"] = row["step"]
            stage["successes"].append(row.get(f"{prefix}success/mean"))
            stage["used"].append(row.get(f"{prefix}turns/mean"))
    for stage in stages:
        stage["success"] = _mean(stage.pop("successes"))
        stage["turns_used"] = _mean(stage.pop("used"))
    return stages


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Yield lines that are JSON objects. A torn last line is skipped; a broken line elsewhere is an error."""
    torn: int | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if torn is not None:
                raise ConfigError(f"{path} line {torn} is not a JSON object: the file was damaged, remove that line")
            # Enough to recognise a torn line. The caller parses the line; parsing twice would double the cost.
            if line.startswith(b"{") and line.endswith(b"}\n"):
                yield line
            else:
                torn = number


def _rewrite_metrics(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    write_atomically(path, b"".join(orjson.dumps(row) + b"\n" for row in rows))


def _plain_metric(name: str, value: object) -> float | int | str:
    if name in _RESERVED:
        raise ValueError(f"metric {name!r} has a reserved name ({', '.join(sorted(_RESERVED))}): rename it")
    if isinstance(value, str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"metric {name!r} needs a number or a string, got {type(value).__name__}: convert it first")


def _mean(values: list[float | None]) -> float | None:
    numeric = [value for value in values if value is not None]
    return math.fsum(numeric) / len(numeric) if numeric else None


def _without_none(value: Any) -> Any:
    """Return a value for TOML, which has no null: an absent key means the default. Paths become strings."""
    if isinstance(value, Mapping):
        return {str(key): _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return str(value) if isinstance(value, str | os.PathLike) else value


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the run directory {folder} cannot be made: {error.strerror or error}") from error


def require_place(root: Path, *, resume: bool) -> None:
    """Raise ConfigError unless a run can be started in `root`, or resumed.

    A kill before config.toml was written leaves empty folders and hidden files. Other files belong to the user.
    """
    if (root / "config.toml").is_file():
        if not resume:
            raise ConfigError(f"{root} already holds a run: add --resume to continue it, or choose another directory")
        return
    if root.exists() and not root.is_dir():
        raise ConfigError(f"a run directory is needed, {root} is a file: choose another directory")
    names = [path.name for path in root.glob("*")] if root.is_dir() else []
    foreign = [name for name in names if name not in _BEFORE_THE_CONFIG and not name.startswith(".")]
    if foreign:
        raise ConfigError(
            f"{root} is not empty and holds no run (no config.toml, but {min(foreign)}): choose a new directory"
        )


def _require_same(
    config_path: Path,
    config: dict[str, Any],
    may_change: Collection[str],
    completed: Callable[[dict[str, Any]], Mapping[str, Any]],
) -> None:
    try:
        raw = tomllib.loads(config_path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{config_path} is not readable TOML ({error}): restore it, or start a new run") from error
    saved = _flatten(tomllib.loads(tomli_w.dumps(_without_none(completed(raw)))))
    given = _flatten(tomllib.loads(tomli_w.dumps(config)))
    changed = [
        f"{key} (saved {saved.get(key, 'nothing')}, given {given.get(key, 'nothing')})"
        for key in sorted(saved.keys() | given.keys())
        if repr(saved.get(key)) != repr(given.get(key))
        and not any(key == name or key.startswith(f"{name}.") for name in may_change)
    ]
    if changed:
        raise ConfigError(
            f"to resume {config_path.parent} its saved config is needed, but these differ: {', '.join(changed)}: "
            "give the saved values, or start a new run in another directory"
        )


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
