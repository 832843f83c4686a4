"""How well and how fast supporting paragraphs are found: BM25, dense and hybrid, beside SQLite's full-text search.

    python benchmarks/retrieval.py QUESTIONS.json [--corpus MORE.jsonl ...] [--dense MODEL] [--top 3 5]

QUESTIONS is a HotpotQA or 2WikiMultihopQA file in the distractor setting: each question brings its paragraphs, and says
which of them support the answer. All paragraphs are indexed together, with the passages of --corpus as distractors.
The query is the question itself. Recall at k: the share of a question's supporting paragraphs among the first k,
averaged over questions; "all" is the share of questions with every supporting paragraph among them.
"""

from __future__ import annotations

import argparse
import json
import re
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from agentgym_rl.environment.envs.searchqa.dense import EncoderSettings
from agentgym_rl.environment.envs.searchqa.indexing import Kind, build_index, open_retriever
from agentgym_rl.environment.envs.searchqa.passages import Passage, read_corpus
from agentgym_rl.environment.envs.searchqa.retrieval import Retriever
from agentgym_rl.errors import AgentGymError


class Asked(NamedTuple):
    question: str
    supporting: frozenset[str]
    """Ids of passages."""


class Score(NamedTuple):
    recall: dict[int, float]
    complete: dict[int, float]
    p50_ms: float
    p95_ms: float


class FullTextSearch:
    """The peer: SQLite's FTS5 with its own bm25() and Porter stemming, in memory."""

    cheap = True

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = passages
        self._database = sqlite3.connect(":memory:")
        self._database.execute("create virtual table corpus using fts5(title, text, tokenize='porter unicode61')")
        self._database.executemany("insert into corpus values (?, ?)", ((p.title, p.text) for p in passages))

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        return [self._search(query, k) for query in queries]

    def _search(self, query: str, k: int) -> list[Passage]:
        words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", query))
        rows = self._database.execute("select rowid from corpus where corpus match ? order by rank limit ?", (words, k))
        return [self._passages[row - 1] for (row,) in rows]


def paragraphs(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(title, text) of a question's paragraphs, in either layout of the field."""
    context = row["context"]
    pairs = zip(context["title"], context["sentences"], strict=True) if isinstance(context, dict) else context
    for title, sentences in pairs:
        yield title.strip(), "".join(sentences).strip()


def supporting_titles(row: dict[str, Any]) -> set[str]:
    facts = row["supporting_facts"]
    return {t.strip() for t in (facts["title"] if isinstance(facts, dict) else (title for title, _ in facts))}


def gather(files: Sequence[Path], corpora: Sequence[Path]) -> tuple[list[Passage], list[Asked]]:
    """All passages, each once, and the questions."""
    numbers: dict[tuple[str, str], str] = {}
    asked = []
    for file in files:
        for row in json.loads(file.read_text(encoding="utf-8")):
            own = {pair: numbers.setdefault(pair, str(len(numbers))) for pair in paragraphs(row)}
            wanted = supporting_titles(row)
            asked.append(Asked(row["question"], frozenset(name for (title, _), name in own.items() if title in wanted)))
    for corpus in corpora:
        for passage, _ in read_corpus(corpus):
            numbers.setdefault((passage.title, passage.text), str(len(numbers)))
    return [Passage(name, title, text) for (title, text), name in numbers.items()], asked


def measure(retriever: Retriever, asked: Sequence[Asked], tops: Sequence[int]) -> Score:
    retriever.search([asked[0].question], max(tops))  # files are mapped in, caches are filled
    found: list[list[str]] = []
    times_ms = []
    for question, _ in asked:
        started = time.perf_counter()
        (passages,) = retriever.search([question], max(tops))
        times_ms.append(1000 * (time.perf_counter() - started))
        found.append([passage.id for passage in passages])
    shares = {
        k: [len(a.supporting.intersection(ids[:k])) / len(a.supporting) for a, ids in zip(asked, found, strict=True)]
        for k in tops
    }
    times_ms.sort()
    return Score(
        {k: sum(some) / len(some) for k, some in shares.items()},
        {k: sum(share == 1.0 for share in some) / len(some) for k, some in shares.items()},
        times_ms[len(times_ms) // 2],
        times_ms[int(0.95 * len(times_ms))],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path, nargs="+")
    parser.add_argument("--corpus", type=Path, nargs="*", default=[])
    parser.add_argument("--dense", help="encoder: Hugging Face folder or name")
    parser.add_argument("--query-prefix", default="")
    parser.add_argument("--passage-prefix", default="")
    parser.add_argument("--top", type=int, nargs="+", default=[3, 5])
    options = parser.parse_args()
    passages, asked = gather(options.questions, options.corpus)
    table = Table("retriever", *(f"recall@{k}" for k in options.top), *(f"all@{k}" for k in options.top), box=None)
    for column in ("p50 ms", "p95 ms", "x sqlite"):
        table.add_column(column, justify="right")
    started = time.perf_counter()
    peer = FullTextSearch(passages)
    print(f"{len(asked)} questions, {len(passages)} passages")
    print(f"built: sqlite {time.perf_counter() - started:.1f} s", end="", flush=True)
    base = measure(peer, asked, options.top)
    add_row(table, "sqlite fts5", base, base)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = (json.dumps({"id": p.id, "title": p.title, "text": p.text}) for p in passages)
        (folder / "corpus.jsonl").write_text("\n".join(rows), encoding="utf-8")
        encoder = (
            EncoderSettings(options.dense, options.query_prefix, options.passage_prefix) if options.dense else None
        )
        for settings in (None, encoder) if encoder else (None,):
            started = time.perf_counter()
            build_index(folder / "corpus.jsonl", folder / ("dense" if settings else "words"), settings)
            print(
                f", {'with vectors' if settings else 'words'} {time.perf_counter() - started:.1f} s", end="", flush=True
            )
        print()
        kinds: tuple[Kind, ...] = ("bm25", "dense", "hybrid") if encoder else ("bm25",)
        for kind in kinds:
            retriever = open_retriever(str(folder / ("dense" if encoder else "words")), kind)
            add_row(table, kind, measure(retriever, asked, options.top), base)
    Console().print(table)


def add_row(table: Table, name: str, score: Score, base: Score) -> None:
    shares = [f"{value:.1%}" for value in (*score.recall.values(), *score.complete.values())]
    table.add_row(name, *shares, f"{score.p50_ms:.2f}", f"{score.p95_ms:.2f}", f"{base.p50_ms / score.p50_ms:.1f}")


if __name__ == "__main__":
    try:
        main()
    except AgentGymError as error:
        sys.exit(f"retrieval: {error}")
