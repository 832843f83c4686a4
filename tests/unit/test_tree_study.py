"""The page about trees and chains says what the records say."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "results"))
import studies  # noqa: E402
import trees  # noqa: E402
from records import read_records, runs_of  # noqa: E402


def test_the_page_is_the_one_that_the_records_give() -> None:
    records = runs_of(read_records(ROOT / "results", "trees"))
    assert {record["arm"] for record in records} == set(studies.TREE_ARMS)
    assert (ROOT / "docs" / "results" / "trees.md").read_text() == trees.page(records)


def test_both_arms_have_the_same_budget_and_start() -> None:
    for make in (studies.trees, studies.qwen_trees):
        jobs = [job for job in make([0]) if job.kind == "train"]
        settings = {tuple(a for a in job.arguments if not a.startswith("rl.tree")) for job in jobs}
        assert len(settings) == len(jobs) // 2, "two arms each"
        assert all(any(a.startswith("rl.token_budget=") for a in job.arguments) for job in jobs)
