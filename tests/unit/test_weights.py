"""Weights in buckets, and engines that load them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs_for_tests import counting_config
from training_for_tests import counting_player, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.agent.engines.native.adapter import NativeAdapter, load_tensors
from agentgym_rl.errors import EngineError
from agentgym_rl.run.backend_ray import make_engine_adapter
from agentgym_rl.run.memory_demand import demand_of
from agentgym_rl.training.checkpoint import export
from agentgym_rl.transport.broadcast import (
    Entry,
    padded_bytes,
    place_in_buckets,
    tensor_view,
    whole_state,
)
from agentgym_rl.types import Sampling


@pytest.mark.parametrize("max_bytes", [1, 100, 4096, 1 << 30])
def test_tensors_are_placed_in_order_and_buckets_respect_their_size(max_bytes: int) -> None:
    named = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "c": torch.arange(5),
        "d": torch.randn(()),
        "e": torch.randn(40, 30),
        "f": torch.randn(2, 3).t(),
    }
    buckets: list[list[tuple[Entry, torch.Tensor]]] = []
    for entry, tensor, begins in place_in_buckets(named.items(), max_bytes):
        if begins:
            buckets.append([])
        buckets[-1].append((entry, tensor))
    assert [entry[0] for bucket in buckets for entry, _ in bucket] == list(named)
    for bucket in buckets:
        end = max(entry[3] + padded_bytes(tensor) for entry, tensor in bucket)
        assert end <= max_bytes or len(bucket) == 1
        memory = torch.empty(end, dtype=torch.uint8)
        for entry, tensor in bucket:
            tensor_view(memory, entry).copy_(tensor)
        for entry, tensor in bucket:
            assert tensor_view(memory, entry).dtype == tensor.dtype
            assert torch.equal(tensor_view(memory, entry), tensor)


def test_a_state_that_does_not_fit_is_refused() -> None:
    own = {"a": torch.zeros(2), "b": torch.zeros(3)}
    for wrong, problem in (
        ({"a": torch.ones(2)}, "missing b"),
        ({"b": torch.ones(4)}, "b has shape (4,), needed (3,)"),
        ({"a": torch.ones(2), "c": torch.ones(3)}, "unexpected c"),
    ):
        with pytest.raises(EngineError, match=re.escape(f"do not fit the engine's model: {problem}")):
            load_tensors(own, arriving(wrong.items()))
        assert not own["b"].any()


class Arriving:
    """Weights that are in this process already."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def connect(self) -> None:
        return None

    def tensors(self) -> Generator[tuple[str, torch.Tensor]]:
        yield from whole_state(self._model)


def arriving(named: Iterable[tuple[str, torch.Tensor]]) -> Generator[tuple[str, torch.Tensor]]:
    yield from named


async def test_an_engine_samples_with_what_it_was_given() -> None:
    """After an update from model A to B the engine samples like B and has the new version."""
    first, second = tiny_model(1), tiny_model(2)
    adapter = NativeAdapter(NativeEngine(first, max_sessions=2), first)
    wanted = NativeEngine(second, max_sessions=2)
    sampling = Sampling(6, temperature=1.0, seed=3)
    before = await adapter.engine.generate([1, 2, 3], sampling, "s")
    await adapter.load(Arriving(second), 7)
    after = await adapter.engine.generate([1, 2, 3], sampling, "t")
    expected = await wanted.generate([1, 2, 3], sampling, "t")
    assert adapter.version == after.version == 7
    assert before.logprobs != after.logprobs
    assert after.token_ids == expected.token_ids
    assert after.logprobs == pytest.approx(expected.logprobs, abs=1e-6)
    await adapter.engine.close()
    await wanted.close()


async def test_a_sleeping_engine_holds_no_cache_and_continues_as_before() -> None:
    model = tiny_model(1)
    adapter = NativeAdapter(NativeEngine(model, max_sessions=2), model)
    sampling = Sampling(6, temperature=1.0, seed=3)
    before = asyncio.create_task(adapter.engine.generate([1, 2, 3], sampling, "s"))
    await asyncio.sleep(0)
    await adapter.sleep()
    assert before.done(), "pending replies finish first"
    cache = adapter.engine._runner.cache
    assert sum(t.numel() for t in cache.keys) < model.config.num_hidden_layers * 2 * model.config.hidden_size
    await adapter.wake()
    again = await adapter.engine.generate([1, 2, 3], sampling, "s")
    assert (again.token_ids, again.logprobs) == (before.result().token_ids, before.result().logprobs)
    assert sum(t.numel() for t in cache.keys) > 6 * model.config.num_hidden_layers
    await adapter.engine.close()


@pytest.mark.parametrize(("engines", "sessions"), [(1, 16), (2, 10), (3, 7), (16, 2)])
def test_an_engine_reserves_its_share_and_the_doctor_counts_the_same(
    tmp_path: Path, engines: int, sessions: int
) -> None:
    model, tokenizer = counting_player()
    export(model, tokenizer, tmp_path)
    changes = {"model": {"path": str(tmp_path)}, "scale": {"engines": engines}, "warm_start": None}
    config = counting_config(**changes)
    assert config.agent.concurrency == 16
    assert make_engine_adapter(config, tmp_path).engine._sessions._free == list(range(sessions))
    assert demand_of(config).sessions == sessions


def test_a_tied_head_is_sent_once_and_loaded() -> None:
    tied = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = LlamaConfig(**tied, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    first, second = LlamaForCausalLM(config), LlamaForCausalLM(config)
    names = [name for name, _ in whole_state(first)]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    load_tensors(second.state_dict(), arriving(whole_state(first)))
    assert torch.equal(second.lm_head.weight, first.lm_head.weight)
