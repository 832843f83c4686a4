"""Log-probabilities and entropies from the head, one chunk of tokens at a time.

The full [tokens x vocabulary] tensor is never held: the backward pass recomputes each chunk's logits. If all tokens fit
into one chunk, its logits are kept instead.

Shapes: A action tokens, C of them in a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK_NUMBERS = {"cuda": 40 << 20, "cpu": 1 << 24}
"""Number of logits held at once, in fp32: 160 and 64 MB."""
CHUNK_ROWS = 128
"""Rows that matrix units process together. The size of a chunk is a multiple of it."""
HAS_TRITON = importlib.util.find_spec("triton") is not None


def head_logprobs(head: Any, hidden_AH: Tensor, targets_A: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return (log-probability of the target, entropy) of the softmax of head(hidden) / temperature, A each, fp32.

    Both are differentiable. The gradient of the entropy is computed only if it is used.
    """
    weight = getattr(head, "weight", None)
    rows = chunk_rows(hidden_AH.device, targets_A, head)
    if type(head) is nn.Linear and not head._forward_hooks and not head._forward_pre_hooks:
        return _Head.apply(hidden_AH, weight, head.bias, targets_A, temperature, rows)
    # An adapter around the head: use autograd, still chunk by chunk.
    parts = [
        checkpoint(_through_head, head, hidden, targets, temperature, use_reentrant=False)
        for hidden, targets in zip(hidden_AH.split(rows), targets_A.split(rows), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def chunk_rows(device: torch.device, targets_A: Tensor, head: Any) -> int:
    """Return the number of tokens in a chunk."""
    numbers = CHUNK_NUMBERS.get(device.type, CHUNK_NUMBERS["cpu"])
    rows = max(1, numbers // head.out_features)
    return rows if rows < CHUNK_ROWS else rows // CHUNK_ROWS * CHUNK_ROWS


def _through_head(head: Any, hidden_CH: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs_CV = (head(hidden_CH).float() / temperature).log_softmax(-1)
    entropy_C = -(logprobs_CV.exp() * logprobs_CV).sum(-1)
    return logprobs_CV.gather(-1, targets_C[:, None]).squeeze(-1), entropy_C


class _Head(torch.autograd.Function):
    """log p = z[target] - lse(z), entropy = -sum p log p, with z = logits / temperature:

    d log p / dz = onehot(target) - p,  d entropy / dz = -p (log p + entropy).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_AH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_A: Tensor,
        temperature: float,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        statistics = _kernels(hidden_AH).statistics if _kernels(hidden_AH) else _statistics
        parts, kept = [], None
        for hidden, targets in zip(hidden_AH.split(rows), targets_A.split(rows), strict=True):
            logits_CV = _logits(hidden, weight_VH, bias_V)
            parts.append(statistics(logits_CV, targets, temperature))
            if len(hidden_AH) <= rows and any(ctx.needs_input_grad):
                kept = logits_CV
            del logits_CV  # before those of the next chunk are allocated
        empty = (hidden_AH.new_empty(0, dtype=torch.float32),) * 3
        lse_A, logprobs_A, entropy_A = (torch.cat(chunks) for chunks in zip(*parts, strict=True)) if parts else empty
        ctx.save_for_backward(hidden_AH, weight_VH, bias_V, targets_A, lse_A, entropy_A, kept)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.set_materialize_grads(False)
        return logprobs_A, entropy_A

    @staticmethod
    def backward(ctx: Any, grad_logprob_A: Tensor | None, grad_entropy_A: Tensor | None) -> tuple[Any, ...]:
        hidden_AH, weight_VH, bias_V, targets_A, lse_A, entropy_A, kept = ctx.saved_tensors
        if grad_logprob_A is None and grad_entropy_A is None:
            return (None,) * 6
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gradient = _kernels(hidden_AH).gradient if _kernels(hidden_AH) else _gradient
        grad_logprob_A = torch.zeros_like(lse_A) if grad_logprob_A is None else grad_logprob_A
        grad_hidden = torch.empty_like(hidden_AH) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_VH) if needs_weight else None
        grad_bias = torch.zeros_like(bias_V) if needs_bias else None
        for first in range(0, len(hidden_AH), ctx.rows):
            part = slice(first, first + ctx.rows)
            hidden = hidden_AH[part]
            logits_CV = _logits(hidden, weight_VH, bias_V) if kept is None else kept
            entropy = None if grad_entropy_A is None else (grad_entropy_A[part], entropy_A[part])
            grad_logits_CV = gradient(
                logits_CV, targets_A[part], lse_A[part], grad_logprob_A[part], entropy, ctx.temperature, hidden.dtype
            )
            if grad_hidden is not None:
                torch.mm(grad_logits_CV, weight_VH, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits_CV.t(), hidden)
            if grad_bias is not None:
                grad_bias += grad_logits_CV.sum(0)
            del logits_CV, grad_logits_CV
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _kernels(hidden: Tensor) -> Any:
    """Return the Triton module if it can run here, else None."""
    if not (hidden.is_cuda and HAS_TRITON):
        return None
    from agentgym_rl.training.device import head_kernels

    return head_kernels


def _logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    """Return logits CV in fp32. Rounded to bf16, logits around 16 would be off by up to 0.06."""
    if hidden_CH.dtype is torch.float32:
        logits = hidden_CH @ weight_VH.t()
    elif hidden_CH.is_cuda:
        logits = torch.mm(hidden_CH, weight_VH.t(), out_dtype=torch.float32)
    else:
        logits = hidden_CH.float() @ weight_VH.t().float()
    return logits if bias_V is None else logits.add_(bias_V)


def _statistics(logits_CV: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (lse, log-probability, entropy), C each."""
    scaled_CV = logits_CV / temperature if temperature != 1.0 else logits_CV
    lse_C = scaled_CV.logsumexp(-1)
    logprobs_CV = scaled_CV - lse_C[:, None]
    chosen_C = logprobs_CV.gather(-1, targets_C[:, None]).squeeze(-1)
    return lse_C, chosen_C, -torch.linalg.vecdot(logprobs_CV.exp(), logprobs_CV)


def _gradient(
    logits_CV: Tensor,
    targets_C: Tensor,
    lse_C: Tensor,
    grad_logprob_C: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of the logits, CV. `entropy` is (gradient of the entropy, the entropy), C each."""
    logprobs_CV = (logits_CV / temperature).sub_(lse_C[:, None])
    grad_z = logprobs_CV.exp()
    if entropy is None:
        grad_z *= -grad_logprob_C[:, None]
    else:
        grad_entropy_C, entropy_C = entropy
        grad_z *= -grad_logprob_C[:, None] - grad_entropy_C[:, None] * (logprobs_CV + entropy_C[:, None])
    grad_z.scatter_add_(-1, targets_C[:, None], grad_logprob_C[:, None])
    return grad_z.div_(temperature).to(dtype)
