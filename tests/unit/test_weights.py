"""Weights in buckets and host memory: unchanged for all sizes and types, and never half loaded."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from reader_for_tests import reader
from runs_for_tests import counting_config
from training_for_tests import counting_player, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.errors import EngineError
from agentgym_rl.run.backend_ray import make_engine_adapter
from agentgym_rl.run.memory_demand import demand_of
from agentgym_rl.scale.process_group import whole_state
from agentgym_rl.training.checkpoint import export
from agentgym_rl.transport import host_memory
from agentgym_rl.transport.buckets import NativeAdapter, Staging, buckets, load_buckets
from agentgym_rl.transport.host_memory import HostMemories, HostMemory
from agentgym_rl.types import Sampling


@pytest.mark.parametrize("max_bytes", [1, 100, 4096, 1 << 30])
def test_tensors_arrive_in_order_and_buckets_respect_their_size(max_bytes: int) -> None:
    named = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "c": torch.arange(5),
        "d": torch.randn(()),
        "e": torch.randn(40, 30),
        "f": torch.randn(2, 3).t(),
    }
    filled = list(buckets(named.items(), max_bytes))
    tensors = [pair for bucket in filled for pair in bucket.tensors()]
    assert [name for name, _ in tensors] == list(named)
    for name, tensor in tensors:
        assert tensor.dtype == named[name].dtype
        assert torch.equal(tensor, named[name])
    assert all(len(bucket.data) <= max_bytes or len(bucket.entries) == 1 for bucket in filled)


def test_ranks_that_keep_no_bucket_still_gather_every_tensor() -> None:
    gathered = []

    def named():
        for name in "abc":
            gathered.append(name)
            yield name, torch.zeros(2)

    assert list(buckets(named(), 100, keep=False)) == []
    assert gathered == ["a", "b", "c"]


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    own = {"a": torch.zeros(2), "b": torch.zeros(3)}
    for wrong in ({"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(4)}, {"a": torch.ones(2), "c": own["b"]}):
        with pytest.raises(EngineError, match="do not fit"):
            load_buckets(own, buckets(wrong.items(), 4))
        assert not own["a"].any()


async def test_an_engine_samples_with_what_it_was_given() -> None:
    """After an update from model A to B the engine samples like B and has the new version."""
    first, second = tiny_model(1), tiny_model(2)
    adapter = NativeAdapter(NativeEngine(first, max_sessions=2), first)
    wanted = NativeEngine(second, max_sessions=2)
    sampling = Sampling(6, temperature=1.0, seed=3)
    before = await adapter.engine.generate([1, 2, 3], sampling, "s")
    await adapter.load(list(buckets(second.state_dict().items(), 1000)), 7)
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


def a_state(seed: float) -> dict[str, torch.Tensor]:
    return {
        "a": torch.full((3, 5), seed),
        "b": torch.arange(7).to(torch.bfloat16) * seed,
        "c": torch.empty(0, 2),
        "d": torch.tensor(seed),
        "e": torch.full((2, 3), seed).t(),
    }


def is_read(weights: Any, state: dict[str, torch.Tensor]) -> bool:
    with weights.locked() as held:
        own = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        load_buckets(own, [held])
        read = dict(held.tensors())
    return list(read) == list(state) and all(
        torch.equal(read[name], tensor) and torch.equal(own[name], tensor) for name, tensor in state.items()
    )


def test_host_weights_are_readable_while_a_process_has_them_locked() -> None:
    memory = HostMemory()
    weights = memory.fill(a_state(1.0).items())
    with weights.locked() as held:
        memory.close()
        with pytest.raises(FileNotFoundError):
            weights.locked().__enter__()
        another = HostMemory()  # open where the first one was
        assert another.fill({}.items()).path == weights.path
        with pytest.raises(FileNotFoundError, match="another file now"):
            weights.locked().__enter__()
        another.close()
        with socket.socket() as elsewhere:  # and cannot even be opened
            assert weights.path.endswith(f"/{elsewhere.fileno()}")
            with pytest.raises(FileNotFoundError, match="another file now"):
                weights.locked().__enter__()
        assert is_read(held, a_state(1.0))


def test_versions_are_written_in_place_and_read_through_one_mapping() -> None:
    memory = HostMemory()
    first = memory.fill(a_state(1.0).items())
    assert is_read(first, a_state(1.0))
    windows = dict(host_memory._mappings)
    second, third = (memory.fill(a_state(seed).items()) for seed in (2.0, 3.0))
    assert (third.inode, third.size, third.generation) == (first.inode, first.size, first.generation + 2)
    assert is_read(third, a_state(3.0))
    assert host_memory._mappings == windows, "mapped once"
    for old in (first, second):
        with pytest.raises(FileNotFoundError, match="other weights now"):
            old.locked().__enter__()
    other = a_state(4.0) | {"d": torch.ones(40), "f": torch.ones(3)}  # another layout from the fourth tensor on
    assert is_read(memory.fill(other.items()), other)
    assert is_read(memory.fill(a_state(5.0).items()), a_state(5.0))
    memory.close()


def test_memory_being_read_is_not_overwritten_and_the_last_version_remains_readable() -> None:
    memories = HostMemories()
    first, second = (memories.fill(a_state(seed).items()) for seed in (1.0, 2.0))
    assert first.inode != second.inode
    with first.locked() as held:  # as an engine that takes long to start
        third = memories.fill(a_state(3.0).items())
        assert third.inode not in (first.inode, second.inode)
        assert is_read(held, a_state(1.0))
    assert is_read(second, a_state(2.0))

    def seen_half_way():
        for number, pair in enumerate(a_state(4.0).items()):
            if number == 2:
                assert is_read(third, a_state(3.0)), "the last one can be read"
                with pytest.raises(FileNotFoundError, match="being overwritten"):
                    second.locked().__enter__()
            yield pair

    fourth = memories.fill(seen_half_way())
    assert fourth.inode == second.inode
    assert is_read(fourth, a_state(4.0))
    memories.close()


def test_another_process_sees_later_writes_through_its_mapping() -> None:
    memories = HostMemories()
    with reader() as connection:
        for seed in (1.0, 2.0, 3.0, 4.0):
            state = a_state(seed)
            connection.send(memories.fill(state.items()))
            assert connection.poll(300)
            found, mapped, remark = connection.recv()
            assert {name: (str(t.dtype), t.float().tolist()) for name, t in state.items()} == {
                name: (dtype, values.tolist()) for name, (dtype, values) in found.items()
            }
            assert (mapped, remark) == (min(seed, 2), "")
    memories.close()


def test_a_state_shared_with_vllm_has_tied_tensors_once() -> None:
    weight = torch.randn(4, 3)
    state = {"embed": weight, "head": weight, "view": weight.t(), "none": torch.empty(0), "nothing": torch.empty(0)}
    message, held = host_memory.pack(state)
    found = dict(host_memory.unpack(message))
    assert list(found) == ["embed", "view", "none", "nothing"]
    assert all(torch.equal(found[name], state[name]) for name in found)
    del held


def test_a_tied_head_is_sent_once_and_loaded() -> None:
    tied = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = LlamaConfig(**tied, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    first, second = LlamaForCausalLM(config), LlamaForCausalLM(config)
    made = list(buckets(whole_state(first), 1 << 20))
    names = [name for bucket in made for name, *_ in bucket.entries]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    load_buckets(second.state_dict(), made)
    assert torch.equal(second.lm_head.weight, first.lm_head.weight)


def test_staged_buckets_are_valid_until_the_next_and_are_read_without_a_copy() -> None:
    staging = Staging()
    made = buckets(a_state(1.0).items(), 64, staging=staging)
    first = next(made)
    place = first.data.ctypes.data
    first.data.flags.writeable = False  # as in an object store
    assert [t.data_ptr() for _, t in first.tensors()] == [place]
    assert {bucket.data.ctypes.data for bucket in made if bucket.data.size} == {place}


@pytest.mark.parametrize("closed", [True, False])
def test_page_locked_memory_is_unlocked_once_with_or_without_close(
    closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []

    class Cudart:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            calls.append(("lock", address))
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            calls.append(("unlock", address))
            return 0

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(host_memory, "wait_for_copies", lambda: calls.append(("copies done", 0)))
    memory = HostMemory()
    for value in (1.0, 2.0):
        memory.fill([("a", torch.full((4,), value))])
    (address,) = (where for call, where in calls if call == "lock")
    calls.clear()
    if closed:
        memory.close()
        assert calls[-1] == ("unlock", address)
    del memory
    assert calls == [("copies done", 0), ("unlock", address)]
