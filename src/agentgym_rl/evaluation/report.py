"""The tables: rows are agents, columns are scenarios with their tasks and an overall. Built from eval.json alone.

A `Grid` is a table as plain text; Markdown and the terminal draw the same ones.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from agentgym_rl.errors import ConfigError
from agentgym_rl.evaluation.metrics import INTERVALS
from agentgym_rl.evaluation.plan import TaskPlan
from agentgym_rl.evaluation.suites import Coverage, coverage

MISSING = "–"
OWN = "†"
OWN_NOTE = f"{OWN} our own data, which stand in for the benchmark's: not comparable with published results."
PUBLISHED = "‡"
PARTLY = "*"
PARTLY_NOTE = f"{PARTLY} played in part: rates are over the tasks that were played, and there is no overall."
FEWER = "§"
FEWER_NOTE = f"{FEWER} over fewer items than the suite has: its tasks weigh differently in this overall."


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    small: str = ""
    """An interval, or a mark's words."""


@dataclass(slots=True)
class Grid:
    title: str
    headings: list[str]
    rows: list[list[Cell]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the tables: an evaluation, or published numbers."""

    name: str
    published: bool
    tasks: Mapping[str, Any]
    scenarios: Mapping[str, Any]
    overall: Mapping[str, Any] | None
    plans: tuple[TaskPlan, ...] = ()
    by_turns: tuple[Mapping[str, Any], ...] = ()
    """Results of every horizon, where there are several."""
    total: Mapping[str, Any] = field(default_factory=dict)
    unpriced: bool = False
    """An API's, whose prices were not given: what it cost is not known."""

    @property
    def own(self) -> set[str]:
        """Scenarios played on our own data."""
        return {plan.scenario for plan in self.plans if plan.own_data and plan.items}


def entry_of(evaluation: Mapping[str, Any]) -> Entry:
    """From the content of an eval.json: the longest horizon is the one in the tables."""
    results, agent = evaluation["results"], evaluation["config"]["agent"]
    last = results[-1]
    return Entry(
        # A folder may come from somebody else, and its name goes to a terminal.
        "".join(character if character.isprintable() else " " for character in agent["name"]),
        False,
        last["tasks"],
        last["scenarios"],
        last["overall"],
        tuple(TaskPlan.from_json(plan) for plan in evaluation["config"]["tasks"]),
        tuple(results) if len(results) > 1 else (),
        last["total"],
        agent.get("kind") == "openai" and evaluation["settings"].get("prices_usd_per_million_tokens") is None,
    )


def published_entries(scenarios: Iterable[str]) -> tuple[str, list[Entry]]:
    """(source, rows): results of other models as their paper gives them. They come without intervals.

    ConfigError where none of the scenarios that they are to stand beside is one of theirs.
    """
    data = json.loads(files("agentgym_rl.evaluation").joinpath("published.json").read_text(encoding="utf-8"))
    entries = []
    for name, percents in data["agents"].items():
        rates = {
            scenario: {"success": {"value": percent / 100}}
            for scenario, percent in zip(data["scenarios"], percents, strict=True)
        }
        entries.append(Entry(name, True, {}, rates, None))
    here = dict.fromkeys(scenarios)
    if not any(scenario in data["scenarios"] for scenario in here):
        raise ConfigError(
            f"published results are of {', '.join(data['scenarios'])}, this is {', '.join(here)}: leave --compare out"
        )
    return data["source"], entries


def grids(entries: Sequence[Entry]) -> list[Grid]:
    """Every table of a report."""
    plans = list({plan.key: plan for entry in entries for plan in entry.plans}.values())
    scenarios = list(dict.fromkeys(plan.scenario for plan in plans))
    own = {scenario for entry in entries for scenario in entry.own}
    ours = [entry for entry in entries if not entry.published]
    found = []
    if len(scenarios) > 1:
        with_result = [name for name in scenarios if any(entry.scenarios.get(name) for entry in entries)]
        found.append(_summary(entries, with_result, own))
    for scenario in scenarios:
        columns = [plan for plan in plans if plan.scenario == scenario]
        if any(plan.items for plan in columns):
            # Published rows have one number a scenario: where that is in the summary it is not repeated.
            found.append(_scenario(ours if len(scenarios) > 1 else entries, scenario, columns, own))
    found += [_numbers(entry) for entry in ours]
    found += [_turns(entry) for entry in ours if entry.by_turns]
    return found


def notes(entries: Sequence[Entry], source: str = "") -> list[str]:
    """What a reader has to know to read the tables rightly."""
    lines = [f"Success is in percent of the episodes that ended. {INTERVALS}"]
    ours = [entry for entry in entries if not entry.published]
    for entry in ours:
        if entry.total["errors"]:
            lines.append(
                f"{entry.name}: {counted(entry.total['errors'], 'episode')} ended as errors. They are left out of "
                "every rate; eval.json also has the success rate that counts them as failures. Run the command again "
                "to retry them."
            )
            lines += [f"{entry.name}: {count} × {cause}" for cause, count in entry.total.get("causes", {}).items()]
        if entry.total["unplayed"]:
            lines.append(f"{entry.name}: {counted(entry.total['unplayed'], 'episode')} not played yet.")
        if entry.total["unreported"]:
            answers = counted(entry.total["unreported"], "answer")
            lines.append(f"{entry.name}: {answers} came without usage: tokens and cost lack them.")
        if entry.unpriced:
            lines.append(f"{entry.name}: cost is not known, run it again with --price-prompt and --price-completion.")
    lines += _differences(ours)
    lines += _data_notes([plan for entry in ours for plan in entry.plans])
    if any(plan.own_data for entry in ours for plan in entry.plans if plan.items):
        lines.append(OWN_NOTE)
    kinds = {_coverage(entry, name, _columns(ours, name)) for entry in ours for name in entry.scenarios}
    lines += [note for kind, note in (("part", PARTLY_NOTE), ("fewer items", FEWER_NOTE)) if kind in kinds]
    if source:
        lines.append(f"{PUBLISHED} published, not measured here ({source}): on other items and with other prompts.")
    return lines


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _differences(entries: Sequence[Entry]) -> list[str]:
    """Columns whose rows were not played on the same items with the same turns: they cannot simply be read across."""
    lines = []
    for scenario in dict.fromkeys(plan.scenario for entry in entries for plan in entry.plans):
        rows = [[p for p in entry.plans if p.items and p.scenario == scenario] for entry in entries]
        rows = [plans for plans in rows if plans]
        kinds: dict[str, set[Any]] = {
            "items": {frozenset((p.env, item) for p in plans for item in p.items) for plans in rows},
            "turns": {frozenset(p.max_turns for p in plans) for plans in rows},
            "data": {frozenset(p.data for p in plans) for plans in rows},
        }
        differing = [kind for kind, some in kinds.items() if len(some) > 1]
        if differing:
            what = " and ".join(differing)
            lines.append(f"{scenario}: the rows differ in {what}; agentgym-rl compare pairs what they share.")
    return lines


def _data_notes(plans: Sequence[TaskPlan]) -> list[str]:
    """What each scenario was played on and with how many turns, and what was not played and why."""
    played: dict[str, None] = {}
    for plan in (plan for plan in plans if plan.items):
        chosen = f"the split {plan.split!r}" if plan.split else "items chosen by number"
        usual = plan.split in ("test", "official")
        words = [plan.data, *([] if usual else [chosen]), f"{counted(plan.max_turns, 'turn')} allowed"]
        played[f"{plan.scenario}{f' {OWN}' if plan.own_data else ''}: {'; '.join(words)}."] = None
    missing: dict[tuple[str, str], dict[str, None]] = {}
    for plan in plans:
        if plan.missing:
            missing.setdefault((plan.scenario, plan.missing), {})[plan.name] = None
    reasons = [f"{name} ({', '.join(tasks)}): not played, {why}." for (name, why), tasks in missing.items()]
    return [*played, *reasons]


def _summary(entries: Sequence[Entry], scenarios: Sequence[str], own: set[str]) -> Grid:
    marked = [f"{name} {OWN}" if name in own else name for name in scenarios]
    grid = Grid("Success, %", ["agent", *marked, "mean"])
    for entry in entries:
        cells = [_overall(entry, scenario, _columns(entries, scenario)) for scenario in scenarios]
        grid.rows.append([_name(entry), *cells, _mean(entry, entries)])
    return grid


def _overall(entry: Entry, scenario: str, columns: Collection[str]) -> Cell:
    """A part's rate would be read as the whole scenario's, above published ones: it is not shown."""
    cell = _rate(entry.scenarios.get(scenario))
    kind = _coverage(entry, scenario, columns)
    if kind == "part":
        return Cell(f"{MISSING} {PARTLY}")
    return Cell(f"{cell.text} {FEWER}", cell.small) if kind == "fewer items" and cell.text != MISSING else cell


def _coverage(entry: Entry, scenario: str, columns: Collection[str] = ()) -> Coverage:
    """Of the scenario as a whole; `columns` are the names of its tasks in the table."""
    plans = [plan for plan in entry.plans if plan.scenario == scenario]
    return coverage(plans, columns) if any(plan.items for plan in plans) else "whole"


def _columns(entries: Sequence[Entry], scenario: str) -> set[str]:
    """Names of a scenario's tasks that any of the entries played."""
    return {plan.name for entry in entries for plan in entry.plans if plan.scenario == scenario and plan.items}


def _mean(entry: Entry, entries: Sequence[Entry]) -> Cell:
    """A mean over fewer scenarios than another row's would invite a wrong comparison: it is not shown."""
    if entry.overall is None:
        return Cell(MISSING)
    everything = {name for other in entries if other.overall for name in other.overall["scenarios"]}
    if everything != set(entry.overall["scenarios"]):
        return Cell(MISSING)
    cell = _rate(entry.overall)
    return Cell(f"{cell.text} {OWN}", cell.small) if entry.overall["own_data"] else cell


def _scenario(entries: Sequence[Entry], scenario: str, plans: Sequence[TaskPlan], own: set[str]) -> Grid:
    title = f"{scenario} {OWN}" if scenario in own else scenario
    several = len(plans) > 1 or any(entry.published for entry in entries)
    grid = Grid(title, ["agent", *(plan.heading or plan.name for plan in plans), *(["overall"] if several else [])])
    columns = _columns(entries, scenario)
    for entry in entries:
        if entry.scenarios.get(scenario) is None:
            continue
        cells = [_rate(entry.tasks.get(plan.key)) for plan in plans]
        name = _name(entry)
        if several and _coverage(entry, scenario, columns) == "part":
            name = Cell(f"{name.text} {PARTLY}")
        grid.rows.append([name, *cells, *([_overall(entry, scenario, columns)] if several else [])])
    return grid


def marked(entry: Entry, scenario: str) -> str:
    """A scenario's name where it heads a row of one evaluation."""
    marks = [OWN] * (scenario in entry.own) + [PARTLY] * (_coverage(entry, scenario) == "part")
    return " ".join([scenario, *marks])


def _numbers(entry: Entry) -> Grid:
    """Everything else, one line a scenario; with a single scenario one line a task as well."""
    lines = {marked(entry, name): cell for name, cell in entry.scenarios.items()}
    if len(entry.scenarios) == 1 and len(entry.tasks) > 1:
        lines = {key.partition("/")[2]: cell for key, cell in entry.tasks.items()}
        (scenario,) = entry.scenarios
        lines[marked(entry, scenario)] = entry.scenarios[scenario]
    played = {name: cell for name, cell in lines.items() if cell}
    # pass@1 is avg@k once more.
    rates = [name for cell in played.values() for name in cell if name.startswith(("avg@", "pass@"))]
    columns = [name for name in dict.fromkeys(rates) if name != "pass@1"]
    with_tokens = any(cell["prompt_tokens"] is not None for cell in played.values())
    with_cost = any(cell["cost_usd"] is not None for cell in played.values())
    headings = ["", "items", "episodes", "errors", *columns, "reward", "turns"]
    headings += ["prompt\ntokens", "sampled\ntokens"] if with_tokens else []
    headings += ["cost"] if with_cost else []
    grid = Grid(entry.name, headings)
    for name, cell in played.items():
        row = [Cell(name), *(Cell(str(cell[count])) for count in ("items", "episodes", "errors"))]
        row += [_rate({"success": cell.get(column)}) for column in columns]
        row += [_reward(cell.get("reward")), _number(cell.get("turns"), 1)]
        if with_tokens:
            row += [_number(cell["prompt_tokens"], 0), _number(cell["sampled_tokens"], 0)]
        if with_cost:
            row.append(_dollars(cell))
        grid.rows.append(row)
    return grid


def _turns(entry: Entry) -> Grid:
    headings = ["turns allowed", *(str(result["max_turns"]) for result in entry.by_turns)]
    grid = Grid(f"{entry.name}: success, %, by turns allowed", headings)
    for scenario in entry.scenarios:
        if entry.scenarios[scenario]:
            cells = [_rate(result["scenarios"][scenario]) for result in entry.by_turns]
            grid.rows.append([Cell(marked(entry, scenario)), *cells])
    if entry.overall:
        mean = f"mean {OWN}" if entry.overall["own_data"] else "mean"
        grid.rows.append([Cell(mean), *(_rate(result["overall"]) for result in entry.by_turns)])
    return grid


def markdown(entries: Sequence[Entry], source: str = "", title: str = "Evaluation") -> str:
    """The report as a page."""
    parts = [f"# {escaped(title)}"]
    parts += [f"## {escaped(grid.title)}\n\n{_markdown_table(grid)}" for grid in grids(entries)]
    parts.append("## Notes\n\n" + "\n".join(f"- {escaped(line)}" for line in notes(entries, source)))
    return "\n\n".join(parts) + "\n"


def escaped(text: str) -> str:
    """As Markdown that shows just this text: names and errors come from models' folders and from servers."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # An underscore within a word means nothing to Markdown.
    return re.sub(r"[\\`*\[\]|#~]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)


def _markdown_table(grid: Grid) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    headings = [escaped(heading.replace("-\n", "").replace("\n", " ")) for heading in grid.headings]
    body = [[escaped(f"{c.text} ({c.small})" if c.small else c.text) for c in row] for row in grid.rows]
    return "\n".join([line(headings), line(["---"] + ["---:"] * (len(headings) - 1)), *map(line, body)])


def _name(entry: Entry) -> Cell:
    return Cell(f"{entry.name} {PUBLISHED}") if entry.published else Cell(entry.name)


def _rate(cell: Mapping[str, Any] | None) -> Cell:
    if not cell or not cell["success"]:
        return Cell(MISSING)
    rate = cell["success"]
    small = f"{100 * rate['low']:.0f}–{100 * rate['high']:.0f}" if "low" in rate else ""
    return Cell(f"{100 * rate['value']:.1f}", small)


def _reward(reward: Mapping[str, float] | None) -> Cell:
    if reward is None:
        return Cell(MISSING)
    return Cell(f"{reward['value']:.3g}", f"{reward['low']:.2g} to {reward['high']:.2g}")


def _number(value: float | None, digits: int) -> Cell:
    return Cell(MISSING if value is None else f"{value:,.{digits}f}")


def _dollars(cell: Mapping[str, Any]) -> Cell:
    if cell["cost_usd"] is None:
        return Cell(MISSING)
    at_least = bool(cell["unreported"])
    return Cell(f"{'≥ ' if at_least else ''}{dollars(cell['cost_usd'], down=at_least)}")


def dollars(amount: float, *, down: bool = False) -> str:
    """`$1,234.50`, `$0.0725`, `$0.000006`, `$0`: two digits that say something, never an exponent.

    `down`: a lower bound, which rounding must not raise.
    """
    if amount == 0:
        return "$0"
    digits = 2 if amount >= 1 else 4 if amount >= 0.01 else 1 - math.floor(math.log10(amount))
    if down:
        amount = math.floor(amount * 10**digits * (1 + 1e-12)) / 10**digits
    return re.sub(r"(\.\d\d\d*?)0+$", r"\1", f"${amount:,.{digits}f}")
