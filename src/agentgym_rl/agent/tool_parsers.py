"""Tool calls in the text of a reply: one pure parser for each format that chat templates use.

A parser returns the text around the calls and the calls in order. A malformed call is a call with an error, which the
environment answers, so that the agent can learn from it. Nothing here evaluates model output as code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from agentgym_rl.common.chat_messages import clean_json
from agentgym_rl.types import Message, ToolCall

Parsed = tuple[str, list[ToolCall]]
_DECODER = json.JSONDecoder()

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


def parse_hermes(reply: str) -> Parsed:
    """Parse Hermes and Qwen2.5: `<tool_call>{"name": "get", "arguments": {"item": "log"}}</tool_call>`."""
    return _outside(reply, _HERMES), [_from_json(match[1], match[0]) for match in _HERMES.finditer(reply)]


_FUNCTION = re.compile(r"\s*<function=([^>]*)>(.*?)(?:</function>\s*|$)", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>]*)>(.*?)</parameter>\s*", re.DOTALL)


def parse_qwen3_xml(reply: str) -> Parsed:
    """Parse Qwen3-Coder: `<tool_call><function=get><parameter=item>log</parameter></function></tool_call>`.

    All arguments are text. The environment reads numbers from it as its schema says.
    """
    return _outside(reply, _HERMES), [_from_xml(match[1], match[0]) for match in _HERMES.finditer(reply)]


def _from_xml(block: str, raw: str) -> ToolCall:
    function = _FUNCTION.fullmatch(block)
    if function is None or not function[1].strip():
        return _malformed("a call needs the form <function=NAME>...</function>", raw)
    arguments: dict[str, Any] = {}
    position = 0
    while parameter := _PARAMETER.match(function[2], position):
        arguments[parameter[1].strip()] = _xml_value(parameter[2])
        position = parameter.end()
    if rest := function[2][position:].strip():
        return _malformed(f"an argument needs the form <parameter=NAME>...</parameter>, got {rest[:60]!r}", raw)
    return ToolCall(function[1].strip(), arguments)


def _xml_value(text: str) -> str:
    """Return a value without the line breaks that the template puts around it."""
    return text.removeprefix("\n").removesuffix("\n") if text.startswith("\n") else text.strip()


_PYTHON_TAG = "<|python_tag|>"
_SEPARATOR = re.compile(r"[\s;]*")


def parse_llama3(reply: str) -> Parsed:
    """Parse Llama 3: the reply is `{"name": "get", "parameters": {"item": "log"}}`, or several of them with `;`.

    Text may stand before the calls only if `<|python_tag|>` separates them.
    """
    content, tag, block = reply.partition(_PYTHON_TAG)
    if not tag:
        content, block = "", reply
        if not reply.lstrip().startswith("{"):
            return reply.strip(), []
    calls: list[ToolCall] = []
    rest = block.strip()
    while rest:
        value, end, error = _decode(rest)
        if error:
            calls.append(_malformed(error, rest))
            break
        calls.append(_checked(value, rest[:end]))
        rest = _SEPARATOR.sub("", rest[end:], count=1)
    return content.strip(), calls or [_malformed("a call needs a JSON object", reply)]


_MISTRAL = "[TOOL_CALLS]"
_ID = re.compile("[A-Za-z0-9]{9}")
"""Ids that Mistral's templates accept. Another one is replaced (`numbered`), as if the model had written none."""
_NAMED_CALL = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?\s*(?=\{)")


def parse_mistral(reply: str) -> Parsed:
    """Parse Mistral: `[TOOL_CALLS][{"name": "get", "arguments": {"item": "log"}, "id": "abcdef123"}]`.

    Newer models write `[TOOL_CALLS]get[ARGS]{"item": "log"}`, once for each call.
    """
    content, tag, rest = reply.partition(_MISTRAL)
    calls: list[ToolCall] = []
    for block in rest.split(_MISTRAL) if tag else ():
        if named := _NAMED_CALL.match(block):
            arguments, end, error = _decode(block[named.end() :])
            error = error or _trailing(block[named.end() + end :])
            call = {"name": named[1], "arguments": arguments, "id": named[2] or ""}
            calls.append(_malformed(error, block) if error else _checked(call, block))
            continue
        values, end, error = _decode(block)
        error = error or _trailing(block.lstrip()[end:])
        if error or not isinstance(values, list) or not values:
            calls.append(_malformed(error or "calls need the form [{...}, {...}]", block))
        else:
            calls += [_checked(value, json.dumps(value, ensure_ascii=False)) for value in values]
    return content.strip(), calls


PARSERS: dict[str, Callable[[str], Parsed]] = {
    "hermes": parse_hermes,
    "qwen3_xml": parse_qwen3_xml,
    "mistral": parse_mistral,
    "llama3": parse_llama3,
}
"""Parsers by format. A template's format is the first that reads back the calls it renders."""


def numbered(calls: Sequence[ToolCall], messages: Sequence[Message]) -> list[ToolCall]:
    """Return the calls of the next reply, each with an id. It has nine letters and digits, as Mistral requires."""
    first = sum(len(message.tool_calls or ()) for message in messages)
    return [call if call.id else replace(call, id=f"call{first + i:05d}") for i, call in enumerate(calls)]


def _outside(reply: str, blocks: re.Pattern[str]) -> str:
    return "\n".join(part for text in blocks.sub("\0", reply).split("\0") if (part := text.strip()))


def _from_json(block: str, raw: str) -> ToolCall:
    value, end, error = _decode(block)
    error = error or _trailing(block.lstrip()[end:])
    return _malformed(error, raw) if error else _checked(value, raw)


def _decode(text: str) -> tuple[Any, int, str]:
    """Return (value, end, error) of the JSON at the start of a text. `end` counts from the first visible character."""
    text = text.lstrip()
    try:
        value, end = _DECODER.raw_decode(text)
        value = clean_json(value)
    except json.JSONDecodeError as error:
        return None, 0, f"not valid JSON ({error.msg} at character {error.pos}): {text[:60]!r}"
    except (ValueError, RecursionError) as error:
        return None, 0, f"not valid JSON ({type(error).__name__})"
    return value, end, ""


def _trailing(rest: str) -> str:
    return f"unexpected text after the JSON: {rest.strip()[:60]!r}" if rest.strip() else ""


def _checked(value: Any, raw: str) -> ToolCall:
    """Return the call that a JSON value stands for. Llama writes `parameters` for `arguments`."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = {**value["function"], "id": value.get("id", "")}
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return _malformed('a call needs a JSON object with a "name"', raw)
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        text = arguments.strip()
        arguments, end, error = _decode(text)
        if error:
            return _malformed(f"the arguments are {error}", raw)
        if unexpected := _trailing(text[end:]):
            return _malformed(f"the arguments have {unexpected}", raw)
    if not isinstance(arguments, dict):
        return _malformed(f"the arguments must be a JSON object, got {json.dumps(arguments)[:60]}", raw)
    identifier = value.get("id")
    valid_id = identifier if isinstance(identifier, str) and _ID.fullmatch(identifier) else ""
    return ToolCall(value["name"], arguments, valid_id)


def _malformed(error: str, raw: str) -> ToolCall:
    return ToolCall("", {}, error=error, raw=raw.strip())
