"""KV cache of many sequences: one slot per sequence, one tensor per layer."""

from __future__ import annotations

import torch


class SlotCache:
    """`keys` and `values` have a tensor [slots, kv_heads, length + 1, head_dim] for each layer.

    The last position of a slot belongs to no token: padding is written there. Memory grows as needed, up to max_slots x
    max_length, one layer after the other, so that only one layer is in memory twice. New memory is zeroed: a masked
    position has weight 0, and 0 x NaN is NaN.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_slots: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.max_slots = max_slots
        self.max_length = max_length
        self._layers, self._heads, self._head_dim = num_layers, num_kv_heads, head_dim
        self._dtype, self._device = dtype, device
        self.free()

    def free(self) -> None:
        self._layers_kv = [self._zeros(0, 0) for _ in range(self._layers)]

    @property
    def keys(self) -> list[torch.Tensor]:
        return [layer_kv[0] for layer_kv in self._layers_kv]

    @property
    def values(self) -> list[torch.Tensor]:
        return [layer_kv[1] for layer_kv in self._layers_kv]

    @property
    def spare_position(self) -> int:
        """Position to which padding is written."""
        return self._layers_kv[-1].shape[3] - 1  # the last layer is the last to grow

    def reserve(self, slots: int, length: int) -> None:
        """Reserve memory for `slots` slots of `length` tokens and keep the contents.

        If memory runs out halfway, the first layers are larger than needed, and the contents are intact.
        """
        old_slots, old_length = self._layers_kv[-1].shape[1], self.spare_position
        if slots <= old_slots and length <= old_length:
            return
        new_slots = old_slots if slots <= old_slots else min(self.max_slots, max(slots, 2 * old_slots))
        new_length = old_length if length <= old_length else min(self.max_length, max(length + 64, 2 * old_length))
        for layer, old in enumerate(self._layers_kv):
            has_slots, has_length = old.shape[1], old.shape[3] - 1
            if new_slots > has_slots or new_length > has_length:
                new = self._zeros(max(new_slots, has_slots), max(new_length, has_length))
                new[:, :old_slots, :, :old_length] = old[:, :old_slots, :, :old_length]
                self._layers_kv[layer] = new

    def clear(self, slot: int) -> None:
        for layer_kv in self._layers_kv:
            if slot < layer_kv.shape[1]:
                layer_kv[:, slot] = 0

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        for layer_kv in self._layers_kv:
            layer_kv[:, target, :, :length] = layer_kv[:, source, :, :length]

    def bytes_of(self, slots: int, length: int) -> int:
        """Return the size of a cache with so many slots and tokens."""
        return 2 * self._layers * slots * self._heads * (length + 1) * self._head_dim * self._dtype.itemsize

    def _zeros(self, slots: int, length: int) -> torch.Tensor:
        """Return zeroed keys and values of one layer."""
        shape = (2, slots, self._heads, length + 1, self._head_dim)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)
