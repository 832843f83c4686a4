"""One decoder layer as one operation with its own backward pass, for plain modules in half precision on CUDA.

It keeps the hidden states that go in, the rotated queries and keys with the values, what attention made of them, and
gate and up. Norms, the product of gate and up, and the hidden states between the layer's halves (its smallest matrix
product) are computed again for the gradient. Matrices with the same input are laid side by side, so that one product
serves them.

Shapes: T tokens, H hidden size, N query heads, K key/value heads, D head width, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from agentgym_rl.training.device import layer_kernels as kernels
from agentgym_rl.training.device.attention import flash_backward, flash_forward
from agentgym_rl.training.microbatch import MicroBatch


@dataclass(slots=True)
class _Shape:
    """What a layer needs beside tensors."""

    heads: int
    kv_heads: int
    width: int
    scale: float
    eps: float
    micro: MicroBatch


def plain(layer: Any) -> bool:
    """Nothing around or inside the modules of this layer that one operation would pass over."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
    return (
        all(type(module) is nn.Linear for module in linears)
        and all(type(module) in (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm) for module in norms)
        and not any(module._forward_hooks or module._forward_pre_hooks for module in (*linears, *norms))
        and all(linear.bias is None for linear in linears[3:])
        and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
    )


def run_layer(layer: Any, hidden_TH: Tensor, cos_TD: Tensor, sin_TD: Tensor, micro: MicroBatch) -> Tensor:
    """TH after a layer for which `plain` holds."""
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
        qkv = x @ side_by_side((query_w, key_w, value_w)).t()
        if biases[0] is not None:
            qkv += side_by_side(biases)
        raw, query, key, value = _heads(qkv, shape, cos, sin, query_norm, key_norm)
        attended = flash_forward(query, key, value, shape.micro, shape.scale)
        middle = torch.addmm(hidden, attended[0].view(len(hidden), -1), out_w.t())
        x, scales_2 = kernels.norm(middle, norm_2, shape.eps)
        gate_up = x @ side_by_side((gate_w, up_w)).t()
        out = torch.addmm(middle, kernels.gate(gate_up), down_w.t())
        ctx.shape, ctx.angles = shape, (cos, sin)
        ctx.save_for_backward(hidden, raw, query, key, value, *attended, gate_up, scales_1, scales_2, *weights)
        return out

    @staticmethod
    def backward(ctx: Any, by_out: Tensor) -> tuple[Any, ...]:
        shape = ctx.shape
        saved = ctx.saved_tensors  # once: under activation checkpointing a second look is refused
        hidden, raw, query, key, value, *attended, gate_up, scales_1, scales_2 = saved[:12]
        norm_1, query_w, key_w, value_w, *biases, query_norm, key_norm, out_w, norm_2, gate_w, up_w, down_w = saved[12:]
        mixed = attended[0].view(len(hidden), -1)
        middle = torch.addmm(hidden, mixed, out_w.t())
        by_out = by_out.contiguous()
        by_gate_up, gated = kernels.gate_backward(gate_up, by_out @ down_w)
        by_down = by_out.t() @ gated
        x, _ = kernels.norm(middle, norm_2, shape.eps)
        by_gate, by_up = (part.t() @ x for part in by_gate_up.chunk(2, 1))
        by_x = by_gate_up @ side_by_side((gate_w, up_w))
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
        by_x = by_qkv @ side_by_side((query_w, key_w, value_w))
        by_hidden, by_norm_1 = kernels.norm_backward(by_x, hidden, norm_1, scales_1, by_middle)
        by_attention = (by_norm_1, *by_projections, *by_biases, *by_head_norms, by_out_w)
        return None, by_hidden, None, None, *by_attention, by_norm_2, by_gate, by_up, by_down


def _heads(
    qkv: Tensor, shape: _Shape, cos: Tensor, sin: Tensor, query_norm: Any, key_norm: Any
) -> tuple[Any, Tensor, Tensor, Tensor]:
    """(qkv if its queries and keys are needed as they were, query TND, key TKD, value TKD); the first two rotated."""
    heads = qkv.unflatten(1, (-1, shape.width))
    query, key, value = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
    if query_norm is None:
        turned = heads[:, : shape.heads + shape.kv_heads]
        kernels.rotate(turned, turned, cos, sin, back=False)
        return None, query, key, value
    query, _ = kernels.norm(query, query_norm, shape.eps)
    key, _ = kernels.norm(key, key_norm, shape.eps)
    kernels.rotate(query, query, cos, sin, back=False)
    kernels.rotate(key, key, cos, sin, back=False)
    return qkv, query, key, value


def _heads_backward(
    by_heads: Sequence[Tensor], raw: Any, angles: tuple[Tensor, Tensor], shape: _Shape, query_norm: Any, key_norm: Any
) -> tuple[Tensor, tuple[Any, Any]]:
    """(gradient by qkv, gradients by the norms of queries and keys)."""
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
        found = []
        for by, x, weight, to in ((by_query, query, query_norm, to_query), (by_key, key, key_norm, to_key)):
            turned = torch.empty(by.shape, dtype=by.dtype, device=by.device)
            kernels.rotate(by, turned, *angles, back=True)
            _, scales = kernels.norm(x, weight, shape.eps)
            found.append(kernels.norm_backward(turned, x, weight, scales, into=to)[1])
        by_norms = (found[0], found[1])
    return by_qkv.flatten(1), by_norms


def side_by_side(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor of all rows: a view where the engine has laid them out so, else a copy for the moment."""
    first, place = parameters[0], parameters[0].data_ptr()
    for parameter in parameters:
        if not parameter.is_contiguous() or parameter.data_ptr() != place:
            return torch.cat([p.detach() for p in parameters])
        place += parameter.numel() * parameter.element_size()
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    if len(storages) > 1:  # neighbours by chance
        return torch.cat([p.detach() for p in parameters])
    rows = sum(len(parameter) for parameter in parameters)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
