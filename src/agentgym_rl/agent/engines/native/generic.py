"""A runner for any causal decoder of transformers, on the model's own forward pass and cache interface.

The model calls `Cache.update` in every attention layer. Here it writes the new keys and values into slots and returns
those of the batch's sequences, aligned on the right as in `generate`, so that an ordinary attention mask works.

Shapes: B rows, T new tokens, L tokens of the longest row, K key/value heads, D head width.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from agentgym_rl.agent.engines.native.decoder import share_prompts, unwrap
from agentgym_rl.agent.engines.native.grouping import RowGroup, group_rows
from agentgym_rl.agent.engines.native.in_place import evaluating
from agentgym_rl.agent.engines.native.runner import Row
from agentgym_rl.common.decoders import STATIC_ROPE

CHECK_TOKENS = 24
"""Tokens of the sequence that `why_not_cached` computes in two ways."""
MAX_CHECK_ERROR = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Largest difference of a logit from a full forward pass, relative to the spread of the logits."""


@dataclass(slots=True)
class Indices:
    """Where a pass reads and writes, the same in every layer."""

    slots: torch.Tensor
    """[B, 1]."""
    written: torch.Tensor
    """[B, T]: position of each new token; padding goes to the spare position."""
    read: torch.Tensor
    """[B, L]: position of each token to attend to; 0 for padding, which is masked."""
    past: int
    """Columns of `read` before the new tokens."""


class SlotLayer(DynamicLayer):
    """Keys and values of one layer, [slots, K, length + 1, D] each. The last position is for padding."""

    def __init__(self) -> None:
        super().__init__()
        self._keys = self._values = torch.empty(0)
        self.indices: Indices | None = None
        self._updated = False

    def start(self, indices: Indices) -> None:
        """Prepare for a forward pass."""
        self.indices, self._updated = indices, False

    def reserve(self, slots: int, length: int) -> None:
        """Grow the tensors, if there are any, and keep their contents."""
        self._keys, self._values = self._grown(self._keys, slots, length), self._grown(self._values, slots, length)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Store the new keys and values [B, K, T, D]; return those of all tokens [B, K, L, D]."""
        assert self.indices is not None
        if not self._keys.numel():
            self._keys, self._values = self._empty(key_states), self._empty(value_states)
        at = self.indices
        self._updated = True
        for tensor, new in ((self._keys, key_states), (self._values, value_states)):
            tensor[at.slots, :, at.written] = new.transpose(1, 2)
        keys, values = (tensor[at.slots, :, at.read].transpose(1, 2) for tensor in (self._keys, self._values))
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        if self.indices is None:
            return 0
        return self.indices.past + (self.indices.written.shape[1] if self._updated else 0)

    def get_mask_sizes(self, query_length: Any, *_: Any) -> tuple[int, int]:
        new = query_length if isinstance(query_length, int) else len(query_length)  # a tensor before 5.18
        return (0 if self.indices is None else self.indices.past) + new, 0

    def copy(self, source: int, target: int, length: int) -> None:
        for tensor in (self._keys, self._values):
            tensor[target, :, :length] = tensor[source, :, :length]

    def clear(self, slot: int) -> None:
        for tensor in (self._keys, self._values):
            if slot < len(tensor):
                tensor[slot] = 0

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros((*self._shape[:1], like.shape[1], self._shape[1] + 1, like.shape[3]))

    def _grown(self, old: torch.Tensor, slots: int, length: int) -> torch.Tensor:
        self._shape = (slots, length)
        if not old.numel():
            return old
        new = old.new_zeros((slots, old.shape[1], length + 1, old.shape[3]))
        new[: len(old), :, : old.shape[2] - 1] = old[:, :, :-1]
        return new


class GenericRunner:
    """Runs a model for which `why_not_cached` returns None."""

    keeps_cache = True

    def __init__(self, model: Any, *, max_slots: int, max_length: int) -> None:
        self._model = model
        self._max_slots, self._max_length = max_slots, max_length
        parameters = inspect.signature(unwrap(model).forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._takes_positions = "position_ids" in parameters
        self._num_layers = unwrap(model).config.get_text_config().num_hidden_layers
        self._device = unwrap(model).get_input_embeddings().weight.device
        self.free()

    @torch.inference_mode()
    def forward(self, rows: list[Row]) -> tuple[torch.Tensor, int]:
        self._reserve(max(row.slot for row in rows) + 1, max(len(row.token_ids) for row in rows))
        leaders, leader_of = share_prompts(rows)
        logits: list[torch.Tensor] = [torch.empty(0)] * len(leaders)
        for group in group_rows(leaders):
            for index, row_logits in zip(group.indices, self._forward_group(group), strict=True):
                logits[index] = row_logits
        for row, leader in zip(rows, leader_of, strict=True):
            if row is not leaders[leader]:
                for layer in self._layers:
                    layer.copy(leaders[leader].slot, row.slot, len(row.token_ids))
        computed = sum(len(row.token_ids) - row.start for row in leaders)
        return torch.stack([logits[leader] for leader in leader_of]), computed

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        for layer in self._layers:
            layer.clear(slot)

    def free(self) -> None:
        self._layers = [SlotLayer() for _ in range(self._num_layers)]
        self._slots = self._length = 0

    def resize(self, max_slots: int) -> None:
        self.free()
        self._max_slots = max_slots

    def _reserve(self, slots: int, length: int) -> None:
        if slots <= self._slots and length <= self._length:
            return
        if slots > self._slots:
            self._slots = min(self._max_slots, max(slots, 2 * self._slots))
        if length > self._length:
            self._length = min(self._max_length, max(length + 64, 2 * self._length))
        for layer in self._layers:
            layer.reserve(self._slots, self._length)

    def _forward_group(self, group: RowGroup) -> torch.Tensor:
        """Return float32 logits after the last token of each row.

        No padding is allowed between cached and new tokens, because windows of attention count columns. So a row with
        fewer new tokens computes some cached ones again.
        """
        width = group.num_new
        rows = [replace(row, start=max(0, len(row.token_ids) - width)) for row in group.rows]
        past = max(row.start for row in rows)
        token_ids, written, read, mask, positions = [], [], [], [], []
        for row in rows:
            end = len(row.token_ids)
            padding, gap = width - (end - row.start), past + width - end
            token_ids.append([0] * padding + row.token_ids[row.start :])
            written.append([self._length] * padding + [*range(row.start, end)])
            read.append([0] * gap + [*range(end)])
            mask.append([0] * gap + [1] * end)
            positions.append([0] * padding + [*range(row.start, end)])
        slots = torch.tensor([[row.slot] for row in rows], device=self._device)
        indices = Indices(slots, self._tensor(written), self._tensor(read), past)
        for layer in self._layers:
            layer.start(indices)
        options: dict[str, Any] = dict(self._options)
        if self._takes_positions:
            options["position_ids"] = self._tensor(positions)
        output = self._model(
            input_ids=self._tensor(token_ids),
            attention_mask=self._tensor(mask),
            past_key_values=Cache(layers=list(self._layers)),
            use_cache=True,
            **options,
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def _tensor(self, values: list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, device=self._device)


def why_not_cached(model: Any) -> str | None:
    """Return None if GenericRunner computes this model exactly, else the reason.

    Besides the rope type, which matters only in long sequences, a short sequence is computed in both ways.
    """
    config = unwrap(model).config.get_text_config()
    if unusual := _rope_types(getattr(config, "rope_parameters", None)) - {*STATIC_ROPE, "proportional"}:
        return f"its rotary embedding is of type {', '.join(sorted(unusual))}"
    generator = torch.Generator().manual_seed(0)
    size = unwrap(model).get_input_embeddings().weight.shape[0]
    ids = torch.randint(size, (CHECK_TOKENS,), generator=generator).tolist()
    runner = GenericRunner(model, max_slots=2, max_length=CHECK_TOKENS)
    try:
        with evaluating(model), torch.inference_mode():
            whole = torch.tensor([ids], device=unwrap(model).get_input_embeddings().weight.device)
            expected = model(input_ids=whole, use_cache=False).logits[0].float()
            runner.forward([Row(0, ids[:5], 0), Row(1, ids[:11], 0)])
            cuts = [(9, 5), (CHECK_TOKENS - 1, 11)]
            rows = [Row(slot, ids[:end], start) for slot, (end, start) in enumerate(cuts)]
            first = runner.forward(rows)[0]
            second = runner.forward([Row(slot, ids[: end + 1], end) for slot, (end, _) in enumerate(cuts)])[0]
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return f"its forward pass does not work with a cache of slots: {type(error).__name__}: {error}"
    ends = torch.tensor([end for end, _ in cuts], device=expected.device)
    wanted = torch.cat([expected[ends - 1], expected[ends]])
    error_size = float((torch.cat([first, second]) - wanted).abs().max() / wanted.std())
    limit = MAX_CHECK_ERROR.get(next(model.parameters()).dtype, 1e-3)
    return None if error_size <= limit else f"its cached forward pass differs from a full one by {error_size:.2g}"


def _rope_types(parameters: Any) -> set[str]:
    """Return the rope types of a config, which may have parameters for each type of layer."""
    if not isinstance(parameters, dict):
        return set()
    types = {str(parameters["rope_type"])} if "rope_type" in parameters else set()
    return types.union(*(_rope_types(value) for value in parameters.values()))
