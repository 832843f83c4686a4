"""Collective operations an update needs, for a learner of one process. scale/process_group.py has them for several.

Every rank gets its share of a batch with the weights of the whole batch, so that losses, metrics and gradients add up
over ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor


class Ranks:
    """One process that learns alone."""

    rank = 0
    size = 1

    def place(self, model: Any) -> None:
        """Prepare a model, in place, before an optimizer sees its parameters; one that is prepared stays as it is."""

    def mine(self, lengths: Sequence[int]) -> list[int]:
        """Which of samples of these lengths this rank takes."""
        return list(range(len(lengths)))

    def most(self, count: int) -> int:
        """The largest `count` of any rank."""
        return count

    def scaled(self, loss: Tensor) -> Tensor:
        """What to call backward on."""
        return loss

    def reduce_gradients(self, gradients: Iterable[Tensor]) -> None:
        """After the last backward of an update: make every rank's gradients, in place, the sum over ranks.

        Not read if nothing is to be reduced here.
        """

    def require_equal(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Raise RuntimeError if ranks that hold whole copies of these tensors hold different ones."""

    def whole(self, value: Tensor) -> Tensor:
        """A plain tensor from one that may be spread over ranks."""
        return value

    def total(self, metrics: dict[str, float]) -> dict[str, float]:
        """Sums over ranks, by name; a rank may lack names that others have."""
        return metrics


ALONE = Ranks()


def balanced(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices in `size` shares of about equal length in all: longest first, each to the share with least so far."""
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        least = loads.index(min(loads))
        shares[least].append(index)
        loads[least] += lengths[index]
    return shares
