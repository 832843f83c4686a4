"""The page about methods beside plain GRPO says what the records say."""

from __future__ import annotations

import sys
from pathlib import Path

from agentgym_rl.config import load_config

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "results"))
import against_grpo  # noqa: E402
import studies  # noqa: E402
from records import read_records, runs_of  # noqa: E402


def test_the_page_is_the_one_that_the_records_give() -> None:
    records = read_records(ROOT / "results", "against-grpo")
    arms = {(record["task"], record["arm"]) for record in runs_of(records) if record["arm"] != "base"}
    assert arms == {(task, arm) for task, arms in studies.AGAINST_GRPO.items() for arm in arms}
    assert (ROOT / "docs" / "results" / "against-grpo.md").read_text() == against_grpo.page(records)


def test_arms_differ_in_the_method_alone() -> None:
    jobs = {(job.task, job.arm): job for job in studies.against_grpo([0])}
    configs = {
        key: load_config(ROOT / "recipes" / job.recipe, [a for a in job.arguments if "{base" not in a])
        for key, job in jobs.items()
    }
    plain, widest = configs["keydoor", "plain"].rl, configs["keydoor", "widest groups"].rl
    assert (plain.keep_groups, widest.keep_groups) == (1.0, 0.25)
    assert plain.token_budget == widest.token_budget > 0
    plain, corrected = configs["lock", "plain"].rl, configs["lock", "self-correction"].rl
    assert corrected.correction is not None
    assert plain.correction is not None
    assert corrected.correction.bonus > 0 == plain.correction.bonus == plain.correction.hold
    for arm, policy in {"plain": "random", "self-play": "past:10"}.items():
        team = configs["nim", arm].team
        assert team is not None
        assert (team.roles["second"].policy, team.roles["second"].eval_policy) == (policy, "oracle")
