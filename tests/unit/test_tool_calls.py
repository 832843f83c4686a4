"""Tool calls in replies: what models write, read by pure functions, malformed calls included."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_for_tests import few

from agentgym_rl.agent.tool_parsers import PARSERS, numbered, parse_hermes, parse_llama3, parse_mistral, parse_qwen3_xml
from agentgym_rl.types import Message, Task, ToolCall, Trajectory

GET = ToolCall("get", {"count": 2, "item": "oak log"})
LOOK = ToolCall("inventory", {})

HERMES: list[tuple[str, str, list[ToolCall]]] = [
    ('<tool_call>\n{"name": "get", "arguments": {"count": 2, "item": "oak log"}}\n</tool_call>', "", [GET]),
    ('<tool_call>{"arguments": {"count": 2, "item": "oak log"}, "name": "get"}</tool_call>', "", [GET]),
    ('I need logs.\n<tool_call>\n{"name": "inventory", "arguments": {}}\n</tool_call>', "I need logs.", [LOOK]),
    ('<tool_call>\n{"name": "inventory"}\n</tool_call>', "", [LOOK]),
    (
        '<tool_call>\n{"name": "get", "arguments": {"count": 2, "item": "oak log"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "inventory", "arguments": {}}\n</tool_call>',
        "",
        [GET, LOOK],
    ),
    (
        '<tool_call>\n{"name": "get", "arguments": "{\\"count\\": 2, \\"item\\": \\"oak log\\"}"}\n</tool_call>',
        "",
        [GET],
    ),
    ('<tool_call>\n{"name": "inventory", "arguments": {}}', "", [LOOK]),
    ("<think>\nLook first.\n</think>\n\nget 2 oak log", "<think>\nLook first.\n</think>\n\nget 2 oak log", []),
    ('{"name": "inventory", "arguments": {}}', '{"name": "inventory", "arguments": {}}', []),
    ("", "", []),
]
QWEN3_XML: list[tuple[str, str, list[ToolCall]]] = [
    (
        "<tool_call>\n<function=get>\n<parameter=count>\n2\n</parameter>\n<parameter=item>\noak log\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [ToolCall("get", {"count": "2", "item": "oak log"})],
    ),
    ("Let me look.\n<tool_call>\n<function=inventory>\n</function>\n</tool_call>", "Let me look.", [LOOK]),
    (
        "<tool_call> <function=get> <parameter=item> oak log </parameter> </function> </tool_call>",
        "",
        [ToolCall("get", {"item": "oak log"})],
    ),
    (
        "<tool_call>\n<function=run>\n<parameter=code>\n  if x < 1:\n    print('<b>')\n</parameter>\n</function>\n"
        "</tool_call>",
        "",
        [ToolCall("run", {"code": "  if x < 1:\n    print('<b>')"})],
    ),
    ("<tool_call>\n<function=inventory>", "", [LOOK]),
    ("No tool is needed.", "No tool is needed.", []),
]
LLAMA3: list[tuple[str, str, list[ToolCall]]] = [
    ('{"name": "get", "parameters": {"count": 2, "item": "oak log"}}', "", [GET]),
    ('{"name": "get", "arguments": {"count": 2, "item": "oak log"}}', "", [GET]),
    ('<|python_tag|>{"name": "get", "parameters": {"count": 2, "item": "oak log"}}', "", [GET]),
    ('{"name": "get", "parameters": {"count": 2, "item": "oak log"}}; {"name": "inventory", "parameters": {}}', "",
     [GET, LOOK]),
    ('{"name": "get", "parameters": {"count": 2, "item": "oak log"}};\r\n{"name": "inventory", "parameters": {}}', "",
     [GET, LOOK]),
    ('{"type": "function", "name": "inventory", "parameters": {}}', "", [LOOK]),
    ('Logs first.<|python_tag|>{"name": "inventory", "parameters": {}}', "Logs first.", [LOOK]),
    ("I would get logs first.", "I would get logs first.", []),
]  # fmt: skip
MISTRAL: list[tuple[str, str, list[ToolCall]]] = [
    ('[TOOL_CALLS][{"name": "get", "arguments": {"count": 2, "item": "oak log"}, "id": "Vgcw7Aw0K"}]', "",
     [ToolCall("get", {"count": 2, "item": "oak log"}, "Vgcw7Aw0K")]),
    ('[TOOL_CALLS] [{"name": "get", "arguments": {"count": 2, "item": "oak log"}}, '
     '{"name": "inventory", "arguments": {}}]', "", [GET, LOOK]),
    ('Wait.[TOOL_CALLS][{"name": "inventory", "arguments": {}}]', "Wait.", [LOOK]),
    ('[TOOL_CALLS]get[ARGS]{"count": 2, "item": "oak log"}[TOOL_CALLS]inventory[ARGS]{}', "", [GET, LOOK]),
    ('[TOOL_CALLS]inventory[CALL_ID]abcdef123[ARGS]{}', "", [ToolCall("inventory", {}, "abcdef123")]),
    ('[TOOL_CALLS]get{"count": 2, "item": "oak log"}', "", [GET]),
    ("Hello!", "Hello!", []),
]  # fmt: skip
TABLES = {"hermes": HERMES, "qwen3_xml": QWEN3_XML, "llama3": LLAMA3, "mistral": MISTRAL}


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, table in TABLES.items() for row in table])
def test_calls_are_read_as_models_write_them(name: str, row: tuple[str, str, list[ToolCall]]) -> None:
    reply, content, calls = row
    assert PARSERS[name](reply) == (content, calls)


@pytest.mark.parametrize(
    ("name", "reply", "error"),
    [
        ("hermes", '<tool_call>{"name": "get", "arguments": {"count": 2</tool_call>', "not valid JSON"),
        ("hermes", "<tool_call>get 2 oak log</tool_call>", "not valid JSON"),
        ("hermes", "<tool_call></tool_call>", "not valid JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '"name"'),
        ("hermes", '<tool_call>["get"]</tool_call>', '"name"'),
        ("hermes", '<tool_call>{"name": "get", "arguments": [2]}</tool_call>', "must be a JSON object"),
        ("hermes", '<tool_call>{"name": "get", "arguments": "two"}</tool_call>', "the arguments are not valid JSON"),
        ("hermes", '<tool_call>{"name": "get", "arguments": "{} two"}</tool_call>', "arguments have unexpected text"),
        ("hermes", '<tool_call>{"name": "get"} and more</tool_call>', "unexpected text after the JSON: 'and more'"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
        ("qwen3_xml", '<tool_call>{"name": "get"}</tool_call>', "<function=NAME>"),
        ("qwen3_xml", "<tool_call><function=></function></tool_call>", "<function=NAME>"),
        ("qwen3_xml", "<tool_call><function=get>2 logs</function></tool_call>", "<parameter=NAME>.*'2 logs'"),
        ("qwen3_xml", "<tool_call><function=get><parameter=n>2</function></tool_call>", "<parameter=NAME>"),
        ("llama3", '{"name": "get", "parameters": {', "not valid JSON"),
        ("llama3", '<|python_tag|>brave_search.call(query="logs")', "not valid JSON"),
        ("llama3", '{"type": "function"}', '"name"'),
        ("llama3", "<|python_tag|>", "needs a JSON object"),
        ("mistral", '[TOOL_CALLS][{"name": "get"', "not valid JSON"),
        ("mistral", "[TOOL_CALLS][]", "calls need the form"),
        ("mistral", '[TOOL_CALLS]get[ARGS]{"count": 2', "not valid JSON"),
        ("mistral", '[TOOL_CALLS][{"name": "get"}] done', "unexpected text"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(name: str, reply: str, error: str) -> None:
    _, (call,) = PARSERS[name](reply)
    assert re.search(error, call.error)
    assert call.raw
    assert call.raw in reply, "the text is kept as it was sampled"
    assert (call.name, call.arguments) == ("", {})


@pytest.mark.parametrize("repeated", ["<parameter=n>", "\n\n", "<function=get>"])
def test_a_reply_that_repeats_itself_is_read_at_once(repeated: str) -> None:
    started = time.process_time()
    _, (call,) = parse_qwen3_xml("<tool_call><function=get>" + repeated * 20_000 + "two")
    assert call.error
    assert time.process_time() - started < 10, "the time grows with the length, not with its square (minutes)"


def test_a_malformed_call_does_not_hide_the_others() -> None:
    content, calls = parse_hermes('Hm.<tool_call>{"name"</tool_call><tool_call>{"name": "inventory"}</tool_call>')
    assert content == "Hm."
    assert bool(calls[0].error) and calls[1] == LOOK  # noqa: PT018 - one pair
    _, calls = parse_llama3('{"name": "inventory", "parameters": {}}; {"name"')
    assert calls[0] == LOOK
    assert calls[1].error


@pytest.mark.parametrize("parse", PARSERS.values())
@few(60)
@given(reply=st.text(max_size=80) | st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "x"', "}", "[",
    "<function=f>", "</function>", "<parameter=p>", "</parameter>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "x",
    '"\\ud800"', "1e999", ":", ",", "NaN"])).map("".join))  # fmt: skip
def test_no_reply_breaks_a_parser_or_the_file_of_episodes(parse: Any, reply: str) -> None:
    content, calls = parse(reply)
    written = Trajectory("t", Task("e", 0), [Message("assistant", content, tool_calls=calls)]).to_json()
    assert Trajectory.from_json(written).messages[0].tool_calls == calls
    json.loads(written.encode(), parse_constant=pytest.fail)


def test_calls_get_ids_that_every_template_accepts() -> None:
    earlier = [Message("assistant", "", tool_calls=numbered([GET, LOOK], []))]
    calls = numbered([GET, ToolCall("x", {}, "given")], earlier)
    assert [call.id for call in earlier[0].tool_calls or ()] == ["call00000", "call00001"]
    assert [call.id for call in calls] == ["call00002", "given"]
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls[:1])


def test_old_trajectory_files_load() -> None:
    message = {"role": "assistant", "content": "go", "token_ids": [1], "logprobs": [-0.5], "version": 0}
    row = {"id": "t", "env": "e", "item": 0, "messages": [message], "rewards": [0.0], "infos": [{}], "stop": "done",
           "error": None, "horizon": 3, "seconds": 0.1}  # fmt: skip
    trajectory = Trajectory.from_json(json.dumps(row))
    assert trajectory.tools == []
    assert trajectory.messages[0].tool_calls is None
    assert json.loads(trajectory.to_json()) == row, "an episode without tools is written as before"


def test_parsers_are_pure_functions_of_the_reply() -> None:
    reply = HERMES[4][0]
    assert parse_hermes(reply) == parse_hermes(reply)
    assert parse_mistral(reply)[1] == parse_llama3(reply)[1] == []
    assert parse_qwen3_xml(reply)[1][0].error
