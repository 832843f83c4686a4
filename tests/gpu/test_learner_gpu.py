"""The learner on a CUDA device: fused layers, the chunked head, the master weights, agreement with the engine."""

from __future__ import annotations

import asyncio
import copy
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels_for_tests import error, gate_error
from shared_prefixes_for_tests import tree_samples, values_and_gradients
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.training.device import attention, head, master_weights, optimizer
from agentgym_rl.training.device.packed import capture_passes, packed_states, padded_states
from agentgym_rl.training.learner import Imitator
from agentgym_rl.training.lora import add_adapter
from agentgym_rl.training.microbatch import MicroBatch, micro_batches
from agentgym_rl.training.model import action_logprobs, hidden_states, load_model
from agentgym_rl.training.settings import LoraSettings, OptimizerSettings
from agentgym_rl.types import Sample, Sampling

CHAT_MODEL = "AGENTGYM_CHAT_MODEL"
"""Variable that names the folder of a real chat model, such as SmolLM2-135M-Instruct."""

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCABULARY = 5003
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 304,
    "num_hidden_layers": 3,
    "max_position_embeddings": 2048,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, num_attention_heads=3, num_key_value_heads=3)),
    "llama-tied": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_attention_heads=6, num_key_value_heads=1)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_attention_heads=4, num_key_value_heads=2, head_dim=64)),
}


def make_model(kind: str, dtype: torch.dtype) -> Any:
    with torch.random.fork_rng(devices=[0]):
        torch.manual_seed(7)
        model = MODELS[kind]().cuda()
        # Biases and norm weights start at 0 and 1, which would hide a forward pass that leaves them out.
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype)


def make_samples(seed: int, lengths: list[int]) -> list[Sample]:
    rng = random.Random(seed)
    masks = [[False] + [rng.random() < 0.4 for _ in range(n - 1)] for n in lengths]
    return [Sample([rng.randrange(VOCABULARY) for _ in mask], mask) for mask in masks]


def packed(samples: list[Sample]) -> MicroBatch:
    (micro,) = micro_batches(samples, [1.0] * len(samples), 1_000_000, "cuda")
    return micro


# --- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [80, 576, 1536, 4096])
def test_norm(size: int) -> None:
    from agentgym_rl.training.device import layer_kernels as kernels

    norm = LlamaRMSNorm(size, 1e-5).cuda()
    x, gradient, residual = torch.randn(3, 700, size, device="cuda")
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    x.requires_grad_()
    expected = norm(x)
    expected.backward(gradient)
    found, scales = kernels.norm(x.detach(), norm.weight.detach(), 1e-5)
    grad_x, grad_weight = kernels.norm_backward(gradient, x.detach(), norm.weight.detach(), scales, residual)
    assert x.grad is not None
    assert norm.weight.grad is not None
    assert max(error(found, expected), error(grad_x, x.grad + residual), error(grad_weight, norm.weight.grad)) < 1e-5


def test_rotation_and_gate() -> None:
    from agentgym_rl.training.device import layer_kernels as kernels

    wide = torch.randn(300, 12, 64, device="cuda")
    cos, sin = torch.rand(2, 300, 32, device="cuda").repeat(1, 1, 2)
    x = wide[:, 2:11].clone().requires_grad_()
    expected, _ = apply_rotary_pos_emb(x[None].transpose(1, 2), x[None].transpose(1, 2), cos[None], sin[None])
    expected = expected[0].transpose(0, 1)
    gradient = torch.randn_like(x)
    expected.backward(gradient)
    found, back = torch.empty_like(x), torch.empty_like(x)
    kernels.rotate(wide[:, 2:11], found, cos, sin, back=False)
    kernels.rotate(gradient, back, cos, sin, back=True)
    assert x.grad is not None
    assert max(error(found, expected), error(back, x.grad)) < 1e-6

    assert gate_error(300, 1100, "cuda") < 1e-6


def test_more_tokens_than_the_second_axis_of_a_grid_has() -> None:
    from agentgym_rl.training.device import head_kernels

    tokens = 70_000
    assert gate_error(tokens, 24, "cuda") < 1e-6
    logits, targets = torch.randn(tokens, 40, device="cuda"), torch.randint(40, (tokens,), device="cuda")
    lse, _, _ = head._statistics(logits, targets, 1.0)
    given = (logits, targets, lse, torch.randn(tokens, device="cuda"), None, 1.0, torch.float32)
    assert error(head_kernels.gradient(*given), head._gradient(*given)) < 1e-5


@pytest.mark.parametrize("size", [100, 49152, 50001])
def test_head_statistics_and_gradient(size: int) -> None:
    from agentgym_rl.training.device import head_kernels as kernels

    logits = torch.randn(65, size, device="cuda") * 6
    targets = torch.randint(size, (65,), device="cuda")
    grad_logprob, grad_entropy = torch.randn(2, 65, device="cuda")
    expected = head._statistics(logits, targets, 0.7)
    for found, right in zip(kernels.statistics(logits, targets, 0.7), expected, strict=True):
        torch.testing.assert_close(found, right, atol=2e-5, rtol=1e-5)
    lse, _, entropy = expected
    for some in (None, (grad_entropy, entropy)):
        given = (logits, targets, lse, grad_logprob, some, 0.7, torch.float32)
        assert error(kernels.gradient(*given), head._gradient(*given)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kv_heads", [6, 2])
def test_attention_sees_each_sample_alone(dtype: torch.dtype, kv_heads: int) -> None:
    micro = packed(make_samples(1, [5, 300, 64, 64, 1]))
    tokens = len(micro.token_ids_T)
    inputs = [torch.randn(tokens, n, 64, device="cuda", requires_grad=True) for n in (6, kv_heads, kv_heads)]
    gradient = torch.randn(tokens, 6 * 64, device="cuda")
    expected = attention._by_runs(*(x.double() for x in inputs), micro, 0.1).reshape(tokens, -1)
    right = torch.autograd.grad(expected, inputs, gradient.double())
    found = attention.attend(*(x.to(dtype) for x in inputs), micro, 0.1)
    mine = torch.autograd.grad(found, inputs, gradient.to(dtype))
    bound = 1e-2 if dtype is torch.bfloat16 else 1e-5
    assert max(error(found, expected), *(error(a, b) for a, b in zip(mine, right, strict=True))) < bound


# --- the model -------------------------------------------------------------------------------------------------------


def gradients(model: Any, micro: MicroBatch, states: Callable[[Any, MicroBatch], torch.Tensor]) -> list[torch.Tensor]:
    """Hidden states, and what a random linear function of them gives every parameter of the decoder."""
    hidden = states(model.get_decoder(), micro)
    torch.manual_seed(3)
    parameters = [p for p in model.get_decoder().parameters() if p.requires_grad]
    found = torch.autograd.grad((hidden.float() * torch.randn(hidden.shape, device="cuda")).sum(), parameters)
    return [hidden.detach(), *found]


@pytest.mark.parametrize("kind", list(MODELS))
def test_packed_is_padded_in_float32(kind: str) -> None:
    model, micro = make_model(kind, torch.float32), packed(make_samples(1, [5, 130, 64, 64, 2, 90]))
    for found, expected in zip(
        gradients(model, micro, packed_states), gradients(model, micro, padded_states), strict=True
    ):
        assert error(found, expected) < 1e-4


@pytest.mark.parametrize("kind", list(MODELS))
def test_fused_layers_are_as_accurate_as_transformers(kind: str) -> None:
    """Against float32 on the same bf16 weights: rounding differs, its size does not."""
    model, micro = make_model(kind, torch.bfloat16), packed(make_samples(1, [5, 130, 64, 64, 2, 90]))
    truth = gradients(copy.deepcopy(model).float(), micro, padded_states)
    theirs = gradients(model, micro, padded_states)
    ours = gradients(model, micro, packed_states)
    for found, plain, right in zip(ours, theirs, truth, strict=True):
        assert error(found, right) < 1.3 * error(plain, right) + 2e-3
    # Parameters that the engine has laid side by side are read in place.
    asyncio.run(NativeEngine(model, max_sessions=2, max_context=64).close())
    for found, again in zip(ours, gradients(model, micro, packed_states), strict=True):
        assert error(again, found) < 1e-2


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("adapters", [False, True])
def test_shared_prefixes_change_only_the_rounding(kind: str, adapters: bool) -> None:
    model, samples = make_model(kind, torch.bfloat16).train(), tree_samples()
    if adapters:
        pytest.importorskip("peft")
        add_adapter(model, LoraSettings(rank=4), 0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.05)

    def results(model: Any, *, share_prefixes: bool) -> list[torch.Tensor]:
        weights = [1.0] * len(samples)
        batches = micro_batches(samples, weights, 300, "cuda", share_prefixes=share_prefixes)
        assert all((micro.shared is not None) == share_prefixes for micro in batches)
        logprobs, found = values_and_gradients(model, batches, len(samples))
        return [torch.tensor([p for row in logprobs for p in row]), *found]

    exact = results(copy.deepcopy(model).float(), share_prefixes=False)
    plain = results(model, share_prefixes=False)
    shared = results(model, share_prefixes=True)
    for found, unshared, right in zip(shared, plain, exact, strict=True):
        assert error(found, right) < 1.5 * error(unshared, right) + 5e-3


def test_the_learner_shares_prefixes_in_half_precision() -> None:
    weights = [1.0] * len(tree_samples())
    for dtype, shares in ((torch.bfloat16, True), (torch.float32, False)):
        imitator = Imitator(make_model("qwen2", dtype), OptimizerSettings(), 1)
        assert all((m.shared is not None) == shares for m in imitator.micro_batches(tree_samples(), weights))


def test_adapters_learn_in_bf16() -> None:
    pytest.importorskip("peft")
    model, micro = make_model("qwen2", torch.bfloat16), packed(make_samples(1, [50, 130, 64]))
    add_adapter(model, LoraSettings(rank=4), 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    for found, plain in zip(
        gradients(model, micro, packed_states), gradients(model, micro, padded_states), strict=True
    ):
        assert error(found, plain) < 5e-2
    imitator = Imitator(model, OptimizerSettings(lr=1e-3), 10)
    samples = make_samples(2, [50, 60, 70])
    losses = [imitator.imitate(samples)["loss"] for _ in range(10)]
    assert losses[-1] < losses[0] - 0.1


def test_recomputed_activations_change_nothing() -> None:
    model, micro = make_model("qwen3", torch.bfloat16).train(), packed(make_samples(1, [200, 130]))
    whole = gradients(model, micro, hidden_states)
    model.get_decoder().gradient_checkpointing_enable({"use_reentrant": False})
    for found, expected in zip(gradients(model, micro, hidden_states), whole, strict=True):
        assert error(found, expected) < 1e-3


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(MODELS))
def test_captured_passes_learn_what_others_learn(kind: str) -> None:
    rng = random.Random(4)
    # One pass an update, then several; sizes that come again, with other lengths in them.
    batches = [make_samples(i, [rng.randrange(20, 400) for _ in range(n)]) for i, n in enumerate((9, 9, 9, 30, 30, 9))]
    found = []
    for capture in (False, True):
        model = make_model(kind, torch.bfloat16)
        settings = OptimizerSettings(lr=1e-3, micro_batch_tokens=2048, capture_passes=capture)
        imitator = Imitator(model, settings, 10)
        found.append([imitator.imitate(batch) for batch in batches])
    plain, captured = found
    assert model.get_decoder().captured_passes.replays > 5
    for a, b in zip(plain, captured, strict=True):
        assert abs(a["loss"] - b["loss"]) < 0.01 * abs(a["loss"])
        assert abs(a["grad/norm"] - b["grad/norm"]) < 0.03 * a["grad/norm"]


def test_the_gradient_of_a_captured_pass_is_that_of_the_same_pass() -> None:
    """Bit for bit where no padding is needed, but for attention, whose backward adds up in any order."""
    model = make_model("llama-tied", torch.bfloat16).train()
    decoder = model.get_decoder()
    gradients = []
    for round_ in range(4):
        if round_ == 1:
            capture_passes(decoder)  # round 1 is still its first time
        micro = packed(make_samples(9, [300, 212]))
        model.zero_grad()
        logprobs, entropy = action_logprobs(model, micro, 1.0)
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert decoder.captured_passes.replays == 2
    noise = max(error(a, b) for a, b in zip(gradients[0], gradients[1], strict=True))
    for replayed in gradients[2:]:
        assert max(error(a, b) for a, b in zip(replayed, gradients[0], strict=True)) < max(1e-3, 3 * noise)


def test_the_head_never_holds_all_logits() -> None:
    """16384 tokens by 50000 words in float32 are 3.3 GB; a sixth of that is allowed."""
    linear = torch.nn.Linear(256, 50_000, bias=False, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(16384, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(50_000, (16384,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, entropy = head.head_logprobs(linear, hidden, targets, 0.9)
    (logprobs.sum() + 0.1 * entropy.sum()).backward()
    assert torch.cuda.max_memory_allocated() - before < 0.55e9


# --- learning --------------------------------------------------------------------------------------------------------


def test_the_float32_master_moves_where_bf16_would_not() -> None:
    model = make_model("llama-tied", torch.bfloat16)
    exact = copy.deepcopy(model).float()
    samples = make_samples(4, [60, 90, 120, 40])
    settings = OptimizerSettings(lr=1e-6, micro_batch_tokens=150)
    places = [p.data_ptr() for p in model.parameters()]
    start = [p.detach().float() for p in model.parameters()]
    half, whole = Imitator(model, settings, 50), Imitator(exact, settings, 50)
    for _ in range(50):
        half.imitate(samples)
        whole.imitate(samples)
    assert [p.data_ptr() for p in model.parameters()] == places
    masters = half._optimizer.master()  # type: ignore[union-attr]
    assert all(torch.equal(p, master_weights.split(m)[0]) for p, m in zip(model.parameters(), masters, strict=True))
    first = torch.cat([p.flatten() for p in start])
    moved = torch.cat([p.flatten() for p in masters]) - first
    wanted = torch.cat([p.detach().flatten() for p in exact.parameters()]) - first
    assert error(moved, wanted) < 0.25


def test_one_launch_updates_as_plain_torch_does() -> None:
    from agentgym_rl.training.device.optimizer_kernels import update_all

    for dtype in (torch.bfloat16, torch.float32):
        rows = []
        for shape in ((3000, 7), (5,), (64, 64)):
            weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            low = torch.zeros_like(weight, dtype=torch.int16)
            rows.append((weight, torch.randn(shape, device="cuda").to(dtype), low, weight * 0, weight * 0))
        slow = [tuple(t.clone() for t in row) for row in rows]
        scale, numbers = torch.tensor(0.3, device="cuda"), (0.9, 0.95, 1e-3, 0.5, 0.99)
        for update in range(1, 4):
            update_all(rows, [0, 1, 2], scale, numbers, update)
            for place, row in enumerate(slow):
                master_weights.update_one(row, scale, numbers, update, place)
        for fast, right in zip(rows, slow, strict=True):
            assert error(master_weights.join(fast[0], fast[2]), master_weights.join(right[0], right[2])) < 1e-6
            assert all(error(a, b) < 1e-3 for a, b in zip(fast[3:], right[3:], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_on_the_host_give_the_same_steps(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "PART_PARAMETERS", 3_000_000)
    made = []
    for offload in (False, True):
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(1000, 1000 + i, device="cuda").to(dtype)) for i in range(6)]
        settings = OptimizerSettings(lr=0.1, offload_moments=offload)
        adam = optimizer.make_optimizer(parameters, settings)
        for update in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            if update == 2:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            optimizer.step(adam, settings)
        made.append((parameters, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated()))
    assert all(torch.equal(a, b) for a, b in zip(made[0][0], made[1][0], strict=True))
    size = sum(p.numel() for p in made[0][0])
    moments = (8 if dtype is torch.float32 else 6) * size
    assert made[1][1] < 0.8 * moments, "at most half of the moments at once, and temporary tensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(MODELS))
def test_engine_and_learner_agree(kind: str, dtype: torch.dtype) -> None:
    model = make_model(kind, dtype).eval()
    engine = NativeEngine(model, max_sessions=8, max_context=512)

    async def play() -> list[Sample]:
        sampling = Sampling(max_new_tokens=40, temperature=0.8)
        prompts = [random.Random(i).choices(range(VOCABULARY), k=20 + 9 * i) for i in range(6)]
        replies = await asyncio.gather(*(engine.generate(p, sampling, str(i)) for i, p in enumerate(prompts)))
        await engine.close()
        return [
            Sample(p + r.token_ids, [False] * len(p) + [True] * len(r.token_ids), r.logprobs)
            for p, r in zip(prompts, replies, strict=True)
        ]

    micro = packed(asyncio.run(play()))
    with torch.no_grad():
        logprobs, _ = action_logprobs(model, micro, 0.8)
        ids, _ = micro.padded()
        plain = model(input_ids=ids).logits[micro.rows_A, micro.columns_A - 1].float() / 0.8
        exact = model.float()(input_ids=ids).logits[micro.rows_A, micro.columns_A - 1] / 0.8
    gap = (logprobs - micro.logprobs_A).abs()
    if dtype is torch.float32:
        assert float(gap.max()) < 1e-4
        return
    transformers, truth = (x.log_softmax(-1).gather(1, micro.targets_A[:, None])[:, 0] for x in (plain, exact))
    engines, ours, theirs = (float((x - truth).abs().mean()) for x in (micro.logprobs_A, logprobs, transformers))
    print(f"{kind}: gap {float(gap.mean()):.4f}; off by: engine {engines:.4f}, learner {ours:.4f}, plain {theirs:.4f}")
    # Weights this wild round coarsely; the learner must do so no more than transformers, nor the two differ by more.
    assert ours < 1.1 * theirs
    assert float(gap.mean()) < 1.3 * max(engines, ours)
    assert float(gap.mean()) < 0.03


@pytest.mark.skipif(CHAT_MODEL not in os.environ, reason=f"{CHAT_MODEL} names no model folder")
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.3])
def test_engine_and_learner_agree_on_real_weights(temperature: float) -> None:
    """bf16, several turns of free talk, where many tokens are about as likely and rounding shows most: engine and
    learner differ by no more than bf16 itself costs either of them, and the learner is no further off than
    transformers. (What agents say in training is far more certain: mismatch/abs of every step.)"""
    model, tokenizer = load_model(os.environ[CHAT_MODEL], device="cuda", dtype=torch.bfloat16)
    engine = NativeEngine(model.eval(), max_sessions=64, max_context=2048)
    questions = [
        "What is the capital of France?",
        "Write a poem about the sea.",
        "List ten animals.",
        "Why is snow white?",
    ]
    follow_up = tokenizer.encode("<|im_end|>\n<|im_start|>user\nSay more.<|im_end|>\n<|im_start|>assistant\n")

    async def episode(index: int) -> Sample:
        question = {"role": "user", "content": questions[index % 4]}
        ids = list(tokenizer.apply_chat_template([question], add_generation_prompt=True, return_dict=False))
        sample = Sample(list(ids), [False] * len(ids), [])
        for turn in range(4):
            reply = await engine.generate(
                sample.token_ids, Sampling(48, temperature=temperature, seed=10 * index + turn), str(index)
            )
            sample.token_ids = sample.token_ids + reply.token_ids + follow_up
            sample.loss_mask += [True] * len(reply.token_ids) + [False] * len(follow_up)
            sample.logprobs += reply.logprobs
        return sample

    async def play() -> list[Sample]:
        samples = await asyncio.gather(*(episode(index) for index in range(32)))
        await engine.close()
        return list(samples)

    micro = packed(asyncio.run(play()))
    with torch.no_grad():
        logprobs, _ = action_logprobs(model, micro, temperature)
        ids, _ = micro.padded()
        plain = model(input_ids=ids).logits[micro.rows_A, micro.columns_A - 1].float() / temperature
        theirs_A = plain.log_softmax(-1).gather(1, micro.targets_A[:, None])[:, 0]
        truth, _ = action_logprobs(model.float(), micro, temperature)
    gap = (logprobs - micro.logprobs_A).abs()
    engines, ours, theirs = (float((x - truth).abs().mean()) for x in (micro.logprobs_A, logprobs, theirs_A))
    print(
        f"{len(gap)} tokens at temperature {temperature}, mean log-probability {float(truth.mean()):.2f}: "
        f"gap {float(gap.mean()):.5f}, most {float(gap.max()):.4f}; "
        f"off by: engine {engines:.5f}, learner {ours:.5f}, plain {theirs:.5f}"
    )
    assert ours < 1.1 * theirs
    assert float(gap.mean()) < 1.3 * max(engines, ours)
    assert float(gap.mean()) < 0.05
