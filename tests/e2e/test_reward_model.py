"""A reward model is trained, orders pairs of held-out items, and is a judge like any other."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs_for_tests import comparable_metrics, counting_config, quiet, train_counting, trainer_state
from safetensors.torch import load_file
from training_for_tests import counting_player
from typer.testing import CliRunner

from agentgym_rl.cli import app
from agentgym_rl.commands.train import train
from agentgym_rl.config import Config, load_config
from agentgym_rl.environment.envs.keydoor import HALL, LAYOUTS, KeyDoor
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.judging import make_scorer
from agentgym_rl.run.log import read_trajectories
from agentgym_rl.run.rounds import read_round
from agentgym_rl.training.checkpoint import export, list_checkpoints
from agentgym_rl.training.reward_settings import RewardSettings
from agentgym_rl.types import Group, Message, StopReason, Task, Trajectory

RECIPES = Path(__file__).parents[2] / "recipes" / "keydoor"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    run = tmp_path_factory.mktemp("reward_model") / "run"
    return run, asyncio.run(train(load_config(RECIPES / "reward_model.toml", ["threads=1"]), run, console=quiet()))


@pytest.mark.long
def test_it_orders_pairs_of_items_it_has_not_seen(trained: tuple[Path, dict[str, Any]]) -> None:
    run, summary = trained
    assert summary["before"]["success"] == 0.5  # the head starts at 0
    assert summary["after"]["success"] >= 0.9
    assert summary["after"]["episodes"] == summary["rounds"][0]["held_out"] >= 20
    assert comparable_metrics(run)[-1]["reward_model/accuracy"] >= 0.9
    assert not list((run / "trajectories").glob("eval_*"))


def endings(run: Path) -> dict[str, Trajectory]:
    """Return the episodes that the run played, by id."""
    return {t.id: t for path in (run / "trajectories").glob("step_*.jsonl") for t in read_trajectories(path)}


def judge_of(path: Path) -> Callable[[list[Trajectory]], list[float | None]]:
    score = make_scorer(RewardSettings(kind="reward_model", path=str(path), device="cpu"))
    return lambda episodes: score(Group(episodes[0].task, episodes))


@pytest.mark.long
def test_pairs_have_failures_that_ended_by_themselves(trained: tuple[Path, dict[str, Any]]) -> None:
    run, _ = trained
    played, pairs = endings(run), read_round(run, 1)
    for side, least in ((pairs.pairs, 8), (pairs.held_out, 2)):
        worse = [played[pair.rejected.trajectory_id] for pair in side]
        assert sum(t.stop is StopReason.DONE for t in worse) >= least
        assert {StopReason.DONE, StopReason.MAX_TURNS} <= {t.stop for t in worse}
    # An item with a trap has it in a pair, however many episodes of it were truncated.
    paired = {played[pair.chosen.trajectory_id].task for pair in [*pairs.pairs, *pairs.held_out]}
    trapped = {t.task for t in played.values() if t.stop is StopReason.DONE and not t.success}
    worse = [played[pair.rejected.trajectory_id] for pair in [*pairs.pairs, *pairs.held_out]]
    assert {t.task for t in worse if t.stop is StopReason.DONE} == paired & trapped


def scripted(item: int, actions: list[str], stop: StopReason = StopReason.DONE) -> Trajectory:
    """Return an episode that nobody sampled."""
    env = KeyDoor()
    messages, rewards, infos = [Message("user", env.reset(item))], [], []
    for action in actions:
        step = env.step(action)
        messages += [Message("assistant", action), Message("user", step.observation)]
        rewards.append(step.reward)
        infos.append(dict(step.info))
    assert step.done is (stop is StopReason.DONE)
    return Trajectory(f"scripted-{item}", Task("keydoor", item), messages, rewards, infos, stop)


@pytest.mark.long
def test_a_won_episode_scores_above_a_trap_and_a_truncated_one_of_its_length(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    """Test layouts with two keys in the hall, which no run has played."""
    score = judge_of(trained[0])
    won, trapped, truncated, unsaid = [], [], [], []
    for item in KeyDoor.splits["test"]:
        layout = LAYOUTS[item]
        here = [colour for colour, room in layout.keys if room == layout.start == HALL]
        if len(here) < 2 or layout.goal not in here:
            continue
        goal, other = f"{layout.goal} key", f"{next(c for c in here if c != layout.goal)} key"
        won.append(scripted(item, [f"take {goal}", f"open {layout.goal} door", "take treasure"]))
        trapped.append(scripted(item, [f"take {goal}", f"take {other}", f"open {other.split()[0]} door"]))
        actions = [f"take {goal}", f"take {other}", f"take {goal}"]
        truncated.append(scripted(item, actions, StopReason.MAX_TURNS))
        last = trapped[-1].messages[-1]
        unsaid.append(replace(won[-1], messages=[*won[-1].messages[:-1], last]))
    assert len(won) >= 5
    won_scores = score(won)
    for lost in (trapped, truncated, unsaid):  # the last differ in nothing but what the environment said last
        assert all(a > b + 0.3 for a, b in zip(won_scores, score(lost), strict=True))


@pytest.mark.long
def test_an_episode_has_one_score_with_and_without_sampled_ids(trained: tuple[Path, dict[str, Any]]) -> None:
    run, _ = trained
    by_stop = {(t.stop, t.success): t for t in endings(run).values()}
    assert len(by_stop) >= 4
    episodes = list(by_stop.values())
    written = [replace(t, messages=[Message(m.role, m.content) for m in t.messages]) for t in episodes]
    score = judge_of(run)
    assert score(episodes) == score(written)


@pytest.mark.long
def test_its_score_is_a_judge_of_an_rl_run(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run, _ = trained
    judged = [
        f"model={{path='{run / 'checkpoints'}/step_000000/model'}}",
        f'rewards=[{{kind="environment", weight=0.0}}, {{kind="reward_model", path="{run}", name="learned"}}]',
        *("threads=1", "rl.steps=2", "rl.groups_per_step=8", "rl.group_size=8", "eval.episodes=4"),
    ]
    recipe = tmp_path / "judged.toml"
    text = (RECIPES / "reward_model.toml").read_text()
    recipe.write_text(text[text.index("[[environments]]") : text.index("[warm_start]")])
    asyncio.run(train(load_config(recipe, judged), tmp_path / "run", console=quiet()))
    episodes = list(read_trajectories(tmp_path / "run" / "trajectories" / "step_000001.jsonl"))
    scores = [(t.success, t.stop, t.training_reward) for t in episodes]
    assert all(0.0 < score < 1.0 for *_, score in scores)
    won, lost = ([score for success, _, score in scores if success is outcome] for outcome in (True, False))
    assert won
    assert sum(won) / len(won) > sum(lost) / len(lost) + 0.3
    assert all(score < 0.5 for success, stop, score in scores if stop is StopReason.DONE and not success)
    assert comparable_metrics(tmp_path / "run")[0]["judged/learned"] == pytest.approx(sum(s for *_, s in scores) / 64)
    out = tmp_path / "rescored.jsonl"
    result = CliRunner().invoke(app, ["rescore", str(tmp_path / "run"), "--step", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(row["before"] == pytest.approx(row["after"]) for row in rows)


async def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """Resume from the checkpoint of the second update, and from that of the start."""
    raw = counting_config().model_dump(exclude_none=True)
    kept = {name: raw[name] for name in ("threads", "environments", "agent", "model", "warm_start")}
    settings = {"sample_groups": 24, "group_size": 4, "max_turns": 3, "batch_size": 8, "optimizer": {"lr": 1e-3}}
    more = {"eval": {"every": 2}, "checkpoint": {"every": 2, "keep": 99}}
    config = Config.model_validate(kept | more | {"method": "reward_model", "reward_model": settings})

    whole = tmp_path / "whole"
    await train_counting(config, whole)
    rows = comparable_metrics(whole)
    assert len(rows) >= 3
    for step in (2, 0):
        resumed = tmp_path / f"from{step}"
        shutil.copytree(whole, resumed)
        for folder in list_checkpoints(resumed / "checkpoints"):
            if int(folder.name.rpartition("_")[2]) > step:
                shutil.rmtree(folder)
        (resumed / "summary.json").unlink()
        await train_counting(config, resumed, resume=True)
        assert comparable_metrics(resumed) == rows
        assert trainer_state(resumed)["evaluations"] == trainer_state(whole)["evaluations"]
        for name in ("reward_head.safetensors", "model.safetensors"):
            found, expected = (
                load_file(list_checkpoints(root / "checkpoints")[-1] / "model" / name) for root in (resumed, whole)
            )
            assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_a_merged_export_of_adapters_is_the_same_judge(tmp_path: Path) -> None:
    export(*counting_player(), tmp_path / "base")
    raw = counting_config().model_dump(exclude_none=True)
    kept = {name: raw[name] for name in ("threads", "environments", "agent")}
    settings = {"sample_groups": 12, "group_size": 4, "max_turns": 3, "batch_size": 8, "optimizer": {"lr": 1e-2}}
    model = {"path": str(tmp_path / "base"), "lora": {"rank": 4, "alpha": 8}}
    run, merged = tmp_path / "run", tmp_path / "merged"
    config = Config.model_validate(kept | {"method": "reward_model", "model": model, "reward_model": settings})
    asyncio.run(train_counting(config, run))
    result = CliRunner().invoke(app, ["export", str(run), str(merged), "--merge"])
    assert result.exit_code == 0, result.output
    assert (merged / "config.json").is_file()
    checkpoint = list_checkpoints(run / "checkpoints")[-1] / "model"
    heads = [load_file(folder / "reward_head.safetensors") for folder in (checkpoint, merged)]
    assert heads[0]["weight"].any()
    assert all(torch.equal(heads[0][name], value) for name, value in heads[1].items())
    episodes = list(endings(run).values())
    scores = judge_of(run)(episodes)
    assert judge_of(merged)(episodes) == pytest.approx(scores, abs=1e-5)
    shutil.copy(checkpoint / "reward_head.safetensors", tmp_path / "base")
    assert judge_of(tmp_path / "base")(episodes) != pytest.approx(scores, abs=1e-3)  # the adapters matter


def test_a_run_without_a_head_is_no_judge(tmp_path: Path) -> None:
    recipe = RECIPES / "tiny.toml"
    config = load_config(recipe, [f'rewards=[{{kind="reward_model", path="{tmp_path}"}}]'])
    with pytest.raises(ConfigError, match="is no reward model"):
        asyncio.run(train(config, tmp_path / "run", console=quiet()))
