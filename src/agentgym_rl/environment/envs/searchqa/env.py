"""SearchQA as a text environment, over the built-in questions or the user's data set and index."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar, get_args

from agentgym_rl.environment.base import check_item
from agentgym_rl.environment.envs.searchqa import published
from agentgym_rl.environment.envs.searchqa.builtin import SPLITS, builtin_questions
from agentgym_rl.environment.envs.searchqa.datasets import Rows, facts_of, load_with_rows
from agentgym_rl.environment.envs.searchqa.geography import corpus
from agentgym_rl.environment.envs.searchqa.indexing import Kind, open_retriever, titles_by_id
from agentgym_rl.environment.envs.searchqa.passages import Passage
from agentgym_rl.environment.envs.searchqa.picture import Turn, draw
from agentgym_rl.environment.envs.searchqa.protocol import Refused, is_right, read_reply, show_passages
from agentgym_rl.environment.envs.searchqa.questions import DATASETS, HOPS, Fact, Question
from agentgym_rl.environment.envs.searchqa.retrieval import BM25Retriever, Retriever
from agentgym_rl.environment.tools import Tool
from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.types import Step

DATA_VARIABLE = "AGENTGYM_SEARCHQA_DATA"
INDEX_VARIABLE = "AGENTGYM_SEARCHQA_INDEX"

INSTRUCTION = """\
You answer a question with the help of a search engine. Think first, between <think> and </think>, whenever you \
get new information. Then do exactly one of two things:
- <search>a query</search> searches a collection of documents. The best matches come back between <information> and \
</information>. You may search as often as you need; some questions need several facts, one after the other.
- <answer>the answer</answer> gives your answer and ends the task. There is only one try.

Give the answer itself, as short as it can be, without explanations. For example: <answer>Beijing</answer>"""

TOOLS = (
    Tool(
        "search",
        "Search a collection of documents and read the best matches.",
        "<search>{query}</search>",
        {"query": {"type": "string"}},
    ),
    Tool(
        "answer",
        "Give the answer and end the task. There is only one try.",
        "<answer>{answer}</answer>",
        {"answer": {"type": "string", "description": "The answer itself, as short as it can be."}},
    ),
)

_ENDED = "The answer was received. The task is over."
_MAX_ACTIONS = 12


class SearchQA:
    """Questions that the agent answers by searching. Implements TextEnv. See `searchqa_from` for other data."""

    name: ClassVar[str] = "searchqa"
    instruction: ClassVar[str] = INSTRUCTION
    splits: ClassVar[Mapping[str, range]] = SPLITS
    subsets: ClassVar[tuple[str, ...]] = (*HOPS, *DATASETS)
    cheap: ClassVar[bool] = True
    passages_per_search: ClassVar[int] = 3

    def __init__(self) -> None:
        self._retriever = self.retriever()
        self._item = -1
        self._question: Question
        self._turns: list[Turn] = []
        self._seen: dict[str, Passage] = {}
        """Passages by id, in the order they were found."""
        self._answer: str | None = None
        self._playing = False

    @classmethod
    def tools(cls) -> Sequence[Tool]:
        return TOOLS

    @classmethod
    def questions(cls) -> Sequence[Question]:
        """Return the questions by item number."""
        return builtin_questions()

    def fork(self) -> SearchQA:
        """Return a copy that shares the retriever."""
        other = copy.copy(self)
        other._turns, other._seen = list(self._turns), dict(self._seen)
        return other

    @classmethod
    def retriever(cls) -> Retriever:
        """Return the retriever, shared by all sessions of the process."""
        return _builtin_retriever()

    @classmethod
    def question(cls, item: int) -> Question:
        return cls.questions()[check_item(cls, item)]

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return (cls.question(item).subset,)

    @classmethod
    def rows(cls) -> Rows:
        """Return the index of each question of the files. Empty for the built-in questions."""
        return {}

    @classmethod
    def agentgym_item(cls, number: int) -> int:
        """Return the item of AgentGym's number if the files hold its questions, otherwise the number itself."""
        return cls.published_item(number) if published.is_published(cls.rows()) else number

    @classmethod
    def published_item(cls, number: int) -> int:
        split, dataset, index = published.locate(number)
        rows = cls.rows().get((split, dataset), [])
        if not published.is_published(cls.rows()):
            raise ConfigError(
                f"searchqa_{number} needs AgentGym's {published.COUNTS[split, dataset]} {split} questions of {dataset},"
                f" got {len(rows)}: set {DATA_VARIABLE} to the files of all of AgentGym's questions, or choose items "
                "by their own numbers"
            )
        if rows[index] < 0:
            raise ConfigError(
                f"searchqa_{number} is a training question that is also a test question and is left out: remove it "
                "from the list"
            )
        return cls.splits[split][rows[index]]

    def reset(self, item: int) -> str:
        self._question = self.question(item)
        self._item = item
        self._turns = []
        self._seen = {}
        self._answer = None
        self._playing = True
        return f"Question: {self._question.text}"

    def step(self, text: str) -> Step:
        self._require_playing()
        try:
            action = read_reply(text)
        except Refused as refusal:
            self._turns.append(Turn("refused", str(refusal), ()))
            return Step(str(refusal), info={"valid": False})
        if action.kind == "answer":
            return self._end(action.text)
        (passages,) = self._retriever.search([action.text], self.passages_per_search)
        self._turns.append(Turn("search", action.text, tuple(passages)))
        for passage in passages:
            self._seen.setdefault(passage.id, passage)
        return Step(show_passages(passages), info={"valid": True})

    def _end(self, answer: str) -> Step:
        """End the episode. The text is the same for right and wrong answers; only the reward differs."""
        success = is_right(answer, self._question.answers)
        self._turns.append(Turn("right" if success else "wrong", answer, ()))
        self._answer = answer
        self._playing = False
        return Step(_ENDED, float(success), True, {"valid": True, "success": success})

    def close(self) -> None:
        self._playing = False

    def actions(self) -> list[str]:
        """Return searches for the question, its names and found titles, and answers with found titles."""
        if not self._playing:
            return []
        titles = [passage.title for passage in self._seen.values() if passage.title]
        names = list(dict.fromkeys([*_probable_names(self._question.text), *titles]))[:_MAX_ACTIONS]
        searches = [self._question.text, *names]
        answers = [title.partition(" (")[0] for title in titles[:_MAX_ACTIONS]]
        candidates = [
            *(f"<search>{text}</search>" for text in searches),
            *(f"<answer>{text}</answer>" for text in answers),
        ]
        return [action for action in dict.fromkeys(candidates) if _is_valid(action)]

    def oracle(self) -> str:
        """Return a search for the next passage neither seen nor searched for, or else the answer."""
        self._require_playing()
        for fact in self._question.facts:
            if not self._is_found(fact):
                return f"<think>{fact.why}</think>\n<search>{fact.query}</search>"
        answer = self._question.answers[0]
        return f"<think>I know enough to answer.</think>\n<answer>{answer}</answer>"

    def _is_found(self, fact: Fact) -> bool:
        if any(turn.kind == "search" and turn.text == fact.query for turn in self._turns):
            return True
        return bool(fact.title) and any(passage.title == fact.title for passage in self._seen.values())

    def state_key(self) -> str:
        """Return `12|` and a digest of the passages seen, in any order, or `12|answered` at the end."""
        if self._answer is not None:
            return f"{self._item}|answered"
        digest = hashlib.sha256("\n".join(sorted(self._seen)).encode(errors="replace")).hexdigest()
        return f"{self._item}|{digest[:16] if self._seen else 'nothing found yet'}"

    def render(self) -> str:
        """Return an HTML page with the question, the searches with their passages and the answer."""
        if self._item < 0:
            raise EnvError("searchqa has nothing to draw yet: call reset first")
        return draw(self._question, self._turns)

    def _require_playing(self) -> None:
        if not self._playing:
            raise EnvError("searchqa needs a running episode: call reset first")


def _probable_names(question: str) -> list[str]:
    """Return the probable names in a question: runs of capitalised words after the first word."""
    names: list[str] = []
    run: list[str] = []
    for word in [*question.split()[1:], ""]:
        stripped = word.strip("?,.:;\"'()")
        if stripped[:1].isupper():
            run.append(stripped)
        if not stripped[:1].isupper() or stripped != word:
            names += [" ".join(run)] if run else []
            run = []
    return names


def _is_valid(action: str) -> bool:
    try:
        read_reply(action)
    except Refused:
        return False
    return True


@cache
def _builtin_retriever() -> BM25Retriever:
    return BM25Retriever.from_passages(corpus())


@lru_cache(maxsize=16)
def searchqa_from(
    data: str | Path,
    index: str | Path,
    *,
    retrieval: Kind = "auto",
    passages_per_search: int = 3,
    test_share: float | None = None,
) -> type[SearchQA]:
    """Return a SearchQA class over question files and an index folder or the address of a /retrieve service.

    The same arguments return the same class. `data` is a file or a folder, see docs/reference/environments/searchqa.md.
    """
    if passages_per_search < 1:
        raise ConfigError(f"searchqa shows at least 1 passage a search, got passages_per_search={passages_per_search}")
    if retrieval not in get_args(Kind):
        raise ConfigError(f"searchqa: retrieval is one of {', '.join(get_args(Kind))}, got {retrieval!r}")
    if test_share is not None and not 0 < test_share < 1:
        raise ConfigError(f"searchqa: test_share is a share between 0 and 1, got {test_share!r}")
    loaded, loaded_rows = load_with_rows(Path(data), test_share)
    shared_retriever = open_retriever(str(index), retrieval)
    num_train = len(loaded["train"])
    all_questions = _with_titles((*loaded["train"], *loaded["test"]), str(index))
    per_search = passages_per_search

    class SearchQAFrom(SearchQA):
        splits: ClassVar[Mapping[str, range]] = {
            "train": range(num_train),
            "test": range(num_train, len(all_questions)),
        }
        subsets: ClassVar[tuple[str, ...]] = DATASETS
        cheap: ClassVar[bool] = shared_retriever.cheap
        passages_per_search: ClassVar[int] = per_search

        @classmethod
        def questions(cls) -> Sequence[Question]:
            return all_questions

        @classmethod
        def rows(cls) -> Rows:
            return loaded_rows

        @classmethod
        def retriever(cls) -> Retriever:
            return shared_retriever

    return SearchQAFrom


def _with_titles(questions: tuple[Question, ...], index: str) -> tuple[Question, ...]:
    """Return the questions with the titles of their gold passages as facts, if the index is a folder that has them."""
    if not any(question.gold for question in questions) or index.startswith(("http://", "https://")):
        return questions
    titles = titles_by_id(Path(index))
    return tuple(
        replace(question, facts=facts_of([titles[name] for name in question.gold]))
        if question.gold and all(titles.get(name) for name in question.gold)
        else question
        for question in questions
    )


def load_searchqa(
    data: str = "",
    index: str = "",
    retrieval: str | None = None,
    passages_per_search: int | None = None,
    test_share: float | None = None,
) -> type[SearchQA]:
    """Return the class over `data` and `index`, by default those of the environment variables.

    Without either, the built-in questions. The others are those of searchqa_from; None means its default.
    """
    given: dict[str, Any] = {
        "retrieval": retrieval,
        "passages_per_search": passages_per_search,
        "test_share": test_share,
    }
    options = {name: value for name, value in given.items() if value is not None}
    names = ("kwargs.data", "kwargs.index")
    if not data and not index:
        names = (DATA_VARIABLE, INDEX_VARIABLE)
        data, index = os.environ.get(DATA_VARIABLE, ""), os.environ.get(INDEX_VARIABLE, "")
    if not data and not index:
        if options:
            raise ConfigError(
                f"searchqa: {', '.join(options)} is for questions of your own: set kwargs.data and .index"
            )
        return SearchQA
    if not (data and index):
        present, missing = names if data else names[::-1]
        raise ConfigError(f"searchqa needs {missing} together with {present}: questions and an index with their facts")
    return searchqa_from(data, index, **options)
