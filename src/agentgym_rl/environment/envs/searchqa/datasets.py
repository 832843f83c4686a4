"""Reader of question files, in the usual formats of the seven deep-search question sets.

nq                {"question", "answer": [...]}  (nq_open)         {"question", "answers": [...]}  (DPR)
triviaqa          {"Data": [{"Question", "Answer": {"Value", "Aliases"}}]}, or lower case, one question a line
popqa             {"question", "possible_answers": "[\\"...\\"]"}
hotpotqa, 2wikimultihopqa
                  {"question", "answer", "supporting_facts": [[title, sentence], ...]} or {"title": [...], ...}
musique           {"question", "answer", "answer_aliases", "paragraphs": [{"title", "is_supporting"}], "answerable"}
bamboogle         {"Question", "Answer"}
any of them       {"question", "golden_answers": [...], "data_source"?, "split"?, "gold": [passage id, ...]?}

Lists of answers and supporting facts may be written as text, in JSON or Python notation (lists, tuples, sets).
"""

from __future__ import annotations

import codecs
import hashlib
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from agentgym_rl.environment.envs.searchqa.literals import looks_like_list, read_literal
from agentgym_rl.environment.envs.searchqa.passages import parse_json, read_bytes
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
"""Spellings of each question set in file and folder names. They match at the start of a word, ignoring punctuation."""
SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
_TEST_WORDS = frozenset({"test", "dev", "val", "valid", "validation", "eval"})
_ANSWER_KEYS = ("golden_answers", "answers", "answer", "possible_answers", "answer_aliases", "target")
_ANSWER_PARTS = ("value", "aliases", "normalizedaliases", "normalized_aliases", "text")
_ONE_ANSWER = ("answer", "target", "value", "text")
"""Keys that hold a list or one answer, which may contain brackets. All other keys hold lists."""


Rows = dict[tuple[str, str], list[int]]
"""(split, question set) -> index in its split of each question in file order, or -1 if it was left out."""


def load_with_rows(path: Path, test_share: float | None = None) -> tuple[dict[str, tuple[Question, ...]], Rows]:
    """Return the questions of a file, or of all .json and .jsonl files in a folder, as {"train": ..., "test": ...}.

    The path of a file names its split and question set (`hotpotqa/train.jsonl`, `nq_test.json`). It counts from the
    given folder or, for a single file, from two folders up (`hotpotqa/dev/data.json`). Files named dev or validation
    are test files. If no part of the path names a split, a question's own `split` does. With `test_share`, a hash of
    the question decides instead. A training question that is also a test question is left out.
    """
    path = Path(os.path.abspath(path))  # gives "." a name and keeps the name of a link
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.name.endswith(SUFFIXES))
    if not files:
        raise ConfigError(f"searchqa data {path}: needed a .json or .jsonl file, or a folder of them, got none")
    questions: dict[str, dict[str, Question]] = {"train": {}, "test": {}}
    keys: dict[tuple[str, str], list[str]] = {}
    root = path.parent.parent.parent if path.is_file() else path.parent
    for file in files:
        name = "/".join(file.relative_to(root).parts).lower()
        file_split = _split_named_in(name)
        for question, own_split in _questions(file, _dataset_named_in(name)):
            key = _key(question.text)
            split = file_split or _split_named_in(own_split) or "test"
            if test_share is not None:
                split = "test" if _fraction(key) < test_share else "train"
            questions[split].setdefault(key, question)
            keys.setdefault((split, question.subset), []).append(key)
    overlap = questions["train"].keys() & questions["test"].keys()
    if overlap:
        logger.warning("searchqa: %d training questions are also test questions and were left out", len(overlap))
    splits = {
        "train": tuple(question for key, question in questions["train"].items() if key not in overlap),
        "test": tuple(questions["test"].values()),
    }
    if not any(splits.values()):
        raise ConfigError(f"searchqa data {path}: the files hold no question with an answer")
    indices = {
        "train": {key: index for index, key in enumerate(key for key in questions["train"] if key not in overlap)},
        "test": {key: index for index, key in enumerate(questions["test"])},
    }
    return splits, {group: [indices[group[0]].get(key, -1) for key in rows] for group, rows in keys.items()}


def _key(question: str) -> str:
    return normalise(question)


def read_questions(file: Path) -> list[Question]:
    """Return the questions of one file, whatever their split. A set of an unknown name is called like the file."""
    dataset = _dataset_named_in(file.name) or file.name.partition(".")[0]
    return [question for question, _ in _questions(file, dataset)]


def _fraction(key: str) -> float:
    """Return a number from 0 to 1 that depends on the question alone."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) / 2**64


def _split_named_in(name: str) -> str:
    """Return the split that the rightmost part of a path names, or an empty string."""
    for part in reversed(name.split("/")):
        words = set(re.findall(r"[a-z]+", part))
        if words & _TEST_WORDS:
            return "test"
        if "train" in words:
            return "train"
    return ""


def _dataset_named_in(name: str) -> str | None:
    """Return the question set that the rightmost part of a path or `data_source` names."""
    for part in reversed(name.lower().split("/")):
        words = re.findall(r"[a-z0-9]+", part)
        suffixes = ["".join(words[number:]) for number in range(len(words))]
        for dataset, spellings in _NAMES.items():
            if any(suffix.startswith(spellings) for suffix in suffixes):
                return dataset
    return None


def _questions(file: Path, dataset: str | None) -> Iterator[tuple[Question, str]]:
    """Yield each question with the split that it names itself, or an empty string."""
    for row, location in _rows(file):
        if not isinstance(row, dict):
            raise ConfigError(f"{location}: a question is an object, got {type(row).__name__}")
        fields = {key.lower(): value for key, value in row.items()}
        if fields.get("answerable") is False:
            continue
        question_set = dataset
        if isinstance(fields.get("data_source"), str):
            question_set = _dataset_named_in(fields["data_source"]) or dataset
        if question_set is None:
            raise ConfigError(
                f"{location}: the question set is unknown: name the file or folder after one of "
                f"{', '.join(DATASETS)}, or give each question a data_source"
            )
        text = fields.get("question", fields.get("query"))
        try:
            answers = tuple(dict.fromkeys(_answers(fields)))
            titles = list(dict.fromkeys(_supporting_titles(fields)))
        except ValueError as error:
            raise ConfigError(f"{location}: {error}") from error
        if not isinstance(text, str) or not one_line(text) or not answers:
            raise ConfigError(f"{location}: needed a question and at least one answer, got the keys {sorted(row)[:10]}")
        text = one_line(text)
        gold = fields.get("gold")
        ids = tuple(map(str, gold)) if isinstance(gold, list) else ()
        full_text = text if text.endswith("?") else f"{text}?"
        split = fields.get("split")
        yield (
            Question(full_text, answers, question_set, _facts(text, titles), ids),
            split.lower() if isinstance(split, str) else "",
        )


def _rows(file: Path) -> Iterator[tuple[Any, str]]:
    """Yield (object, location) of a file: a list, a list under `data`, or one object per line."""
    data = read_bytes(file).removeprefix(codecs.BOM_UTF8)
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError:
        for number, line in enumerate(data.splitlines(), start=1):
            if line.strip():
                yield parse_json(line, file, number), f"{file}, line {number}"
        return
    if isinstance(document, dict):
        document = next((value for key, value in document.items() if key.lower() == "data"), [document])
    if not isinstance(document, list):
        raise ConfigError(f"{file}: needed a list of questions or one question a line, got {type(document).__name__}")
    yield from ((row, f"{file}, entry {number}") for number, row in enumerate(document))


def _answers(fields: dict[str, Any]) -> Iterator[str]:
    for key in _ANSWER_KEYS:
        yield from _strings(fields.get(key), key)
    if isinstance(model := fields.get("reward_model"), dict) and isinstance(truth := model.get("ground_truth"), dict):
        yield from _strings(truth.get("target"), "target")


def _strings(value: Any, key: str) -> Iterator[str]:
    """Yield the strings of a string, number, list, list written as text, or object with value and aliases."""
    if isinstance(value, str) and looks_like_list(value, key in _ONE_ANSWER):
        value = read_literal(value, key)
    if isinstance(value, list | tuple):
        for part in value:  # a string in a list is always an answer
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
    """Return a fact per supporting passage, or the question as the only search if there are none."""
    return facts_of(titles) if titles else (Fact(question, "", "I need to search for this."),)


def facts_of(titles: Iterable[str]) -> tuple[Fact, ...]:
    """Return a fact per title, each once."""
    return tuple(Fact(title, title, f"I need to read about {title}.") for title in dict.fromkeys(titles))


def _supporting_titles(fields: dict[str, Any]) -> Iterable[str]:
    supporting = _read_text(fields.get("supporting_facts"), "supporting_facts")
    if isinstance(supporting, dict):
        titles = _read_text(supporting.get("title"), "supporting_facts.title")
        return [title for title in titles or [] if isinstance(title, str)]
    if isinstance(supporting, list | tuple):
        pairs = [pair for pair in supporting if isinstance(pair, list | tuple) and pair]
        return [pair[0] for pair in pairs if isinstance(pair[0], str)]
    paragraphs = _read_text(fields.get("paragraphs"), "paragraphs")
    if isinstance(paragraphs, list | tuple):
        return [p["title"] for p in paragraphs if isinstance(p, dict) and p.get("is_supporting") and "title" in p]
    return []


def _read_text(value: Any, key: str) -> Any:
    """Return the value of a list or object written as text. An empty text is None."""
    if not isinstance(value, str):
        return value
    return read_literal(value, key) if value.strip() else None
