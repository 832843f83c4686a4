"""The native engine against transformers itself, on tiny random models in float32."""

from __future__ import annotations

import asyncio
import copy
import math
import random
import warnings
from typing import Any

import pytest
import torch
from kernels_for_tests import VOCABULARY, LimitedMemory, play, prompt, without_memory_once
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.agent.engines.native.decoder import why_unsupported
from agentgym_rl.agent.engines.native.generic import GenericRunner
from agentgym_rl.agent.engines.native.grouping import GROUP_TOKENS, group_rows
from agentgym_rl.agent.engines.native.recompute import RecomputeRunner
from agentgym_rl.agent.engines.native.runner import Row
from agentgym_rl.agent.engines.native.sampling import sample, uniforms
from agentgym_rl.errors import EngineError
from agentgym_rl.types import Completion, Sampling

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # wide enough that replies depend on the whole prompt
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def make_model(kind: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        match kind:
            case "llama":
                model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=4))
            case "llama-gqa-tied":
                config = LlamaConfig(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True, attention_bias=True)
                model = LlamaForCausalLM(config)
            case "llama-rope-scaled":
                model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=1, rope_parameters=LLAMA3_ROPE))
            case "qwen2":
                model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_key_value_heads=2))
            case "qwen3":
                model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16))
            case _:
                raise ValueError(kind)
        # Biases and norm weights start at 0 and 1, which would hide a forward pass that leaves them out.
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


FAST = ["llama", "llama-gqa-tied", "llama-rope-scaled", "qwen2", "qwen3"]


def greedy(model: Any, ids: list[int], num_new: int) -> list[int]:
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=num_new,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(ids) :].tolist()


def full_logprobs(model: Any, ids: list[int], reply: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[len(reply), V] from one forward pass over everything, as a learner does it."""
    with torch.no_grad():
        logits = model(torch.tensor([ids + reply])).logits[0, len(ids) - 1 : -1]
    return torch.log_softmax(logits.float() / temperature, -1)


def assert_logprobs(model: Any, ids: list[int], completion: Completion, temperature: float = 1.0) -> None:
    expected = full_logprobs(model, ids, completion.token_ids, temperature)
    expected = expected.gather(1, torch.tensor(completion.token_ids).unsqueeze(1)).squeeze(1)
    assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)


async def until(engine: NativeEngine, counter: str, least: int) -> None:
    for _ in range(10_000):
        if engine.stats()[counter] >= least:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"{counter} never reached {least}: {engine.stats()}")


@pytest.mark.parametrize("kind", FAST)
async def test_greedy_equals_transformers(kind: str) -> None:
    model = make_model(kind)
    assert why_unsupported(model) is None
    engine = NativeEngine(model)
    prompts = [prompt(n) for n in (1, 2, 7, 30, 31, 90)]
    sampling = Sampling(max_new_tokens=12, temperature=0)
    done = await asyncio.gather(*(engine.generate(p, sampling, str(i)) for i, p in enumerate(prompts)))
    assert len({tuple(c.token_ids) for c in done}) > 3, "the model is too dull to test with"
    for ids, completion in zip(prompts, done, strict=True):
        assert completion.token_ids == greedy(model, ids, 12)
        assert completion.finish == "length"
        assert_logprobs(model, ids, completion)


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_of_many_turns_equal_a_full_forward(kind: str, temperature: float) -> None:
    model = make_model(kind)
    engine = NativeEngine(model)

    async def episode(name: str, seed: int) -> None:
        ids = prompt(20 + seed, seed)
        for turn in range(4):
            completion = await engine.generate(ids, Sampling(6, temperature=temperature, seed=seed + turn), name)
            assert_logprobs(model, ids, completion, temperature)
            ids = ids + completion.token_ids + prompt(5 + seed, turn)

    await asyncio.gather(*(episode(f"e{i}", i) for i in range(6)))


async def test_a_new_turn_computes_only_new_tokens() -> None:
    model = make_model("qwen3")
    engine = NativeEngine(model)
    first = prompt(40)
    reply = await engine.generate(first, Sampling(5, seed=1), "a")
    stats = engine.stats()
    assert (stats["prompt_tokens_computed"], stats["prompt_tokens_reused"], stats["new_tokens"]) == (40, 0, 5)
    engine.reset_stats()
    second = first + reply.token_ids + prompt(10, 3)
    again = await engine.generate(second, Sampling(5, seed=2), "a")
    stats = engine.stats()
    # The last token of a reply was sampled but never computed: 10 of the observation and that one.
    assert (stats["prompt_tokens_computed"], stats["prompt_tokens_reused"]) == (11, 44)
    fresh = await NativeEngine(model).generate(second, Sampling(5, seed=2), "b")
    assert again.token_ids == fresh.token_ids
    assert again.logprobs == pytest.approx(fresh.logprobs, abs=1e-4)


async def test_divergent_shorter_and_repeated_prompts_are_computed_correctly() -> None:
    model = make_model("llama-gqa-tied")
    engine = NativeEngine(model)
    base = prompt(30)
    sampling = Sampling(6, temperature=0)
    for ids in (base, base[:17] + prompt(20, 5), base[:9], base[:9], base, prompt(12, 8)):
        completion = await engine.generate(ids, sampling, "s")
        assert completion.token_ids == greedy(model, ids, 6)
        assert_logprobs(model, ids, completion)
    assert engine.stats()["prompt_tokens_reused"] == 17 + 9 - 1 + 8 + 9


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("schedule", range(4))
async def test_fuzzed_schedules_give_the_same_tokens_as_one_by_one(kind: str, schedule: int) -> None:
    model = make_model(kind)
    rng = random.Random(schedule)
    jobs = []
    for index in range(30):
        sampling = Sampling(
            max_new_tokens=rng.randint(1, 9),
            temperature=rng.choice([0, 0.7, 1.0, 1.3]),
            top_p=rng.choice([1.0, 1.0, 0.8]),
            stop_token_ids=tuple(rng.sample(range(VOCABULARY), rng.randint(0, 8))),
            seed=rng.randint(-(2**70), 2**70),
        )
        jobs.append((f"s{index}", rng.randint(1, 4), index, sampling))
    alone = NativeEngine(model, max_sessions=1)
    expected = [await play(alone, *job) for job in jobs]

    together = NativeEngine(model, max_sessions=rng.choice([3, 12, 64]))

    async def late(job: tuple[str, int, int, Sampling], rounds: int) -> list[list[int]]:
        for _ in range(rounds):
            await asyncio.sleep(0)
        return await play(together, *job)

    got = await asyncio.gather(*(late(job, rng.randint(0, 60)) for job in jobs))
    assert got == expected
    assert together.stats()["steps"] < alone.stats()["steps"] / 2
    assert together.stats()["sessions"] == 0


async def test_top_p_logprobs_are_renormalised() -> None:
    model = make_model("llama")
    engine = NativeEngine(model)
    ids = prompt(20)
    dropped_some = False
    for seed in range(10):
        completion = await engine.generate(ids, Sampling(6, temperature=1.2, top_p=0.7, seed=seed), f"s{seed}")
        rows = full_logprobs(model, ids, completion.token_ids, 1.2).exp()
        for row, token, logprob in zip(rows, completion.token_ids, completion.logprobs, strict=True):
            kept: list[int] = []
            for candidate in row.argsort(descending=True).tolist():
                kept.append(candidate)
                if row[kept].sum() >= 0.7:
                    break
            assert token in kept
            assert logprob == pytest.approx((row[token] / row[kept].sum()).log().item(), abs=1e-4)
            dropped_some |= len(kept) < VOCABULARY
    assert dropped_some


async def test_sampled_frequencies_follow_the_distribution() -> None:
    model = make_model("llama")
    engine = NativeEngine(model)
    ids = prompt(10)
    draws = 4000
    done = await asyncio.gather(*(engine.generate(ids, Sampling(1, seed=i), f"s{i}") for i in range(draws)))
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in done]), minlength=VOCABULARY)
    expected = full_logprobs(model, ids, [0])[0].exp() * draws
    likely = expected > 20
    assert likely.sum() > 3
    assert ((counts - expected).abs()[likely] < 5 * expected[likely].sqrt()).all()
    assert engine.stats()["prompt_tokens_shared"] > 0.9 * draws * 10 * (255 / 256)


def test_uniforms_are_uniform_and_independent_of_neighbours() -> None:
    seeds, positions = torch.arange(300).repeat_interleave(300), torch.arange(300).repeat(300)
    grid = uniforms(seeds, positions).view(300, 300)
    assert grid.min() >= 0
    assert grid.max() < 1
    assert abs(grid.mean() - 0.5) < 0.005
    assert abs(grid.var() - 1 / 12) < 0.002
    centred = grid - 0.5
    for other in (centred.roll(1, 0), centred.roll(1, 1), centred.T):
        off_diagonal = ~torch.eye(300, dtype=torch.bool)
        assert abs((centred * other)[off_diagonal].mean() * 12) < 0.02


async def test_seed_none_differs_by_request_and_leaves_the_global_generator_alone() -> None:
    model = make_model("llama")
    state = torch.random.get_rng_state()
    replies = []
    for _ in range(2):
        engine = NativeEngine(model, seed=3)
        done = await asyncio.gather(*(engine.generate(prompt(8), Sampling(8), str(i)) for i in range(4)))
        replies.append([c.token_ids for c in done])
    assert replies[0] == replies[1]
    assert len({tuple(r) for r in replies[0]}) == 4
    assert torch.equal(state, torch.random.get_rng_state())


async def test_stop_tokens_and_stop_strings() -> None:
    model = make_model("llama")
    engine = NativeEngine(model, decode=lambda ids: "".join(f"<{i}>" for i in ids))
    ids = prompt(25)
    plain = (await engine.generate(ids, Sampling(10, seed=5), "a")).token_ids
    first = next(i for i, token in enumerate(plain) if i >= 3 and token not in plain[:i])
    by_token = await engine.generate(ids, Sampling(10, seed=5, stop_token_ids=(plain[first],)), "b")
    assert (by_token.token_ids, by_token.finish) == (plain[: first + 1], "stop")
    # The string spans two tokens and is complete in the middle of the second.
    stop = f"{plain[first - 1]}><{plain[first]}"
    by_text = await engine.generate(ids, Sampling(10, seed=5, stop=("never", stop)), "c")
    assert (by_text.token_ids, by_text.finish) == (plain[: first + 1], "stop")
    last = await engine.generate(ids, Sampling(first + 1, seed=5, stop_token_ids=(plain[first],)), "d")
    assert last.finish == "stop"
    with pytest.raises(EngineError, match="decode"):
        await NativeEngine(model).generate(ids, Sampling(3, stop=("x",)), "a")


async def test_weight_update_drops_stale_keys() -> None:
    model = make_model("qwen2")
    engine = NativeEngine(model)
    ids = prompt(30)
    first = await engine.generate(ids, Sampling(4, temperature=0), "a")
    assert first.version == 0
    changed = make_model("qwen2")
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), changed.parameters(), strict=True):
            ours.mul_(0.8)
            theirs.mul_(0.8)
    longer = ids + first.token_ids + prompt(3, 1)
    fresh = await NativeEngine(changed).generate(longer, Sampling(6, temperature=0), "b")

    stale = copy.copy(await engine.generate(longer, Sampling(6, temperature=0), "a"))
    assert max(abs(a - b) for a, b in zip(stale.logprobs, fresh.logprobs, strict=True)) > 1e-2, "stale keys went unseen"

    await engine.update_weights(None, 1)
    engine.reset_stats()
    updated = await engine.generate(longer, Sampling(6, temperature=0), "a")
    assert updated.version == engine.version == 1
    assert engine.stats()["prompt_tokens_reused"] == 0
    assert updated.token_ids == fresh.token_ids
    assert updated.logprobs == pytest.approx(fresh.logprobs, abs=1e-4)


async def test_weight_update_in_the_middle_of_a_reply() -> None:
    """The reply continues with the new weights, and each log-probability is that of the weights that sampled it."""
    model = make_model("llama")
    before = copy.deepcopy(model)
    engine = NativeEngine(model)
    ids = prompt(20)
    task = asyncio.create_task(engine.generate(ids, Sampling(12, seed=1), "a"))
    await until(engine, "new_tokens", 5)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
        model.model.layers[0].self_attn.k_proj.weight.mul_(0.5)
    await engine.update_weights(None, 7)
    completion = await task
    assert completion.version == 0
    old = full_logprobs(before, ids, completion.token_ids)
    new = full_logprobs(model, ids, completion.token_ids)
    expected = torch.cat([old[:5], new[5:]]).gather(1, torch.tensor(completion.token_ids).unsqueeze(1)).squeeze(1)
    assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


async def test_state_dict_update_is_in_place_and_all_or_nothing() -> None:
    model, other = make_model("llama-gqa-tied"), make_model("llama-gqa-tied")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.7)
    engine = NativeEngine(model)
    pointers = [p.data_ptr() for p in model.parameters()]
    state = {name: value for name, value in other.state_dict().items() if name != "lm_head.weight"}
    wrong = {**state, "model.norm.weight": torch.ones(5)}
    before = copy.deepcopy(model.state_dict())
    for bad in (wrong, {**state, "extra": torch.ones(1)}, {k: v for k, v in state.items() if "norm" not in k}):
        with pytest.raises(EngineError, match="does not fit"):
            await engine.update_weights(bad, 1)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert engine.version == 0
    await engine.update_weights(state, 1)
    assert [p.data_ptr() for p in model.parameters()] == pointers
    completion = await engine.generate(prompt(12), Sampling(5, temperature=0), "a")
    assert completion.token_ids == greedy(other, prompt(12), 5)


async def test_least_recently_used_sessions_are_evicted_and_recomputed() -> None:
    model = make_model("llama")
    engine = NativeEngine(model, max_sessions=2)
    sampling = Sampling(4, temperature=0)
    for name in ("a", "b", "a", "c"):
        await engine.generate(prompt(15), sampling, name)
    assert engine.stats()["evictions"] == 1
    engine.reset_stats()
    await engine.generate(prompt(15), sampling, "a")
    assert engine.stats()["prompt_tokens_reused"] == 14
    completion = await engine.generate(prompt(15), sampling, "b")
    assert engine.stats()["prompt_tokens_reused"] == 14
    assert completion.token_ids == greedy(model, prompt(15), 4)
    assert engine.stats()["sessions"] == 2


async def test_release_frees_a_busy_session() -> None:
    engine = NativeEngine(make_model("llama"))
    await engine.generate(prompt(5), Sampling(2, seed=0), "a")
    task = asyncio.create_task(engine.generate(prompt(5), Sampling(4, seed=0), "b"))
    await until(engine, "requests", 2)
    for name in ("a", "b", "unknown"):
        await engine.release(name)
    assert len((await task).token_ids) == 4
    assert engine.stats()["sessions"] == 0


async def test_cancellation_frees_the_slot_and_affects_no_other_request() -> None:
    model = make_model("llama")
    engine = NativeEngine(model, max_sessions=2)
    doomed = asyncio.create_task(engine.generate(prompt(9), Sampling(100, seed=1), "doomed"))
    other = asyncio.create_task(engine.generate(prompt(11), Sampling(20, temperature=0), "other"))
    waiting = asyncio.create_task(engine.generate(prompt(13), Sampling(3, temperature=0), "waiting"))
    never = asyncio.create_task(engine.generate(prompt(13), Sampling(3, temperature=0), "never admitted"))
    await until(engine, "steps", 4)
    never.cancel()
    doomed.cancel()
    assert (await other).token_ids == greedy(model, prompt(11), 20)
    assert (await waiting).token_ids == greedy(model, prompt(13), 3)
    for task in (doomed, never):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert engine.stats()["steps"] < 40
    assert engine.stats()["sessions"] == 2
    assert len((await engine.generate(prompt(9), Sampling(5, seed=1), "doomed")).token_ids) == 5


async def test_refusals_say_what_to_do() -> None:
    engine = NativeEngine(make_model("llama"), max_context=32)
    for ids, sampling, words in [
        (prompt(32), Sampling(1), "32 tokens.*max_context is 32.*raise max_context"),
        ([], Sampling(1), "empty"),
        ([VOCABULARY], Sampling(1), "tokenizer and model"),
        ([-1], Sampling(1), "tokenizer and model"),
        ([1], Sampling(0), "max_new_tokens"),
        ([1], Sampling(1, temperature=-1), "temperature"),
        ([1], Sampling(1, top_p=0), "top_p"),
    ]:
        with pytest.raises(EngineError, match=words):
            await engine.generate(ids, sampling, "a")
    first = asyncio.create_task(engine.generate(prompt(4), Sampling(4, seed=0), "a"))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="its own session"):
        await engine.generate(prompt(4), Sampling(4), "a")
    assert len((await first).token_ids) == 4
    cut = await engine.generate(prompt(28), Sampling(50, seed=0), "b")
    assert (len(cut.token_ids), cut.finish) == (4, "length")


async def test_a_failing_step_fails_its_requests_and_leaves_the_engine_usable() -> None:
    model = make_model("llama")
    engine = NativeEngine(model)
    ids = prompt(10)
    healthy = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="not finite"):
        await engine.generate(ids, Sampling(3), "a")
    with torch.no_grad():
        model.lm_head.weight.copy_(healthy)
    whole = model.lm_head
    model.lm_head = torch.nn.Linear(3, 5)
    tasks = [asyncio.create_task(engine.generate(ids, Sampling(3), name)) for name in ("a", "b")]
    for task in tasks:
        with pytest.raises(EngineError, match="A step of the model failed"):
            await task
    model.lm_head = whole
    assert engine.stats()["sessions"] == 0
    assert (await engine.generate(ids, Sampling(3, temperature=0), "a")).token_ids == greedy(model, ids, 3)


async def test_non_finite_keys_do_not_outlive_their_request() -> None:
    model = make_model("llama")
    engine = NativeEngine(model, max_sessions=2)
    healthy = model.model.embed_tokens.weight.detach().clone()
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="not finite"):
        await engine.generate(prompt(40), Sampling(3), "a")
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(healthy)
    # The short one takes the slot; the long one beside it makes attention read past the short one's end.
    prompts = [prompt(3), prompt(30)]
    done = await asyncio.gather(*(engine.generate(ids, Sampling(4, temperature=0), str(len(ids))) for ids in prompts))
    for ids, completion in zip(prompts, done, strict=True):
        assert completion.token_ids == greedy(model, ids, 4)


async def test_identical_prompts_are_computed_once_and_then_diverge() -> None:
    model = make_model("qwen2")
    engine = NativeEngine(model)
    ids = prompt(33)
    done = await asyncio.gather(*(engine.generate(ids, Sampling(8, seed=i), str(i)) for i in range(5)))
    assert len({tuple(c.token_ids) for c in done}) == 5
    for completion in done:
        assert_logprobs(model, ids, completion)
    stats = engine.stats()
    assert (stats["prompt_tokens_computed"], stats["prompt_tokens_shared"], stats["steps"]) == (33, 4 * 33, 8)


def test_groups_hold_every_row_once_and_little_padding() -> None:
    rng = random.Random(0)
    rows = []
    for slot in range(200):
        start = rng.choice([0, rng.randint(1, 300)])
        rows.append(Row(slot, [0] * (start + rng.choice([1, rng.randint(20, 120)])), start))
    groups = group_rows(rows)
    assert sorted(place for group in groups for place in group.indices) == list(range(200))
    assert all(rows[place] is row for group in groups for place, row in zip(group.indices, group.rows, strict=True))
    assert all(group.num_new == 1 or group.num_new * len(group.rows) <= GROUP_TOKENS for group in groups)
    padded = sum(group.num_new * len(group.rows) for group in groups)
    assert padded < 1.2 * sum(len(row.token_ids) - row.start for row in rows)
    assert len(groups) < 20


async def test_a_cache_that_cannot_grow_leaves_the_engine_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    engine = NativeEngine(model, max_sessions=2, max_context=2048)
    runner: Any = engine._runner
    first = await engine.generate(prompt(8), Sampling(3, seed=1), "a")
    monkeypatch.setattr(runner.cache, "_zeros", without_memory_once(runner.cache))
    with pytest.warns(UserWarning, match=r"ran out of memory .* 1 sequences run at once"):
        await engine.generate(prompt(200), Sampling(3, seed=1), "b")
    again = prompt(8) + first.token_ids + prompt(4, 2)
    for ids, name in ((again, "a"), (prompt(80), "c"), (prompt(200), "b")):
        completion = await engine.generate(ids, Sampling(3, seed=1), name)
        assert_logprobs(model, ids, completion)


async def test_a_growing_cache_holds_one_layer_twice_and_not_all_of_it() -> None:
    engine = NativeEngine(make_model("llama"), max_sessions=4)
    cache: Any = engine._runner.cache  # type: ignore[union-attr]
    memory = cache._zeros = LimitedMemory(cache)
    for length in (10, 90, 170, 250):
        await asyncio.gather(*(engine.generate(prompt(length, i), Sampling(2, seed=1), str(i)) for i in range(4)))
        largest = cache.bytes_of(4, cache.spare_position)
        assert memory.peak <= largest * (1 + 1 / len(cache.keys)), length
    assert largest == sum(t.nbytes for t in (*cache.keys, *cache.values))


async def test_long_episodes_are_not_lost_when_memory_runs_out() -> None:
    """Replies that need twice the available memory all finish, with the same result as with enough memory."""
    model = make_model("llama-gqa-tied")
    prompts = [prompt(10 + 45 * (i % 4), i) for i in range(12)]

    async def turns(engine: NativeEngine, index: int) -> list[Completion]:
        first = await engine.generate(prompts[index], Sampling(8, seed=index), str(index))
        ids = prompts[index] + first.token_ids + prompt(30, index)
        return [first, await engine.generate(ids, Sampling(8, seed=index), str(index))]

    plenty = NativeEngine(model, max_sessions=12)
    wanted = await asyncio.gather(*(turns(plenty, i) for i in range(12)))
    engine = NativeEngine(model, max_sessions=12)
    cache: Any = engine._runner.cache  # type: ignore[union-attr]
    memory = cache._zeros = LimitedMemory(cache, cache.bytes_of(5, 256))
    with pytest.warns(UserWarning, match=r"ran out of memory with up to 12 sequences, .* 6 sequences run at once"):
        found = await asyncio.gather(*(turns(engine, i) for i in range(12)))
    assert memory.peak > 0
    for mine, right in zip(found, wanted, strict=True):
        assert [c.token_ids for c in mine] == [c.token_ids for c in right]
    assert engine.stats()["evictions"] > 0
    await engine.sleep()
    assert engine._sessions.max_sessions == 12


async def test_a_sequence_that_does_not_fit_alone_fails_and_the_others_do_not() -> None:
    model = make_model("llama")
    engine = NativeEngine(model, max_sessions=4)
    cache: Any = engine._runner.cache  # type: ignore[union-attr]
    cache._zeros = LimitedMemory(cache, cache.bytes_of(1, 200))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        short = [asyncio.create_task(engine.generate(prompt(30, i), Sampling(4, seed=1), str(i))) for i in range(3)]
        with pytest.raises(EngineError, match="not enough memory for one sequence of 240 tokens: no memory"):
            await engine.generate(prompt(240), Sampling(4, seed=1), "long")
        for i, completion in enumerate(await asyncio.gather(*short)):
            assert_logprobs(model, prompt(30, i), completion)
    assert any("ran out of memory" in str(w.message) for w in caught)
    assert engine._sessions.max_sessions > 1, "several run at once again"


async def test_a_failing_decode_fails_only_its_request() -> None:
    def decode(ids: list[int]) -> str:
        raise KeyError("no such token")

    engine = NativeEngine(make_model("llama"), decode=decode)
    bad = asyncio.create_task(engine.generate(prompt(5), Sampling(3, stop=("x",)), "a"))
    good = asyncio.create_task(engine.generate(prompt(5), Sampling(3), "b"))
    with pytest.raises(EngineError, match="no such token"):
        await bad
    assert len((await good).token_ids) == 3


async def test_close_ends_pending_requests() -> None:
    engine = NativeEngine(make_model("llama"))
    task = asyncio.create_task(engine.generate(prompt(5), Sampling(200), "a"))
    await until(engine, "steps", 2)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await task
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(prompt(5), Sampling(1), "a")
    assert not [t for t in asyncio.all_tasks() if t.get_name() == "native-engine"]


def test_one_engine_over_several_event_loops() -> None:
    engine = NativeEngine(make_model("llama"))
    sampling = Sampling(4, temperature=0)
    first = asyncio.run(engine.generate(prompt(6), sampling, "a"))
    second = asyncio.run(engine.generate(prompt(6), sampling, "a"))
    assert first.token_ids == second.token_ids


async def test_dropout_never_touches_sampling_and_the_training_flag_survives() -> None:
    model = make_model("llama")
    expected = await NativeEngine(model).generate(prompt(9), Sampling(6, temperature=0), "a")
    # An adapter's dropout would sit where a projection is; so does this one.
    layer = model.model.layers[1]
    layer.self_attn.q_proj = torch.nn.Sequential(torch.nn.Dropout(0.5), layer.self_attn.q_proj)
    model.train()
    layer.mlp.eval()
    got = await NativeEngine(model).generate(prompt(9), Sampling(6, temperature=0), "a")
    assert (got.token_ids, got.logprobs) == (expected.token_ids, expected.logprobs)
    assert model.training
    assert layer.self_attn.q_proj[0].training
    assert not layer.mlp.training


def make_other(kind: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        if kind == "gpt2":
            config = GPT2Config(
                vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3, **tokens
            )
            return GPT2LMHeadModel(config)
        if kind == "gemma2":
            return Gemma2ForCausalLM(Gemma2Config(**SHAPE, num_key_value_heads=2, head_dim=8, sliding_window=8))
        if kind == "mistral":
            return MistralForCausalLM(MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=8))
        if kind == "phi":
            return PhiForCausalLM(PhiConfig(**SHAPE, num_key_value_heads=2))
        if kind == "gpt-neox":
            return GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE))
        if kind == "olmo2":
            return Olmo2ForCausalLM(Olmo2Config(**SHAPE, num_key_value_heads=2))
        if kind == "qwen2-sliding":
            window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
            return Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_key_value_heads=2, **window))
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
        return LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2, rope_parameters=rope))


OTHER = ["gpt2", "gemma2", "mistral", "phi", "gpt-neox", "olmo2", "qwen2-sliding"]


@pytest.mark.parametrize("kind", [*OTHER, "llama-dynamic-rope"])
async def test_other_decoders_run_through_their_own_forward_and_say_so(kind: str) -> None:
    model = make_other(kind)
    slow = kind == "llama-dynamic-rope"
    with pytest.warns(UserWarning, match="no fast path.*" + ("recomputes" if slow else "KV cache")):
        engine = NativeEngine(model, max_sessions=3)
    assert isinstance(engine._runner, RecomputeRunner if slow else GenericRunner)
    model.eval()
    prompts = [prompt(n) for n in (1, 6, 25, 40)]
    done = await asyncio.gather(
        *(engine.generate(p, Sampling(8, temperature=0), str(i)) for i, p in enumerate(prompts))
    )
    for ids, completion in zip(prompts, done, strict=True):
        assert completion.token_ids == greedy(model, ids, 8)
        assert_logprobs(model, ids, completion)
    turn = prompts[2] + done[2].token_ids + prompt(5)
    again = await engine.generate(turn, Sampling(6, temperature=0.8, seed=4), "2")
    assert_logprobs(model, turn, again, 0.8)


@pytest.mark.filterwarnings("ignore:The native engine has no fast path")
@pytest.mark.parametrize("kind", ["gemma2", "gpt-neox"])
async def test_a_cache_of_any_decoder_gives_the_same_tokens_as_recomputing(kind: str) -> None:
    """Rows of all lengths, turns, evictions, shared prompts and a cache that grows."""
    model = make_other(kind).eval()
    sampling = Sampling(6, seed=3)
    jobs = [(f"s{i}", 3, i // 2, sampling) for i in range(14)]
    recompute = NativeEngine(model, max_sessions=14, runner=RecomputeRunner(model))
    expected = await asyncio.gather(*(play(recompute, *job) for job in jobs))
    engine = NativeEngine(model, max_sessions=5)
    assert await asyncio.gather(*(play(engine, *job) for job in jobs)) == expected
    assert engine.stats()["prompt_tokens_computed"] < recompute.stats()["prompt_tokens_computed"] / 3


def test_a_decoder_whose_cache_is_not_exact_is_recomputed() -> None:
    class Forgetful(GPT2LMHeadModel):
        """Ignores cached keys, as a model with a state of its own would."""

        def forward(self, *args: Any, past_key_values: Any = None, attention_mask: Any = None, **options: Any) -> Any:
            return super().forward(*args, **options)

    model = Forgetful(make_other("gpt2").config)
    with pytest.warns(UserWarning, match="differs from a full one by.*recomputes"):
        assert isinstance(NativeEngine(model)._runner, RecomputeRunner)


def test_supported_models_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in FAST:
            NativeEngine(make_model(kind))


@pytest.mark.parametrize("top_p", [None, 0.9])
def test_logprobs_are_exact_over_a_large_vocabulary(top_p: float | None) -> None:
    logits = 3 * torch.randn(4, 151_936, generator=torch.Generator().manual_seed(0))
    ones = torch.ones(4)
    tokens, logprobs = sample(
        logits,
        temperature=ones,
        top_p=None if top_p is None else top_p * ones,
        seeds=torch.arange(4),
        positions=torch.zeros(4, dtype=torch.int64),
    )
    exact = logits.double().log_softmax(-1)
    if top_p is not None:
        ordered, _ = exact.exp().sort(-1, descending=True)
        least = ordered.gather(1, (ordered.cumsum(-1) < top_p).sum(-1, keepdim=True))
        exact = exact.masked_fill(exact.exp() < least, float("-inf")).log_softmax(-1)
    found = exact.gather(1, tokens.unsqueeze(1)).squeeze(1)
    assert (logprobs - found).abs().max() < 1e-5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_non_finite_row_has_no_logprob(bad: float, temperature: float) -> None:
    logits = torch.zeros(2, 7)
    logits[1, 3] = bad
    number = torch.arange(2)
    _, logprobs = sample(logits, temperature=torch.full((2,), temperature), top_p=None, seeds=number, positions=number)
    assert logprobs[0].item() == pytest.approx(-math.log(7))
    assert logprobs[1].isnan()
