"""Parser of the agent's actions. It never evaluates what the agent writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from agentgym_rl.environment.plain_text import plain
from agentgym_rl.environment.tools import Tool

MAX_CHARS = 5000
"""Length of the longest action accepted. No form of the sites needs as much."""

FORMS = (
    "click [id]",
    "type [id] [content] [press_enter_after=0|1]",
    "hover [id]",
    "press [key_comb]",
    "scroll [down|up]",
    "new_tab",
    "tab_focus [n]",
    "close_tab",
    "goto [url]",
    "go_back",
    "go_forward",
    "stop [answer]",
)

_ELEMENT = {"id": {"type": "integer", "description": "Number of the element in brackets."}}
TOOLS = (
    Tool(
        "click", "Click an element. An option of a drop-down list is chosen by clicking it.", "click [{id}]", _ELEMENT
    ),
    Tool(
        "type",
        "Replace the text in a field.",
        "type [{id}] [{content}] [{press_enter_after}]",
        {
            **_ELEMENT,
            "content": {"type": "string"},
            "press_enter_after": {"type": "integer", "enum": [0, 1], "default": 1},
        },
    ),
    Tool("hover", "Move the pointer over an element.", "hover [{id}]", _ELEMENT),
    Tool(
        "press", "Press a key or combination, such as Enter or Ctrl+a.", "press [{keys}]", {"keys": {"type": "string"}}
    ),
    Tool(
        "scroll",
        "Move the window by about its height.",
        "scroll [{direction}]",
        {"direction": {"type": "string", "enum": ["down", "up"]}},
    ),
    Tool("new_tab", "Open a tab.", "new_tab"),
    Tool("tab_focus", "Go to a tab by its number.", "tab_focus [{number}]", {"number": {"type": "integer"}}),
    Tool("close_tab", "Close the current tab.", "close_tab"),
    Tool("goto", "Open an address of the task's sites.", "goto [{url}]", {"url": {"type": "string"}}),
    Tool("go_back", "Go back in the tab's history.", "go_back"),
    Tool("go_forward", "Go forward in the tab's history.", "go_forward"),
    Tool(
        "stop",
        "End the task, with the answer if the objective asks for one.",
        "stop [{answer}]",
        {"answer": {"type": "string", "default": ""}},
    ),
)


class Refused(Exception):
    """The action is malformed or impossible. The agent sees the text."""


@dataclass(frozen=True, slots=True)
class Action:
    """One parsed action."""

    kind: str
    element: int = 0
    """click, type, hover: the element's id; tab_focus: the tab's number."""
    text: str = ""
    """type: the text; press: a key in Playwright's spelling; scroll: direction; goto: address; stop: answer."""
    enter: bool = False
    """type: press Enter afterwards."""


def parse(text: str) -> Action:
    """Parse one action. Raise Refused with the reason if it is malformed."""
    if len(text) > MAX_CHARS:
        raise Refused(f"An action of {len(text)} characters is too long. Give one short action.")
    action = text.strip().strip("`").strip()
    word = re.match(r"[a-z_]+", action)
    for pattern, make in _PATTERNS.get(word[0] if word else "", ()):
        if match := pattern.fullmatch(action):
            return make(match)
    if word and word[0] in _PATTERNS:
        form = next(form for form in FORMS if form.split()[0] == word[0])
        raise Refused(f"Could not read {quote(action)}. Write it as: {form}")
    raise Refused(f"There is no action {quote(action)}. Actions: {', '.join(FORMS)}")


def quote(text: str) -> str:
    """Return the agent's text in quotes, shortened and reduced to printable ASCII."""
    return f'"{plain(text)}"'


_MODIFIERS = {"ctrl": "Control", "control": "Control", "alt": "Alt", "shift": "Shift", "meta": "Meta", "cmd": "Meta"}
_KEYS = {
    "enter": "Enter",
    "return": "Enter",
    "tab": "Tab",
    "escape": "Escape",
    "esc": "Escape",
    "backspace": "Backspace",
    "delete": "Delete",
    "space": "Space",
    "home": "Home",
    "end": "End",
    "pageup": "PageUp",
    "pagedown": "PageDown",
    **{f"arrow{direction}": f"Arrow{direction.capitalize()}" for direction in ("up", "down", "left", "right")},
    **{direction: f"Arrow{direction.capitalize()}" for direction in ("up", "down", "left", "right")},
}


def key_combination(text: str) -> str:
    """Return Playwright's spelling of a key combination: `ctrl+a` -> `Control+a`. Raise Refused if a key is unknown."""
    *modifiers, key = [part.strip() for part in text.split("+")] if text.strip("+") else [text]
    try:
        modifier_names = [_MODIFIERS[modifier.lower()] for modifier in modifiers]
    except KeyError:
        raise Refused(f"There is no key combination {quote(text)}. Modifiers are Ctrl, Alt, Shift and Meta.") from None
    if key.lower() in _KEYS:
        key = _KEYS[key.lower()]
    elif len(key) != 1 or not key.isascii() or not key.isprintable():
        raise Refused(f"There is no key {quote(key)}. Keys are single characters and: {', '.join(sorted(_KEYS))}")
    return "+".join([*modifier_names, key])


def _parse_type(match: re.Match[str]) -> Action:
    content = match[2]
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]", content):
        raise Refused("The text to type contains control characters, which no keyboard has.")
    return Action("type", int(match[1]), content, match[3] != "0")


def _parse_stop(match: re.Match[str]) -> Action:
    return Action("stop", text=(match[1] or "").strip())


def _with_element(kind: str) -> Callable[[re.Match[str]], Action]:
    return lambda match: Action(kind, int(match[1]))


def _no_argument(kind: str) -> Callable[[re.Match[str]], Action]:
    return lambda match: Action(kind)


_Pattern = tuple[re.Pattern[str], Callable[[re.Match[str]], Action]]
_ID = r"\s*\[?\s*([0-9]{1,6})\s*\]?"
_ID_AND_NAME = _ID + r"""[ \t]+(?:[A-Za-z]+[ \t]+)?(?:'[^'\[\]]{0,300}'|"[^"\[\]]{0,300}")"""
"""An id and the element as the page shows it: `click [13] link 'Outdoors'`. WebArena's own parser accepts it, too."""


def _pattern(pattern: str, make: Callable[[re.Match[str]], Action]) -> tuple[_Pattern, ...]:
    return ((re.compile(pattern, re.DOTALL), make),)


_PATTERNS: dict[str, tuple[_Pattern, ...]] = {
    **{
        kind: tuple(each for form in (_ID, _ID_AND_NAME) for each in _pattern(kind + form, _with_element(kind)))
        for kind in ("click", "hover", "tab_focus")
    },
    **{kind: _pattern(kind + r"(?:\s*\[\s*\])?", _no_argument(kind)) for kind in ("new_tab", "close_tab", "go_back")},
    "go_forward": _pattern(r"go_forward(?:\s*\[\s*\])?", _no_argument("go_forward")),
    "type": _pattern(rf"type{_ID}\s*\[(.*?)\](?:\s*\[\s*(?:press_enter_after\s*=\s*)?([01])\s*\])?", _parse_type),
    "press": _pattern(r"press\s*\[(.{1,40})\]", lambda m: Action("press", text=key_combination(m[1].strip()))),
    "scroll": _pattern(
        r"scroll\s*\[?\s*(?:direction\s*=\s*)?(down|up)\s*\]?", lambda match: Action("scroll", text=match[1])
    ),
    "goto": _pattern(r"goto\s*\[\s*(\S{1,2000}?)\s*\]", lambda match: Action("goto", text=match[1])),
    "stop": (
        *_pattern(r"stop\s*\[(.*)\]", _parse_stop),
        *_pattern(r"stop()", _parse_stop),
    ),
}
