"""The page about long episodes in a short context says what the records say."""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path

from agentgym_rl.config import load_config

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "results"))
import long_context  # noqa: E402
import studies  # noqa: E402
from records import read_records  # noqa: E402


def test_the_page_is_the_one_that_the_records_give() -> None:
    records = read_records(ROOT / "results", "long-context")
    assert (ROOT / "docs" / "results" / "long-context.md").read_text() == long_context.page(records)


def test_seeds_that_overlap_and_missing_runs_are_said() -> None:
    records = deepcopy(read_records(ROOT / "results", "long-context"))
    best = max(long_context.successes(long_context.runs_of_arm(records, "truncation"), -1))
    long_context.runs_of_arm(records, "summary")[0]["evaluations"][-1]["success"] = best
    assert "overlap" in long_context.claim(records)
    assert "window" in long_context.page([r for r in records if r["job"] != "window-long-maze-2"]).split("## Limits")[1]


def test_arms_differ_in_the_context_only() -> None:
    jobs = [job for job in studies.long_context([0]) if job.arm != "base"]
    configs = [load_config(ROOT / "recipes" / job.recipe, [a for a in job.arguments if "{" not in a]) for job in jobs]
    assert [config.agent.context for config in configs] == ["full", "window", "summary"]
    assert len({job.arguments[0] for job in jobs}) == 1, "the same starting model"
