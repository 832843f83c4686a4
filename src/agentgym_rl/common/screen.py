"""Untrusted text on a terminal: control characters of environments, models and files are removed."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters except tab and newline. Escape sequences start with one of them."""


def printable(text: str) -> str:
    """Return `text` without control characters. The rest of an escape sequence is shown as plain text."""
    return _CONTROL.sub("", text)


class Screen(Console):
    """A rich console that prints no control characters except its own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or not _CONTROL.search(segment.text):
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)
