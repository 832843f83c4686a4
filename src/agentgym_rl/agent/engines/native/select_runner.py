"""Selects the fastest runner that computes a model exactly. Warns in one line if it is a slow one."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from agentgym_rl.agent.engines.native.decoder import DecoderRunner, unwrap, why_unsupported
from agentgym_rl.agent.engines.native.generic import GenericRunner, why_not_cached
from agentgym_rl.agent.engines.native.recompute import RecomputeRunner

if TYPE_CHECKING:
    from agentgym_rl.agent.engines.native.cuda.captured_runner import CapturedRunner


def make_runner(
    model: Any, *, max_slots: int, max_length: int, own_stream: bool = False
) -> DecoderRunner | GenericRunner | RecomputeRunner | CapturedRunner:
    reason = why_unsupported(model)
    if reason is not None:
        slow = why_not_cached(model)
        consequence = (
            "it runs through its own forward pass with a KV cache. Results are correct, but slower than those of the "
            "fast path"
            if slow is None
            else f"and {slow}, so every token recomputes its whole sequence. Results are correct, but slow"
        )
        warnings.warn(f"The native engine has no fast path for this model ({reason}): {consequence}.", stacklevel=3)
        if slow is None:
            return GenericRunner(model, max_slots=max_slots, max_length=max_length)
        return RecomputeRunner(model)
    if unwrap(model).get_input_embeddings().weight.device.type == "cuda":
        reason = why_not_captured(model)
        if reason is None:
            from agentgym_rl.agent.engines.native.cuda.captured_runner import CapturedRunner

            return CapturedRunner(model, max_slots=max_slots, max_length=max_length, own_stream=own_stream)
        warnings.warn(
            f"The native engine cannot capture this model's steps in CUDA graphs ({reason}): they run module by "
            "module. Results are correct, but slower.",
            stacklevel=3,
        )
    return DecoderRunner(model, max_slots=max_slots, max_length=max_length)


def why_not_captured(model: Any) -> str | None:
    """Return None if CapturedRunner supports this model, else the reason."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "Triton is not installed"
    from agentgym_rl.agent.engines.native.cuda import joint_weights

    return joint_weights.why_not_captured(model)
