"""The command `eval`: find the agent and the items, play the remaining episodes, write the tables.

After a kill at any moment, the same command resumes the evaluation. Finished episodes are never played twice.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from agentgym_rl import __version__
from agentgym_rl.agent.policy import PolicyFactory
from agentgym_rl.agent.styles import STYLES
from agentgym_rl.agent.team import Cast
from agentgym_rl.commands.eval_options import parse_prices, parse_turns, parse_urls, wants_published
from agentgym_rl.commands.eval_served import OWN_TASKS, served_plan
from agentgym_rl.commands.eval_team import Opponent, find_team
from agentgym_rl.commands.load_agent import OPENAI, AgentOptions, Candidate, find_agent, load_agent, run_of
from agentgym_rl.common.files import write_atomically
from agentgym_rl.config import AgentConfig, EnvironmentConfig, load_config
from agentgym_rl.config.overrides import parse_assignments
from agentgym_rl.environment import catalog
from agentgym_rl.environment.agentgym import Server, is_agentgym, read_items
from agentgym_rl.environment.base import TextEnv
from agentgym_rl.errors import ConfigError, EngineError, did_you_mean
from agentgym_rl.evaluation.episodes import PlayOptions, play
from agentgym_rl.evaluation.folder import Folder, default_root, explain_write_errors
from agentgym_rl.evaluation.metrics import results
from agentgym_rl.evaluation.plan import Episode, TaskPlan, episodes_of
from agentgym_rl.evaluation.plot import turns_plot
from agentgym_rl.evaluation.records import Record
from agentgym_rl.evaluation.report import (
    OWN_DATA_MARK,
    OWN_DATA_NOTE,
    Entry,
    entry_of,
    format_dollars,
    markdown,
    pluralize,
    published_entries,
    scenario_label,
)
from agentgym_rl.evaluation.suites import (
    AGENTGYM_27,
    BUILT_IN_SCENARIOS,
    SUBSTITUTES,
    SUITES,
    Scenario,
    SuiteTask,
    evenly_spaced,
)
from agentgym_rl.evaluation.terminal import print_report
from agentgym_rl.run.collectors import session_wrapper
from agentgym_rl.run.console import Console
from agentgym_rl.run.environments_pool import EnvironmentsPool, load_class

SAVE_INTERVAL_S = 15.0
"""Seconds between updates of eval.json while episodes are played."""
CONCURRENCY, CONCURRENCY_HEAVY = 32, 8
"""Default number of concurrent episodes. Environments with a browser or a Java process get fewer."""
MAX_NAMED_SUBSETS = 3
"""A folder name lists up to this many subsets. If there are more, it gives their number."""
MAX_NAME_LENGTH = 200
"""Characters of a folder name. File systems allow 255."""
WEBARENA_SITES = ("SHOPPING", "SHOPPING_ADMIN", "REDDIT", "GITLAB", "MAP")
SEARCHQA_DATA, SEARCHQA_INDEX = "AGENTGYM_SEARCHQA_DATA", "AGENTGYM_SEARCHQA_INDEX"
DATA = {  # saved in eval.json and compared on resume: do not reword
    "textcraft": "Minecraft 1.16 recipes; goals drawn by this project, as many of each depth as published",
    "babyai": "minigrid's levels, seeds held out by this project",
    "sciworld": "ScienceWorld's own test variations",
}

DEFAULT_TURNS = 30
"""Horizon of an environment that is in no suite, for an agent without a run."""

ItemsBySubset = Mapping[str | None, tuple[int, ...]]
"""Item numbers that a server lists, by subset."""


@dataclass(frozen=True, slots=True)
class Request:
    """Options of the command line."""

    agent: AgentOptions
    suite: str | None = None
    env: str | None = None
    subsets: tuple[str, ...] = ()
    items: str | None = None
    split: str = "test"
    limit: int | None = None
    """Most items of each task."""
    url: str | None = None
    urls: Mapping[str, str] = field(default_factory=dict)
    """AgentGym's servers for a suite, by environment."""
    lists: Path | None = None
    """Folder of item lists, one per environment of a suite that is played on a server."""
    token_variable: str | None = None
    source: str | None = None
    """Name in the catalog or import path of the environment, if `env` is a name that a run gave it."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor."""
    turns: tuple[int, ...] = ()
    """Horizons, or empty for each scenario's own."""
    default_turns: int = DEFAULT_TURNS
    """Horizon of an environment that is in no suite, or what the agent's own run gave it."""
    samples: int = 1
    seed: int = 0
    out: Path | None = None
    concurrency: int | None = None
    retries: int = 2
    step_timeout_s: float = 60.0
    episode_timeout_s: float = 1800.0
    compare_published: bool = False
    role: str | None = None
    """Role that the agent plays, in an environment with several."""
    opponent: str | None = None
    """Agent that plays the other roles."""

    def __post_init__(self) -> None:
        if self.suite is None and self.env is None:
            raise ConfigError("nothing to evaluate: give --suite agentgym-27, --env NAME, or both for one scenario")
        if self.suite is not None and self.suite not in SUITES:
            raise ConfigError(
                f"unknown suite {self.suite!r}: known are {', '.join(SUITES)}{did_you_mean(self.suite, SUITES)}"
            )
        if self.suite is not None and (self.subsets or self.items or self.url or self.kwargs):
            raise ConfigError(
                "a suite has its own items: leave out --subset, --items, --url and --kwarg, or leave out --suite"
            )
        if self.suite is None and self.lists is not None:
            raise ConfigError("--lists has the items of a suite: give --suite, or name items by --items")
        unserved = set(self.urls) - {
            task.scenario.env for task in SUITES.get(self.suite or "", ()) if task.scenario.needs_server
        }
        if unserved:
            raise ConfigError(
                f"{self.suite} plays {min(unserved)} in this process: leave out --url {min(unserved)}=..."
            )
        if self.url is not None and self.kwargs:
            raise ConfigError("--kwarg is for an environment in this process; with --url the server decides")
        if self.suite is not None and self.env is not None and self.env not in _environments(self.suite):
            raise ConfigError(f"{self.suite} has no {self.env!r}: it has {', '.join(_environments(self.suite))}")
        if self.items is not None and self.subsets:
            raise ConfigError("give --items or --subset, not both")
        if self.agent.style is not None and self.agent.style not in STYLES:
            known, hint = ", ".join(STYLES), did_you_mean(self.agent.style, STYLES)
            raise ConfigError(f"unknown style {self.agent.style!r}: known are {known}{hint}")
        if self.agent.context not in (None, "full", "window", "summary"):
            raise ConfigError(f"--context needs full, window or summary, got {self.agent.context!r}")
        if any(t < 1 for t in self.turns):
            raise ConfigError(f"--turns needs numbers of at least 1, got {self.turns}")


def _environments(suite: str) -> list[str]:
    return list(dict.fromkeys(task.scenario.env for task in SUITES[suite]))


def request_of(given: Mapping[str, Any]) -> Request:
    """Make a request from the options of the command line. Options of the same name as a field are copied."""
    prices = parse_prices(*(given[f"price_{kind}"] for kind in ("prompt", "completion", "cached")))
    changed: dict[str, Any] = {
        "spec": given["agent"],
        "key_variable": given["key_variable"] or None,
        "request_timeout_s": given["request_timeout"],
        "prices": prices,
    }
    agent = AgentOptions(**{f.name: ({**given, **changed})[f.name] for f in fields(AgentOptions)})
    url, urls = parse_urls(given["url"], given["suite"])
    changed = {
        "agent": agent,
        "url": url,
        "urls": urls,
        "subsets": tuple(dict.fromkeys(given["subset"] or ())),
        "turns": parse_turns(given["turns"]),
        "default_turns": DEFAULT_TURNS,
        "source": None,
        "kwargs": parse_assignments(given["kwarg"] or []),
        "step_timeout_s": given["step_timeout"],
        "episode_timeout_s": given["episode_timeout"],
        "compare_published": wants_published(given["compare"]),
    }
    return Request(**{f.name: ({**given, **changed})[f.name] for f in fields(Request)})


async def evaluate(request: Request, console: Console | None = None) -> dict[str, Any]:
    """Evaluate one agent and return the content of its eval.json."""
    console = console or Console()
    request = _with_settings_of_run(request)
    # Before the agent: an error in a name is reported without loading torch.
    plans = _requested_plans(request, await _listed_items(request))
    environment = None if request.suite or request.env is None else _environment(request, request.env)
    team = await find_team(environment, request.role, request.opponent)
    candidate = find_agent(replace(request.agent, role=None if team is None else team.role))
    plans = _apply_agent(plans, request, candidate)
    playable = [plan for plan in plans if plan.items]
    if not playable:
        raise ConfigError(f"no task can be played: {plans[0].missing or 'the selection has no items'}")
    published = published_entries(plan.scenario for plan in plans) if request.compare_published else ("", [])
    max_context = max(plan.max_context for plan in playable)
    heavy = {plan.env for plan in playable if _url(request, plan) is None and not _load(request, plan.env).cheap}
    concurrency = {
        plan.env: request.concurrency or (CONCURRENCY_HEAVY if plan.env in heavy else CONCURRENCY) for plan in playable
    }
    opponent = None if team is None else Opponent(team, request.agent)
    config = _config(request, candidate, plans) | (opponent.config() if opponent is not None else {})
    root = request.out or default_root(Path("evals"), _name(request, candidate), config)
    # Before the folder is created: an agent that cannot be loaded leaves no folder behind.
    agent = load_agent(candidate, max(concurrency.values()), max_context)
    try:
        if opponent is not None:
            opponent.load(max(concurrency.values()), max_context)
        with Folder(root, config, _settings(request)) as folder:
            limit = agent.max_context or max_context
            plans = [replace(plan, max_context=min(plan.max_context, limit)) for plan in plans]
            episodes = episodes_of(plans, request.samples, candidate.playing.max_new_tokens)
            progress = _Progress(request, plans, folder, episodes)
            remaining = [episode for episode in episodes if not folder.finished(episode.key)]
            _announce(console, candidate, root, plans, len(episodes), len(remaining))
            if remaining:
                with console.progress("episodes", len(remaining)) as progress.advance:
                    for env in dict.fromkeys(episode.task.env for episode in remaining):
                        batch = [episode for episode in remaining if episode.task.env == env]
                        playing = candidate.playing.model_copy(update={"style": batch[0].style})
                        cast = None if opponent is None else opponent.cast
                        await _play_environment(
                            request, playing, env, concurrency[env], batch, agent, folder, progress, cast
                        )
            _finish(request, folder, plans, console, *published)
            return folder.row
    finally:
        await agent.close()
        if opponent is not None:
            await opponent.close()


def _with_settings_of_run(request: Request) -> Request:
    """Return the request with what the agent's own run gave the environment: limits, source and kwargs."""
    run = run_of(request.agent.spec) if request.suite is None else None
    config = None if run is None else load_config(run[0] / "config.toml", [])
    env = next((env for env in config.environments if env.name == request.env), None) if config else None
    if config is None or env is None:
        return request
    tokens, context = request.agent.max_new_tokens or env.max_new_tokens, request.agent.max_context or env.max_context
    agent = replace(request.agent, max_new_tokens=tokens, max_context=context)
    request = replace(request, agent=agent, default_turns=env.eval_max_turns or config.eval.max_turns)
    if request.url is not None or env.url is not None:
        return request
    return replace(request, source=env.source, kwargs={**env.kwargs, **request.kwargs})


def _environment(request: Request, env: str) -> EnvironmentConfig:
    url = request.url or request.urls.get(env)
    settings = {"source": request.source, "kwargs": dict(request.kwargs)} if url is None else {}
    return EnvironmentConfig(name=env, url=url, token_variable=request.token_variable, **settings)


def _url(request: Request, plan: TaskPlan) -> str | None:
    return request.url or request.urls.get(plan.env)


def _load(request: Request, env: str) -> type[TextEnv]:
    return load_class(_environment(request, env))


async def _play_environment(
    request: Request,
    playing: AgentConfig,
    env: str,
    concurrency: int,
    episodes: Sequence[Episode],
    agent: Any,
    folder: Folder,
    progress: _Progress,
    cast: Callable[[PolicyFactory], Cast] | None = None,
) -> None:
    """Play the episodes of one environment. Its browsers are closed before the next environment starts."""
    playing = playing.model_copy(update={"concurrency": concurrency, "step_timeout_s": request.step_timeout_s})
    pool = EnvironmentsPool((_environment(request, env),), playing)
    options = PlayOptions(concurrency, request.retries, request.episode_timeout_s)
    try:
        wrap, seed = session_wrapper(playing), request.seed
        await play(episodes, agent, pool, wrap, folder, options, seed, progress.on_record, cast)
    finally:
        await pool.close()


class _Progress:
    """Progress of an evaluation: updates the progress bar and eval.json after each attempt."""

    def __init__(
        self, request: Request, plans: Sequence[TaskPlan], folder: Folder, episodes: Sequence[Episode]
    ) -> None:
        self.advance: Any = None
        self._request, self._plans, self._folder = request, plans, folder
        keys = {episode.key for episode in episodes}
        finished = [r for key, records in folder.records.items() if key in keys for r in records if not r.failed]
        self._played, self._solved, self._errors = len(finished), sum(r.success for r in finished), 0
        self._dollars = 0.0
        self._saved = time.monotonic()

    def on_record(self, record: Record, is_last: bool) -> None:
        prices = self._request.agent.prices
        self._dollars += sum(map(prices.cost, record.tokens or ())) if prices else 0.0
        if is_last:
            self._played += not record.failed
            self._solved += record.success
            self._errors += record.failed
            self.advance(1, self._note())
        if time.monotonic() - self._saved > SAVE_INTERVAL_S:
            self._saved = time.monotonic()
            self._folder.save(make_results(self._request, self._plans, self._folder))

    def _note(self) -> str:
        parts = [f"success {100 * self._solved / self._played:.0f}%"] if self._played else []
        parts += [pluralize(self._errors, "error")] if self._errors else []
        parts += [format_dollars(self._dollars)] if self._request.agent.prices else []
        return " · ".join(parts)


def make_results(request: Request, plans: Sequence[TaskPlan], folder: Folder) -> list[dict[str, Any]]:
    return results(plans, folder.records, request.samples, request.turns or None, request.agent.prices)


def _announce(
    console: Console, candidate: Candidate, root: Path, plans: Sequence[TaskPlan], total: int, remaining: int
) -> None:
    tasks = sum(bool(plan.items) for plan in plans)
    size = f"{pluralize(tasks, 'task')}, {pluralize(total, 'episode')}"
    console.stage("Evaluation", f"{candidate.name}, {size}, in {root}")
    if remaining < total:
        console.note(f"resumed: {total - remaining} episodes are finished, {remaining} remain")
    for reason in dict.fromkeys(plan.missing for plan in plans if plan.missing):
        missing = [plan for plan in plans if plan.missing == reason]
        scenario = missing[0].scenario
        is_whole = all(plan.missing for plan in plans if plan.scenario == scenario)
        name = scenario if is_whole else f"{scenario} ({', '.join(plan.name for plan in missing)})"
        console.warn(f"{name} is not played: {reason}")


def _finish(
    request: Request,
    folder: Folder,
    plans: Sequence[TaskPlan],
    console: Console,
    source: str,
    published: Sequence[Entry],
) -> None:
    final_results = make_results(request, plans, folder)
    total = final_results[-1]["total"]
    folder.save(final_results, "finished" if total["episodes"] else "failed")
    if not total["episodes"]:
        raise EngineError(f"{_failures(total)}: fix that and run the same command again")
    entry = entry_of(folder.row)
    entries = [entry, *published]
    paths = {"results": folder.root / "eval.json", "report": folder.root / "report.md"}
    with explain_write_errors(folder.root):
        write_atomically(paths["report"], markdown(entries, source, f"Evaluation of {entry.name}").encode())
        if len(request.turns) > 1:
            paths["turns"] = folder.root / "turns.png"
            _plot(entry, paths["turns"])
    print_report(console.rich, entries, source)
    if total["errors"]:
        console.rich.print()
        console.warn(_failures(total))
    console.files({**paths, "trajectories": folder.trajectories_dir})


def _plot(entry: Entry, path: Path) -> None:
    footnote = OWN_DATA_NOTE if entry.own else ""

    def label(name: str) -> str:
        if name in entry.scenarios:
            return scenario_label(entry, name)
        return f"{name} {OWN_DATA_MARK}" if entry.overall and entry.overall["own_data"] else name

    turns_plot(entry.by_turns, path, f"{entry.name}: success against turns allowed", label, footnote)


def _failures(total: Mapping[str, Any]) -> str:
    """Return how many episodes failed, and the most common cause."""
    (cause, count), *others = total["causes"].items()
    attempted = total["episodes"] + total["errors"]
    failed = f"all {attempted} episodes" if not total["episodes"] else f"{total['errors']} of {attempted} episodes"
    ended = "the only episode ended as an error" if attempted == 1 else f"{failed} ended as errors"
    share = "" if not others else f" {count} of them" if count > 1 else " one of them"
    return f"{ended},{share} with: {cause}"


async def _listed_items(request: Request) -> ItemsBySubset:
    """Return the items that the server of --url lists for the split or each subset. Empty if --items names them."""
    if request.url is None or request.items is not None:
        return {}
    assert request.env is not None
    if is_agentgym(request.url) and Server(request.url, request.env).served is None:
        raise ConfigError("an AgentGym server needs --items, such as 0-99: it does not list its test items")
    environment = _environment(request, request.env)
    pool = EnvironmentsPool((environment,), AgentConfig(step_timeout_s=request.step_timeout_s))
    try:
        subsets = request.subsets or (None,)
        return {subset: tuple(await pool.items(request.env, request.split, subset)) for subset in subsets}
    finally:
        await pool.close()


def make_plans(request: Request, candidate: Candidate, listed: ItemsBySubset | None = None) -> list[TaskPlan]:
    """Return every column with its items, `listed` by a server if any. An unplayable task has none, and a reason."""
    return _apply_agent(_requested_plans(request, listed or {}), request, candidate)


def _requested_plans(request: Request, listed: ItemsBySubset) -> list[TaskPlan]:
    return _suite_plans(request) if request.suite is not None else _environment_plans(request, listed)


def _apply_agent(plans: list[TaskPlan], request: Request, candidate: Candidate) -> list[TaskPlan]:
    """Return the plans with the agent's own style and context, and the requested turns."""
    changes: dict[str, Any] = {}
    if candidate.own_style:
        changes["style"] = candidate.playing.style
    if candidate.own_context:
        changes["max_context"] = candidate.playing.max_context
    if request.turns:
        changes["max_turns"] = max(request.turns)
    return [replace(plan, **changes) for plan in plans]


def _suite_plans(request: Request) -> list[TaskPlan]:
    """Return the suite's tasks. If an environment lacks their data, its substitutes follow the empty columns."""
    assert request.suite is not None
    plans: list[TaskPlan] = []
    for env in [request.env] if request.env is not None else _environments(request.suite):
        tasks = [_suite_plan(task, request) for task in SUITES[request.suite] if task.scenario.env == env]
        plans += tasks
        if not any(plan.items for plan in tasks):
            substitutes = [_suite_plan(task, request) for task in SUBSTITUTES.get(env, ())]
            plans += [plan for plan in substitutes if plan.items]
    return plans


def _suite_plan(task: SuiteTask, request: Request) -> TaskPlan:
    scenario, split = task.scenario, request.split
    if scenario.needs_server:
        return served_plan(task, request.urls.get(scenario.env), request.lists, request.limit)
    is_substitute = task in SUBSTITUTES.get(scenario.env, ())
    if scenario.env == "webarena" and not is_substitute:
        split = "official"
    plan = _plan(scenario, task.name, task.subset, split, request, heading=task.heading)
    if plan.missing:
        return plan
    if scenario.env == "webarena" and not is_substitute and not all(os.environ.get(site) for site in WEBARENA_SITES):
        return _missing(plan, f"WebArena's sites are needed: set {', '.join(WEBARENA_SITES)}")
    if not plan.items:
        return _missing(plan, f"its questions are needed: set {SEARCHQA_DATA} and {SEARCHQA_INDEX}")
    count = min(task.num_items, request.limit or task.num_items)
    items = tuple(evenly_spaced(plan.items, count))
    return replace(plan, items=items, own_data=plan.own_data or is_substitute)


def _environment_plans(request: Request, listed: ItemsBySubset) -> list[TaskPlan]:
    env = request.env
    assert env is not None
    data, own_data = _data_of(env, request, request.split)
    scenario = _scenario_of(request.source or env, own_data, request)
    tasks = {
        task.subset: task
        for suite in (*SUITES.values(), *SUBSTITUTES.values())
        for task in suite
        if task.scenario == scenario
    }
    if request.source is not None:
        scenario = replace(scenario, name=env, env=env)
    if request.items is not None:
        items = read_items(request.items, request.source or env, request.url)
        limits = (scenario.max_turns, scenario.style, scenario.max_context)
        plans = [TaskPlan(scenario.name, "items", env, "", None, tuple(items), *limits, data, own_data)]
        if request.url is None:
            splits = _load(request, env).splits
            outside = [item for item in items if not any(item in split for split in splits.values())]
            if outside:
                ranges = ", ".join(f"{name} {r.start}-{r.stop - 1}" for name, r in splits.items())
                raise ConfigError(f"{env} has no item {outside[0]}: its items are {ranges}")
    else:
        if request.url is None:
            _load(request, env)  # a package that is not installed is an error here, not an empty column
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


def _scenario_of(env: str, own_data: bool, request: Request) -> Scenario:
    """Return the suite's scenario or its substitute, so that a scenario has one name however its items are chosen."""
    if own_data:
        return BUILT_IN_SCENARIOS[env]
    suites = tuple(SUITES.values()) if request.url is not None and is_agentgym(request.url) else (AGENTGYM_27,)
    known = {task.scenario.env: task.scenario for tasks in reversed(suites) for task in tasks}
    return known.get(env, Scenario(env, env, request.default_turns, "act"))


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
    data, own_data = _data_of(env, request, split)
    plan = TaskPlan(
        *(scenario.name, name, env, split, subset, (), scenario.max_turns, scenario.style, scenario.max_context),
        *(data, own_data),
        heading=heading,
    )
    if listed is not None:
        return replace(plan, items=listed)
    try:
        env_class = _load(request, env)
    except ConfigError as error:
        return _missing(plan, str(error))
    return replace(plan, items=tuple(catalog.items(env_class, split, subset)))


def _missing(plan: TaskPlan, reason: str) -> TaskPlan:
    return replace(plan, items=(), data="", own_data=False, missing=reason)


def _data_of(env: str, request: Request, split: str = "") -> tuple[str, bool]:
    """Return a description of the items, and whether they replace those of a published benchmark."""
    if request.url is not None:
        return "an environment server's own items", False
    env = request.source or env
    if env == "searchqa":
        path = request.kwargs.get("data") or os.environ.get(SEARCHQA_DATA)
        return (f"question sets in {path}", False) if path else ("this project's own geography questions", True)
    if env == "webarena":
        if split == "official":
            return "WebArena's 812 published tasks, on sites that you run", False
        return "this project's own small sites and tasks", True
    if env in OWN_TASKS:
        return OWN_TASKS[env], True
    if env not in catalog.CATALOG:
        return f"items of {env}", False
    return DATA.get(env, "built into this project"), False


def _config(request: Request, candidate: Candidate, plans: Sequence[TaskPlan]) -> dict[str, Any]:
    """Return the settings that define what is measured. A resumed evaluation must have the same."""
    playing = candidate.playing
    own_arguments = request.kwargs or request.source
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
    } | ({"environment": {"source": request.source, "kwargs": dict(request.kwargs)}} if own_arguments else {})


def _settings(request: Request) -> dict[str, Any]:
    """Return the settings that a resumed evaluation may change."""
    prices = request.agent.prices
    is_api = any(spec.startswith(OPENAI) for spec in (request.agent.spec, request.opponent or ""))
    return {
        "agentgym_rl": __version__,
        "concurrency": request.concurrency,
        "retries": request.retries,
        "step_timeout_s": request.step_timeout_s,
        "episode_timeout_s": request.episode_timeout_s,
        "base_url": request.agent.base_url if is_api else None,
        "url": request.url,
        "urls": dict(request.urls),
        "device": request.agent.device,
        "prices_usd_per_million_tokens": asdict(prices) if prices else None,
    }


def _name(request: Request, candidate: Candidate) -> str:
    """Return a folder name made of agent, suite, environment, subsets and turns."""
    subsets = request.subsets if len(request.subsets) <= MAX_NAMED_SUBSETS else (f"{len(request.subsets)} subsets",)
    turns = f"turns {' '.join(map(str, request.turns))}" if request.turns else ""
    parts = filter(None, (candidate.name, request.suite, request.env, *subsets, turns))
    return re.sub(r"[^\w.@-]+", "-", "-".join(parts)).strip("-")[:MAX_NAME_LENGTH]
