"""Question files: each question set in its usual layouts."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from agentgym_rl.environment.envs.searchqa.datasets import load_with_rows
from agentgym_rl.environment.envs.searchqa.questions import DATASETS, Question
from agentgym_rl.errors import ConfigError

HOTPOT_FACTS = [["Ed Wood", 0], ["Scott Derrickson", 0], ["Ed Wood", 2]]
HOTPOT = {
    "_id": "5a8b57f25542995d1e6f1371",
    "question": "Were Scott Derrickson and Ed Wood of the same nationality?",
    "answer": "yes",
    "type": "comparison",
    "supporting_facts": HOTPOT_FACTS,
    "context": [["Ed Wood", ["Ed Wood was an American filmmaker."]], ["Other", ["Nothing."]]],
}
HOTPOT_COLUMNS = HOTPOT | {
    "supporting_facts": {"title": ["Ed Wood", "Scott Derrickson"], "sent_id": [0, 0]},
    "context": {"title": ["Ed Wood"], "sentences": [["Ed Wood was an American filmmaker."]]},
}
MUSIQUE = {
    "id": "2hop__1",
    "question": "When was the institute that owned The Collegian founded?",
    "paragraphs": [
        {"idx": 0, "title": "The Collegian", "paragraph_text": "...", "is_supporting": True},
        {"idx": 1, "title": "Noise", "paragraph_text": "...", "is_supporting": False},
        {"idx": 2, "title": "Houston Baptist University", "paragraph_text": "...", "is_supporting": True},
    ],
    "answer": "1960",
    "answer_aliases": ["in 1960"],
    "answerable": True,
}
TRIVIA = {"Value": "V", "Aliases": ["V", "W"], "NormalizedAliases": ["v"]}
LAYOUTS: list[tuple[str, str, Any, tuple[str, ...], tuple[str, ...]]] = [
    (
        "nq_open-dev.jsonl",
        "nq",
        {"question": "who got the first nobel", "answer": ["Röntgen", "W. Röntgen"]},
        ("Röntgen", "W. Röntgen"),
        (),
    ),
    ("nq-test.json", "nq", [{"question": "q", "answers": ["a"], "positive_ctxs": []}], ("a",), ()),
    ("nq-zero.jsonl", "nq", {"question": "q", "answer": [" \u200bRoom\u200b "]}, ("\u200bRoom\u200b",), ()),
    ("nq/test.jsonl", "nq", {"id": "test_0", "question": "q?", "golden_answers": ["a b", "c"]}, ("a b", "c"), ()),
    (
        "triviaqa-unfiltered/wikipedia-dev.json",
        "triviaqa",
        {"Data": [{"Question": "Q?", "QuestionId": "1", "Answer": TRIVIA}]},
        ("V", "W", "v"),
        (),
    ),
    ("trivia_qa.jsonl", "triviaqa", {"question": "Q?", "answer": {"value": "V", "aliases": ["W"]}}, ("V", "W"), ()),
    (
        "popQA.json",
        "popqa",
        [{"question": "Q?", "obj": "x", "possible_answers": '["politician", "pol."]'}],
        ("politician", "pol."),
        (),
    ),
    (
        "popqa-python.jsonl",
        "popqa",
        {"question": "Q?", "possible_answers": "['politician', \"O'Hara\", 'pol.', 7]"},
        ("politician", "O'Hara", "pol.", "7"),
        (),
    ),
    ("nq-text.jsonl", "nq", {"question": "Q?", "answer": "['a', 'b']"}, ("a", "b"), ()),
    ("nq-tuple.jsonl", "nq", {"question": "Q?", "answer": "('a', 'b')"}, ("a", "b"), ()),
    ("nq-tuple-of-one.jsonl", "nq", {"question": "Q?", "golden_answers": "('a',)"}, ("a",), ()),
    ("nq-set.jsonl", "nq", {"question": "Q?", "answer": "{'b', 'a'}"}, ("a", "b"), ()),
    ("nq-brackets.jsonl", "nq", {"question": "Q?", "answer": "('Heroes')"}, ("('Heroes')",), ()),
    ("nq-brackets-2.jsonl", "nq", {"question": "Q?", "answer": "('a', or so) b"}, ("('a', or so) b",), ()),
    ("nq-arrays.jsonl", "nq", {"question": "Q?", "answer": "array (physics)"}, ("array (physics)",), ()),
    ("nq-odd.jsonl", "nq", {"question": "Q?", "answer": "[3, 4]"}, ("[3, 4]",), ()),
    ("nq-odder.jsonl", "nq", {"question": "Q?", "answers": ["['a' is one]", " "]}, ("['a' is one]",), ()),
    (
        "triviaqa-text.jsonl",
        "triviaqa",
        {"question": "Q?", "answer": {"value": "V", "aliases": "['V', 'W']"}},
        ("V", "W"),
        (),
    ),
    (
        "hotpotqa_python.jsonl",
        "hotpotqa",
        HOTPOT | {"supporting_facts": str(HOTPOT_FACTS)},
        ("yes",),
        ("Ed Wood", "Scott Derrickson"),
    ),
    (
        "hotpotqa_tuples.jsonl",
        "hotpotqa",
        HOTPOT | {"supporting_facts": "[('Ed Wood', 0), ('Scott Derrickson', 0)]"},
        ("yes",),
        ("Ed Wood", "Scott Derrickson"),
    ),
    (
        "hotpotqa_columns_python.jsonl",
        "hotpotqa",
        HOTPOT | {"supporting_facts": str(HOTPOT_COLUMNS["supporting_facts"])},
        ("yes",),
        ("Ed Wood", "Scott Derrickson"),
    ),
    (
        "hotpotqa_columns_inside.jsonl",
        "hotpotqa",
        HOTPOT | {"supporting_facts": {"title": "['Ed Wood', 'Scott Derrickson']"}},
        ("yes",),
        ("Ed Wood", "Scott Derrickson"),
    ),
    (
        "2wikimultihopqa/text.jsonl",
        "2wikimultihopqa",
        HOTPOT | {"supporting_facts": json.dumps(HOTPOT_FACTS)},
        ("yes",),
        ("Ed Wood", "Scott Derrickson"),
    ),
    ("hotpotqa_empty.jsonl", "hotpotqa", HOTPOT | {"supporting_facts": ""}, ("yes",), ()),
    (
        "musique_text.jsonl",
        "musique",
        MUSIQUE | {"paragraphs": str(MUSIQUE["paragraphs"]), "answer_aliases": "[]"},
        ("1960",),
        ("The Collegian", "Houston Baptist University"),
    ),
    ("hotpot_dev_distractor_v1.json", "hotpotqa", [HOTPOT], ("yes",), ("Ed Wood", "Scott Derrickson")),
    ("hotpotqa_dev_60.json", "hotpotqa", [HOTPOT_COLUMNS], ("yes",), ("Ed Wood", "Scott Derrickson")),
    (
        "2wikimultihopqa/dev.json",
        "2wikimultihopqa",
        [HOTPOT | {"evidences": []}],
        ("yes",),
        ("Ed Wood", "Scott Derrickson"),
    ),
    ("2WikiMultihopQA_dev.jsonl", "2wikimultihopqa", HOTPOT, ("yes",), ("Ed Wood", "Scott Derrickson")),
    (
        "musique_ans_v1.0_dev.jsonl",
        "musique",
        MUSIQUE,
        ("1960", "in 1960"),
        ("The Collegian", "Houston Baptist University"),
    ),
    ("bamboogle.json", "bamboogle", [{"Question": "Q?", "Answer": "A"}], ("A",), ()),
    ("mixed.jsonl", "popqa", {"question": "Q?", "data_source": "popqa", "golden_answers": ["a"]}, ("a",), ()),
    (
        "search_r1.jsonl",
        "musique",
        {"question": "Q?", "data_source": "musique", "reward_model": {"ground_truth": {"target": ["a"]}}},
        ("a",),
        (),
    ),
]


def load_questions(path: Path) -> dict[str, tuple[Question, ...]]:
    return load_with_rows(path)[0]


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(("name", "dataset", "content", "answers", "titles"), LAYOUTS, ids=[row[0] for row in LAYOUTS])
def test_layouts(
    tmp_path: Path, name: str, dataset: str, content: Any, answers: tuple[str, ...], titles: tuple[str, ...]
) -> None:
    write(tmp_path / "data" / name, content)
    loaded = load_questions(tmp_path / "data")
    assert loaded["train"] == ()
    (question,) = loaded["test"]
    assert isinstance(question, Question)
    assert (question.subset, question.answers) == (dataset, answers)
    assert question.text.endswith("?")
    assert tuple(fact.title for fact in question.facts) == (titles or ("",))


def test_every_question_set_has_a_layout() -> None:
    assert {dataset for _, dataset, *_ in LAYOUTS} == set(DATASETS)


def test_splits_follow_the_names_of_files(tmp_path: Path) -> None:
    write(tmp_path / "train" / "hotpotqa.jsonl", {"question": "one", "answer": "1"})
    write(tmp_path / "nq_train.jsonl", {"question": "two", "answer": ["2"]})
    write(tmp_path / "nq-dev.jsonl", {"question": "three", "answer": ["3"]})
    write(tmp_path / "musique" / "validation.jsonl", {"question": "training a dog?", "answer": "4"})
    write(tmp_path / "train" / "popqa-test.jsonl", {"question": "five", "answer": "5"})
    write(tmp_path / "notes.txt", "not read")
    loaded = load_questions(tmp_path)
    assert [(q.subset, q.text) for q in loaded["train"]] == [("nq", "two?"), ("hotpotqa", "one?")]
    assert [(q.subset, q.text) for q in loaded["test"]] == [
        ("musique", "training a dog?"),
        ("nq", "three?"),
        ("popqa", "five?"),
    ]


@pytest.mark.parametrize(
    ("name", "split", "dataset"),
    [
        ("nq_train.jsonl", "train", "nq"),
        ("hotpotqa/dev.jsonl", "test", "hotpotqa"),
        ("hotpotqa/train.jsonl", "train", "hotpotqa"),
        ("train/popqa.jsonl", "train", "popqa"),
        ("musique/nq-dev.jsonl", "test", "nq"),
        ("hotpotqa/dev/data.jsonl", "test", "hotpotqa"),
        ("hotpotqa/train/data.jsonl", "train", "hotpotqa"),
    ],
)
def test_path_names_split_and_question_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, split: str, dataset: str
) -> None:
    file = write(tmp_path / name, {"question": "two", "answer": ["2"]})
    monkeypatch.chdir(file.parent)
    for path in (file, Path(file.name), file.parent, Path()):
        if path.is_file() or file.parent.parent == tmp_path:
            (question,) = load_questions(path)[split]
            assert question.subset == dataset


def test_folders_further_up_are_ignored(tmp_path: Path) -> None:
    file = write(tmp_path / "hotpotqa" / "data" / "dev" / "part.jsonl", {"question": "two", "answer": ["2"]})
    with pytest.raises(ConfigError, match="question set is unknown"):
        load_questions(file)


def test_test_questions_are_left_out_of_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"question": "Who is the king?", "answer": "a"}, {"question": "Who else?", "answer": "b"}]
    write(tmp_path / "nq_train.json", [*rows, rows[1]])
    write(tmp_path / "nq_test.json", [{"question": "who is  king", "answer": "a"}])
    with caplog.at_level(logging.WARNING):
        loaded = load_questions(tmp_path)
    assert [question.text for question in loaded["train"]] == ["Who else?"]
    assert "1 training questions are also test questions" in caplog.text


def test_unanswerable_questions_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "musique_dev.json", [MUSIQUE, MUSIQUE | {"question": "No answer?", "answerable": False}])
    assert len(load_questions(tmp_path)["test"]) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "nq.json",
            [{"question": "q"}],
            r"entry 0: needed a question and at least one answer, got the keys \['question'",
        ),
        ("nq.json", [{"question": "  ", "answer": "a"}], "needed a question"),
        ("nq.json", [3], "entry 0: a question is an object, got int"),
        ("nq.json", "text", "needed a list of questions"),
        ("questions.json", [{"question": "q", "answer": "a"}], "question set is unknown"),
        ("musique.json", [MUSIQUE | {"answerable": False}], "no question with an answer"),
        (
            "popqa.json",
            [{"question": "p", "possible_answers": "['a']"}, {"question": "q", "possible_answers": "['a', b]"}],
            r"entry 1: possible_answers looks like a list .* got \"\['a', b\]\": correct it",
        ),
        ("popqa.json", [{"question": "q", "possible_answers": "['a', 'b"}], "entry 0: possible_answers looks like"),
        ("popqa.json", [{"question": "q", "possible_answers": "['a' 'b']"}], "commas are missing"),
        ("popqa.json", [{"question": "q", "possible_answers": "[__import__('os').getpid()]"}], "cannot be read"),
        ("nq.json", [{"question": "q", "answer": "array(['a', 'b'], dtype=object)"}], "answer looks like a list"),
        ("nq.json", [{"question": "q", "answers": "np.array(['a'])"}], "answers looks like a list"),
        ("nq.json", [{"question": "q", "answer": "['a', 'b'"}], "answer looks like a list"),
        ("nq.json", [{"question": "q", "answer": "('a', 'b'"}], "answer looks like a list"),
        ("nq.json", [{"question": "q", "answer": "{'a', 'b"}], "answer looks like a list"),
        ("nq.json", [{"question": "q", "answer": "['a' + ]"}], "entry 0: answer looks like a list"),
        ("popqa.json", [{"question": "q", "possible_answers": "[]"}], "at least one answer"),
        (
            "hotpotqa.json",
            [HOTPOT | {"supporting_facts": "array(['Ed Wood'], dtype=object)"}],
            "entry 0: supporting_facts looks like",
        ),
        ("hotpotqa.json", [HOTPOT | {"supporting_facts": "[" * 5000}], "cannot be read"),
        ("musique.json", [MUSIQUE | {"paragraphs": "[{'title': "}], "entry 0: paragraphs looks like"),
    ],
)
def test_errors_name_the_file_and_entry(tmp_path: Path, name: str, content: Any, message: str) -> None:
    write(tmp_path / name, content)
    with pytest.raises(ConfigError, match=message):
        load_questions(tmp_path)


def test_errors_name_the_broken_line(tmp_path: Path) -> None:
    (tmp_path / "nq.jsonl").write_text('{"question": "q", "answer": "a"}\n{"question": \n')
    with pytest.raises(ConfigError, match="line 2 is not JSON"):
        load_questions(tmp_path)


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    row = json.dumps({"question": "q", "answer": "a"})
    (tmp_path / "nq.json").write_text(f"[{row}]", encoding="utf-8-sig")
    assert len(load_questions(tmp_path / "nq.json")["test"]) == 1
    (tmp_path / "popqa.jsonl").write_text(row.replace('"q"', '"p"') + "\n" + row + "\n", encoding="utf-8-sig")
    assert len(load_questions(tmp_path / "popqa.jsonl")["test"]) == 2


def test_missing_files_raise_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="got none"):
            load_questions(path)
