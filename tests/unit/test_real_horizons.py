"""Claim B with the 0.5B model from made-up records: the verdict, the table and the list of the evidence page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "results"))
import pages
import real_horizons
from qwen_studies import SMALL_SEEDS


def write(folder: Path, arm: str, seed: int, end: float, tokens: int = 1000) -> None:
    """Write a run of two steps, whose held-out success rises to `end`, and the evaluation of its model."""
    evaluations = [{"step": s, "success": end * s / 2, "sampled_tokens": tokens * s} for s in range(3)]
    curves = {"tokens/per_episode": [tokens] * 2, "episodes/usable": [4] * 2, "time/step_s": [2.0, 3.0]}
    common = {"arm": arm, "task": "babyai", "seed": seed}
    run = {"steps": 2, "sampled_tokens": 2 * tokens, "stages": [{"turns": 6.0}, {"turns": 20.0}], "seconds": 9.0}
    run |= {"evaluations": evaluations, "curves": curves, "job": f"{arm}-{seed}"}
    solved = round(10 * end)
    outcomes = {f"babyai/{n}": "1111" if n < solved else "0000" for n in range(10)}
    evaluated = {"outcomes": {"20": outcomes}, "job": f"eval-{arm}-{seed}"}
    for record in (run, evaluated):
        (folder / f"{record['job']}.json").write_text(json.dumps(common | record))


@pytest.fixture
def study(tmp_path: Path) -> Path:
    folder = tmp_path / real_horizons.STUDY
    folder.mkdir()
    for seed in SMALL_SEEDS[:2]:
        write(folder, "staged", seed, 0.8)
        write(folder, "fixed-long", seed, 0.6, tokens=2000)
    return folder


def text(study: Path) -> str:
    return " ".join(real_horizons.texts(study.parent)["real-horizons"].split())


def test_two_seeds_are_not_shown(study: Path) -> None:
    assert text(study) == ""
    assert "real-horizons" in pages.current(pages.RESULTS)["docs/results/evidence.md"]


def test_some_seeds_are_shown_without_a_verdict(study: Path) -> None:
    write(study, "staged", SMALL_SEEDS[2], 0.8)
    write(study, "fixed-long", SMALL_SEEDS[2], 0.6, tokens=2000)
    write(study, "fixed-short", SMALL_SEEDS[2], 0.5)
    written = text(study)
    assert "no verdict before eight seeds; with three: not shown. 0 of 3 runs of fixed-long collapsed." in written
    assert "| success at the end | 80.0% | 60.0% | +20.0 (+20.0 to +20.0) | 0.75 |" in written
    assert "| mean success at equal processed tokens | 40.0% | 15.0% | +25.0 (+25.0 to +25.0) | 0.75 |" in written
    assert "staged less fixed-short +30.0 (+0.0 to +60.0), p = 0.25 (one seed)" in written
    assert "is 40.0% (staged) and 30.0% (fixed-long)" in written
    assert "one of staged 0.0 million sampled tokens and 5 s of training steps" in written


def test_all_seeds_have_a_verdict(study: Path) -> None:
    for seed in SMALL_SEEDS:
        write(study, "staged", seed, 0.8)
        write(study, "fixed-long", seed, 0.6, tokens=2000)
    assert "By the rule written before the runs: **staging helps**." in text(study)
    assert "| eight seeds | staged | fixed-long |" in text(study)
