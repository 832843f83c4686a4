"""Validation of files that may be damaged or untrusted, before the pages show them.

Every function takes the content of a file and returns the valid part of it and a list of problems.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

MAX_PROBLEMS = 4
"""Problems shown per file. A file of another kind has one for each field."""
_RATE = re.compile(r"success|reward|(avg|pass)@\d+")
_COUNTS = (
    *("items", "episodes", "errors", "unplayed", "unreported", "turns", "truncated"),
    *("prompt_tokens", "sampled_tokens", "cost_usd", "success_errors_as_failures"),
)


class Check:
    """Collector of the problems of one file. None means an absent value, which is never a problem."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._problems: list[str] = []

    @property
    def problems(self) -> list[str]:
        more = len(self._problems) - MAX_PROBLEMS
        return self._problems[:MAX_PROBLEMS] + ([f"{self._file}: and {more} more"] if more > 0 else [])

    def number(self, value: Any, where: str) -> float | None:
        valid = isinstance(value, int | float) and not isinstance(value, bool)
        return value if self._require(valid, value, where, "a number") else None

    def text(self, value: Any, where: str) -> str | None:
        return value if self._require(isinstance(value, str), value, where, "a text") else None

    def table(self, value: Any, where: str) -> dict[str, Any]:
        return value if self._require(isinstance(value, dict), value, where, "a table") else {}

    def tables(self, value: Any, where: str) -> list[dict[str, Any]]:
        rows = value if self._require(isinstance(value, list), value, where, "a list") else []
        return [self.table(row, f"{where}[{i}]") for i, row in enumerate(rows)]

    def _require(self, valid: bool, value: Any, where: str, needed: str) -> bool:
        if not valid and value is not None:
            where, shown = (text if len(text) <= 60 else f"{text[:59]}…" for text in (where, repr(value)))
            self._problems.append(f"{self._file}: {where} must be {needed}, got {shown}")
        return valid


def checked_status(row: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Check status.json."""
    check = Check("status.json")
    numbers = {name: check.number(row.get(name), name) for name in ("step", "steps", "started", "updated")}
    texts = {name: check.text(row.get(name), name) for name in ("state", "error", "host")}
    return {name: value for name, value in (row | numbers | texts).items() if value is not None}, check.problems


def environments_of(config: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the environment names in a config.toml."""
    check = Check("config.toml")
    rows = check.tables(config.get("environments"), "environments")
    names = [check.text(row.get("name"), f"environments[{i}].name") for i, row in enumerate(rows)]
    return [name for name in names if name], check.problems


def checked_verdicts(value: Any) -> list[dict[str, Any]]:
    """Return the verdicts of an episode that a page can show; others are left out."""
    rows = [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []
    verdicts = []
    for row in rows:
        check, scores = Check("verdicts"), row.get("scores")
        numbers = [check.number(score, "scores") for score in scores] if isinstance(scores, list) else []
        texts = {name: check.text(row.get(name), name) or "" for name in ("source", "reason", "error")}
        verdict = texts | {"weight": check.number(row.get("weight"), "weight"), "scores": numbers}
        verdicts += [] if check.problems or None in numbers or verdict["weight"] is None else [verdict]
    return verdicts


def checked_evaluation(row: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Check eval.json. A task's items are replaced by their number and a checksum."""
    check = Check("eval.json")
    config = check.table(row.get("config"), "config")
    agent = check.table(config.get("agent"), "config.agent")
    agent = agent | {"name": check.text(agent.get("name"), "config.agent.name") or ""}
    tasks = [
        _plan(check, plan, f"config.tasks[{i}]")
        for i, plan in enumerate(check.tables(config.get("tasks"), "config.tasks"))
    ]
    results = check.tables(row.get("results"), "results")
    return {
        **row,
        "state": check.text(row.get("state"), "state") or "unknown",
        "config": config | {"agent": agent, "tasks": tasks},
        "results": [_result(check, result, f"results[{i}]") for i, result in enumerate(results)],
    }, check.problems


def _plan(check: Check, plan: dict[str, Any], where: str) -> dict[str, Any]:
    names = ("scenario", "name", "env", "subset", "style", "data", "missing")
    texts = {name: check.text(plan.get(name), f"{where}.{name}") for name in names}
    items = plan.get("items")
    return texts | {
        "items": len(items) if isinstance(items, list) else 0,
        "which_items": zlib.crc32(repr(items).encode("utf-8", "replace")),
        "own_data": plan.get("own_data") is True,
        "max_turns": check.number(plan.get("max_turns"), f"{where}.max_turns"),
    }


def _result(check: Check, result: dict[str, Any], where: str) -> dict[str, Any]:
    cells = {
        part: {
            name: _cell(check, cell, f"{where}.{part}.{name}")
            for name, cell in check.table(result.get(part), f"{where}.{part}").items()
        }
        for part in ("tasks", "scenarios")
    }
    overall = _cell(check, result.get("overall"), f"{where}.overall")
    if overall is not None:
        given = result["overall"] if isinstance(result["overall"], dict) else {}
        played = given.get("scenarios")
        overall["scenarios"] = [str(name) for name in played] if isinstance(played, list) else []
        overall["own_data"] = given.get("own_data") is True
    total = check.table(result.get("total"), f"{where}.total")
    return {
        **cells,
        "max_turns": check.number(result.get("max_turns"), f"{where}.max_turns"),
        "overall": overall,
        "total": _counts(check, total, f"{where}.total"),
    }


def _cell(check: Check, cell: Any, where: str) -> dict[str, Any] | None:
    if cell is None:
        return None
    table = check.table(cell, where)
    rates = {name: _rate(check, table[name], f"{where}.{name}") for name in table if _RATE.fullmatch(name)}
    coverage = check.text(table.get("coverage"), f"{where}.coverage")
    return _counts(check, table, where) | rates | ({"coverage": coverage} if coverage else {})


def _counts(check: Check, table: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the counts that a page shows. Other versions may write more."""
    counts: dict[str, Any] = {name: check.number(table[name], f"{where}.{name}") for name in _COUNTS if name in table}
    causes = check.table(table.get("causes"), f"{where}.causes")
    # A list, because JavaScript objects reorder keys that look like numbers.
    counts["causes"] = [[text, check.number(times, f"{where}.causes.{text}")] for text, times in causes.items()]
    return counts


def _rate(check: Check, rate: Any, where: str) -> dict[str, float] | None:
    if rate is None:
        return None
    table = check.table(rate, where)
    numbers = {name: check.number(table.get(name), f"{where}.{name}") for name in ("value", "low", "high")}
    kept = {name: value for name, value in numbers.items() if value is not None}
    return kept if "value" in kept else None
