"""The tasks that are played, and the items of the splits.

Item `i` is task `i % len(TASKS)`, generated with `i` as the random seed, so that every run of items covers all tasks.
A task is listed if the oracle solves it with the actions of this environment.
"""

from __future__ import annotations

TASKS = (
    "click-button",
    "click-button-sequence",
    "click-test",
    "click-test-2",
    "click-test-transfer",
    "unicode-test",
    "click-link",
    "click-dialog",
    "click-dialog-2",
    "click-option",
    "click-checkboxes",
    "click-checkboxes-large",
    "click-checkboxes-transfer",
    "choose-list",
    "click-tab",
    "click-tab-2",
    "click-tab-2-easy",
    "click-tab-2-medium",
    "click-tab-2-hard",
    "click-collapsible",
    "click-collapsible-2",
    "focus-text",
    "focus-text-2",
    "enter-text",
    "enter-text-2",
    "enter-text-dynamic",
    "enter-password",
    "login-user",
    "login-user-popup",
    "read-table",
    "read-table-2",
    "search-engine",
    "simple-arithmetic",
    "simple-algebra",
    "find-word",
    "form-sequence-2",
    "guess-number",
    "multi-orderings",
    "odd-or-even",
)
TRAIN_SEEDS, TEST_SEEDS = 1000, 50
"""Items of each task in each split."""
TRAIN = range(len(TASKS) * TRAIN_SEEDS)
TEST = range(TRAIN.stop, TRAIN.stop + len(TASKS) * TEST_SEEDS)


def task_of(item: int) -> str:
    """Return the name of an item's task. Raise IndexError if the item is in no split."""
    if not 0 <= item < TEST.stop:
        raise IndexError(f"miniwob has items 0 to {TEST.stop - 1}, got {item}")
    return TASKS[item % len(TASKS)]
