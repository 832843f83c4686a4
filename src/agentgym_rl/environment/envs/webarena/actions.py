"""What the agent writes, read into an action. Nothing the agent writes is ever evaluated."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

MAX_CHARS = 5000
"""The longest action taken; no form of the sites needs as much."""
MAX_QUOTED = 60

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


class Refused(Exception):
    """The action is malformed or impossible; the text is what the agent is told."""


@dataclass(frozen=True, slots=True)
class Action:
    """One action, ready to be carried out."""

    kind: str
    element: int = 0
    """click, type, hover: the element's id; tab_focus: the tab's number."""
    text: str = ""
    """type: what; press: a key in Playwright's spelling; scroll: direction; goto: address; stop: answer."""
    enter: bool = False
    """type: press Enter afterwards."""


def parse(text: str) -> Action:
    """Read one action; Refused says what is wrong with it."""
    if len(text) > MAX_CHARS:
        raise Refused(f"An action of {len(text)} characters is too long. Give one short action.")
    action = text.strip().strip("`").strip()
    word = re.match(r"[a-z_]+", action)
    for pattern, make in _READERS.get(word[0] if word else "", ()):
        if match := pattern.fullmatch(action):
            return make(match)
    if word and word[0] in _READERS:
        form = next(form for form in FORMS if form.split()[0] == word[0])
        raise Refused(f"Could not read {quote(action)}. Write it as: {form}")
    raise Refused(f"There is no action {quote(action)}. Actions: {', '.join(FORMS)}")


def quote(text: str) -> str:
    """What the agent wrote, made safe to repeat: short, and printable ASCII only."""
    plain = re.sub(r"[^\x20-\x7e]+", "?", text)
    return f'"{plain}"' if len(plain) <= MAX_QUOTED else f'"{plain[: MAX_QUOTED - 3]}..."'


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
    **{f"arrow{way}": f"Arrow{way.capitalize()}" for way in ("up", "down", "left", "right")},
    **{way: f"Arrow{way.capitalize()}" for way in ("up", "down", "left", "right")},
}


def key_combination(text: str) -> str:
    """`ctrl+a` -> `Control+a`; Refused when a key is unknown."""
    *modifiers, key = [part.strip() for part in text.split("+")] if text.strip("+") else [text]
    try:
        named = [_MODIFIERS[modifier.lower()] for modifier in modifiers]
    except KeyError:
        raise Refused(f"There is no key combination {quote(text)}. Modifiers are Ctrl, Alt, Shift and Meta.") from None
    if key.lower() in _KEYS:
        key = _KEYS[key.lower()]
    elif len(key) != 1 or not key.isascii() or not key.isprintable():
        raise Refused(f"There is no key {quote(key)}. Keys are single characters and: {', '.join(sorted(_KEYS))}")
    return "+".join([*named, key])


def _typed(match: re.Match[str]) -> Action:
    content = match[2]
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]", content):
        raise Refused("The text to type contains control characters, which no keyboard has.")
    return Action("type", int(match[1]), content, match[3] != "0")


def _stopped(match: re.Match[str]) -> Action:
    return Action("stop", text=(match[1] or "").strip())


def _element(kind: str) -> Callable[[re.Match[str]], Action]:
    return lambda match: Action(kind, int(match[1]))


def _bare(kind: str) -> Callable[[re.Match[str]], Action]:
    return lambda match: Action(kind)


_Reader = tuple[re.Pattern[str], Callable[[re.Match[str]], Action]]
_ID = r"\s*\[?\s*([0-9]{1,6})\s*\]?"


def _reader(pattern: str, make: Callable[[re.Match[str]], Action]) -> tuple[_Reader, ...]:
    return ((re.compile(pattern, re.DOTALL), make),)


_READERS: dict[str, tuple[_Reader, ...]] = {
    **{kind: _reader(kind + _ID, _element(kind)) for kind in ("click", "hover", "tab_focus")},
    **{kind: _reader(kind + r"(?:\s*\[\s*\])?", _bare(kind)) for kind in ("new_tab", "close_tab", "go_back")},
    "go_forward": _reader(r"go_forward(?:\s*\[\s*\])?", _bare("go_forward")),
    "type": _reader(rf"type{_ID}\s*\[(.*?)\](?:\s*\[\s*(?:press_enter_after\s*=\s*)?([01])\s*\])?", _typed),
    "press": _reader(r"press\s*\[(.{1,40})\]", lambda m: Action("press", text=key_combination(m[1].strip()))),
    "scroll": _reader(
        r"scroll\s*\[?\s*(?:direction\s*=\s*)?(down|up)\s*\]?", lambda match: Action("scroll", text=match[1])
    ),
    "goto": _reader(r"goto\s*\[\s*(\S{1,2000}?)\s*\]", lambda match: Action("goto", text=match[1])),
    "stop": (
        *_reader(r"stop\s*\[(.*)\]", _stopped),
        *_reader(r"stop()", _stopped),
    ),
}
