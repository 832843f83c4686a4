"""Token sampling: temperature, top-p, and random numbers per request.

The uniform number for a token depends only on the request's seed and the token's position (a counter-based generator).
So a reply does not depend on other requests, and torch's global generator is not used.
"""

from __future__ import annotations

import torch

UNIFORM_BITS = 40


def signed_64(value: int) -> int:
    """Return the int64 with the same low 64 bits as a Python integer."""
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >> 63 else value


_WEYL = signed_64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = signed_64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = signed_64(0x94D049BB133111EB)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right without keeping the sign, unlike torch."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply the 64-bit finalizer of SplitMix: every output bit depends on every input bit."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLY_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLY_2
    return x ^ _shift_right(x, 31)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return a float64 in [0, 1) for each (seed, position)."""
    bits = _mix(_mix(seeds + _WEYL) + (positions + 1) * _WEYL)
    return _shift_right(bits, 64 - UNIFORM_BITS).double() * 2.0**-UNIFORM_BITS


def top_p_filter(logprobs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the fewest most likely tokens whose probabilities reach top_p, renormalised; -inf elsewhere."""
    ordered, order = logprobs.sort(dim=-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    dropped_ordered = before >= top_p.unsqueeze(1)
    dropped_ordered[:, 0] = False
    dropped = torch.zeros_like(dropped_ordered).scatter_(1, order, dropped_ordered)
    return normalised(logprobs.masked_fill(dropped, float("-inf")))


def normalised(logits: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities, or NaN if a row is not finite. `log_softmax` is not used: over a large vocabulary its
    sums have a one-sided error of up to 1e-4 on some processors, which the learner's `logsumexp` does not have."""
    total = logits.logsumexp(-1, keepdim=True)
    return logits - torch.where(total.isfinite(), total, torch.nan)


@torch.inference_mode()
def sample(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_p: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one token per row and its log-probability under the distribution it was drawn from.

    logits [B, V] float32; temperature [B], 0 means greedy (log-probability of the unscaled distribution); top_p [B] or
    None when no row uses it; seeds and positions [B] int64. A row with non-finite logits gets a NaN log-probability.
    """
    greedy = temperature == 0
    logprobs = normalised(logits / torch.where(greedy, 1.0, temperature).unsqueeze(1))
    if top_p is not None:
        limited = (top_p < 1) & ~greedy
        logprobs = torch.where(limited.unsqueeze(1), top_p_filter(logprobs, top_p), logprobs)
    # Invert the cumulative distribution in float64: a token is picked only if its own mass covers the number. With 40
    # random bits the number never rounds up to the total.
    cumulative = logprobs.double().exp().cumsum(-1)
    threshold = uniforms(seeds, positions).unsqueeze(1) * cumulative[:, -1:]
    drawn = (cumulative <= threshold).sum(-1).clamp_(max=logits.shape[1] - 1)
    tokens = torch.where(greedy, logits.argmax(-1), drawn)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
