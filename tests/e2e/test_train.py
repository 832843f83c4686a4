"""Whole runs in this process: their files, and the choices of a recipe."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from envs_for_tests import Counting
from runs_for_tests import assert_same_weights, comparable_metrics, comparable_trajectories, counting_config, quiet
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentgym_rl.agent.styles import STYLES
from agentgym_rl.commands.train import train
from agentgym_rl.config import Config, load_config
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.log import read_metrics, read_trajectories
from agentgym_rl.types import EnvSession, Step, StopReason


class Doubling(Counting):
    """A second environment."""

    name = "doubling"
    num_alive = 0


async def run(config: Config, folder: Path, **options: Any) -> dict[str, Any]:
    style = STYLES[config.agent.style]
    pool = LocalPool({"counting": Counting, "doubling": Doubling}, action_format=style.action_format)
    try:
        return await train(config, folder, console=quiet(), pool=pool, **options)
    finally:
        assert pool.num_open == 0
        assert Counting.num_alive == Doubling.num_alive == 0
        await pool.close()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    config = counting_config(trackers=["tensorboard"], rl__steps=4, rl__kl_coef=0.01, eval__every=2)
    asyncio.run(run(config, folder))
    return folder


def test_a_finished_run_has_all_its_files(finished: Path) -> None:
    assert {p.name for p in finished.iterdir() if not p.name.startswith(".")} == {
        *("config.toml", "metrics.jsonl", "trajectories", "checkpoints", "reference"),
        *("status.json", "summary.json", "curve.png", "tensorboard"),
    }
    assert sorted(p.name for p in (finished / "trajectories").iterdir()) == [
        *("eval_000000.jsonl", "eval_000002.jsonl", "eval_000004.jsonl"),
        *(f"learned_{step:06d}.jsonl" for step in (1, 2, 3, 4)),
        *(f"step_{step:06d}.jsonl" for step in (1, 2, 3, 4)),
        "warmstart_000000.jsonl",
    ]
    assert [p.name for p in sorted((finished / "checkpoints").iterdir())] == ["step_000003", "step_000004"]
    assert (finished / "curve.png").read_bytes().startswith(b"\x89PNG")
    status = json.loads((finished / "status.json").read_text())
    assert (status["state"], status["step"], status["steps"]) == ("finished", 4, 4)


def test_the_summary_has_evaluations_and_stages(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert (summary["before"]["step"], summary["after"]["step"], summary["steps"]) == (0, 4, 4)
    for when in ("before", "after"):
        assert summary[when]["episodes"] == 6
        assert 0 <= summary[when]["success"] <= 1
        assert summary[when]["subsets"]["counting"]["episodes"] == 6
    assert [(s["turns"], s["first_step"], s["last_step"]) for s in summary["stages"]] == [(2, 1, 1), (4, 2, 4)]
    assert summary["seconds"] > 0


def test_every_episode_is_recorded_with_its_tokens(finished: Path) -> None:
    for step, horizon in ((1, 2), (2, 4), (4, 4)):
        episodes = list(read_trajectories(finished / "trajectories" / f"step_{step:06d}.jsonl"))
        assert len(episodes) == 16
        assert {t.horizon for t in episodes} == {horizon}
        assert len({t.id for t in episodes}) == 16
        assert max(t.num_turns for t in episodes) == horizon
        for t in episodes:
            assert sum(t.loss_mask) == sum(len(m.token_ids) for m in t.messages if m.role == "assistant")
    metrics = read_metrics(finished / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    assert all(row["episodes/usable"] == 16 for row in metrics)
    assert all(row["mismatch/abs"] < 1e-4 for row in metrics)
    assert any(row.get("kl/reference", 0) > 0 for row in metrics)


def test_evaluations_use_the_same_held_out_items(finished: Path) -> None:
    files = comparable_trajectories(finished)
    evaluated = [[row["item"] for row in files[f"eval_{step:06d}.jsonl"]] for step in (0, 2, 4)]
    assert evaluated[0] == evaluated[1] == evaluated[2]
    assert set(evaluated[0]) <= set(Counting.splits["test"])
    for name in ("warmstart_000000.jsonl", "step_000001.jsonl", "step_000004.jsonl"):
        assert {row["item"] for row in files[name]} <= set(Counting.splits["train"])


def test_tensorboard_has_the_same_metrics(finished: Path) -> None:
    events = EventAccumulator(str(finished / "tensorboard"))
    events.Reload()
    rows = read_metrics(finished / "metrics.jsonl")
    assert "reward/mean" in events.Tags()["scalars"]
    for name in ("reward/mean", "horizon/counting"):
        scalars = events.Scalars(name)
        assert [(e.step, pytest.approx(e.value)) for e in scalars] == [(row["step"], row[name]) for row in rows]


def test_the_checkpoint_is_a_hugging_face_folder(finished: Path) -> None:
    folder = finished / "checkpoints" / "step_000004" / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Goal: 3. You are at 0."}], add_generation_prompt=True, return_tensors="pt"
    )
    generated = model.generate(ids["input_ids"], max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(generated[0, ids["input_ids"].shape[1] :], skip_special_tokens=True).strip() in (
        "up",
        "down",
    )


async def test_the_saved_config_repeats_the_run(finished: Path, tmp_path: Path) -> None:
    config = load_config(finished / "config.toml", [])
    await run(config, tmp_path / "again")
    assert comparable_metrics(tmp_path / "again") == comparable_metrics(finished)
    assert_same_weights(tmp_path / "again", finished)


async def test_another_seed_gives_another_run(finished: Path, tmp_path: Path) -> None:
    config = counting_config(seed=1, rl__steps=1)
    await run(config, tmp_path / "other")
    assert (
        comparable_trajectories(tmp_path / "other")["step_000001.jsonl"]
        != (comparable_trajectories(finished)["step_000001.jsonl"])
    )


async def test_each_environment_has_its_own_horizon(tmp_path: Path) -> None:
    environments = [
        {"name": "counting", "subsets": ["even", "odd"]},
        {"name": "doubling", "weight": 2.0, "horizon": {"kind": "fixed", "turns": [3]}},
    ]
    config = counting_config(environments=environments, rl__groups_per_step=8, rl__steps=3)
    summary = await run(config, tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(row["horizon/counting"], row["horizon/doubling"]) for row in rows] == [(2, 3), (4, 3), (4, 3)]
    assert set(summary["before"]["subsets"]) == {"counting/even", "counting/odd", "doubling/doubling"}
    for step in (1, 2, 3):
        for t in read_trajectories(tmp_path / "run" / "trajectories" / f"step_{step:06d}.jsonl"):
            assert t.horizon == (3 if t.task.env == "doubling" else (2, 4, 4)[step - 1])


@pytest.mark.parametrize("on_timeout", [pytest.param("retry", marks=pytest.mark.long), "truncate"])
async def test_timed_out_episodes_are_counted_and_recorded(on_timeout: str, tmp_path: Path) -> None:
    num_steps = 0

    class Slow(LocalPool):
        async def open(self, env: str) -> EnvSession:
            session = await super().open(env)
            step = session.step

            async def hang_sometimes(text: str) -> Step:
                nonlocal num_steps
                num_steps += 1
                return await (asyncio.sleep(3600) if num_steps % 12 == 0 else step(text))  # type: ignore[return-value]

            session.step = hang_sometimes  # type: ignore[method-assign]
            return session

    config = counting_config(agent__episode_timeout_s=2.0, agent__on_timeout=on_timeout, agent__retries=4, rl__steps=1)
    await train(config, tmp_path / "run", console=quiet(), pool=Slow({"counting": Counting}))
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    stops = [t.stop for t in read_trajectories(tmp_path / "run" / "trajectories" / "step_000001.jsonl")]
    assert row["episodes/timeout"] > 0
    if on_timeout == "truncate":
        assert row["episodes/timeout"] == stops.count(StopReason.TIMEOUT)
        assert (row["episodes/error"], row["episodes/usable"]) == (0, 16)
        assert not (tmp_path / "run" / "events.jsonl").exists()
    else:
        assert row["episodes/timeout"] == row["episodes/error"] == stops.count(StopReason.ERROR)
        events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
        *of_warm_start, failed, timed_out = events
        assert {event["kind"] for event in [*of_warm_start, failed]} == {"episodes_failed"}
        assert all(event["message"].startswith("warm start: ") for event in of_warm_start)
        assert timed_out["kind"] == "episodes_timed_out"
        assert "set agent.on_timeout = 'truncate'" in timed_out["message"]


async def test_a_run_without_kl_saves_no_reference(tmp_path: Path) -> None:
    await run(counting_config(rl__steps=1), tmp_path / "run")
    assert not (tmp_path / "run" / "reference").exists()


async def test_a_model_from_a_folder_needs_no_warm_start(finished: Path, tmp_path: Path) -> None:
    path = finished / "checkpoints" / "step_000004" / "model"
    config = counting_config(model={"path": str(path)}, warm_start=None, rl__steps=1, rl__optimizer={"lr": 0.0})
    summary = await run(config, tmp_path / "run")
    # The learning rate is 0 and evaluation is deterministic.
    assert summary["before"] == summary["after"] | {"step": 0, "sampled_tokens": 0}
    trained = json.loads((finished / "summary.json").read_text())["after"]
    assert summary["before"]["success"] == trained["success"]  # the trained model was loaded
    assert not (tmp_path / "run" / "trajectories" / "warmstart_000000.jsonl").exists()


async def test_the_game_is_learned_from_oracle_demonstrations(tmp_path: Path) -> None:
    config = counting_config(
        warm_start__policy="oracle", warm_start__max_turns=6, eval__max_turns=6, eval__temperature=0.0, rl__steps=0
    )
    summary = await run(config, tmp_path / "run")
    episodes = list(read_trajectories(tmp_path / "run" / "trajectories" / "warmstart_000000.jsonl"))
    assert {t.stop for t in episodes} == {StopReason.DONE}
    assert summary["before"] == summary["after"]
    assert summary["after"]["success"] == 1.0


@pytest.mark.parametrize("style", ["react", "reflect"])
async def test_other_agent_styles(style: str, tmp_path: Path) -> None:
    agent = {"style": style, "turns_per_attempt": 2, "max_new_tokens": 16, "max_context": 600}
    await run(counting_config(agent=agent, rl__steps=1), tmp_path / "run")
    [first, *_] = read_trajectories(tmp_path / "run" / "trajectories" / "warmstart_000000.jsonl")
    replies = [m.content for m in first.messages if m.role == "assistant"]
    assert replies[0].startswith("Thought:")
    assert "Action:" in replies[0]
    assert first.infos[0]["valid"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environments": [{"name": "counting", "subsets": ["prime"]}]}, "no subset 'prime'"),
        ({"environments": [{"name": "counting", "eval_split": "exam"}]}, "no split 'exam'"),
        ({"model": {"path": "/nowhere/model"}, "warm_start": None}, "no Hugging Face model folder"),
        ({"model__device": "cuda:0"}, "needs a CUDA device"),
    ],
)
async def test_an_invalid_run_leaves_no_folder(changes: dict, message: str, tmp_path: Path) -> None:
    if "model__device" in changes and torch.cuda.is_available():
        changes = {"model__device": "cuda:99"}
    with pytest.raises(ConfigError, match=message):
        await run(counting_config(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.parametrize(("policy", "played"), [("random", 250), ("oracle", 100)])
async def test_random_play_repeats_items_and_the_oracle_does_not(policy: str, played: int, tmp_path: Path) -> None:
    changes = {"rl__steps": 0, "warm_start__policy": policy, "warm_start__episodes": 250}
    await run(counting_config(warm_start__sft={"optimizer": {"lr": 1e-2}}, **changes), tmp_path / "run")
    episodes = list(read_trajectories(tmp_path / "run" / "trajectories" / "warmstart_000000.jsonl"))
    assert len({t.id for t in episodes}) == len(episodes) == played
    assert {t.task.item for t in episodes} == set(range(100))
    conversations = [[m.content for m in t.messages] for t in episodes if t.task.item == episodes[0].task.item]
    assert policy == "oracle" or any(a != conversations[0] for a in conversations[1:])
