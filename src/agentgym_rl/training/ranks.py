"""Collective operations of an update, for one process. scale/process_group.py has them for several.

Every rank gets a share of the batch with the weights of the whole batch, so that losses, metrics and gradients add up
over ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor


class Ranks:
    """A learner of one process."""

    rank = 0
    size = 1

    def prepare_model(self, model: Any) -> None:
        """Prepare a model in place before the optimizer reads its parameters. A second call does nothing."""

    def local_indices(self, lengths: Sequence[int]) -> list[int]:
        """Return the indices of this rank's samples, given the lengths of all."""
        return list(range(len(lengths)))

    def max_over_ranks(self, count: int) -> int:
        """Return the largest `count` of any rank."""
        return count

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss to call backward on."""
        return loss

    def reduce_gradients(self, gradients: Iterable[Tensor]) -> None:
        """Sum gradients over ranks in place, after an update's last backward. One process does not iterate them."""

    def require_equal(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Raise RuntimeError if the copies of a tensor differ between ranks."""

    def full_tensor(self, value: Tensor) -> Tensor:
        """Return the full tensor of one that may be sharded over ranks."""
        return value

    def sum_over_ranks(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the sums over ranks by name. A rank may lack names that others have."""
        return metrics


SINGLE_PROCESS = Ranks()


def balanced_shares(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Split indices into `size` shares of about equal total length: longest first, each to the smallest share."""
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        least = loads.index(min(loads))
        shares[least].append(index)
        loads[least] += lengths[index]
    return shares
