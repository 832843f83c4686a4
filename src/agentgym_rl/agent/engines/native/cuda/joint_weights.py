"""The model's own parameters in joint matrices: q, k, v in one, gate and up in another.

Nothing is stored twice. The parameters remain the same objects and become views of the joint matrices, so in-place
optimizers, load_state_dict and save_pretrained work as before. With LoRA every matrix has further rows (`adapters.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from agentgym_rl.agent.engines.native.cuda.adapters import (
    ExtendedMatrix,
    JointAdapter,
    base_layer,
    padded_rank,
    why_not_adapted,
)
from agentgym_rl.agent.engines.native.decoder import unwrap
from agentgym_rl.common.decoders import RMS_NORMS

HEAD_DIMS = (16, 32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDE_HEADS_BYTES = 160 << 10
"""Maximum shared memory of attention over heads of 256. Narrower heads fit every device."""
_MATRICES: WeakValueDictionary[int, ExtendedMatrix] = WeakValueDictionary()
"""Joint matrices with rows for adapters, by address."""


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
    qkv_adapter: JointAdapter | None
    out_adapter: JointAdapter | None
    gate_up_adapter: JointAdapter | None
    down_adapter: JointAdapter | None

    @property
    def adapters(self) -> list[JointAdapter]:
        each = (self.qkv_adapter, self.out_adapter, self.gate_up_adapter, self.down_adapter)
        return [adapter for adapter in each if adapter is not None]


def projections(layer: Any) -> list[Any]:
    """Return the modules of a layer that may have adapters."""
    attention, mlp = layer.self_attn, layer.mlp
    return [
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    ]


def why_not_captured(model: Any) -> str | None:
    """Return None if captured steps support this model (one that DecoderRunner supports), else the reason."""
    inner = unwrap(model)
    config, decoder = inner.config, inner.model
    if inner is not model and getattr(model, "peft_type", None) != "LORA":
        return f"it is wrapped by {type(model).__name__}"
    parameters = [parameter for name, parameter in inner.named_parameters() if ".lora_" not in name]
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
    linears, norms = [], [decoder.norm]
    for layer in decoder.layers:
        attention = layer.self_attn
        linears += projections(layer)
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
    for module in (*map(base_layer, linears), *norms, inner.lm_head, decoder.embed_tokens):
        plain = type(module) in (nn.Linear, nn.Embedding, *RMS_NORMS)
        if not plain or module._forward_hooks or module._forward_pre_hooks:
            return f"one of its layers is a {type(module).__name__} (an adapter, perhaps) or has hooks"
    if (reason := next(filter(None, map(why_not_adapted, linears)), None)) is not None:
        return reason
    if any(base_layer(linear).bias is not None for layer in decoder.layers for linear in projections(layer)[4:]):
        return "its MLP has biases"
    if inner.lm_head.bias is not None:
        return "its head has a bias"
    return None


def join(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one tensor with all parameters in order, which become views of it. Copies only if they are not yet."""
    first = parameters[0]
    if _are_adjacent(parameters):
        shape = (sum(map(len, parameters)), *first.shape[1:])
        return first.data.as_strided(shape, first.stride(), first.storage_offset())
    return _moved(parameters, 0)


def join_with_rows(parameters: Sequence[torch.Tensor], spare: int) -> ExtendedMatrix:
    """Join parameters in a matrix with at least `spare` further rows, which may be another engine's."""
    extended = _MATRICES.get(parameters[0].data_ptr())
    if extended is None or not _are_adjacent(parameters) or len(extended.matrix) < sum(map(len, parameters)) + spare:
        extended = ExtendedMatrix(_moved(parameters, spare))
        _MATRICES[extended.matrix.data_ptr()] = extended
    return extended


def _are_adjacent(parameters: Sequence[torch.Tensor]) -> bool:
    storage, end = parameters[0].untyped_storage().data_ptr(), parameters[0].data_ptr()
    for parameter in parameters:
        if not parameter.is_contiguous() or parameter.data_ptr() != end:
            return False
        if parameter.untyped_storage().data_ptr() != storage:
            return False
        end += parameter.numel() * parameter.element_size()
    return True


def _moved(parameters: Sequence[torch.Tensor], spare: int) -> torch.Tensor:
    """Move parameters to one tensor, in order, with `spare` rows of zeros after them."""
    first = parameters[0]
    shape = (sum(map(len, parameters)) + spare, *first.shape[1:])
    joint = torch.empty(shape, dtype=first.dtype, device=first.device)
    row = 0
    for parameter in parameters:
        view = joint[row : row + len(parameter)]
        view.copy_(parameter.data)
        parameter.data = view
        row += len(parameter)
    joint[row:] = 0
    return joint


def joint_adapter(modules: Sequence[Any]) -> JointAdapter | None:
    """Return the adapters of modules that share a product, or None. Moves their weights to an extended matrix."""
    rank = max(map(padded_rank, modules))
    if rank == 0:
        return None
    return JointAdapter(modules, join_with_rows([base_layer(m).weight for m in modules], len(modules) * rank), rank)


def layer_weights(layer: Any) -> LayerWeights:
    attention = layer.self_attn
    query, key, value, out, gate, up, down = projections(layer)
    # Before the weights are joined, because adapters move them.
    adapters = [joint_adapter(modules) for modules in ((query, key, value), (out,), (gate, up), (down,))]
    query, key, value, out, gate, up, down = map(base_layer, projections(layer))
    norms = None
    if hasattr(attention, "q_norm"):
        eps = attention.q_norm.variance_epsilon
        norms = (attention.q_norm.weight.data, attention.k_norm.weight.data, eps)
    return LayerWeights(
        input_norm=(layer.input_layernorm.weight.data, layer.input_layernorm.variance_epsilon),
        qkv=join([query.weight, key.weight, value.weight]),
        qkv_bias=None if query.bias is None else join([query.bias, key.bias, value.bias]),
        head_norms=norms,
        out=out.weight.data,
        out_bias=None if out.bias is None else out.bias.data,
        post_norm=(layer.post_attention_layernorm.weight.data, layer.post_attention_layernorm.variance_epsilon),
        gate_up=join([gate.weight, up.weight]),
        down=down.weight.data,
        qkv_adapter=adapters[0],
        out_adapter=adapters[1],
        gate_up_adapter=adapters[2],
        down_adapter=adapters[3],
    )


def addresses(modules: Iterable[nn.Module]) -> tuple[int, ...]:
    """Return the address of every parameter of the modules. Captured steps are valid only for these."""
    return tuple(p.data_ptr() for module in modules for p in module._parameters.values() if p is not None)


def weight_modules(model: Any) -> list[nn.Module]:
    """Return the modules that have parameters, but the adapters'."""
    return [module for name, module in model.named_modules() if module._parameters and ".lora_" not in name]


def ranks(model: Any) -> tuple[int, ...]:
    """Return the columns of every projection's adapters. Captured steps are valid only for these."""
    return tuple(padded_rank(module) for layer in model.model.layers for module in projections(layer))
