"""Does the engine hold the learner's weights? After every update both sides add up the bits of some tensors, which must
be the same, and score the same tokens.

An update that was not made, or that leaves part of a model behind, raises nothing. In bf16 one step of learning is lost
in what two forward passes differ by anyway, so log-probabilities alone cannot tell; the bits can. They in turn are not
what is multiplied with where an engine packs copies: a head tied to the embedding may go on with its old values. Then
log-probabilities are off by one or more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from agentgym_rl.errors import EngineError

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Of the mean absolute difference, by the wider rounding of the two: two bf16 forwards differ by a few hundredths."""
PROBE_TOKENS = 48
WATCHED = ("embed_tokens.weight", "lm_head.weight", "o_proj.weight", "down_proj.weight", "norm.weight")
"""Ends of names that vLLM's models and the learner's share; others are joined there. Of each the first, a middle and
the last are compared."""
CHUNK = 1 << 22
"""Numbers that are added up at once: a hundred megabytes beside a device that is full."""

Merge = Callable[[Iterable[tuple[str, torch.Tensor]]], Iterable[tuple[str, torch.Tensor]]]
"""(name, frozen weights) of a model with adapters -> (name, weights with them inside)."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Tokens and what the learner says of them."""

    token_ids: list[int]
    logprobs: list[float]
    """Of every token but the first, under the learner's weights at temperature 1."""
    tolerance: float = TOLERANCE[torch.float32]
    checksums: dict[str, str] = field(default_factory=dict)
    """Of some tensors, in the engine's type; none of a model with adapters that the engine merges itself."""
    shapes: dict[str, list[int]] = field(default_factory=dict)

    def check_held(self, workers: Sequence[Mapping[str, str]], version: int) -> None:
        """What each of an engine's workers found by `held` must be the learner's, bit for bit."""
        for found in workers:
            if not found:
                raise EngineError(
                    f"the engine has none of {', '.join(self.checksums)} as the learner does, so that nobody can tell "
                    f"whether it took weights {version}: use a model of the Llama or Qwen families"
                )
            for name, mine in found.items():
                if mine != self.checksums[name]:
                    raise EngineError(
                        f"after the update to weights {version} the engine's {name} is {mine}, the learner's is "
                        f"{self.checksums[name]}: it does not hold these weights, or not in this type (engine.dtype)"
                    )

    def check(self, found: Sequence[float], version: int) -> float:
        """The mean absolute difference; EngineError where it is too large."""
        if len(found) != len(self.logprobs):
            raise EngineError(f"the probe has {len(self.logprobs)} log-probabilities, the engine gave {len(found)}")
        off = sum(abs(a - b) for a, b in zip(found, self.logprobs, strict=True)) / len(self.logprobs)
        if not off <= self.tolerance:  # NaN is no agreement
            raise EngineError(
                f"after the update to weights {version} the engine's log-probabilities differ from the learner's by "
                f"{off:.3g} a token (allowed {self.tolerance:g}): it does not hold these weights"
            )
        return off


@torch.no_grad()
def probe_model(
    model: Any,
    engine_dtype: torch.dtype | None = None,
    token_ids: Sequence[int] | None = None,
    sent_dtype: torch.dtype | None = None,
    merge: Merge | None = None,
) -> Probe:
    """Tokens spread over the vocabulary, as `model` scores them, and checksums of some of its tensors: those of an
    engine in `engine_dtype` that was sent `sent_dtype`, each of them the model's where it is not given. `merge` says
    what a model with adapters sends instead of its own weights."""
    _require_exact_frequencies(model)
    weight = model.get_input_embeddings().weight
    checksums, shapes = {}, {}
    for name, tensor in _watched(model, merge):
        sent = tensor.to(sent_dtype or tensor.dtype)
        checksums[name], shapes[name] = checksum(sent.to(engine_dtype or sent.dtype)), list(sent.shape)
    if token_ids is None:
        vocabulary = min(weight.shape[0], model.config.vocab_size)
        token_ids = [(7 + 7919 * n) % vocabulary for n in range(PROBE_TOKENS)]
    ids = torch.tensor([list(token_ids)], device=weight.device)
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
def held(model: Any, shapes: Mapping[str, Sequence[int]], *, split: bool = False) -> dict[str, str]:
    """Checksums of the parameters that an engine's model has under these names, less the rows it is padded with. What
    it keeps packed is left out, and where it is `split` between devices all but what each of them has."""
    own = {name.replace(".base_layer", ""): parameter for name, parameter in model.named_parameters()}
    found = {}
    for name, (rows, *rest) in shapes.items():
        mine = own.get(name)
        if split and any(getattr(mine, side, None) is not None for side in ("input_dim", "output_dim")):
            continue  # vLLM's marks of what it cuts
        if mine is not None and list(mine.shape[1:]) == rest and mine.dim() and mine.shape[0] >= rows:
            found[name] = checksum(mine.detach()[:rows])
    return found


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> str:
    """Type and a sum of all bits, each number's weighted by its place: another if any single number is another, and the
    same on every device."""
    bits = tensor.detach().contiguous().view(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, len(bits), CHUNK):
        part = bits[first : first + CHUNK].to(torch.int64)
        places = torch.arange(first, first + len(part), device=bits.device)
        total += part.mul_(places.mul_(2).add_(1)).sum()  # around the end of 64 bits, in any order
    return f"{str(tensor.dtype).removeprefix('torch.')} {int(total) % (1 << 64):016x}"


def _require_exact_frequencies(model: Any) -> None:
    """Rotary frequencies are no weights: an engine makes its own, in float32. Rounded ones put the learner's tokens at
    other places, which few tokens hardly show and many do."""
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and buffer.dtype in (torch.bfloat16, torch.float16):
            raise EngineError(
                f"the learner's {name} is in {str(buffer.dtype).removeprefix('torch.')}, as model.to(dtype) leaves it: "
                "no engine will agree with it. Load the model with from_pretrained(..., dtype=...)"
            )


def _watched(model: Any, merge: Merge | None) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor); where a model is spread over ranks every one of them must read all."""
    parameters = {name: p for name, p in model.named_parameters() if "lora_" not in name}
    if merge is None and len(parameters) < len(list(model.named_parameters())):
        return
    for end in WATCHED:
        names = [name for name in parameters if name.replace(".base_layer", "").endswith(end)]
        for name in dict.fromkeys(names[i] for i in (0, len(names) // 2, -1) if names):
            tensor = parameters[name].detach()
            whole = [(name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)]
            yield from whole if merge is None else merge(whole)
