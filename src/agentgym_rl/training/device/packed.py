"""Forward pass of Llama-like decoders over packed samples. See docs/how-it-works/learner.md.

It calls the model's own modules, so that adapters around them work. On CUDA, layers of plain modules in half precision
run as one operation each (fused_layer.py). Every other decoder runs its own forward pass, padded.

Shapes: T tokens of a micro-batch, A action tokens and R tokens that are read among them, H hidden size, N query heads,
K key/value heads, D head width.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from torch.utils.checkpoint import checkpoint

from agentgym_rl.common.decoders import DECODERS, RMS_NORMS, STATIC_ROPE
from agentgym_rl.training.device.attention import Queries, attend, flash_supports, flash_takes, take_rows
from agentgym_rl.training.device.captured import CapturedPasses
from agentgym_rl.training.device.head import HAS_TRITON
from agentgym_rl.training.microbatch import MicroBatch, SharedPrefixes

MAX_READ_SHARE = 0.5
"""The last layer computes only the tokens that are read if they are at most this share of all."""


def why_not_packed(decoder: Any) -> str | None:
    """Return why `packed_states` does not compute this decoder exactly, or None if it does."""
    if type(decoder) not in DECODERS:
        return f"{type(decoder).__name__} is not one of {', '.join(kind.__name__ for kind in DECODERS)}"
    config = decoder.config
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        return "it uses sliding-window attention"
    if decoder.rotary_emb.rope_type not in STATIC_ROPE:
        return f"its rotary embedding is of type {decoder.rotary_emb.rope_type!r}"
    if config.attention_dropout:
        return "its attention has dropout"
    return None


def can_share_prefixes(decoder: Any, device: torch.device) -> bool:
    """Return whether passes of this decoder on a device take samples that share prefixes: not in float32 on CUDA.

    The device is that of the passes: between them the parameters may be on the host.
    """
    return device.type != "cuda" or flash_takes(decoder.embed_tokens.weight.dtype, decoder.layers[0].self_attn.head_dim)


def packed_states(decoder: Any, micro: MicroBatch) -> Tensor:
    """Return the decoder's output for every token, TH. Samples do not see each other, but may share prefixes."""
    shared = micro.shared
    if shared is not None:
        return take_rows(_shared_states(decoder, micro, shared), shared.unique_T)
    hidden_TH = decoder.embed_tokens(micro.token_ids_T)
    captured = getattr(decoder, "captured_passes", None)
    if captured is not None and decoder.training and torch.is_grad_enabled():
        states: Tensor | None = captured.states(hidden_TH, micro)
        if states is not None:
            return states
    return through_layers(decoder, hidden_TH, micro.positions_T, micro)


def packed_action_states(decoder: Any, micro: MicroBatch) -> Tensor:
    """Return the decoder's output before every action token, AH.

    On a CPU in float32, the last layer computes nothing else. In half precision, that would change the rounding.
    """
    places_A, shared = micro.places_A - 1, micro.shared
    few = 0 < len(places_A) <= MAX_READ_SHARE * len(micro.token_ids_T)
    exact = decoder.embed_tokens.weight.dtype is torch.float32 and not torch.is_autocast_enabled("cpu")
    if not few or not exact or places_A.is_cuda or hasattr(decoder, "captured_passes"):
        if shared is None:
            return packed_states(decoder, micro).index_select(0, places_A)
        return take_rows(_shared_states(decoder, micro, shared), shared.unique_T[places_A])
    if shared is None:
        hidden_TH = decoder.embed_tokens(micro.token_ids_T)
        return through_layers(decoder, hidden_TH, micro.positions_T, micro, Queries(places_A, places_A))
    read_R, read_A = shared.unique_T[places_A].unique(return_inverse=True)
    states_RH = _shared_states(decoder, micro, shared, Queries(read_R, shared.places_U[read_R]))
    return states_RH.index_select(0, read_A)


def _shared_states(decoder: Any, micro: MicroBatch, shared: SharedPrefixes, queries: Queries | None = None) -> Tensor:
    hidden_UH = decoder.embed_tokens(micro.token_ids_T[shared.places_U])
    return through_layers(decoder, hidden_UH, micro.positions_T[shared.places_U], micro, queries)


def capture_passes(decoder: Any) -> None:
    """Replay passes in training mode as CUDA graphs from now on (captured.py), or warn why that is impossible."""
    reason = why_not_captured(decoder)
    if reason is not None:
        warnings.warn(f"capture_passes has no effect: {reason}. Passes run without CUDA graphs.", stacklevel=2)
        return
    modules = [*decoder.layers, decoder.norm]
    decoder.captured_passes = CapturedPasses(modules, partial(through_layers, decoder))


def why_not_captured(decoder: Any) -> str | None:
    """Return why passes of this decoder cannot be replayed, or None if they can."""
    if reason := why_not_packed(decoder):
        return reason
    if decoder.gradient_checkpointing:
        return "activations are checkpointed"
    if hasattr(decoder.layers[0], "gathered"):
        return "the model is sharded over several ranks"
    weight = decoder.norm.weight
    if weight.is_cuda and _fused(decoder, weight) is None:
        return "it needs half precision, Triton, and layers without adapters and hooks"
    return None


def through_layers(
    decoder: Any, hidden_TH: Tensor, positions_T: Tensor, micro: MicroBatch, queries: Queries | None = None
) -> Tensor:
    """Return the decoder's output TH for embeddings TH. Only the bounds of samples in `micro` are used.

    With `queries`, which fused layers do not take, the last layer computes and returns the outputs of these tokens.
    """
    cos, sin = (x[0] for x in decoder.rotary_emb(hidden_TH, positions_T[None]))
    run = _fused(decoder, hidden_TH)
    if run is None:
        run, cos, sin = _layer, cos[:, None], sin[:, None].clone()
        sin[..., : sin.shape[-1] // 2].neg_()
    recompute = decoder.gradient_checkpointing and decoder.training and torch.is_grad_enabled()
    run_layer = partial(checkpoint, run, use_reentrant=False) if recompute else run
    last = decoder.layers[-1]
    for layer in decoder.layers:
        args = (hidden_TH, cos, sin, micro, queries) if layer is last and queries else (hidden_TH, cos, sin, micro)
        # A layer that is sharded over ranks gathers its parameters for the call.
        hidden_TH = layer.gathered(run_layer, *args) if hasattr(layer, "gathered") else run_layer(layer, *args)
    return decoder.norm(hidden_TH)


def padded_states(decoder: Any, micro: MicroBatch) -> Tensor:
    """Return the output TH of the decoder's own forward pass. A causal model needs no mask for right padding."""
    ids_BL, places_T = micro.padded()
    hidden_BLH = decoder(input_ids=ids_BL, use_cache=False).last_hidden_state
    return hidden_BLH.flatten(0, 1).index_select(0, places_T)


def _layer(
    layer: Any,
    hidden_TH: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
    micro: MicroBatch,
    queries: Queries | None = None,
) -> Tensor:
    attention = layer.self_attn
    heads = (-1, attention.head_dim)
    x = _normalise(layer.input_layernorm, hidden_TH)
    read, angles = x, [cos, signed_sin]
    if queries is not None:
        hidden_TH, read, *angles = (rows.index_select(0, queries.rows_R) for rows in (hidden_TH, x, cos, signed_sin))
    # The order of the projections decides how the gradient of x is rounded in half precision.
    inputs = ((attention.q_proj, read), (attention.k_proj, x), (attention.v_proj, x))
    query, key, value = (project(tokens).unflatten(-1, heads) for project, tokens in inputs)
    if hasattr(attention, "q_norm"):
        query, key = _normalise(attention.q_norm, query), _normalise(attention.k_norm, key)
    query, key = _Rotate.apply(query, *angles), _Rotate.apply(key, cos, signed_sin)
    hidden_TH = hidden_TH + attention.o_proj(attend(query, key, value, micro, attention.scaling, queries))
    return hidden_TH + layer.mlp(_normalise(layer.post_attention_layernorm, hidden_TH))


def _normalise(norm: Any, x: Tensor) -> Tensor:
    """Return the RMS norm as one operation if the arithmetic is the same (float32), else by the module."""
    if x.dtype is torch.float32 and type(norm) in RMS_NORMS:
        return rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
    return norm(x)


class _Rotate(torch.autograd.Function):
    """Rotary embedding: x cos + swap(x) sin, with the minus in the sine's first half. Stores no activations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        ctx.angles = cos, signed_sin
        return _rotate(x, cos, signed_sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, signed_sin = ctx.angles
        return _rotate(gradient, cos, -signed_sin), None, None


def _rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), signed_sin)


def _fused(decoder: Any, hidden_TH: Tensor) -> Callable[..., Tensor] | None:
    """Return the fused layer if all layers are plain modules in half precision on CUDA, else None."""
    if not (HAS_TRITON and flash_supports(hidden_TH.new_empty(0, decoder.layers[0].self_attn.head_dim))):
        return None
    from agentgym_rl.training.device.fused_layer import plain, run_layer

    return run_layer if all(plain(layer) for layer in decoder.layers) else None
