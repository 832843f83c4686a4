"""The table of the time to a fixed success, from made-up records."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "results"))
import asynchronous_tables
from studies import STUDIES


def record(bound: int, seed: int, step_s: float, success: list[float]) -> dict[str, Any]:
    steps = len(success)
    curves = {"success/mean": success, "time/step_s": [step_s] * steps, "time/learn_s": [0.5] * steps}
    curves |= {"turns/median": [5.0] * steps, "turns/max": [50.0] * steps}
    return {
        "arm": f"max_staleness {bound}",
        "seed": seed,
        "curves": curves,
        "after": {"success": success[-1], "episodes": 10},
    }


def test_a_run_reaches_a_success_when_the_mean_of_its_last_steps_does() -> None:
    rising = [0.0] * 10 + [1.0] * 30
    assert asynchronous_tables.time_to_success(record(0, 0, 2.0, rising), 0.6) == pytest.approx(2.0 * 22)
    assert asynchronous_tables.time_to_success(record(0, 0, 2.0, [0.5] * 40), 0.6) == math.inf


def test_runs_race_to_a_share_of_what_synchronous_ones_reach() -> None:
    runs = [record(0, seed, 2.0, [0.0] * 20 + [end] * 20) for seed, end in enumerate((0.6, 0.8))]
    assert asynchronous_tables.race_success(runs) == pytest.approx(0.9 * 0.7)


def test_runs_are_compared_with_the_synchronous_one_of_their_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rising = [0.0] * 5 + [1.0] * 15
    folder = tmp_path / "long"
    folder.mkdir()
    for seed, (synchronous, bounded) in enumerate([(2.0, 1.0), (3.0, 1.0)]):
        for bound, seconds in ((0, synchronous), (2, bounded)):
            row = record(bound, seed, seconds, rising)
            (folder / f"run-staleness-{bound}-{seed}.json").write_text(json.dumps(row))
    monkeypatch.setattr(asynchronous_tables, "RESULTS", tmp_path)
    header, rows = asynchronous_tables.race("long")
    assert header[4] == "time to 68%"  # 15 of the 20 steps succeed
    assert [row[0] for row in rows] == ["`0`", "`2`"]
    assert rows[0][3] == "10×"
    assert rows[1][4] == "20, 20 s"
    assert rows[1][5] == "**2.50×** (2.00 to 3.00)"


def test_the_study_has_a_synchronous_run_of_every_seed() -> None:
    jobs = STUDIES["asynchronous-long"](None)
    arms = {(job.seed, job.arm) for job in jobs}
    assert arms == {(seed, f"max_staleness {bound}") for seed in range(3) for bound in (0, 4)}
