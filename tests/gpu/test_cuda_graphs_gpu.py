"""Captures on a CUDA device: garbage, failures and graphs that are no longer needed."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.common.cuda_graphs import capture
from agentgym_rl.errors import EngineError
from agentgym_rl.training.device.packed import capture_passes
from agentgym_rl.training.learner import Imitator
from agentgym_rl.training.settings import OptimizerSettings
from agentgym_rl.types import Completion, Sample, Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROMPT = list(range(20))


@pytest.fixture
def eager_collector() -> Iterator[None]:
    known = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*known)


def make_model(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=503,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
        max_position_embeddings=2048,
    )
    return LlamaForCausalLM(config).cuda().to(dtype).eval()


def reply(engine: NativeEngine, length: int = 20) -> Completion:
    async def play() -> Completion:
        return await engine.generate(PROMPT[:length], Sampling(6, temperature=0), "a")

    return asyncio.run(play())


def fail_while_capturing(*_: Any, **__: Any) -> None:
    """Do what CUDA forbids in a capture, and nothing outside of one."""
    if torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()


def test_unclosed_engines_are_collected_while_others_capture(eager_collector: None) -> None:
    model = make_model()
    wanted = reply(NativeEngine(model, max_sessions=4)).token_ids
    for _ in range(6):
        assert reply(NativeEngine(model, max_sessions=4)).token_ids == wanted


def test_a_failed_capture_leaves_the_process_as_it_was() -> None:
    def run() -> None:
        torch.ones(1 << 20, device="cuda")
        fail_while_capturing()

    stream = torch.cuda.Stream()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        with torch.cuda.stream(stream), pytest.raises(RuntimeError, match="captur"):
            capture(run, torch.cuda.graph_pool_handle())
    assert gc.isenabled()
    assert torch.rand(4, device="cuda").isfinite().all(), "random numbers are drawn outside of a capture again"
    assert torch.cuda.memory_allocated() == before
    value = torch.zeros(4, device="cuda")
    with torch.cuda.stream(stream):
        graph = capture(lambda: value.add_(1), torch.cuda.graph_pool_handle())
    graph.replay()
    torch.cuda.synchronize()
    assert value.tolist() == [1.0] * 4


def test_an_engine_works_after_a_capture_of_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    wanted = reply(NativeEngine(model, max_sessions=4)).token_ids
    engine = NativeEngine(model, max_sessions=4)
    runner: Any = engine._runner
    runner.refresh()
    with monkeypatch.context() as patched:
        patched.setattr(runner._captured, "decode", fail_while_capturing)
        with pytest.raises(EngineError, match="A launch on the device failed"):
            reply(engine)
    assert reply(engine).token_ids == wanted
    assert reply(NativeEngine(model, max_sessions=4)).token_ids == wanted


def memory_pools() -> set[Any]:
    return {segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()}


def test_graphs_are_released_when_an_engine_closes() -> None:
    model = make_model()
    gc.collect()
    gc.disable()
    try:
        torch.cuda.empty_cache()
        before, pools = torch.cuda.memory_allocated(), memory_pools()
        engine = NativeEngine(model, max_sessions=4)
        reply(engine)
        runner: Any = engine._runner
        assert runner._graphs
        assert memory_pools() > pools
        in_use = torch.cuda.memory_allocated()
        asyncio.run(engine.close())
        assert not runner._graphs
        assert before <= torch.cuda.memory_allocated() < in_use
        torch.cuda.empty_cache()
        assert memory_pools() == pools, "no memory belongs to its graphs any more"
    finally:
        gc.enable()


def test_a_learner_whose_capture_fails_says_so_and_learns_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [Sample([i % 503 for i in range(n)], [False] + [True] * (n - 1)) for n in (40, 60, 70)]
    settings = OptimizerSettings(lr=1e-3, micro_batch_tokens=256)
    plain, failing = (
        Imitator(make_model(torch.bfloat16), settings, 4),
        Imitator(make_model(torch.bfloat16), settings, 4),
    )
    capture_passes(failing.model.get_decoder())
    passes = failing.model.get_decoder().captured_passes
    layers = passes._layers

    def failing_layers(*arguments: Any) -> Any:
        fail_while_capturing()
        return layers(*arguments)

    monkeypatch.setattr(passes, "_layers", failing_layers)
    wanted = [plain.imitate(samples)["loss"] for _ in range(4)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [failing.imitate(samples)["loss"] for _ in range(4)]
    assert found == pytest.approx(wanted, rel=1e-2)
    assert [str(w.message) for w in caught if "could not be captured" in str(w.message)]
    assert passes.replays == 0
