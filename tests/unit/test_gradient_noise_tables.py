"""The table of gradients by horizon, from records of drawn gradients."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "results"))
import gradient_noise
import gradient_noise_tables

TURNS = (8, 64)


def record(seed: int, truths: dict[int, torch.Tensor]) -> dict[str, Any]:
    """Return a record of 60 groups whose gradients are the horizon's true one and noise."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {turns: truth + torch.randn(60, len(truth), generator=generator) for turns, truth in truths.items()}
    horizons = [
        {
            "turns": turns,
            "groups_with_contrast": 45 if turns == 64 else 15,
            "processed_tokens_per_group": 100.0 * turns,
            **asdict(gradient_noise.products(gradients, drawn[64])),
        }
        for turns, gradients in drawn.items()
    ]
    return {"model": "step_000100", "evaluation": "100", "aggregate": "trajectory", "horizons": horizons}


def write(folder: Path, name: str, seed: int, scale: float = 1.0) -> dict[int, dict[str, Any]]:
    truths = {turns: torch.tensor([scale, 0.0, 0.0, 0.0]) for turns in TURNS}
    made = record(seed, truths)
    (folder / f"{name}.json").write_text(json.dumps(made))
    return {row["turns"]: row for row in gradient_noise.estimates(made["horizons"])}


def test_a_row_is_the_mean_of_the_seeds_with_their_range(tmp_path: Path) -> None:
    seeds = [write(tmp_path, f"fixed-64-calm-{seed}-100", seed)[8] for seed in (8, 9)]
    write(tmp_path, "fixed-64-paper-like-8-300", 8)
    header, rows = gradient_noise_tables.by_horizon(tmp_path)
    assert [row[:5] for row in rows] == [
        ["fixed-64, calm", "100", "8", "2 × 60", "25%"],
        ["fixed-64, calm", "100", "64", "2 × 60", "75%"],
        ["fixed-64, paper-like", "300", "8", "1 × 60", "25%"],
        ["fixed-64, paper-like", "300", "64", "1 × 60", "75%"],
        ["all", "", "8", "3 × 60", "25%"],
        ["all", "", "64", "3 × 60", "75%"],
    ]
    assert all(len(row) == len(header) for row in rows)
    low, high = sorted(1000 * seed["ratio"][0] for seed in seeds)
    mean, error = (low + high) / 2, 1000 * (seeds[0]["ratio"][1] ** 2 + seeds[1]["ratio"][1] ** 2) ** 0.5 / 2
    assert rows[0][6] == f"{mean:.2f} ± {error:.2f} ({low:.2f} to {high:.2f})"
    assert "(" not in rows[2][6], "one seed has no range"
    assert [row[8] == "" for row in rows] == [False, True] * 3, "the longest horizon is not compared with itself"


def test_steps_are_sorted_as_numbers(tmp_path: Path) -> None:
    for step in (1000, 200):
        write(tmp_path, f"fixed-64-calm-8-{step}", 8)
    _, rows = gradient_noise_tables.by_horizon(tmp_path)
    assert [row[1] for row in rows[::2]] == ["200", "1000", ""]


def test_an_agreement_that_the_groups_do_not_show_is_a_dash() -> None:
    assert gradient_noise_tables.mean_with_error([(0.1, 0.2), (float("nan"), 0.2)]) == "–"


def test_a_record_with_another_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trial.json").write_text("{}")
    with pytest.raises(ValueError, match=r"trial.json is not named ARM-CONDITION-SEED-STEP.json"):
        gradient_noise_tables.by_horizon(tmp_path)
