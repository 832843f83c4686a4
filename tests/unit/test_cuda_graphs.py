"""No garbage is collected while a CUDA graph is captured. Captures themselves are in tests/gpu."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentgym_rl.common.cuda_graphs import collector_paused

ROOT = Path(__file__).parents[2]


class Cycle:
    """Freed by the collector alone, as an engine with captured steps is."""

    freed = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        Cycle.freed += 1


@pytest.fixture(autouse=True)
def eager_collector() -> Iterator[None]:
    """A collector that runs at every allocation."""
    known, enabled = gc.get_threshold(), gc.isenabled()
    gc.collect()
    gc.enable()
    gc.set_threshold(1)
    Cycle.freed = 0
    yield
    gc.set_threshold(*known)
    if enabled:
        gc.enable()
    else:
        gc.disable()


def leave_garbage(count: int = 50) -> None:
    for _ in range(count):
        Cycle()


def test_without_the_guard_garbage_is_collected_at_once() -> None:
    leave_garbage()
    assert Cycle.freed > 0


def test_no_garbage_is_collected_under_the_guard_and_all_of_it_later() -> None:
    with collector_paused():
        leave_garbage()
        assert Cycle.freed == 0
    assert gc.isenabled()
    leave_garbage()
    gc.collect()
    assert Cycle.freed == 100


def test_a_failure_under_the_guard_lets_the_collector_run_again() -> None:
    with pytest.raises(RuntimeError, match="capture"), collector_paused():
        raise RuntimeError("the capture failed")
    assert gc.isenabled()
    with collector_paused():  # and another capture can begin
        assert not gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with collector_paused(), collector_paused():
        pass
    assert not gc.isenabled()


def test_captures_of_two_threads_come_one_after_the_other() -> None:
    """Otherwise the first that ends lets garbage be collected under the second."""
    began, order = threading.Event(), []

    def second() -> None:
        began.set()
        with collector_paused():
            order.append("second")
            assert not gc.isenabled()

    with collector_paused():
        thread = threading.Thread(target=second)
        thread.start()
        assert began.wait(60)
        thread.join(0.2)
        leave_garbage()
        assert Cycle.freed == 0
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]
    assert gc.isenabled()


def test_both_places_that_capture_do_it_under_the_guard() -> None:
    """`capture_begin` is called in one place: a new one would have no guard."""
    calls = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "src").rglob("*.py"))
        if "capture_begin(" in path.read_text(encoding="utf-8") or "cuda.graph(" in path.read_text(encoding="utf-8")
    ]
    assert calls == ["src/agentgym_rl/common/cuda_graphs.py"]
