"""The texts that a chat template writes around an observation, so that it need not be rendered every time.

A template may look into an observation: it may trim it, or search it for a mark of its own. So a frame is used only for
plain observations, without white space around them and without the characters that marks are made of. The template is
first tried with such observations made of its own string constants, because it can compare with nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from jinja2 import Environment, TemplateError

Frame = tuple[str, str]
"""Texts before and after an observation."""

_MARKS = re.compile(r"[<>\[\]{}|]")
_INNER = "0frame0"
_PROBES = ("a", "A b.", "7", "é", "two\nlines\n\nmore", "'\"&\\", "-", "None", "x" * 3000)


class ObservationFrames:
    """Frames of a template. `render(observation, generation_prompt)` returns the text between two replies."""

    def __init__(self, template: str, render: Callable[[str, bool], str]) -> None:
        self._template, self._render = template, render
        self._frames: dict[bool, Frame | None] = {}
        """By generation prompt; None if a frame depends on the observation."""

    def find(self, generation_prompt: bool, observation: str) -> Frame | None:
        """Return the texts around an observation, or None if it must be rendered."""
        if not _is_plain(observation):
            return None
        if generation_prompt not in self._frames:
            try:
                self._frames[generation_prompt] = self._try(generation_prompt)
            except TemplateError:  # it refuses some observations
                self._frames[generation_prompt] = None
        return self._frames[generation_prompt]

    def _try(self, generation_prompt: bool) -> Frame | None:
        before, found, after = self._render(_INNER, generation_prompt).partition(_INNER)
        texts = filter(_is_plain, [*_PROBES, *_texts_with_constants(self._template)])
        same = all(self._render(text, generation_prompt) == f"{before}{text}{after}" for text in texts)
        return (before, after) if found and same else None


def _is_plain(observation: str) -> bool:
    return observation != "" and observation == observation.strip() and not _MARKS.search(observation)


def _texts_with_constants(template: str) -> list[str]:
    tokens = Environment().lexer.tokenize(template)
    words = sorted({str(token.value).strip() for token in tokens if token.type == "string"})
    return [text for word in words for text in (word, f"{word} a", f"a {word}", f"{word}a", f"a{word}", f"a{word}a")]
