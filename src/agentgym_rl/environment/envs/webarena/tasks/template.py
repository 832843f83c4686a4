"""Templates of embedded tasks, and the parts of their evaluations."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from agentgym_rl.environment.envs.webarena.oracle import Move


@dataclass(frozen=True, slots=True)
class Instance:
    """One task of a template, before it has a number."""

    arguments: dict[str, Any]
    """Values for the template's text."""
    evaluation: dict[str, Any]
    script: tuple[Move, ...]
    start: str = ""
    """Path of the start page on the site. Default: the front page."""


Make = Callable[[sqlite3.Connection], Iterable[Instance]]


@dataclass(frozen=True, slots=True)
class Template:
    """A kind of task."""

    site: str
    """Site name as in configs: shopping, shopping_admin, reddit, gitlab, map."""
    text: str
    """The intent, with {{argument}} placeholders as in WebArena."""
    make: Make
    """Returns the instances for a fresh copy of the sites' data, always the same."""
    changes: bool = False
    """Whether the solution changes the site's data."""


def _question(approach: str, wanted: Any, right: str) -> dict[str, Any]:
    return {
        "eval_types": ["string_match"],
        "reference_answers": {approach: wanted},
        "reference_url": "",
        "program_html": [],
        "string_note": "",
        "reference_answer_raw_annotation": right,
    }


def exactly(right: object) -> dict[str, Any]:
    """Return the evaluation of a question whose answer must be a number and nothing else."""
    return _question("number_only", str(right), str(right))


def quantity(value: str, unit: str) -> dict[str, Any]:
    """Return the evaluation of a question whose answer is one number, with or without its unit."""
    return _question("number", {"value": value, "unit": unit}, f"{value} {unit}")


def one_of(right: str, choices: Iterable[str]) -> dict[str, Any]:
    """Return the evaluation of a question whose answer is one of several choices. Naming a second choice fails."""
    return _question("one_of", {"right": right, "choices": sorted(set(choices))}, right)


def column(db: sqlite3.Connection, sql: str, *arguments: Any) -> list[Any]:
    """Return the first column of a query's result."""
    return [row[0] for row in db.execute(sql, arguments).fetchall()]


def at_url(url: str) -> dict[str, Any]:
    """Return the evaluation of reaching exactly this page."""
    return {
        "eval_types": ["url_match"],
        "reference_answers": None,
        "reference_url": url,
        "program_html": [],
        "url_note": "EXACT",
    }


def page_has(*targets: tuple[str, str, str | list[str]]) -> dict[str, Any]:
    """Return the evaluation of a change by (url, locator, text it must equal or list of texts it must include)."""
    return {
        "eval_types": ["program_html"],
        "reference_answers": None,
        "reference_url": "",
        "program_html": [
            {
                "url": url,
                "locator": locator,
                "required_contents": {"exact_match": wanted} if isinstance(wanted, str) else {"must_include": wanted},
            }
            for url, locator, wanted in targets
        ],
    }


def changed(table: str, row: int, **values: Any) -> dict[str, Any]:
    """Return the description of a row that changes in these columns only."""
    return {"table": table, "row": row, "values": values}


def added(table: str, **values: Any) -> dict[str, Any]:
    """Return the description of a new row with at least these values."""
    return {"table": table, "row": "new", "values": values}


def with_data(pages: dict[str, Any], *rows: dict[str, Any]) -> dict[str, Any]:
    """Return an evaluation that first checks the site's data (these rows changed, no others), because that is fast."""
    return {**pages, "eval_types": ["changed_data", *pages["eval_types"]], "changed_data": list(rows)}


def rows_text(selector: str) -> str:
    """Return a locator of a table's body: rows joined by ` / `, cells by `; `."""
    cells = "[...row.cells].map(cell => cell.innerText.trim()).join('; ')"
    return f"[...document.querySelectorAll('{selector} tbody tr')].map(row => {cells}).join(' / ')"


def text_of(selector: str) -> str:
    """Return a locator of the text of the first element that matches a CSS selector."""
    return f"document.querySelector('{selector}').innerText"
