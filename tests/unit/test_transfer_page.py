"""The part of the evidence page about agents on scenarios that they never saw, from made-up records."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "results"))
import transfer_page  # noqa: E402


def write(folder: Path, job: str, arm: str, task: str, success: str, refused: list[int], seed: int = 0) -> None:
    """Write an evaluation of eight items with two samples each, and the actions of one episode."""
    outcomes = {"20": {f"{task}/{n}": success for n in range(8)}}
    config: dict[str, Any] = {"samples": 2, "tasks": []}
    record = {"job": job, "arm": arm, "task": task, "seed": seed, "outcomes": outcomes, "config": config}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{job}.json").write_text(json.dumps(record | {"results": [{"max_turns": 20, "tasks": {}}]}))
    row = {"actions": ["a"] * 4, "refused": refused, "stop": "done"}
    (folder / f"{job}.actions.jsonl.xz").write_bytes(lzma.compress((json.dumps(row) + "\n").encode()))


def test_an_agent_is_compared_on_a_scenario_that_it_never_saw(tmp_path: Path) -> None:
    write(tmp_path / "qwen-babyai", "base-b", "base", "babyai", "00", [0, 1])
    write(tmp_path / "qwen-babyai", "random-b", "random play", "babyai", "01", [])
    write(tmp_path / "qwen-textcraft", "own", "staged", "textcraft", "11", [], seed=3)
    write(tmp_path / "qwen-textcraft", "other-seed", "staged", "textcraft", "00", [], seed=4)
    write(tmp_path / "qwen-textcraft", "base-t", "base", "textcraft", "00", [])
    write(tmp_path / "qwen-generalisation", "moved", "trained on textcraft", "babyai", "11", [0], seed=3)
    lines = transfer_page.texts(tmp_path)["transfer"].splitlines()
    assert lines[0] == "| agent | BabyAI |"
    assert "| trained on TextCraft | 100.0% (68–100) |" in lines
    assert lines[-1] == (
        "| trained on TextCraft, on BabyAI | +100.0 (+100.0 to +100.0) | 0.016 | +50.0 (+50.0 to +50.0) | 0.016 "
        "| 50%, 25% |"
    )


def test_without_transfers_there_is_no_text(tmp_path: Path) -> None:
    assert transfer_page.texts(tmp_path) == {"transfer": ""}
