"""Items of a suite's tasks that AgentGym's servers play, and the tasks of our own that replace them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from agentgym_rl.environment.agentgym import Server, read_items
from agentgym_rl.evaluation.plan import TaskPlan
from agentgym_rl.evaluation.suites import SuiteTask, evenly_spaced

OWN_TASKS = {
    "webshop": "this project's own catalog and goals",
    "alfworld": "this project's own household and tasks",
    "sqlgym": "this project's own databases and questions",
}
"""Descriptions of data that replace those of a published environment of the same name."""


def served_plan(task: SuiteTask, url: str | None, lists: Path | None, limit: int | None) -> TaskPlan:
    """Return a task on AgentGym's server: the items of the user's list, or of the server's test split."""
    scenario, env = task.scenario, task.scenario.env
    limits = (scenario.max_turns, scenario.style, scenario.max_context)
    plan = TaskPlan(scenario.name, task.name, env, "test", None, (), *limits, "", heading=task.heading)
    if url is None:
        return replace(plan, missing=f"AgentGym's server is needed: give --url {env}=agentgym+http://HOST:PORT/{env}")
    path = None if lists is None else lists / f"{env}_test.json"
    served = Server(url, env).served
    if path is not None and path.is_file():
        items, data = read_items(str(path), env, url), f"the list {path.name}, on AgentGym's server"
    elif served is not None:
        items, data = list(served.splits["test"]), "items of AgentGym's server, evenly spaced"
    else:
        return replace(plan, missing=f"a list of items is needed: give --lists FOLDER with {env}_test.json")
    return replace(plan, items=tuple(evenly_spaced(items, min(task.num_items, limit or task.num_items))), data=data)
