"""Sampling beside a learner of the same weights: the engine is paused only while they change."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.run.local_engine import sampling_beside
from agentgym_rl.training.learner import Imitator
from agentgym_rl.training.settings import OptimizerSettings
from agentgym_rl.types import Completion, Sample, Sampling

PROMPT = [5, 3, 8, 1]


def make_model() -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, bos_token_id=None, eos_token_id=None))


def make_learner(model: Any) -> Imitator:
    return Imitator(model, OptimizerSettings(lr=0.1), total_updates=4)


def sample() -> Sample:
    return Sample([*PROMPT, 7, 7, 7], [False] * 4 + [True] * 3)


def test_a_learner_announces_the_change_of_its_weights() -> None:
    model = make_model()
    learner = make_learner(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    seen: list[bool] = []

    def compare() -> None:
        assert any(parameter.grad is not None for parameter in model.parameters())
        seen.append(all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))

    learner.before_step = compare
    learner.imitate([sample()])
    assert seen == [True]
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


async def test_the_engine_samples_until_the_weights_change() -> None:
    model = make_model()
    learner, engine = make_learner(model), NativeEngine(model)
    event_loop, working = asyncio.get_running_loop(), asyncio.Event()
    tokens_at: dict[str, float] = {}

    async def play() -> Completion:
        return await engine.generate(PROMPT, Sampling(400, temperature=0), "beside")

    def learn() -> None:
        event_loop.call_soon_threadsafe(working.set)
        while engine.stats()["new_tokens"] < 20:  # it goes on while the learner works
            pass
        plain_step = learner.before_step

        def announced() -> None:
            plain_step()
            tokens_at["pause"] = engine.stats()["new_tokens"]

        learner.before_step = announced
        learner.imitate([sample()])
        tokens_at["update"] = engine.stats()["new_tokens"]

    reply = asyncio.create_task(play())
    async with sampling_beside(engine, learner):
        await asyncio.to_thread(learn)
        for _ in range(50):
            await asyncio.sleep(0)
        assert working.is_set()
        assert 20 <= tokens_at["pause"] == tokens_at["update"] == engine.stats()["new_tokens"] < 400
        await engine.update_weights(None, 1)
    completion = await reply
    paused = int(tokens_at["pause"])
    assert completion.versions == [0] * paused + [1] * (400 - paused)
    await engine.close()


async def test_a_step_without_an_update_does_not_pause_the_engine() -> None:
    model = make_model()
    learner, engine = make_learner(model), NativeEngine(model)
    unpaused = learner.before_step
    async with sampling_beside(engine, learner):
        assert learner.before_step is not unpaused
        assert len((await engine.generate(PROMPT, Sampling(8), "a")).token_ids) == 8
    assert learner.before_step is unpaused
    await engine.close()


async def test_a_failure_of_the_learner_ends_the_pause() -> None:
    model = make_model()
    learner, engine = make_learner(model), NativeEngine(model)

    async def fail() -> None:
        async with sampling_beside(engine, learner):
            await asyncio.to_thread(learner.before_step)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await fail()
    assert len((await engine.generate(PROMPT, Sampling(8), "a")).token_ids) == 8
    await engine.close()
