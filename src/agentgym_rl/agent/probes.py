"""Conversations that show whether a chat template rewrites history, with which a renderer probes its template."""

from __future__ import annotations

from agentgym_rl.agent.templates import template_advice
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Message, ToolCall

PROBES: tuple[tuple[str, ...], ...] = (
    ("Go north.", "north", "A wall.", "south", "A door.", "open it"),
    (
        "Go north.",
        "<think>\nNorth is up.\n</think>\n\nnorth",
        "A wall.",
        "<think>\nBack.\n</think>\n\nsouth",
        "A door.",
    ),
    ("One line.\nAnother line.", "Thought: go on\nAction: north", "Done, it says: 'yes'.", "stop", "Stopped."),
)
"""Observation, reply, observation, ...: conversations in which known templates rewrite history."""


TOOL = {
    "type": "function",
    "function": {
        "name": "walk",
        "description": "Walk.",
        "parameters": {"type": "object", "properties": {"way": {"type": "string"}}, "required": ["way"]},
    },
}
TOOL_PROBE = (
    Message("user", "Find the door."),
    Message("assistant", "", tool_calls=[ToolCall("walk", {"way": "north"}, "call00000")]),
    Message("tool", "A wall.\nDamp.", tool_call_id="call00000"),
    Message("assistant", "Back again.", tool_calls=[ToolCall("walk", {"way": "south"}, "call00001")]),
    Message("tool", "A door.", tool_call_id="call00001"),
    Message("assistant", "", tool_calls=[ToolCall("walk", {"way": "through the door"}, "call00002")]),
)
"""A conversation with calls and results. Some templates drop the text before a call: those are probed without it."""

TEXT_PROBE = (Message("assistant", "I am done."), Message("user", "Call a tool."), Message("assistant", "I will."))
"""Messages after a reply without a call, which is answered by the user. Some templates then move the list of tools."""


class RewrittenHistory(ConfigError):
    """A chat template changes earlier turns when a message is added."""


def probe_conversations() -> list[list[Message]]:
    """Return the conversations without tools, each with and without a system message."""
    systems: tuple[list[Message], ...] = ([], [Message("system", "You are a walker.")])
    return [[*system, *_alternate(probe)] for probe in PROBES for system in systems]


def _alternate(contents: tuple[str, ...]) -> list[Message]:
    return [Message("assistant" if i % 2 else "user", content) for i, content in enumerate(contents)]


def require_prefix(before: str, after: str, when: str, ignore_space: bool = False) -> None:
    """Raise RewrittenHistory unless a conversation extends the conversation before it."""
    if ignore_space:
        before, after = "".join(before.split()), "".join(after.split())
    if after.startswith(before):
        return
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    raise RewrittenHistory(
        f"the chat template rewrites history: the conversation has {before[at : at + 60]!r} at character {at}, but "
        f"{when} it has {after[at : at + 60]!r}. Sampled tokens must not change: {template_advice()}"
    )
