"""A decode step and a prefill pass over the kernels and the joint weights. Static shapes, no host round trips.

Shapes: B rows of a decode step, T packed tokens of a prefill pass, C hidden size.
"""

from __future__ import annotations

from typing import Any

import torch

from agentgym_rl.agent.engines.native.cache import SlotCache
from agentgym_rl.agent.engines.native.cuda.adapter_kernels import adapted_heads, adapted_silu, add_adapted
from agentgym_rl.agent.engines.native.cuda.adapters import JointAdapter, write_adapter_rows
from agentgym_rl.agent.engines.native.cuda.attention_kernels import decode_attention, prefill_attention
from agentgym_rl.agent.engines.native.cuda.drafts import accept, draft, drafted_picks
from agentgym_rl.agent.engines.native.cuda.joint_weights import LayerWeights, layer_weights, ranks
from agentgym_rl.agent.engines.native.cuda.layers import rms_norm, rope_and_store, silu_times
from agentgym_rl.agent.engines.native.cuda.matmul_kernels import add_product, embed, gate_up, qkv
from agentgym_rl.agent.engines.native.cuda.packing import Packed
from agentgym_rl.agent.engines.native.cuda.sample_kernels import Picks, RowState, pick

NARROW = 1024
"""Models up to this hidden size decode with the fused products only; for wider ones the library's are faster."""
NARROW_RANK = 64
"""Adapters of a higher rank are decoded with the library's products: the fused ones would need more registers."""


class CapturedModel:
    """The arithmetic of Llama, Qwen2 and Qwen3 on joint weights and a slot cache."""

    def __init__(self, model: Any, cache: SlotCache) -> None:
        self._model, self._cache = model, cache
        decoder = model.model
        self._embedding = decoder.embed_tokens.weight.data
        self._head = model.lm_head.weight.data
        self._norm = (decoder.norm.weight.data, decoder.norm.variance_epsilon)
        self._layers: list[LayerWeights] = [layer_weights(layer) for layer in decoder.layers]
        self._scaling = decoder.layers[0].self_attn.scaling
        self._ranks = ranks(model)
        self._adapters = [adapter for layer in self._layers for adapter in layer.adapters]
        # The fused products read rows before normalization, whose range float16 cannot hold.
        self._narrow = self._embedding.shape[1] <= NARROW and self._embedding.dtype != torch.float16
        self._narrow &= all(adapter.rank <= NARROW_RANK for adapter in self._adapters)
        device = self._embedding.device
        self._num_processors = 8  # an interpreter has none, and is faster with few programs
        if device.type == "cuda":
            self._num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._cos = self._sin = torch.empty(0)

    @property
    def num_positions(self) -> int:
        """Positions for which there are rotary angles."""
        return len(self._cos)

    def active_adapters(self) -> list[list[str]]:
        """Return the names of the active adapters of the first joint matrix with some: peft switches all at once. Empty
        only without adapters."""
        return self._adapters[0].active() if self._adapters else []

    def fits_adapters(self) -> bool:
        """Return whether the buffers can hold the present adapters of the model."""
        return not self._adapters or ranks(self._model) == self._ranks

    def load_adapters(self) -> None:
        """Copy the present adapters of the model, without which captured steps would use earlier ones."""
        for adapter in self._adapters:
            adapter.load()

    def write_adapter_rows(self) -> None:
        """Call before steps: another engine may have copied its adapters to the rows of the joint matrices."""
        write_adapter_rows(self._adapters)

    def refresh_rotary(self) -> None:
        """Compute the angles of every cache position with the model's own module: [L, D / 2] each."""
        like = torch.empty(0, dtype=self._embedding.dtype, device=self._embedding.device)
        positions = torch.arange(self._cache.spare_position + 1, device=like.device).unsqueeze(0)
        cos, sin = self._model.model.rotary_emb(like, positions)
        half = cos.shape[-1] // 2
        self._cos, self._sin = cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()

    def decode(self, state: RowState, picks: Picks, history: torch.Tensor, *, with_top_p: bool, width: int = 1) -> None:
        """Compute each row's token and sample the next one. `width` is 1 plus the tokens guessed from `history`, the
        tokens [slots, L] so far."""
        if width == 1:
            pick(self._next_logits(state, 1), state, picks, history, with_top_p=with_top_p)
            return
        drafts = draft(state, history, width)
        sampled = drafted_picks(len(drafts.token), history.device)
        logits = self._next_logits(drafts, width)
        pick(logits, drafts, sampled, history, with_top_p=with_top_p, width=width)
        accept(drafts, sampled, state, picks, history, width)

    def _next_logits(self, state: RowState, width: int) -> torch.Tensor:
        hidden = self._narrow_layers(state, width) if self._narrow else self._wide_layers(state, width)
        return _logits(rms_norm(hidden, *self._norm), self._head)

    def prefill(self, packed: Packed) -> None:
        """Compute keys and values of the packed tokens. Nothing is sampled, so the last layer stops after its keys."""
        hidden = self._embedding.index_select(0, packed.token_ids)
        for index, layer in enumerate(self._layers):
            keys, values = self._cache.keys[index], self._cache.values[index]
            query = self._query(index, layer, hidden, packed.slots, packed.positions, None)
            if index == len(self._layers) - 1:
                return
            mixed = prefill_attention(query, keys, values, packed.blocks, self._scaling, self._num_processors)
            self._finish_layer(layer, hidden, mixed)

    def _narrow_layers(self, state: RowState, width: int) -> torch.Tensor:
        stream = embed(state.token, self._embedding, self._layers[0].input_norm[0])
        for index, layer in enumerate(self._layers):
            query = qkv(
                stream,
                layer.input_norm[1],
                layer.qkv,
                layer.qkv_bias,
                layer.head_norms,
                self._cos,
                self._sin,
                self._cache.keys[index],
                self._cache.values[index],
                state.slot,
                state.position,
                state.done,
                layer.qkv_adapter,
            )
            mixed = self._attend(index, query, state, width)
            add_product(stream, mixed, layer.out, layer.out_bias, layer.post_norm[0], layer.out_adapter)
            inner = gate_up(stream, layer.post_norm[1], layer.gate_up, layer.gate_up_adapter)
            last = index + 1 == len(self._layers)
            next_norm = self._norm[0] if last else self._layers[index + 1].input_norm[0]
            add_product(stream, inner, layer.down, None, next_norm, layer.down_adapter)
        return stream.hidden

    def _wide_layers(self, state: RowState, width: int) -> torch.Tensor:
        hidden = self._embedding.index_select(0, state.token)
        for index, layer in enumerate(self._layers):
            query = self._query(index, layer, hidden, state.slot, state.position, state.done)
            mixed = self._attend(index, query, state, width)
            self._finish_layer(layer, hidden, mixed)
        return hidden

    def _attend(self, index: int, query: torch.Tensor, state: RowState, width: int) -> torch.Tensor:
        return decode_attention(
            query,
            self._cache.keys[index],
            self._cache.values[index],
            state.slot,
            state.position,
            state.done,
            self._scaling,
            self._num_processors,
            width,
        )

    def _query(
        self,
        index: int,
        layer: LayerWeights,
        hidden: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        done: torch.Tensor | None,
    ) -> torch.Tensor:
        normal = rms_norm(hidden, *layer.input_norm)
        keys, values = self._cache.keys[index], self._cache.values[index]
        write = (keys, values, layer.head_norms, self._cos, self._sin, slots, positions, done)
        if layer.qkv_adapter is not None:
            projected = _product(normal, layer.qkv_adapter.joint, None)
            return adapted_heads(projected, layer.qkv_adapter.b, layer.qkv_bias, *write)
        return rope_and_store(_product(normal, layer.qkv, layer.qkv_bias), *write)

    def _finish_layer(self, layer: LayerWeights, hidden: torch.Tensor, mixed: torch.Tensor) -> None:
        """Compute the layer after attention. The residual sums are part of the products."""
        _add_product(hidden, mixed, layer.out, layer.out_bias, layer.out_adapter)
        normal = rms_norm(hidden, *layer.post_norm)
        if layer.gate_up_adapter is not None:
            inner = adapted_silu(_product(normal, layer.gate_up_adapter.joint, None), layer.gate_up_adapter.b)
        else:
            inner = silu_times(_product(normal, layer.gate_up, None))
        _add_product(hidden, inner, layer.down, None, layer.down_adapter)


def _add_product(
    hidden: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    adapter: JointAdapter | None,
) -> None:
    if adapter is not None:
        add_adapted(hidden, _product(x, adapter.joint, None), adapter.b, bias)
        return
    torch.addmm(hidden, x, weight.t(), out=hidden)
    if bias is not None:
        hidden += bias


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def _logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return float32 logits without intermediate rounding."""
    if x.dtype is torch.float32:
        return torch.mm(x, weight.t())
    return torch.mm(x, weight.t(), out_dtype=torch.float32)
