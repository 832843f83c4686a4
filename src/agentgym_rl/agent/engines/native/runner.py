"""What stands between the scheduler and a model: a Runner, rows in and next-token logits out, a step at a time; or a
LaunchRunner, which picks the tokens itself and does several steps in one launch."""

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

    def resize(self, max_slots: int) -> None:
        """Give the cache's memory back, and use only the first `max_slots` slots from now on."""
        ...


MOST_STOPS = 8
"""Stop tokens of a row that a launch looks for; the scheduler looks for further ones."""


@dataclass(slots=True)
class DecodeRow:
    """One sequence of a launch; all its tokens but the last are in the cache."""

    slot: int
    token: int
    """The last one."""
    position: int
    """Where in the sequence it is."""
    remaining: int
    """How many tokens may be picked."""
    seed: int
    temperature: float
    top_p: float
    stop_token_ids: tuple[int, ...]


class Launch(Protocol):
    """Steps under way on the device."""

    steps: int

    def wait(self) -> None:
        """Block until they are done (in a thread, say)."""
        ...

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and log-probabilities of every row; a row that ended early has fewer."""
        ...


class LaunchRunner(Protocol):
    def refresh(self) -> None:
        """Notice weights that have moved."""
        ...

    def reserve(self, length: int) -> None:
        """Make room for sequences of `length` tokens."""
        ...

    def has_room(self, length: int) -> bool:
        """Whether sequences of `length` tokens fit without `reserve`, which must not be called during a launch."""
        ...

    def prefill(self, rows: list[Row]) -> int:
        """Compute what is missing of all rows but their last tokens; returns how many tokens that took."""
        ...

    def begin(self, rows: list[DecodeRow]) -> None:
        """Put the rows of the next launches on the device."""
        ...

    def launch(self, steps: int) -> Launch:
        """Start so many steps for those rows. Two launches may be under way at once."""
        ...

    def clear(self, slot: int) -> None: ...

    def free(self) -> None: ...

    def resize(self, max_slots: int) -> None: ...
