"""Questions from files: the formats in which the seven question sets of deep search are handed around.

nq                {"question", "answer": [...]}  (nq_open)         {"question", "answers": [...]}  (DPR)
triviaqa          {"Data": [{"Question", "Answer": {"Value", "Aliases"}}]}, or lower case, one question a line
popqa             {"question", "possible_answers": "[\\"...\\"]"}
hotpotqa, 2wikimultihopqa
                  {"question", "answer", "supporting_facts": [[title, sentence], ...]} or {"title": [...], ...}
musique           {"question", "answer", "answer_aliases", "paragraphs": [{"title", "is_supporting"}], "answerable"}
bamboogle         {"Question", "Answer"}
any of them       {"question", "golden_answers": [...], "data_source"?}  (one question a line)

Lists of answers and supporting facts may be written as text, in JSON or Python notation (lists, tuples, sets).
"""

from __future__ import annotations

import codecs
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from agentgym_rl.environment.envs.searchqa.literals import looks_like_a_list, read_literal
from agentgym_rl.environment.envs.searchqa.passages import parse_json
from agentgym_rl.environment.envs.searchqa.protocol import normalise, one_line
from agentgym_rl.environment.envs.searchqa.questions import DATASETS, Fact, Question
from agentgym_rl.errors import ConfigError

logger = logging.getLogger(__name__)

_NAMES = {
    "nq": ("naturalquestions", "nqopen", "nq"),
    "triviaqa": ("triviaqa", "trivia", "tqa"),
    "popqa": ("popqa",),
    "hotpotqa": ("hotpotqa", "hotpot"),
    "2wikimultihopqa": ("2wikimultihopqa", "2wikimultihop", "2wikimqa", "2wiki"),
    "musique": ("musique",),
    "bamboogle": ("bamboogle",),
}
"""How a file's or folder's name may call it, from the start of a word and with or without marks between."""
_TEST_WORDS = frozenset({"test", "dev", "val", "valid", "validation", "eval"})
_ANSWER_KEYS = ("golden_answers", "answers", "answer", "possible_answers", "answer_aliases", "target")
_ANSWER_PARTS = ("value", "aliases", "normalizedaliases", "normalized_aliases", "text")
_ONE_ANSWER = ("answer", "target", "value", "text")
"""Keys of a list or of one answer, which may look a bit like a list itself; all others hold lists."""


Rows = dict[tuple[str, str], list[int]]
"""(split, question set) -> the place in its split of each question of the files, in their order; -1: left out."""


def load_questions(place: Path) -> dict[str, tuple[Question, ...]]:
    return load_with_rows(place)[0]


def load_with_rows(place: Path) -> tuple[dict[str, tuple[Question, ...]], Rows]:
    """Questions of a file, or of all .json and .jsonl files under a folder, as {"train": ..., "test": ...}.

    A file belongs to the split and the question set that its path names (`hotpotqa/train.jsonl`, `nq_test.json`), from
    the folder that was given or, for a single file, the two it lies in (`hotpotqa/dev/data.json`); dev and
    validation files are test files. A
    training question that is also a test question is left out.
    """
    place = Path(os.path.abspath(place))  # "." has no name, and a link's own name is what counts
    files = [place] if place.is_file() else sorted(f for f in place.rglob("*") if f.suffix in (".json", ".jsonl"))
    if not files:
        raise ConfigError(f"searchqa data {place}: needed a .json or .jsonl file, or a folder with some; found none")
    found: dict[str, dict[str, Question]] = {"train": {}, "test": {}}
    keys: dict[tuple[str, str], list[str]] = {}
    root = place.parent.parent.parent if place.is_file() else place.parent
    for file in files:
        name = "/".join(file.relative_to(root).parts).lower()
        split = _split_in(name)
        for question in _questions(file, _dataset_in(name)):
            key = _key(question.text)
            found[split].setdefault(key, question)
            keys.setdefault((split, question.subset), []).append(key)
    both = found["train"].keys() & found["test"].keys()
    if both:
        logger.warning("searchqa: %d training questions are also test questions and were left out", len(both))
    splits = {
        "train": tuple(question for key, question in found["train"].items() if key not in both),
        "test": tuple(found["test"].values()),
    }
    if not any(splits.values()):
        raise ConfigError(f"searchqa data {place}: the files hold no question with an answer")
    places = {
        "train": {key: place for place, key in enumerate(key for key in found["train"] if key not in both)},
        "test": {key: place for place, key in enumerate(found["test"])},
    }
    return splits, {group: [places[group[0]].get(key, -1) for key in rows] for group, rows in keys.items()}


def _key(question: str) -> str:
    return normalise(question)


def _split_in(name: str) -> str:
    """The part of a path furthest right that names a split counts; a file of an unnamed one is for testing."""
    for part in reversed(name.split("/")):
        words = set(re.findall(r"[a-z]+", part))
        if words & _TEST_WORDS:
            return "test"
        if "train" in words:
            return "train"
    return "test"


def _dataset_in(name: str) -> str | None:
    """The question set that a path or a `data_source` names; the part furthest right counts."""
    for part in reversed(name.lower().split("/")):
        words = re.findall(r"[a-z0-9]+", part)
        starts = ["".join(words[number:]) for number in range(len(words))]
        for dataset, spellings in _NAMES.items():
            if any(start.startswith(spellings) for start in starts):
                return dataset
    return None


def _questions(file: Path, dataset: str | None) -> Iterator[Question]:
    for row, where in _rows(file):
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: a question is an object, got {type(row).__name__}")
        fields = {key.lower(): value for key, value in row.items()}
        if fields.get("answerable") is False:
            continue
        own = dataset
        if isinstance(fields.get("data_source"), str):
            own = _dataset_in(fields["data_source"]) or dataset
        if own is None:
            raise ConfigError(
                f"{where}: cannot tell which question set this is: name the file or folder after one of "
                f"{', '.join(DATASETS)}, or give each question a data_source"
            )
        text = fields.get("question", fields.get("query"))
        try:
            answers = tuple(dict.fromkeys(_answers(fields)))
            titles = list(dict.fromkeys(_supporting_titles(fields)))
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
        if not isinstance(text, str) or not one_line(text) or not answers:
            raise ConfigError(f"{where}: needed a question and at least one answer, got the keys {sorted(row)[:10]}")
        text = one_line(text)
        yield Question(text if text.endswith("?") else f"{text}?", answers, own, _facts(text, titles))


def _rows(file: Path) -> Iterator[tuple[Any, str]]:
    """Objects of a file with a name for each: a list, a list under `data`, or one object a line."""
    data = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        whole = orjson.loads(data)
    except orjson.JSONDecodeError:
        for number, line in enumerate(data.splitlines(), start=1):
            if line.strip():
                yield parse_json(line, file, number), f"{file}, line {number}"
        return
    if isinstance(whole, dict):
        whole = next((value for key, value in whole.items() if key.lower() == "data"), [whole])
    if not isinstance(whole, list):
        raise ConfigError(f"{file}: needed a list of questions or one question a line, got {type(whole).__name__}")
    yield from ((row, f"{file}, entry {number}") for number, row in enumerate(whole))


def _answers(fields: dict[str, Any]) -> Iterator[str]:
    for key in _ANSWER_KEYS:
        yield from _strings(fields.get(key), key)
    if isinstance(model := fields.get("reward_model"), dict) and isinstance(truth := model.get("ground_truth"), dict):
        yield from _strings(truth.get("target"), "target")


def _strings(value: Any, key: str) -> Iterator[str]:
    """Strings in a string, a number, a list, a list written as text, or an object with a value and aliases."""
    if isinstance(value, str) and looks_like_a_list(value, key in _ONE_ANSWER):
        value = read_literal(value, key)
    if isinstance(value, list | tuple):
        for part in value:  # a string in a list is an answer, whatever it looks like
            yield from [part.strip()] if isinstance(part, str) and one_line(part) else _strings(part, key)
    elif isinstance(value, str):
        if one_line(value):
            yield value.strip()
    elif isinstance(value, bool):
        yield "yes" if value else "no"
    elif isinstance(value, int | float):
        yield str(value)
    elif isinstance(value, dict):
        lower = {name.lower(): part for name, part in value.items()}
        for name in _ANSWER_PARTS:
            yield from _strings(lower.get(name), name)


def _facts(question: str, titles: list[str]) -> tuple[Fact, ...]:
    """Supporting passages where the set names them; otherwise the question itself is the only search."""
    if not titles:
        return (Fact(question, "", "I need to search for this."),)
    return tuple(Fact(title, title, f"I need to read about {title}.") for title in titles)


def _supporting_titles(fields: dict[str, Any]) -> Iterable[str]:
    supporting = _unpacked(fields.get("supporting_facts"), "supporting_facts")
    if isinstance(supporting, dict):
        titles = _unpacked(supporting.get("title"), "supporting_facts.title")
        return [title for title in titles or [] if isinstance(title, str)]
    if isinstance(supporting, list | tuple):
        pairs = [pair for pair in supporting if isinstance(pair, list | tuple) and pair]
        return [pair[0] for pair in pairs if isinstance(pair[0], str)]
    paragraphs = _unpacked(fields.get("paragraphs"), "paragraphs")
    if isinstance(paragraphs, list | tuple):
        return [p["title"] for p in paragraphs if isinstance(p, dict) and p.get("is_supporting") and "title" in p]
    return []


def _unpacked(value: Any, key: str) -> Any:
    """What a text stands for; an empty one stands for nothing."""
    if not isinstance(value, str):
        return value
    return read_literal(value, key) if value.strip() else None
