"""The embedded tasks: all instances of all templates, numbered and split into train and test."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from agentgym_rl.environment.envs.webarena.oracle import Move
from agentgym_rl.environment.envs.webarena.sites.store import fresh_database
from agentgym_rl.environment.envs.webarena.tasks import gitlab, reddit, shopping, shopping_admin
from agentgym_rl.environment.envs.webarena.tasks import map as map_tasks
from agentgym_rl.environment.envs.webarena.tasks.task_config import subsets_of
from agentgym_rl.environment.envs.webarena.tasks.template import Instance, Template

TEMPLATES: tuple[Template, ...] = (
    *shopping.TEMPLATES,
    *shopping_admin.TEMPLATES,
    *reddit.TEMPLATES,
    *gitlab.TEMPLATES,
    *map_tasks.TEMPLATES,
)
TEST_SHARE = 4
"""One in this many instances, the last ones of each template, belongs to the test split."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A task and its solution."""

    config: dict[str, Any]
    """Task in WebArena's format, with `__SHOPPING__` and so on for the sites."""
    script: tuple[Move, ...]
    changes: bool


@lru_cache(maxsize=1)
def _instances() -> tuple[list[tuple[int, Instance]], list[tuple[int, Instance]]]:
    """Return the train and the test instances, each with the number of its template."""
    database = fresh_database()
    train: list[tuple[int, Instance]] = []
    test: list[tuple[int, Instance]] = []
    for number, template in enumerate(TEMPLATES):
        instances = [(number, instance) for instance in template.make(database)]
        num_test = max(len(instances) // TEST_SHARE, int(len(instances) > 1))
        train += instances[: len(instances) - num_test]
        test += instances[len(instances) - num_test :]
    database.close()
    return train, test


@lru_cache(maxsize=1)
def problems() -> tuple[Problem, ...]:
    """Return all tasks by number, first train, then test."""
    train, test = _instances()
    return tuple(_problem(task_id, *numbered) for task_id, numbered in enumerate([*train, *test]))


def embedded_splits() -> dict[str, range]:
    train, test = _instances()
    return {"train": range(len(train)), "test": range(len(train), len(train) + len(test))}


def embedded_subsets(item: int) -> tuple[str, ...]:
    return subsets_of(problems()[item].config["sites"])


def _problem(task_id: int, number: int, instance: Instance) -> Problem:
    template = TEMPLATES[number]
    intent = template.text
    for name, value in instance.arguments.items():
        intent = intent.replace("{{" + name + "}}", str(value))
    config = {
        "sites": [template.site],
        "task_id": task_id,
        "require_login": True,
        "storage_state": None,
        "start_url": f"__{template.site.upper()}__/{instance.start}",
        "geolocation": None,
        "intent_template": template.text,
        "instantiation_dict": instance.arguments,
        "intent": intent,
        "require_reset": template.changes,
        "eval": instance.evaluation,
        "intent_template_id": number,
    }
    return Problem(config, instance.script, template.changes)


def as_json() -> str:
    """Return all tasks as one JSON list in WebArena's format."""
    return json.dumps([problem.config for problem in problems()], ensure_ascii=False, indent=1)
