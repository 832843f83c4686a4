"""Does the engine hold the learner's weights? Both score the same tokens after every update.

An update that leaves part of a model behind raises nothing: a head that is tied to the embedding but kept in a packed
copy goes on with its old values. Log-probabilities are then off by one or more: a probe sees that, training does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agentgym_rl.errors import EngineError

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Of the mean absolute difference, by the wider rounding of the two: two bf16 forwards differ by a few hundredths."""
PROBE_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Probe:
    """Tokens and what the learner says of them."""

    token_ids: list[int]
    logprobs: list[float]
    """Of every token but the first, under the learner's weights at temperature 1."""
    tolerance: float = TOLERANCE[torch.float32]

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
def probe_model(model: Any, engine_dtype: torch.dtype | None = None, token_ids: Sequence[int] | None = None) -> Probe:
    """Tokens spread over the vocabulary, as `model` scores them."""
    weight = model.get_input_embeddings().weight
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
    return Probe(list(token_ids), logprobs.tolist(), tolerance)
