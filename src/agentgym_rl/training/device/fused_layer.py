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
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        shape = ctx.shape
        saved = ctx.saved_tensors  # read once: activation checkpointing refuses a second read
        hidden, raw, query, key, value, *attended, gate_up, scales_1, scales_2 = saved[:12]
        norm_1, query_w, key_w, value_w, *biases, query_norm, key_norm, out_w, norm_2, gate_w, up_w, down_w = saved[12:]
        mixed = attended[0].view(len(hidden), -1)
        middle = torch.addmm(hidden, mixed, out_w.t())
        grad_out = grad_out.contiguous()
        grad_gate_up, gated = kernels.gate_backward(gate_up, grad_out @ down_w)
        grad_down = grad_out.t() @ gated
        x, _ = kernels.norm(middle, norm_2, shape.eps)
        grad_gate, grad_up = (part.t() @ x for part in grad_gate_up.chunk(2, 1))
        grad_x = grad_gate_up @ concatenated((gate_w, up_w))
        del gated, grad_gate_up
        grad_middle, grad_norm_2 = kernels.norm_backward(grad_x, middle, norm_2, scales_2, grad_out)

        grad_out_w = grad_middle.t() @ mixed
        grad_mixed = (grad_middle @ out_w).view_as(attended[0])
        grad_heads = flash_backward(grad_mixed, query, key, value, tuple(attended), shape.micro, shape.scale)
        grad_qkv, grad_head_norms = _heads_backward(grad_heads, raw, ctx.angles, shape, query_norm, key_norm)
        x, _ = kernels.norm(hidden, norm_1, shape.eps)
        sizes = [len(query_w), len(key_w), len(value_w)]
        grad_projections = [part.t() @ x for part in grad_qkv.split(sizes, 1)]
        grad_biases = (
            [None] * 3 if biases[0] is None else grad_qkv.sum(0, dtype=torch.float32).to(grad_qkv.dtype).split(sizes)
        )
        grad_x = grad_qkv @ concatenated((query_w, key_w, value_w))
        grad_hidden, grad_norm_1 = kernels.norm_backward(grad_x, hidden, norm_1, scales_1, grad_middle)
        grad_attention = (grad_norm_1, *grad_projections, *grad_biases, *grad_head_norms, grad_out_w)
        return None, grad_hidden, None, None, *grad_attention, grad_norm_2, grad_gate, grad_up, grad_down


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
    grad_heads: Sequence[Tensor], raw: Any, angles: tuple[Tensor, Tensor], shape: _Shape, query_norm: Any, key_norm: Any
) -> tuple[Tensor, tuple[Any, Any]]:
    """Return (gradient of qkv, gradients of the norms of queries and keys)."""
    grad_query, grad_key, grad_value = grad_heads
    sizes = (shape.heads, shape.kv_heads, shape.kv_heads)
    grad_qkv = grad_query.new_empty(len(grad_query), sum(sizes), shape.width)
    to_query, to_key, to_value = grad_qkv.split(sizes, 1)
    to_value.copy_(grad_value)
    grad_norms: tuple[Any, Any] = (None, None)
    if query_norm is None:
        kernels.rotate(grad_query, to_query, *angles, back=True)
        kernels.rotate(grad_key, to_key, *angles, back=True)
    else:
        query, key, _ = raw.view_as(grad_qkv).split(sizes, 1)
        gradients = []
        for grad, x, weight, to in ((grad_query, query, query_norm, to_query), (grad_key, key, key_norm, to_key)):
            rotated = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
            kernels.rotate(grad, rotated, *angles, back=True)
            _, scales = kernels.norm(x, weight, shape.eps)
            gradients.append(kernels.norm_backward(rotated, x, weight, scales, into=to)[1])
        grad_norms = (gradients[0], gradients[1])
    return grad_qkv.flatten(1), grad_norms


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
