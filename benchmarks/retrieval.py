"""Measure recall and speed of retrieval: BM25, dense and hybrid, with SQLite's full-text search as the peer.

    python benchmarks/retrieval.py QUESTIONS.json [--corpus MORE.jsonl ...] [--dense MODEL] [--top 3 5]

QUESTIONS is a HotpotQA or 2WikiMultihopQA file in the distractor setting: each question lists its paragraphs and
those that support the answer. All paragraphs are indexed together, with the passages of --corpus as distractors.
The query is the question itself. Recall at k: the share of a question's supporting paragraphs among the first k,
averaged over questions; "all" is the share of questions with every supporting paragraph among them.
"""

from __future__ import annotations

import argparse
import json
import re
import sqlite3
import statistics
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


class Question(NamedTuple):
    text: str
    supporting: frozenset[str]
    """Ids of the passages that support the answer."""


class Score(NamedTuple):
    recall: dict[int, float]
    complete: dict[int, float]
    p50_ms: float
    p95_ms: float


class FullTextSearch:
    """Peer: SQLite's FTS5 in memory, with its own bm25() and Porter stemming."""

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
    """Yield (title, text) of a question's paragraphs, in either layout of the field."""
    context = row["context"]
    pairs = zip(context["title"], context["sentences"], strict=True) if isinstance(context, dict) else context
    for title, sentences in pairs:
        yield title.strip(), "".join(sentences).strip()


def supporting_titles(row: dict[str, Any]) -> set[str]:
    facts = row["supporting_facts"]
    return {t.strip() for t in (facts["title"] if isinstance(facts, dict) else (title for title, _ in facts))}


def gather(files: Sequence[Path], corpora: Sequence[Path]) -> tuple[list[Passage], list[Question]]:
    """Return all passages without duplicates, and the questions."""
    ids: dict[tuple[str, str], str] = {}
    questions = []
    for file in files:
        for row in json.loads(file.read_text(encoding="utf-8")):
            own = {pair: ids.setdefault(pair, str(len(ids))) for pair in paragraphs(row)}
            wanted = supporting_titles(row)
            supporting = frozenset(name for (title, _), name in own.items() if title in wanted)
            questions.append(Question(row["question"], supporting))
    for corpus in corpora:
        for passage, _ in read_corpus(corpus):
            ids.setdefault((passage.title, passage.text), str(len(ids)))
    return [Passage(name, title, text) for (title, text), name in ids.items()], questions


def measure(retriever: Retriever, questions: Sequence[Question], tops: Sequence[int]) -> Score:
    retriever.search([questions[0].text], max(tops))  # map the files and fill the caches
    retrieved: list[list[str]] = []
    times_ms = []
    for question, _ in questions:
        started = time.perf_counter()
        (passages,) = retriever.search([question], max(tops))
        times_ms.append(1000 * (time.perf_counter() - started))
        retrieved.append([passage.id for passage in passages])
    shares = {
        k: [len(q.supporting & set(top[:k])) / len(q.supporting) for q, top in zip(questions, retrieved, strict=True)]
        for k in tops
    }
    times_ms.sort()
    return Score(
        {k: statistics.fmean(recalls) for k, recalls in shares.items()},
        {k: statistics.fmean(recall == 1.0 for recall in recalls) for k, recalls in shares.items()},
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
    passages, questions = gather(options.questions, options.corpus)
    table = Table("retriever", *(f"recall@{k}" for k in options.top), *(f"all@{k}" for k in options.top), box=None)
    for column in ("p50 ms", "p95 ms", "x sqlite"):
        table.add_column(column, justify="right")
    started = time.perf_counter()
    peer = FullTextSearch(passages)
    print(f"{len(questions)} questions, {len(passages)} passages")
    print(f"built: sqlite {time.perf_counter() - started:.1f} s", end="", flush=True)
    base = measure(peer, questions, options.top)
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
            add_row(table, kind, measure(retriever, questions, options.top), base)
    Console().print(table)


def add_row(table: Table, name: str, score: Score, base: Score) -> None:
    shares = [f"{value:.1%}" for value in (*score.recall.values(), *score.complete.values())]
    table.add_row(name, *shares, f"{score.p50_ms:.2f}", f"{score.p95_ms:.2f}", f"{base.p50_ms / score.p50_ms:.1f}")


if __name__ == "__main__":
    try:
        main()
    except AgentGymError as error:
        sys.exit(f"retrieval: {error}")
