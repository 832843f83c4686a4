"""Self-correction is learned: the second attempt beats two samples of the first."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

import pytest
from runs_for_tests import quiet

from agentgym_rl.commands.train import train
from agentgym_rl.config import load_config
from agentgym_rl.run.log import read_metrics

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.long
async def test_the_second_attempt_beats_two_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "lock", raising=False)
    await train(load_config(EXAMPLES / "lock.toml", ["threads=1"]), tmp_path / "run", console=quiet())
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    first, last = (
        {name: fmean(row[name] for row in part) for name in rows[0] if name.startswith("attempts/")}
        for part in (rows[:5], rows[-5:])
    )
    assert first["attempts/success_2"] < first["attempts/sampled_twice"]
    assert last["attempts/success_2"] > last["attempts/sampled_twice"] + 0.05
    assert last["attempts/wrong_to_right"] > last["attempts/right_to_wrong"] + 0.2
    assert abs(last["attempts/success_1"] - 1 / 3) < 0.15, "the code cannot be known"
