"""What stands between the scheduler and a model: rows in, next-token logits out.

A faster way to run a model (CUDA graphs, say) is another Runner; the scheduler does not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(slots=True)
class Row:
    """One sequence in one forward pass."""

    slot: int
    """Where its keys and values are kept."""
    token_ids: list[int]
    """The whole sequence so far. Read only: it is the scheduler's own list."""
    start: int
    """The first `start` tokens are in the cache already; the others are computed now (at least one)."""


class Runner(Protocol):
    keeps_cache: bool
    """False when every call computes whole sequences again: rows then always come with start 0."""

    def forward(self, rows: list[Row]) -> tuple[torch.Tensor, int]:
        """Compute the new tokens of all rows. Returns float32 logits [rows, vocabulary] that follow each row's last
        token, and how many tokens were computed (fewer than asked where rows shared a prompt)."""
        ...

    def clear(self, slot: int) -> None:
        """Overwrite a slot whose contents may not be finite."""
        ...

    def free(self) -> None:
        """Give the cache's memory back."""
        ...
