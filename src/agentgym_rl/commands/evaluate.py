"""An evaluation from start to report: find the agent and the items, play what is not played yet, write the tables.

Killed at any moment and started again with the same command, it goes on; finished episodes are never played twice.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from agentgym_rl import __version__
from agentgym_rl.agent.styles import STYLES
from agentgym_rl.commands.eval_options import prices_of, turns_of, wants_published
from agentgym_rl.commands.load_agent import AgentOptions, Candidate, find_agent, load_agent
from agentgym_rl.config import AgentConfig, EnvironmentConfig
from agentgym_rl.environment import catalog
from agentgym_rl.environment.agentgym import is_agentgym, read_items
from agentgym_rl.errors import ConfigError, EngineError, did_you_mean
from agentgym_rl.evaluation.episodes import Pace, play
from agentgym_rl.evaluation.folder import Folder, default_root, write_atomically, writing
from agentgym_rl.evaluation.metrics import results
from agentgym_rl.evaluation.plan import Episode, TaskPlan, episodes_of
from agentgym_rl.evaluation.plot import turns_plot
from agentgym_rl.evaluation.records import Record
from agentgym_rl.evaluation.report import (
    OWN,
    OWN_NOTE,
    Entry,
    counted,
    dollars,
    entry_of,
    markdown,
    marked,
    published_entries,
)
from agentgym_rl.evaluation.suites import (
    BUILT_IN_SEARCH,
    BUILT_IN_WEB,
    STAND_INS,
    SUITES,
    Scenario,
    SuiteTask,
    evenly_spaced,
)
from agentgym_rl.evaluation.terminal import print_report
from agentgym_rl.run.collectors import wrap_of
from agentgym_rl.run.console import Console
from agentgym_rl.run.pool import EnvironmentsPool

SAVE_EVERY_S = 15.0
"""How often eval.json shows what is known so far."""
CONCURRENCY, CONCURRENCY_HEAVY = 32, 8
"""Episodes at once unless asked for otherwise; fewer where each has a browser or a share of a Java process."""
SUBSETS_NAMED = 3
"""More subsets than these are counted, not named, in the name of a folder."""
NAME_LENGTH = 200
"""Characters of such a name; file systems allow 255."""
WEBARENA_SITES = ("SHOPPING", "SHOPPING_ADMIN", "REDDIT", "GITLAB", "MAP")
SEARCHQA_DATA, SEARCHQA_INDEX = "AGENTGYM_SEARCHQA_DATA", "AGENTGYM_SEARCHQA_INDEX"
DATA = {
    "textcraft": "Minecraft 1.16 recipes; goals drawn by this project, as many of each depth as published",
    "babyai": "minigrid's levels, seeds held out by this project",
    "sciworld": "ScienceWorld's own test variations",
}


Listed = Mapping[str | None, tuple[int, ...]]
"""Items by subset, as a server lists them."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for."""

    agent: AgentOptions
    suite: str | None = None
    env: str | None = None
    subsets: tuple[str, ...] = ()
    items: str | None = None
    split: str = "test"
    limit: int | None = None
    """Items of each task."""
    url: str | None = None
    token_variable: str | None = None
    turns: tuple[int, ...] = ()
    """Horizons; empty for each scenario's own."""
    samples: int = 1
    seed: int = 0
    out: Path | None = None
    concurrency: int | None = None
    retries: int = 2
    step_timeout_s: float = 60.0
    episode_timeout_s: float = 1800.0
    compare_published: bool = False

    def __post_init__(self) -> None:
        if self.suite is None and self.env is None:
            raise ConfigError("say what to play: --suite agentgym-27, --env NAME, or both for one of its scenarios")
        if self.suite is not None and self.suite not in SUITES:
            raise ConfigError(
                f"unknown suite {self.suite!r}: known are {', '.join(SUITES)}{did_you_mean(self.suite, SUITES)}"
            )
        if self.suite is not None and (self.subsets or self.items or self.url):
            raise ConfigError("a suite has its own items: leave out --subset, --items and --url, or leave out --suite")
        if self.suite is not None and self.env is not None and self.env not in _environments(self.suite):
            raise ConfigError(f"{self.suite} has no {self.env!r}: it has {', '.join(_environments(self.suite))}")
        if self.items is not None and self.subsets:
            raise ConfigError("give --items or --subset, not both")
        if self.agent.style is not None and self.agent.style not in STYLES:
            known, hint = ", ".join(STYLES), did_you_mean(self.agent.style, STYLES)
            raise ConfigError(f"unknown style {self.agent.style!r}: known are {known}{hint}")
        if any(t < 1 for t in self.turns):
            raise ConfigError(f"--turns needs numbers from 1 on, got {self.turns}")


def _environments(suite: str) -> list[str]:
    return list(dict.fromkeys(task.scenario.env for task in SUITES[suite]))


def request_of(given: Mapping[str, Any]) -> Request:
    """From the options of the command line, by their names; what has the same name here is taken as it is."""
    prices = prices_of(*(given[f"price_{kind}"] for kind in ("prompt", "completion", "cached")))
    changed: dict[str, Any] = {
        "spec": given["agent"],
        "key_variable": given["key_variable"] or None,
        "request_timeout_s": given["request_timeout"],
        "prices": prices,
    }
    agent = AgentOptions(**{f.name: ({**given, **changed})[f.name] for f in fields(AgentOptions)})
    changed = {
        "agent": agent,
        "subsets": tuple(dict.fromkeys(given["subset"] or ())),
        "turns": turns_of(given["turns"]),
        "step_timeout_s": given["step_timeout"],
        "episode_timeout_s": given["episode_timeout"],
        "compare_published": wants_published(given["compare"]),
    }
    return Request(**{f.name: ({**given, **changed})[f.name] for f in fields(Request)})


async def evaluate(request: Request, console: Console | None = None) -> dict[str, Any]:
    """Evaluate one agent and return the content of its eval.json."""
    console = console or Console()
    plans = _asked_plans(
        request, await _listed_items(request)
    )  # before the agent: what a name is wrong of is told without loading torch
    candidate = find_agent(request.agent)
    plans = _as_played(plans, request, candidate)
    playable = [plan for plan in plans if plan.items]
    if not playable:
        raise ConfigError(f"nothing to play: {plans[0].missing or 'the choice of items is empty'}")
    published = published_entries(plan.scenario for plan in plans) if request.compare_published else ("", [])
    most = max(plan.max_context for plan in playable)
    heavy = {plan.env for plan in playable if request.url is None and not catalog.load(plan.env).cheap}
    at_once = {plan.env: _concurrency(request, plan.env in heavy) for plan in playable}
    config = _config(request, candidate, plans)
    root = request.out or default_root(Path("evals"), _name(request, candidate), config)
    # Before the folder is made: an agent that cannot be loaded leaves nothing behind.
    agent = load_agent(candidate, max(at_once.values()), most)
    try:
        with Folder(root, config, _settings(request)) as folder:
            plans = [replace(plan, max_context=min(plan.max_context, agent.room or plan.max_context)) for plan in plans]
            episodes = episodes_of(plans, request.samples, candidate.playing.max_new_tokens)
            watch = _Watch(request, plans, folder, episodes)
            left = [episode for episode in episodes if not folder.finished(episode.key)]
            _announce(console, candidate, root, plans, len(episodes), len(left))
            if left:
                with console.progress("episodes", len(left)) as watch.advance:
                    for env in dict.fromkeys(episode.task.env for episode in left):
                        some = [episode for episode in left if episode.task.env == env]
                        playing = candidate.playing.model_copy(update={"style": some[0].style})
                        await _play_environment(request, playing, env, at_once[env], some, agent, folder, watch)
            _finish(request, folder, plans, console, *published)
            return folder.row
    finally:
        await agent.close()


async def _play_environment(
    request: Request,
    playing: AgentConfig,
    env: str,
    at_once: int,
    episodes: Sequence[Episode],
    agent: Any,
    folder: Folder,
    watch: _Watch,
) -> None:
    """One environment after the other, so that the browsers of one are gone before the next starts its own."""
    playing = playing.model_copy(update={"concurrency": at_once, "step_timeout_s": request.step_timeout_s})
    environment = EnvironmentConfig(name=env, url=request.url, token_variable=request.token_variable)
    pool = EnvironmentsPool((environment,), playing)
    pace = Pace(at_once, request.retries, request.episode_timeout_s)
    try:
        await play(episodes, agent, pool, wrap_of(playing), folder, pace, request.seed, watch.heard)
    finally:
        await pool.close()


class _Watch:
    """Hears of every attempt: moves the bar, and keeps eval.json up to date."""

    def __init__(
        self, request: Request, plans: Sequence[TaskPlan], folder: Folder, episodes: Sequence[Episode]
    ) -> None:
        self.advance: Any = None
        self._request, self._plans, self._folder = request, plans, folder
        wanted = {episode.key for episode in episodes}
        kept = [r for key, tried in folder.records.items() if key in wanted for r in tried if not r.failed]
        self._played, self._solved, self._errors = len(kept), sum(r.success for r in kept), 0
        self._dollars = 0.0
        self._saved = time.monotonic()

    def heard(self, record: Record, last: bool) -> None:
        prices = self._request.agent.prices
        self._dollars += sum(map(prices.cost, record.tokens or ())) if prices else 0.0
        if last:
            self._played += not record.failed
            self._solved += record.success
            self._errors += record.failed
            self.advance(1, self._note())
        if time.monotonic() - self._saved > SAVE_EVERY_S:
            self._saved = time.monotonic()
            self._folder.save(make_results(self._request, self._plans, self._folder))

    def _note(self) -> str:
        parts = [f"success {100 * self._solved / self._played:.0f}%"] if self._played else []
        parts += [counted(self._errors, "error")] if self._errors else []
        parts += [dollars(self._dollars)] if self._request.agent.prices else []
        return " · ".join(parts)


def make_results(request: Request, plans: Sequence[TaskPlan], folder: Folder) -> list[dict[str, Any]]:
    return results(plans, folder.records, request.samples, request.turns or None, request.agent.prices)


def _announce(
    console: Console, candidate: Candidate, root: Path, plans: Sequence[TaskPlan], total: int, left: int
) -> None:
    tasks = sum(bool(plan.items) for plan in plans)
    console.stage("Evaluation", f"{candidate.name}, {counted(tasks, 'task')}, {counted(total, 'episode')}, in {root}")
    if left < total:
        console.note(f"{total - left} episodes are there from before, {left} are left")
    for reason in dict.fromkeys(plan.missing for plan in plans if plan.missing):
        names = [plan for plan in plans if plan.missing == reason]
        scenario = names[0].scenario
        whole = all(plan.missing for plan in plans if plan.scenario == scenario)
        what = scenario if whole else f"{scenario} ({', '.join(plan.name for plan in names)})"
        console.warn(f"{what} is not played: {reason}")


def _finish(
    request: Request,
    folder: Folder,
    plans: Sequence[TaskPlan],
    console: Console,
    source: str,
    published: Sequence[Entry],
) -> None:
    found = make_results(request, plans, folder)
    total = found[-1]["total"]
    folder.save(found, "finished" if total["episodes"] else "failed")
    if not total["episodes"]:
        raise EngineError(f"{_failures(total)}: mend that and run the same command again")
    mine = entry_of(folder.row)
    entries = [mine, *published]
    written = {"results": folder.root / "eval.json", "report": folder.root / "report.md"}
    with writing(folder.root):
        write_atomically(folder.root / "report.md", markdown(entries, source, f"Evaluation of {mine.name}"))
        if len(request.turns) > 1:
            written["turns"] = folder.root / "turns.png"
            _plot(mine, written["turns"])
    print_report(console.rich, entries, source)
    if total["errors"]:
        console.rich.print()
        console.warn(_failures(total))
    console.files({**written, "trajectories": folder.trajectories_dir})


def _plot(entry: Entry, path: Path) -> None:
    footnote = OWN_NOTE if entry.own else ""

    def label(name: str) -> str:
        if name in entry.scenarios:
            return marked(entry, name)
        return f"{name} {OWN}" if entry.overall and entry.overall["own_data"] else name

    turns_plot(entry.by_turns, path, f"{entry.name}: success against turns allowed", label, footnote)


def _failures(total: Mapping[str, Any]) -> str:
    """How many episodes failed, and what with."""
    (cause, times), *more = total["causes"].items()
    asked = total["episodes"] + total["errors"]
    how_many = f"all {asked} episodes" if not total["episodes"] else f"{total['errors']} of {asked} episodes"
    ended = "the only episode ended as an error" if asked == 1 else f"{how_many} ended as errors"
    most = "" if not more else f" {times} of them" if times > 1 else " one of them"
    return f"{ended},{most} with: {cause}"


async def _listed_items(request: Request) -> Listed:
    """Ask the server of --url for the items of the split, or of each subset, unless --items names them."""
    if request.url is None or request.items is not None:
        return {}
    if is_agentgym(request.url):
        raise ConfigError("an AgentGym server needs --items, such as 0-99: it does not list what there is to test on")
    assert request.env is not None
    environment = EnvironmentConfig(name=request.env, url=request.url, token_variable=request.token_variable)
    pool = EnvironmentsPool((environment,), AgentConfig(step_timeout_s=request.step_timeout_s))
    try:
        subsets = request.subsets or (None,)
        return {subset: tuple(await pool.items(request.env, request.split, subset)) for subset in subsets}
    finally:
        await pool.close()


def make_plans(request: Request, candidate: Candidate, listed: Listed | None = None) -> list[TaskPlan]:
    """Every column with its items. What cannot be played stays as a column that says why. `listed` are a server's."""
    return _as_played(_asked_plans(request, listed or {}), request, candidate)


def _asked_plans(request: Request, listed: Listed) -> list[TaskPlan]:
    return _suite_plans(request) if request.suite is not None else _environment_plans(request, listed)


def _as_played(plans: list[TaskPlan], request: Request, candidate: Candidate) -> list[TaskPlan]:
    """The plans with the candidate's own style and context, and the turns asked for."""
    changes: dict[str, Any] = {}
    if candidate.own_style:
        changes["style"] = candidate.playing.style
    if candidate.own_context:
        changes["max_context"] = candidate.playing.max_context
    if request.turns:
        changes["max_turns"] = max(request.turns)
    return [replace(plan, **changes) for plan in plans]


def _suite_plans(request: Request) -> list[TaskPlan]:
    """The suite's tasks; where an environment has none of their data, our stand-ins follow the empty columns."""
    assert request.suite is not None
    plans: list[TaskPlan] = []
    for env in [request.env] if request.env is not None else _environments(request.suite):
        tasks = [_suite_plan(task, request) for task in SUITES[request.suite] if task.scenario.env == env]
        plans += tasks
        if not any(plan.items for plan in tasks):
            found = [_suite_plan(task, request) for task in STAND_INS.get(env, ())]
            plans += [plan for plan in found if plan.items]
    return plans


def _suite_plan(task: SuiteTask, request: Request) -> TaskPlan:
    scenario, split = task.scenario, request.split
    stands_in = task in STAND_INS.get(scenario.env, ())
    if scenario.env == "webarena" and not stands_in:
        split = "official"
    plan = _plan(scenario, task.name, task.subset, split, request, heading=task.heading)
    if plan.missing:
        return plan
    if scenario.env == "webarena" and not stands_in and not all(os.environ.get(site) for site in WEBARENA_SITES):
        return _absent(plan, f"WebArena's sites are needed: set {', '.join(WEBARENA_SITES)}")
    if not plan.items:
        return _absent(plan, f"its questions are needed: set {SEARCHQA_DATA} and {SEARCHQA_INDEX}")
    count = min(task.num_items, request.limit or task.num_items)
    return replace(plan, items=tuple(evenly_spaced(plan.items, count)))


def _environment_plans(request: Request, listed: Listed) -> list[TaskPlan]:
    env = request.env
    assert env is not None
    data, own = _data_of(env, request, request.split)
    scenario = _scenario_of(env, own)
    tasks = {
        task.subset: task
        for suite in (*SUITES.values(), *STAND_INS.values())
        for task in suite
        if task.scenario == scenario
    }
    if request.items is not None:
        items = read_items(request.items, env, request.url)
        limits = (scenario.max_turns, scenario.style, scenario.max_context)
        plans = [TaskPlan(scenario.name, "items", env, "", None, tuple(items), *limits, data, own)]
        if request.url is None:
            splits = catalog.load(env).splits
            outside = [item for item in items if not any(item in split for split in splits.values())]
            if outside:
                there = ", ".join(f"{name} {r.start}-{r.stop - 1}" for name, r in splits.items())
                raise ConfigError(f"{env} has no item {outside[0]}: its items are {there}")
    else:
        if request.url is None:
            catalog.load(env)  # what is not installed is an error here, not an empty column
        plans = []
        for subset in request.subsets or (None,):
            name, heading = (tasks[subset].name, tasks[subset].heading) if subset in tasks else (subset, "")
            plans.append(
                _plan(scenario, name or request.split, subset, request.split, request, heading, listed.get(subset))
            )
        for plan in plans:
            if not plan.items:
                raise ConfigError(f"{env} has no items of {plan.name!r} in its split {request.split!r}: leave it out")
    limit = request.limit
    return [replace(plan, items=tuple(evenly_spaced(plan.items, limit))) if limit else plan for plan in plans]


def _scenario_of(env: str, own_data: bool) -> Scenario:
    """A scenario has one name, however its items were chosen: the suite's, or that of our stand-in for it."""
    if own_data:
        return {"webarena": BUILT_IN_WEB, "searchqa": BUILT_IN_SEARCH}[env]
    known = {task.scenario.env: task.scenario for tasks in SUITES.values() for task in tasks}
    return known.get(env, Scenario(env, env, 30, "act"))


def _plan(
    scenario: Scenario,
    name: str,
    subset: str | None,
    split: str,
    request: Request,
    heading: str = "",
    listed: tuple[int, ...] | None = None,
) -> TaskPlan:
    env = scenario.env
    data, own = _data_of(env, request, split)
    plan = TaskPlan(
        scenario.name, name, env, split, subset, (), scenario.max_turns, scenario.style, scenario.max_context, data, own
    )
    plan = replace(plan, heading=heading)
    if listed is not None:
        return replace(plan, items=listed)
    try:
        env_class = catalog.load(env)
    except ConfigError as error:
        return _absent(plan, str(error))
    return replace(plan, items=tuple(catalog.items(env_class, split, subset)))


def _absent(plan: TaskPlan, reason: str) -> TaskPlan:
    return replace(plan, items=(), data="", own_data=False, missing=reason)


def _data_of(env: str, request: Request, split: str = "") -> tuple[str, bool]:
    """(what its items are, whether that is our own stand-in for a published benchmark)."""
    if request.url is not None:
        return "an environment server's own items", False
    if env == "searchqa":
        place = os.environ.get(SEARCHQA_DATA)
        return (f"question sets in {place}", False) if place else ("this project's own geography questions", True)
    if env == "webarena":
        if split == "official":
            return "WebArena's 812 published tasks, on sites that you run", False
        return "this project's own small sites and tasks", True
    return DATA.get(env, "built into this project"), False


def _config(request: Request, candidate: Candidate, plans: Sequence[TaskPlan]) -> dict[str, Any]:
    """What is measured: a rerun must agree in all of it."""
    playing = candidate.playing
    return {
        "agent": candidate.identity,
        "suite": request.suite,
        "turns": list(request.turns) or None,
        "samples": request.samples,
        "seed": request.seed,
        "temperature": None if candidate.kind in ("oracle", "random") else playing.temperature,
        "max_new_tokens": playing.max_new_tokens,
        "instruction": playing.instruction,
        "dtype": candidate.model.dtype if candidate.model is not None else None,
        "tasks": [plan.to_json() for plan in plans],
    }


def _settings(request: Request) -> dict[str, Any]:
    """How it was played; free to change."""
    prices = request.agent.prices
    return {
        "agentgym_rl": __version__,
        "concurrency": request.concurrency,
        "retries": request.retries,
        "step_timeout_s": request.step_timeout_s,
        "episode_timeout_s": request.episode_timeout_s,
        "base_url": request.agent.base_url if request.agent.spec.startswith("openai:") else None,
        "url": request.url,
        "device": request.agent.device,
        "prices_usd_per_million_tokens": asdict(prices) if prices else None,
    }


def _concurrency(request: Request, heavy: bool) -> int:
    return request.concurrency or (CONCURRENCY_HEAVY if heavy else CONCURRENCY)


def _name(request: Request, candidate: Candidate) -> str:
    """Agent, suite, environment, subsets and turns, as one name of a folder."""
    subsets = request.subsets if len(request.subsets) <= SUBSETS_NAMED else (f"{len(request.subsets)} subsets",)
    turns = f"turns {' '.join(map(str, request.turns))}" if request.turns else ""
    parts = filter(None, (candidate.name, request.suite, request.env, *subsets, turns))
    return re.sub(r"[^\w.@-]+", "-", "-".join(parts)).strip("-")[:NAME_LENGTH]
