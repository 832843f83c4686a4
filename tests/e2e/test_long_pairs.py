"""Pairs with an episode longer than the context, or than the model can read, are left out and counted."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from envs_for_tests import Counting
from runs_for_tests import comparable_metrics, train_counting
from training_for_tests import counting_player
from transformers import AutoTokenizer

from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.config import Config
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.console import Console
from agentgym_rl.run.demonstrations import to_sample, to_transcript
from agentgym_rl.run.log import RunLog
from agentgym_rl.run.rounds import read_round
from agentgym_rl.training.checkpoint import export
from agentgym_rl.types import Message, Sample, StopReason, Task, Trajectory

METHODS = ("dpo", "reward_model")


def episode(item: int, ups: int, downs: int) -> Trajectory:
    """Play the counting game. Each step down is undone, so that more of them make a longer episode."""
    env = Counting()
    messages, rewards, infos = [Message("user", env.reset(item))], [], []
    for action in [*["down", "up"] * downs, *["up"] * ups]:
        step = env.step(action)
        messages += [Message("assistant", action), Message("user", step.observation)]
        rewards.append(step.reward)
        infos.append(dict(step.info))
    env.close()
    stop = StopReason.DONE if step.done else StopReason.MAX_TURNS
    return Trajectory(f"train-{item}-{ups}-{downs}", Task("counting", item), messages, rewards, infos, stop)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[Trajectory]]:
    """Return (model, run, its episodes): on four items a success and a failure, the failure long on two of them."""
    folder = tmp_path_factory.mktemp("pairs")
    export(*counting_player(), folder / "model")
    episodes = []
    for item, downs in ((0, 1), (5, 1), (10, 4), (15, 4)):
        episodes += [episode(item, 2, 0), episode(item, 0, downs)]
    log = RunLog.create(folder / "run", {})
    for trajectory in episodes:
        log.write_trajectory(1, trajectory)
    log.close()
    return folder / "model", folder / "run", episodes


def lengths(model: Path, episodes: list[Trajectory], method: str) -> list[int]:
    renderer = Renderer(AutoTokenizer.from_pretrained(model))
    make: Callable[[Trajectory, Renderer], Sample] = to_sample if method == "dpo" else to_transcript
    return [len(make(trajectory, renderer).token_ids) for trajectory in episodes]


def learn(method: str, model: Path, run: Path, folder: Path, max_context: int) -> str:
    """Train on the run's pairs; return what is printed."""
    raw: dict[str, Any] = {
        "threads": 1,
        "method": method,
        "model": {"path": str(model)},
        "environments": [{"name": "counting"}],
        "agent": {"instruction": "", "max_new_tokens": 4, "max_context": max_context},
        "data": {"files": [str(run)]},
        "eval": {"episodes": 2, "max_turns": 1},
        method: {"batch_size": 8},
    }
    output = io.StringIO()
    asyncio.run(train_counting(Config.model_validate(raw), folder, console=Console(output)))
    return " ".join(output.getvalue().split())


@pytest.mark.parametrize("method", METHODS)
def test_a_pair_is_left_out_if_either_episode_is_longer_than_the_context(
    method: str, played: tuple[Path, Path, list[Trajectory]], tmp_path: Path
) -> None:
    model, run, episodes = played
    longest = max(lengths(model, episodes[:4], method))
    assert longest < min(lengths(model, episodes[5::2], method))
    printed = learn(method, model, run, tmp_path / "run", longest)  # a pair that just fits is kept
    assert f"2 of 4 pairs have an episode longer than agent.max_context = {longest} tokens" in printed
    current = read_round(tmp_path / "run", 1)
    kept = {sample.trajectory_id for p in [*current.pairs, *current.held_out] for sample in (p.chosen, p.rejected)}
    assert kept == {trajectory.id for trajectory in episodes[:4]}
    assert comparable_metrics(tmp_path / "run")[0]["round/pairs"] == 2.0
    assert "longer than" not in learn(method, model, run, tmp_path / "long", 500)


@pytest.mark.parametrize("method", METHODS)
def test_a_pair_is_left_out_if_the_model_cannot_read_it(
    method: str, played: tuple[Path, Path, list[Trajectory]], tmp_path: Path
) -> None:
    model, run, episodes = played
    longest = max(lengths(model, episodes[:4], method))
    shutil.copytree(model, tmp_path / "model")
    shape = json.loads((tmp_path / "model" / "config.json").read_text())
    shape["max_position_embeddings"] = longest
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
    printed = learn(method, tmp_path / "model", run, tmp_path / "run", 500)
    assert f"2 of 4 pairs have an episode longer than the model's context = {longest} tokens" in printed
    assert len(read_round(tmp_path / "run", 1).pairs) == (2 if method == "dpo" else 1)


@pytest.mark.parametrize("method", METHODS)
def test_a_round_without_a_pair_that_fits_is_refused(
    method: str, played: tuple[Path, Path, list[Trajectory]], tmp_path: Path
) -> None:
    model, run, episodes = played
    shortest = min(max(pair) for pair in zip(*[iter(lengths(model, episodes, method))] * 2, strict=True))
    with pytest.raises(ConfigError, match=rf"each of 4 pairs .* agent.max_context = {shortest - 1} tokens: raise"):
        learn(method, model, run, tmp_path / "run", shortest - 1)
