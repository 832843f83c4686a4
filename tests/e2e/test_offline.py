"""Whole runs of offline methods: they learn, and a killed and resumed run equals an uninterrupted one."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from envs_for_tests import Counting
from runs_for_tests import (
    Process,
    assert_same_run,
    comparable_metrics,
    counting_config,
    final_weights,
    quiet,
    trainer_state,
)
from tokenizers_for_tests import thinking_tokenizer

from agentgym_rl.commands.train import train
from agentgym_rl.config import Config, load_config
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.run.backend import LocalBackend
from agentgym_rl.run.log import read_trajectories
from agentgym_rl.run.rounds import read_round
from agentgym_rl.run.stopping import Stopped
from agentgym_rl.training.checkpoint import list_checkpoints
from agentgym_rl.training.scratch import build_model
from agentgym_rl.training.settings import ScratchSettings

RECIPES = Path(__file__).parents[2] / "recipes" / "keydoor"
SMALL = {
    "sft": ["data.episodes=40", "sft.epochs=2"],
    "dpo": ["dpo.rounds=2", "dpo.batch_size=24", "dpo.pairs_per_item=8"],
    "agentevol": ["agentevol.rounds=2", "sft.batch_size=16", "warm_start.episodes=128", "warm_start.sft.epochs=6"],
    "dagger": ["dagger.rounds=2", "sft.batch_size=16", "warm_start.episodes=128", "warm_start.sft.epochs=6"],
    "reward_model": ["reward_model.batch_size=8", "reward_model.pairs_per_item=4"],
}
"""Overrides for runs of a few seconds with several updates in each round."""


def arguments_of(method: str, run: Path) -> list[str]:
    common = [f"run_dir={run}", "threads=1", "checkpoint.every=2", "eval.every=3"]
    return ["train", str(RECIPES / f"tiny-{method}.toml"), *SMALL[method], *common]


def start(method: str, run: Path, *more: str) -> Process:
    return Process([*arguments_of(method, run), *more], run.parent / f"{run.name}.out")


def finish(method: str, run: Path, *more: str) -> None:
    process = start(method, run, *more)
    assert process.wait(280) == 0, process.output.read_text()


def count_steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def assert_equal(run: Path, expected: Path) -> None:
    assert_same_run(run, expected)
    rounds = sorted(path.name for path in (expected / "rounds").iterdir())
    assert sorted(path.name for path in (run / "rounds").iterdir()) == rounds
    for number in range(1, len(rounds) + 1):
        actual_round, expected_round = read_round(run, number), read_round(expected, number)
        assert actual_round == replace(expected_round, metrics=actual_round.metrics)  # those hold times
    state, expected_state = trainer_state(run), trainer_state(expected)
    for name in ("step", "rounds_done", "history", "evaluations"):
        assert state[name] == expected_state[name]
    summary, expected_summary = (json.loads((folder / "summary.json").read_text()) for folder in (run, expected))
    assert summary | {"seconds": 0} == expected_summary | {"seconds": 0}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    runs: dict[str, Path] = {}

    def run_of(method: str) -> Path:
        if method not in runs:
            runs[method] = tmp_path_factory.mktemp(method) / "run"
            finish(method, runs[method])
        return runs[method]

    return run_of


MOMENTS: dict[str, tuple[str, Callable[[Path], bool]]] = {
    "sft between checkpoints": ("sft", lambda run: count_steps(run) >= 3),
    "dpo while a round is played": ("dpo", lambda run: (run / "trajectories" / "step_000001.jsonl").exists()),
    "dpo once a round has its pairs": ("dpo", lambda run: (run / "rounds" / "round_002.jsonl").exists()),
    "agentevol in a later round": ("agentevol", lambda run: (run / "rounds" / "round_002.jsonl").exists()),
    "dagger in a later round": ("dagger", lambda run: (run / "rounds" / "round_002.jsonl").exists()),
    "reward_model between checkpoints": ("reward_model", lambda run: count_steps(run) >= 3),
}


@pytest.mark.long
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(
    moment: str, uninterrupted: Callable[[str], Path], tmp_path: Path
) -> None:
    method, is_moment = MOMENTS[moment]
    run = tmp_path / "run"
    start(method, run).kill_when(lambda: is_moment(run), 280)
    finish(method, run, "--resume")
    assert_equal(run, uninterrupted(method))


@pytest.mark.parametrize("before_the_end", [pytest.param(3, marks=pytest.mark.long), 0])
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(
    before_the_end: int, uninterrupted: Callable[[str], Path], tmp_path: Path
) -> None:
    """Stop between two updates, and after the last one during the evaluation."""
    run, last = tmp_path / "run", count_steps(uninterrupted("sft"))
    start("sft", run).stop_when(lambda: count_steps(run) >= last - before_the_end)
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "stopped"
    assert list_checkpoints(run / "checkpoints")[-1].name == f"step_{status['step']:06d}"
    finish("sft", run, "--resume")
    assert_equal(run, uninterrupted("sft"))


async def test_a_stop_during_restore_keeps_the_checkpoint_intact(
    uninterrupted: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(uninterrupted("sft"), run)
    shutil.rmtree(list_checkpoints(run / "checkpoints")[-1])  # the previous one is in the middle of a round
    before = trainer_state(run)
    assert before["learner"]["updates"] == before["step"] > 0
    restore = LocalBackend.restore

    async def slowly(self: LocalBackend, folder: Path, saved: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(5):
            await asyncio.sleep(0)  # as if a cluster's ranks were slow
        await restore(self, folder, saved)

    monkeypatch.setattr(LocalBackend, "restore", slowly)
    _, recipe, *overrides = arguments_of("sft", run)
    with pytest.raises(Stopped):
        await train(load_config(Path(recipe), overrides), run, resume=True, console=quiet())
    assert trainer_state(run)["learner"]["updates"] == before["step"]
    monkeypatch.undo()
    finish("sft", run, "--resume")
    assert_equal(run, uninterrupted("sft"))


@pytest.mark.long
def test_the_compared_runs_are_not_trivial(uninterrupted: Callable[[str], Path]) -> None:
    """Check the reference runs, because two empty runs would be equal too."""
    for method in SMALL:
        run = uninterrupted(method)
        rows = comparable_metrics(run)
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        assert len(rows) > 3
        assert all(row["grad/norm"] > 0 for row in rows)
        summary = json.loads((run / "summary.json").read_text())
        assert summary["steps"] == len(rows)
        assert [r["round"] for r in summary["rounds"]] == list(
            range(1, {"sft": 1, "dpo": 2, "agentevol": 3, "dagger": 3, "reward_model": 1}[method] + 1)
        )
        assert (run / "curve.png").stat().st_size > 1000
        assert len(list_checkpoints(run / "checkpoints")) == 2


@pytest.mark.long
def test_every_round_of_agentevol_starts_from_the_base_model(
    uninterrupted: Callable[[str], Path], tmp_path: Path
) -> None:
    """Use a learning rate of 0, so that every checkpoint must equal the base, which the warm start trained."""
    run = uninterrupted("agentevol")
    last = read_round(run, 3)
    assert last.samples["expert"] == read_round(run, 1).samples["expert"]
    assert len(last.samples["explored"]) == last.metrics["round/kept"] > 0
    unchanged = tmp_path / "still"
    finish("agentevol", unchanged, "sft.optimizer.lr=0.0", "agentevol.rounds=1")
    from safetensors.torch import load_file

    base = load_file(unchanged / "base" / "model.safetensors")
    assert all(torch.equal(base[name], value) for name, value in final_weights(unchanged).items())
    moved = final_weights(run)
    assert any(not torch.equal(base[name], value) for name, value in moved.items())


async def test_rounds_of_dagger_add_up_and_hand_play_over_to_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle plays the first round and the agent the second; each round starts from the base model."""
    loaded: list[Path] = []
    load_model = LocalBackend.load_model

    def load(backend: LocalBackend, folder: Path) -> None:
        loaded.append(folder)
        load_model(backend, folder)

    monkeypatch.setattr(LocalBackend, "load_model", load)
    small = ["warm_start.episodes=16", "dagger.rounds=2", "dagger.oracle_share=1.0", "dagger.oracle_decay=0.0"]
    config = load_config(RECIPES / "tiny-dagger.toml", [*small, "dagger.tasks=8", "eval.episodes=1", "threads=1"])
    run = tmp_path / "run"
    summary = await train(config.model_copy(update={"data": None}), run, console=quiet())
    first, second = (read_round(run, number) for number in (1, 2))
    by_oracle = []
    for played in (first, second):
        episodes = read_trajectories(run / "trajectories" / f"step_{played.first_step:06d}.jsonl")
        replies = [message for episode in episodes for message in episode.messages if message.role == "assistant"]
        assert all(reply.advice for reply in replies)
        by_oracle.append([reply.logprobs is None for reply in replies])
    assert all(by_oracle[0])
    assert not any(by_oracle[1])
    old, new = first.samples["labelled"], second.samples["labelled"]
    assert new[: len(old)] == old
    assert len(new) - len(old) == second.metrics["round/labelled"] > 0
    assert [row["labelled"] for row in summary["rounds"]] == [len(old), len(new)]
    assert loaded == [run / "base"] * 2


class Pondering(Counting):
    """Counting with an oracle that thinks."""

    num_alive = 0

    def oracle(self) -> str:
        return f"<think>I am at {self.count}.</think>\n{super().oracle()}"


@pytest.mark.parametrize("train_thoughts", [True, False])
async def test_rounds_of_dagger_train_thoughts_only_if_asked(train_thoughts: bool, tmp_path: Path) -> None:
    tokenizer = thinking_tokenizer("qwen3")
    sizes = ScratchSettings(hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2)
    for part in (tokenizer, build_model(sizes, tokenizer, 0)):
        part.save_pretrained(tmp_path / "model")
    raw = counting_config().model_dump(exclude_unset=True, exclude={"horizon", "rl", "warm_start"}) | {
        "method": "dagger",
        "model": {"path": str(tmp_path / "model")},
        "data": {"play": "oracle", "episodes": 4, "max_turns": 8},
        "dagger": {"rounds": 1, "tasks": 4, "max_turns": 3, "oracle_share": 0.5},
        "sft": {"epochs": 1, "batch_size": 8},
    }
    raw["agent"] |= {"train_thoughts": train_thoughts, "max_context": 1000}
    pool = LocalPool({"counting": Pondering})
    await train(Config.model_validate(raw), tmp_path / "run", console=quiet(), pool=pool)
    await pool.close()
    samples = read_round(tmp_path / "run", 2).samples
    assert samples["expert"]
    assert samples["labelled"]
    for sample in (*samples["expert"], *samples["labelled"]):
        trained = [token for token, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on]
        assert "up" in tokenizer.decode(trained)
        assert "think" in tokenizer.decode(sample.token_ids)
        assert ("think" in tokenizer.decode(trained)) == train_thoughts


@pytest.mark.long
async def test_reference_log_probabilities_come_from_the_model_at_the_start_of_the_round(
    uninterrupted: Callable[[str], Path],
) -> None:
    """Check the first step of each round: the margin is 0 before the first update."""
    rows = comparable_metrics(uninterrupted("dpo"))
    first = [row for row in rows if "round/pairs" in row]
    assert len(first) == 2
    assert all(abs(row["dpo/margin"]) < 1e-3 for row in first)
    assert all(abs(row["dpo/margin"]) > 1e-3 for row in rows if "round/pairs" not in row)


async def test_a_run_learns_from_the_trajectories_of_another_run(tmp_path: Path) -> None:
    """Train SFT and DPO from a run directory. With the same tokenizer they use the sampled ids."""
    source = tmp_path / "source"
    finish("dpo", source, "dpo.rounds=1", "eval.every=0", "eval.episodes=4")
    model = str(list_checkpoints(source / "checkpoints")[-1] / "model")
    common = [f"model={{path='{model}'}}", "threads=1"]
    recipe = tmp_path / "files.toml"
    recipe.write_text(
        '[[environments]]\nname = "keydoor"\n[agent]\ninstruction = ""\nmax_new_tokens = 6\nmax_context = 512\n'
        "[eval]\nepisodes = 4\nmax_turns = 6\n"
    )
    files = f"data.files=['{source}']"
    sft = load_config(recipe, ["method=sft", *common, files, "sft.batch_size=64"])
    await train(sft, tmp_path / "sft", console=quiet())
    sampled = {tuple(p.chosen.token_ids) for p in read_round(source, 1).pairs}
    learned = {tuple(s.token_ids) for s in read_round(tmp_path / "sft", 1).samples["expert"]}
    assert sampled <= learned  # every chosen reply is a success with its sampled ids
    dpo = load_config(recipe, ["method=dpo", *common, files, "dpo.batch_size=64"])
    await train(dpo, tmp_path / "dpo", console=quiet())
    assert read_round(tmp_path / "dpo", 1).pairs
    assert "episodes/usable" not in comparable_metrics(tmp_path / "dpo")[0]  # no episode was played


async def test_an_environment_without_tasks_in_a_round_is_skipped(tmp_path: Path) -> None:
    recipe = counting_config().model_dump(exclude_unset=True, exclude={"horizon", "rl"}) | {
        "method": "agentevol",
        "environments": [{"name": "counting"}, {"name": "rare", "weight": 1e-9}],
        "agentevol": {"rounds": 1, "tasks": 2, "group_size": 2, "max_turns": 3, "min_reward": 0.0},
        "sft": {"epochs": 1, "batch_size": 4},
    }
    pool = LocalPool({"counting": Counting, "rare": Counting})
    summary = await train(Config.model_validate(recipe), tmp_path / "run", console=quiet(), pool=pool)
    await pool.close()
    assert [row["episodes"] for row in summary["rounds"]] == [4.0]


@pytest.mark.timeout(900)  # under a minute on a free core; a busy machine takes longer
@pytest.mark.long
@pytest.mark.parametrize("method", ["dpo", "agentevol", "dagger"])
async def test_the_method_learns_the_game_from_random_play(method: str, tmp_path: Path) -> None:
    config = load_config(RECIPES / f"{method}.toml", ["threads=1"])
    assert config.warm_start is not None
    assert config.warm_start.policy == "random"
    summary = await train(config, tmp_path / "run", console=quiet())
    assert summary["before"]["success"] < 0.25
    assert summary["after"]["success"] >= 0.9
