"""The starting model of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from envs_for_tests import Counting
from runs_for_tests import context_with_items, counting_config

from agentgym_rl.config import Config
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.run.start import make_untrained_model, prepare, starting_model, word_tokenizer
from agentgym_rl.types import Message, Step


def test_a_bf16_model_from_scratch_keeps_its_rotary_frequencies() -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2}
    models = {}
    for dtype in ("float32", "bfloat16"):
        raw = {
            "model": {"scratch": shape, "dtype": dtype, "device": "cpu"},
            "environments": [{"name": "keydoor"}],
            "warm_start": {"policy": "random"},
        }
        conversation = [Message("user", "the door is shut"), Message("assistant", "open the door")]
        models[dtype] = make_untrained_model(Config.model_validate(raw).model, 0, word_tokenizer([conversation]))
    whole, half = models["float32"], models["bfloat16"]
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert torch.equal(half.model.rotary_emb.inv_freq, whole.model.rotary_emb.inv_freq)
    assert torch.equal(half.lm_head.weight, whole.lm_head.weight.bfloat16())
    assert half.lm_head.weight is half.get_input_embeddings().weight


async def test_a_warm_start_leaves_the_model_ready_to_play(tmp_path: Path) -> None:
    config = counting_config()
    async with context_with_items(config, tmp_path / "run", LocalPool({"counting": Counting})) as context:
        model, tokenizer = await starting_model(context)
    assert not model.training
    before = dict(make_untrained_model(config.model, config.seed, tokenizer).named_parameters())
    assert all(not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


class TalkingTooMuch(Counting):
    """Items 2, 7, 12, ... answer every action with more words than fit into the context."""

    def step(self, text: str) -> Step:
        step = super().step(text)
        return replace(step, observation="You are lost. " * 100_000) if self.target == 4 else step


async def test_a_warm_start_leaves_out_episodes_longer_than_max_context(tmp_path: Path) -> None:
    config = counting_config()
    async with context_with_items(config, tmp_path / "run", LocalPool({"counting": TalkingTooMuch})) as context:
        start = await prepare(context)
    assert 30 < len(start.samples) < 48
    assert max(len(sample.token_ids) for sample in start.samples) <= config.agent.max_context
