"""Tables of a report, built from eval.json alone. Rows are agents; columns are scenarios, their tasks and an overall.

A `Grid` is a table of plain text. The Markdown page and the terminal draw the same grids.
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
from agentgym_rl.evaluation.metrics import INTERVALS, MEAN_INTERVAL
from agentgym_rl.evaluation.plan import GAME, TaskPlan, game_of
from agentgym_rl.evaluation.suites import Coverage, coverage

NO_VALUE = "–"
OWN_DATA_MARK = "†"
OWN_DATA_NOTE = f"{OWN_DATA_MARK} own data, not the benchmark's: not comparable with published results."
PUBLISHED_MARK = "‡"
PARTIAL_MARK = "*"
PARTIAL_NOTE = f"{PARTIAL_MARK} played in part: rates cover the tasks that were played, and there is no overall."
FEWER_ITEMS_MARK = "§"
FEWER_ITEMS_NOTE = f"{FEWER_ITEMS_MARK} fewer items than in the suite: its tasks have other weights in this overall."


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    detail: str = ""
    """Second line, such as an interval."""


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
    """Results of every horizon, if there are several."""
    total: Mapping[str, Any] = field(default_factory=dict)
    unpriced: bool = False
    """True for an API agent without prices, whose cost is therefore unknown."""
    game: Mapping[str, str] = field(default_factory=dict)
    """Environment arguments, role and opponent, by name."""

    @property
    def own(self) -> set[str]:
        """Scenarios played on this project's own data."""
        return {plan.scenario for plan in self.plans if plan.own_data and plan.items}


def entry_of(evaluation: Mapping[str, Any]) -> Entry:
    """Make an entry from the content of an eval.json. The tables show the longest horizon."""
    results, agent = evaluation["results"], evaluation["config"]["agent"]
    last = results[-1]
    return Entry(
        # The folder may come from another user, and the name is printed to a terminal.
        "".join(character if character.isprintable() else " " for character in agent["name"]),
        False,
        last["tasks"],
        last["scenarios"],
        last["overall"],
        tuple(TaskPlan.from_json(plan) for plan in evaluation["config"]["tasks"]),
        tuple(results) if len(results) > 1 else (),
        last["total"],
        agent.get("kind") == "openai" and evaluation["settings"].get("prices_usd_per_million_tokens") is None,
        game_of(evaluation["config"]),
    )


def published_entries(scenarios: Iterable[str]) -> tuple[str, list[Entry]]:
    """Return (source, entries): results of other models as published, without intervals.

    Raise ConfigError if no published result covers any of `scenarios`.
    """
    sources = json.loads(files("agentgym_rl.evaluation").joinpath("published.json").read_text(encoding="utf-8"))
    wanted = dict.fromkeys(scenarios)
    # The paper with the most of them; the first of equals.
    data = max(sources, key=lambda source: len(wanted.keys() & source["scenarios"]))
    if not wanted.keys() & data["scenarios"]:
        covered = ", ".join(dict.fromkeys(name for source in sources for name in source["scenarios"]))
        raise ConfigError(f"published results cover {covered}, not {', '.join(wanted)}: leave --compare out")
    entries = []
    for name, percents in data["agents"].items():
        rates = {
            scenario: {"success": {"value": percent / 100}}
            for scenario, percent in zip(data["scenarios"], percents, strict=True)
        }
        entries.append(Entry(name, True, {}, rates, None))
    return data["source"], entries


def grids(entries: Sequence[Entry]) -> list[Grid]:
    """Return every table of a report."""
    plans = list({plan.key: plan for entry in entries for plan in entry.plans}.values())
    scenarios = list(dict.fromkeys(plan.scenario for plan in plans))
    own = {scenario for entry in entries for scenario in entry.own}
    ours = [entry for entry in entries if not entry.published]
    tables = []
    if len(scenarios) > 1:
        with_result = [name for name in scenarios if any(entry.scenarios.get(name) for entry in entries)]
        tables.append(_summary(entries, with_result, own))
    for scenario in scenarios:
        columns = [plan for plan in plans if plan.scenario == scenario]
        if any(plan.items for plan in columns):
            # Published rows have one number per scenario. If it is in the summary it is not repeated.
            tables.append(_scenario(ours if len(scenarios) > 1 else entries, scenario, columns, own))
    tables += [_numbers(entry) for entry in ours]
    tables += [_turns(entry) for entry in ours if entry.by_turns]
    return tables


def notes(entries: Sequence[Entry], source: str = "") -> list[str]:
    """Return the notes below the tables: errors, data, missing tasks and the meaning of the marks."""
    ours = [entry for entry in entries if not entry.published]
    of_mean = MEAN_INTERVAL if any(len(entry.scenarios) > 1 for entry in ours) else ""
    lines = [f"Success is the percentage of episodes that ended without an error. {INTERVALS}{of_mean}."]
    for entry in ours:
        if entry.total["errors"]:
            lines.append(
                f"{entry.name}: {pluralize(entry.total['errors'], 'episode')} ended as errors. They are left out of "
                "every rate; eval.json also has the success rate that counts them as failures. Run the command again "
                "to retry them."
            )
            lines += [f"{entry.name}: {count} × {cause}" for cause, count in entry.total.get("causes", {}).items()]
        if entry.total["unplayed"]:
            lines.append(f"{entry.name}: {pluralize(entry.total['unplayed'], 'episode')} not played yet.")
        if entry.total["unreported"]:
            answers = pluralize(entry.total["unreported"], "answer")
            lines.append(f"{entry.name}: {answers} reported no usage: tokens and cost do not include them.")
        if entry.unpriced:
            lines.append(f"{entry.name}: cost is unknown, run it again with --price-prompt and --price-completion.")
    lines += _differences(ours)
    lines += _data_notes([plan for entry in ours for plan in entry.plans])
    if any(plan.own_data for entry in ours for plan in entry.plans if plan.items):
        lines.append(OWN_DATA_NOTE)
    kinds = {_coverage(entry, name, _columns(ours, name)) for entry in ours for name in entry.scenarios}
    lines += [note for kind, note in (("part", PARTIAL_NOTE), ("fewer items", FEWER_ITEMS_NOTE)) if kind in kinds]
    if source:
        lines.append(f"{PUBLISHED_MARK} published, not measured here ({source}): other items, other prompts.")
    return lines


def pluralize(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _differences(entries: Sequence[Entry]) -> list[str]:
    """Return a note for each scenario whose rows differ in what is played and cannot be compared directly."""
    lines = []
    for scenario in dict.fromkeys(plan.scenario for entry in entries for plan in entry.plans):
        played = {e: [p for p in entry.plans if p.items and p.scenario == scenario] for e, entry in enumerate(entries)}
        rows = [plans for plans in played.values() if plans]
        games = [entries[e].game for e, plans in played.items() if plans]
        others: dict[str, set[Any]] = {name: {game.get(name, "") for game in games} for name in GAME.values()}
        kinds: dict[str, set[Any]] = others | {
            "items": {frozenset((p.env, item) for p in plans for item in p.items) for plans in rows},
            "turns": {frozenset(p.max_turns for p in plans) for plans in rows},
            "data": {frozenset(p.data for p in plans) for plans in rows},
        }
        differing = [kind for kind, values in kinds.items() if len(values) > 1]
        if differing:
            names = " and ".join(differing)
            lines.append(f"{scenario}: the rows differ in {names}; agentgym-rl compare pairs the items they share.")
    return lines


def _data_notes(plans: Sequence[TaskPlan]) -> list[str]:
    """Return the data and turns of each scenario, and the tasks that were not played with the reason."""
    played: dict[str, None] = {}
    for plan in (plan for plan in plans if plan.items):
        selection = f"the split {plan.split!r}" if plan.split else "items chosen by number"
        is_test_split = plan.split in ("test", "official")
        parts = [plan.data, *([] if is_test_split else [selection]), f"{pluralize(plan.max_turns, 'turn')} allowed"]
        played[f"{plan.scenario}{f' {OWN_DATA_MARK}' if plan.own_data else ''}: {'; '.join(parts)}."] = None
    missing: dict[tuple[str, str], dict[str, None]] = {}
    for plan in plans:
        if plan.missing:
            missing.setdefault((plan.scenario, plan.missing), {})[plan.name] = None
    reasons = [f"{name} ({', '.join(tasks)}): not played, {why}." for (name, why), tasks in missing.items()]
    return [*played, *reasons]


def _summary(entries: Sequence[Entry], scenarios: Sequence[str], own: set[str]) -> Grid:
    labels = [f"{name} {OWN_DATA_MARK}" if name in own else name for name in scenarios]
    grid = Grid("Success, %", ["agent", *labels, "mean"])
    for entry in entries:
        cells = [_overall(entry, scenario, _columns(entries, scenario)) for scenario in scenarios]
        grid.rows.append([_name(entry), *cells, _mean(entry, entries)])
    return grid


def _overall(entry: Entry, scenario: str, columns: Collection[str]) -> Cell:
    """Return the overall of a scenario, or no value if it was played in part: a reader would take it for the whole."""
    cell = _rate(entry.scenarios.get(scenario))
    kind = _coverage(entry, scenario, columns)
    if kind == "part":
        return Cell(f"{NO_VALUE} {PARTIAL_MARK}")
    if kind == "fewer items" and cell.text != NO_VALUE:
        return Cell(f"{cell.text} {FEWER_ITEMS_MARK}", cell.detail)
    return cell


def _coverage(entry: Entry, scenario: str, columns: Collection[str] = ()) -> Coverage:
    """Return how much of the scenario was played. `columns` are the names of its tasks in the table."""
    plans = [plan for plan in entry.plans if plan.scenario == scenario]
    return coverage(plans, columns) if any(plan.items for plan in plans) else "whole"


def _columns(entries: Sequence[Entry], scenario: str) -> set[str]:
    """Return the names of a scenario's tasks that at least one entry played."""
    return {plan.name for entry in entries for plan in entry.plans if plan.scenario == scenario and plan.items}


def _mean(entry: Entry, entries: Sequence[Entry]) -> Cell:
    """Return the mean over scenarios, or no value if another row has a mean over more scenarios."""
    if entry.overall is None:
        return Cell(NO_VALUE)
    all_scenarios = {name for other in entries if other.overall for name in other.overall["scenarios"]}
    if all_scenarios != set(entry.overall["scenarios"]):
        return Cell(NO_VALUE)
    cell = _rate(entry.overall)
    return Cell(f"{cell.text} {OWN_DATA_MARK}", cell.detail) if entry.overall["own_data"] else cell


def _scenario(entries: Sequence[Entry], scenario: str, plans: Sequence[TaskPlan], own: set[str]) -> Grid:
    title = f"{scenario} {OWN_DATA_MARK}" if scenario in own else scenario
    several = len(plans) > 1 or any(entry.published for entry in entries)
    grid = Grid(title, ["agent", *(plan.heading or plan.name for plan in plans), *(["overall"] if several else [])])
    columns = _columns(entries, scenario)
    for entry in entries:
        if entry.scenarios.get(scenario) is None:
            continue
        cells = [_rate(entry.tasks.get(plan.key)) for plan in plans]
        name = _name(entry)
        if several and _coverage(entry, scenario, columns) == "part":
            name = Cell(f"{name.text} {PARTIAL_MARK}")
        grid.rows.append([name, *cells, *([_overall(entry, scenario, columns)] if several else [])])
    return grid


def scenario_label(entry: Entry, scenario: str) -> str:
    """Return a scenario's name with its marks, as the heading of a row."""
    marks = [OWN_DATA_MARK] * (scenario in entry.own) + [PARTIAL_MARK] * (_coverage(entry, scenario) == "part")
    return " ".join([scenario, *marks])


def _numbers(entry: Entry) -> Grid:
    """Return the other metrics, one line per scenario. With a single scenario, add one line per task."""
    lines = {scenario_label(entry, name): cell for name, cell in entry.scenarios.items()}
    if len(entry.scenarios) == 1 and len(entry.tasks) > 1:
        lines = {key.partition("/")[2]: cell for key, cell in entry.tasks.items()}
        (scenario,) = entry.scenarios
        lines[scenario_label(entry, scenario)] = entry.scenarios[scenario]
    played = {name: cell for name, cell in lines.items() if cell}
    # pass@1 equals avg@k.
    rates = [name for cell in played.values() for name in cell if name.startswith(("avg@", "pass@"))]
    columns = [name for name in dict.fromkeys(rates) if name != "pass@1"]
    with_tokens = any(cell["prompt_tokens"] is not None for cell in played.values())
    with_cost = any(cell["cost_usd"] is not None for cell in played.values())
    tried = [name for cell in played.values() for name in cell.get("attempts", ())]
    attempts = list(dict.fromkeys(tried))
    headings = ["", "items", "episodes", "errors", *columns, *attempts, "reward", "turns"]
    headings += ["prompt\ntokens", "sampled\ntokens"] if with_tokens else []
    headings += ["cost"] if with_cost else []
    grid = Grid(entry.name, headings)
    for name, cell in played.items():
        row = [Cell(name), *(Cell(str(cell[count])) for count in ("items", "episodes", "errors"))]
        row += [_rate({"success": cell.get(column)}) for column in columns]
        row += [_rate({"success": cell.get("attempts", {}).get(name)}) for name in attempts]
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
            grid.rows.append([Cell(scenario_label(entry, scenario)), *cells])
    if entry.overall:
        mean = f"mean {OWN_DATA_MARK}" if entry.overall["own_data"] else "mean"
        grid.rows.append([Cell(mean), *(_rate(result["overall"]) for result in entry.by_turns)])
    return grid


def markdown(entries: Sequence[Entry], source: str = "", title: str = "Evaluation") -> str:
    """Return the report as a Markdown page."""
    parts = [f"# {escape_markdown(title)}"]
    parts += [f"## {escape_markdown(grid.title)}\n\n{_markdown_table(grid)}" for grid in grids(entries)]
    parts.append("## Notes\n\n" + "\n".join(f"- {escape_markdown(line)}" for line in notes(entries, source)))
    return "\n\n".join(parts) + "\n"


def escape_markdown(text: str) -> str:
    """Escape text for Markdown. Names and errors come from model folders and servers and are not trusted."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # Markdown ignores an underscore within a word.
    return re.sub(r"[\\`*\[\]|#~]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)


def _markdown_table(grid: Grid) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    headings = [escape_markdown(heading.replace("-\n", "").replace("\n", " ")) for heading in grid.headings]
    body = [[escape_markdown(f"{c.text} ({c.detail})" if c.detail else c.text) for c in row] for row in grid.rows]
    return "\n".join([line(headings), line(["---"] + ["---:"] * (len(headings) - 1)), *map(line, body)])


def _name(entry: Entry) -> Cell:
    return Cell(f"{entry.name} {PUBLISHED_MARK}") if entry.published else Cell(entry.name)


def _rate(cell: Mapping[str, Any] | None) -> Cell:
    if not cell or not cell["success"]:
        return Cell(NO_VALUE)
    rate = cell["success"]
    detail = f"{100 * rate['low']:.0f}–{100 * rate['high']:.0f}" if "low" in rate else ""
    return Cell(f"{100 * rate['value']:.1f}", detail)


def _reward(reward: Mapping[str, float] | None) -> Cell:
    if reward is None:
        return Cell(NO_VALUE)
    return Cell(f"{reward['value']:.3g}", f"{reward['low']:.2g} to {reward['high']:.2g}")


def _number(value: float | None, digits: int) -> Cell:
    return Cell(NO_VALUE if value is None else f"{value:,.{digits}f}")


def _dollars(cell: Mapping[str, Any]) -> Cell:
    if cell["cost_usd"] is None:
        return Cell(NO_VALUE)
    at_least = bool(cell["unreported"])
    return Cell(f"{'≥ ' if at_least else ''}{format_dollars(cell['cost_usd'], down=at_least)}")


def format_dollars(amount: float, *, down: bool = False) -> str:
    """Format an amount with two significant digits and no exponent: `$1,234.50`, `$0.0725`, `$0.000006`, `$0`.

    `down` rounds down, for a lower bound.
    """
    if amount == 0:
        return "$0"
    digits = 2 if amount >= 1 else 4 if amount >= 0.01 else 1 - math.floor(math.log10(amount))
    if down:
        amount = math.floor(amount * 10**digits * (1 + 1e-12)) / 10**digits
    return re.sub(r"(\.\d\d\d*?)0+$", r"\1", f"${amount:,.{digits}f}")
