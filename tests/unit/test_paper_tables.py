"""Tables of the paper's table from made-up records: rows, intervals, aims, axes, transfers, tries."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "results"))
import paper  # noqa: E402
import plot  # noqa: E402
import searchqa_data  # noqa: E402
import studies  # noqa: E402

from agentgym_rl.environment import catalog  # noqa: E402
from agentgym_rl.environment.envs.searchqa import searchqa_from  # noqa: E402


def items(depth: str, count: int) -> list[int]:
    return list(catalog.items(catalog.load("textcraft"), "test", depth))[:count]


def evaluation(arm: str, rate: float, seed: int = 0, task: str = "textcraft", turns: str = "30") -> dict[str, Any]:
    """Return an evaluation on ten goals of depth 1 and ten of depth 3, of which a share is solved."""
    numbers = items("depth1", 10) + items("depth3", 10) if task == "textcraft" else range(20)
    outcomes = {f"{task}/{n}": "1111" if i % 10 < round(10 * rate) else "0000" for i, n in enumerate(numbers)}
    cell = {"items": 20, "episodes": 80, "success": {"value": rate}, "sampled_tokens": 100.0}
    results = [{"max_turns": int(t), "tasks": {f"X/{task}": cell}, "scenarios": {"X": cell}} for t in turns.split(",")]
    fields = {"arm": arm, "task": task, "seed": seed, "job": f"{arm}-{seed}", "results": results}
    return {**fields, "outcomes": dict.fromkeys(turns.split(","), outcomes)}


def run(arm: str, seed: int, end: float) -> dict[str, Any]:
    evaluations = [{"step": s, "success": end * s / 2, "sampled_tokens": 1000 * s} for s in range(3)]
    names = ("sequences_per_episode", "states_per_item", "loops", "refused", "recovered", "success_after_refusal")
    behaviour = {"step": {"step": [1, 2], **{name: [0.5, None] for name in names}}, "eval": {}}
    stages = [{"turns": 10.0 * s, "first_step": s, "last_step": s} for s in (1, 2)]
    fields = {"arm": arm, "task": "textcraft", "seed": seed, "job": f"run-{arm}-{seed}", "stages": stages}
    fields |= {"evaluations": evaluations, "curves": {"time/step_s": [2.0, 3.0]}, "behaviour": behaviour}
    return {**fields, "steps": 2, "seconds": 9.0, "sampled_tokens": 2000}


RECORDS = [
    *(evaluation("base", 0.1), evaluation("random play", 0.2), evaluation("SFT", 0.5)),
    *(evaluation("staged", 0.8, seed) for seed in (0, 1)),
    *(evaluation("fixed-long", 0.6, seed) for seed in (0, 1)),
    *(run(arm, seed, end) for arm, end in (("staged", 0.8), ("fixed-long", 0.6)) for seed in (0, 1)),
]


def test_a_dataset_without_items_has_no_row() -> None:
    record = evaluation("base", 0.1, task="searchqa")
    record["results"][-1]["tasks"] |= {"X/absent": None, "X/unplayed": {"items": 5, "episodes": 0}}
    assert [line.split(" | ")[0] for line in paper.kinds_table([record], "searchqa")[2:]] == ["| searchqa"]


def test_the_main_table_has_a_row_per_arm_and_the_published_ones() -> None:
    lines = paper.main_table(RECORDS)
    assert lines[0] == "| success | TextCraft |"
    assert [line.split(" | ")[0] for line in lines[2:7]] == [
        *("| random play", "| base", "| SFT on the oracle", "| RL, fixed long horizon", "| RL, ScalingInter"),
    ]
    assert "| RL, ScalingInter | 80.0% (58–92), seeds 80–80 |" in lines
    assert "| *AgentGym-RL-3B (published)* | 75% |" in lines


def test_the_gain_over_base_is_of_the_subsets_of_its_aim() -> None:
    (row,) = paper.over_base_table(RECORDS)[2:]
    assert row.startswith("| TextCraft, depth1 and depth2 | 10 | +70.0 ("), "goals of depth 3 do not count"
    assert row.endswith("| +70.0, +70.0 | +60: reached |")
    weak = [
        r | {"outcomes": RECORDS[5]["outcomes"]} if r["arm"] == "staged" and "outcomes" in r else r for r in RECORDS
    ]
    assert paper.over_base_table(weak)[2].endswith("| +60: missed |")


def test_arms_are_compared_on_shared_items_and_seeds() -> None:
    lines = paper.arms_against_staged(RECORDS, "textcraft")
    assert lines[2].startswith("| fixed-long | +20.0 (")
    assert "| +20.0, +20.0 | 0.12 | 0.12 |" in lines[2], "four items of twenty differ: p = 2 / 2**4"


def test_curves_have_the_same_success_over_steps_tokens_and_seconds() -> None:
    (steps, tokens, seconds), success = paper.axes_of(RECORDS[7])
    assert (steps, tokens, seconds) == ([0, 1, 2], [0, 1, 2], [0, 2, 5])
    assert success == pytest.approx([0, 0.4, 0.8])
    assert "| RL, ScalingInter | 2 | 2 | 2,000 | 5 | 9 | 80.0%, 80.0% |" in paper.costs_table(RECORDS, "textcraft")


def test_behaviour_is_averaged_by_stage_and_old_records_have_none() -> None:
    lines = paper.behaviour_table(RECORDS, "textcraft")
    assert "| staged | 10 | 0.5 | 0.5 | 0.5 | 0.5 | 0.5 | 0.5 |" in lines
    assert "| staged | 20 |  |  |  |  |  |  |" in lines
    old = [{k: v for k, v in r.items() if k != "behaviour"} for r in RECORDS]
    assert paper.behaviour_table(old, "textcraft") == ["No run has behaviour by step in its record."]


def test_turns_and_tries_of_each_size_are_listed() -> None:
    turns = "2,4,8,16,32"
    records = [evaluation("base 0.5B", 0.1, turns=turns), evaluation("staged 0.5B", 0.5, turns=turns)]
    text = "\n".join(paper.interaction_tables(records))
    assert "| staged 0.5B | 50.0% | 50.0% | 50.0% | 50.0% | 50.0% |" in text
    assert "| staged 0.5B | 50.0%, 100 | 50.0%, 200 | 50.0%, 400 |" in text


def test_published_agents_have_no_number_on_the_built_in_sites() -> None:
    lines = paper.main_table([*RECORDS, evaluation("base", 0.1, task="webarena")])
    assert lines[0].endswith("| Web, built-in sites |")
    published = [line for line in lines if "(published)" in line]
    assert len(published) == len(paper.PUBLISHED)
    assert all(line.endswith("% |  |") for line in published)


def test_transfers_form_a_matrix_with_the_own_scenario_marked() -> None:
    transfers = [evaluation("trained on textcraft", 0.3, task="babyai"), evaluation("together", 0.4)]
    lines = paper.generalisation_table(transfers, RECORDS)
    assert lines[0] == "| agent | TextCraft | BabyAI |"
    assert "| trained on TextCraft | 80.0% (58–92) (own) | 30.0% (15–52) |" in lines


def test_the_page_of_a_real_model_is_drawn_from_its_records(tmp_path: Path) -> None:
    text = "\n".join(plot.real_model("textcraft", RECORDS, tmp_path))
    assert "Behaviour in training, by stage:" in text
    assert (tmp_path / "paper-textcraft.png").stat().st_size > 10_000


def test_every_real_model_study_has_the_rows_of_the_table() -> None:
    for task in studies.QWEN:
        jobs = studies.STUDIES[f"qwen-{task}"]([0])
        assert {job.arm for job in jobs if job.kind == "eval"} == set(paper.ROWS)


def test_questions_are_split_by_their_text_and_keep_their_facts(tmp_path: Path) -> None:
    def write(name: str, rows: list[dict[str, Any]]) -> None:
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    write("paragraphs", [{"id": f"p{n}", "title": f"Title {n}", "text": f"Fact number {n}."} for n in range(40)])
    questions = [{"question": f"What is fact {n}?", "answers": [f"{n}"], "gold": [f"p{n}"]} for n in range(40)]
    write("hotpotqa", questions)
    write("musique", questions[:3])  # asked before
    counts = searchqa_data.prepare(tmp_path, tmp_path / "out", ("hotpotqa", "musique"))
    assert counts["hotpotqa"]["train"] + counts["hotpotqa"]["test"] == 40
    assert 2 <= counts["hotpotqa"]["test"] <= 16
    assert sum(counts["musique"].values()) == 0
    env_class = searchqa_from(tmp_path / "out/questions", tmp_path / "out/index")
    assert {name: len(split) for name, split in env_class.splits.items()} == dict(counts["hotpotqa"])
    env = env_class()
    env.reset(0)
    while not (step := env.step(env.oracle())).done:
        assert "Title" in step.observation
    assert step.reward == 1.0
