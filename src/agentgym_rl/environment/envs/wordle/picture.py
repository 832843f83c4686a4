"""A picture of the game for people: an SVG with the board and the keyboard."""

from __future__ import annotations

from collections.abc import Iterator

from agentgym_rl.environment.envs.wordle.solver import History
from agentgym_rl.environment.envs.wordle.words import LENGTH, MAX_GUESSES

_INK, _SOFT, _LINE = "#1f2933", "#6b7785", "#c9d1d9"
_COLOURS = {"g": "#2f9e56", "y": "#d99a1c", "b": "#7b8794"}
_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_TILE, _GAP, _MARGIN = 58, 8, 28
_KEY_W, _KEY_H, _KEY_GAP = 32, 42, 6
_WIDTH = 440
_TOP = 92


def draw(item: int, history: History, answer: str | None) -> str:
    """Draw the game. `answer` is given only when it is over."""
    keyboard_top = _TOP + MAX_GUESSES * (_TILE + _GAP) + 18
    height = keyboard_top + len(_ROWS) * (_KEY_H + _KEY_GAP) + _MARGIN - _KEY_GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif">',
            f"<title>Wordle, item {item}: {len(history)} of {MAX_GUESSES} guesses</title>",
            f'<rect width="{_WIDTH}" height="{height}" fill="#f7f8fa"/>',
            *_header(item, history, answer),
            *_board(history),
            *_keyboard(history, keyboard_top),
            "</svg>",
        ]
    )


def _header(item: int, history: History, answer: str | None) -> Iterator[str]:
    solved = bool(history) and set(history[-1][1]) == {"g"}
    status, colour = f"{len(history)} of {MAX_GUESSES} guesses", "#3a6ea5"
    if solved:
        status, colour = f"found in {len(history)}", _COLOURS["g"]
    elif answer is not None:
        status, colour = f"it was {answer}", "#c0392b"
    yield (
        f'<text x="{_MARGIN}" y="44" font-size="12" font-weight="600" letter-spacing="1" fill="{_SOFT}">'
        f"WORDLE, ITEM {item}</text>"
    )
    yield (
        f'<text x="{_MARGIN}" y="70" font-size="22" font-weight="700" fill="{_INK}">'
        f"{history[-1][0].upper() if history else 'first guess'}</text>"
    )
    yield f'<rect x="{_WIDTH - _MARGIN - 132}" y="36" width="132" height="30" rx="15" fill="{colour}"/>'
    yield (
        f'<text x="{_WIDTH - _MARGIN - 66}" y="56" font-size="14" font-weight="600" fill="#fff" '
        f'text-anchor="middle">{status}</text>'
    )


def _board(history: History) -> Iterator[str]:
    left = (_WIDTH - LENGTH * (_TILE + _GAP) + _GAP) / 2
    for row in range(MAX_GUESSES):
        guess, marks = history[row] if row < len(history) else (" " * LENGTH, " " * LENGTH)
        for column in range(LENGTH):
            x, y = left + column * (_TILE + _GAP), _TOP + row * (_TILE + _GAP)
            fill = _COLOURS.get(marks[column], "#ffffff")
            border = _COLOURS.get(marks[column], _LINE)
            yield (
                f'<rect x="{x:g}" y="{y}" width="{_TILE}" height="{_TILE}" rx="6" fill="{fill}" stroke="{border}" '
                'stroke-width="2"/>'
            )
            if guess[column] != " ":
                yield (
                    f'<text x="{x + _TILE / 2:g}" y="{y + 40}" font-size="32" font-weight="700" fill="#fff" '
                    f'text-anchor="middle">{guess[column].upper()}</text>'
                )


def _keyboard(history: History, top: int) -> Iterator[str]:
    best: dict[str, str] = {}
    for guess, marks in history:
        for letter, mark in zip(guess, marks, strict=True):
            best[letter] = max(best.get(letter, "b"), mark, key="byg".index)
    for number, letters in enumerate(_ROWS):
        left = (_WIDTH - len(letters) * (_KEY_W + _KEY_GAP) + _KEY_GAP) / 2
        y = top + number * (_KEY_H + _KEY_GAP)
        for place, letter in enumerate(letters):
            x = left + place * (_KEY_W + _KEY_GAP)
            fill = _COLOURS.get(best.get(letter, ""), "#e4e7eb")
            ink = "#fff" if letter in best else _INK
            yield f'<rect x="{x:g}" y="{y}" width="{_KEY_W}" height="{_KEY_H}" rx="5" fill="{fill}"/>'
            yield (
                f'<text x="{x + _KEY_W / 2:g}" y="{y + 27}" font-size="15" font-weight="600" fill="{ink}" '
                f'text-anchor="middle">{letter.upper()}</text>'
            )
