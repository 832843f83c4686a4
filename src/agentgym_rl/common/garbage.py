"""Settings of Python's garbage collector while episodes are played and gathered."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

ALLOCATIONS_BETWEEN = 100_000
"""Allocations between two collections; Python's default is 700. A collection visits every token of every new message,
which takes a tenth of a rollout's host time at the default."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage rarely in the body. Does nothing if the collector is off or was set to be even rarer.

    If bodies overlap, as of threads, the first one restores the setting that it found; the others change nothing.
    """
    before = gc.get_threshold()
    if not gc.isenabled() or before[0] == 0 or before[0] >= ALLOCATIONS_BETWEEN:
        yield
        return
    gc.set_threshold(ALLOCATIONS_BETWEEN, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
