"""Actions of environments with tools: text that holds one JSON object {"name": ..., "arguments": {...}}."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from agentgym_rl.environment.tools import BadCall, Tool
from agentgym_rl.errors import did_you_mean

MAX_ACTION_CHARS = 100_000
"""Longest action that is parsed."""
MAX_RESULT_CHARS = 10_000
"""Longest result of a call that the agent reads."""
_TAGS = re.compile(r"^\s*(?:```(?:json)?|<tool_call>)(.*?)(?:```|</tool_call>)\s*$", re.DOTALL)


def read_call(text: str, names: Iterable[str]) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of the call in `text`. Raise BadCall if there is none.

    One fence or one pair of <tool_call> tags around the object is ignored.
    """
    call = read_object(text, 'a call is written as {"name": "...", "arguments": {...}}')
    name, arguments = call.get("name"), call.get("arguments", {})
    known = list(names)
    if not isinstance(name, str) or name not in known:
        shown = f"tool {name!r:.60}" if isinstance(name, str) else "name of a tool in the call"
        hint = did_you_mean(name, known) if isinstance(name, str) and len(name) < 60 else ""
        raise BadCall(f"There is no {printable(shown)}: the tools are {', '.join(known)}{hint}.")
    if not isinstance(arguments, dict):
        raise BadCall(f"The arguments of {name} must be a JSON object, got {type(arguments).__name__}.")
    return name, arguments


def read_object(text: str, needed: str) -> dict[str, Any]:
    """Return the JSON object that a text is. Raise BadCall if it is none; `needed` tells how it is written."""
    if len(text) > MAX_ACTION_CHARS:
        raise BadCall(f"The action has {len(text)} characters, {MAX_ACTION_CHARS} are allowed.")
    tagged = _TAGS.match(text)
    try:
        value = json.loads(tagged.group(1) if tagged else text, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair cannot be sent
    except UnicodeError:
        raise BadCall(f"The action is not valid Unicode: {needed}.") from None
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else printable(str(error))
        raise BadCall(f"The action is not JSON ({reason}): {needed}.") from None
    if not isinstance(value, dict):
        raise BadCall(f"The action is JSON, but no object: {needed}.")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def explain_tools(tools: Sequence[Tool]) -> str:
    """Return the part of an instruction that lists tools and tells how to call them."""
    lines = [json.dumps(tool.schema()["function"], ensure_ascii=False) for tool in tools]
    return (
        'Reply with exactly one call, a JSON object: {"name": "the tool", "arguments": {...}}. These are the tools, '
        "with the JSON schema of their arguments:\n" + "\n".join(lines)
    )


def shorten(text: str) -> str:
    """Return a result as the agent reads it: valid Unicode of bounded length."""
    text = text.encode(errors="replace").decode()
    if len(text) <= MAX_RESULT_CHARS:
        return text
    return f"{text[:MAX_RESULT_CHARS]}\n[{len(text) - MAX_RESULT_CHARS} more characters]"


def printable(text: str) -> str:
    return re.sub(r"[^\x20-\x7e]+", "?", text)
