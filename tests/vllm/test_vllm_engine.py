"""vLLM in this process against transformers and the native engine, on tiny random models in float32."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
import torch.distributed as dist
from vllm_for_tests import SMALL, gap, greedy, prompt, scored, vllm_processes

from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.agent.engines.vllm import Probe, VllmEngine, probe_model
from agentgym_rl.errors import EngineError
from agentgym_rl.run.backend_vllm import VllmAdapter
from agentgym_rl.training.lora import add_adapter, policy_tensors
from agentgym_rl.training.settings import LoraSettings
from agentgym_rl.transport import broadcast
from agentgym_rl.transport.broadcast import BroadcastWeights, Member, whole_state
from agentgym_rl.transport.device import DeviceWeights, device_id, send_weights
from agentgym_rl.types import Sampling

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1800)]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def started(folders: dict[str, Path]) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(folders["A"], lora_rank=4, **SMALL)
    await engine.start()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="session")
async def engine(started: VllmEngine, folders: dict[str, Path]) -> VllmEngine:
    """Restore the weights of A before each test."""
    if started.version % 100:
        await started.update_weights(folders["A"], (started.version // 100 + 1) * 100)
    started.reset_stats()
    return started


@pytest.fixture(scope="session")
def vocabulary(models: dict[str, Any]) -> int:
    return models["A"].config.vocab_size


async def test_greedy_replies_are_those_of_transformers(engine: Any, models: Any, vocabulary: int) -> None:
    prompts = [prompt(n, vocabulary) for n in (1, 7, 40, 200)]
    done = await asyncio.gather(
        *(engine.generate(ids, Sampling(12, temperature=0), str(i)) for i, ids in enumerate(prompts))
    )
    for ids, completion in zip(prompts, done, strict=True):
        assert completion.token_ids == greedy(models["A"], ids, 12)
        assert gap(models["A"], ids, completion) < 1e-4
        assert completion.finish == "length"


async def test_logprobs_are_of_the_distribution_sampled_from(engine: Any, models: Any, vocabulary: int) -> None:
    ids = prompt(30, vocabulary)
    asked = [Sampling(16, temperature=t, seed=3) for t in (0.5, 1.0, 2.0)] + [Sampling(16, temperature=0)]
    done = await asyncio.gather(*(engine.generate(ids, s, str(i)) for i, s in enumerate(asked)))
    for sampling, completion in zip(asked, done, strict=True):
        assert gap(models["A"], ids, completion, sampling.temperature or 1.0) < 1e-4
    cut = await engine.generate(ids, Sampling(16, top_p=0.3, seed=3), "cut")
    plain = scored(models["A"], ids, cut.token_ids)
    # Renormalised over what top_p keeps: more likely, by at most 1 / 0.3.
    assert all(0.0 < a - b < 1.3 for a, b in zip(cut.logprobs, plain, strict=True))


async def test_a_seed_decides_whatever_other_requests_run(engine: Any, vocabulary: int) -> None:
    ids = prompt(30, vocabulary)
    alone = await engine.generate(ids, Sampling(16, seed=2**63 - 5), "alone")
    crowd = await asyncio.gather(
        *(engine.generate(ids, Sampling(16, seed=seed), str(seed)) for seed in (1, 2**63 - 5, 2))
    )
    assert crowd[1].token_ids == alone.token_ids
    assert len({tuple(c.token_ids) for c in crowd}) == 3


async def test_more_prompts_than_a_step_takes_wait_for_the_next(engine: Any, vocabulary: int) -> None:
    """With seeds: on a CPU vLLM would crash if it split a prompt over several steps."""
    prompts = [prompt(490, vocabulary, seed=n) for n in range(20)]
    done = await asyncio.gather(*(engine.generate(p, Sampling(2, seed=n), str(n)) for n, p in enumerate(prompts)))
    assert [len(c.token_ids) for c in done] == [2] * 20


async def test_a_reply_ends_with_its_stop_token_or_at_the_context_limit(
    engine: Any, models: Any, vocabulary: int
) -> None:
    ids = prompt(40, vocabulary)
    whole = greedy(models["A"], ids, 12)
    stopped = await engine.generate(ids, Sampling(12, temperature=0, stop_token_ids=(whole[3],)), "s")
    assert stopped.token_ids == whole[: whole.index(whole[3]) + 1]
    assert stopped.finish == "stop"
    full = await engine.generate(prompt(510, vocabulary), Sampling(12, temperature=0), "f")
    assert (len(full.token_ids), full.finish) == (2, "length")


async def test_requests_that_cannot_be_served_are_refused_with_a_reason(engine: Any, vocabulary: int) -> None:
    with pytest.raises(EngineError, match="max_context is 512"):
        await engine.generate(prompt(512, vocabulary), Sampling(1), "a")
    with pytest.raises(EngineError, match="empty"):
        await engine.generate([], Sampling(1), "a")
    with pytest.raises(EngineError, match=r"vLLM failed: .*out of vocabulary"):
        await engine.generate([vocabulary + 1000], Sampling(1), "a")
    assert (await engine.generate([5], Sampling(1), "a")).finish == "length"


async def test_a_trajectory_reads_from_the_cache_and_equals_the_native_engine(
    engine: Any, models: Any, vocabulary: int
) -> None:
    native = NativeEngine(models["A"], max_context=512)
    ids = prompt(150, vocabulary)
    for turn in range(4):
        sampling = Sampling(20, temperature=0)
        here, there = await asyncio.gather(engine.generate(ids, sampling, "t"), native.generate(ids, sampling, "t"))
        assert here.token_ids == there.token_ids
        assert max(abs(a - b) for a, b in zip(here.logprobs, there.logprobs, strict=True)) < 1e-4
        ids = ids + here.token_ids + prompt(30, vocabulary, seed=turn)
    assert engine.stats()["prompt_tokens_reused"] >= 128 * 3
    await engine.release("t")
    await native.close()


async def test_new_weights_are_used_and_the_cache_of_old_ones_is_not(
    engine: Any, models: Any, folders: Any, vocabulary: int
) -> None:
    ids, sampling = prompt(300, vocabulary), Sampling(8, temperature=0)
    first = await engine.generate(ids, sampling, "a")
    again = await engine.generate(ids, sampling, "a")
    assert engine.stats()["prompt_tokens_reused"] == 256
    assert gap(models["A"], ids, again) < 1e-4
    await engine.update_weights(folders["B"], engine.version + 1, probe=probe_model(models["B"]))
    engine.reset_stats()
    second = await engine.generate(ids, sampling, "a")
    assert engine.stats()["prompt_tokens_reused"] == 0
    assert (second.version, gap(models["B"], ids, second) < 1e-4) == (first.version + 1, True)
    assert gap(models["A"], ids, second) > 0.5


async def test_weights_are_also_loaded_from_memory(engine: Any, models: Any, vocabulary: int) -> None:
    ids = prompt(50, vocabulary)
    await engine.update_weights(models["C"].state_dict(), engine.version + 1, probe=probe_model(models["C"]))
    assert gap(models["C"], ids, await engine.generate(ids, Sampling(8, seed=1), "a")) < 1e-4


async def test_weights_are_broadcast_by_another_process(engine: Any, models: Any, vocabulary: int) -> None:
    """The worker joins the group of the first update, which is used again. A bucket has half of a layer."""
    ids, adapter = prompt(50, vocabulary), VllmAdapter(engine)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for number, name in enumerate("BCAB"):
        version, probe = engine.version + 1, probe_model(models[name])
        common = ("group", f"127.0.0.1:{store.port}")
        sender, receiver = (Member(*common, rank, 2, 1, "gloo", is_new=number == 0) for rank in range(2))
        sending = asyncio.create_task(
            asyncio.to_thread(broadcast.send_weights, whole_state(models[name]), sender, version, 20_000)
        )
        await adapter.load(BroadcastWeights(receiver, version), version, probe)
        assert await sending == {}
        (found,) = await engine._llm.collective_rpc("agentgym_checksums", args=(probe.shapes,))
        assert found["model.embed_tokens.weight"] == probe.checksums["model.embed_tokens.weight"]
        reply = await engine.generate(ids, Sampling(8, seed=1), "a")
        assert (reply.version, gap(models[name], ids, reply) < 1e-4) == (version, True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="models are on the CPU here, vLLM is on the device")
async def test_weights_are_sent_by_a_process_on_the_same_device(engine: Any, models: Any, vocabulary: int) -> None:
    """Send bucket by bucket, as on a cluster, but through host memory. vLLM keeps tensors until it has a whole layer; a
    bucket has half of one."""
    ids, adapter = prompt(50, vocabulary), VllmAdapter(engine)
    for name in "BCA":
        version, probe, (endpoint,) = engine.version + 1, probe_model(models[name]), await adapter.open_endpoints()
        assert endpoint.device == device_id()
        sending = asyncio.create_task(
            asyncio.to_thread(send_weights, whole_state(models[name]), version, [endpoint], 20_000)
        )
        await adapter.load(DeviceWeights(endpoint, version), version, probe)
        assert await sending == {}
        reply = await engine.generate(ids, Sampling(8, seed=1), "a")
        assert (reply.version, gap(models[name], ids, reply) < 1e-4) == (version, True)


async def test_a_pending_reply_keeps_its_weights(engine: Any, models: Any, folders: Any, vocabulary: int) -> None:
    ids, version = prompt(20, vocabulary), engine.version
    before = asyncio.create_task(engine.generate(ids, Sampling(300, seed=1), "a"))
    await asyncio.sleep(0.2)
    update = asyncio.create_task(engine.update_weights(folders["B"], version + 1))
    await asyncio.sleep(0)
    after = asyncio.create_task(engine.generate(ids, Sampling(8, seed=1), "b"))
    assert not before.done()
    await update
    old, new = await before, await after
    assert (old.version, gap(models["A"], ids, old) < 1e-4) == (version, True)
    assert (new.version, gap(models["B"], ids, new) < 1e-4) == (version + 1, True)


async def test_adapters_are_loaded_by_version(engine: Any, models: Any, vocabulary: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    adapted = AutoModelForCausalLM.from_pretrained(engine._folder)
    add_adapter(adapted, LoraSettings(rank=4, alpha=8.0), 0)
    for number in (1, 2):
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.3)
        adapted.save_pretrained(tmp_path / str(number))
        await engine.update_weights(tmp_path / str(number), engine.version + 1, probe=probe_model(adapted))
        ids = prompt(200, vocabulary)
        reply = await engine.generate(ids, Sampling(8, seed=1), "a")
        assert gap(adapted.eval(), ids, reply) < 1e-4
        assert gap(models["A"], ids, reply) > 0.1


async def test_adapters_are_sent_without_their_frozen_weights(engine: Any, models: Any, vocabulary: int) -> None:
    """The learner broadcasts the adapter alone; checksums tell apart adapters that differ by one small update."""
    from transformers import AutoModelForCausalLM

    adapted = AutoModelForCausalLM.from_pretrained(engine._folder).eval()
    add_adapter(adapted, LoraSettings(rank=4, alpha=12.0), 0)
    matrices = [parameter for name, parameter in adapted.named_parameters() if "lora_B" in name]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ids, adapter = prompt(200, vocabulary), VllmAdapter(engine)
    for number in range(2):
        for matrix in matrices:
            matrix.data.normal_(std=0.3)
        version, probe = engine.version + 1, probe_model(adapted, adapter=policy_tensors(adapted))
        common = ("adapters", f"127.0.0.1:{store.port}")
        sender, receiver = (Member(*common, rank, 2, 1, "gloo", is_new=number == 0) for rank in range(2))
        sending = asyncio.to_thread(broadcast.send_weights, policy_tensors(adapted), sender, version, 20_000)
        sent, _ = await asyncio.gather(sending, adapter.load(BroadcastWeights(receiver, version), version, probe))
        assert sent == {}
        reply = await engine.generate(ids, Sampling(8, seed=1), "a")
        assert (reply.version, gap(adapted, ids, reply) < 1e-4) == (version, True)
        assert gap(models["A"], ids, reply) > 0.1
    compared = await engine._llm.collective_rpc("agentgym_checksums", args=(probe.shapes,))
    assert set(compared[0]) >= {name for name in probe.checksums if "lora_" in name}
    matrices[-1].data += 1e-6
    with pytest.raises(EngineError, match=r"down_proj.lora_B.weight is .*does not hold these weights"):
        probe_model(adapted, adapter=policy_tensors(adapted)).check_checksums(compared, version)
    await engine.update_weights(dict(policy_tensors(adapted)), version + 1)
    assert gap(adapted, ids, await engine.generate(ids, Sampling(8, seed=1), "b")) < 1e-4


async def test_a_cancelled_reply_leaves_the_engine_usable(engine: Any, models: Any, vocabulary: int) -> None:
    ids = prompt(20, vocabulary)
    task = asyncio.create_task(engine.generate(ids, Sampling(400), "a"))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gap(models["A"], ids, await engine.generate(ids, Sampling(4), "a")) < 1e-4


async def test_weights_that_are_not_the_learners_end_the_engine(engine: Any, models: Any, folders: Any) -> None:
    """The last test of this engine: nothing runs afterwards."""
    right = probe_model(models["A"])
    wrong = Probe(right.token_ids, right.logprobs)
    update = asyncio.create_task(engine.update_weights(folders["B"], engine.version + 1, probe=wrong))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(engine.generate([5, 6, 7], Sampling(2), "a"))
    with pytest.raises(EngineError, match="does not hold these weights"):
        await update
    with pytest.raises(EngineError, match="does not hold these weights"):
        await waiting
    with pytest.raises(EngineError, match=r"update to weights \d+ failed"):
        await engine.generate([5], Sampling(1), "a")
    await engine.close()
    with pytest.raises(EngineError, match="was closed"):
        await engine.generate([5], Sampling(1), "a")
    for _ in range(100):
        if not vllm_processes(os.getpid()):
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"processes left: {vllm_processes(os.getpid())}")
