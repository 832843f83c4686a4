"""Settings of the suite for CUDA devices.

AGENTGYM_GC_THRESHOLD=1 collects garbage at every allocation: graphs of engines that nobody closed are then destroyed at
the worst moment.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import os

import pytest

if os.environ.get("AGENTGYM_GC_THRESHOLD"):
    gc.set_threshold(int(os.environ["AGENTGYM_GC_THRESHOLD"]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("pytest_asyncio") is None:
        skip = pytest.mark.skip(reason="needs the package pytest-asyncio")
        for item in items:
            if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.function):
                item.add_marker(skip)
