"""Base of tasks that a user gives to an agent with tools: calls, messages to the user, and a transcript of both."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from agentgym_rl.environment.base import check_item
from agentgym_rl.environment.bridges.calls import printable, read_call, shorten
from agentgym_rl.environment.envs.text_svg import Panel, draw
from agentgym_rl.environment.tools import BadCall, Tool
from agentgym_rl.errors import EnvError
from agentgym_rl.types import Step

HELP = "help"
_PANELS = 6
"""Panels of the transcript in a picture: the last ones."""
_RESULT_CHARS = 600
_CALL_STARTS = ("{", "<tool_call>", "```")

HOW_TO_CALL = """\
Each reply is one of these, and nothing else:
- a call of a tool, one JSON object: {"name": "the tool", "arguments": {"an argument": "its value"}}
- help: list the tools that you have now, with the JSON schema of their arguments
- a message to the user, which is any other text"""
"""Part of an instruction for agents that write their actions as text."""


class ToolTask(ABC):
    """One task and its conversation. Subclasses play calls and messages. Implements TextEnv."""

    name: ClassVar[str]
    instruction: ClassVar[str]
    tool_instruction: ClassVar[str]
    splits: ClassVar[Mapping[str, range]]
    subsets: ClassVar[tuple[str, ...]]
    cheap: ClassVar[bool] = True
    takes_messages: ClassVar[bool] = True
    oracle_recovers: ClassVar[bool] = False

    def __init__(self) -> None:
        self._item = -1
        self._playing = False
        self._success: bool | None = None
        self._num_turns = 0
        self._transcript: list[Panel] = []

    @classmethod
    @abstractmethod
    def tools(cls) -> Sequence[Tool]:
        """Return the tools of all items."""

    @abstractmethod
    def item_tools(self) -> list[str]: ...

    @abstractmethod
    def start(self, item: int) -> str:
        """Start an item and return the user's first message."""

    @abstractmethod
    def play(self, tool: str, arguments: dict[str, Any]) -> Step:
        """Call a tool and return its result."""

    @abstractmethod
    def message(self, text: str) -> Step:
        """Take a message to the user, which ends a turn of the user or the episode."""

    def reset(self, item: int) -> str:
        request = self.start(check_item(self, item))
        self._item, self._playing, self._success, self._num_turns = item, True, None, 0
        self._transcript = [Panel("User", request)]
        return request

    def step(self, text: str) -> Step:
        self.require_playing()
        self._num_turns += 1
        stripped = text.strip()
        if stripped == HELP:
            return Step(self._list_tools(), info={"valid": True})
        if not stripped:
            return Step("The reply is empty: call a tool, or write a message to the user.", info={"valid": False})
        if not stripped.startswith(_CALL_STARTS):
            step = self.message(stripped)
            self._transcript.append(Panel("Message of the agent", shorten(stripped)[:_RESULT_CHARS], colour="#eef4fb"))
            self._transcript.append(Panel("Verdict" if step.done else "User", step.observation))
            return self._ended(step)
        try:
            name, arguments = read_call(stripped, self.item_tools())
        except BadCall as error:
            return Step(str(error), info={"valid": False})
        step = self.play(name, arguments)
        shown = f"{name}({json.dumps(arguments, ensure_ascii=False)})\n→ {step.observation}"
        self._transcript.append(Panel("Call", shown[:_RESULT_CHARS], mono=True))
        step.observation = shorten(step.observation)
        return self._ended(step)

    def _ended(self, step: Step) -> Step:
        if step.done:
            self._playing, self._success = False, bool(step.info["success"])
        return step

    def close(self) -> None:
        self._playing = False

    def render(self) -> str:
        """Return an SVG with the last messages and calls."""
        if self._item < 0:
            raise EnvError(f"{self.name} has nothing to draw yet: call reset first")
        state = "playing" if self._success is None else "solved" if self._success else "failed"
        status = f"turn {self._num_turns}" if self._success is None else state
        panels = self._transcript[-_PANELS:]
        if panels[0] is not self._transcript[0]:
            panels = [self._transcript[0], *panels[1:]]
        title = f"{self.name}, item {self._item}: {', '.join(self.subsets_of(self._item))}"
        return draw(title, self.heading(), status, state, panels)

    @classmethod
    @abstractmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]: ...

    def heading(self) -> str:
        """Return the headline of the picture."""
        return printable(self._transcript[0].text)

    def require_playing(self) -> None:
        if not self._playing:
            raise EnvError(f"{self.name} needs a running episode: call reset first")

    def _list_tools(self) -> str:
        names = set(self.item_tools())
        return "\n".join(
            json.dumps(tool.schema()["function"], ensure_ascii=False) for tool in self.tools() if tool.name in names
        )


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as the text action that step() takes."""
    return json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
