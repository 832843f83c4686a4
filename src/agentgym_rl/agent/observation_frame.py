"""The texts that a chat template writes around an observation, so that it need not be rendered every time.

A template may look into an observation: it may trim it, cut it, or search it for a mark of its own. So a frame is used
only for plain observations: without white space around them, without the characters that marks are made of, and not
long. The template is first tried with such observations made of the strings that it can compare them with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import pairwise

from jinja2 import Environment, TemplateError

from agentgym_rl.errors import ConfigError

Frame = tuple[str, str]
"""Texts before and after an observation."""

_MARKS = re.compile(r"[<>\[\]{}|]")
_INNER = "0frame0"
_MAX_CHARS = 2000
_PROBES = (
    *(
        "a",
        "A b.",
        "LOUD",
        "7",
        "1.5",
        "é",
        "two\nlines\n\nmore",
        "two\r\nlines",
        "a\tb",
        "a  b",
        "'\"&\\",
        "-",
        "None",
    ),
    *("x" * _MAX_CHARS, "x " * (_MAX_CHARS // 2 - 1) + "x", "x\n" * (_MAX_CHARS // 2 - 1) + "x"),
)


class ObservationFrames:
    """Frames of a template. `render(observation, generation_prompt)` returns the text between two replies.

    `values` are strings that the template gets besides messages.
    """

    def __init__(self, template: str, values: Iterable[str], render: Callable[[str, bool], str]) -> None:
        self._template, self._values, self._render = template, tuple(values), render
        self._frames: dict[bool, Frame | None] = {}
        """By generation prompt; None if a frame depends on the observation."""

    def find(self, generation_prompt: bool, observation: str) -> Frame | None:
        """Return the texts around an observation, or None if it must be rendered."""
        if not _is_plain(observation):
            return None
        if generation_prompt not in self._frames:
            try:
                self._frames[generation_prompt] = self._try(generation_prompt)
            except (TemplateError, ConfigError, ValueError):  # it refuses some observations, or drops the reply before
                self._frames[generation_prompt] = None
        return self._frames[generation_prompt]

    def _try(self, generation_prompt: bool) -> Frame | None:
        before, found, after = self._render(_INNER, generation_prompt).partition(_INNER)
        texts = filter(_is_plain, [*_PROBES, *_texts_with([*_constants(self._template), *self._values])])
        same = all(self._render(text, generation_prompt) == f"{before}{text}{after}" for text in texts)
        return (before, after) if found and same else None


def _is_plain(observation: str) -> bool:
    is_short = 0 < len(observation) <= _MAX_CHARS
    return is_short and observation == observation.strip() and not _MARKS.search(observation)


def _constants(template: str) -> list[str]:
    """Return the string constants of a template, each alone and with the next, which it may append."""
    constants = [str(token.value) for token in Environment().lexer.tokenize(template) if token.type == "string"]
    return [*constants, *map("".join, pairwise(constants))]


def _texts_with(constants: list[str]) -> list[str]:
    texts: dict[str, None] = {}
    for constant in constants:
        word = constant.strip()
        around = (word, f"{word} a", f"a {word}", f"{word}a", f"a{word}", f"a{word}a", f"a{constant}a")
        texts |= dict.fromkeys(around)
    return list(texts)
