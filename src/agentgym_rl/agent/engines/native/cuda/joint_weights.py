"""The model's own parameters in joint matrices: q, k, v in one, gate and up in another.

Nothing is stored twice. The parameters remain the same objects and become views of the joint matrices, so in-place
optimizers, load_state_dict and save_pretrained work as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from agentgym_rl.agent.engines.native.decoder import unwrap
from agentgym_rl.common.decoders import RMS_NORMS

HEAD_DIMS = (32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDE_HEADS_BYTES = 160 << 10
"""Maximum shared memory of attention over heads of 256. Narrower heads fit every device."""


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Return the shared memory of one program: 227 KiB on Hopper, 163 on an A100, 99 on consumer cards. Without CUDA
    kernels are interpreted and there is no limit."""
    if device.type != "cuda":
        return 1 << 30
    properties: Any = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))  # not in HIP


@dataclass(slots=True)
class LayerWeights:
    """Tensors of one layer, [out, in] as in torch.nn.Linear."""

    input_norm: tuple[torch.Tensor, float]
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norms: tuple[torch.Tensor, torch.Tensor, float] | None
    """Weights of the norms of queries and keys (Qwen3)."""
    out: torch.Tensor
    out_bias: torch.Tensor | None
    post_norm: tuple[torch.Tensor, float]
    gate_up: torch.Tensor
    down: torch.Tensor


def why_not_captured(model: Any) -> str | None:
    """Return None if captured steps support this model (one that DecoderRunner supports), else the reason."""
    inner = unwrap(model)
    config, decoder = inner.config, inner.model
    if inner is not model:
        return "it is wrapped, for example by an adapter"
    parameters = list(model.parameters())
    if len({p.device for p in parameters}) > 1 or len({p.dtype for p in parameters}) > 1:
        return "its parameters are of several devices or types"
    if parameters[0].dtype not in DTYPES:
        return f"its parameters are {parameters[0].dtype}"
    head_dim = decoder.layers[0].self_attn.head_dim
    if head_dim not in HEAD_DIMS:
        return f"its heads are {head_dim} wide, not one of {', '.join(map(str, HEAD_DIMS))}"
    if head_dim == 256 and (available := shared_memory(parameters[0].device)) < WIDE_HEADS_BYTES:
        return f"heads of 256 need {WIDE_HEADS_BYTES >> 10} KiB of shared memory, this device has {available >> 10}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    linears, norms = [inner.lm_head], [decoder.norm]
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        linears += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
    for module in (*linears, *norms, decoder.embed_tokens):
        plain = type(module) in (nn.Linear, nn.Embedding, *RMS_NORMS)
        if not plain or module._forward_hooks or module._forward_pre_hooks:
            return f"one of its layers is a {type(module).__name__} (an adapter, perhaps) or has hooks"
    if any(
        linear.bias is not None
        for layer in decoder.layers
        for linear in layer.mlp.children()
        if hasattr(linear, "bias")
    ):
        return "its MLP has biases"
    if inner.lm_head.bias is not None:
        return "its head has a bias"
    return None


def join(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one tensor with all parameters in order, which become views of it. Copies only if they are not yet."""
    first = parameters[0]
    end = first.data_ptr()
    adjacent = True
    for parameter in parameters:
        adjacent &= parameter.is_contiguous() and parameter.data_ptr() == end
        adjacent &= parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        end += parameter.numel() * parameter.element_size()
    num_rows = sum(len(parameter) for parameter in parameters)
    shape = (num_rows, *first.shape[1:])
    if adjacent:
        return first.data.as_strided(shape, first.stride(), first.storage_offset())
    joint = torch.empty(shape, dtype=first.dtype, device=first.device)
    row = 0
    for parameter in parameters:
        view = joint[row : row + len(parameter)]
        view.copy_(parameter.data)
        parameter.data = view
        row += len(parameter)
    return joint


def layer_weights(layer: Any) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    norms = None
    if hasattr(attention, "q_norm"):
        eps = attention.q_norm.variance_epsilon
        norms = (attention.q_norm.weight.data, attention.k_norm.weight.data, eps)
    return LayerWeights(
        input_norm=(layer.input_layernorm.weight.data, layer.input_layernorm.variance_epsilon),
        qkv=join([p.weight for p in projections]),
        qkv_bias=None if attention.q_proj.bias is None else join([p.bias for p in projections]),
        head_norms=norms,
        out=attention.o_proj.weight.data,
        out_bias=None if attention.o_proj.bias is None else attention.o_proj.bias.data,
        post_norm=(layer.post_attention_layernorm.weight.data, layer.post_attention_layernorm.variance_epsilon),
        gate_up=join([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down=mlp.down_proj.weight.data,
    )


def addresses(model: Any) -> tuple[int, ...]:
    """Return the address of every parameter. Captured steps are valid only for these."""
    return tuple(parameter.data_ptr() for parameter in model.parameters())
