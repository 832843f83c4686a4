"""The task and variation of each item, and its split and subsets.

The table repeats the simulator's own, so that items can be listed without starting Java. A test compares them.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from agentgym_rl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TaskType:
    """One of the 30 experiments."""

    number: str
    """Topic and task, as in the ScienceWorld paper."""
    name: str
    num_variations: int

    def variations(self, split: str) -> range:
        """Return the variations of an official split: half, a quarter, and a quarter. The remainder goes to test."""
        quarter = self.num_variations // 4
        bounds = {"train": (0, 2 * quarter), "validation": (2 * quarter, 3 * quarter)}
        return range(*bounds.get(split, (3 * quarter, self.num_variations)))


TASKS = (
    TaskType("1-1", "boil", 30),
    TaskType("1-2", "melt", 30),
    TaskType("1-3", "freeze", 30),
    TaskType("1-4", "change-the-state-of-matter-of", 30),
    TaskType("2-1", "use-thermometer", 540),
    TaskType("2-2", "measure-melting-point-known-substance", 436),
    TaskType("2-3", "measure-melting-point-unknown-substance", 300),
    TaskType("3-1", "power-component", 20),
    TaskType("3-2", "power-component-renewable-vs-nonrenewable-energy", 20),
    TaskType("3-3", "test-conductivity", 900),
    TaskType("3-4", "test-conductivity-of-unknown-substances", 600),
    TaskType("4-1", "find-living-thing", 300),
    TaskType("4-2", "find-non-living-thing", 300),
    TaskType("4-3", "find-plant", 300),
    TaskType("4-4", "find-animal", 300),
    TaskType("5-1", "grow-plant", 126),
    TaskType("5-2", "grow-fruit", 126),
    TaskType("6-1", "chemistry-mix", 32),
    TaskType("6-2", "chemistry-mix-paint-secondary-color", 36),
    TaskType("6-3", "chemistry-mix-paint-tertiary-color", 36),
    TaskType("7-1", "lifespan-longest-lived", 125),
    TaskType("7-2", "lifespan-shortest-lived", 125),
    TaskType("7-3", "lifespan-longest-lived-then-shortest-lived", 125),
    TaskType("8-1", "identify-life-stages-1", 14),
    TaskType("8-2", "identify-life-stages-2", 10),
    TaskType("9-1", "inclined-plane-determine-angle", 168),
    TaskType("9-2", "inclined-plane-friction-named-surfaces", 1386),
    TaskType("9-3", "inclined-plane-friction-unnamed-surfaces", 162),
    TaskType("10-1", "mendelian-genetics-known-plant", 120),
    TaskType("10-2", "mendelian-genetics-unknown-plant", 480),
)
PUBLISHED_SUBSETS = ("Measure", "Test-Conductivity", "Find", "Chemistry-Mix", "Lifespan")
_PUBLISHED = {"2": "Measure", "4": "Find", "6": "Chemistry-Mix", "7": "Lifespan"}
"""Published subset by topic. Test-Conductivity is only half of topic 3."""
RL_SUBSET = "rl"
_NOT_IN_RL = ("5", "9", "10")
"""Topics that are not in the published RL set."""

SUBSETS = (RL_SUBSET, *PUBLISHED_SUBSETS, *(task.name for task in TASKS))


def _count(split: str) -> list[int]:
    """Return the first index of each task in a split, and the split's length."""
    return list(accumulate((len(task.variations(split)) for task in TASKS), initial=0))


_PLACES = {split: _count(split) for split in ("train", "test", "validation")}
_STARTS = dict(zip(_PLACES, accumulate((places[-1] for places in _PLACES.values()), initial=0), strict=False))
SPLITS = {split: range(start, start + _PLACES[split][-1]) for split, start in _STARTS.items()}
"""Items by split. Within a split they are ordered by task number, then by variation."""


def locate(item: int) -> tuple[TaskType, int]:
    """Return the task and the variation of an item. Raise IndexError for an unknown item."""
    for split, items in SPLITS.items():
        if item in items:
            places = _PLACES[split]
            index = bisect_right(places, item - items.start) - 1
            return TASKS[index], TASKS[index].variations(split)[item - items.start - places[index]]
    raise IndexError(f"sciworld has items 0 to {max(items.stop for items in SPLITS.values()) - 1}, got {item}")


def item_of(task: TaskType, variation: int) -> int:
    """Return the item of a task and a variation: the inverse of `locate`."""
    index = TASKS.index(task)
    for split, items in SPLITS.items():
        if variation in task.variations(split):
            return items.start + _PLACES[split][index] + task.variations(split).index(variation)
    raise IndexError(f"{task.name} has variations 0 to {task.num_variations - 1}, got {variation}")


_IN_RL = tuple(task for task in TASKS if task.number.split("-")[0] not in _NOT_IN_RL)
_RL_PLACES = list(accumulate((task.num_variations for task in _IN_RL), initial=0))


def published_item(number: int) -> int:
    """Return the item of AgentGym's `sciworld_NUMBER`: it numbers the subset `rl` by task, then by variation."""
    if not 0 <= number < _RL_PLACES[-1]:
        raise ConfigError(f"AgentGym's sciworld has items 0 to {_RL_PLACES[-1] - 1}, got {number}")
    index = bisect_right(_RL_PLACES, number) - 1
    return item_of(_IN_RL[index], number - _RL_PLACES[index])


def subsets_of(item: int) -> tuple[str, ...]:
    task, _ = locate(item)
    topic = task.number.split("-")[0]
    subsets = [] if topic in _NOT_IN_RL else [RL_SUBSET]
    if topic in _PUBLISHED:
        subsets.append(_PUBLISHED[topic])
    if task.name.startswith("test-conductivity"):
        subsets.append("Test-Conductivity")
    return (*subsets, task.name)
