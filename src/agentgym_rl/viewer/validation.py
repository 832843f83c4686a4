"""What the pages need of files that may be damaged or somebody else's: the rest is left out, and named.

Every function takes the content of a file and gives back what of it can be shown, with a list of what is wrong.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

MOST_PROBLEMS = 4
"""Of one file: a file of another kind has as many as it has fields."""
_RATE = re.compile(r"success|reward|(avg|pass)@\d+")
_COUNTS = (
    *("items", "episodes", "errors", "unplayed", "unreported", "turns", "truncated"),
    *("prompt_tokens", "sampled_tokens", "cost_usd", "success_errors_as_failures"),
)


class Check:
    """Collects what is wrong with one file. None stands for what is not there and is never wrong."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._found: list[str] = []

    @property
    def problems(self) -> list[str]:
        more = len(self._found) - MOST_PROBLEMS
        return self._found[:MOST_PROBLEMS] + ([f"{self._file}: and {more} more"] if more > 0 else [])

    def number(self, value: Any, where: str) -> float | None:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        return value if self._holds(good, value, where, "a number") else None

    def text(self, value: Any, where: str) -> str | None:
        return value if self._holds(isinstance(value, str), value, where, "a text") else None

    def table(self, value: Any, where: str) -> dict[str, Any]:
        return value if self._holds(isinstance(value, dict), value, where, "a table") else {}

    def tables(self, value: Any, where: str) -> list[dict[str, Any]]:
        rows = value if self._holds(isinstance(value, list), value, where, "a list") else []
        return [self.table(row, f"{where}[{place}]") for place, row in enumerate(rows)]

    def _holds(self, good: bool, value: Any, where: str, needed: str) -> bool:
        if not good and value is not None:
            where, shown = (text if len(text) <= 60 else f"{text[:59]}…" for text in (where, repr(value)))
            self._found.append(f"{self._file}: {where} should be {needed}, got {shown}")
        return good


def checked_status(row: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """status.json."""
    check = Check("status.json")
    numbers = {name: check.number(row.get(name), name) for name in ("step", "steps", "started", "updated")}
    texts = {name: check.text(row.get(name), name) for name in ("state", "error", "host")}
    return {name: value for name, value in (row | numbers | texts).items() if value is not None}, check.problems


def environments_of(config: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The names in a config.toml."""
    check = Check("config.toml")
    rows = check.tables(config.get("environments"), "environments")
    names = [check.text(row.get("name"), f"environments[{place}].name") for place, row in enumerate(rows)]
    return [name for name in names if name], check.problems


def checked_evaluation(row: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """eval.json as the pages expect it. Of a task's items their number is left, and a mark to tell others apart."""
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
        "results": [_result(check, result, f"results[{place}]") for place, result in enumerate(results)],
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
    """What is counted. Only what a page shows is looked at: other versions may write more."""
    found: dict[str, Any] = {name: check.number(table[name], f"{where}.{name}") for name in _COUNTS if name in table}
    causes = check.table(table.get("causes"), f"{where}.causes")
    # A list: in a browser, an object puts names that look like numbers first.
    found["causes"] = [[text, check.number(times, f"{where}.causes.{text}")] for text, times in causes.items()]
    return found


def _rate(check: Check, rate: Any, where: str) -> dict[str, float] | None:
    if rate is None:
        return None
    table = check.table(rate, where)
    found = {name: check.number(table.get(name), f"{where}.{name}") for name in ("value", "low", "high")}
    kept = {name: value for name, value in found.items() if value is not None}
    return kept if "value" in kept else None
