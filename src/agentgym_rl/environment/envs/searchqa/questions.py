"""Questions with their accepted answers and the passages that hold their facts."""

from __future__ import annotations

from dataclasses import dataclass

DATASETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
"""The seven question sets of deep search, in the usual order of results."""
HOPS = ("hop1", "hop2", "hop3")
"""Subsets of the built-in questions, by the number of passages needed."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One passage to find on the way to an answer."""

    query: str
    """Query that finds the passage."""
    title: str
    """Title of the passage. If it is empty, searching for `query` is enough."""
    why: str
    """Thought of the oracle before the search."""


@dataclass(frozen=True, slots=True)
class Question:
    """One item."""

    text: str
    answers: tuple[str, ...]
    """Accepted answers. The oracle gives the first."""
    subset: str
    facts: tuple[Fact, ...]
    """Facts in an order in which they can be found."""
    gold: tuple[str, ...] = ()
    """Ids of the passages that support the answer, if the file names them."""
