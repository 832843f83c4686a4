"""Scripted solutions: moves that name their element, turned into actions on the current page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentgym_rl.environment.envs.webarena.observation import Element, View
from agentgym_rl.errors import EnvError


@dataclass(frozen=True, slots=True)
class Move:
    """One action of a solution."""

    kind: str
    """click, type or stop."""
    role: str = ""
    name: str = ""
    text: str = ""
    """type: the text; stop: the answer."""
    enter: bool = False
    after: str = ""
    """Name of an earlier element, if several elements have the same role and name."""


def click(role: str, name: str, after: str = "") -> Move:
    return Move("click", role, name, after=after)


def choose(list_name: str, option: str) -> Move:
    """Return the move that selects an option of a drop-down list."""
    return Move("click", "option", option, after=list_name)


def fill(name: str, text: str, role: str = "textbox") -> Move:
    return Move("type", role, name, text)


def search(name: str, text: str) -> Move:
    """Return the move that types into a search field and presses Enter."""
    return Move("type", "searchbox", name, text, enter=True)


def stop(answer: str = "") -> Move:
    return Move("stop", text=answer)


class ScriptedOracle:
    """Follower of a script. After another action it goes back to the start URL; changes made meanwhile remain."""

    def __init__(self, script: Sequence[Move], start_url: str) -> None:
        self._script = script
        self._start_url = start_url
        self._position = 0
        self._lost = False

    def next(self, view: View) -> str:
        """Return the next action."""
        if self._lost:
            return f"goto [{self._start_url}]"
        move = self._script[self._position]
        if move.kind == "stop":
            return f"stop [{move.text}]"
        element = _find(view, move)
        if element is None and self._position:
            self._lost = True
            return self.next(view)
        if element is None:
            raise EnvError(f"the oracle needs a {move.role} {move.name!r} on this page, got none")
        if not element.visible:
            last_visible = max((index for index, each in enumerate(view.elements) if each.visible), default=0)
            return f"scroll [{'down' if view.elements.index(element) > last_visible else 'up'}]"
        if move.kind == "click":
            return f"click [{element.id}]"
        return f"type [{element.id}] [{move.text}] [{int(move.enter)}]"

    def record_action(self, action: str, view: View) -> None:
        """Record that `action` was carried out on the page in `view`."""
        try:
            expected = self.next(view)
        except EnvError:
            expected = ""
        if action.startswith(("scroll", "hover")):
            return
        if action != expected:
            self._lost = True
        elif self._lost:
            self._lost = False
            self._position = 0
        else:
            self._position += 1


def _find(view: View, move: Move) -> Element | None:
    """Return the element of a move, visible or not."""
    after_passed = not move.after
    for element in view.elements:
        if after_passed and element.role == move.role and element.name == move.name:
            return element
        after_passed = after_passed or element.name == move.after
    return None
