"""Suites: named tasks mapped onto environments, splits and subsets. The 27 tasks of AgentGym-RL are one.

What a task is played on (`data`) is found out where the environment is wired: a named question set needs the user's
data, and our own questions or sites are never shown under the name of a published benchmark without saying so.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from agentgym_rl.evaluation.plan import TaskPlan

Coverage = Literal["whole", "fewer items", "part"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """How the tasks of one environment are evaluated."""

    name: str
    env: str
    max_turns: int
    """Of the published evaluation."""
    style: str
    """As in this environment's recipes."""
    max_context: int = 8192


@dataclass(frozen=True, slots=True)
class SuiteTask:
    """One column of the table."""

    scenario: Scenario
    name: str
    subset: str
    num_items: int
    """In the published test set. Where ours has more, so many are taken, evenly spaced."""
    heading: str = ""
    """Over a narrow column; the name when empty."""

    @property
    def key(self) -> str:
        return f"{self.scenario.name}/{self.name}"


WEBARENA = Scenario("WebArena", "webarena", 15, "react", 14336)
SEARCH = Scenario("Deep search", "searchqa", 10, "act", 14336)
TEXTCRAFT = Scenario("TextCraft", "textcraft", 30, "react")
BABYAI = Scenario("BabyAI", "babyai", 20, "react")
SCIWORLD = Scenario("SciWorld", "sciworld", 30, "react", 14336)
BUILT_IN_WEB = Scenario("Web, built-in sites", "webarena", 15, "react", 14336)
BUILT_IN_SEARCH = Scenario("Search, built-in questions", "searchqa", 10, "act", 14336)
"""These two are not published scenarios: they stand in where the sites or the question sets are not there."""

AGENTGYM_27: tuple[SuiteTask, ...] = (
    # 15/15/10/10 are published for Shopping, CMS, Map and GitLab with Reddit; the last ten are shared out.
    SuiteTask(WEBARENA, "Shopping", "Shopping", 15),
    SuiteTask(WEBARENA, "CMS", "CMS", 15),
    SuiteTask(WEBARENA, "Map", "Map", 10),
    SuiteTask(WEBARENA, "GitLab", "GitLab", 5),
    SuiteTask(WEBARENA, "Reddit", "Reddit", 5),
    SuiteTask(SEARCH, "NQ", "nq", 50),
    SuiteTask(SEARCH, "TriviaQA", "triviaqa", 50, "Trivia-\nQA"),
    SuiteTask(SEARCH, "PopQA", "popqa", 50),
    SuiteTask(SEARCH, "HotpotQA", "hotpotqa", 50, "Hotpot-\nQA"),
    SuiteTask(SEARCH, "2WikiMultihopQA", "2wikimultihopqa", 50, "2Wiki"),
    SuiteTask(SEARCH, "MuSiQue", "musique", 100),
    SuiteTask(SEARCH, "Bamboogle", "bamboogle", 50, "Bam-\nboogle"),
    SuiteTask(TEXTCRAFT, "Depth 1", "depth1", 31),
    SuiteTask(TEXTCRAFT, "Depth 2", "depth2", 41),
    SuiteTask(TEXTCRAFT, "Depth 3", "depth3", 25),
    SuiteTask(TEXTCRAFT, "Depth 4", "depth4", 3),
    SuiteTask(BABYAI, "GoTo", "GoTo", 55),
    SuiteTask(BABYAI, "Pickup", "Pickup", 15),
    SuiteTask(BABYAI, "ActionObjDoor", "ActionObjDoor", 5, "Action-\nObjDoor"),
    SuiteTask(BABYAI, "FindObjS7", "FindObjS7", 5, "Find-\nObjS7"),
    SuiteTask(BABYAI, "OneRoomS20", "OneRoomS20", 5, "OneRoom-\nS20"),
    SuiteTask(BABYAI, "SynthLoc", "SynthLoc", 5),
    SuiteTask(SCIWORLD, "Measure", "Measure", 53),
    SuiteTask(SCIWORLD, "Test-Conductivity", "Test-Conductivity", 83, "Conduc-\ntivity"),
    SuiteTask(SCIWORLD, "Find", "Find", 44),
    SuiteTask(SCIWORLD, "Chemistry-Mix", "Chemistry-Mix", 5, "Chem.-\nMix"),
    SuiteTask(SCIWORLD, "Lifespan", "Lifespan", 15),
)
STAND_INS: dict[str, tuple[SuiteTask, ...]] = {
    "webarena": tuple(
        SuiteTask(BUILT_IN_WEB, task.name, task.subset, task.num_items)
        for task in AGENTGYM_27
        if task.scenario is WEBARENA
    ),
    "searchqa": (
        SuiteTask(BUILT_IN_SEARCH, "one hop", "hop1", 50),
        SuiteTask(BUILT_IN_SEARCH, "two hops", "hop2", 50),
        SuiteTask(BUILT_IN_SEARCH, "three hops", "hop3", 50),
    ),
}
"""By environment: played beside the empty columns of what is not there, under names of their own."""

SUITES: dict[str, tuple[SuiteTask, ...]] = {"agentgym-27": AGENTGYM_27}


def evenly_spaced(items: Sequence[int], count: int) -> list[int]:
    """`count` of the items in order, from the first on and equally far apart: subsets are often sorted by difficulty
    or type. `evenly_spaced(range(10), 4)` is [0, 2, 5, 7]."""
    if count >= len(items):
        return list(items)
    return [items[place * len(items) // count] for place in range(count)]


def coverage(plans: Sequence[TaskPlan], columns: Collection[str] = ()) -> Coverage:
    """Say how much of one scenario was played: its overall may stand beside that of the whole scenario, or not.

    `part`: some of its tasks only. `fewer items`: every task, but of some fewer items than the suite has, so that the
    tasks weigh differently in the overall. `columns`: names of all tasks in the table, by which a scenario that is in
    no suite is measured.
    """
    played = [plan for plan in plans if plan.items]
    known = {(plan.scenario, plan.env) for plan in plans}
    tasks = [
        task
        for suite in (*SUITES.values(), *STAND_INS.values())
        for task in suite
        if (task.scenario.name, task.scenario.env) in known
    ]
    whole_split = any(plan.split and plan.subset is None for plan in played)
    items = {plan.subset: len(plan.items) for plan in played}
    if tasks:
        covered = whole_split or all(task.subset in items for task in tasks)
    else:
        covered = whole_split or set(columns) <= {plan.name for plan in played}
    if not covered or any(plan.missing for plan in plans):
        return "part"
    published = [task for task in tasks if task in AGENTGYM_27]
    if whole_split:
        fewer = sum(items.values()) < sum(task.num_items for task in published)
    else:
        fewer = any(items[task.subset] < task.num_items for task in published)
    return "fewer items" if fewer else "whole"
