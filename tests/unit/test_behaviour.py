"""Behaviour metrics and kept episodes of the studies, on episodes written by hand."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "results"))
import behaviour  # noqa: E402
import episodes  # noqa: E402

from agentgym_rl.types import Trajectory  # noqa: E402


def row(item: int, replies: list[str], states: str, refused: tuple[int, ...] = (), **changes: Any) -> dict[str, Any]:
    """Return the line of an episode: one letter of `states` per turn."""
    messages = [{"role": "user", "content": "start", "token_ids": [1, 2], "logprobs": None, "version": None}]
    for reply in replies:
        messages.append({"role": "assistant", "content": reply, "token_ids": [3], "logprobs": [-0.1], "version": 0})
        messages.append({"role": "user", "content": "ok", "token_ids": [4], "logprobs": None, "version": None})
    infos = [{"valid": turn not in refused, "state_key": state} for turn, state in enumerate(states)]
    infos[-1]["success"] = changes.pop("success", False)
    fields = {"id": f"maze-{item}", "env": "maze", "item": item, "messages": messages, "infos": infos}
    fields |= {"rewards": [0.0] * len(replies), "stop": "done", "error": None, "horizon": 8, "seconds": 0.1234}
    return {**fields, "sample": 0, "columns": ["maze/all"], **changes}


EPISODES = [
    row(1, ["Thought: a\nAction: go  up", "Action: go up", "Action: left"], "aab", refused=(0,), success=True),
    row(1, ["Action: go up", "Action: go up", "Action: left"], "aab", sample=1),
    row(1, ["left", "left"], "ab", refused=(1,), sample=2),
    row(2, ["x"], "z"),
]


def test_actions_are_taken_from_replies_in_every_style() -> None:
    assert behaviour.action_of("Thought: Action: no\nAction: go  up\n") == "go up"
    assert behaviour.action_of("<think>so</think>\n<search>a b</search>") == "<search>a b</search>"
    assert behaviour.action_of("  move up ") == "move up"


def test_behaviour_counts_sequences_states_loops_and_recoveries() -> None:
    metrics = behaviour.behaviour([behaviour.episode_of(r) for r in EPISODES])
    assert metrics["episodes"] == 4
    assert metrics["sequences_per_episode"] == pytest.approx(2 / 3), "thoughts and spaces do not count; item 2 has one"
    assert metrics["states_per_item"] == pytest.approx((2 + 1) / 2)
    assert metrics["loops"] == pytest.approx(2 / 9), "the second `go up` in state a, twice"
    assert metrics["refused"] == pytest.approx(2 / 9)
    assert metrics["recovered"] == 1.0, "the refusal at the end of an episode has no next turn"
    assert metrics["success_after_refusal"] == pytest.approx(0.5)
    assert behaviour.behaviour([])["loops"] is None


def test_steps_are_read_in_order_and_failed_episodes_left_out(tmp_path: Path) -> None:
    (tmp_path / "trajectories").mkdir()
    failed = row(3, ["x"], "z", stop="error")
    for step in (1, 2, 10):
        lines = [json.dumps(r) + "\n" for r in [*EPISODES[:step], failed]]
        (tmp_path / f"trajectories/step_{step:06d}.jsonl").write_text("".join(lines) + '{"torn')
    steps = behaviour.by_step(tmp_path)
    assert {step: values["episodes"] for step, values in steps.items()} == {1: 1, 2: 2, 10: 4}
    assert behaviour.blocks(steps, 2)[2]["episodes"] == 1.5
    assert behaviour.table(behaviour.blocks(steps, 2))[-1].startswith("| 10 | 4 | 0.667 |")


def test_kept_episodes_are_small_and_readable_by_the_viewer(tmp_path: Path) -> None:
    (tmp_path / "eval/trajectories").mkdir(parents=True)
    (tmp_path / "eval/trajectories/maze.jsonl").write_text("".join(json.dumps(r) + "\n" for r in EPISODES))
    record = tmp_path / "eval-1.5B.json"
    episodes.keep_episodes(tmp_path / "eval", record)
    with lzma.open(tmp_path / "eval-1.5B.actions.jsonl.xz", "rt") as lines:
        actions = [json.loads(line) for line in lines]
    assert [(a["item"], a["sample"]) for a in actions] == [("maze/1", 0), ("maze/1", 1), ("maze/1", 2), ("maze/2", 0)]
    assert actions[0]["actions"] == ["go up", "go up", "left"]
    assert actions[0]["states"] == actions[1]["states"] == [0, 0, 1]
    assert actions[0]["refused"] == [0]
    kept = list(behaviour.read_rows(tmp_path / "eval-1.5B.episodes.jsonl.xz"))
    assert [r["item"] for r in kept] == [1, 2], "the first sample of each item"
    trajectory = Trajectory.from_json(json.dumps(kept[0]))
    assert trajectory.success
    assert not trajectory.token_ids
    task = {"scenario": "maze", "name": "all", "env": "maze", "items": 2}
    config = {"agent": {"name": "a"}, "tasks": [task]}
    record.write_text(json.dumps({"config": config, "results": [], "seconds": 1.0}))
    episodes.restore_folder(record, tmp_path / "restored", 1)
    restored = json.loads((tmp_path / "restored/eval.json").read_text())
    assert restored["config"]["tasks"][0]["items"] == [1]
    assert len((tmp_path / "restored/trajectories/maze.jsonl").read_text().splitlines()) == 1
