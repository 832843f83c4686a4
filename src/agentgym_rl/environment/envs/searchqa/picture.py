"""HTML page of an episode: the question, the searches with their passages, the answer. It loads nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from agentgym_rl.environment.envs.searchqa.passages import Passage
from agentgym_rl.environment.envs.searchqa.protocol import one_line
from agentgym_rl.environment.envs.searchqa.questions import Question

_MAX_CHARS = 420
_STYLE = """
:root { --ink: #1f2933; --soft: #6b7785; --line: #d9dee4; --blue: #2563a8; --green: #23834a; --red: #b4392f }
* { box-sizing: border-box }
body { margin: 0; background: #f3f5f7; color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif }
main { max-width: 860px; margin: 0 auto; padding: 28px 24px 36px }
.label { font-size: 12px; font-weight: 600; letter-spacing: .08em; text-transform: uppercase; color: var(--soft) }
.chip { display: inline-block; margin-left: 10px; padding: 0 10px; border-radius: 10px; background: #e4ecf5;
  color: var(--blue); letter-spacing: 0; text-transform: none }
h1 { font-size: 24px; line-height: 1.3; margin: 4px 0 22px }
section { position: relative; margin: 0 0 18px; padding: 0 0 0 44px }
section:before { content: attr(data-number); position: absolute; left: 0; top: 2px; width: 28px; height: 28px;
  border-radius: 14px; background: var(--blue); color: #fff; font-weight: 600; font-size: 13px; line-height: 28px;
  text-align: center }
section:after { content: ""; position: absolute; left: 13px; top: 34px; bottom: -16px; width: 2px;
  background: var(--line) }
section:last-of-type:after { display: none }
.query { display: inline-block; max-width: 100%; padding: 4px 14px; border: 1px solid var(--line);
  border-radius: 16px; background: #fff; font-weight: 600; overflow-wrap: anywhere }
.query:before { content: "search"; margin-right: 10px; color: var(--soft); font-size: 12px; font-weight: 600 }
article { margin: 10px 0 0; padding: 9px 14px; border: 1px solid var(--line); border-radius: 8px; background: #fff;
  overflow-wrap: anywhere }
article.needed { border-color: #8fc7a5; background: #f2faf5 }
article b { display: block }
article.needed b:after { content: "needed"; margin-left: 10px; padding: 0 8px; border-radius: 8px;
  background: #d6eede; color: var(--green); font-size: 11px; font-weight: 600 }
article p { margin: 2px 0 0; color: #46525f; font-size: 14px }
mark { background: #fdeeb3; color: inherit; padding: 0 1px; border-radius: 2px }
.none { color: var(--soft); margin: 8px 0 0 }
.refused:before { background: #a7b0ba }
.refused .said { color: var(--soft) }
.right:before, .right .verdict { background: var(--green) }
.wrong:before, .wrong .verdict { background: var(--red) }
.final { display: flex; align-items: baseline; gap: 14px; flex-wrap: wrap }
.final strong { font-size: 20px; overflow-wrap: anywhere }
.verdict { padding: 1px 12px; border-radius: 11px; color: #fff; font-size: 13px; font-weight: 600 }
.gold { margin: 2px 0 0; color: var(--soft); font-size: 14px }
"""


@dataclass(frozen=True, slots=True)
class Turn:
    """Outcome of one reply."""

    kind: Literal["search", "refused", "right", "wrong"]
    text: str
    """The query, the reason of a refusal, or the answer."""
    passages: tuple[Passage, ...]


def draw(question: Question, turns: Sequence[Turn]) -> str:
    needed = {fact.title for fact in question.facts if fact.title}
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>SearchQA</title>',
        f"<style>{_STYLE}</style></head><body><main>",
        f'<div class="label">Question<span class="chip">{escape(question.subset)}</span></div>',
        f"<h1>{escape(question.text)}</h1>",
        *(_turn(number, turn, question, needed) for number, turn in enumerate(turns, start=1)),
        "</main></body></html>",
    ]
    return "\n".join(parts)


def _turn(number: int, turn: Turn, question: Question, needed: set[str]) -> str:
    head = f'<section class="{turn.kind}" data-number="{number}">'
    if turn.kind == "search":
        passages = "".join(_passage(passage, turn.text, needed) for passage in turn.passages)
        return f'{head}<span class="query">{_clipped(turn.text)}</span>{passages or _NOTHING}</section>'
    if turn.kind == "refused":
        return f'{head}<div class="label">Not understood</div><div class="said">{_clipped(turn.text)}</div></section>'
    verdict = "right" if turn.kind == "right" else "wrong"
    gold = "" if verdict == "right" else f'<p class="gold">accepted: {_clipped(" · ".join(question.answers[:6]))}</p>'
    return (
        f'{head}<div class="label">Answer</div><div class="final"><strong>{_clipped(turn.text)}</strong>'
        f'<span class="verdict">{verdict}</span></div>{gold}</section>'
    )


_NOTHING = '<p class="none">No document was found.</p>'


def _passage(passage: Passage, query: str, needed: set[str]) -> str:
    mark = ' class="needed"' if passage.title in needed else ""
    return f"<article{mark}><b>{_clipped(passage.title)}</b><p>{_highlighted(passage.text, query)}</p></article>"


def _clipped(text: str) -> str:
    line = one_line(text)
    return escape(line if len(line) <= _MAX_CHARS else line[: _MAX_CHARS - 1] + "…")


def _highlighted(text: str, query: str) -> str:
    """Return the text as escaped HTML with the query's words marked."""
    words = sorted({re.escape(word) for word in re.findall(r"\w{3,}", query)[:40]}, key=len, reverse=True)
    line = one_line(text)
    line = line if len(line) <= _MAX_CHARS else line[: _MAX_CHARS - 1] + "…"
    if not words:
        return escape(line)
    pieces = re.split(rf"\b({'|'.join(words)})\b", line, flags=re.IGNORECASE)
    return "".join(f"<mark>{escape(p)}</mark>" if n % 2 else escape(p) for n, p in enumerate(pieces))
