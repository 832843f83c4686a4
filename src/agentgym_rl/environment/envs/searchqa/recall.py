"""What retrieval finds: recall of gold passages, answers shown, and milliseconds a query.

Three ways to search bound what a policy can reach with a retriever:

question   the question as asked, once
follow     the question, and if there are several gold passages the question with the beginning of the best passage
titles     the titles of the gold passages, one after the other: queries as good as they can be
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentgym_rl.common.intervals import Z_95
from agentgym_rl.environment.envs.searchqa.datasets import facts_of
from agentgym_rl.environment.envs.searchqa.passages import Passage
from agentgym_rl.environment.envs.searchqa.protocol import normalise
from agentgym_rl.environment.envs.searchqa.questions import Question
from agentgym_rl.environment.envs.searchqa.retrieval import Retriever

TOPS = (3, 5, 10)
TIMED_QUERIES = 100
"""Queries that are sent one by one and timed. The others are sent in batches."""
BATCH = 256
FOLLOW_WORDS = 20
"""Words of the best passage in the second query of `follow`."""
Progress = Callable[[int, int], None]


def with_gold(questions: Sequence[Question], titles: Mapping[str, str]) -> list[Question]:
    """Return the questions whose gold passages are known and in the corpus, with their titles as facts."""
    ids_by_title: dict[str, str] = {title: name for name, title in titles.items()}
    known = []
    for question in questions:
        gold = question.gold or tuple(ids_by_title.get(fact.title, "") for fact in question.facts if fact.title)
        if gold and all(name in titles for name in gold):
            facts = facts_of([titles[name] for name in gold])
            known.append(replace(question, gold=tuple(dict.fromkeys(gold)), facts=facts))
    return known


def measure(
    retriever: Retriever, questions: Sequence[Question], progress: Progress = lambda *_: None
) -> dict[str, Any]:
    """Return recall, `all` (every gold passage found) and `answer` (it is in the text shown) by way and depth."""
    k, total = max(TOPS), 3 * len(questions)
    milliseconds = _time(retriever, [question.text for question in questions[:TIMED_QUERIES]], k)
    asked = _search(retriever, [question.text for question in questions], k, lambda done: progress(done, total))
    further = [
        (number, f"{question.text} {' '.join(asked[number][0].contents.split()[:FOLLOW_WORDS])}")
        for number, question in enumerate(questions)
        for _ in question.gold[1:2]
        if asked[number]
    ]
    titles = [(number, fact.title) for number, question in enumerate(questions) for fact in question.facts]
    done = len(questions)
    found = {
        number: result
        for (number, _), result in zip(
            further, _search(retriever, [q for _, q in further], k, lambda n: progress(done + n, total)), strict=True
        )
    }
    perfect: list[list[list[Passage]]] = [[] for _ in questions]
    results = _search(retriever, [q for _, q in titles], k, lambda n: progress(min(total, 2 * done + n), total))
    for (number, _), result in zip(titles, results, strict=True):
        perfect[number].append(result)
    ways = {
        "question": [[first] for first in asked],
        "follow": [[first, *([found[n]] if n in found else [])] for n, first in enumerate(asked)],
        "titles": perfect,
    }
    return {
        "questions": len(questions),
        "gold": statistics.fmean(len(question.gold) for question in questions),
        "ms": milliseconds,
        **{way: {str(top): _score(questions, shown, top) for top in TOPS} for way, shown in ways.items()},
    }


def _score(questions: Sequence[Question], shown: Sequence[list[list[Passage]]], top: int) -> dict[str, Any]:
    """Return means over questions of what the first `top` passages of each query hold."""
    recalls, answered = [], []
    for question, rankings in zip(questions, shown, strict=True):
        passages = [passage for ranking in rankings for passage in ranking[:top]]
        ids = {passage.id for passage in passages}
        recalls.append(len(ids & set(question.gold)) / len(question.gold))
        text = f" {normalise(' '.join(passage.contents for passage in passages))} "
        answered.append(float(any(f" {normalise(answer)} " in text for answer in question.answers)))
    complete = [float(recall == 1.0) for recall in recalls]
    return {"recall": _mean(recalls), "all": _mean(complete), "answer": _mean(answered)}


def _mean(values: list[float]) -> list[float]:
    """Return [mean, half width of its 95% interval]."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return [round(statistics.fmean(values), 4), round(Z_95 * deviation / math.sqrt(len(values)), 4)]


def _time(retriever: Retriever, queries: Sequence[str], k: int) -> float:
    """Return the median milliseconds of a query sent alone."""
    retriever.search(queries[:1], k)  # maps files and fills caches
    times = []
    for query in queries:
        started = time.perf_counter()
        retriever.search([query], k)
        times.append(1000 * (time.perf_counter() - started))
    return round(statistics.median(times), 3)


def _search(
    retriever: Retriever, queries: Sequence[str], k: int, progress: Callable[[int], None]
) -> list[list[Passage]]:
    found: list[list[Passage]] = []
    for start in range(0, len(queries), BATCH):
        found += retriever.search(queries[start : start + BATCH], k)
        progress(len(found))
    return found
