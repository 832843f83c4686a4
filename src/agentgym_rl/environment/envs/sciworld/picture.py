"""A picture of the game for people: an SVG with the task, the score, the room, its doors and the inventory."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

_INK, _SOFT, _LINE, _PAPER = "#1f2933", "#6b7785", "#c9d1d9", "#f7f8fa"
_GOOD, _BAD, _BUSY = "#2f9e56", "#c2413b", "#4a6fa5"
_WIDTH, _MARGIN, _SIDE, _GAP = 1040, 28, 270, 24
_ROOM = _WIDTH - 2 * _MARGIN - _SIDE - _GAP
_CARD_GAP = 10
_CARD = (_ROOM - 32 - 2 * _CARD_GAP) // 3
_NARROW, _BROAD, _WIDE = " !'(),-./:;I[]fijl|\\", "ABCDEFHKNPRSTUVXYZ", "#%&+<=>@GMOQW^mw~…"
_UNPRINTABLE = re.compile(r"[^\x20-\x7e°]+")
_DOOR = re.compile(r"A door to the (.+?) \(that is (open|closed)\)")
_THING = re.compile(
    r"(?:an?|the|some|two|three|several)? ?(?:substance called )?(?P<name>[^.,(]+?)"
    r"(?P<state>, which is [^.]*| \(containing .*\)|, currently .*| \(that .*)?"
    r"(?:\. ?(?P<more>.*))?"
)
_WARM = ("stove", "oven", "furnace", "fire", "lighter", "blast", "heater", "sun")
_COLD = ("freezer", "fridge", "ice", "water", "sink", "bathtub", "toilet", "fountain")
_ALIVE = (
    "plant",
    "tree",
    "bee",
    "seed",
    "flower",
    "egg",
    "animal",
    "apple",
    "banana",
    "orange",
    "potato",
    "dove",
    "frog",
)


@dataclass(slots=True)
class Scene:
    """Data of the picture."""

    task: str
    variation: int
    description: str
    look: str
    inventory: str
    score: int = 0
    """-100 to 100."""
    moves: int = 0
    """Time passed in the game."""
    turn: int = 0
    last_action: str = ""
    last_answer: str = ""


@dataclass(frozen=True, slots=True)
class _Thing:
    name: str
    details: tuple[str, ...]
    """Wrapped lines."""

    @property
    def height(self) -> int:
        return 40 + 16 * len(self.details)


def draw(scene: Scene) -> str:
    """Draw the room with its things and doors on the left, the inventory and the last turn on the right."""
    room, things, doors = _parse_look(scene.look)
    description = _wrap(_plain(scene.description), _WIDTH - 2 * _MARGIN, size=14)[:5]
    top = 92 + 19 * len(description)
    room_parts, room_height = _room(room, things, doors, top)
    side_parts, side_height = _side(scene, top)
    height = top + max(room_height, side_height) + _MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif">',
            f"<title>SciWorld: {escape(scene.task)}, variation {scene.variation}</title>",
            f'<rect width="{_WIDTH}" height="{height}" fill="{_PAPER}"/>',
            *_header(scene, description),
            *room_parts,
            *side_parts,
            "</svg>",
        ]
    )


def _header(scene: Scene, description: list[str]) -> Iterator[str]:
    title = scene.task.replace("-", " ").capitalize()
    size = next(size for size in range(24, 0, -1) if size == 1 or _width(title, size, weight=700) <= _ROOM)
    yield _text(_MARGIN, 40, title, size=size, weight=700)
    yield _text(
        _MARGIN, 62, f"variation {scene.variation} · turn {scene.turn} · {scene.moves} moments passed", colour=_SOFT
    )
    for row, line in enumerate(description):
        yield _text(_MARGIN, 88 + 19 * row, line, size=14)
    left = _WIDTH - _MARGIN - _SIDE
    colour = _BAD if scene.score < 0 else _GOOD if scene.score == 100 else _BUSY
    label = "failed" if scene.score < 0 else "solved" if scene.score == 100 else "in progress"
    yield _text(left, 36, "SCORE", size=12, weight=600, colour=_SOFT)
    yield _text(_WIDTH - _MARGIN, 36, f"{scene.score} of 100, {label}", size=13, weight=600, colour=colour, end=True)
    yield f'<rect x="{left}" y="46" width="{_SIDE}" height="14" rx="7" fill="#e3e7ec"/>'
    filled = _SIDE if scene.score < 0 else round(_SIDE * scene.score / 100)
    if filled:
        yield f'<rect x="{left}" y="46" width="{filled}" height="14" rx="7" fill="{colour}"/>'


def _room(room: str, things: list[_Thing], doors: list[tuple[str, bool]], top: int) -> tuple[list[str], int]:
    """Put cards in three columns, each into the shortest one, and doors in a row below."""
    columns = [top + 44] * 3
    inside: list[str] = []
    for thing in things:
        column = columns.index(min(columns))
        inside += _card(thing, _MARGIN + 16 + column * (_CARD + _CARD_GAP), columns[column], _CARD)
        columns[column] += thing.height + _CARD_GAP
    y = max(columns) + 12
    x = _MARGIN + 16
    for place, is_open in doors:
        door_width = 46 + round(_width(place, size=13, weight=600))
        if x > _MARGIN + 16 and x + door_width > _MARGIN + _ROOM - 16:
            x, y = _MARGIN + 16, y + 46
        inside += _door(place, is_open, x, y)
        x += door_width + _CARD_GAP
    height = (y + 52 if doors else y) - top
    frame = [
        f'<rect x="{_MARGIN}" y="{top}" width="{_ROOM}" height="{height}" rx="12" fill="#fff" stroke="{_LINE}" '
        'stroke-width="2"/>',
        _text(_MARGIN + 16, top + 28, room, size=17, weight=700),
    ]
    return frame + inside, height


def _side(scene: Scene, top: int) -> tuple[list[str], int]:
    left = _WIDTH - _MARGIN - _SIDE
    y = top + 28
    parts = [_text(left, y, "INVENTORY", size=12, weight=600, colour=_SOFT)]
    y += 12
    carried = _items(scene.inventory)
    for thing in carried:
        parts += _card(thing, left, y, _SIDE)
        y += thing.height + _CARD_GAP
    if not carried:
        parts.append(_text(left, y + 14, "nothing", colour=_SOFT))
        y += 26
    if scene.last_action:
        y += 28
        parts.append(_text(left, y, "LAST ACTION", size=12, weight=600, colour=_SOFT))
        for line in _wrap(f"> {_plain(scene.last_action)}", _SIDE, size=14, weight=600):
            y += 20
            parts.append(_text(left, y, line, size=14, weight=600))
        y += 6
        answer = [line for part in scene.last_answer.splitlines() for line in _wrap(_plain(part), _SIDE, size=13)]
        for line in answer[:10] + (["…"] if len(answer) > 10 else []):
            y += 17
            parts.append(_text(left, y, line, size=13, colour=_SOFT))
    return parts, y + 16 - top


def _card(thing: _Thing, x: int, y: int, width: int) -> Iterator[str]:
    fill, border = ("#fff3d6", "#d99a1c") if "turned on" in thing.details else (_PAPER, _LINE)
    yield f'<rect x="{x}" y="{y}" width="{width}" height="{thing.height - 4}" rx="8" fill="{fill}" stroke="{border}"/>'
    yield f'<circle cx="{x + 19}" cy="{y + 18}" r="9" fill="{_colour(thing.name)}"/>'
    name = _wrap(thing.name, width - 44, size=14, weight=600)
    yield _text(x + 36, y + 23, name[0] if len(name) == 1 else f"{name[0][:-1].rstrip()}…", size=14, weight=600)
    for row, line in enumerate(thing.details):
        yield _text(x + 14, y + 42 + 16 * row, line, size=12, colour=_SOFT)


def _door(place: str, is_open: bool, x: int, y: int) -> Iterator[str]:
    """Draw a small door, open or closed, and the name of the place behind it."""
    yield f'<rect x="{x}" y="{y}" width="22" height="34" fill="{"#dfeee4" if is_open else "#a9794d"}" stroke="{_INK}"/>'
    if is_open:
        yield f'<path d="M{x} {y}l9 6v34l-9 -6z" fill="#a9794d" stroke="{_INK}"/>'
    else:
        yield f'<circle cx="{x + 17}" cy="{y + 18}" r="2" fill="{_INK}"/>'
    yield _text(x + 30, y + 14, place, size=13, weight=600)
    yield _text(x + 30, y + 30, "open" if is_open else "closed", size=12, colour=_GOOD if is_open else _SOFT)


def _parse_look(look: str) -> tuple[str, list[_Thing], list[tuple[str, bool]]]:
    """Return the room's name, its things and its doors with their places and whether they are open."""
    first = _plain(look.split(".", 1)[0])
    room = first.removeprefix("This room is called the ").removeprefix("This outside location is called the ")
    doors = [(_plain(place), state == "open") for place, state in _DOOR.findall(look)]
    return room, [thing for thing in _items(look) if not thing.name.startswith("A door")], doors


def _items(text: str) -> list[_Thing]:
    """Return the things of the indented lines, without those of every room."""
    lines = [_plain(line) for line in text.splitlines() if line.startswith("\t")]
    return [_thing(line) for line in lines if line not in ("the agent", "a substance called air")]


def _thing(line: str) -> _Thing:
    match = _THING.fullmatch(line)
    if match is None:
        return _Thing(line, ())
    state = (match["state"] or "").strip(" ,()").removeprefix("which is ")
    more = re.sub(r"(^|(?<=\. ))[IO]n the [^.:]+ is: nothing\.", "", match["more"] or "")
    sentences = [part for part in (state, more) if part and part != "containing nothing"]
    details = [row for sentence in sentences for row in _wrap(sentence.strip(), _CARD - 28, size=12)]
    return _Thing(match["name"], tuple(details[:5] + ["…"] * (len(details) > 5)))


def _colour(name: str) -> str:
    """Return a colour by the kind in the name, or by the name's hash."""
    for words, hue in ((_WARM, 14), (_COLD, 205), (_ALIVE, 125)):
        if any(word in name for word in words):
            return f"hsl({hue} 55% 55%)"
    return f"hsl({hashlib.sha256(name.encode()).digest()[0] * 360 // 256} 28% 62%)"


def _wrap(text: str, width: int, size: int, weight: int = 400) -> list[str]:
    """Return lines of at most `width` pixels. A longer word is split."""
    lines = [""]
    for word in text.split():
        if lines[-1] and _width(f"{lines[-1]} {word}", size, weight) > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
        while _width(lines[-1], size, weight) > width:
            cut = next(
                end for end in range(len(lines[-1]) - 1, 0, -1) if _width(lines[-1][:end], size, weight) <= width
            )
            lines[-1:] = [lines[-1][:cut], lines[-1][cut:]]
    return lines if lines[0] else []


def _width(text: str, size: int, weight: int = 400) -> float:
    """Estimate the width of a text in pixels in the widest of the usual fonts; the viewer's font is unknown."""
    ems = sum(
        0.42 if letter in _NARROW else 0.78 if letter in _BROAD else 1.0 if letter in _WIDE else 0.66 for letter in text
    )
    return ems * size * (1.12 if weight >= 600 else 1.0)


def _plain(text: str) -> str:
    """Return the text as one printable line; SVG does not allow control characters."""
    return _UNPRINTABLE.sub(" ", text).strip()


def _text(x: int, y: int, text: str, size: int = 13, weight: int = 400, colour: str = _INK, end: bool = False) -> str:
    anchor = ' text-anchor="end"' if end else ""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{colour}"{anchor}>{escape(text)}</text>'
    )
