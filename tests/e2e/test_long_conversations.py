"""Conversations to imitate that are longer than the model can read are left out and counted."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from envs_for_tests import Counting
from runs_for_tests import context_with_items, train_counting
from training_for_tests import counting_player
from transformers import GPT2Config, GPT2LMHeadModel

from agentgym_rl.config import Config
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.console import Console
from agentgym_rl.run.rounds import read_round
from agentgym_rl.run.start import prepare
from agentgym_rl.training.checkpoint import export

POSITIONS = 36


@pytest.fixture(params=["learned", "rotary"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the folder of a model with few positions, learned ones or rotary ones."""
    player, tokenizer = counting_player()
    if request.param == "learned":
        torch.manual_seed(0)
        shape = {"n_positions": POSITIONS, "n_embd": 32, "n_layer": 1, "n_head": 2}
        player = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **shape))
    player.config.max_position_embeddings = POSITIONS
    export(player, tokenizer, tmp_path / "model")
    return tmp_path / "model"


def recipe(model: Path, **sections: Any) -> Config:
    raw: dict[str, Any] = {
        "threads": 1,
        "model": {"path": str(model)},
        "environments": [{"name": "counting"}],
        "agent": {"instruction": "", "max_new_tokens": 4, "max_context": 500},
        "eval": {"episodes": 2, "max_turns": 1},
    }
    return Config.model_validate(raw | sections)


def train(config: Config, run: Path) -> str:
    """Return what a run prints."""
    output = io.StringIO()
    asyncio.run(train_counting(config, run, console=Console(output)))
    return " ".join(output.getvalue().split())


def oracle(max_turns: int) -> dict[str, Any]:
    return {"play": "oracle", "episodes": 20, "max_turns": max_turns}


def test_sft_leaves_out_conversations_that_the_model_cannot_read(model: Path, tmp_path: Path) -> None:
    config = recipe(model, method="sft", data=oracle(8), sft={"epochs": 1, "batch_size": 8})
    printed = train(config, tmp_path / "run")
    kept = read_round(tmp_path / "run", 1).samples["expert"]
    assert 0 < len(kept) < 20
    assert max(len(sample.token_ids) for sample in kept) <= POSITIONS
    assert f"{20 - len(kept)} of 20 conversations are longer than the model's context = {POSITIONS} tokens" in printed


def test_dagger_leaves_out_corrections_that_the_model_cannot_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_advice = " ".join(["up"] * 20)
    monkeypatch.setattr(Counting, "oracle", lambda env: long_advice)
    dagger = {"rounds": 1, "tasks": 8, "max_turns": 4, "oracle_share": 0.0}
    config = recipe(model, method="dagger", dagger=dagger, sft={"epochs": 1, "batch_size": 8})
    printed = train(config, tmp_path / "run")
    kept = read_round(tmp_path / "run", 1).samples["labelled"]
    assert max(len(sample.token_ids) for sample in kept) <= POSITIONS
    assert f"conversations are longer than the model's context = {POSITIONS} tokens and left out" in printed


async def test_a_warm_start_leaves_out_episodes_that_the_model_cannot_read(model: Path, tmp_path: Path) -> None:
    warm = {"policy": "oracle", "episodes": 20, "max_turns": 8}
    config = recipe(model, warm_start=warm)
    async with context_with_items(config, tmp_path / "run", LocalPool({"counting": Counting})) as context:
        start = await prepare(context)
    assert 0 < len(start.samples) < 20
    assert max(len(sample.token_ids) for sample in start.samples) <= POSITIONS


def test_no_conversation_that_the_model_can_read_is_one_line(tmp_path: Path) -> None:
    player, tokenizer = counting_player()
    player.config.max_position_embeddings = 12
    export(player, tokenizer, tmp_path / "model")
    reason = r"at most the model's context = 12 tokens: .*choose a model that reads more"
    config = recipe(tmp_path / "model", method="sft", data=oracle(8))
    with pytest.raises(ConfigError, match=f"^data: no conversation .* {reason}"):
        train(config, tmp_path / "sft")
    config = recipe(tmp_path / "model", warm_start={"policy": "oracle", "episodes": 20, "max_turns": 8})
    with pytest.raises(ConfigError, match=f"^warm_start: no episode .* {reason}"):
        train(config, tmp_path / "rl")
