"""The rule of results/collapse/PROTOCOL.md as code: outcomes of a run, tests over seeds, verdicts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "results"))
import collapse  # noqa: E402
import collapse_page  # noqa: E402
import studies  # noqa: E402

from agentgym_rl.config import load_config  # noqa: E402

TASK = "maze, paper-like"


def run(success: list[float], tokens: float = 100.0, arm: str = "staged", seed: int = 0) -> dict[str, Any]:
    """Return the record of a run with an evaluation after every step and `tokens` per episode, two episodes a step."""
    steps = len(success) - 1
    curves = {"tokens/per_episode": [tokens] * steps, "episodes/usable": [2.0] * steps, "grad/norm": [1.0] * steps}
    evaluations = [{"step": step, "success": value} for step, value in enumerate(success)]
    fields = {"arm": arm, "seed": seed, "task": TASK, "job": "j", "seconds": 1.0}
    return {**fields, "curves": curves, "evaluations": evaluations}


def evaluation(rate: float, arm: str, seed: int) -> dict[str, Any]:
    outcomes = {f"maze/{item}": "1" if item < round(100 * rate) else "0" for item in range(100)}
    return {"arm": arm, "seed": seed, "task": TASK, "job": "j", "outcomes": {"64": outcomes}}


@pytest.mark.parametrize(
    ("success", "expected"),
    [
        ([0.4, 0.8, 0.3, 0.3], True),
        ([0.4, 0.8, 0.3, 0.5, 0.3], False),  # never two in a row
        ([0.4, 0.8, 0.4, 0.4], False),  # half is not below half
        ([0.8, 0.1, 0.1], True),  # the start counts as the best
        ([0.1, 0.2, 0.4, 0.8], False),
        ([0.2, 0.8, 0.5, 0.3, 0.3, 0.9], True),  # a later recovery does not undo it
    ],
)
def test_a_collapse_is_below_half_of_the_best_twice_in_a_row(success: list[float], expected: bool) -> None:
    assert collapse.collapsed(run(success)) is expected


def test_a_gradient_that_is_no_number_is_a_collapse() -> None:
    record = run([0.4, 0.8])
    record["curves"]["grad/norm"] = [float("nan")]
    assert collapse.collapsed(record)


def test_areas_are_compared_up_to_the_tokens_that_both_runs_processed() -> None:
    cheap, costly = run([0.0, 0.5, 1.0], tokens=50.0), run([0.0, 1.0, 1.0], tokens=100.0)
    assert collapse.processed_curve(costly)[0] == [0.0, 200.0, 400.0]
    # up to 200 tokens: the cheap run rises evenly from 0 to 1, the costly one too
    assert collapse.areas(cheap, costly) == pytest.approx((0.5, 0.5))
    short = run([0.0, 1.0], tokens=50.0)
    assert collapse.areas(short, costly) == pytest.approx((0.5, 0.25))


def study(pairs: list[tuple[list[float], float, list[float], float]]) -> list[dict[str, Any]]:
    """Return records with (curve, end) of staged and (curve, end) of fixed-64 for each seed."""
    records = []
    for seed, (staged, staged_end, fixed, fixed_end) in enumerate(pairs):
        records += [run(staged, arm="staged", seed=seed), evaluation(staged_end, "staged", seed)]
        records += [run(fixed, arm="fixed-64", seed=seed), evaluation(fixed_end, "fixed-64", seed)]
    return records


GOOD, BROKEN = [0.4, 0.7, 0.8, 0.9], [0.4, 0.8, 0.2, 0.1]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(GOOD, 0.9, BROKEN, 0.1)] * 12, "staging helps"),
        ([(BROKEN, 0.1, GOOD, 0.9)] * 12, "staging hurts"),
        ([(GOOD, 0.9, GOOD, 0.9)] * 12, "not shown"),
        ([(GOOD, 0.9, BROKEN, 0.1)] * 4, "not shown"),  # four seeds cannot reach 5%
        ([([0.4, 0.9, 0.9, 0.9], 0.8, GOOD, 0.9)] * 12, "mixed"),  # faster, and lower at the end
        ([([0.4, 0.4, 0.4], 0.41, [0.4, 0.4, 0.4], 0.40)] * 12, "void"),
    ],
)
def test_the_verdict_follows_the_rule(
    pairs: list[tuple[list[float], float, list[float], float]], expected: str
) -> None:
    records = study(pairs)
    chosen = collapse.pairs_of(records, TASK, "staged", "fixed-64")
    assert len(chosen) == len(pairs)
    assert collapse.verdict(collapse.compare(chosen), collapse.gain_of(records, TASK)) == expected
    title = "Verdict" if len(pairs) == 12 else "No verdict before 12 seeds; so far"
    assert f"**{title}: {expected}.**" in "\n".join(collapse.report(records))


def test_p_values_of_twelve_equal_pairs_are_exact_and_incomplete_seeds_are_left_out() -> None:
    records = study([(GOOD, 0.9, BROKEN, 0.1)] * 12)
    outcomes = collapse.compare(collapse.pairs_of(records, TASK, "staged", "fixed-64"))
    assert [outcome.p for outcome in outcomes] == pytest.approx([2 / 4096] * 3)
    text = "\n".join(collapse.report(records))
    assert "reproduced (12 of 12 seeds)" in text
    assert "| collapsed | 0.0% | 100.0% | -100.0 (-100.0 to -100.0) points | 0.000488 | 0.00146 |" in text
    without_last = [r for r in records if (r["arm"], r["seed"]) != ("staged", 11)]
    assert len(collapse.pairs_of(without_last, TASK, "staged", "fixed-64")) == 11


def test_the_conditions_of_the_study_are_those_of_the_protocol() -> None:
    jobs = {job.name: job for job in studies.collapse([3])}
    recipe = ROOT / "recipes/evidence/maze-rl.toml"
    calm, paper = (
        load_config(recipe, [a for a in jobs[f"staged-{name}-maze-3"].arguments if "{" not in a])
        for name in ("calm", "paper-like")
    )
    assert (calm.rl.kl_coef, calm.rl.minibatches, calm.rl.overlap, calm.rl.importance) == (0.02, 2, 0, "token")
    assert (paper.rl.kl_coef, paper.rl.minibatches, paper.rl.overlap, paper.rl.importance) == (0.0, 4, 1, "none")
    assert (calm.rl.optimizer.lr, paper.rl.optimizer.lr) == (1e-3, 5e-4)
    assert {config.rl.aggregate for config in (calm, paper)} == {"trajectory"}
    assert calm.rl.steps == paper.rl.steps == 300
    assert (calm.horizon.turns, calm.horizon.steps_per_stage) == ((16, 32, 64), 100)
    assert len([job for job in studies.collapse(None) if job.kind == "train" and job.arm != "base"]) == 96


def test_the_page_has_no_verdict_before_all_seeds_have_run(tmp_path: Path) -> None:
    assert collapse_page.texts(tmp_path) == {"collapse": ""}
    stored = ROOT / "results"
    assert "**staging helps** in the calm condition" in " ".join(collapse_page.texts(stored)["collapse"].split())
    (tmp_path / "collapse").mkdir()
    for path in (stored / "collapse").glob("*.json"):
        if not path.stem.endswith("-11"):
            (tmp_path / "collapse" / path.name).symlink_to(path)
    assert collapse_page.texts(tmp_path) == {"collapse": ""}


def test_the_page_names_collapses_and_differences_of_each_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collapse_page, "CONDITIONS", {TASK: "paper-like"})
    records = study([(GOOD, 0.9, BROKEN, 0.1)] * 12)
    lines = collapse_page.table(records)
    assert lines[2] == "| paper-like: runs that collapsed | 0 of 12 | 12 of 12 |  | 0.0015 |"
    assert lines[3] == "| paper-like: success at the end | 90.0% | 10.0% | +80.0 (+80.0 to +80.0) | 0.0015 |"
    claim = collapse_page.claim(records)
    assert "**staging helps** in the paper-like condition" in claim
    assert "not reproduced" not in claim
    assert "The paper's collapse is reproduced: 12 of 12 runs of fixed-64 collapsed." in claim
