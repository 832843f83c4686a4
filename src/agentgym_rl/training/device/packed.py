"""Llama-like decoders over samples laid end to end, module by module. See docs/how-it-works/learner.md.

The modules are the model's own and are called as such, so that adapters around them work. On CUDA, layers of plain
modules in half precision run as one operation each (fused_layer.py). Every other decoder runs through its own forward
pass, padded.

Shapes: T tokens of a micro-batch, H hidden size, N query heads, K key/value heads, D head width.
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
from transformers import LlamaModel, Qwen2Model, Qwen3Model
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from agentgym_rl.training.device.attention import attend, flash_takes
from agentgym_rl.training.device.captured import CapturedPasses
from agentgym_rl.training.device.head import HAS_TRITON
from agentgym_rl.training.microbatch import MicroBatch

SUPPORTED = (LlamaModel, Qwen2Model, Qwen3Model)
RMS_NORMS = (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)
# Rope types whose angles depend on the position alone; others (dynamic, longrope) look at the longest of a batch.
STATIC_ROPE = ("default", "linear", "llama3", "yarn")


def why_not_packed(decoder: Any) -> str | None:
    """None when `packed_states` computes this decoder exactly, else the reason it does not."""
    if type(decoder) not in SUPPORTED:
        return f"{type(decoder).__name__} is not one of {', '.join(kind.__name__ for kind in SUPPORTED)}"
    config = decoder.config
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        return "it uses sliding-window attention"
    if decoder.rotary_emb.rope_type not in STATIC_ROPE:
        return f"its rotary embedding is of type {decoder.rotary_emb.rope_type!r}"
    if config.attention_dropout:
        return "its attention has dropout"
    return None


def packed_states(decoder: Any, micro: MicroBatch) -> Tensor:
    """TH: what the decoder makes of every token, each sample by itself."""
    hidden_TH = decoder.embed_tokens(micro.token_ids_T)
    captured = getattr(decoder, "captured_passes", None)
    if captured is not None and decoder.training and torch.is_grad_enabled():
        found: Tensor | None = captured.states(hidden_TH, micro)
        if found is not None:
            return found
    return through_layers(decoder, hidden_TH, micro.positions_T, micro)


def capture_passes(decoder: Any) -> None:
    """From now on replay passes in training mode (captured.py), where the decoder's layers are one operation each."""
    reason = why_not_captured(decoder)
    if reason is not None:
        warnings.warn(f"capture_passes is of no effect: {reason}. Passes run as without it.", stacklevel=2)
        return
    modules = [*decoder.layers, decoder.norm]
    decoder.captured_passes = CapturedPasses(modules, partial(through_layers, decoder))


def why_not_captured(decoder: Any) -> str | None:
    """None when passes of this decoder can be replayed, else the reason they cannot."""
    if reason := why_not_packed(decoder):
        return reason
    if decoder.gradient_checkpointing:
        return "activations are computed again"
    if hasattr(decoder.layers[0], "gathered"):
        return "the model is spread over several ranks"
    weight = decoder.norm.weight
    if weight.is_cuda and _fused(decoder, weight) is None:
        return "layers are one operation each only in half precision, without adapters and hooks, and with Triton"
    return None


def through_layers(decoder: Any, hidden_TH: Tensor, positions_T: Tensor, micro: MicroBatch) -> Tensor:
    """TH: embeddings in, what the decoder makes of them out. Of `micro` only the samples' bounds are looked at."""
    cos, sin = (x[0] for x in decoder.rotary_emb(hidden_TH, positions_T[None]))
    run = _fused(decoder, hidden_TH)
    if run is None:
        run, cos, sin = _layer, cos[:, None], sin[:, None].clone()
        sin[..., : sin.shape[-1] // 2].neg_()
    recompute = decoder.gradient_checkpointing and decoder.training and torch.is_grad_enabled()
    once = partial(checkpoint, run, use_reentrant=False) if recompute else run
    for layer in decoder.layers:
        if hasattr(layer, "gathered"):  # spread over ranks: its parameters are whole within this call
            hidden_TH = layer.gathered(once, hidden_TH, cos, sin, micro)
        else:
            hidden_TH = once(layer, hidden_TH, cos, sin, micro)
    return decoder.norm(hidden_TH)


def padded_states(decoder: Any, micro: MicroBatch) -> Tensor:
    """TH, through the decoder's own forward pass. A causal model needs no mask for padding on the right."""
    ids_BL, places_T = micro.padded()
    hidden_BLH = decoder(input_ids=ids_BL, use_cache=False).last_hidden_state
    return hidden_BLH.flatten(0, 1).index_select(0, places_T)


def _layer(layer: Any, hidden_TH: Tensor, cos: Tensor, signed_sin: Tensor, micro: MicroBatch) -> Tensor:
    attention = layer.self_attn
    heads = (len(hidden_TH), -1, attention.head_dim)
    x = _normalise(layer.input_layernorm, hidden_TH)
    query, key, value = (project(x).view(heads) for project in (attention.q_proj, attention.k_proj, attention.v_proj))
    if hasattr(attention, "q_norm"):
        query, key = _normalise(attention.q_norm, query), _normalise(attention.k_norm, key)
    query, key = _Rotate.apply(query, cos, signed_sin), _Rotate.apply(key, cos, signed_sin)
    hidden_TH = hidden_TH + attention.o_proj(attend(query, key, value, micro, attention.scaling))
    return hidden_TH + layer.mlp(_normalise(layer.post_attention_layernorm, hidden_TH))


def _normalise(norm: Any, x: Tensor) -> Tensor:
    """RMS norm in one operation where that is the same arithmetic (float32), else the module's own."""
    if x.dtype is torch.float32 and type(norm) in RMS_NORMS:
        return rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
    return norm(x)


class _Rotate(torch.autograd.Function):
    """Rotary embedding: x cos + swap(x) sin, with the minus in the sine's first half. Keeps nothing for backward."""

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
    """A whole layer at once, for plain modules without adapters or hooks, in half precision on CUDA."""
    if not (HAS_TRITON and flash_takes(hidden_TH.new_empty(0, decoder.layers[0].self_attn.head_dim))):
        return None
    from agentgym_rl.training.device.fused_layer import plain, run_layer

    return run_layer if all(plain(layer) for layer in decoder.layers) else None
