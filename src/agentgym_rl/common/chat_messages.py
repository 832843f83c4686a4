"""Messages with tool calls in the form of OpenAI's chat API, which chat templates and data sets use, too."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentgym_rl.types import Message, ToolCall

ROLES = ("system", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a content that have text, in the chat API and the Responses API."""

PLAYED_ACTION, PLAYED_CALLS = "played_action", "played_calls"
"""Keys of a turn's info: what an external program played, which the model's reply need not show."""


def to_openai(message: Message, *, arguments_as_text: bool = True) -> dict[str, Any]:
    """Return a message as a JSON object. Chat templates take arguments as objects, the API as text.

    A malformed call is part of the content, unless only its arguments are malformed and they are text anyway.
    """
    calls = [call for call in message.tool_calls or () if not call.error or (call.name and arguments_as_text)]
    malformed = [call.raw for call in message.tool_calls or () if call not in calls]
    row: dict[str, Any] = {"role": message.role, "content": "\n".join(t for t in (message.content, *malformed) if t)}
    if calls:
        row["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _arguments_text(call) if arguments_as_text else call.arguments,
                },
            }
            for call in calls
        ]
    if message.role == "tool":
        row["tool_call_id"] = message.tool_call_id
    return row


def _arguments_text(call: ToolCall) -> str:
    return call.raw or json.dumps(call.arguments, ensure_ascii=False)


def with_answers_of_the_user(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the results of malformed calls as texts of the user.

    A reply without a valid call is a text for the template, and Mistral's accept only the user after a text.
    """
    changed: list[Message] = []
    for message in messages:
        reply = next((m for m in reversed(changed) if m.role == "assistant"), None)
        if message.role != "tool" or reply is None or any(not call.error for call in reply.tool_calls or ()):
            changed.append(message)
        elif changed[-1].role == "user":  # several malformed calls
            changed[-1] = replace(changed[-1], content=f"{changed[-1].content}\n{message.content}")
        else:
            changed.append(Message("user", message.content))
    return changed


def from_openai(row: dict[str, Any]) -> Message:
    """Return the message of a JSON object. Raise ValueError, KeyError or TypeError if it is none."""
    role = row["role"]
    if role not in ROLES:
        raise ValueError(f"role must be one of {', '.join(ROLES)}, got {role!r}")
    content = row.get("content") or ""
    if isinstance(content, list):  # in parts, of which only text counts
        content = "".join(part["text"] for part in content if part.get("type", "text") in TEXT_PARTS)
    if not isinstance(content, str):
        raise TypeError(f"content must be text, got {type(content).__name__}")
    calls = row.get("tool_calls")
    return Message(
        role,
        content,
        tool_calls=[call_from_openai(call) for call in calls] if calls else None,
        tool_call_id=str(row.get("tool_call_id") or ""),
    )


def call_from_openai(row: dict[str, Any]) -> ToolCall:
    """Return a call. Arguments that are no JSON object make it malformed."""
    function = row["function"]
    text = function.get("arguments") or "{}"
    identifier = str(row.get("id") or "")
    try:
        arguments = clean_json(json.loads(text) if isinstance(text, str) else text)
        error = "" if isinstance(arguments, dict) else "the arguments must be a JSON object"
    except (ValueError, RecursionError) as problem:
        arguments, error = {}, f"the arguments are not valid JSON ({problem})"
    if error:
        return ToolCall(clean_json(str(function["name"])), {}, identifier, error, clean_json(str(text)))
    return ToolCall(clean_json(str(function["name"])), arguments, identifier)


def clean_json(value: Any) -> Any:
    """Return a decoded JSON value that can be written again: no lone surrogates, no infinite numbers."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return [clean_json(item) for item in value]
    if isinstance(value, dict):
        return {clean_json(key): clean_json(item) for key, item in value.items()}
    return value
