"""What is asked: a question, its accepted answers, and where its facts are."""

from __future__ import annotations

from dataclasses import dataclass

DATASETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
"""The seven question sets of deep search, in the order results are usually given."""
HOPS = ("hop1", "hop2", "hop3")
"""Of the built-in questions: how many passages have to be read together."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One passage to find on the way to an answer."""

    query: str
    """A search that finds it."""
    title: str
    """The passage's title; empty where it is not known, and then the search alone counts."""
    why: str
    """What the oracle says before it searches."""


@dataclass(frozen=True, slots=True)
class Question:
    """One item."""

    text: str
    answers: tuple[str, ...]
    """Any of them is right; the first is the oracle's."""
    subset: str
    facts: tuple[Fact, ...]
    """In the order in which they can be looked for."""
