"""Claim C with real models and the paper's table, from made-up records: gains, endings, missing parts."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "results"))
import after_rl  # noqa: E402
import check_d  # noqa: E402
import paper_page  # noqa: E402
import real_sizes  # noqa: E402

TURNS = (2, 4, 8, 16, 32)


def episode(item: int, solved_at: int = 0, stop: str = "max_turns", turns: int = 32) -> dict[str, Any]:
    """Return the line of an episode that is solved in a turn, or ends otherwise after `turns` replies."""
    length = solved_at or turns
    rewards = [0.0] * (length - 1) + [float(bool(solved_at))]
    fields = {"item": f"babyai/{item}", "actions": ["turn left"] * length, "states": [0] * length, "refused": []}
    return {**fields, "rewards": rewards, "stop": "done" if solved_at else stop}


def write_agent(
    folder: Path, task: str, arm: str, rows: list[dict[str, Any]], seed: int = 0, turns: tuple[int, ...] = TURNS
) -> None:
    outcomes = {str(t): {r["item"]: _outcome(r, t) * 4 for r in rows} for t in turns}
    cell = {"sampled_tokens": 10.0, "prompt_tokens": 20.0}
    results = [{"max_turns": t, "scenarios": {"X": cell}} for t in turns]
    config = {"agent": {"run": f"{task}-{seed}"}, "samples": 4, "max_new_tokens": 128, "tasks": [{"max_context": 4096}]}
    job = f"turns-{task}-{arm.replace(' ', '-')}-{seed}"
    record = {"job": job, "arm": arm, "task": task, "seed": seed, "outcomes": outcomes, "results": results}
    record |= {"config": config, "behaviour": {"loops": 0.5, "refused": 0.25}}
    (folder / f"{job}.json").write_text(json.dumps(record))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"{job}.actions.jsonl.xz").write_bytes(lzma.compress(lines.encode()))


def _outcome(row: dict[str, Any], turns: int) -> str:
    return str(int(sum(row["rewards"]) > 0 and len(row["actions"]) <= turns))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Return a folder of records: random play gains eight of ten items from 4 to 32 turns, the larger model two."""
    study = tmp_path / real_sizes.STUDY
    study.mkdir()
    for task in real_sizes.TASKS:
        write_agent(study, task, "random play", [episode(n, solved_at=4 if n < 2 else 20) for n in range(10)])
        write_agent(study, task, "base 135M", [episode(n, stop="length", turns=1) for n in range(10)])
        write_agent(study, task, "base 0.5B", [episode(n, stop="max_context", turns=10 + n) for n in range(10)])
        large = [episode(0, solved_at=4), episode(1, solved_at=6), episode(2, solved_at=32)]
        write_agent(study, task, "base 1.5B", [*large, *(episode(n) for n in range(3, 10))])
    return tmp_path


def test_the_gain_from_turns_is_less_random_plays_own(results: Path) -> None:
    model = real_sizes.read(results)
    assert model is not None
    compared = real_sizes.by_name(model)
    gain, p = compared["babyai", "1.5B: from 4 to 32 turns, less random play's gain"]
    assert gain.points == "−60.0"
    assert gain.p <= p <= 1
    text = " ".join(real_sizes.texts(model)["sizes"].split())
    assert "the untrained 0.5B model gains 0.0 points and the 1.5B model 20.0; random play gains 80.0" in text
    assert f"p is over all {len(compared)} comparisons before RL (" in text


def test_endings_count_up_to_a_turn(results: Path) -> None:
    model = real_sizes.read(results)
    assert model is not None
    rows = model.episodes["babyai", "0.5B"]
    assert [real_sizes.ended(rows, "max_context", turns) for turns in (9, 10, 16, 32)] == [0, 10, 70, 100]
    row = next(line for line in real_sizes.table(model) if line.startswith("| BabyAI: SmolLM2-135M"))
    assert row.endswith("|  |  | 0% | 100% |"), "no comparison of a model that never answers"


def test_lack_of_context_is_lifted_by_kaplan_meier() -> None:
    rows = [episode(0, solved_at=2), episode(1, stop="max_context", turns=5), episode(2, solved_at=8), episode(3)]
    assert real_sizes.without_context_limit(rows) == pytest.approx(100 * (1 - 3 / 4 * 1 / 2))
    assert check_d.without_context(rows) == pytest.approx(real_sizes.without_context_limit(rows))
    cut = [*rows[:1], episode(1, stop="length", turns=5), *rows[2:]]
    assert real_sizes.without_context_limit(cut) == pytest.approx(50), "a cut reply is a failure, not a limit"


def test_the_picture_and_the_second_evaluation_need_their_records(results: Path, tmp_path: Path) -> None:
    model = real_sizes.read(results)
    assert model is not None
    assert "second evaluation" not in real_sizes.texts(model)["sizes"]
    assert real_sizes.draw(model, tmp_path / "sizes.png")
    assert (tmp_path / "sizes.png").stat().st_size > 10_000
    assert not real_sizes.draw(None, tmp_path / "none.png")


def test_a_study_without_all_models_has_no_text(results: Path) -> None:
    next((results / real_sizes.STUDY).glob("*base-1.5B-0.json")).unlink()
    assert real_sizes.read(results) is None
    assert real_sizes.texts(None) == {"sizes": "", "sizes-details": ""}


def solved_in(turns: dict[int, int]) -> list[dict[str, Any]]:
    """Return ten episodes, of which each item in `turns` is solved in so many turns."""
    return [episode(n, solved_at=turns.get(n, 0)) for n in range(10)]


def plain(model: real_sizes.RealSizes, part: str = "sizes") -> str:
    return " ".join(real_sizes.texts(model)[part].split())


def test_without_trained_agents_the_text_says_that_they_are_not_measured(results: Path) -> None:
    model = real_sizes.read(results)
    assert model is not None
    assert after_rl.comparisons(model) == []
    assert "The same after RL is not measured." in plain(model)
    assert "after RL |" not in plain(model) + plain(model, "sizes-details")


def test_trained_agents_have_rows_and_comparisons_of_their_own(results: Path, tmp_path: Path) -> None:
    before = real_sizes.read(results)
    assert before is not None
    untrained = {key: (c.points, p) for key, (c, p) in real_sizes.by_name(before).items()}
    for task in real_sizes.TASKS:
        write_agent(results / real_sizes.STUDY, task, "staged 1.5B", solved_in({0: 2, 1: 4, 2: 6, 3: 20, 4: 20}))
    model = real_sizes.read(results)
    assert model is not None
    assert {key: (c.points, p) for key, (c, p) in real_sizes.by_name(model).items()} == untrained
    compared = after_rl.by_name(model)
    gain, p = compared["babyai", "1.5B after RL: from 4 to 32 turns, less random play's gain"]
    assert gain.points == "−50.0", "three of ten items less eight of random play"
    assert gain.p <= p
    text = plain(model)
    assert "| BabyAI: Qwen2.5-Coder-1.5B after RL | 20.0% | 30.0% | 50.0% |" in text
    assert (
        "**Not shown after RL, either.** On BabyAI random play gains 80.0 points and the trained 1.5B model 30.0"
        in text
    )
    assert f"apart from them, over all {len(compared)} after RL" in text
    evaluated = "1.5B on BabyAI (one seed) and 1.5B on TextCraft (one seed), so parameters cannot be compared."
    assert f"**Evaluated after RL**: {evaluated}" in text
    assert "1.5B after RL: best of 4 tries of 8 turns less one of 32 | −20.0" in plain(model, "sizes-details")
    assert real_sizes.draw(model, tmp_path / "sizes.png")


def test_a_gain_above_random_plays_is_shown(results: Path) -> None:
    study = results / real_sizes.STUDY
    for task in real_sizes.TASKS:
        write_agent(study, task, "random play", solved_in({}))
        write_agent(study, task, "staged 1.5B", solved_in(dict.fromkeys(range(10), 20)))
    model = real_sizes.read(results)
    assert model is not None
    assert "**After RL it is shown on BabyAI (1.5B) and TextCraft (1.5B).**" in plain(model)


def test_more_seeds_are_averaged_and_more_sizes_named(results: Path) -> None:
    study = results / real_sizes.STUDY
    write_agent(study, "babyai", "staged 1.5B", solved_in({0: 2, 1: 20}), seed=0)
    write_agent(study, "babyai", "staged 1.5B", solved_in({0: 2, 1: 20, 2: 20}), seed=1)
    write_agent(study, "textcraft", "staged 0.5B", solved_in({0: 2}))
    model = real_sizes.read(results)
    assert model is not None
    assert real_sizes.success(model, "babyai", "1.5B after RL", 32) == pytest.approx(25)
    text = plain(model)
    assert "**Evaluated after RL**: 0.5B on TextCraft (one seed) and 1.5B on BabyAI (two seeds)." in text
    assert "(1.5B after RL: two seeds)" in text
    assert "On TextCraft random play gains 80.0 points and the trained 0.5B model 0.0" in text
    assert "| TextCraft: Qwen2.5-Coder-0.5B after RL | 10.0% |" in text


def test_seeds_of_the_papers_table_stand_beside_the_agent(results: Path) -> None:
    write_agent(results / real_sizes.STUDY, "babyai", "staged 1.5B", solved_in({0: 2, 1: 20}), seed=1)
    suite = results / "qwen-babyai"
    suite.mkdir()
    write_agent(suite, "babyai", "staged", solved_in({0: 2, 1: 20, 2: 20}), seed=0, turns=(20,))
    write_agent(suite, "babyai", "staged", solved_in({0: 2, 1: 20}), seed=1, turns=(20,))
    model = real_sizes.read(results)
    assert model is not None
    comparison, _ = after_rl.by_name(model)["babyai", "all 2 seeds: from 4 to 20 turns, less random play's gain"]
    assert comparison.points == "−65.0"
    assert "by seed −60.0 and −70.0. The 1.5B agents of this section are the seeds that gain least." in plain(model)
    assert "20.0% and 20.0% on BabyAI under 20 turns (p = 1)" in plain(model, "sizes-details")


def test_two_sizes_after_rl_are_compared_with_all_seeds_of_the_papers_table(results: Path) -> None:
    study, suite = results / real_sizes.STUDY, results / "qwen-babyai"
    write_agent(study, "babyai", "staged 1.5B", solved_in({0: 2}))
    for seed in range(2):
        write_agent(study, "babyai", "staged 0.5B", solved_in({0: 2, 1: 20, 2: 20, 3: 32}), seed=seed)
    suite.mkdir()
    write_agent(suite, "babyai", "staged", solved_in({0: 2, 1: 20}), turns=(20,))
    write_agent(suite, "babyai", "staged", solved_in({0: 2, 1: 2, 2: 20, 3: 20}), seed=1, turns=(20,))
    model = real_sizes.read(results)
    assert model is not None
    points = {name: c.points for (_, name), (c, _) in after_rl.by_name(model).items() if name.startswith("after RL")}
    assert points == {
        "after RL, all seeds: from 0.5B to 1.5B under 4 turns": "+5.0",
        "after RL, all seeds: from 0.5B to 1.5B under 16 turns": "+5.0",
        "after RL, all seeds: from 0.5B to 1.5B under 20 turns": "+0.0",
        "after RL, all seeds: 0.5B under 32 turns less 1.5B under 4": "+25.0",
        "after RL, all seeds: 0.5B under 32 turns less 1.5B under 8": "+25.0",
    }
    text = plain(model)
    assert "on BabyAI 0.5B (two seeds) solves 10.0, 10.0, 10.0 and 30.0% under 4, 8, 16 and 20 turns" in text
    assert "1.5B less 0.5B is +5.0 points under 4 turns" in text
    assert "0.5B under 32 turns solves 40.0% (by seed 40.0 and 40.0%); less 1.5B that is +25.0 points under 4" in text
    assert "random play under 32 turns less 1.5B is +85.0 points under 4" in text


def suite_record(arm: str, task: str, success: str) -> dict[str, Any]:
    outcomes = {"20": {f"{task}/{n}": success for n in range(8)}}
    subsets = [{"name": "known", "items": 8}, {"name": "absent", "items": 0}]
    cells = {"X/known": {"items": 8, "episodes": 16, "success": {"value": 0.5}}, "X/absent": None}
    config = {"samples": 2, "tasks": subsets}
    results = [{"max_turns": 20, "tasks": cells}]
    return {"arm": arm, "task": task, "seed": 0, "outcomes": outcomes, "config": config, "results": results}


def test_the_papers_table_names_what_has_no_record(tmp_path: Path) -> None:
    for arm, task, success in (("random play", "babyai", "11"), ("base", "babyai", "01"), ("base", "sciworld", "00")):
        folder = tmp_path / f"qwen-{task}"
        folder.mkdir(exist_ok=True)
        (folder / f"{arm}.json").write_text(json.dumps(suite_record(arm, task, success)))
    texts = paper_page.texts(tmp_path)
    table = texts["paper-table"].splitlines()
    assert table[0] == "| success | BabyAI | SciWorld |"
    assert table[2].endswith(" |  |"), "random play did not play SciWorld"
    assert "| BabyAI | 8, no absent | 20 | 2 | the mission is done |" in table
    plain = " ".join(texts["paper-table"].split())
    assert "BabyAI −50.0 (−50.0 to −50.0, p = 0.0078). p is exact" in plain
    assert "SFT less base" not in plain, "no agent imitated"
    assert "Missing columns: TextCraft; Deep search; Web. Missing cells: random play on SciWorld." in plain
    assert "| known | 8 | 50 | 50 |" in texts["paper-kinds"]
    assert (texts["paper-runs"], texts["paper-behaviour"]) == ("", ""), "no agent was trained"
    assert paper_page.texts(tmp_path / "nothing") == dict.fromkeys(texts, "")
