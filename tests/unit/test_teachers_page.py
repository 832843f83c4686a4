"""The page about teachers shows the arms that have records."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

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
    assert "staged is ahead in 2 of 2 seeds.\nNo seed of one reaches the other." in page
    assert "| 0.5B, distilled under the staged horizon | 75.0%" in page
    assert "BabyAI\n" not in page
    assert "DAgger\n\n" not in page
    assert "jobs have a record" in page


def test_judged_answers_are_compared_with_exact_match() -> None:
    records = [evaluation("searchqa", "judged", 0, "10"), evaluation("searchqa", "exact match", 0, "10")]
    page = teachers.page(records)
    assert "## Judged rewards\n\njudged is ahead in 0 of 1 seeds." in page
    assert "| exact match and the judge's score | 50.0%" in page


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
