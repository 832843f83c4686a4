"""The order of tasks: every item once before any is repeated, and the same order after a resume."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest

from agentgym_rl.errors import ConfigError
from agentgym_rl.training.task_source import TaskSource
from agentgym_rl.types import Task

ITEMS = {"a": list(range(5)), "b": list(range(100, 107))}
WEIGHTS = {"a": 1.0, "b": 3.0}


def test_every_item_is_drawn_once_before_any_is_drawn_again() -> None:
    source = TaskSource({"a": list(range(10))}, seed=1)
    epochs = [[t.item for t in source.take(10)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != list(range(10))


def test_the_order_does_not_depend_on_how_many_are_taken_at_once() -> None:
    single, batched = TaskSource(ITEMS, 3, WEIGHTS), TaskSource(ITEMS, 3, WEIGHTS)
    assert [t for _ in range(40) for t in single.take(1)] == batched.take(40)


def test_seeds_differ() -> None:
    assert TaskSource(ITEMS, 1, WEIGHTS).take(20) != TaskSource(ITEMS, 2, WEIGHTS).take(20)


def test_resume_after_any_number_gives_the_same_order() -> None:
    whole = TaskSource(ITEMS, 3, WEIGHTS).take(60)
    for drawn in range(60):
        killed = TaskSource(ITEMS, 3, WEIGHTS)
        killed.take(drawn)
        resumed = TaskSource(ITEMS, 3, WEIGHTS)
        resumed.restore(json.loads(json.dumps(killed.state())))
        assert resumed.take(60 - drawn) == whole[drawn:]


def test_restoring_in_another_epoch_discards_the_cached_order() -> None:
    source = TaskSource({"a": list(range(10))}, 1)
    start, first = source.state(), source.take(10)
    source.take(15)
    source.restore(start)
    assert source.take(10) == first


def test_weights_are_shares() -> None:
    counts = Counter(t.env for t in TaskSource(ITEMS, 0, WEIGHTS).take(4000))
    assert 0.70 < counts["b"] / 4000 < 0.80


def test_the_order_does_not_depend_on_the_hash_seed() -> None:
    program = (
        "from agentgym_rl.training.task_source import TaskSource;"
        "print([t.key for t in TaskSource({'a': list(range(9)), 'b': [1, 2]}, 5).take(30)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    here = [t.key for t in TaskSource({"a": list(range(9)), "b": [1, 2]}, 5).take(30)]
    assert outputs == {f"{here}\n"}


def test_tasks_name_their_environment() -> None:
    for task in TaskSource(ITEMS, 0).take(50):
        assert isinstance(task, Task)
        assert task.item in ITEMS[task.env]


def test_nothing_to_train_on_is_refused() -> None:
    with pytest.raises(ConfigError, match="training needs at least one item in b, got none"):
        TaskSource({"a": [1], "b": []}, 0)
    with pytest.raises(ConfigError, match="training needs at least one item, got none"):
        TaskSource({}, 0)
