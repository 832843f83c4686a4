"""Search on question files: kwargs of the environment, several sets side by side, recall of gold passages."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentgym_rl.cli import app
from agentgym_rl.config import AgentConfig, load_config
from agentgym_rl.environment import catalog
from agentgym_rl.environment.envs.searchqa.datasets import load_with_rows, read_questions
from agentgym_rl.environment.envs.searchqa.env import DATA_VARIABLE, INDEX_VARIABLE
from agentgym_rl.environment.envs.searchqa.indexing import open_retriever, titles_by_id
from agentgym_rl.environment.envs.searchqa.recall import measure, with_gold
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.environments_pool import EnvironmentsPool
from agentgym_rl.run.preflight import require_environments
from agentgym_rl.types import Step

NUMBER = 40


def chain(number: int) -> tuple[str, str, str]:
    """Return the names of a band, its singer and the singer's birthplace. The text is ours."""
    syllables = ["ba", "ko", "li", "mu", "ra", "so", "ti"]
    stem = "".join(syllables[(number // 7**power) % 7] for power in range(3))
    return f"{stem}x".capitalize(), f"{stem}son".capitalize(), f"{stem}ville".capitalize()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a packed corpus of bands and singers, and two question sets with the ids of their gold passages."""
    folder = tmp_path_factory.mktemp("search")
    passages, hops, singles = [], [], []
    for number in range(NUMBER):
        band, singer, town = chain(number)
        passages.append({"id": f"b{number}", "title": band, "text": f"{band} is a band whose singer is {singer}."})
        passages.append({"id": f"s{number}", "title": singer, "text": f"{singer} was born in the town of {town}."})
        gold = {"gold": [f"b{number}", f"s{number}"], "answers": [town], "split": "dev" if number % 4 == 0 else "train"}
        hops.append({"question": f"Where was the singer of the band {band} born?", **gold})
        singles.append({"question": f"who sings in {band}", "answers": [singer], "gold": [f"b{number}"]})
    write(folder / "corpus.jsonl.gz", passages)
    write(folder / "hotpotqa.jsonl.gz", hops)
    write(folder / "nq_open.jsonl", singles)
    run = CliRunner().invoke(app, ["index", str(folder / "corpus.jsonl.gz")])
    assert run.exit_code == 0, run.output
    assert (folder / "corpus.index").is_dir()
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def test_a_question_names_its_split_if_the_file_does_not(files: Path) -> None:
    loaded, _ = load_with_rows(files / "hotpotqa.jsonl.gz")
    assert (len(loaded["train"]), len(loaded["test"])) == (30, 10)
    assert loaded["test"][1].gold == ("b4", "s4")


def test_a_hash_of_the_question_splits_a_file(files: Path) -> None:
    loaded, _ = load_with_rows(files / "nq_open.jsonl", test_share=0.3)
    assert 5 <= len(loaded["test"]) <= 20
    more, _ = load_with_rows(files / "nq_open.jsonl", test_share=0.6)
    assert set(loaded["test"]) < set(more["test"])  # a larger share only adds
    assert len(more["train"]) + len(more["test"]) == NUMBER


async def test_two_question_sets_are_played_side_by_side(files: Path) -> None:
    recipe = files / "two.toml"
    recipe.write_text(
        f"""
[model]
path = "none"
[[environments]]
name = "hotpotqa"
source = "searchqa"
kwargs = {{ data = "{files}/hotpotqa.jsonl.gz", index = "{files}/corpus.index" }}
[[environments]]
name = "nq"
source = "searchqa"
kwargs = {{ data = "{files}/nq_open.jsonl", index = "{files}/corpus.index", passages_per_search = 1, test_share = 0.3 }}
[[environments]]
name = "searchqa"
subsets = ["hop1"]
"""
    )
    config = load_config(recipe, [])
    require_environments(config.environments)
    pool = EnvironmentsPool(config.environments, AgentConfig())
    try:
        for name, searches, passages in (("hotpotqa", 2, 3), ("nq", 1, 1), ("searchqa", 3, 3)):
            session = await pool.open(name)
            await session.reset((await pool.items(name, "test"))[0])
            step = await session.step("<search>the singer of a band, or the capital of a country</search>")
            assert step.observation.count("(Title: ") == passages
            steps: list[Step] = []
            while not steps or not steps[-1].done:
                steps.append(await session.step(await session.oracle()))
            assert steps[-1].info["success"] is True
            assert len(steps) <= searches + 1
    finally:
        await pool.close()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"data": "x.jsonl"}, "needs kwargs.index together with kwargs.data"),
        ({"passages_per_search": 5}, "passages_per_search is for questions of your own"),
        ({"dta": "x"}, r"unexpected keyword argument 'dta'; it takes data, index, retrieval"),
        ({"data": "nq_open.jsonl", "index": "corpus.index", "retrieval": "magic"}, "retrieval is one of auto, bm25"),
        ({"data": "nq_open.jsonl", "index": "corpus.index", "test_share": 2}, "test_share is a share between 0 and 1"),
        ({"data": "nq_open.jsonl", "index": "corpus.index", "retrieval": "dense"}, "has no vectors"),
    ],
)
def test_wrong_kwargs_are_refused(
    files: Path, monkeypatch: pytest.MonkeyPatch, kwargs: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(files)
    with pytest.raises(ConfigError, match=message):
        catalog.load("searchqa", kwargs)


def test_the_variables_are_the_default(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(files / "nq_open.jsonl"))
    monkeypatch.setenv(INDEX_VARIABLE, str(files / "corpus.index"))
    assert len(catalog.load("searchqa").splits["test"]) == NUMBER
    assert len(catalog.load("searchqa", {"test_share": 0.5}).splits["test"]) < NUMBER
    kwargs = {"data": str(files / "hotpotqa.jsonl.gz"), "index": str(files / "corpus.index")}
    assert len(catalog.load("searchqa", kwargs).splits["train"]) == 30


def test_recall_is_that_of_the_gold_passages(files: Path) -> None:
    titles = titles_by_id(files / "corpus.index")
    questions = with_gold(read_questions(files / "hotpotqa.jsonl.gz"), titles)
    found = measure(open_retriever(str(files / "corpus.index"), "bm25"), questions)
    assert (found["questions"], found["gold"]) == (NUMBER, 2.0)
    # The question names the band alone: one query finds the band, the second names its singer.
    assert found["question"]["3"]["recall"][0] == pytest.approx(0.5, abs=0.1)
    assert found["question"]["3"]["all"][0] < 0.2
    assert found["follow"]["3"]["all"][0] == found["titles"]["3"]["all"][0] == 1.0
    assert found["question"]["3"]["answer"][0] < 0.2
    assert found["titles"]["10"]["answer"] == [1.0, 0.0]
    assert found["ms"] > 0
    assert with_gold(read_questions(files / "hotpotqa.jsonl.gz"), {"b0": "Bax"}) == []


def test_index_reports_recall_of_question_files(files: Path, tmp_path: Path) -> None:
    arguments = ["index", str(files / "corpus.jsonl.gz"), "--questions", str(files / "*.jsonl.gz"), "--limit", "8"]
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 1  # the corpus is no question file
    assert "corpus.jsonl.gz" in str(run.exception)
    arguments[3] = str(files / "hotpot*.gz")
    run = CliRunner().invoke(
        app, [*arguments, "--questions", str(files / "nq_open.jsonl"), "--report", str(tmp_path / "r.json")]
    )
    assert run.exit_code == 0, run.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["passages"], report["corpus"]) == (2 * NUMBER, "corpus.jsonl.gz")
    assert [(row["set"], row["retriever"], row["questions"]) for row in report["measured"]] == [
        ("hotpotqa", "bm25", 8),
        ("nq", "bm25", 8),
    ]
    run = CliRunner().invoke(app, [*arguments, "--report", str(tmp_path / "missing" / "r.json")])
    assert "there is no folder" in str(run.exception)
    run = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert "is not a search index" in str(run.exception)
    missing = CliRunner().invoke(app, ["index", str(files / "corpus.jsonl.gz"), "--questions", "nothing.jsonl"])
    assert "nothing.jsonl: no such file" in str(missing.exception)
