"""Retrieval: the interface, a BM25 index on tantivy, and the fusion of several retrievers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

from agentgym_rl.environment.envs.searchqa.passages import Passage, PassageStore
from agentgym_rl.errors import ConfigError

try:
    import tantivy
except ImportError as error:
    raise ConfigError("searchqa needs the package 'tantivy': pip install 'agentgym-rl[searchqa]'") from error

MAX_TERMS = 64
"""Distinct words of a query that are searched. It limits the cost of a hostile query."""
TITLE_BOOST = 0.5
_ANALYZER = "english"
_WRITER_BYTES = 128_000_000


class Retriever(Protocol):
    """Search engine over passages. Failures raise EnvError."""

    cheap: bool
    """Whether a query takes at most a few milliseconds and never blocks."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return up to `k` passages per query, best first. A query without a known word finds nothing."""


@cache
def analyzer() -> tantivy.TextAnalyzer:
    """Return the analyzer: lower case, no accents, no stop words, English stems."""
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    for step in (
        tantivy.Filter.remove_long(40),
        tantivy.Filter.lowercase(),
        tantivy.Filter.ascii_fold(),
        tantivy.Filter.stopword("english"),
        tantivy.Filter.stemmer("english"),
    ):
        builder = builder.filter(step)
    return builder.build()


def _schema() -> tantivy.Schema:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("title", tokenizer_name=_ANALYZER, index_option="freq")
    builder.add_text_field("contents", tokenizer_name=_ANALYZER, index_option="freq")
    builder.add_unsigned_field("place", fast=True)
    return builder.build()


class BM25Writer:
    """Builder of a BM25 index, in memory or in a folder. It numbers passages in the order they are added."""

    def __init__(self, folder: Path | None = None) -> None:
        self._index = tantivy.Index(_schema(), None if folder is None else str(folder), reuse=False)
        self._index.register_tokenizer(_ANALYZER, analyzer())
        # One thread: with several, the order of passages would depend on timing.
        self._writer = self._index.writer(_WRITER_BYTES, num_threads=1)
        self._num_passages = 0

    def add(self, passage: Passage) -> None:
        document = tantivy.Document()
        document.add_text("title", passage.title)
        document.add_text("contents", passage.contents)
        document.add_unsigned("place", self._num_passages)
        self._writer.add_document(document)
        self._num_passages += 1

    def abandon(self) -> None:
        """Stop the writer's threads, so that its folder can be removed."""
        self._writer.rollback()
        self._writer.wait_merging_threads()

    def close(self) -> tantivy.Index:
        self._writer.commit()
        self._writer.wait_merging_threads()
        self._index.reload()
        return self._index


class BM25Retriever:
    """Okapi BM25 (k1 1.2, b 0.75) over title and text together, plus a weighted score over the title."""

    def __init__(self, index: tantivy.Index, passages: PassageStore, *, cheap: bool = True) -> None:
        self.cheap = cheap
        self._schema = index.schema
        self._searcher = index.searcher()
        self._passages = passages

    @classmethod
    def open(cls, folder: Path, passages: PassageStore, *, cheap: bool = True) -> BM25Retriever:
        return cls(tantivy.Index.open(str(folder)), passages, cheap=cheap)

    @classmethod
    def from_passages(cls, passages: Sequence[Passage]) -> BM25Retriever:
        """Return a retriever over an index in memory."""
        writer = BM25Writer()
        for passage in passages:
            writer.add(passage)
        return cls(writer.close(), passages)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        return [[self._passages[index] for index in self.search_indices(query, k)] for query in queries]

    def search_indices(self, query: str, k: int) -> list[int]:
        # One term query per word: no part of the query is parsed as query syntax.
        terms = list(dict.fromkeys(analyzer().analyze(query)))[:MAX_TERMS]
        if not terms or k < 1:
            return []
        parts = []
        for term in terms:
            parts.append((tantivy.Occur.Should, tantivy.Query.term_query(self._schema, "contents", term, "freq")))
            in_title = tantivy.Query.term_query(self._schema, "title", term, "freq")
            parts.append((tantivy.Occur.Should, tantivy.Query.boost_query(in_title, TITLE_BOOST)))
        # Fetch more than k, so that ties follow the order of the corpus and not of the segments.
        result = self._searcher.search(tantivy.Query.boolean_query(parts), limit=2 * k + 8, count=False)
        addresses = [address for _, address in result.hits]
        numbers = self._searcher.fast_field_values("place", addresses)
        scored = [(-score, int(index or 0)) for (score, _), index in zip(result.hits, numbers, strict=True)]
        return [index for _, index in sorted(scored)[:k]]


class HybridRetriever:
    """Reciprocal rank fusion: a passage scores the sum of 1 / (60 + rank) over the retrievers that found it."""

    CONSTANT = 60
    MIN_DEPTH = 50
    """Smallest number of ranks read from each retriever. Lower ranks hardly count."""

    def __init__(self, retrievers: Sequence[Retriever]) -> None:
        self.cheap = all(retriever.cheap for retriever in retrievers)
        self._retrievers = tuple(retrievers)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        depth = max(self.MIN_DEPTH, 2 * k)
        rankings = [retriever.search(queries, depth) for retriever in self._retrievers]
        return [fuse(lists, k, self.CONSTANT) for lists in zip(*rankings, strict=True)]


def fuse(rankings: Iterable[Sequence[Passage]], k: int, constant: int) -> list[Passage]:
    """Return the `k` best passages of several rankings. Ties go to the passage found first."""
    scores: dict[str, float] = {}
    passages: dict[str, Passage] = {}
    for ranking in rankings:
        for rank, passage in enumerate(ranking, start=1):
            scores[passage.id] = scores.get(passage.id, 0.0) + 1.0 / (constant + rank)
            passages.setdefault(passage.id, passage)
    return [passages[passage_id] for passage_id in sorted(scores, key=lambda passage_id: -scores[passage_id])[:k]]
