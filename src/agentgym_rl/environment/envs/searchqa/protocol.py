"""The words of the game: how a reply is read, how passages are shown, when an answer is right."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from agentgym_rl.environment.envs.searchqa.passages import Passage

MAX_REPLY_CHARS = 50_000
"""More than any model writes in a turn; the game runs on the event loop and must not be kept busy."""
MAX_QUERY_CHARS = 500
MAX_PASSAGE_CHARS = 2000
"""Passages are about 100 words; of a corpus with whole articles only the beginning is shown."""
MAX_TITLE_CHARS = 200

_TAG = re.compile(r"<(/?)(think|search|answer|information)>", re.IGNORECASE)
_TAG_LIKE = re.compile(r"<(/?[|a-zA-Z!][^<>]{0,60})>")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff\s]+")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Refused(Exception):
    """The reply is malformed; the text is the game's answer."""


@dataclass(frozen=True, slots=True)
class Action:
    kind: Literal["search", "answer"]
    text: str
    """Of a search one line without control characters, of an answer what was written."""


def read_reply(reply: str) -> Action:
    """The one action of a reply, thoughts aside. Takes time in proportion to the reply's length, whatever is in it."""
    if len(reply) > MAX_REPLY_CHARS:
        raise Refused(f"The reply has {len(reply)} characters: at most {MAX_REPLY_CHARS} are read.")
    tags = list(_TAG.finditer(reply))
    last_thought_end = max((n for n, tag in enumerate(tags) if _is(tag, "think", closing=True)), default=-1)
    found: list[tuple[str, str]] = []
    number = 0
    while number < len(tags):
        tag = tags[number]
        kind = tag[2].lower()
        if _is(tag, "think", closing=False) and number < last_thought_end:
            while not _is(tags[number], "think", closing=True):
                number += 1
        elif kind in ("search", "answer") and not tag[1]:
            end = tags[number + 1] if number + 1 < len(tags) else None
            if end is None:
                raise Refused(f"The tag <{kind}> was not closed: write <{kind}>...</{kind}>.")
            if not _is(end, kind, closing=True):
                raise Refused(f"No other tag may stand between <{kind}> and </{kind}>.")
            found.append((kind, reply[tag.end() : end.start()]))
            number += 1
        number += 1
    if not found:
        raise Refused("No action was found: write <search>a query</search> or <answer>the answer</answer>.")
    if len(found) > 1:
        raise Refused(f"Give one action a turn: {len(found)} were found.")
    kind, written = found[0]
    text = one_line(written)
    if not text:
        raise Refused(f"There is nothing between <{kind}> and </{kind}>.")
    if kind == "search":
        if len(text) > MAX_QUERY_CHARS:
            raise Refused(f"The query has {len(text)} characters: at most {MAX_QUERY_CHARS} are searched.")
        return Action("search", text)
    return Action("answer", written.strip())


def _is(tag: re.Match[str], kind: str, *, closing: bool) -> bool:
    return tag[2].lower() == kind and bool(tag[1]) == closing


def one_line(text: str) -> str:
    """Without control characters and invisible ones, single spaces between words."""
    return _UNPRINTABLE.sub(" ", text).strip()


def show_passages(passages: Sequence[Passage]) -> str:
    """What a search is answered with. A passage is data: it stays in its line, and no tag in it is a tag."""
    if not passages:
        return "<information>No document was found.</information>"
    lines = [
        f"Doc {number}(Title: {_shown(passage.title, MAX_TITLE_CHARS)}) {_shown(passage.text, MAX_PASSAGE_CHARS)}"
        for number, passage in enumerate(passages, start=1)
    ]
    return "<information>" + "\n".join(lines) + "</information>"


def _shown(text: str, max_chars: int) -> str:
    line = _TAG_LIKE.sub("‹\\1›", one_line(text))
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"


def normalise(answer: str) -> str:
    """Lower case without punctuation, articles and needless spaces, exactly as the question sets' own scorers do it."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def is_right(answer: str, accepted: Iterable[str]) -> bool:
    """Exact match with any accepted answer after normalisation."""
    given = normalise(answer)
    return any(given == normalise(right) for right in accepted)
