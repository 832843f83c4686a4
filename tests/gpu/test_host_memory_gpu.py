"""Weights between processes through page-locked host memory, and shared on the device."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch
from agentgym_rl.transport.host_memory import HostMemories, HostMemory
from reader_for_tests import on_device, reader

from agentgym_rl.transport import host_memory
from agentgym_rl.transport.buckets import Staging, buckets, load_buckets

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def same(found: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> bool:
    return list(found) == list(state) and all(torch.equal(found[name], state[name]) for name in state)


def test_both_sides_have_the_memory_page_locked_and_every_version_arrives() -> None:
    memories = HostMemories()
    with reader("cuda") as connection:
        for seed in range(5):
            state = on_device(seed)
            connection.send(memories.fill(state.items()))
            assert connection.poll(300)
            found, mapped, remark = connection.recv()
            assert remark == ""
            assert mapped == min(seed + 1, 2)
            for name, tensor in state.items():
                dtype, values = found[name]
                assert dtype == str(tensor.dtype)
                assert torch.equal(torch.from_numpy(values), tensor.cpu().float())
    for memory in (memories._current, memories._spare):
        assert memory is not None
        assert memory._mapping is not None
        assert memory._mapping.page_lock_error == ""
        assert memory._mapping.tensor(memory._entries[0]).is_pinned()
    memories.close()


def test_an_engine_copies_from_pinned_memory_and_tensors_may_be_freed_while_written() -> None:
    memory = HostMemory()
    for seed in range(3):
        # Each is freed as soon as its copy is asked for, and its room used again by the next.
        weights = memory.fill((name, tensor.clone()) for name, tensor in on_device(seed).items())
        own = {name: torch.zeros_like(tensor) for name, tensor in on_device(seed).items()}
        with weights.locked() as held:
            load_buckets(own, [held])
            assert next(iter(held.tensors()))[1].is_pinned()
        assert same(own, on_device(seed))
    memory.close()


def test_memory_that_cuda_does_not_page_lock_is_reported_and_works() -> None:
    memory = HostMemory()
    memory.fill(on_device(0).items())
    memory.fill(on_device(1).items())
    window = memory._mapping
    assert window is not None
    unlock, window._unlock = window._unlock, None
    window.lock()  # a second time, which CUDA refuses
    assert "does not page-lock" in window.page_lock_error
    state = on_device(2)
    assert float(torch.ones(5, device="cuda").sum()) == 5.0, "the refusal is not found by whoever comes next"
    weights = memory.fill(state.items())
    assert weights.page_lock_error == window.page_lock_error
    own = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load_buckets(own, [weights])
    assert same(own, state)
    window._unlock = unlock
    memory.close()


def test_unclosed_memory_is_unlocked_before_its_address_is_reused() -> None:
    state = {"a": torch.ones(8 << 20, device="cuda")}
    memory = HostMemory()
    for _ in range(2):
        memory.fill(state.items())
    window = memory._mapping
    assert window is not None
    assert window.tensor(memory._entries[0]).is_pinned()
    address, size = window._bytes.data_ptr(), window.size
    del window, memory
    with mmap.mmap(-1, size) as later:  # the kernel gives the same place again
        tensor = torch.frombuffer(later, dtype=torch.uint8)
        there = tensor.data_ptr() == address
        assert not tensor.is_pinned()
        assert int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, 0)) == 0, f"same place: {there}"
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
        del tensor


def test_buckets_are_built_in_page_locked_memory() -> None:
    staging, state = Staging(), on_device(3)
    found: dict[str, torch.Tensor] = {}
    for bucket in buckets(state.items(), 1 << 20, staging=staging):
        found |= {name: tensor.cuda() for name, tensor in bucket.tensors()}
    assert same(found, state)
    assert staging.reserve(1).is_pinned()


def test_a_state_on_the_device_is_shared_with_another_process_unchanged() -> None:
    state = on_device(4) | {"e": torch.arange(6.0)}  # one on the host among them
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=borrow, args=(theirs,), daemon=True)
    process.start()
    message, held = host_memory.pack(state)
    ours.send_bytes(message)
    assert ours.poll(300)
    found = ours.recv()
    process.join(60)
    assert set(found) == set(state)
    assert all(torch.equal(torch.from_numpy(found[name]), tensor.cpu().float()) for name, tensor in state.items())
    del held


def borrow(connection: Any) -> None:
    connection.send({name: t.float().cpu().numpy() for name, t in host_memory.unpack(connection.recv_bytes())})
