"""Captures of CUDA graphs: one at a time in a process, without garbage collection, and cleaned up if one fails.

CUDA forbids destroying a graph in a thread that captures another. An engine or a learner that is no longer used is
part of reference cycles, so its graphs are destroyed whenever Python collects garbage, which may be in the middle of a
capture. torch does not collect before one by itself.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import RLock
from typing import Any

import torch

_CAPTURING = RLock()
_ABANDONED: list[Any] = []
"""Graphs whose capture failed. torch's allocators may keep a pointer to them, so they are never destroyed."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the garbage collector from running in any thread. Only one caller holds this at a time."""
    with _CAPTURING:
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()


def capture(run: Callable[[], None], pool: Any) -> Any:
    """Return a graph of what `run` launches on the current stream, which must not be the default one.

    Its memory is taken from `pool`. After a failure the process works as before, and the pool must not be used again.
    """
    with collector_paused():
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            run()
            graph.capture_end()
        except BaseException:
            _abandon(graph, pool)
            raise
    return graph


def _abandon(graph: Any, pool: Any) -> None:
    """End a capture that failed, on the stream it began on.

    torch gives up halfway if CUDA says that a capture was invalidated: its allocator would keep serving the stream
    from the pool, and its random numbers would fail with "Offset increment outside graph capture" for ever.
    """
    _ABANDONED.append(graph)
    with suppress(RuntimeError):
        graph.capture_end()
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # it is not open if torch could end the capture
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    graph.reset()
    with suppress(RuntimeError):
        flag = torch.zeros(1, device="cuda")
        again = torch.cuda.CUDAGraph()
        again.capture_begin(capture_error_mode="thread_local")
        flag.add_(1)
        again.capture_end()  # a successful capture resets the random generator's capture state
