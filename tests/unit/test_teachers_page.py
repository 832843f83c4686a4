"""The page about teachers shows the arms that have records."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "results"))
import teachers  # noqa: E402


def evaluation(task: str, arm: str, seed: int, outcomes: str) -> dict[str, Any]:
    items = {f"{task}/{i}": outcome for i, outcome in enumerate(outcomes)}
    return {"job": f"{arm}-{seed}", "task": task, "arm": arm, "seed": seed, "outcomes": {"30": items}}


def test_students_are_compared_on_the_seeds_that_both_have() -> None:
    records = [
        evaluation("textcraft", "base 0.5B", 0, "0000"),
        evaluation("textcraft", "staged", 0, "1100"),
        evaluation("textcraft", "staged", 1, "1110"),
        evaluation("textcraft", "staged", 2, "1111"),
        evaluation("textcraft", "fixed-long", 0, "0000"),
        evaluation("textcraft", "fixed-long", 1, "0001"),
        evaluation("babyai", "staged", 0, "1111"),
    ]
    assert teachers.distilled_tasks(records) == ["textcraft"]
    page = teachers.page(records)
    assert "under the staged horizon* is ahead in 2 of 2 seeds.\nNo seed of one reaches the other." in page
    assert "| 0.5B, distilled under the staged horizon | 75.0%" in page
    assert "BabyAI\n" not in page
    assert "DAgger\n\n" not in page
    assert "jobs have a record" in page


def searchqa_run(arm: str, score: list[float], turns: list[float]) -> dict[str, Any]:
    run = {"job": f"{arm}-0", "task": "searchqa", "arm": arm, "seed": 0, "evaluations": []}
    return run | {"curves": {"judged/rubric": score, "turns/mean": turns}}


def searchqa_records(turns: list[float]) -> list[dict[str, Any]]:
    runs = [searchqa_run("judged", [0.5] * 5 + [0.99] * 5, turns), searchqa_run("exact match", [0.6] * 10, turns)]
    agents = [evaluation("searchqa", run["arm"], 0, "10") | {"job": f"eval-{run['job']}"} for run in runs]
    return runs + agents


def test_judged_answers_are_compared_with_exact_match() -> None:
    page = teachers.page(searchqa_records([3.0] * 10))
    assert "*exact match, the judge's score and length* is not ahead, with one seed" in page
    assert "| exact match, the judge's score and length | 50.0% (9–91) | 0.50 → 0.99 | 3.0 → 3.0 |" in page
    assert "this small judge is fooled" not in page


def test_the_page_says_when_a_judge_praises_answers_without_a_search() -> None:
    assert "this small judge is fooled" in teachers.page(searchqa_records([3.0] * 5 + [1.0] * 5))


def test_failures_that_repeat_one_command_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    episodes = [
        {"actions": ["get 1 log", *["craft 1 door"] * 4], "rewards": [0.0] * 5, "stop": "horizon"},
        {"actions": ["craft 1 door"] * 3, "rewards": [0.0] * 3, "stop": "horizon"},
        {"actions": ["get 1 log"] * 4, "rewards": [0.0, 0.0, 0.0, 1.0], "stop": "done"},
    ]
    (tmp_path / "teachers").mkdir()
    with lzma.open(tmp_path / "teachers/eval-dagger-0.actions.jsonl.xz", "wt") as lines:
        lines.writelines(json.dumps(episode) + "\n" for episode in episodes)
    monkeypatch.setattr(teachers, "RESULTS", tmp_path)
    assert teachers.stuck([{"job": "eval-dagger-0"}]) == "1 of 2"


def test_the_figure_has_a_panel_for_each_task_with_students(tmp_path: Path) -> None:
    runs = [
        {"job": f"run-{arm}", "task": "textcraft", "arm": arm, "seed": 0, "evaluations": []}
        | {"curves": {"tokens/total": [1000.0, 2000.0], "success/mean": [0.1, 0.4]}}
        for arm in teachers.COLOURS
    ]
    agents = [evaluation("textcraft", arm, 0, "10") for arm in teachers.COLOURS]
    teachers.draw([*runs, *agents], tmp_path / "students.png")
    teachers.draw([evaluation("searchqa", "judged", 0, "10")], tmp_path / "none.png")
    assert [path.name for path in tmp_path.iterdir()] == ["students.png"]
