"""The page about trees and chains says what the records say."""

from __future__ import annotations

import sys
from pathlib import Path

from agentgym_rl.config import load_config

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "results"))
import studies  # noqa: E402
import trees  # noqa: E402
from records import read_records  # noqa: E402


def test_the_page_is_the_one_that_the_records_give() -> None:
    records = [record for study in ("trees", "qwen-trees") for record in read_records(ROOT / "results", study)]
    assert {record["arm"] for record in trees.runs_by_seed(records)} == set(studies.TREE_ARMS)
    assert (ROOT / "docs" / "results" / "trees.md").read_text() == trees.page(records)


def test_both_arms_have_the_same_budget_and_start() -> None:
    for make in (studies.trees, studies.qwen_trees):
        jobs = [job for job in make([0]) if job.kind == "train" and job.arm != "base"]
        settings = {tuple(a for a in job.arguments if not a.startswith("rl.tree")) for job in jobs}
        assert len(settings) == len(jobs) // 2, "two arms each"
        for job in jobs:
            config = load_config(ROOT / "recipes" / job.recipe, [a for a in job.arguments if "{pre" not in a])
            assert config.rl.token_budget > 0
            assert set(config.group_sizes().values()) == {8}
