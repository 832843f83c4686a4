"""Pictures of text environments for people: a title, a status and panels of text, as SVG without external resources."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

_INK, _SOFT, _LINE = "#1f2933", "#6b7785", "#d9dee4"
STATUS_COLOURS = {"playing": "#3a6ea5", "solved": "#2f9e56", "failed": "#c0392b"}
_WIDTH, _MARGIN, _LINE_HEIGHT, _COLUMNS = 860, 28, 20, 94
_HEADLINE = 58
"""Most characters of the headline, which shares its row with the status."""
_MAX_LINES = 24
"""Lines of one panel. Longer text is cut."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A box of text with a heading. `mono` keeps columns aligned."""

    heading: str
    text: str
    mono: bool = False
    colour: str = "#ffffff"


def draw(title: str, headline: str, status: str, state: str, panels: Sequence[Panel]) -> str:
    """Draw the page. `state` is a key of STATUS_COLOURS."""
    body: list[str] = []
    height = 92
    for panel in panels:
        lines = _wrap(panel.text)
        body += _panel(panel, lines, height)
        height += 44 + _LINE_HEIGHT * len(lines) + 12
    height += 16
    heading = _wrap(headline)[0]
    if len(heading) > _HEADLINE:
        start, _, _ = heading[:_HEADLINE].rpartition(" ")
        heading = f"{start or heading[:_HEADLINE]} …"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif">',
            f"<title>{_plain(title)}</title>",
            f'<rect width="{_WIDTH}" height="{height}" fill="#f7f8fa"/>',
            f'<text x="{_MARGIN}" y="40" font-size="12" font-weight="600" letter-spacing="1" fill="{_SOFT}">'
            f"{_plain(title.upper())}</text>",
            f'<text x="{_MARGIN}" y="68" font-size="19" font-weight="700" fill="{_INK}">{_plain(heading)}</text>',
            f'<rect x="{_WIDTH - _MARGIN - 132}" y="30" width="132" height="28" rx="14" '
            f'fill="{STATUS_COLOURS[state]}"/>',
            f'<text x="{_WIDTH - _MARGIN - 66}" y="49" font-size="13" font-weight="600" fill="#fff" '
            f'text-anchor="middle">{_plain(status[:18])}</text>',
            *body,
            "</svg>",
        ]
    )


def _panel(panel: Panel, lines: Sequence[str], top: int) -> Iterator[str]:
    height = 44 + _LINE_HEIGHT * len(lines)
    yield (
        f'<rect x="{_MARGIN}" y="{top}" width="{_WIDTH - 2 * _MARGIN}" height="{height}" rx="8" '
        f'fill="{panel.colour}" stroke="{_LINE}"/>'
    )
    yield (
        f'<text x="{_MARGIN + 16}" y="{top + 24}" font-size="12" font-weight="600" fill="{_SOFT}">'
        f"{_plain(panel.heading)}</text>"
    )
    font = (
        ' font-family="ui-monospace, DejaVu Sans Mono, Menlo, monospace" font-size="13"'
        if panel.mono
        else ' font-size="14"'
    )
    for number, line in enumerate(lines):
        yield (
            f'<text x="{_MARGIN + 16}" y="{top + 48 + number * _LINE_HEIGHT}" fill="{_INK}" xml:space="preserve"'
            f"{font}>{_plain(line)}</text>"
        )


def _wrap(text: str) -> list[str]:
    """Return lines that fit into a panel, at least one."""
    lines = [
        part for line in text.splitlines() for part in textwrap.wrap(line, _COLUMNS, subsequent_indent="  ") or [""]
    ]
    if len(lines) > _MAX_LINES:
        lines = [*lines[: _MAX_LINES - 1], "…"]
    return lines or [""]


def _plain(text: str) -> str:
    """Escape text, and replace what XML cannot hold."""
    return escape("".join(char if char.isprintable() else "?" for char in text))
