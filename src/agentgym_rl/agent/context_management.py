"""Context management: which part of an episode's conversation the model sees when the context is full.

`view` derives the visible conversation from the messages alone. The policy decides when to cut, because only it knows
the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agentgym_rl.common.thoughts import OPEN, without_thought
from agentgym_rl.types import Message

SUMMARY = "summary"
"""Purpose of the messages that ask for a summary and give it."""

ASK = (
    "Your context is nearly full. Before the task continues, reply with a short summary: what you did, what you found "
    "and what remains to be done. From now on you see this summary instead of the conversation."
)
LEFT_OUT = "[Earlier turns are left out]"
SUMMARISED = "[Summary of the earlier turns]"


@dataclass(frozen=True, slots=True)
class Context:
    """Settings of an agent's context."""

    kind: Literal["full", "window", "summary"] = "full"
    """full: an episode ends when its context is full. window: the oldest turns are then left out. summary: the model
    writes a summary of the conversation, which replaces it."""
    turns: int = 4
    """Turns that are kept when the context is cut; fewer if they do not fit."""
    summary_tokens: int = 256
    """Maximum sampled tokens of a summary."""


FULL = Context()
"""An episode ends when its context is full."""


def summary_request(messages: Sequence[Message]) -> list[Message]:
    """Return the request for a summary: a user message, or the results of calls that the last reply made.

    Some templates accept nothing but results after calls. The real results follow after the summary.
    """
    calls = messages[-1].tool_calls or ()
    if not calls:
        return [Message("user", ASK, purpose=SUMMARY)]
    return [Message("tool", ASK if call is calls[-1] else "", tool_call_id=call.id, purpose=SUMMARY) for call in calls]


def view(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation that the model sees before its next reply.

    After a cut its first user message has the task (the first observation), a note or the summary, and the observation
    of the first turn that is kept. Requests for summaries and the summaries themselves are not part of it.
    """
    conversation = [message for message in messages if not message.purpose]
    dropped = next((message.dropped_turns for message in reversed(messages) if message.dropped_turns), 0)
    if not dropped:
        return conversation
    system = conversation[:1] if conversation[0].role == "system" else []
    turns = _turns(conversation[len(system) :])
    task, first = turns[0][0], turns[dropped]
    observation = [message for message in first if not message.is_reply]
    head = "\n\n".join([task.content, _note(messages), *(message.content for message in observation)])
    replies = [message for message in first if message.is_reply]
    kept = [message for turn in turns[dropped + 1 :] for message in turn]
    return [*system, Message("user", head), *replies, *kept]


def _turns(conversation: Sequence[Message]) -> list[list[Message]]:
    """Return the messages of each turn, its reply last. The last turn has no reply yet."""
    turns: list[list[Message]] = [[]]
    for message in conversation:
        turns[-1].append(message)
        if message.is_reply:
            turns.append([])
    return turns


def _note(messages: Sequence[Message]) -> str:
    summaries = [m.content for m in messages if m.purpose == SUMMARY and m.role == "assistant"]
    if summaries:
        text = without_thought(summaries[-1]).strip()
        return f"{SUMMARISED}\n{text.removeprefix(OPEN).lstrip()}"  # the rest of a thought that was cut
    return LEFT_OUT
