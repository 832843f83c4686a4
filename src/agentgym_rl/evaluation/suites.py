"""Suites: named tasks mapped to environments, splits and subsets: the 27 tasks of AgentGym-RL, and AgentEval.

The data of a task are resolved by commands/evaluate.py. A named question set needs the user's data. Results on this
project's own questions or sites are always marked as such.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from agentgym_rl.evaluation.plan import TaskPlan

Coverage = Literal["whole", "fewer items", "part"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Evaluation settings shared by the tasks of one environment."""

    name: str
    env: str
    max_turns: int
    """Turns allowed in the published evaluation."""
    style: str
    """Style of this environment's recipes."""
    max_context: int = 8192
    needs_server: bool = False
    """Whether the published items need AgentGym's server."""


@dataclass(frozen=True, slots=True)
class SuiteTask:
    """One column of the table."""

    scenario: Scenario
    name: str
    subset: str | None
    """Subset of the test split, or None for the whole split."""
    num_items: int
    """Items in the published test set. If the environment has more, this many are taken, evenly spaced."""
    heading: str = ""
    """Heading of a narrow column. Empty: the name."""

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
"""Unpublished scenarios. These two replace WebArena and Deep search if their sites or question sets are missing."""

WEBARENA_20 = Scenario("WebArena, 20 tasks", "webarena", 15, "react", 14336)
SERVED = {
    "WebShop": Scenario("WebShop", "webshop", 10, "react", needs_server=True),
    "ALFWorld": Scenario("ALFWorld", "alfworld", 30, "react", 14336, needs_server=True),
    "Maze": Scenario("Maze", "maze", 15, "react", needs_server=True),
    "Wordle": Scenario("Wordle", "wordle", 8, "react", needs_server=True),
    "BIRD": Scenario("BIRD", "sqlgym", 1, "react", needs_server=True),
    "Weather": Scenario("Weather", "weather", 10, "react", 14336, needs_server=True),
    "Movie": Scenario("Movie", "movie", 12, "react", 14336, needs_server=True),
    "Academia": Scenario("Academia", "academia", 12, "react", 14336, needs_server=True),
    "Sheet": Scenario("Sheet", "sheet", 15, "react", 14336, needs_server=True),
    "TODOList": Scenario("TODOList", "todo", 15, "react", 14336, needs_server=True),
}
"""Scenarios of AgentEval on AgentGym's servers. Turns of WebShop and ALFWorld are AgentGym's, the others our choice."""
BUILT_IN_SCENARIOS = {
    "webarena": BUILT_IN_WEB,
    "searchqa": BUILT_IN_SEARCH,
    "webshop": Scenario("Shop, built-in catalog", "webshop", 10, "react"),
    "alfworld": Scenario("Household, built-in", "alfworld", 30, "react", 14336),
    "sqlgym": Scenario("SQL, built-in databases", "sqlgym", 6, "react"),
    "maze": Scenario("Maze, built-in", "maze", 15, "react"),
    "wordle": Scenario("Wordle, built-in words", "wordle", 8, "react"),
}
"""Scenarios on this project's own data, by environment. They replace published ones whose data or server is missing."""

AGENTGYM_27: tuple[SuiteTask, ...] = (
    # Published: Shopping 15, CMS 15, Map 10, GitLab and Reddit together 10. Those ten are split evenly.
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
AGENTEVAL: tuple[SuiteTask, ...] = (
    SuiteTask(SERVED["WebShop"], "WebShop", None, 200),
    SuiteTask(WEBARENA_20, "WebArena", None, 20),
    SuiteTask(SERVED["Maze"], "Maze", None, 25),
    SuiteTask(SERVED["Wordle"], "Wordle", None, 25),
    SuiteTask(SERVED["ALFWorld"], "ALFWorld", None, 200),
    # As many items of each task as in agentgym-27: 200, 90 and 100.
    *(task for task in AGENTGYM_27 if task.scenario is SCIWORLD),
    *(task for task in AGENTGYM_27 if task.scenario is BABYAI),
    *(task for task in AGENTGYM_27 if task.scenario is TEXTCRAFT),
    *(SuiteTask(SERVED[name], name, None, 20) for name in ("Weather", "Movie", "Academia", "Sheet", "TODOList")),
    SuiteTask(SERVED["BIRD"], "BIRD", None, 200),
)
"""AgentEval, the benchmark of AgentGym: 1,160 items of 14 environments."""
SUBSTITUTES: dict[str, tuple[SuiteTask, ...]] = {
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
    **{
        task.scenario.env: (SuiteTask(BUILT_IN_SCENARIOS[task.scenario.env], "all", None, task.num_items),)
        for task in AGENTEVAL
        if task.scenario.needs_server and task.scenario.env in BUILT_IN_SCENARIOS
    },
}
"""Substitute tasks by environment, played under their own names if the data of the suite's tasks are missing."""

SUITES: dict[str, tuple[SuiteTask, ...]] = {"agentgym-27": AGENTGYM_27, "agenteval": AGENTEVAL}


def evenly_spaced(items: Sequence[int], count: int) -> list[int]:
    """Return `count` of the items, from the first on and evenly spaced, because subsets are often sorted by difficulty.

    `evenly_spaced(range(10), 4)` is [0, 2, 5, 7].
    """
    if count >= len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def coverage(plans: Sequence[TaskPlan], columns: Collection[str] = ()) -> Coverage:
    """Return how much of one scenario was played, which decides whether its overall rate is comparable.

    `part`: not all of its tasks. `fewer items`: every task, but some with fewer items than in the suite, so that the
    tasks have other weights in the overall. `columns` are the names of all tasks in the table. They define a whole
    scenario if no suite contains it.
    """
    played = [plan for plan in plans if plan.items]
    scenarios = {(plan.scenario, plan.env) for plan in plans}
    tasks = [
        task
        for suite in (*SUITES.values(), *SUBSTITUTES.values())
        for task in suite
        if (task.scenario.name, task.scenario.env) in scenarios
    ]
    whole_split = any(plan.split and plan.subset is None for plan in played)
    items = {plan.subset: len(plan.items) for plan in played}
    if tasks:
        covered = whole_split or all(task.subset in items for task in tasks)
    else:
        covered = whole_split or set(columns) <= {plan.name for plan in played}
    if not covered or any(plan.missing for plan in plans):
        return "part"
    published = {task for suite in SUITES.values() for task in suite} & set(tasks)
    if whole_split:
        fewer = sum(items.values()) < sum(task.num_items for task in published)
    else:
        fewer = any(items[task.subset] < task.num_items for task in published)
    return "fewer items" if fewer else "whole"
