"""Action formats: how an agent writes its action, and how the reply is parsed into the environment's action.

A reply without an action becomes `NO_ACTION`. No environment has such a command, so it answers that the action is
invalid, the turn counts, and the agent can learn from it. The reply itself is not passed on: it could contain a valid
command by chance, and the format would then be optional. Nothing here evaluates model output as code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentgym_rl.errors import ConfigError

NO_ACTION = "(no action found)"

MAX_JSON_ATTEMPTS = 64
"""Opening braces tried per reply. This bounds the work that a hostile or broken reply can cause."""


@dataclass(frozen=True, slots=True)
class ActionFormat:
    explain: str
    """Text appended to the environment's instruction. May be empty."""
    parse: Callable[[str], str]
    """Returns the environment's action in an agent's reply."""
    tools: bool = False
    """Whether the agent is offered the environment's tools. Their calls are parsed by the agent's chat template."""


_ACTION = re.compile(r"(?<!\w)(\*\*)?Action(\*\*)? ?:(\*\*)?")
"""Models also write `**Action:** go`, `**Action**: go` and `**Action: go**`."""
_AFTER_ACTION = re.compile(r"^\s*\**(?:Thought|Observation)\**:", re.MULTILINE)


def parse_react(reply: str) -> str:
    """Parse `Thought: I need wood. Action: get 1 oak log` to `get 1 oak log`. The Thought is optional.

    The last Action counts. A Thought or Observation that the model invents after its action is cut off.
    """
    actions = list(_ACTION.finditer(reply))
    if not actions:
        return NO_ACTION
    opened, *closed = actions[-1].groups()
    action = reply[actions[-1].end() :]
    if invented := _AFTER_ACTION.search(action):
        action = action[: invented.start()]
    action = action.strip()
    if opened and not any(closed):
        action = action.removesuffix("**").rstrip()
    return action or NO_ACTION


def parse_function_call(reply: str) -> str:
    """Parse `{"name": "get", "arguments": {"item": "1 oak log"}}` to `get 1 oak log`. The last call counts.

    Underscores in the name become spaces. The argument values follow in the given order, lists joined by commas.
    Text around the JSON (thoughts, <tool_call> tags, a fence) is ignored. OpenAI's nesting under `function` and
    arguments as a JSON string are accepted.
    """
    command = NO_ACTION
    decoder = json.JSONDecoder()
    position = reply.find("{")
    for _ in range(MAX_JSON_ATTEMPTS):
        if position < 0:
            break
        try:
            value, end = decoder.raw_decode(reply, position)
        except (ValueError, RecursionError):
            end = position + 1
        else:
            command = _command(value) or command
        position = reply.find("{", end)
    return command


def _command(call: Any) -> str | None:
    """Return the command of a decoded call, or None if it is not a call."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    words = [call["name"].replace("_", " ")]
    for value in arguments.values():
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(part, str | int | float) for part in parts):
            return None
        words.append(", ".join(str(part) for part in parts))
    return " ".join(word.strip() for word in words if word.strip()) or None


_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)


def parse_code(reply: str) -> str:
    """Return the content of the last complete fenced block."""
    blocks = _FENCE.findall(reply)
    return (blocks[-1].strip() if blocks else "") or NO_ACTION


FORMATS: dict[str, ActionFormat] = {
    "plain": ActionFormat("", str.strip),
    "tool": ActionFormat(
        "Act by calling your tools: each call is one action. A reply without a call does nothing.",
        str.strip,
        tools=True,
    ),
    "react": ActionFormat(
        "Think before you act. Every reply has this form, with exactly one action:\n"
        "Thought: your reasoning\n"
        "Action: the action",
        parse_react,
    ),
    "function_call": ActionFormat(
        "Write every action as one function call, a JSON object with a name and arguments. The name is the first "
        "word of the action, the arguments hold the rest in order. The action `look at lamp` is written:\n"
        '<tool_call>{"name": "look", "arguments": {"rest": "at lamp"}}</tool_call>\n'
        'An action of one word has empty arguments: {"name": "wait", "arguments": {}}.',
        parse_function_call,
    ),
    "code": ActionFormat(
        "You may reason first. End every reply with the action alone in a fenced block:\n```\nthe action\n```",
        parse_code,
    ),
}


def action_format(name: str) -> ActionFormat:
    if name not in FORMATS:
        raise ConfigError(f"unknown action format {name!r}: known are {', '.join(FORMATS)}")
    return FORMATS[name]
