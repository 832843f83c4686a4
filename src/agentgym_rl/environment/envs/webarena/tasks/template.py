"""What a template of embedded tasks gives, and how instances become tasks."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agentgym_rl.environment.envs.webarena.oracle import Move


@dataclass(frozen=True, slots=True)
class Instance:
    """One task of a template, before it has a number."""

    arguments: dict[str, Any]
    """What is filled into the template's text."""
    evaluation: dict[str, Any]
    script: tuple[Move, ...]
    start: str = ""
    """Path on the site where it starts; the front page unless said otherwise."""


Make = Callable[[sqlite3.Connection], Sequence[Instance]]


@dataclass(frozen=True, slots=True)
class Template:
    """A kind of task."""

    site: str
    """As configs write it: shopping, shopping_admin, reddit, gitlab, map."""
    text: str
    """The intent, with {{argument}} in WebArena's manner."""
    make: Make
    """Instances from a fresh copy of the sites' data, always the same ones."""
    changes: bool = False
    """Whether doing it changes the site's data."""


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
    """Evaluation of a question that asks for nothing but a number."""
    return _question("number_only", str(right), str(right))


def quantity(value: str, unit: str) -> dict[str, Any]:
    """Evaluation of a question whose answer is one number, with or without its unit."""
    return _question("number", {"value": value, "unit": unit}, f"{value} {unit}")


def one_of(right: str, choices: Iterable[str]) -> dict[str, Any]:
    """Evaluation of a question whose answer is one of several: naming another one beside it does not count."""
    return _question("one_of", {"right": right, "choices": sorted(set(choices))}, right)


def column(db: sqlite3.Connection, sql: str, *arguments: Any) -> list[Any]:
    """The first column of what a query finds."""
    return [row[0] for row in db.execute(sql, arguments).fetchall()]


def at_url(url: str) -> dict[str, Any]:
    """Evaluation of finding a page: this one, and not one whose address begins alike."""
    return {
        "eval_types": ["url_match"],
        "reference_answers": None,
        "reference_url": url,
        "program_html": [],
        "url_note": "EXACT",
    }


def page_has(*targets: tuple[str, str, str | list[str]]) -> dict[str, Any]:
    """Evaluation of a change: (url, locator, text it must equal or list of texts it must include)."""
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
    """A row that changes in these columns only."""
    return {"table": table, "row": row, "values": values}


def added(table: str, **values: Any) -> dict[str, Any]:
    """A new row with at least these values."""
    return {"table": table, "row": "new", "values": values}


def with_data(pages: dict[str, Any], *rows: dict[str, Any]) -> dict[str, Any]:
    """Evaluation of a change by the site's data too: these rows and no others. Looked at first, since it is quick."""
    return {**pages, "eval_types": ["changed_data", *pages["eval_types"]], "changed_data": list(rows)}


def rows_text(selector: str) -> str:
    """A locator: the rows of a table's body, their cells apart by `; ` and themselves by ` / `."""
    cells = "[...row.cells].map(cell => cell.innerText.trim()).join('; ')"
    return f"[...document.querySelectorAll('{selector} tbody tr')].map(row => {cells}).join(' / ')"


def text_of(selector: str) -> str:
    """A locator: the text of the first element that fits a CSS selector."""
    return f"document.querySelector('{selector}').innerText"
