"""Its presence puts this folder on the import path, so that tests find `envs_for_tests` and `servers_for_tests`."""

from __future__ import annotations

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
"""Files of half a minute and more. `make test` gives whole files to its workers in the order of collection: were one of
these among the last, a worker would be left alone with it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
