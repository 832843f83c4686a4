"""Interfaces between the scheduler and a model. A Runner computes next-token logits one step at a time; a LaunchRunner
also samples the tokens and runs several steps in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(slots=True)
class Row:
    """One sequence in one forward pass."""

    slot: int
    """Cache slot of its keys and values."""
    token_ids: list[int]
    """The whole sequence so far. Read-only, because the scheduler owns the list."""
    start: int
    """Number of cached tokens. The others (at least one) are computed now."""


class Runner(Protocol):
    keeps_cache: bool
    """False if every call computes whole sequences again. Rows then always have start 0."""

    def forward(self, rows: list[Row]) -> tuple[torch.Tensor, int]:
        """Compute the new tokens of all rows. Returns float32 logits [rows, vocabulary] after each row's last token,
        and how many tokens were computed (fewer than requested if rows shared a prompt)."""

    def clear(self, slot: int) -> None:
        """Overwrite a slot whose contents may not be finite."""

    def free(self) -> None:
        """Free the cache's memory."""

    def resize(self, max_slots: int) -> None:
        """Free the cache's memory and use only the first `max_slots` slots from now on."""


MAX_STOPS = 8
"""Stop tokens of a row that a launch checks. The scheduler checks further ones."""


@dataclass(slots=True)
class DecodeRow:
    """One sequence of a launch. All its tokens but the last are in the cache."""

    slot: int
    token: int
    """The last token."""
    position: int
    """The last token's position in the sequence."""
    remaining: int
    """Tokens that may still be sampled."""
    seed: int
    temperature: float
    top_p: float
    stop_token_ids: tuple[int, ...]


class Launch(Protocol):
    """Steps that run on the device."""

    steps: int

    def wait(self) -> None:
        """Block until the steps are done. Call it in a thread."""

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        """Return tokens and log-probabilities of every row. A row that ended early has fewer."""


class LaunchRunner(Protocol):
    def refresh(self, *, updated: bool) -> None:
        """Adapt to weights that moved to other addresses, and if `updated` to those that changed in place. The next
        prefill waits for all launches."""

    def reserve(self, length: int) -> None:
        """Reserve cache for sequences of `length` tokens."""

    def fits(self, length: int) -> bool:
        """Return whether `length` tokens fit without `reserve`, which must not be called during a launch."""

    def prefill(self, rows: list[Row], *, beside: bool) -> int:
        """Compute all uncached tokens of the rows except the last ones. Return how many were computed.

        `beside`: no launch that runs writes to a slot of these rows, so the device may do both at once.
        """

    def arrange(self, kept: list[int], new: list[DecodeRow]) -> None:
        """Set the rows of the next launches: those at the indices `kept` of the present ones, as the launches so far
        leave them, then new ones. Launches may be running."""

    def launch(self, steps: int) -> Launch:
        """Start at most `steps` steps for those rows. Two launches may run at once."""

    def clear(self, slot: int) -> None: ...

    def free(self) -> None: ...

    def resize(self, max_slots: int) -> None: ...
