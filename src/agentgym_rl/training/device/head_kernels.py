"""Triton kernels for the softmax statistics of a chunk of logits and their gradient, each in one pass.

Shapes: C tokens of a chunk, V vocabulary. They compute the same as `_statistics` and `_gradient` in head.py.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def statistics_kernel(logits, targets, lse, logprobs, entropies, inverse, SIZE, STRIDE, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    top = float("-inf")
    total = 0.0
    weighted = 0.0  # the sum of e^(z - top) (z - top)
    for start in range(0, SIZE, BLOCK):
        inside = start + offs < SIZE
        z = tl.load(logits + row * STRIDE + start + offs, mask=inside, other=float("-inf")) * inverse
        new_top = tl.maximum(top, tl.max(z, 0))
        shrink = tl.exp(top - new_top)
        # Rescale the sums to the new maximum: every exponent changes by the difference. The first block has no sums.
        moved = tl.where(total > 0, weighted + total * (top - new_top), 0.0) * shrink
        far = tl.where(inside, z - new_top, 0.0)
        share = tl.where(inside, tl.exp(far), 0.0)
        weighted = tl.where(total > 0, moved, 0.0) + tl.sum(share * far, 0)
        total = tl.where(total > 0, total * shrink, 0.0) + tl.sum(share, 0)
        top = new_top
    log_total = tl.log(total)
    chosen = tl.load(logits + row * STRIDE + tl.load(targets + row)) * inverse
    tl.store(lse + row, top + log_total)
    tl.store(logprobs + row, chosen - top - log_total)
    tl.store(entropies + row, log_total - weighted / total)


def statistics(logits_CV: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (lse, log-probability, entropy), C each."""
    rows, size = logits_CV.shape
    lse, logprobs, entropies = torch.empty((3, rows), dtype=torch.float32, device=logits_CV.device)
    statistics_kernel[(rows,)](
        logits_CV, targets_C, lse, logprobs, entropies, 1.0 / temperature, size, size, BLOCK=4096, num_warps=8
    )
    return lse, logprobs, entropies


@triton.jit
def gradient_kernel(
    logits,
    targets,
    lse,
    grad_logprob,
    grad_entropy,
    entropies,
    out,
    inverse,
    SIZE,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < SIZE
    z = tl.load(logits + row * SIZE + offs, mask=inside, other=0.0) * inverse
    logprob = z - tl.load(lse + row)
    weight = tl.load(grad_logprob + row)
    factor = -weight
    if HAS_ENTROPY:
        factor = factor - tl.load(grad_entropy + row) * (logprob + tl.load(entropies + row))
    gradient = tl.exp(logprob) * factor
    gradient = tl.where(offs == tl.load(targets + row), gradient + weight, gradient)
    tl.store(out + row * SIZE + offs, (gradient * inverse).to(out.dtype.element_ty), mask=inside)


def gradient(
    logits_CV: Tensor,
    targets_C: Tensor,
    lse_C: Tensor,
    grad_logprob_C: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of the logits, CV."""
    rows, size = logits_CV.shape
    out = torch.empty((rows, size), dtype=dtype, device=logits_CV.device)
    grad_entropy, entropies = entropy or (lse_C, lse_C)
    gradient_kernel[(rows, triton.cdiv(size, 4096))](
        logits_CV,
        targets_C,
        lse_C,
        grad_logprob_C.contiguous(),
        grad_entropy.contiguous(),
        entropies,
        out,
        1.0 / temperature,
        size,
        HAS_ENTROPY=entropy is not None,
        BLOCK=4096,
        num_warps=8,
    )
    return out
