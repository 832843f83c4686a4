"""BFCL's multi-turn tasks: reference calls, verdicts that agree with its own checker, held-back functions."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import pytest

pytest.importorskip("bfcl_eval")

from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

from agentgym_rl.environment import catalog
from agentgym_rl.environment.envs.bfcl import scenarios
from agentgym_rl.environment.envs.tool_tasks import write_call
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Step, ToolCall

Turns = list[scenarios.Calls]
_plays = itertools.count()


def make() -> Any:
    return catalog.load("bfcl")()


def item_of(identifier: str) -> int:
    return [task.id for task in scenarios.tasks()].index(identifier)


def oracle_play(env: Any, item: int, turns: int = 60) -> Step:
    env.reset(item)
    for _ in range(turns):
        step: Step = env.step(env.oracle())
        assert step.info["valid"] is True, (item, step.observation)
        if step.done:
            return step
    raise AssertionError(f"item {item} does not end")


@pytest.mark.parametrize("items", [range(0, 800, 20), pytest.param(range(800), marks=pytest.mark.long)])
def test_the_reference_calls_solve_every_item(items: range) -> None:
    env = make()
    for item in items:
        step = oracle_play(env, item)
        assert (step.reward, step.info["success"]) == (1.0, True), (item, step.observation)


def test_items_are_scenarios_in_four_variants_that_share_a_split() -> None:
    tasks, splits = scenarios.tasks(), scenarios.splits()
    assert {name: len(items) for name, items in splits.items()} == {"train": 640, "test": 160}
    numbers = {
        name: {(tasks[item].category, int(tasks[item].id.rpartition("_")[2])) for item in items}
        for name, items in splits.items()
    }
    assert {number for _, number in numbers["test"]} == set(range(4, 200, 5))
    assert not {number for _, number in numbers["train"]} & {number for _, number in numbers["test"]}
    assert {category for category, _ in numbers["test"]} == set(scenarios.CATEGORIES)


def python_call(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def bfcl_verdict(task: scenarios.Task, turns: Turns) -> bool:
    """Return what BFCL's own checker says of calls, each in a step of its own."""
    entry = {"id": task.id, "initial_config": task.initial, "involved_classes": list(task.classes)}
    played = [[[python_call(*call)] for call in turn] for turn in turns]
    reference = [[python_call(*call) for call in turn] for turn in task.solution]
    verdict = multi_turn_checker(played, reference, entry, "multi_turn", f"play{next(_plays)}")
    return bool(verdict["valid"])


def our_verdict(env: Any, item: int, turns: Turns) -> bool:
    env.reset(item)
    for turn in turns:
        for name, arguments in turn:
            env.step(write_call(name, arguments))
        step = env.step("That was it.")
        if step.done:
            return bool(step.info["success"])
    raise AssertionError("the conversation does not end")


def variations(task: scenarios.Task) -> dict[str, Turns]:
    """Return calls near the reference, right and wrong."""
    reference = [list(turn) for turn in task.solution]
    last = max(number for number, turn in enumerate(reference) if turn)
    harmless = ("pwd", {}) if "GorillaFileSystem" in task.classes else ("displayCarStatus", {"option": "fuel"})
    return {
        "reference": reference,
        "no calls": [[] for _ in reference],
        "the last call is missing": [turn[:-1] if number == last else turn for number, turn in enumerate(reference)],
        "all calls twice": [[call for call in turn for _ in range(2)] for turn in reference],
        "calls in reverse": [turn[::-1] for turn in reference],
        "a harmless call more": [[harmless, *turn] if turn else turn for turn in reference],
        "calls also where nothing can be done": [turn or [harmless] for turn in reference],
        "everything in the first turn": [[c for t in reference for c in t], *([] for _ in reference[1:])],
    }


@pytest.mark.parametrize("number", [0, 7, 33, 52, 88])
@pytest.mark.parametrize("category", ["base", "miss_func", "miss_param"])
def test_verdicts_are_those_of_the_checker_of_bfcl(category: str, number: int) -> None:
    item = item_of(f"multi_turn_{category}_{number}")
    task, env = scenarios.tasks()[item], make()
    verdicts = {name: our_verdict(env, item, turns) for name, turns in variations(task).items()}
    assert verdicts == {name: bfcl_verdict(task, turns) for name, turns in variations(task).items()}
    assert verdicts["reference"]
    assert not verdicts["no calls"]


def test_a_held_back_function_comes_with_a_later_message() -> None:
    env = make()
    env.reset(item_of("multi_turn_miss_func_0"))
    assert "sort" not in env.item_tools()
    assert "There is no tool 'sort'" in env.step(write_call("sort", {"file_name": "final_report.pdf"})).observation
    message = ""
    while "sort" not in env.item_tools():
        step = env.step(env.oracle())
        message = step.observation
        assert not step.done
    schema, prompt = message.splitlines()
    assert json.loads(schema)["name"] == "sort"
    assert prompt == "I have updated some more functions you can choose from. What about now?"


async def test_only_the_functions_of_the_item_are_offered() -> None:
    pool = LocalPool({"bfcl": catalog.load("bfcl")}, action_format="tool")
    session = await pool.open("bfcl")
    await session.reset(item_of("multi_turn_base_0"))
    names = {tool["function"]["name"] for tool in session.tools}
    assert {"cd", "post_tweet"} <= names
    assert "book_flight" not in names
    calls = [ToolCall("cd", {"folder": "document"}), ToolCall("ls"), ToolCall("book_flight")]
    step = await session.call(calls)
    assert json.loads(step.results[1]) == {"current_directory_content": ["final_report.pdf", "previous_report.pdf"]}
    assert step.results[2].startswith("Invalid call: there is no tool 'book_flight'")
    assert (await session.call([], "It is done.")).info["success"] is False
    await pool.close()


def test_malformed_and_failing_calls_are_answered() -> None:
    env = make()
    env.reset(item_of("multi_turn_base_0"))
    for action, answer in (
        ('{"name": "cd"', "The action is not JSON"),
        (write_call("cd", {"place": "x"}), "Error during execution: "),
        (write_call("_load_scenario", {"scenario": {}}), "There is no tool '_load_scenario'"),
        ("", "The reply is empty"),
    ):
        step = env.step(action)
        assert answer in step.observation
        assert step.info["valid"] is False
        assert not step.done
    listed = [json.loads(line) for line in env.step("help").observation.splitlines()]
    assert {row["name"] for row in listed} == set(env.item_tools())
    assert len(listed) == len(env.item_tools())


def test_a_computation_without_end_is_refused() -> None:
    env = make()
    env.reset(next(item for item, task in enumerate(scenarios.tasks()) if "MathAPI" in task.classes))
    for name, arguments in (
        ("power", {"base": 9, "exponent": 10**9}),
        ("logarithm", {"value": 2, "base": 10, "precision": 10**9}),
        ("power", {"base": 10**40, "exponent": 900}),
    ):
        step = env.step(write_call(name, arguments))
        assert "must be at most" in step.observation
        assert step.info["valid"] is False


def test_a_missing_package_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bfcl_eval", None)
    with pytest.raises(ConfigError) as error:
        catalog.load("bfcl")
    assert str(error.value) == (
        "environment 'bfcl' needs the package 'bfcl_eval': "
        "pip install 'agentgym-rl[bfcl]' && pip install --no-deps bfcl-eval"
    )
