"""Order of the test files, and a check after each test.

This file also puts its folder on the import path, where the *_for_tests modules are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

LONGEST_FIRST = (
    "test_algorithms.py",
    "test_stopping.py",
    "test_offline.py",
    "test_webarena.py",
    "test_recipes.py",
    "test_ray.py",
    "test_ray_app.py",
    "test_resume.py",
    "test_sciworld_gold.py",
    "test_viewer_pages.py",
    "test_sciworld.py",
)
"""Files that take half a minute or more. `make test` gives whole files to its workers in the order of collection, and a
long file at the end would leave the other workers idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(autouse=True)
def _weights_can_be_tied() -> Iterator[None]:
    """Fail the test that loaded models in two threads without `loading_lock`, not one of the tests after it."""
    yield
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is not None:
        assert modeling.PreTrainedModel.tie_weights.__name__ == "tie_weights"
