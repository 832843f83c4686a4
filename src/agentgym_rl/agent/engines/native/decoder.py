"""A fast forward pass over the modules of Llama-like decoders, with a slot cache. Works on any device.

It uses the model's own parameters, so a learner's in-place update takes effect at once. Projections are called as
modules, so that adapters wrapped around them work.

Shapes: B rows, T new tokens (padded), L cached positions read, H query heads, K key/value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from agentgym_rl.agent.engines.native.cache import SlotCache
from agentgym_rl.agent.engines.native.grouping import RowGroup, group_rows
from agentgym_rl.agent.engines.native.runner import Row
from agentgym_rl.common.decoders import CAUSAL_MODELS, RMS_NORMS, STATIC_ROPE


def unwrap(model: Any) -> Any:
    """Return the causal language model inside an adapter wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def why_unsupported(model: Any) -> str | None:
    """Return None if DecoderRunner computes this model exactly, else the reason."""
    model = unwrap(model)
    if type(model) not in CAUSAL_MODELS:
        return f"{type(model).__name__} is not one of {', '.join(kind.__name__ for kind in CAUSAL_MODELS)}"
    config = model.config
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if getattr(config, "use_sliding_window", False) or layer_types != {"full_attention"}:
        return "it uses sliding-window attention"
    if model.model.rotary_emb.rope_type not in STATIC_ROPE:
        return f"its rotary embedding is of type {model.model.rotary_emb.rope_type!r}"
    return None


@dataclass(slots=True)
class Batch:
    """One group of rows as tensors."""

    token_ids: torch.Tensor
    """[B, T], padded on the right."""
    positions: torch.Tensor
    """[B, T], padding at the cache's spare position."""
    slots: torch.Tensor
    """[B, 1]."""
    last: torch.Tensor
    """[B]: index in T of each row's last token."""
    length: int
    """L."""
    fresh: bool
    """Nothing is cached for any row, so attention covers only the new tokens."""
    slot_range: tuple[int, int] | None
    """Read these slots in place instead of gathering."""
    bias: torch.Tensor | None
    """[B or slots of the range, 1, T, L]: 0 where a query may attend, -inf elsewhere; None if fresh."""
    range_indices: torch.Tensor | None
    """[B]: index of each row in slot_range; None if the rows are the range, in order."""


class DecoderRunner:
    """Runs LlamaForCausalLM and its close relatives."""

    keeps_cache = True

    def __init__(self, model: Any, *, max_slots: int, max_length: int) -> None:
        self._model = unwrap(model)
        self._decoder = self._model.model
        config = self._model.config
        self._num_heads = config.num_attention_heads
        self._num_kv_heads = config.num_key_value_heads
        self._head_dim = self._decoder.layers[0].self_attn.head_dim
        self._device = self._decoder.embed_tokens.weight.device
        self._dtype = self._decoder.embed_tokens.weight.dtype
        self.cache = SlotCache(
            num_layers=config.num_hidden_layers,
            num_kv_heads=self._num_kv_heads,
            head_dim=self._head_dim,
            max_slots=max_slots,
            max_length=max_length,
            dtype=self._dtype,
            device=self._device,
        )
        self._cos, self._sin = self._rotary_tables(0)

    @torch.inference_mode()
    def forward(self, rows: list[Row]) -> tuple[torch.Tensor, int]:
        self.cache.reserve(max(row.slot for row in rows) + 1, max(len(row.token_ids) for row in rows))
        if len(self._cos) <= self.cache.spare_position:
            self._cos, self._sin = self._rotary_tables(self.cache.spare_position + 1)
        leaders, leader_of = share_prompts(rows)
        groups = group_rows(leaders)
        logits = torch.cat([self._forward_group(group) for group in groups])
        computed_order = [leader for group in groups for leader in group.indices]
        order = {leader: index for index, leader in enumerate(computed_order)}
        for row, leader in zip(rows, leader_of, strict=True):
            if row is not leaders[leader]:
                self.cache.copy(leaders[leader].slot, row.slot, len(row.token_ids))
        picked = [order[leader] for leader in leader_of]
        if picked != list(range(len(picked))):
            logits = logits[torch.tensor(picked, device=self._device)]
        return logits, sum(len(row.token_ids) - row.start for row in leaders)

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        self.cache.clear(slot)

    @torch.inference_mode()
    def free(self) -> None:
        self.cache.free()

    def resize(self, max_slots: int) -> None:
        self.free()
        self.cache.max_slots = max_slots

    def _forward_group(self, group: RowGroup) -> torch.Tensor:
        batch = self._batch(group)
        decoder, head_dim = self._decoder, self._head_dim
        hidden = decoder.embed_tokens(batch.token_ids)
        cos, sin = self._cos[batch.positions].unsqueeze(2), self._sin[batch.positions].unsqueeze(2)
        heads = (*batch.token_ids.shape, -1, head_dim)
        for index, layer in enumerate(decoder.layers):
            attention = layer.self_attn
            x = _normalise(layer.input_layernorm, hidden)
            query = attention.q_proj(x).view(heads)
            key = attention.k_proj(x).view(heads)
            value = attention.v_proj(x).view(heads)
            if hasattr(attention, "q_norm"):
                query, key = _normalise(attention.q_norm, query), _normalise(attention.k_norm, key)
            query, key = _rotate(query, key, cos, sin)
            self.cache.keys[index][batch.slots, :, batch.positions] = key
            self.cache.values[index][batch.slots, :, batch.positions] = value
            mixed = self._attend(index, query, key, value, batch, attention.scaling)
            if layer is decoder.layers[-1]:  # only the last token of a row is read
                rows = torch.arange(len(hidden), device=self._device)
                hidden, mixed = hidden[rows, batch.last], mixed[rows, batch.last]
            hidden += attention.o_proj(mixed)
            hidden += layer.mlp(_normalise(layer.post_attention_layernorm, hidden))
        return self._model.lm_head(_normalise(decoder.norm, hidden)).float()

    def _attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Batch, scaling: float
    ) -> torch.Tensor:
        """Return attention [B, T, H * D] of queries [B, T, H, D]."""
        grouped = self._num_heads != self._num_kv_heads
        rows, num_new = query.shape[:2]
        if batch.fresh:
            mixed = F.scaled_dot_product_attention(
                query.transpose(1, 2),
                key.transpose(1, 2),
                value.transpose(1, 2),
                is_causal=True,
                scale=scaling,
                enable_gqa=grouped,
            )
            return mixed.transpose(1, 2).reshape(rows, num_new, -1)
        keys, values = self._cached(layer, batch)
        if batch.range_indices is not None:
            scattered = query.new_zeros((keys.shape[0], *query.shape[1:]))
            scattered[batch.range_indices] = query
            query = scattered
        if num_new == 1:
            mixed = self._attend_one(query, keys, values, batch.bias, scaling)
        else:
            mixed = F.scaled_dot_product_attention(
                query.transpose(1, 2), keys, values, batch.bias, scale=scaling, enable_gqa=grouped
            )
            mixed = mixed.transpose(1, 2)
        if batch.range_indices is not None:
            mixed = mixed[batch.range_indices]
        return mixed.reshape(rows, num_new, -1)

    def _attend_one(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scaling: float
    ) -> torch.Tensor:
        """Attend with one query per row: two batched products over the heads of a group, faster on CPU than SDPA."""
        query = query.reshape(query.shape[0], self._num_kv_heads, -1, self._head_dim)
        scores = torch.matmul(query * scaling, keys.transpose(2, 3))
        if bias is not None:
            scores += bias
        return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype), values)

    def _cached(self, layer: int, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [B or slots of the range, K, L, D]."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if batch.slot_range is not None:
            low, high = batch.slot_range
            return keys[low:high, :, : batch.length], values[low:high, :, : batch.length]
        slots = batch.slots[:, 0]
        return keys[:, :, : batch.length].index_select(0, slots), values[:, :, : batch.length].index_select(0, slots)

    def _batch(self, group: RowGroup) -> Batch:
        rows, width, spare = group.rows, group.num_new, self.cache.spare_position
        token_ids, positions, last = [], [], []
        for row in rows:
            new, end = row.token_ids[row.start :], len(row.token_ids)
            padding = width - len(new)
            token_ids.append(new + [0] * padding)
            positions.append([*range(row.start, end)] + [spare] * padding)
            last.append(len(new) - 1)
        slots = [row.slot for row in rows]
        slot_range = None if group.fresh else group.slot_range
        device = self._device
        positions_BT = torch.tensor(positions, device=device)
        range_indices = bias = None
        if slot_range is not None and slots != list(range(*slot_range)):
            range_indices = torch.tensor(slots, device=device) - slot_range[0]
        if not group.fresh:
            bias = self._bias(positions_BT, group.length)
            if range_indices is not None and slot_range is not None:
                # Slots of the range outside the group attend to everything, and their results are discarded.
                scattered = bias.new_zeros((slot_range[1] - slot_range[0], *bias.shape[1:]))
                scattered[range_indices] = bias
                bias = scattered
        return Batch(
            token_ids=torch.tensor(token_ids, device=device),
            positions=positions_BT,
            slots=torch.tensor(slots, device=device).unsqueeze(1),
            last=torch.tensor(last, device=device),
            length=group.length,
            fresh=group.fresh,
            slot_range=slot_range,
            bias=bias,
            range_indices=range_indices,
        )

    def _bias(self, positions: torch.Tensor, length: int) -> torch.Tensor:
        columns = torch.arange(length, device=self._device)
        hidden = columns > positions.unsqueeze(-1)
        return (
            torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
            .masked_fill_(hidden, float("-inf"))
            .unsqueeze(1)
        )

    def _rotary_tables(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine [length, D] of the model's own module. The first half of the sine is negated."""
        like = torch.empty(0, dtype=self._dtype, device=self._device)
        positions = torch.arange(length, device=self._device).unsqueeze(0)
        cos, sin = self._decoder.rotary_emb(like, positions)
        sin = sin.clone()
        sin[..., : self._head_dim // 2].neg_()
        return cos[0], sin[0]


def share_prompts(rows: list[Row]) -> tuple[list[Row], list[int]]:
    """Find rows with the same prompt (a group's trajectories), which is computed once.

    Returns the rows to compute and, for each row, the index of the one that it shares.
    """
    leaders: list[Row] = []
    leader_of: list[int] = []
    seen: dict[tuple[int, ...], int] = {}
    for row in rows:
        prompt = tuple(row.token_ids) if row.start == 0 else None
        if prompt is not None and prompt in seen:
            leader_of.append(seen[prompt])
            continue
        if prompt is not None:
            seen[prompt] = len(leaders)
        leader_of.append(len(leaders))
        leaders.append(row)
    return leaders, leader_of


def _normalise(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Apply the RMS norm in one operation if the arithmetic is the same (float32), else with the module."""
    if x.dtype is torch.float32 and type(norm) in RMS_NORMS:
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
    return norm(x)


def _rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rotary embedding to queries and keys together, which halves the number of operations."""
    num_heads, half = query.shape[2], query.shape[3] // 2
    joined = torch.cat([query, key], dim=2)
    swapped = torch.cat([joined[..., half:], joined[..., :half]], dim=-1)
    joined.mul_(cos).addcmul_(swapped, sin)
    return joined[:, :, :num_heads], joined[:, :, num_heads:]
