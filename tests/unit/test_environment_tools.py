"""Tools of environments: schemas, calls as text actions and back, local and over HTTP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from envs_for_tests import Counting
from servers_for_tests import server_in_thread

from agentgym_rl.environment import catalog
from agentgym_rl.environment.base import HasActions
from agentgym_rl.environment.client import EnvClient
from agentgym_rl.environment.envs.sciworld.gold import stored_paths
from agentgym_rl.environment.pool import LocalPool, RemotePool
from agentgym_rl.environment.tools import ACT, BadCall, Tool, call_of, play_calls
from agentgym_rl.errors import EnvError
from agentgym_rl.types import Step, ToolCall

CRAFT = Tool(
    "craft",
    "Craft.",
    "craft {count} {item} using {parts}",
    {"count": {"type": "integer"}, "item": {"type": "string"}, "parts": {"type": "array"}},
)
TYPE = Tool(
    "type",
    "Type.",
    "type [{id}] [{text}] [{enter}]",
    {"id": {"type": "integer"}, "text": {"type": "string"}, "enter": {"type": "integer", "enum": [0, 1], "default": 1}},
)
STRUCTURED = Tool("query", "Ask.", "", {"filter": {"type": "object"}, "exact": {"type": "boolean", "default": False}})

BY_TEXT = {"nim", "debate"}
"""Games of several roles, which act by text."""


@pytest.mark.parametrize(
    ("tool", "arguments", "action"),
    [
        (CRAFT, {"count": 4, "item": "stick", "parts": ["2 planks"]}, "craft 4 stick using 2 planks"),
        (CRAFT, {"count": 1, "item": "bed", "parts": ["3 wool", "3 planks"]}, "craft 1 bed using 3 wool, 3 planks"),
        (TYPE, {"id": 7, "text": "a [lamp]", "enter": 0}, "type [7] [a [lamp]] [0]"),
        (ACT, {"action": "look around"}, "look around"),
        (Tool("stop", "Stop.", "stop [{answer}]", {"answer": {"type": "string", "default": ""}}), {"answer": ""},
         "stop []"),
        (STRUCTURED, {"filter": {"a": [1]}, "exact": True},
         '{"name": "query", "arguments": {"filter": {"a": [1]}, "exact": true}}'),
    ],
)  # fmt: skip
def test_a_call_stands_for_a_text_action_and_back(tool: Tool, arguments: dict[str, Any], action: str) -> None:
    assert tool.action_of(arguments) == action
    assert call_of([tool], action, "env") == ToolCall(tool.name, arguments)


def test_arguments_that_came_as_text_are_read_by_their_schema() -> None:
    """Qwen3-Coder writes every argument as text."""
    assert CRAFT.action_of({"count": "4", "item": " stick ", "parts": '["2 planks"]'}) == "craft 4 stick using 2 planks"
    assert (
        CRAFT.action_of({"count": "4", "item": "stick", "parts": "2 oak, 1 log"}) == "craft 4 stick using 2 oak, 1 log"
    )
    assert TYPE.action_of({"id": "7", "text": 42}) == "type [7] [42] [1]"
    assert json.loads(STRUCTURED.action_of({"filter": '{"a": 1}', "exact": "true"}))["arguments"] == {
        "filter": {"a": 1},
        "exact": True,
    }


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "craft needs the argument count, item, parts"),
        ({"count": 1, "item": "x"}, "craft needs the argument parts"),
        ({"count": "two", "item": "x", "parts": []}, "craft needs an integer as count, got '\"two\"'"),
        ({"count": True, "item": "x", "parts": []}, "an integer as count, got 'true'"),
        ({"count": 1.5, "item": "x", "parts": []}, "an integer as count"),
        ({"count": 1, "item": ["x"], "parts": []}, "a string as item"),
        ({"count": 1, "item": None, "parts": []}, "a string as item, got 'null'"),
        ({"count": 1, "item": "x", "parts": [{}]}, "an array as parts"),
        ({"count": 1, "item": "x", "parts": [], "speed": 2}, "no argument 'speed': it takes count, item, parts"),
    ],
)
def test_arguments_outside_the_schema_are_refused_with_the_reason(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadCall) as error:
        CRAFT.action_of(arguments)
    assert complaint in str(error.value)


def test_an_action_without_a_tool_is_an_error() -> None:
    with pytest.raises(EnvError, match="env has no tool for the action 'jump': its tools are craft, type"):
        call_of([CRAFT, TYPE], "jump", "env")


@pytest.mark.parametrize("name", sorted(set(catalog.CATALOG) - {"webarena", "sciworld"} - BY_TEXT))
def test_every_environment_offers_its_actions_as_tools(name: str) -> None:
    env = catalog.load(name)()
    tools: Sequence[Tool] = env.tools()  # type: ignore[attr-defined]
    by_name = {tool.name: tool for tool in tools}
    assert len(by_name) == len(tools)
    for item in list(env.splits["test"])[:5]:
        env.reset(item)
        for _ in range(6):
            oracle = env.oracle().rpartition("</think>\n")[2]  # type: ignore[attr-defined]
            for action in [*(env.actions() if isinstance(env, HasActions) else []), oracle]:
                call = call_of(tools, action, name, getattr(env, "takes_messages", False))
                if call is None:
                    assert not action.startswith("{"), "a message"
                    continue
                assert by_name[call.name].action_of(call.arguments) == action
            if env.step(oracle).done:
                break
    env.close()


@pytest.mark.parametrize("name", sorted(set(catalog.CATALOG) - BY_TEXT))
def test_schemas_are_those_of_chat_apis(name: str) -> None:
    for tool in catalog.load(name).tools():  # type: ignore[attr-defined]
        schema = tool.schema()
        assert schema["type"] == "function"
        assert schema["function"]["description"].endswith(".")
        parameters = schema["function"]["parameters"]
        assert set(parameters["required"]) <= set(parameters["properties"])
        assert json.loads(json.dumps(schema)) == schema
        assert Tool.from_wire(json.loads(json.dumps(tool.to_wire())), "test") == tool


def test_sciworlds_gold_actions_have_calls() -> None:
    tools = catalog.load("sciworld").tools()  # type: ignore[attr-defined]
    by_name = {tool.name: tool for tool in tools}
    actions = sorted({action for path in stored_paths().values() for action in path})
    calls = [call for action in actions if (call := call_of(tools, action, "sciworld")) is not None]
    assert [by_name[call.name].action_of(call.arguments) for call in calls] == actions
    assert sum(call.name == "act" for call in calls) < len(calls) / 10, "most actions have a tool of their own"


def test_webarenas_forms_have_calls() -> None:
    tools = catalog.load("webarena").tools()  # type: ignore[attr-defined]
    for action in (
        *("click [12]", "type [7] [lamp] [1]", "type [7] [lamp] [0]", "hover [3]", "press [Ctrl+a]", "scroll [down]"),
        *(
            "new_tab",
            "tab_focus [1]",
            "close_tab",
            "goto [http://x/y]",
            "go_back",
            "go_forward",
            "stop [42]",
            "stop []",
        ),
    ):
        call = call_of(tools, action, "webarena")
        assert call is not None
        assert {tool.name: tool for tool in tools}[call.name].action_of(call.arguments) == action


class Taking(Counting):
    """The counting game with tools, one of them structured."""

    name: ClassVar[str] = "taking"

    @classmethod
    def tools(cls) -> Sequence[Tool]:
        return (Tool("count", "Count.", "{way}", {"way": {"type": "string"}}), STRUCTURED)

    def step(self, text: str) -> Step:
        return Step(f"asked {json.loads(text)['arguments']}") if text.startswith("{") else super().step(text)


async def test_remote_sessions_have_the_tools_of_local_ones() -> None:
    with server_in_thread({"taking": Taking, "counting": Counting}) as server:
        local = LocalPool({"taking": Taking, "counting": Counting}, action_format="tool")
        urls = {name: f"{server.url}/{name}" for name in ("taking", "counting")}
        remote = RemotePool(urls, action_format="tool")
        for pool in (local, remote):
            session = await pool.open("taking")
            assert [tool["function"]["name"] for tool in session.tools] == ["count", "query"]
            await session.reset(3)
            step = await session.call([ToolCall("count", {"way": "up"}), ToolCall("query", {"filter": {"x": 1}})])
            assert step.results == ["You are at 1.", "asked {'filter': {'x': 1}, 'exact': False}"]
            assert step.info["state_key"] == "1"
            assert (await session.step("up")).observation == "You are at 2.", "plain text still works"
            assert session.call_of("up") == ToolCall("count", {"way": "up"})
            invalid = await session.call([ToolCall("count", {"way": "left"}), ToolCall("count")])
            assert invalid.results == ["I do not know 'left'.", "Invalid call: count needs the argument way."]
            assert invalid.info["valid"] is False
            other = await pool.open("counting")
            assert [tool["function"]["name"] for tool in other.tools] == ["act"], "tools for free"
            await other.reset(0)
            assert (await other.call([ToolCall("act", {"action": "up"})])).observation == "You are at 1."
            await pool.close()
        async with EnvClient(urls["taking"]) as client:
            info = await client.info()
        assert "tools" in info["capabilities"]
        assert info["tools"][0]["action"] == "{way}"
        text_only = RemotePool(urls)
        session = await text_only.open("taking")
        assert session.tools == []
        await text_only.close()


async def test_a_server_without_tools_in_its_info_offers_act() -> None:
    from agentgym_rl.environment.pool import _toolset

    assert list(_toolset({"instruction": ""}, "http://x")) == [ACT]
    with pytest.raises(EnvError, match="must list tools as JSON schemas"):
        _toolset({"tools": [{"name": "x"}]}, "http://x")


async def test_rewards_of_parallel_calls_add_up() -> None:
    steps = iter([Step("a", 0.25, info={"valid": True}), Step("b", 0.5, done=True, info={"success": True})])

    async def step(action: str) -> Step:
        return next(steps)

    played = await play_calls([ACT], [ToolCall("act", {"action": "x"})] * 3, step, {"state_key": "s"})
    assert (played.reward, played.done, played.info) == (0.75, True, {"success": True})
    assert played.results == ["a", "b", "Not played: the episode has ended."]
    nothing = await play_calls([ACT], [], step, {"state_key": "s"})
    assert nothing.info == {"state_key": "s", "valid": False}
    assert nothing.results == []


FOREIGN = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "count": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        "labels": {"type": ["array", "null"], "items": {"type": "object"}},
        "owner": {"$ref": "#/$defs/Owner"},
        "anything": {},
    },
    "required": ["title"],
    "$defs": {"Owner": {"type": "object"}},
}
"""A schema as other packages write it: optional arguments without a default, unions, references."""


def test_a_tool_keeps_the_json_schema_of_another_package() -> None:
    tool = Tool.from_schema("note", "Write.", FOREIGN)
    assert tool.schema()["function"]["parameters"] == FOREIGN
    assert Tool.from_wire(json.loads(json.dumps(tool.to_wire())), "test") == tool
    for arguments in (
        {"title": "a"},
        {"title": "a", "count": 3, "labels": [{"name": "x"}, [1]], "owner": {"id": 1}, "anything": [None]},
        {"title": "a", "labels": None},
    ):
        called = json.loads(tool.action_of(arguments))
        assert called == {"name": "note", "arguments": {"count": None, **arguments}}
    assert json.loads(tool.action_of({"title": "a", "count": "3"}))["arguments"]["count"] == 3, "XML calls are text"
    for wrong, complaint in (
        ({}, "note needs the argument title"),
        ({"title": None}, "note needs a string as title, got 'null'"),
        ({"title": "a", "count": "x"}, "note needs an integer or a null as count"),
        ({"title": "a", "labels": 3}, "note needs an array or a null as labels"),
        ({"title": "a", "colour": 1}, "note has no argument 'colour'"),
    ):
        with pytest.raises(BadCall, match=complaint):
            tool.action_of(wrong)
    free = Tool.from_schema("log", "Log.", {"type": "object", "additionalProperties": True})
    assert json.loads(free.action_of({"x": [1]}))["arguments"] == {"x": [1]}
