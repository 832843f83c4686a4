"""The native engine's captured steps on a CUDA device, against transformers itself."""

from __future__ import annotations

import asyncio
import copy
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels_for_tests import near_the_largest_float16, without_memory_once
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.agent.engines.native.runner import DecodeRow, Row
from agentgym_rl.agent.engines.native.sampling import signed_64, top_p_filter, uniforms
from agentgym_rl.errors import EngineError
from agentgym_rl.types import Completion, Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCABULARY = 5003
"""More than one block of the sampling kernels, and no multiple of one."""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 304,
    "num_hidden_layers": 3,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,  # wide enough that replies depend on the whole prompt
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WIDE: dict[str, Any] = {**SHAPE, "hidden_size": 1280, "intermediate_size": 1536, "initializer_range": 0.05}
"""Too wide for the fused products: the library's are used."""
NARROW: dict[str, Any] = {**SHAPE, "hidden_size": 64, "intermediate_size": 128}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, num_attention_heads=3, num_key_value_heads=3),
    "llama-gqa-tied": LlamaConfig(
        **SHAPE, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True, attention_bias=True
    ),
    "qwen2": Qwen2Config(**SHAPE, num_attention_heads=6, num_key_value_heads=1),
    "llama-heads-of-16": LlamaConfig(**NARROW, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, num_attention_heads=4, num_key_value_heads=2, head_dim=128),
    "qwen3-heads-of-256": Qwen3Config(**SHAPE, num_attention_heads=2, num_key_value_heads=1, head_dim=256),
    "llama-wide": LlamaConfig(**WIDE, num_attention_heads=10, num_key_value_heads=2, attention_bias=True),
    "qwen2-wide": Qwen2Config(**WIDE, num_attention_heads=20, num_key_value_heads=4),
    "qwen3-wide": Qwen3Config(**WIDE, num_attention_heads=10, num_key_value_heads=2, head_dim=128),
}
CLASSES = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM, "qwen3": Qwen3ForCausalLM}


def make_model(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    with torch.random.fork_rng(devices=[0]):
        torch.manual_seed(7)
        model = CLASSES[kind.split("-")[0]](copy.deepcopy(CONFIGS[kind])).cuda()
        # Biases and norm weights start at 0 and 1, which would hide a forward pass that leaves them out.
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype).eval()


def make_engine(model: Any, **options: Any) -> NativeEngine:
    """An engine with captured steps: a warning would say that it has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return NativeEngine(model, **options)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(VOCABULARY), k=length)


def greedy(model: Any, ids: list[int], num_new: int) -> list[int]:
    out = model.generate(
        torch.tensor([ids], device="cuda"),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long, device="cuda"),
        max_new_tokens=num_new,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(ids) :].tolist()


def distribution(model: Any, ids: list[int], reply: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[len(reply), V] log-probabilities from one plain forward pass over everything."""
    with torch.no_grad():
        logits = model(torch.tensor([ids + reply], device="cuda")).logits[0, len(ids) - 1 : -1]
    return torch.log_softmax(logits.float() / temperature, -1).cpu()


def gaps(model: Any, ids: list[int], completion: Completion, temperature: float = 1.0) -> torch.Tensor:
    """|engine - plain forward| at every sampled token."""
    expected = distribution(model, ids, completion.token_ids, temperature)
    expected = expected.gather(1, torch.tensor(completion.token_ids).unsqueeze(1)).squeeze(1)
    return (torch.tensor(completion.logprobs) - expected).abs()


async def until(engine: NativeEngine, new_tokens: float) -> None:
    for _ in range(100_000):
        if engine.stats()["new_tokens"] >= new_tokens:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"never reached {new_tokens} tokens: {engine.stats()}")


Turn = tuple[list[int], list[int]]
"""A prompt and the reply to it."""


async def play(engine: NativeEngine, name: str, turns: int, seed: int, sampling: Sampling) -> list[Turn]:
    """A multi-turn session, with random observations between replies."""
    rng = random.Random(seed)
    ids, played = prompt(rng.randint(3, 150), seed), []
    for _ in range(turns):
        completion = await engine.generate(ids, sampling, name)
        played.append((ids, completion.token_ids))
        ids = ids + completion.token_ids + prompt(rng.randint(1, 40), rng.randint(0, 99))
        await asyncio.sleep(rng.choice([0, 0, 0.002]))
    await engine.release(name)
    return played


def is_tie(model: Any, sampling: Sampling, got: list[Turn], expected: list[Turn]) -> bool:
    """Return whether the first difference of two sessions is rounding: the number drawn is between two tokens.

    Products of other sizes round differently in the last bits, and what follows such a token is another reply.
    """
    (ids, reply), (_, other) = next((g, e) for g, e in zip(got, expected, strict=True) if g[1] != e[1])
    place = next(i for i in range(len(reply)) if reply[i] != other[i])
    low, high = sorted((reply[place], other[place]))
    logprobs = distribution(model, ids, reply[: place + 1], sampling.temperature or 1.0)[place].double()
    if sampling.temperature == 0:
        return bool((logprobs[low] - logprobs[high]).abs() < 1e-4)
    assert sampling.seed is not None
    position = torch.tensor([len(ids) + place])
    drawn = uniforms(torch.tensor([signed_64(sampling.seed)]), position).item()
    cumulative = logprobs.exp().cumsum(0)
    if sampling.top_p < 1:
        kept = top_p_filter(logprobs.unsqueeze(0), torch.tensor([sampling.top_p]))
        cumulative = kept[0].exp().cumsum(0)
    return abs(cumulative[low].item() - drawn) < 1e-4 and (cumulative[high - 1] - cumulative[low]).item() < 1e-4


@pytest.mark.parametrize("kind", CONFIGS)
async def test_greedy_equals_transformers_and_logprobs_a_plain_forward(kind: str) -> None:
    model = make_model(kind)
    engine = make_engine(model)
    prompts = [prompt(n) for n in (1, 2, 7, 63, 64, 65, 300)]
    done = await asyncio.gather(
        *(engine.generate(p, Sampling(24, temperature=0), str(i)) for i, p in enumerate(prompts))
    )
    assert len({tuple(c.token_ids) for c in done}) > 3, "the model is too dull to test with"
    for ids, completion in zip(prompts, done, strict=True):
        assert completion.token_ids == greedy(model, ids, 24)
        assert completion.finish == "length"
        assert gaps(model, ids, completion).max() < 1e-4


@pytest.mark.parametrize("kind", CONFIGS)
async def test_turns_keep_keys_and_agree_with_a_plain_forward(kind: str) -> None:
    model = make_model(kind)
    engine = make_engine(model, max_sessions=64)

    async def episode(name: str, seed: int) -> None:
        temperature = random.Random(seed).choice([1.0, 0.7])
        ids = prompt(20 + 7 * seed, seed)
        for turn in range(4):
            sampling = Sampling(5 + 9 * (seed % 3), temperature=temperature, seed=100 * seed + turn)
            completion = await engine.generate(ids, sampling, name)
            assert gaps(model, ids, completion, temperature).max() < 1e-4
            ids = ids + completion.token_ids + prompt(5 + seed, turn)

    await asyncio.gather(*(episode(f"e{i}", i) for i in range(40)))
    stats = engine.stats()
    assert stats["prompt_tokens_reused"] > 2 * stats["prompt_tokens_computed"]
    # One session recomputed whole gives what its kept keys gave.
    ids = prompt(200)
    first = await engine.generate(ids, Sampling(8, seed=1), "kept")
    longer = ids + first.token_ids + prompt(30, 1)
    kept = await engine.generate(longer, Sampling(8, seed=2), "kept")
    fresh = await engine.generate(longer, Sampling(8, seed=2), "fresh")
    assert kept.token_ids == fresh.token_ids
    assert kept.logprobs == pytest.approx(fresh.logprobs, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama-gqa-tied", "qwen2", "qwen3", "qwen2-wide"])
async def test_half_precision_is_close_to_a_plain_forward(kind: str, dtype: torch.dtype) -> None:
    model = make_model(kind, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name or "lm_head" in name:
                parameter.mul_(0.3)  # so small a share of the stream that rounding hardly grows from layer to layer
    engine = make_engine(model, max_sessions=64)
    prompts = [prompt(30 + 11 * i, i) for i in range(48)]
    done = await asyncio.gather(*(engine.generate(p, Sampling(32, seed=i), str(i)) for i, p in enumerate(prompts)))
    delta = torch.cat([gaps(model, ids, completion) for ids, completion in zip(prompts, done, strict=True)])
    assert delta.mean() < 0.01, delta.mean()


async def test_float16_does_not_overflow_where_the_model_does_not() -> None:
    model = near_the_largest_float16(make_model("llama"))
    ids = prompt(6)
    with torch.no_grad():
        assert model(torch.tensor([ids]).cuda()).logits.isfinite().all()
    assert 9 * model.model.embed_tokens.weight[ids].abs().max().float() > 65_504
    completion = await make_engine(model).generate(ids, Sampling(4, temperature=0), "a")
    assert completion.token_ids == greedy(model, ids, 4)


@pytest.mark.parametrize("kind", ["llama-gqa-tied", "qwen3", "qwen2-wide"])
@pytest.mark.parametrize("schedule", range(2))
async def test_fuzzed_schedules_give_the_same_tokens_as_one_by_one(kind: str, schedule: int) -> None:
    model = make_model(kind)
    rng = random.Random(schedule)
    jobs = []
    for index in range(40):
        sampling = Sampling(
            max_new_tokens=rng.randint(1, 40),
            temperature=rng.choice([0, 0.7, 1.0, 1.3]),
            top_p=rng.choice([1.0, 1.0, 0.8]),
            stop_token_ids=tuple(rng.sample(range(VOCABULARY), rng.choice([0, 3, 8, 400]))),
            seed=rng.randint(-(2**70), 2**70),
        )
        jobs.append((f"s{index}", rng.randint(1, 4), index, sampling))
    alone = make_engine(model, max_sessions=1)
    expected = [await play(alone, *job) for job in jobs]
    together = make_engine(model, max_sessions=rng.choice([3, 12, 64]))

    async def late(job: tuple[str, int, int, Sampling], wait_s: float) -> list[Turn]:
        await asyncio.sleep(wait_s)
        return await play(together, *job)

    got = await asyncio.gather(*(late(job, rng.random() * 0.2) for job in jobs))
    different = [(job[3], g, e) for job, g, e in zip(jobs, got, expected, strict=True) if g != e]
    assert all(is_tie(model, *case) for case in different)
    assert len(different) <= 2
    assert together.stats()["sessions"] == 0


async def test_draws_equal_those_of_the_same_model_on_cpu() -> None:
    model = make_model("qwen3")
    jobs = [(prompt(10 + i, i), Sampling(12, temperature=1.2, top_p=0.7 if i % 2 else 1.0, seed=i)) for i in range(12)]
    on_cpu, on_gpu = NativeEngine(copy.deepcopy(model).cpu()), make_engine(model)
    for ids, sampling in jobs:
        expected = await on_cpu.generate(ids, sampling, "a")
        got = await on_gpu.generate(ids, sampling, "a")
        assert got.token_ids == expected.token_ids
        assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-3)


async def test_sampled_frequencies_follow_the_distribution() -> None:
    model = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(0.2)
    engine = make_engine(model, max_sessions=512)
    ids, draws = prompt(10), 8192
    done = await asyncio.gather(*(engine.generate(ids, Sampling(1, seed=i), f"s{i}") for i in range(draws)))
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in done]), minlength=VOCABULARY)
    expected = distribution(model, ids, [0])[0].exp() * draws
    # Single tokens where they are likely, and the whole vocabulary in 50 parts.
    likely = expected > 20
    assert ((counts - expected).abs()[likely] < 5 * expected[likely].sqrt()).all()
    parts, expected_parts = counts[:5000].view(50, 100).sum(1), expected[:5000].view(50, 100).sum(1)
    assert ((parts - expected_parts).abs() < 5 * expected_parts.sqrt() + 1).all()


async def test_weights_changed_in_place_are_used_after_an_update() -> None:
    model = make_model("qwen2", torch.float32)
    engine = make_engine(model)
    ids = prompt(50)
    await engine.generate(ids, Sampling(4, temperature=0), "a")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(2):
        model.train()
        model(torch.tensor([ids], device="cuda"), labels=torch.tensor([ids], device="cuda")).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        await engine.update_weights(None, 1)
        completion = await engine.generate(ids, Sampling(12, temperature=0), "a")
        assert completion.token_ids == greedy(model, ids, 12)
        assert gaps(model, ids, completion).max() < 1e-4


async def test_an_update_in_the_middle_of_a_reply() -> None:
    """The reply continues with the new weights, and each log-probability is that of the weights that sampled it."""
    model = make_model("llama")
    before = copy.deepcopy(model)
    engine = make_engine(model)
    ids = prompt(20)
    await engine.generate(ids, Sampling(2), "warm")
    task = asyncio.create_task(engine.generate(ids, Sampling(1200, seed=1), "a"))
    await until(engine, 40)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
        model.model.layers[0].self_attn.k_proj.weight.mul_(0.5)
    await engine.update_weights(None, 7)
    completion = await task
    assert completion.version == 0
    index = torch.tensor(completion.token_ids).unsqueeze(1)
    old, new = (distribution(m, ids, completion.token_ids).gather(1, index).squeeze(1) for m in (before, model))
    got = torch.tensor(completion.logprobs)
    is_old, is_new = (got - old).abs() < 1e-3, (got - new).abs() < 1e-3
    change = next(i for i in range(len(got)) if not is_old[i])
    assert 0 < change < len(got)
    assert is_new[change:].all()


async def test_parameters_stay_themselves(tmp_path: Path) -> None:
    """Joint matrices are views' storage, not copies: saving, loading and copying work as before."""
    model = make_model("qwen2", torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    torch.cuda.synchronize()
    engine = make_engine(model, max_sessions=4)
    ids = prompt(30)
    first = await engine.generate(ids, Sampling(6, temperature=0), "a")
    layer = model.model.layers[1]
    q, k = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(torch.equal(before[name].cpu(), value) for name, value in again.state_dict().items())
    other = {name: value * 0.5 for name, value in before.items()}
    await engine.update_weights(other, 1)
    assert all(torch.equal(other[name], value) for name, value in model.state_dict().items())
    model.load_state_dict(before)
    await engine.update_weights(None, 2)
    assert (await engine.generate(ids, Sampling(6, temperature=0), "b")).token_ids == first.token_ids
    # Parameters that were moved elsewhere are noticed.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() * 0.5
    await engine.update_weights(None, 3)
    moved = await engine.generate(ids, Sampling(6, temperature=0), "c")
    assert gaps(model, ids, moved).mean() < 0.05
    assert moved.logprobs != first.logprobs


async def test_stops_limits_and_strings() -> None:
    model = make_model("llama")
    engine = make_engine(model, decode=lambda ids: "".join(f"<{i}>" for i in ids), max_context=400)
    ids = prompt(25)
    plain = (await engine.generate(ids, Sampling(50, seed=5), "a")).token_ids
    first = next(i for i, token in enumerate(plain) if i >= 13 and token not in plain[:i])
    by_token = await engine.generate(ids, Sampling(50, seed=5, stop_token_ids=(plain[first],)), "b")
    assert (by_token.token_ids, by_token.finish) == (plain[: first + 1], "stop")
    many = tuple(t for t in range(VOCABULARY) if t not in plain)[:20]
    by_many = await engine.generate(ids, Sampling(50, seed=5, stop_token_ids=(*many, plain[first])), "b2")
    assert (by_many.token_ids, by_many.finish) == (plain[: first + 1], "stop")
    stop = f"{plain[first - 1]}><{plain[first]}"
    by_text = await engine.generate(ids, Sampling(50, seed=5, stop=("never", stop)), "c")
    assert (by_text.token_ids, by_text.finish) == (plain[: first + 1], "stop")
    # A new turn after a reply that was cut on the host: the device had gone further.
    turn = ids + by_text.token_ids + prompt(9)
    assert gaps(model, turn, await engine.generate(turn, Sampling(9, seed=1), "c")).max() < 1e-4
    full = await engine.generate(prompt(390), Sampling(50, seed=0), "d")
    assert (len(full.token_ids), full.finish) == (10, "length")


async def test_identical_prompts_are_computed_once() -> None:
    model = make_model("qwen2")
    engine = make_engine(model)
    ids = prompt(333)
    done = await asyncio.gather(*(engine.generate(ids, Sampling(8, seed=i), str(i)) for i in range(9)))
    assert len({tuple(c.token_ids) for c in done}) == 9
    assert all(gaps(model, ids, completion).max() < 1e-4 for completion in done)
    stats = engine.stats()
    assert (stats["prompt_tokens_computed"], stats["prompt_tokens_shared"]) == (332 + 9, 8 * 332)


def test_a_prefill_beside_a_launch_does_not_overtake_one_that_waits_for_it() -> None:
    """Passes share memory: two at once would mix up their tokens."""
    from agentgym_rl.agent.engines.native.cuda.captured_runner import CapturedRunner

    runner = CapturedRunner(make_model("llama"), max_slots=4, max_length=512)
    runner.refresh()
    runner.reserve(400)
    ids = [prompt(100, slot) for slot in range(3)]
    runner.prefill([Row(0, ids[0], 0)])

    def filled(*beside: bool) -> torch.Tensor:
        for slot in (1, 2):
            runner.clear(slot)
        runner.arrange([], [DecodeRow(0, ids[0][-1], 99, 200, 1, 1.0, 1.0, ())])
        launch = runner.launch(100)
        for slot, each in zip((1, 2), beside, strict=True):
            runner.prefill([Row(slot, ids[slot], 0)], beside=each)
        launch.wait()
        torch.cuda.synchronize()
        return torch.stack([keys[1:3, :, :99] for keys in runner.cache.keys])

    expected = filled(False, False)
    assert (expected != 0).all(), "every position was computed"
    for _ in range(5):
        assert torch.equal(filled(False, True), expected)
        assert torch.equal(filled(True, True), expected)


async def test_a_cache_that_grows_keeps_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentgym_rl.agent.engines.native.cuda.captured_runner.WHOLE_CACHE_SHARE", 0.0)
    model = make_model("llama-gqa-tied")
    engine = make_engine(model, max_sessions=24)
    prompts = [prompt(40 + i, i) for i in range(24)]
    runner: Any = engine._runner
    captures = 0
    for grown in (0, 300, 700):
        prompts = [ids + prompt(grown, i) for i, ids in enumerate(prompts)]
        done = await asyncio.gather(*(engine.generate(p, Sampling(6, seed=0), str(i)) for i, p in enumerate(prompts)))
        for ids, completion in zip(prompts, done, strict=True):
            assert gaps(model, ids, completion).max() < 1e-4
        assert runner.captures > captures, "steps are captured anew for the longer cache"
        captures = runner.captures
        prompts = [ids + completion.token_ids for ids, completion in zip(prompts, done, strict=True)]
    assert engine.stats()["prompt_tokens_reused"] > 24 * (40 + 340)


async def test_a_cache_that_cannot_grow_leaves_the_engine_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentgym_rl.agent.engines.native.cuda.captured_runner.WHOLE_CACHE_SHARE", 0.0)
    model = make_model("llama-gqa-tied")
    engine = make_engine(model, max_sessions=2)
    runner: Any = engine._runner
    first = await engine.generate(prompt(8), Sampling(3, seed=1), "a")
    monkeypatch.setattr(runner.cache, "_zeros", without_memory_once(runner.cache))
    with pytest.warns(UserWarning, match=r"ran out of memory .* 1 sequences run at once"):
        await engine.generate(prompt(200), Sampling(3, seed=1), "b")
    again = prompt(8) + first.token_ids + prompt(4, 2)
    for ids, name in ((again, "a"), (prompt(80), "c"), (prompt(200), "b")):
        completion = await engine.generate(ids, Sampling(3, seed=1), name)
        assert gaps(model, ids, completion).max() < 1e-4


async def test_an_engine_that_slept_starts_with_a_small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentgym_rl.agent.engines.native.cuda.captured_runner.WHOLE_CACHE_SHARE", 0.0)
    model = make_model("llama-gqa-tied")
    engine = make_engine(model, max_sessions=2)
    runner: Any = engine._runner
    positions = []
    state = runner._state  # made for every captured step, just before it is run
    monkeypatch.setattr(
        runner, "_state", lambda bucket: (positions.append(int(runner._inputs[1].max())), state(bucket))[1]
    )
    for length in (900, 8):
        completion = await engine.generate(prompt(length), Sampling(3, seed=1), str(length))
        assert gaps(model, prompt(length), completion).max() < 1e-4
        await engine.sleep()
    assert positions == [0, 0], "capturing runs a step, which must not look beyond the new cache"


async def test_any_other_decoder_runs_through_its_own_forward_and_says_so() -> None:
    shape = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 256, "initializer_range": 0.2}
    config = GPT2Config(**shape, vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(config).cuda().eval()
    with pytest.warns(UserWarning, match="GPT2LMHeadModel"):
        engine = NativeEngine(model, max_sessions=8, max_context=256)
    prompts = [prompt(n) for n in (1, 30, 31)]
    done = await asyncio.gather(
        *(engine.generate(p, Sampling(8, temperature=0), str(i)) for i, p in enumerate(prompts))
    )
    for ids, completion in zip(prompts, done, strict=True):
        assert completion.token_ids == greedy(model, ids, 8)
        assert gaps(model, ids, completion).max() < 1e-4


async def test_long_prompts_over_several_passes() -> None:
    model = make_model("llama-gqa-tied")
    engine = make_engine(model, max_sessions=24)
    prompts = [prompt(1200 + i, i) for i in range(24)]
    done = await asyncio.gather(*(engine.generate(p, Sampling(6, seed=0), str(i)) for i, p in enumerate(prompts)))
    for ids, completion in zip(prompts, done, strict=True):
        assert gaps(model, ids, completion).max() < 1e-4


async def test_failures_name_themselves_and_leave_the_engine_usable() -> None:
    model = make_model("llama")
    engine = make_engine(model, max_sessions=8)
    ids = prompt(10)
    healthy = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="not finite"):
        await engine.generate(ids, Sampling(3), "a")
    with torch.no_grad():
        model.lm_head.weight.copy_(healthy)
    doomed = asyncio.create_task(engine.generate(ids, Sampling(1000, seed=1), "doomed"))
    other = asyncio.create_task(engine.generate(prompt(11), Sampling(60, temperature=0), "other"))
    await until(engine, engine.stats()["new_tokens"] + 20)
    doomed.cancel()
    assert (await other).token_ids == greedy(model, prompt(11), 60)
    with pytest.raises(asyncio.CancelledError):
        await doomed
    under_way = asyncio.create_task(engine.generate(ids, Sampling(1000, seed=1), "a"))
    await asyncio.sleep(0.05)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await under_way


ALL_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def add_adapters(model: Any, rank: int, targets: tuple[str, ...] = ALL_PROJECTIONS, name: str = "default") -> Any:
    """Add adapters that change every output, in float32 as the learner's. peft's own start with B = 0."""
    peft = pytest.importorskip("peft")
    model.add_adapter(peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=list(targets)), name)
    with torch.no_grad(), torch.random.fork_rng(devices=[0]):
        torch.manual_seed(rank)
        for key, parameter in model.named_parameters():
            if f".{name}." in key:
                parameter.data = torch.randn_like(parameter, dtype=torch.float32) * 0.3 * parameter.shape[1] ** -0.5
    return model.eval()


async def replies(engine: NativeEngine, prompts: list[list[int]], num_new: int) -> list[Completion]:
    return await asyncio.gather(
        *(engine.generate(ids, Sampling(num_new, seed=i), f"{num_new}/{i}") for i, ids in enumerate(prompts))
    )


@pytest.mark.parametrize("targets", [ALL_PROJECTIONS, ("q_proj", "v_proj")], ids=["all", "query and value"])
@pytest.mark.parametrize("rank", [4, 16, 64, 128])
@pytest.mark.parametrize("kind", ["llama-gqa-tied", "qwen3", "llama-wide", "qwen3-wide"])
async def test_adapters_are_captured_and_agree_with_peft(kind: str, rank: int, targets: tuple[str, ...]) -> None:
    model = add_adapters(make_model(kind), rank, targets)
    engine = make_engine(model, max_sessions=80)
    for prompts in ([prompt(40)], [prompt(1 + 5 * i, i) for i in range(70)]):
        for turn in range(2):
            done = await replies(engine, prompts, 9)
            assert max(gaps(model, i, c).max() for i, c in zip(prompts, done, strict=True)) < 1e-4
            prompts = [i + c.token_ids + prompt(6, turn) for i, c in zip(prompts, done, strict=True)]
    runner: Any = engine._runner
    assert runner.captures >= 2


@pytest.mark.parametrize("kind", ["llama-gqa-tied", "qwen3", "qwen2-wide"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
async def test_adapters_in_half_precision_are_as_close_as_the_model_without(kind: str, dtype: torch.dtype) -> None:
    model = make_model(kind, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name or "lm_head" in name:
                parameter.mul_(0.3)  # as in the test without adapters
    add_adapters(model, 16)
    prompts = [prompt(30 + 11 * i, i) for i in range(48)]
    engine = make_engine(model, max_sessions=64)

    def mean_gap(completions: list[Completion]) -> float:
        return float(torch.cat([gaps(model, i, c) for i, c in zip(prompts, completions, strict=True)]).mean())

    adapted = await replies(engine, prompts, 32)
    with_adapters = mean_gap(adapted)
    model.disable_adapters()
    await engine.update_weights(None, 1)
    without = mean_gap(await replies(engine, prompts, 32))
    assert with_adapters < 2 * without + 1e-3, (with_adapters, without)
    assert mean_gap(adapted) > 5 * with_adapters, "the adapters change too little to be tested"


@pytest.mark.parametrize("kind", ["llama-gqa-tied", "qwen2-wide"])
async def test_adapters_that_were_updated_need_no_new_capture(kind: str) -> None:
    model = add_adapters(make_model(kind), 16)
    engine = make_engine(model)
    runner: Any = engine._runner
    ids = prompt(50)
    await engine.generate(ids, Sampling(12, temperature=0), "a")
    captures = runner.captures
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
    for version in range(1, 3):
        before = await engine.generate(ids, Sampling(12, temperature=0), "b")
        model.train()
        model(torch.tensor([ids], device="cuda"), labels=torch.tensor([ids], device="cuda")).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        assert gaps(model, ids, before).max() > 1e-2
        await engine.update_weights(None, version)
        completion = await engine.generate(ids, Sampling(12, temperature=0), "a")
        assert completion.token_ids == greedy(model, ids, 12)
        assert gaps(model, ids, completion).max() < 1e-4
    assert runner.captures == captures


@pytest.mark.parametrize("kind", ["llama-gqa-tied", "qwen2-wide"])
async def test_adapters_that_are_switched_need_no_new_capture(kind: str) -> None:
    model = add_adapters(make_model(kind), 8)
    add_adapters(model, 16, ("q_proj", "o_proj", "up_proj"), "other")
    engine = make_engine(model)
    runner: Any = engine._runner
    ids, found, captures = prompt(50), [], 0
    for version, names in enumerate((["default"], ["other"], [], ["default"], ["default", "other"]), 1):
        if names:
            model.enable_adapters()
            model.set_adapter(names)
        else:
            model.disable_adapters()
        await engine.update_weights(None, version)
        found.append(await engine.generate(ids, Sampling(12, seed=1), "a"))
        assert gaps(model, ids, found[-1]).max() < 1e-4, names
        captures = captures or runner.captures
        assert runner.captures == captures or len(names) == 2
    assert len({tuple(completion.logprobs) for completion in found[:3]}) == 3


@pytest.mark.parametrize("kind", ["llama-gqa-tied", "qwen2-wide"])
async def test_roles_share_frozen_weights_and_play_at_once(kind: str) -> None:
    from agentgym_rl.training.lora import copy_with_own_adapters

    base = add_adapters(make_model(kind), 16)
    models = [base, *(copy_with_own_adapters(base) for _ in range(2))]
    with torch.no_grad():
        for seed, model in enumerate(models):
            torch.manual_seed(seed)
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.3 * parameter.shape[1] ** -0.5)
    torch.cuda.synchronize()
    engines = [make_engine(model, max_sessions=8) for model in models]

    async def play_role(engine: NativeEngine, model: Any, seed: int) -> float:
        ids, largest = prompt(20, seed), 0.0
        for turn in range(6):
            completion = await engine.generate(ids, Sampling(30, seed=turn), str(seed))
            largest = max(largest, float(gaps(model, ids, completion).max()))
            ids = ids + completion.token_ids + prompt(5, turn)
        return largest

    pairs = list(zip(engines, models, strict=True))
    found = await asyncio.gather(*(play_role(*pair, seed) for pair in pairs for seed in range(4)))
    assert max(found) < 1e-4, found
    weights = {model.model.layers[1].mlp.down_proj.base_layer.weight.data_ptr() for model in models}
    assert len(weights) == 1


async def test_adapters_around_a_model_are_captured() -> None:
    peft = pytest.importorskip("peft")
    model = make_model("llama-gqa-tied")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.05)
    wrapped.eval()
    ids = prompt(40)
    completion = await make_engine(wrapped).generate(ids, Sampling(12, temperature=0), "a")
    assert completion.token_ids == greedy(wrapped, ids, 12)
    assert gaps(wrapped, ids, completion).max() < 1e-4


async def test_other_adapters_run_module_by_module_and_say_so() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True)
    wrapped = peft.get_peft_model(make_model("llama-gqa-tied"), settings)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.normal_(0, 0.05)
    with pytest.warns(UserWarning, match=r"DoRA.*module by module"):
        engine = NativeEngine(wrapped)
    wrapped.eval()
    ids = prompt(40)
    completion = await engine.generate(ids, Sampling(12, temperature=0), "a")
    assert completion.token_ids == greedy(wrapped, ids, 12)
    assert gaps(wrapped, ids, completion).max() < 1e-4
