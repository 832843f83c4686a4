"""One decoder layer as one operation with its own backward pass, for plain modules in half precision on CUDA.

It stores the input hidden states, the rotated queries and keys, the values, the attention output, and gate and up.
Norms, the product of gate and up, and the hidden states between the layer's halves (its smallest matrix product) are
recomputed in the backward pass. Matrices with the same input are concatenated, so that one product serves them.

Shapes: T tokens, H hidden size, N query heads, K key/value heads, D head width, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agentgym_rl.common.decoders import RMS_NORMS
from agentgym_rl.training.device import layer_kernels as kernels
from agentgym_rl.training.device.attention import flash_backward, flash_forward
from agentgym_rl.training.microbatch import MicroBatch


@dataclass(slots=True)
class _Shape:
    """Arguments of a layer that are not tensors."""

    heads: int
    kv_heads: int
    width: int
    scale: float
    eps: float
    micro: MicroBatch


def plain(layer: Any) -> bool:
    """Return whether the layer has no adapters, hooks or other parts that the fused operation would skip."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
    return (
        all(type(module) is nn.Linear for module in linears)
        and all(type(module) in RMS_NORMS for module in norms)
        and not any(module._forward_hooks or module._forward_pre_hooks for module in (*linears, *norms))
        and all(linear.bias is None for linear in linears[3:])
        and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
    )


def run_layer(layer: Any, hidden_TH: Tensor, cos_TD: Tensor, sin_TD: Tensor, micro: MicroBatch) -> Tensor:
    """Return the output TH of a layer for which `plain` is true."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    normed = hasattr(attention, "q_norm")
    width = attention.head_dim
    shape = _Shape(
        attention.q_proj.out_features // width,
        attention.k_proj.out_features // width,
        width,
        attention.scaling,
        layer.input_layernorm.variance_epsilon,
        micro,
    )
    return _Layer.apply(
        shape,
        hidden_TH,
        cos_TD,
        sin_TD,
        layer.input_layernorm.weight,
        *(p.weight for p in projections),
        *(p.bias for p in projections),
        attention.q_norm.weight if normed else None,
        attention.k_norm.weight if normed else None,
        attention.o_proj.weight,
        layer.post_attention_layernorm.weight,
        mlp.gate_proj.weight,
        mlp.up_proj.weight,
        mlp.down_proj.weight,
    )


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: _Shape, hidden: Tensor, cos: Tensor, sin: Tensor, *weights: Any) -> Tensor:
        norm_1, query_w, key_w, value_w, *biases, query_norm, key_norm, out_w, norm_2, gate_w, up_w, down_w = weights
        x, scales_1 = kernels.norm(hidden, norm_1, shape.eps)
        qkv = x @ concatenated((query_w, key_w, value_w)).t()
        if biases[0] is not None:
            qkv += concatenated(biases)
        raw, query, key, value = _heads(qkv, shape, cos, sin, query_norm, key_norm)
        attended = flash_forward(query, key, value, shape.micro, shape.scale)
        middle = torch.addmm(hidden, attended[0].view(len(hidden), -1), out_w.t())
        x, scales_2 = kernels.norm(middle, norm_2, shape.eps)
        gate_up = x @ concatenated((gate_w, up_w)).t()
        out = torch.addmm(middle, kernels.gate(gate_up), down_w.t())
        ctx.shape, ctx.angles = shape, (cos, sin)
        ctx.save_for_backward(hidden, raw, query, key, value, *attended, gate_up, scales_1, scales_2, *weights)
        return out

    @staticmethod
    def backward(ctx: Any, by_out: Tensor) -> tuple[Any, ...]:
        shape = ctx.shape
        saved = ctx.saved_tensors  # read once: activation checkpointing refuses a second read
        hidden, raw, query, key, value, *attended, gate_up, scales_1, scales_2 = saved[:12]
        norm_1, query_w, key_w, value_w, *biases, query_norm, key_norm, out_w, norm_2, gate_w, up_w, down_w = saved[12:]
        mixed = attended[0].view(len(hidden), -1)
        middle = torch.addmm(hidden, mixed, out_w.t())
        by_out = by_out.contiguous()
        by_gate_up, gated = kernels.gate_backward(gate_up, by_out @ down_w)
        by_down = by_out.t() @ gated
        x, _ = kernels.norm(middle, norm_2, shape.eps)
        by_gate, by_up = (part.t() @ x for part in by_gate_up.chunk(2, 1))
        by_x = by_gate_up @ concatenated((gate_w, up_w))
        del gated, by_gate_up
        by_middle, by_norm_2 = kernels.norm_backward(by_x, middle, norm_2, scales_2, by_out)

        by_out_w = by_middle.t() @ mixed
        by_mixed = (by_middle @ out_w).view_as(attended[0])
        by_heads = flash_backward(by_mixed, query, key, value, tuple(attended), shape.micro, shape.scale)
        by_qkv, by_head_norms = _heads_backward(by_heads, raw, ctx.angles, shape, query_norm, key_norm)
        x, _ = kernels.norm(hidden, norm_1, shape.eps)
        sizes = [len(query_w), len(key_w), len(value_w)]
        by_projections = [part.t() @ x for part in by_qkv.split(sizes, 1)]
        by_biases = (
            [None] * 3 if biases[0] is None else by_qkv.sum(0, dtype=torch.float32).to(by_qkv.dtype).split(sizes)
        )
        by_x = by_qkv @ concatenated((query_w, key_w, value_w))
        by_hidden, by_norm_1 = kernels.norm_backward(by_x, hidden, norm_1, scales_1, by_middle)
        by_attention = (by_norm_1, *by_projections, *by_biases, *by_head_norms, by_out_w)
        return None, by_hidden, None, None, *by_attention, by_norm_2, by_gate, by_up, by_down


def _heads(
    qkv: Tensor, shape: _Shape, cos: Tensor, sin: Tensor, query_norm: Any, key_norm: Any
) -> tuple[Any, Tensor, Tensor, Tensor]:
    """Return (qkv if backward needs it, rotated query TND, rotated key TKD, value TKD)."""
    heads = qkv.unflatten(1, (-1, shape.width))
    query, key, value = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
    if query_norm is None:
        rotated = heads[:, : shape.heads + shape.kv_heads]
        kernels.rotate(rotated, rotated, cos, sin, back=False)
        return None, query, key, value
    query, _ = kernels.norm(query, query_norm, shape.eps)
    key, _ = kernels.norm(key, key_norm, shape.eps)
    kernels.rotate(query, query, cos, sin, back=False)
    kernels.rotate(key, key, cos, sin, back=False)
    return qkv, query, key, value


def _heads_backward(
    by_heads: Sequence[Tensor], raw: Any, angles: tuple[Tensor, Tensor], shape: _Shape, query_norm: Any, key_norm: Any
) -> tuple[Tensor, tuple[Any, Any]]:
    """Return (gradient of qkv, gradients of the norms of queries and keys)."""
    by_query, by_key, by_value = by_heads
    sizes = (shape.heads, shape.kv_heads, shape.kv_heads)
    by_qkv = by_query.new_empty(len(by_query), sum(sizes), shape.width)
    to_query, to_key, to_value = by_qkv.split(sizes, 1)
    to_value.copy_(by_value)
    by_norms: tuple[Any, Any] = (None, None)
    if query_norm is None:
        kernels.rotate(by_query, to_query, *angles, back=True)
        kernels.rotate(by_key, to_key, *angles, back=True)
    else:
        query, key, _ = raw.view_as(by_qkv).split(sizes, 1)
        gradients = []
        for by, x, weight, to in ((by_query, query, query_norm, to_query), (by_key, key, key_norm, to_key)):
            rotated = torch.empty(by.shape, dtype=by.dtype, device=by.device)
            kernels.rotate(by, rotated, *angles, back=True)
            _, scales = kernels.norm(x, weight, shape.eps)
            gradients.append(kernels.norm_backward(rotated, x, weight, scales, into=to)[1])
        by_norms = (gradients[0], gradients[1])
    return by_qkv.flatten(1), by_norms


def concatenated(parameters: Sequence[Tensor]) -> Tensor:
    """Return all rows as one tensor: a view if the engine placed them next to each other, else a temporary copy."""
    first, address = parameters[0], parameters[0].data_ptr()
    for parameter in parameters:
        if not parameter.is_contiguous() or parameter.data_ptr() != address:
            return torch.cat([p.detach() for p in parameters])
        address += parameter.numel() * parameter.element_size()
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    if len(storages) > 1:  # neighbours by chance
        return torch.cat([p.detach() for p in parameters])
    rows = sum(len(parameter) for parameter in parameters)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
