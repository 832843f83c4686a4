"""Checks that an engine has the learner's weights. After every update both sides compute checksums of some tensors,
which must be equal, and score the same tokens.

vLLM raises no error if an update is skipped or incomplete. In bf16 two forward passes differ by more than one step of
learning changes, so log-probabilities alone are not enough; checksums show the change. But an engine may compute with
packed copies: a head tied to the embedding may keep its old values. Then log-probabilities differ by one or more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from agentgym_rl.errors import EngineError

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Allowed mean absolute difference, by the coarser type of the two. Two bf16 passes differ by a few hundredths."""
PROBE_TOKENS = 48
WATCHED = ("embed_tokens.weight", "lm_head.weight", "o_proj.weight", "down_proj.weight", "norm.weight")
"""Suffixes of names that vLLM's models and the learner's share; vLLM fuses the others. The first, a middle and the last
tensor of each are compared."""
WATCHED_ADAPTERS = tuple(f"{layer}.lora_{matrix}.weight" for layer in ("o_proj", "down_proj") for matrix in "AB")
"""The same of adapters. Adapters of other layers are fused with their neighbours, or checked by log-probabilities."""
CHUNK = 1 << 22
"""Numbers summed at once, which needs a hundred megabytes on a device that is nearly full."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Tokens with the learner's log-probabilities, and checksums of its tensors."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-probability of every token but the first, at temperature 1."""
    tolerance: float = TOLERANCE[torch.float32]
    checksums: dict[str, str] = field(default_factory=dict)
    """Checksums of some tensors in the engine's type. Empty if a server is given adapters."""
    shapes: dict[str, list[int]] = field(default_factory=dict)

    def check_checksums(self, workers: Sequence[Mapping[str, str]], version: int) -> None:
        """Raise EngineError unless the `parameter_checksums` of every worker equal the learner's."""
        for checksums in workers:
            if not checksums:
                raise EngineError(
                    f"the engine has none of the learner's tensors {', '.join(self.checksums)}, so weights {version} "
                    "cannot be checked: use a model of the Llama or Qwen families"
                )
            for name, value in checksums.items():
                if value != self.checksums[name]:
                    raise EngineError(
                        f"after the update to weights {version} the engine's {name} is {value}, the learner's is "
                        f"{self.checksums[name]}: it does not hold these weights, or not in this type (engine.dtype)"
                    )

    def check(self, logprobs: Sequence[float], version: int) -> float:
        """Return the mean absolute difference. Raises EngineError if it is too large."""
        if len(logprobs) != len(self.logprobs):
            raise EngineError(f"the probe has {len(self.logprobs)} log-probabilities, the engine gave {len(logprobs)}")
        difference = sum(abs(a - b) for a, b in zip(logprobs, self.logprobs, strict=True)) / len(self.logprobs)
        if not difference <= self.tolerance:  # also true for NaN
            raise EngineError(
                f"after the update to weights {version} the engine's log-probabilities differ from the learner's by "
                f"{difference:.3g} a token (allowed {self.tolerance:g}): it does not hold these weights"
            )
        return difference


@torch.no_grad()
def probe_model(
    model: Any,
    engine_dtype: torch.dtype | None = None,
    token_ids: Sequence[int] | None = None,
    sent_dtype: torch.dtype | None = None,
    adapter: Iterable[tuple[str, torch.Tensor]] = (),
    device: torch.device | None = None,
) -> Probe:
    """Return a probe: tokens from all over the vocabulary with the model's scores, and checksums of some tensors. They
    are rounded to `sent_dtype` and then `engine_dtype` (default: the model's type). `adapter`: the tensors that are
    sent instead of the weights, not rounded; without it, weights of a model with adapters are not compared. `device`:
    that of the model's passes, if its weights are elsewhere."""
    _require_exact_frequencies(model)
    weight = model.get_input_embeddings().weight
    checksums, shapes = {}, {}
    for name, tensor in _watched(model, dict(adapter)):
        sent = tensor if "lora_" in name else tensor.to(sent_dtype or tensor.dtype)
        checksums[name], shapes[name] = checksum(sent.to(engine_dtype or weight.dtype)), list(sent.shape)
    if token_ids is None:
        vocabulary = min(weight.shape[0], model.config.vocab_size)
        token_ids = [(7 + 7919 * n) % vocabulary for n in range(PROBE_TOKENS)]
    ids = torch.tensor([list(token_ids)], device=device or weight.device)
    training = model.training
    model.eval()
    try:
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    finally:
        model.train(training)
    logprobs = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
    tolerance = max(TOLERANCE.get(dtype, 0.1) for dtype in (weight.dtype, engine_dtype or weight.dtype))
    return Probe(list(token_ids), logprobs.tolist(), tolerance, checksums, shapes)


@torch.no_grad()
def parameter_checksums(model: Any, shapes: Mapping[str, Sequence[int]], *, split: bool = False) -> dict[str, str]:
    """Return checksums of an engine model's parameters with these names, without padding rows. Packed parameters are
    left out, and if the model is `split` over devices, so are those that are sharded. Adapters are those of the first
    slot, whose rank is padded."""
    parameters = {name.replace(".base_layer", ""): parameter for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        for letter in "AB":
            stacked = getattr(module, f"lora_{letter.lower()}_stacked", None)
            if isinstance(stacked, tuple) and len(stacked) == 1:  # vLLM fuses several
                parameters[f"{name}.lora_{letter}.weight"] = stacked[0][0, 0]
    checksums = {}
    for name, (rows, *columns) in shapes.items():
        tensor = parameters.get(name)
        if tensor is not None and name.endswith(".lora_B.weight"):
            tensor = tensor[:, : columns[0]]
        if split and any(getattr(tensor, side, None) is not None for side in ("input_dim", "output_dim")):
            continue  # vLLM marks sharded parameters with these attributes
        if tensor is not None and list(tensor.shape[1:]) == columns and tensor.dim() and tensor.shape[0] >= rows:
            checksums[name] = checksum(tensor.detach()[:rows])
    return checksums


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> str:
    """Return the type and a sum of all bits, weighted by position. It changes with any single number and is the same on
    every device."""
    bits = tensor.detach().contiguous().view(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, len(bits), CHUNK):
        part = bits[first : first + CHUNK].to(torch.int64)
        places = torch.arange(first, first + len(part), device=bits.device)
        total += part.mul_(places.mul_(2).add_(1)).sum()  # overflow wraps around, so the order does not matter
    return f"{str(tensor.dtype).removeprefix('torch.')} {int(total) % (1 << 64):016x}"


def _require_exact_frequencies(model: Any) -> None:
    """Raise EngineError if rotary frequencies are rounded. Engines compute their own in float32. Rounded ones shift the
    learner's positions, which only long prompts show."""
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and buffer.dtype in (torch.bfloat16, torch.float16):
            raise EngineError(
                f"the learner's {name} must be float32, got {str(buffer.dtype).removeprefix('torch.')}, as after "
                "model.to(dtype): no engine agrees with it. Load the model with from_pretrained(..., dtype=...)"
            )


def _watched(model: Any, adapter: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of the compared tensors. Every rank of a sharded model must read all."""
    named = {name.replace(".base_layer", ""): p for name, p in model.named_parameters() if "lora_" not in name}
    if not adapter and len(named) < len(list(model.named_parameters())):
        return
    named |= {name.removeprefix("base_model.model."): tensor for name, tensor in adapter.items()}
    for end in WATCHED + WATCHED_ADAPTERS:
        names = [name for name in named if name.endswith(end)]
        for name in dict.fromkeys(names[i] for i in (0, len(names) // 2, -1) if names):
            tensor = named[name].detach()
            yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
