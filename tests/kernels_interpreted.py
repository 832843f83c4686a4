"""CUDA kernels in Triton's interpreter, against plain torch and transformers.

    TRITON_INTERPRET=1 python tests/kernels_interpreted.py [NAME ...]

tests/unit/test_kernels.py runs them in processes of their own, since Triton decides once whether it compiles.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1 before Triton is imported"

import pytest
import torch
from kernels_for_tests import error, gate_error, near_the_largest_float16, without_memory_once
from shared_prefixes_for_tests import tree_samples, values_and_gradients
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentgym_rl.agent.engines.native import NativeEngine, engine
from agentgym_rl.agent.engines.native.cuda import captured_runner, forward_passes
from agentgym_rl.agent.engines.native.cuda.attention_kernels import prefill_attention, queries_per_block
from agentgym_rl.agent.engines.native.cuda.captured_runner import CapturedRunner
from agentgym_rl.agent.engines.native.cuda.drafts import accept, draft, drafted_picks
from agentgym_rl.agent.engines.native.cuda.packing import as_packed, pack
from agentgym_rl.agent.engines.native.cuda.sample_kernels import Picks, RowState
from agentgym_rl.agent.engines.native.runner import Row
from agentgym_rl.training.device import head, head_kernels, layer_kernels, packed
from agentgym_rl.training.microbatch import micro_batches
from agentgym_rl.types import Completion, Sampling

VOCABULARY = 130
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make(kind: str, **more: Any) -> Any:
    torch.manual_seed(3)
    shape = SHAPE | more
    model: Any
    model = LlamaForCausalLM(LlamaConfig(**shape)) if kind == "llama" else Qwen3ForCausalLM(Qwen3Config(**shape))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def captured(model: Any, slots: int = 4, length: int = 2048) -> NativeEngine:
    steps = CapturedRunner(model, max_slots=slots, max_length=length)
    return NativeEngine(model, max_sessions=slots, max_context=length, runner=steps)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(VOCABULARY), k=length)


def gap(model: Any, ids: list[int], completion: Completion) -> float:
    """Return the largest difference of a log-probability from a plain forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([ids + completion.token_ids])).logits[0, len(ids) - 1 : -1]
    wanted = logits.float().log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return float((wanted - torch.tensor(completion.logprobs)).abs().max())


async def two_turns(model: Any) -> None:
    """Compare tokens with the CPU engine, over several rows, two turns and a growing cache."""
    device, host = captured(model), NativeEngine(model, max_sessions=4)

    async def play(index: int) -> None:
        ids = prompt((3, 14, 14)[index], index // 2)
        for turn in range(2):
            sampling = Sampling(2, seed=10 * index + turn, top_p=0.9 if index == 1 else 1.0)
            mine, theirs = [await e.generate(ids, sampling, str(index)) for e in (device, host)]
            assert mine.token_ids == theirs.token_ids, (index, turn)
            assert max(abs(a - b) for a, b in zip(mine.logprobs, theirs.logprobs, strict=True)) < 1e-4
            ids = ids + mine.token_ids + prompt(70, turn)

    await asyncio.gather(*(play(index) for index in range(3)))


async def short_reply() -> None:
    model = make("llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    completion = await captured(model, 1, 64).generate(prompt(3), Sampling(2, seed=1), "a")
    assert gap(model, prompt(3), completion) < 1e-4


async def llama() -> None:
    await two_turns(make("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=32, attention_bias=True))


async def narrow_heads() -> None:
    shape = {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": True}
    await two_turns(make("llama", num_attention_heads=4, num_key_value_heads=4, head_dim=16, **shape))


async def qwen3() -> None:
    await two_turns(make("qwen3", num_attention_heads=2, num_key_value_heads=1, head_dim=64))


async def wide() -> None:
    """Check the path of wide models, whose matrix products come from the library."""
    with patch.multiple(forward_passes, NARROW=0, qkv=None):
        await two_turns(make("qwen3", num_attention_heads=2, num_key_value_heads=2, head_dim=32))


async def out_of_memory() -> None:
    """Check replies with a smaller cache. Capturing runs a step: it must not look at slots that the cache no longer
    has."""
    model = make("llama", num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    device = captured(model, 2)
    steps: Any = device._runner
    seen = []
    state = steps._state
    steps._state = lambda bucket: (
        seen.append((int(steps._inputs[captured_runner.SLOT].max()), steps.cache.max_slots)),
        state(bucket),
    )[1]
    await asyncio.gather(*(device.generate(prompt(8, i), Sampling(2, seed=1), f"a{i}") for i in range(2)))
    assert int(steps._inputs[captured_runner.SLOT].max()) == 1
    steps.cache._zeros = without_memory_once(steps.cache)
    with pytest.warns(UserWarning, match=r"ran out of memory .* 1 sequences run at once"):
        await device.generate(prompt(120), Sampling(2, seed=1), "b")
    for length in (20, 120):
        completion = await device.generate(prompt(length), Sampling(1, seed=1), str(length))
        assert gap(model, prompt(length), completion) < 1e-4
    assert seen[-1][1] == 1
    assert all(slot < slots for slot, slots in seen), seen


async def slept() -> None:
    """Capturing runs a step: it must not look at positions that the cache no longer has."""
    model = make("llama", num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    device = captured(model, 2)
    steps: Any = device._runner
    seen = []
    plain = steps._capture

    def capture(run: Callable[[], None], *where: Any) -> Callable[[], None]:
        seen.append((int(steps._inputs[captured_runner.POSITION].max()), steps._captured.num_positions))
        return plain(run, *where)

    steps._capture = capture
    for length in (150, 8):
        await device.generate(prompt(length), Sampling(1, seed=1), str(length))
        await device.sleep()
    assert len(seen) == 2
    assert all(position < positions for position, positions in seen), seen
    await device.generate(prompt(8), Sampling(1, seed=1), "last")
    assert steps._graphs
    await device.close()
    assert not steps._graphs, "an engine that is closed holds no graphs"


async def bucketed() -> None:
    """Check that batches of similar sizes share one captured step size."""
    device = captured(make("llama", num_attention_heads=2, num_key_value_heads=1, head_dim=32), 5)
    steps: Any = device._runner
    sizes: list[int] = []
    state = steps._state
    steps._state = lambda bucket: (sizes.append(bucket), state(bucket))[1]
    for rows in (3, 4, 5, 3):
        replies = [device.generate(prompt(4, row), Sampling(1, seed=row), str(row)) for row in range(rows)]
        await asyncio.gather(*replies)
    assert sizes == [4, 8], sizes


async def moved_weights() -> None:
    """Check that prompts that arrive during delivery do not start with weights replaced in the meantime."""
    model = make("llama", num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_hidden_layers=1)
    device = captured(model, 8, 128)
    await device.generate(prompt(60), Sampling(1, seed=1), "room")

    async def play(index: int) -> float:
        ids = prompt(10, index)
        completion = await device.generate(ids, Sampling(2, seed=1), str(index))
        if index == 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.data = parameter.data * 0.7
            await device.update_weights(None, 1)
        ids = ids + completion.token_ids + prompt(5, index)
        return gap(model, ids, await device.generate(ids, Sampling(2, seed=2), str(index)))

    with patch.object(engine, "REPLIES_PER_PORTION", 2):
        gaps = await asyncio.gather(*(play(index) for index in range(3)))
    assert max(gaps) < 1e-4, gaps


def expected_drafts(history: list[int], width: int) -> list[int]:
    """Return the tokens after the latest place that ends with as many of the last tokens as possible, up to six."""
    for count in range(6, 0, -1):
        for end in range(len(history) - 1, count - 1, -1):
            if history[end - count : end] == history[-count:]:
                return history[end : end + width - 1]
    return []


async def drafts() -> None:
    for width in (2, 4, 8, 16):
        check_drafts(width)


def check_drafts(width: int) -> None:
    """Check guesses, and how many of them are accepted, against plain Python."""
    rng = random.Random(0)
    lengths = [1, 2, 3, 9, 30, 40, 40, 25]
    histories = [rng.choices(range(30 if row == 3 else 3), k=length) for row, length in enumerate(lengths)]
    histories[4], histories[5] = rng.choices(range(30), k=15) * 2, rng.choices(range(30), k=20) * 2
    rows = len(lengths)
    stored = torch.full((rows, 64), -7, dtype=torch.int32)
    for row, tokens in enumerate(histories):
        stored[row, : len(tokens)] = torch.tensor(tokens)
    column = torch.zeros(rows, dtype=torch.int64)
    state = RowState(
        token=torch.tensor([tokens[-1] for tokens in histories]),
        position=torch.tensor(lengths) - 1,
        slot=torch.arange(rows),
        remaining=torch.tensor([20, 20, 20, 20, 20, 20, 2, 20]),
        seed=column,
        done=torch.tensor([0, 0, 0, 0, 0, 0, 0, 1]),
        temperature=column.double(),
        top_p=column.double(),
        stops=torch.full((8, rows), -1),
    )
    state.stops[0, 4] = 999
    found = draft(state, stored, width)
    guesses: list[list[int]] = []
    for row, tokens in enumerate(histories):
        ids, done = (t.view(rows, width)[row].tolist() for t in (found.token, found.done))
        guesses.append([i for i, is_done in zip(ids[1:], done[1:], strict=True) if not is_done])
        known = expected_drafts(tokens, width)[: int(state.remaining[row]) - 1]
        assert guesses[row] == ([] if state.done[row] else known), (row, tokens, ids, done)
        assert ids[0] == tokens[-1]
    assert sum(map(bool, guesses)) >= 3
    # Row 5 samples all that was guessed, row 4 a stop token, the others only the first guess.
    sampled = drafted_picks(rows * width, stored.device)
    sampled.tokens.fill_(77)
    sampled.logprobs.copy_(torch.arange(rows * width) / -100)
    for row, guess in enumerate(guesses):
        sampled.tokens[0, row * width : row * width + len(guess)] = torch.tensor(guess, dtype=torch.int32)
        if row != 5 and len(guess) > 1:
            sampled.tokens[0, row * width + 1] = 78
    sampled.tokens[0, 4 * width] = 999
    picks = Picks(
        torch.zeros((16, rows), dtype=torch.int32), torch.zeros((16, rows)), torch.zeros(rows, dtype=torch.int32)
    )
    accept(found, sampled, state, picks, stored, width)
    for row, guess in enumerate(guesses):
        all_sampled = sampled.tokens[0, row * width : (row + 1) * width].tolist()
        right = next((i for i, token in enumerate(guess) if token != all_sampled[i]), len(guess))
        wanted = all_sampled[: right + 1] if not (row == 4 or row == 7) else [999] if row == 4 else []
        assert picks.tokens[: picks.counts[row], row].tolist() == wanted, (row, guess, all_sampled)
        assert stored[row, lengths[row] : lengths[row] + len(wanted)].tolist() == wanted
        assert int(state.position[row]) == lengths[row] - 1 + len(wanted)
        assert bool(state.done[row]) == (row in (4, 7) or len(wanted) >= (2 if row == 6 else 20))
    assert int(picks.counts[5]) == 1 + len(guesses[5]) == width


async def guessed_replies() -> None:
    """A greedy model that repeats itself: some guesses come true, and every token is that of the CPU engine."""
    widths = [captured_runner.draft_width(rows) for rows in (1, 16, 32, 48, 64, 96, 128, 192)]
    assert widths == [16, 16, 8, 4, 4, 2, 2, 1]
    model = make("llama", num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_hidden_layers=1)
    device, host = captured(model, 2, 128), NativeEngine(model, max_sessions=2)
    ids = prompt(6) * 3

    async def play(index: int) -> None:
        sampling = Sampling(14, temperature=0) if index else Sampling(9, temperature=0.5, seed=3)
        mine, theirs = [await e.generate(ids, sampling, str(index)) for e in (device, host)]
        assert mine.token_ids == theirs.token_ids
        assert max(abs(a - b) for a, b in zip(mine.logprobs, theirs.logprobs, strict=True)) < 1e-4

    await asyncio.gather(play(0), play(1))


async def float16() -> None:
    model = near_the_largest_float16(make("llama", num_attention_heads=2, num_key_value_heads=1, head_dim=32))
    ids = prompt(12)
    assert 9 * model.model.embed_tokens.weight[ids].abs().max().float() > 65_504
    with patch.object(forward_passes, "_logits", lambda x, weight: x.float() @ weight.float().t()):  # CUDA's has dtypes
        completion = await captured(model, 1, 64).generate(ids, Sampling(3, temperature=0), "a")
    with torch.no_grad():
        for token in completion.token_ids:
            assert int(model(torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids = [*ids, token]


async def layers() -> None:
    """Check norm and gate of the learner, forward and backward."""
    torch.manual_seed(0)
    for rows, size in ((7, 80), (5, 33)):
        x, weight = torch.randn(rows, size, requires_grad=True), torch.randn(size, requires_grad=True)
        residual, gradient = torch.randn(2, rows, size)
        right = F.rms_norm(x, (size,), weight, 1e-5)
        right.backward(gradient)
        actual, scales = layer_kernels.norm(x.detach(), weight.detach(), 1e-5)
        grad_x, grad_weight = layer_kernels.norm_backward(gradient, x.detach(), weight.detach(), scales, residual)
        assert x.grad is not None
        assert weight.grad is not None
        assert max(error(actual, right), error(grad_x, x.grad + residual), error(grad_weight, weight.grad)) < 1e-5
    assert gate_error(9, 1100, "cpu") < 1e-5


def attention_of(query: Any, keys: Any, values: Any, bounds: Any, key_bounds: Any, scale: float) -> torch.Tensor:
    """Return causal attention from the bottom right of each sample, in plain torch."""
    mixed = []
    for i in range(len(bounds) - 1):
        q, seen = query[bounds[i] : bounds[i + 1]], slice(key_bounds[i], key_bounds[i + 1])
        k, v = (x[seen].repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
        scores = torch.einsum("qnd,knd->nqk", q, k) * scale
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
        mixed.append(torch.einsum("nqk,knd->qnd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(mixed)


def flash_forward(
    q: Any, k: Any, v: Any, q_bounds: Any, k_bounds: Any, q_max: int, k_max: int, *rest: Any, scale: float
) -> tuple[Any, ...]:
    """Replace torch's flash kernel, which needs CUDA. It wants a query of every sample."""
    for bounds, longest in ((q_bounds, q_max), (k_bounds, k_max)):
        assert bounds.dtype is torch.int32
        assert 0 < int(bounds.diff().min()) <= int(bounds.diff().max()) == longest
    assert rest == (0.0, True, False)
    return attention_of(q, k, v, q_bounds, k_bounds, scale), q.new_empty(0), q.new_empty(0), q.new_empty(0), None


def flash_backward(
    gradient: Any, q: Any, k: Any, v: Any, mixed: Any, sums: Any, q_bounds: Any, k_bounds: Any, *rest: Any, scale: float
) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(attention_of(*inputs, q_bounds, k_bounds, scale), inputs, gradient)


async def shared_prefixes() -> None:
    """Check fused layers over the unique tokens of samples that share prefixes, against modules over all tokens."""
    samples = tree_samples(groups=1, members=4)
    weights = [1.0] * len(samples)
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("llama", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True}),
        ("qwen3", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}),
    ]
    for kind, shape in kinds:
        model = make(kind, **shape).train()
        expected = values_and_gradients(model, micro_batches(samples, weights, 100), len(samples))
        with (
            patch.object(packed, "HAS_TRITON", True),
            patch.object(packed, "flash_supports", lambda query: True),
            patch.object(packed, "MAX_READ_SHARE", 0.0),
            patch.object(torch.ops.aten, "_flash_attention_forward", flash_forward),
            patch.object(torch.ops.aten, "_flash_attention_backward", flash_backward),
        ):
            batches = micro_batches(samples, weights, 100, share_prefixes=True)
            assert all(micro.shared is not None for micro in batches)
            assert len(batches) > 1
            actual = values_and_gradients(model, batches, len(samples))
        for found, right in zip(actual[0], expected[0], strict=True):
            assert error(torch.tensor(found), torch.tensor(right)) < 1e-5
        for found, right in zip(actual[1], expected[1], strict=True):
            assert error(found, right) < 1e-4


async def logits() -> None:
    """Check the statistics of the head and their gradient."""
    torch.manual_seed(0)
    for size in (100, 5000):
        values, targets = torch.randn(9, size) * 6, torch.randint(size, (9,))
        grad_logprob, grad_entropy = torch.randn(2, 9)
        right = head._statistics(values, targets, 0.7)
        for actual, wanted in zip(head_kernels.statistics(values, targets, 0.7), right, strict=True):
            torch.testing.assert_close(actual, wanted, atol=2e-5, rtol=1e-5)
        for entropy in (None, (grad_entropy, right[2])):
            given = (values, targets, right[0], grad_logprob, entropy, 0.7, torch.float32)
            assert error(head_kernels.gradient(*given), head._gradient(*given)) < 1e-5


async def split_prefill() -> None:
    """Check prefill attention with 1, 2, 4 and 8 parts of the keys: new and continued rows, at and beside the blocks.

    The last row crosses the border of two parts, so its first tokens see no key of the second.
    """
    torch.manual_seed(0)
    num_kv, num_heads, width = 2, 4, 16
    keys, values = torch.randn(2, 6, num_kv, 400, width)
    bounds = ((0, 0, 12), (1, 200, 206), (2, 63, 65), (3, 64, 66), (4, 130, 139), (5, 60, 72))
    rows = [Row(slot, list(range(end)), start) for slot, start, end in bounds]
    (packed_pass,) = pack(rows, 1000, queries_per_block(num_heads // num_kv, keys.dtype))
    tokens, blocks = (torch.tensor(array.tolist()) for array in (packed_pass.tokens, packed_pass.blocks))
    packed = as_packed(tokens, blocks)
    query = torch.randn(tokens.shape[1], num_heads * width)
    right = torch.empty_like(query)
    for i, (slot, position) in enumerate(zip(packed.slots.tolist(), packed.positions.tolist(), strict=True)):
        for head_index in range(num_heads):
            seen = slot, head_index // (num_heads // num_kv), slice(position + 1)
            columns = slice(head_index * width, (head_index + 1) * width)
            right[i, columns] = torch.softmax(keys[seen] @ query[i, columns] * 0.2, 0) @ values[seen]
    for num_processors in (1, 4, 8, 64):
        actual = prefill_attention(query, keys, values, packed.blocks, 0.2, num_processors)
        assert error(actual, right) < 1e-5


def run(*checks: Callable[[], Any]) -> None:
    """Run the checks that the command line names, or all."""
    by_name = {check.__name__: check for check in checks}
    for name in sys.argv[1:] or by_name:
        # Guesses take many times as long to interpret.
        with patch.object(captured_runner, "MAX_DRAFT_WIDTH", 16 if name == "guessed_replies" else 1):
            asyncio.run(by_name[name]())
        print(f"{name}: good", flush=True)


if __name__ == "__main__":
    run(
        short_reply,
        llama,
        narrow_heads,
        qwen3,
        wide,
        out_of_memory,
        slept,
        bucketed,
        moved_weights,
        split_prefill,
        drafts,
        guessed_replies,
        float16,
        layers,
        shared_prefixes,
        logits,
    )
