"""Data of a run other than its episodes: state, metrics, stages, warnings, config and evaluation tables."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentgym_rl.common.intervals import wilson_interval
from agentgym_rl.viewer.discovery import RunFolder, current_state, read_json, read_lines, read_status, read_toml
from agentgym_rl.viewer.queries import Queries
from agentgym_rl.viewer.validation import checked_evaluation, environments_of
from agentgym_rl.viewer.vocabulary import Vocabulary, find_tokenizer, load_vocabulary

SPARK_POINTS = 48
"""Most points of the small curve in the list of runs."""


def stamp_of(*paths: Path) -> tuple[int, ...]:
    """Return a value that changes whenever one of the files does."""
    stamps: list[int] = []
    for path in paths:
        try:
            stat = os.stat(path)
        except OSError:
            stamps += [0, 0]
        else:
            stamps += [stat.st_size, stat.st_mtime_ns]
    return tuple(stamps)


class Runs:
    """Reader of runs. Content is cached until its file changes."""

    def __init__(self, queries: Queries) -> None:
        self._queries = queries
        self._cache: dict[tuple[str, Path], tuple[tuple[int, ...], Any]] = {}
        self._guard = threading.Lock()

    def overview(self, folder: RunFolder) -> dict[str, Any]:
        """Return a row of the list of runs."""
        counts = self._queries.counts(folder.path)
        row: dict[str, Any] = {"id": folder.id, "kind": folder.kind, "path": str(folder.path), **counts}
        if folder.kind == "eval":
            result, problems = self._evaluation(folder)
            return row | {
                "problems": problems,
                "status": {"state": "damaged" if problems else self._state(folder)},
                "agent": result["config"]["agent"]["name"],
                "updated": _modified(folder.path / "eval.json"),
                "success": _success(result),
                "in_part": _in_part(result),
                "environments": sorted({plan["env"] for plan in result["config"]["tasks"] if plan["env"]}),
            }
        (status, status_problems), (config, config_problems) = read_status(folder.path), self._config(folder)
        environments, name_problems = environments_of(config)
        problems = [*config_problems, *name_problems, *status_problems]
        metrics = self.metrics(folder)
        success = [value for value in metrics["series"].get("success/mean", []) if value is not None]
        held_out = self._queries.evaluations(folder.path)
        return row | {
            "problems": problems,
            "status": status | ({"state": "damaged"} if status_problems else {}),
            "environments": environments,
            "updated": status.get("updated") or _modified(folder.path / "config.toml"),
            "success": success[-1] if success else None,
            "held_out": held_out[-1] if held_out else None,
            "spark": _thin(success),
        }

    def details(self, folder: RunFolder, overview: dict[str, Any]) -> dict[str, Any]:
        """Return everything about one run except its curves."""
        config = self.config(folder)
        return overview | {
            "config": config,
            "summary": read_json(folder.path / "summary.json")[0],
            "doctor": read_lines(folder.path / "doctor.jsonl")[-200:],
            "evaluations": [_with_interval(row) for row in self._queries.evaluations(folder.path)],
            "checkpoints": _checkpoints(folder.path / "checkpoints"),
            "tokenizer": find_tokenizer(folder.path, config) is not None,
        }

    def evaluation(self, folder: RunFolder) -> dict[str, Any]:
        """Return the checked content of eval.json."""
        return self._evaluation(folder)[0]

    def _evaluation(self, folder: RunFolder) -> tuple[dict[str, Any], list[str]]:
        path = folder.path / "eval.json"

        def read() -> tuple[dict[str, Any], list[str]]:
            row, read_problems = read_json(path)
            evaluation, problems = checked_evaluation(row)
            return evaluation, read_problems + problems

        return self._cached("eval", path, read)

    def agent(self, folder: RunFolder) -> dict[str, Any]:
        """Return the agent of an evaluation, or an empty table for a run."""
        return self.evaluation(folder)["config"]["agent"] if folder.kind == "eval" else {}

    def config(self, folder: RunFolder) -> dict[str, Any]:
        return self._config(folder)[0]

    def _config(self, folder: RunFolder) -> tuple[dict[str, Any], list[str]]:
        path = folder.path / "config.toml"
        return self._cached("config", path, lambda: read_toml(path))

    def metrics(self, folder: RunFolder) -> dict[str, Any]:
        """Return {"steps", "times", "series": {name: values by step or None}}. Lines of one step are merged."""
        path = folder.path / "metrics.jsonl"
        return self._cached("metrics", path, lambda: _columns(read_lines(path)))

    def vocabulary(self, folder: RunFolder) -> Vocabulary | None:
        config = {"model": self.agent(folder)} if folder.kind == "eval" else self.config(folder)
        path = find_tokenizer(folder.path, config)
        return self._cached("vocabulary", path, lambda: load_vocabulary(path)) if path else None

    def stamp(self, folder: RunFolder) -> list[int | str]:
        """Return a value that changes with the run. It includes the state, because a kill changes no file."""
        names = ("metrics.jsonl", "status.json", "eval.json", "doctor.jsonl", "summary.json", "checkpoints")
        return [*stamp_of(*(folder.path / name for name in names)), self._state(folder)]

    def _state(self, folder: RunFolder) -> str:
        if folder.kind == "run":
            return str(read_status(folder.path)[0].get("state", ""))
        silent_s = time.time() - (_modified(folder.path / "eval.json") or 0.0)
        return current_state(self.evaluation(folder), silent_s)

    def style_of(self, folder: RunFolder, env: str) -> tuple[str, int | None, int | None, str]:
        """Return (style, turns per attempt, attempts, retry) of `env`, which a replay needs."""
        if folder.kind == "eval":
            styles = [plan["style"] for plan in self.evaluation(folder)["config"]["tasks"] if plan["env"] == env]
            style, agent = styles[0] if styles and styles[0] else "act", self.agent(folder)
        else:
            agent = _table(self.config(folder).get("agent"))
            style = str(agent.get("style", "act"))
        attempts = (_integer(agent.get("turns_per_attempt")), _integer(agent.get("attempts")))
        return style, *attempts, str(agent.get("retry", "failure"))

    def _cached(self, kind: str, path: Path, read: Callable[[], Any]) -> Any:
        stamp = stamp_of(path)
        with self._guard:
            entry = self._cache.get((kind, path))
        if entry is None or entry[0] != stamp:
            entry = (stamp, read())
            with self._guard:
                self._cache[kind, path] = entry
        return entry[1]


def _checkpoints(folder: Path) -> list[dict[str, Any]]:
    """Return the saved checkpoints, oldest step first, with their content, size and time."""
    checkpoints = []
    for path in folder.glob("step_*"):
        if path.is_symlink():  # count only files of this run
            continue
        try:
            sizes = [(entry, entry.lstat().st_size) for entry in path.rglob("*") if not entry.is_dir()]
            holds = sorted({entry.relative_to(path).parts[0] for entry, _ in sizes})
            saved = path.lstat().st_mtime
        except OSError:  # removed while it was read
            continue
        step = path.name.removeprefix("step_")
        if step.isdecimal():
            row = {"step": int(step), "holds": holds, "bytes": sum(size for _, size in sizes), "saved": saved}
            checkpoints.append(row)
    return sorted(checkpoints, key=lambda row: row["step"])


def damaged_overview(folder: RunFolder, error: Exception) -> dict[str, Any]:
    """Return the row of a run that cannot be read."""
    row: dict[str, Any] = {"id": folder.id, "kind": folder.kind, "path": str(folder.path)}
    row |= {"status": {"state": "damaged"}, "episodes": 0, "broken": 0, "environments": [], "agent": "", "spark": []}
    row |= dict.fromkeys(("updated", "success", "held_out"))
    return row | {"problems": [f"it cannot be read: {type(error).__name__}: {error}"]}


def _columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    by_step: dict[int, dict[str, Any]] = {}
    for row in rows:
        if _integer(row.get("step")) is not None:
            by_step.setdefault(row["step"], {}).update(row)
    steps = sorted(by_step)
    names = sorted({name for row in by_step.values() for name in row} - {"step", "time", "nonfinite"})
    series = {}
    for name in names:
        values = [by_step[step].get(name) for step in steps]
        if any(_is_drawable(value) for value in values):
            series[name] = [value if _is_drawable(value) else None for value in values]
    times = [by_step[step].get("time") for step in steps]
    return {"steps": steps, "times": [time if _is_number(time) else None for time in times], "series": series}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_drawable(value: Any) -> bool:
    """Return whether a value can be drawn: a number whose differences to others are finite."""
    return _is_number(value) and abs(value) < 1e100


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _with_interval(row: dict[str, Any]) -> dict[str, Any]:
    low, high = wilson_interval(row["success"] * row["episodes"], row["episodes"])
    return row | {"low": low, "high": high}


def _thin(values: list[float]) -> list[float]:
    """Return at most SPARK_POINTS means of neighbouring values."""
    size = -(-len(values) // SPARK_POINTS) or 1
    return [round(sum(part) / len(part), 4) for i in range(0, len(values), size) if (part := values[i : i + size])]


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _success(evaluation: dict[str, Any]) -> float | None:
    """Return the mean over scenarios at the longest horizon, or the rate of the only scenario."""
    if not evaluation["results"]:
        return None
    last = evaluation["results"][-1]
    cells = list(last["scenarios"].values())
    cell = last["overall"] or (cells[0] if len(cells) == 1 else None)
    rate = cell.get("success") if cell else None
    return rate["value"] if rate else None


def _in_part(evaluation: dict[str, Any]) -> bool:
    """Return whether a scenario was played in part, so that its success is not that of the whole."""
    last = evaluation["results"][-1:]
    return any(cell and cell.get("coverage") == "part" for result in last for cell in result["scenarios"].values())


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
