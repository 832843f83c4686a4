"""What the pages show of a run besides its episodes: state, metrics, stages, warnings, config, evaluation tables."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentgym_rl.common.intervals import wilson_interval
from agentgym_rl.viewer.discovery import Place, read_json, read_lines, read_status, read_toml, state_now
from agentgym_rl.viewer.queries import Queries
from agentgym_rl.viewer.validation import checked_evaluation, environments_of
from agentgym_rl.viewer.vocabulary import Vocabulary, find_tokenizer, load_vocabulary

SPARK_POINTS = 48


def stamp_of(*paths: Path) -> tuple[int, ...]:
    """Changes whenever one of the files does."""
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
    """Reads runs; what was read is kept until its file changes."""

    def __init__(self, queries: Queries) -> None:
        self._queries = queries
        self._kept: dict[tuple[str, Path], tuple[tuple[int, ...], Any]] = {}
        self._guard = threading.Lock()

    def overview(self, place: Place) -> dict[str, Any]:
        """A line of the list of runs."""
        counts = self._queries.counts(place.path)
        row: dict[str, Any] = {"id": place.id, "kind": place.kind, "path": str(place.path), **counts}
        if place.kind == "eval":
            result, problems = self._evaluation(place)
            return row | {
                "problems": problems,
                "status": {"state": "damaged" if problems else self._state(place)},
                "agent": result["config"]["agent"]["name"],
                "updated": _modified(place.path / "eval.json"),
                "success": _success(result),
                "in_part": _in_part(result),
                "environments": sorted({plan["env"] for plan in result["config"]["tasks"] if plan["env"]}),
            }
        (status, wrong), (config, unreadable) = read_status(place.path), self._config(place)
        environments, odd = environments_of(config)
        problems = [*unreadable, *odd, *wrong]
        metrics = self.metrics(place)
        success = [value for value in metrics["series"].get("success/mean", []) if value is not None]
        held_out = self._queries.evaluations(place.path)
        return row | {
            "problems": problems,
            "status": status | ({"state": "damaged"} if wrong else {}),
            "environments": environments,
            "updated": status.get("updated") or _modified(place.path / "config.toml"),
            "success": success[-1] if success else None,
            "held_out": held_out[-1] if held_out else None,
            "spark": _thin(success),
        }

    def details(self, place: Place, overview: dict[str, Any]) -> dict[str, Any]:
        """All about one run that is not a curve."""
        config = self.config(place)
        return overview | {
            "config": config,
            "summary": read_json(place.path / "summary.json")[0],
            "doctor": read_lines(place.path / "doctor.jsonl")[-200:],
            "evaluations": [_with_interval(row) for row in self._queries.evaluations(place.path)],
            "checkpoints": _checkpoints(place.path / "checkpoints"),
            "tokenizer": find_tokenizer(place.path, config) is not None,
        }

    def evaluation(self, place: Place) -> dict[str, Any]:
        """eval.json, checked."""
        return self._evaluation(place)[0]

    def _evaluation(self, place: Place) -> tuple[dict[str, Any], list[str]]:
        path = place.path / "eval.json"

        def read() -> tuple[dict[str, Any], list[str]]:
            row, unreadable = read_json(path)
            found, wrong = checked_evaluation(row)
            return found, unreadable + wrong

        return self._keep("eval", path, read)

    def agent(self, place: Place) -> dict[str, Any]:
        """What an evaluation says of its agent."""
        return self.evaluation(place)["config"]["agent"] if place.kind == "eval" else {}

    def config(self, place: Place) -> dict[str, Any]:
        return self._config(place)[0]

    def _config(self, place: Place) -> tuple[dict[str, Any], list[str]]:
        path = place.path / "config.toml"
        return self._keep("config", path, lambda: read_toml(path))

    def metrics(self, place: Place) -> dict[str, Any]:
        """{"steps", "times", "series": {name: one value a step or None}}; lines of one step are put together."""
        path = place.path / "metrics.jsonl"
        return self._keep("metrics", path, lambda: _columns(read_lines(path)))

    def vocabulary(self, place: Place) -> Vocabulary | None:
        config = {"model": self.agent(place)} if place.kind == "eval" else self.config(place)
        path = find_tokenizer(place.path, config)
        return self._keep("vocabulary", path, lambda: load_vocabulary(path)) if path else None

    def stamp(self, place: Place) -> list[int | str]:
        """What a page compares to know that it is out of date. A process that is killed changes no file."""
        names = ("metrics.jsonl", "status.json", "eval.json", "doctor.jsonl", "summary.json", "checkpoints")
        return [*stamp_of(*(place.path / name for name in names)), self._state(place)]

    def _state(self, place: Place) -> str:
        if place.kind == "run":
            return str(read_status(place.path)[0].get("state", ""))
        silent_s = time.time() - (_modified(place.path / "eval.json") or 0.0)
        return state_now(self.evaluation(place), silent_s)

    def style_of(self, place: Place, env: str) -> tuple[str, int | None]:
        """(style, turns per attempt) in which `env` was played, so that replies can be played again."""
        if place.kind == "eval":
            styles = [plan["style"] for plan in self.evaluation(place)["config"]["tasks"] if plan["env"] == env]
            return (styles[0] if styles and styles[0] else "act"), _whole(self.agent(place).get("turns_per_attempt"))
        agent = _table(self.config(place).get("agent"))
        return str(agent.get("style", "act")), _whole(agent.get("turns_per_attempt"))

    def _keep(self, what: str, path: Path, read: Callable[[], Any]) -> Any:
        stamp = stamp_of(path)
        with self._guard:
            kept = self._kept.get((what, path))
        if kept is None or kept[0] != stamp:
            kept = (stamp, read())
            with self._guard:
                self._kept[what, path] = kept
        return kept[1]


def _checkpoints(folder: Path) -> list[dict[str, Any]]:
    """Saved checkpoints, oldest step first: what each holds, its size, and when it was saved."""
    found = []
    for path in folder.glob("step_*"):
        if path.is_symlink():  # sizes are those of this run's own files
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
            found.append(row)
    return sorted(found, key=lambda row: row["step"])


def damaged_overview(place: Place, error: Exception) -> dict[str, Any]:
    """The line of a run that cannot be read at all."""
    row: dict[str, Any] = {"id": place.id, "kind": place.kind, "path": str(place.path), "status": {"state": "damaged"}}
    row |= {"episodes": 0, "broken": 0, "environments": [], "updated": None, "success": None, "held_out": None}
    return row | {"spark": [], "agent": "", "problems": [f"it cannot be read: {type(error).__name__}: {error}"]}


def _columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    by_step: dict[int, dict[str, Any]] = {}
    for row in rows:
        if _whole(row.get("step")) is not None:
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
    """A number whose distances to others are numbers too."""
    return _is_number(value) and abs(value) < 1e100


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _with_interval(row: dict[str, Any]) -> dict[str, Any]:
    low, high = wilson_interval(row["success"] * row["episodes"], row["episodes"])
    return row | {"low": low, "high": high}


def _thin(values: list[float]) -> list[float]:
    """At most SPARK_POINTS means of neighbouring values."""
    size = -(-len(values) // SPARK_POINTS) or 1
    return [round(sum(some) / len(some), 4) for i in range(0, len(values), size) if (some := values[i : i + size])]


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _success(evaluation: dict[str, Any]) -> float | None:
    """The mean over scenarios under the longest horizon, or the only scenario's."""
    if not evaluation["results"]:
        return None
    last = evaluation["results"][-1]
    cells = list(last["scenarios"].values())
    cell = last["overall"] or (cells[0] if len(cells) == 1 else None)
    rate = cell.get("success") if cell else None
    return rate["value"] if rate else None


def _in_part(evaluation: dict[str, Any]) -> bool:
    """True if some tasks of a scenario were not played: its success is not that of the whole."""
    last = evaluation["results"][-1:]
    return any(cell and cell.get("coverage") == "part" for result in last for cell in result["scenarios"].values())


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
