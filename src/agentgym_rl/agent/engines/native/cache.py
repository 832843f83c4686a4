"""Keys and values of many sequences, one slot each, in two tensors."""

from __future__ import annotations

import torch


class SlotCache:
    """`keys` and `values` are [layers, slots, kv_heads, length + 1, head_dim].

    The last position of a slot belongs to no token: padding writes there. Memory grows to what is used, up to
    max_slots x max_length. Fresh memory is zero, never garbage: a masked position has weight 0, and 0 x NaN is NaN.
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
        self.keys, self.values = self._zeros(0, 0), self._zeros(0, 0)

    @property
    def spare_position(self) -> int:
        """Where padding is written."""
        return self.keys.shape[3] - 1

    def reserve(self, slots: int, length: int) -> None:
        """Make room for `slots` slots of `length` tokens, keeping what is stored."""
        old_slots, old_length = self.keys.shape[1], self.spare_position
        if slots <= old_slots and length <= old_length:
            return
        new_slots = old_slots if slots <= old_slots else min(self.max_slots, max(slots, 2 * old_slots))
        new_length = old_length if length <= old_length else min(self.max_length, max(length + 64, 2 * old_length))
        # Both or none: where there is no memory for the second, the first stays what it was.
        keys, values = self._zeros(new_slots, new_length), self._zeros(new_slots, new_length)
        for old, new in ((self.keys, keys), (self.values, values)):
            new[:, :old_slots, :, :old_length] = old[:, :, :, :old_length]
        self.keys, self.values = keys, values

    def clear(self, slot: int) -> None:
        if slot < self.keys.shape[1]:
            self.keys[:, slot] = 0
            self.values[:, slot] = 0

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` positions of one slot to another."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]

    def bytes_of(self, slots: int, length: int) -> int:
        """What keys and values of so many slots and tokens take."""
        return 2 * self._layers * slots * self._heads * (length + 1) * self._head_dim * self._dtype.itemsize

    def _zeros(self, slots: int, length: int) -> torch.Tensor:
        shape = (self._layers, slots, self._heads, length + 1, self._head_dim)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)
