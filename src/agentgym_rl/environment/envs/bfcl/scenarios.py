"""Tasks, tools and reference calls of the package `bfcl-eval`, read from its data files."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from agentgym_rl.environment.tools import Tool
from agentgym_rl.errors import ConfigError

CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
"""Categories of the multi-turn tasks, in the order of their items."""
DOMAINS = {
    "files": "GorillaFileSystem",
    "vehicle": "VehicleControlAPI",
    "trading": "TradingBot",
    "travel": "TravelAPI",
}
"""Subsets by the API that a task is about. Each task has further APIs."""
TEST_EVERY = 5
"""Every fifth scenario is a test item. The four variants of a scenario are all in the same split."""
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}
"""JSON types of the types that the package's documents of functions use."""

Calls = list[tuple[str, dict[str, Any]]]
"""Names and arguments."""


@dataclass(frozen=True, slots=True)
class Task:
    """One conversation."""

    id: str
    category: str
    domain: str
    requests: tuple[str, ...]
    """The user's messages. An empty one comes with functions that were held back."""
    solution: tuple[Calls, ...]
    """Calls of each turn. None of a turn in which the user asks for something that cannot be done yet."""
    classes: tuple[str, ...]
    initial: Mapping[str, Any]
    """State of each API at the start."""
    held_back: Mapping[int, tuple[str, ...]]
    """Functions that the agent gets in a later turn."""


@cache
def tasks() -> tuple[Task, ...]:
    """Return all tasks: those of the training split first, each split ordered by category."""
    by_category = {category: list(_read(category)) for category in CATEGORIES}
    return tuple(
        task
        for is_test in (False, True)
        for category in CATEGORIES
        for number, task in enumerate(by_category[category])
        if (number % TEST_EVERY == TEST_EVERY - 1) is is_test
    )


@cache
def splits() -> dict[str, range]:
    """Return the items of each split."""
    test = sum(int(task.id.rpartition("_")[2]) % TEST_EVERY == TEST_EVERY - 1 for task in tasks())
    return {"train": range(len(tasks()) - test), "test": range(len(tasks()) - test, len(tasks()))}


def _read(category: str) -> Iterator[Task]:
    answers = {row["id"]: row["ground_truth"] for row in _rows(f"multi_turn_{category}.json", "possible_answer")}
    for row in _rows(f"multi_turn_{category}.json"):
        classes = tuple(row["involved_classes"])
        yield Task(
            row["id"],
            category,
            next((domain for domain, api in DOMAINS.items() if api in classes), ""),
            tuple("\n".join(message["content"] for message in turn) for turn in row["question"]),
            tuple([_read_call(call, classes) for call in turn] for turn in answers[row["id"]]),
            classes,
            row["initial_config"],
            _held_back(row.get("missed_function", {}), answers[row["id"]]),
        )


def _held_back(rows: Mapping[str, list[str]], solution: list[list[str]]) -> dict[int, tuple[str, ...]]:
    """Return the functions that come with a later turn, without those that an earlier turn cannot do without."""
    used = {int(turn): " ".join(call for calls in solution[: int(turn)] for call in calls) for turn in rows}
    return {int(turn): tuple(n for n in names if f"{n}(" not in used[int(turn)]) for turn, names in rows.items()}


def _rows(suffix: str, folder: str = "") -> list[dict[str, Any]]:
    """Return the rows of the file whose name ends with `suffix`; its beginning is a version, such as BFCL_v4_."""
    files = resources.files("bfcl_eval") / "data"
    files = files / folder if folder else files
    names = sorted(file.name for file in files.iterdir() if file.name.endswith(suffix))
    if not names:
        raise ConfigError(f"environment bfcl: the package bfcl-eval should have data/{folder}/*{suffix}, it has none")
    return [json.loads(line) for line in (files / names[-1]).read_text(encoding="utf-8").splitlines() if line.strip()]


def _read_call(text: str, classes: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a reference call such as `sort('report.txt')`. Nothing is evaluated."""
    call = ast.parse(text.strip(), mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ConfigError(f"environment bfcl: a reference call should be NAME(ARGUMENTS), got {text!r:.80}")
    tool = next(tools[call.func.id] for tools in map(class_tools, classes) if call.func.id in tools)
    positional = zip(tool.parameters, call.args, strict=False)
    named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    arguments = {name: ast.literal_eval(value) for name, value in positional} | named
    return tool.name, {name: arguments[name] for name in tool.parameters if name in arguments}


@cache
def class_tools(api: str) -> dict[str, Tool]:
    """Return the tools of an API by name."""
    from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING

    rows = _rows(MULTI_TURN_FUNC_DOC_FILE_MAPPING[api], "multi_turn_func_doc")
    return {row["name"]: _tool(row) for row in rows}


@cache
def all_tools() -> tuple[Tool, ...]:
    """Return the tools of all APIs that the tasks use."""
    apis = sorted({api for task in tasks() for api in task.classes})
    return tuple(tool for api in apis for tool in class_tools(api).values())


def _tool(row: Mapping[str, Any]) -> Tool:
    description = row["description"].strip()
    return Tool.from_schema(row["name"], description if description.endswith(".") else f"{description}.", {
        **_json_schema(row["parameters"]), "required": row["parameters"].get("required", []),
    })  # fmt: skip


def _json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with JSON's types. Defaults are left to the function, whose own may differ in type."""
    converted: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "type":
            value = _TYPES.get(value, value)
        elif key == "properties":
            value = {name: _json_schema(part) for name, part in value.items()}
        elif key == "items":
            value = _json_schema(value)
        if value is not None and key not in ("default", "optional"):
            converted[key] = value
    return converted
