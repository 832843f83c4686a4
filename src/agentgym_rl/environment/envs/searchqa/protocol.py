"""Text protocol: parsing of replies, formatting of passages, comparison of answers."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from agentgym_rl.environment.envs.searchqa.passages import Passage

MAX_REPLY_CHARS = 50_000
"""More than any model writes in a turn. The limit keeps the event loop responsive."""
MAX_QUERY_CHARS = 500
MAX_PASSAGE_CHARS = 2000
"""Passages have about 100 words. Longer ones, such as whole articles, are cut."""
MAX_TITLE_CHARS = 200

_TAG = re.compile(r"<(/?)(think|search|answer|information)>", re.IGNORECASE)
_TAG_LIKE = re.compile(r"<(/?[|a-zA-Z!][^<>]{0,60})>")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff\s]+")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Refused(Exception):
    """The reply is malformed. The agent sees the text."""


@dataclass(frozen=True, slots=True)
class Action:
    kind: Literal["search", "answer"]
    text: str
    """search: one line without control characters; answer: the text as written."""


def read_reply(reply: str) -> Action:
    """Return the only action of a reply, ignoring thoughts. Runs in linear time for every input."""
    if len(reply) > MAX_REPLY_CHARS:
        raise Refused(f"The reply has {len(reply)} characters: at most {MAX_REPLY_CHARS} are read.")
    tags = list(_TAG.finditer(reply))
    last_thought_end = max((n for n, tag in enumerate(tags) if _is_tag(tag, "think", closing=True)), default=-1)
    actions: list[tuple[str, str]] = []
    number = 0
    while number < len(tags):
        tag = tags[number]
        kind = tag[2].lower()
        if _is_tag(tag, "think", closing=False) and number < last_thought_end:
            while not _is_tag(tags[number], "think", closing=True):
                number += 1
        elif kind in ("search", "answer") and not tag[1]:
            end = tags[number + 1] if number + 1 < len(tags) else None
            if end is None:
                raise Refused(f"The tag <{kind}> was not closed: write <{kind}>...</{kind}>.")
            if not _is_tag(end, kind, closing=True):
                raise Refused(f"No other tag may stand between <{kind}> and </{kind}>.")
            actions.append((kind, reply[tag.end() : end.start()]))
            number += 1
        number += 1
    if not actions:
        raise Refused("No action was found: write <search>a query</search> or <answer>the answer</answer>.")
    if len(actions) > 1:
        raise Refused(f"Give one action a turn: {len(actions)} were found.")
    kind, content = actions[0]
    text = one_line(content)
    if not text:
        raise Refused(f"There is nothing between <{kind}> and </{kind}>.")
    if kind == "search":
        if len(text) > MAX_QUERY_CHARS:
            raise Refused(f"The query has {len(text)} characters: at most {MAX_QUERY_CHARS} are searched.")
        return Action("search", text)
    return Action("answer", content.strip())


def _is_tag(tag: re.Match[str], kind: str, *, closing: bool) -> bool:
    return tag[2].lower() == kind and bool(tag[1]) == closing


def one_line(text: str) -> str:
    """Return the text without control and invisible characters, with single spaces between words."""
    return _UNPRINTABLE.sub(" ", text).strip()


def show_passages(passages: Sequence[Passage]) -> str:
    """Return the answer to a search. Each passage is one line, and tags in it are neutralised."""
    if not passages:
        return "<information>No document was found.</information>"
    lines = [
        f"Doc {number}(Title: {_shorten(passage.title, MAX_TITLE_CHARS)}) {_shorten(passage.text, MAX_PASSAGE_CHARS)}"
        for number, passage in enumerate(passages, start=1)
    ]
    return "<information>" + "\n".join(lines) + "</information>"


def _shorten(text: str, max_chars: int) -> str:
    line = _TAG_LIKE.sub("‹\\1›", one_line(text))
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"


def normalise(answer: str) -> str:
    """Return the text in lower case without punctuation, articles and extra spaces, as the sets' own scorers do."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def is_right(answer: str, accepted: Iterable[str]) -> bool:
    """Return whether the answer equals an accepted one after normalisation."""
    normalised = normalise(answer)
    return any(normalised == normalise(right) for right in accepted)
