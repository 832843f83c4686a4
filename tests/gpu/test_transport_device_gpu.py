"""Weights sent between processes on one CUDA device: exact bits, memory use, and memory after a death."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from receiver_for_tests import receiver

from agentgym_rl.transport.device import device_id, send_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BUCKET = 64 << 20
SLACK = 48 << 20
"""Bytes of the device that a context or an allocator may take once."""


def a_state(seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of several types and shapes, one of them empty, one not contiguous, one larger than a bucket."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return {
        "a": torch.randn(4096, 2049, device="cuda", generator=generator).to(torch.bfloat16),
        "b": torch.randn(7, device="cuda", generator=generator),
        "c": torch.empty(0, 2, device="cuda"),
        "d": torch.randn(33, 5, device="cuda", generator=generator).t(),
        "e": torch.randn(9000, 4096, device="cuda", generator=generator).to(torch.bfloat16),
        "f": torch.randn(4096, 2048, device="cuda", generator=generator),
    }


def as_gathered(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of which each is freed before the next, so that its memory is reused."""
    for name, tensor in state.items():
        yield name, tensor.clone()


def same(found: Any, state: dict[str, torch.Tensor]) -> bool:
    assert not isinstance(found, str), found
    return found.keys() == state.keys() and all(
        torch.equal(torch.from_numpy(found[name]), t.cpu().contiguous().view(-1).view(torch.uint8))
        for name, t in state.items()
    )


def used() -> int:
    """Return the used bytes of the device, of all processes."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.fixture
def bases() -> Iterator[None]:
    torch.zeros(1, device="cuda")
    yield
    torch.cuda.empty_cache()


def test_every_version_is_bit_exact_and_twenty_use_no_more_memory_than_two(bases: None) -> None:
    with receiver(a_state(0), "cuda") as engine:
        memory = []
        for version in range(20):
            state, endpoint = a_state(version), engine.open_endpoint()
            assert endpoint.device == device_id()
            assert endpoint.device.startswith("GPU-")
            engine.begin(endpoint, version)
            assert send_weights(as_gathered(state), version, [endpoint], BUCKET) == {}
            assert same(engine.result(), state)
            memory.append(used())
        assert max(memory[2:]) - memory[1] < SLACK, [m >> 20 for m in memory]


def test_there_is_about_a_bucket_of_extra_memory_or_the_largest_tensor(bases: None) -> None:
    state = a_state(3)
    largest = max(t.numel() * t.element_size() for t in state.values())
    with receiver(state, "cuda") as engine:
        endpoint = engine.open_endpoint()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        engine.begin(endpoint, 0)
        assert send_weights(state.items(), 0, [endpoint], BUCKET) == {}
        assert torch.cuda.max_memory_allocated() - before <= max(BUCKET, largest) + (2 << 20)
        assert torch.cuda.memory_allocated() <= before
        assert same(engine.result(), state)


def test_two_engines_load_at_once_and_a_killed_one_leaks_no_memory(bases: None) -> None:
    state = a_state(5)
    with receiver(state, "cuda") as stays:
        for version in range(6):
            before, allocated = used(), torch.cuda.memory_allocated()
            with receiver(state, "cuda") as dies:
                endpoints = [stays.open_endpoint(), dies.open_endpoint()]
                stays.begin(endpoints[0], version)
                dies.begin(endpoints[1], version, dies_at="f")
                assert send_weights(as_gathered(state), version, endpoints, BUCKET).keys() == {endpoints[1].name}
                assert same(stays.result(), state)
                dies.process.join(60)
            torch.cuda.ipc_collect()
            assert torch.cuda.memory_allocated() <= allocated, "the room that it had open is freed"
            if version > 1:
                assert used() - before < SLACK


def test_expandable_segments_do_not_prevent_sharing_memory(bases: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        state = a_state(6)
        with receiver(state, "cuda") as engine:
            endpoint = engine.open_endpoint()
            engine.begin(endpoint, 0)
            assert send_weights(as_gathered(state), 0, [endpoint], BUCKET) == {}
            assert same(engine.result(), state)
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def test_float32_that_is_on_the_host_arrives_on_the_device_too(bases: None) -> None:
    """Like a learner's parameters, which remain on the device."""
    state = {name: tensor.cpu() for name, tensor in a_state(7).items()}
    with receiver(state, "cuda") as engine:
        endpoint = engine.open_endpoint()
        engine.begin(endpoint, 0)
        assert send_weights(((n, t.clone()) for n, t in state.items()), 0, [endpoint], BUCKET) == {}
        assert same(engine.result(), state)
