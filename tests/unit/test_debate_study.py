"""The page about judges and debaters says what the records say."""

from __future__ import annotations

import sys
from pathlib import Path

from agentgym_rl.config import load_config

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "results"))
import debate  # noqa: E402
import studies  # noqa: E402
from records import read_records  # noqa: E402


def test_the_page_is_the_one_that_the_records_give() -> None:
    records = read_records(ROOT / "results", "debate")
    assert {record["arm"] for record in records} == set(studies.DEBATE_ARMS)
    records += read_records(ROOT / "results", "qwen-debate")
    assert (ROOT / "docs" / "results" / "debate.md").read_text() == debate.page(records)


def test_the_arms_differ_in_what_the_judge_hears_only() -> None:
    configs = []
    for job in studies.debate([0]):
        config = load_config(ROOT / "recipes" / job.recipe, list(job.arguments)).model_dump()
        assert config["team"]["roles"].pop("judge")["policy"] == "learner"
        rounds = config["environments"][0]["kwargs"].pop("rounds")
        speakers = {role["policy"] for role in config["team"].pop("roles").values()}
        configs.append(config)
        assert (rounds, speakers) in [(0, {"random"}), (1, {"random"}), (1, {"oracle"})]
    assert configs[0] == configs[1] == configs[2]
