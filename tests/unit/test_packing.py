"""Packed samples: the model's output for each equals that for the sample alone, and memory is bounded."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from training_for_tests import VOCABULARY, few, tiny_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentgym_rl.errors import ConfigError
from agentgym_rl.training.checkpoint import load_state, save_checkpoint
from agentgym_rl.training.device import head, master_weights, optimizer
from agentgym_rl.training.device.captured import padded_lengths
from agentgym_rl.training.device.packed import (
    capture_passes,
    packed_action_states,
    packed_states,
    padded_states,
    why_not_packed,
)
from agentgym_rl.training.learner import Imitator
from agentgym_rl.training.lora import add_adapter
from agentgym_rl.training.microbatch import micro_batches
from agentgym_rl.training.model import action_logprobs, hidden_states, states_at_end, states_before_actions
from agentgym_rl.training.settings import LoraSettings, OptimizerSettings
from agentgym_rl.types import Sample

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, num_attention_heads=4, num_key_value_heads=2, attention_bias=True, mlp_bias=True)
    ),
    "llama-yarn": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, num_attention_heads=2, num_key_value_heads=2, rope_parameters=YARN)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, num_attention_heads=4, num_key_value_heads=1, tie_word_embeddings=True)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_attention_heads=4, num_key_value_heads=2, head_dim=8)),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "GPT2Model": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=24, n_layer=2, n_head=2, n_positions=128)
    ),
    "dropout": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.1)
    ),
    "sliding": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            **SHAPE,
            num_attention_heads=2,
            num_key_value_heads=2,
            use_sliding_window=True,
            sliding_window=4,
            max_window_layers=0,
        )
    ),
}


def make(build: Callable[[], Any]) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = build()
        with torch.no_grad():  # biases of 0 and norms of 1 would hide a pass that skips them
            for name, parameter in model.named_parameters():
                if "bias" in name or "norm" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def in_bf16(model: Any) -> Any:
    """Convert only the parameters: rotary frequencies remain float32, as in a model loaded in bf16."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def make_samples(seed: int, lengths: list[int], vocabulary: int = VOCABULARY) -> list[Sample]:
    rng = random.Random(seed)
    masks = [[False] + [rng.random() < 0.5 for _ in range(n - 1)] for n in lengths]
    return [
        Sample([rng.randrange(vocabulary) for _ in mask], mask, [-rng.random()] * sum(mask), trajectory_id=str(i))
        for i, mask in enumerate(masks)
    ]


LENGTHS = st.lists(st.integers(1, 24), min_size=1, max_size=8)


# --- layout ----------------------------------------------------------------------------------------------------------


@few(30)
@given(lengths=LENGTHS, max_tokens=st.integers(1, 80), seed=st.integers(0, 999))
def test_every_token_is_packed_once_and_in_order(lengths: list[int], max_tokens: int, seed: int) -> None:
    samples = make_samples(seed, lengths)
    weights = [float(i) for i in range(len(samples))]
    seen: list[int] = []
    for micro in micro_batches(samples, weights, max_tokens):
        rows = [samples[i] for i in micro.indices]
        seen += micro.indices
        assert micro.token_ids_T.tolist() == [t for s in rows for t in s.token_ids]
        assert micro.positions_T.tolist() == [i for s in rows for i in range(len(s.token_ids))]
        assert micro.bounds_B1.tolist() == [sum(micro.lengths[:i]) for i in range(len(rows) + 1)]
        assert micro.targets_A.tolist() == [
            t for s in rows for t, on in zip(s.token_ids, s.loss_mask, strict=True) if on
        ]
        assert micro.weights_A.tolist() == [weights[i] for i in micro.indices for on in samples[i].loss_mask if on]
        assert micro.by_row(micro.logprobs_A) == [pytest.approx(s.logprobs) for s in rows]
        assert [n for count, length in micro.runs() for n in [length] * count] == micro.lengths
        ids, places = micro.padded()
        assert ids.flatten()[places].tolist() == micro.token_ids_T.tolist()
        assert int(ids.count_nonzero()) == int(micro.token_ids_T.count_nonzero())
    assert sorted(seen) == list(range(len(samples)))


def test_a_mask_of_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="t9: 3 tokens need a mask of equal length, got 2"):
        micro_batches([Sample([1, 2, 3], [False, True], trajectory_id="t9")], [1.0], 100)


# --- the decoder -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(MODELS))
def test_packed_states_and_gradients_are_those_of_each_sample_alone(kind: str) -> None:
    model = make(MODELS[kind])
    decoder = model.get_decoder()
    assert why_not_packed(decoder) is None
    samples = make_samples(3, [7, 19, 7, 2, 30, 1])
    (micro,) = micro_batches(samples, [1.0] * 6, 1000)
    hidden = hidden_states(decoder, micro)
    torch.manual_seed(1)
    wanted = torch.randn_like(hidden)
    parameters = list(decoder.parameters())
    actual = torch.autograd.grad((hidden * wanted).sum(), parameters)
    total = torch.zeros(())
    for part, index, share in zip(hidden.split(micro.lengths), micro.indices, wanted.split(micro.lengths), strict=True):
        alone = decoder(input_ids=torch.tensor([samples[index].token_ids])).last_hidden_state[0]
        torch.testing.assert_close(part, alone, atol=1e-5, rtol=1e-4)
        total = total + (alone * share).sum()
    for mine, right in zip(actual, torch.autograd.grad(total, parameters), strict=True):
        torch.testing.assert_close(mine, right, atol=1e-4, rtol=1e-3)
    ends = [sum(micro.lengths[: i + 1]) - 1 for i in range(6)]
    assert torch.equal(states_at_end(hidden, micro), hidden[ends])
    assert torch.equal(states_before_actions(hidden, micro), hidden[micro.places_A - 1])


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", list(MODELS))
def test_the_last_layer_computes_only_what_action_tokens_need(kind: str, shared: bool, recomputed: bool) -> None:
    decoder = make(MODELS[kind]).get_decoder()
    if recomputed:
        decoder.train().gradient_checkpointing_enable({"use_reentrant": False})
    samples = make_samples(3, [7, 19, 7, 2, 30, 1, 19, 25])
    rng = random.Random(0)
    for sample in samples:
        sample.loss_mask = [False] + [rng.random() < 0.25 for _ in sample.token_ids[1:]]
        sample.logprobs = [-1.0] * sum(sample.loss_mask)
    if shared:  # also their action tokens
        for sample in samples[1:]:
            sample.token_ids[:15] = samples[0].token_ids[: len(sample.token_ids)] + sample.token_ids[7:15]
    (micro,) = micro_batches(samples, [1.0] * len(samples), 1000, share_prefixes=shared)
    assert (micro.shared is not None) == shared
    assert 0 in micro.action_counts
    rows: list[int] = []
    decoder.layers[-1].mlp.register_forward_hook(lambda module, args, out: rows.append(len(out)))
    actual = packed_action_states(decoder, micro)
    assert rows[0] <= micro.num_actions < len(micro.token_ids_T) / 3
    right = states_before_actions(padded_states(decoder, micro), micro)
    torch.testing.assert_close(actual, right, atol=1e-5, rtol=1e-4)
    torch.manual_seed(1)
    wanted = torch.randn_like(actual)
    for mine, expected in zip(
        *(torch.autograd.grad((states * wanted).sum(), list(decoder.parameters())) for states in (actual, right)),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("mode", ["float32", "bfloat16", "autocast"])
def test_the_last_layer_computes_all_tokens_in_half_precision(mode: str) -> None:
    decoder = make(MODELS["qwen2"]).get_decoder()
    if mode == "bfloat16":
        decoder.bfloat16()
    samples = make_samples(3, [30, 19])
    for sample in samples:
        sample.loss_mask = [False] * (len(sample.token_ids) - 1) + [True]
        sample.logprobs = [-1.0]
    (micro,) = micro_batches(samples, [1.0] * 2, 1000)
    rows: list[int] = []
    decoder.layers[-1].mlp.register_forward_hook(lambda module, args, out: rows.append(len(out)))
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        states = packed_action_states(decoder, micro)
    assert len(states) == 2
    assert rows == [2 if mode == "float32" else 49]


@pytest.mark.parametrize("kind", list(OTHERS))
def test_other_decoders_run_their_own_forward_pass(kind: str) -> None:
    model = make(OTHERS[kind])
    decoder = model.get_decoder() if kind != "GPT2Model" else model.transformer
    assert kind in (why_not_packed(decoder) or "")
    samples = make_samples(4, [9, 14, 3])
    (micro,) = micro_batches(samples, [1.0] * 3, 1000)
    for part, index in zip(hidden_states(decoder, micro).split(micro.lengths), micro.indices, strict=True):
        alone = decoder(input_ids=torch.tensor([samples[index].token_ids])).last_hidden_state[0]
        torch.testing.assert_close(part, alone, atol=1e-5, rtol=1e-4)


@few(15)
@given(lengths=LENGTHS, max_tokens=st.integers(1, 100), seed=st.integers(0, 999))
def test_neighbours_order_and_micro_batches_change_no_result(lengths: list[int], max_tokens: int, seed: int) -> None:
    model, samples = make(MODELS["qwen3"]), make_samples(seed, lengths)
    actual: dict[str, list[float]] = {}
    order = random.Random(seed).sample(range(len(samples)), len(samples))
    for micro in micro_batches([samples[i] for i in order], [1.0] * len(samples), max_tokens):
        with torch.no_grad():
            logprobs_A, _ = action_logprobs(model, micro, 0.8)
        for place, row in zip(micro.indices, micro.by_row(logprobs_A), strict=True):
            actual[samples[order[place]].trajectory_id] = row
    for sample in samples:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([sample.token_ids])).logits[0, :-1] / 0.8
        right = logits.log_softmax(-1).gather(1, torch.tensor(sample.token_ids[1:])[:, None])[:, 0]
        expected = [float(p) for p, on in zip(right, sample.loss_mask[1:], strict=True) if on]
        assert actual[sample.trajectory_id] == pytest.approx(expected, abs=2e-5)


def test_adapters_around_the_projections_are_run() -> None:
    model = make(MODELS["llama"])
    add_adapter(model, LoraSettings(rank=2), 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    (micro,) = micro_batches(make_samples(3, [7, 19, 5]), [1.0] * 3, 1000)
    trained = [p for p in model.parameters() if p.requires_grad]
    results = []
    for states in (packed_states, padded_states):
        hidden = states(model.get_decoder(), micro)
        results.append([hidden, *torch.autograd.grad(hidden.square().sum(), trained)])
    for mine, right in zip(*results, strict=True):
        torch.testing.assert_close(mine, right, atol=1e-3, rtol=1e-3)


class Largest(TorchDispatchMode):
    """Record the size of the largest tensor, and of all tensors that autograd keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.most = max(self.most, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def test_recomputed_activations_change_nothing_and_are_not_kept() -> None:
    def kept_and_gradients(recompute: bool) -> tuple[int, list[torch.Tensor]]:
        model = make(MODELS["qwen2"])
        settings = OptimizerSettings(lr=0.0, checkpoint_activations=recompute)
        imitator = Imitator(model, settings, 1)
        assert not any(module._forward_hooks for module in model.modules()), "an engine would not capture its steps"
        model.train()
        kept = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        (micro,) = micro_batches(make_samples(3, [30, 19, 7]), [1.0] * 3, 1000)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            loss, _ = imitator._loss(micro)
        return kept, list(torch.autograd.grad(loss, list(model.parameters())))

    (all_of_it, expected), (little, actual) = kept_and_gradients(False), kept_and_gradients(True)
    assert little < all_of_it / 2
    for mine, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, right)


@few(30)
@given(lengths=st.lists(st.integers(1, 700), min_size=1, max_size=40))
def test_padding_of_a_captured_pass_consists_of_separate_samples(lengths: list[int]) -> None:
    size, padded = padded_lengths(lengths)
    assert padded[: len(lengths)] == lengths
    assert sum(padded) == size.tokens
    assert min(padded) > 0
    assert max(padded) <= size.longest
    assert len(padded) <= size.samples
    assert size.tokens - sum(lengths) < max(256, size.tokens / 4)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_captured_passes_give_the_same_updates_as_others(kind: str) -> None:
    """Three updates of two passes, all padded to one size: every pass but the first is replayed."""
    batches = [make_samples(seed, [30, 19, 7, 30, 12, 3]) for seed in range(3)]
    learned, replays = [], []
    for capture in (False, True):
        model = make(MODELS[kind])
        settings = OptimizerSettings(lr=1e-2, micro_batch_tokens=80, capture_passes=capture)
        imitator = Imitator(model, settings, 10)
        losses = [imitator.imitate(batch)["loss"] for batch in batches]
        learned.append((losses, list(model.parameters())))
        captured = getattr(model.get_decoder(), "captured_passes", None)
        replays.append(captured.replays if captured is not None else 0)
        assert getattr(copy.deepcopy(model).get_decoder(), "captured_passes", None) is None
    assert replays == [0, 5]
    assert learned[0][0] == pytest.approx(learned[1][0], abs=1e-5)
    for mine, right in zip(learned[1][1], learned[0][1], strict=True):
        torch.testing.assert_close(mine, right, atol=1e-5, rtol=1e-4)


def test_a_warning_says_why_passes_cannot_be_captured() -> None:
    decoder = make(MODELS["qwen2"]).get_decoder()
    decoder.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.warns(UserWarning, match="has no effect: activations are checkpointed"):
        capture_passes(decoder)
    assert not hasattr(decoder, "captured_passes")


def test_a_second_captured_pass_before_backward_is_refused() -> None:
    model = make(MODELS["qwen2"]).train()
    capture_passes(model.get_decoder())
    (micro,) = micro_batches(make_samples(3, [30, 19]), [1.0] * 2, 1000)
    _, first, _ = (hidden_states(model.get_decoder(), micro) for _ in range(3))
    with pytest.raises(RuntimeError, match="call backward first"):
        first.sum().backward()


# --- the head --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("numbers", [1 << 24, 40 * 7])
@pytest.mark.parametrize("use", ["logprobs", "entropy", "both"])
def test_chunks_give_the_values_and_gradients_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, bias: bool, numbers: int, use: str
) -> None:
    monkeypatch.setattr(head, "CHUNK_NUMBERS", {"cpu": numbers})
    torch.manual_seed(0)
    linear = torch.nn.Linear(12, 40, bias=bias)
    torch.nn.init.normal_(linear.weight)
    hidden, targets = torch.randn(50, 12, requires_grad=True), torch.randint(40, (50,))
    weights = torch.randn(2, 50) * torch.tensor([[use != "entropy"], [use != "logprobs"]])
    inputs = [hidden, *linear.parameters()]
    whole = head._through_head(linear, hidden, targets, 0.7)
    chunked = head.head_logprobs(linear, hidden, targets, 0.7)
    results = []
    for logprobs, entropy in (whole, chunked):
        used = {"logprobs": logprobs * weights[0], "entropy": entropy * weights[1]}
        loss = sum(used.values()).sum() if use == "both" else used[use].sum()  # type: ignore[union-attr]
        results.append([logprobs, entropy, *torch.autograd.grad(loss, inputs)])
    for mine, right in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, right, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("adapted", [False, True])
def test_tokens_by_vocabulary_is_never_held(monkeypatch: pytest.MonkeyPatch, adapted: bool) -> None:
    monkeypatch.setattr(head, "CHUNK_NUMBERS", {"cpu": 1 << 16})
    vocabulary = 512
    model = tiny_model(vocabulary=vocabulary)
    if adapted:
        add_adapter(model, LoraSettings(rank=2, target_modules=("lm_head", "q_proj")), 0)
    samples = make_samples(1, [100] * 12, vocabulary)
    imitator = Imitator(model, OptimizerSettings(lr=1e-3), 1)
    with Largest() as seen:
        imitator.imitate(samples)
    trained = sum(sum(s.loss_mask) for s in samples)
    assert seen.most <= 1 << 16 < trained * vocabulary / 4


def test_a_vocabulary_larger_than_a_chunk_is_processed_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_NUMBERS", {"cpu": 10})
    linear = torch.nn.Linear(4, 40)
    hidden, targets = torch.randn(3, 4), torch.randint(40, (3,))
    for mine, right in zip(
        head.head_logprobs(linear, hidden, targets, 1.0), head._through_head(linear, hidden, targets, 1.0), strict=True
    ):
        torch.testing.assert_close(mine, right, atol=1e-5, rtol=1e-4)
    nothing = head.head_logprobs(linear, hidden[:0], targets[:0], 1.0)
    assert [len(x) for x in nothing] == [0, 0]


# --- bf16 weights on a float32 master --------------------------------------------------------------------------------


def test_a_float32_is_restored_from_its_bf16_and_remainder() -> None:
    torch.manual_seed(0)
    values = torch.randn(20_000) * torch.randn(20_000).mul(8).exp()
    upper, lower = master_weights.split(values)
    assert torch.equal(master_weights.join(upper, lower), values)
    assert torch.equal((upper.float() - values).abs(), (values.to(torch.bfloat16).float() - values).abs())


def test_stochastic_rounding_is_unbiased_and_repeatable() -> None:
    values = torch.full((50_000,), -1.00123)
    bits = master_weights.random_bits(50_000, 3, 1, torch.device("cpu")) & 0xFFFF
    rounded = master_weights.round_stochastically(values, bits).float()
    assert rounded.unique().tolist() == [-1.0078125, -1.0]
    assert float(rounded.mean()) == pytest.approx(-1.00123, abs=1e-4)
    assert torch.equal(bits, master_weights.random_bits(50_000, 3, 1, torch.device("cpu")) & 0xFFFF)
    assert (bits != master_weights.random_bits(50_000, 4, 1, torch.device("cpu")) & 0xFFFF).float().mean() > 0.99


def test_small_updates_move_the_master_and_bf16_follows() -> None:
    """lr 1e-6 is far below bf16's last place for most weights; the sum of 50 such updates must still be exact."""
    model = in_bf16(make(MODELS["qwen2"]))
    exact = copy.deepcopy(model).float()
    samples = make_samples(4, [20, 30])
    places = [p.data_ptr() for p in model.parameters()]
    start = [p.detach().float().clone() for p in model.parameters()]
    settings = OptimizerSettings(lr=1e-6, micro_batch_tokens=30, weight_decay=0.01, betas=(0.9, 0.999))
    half, whole = Imitator(model, settings, 50), Imitator(exact, settings, 50)
    losses = [(half.imitate(samples)["loss"], whole.imitate(samples)["loss"]) for _ in range(50)]
    assert [p.data_ptr() for p in model.parameters()] == places
    assert all(mine == pytest.approx(right, rel=2e-2) for mine, right in losses)
    assert isinstance(half._optimizer, optimizer.MasterAdamW)
    masters = half._optimizer.master()
    assert all(torch.equal(p, master_weights.split(m)[0]) for p, m in zip(model.parameters(), masters, strict=True))
    first = torch.cat([p.flatten() for p in start])
    moved = torch.cat([p.flatten() for p in masters]) - first
    wanted = torch.cat([p.detach().flatten() for p in exact.parameters()]) - first
    assert float((moved - wanted).norm() / wanted.norm()) < 0.25
    unmoved = float((torch.cat([p.detach().float().flatten() for p in model.parameters()]) == first).float().mean())
    assert unmoved > 0.5, "the learning rate must be so small that bf16 alone loses it"


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_the_update_is_torchs_up_to_rounding(beta2: float) -> None:
    torch.manual_seed(0)
    start = torch.randn(400)
    mine, right = torch.nn.Parameter(start.bfloat16()), torch.nn.Parameter(start.bfloat16().float())
    settings = OptimizerSettings(lr=1e-3, weight_decay=0.1, betas=(0.9, beta2), max_grad_norm=0.0)
    ours, theirs = optimizer.make_optimizer([mine], settings), optimizer.make_optimizer([right], settings)
    assert isinstance(ours, optimizer.MasterAdamW)
    for _ in range(200):
        gradient = (torch.randn(400) + 0.5).bfloat16()
        mine.grad, right.grad = gradient.clone(), gradient.float()
        ours.step()
        theirs.step()
    (master,) = ours.master()
    moved, wanted = master - start.bfloat16().float(), right.detach() - start.bfloat16().float()
    assert float((moved - wanted).norm() / wanted.norm()) < 0.03


@pytest.mark.parametrize("small", [0, 100])
def test_gradients_of_several_passes_add_up_in_float32(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "SMALL_MODEL_PARAMETERS", small)
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    ours = optimizer.make_optimizer([parameter], OptimizerSettings())
    assert isinstance(ours, optimizer.MasterAdamW)
    with optimizer.collecting(ours, several=True) as passed:
        for factor in [256.0, *[0.5] * 64]:  # 256 + 0.5 is 256 in bf16
            (parameter.sum() * factor).backward()
            passed()
            assert parameter.grad is None
    assert float(ours.norm()) == pytest.approx(2 * (256 + 32))
    ours.zero_grad()
    parameter.sum().backward()  # the hooks are gone
    assert parameter.grad is not None


def test_a_resumed_bf16_run_continues_bit_for_bit(tmp_path: Any) -> None:
    from training_for_tests import counting_player

    _, tokenizer = counting_player()
    samples, settings = make_samples(4, [20, 30, 12]), OptimizerSettings(lr=1e-4, micro_batch_tokens=40)

    def build() -> Any:
        return in_bf16(make(MODELS["qwen2"]))

    straight = Imitator(build(), settings, 6)
    for _ in range(6):
        last = straight.imitate(samples)
    half = Imitator(build(), settings, 6)
    for _ in range(3):
        half.imitate(samples)
    folder = save_checkpoint(tmp_path, 3, half.model, tokenizer, {"learner": half.state()}, 1)
    reloaded = type(half.model).from_pretrained(folder / "model", dtype=torch.bfloat16)
    resumed = Imitator(reloaded, settings, 6)
    resumed.restore(load_state(folder)["learner"])
    for _ in range(3):
        again = resumed.imitate(samples)
    assert again == last
    for mine, right in zip(reloaded.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(mine, right)
    for mine, right in zip(resumed._optimizer.master(), straight._optimizer.master(), strict=True):  # type: ignore[union-attr]
        assert torch.equal(mine, right)


def test_the_state_of_a_float32_run_is_refused() -> None:
    float32 = Imitator(make(MODELS["qwen2"]), OptimizerSettings(), 1)
    half = Imitator(in_bf16(make(MODELS["qwen2"])), OptimizerSettings(), 1)
    with pytest.raises(ConfigError, match=r"another model\.dtype: resume with the one that it was written with"):
        half.restore(float32.state())
