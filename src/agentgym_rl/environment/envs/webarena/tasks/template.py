"""What a template of embedded tasks gives, and how instances become tasks."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
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


def answer(*must_include: str, exact: str = "") -> dict[str, Any]:
    """Evaluation of a question."""
    wanted: dict[str, Any] = {"exact_match": exact} if exact else {"must_include": list(must_include)}
    return {
        "eval_types": ["string_match"],
        "reference_answers": wanted,
        "reference_url": "",
        "program_html": [],
        "string_note": "",
        "reference_answer_raw_annotation": exact or ", ".join(must_include),
    }


def at_url(url: str) -> dict[str, Any]:
    """Evaluation of finding a page."""
    return {
        "eval_types": ["url_match"],
        "reference_answers": None,
        "reference_url": url,
        "program_html": [],
        "url_note": "GOLD in PRED",
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


def text_of(selector: str) -> str:
    """A locator: the text of the first element that fits a CSS selector."""
    return f"document.querySelector('{selector}').innerText"
