"""The paper's table with a real model: rows with intervals, curves over steps, tokens and seconds, from the records.

`results/plot.py` calls it for the studies whose names begin with qwen. An interval is over items: it describes these
agents. The lowest and highest seed stand beside it.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from importlib.resources import files
from itertools import accumulate
from typing import Any

from jobs import RANDOM
from qwen_studies import QWEN, QWEN_SIZES
from records import Record, evaluations_of, item_rates, mean_curve, runs_of, success_at, turns_of
from tables import holm, in_points

from agentgym_rl.environment import catalog
from agentgym_rl.evaluation.statistics import mean_interval, rate_interval, sign_flip_test

ROWS = {
    RANDOM: "random play",
    "base": "base",
    "SFT": "SFT on the oracle",
    "fixed-short": "RL, fixed short horizon",
    "fixed-long": "RL, fixed long horizon",
    "staged": "RL, ScalingInter",
    "adaptive": "RL, adaptive horizon",
}
"""Rows of the table by arm."""
SCENARIOS = {
    "textcraft": "TextCraft",
    "babyai": "BabyAI",
    "searchqa": "Deep search",
    "sciworld": "SciWorld",
    "webarena": "Web, built-in sites",
}
"""Columns of the table. Published agents did not play the built-in sites."""
PUBLISHED = ("Qwen2.5-3B-Instruct", "AgentGym-RL-3B", "AgentGym-RL-7B", "ScalingInter-7B")
AIMS = {"textcraft": (("depth1", "depth2"), 0.60), "babyai": ((), 0.35)}
"""Subsets (empty: all) and gain over base that the staged arm is to reach, by task."""
AXES = ("steps", "sampled tokens, thousands", "seconds of training")
TRIES = ((32, 1), (16, 2), (8, 4))
"""(turns, tries): one long episode, or several shorter ones with the same total of turns."""


def by_task_and_arm(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """Return the suite's evaluations by task and arm, one per seed. Transfers and turn studies have other arms."""
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in evaluations_of(records):
        groups[record["task"], record["arm"]].append(record)
    return groups


def mean_item_rates(records: Sequence[Record], subsets: Sequence[str] = ()) -> dict[str, float]:
    """Return each item's success, averaged over the agents that played it."""
    rates: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for item, rate in item_rates(record, turns_of(record)[-1]).items():
            if not subsets or set(subsets) & set(_subsets_of(item)):
                rates[item].append(rate)
    return {item: statistics.fmean(values) for item, values in rates.items()}


def _subsets_of(item: str) -> Sequence[str]:
    env, _, number = item.partition("/")
    subsets: Sequence[str] = catalog.load(env).subsets_of(int(number))
    return subsets


def rate_cell(records: Sequence[Record]) -> str:
    """Return `72.1% (64–79), seeds 70–74`: mean over seeds, interval over items, lowest and highest seed."""
    rates = mean_item_rates(records)
    episodes = sum(len(s) for r in records for s in r["outcomes"][str(turns_of(r)[-1])].values())
    low, high = rate_interval(list(rates.values()), episodes)
    cell = f"{statistics.fmean(rates.values()):.1%} ({100 * low:.0f}–{100 * high:.0f})"
    if len(records) > 1:
        seeds = [100 * success_at(r, turns_of(r)[-1]) for r in records]
        cell += f", seeds {min(seeds):.0f}–{max(seeds):.0f}"
    return cell


def published_rows(scenarios: Sequence[str]) -> list[str]:
    sources = json.loads(files("agentgym_rl.evaluation").joinpath("published.json").read_text(encoding="utf-8"))
    (data,) = (source for source in sources if PUBLISHED[0] in source["agents"])
    column = {scenario: index for index, scenario in enumerate(data["scenarios"])}
    lines = []
    for agent in PUBLISHED:
        cells = (f"{data['agents'][agent][column[s]]:g}%" if s in column else "" for s in scenarios)
        lines.append(f"| *{agent} (published)* | {' | '.join(cells)} |")
    return lines


def main_table(records: Sequence[Record]) -> list[str]:
    """Return the table of the paper: a row per arm, a column per scenario."""
    groups = by_task_and_arm(records)
    tasks = [task for task in QWEN if any(t == task for t, _ in groups)]
    lines = [f"| success | {' | '.join(SCENARIOS[task] for task in tasks)} |", "|---|" + "---|" * len(tasks)]
    for arm, title in ROWS.items():
        if any((task, arm) in groups for task in tasks):
            cells = (rate_cell(groups[task, arm]) if (task, arm) in groups else "" for task in tasks)
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return [*lines, *published_rows([SCENARIOS[task] for task in tasks])]


def kinds_table(records: Sequence[Record], task: str) -> list[str]:
    """Return the success of each subset of a task by arm, mean over seeds, in percent."""
    groups = by_task_and_arm(records)
    arms = [arm for arm in ROWS if (task, arm) in groups]
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    items: dict[str, int] = {}
    for arm in arms:
        for record in groups[task, arm]:
            for kind, cell in record["results"][-1]["tasks"].items():
                if cell is not None and cell["episodes"]:  # None: a dataset that is not here
                    rates[kind][arm].append(cell["success"]["value"])
                    items[kind] = cell["items"]
    lines = [f"| in percent | items | {' | '.join(ROWS[arm] for arm in arms)} |", "|---|---|" + "---|" * len(arms)]
    for kind, by_arm in rates.items():
        cells = (f"{100 * statistics.fmean(by_arm[arm]):.0f}" if by_arm[arm] else "" for arm in arms)
        lines.append(f"| {kind.partition('/')[2]} | {items[kind]} | {' | '.join(cells)} |")
    return lines


def gains_over_base(
    trained: Sequence[Record], base: Sequence[Record], subsets: Sequence[str] = ()
) -> tuple[list[float], list[float]]:
    """Return the gains of trained agents over base: of each item, mean over the agents, and of each agent."""
    before = mean_item_rates(base, subsets)

    def gains(agents: Sequence[Record]) -> list[float]:
        after = mean_item_rates(agents, subsets)
        return [after[item] - before[item] for item in sorted(after.keys() & before.keys())]

    return gains(trained), [statistics.fmean(gains([agent])) for agent in trained]


def over_base_table(records: Sequence[Record]) -> list[str]:
    """Return the gain of the staged arm over base on the same items, and whether it reaches its aim."""
    groups = by_task_and_arm(records)
    lines = ["| task | items | ScalingInter less base (95% interval) | by seed | aim |", "|---|---|---|---|---|"]
    for task in QWEN:
        if (task, "staged") not in groups or (task, "base") not in groups:
            continue
        subsets, aim = AIMS.get(task, ((), 0.0))
        gains, by_seed = gains_over_base(groups[task, "staged"], groups[task, "base"], subsets)
        reached = "reached" if statistics.fmean(gains) >= aim else "missed"
        wanted = f"{100 * aim:+.0f}: {reached}" if aim else ""
        name = f"{SCENARIOS[task]}{', ' + ' and '.join(subsets) if subsets else ''}"
        gain = in_points(statistics.fmean(gains), *mean_interval(gains))
        seeds = ", ".join(f"{100 * value:+.1f}" for value in by_seed)
        lines.append(f"| {name} | {len(gains)} | {gain} | {seeds} | {wanted} |")
    return lines if len(lines) > 2 else ["No task has both base and a staged agent yet."]


def arms_against_staged(records: Sequence[Record], task: str) -> list[str]:
    """Return staged less each other arm over the shared items, mean over shared seeds. Three seeds decide nothing."""
    groups = by_task_and_arm(records)
    by_seed = {arm: {r["seed"]: r for r in groups.get((task, arm), [])} for arm in ROWS}
    rows: list[tuple[str, float]] = []
    for arm in ("fixed-long", "fixed-short", "adaptive", "SFT"):
        seeds = sorted(by_seed["staged"].keys() & by_seed[arm].keys())
        if not seeds:
            continue
        first, second = (mean_item_rates([by_seed[a][s] for s in seeds]) for a in ("staged", arm))
        differences = [first[item] - second[item] for item in first if item in second]
        ends = {a: [success_at(by_seed[a][s], turns_of(by_seed[a][s])[-1]) for s in seeds] for a in ("staged", arm)}
        each = [a - b for a, b in zip(ends["staged"], ends[arm], strict=True)]
        difference = in_points(statistics.fmean(differences), *mean_interval(differences))
        line = f"| {arm} | {difference} | {', '.join(f'{100 * d:+.1f}' for d in each)}"
        rows.append((line, sign_flip_test(differences)))
    lines = ["| staged less | difference (95% interval over items) | by seed | p over items | p, Holm |"]
    adjusted = holm([p for _, p in rows])
    cells = [f"{line} | {p:.2g} | {q:.2g} |" for (line, p), q in zip(rows, adjusted, strict=True)]
    return [*lines, "|---|---|---|---|---|", *cells]


def axes_of(record: Record) -> tuple[list[list[float]], list[float]]:
    """Return (steps, thousand sampled tokens, seconds of training at each evaluation) and the held-out success.

    Seconds are those of the training steps, without evaluations; several runs shared the GPU.
    """
    seconds = [0.0, *accumulate(value or 0.0 for value in record["curves"].get("time/step_s", []))]
    evaluations = record["evaluations"]
    steps = [float(e["step"]) for e in evaluations]
    tokens = [e["sampled_tokens"] / 1e3 for e in evaluations]
    return [steps, tokens, [seconds[e["step"]] for e in evaluations]], [e["success"] for e in evaluations]


def draw_curves(panels: Sequence[Any], runs: Sequence[Record], task: str, colours: dict[str, str]) -> None:
    """Draw held-out success on the three axes of AXES from the same runs: the mean and faint seeds."""
    for arm, colour in colours.items():
        curves = [axes_of(r) for r in runs if (r["task"], r["arm"]) == (task, arm)]
        for number, axes in enumerate(panels):
            for xs, ys in curves:
                axes.plot(xs[number], ys, color=colour, alpha=0.25, linewidth=0.8)
            if curves:
                axes.plot(*mean_curve([(xs[number], ys) for xs, ys in curves]), color=colour, linewidth=2, label=arm)


def runs_with_evaluations(records: Sequence[Record], task: str, arms: Sequence[str]) -> list[Record]:
    """Return the runs of a task that have a curve of held-out success."""
    return [r for r in runs_of(records) if r["task"] == task and r["arm"] in arms and r["evaluations"]]


def costs_table(records: Sequence[Record], task: str) -> list[str]:
    """Return steps, tokens and wall-clock of the runs of a task, mean over seeds."""
    lines = [
        "| arm | runs | steps | sampled tokens | training, s | whole run, s | held-out success, best and last |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, title in ROWS.items():
        runs = runs_with_evaluations(records, task, [arm])
        if runs and arm != "base":
            steps, seconds = (statistics.fmean(r[n] for r in runs) for n in ("steps", "seconds"))
            tokens = statistics.fmean(r.get("sampled_tokens", 0) for r in runs)
            training = statistics.fmean(sum(v or 0.0 for v in r["curves"].get("time/step_s", [])) for r in runs)
            best = statistics.fmean(max(e["success"] for e in r["evaluations"]) for r in runs)
            last = statistics.fmean(r["evaluations"][-1]["success"] for r in runs)
            row = f"{steps:.0f} | {tokens:,.0f} | {training:.0f} | {seconds:.0f} | {best:.1%}, {last:.1%}"
            lines.append(f"| {title} | {len(runs)} | {row} |")
    return lines


def behaviour_in_stage(run: Record, number: int, metric: str) -> list[float]:
    """Return the values of a metric of behaviour in a stage of a run."""
    stage, columns = run["stages"][number], run["behaviour"]["step"]
    rows = zip(columns["step"], columns[metric], strict=True)
    return [value for step, value in rows if stage["first_step"] <= step <= stage["last_step"] and value is not None]


def behaviour_table(records: Sequence[Record], task: str) -> list[str]:
    """Return the behaviour in training by stage, mean over seeds (results/behaviour.py defines the metrics)."""
    names = ("sequences_per_episode", "states_per_item", "loops", "refused", "recovered", "success_after_refusal")
    lines = [f"| arm | turns | {' | '.join(n.replace('_', ' ') for n in names)} |", "|---|---|" + "---|" * len(names)]
    for arm in ROWS:
        runs = [r for r in runs_of(records) if (r["task"], r["arm"]) == (task, arm)]
        runs = [r for r in runs if r.get("behaviour", {}).get("step")]
        for number in range(max((len(r["stages"]) for r in runs), default=0)):
            inside = [run for run in runs if number < len(run["stages"])]
            turns = [run["stages"][number]["turns"] for run in inside]
            values = {name: [v for run in inside for v in behaviour_in_stage(run, number, name)] for name in names}
            cells = (f"{statistics.fmean(values[n]):.3g}" if values[n] else "" for n in names)
            lines.append(f"| {arm} | {statistics.fmean(turns):.0f} | {' | '.join(cells)} |")
    return lines if len(lines) > 2 else ["No run has behaviour by step in its record."]


def interaction_tables(records: Sequence[Record]) -> list[str]:
    """Return success by turns and size before and after RL, and several tries at the same total of turns."""
    lines: list[str] = []
    groups = by_task_and_arm(records)
    arms = [RANDOM, *(f"{kind} {size}" for size in QWEN_SIZES for kind in ("base", "staged"))]
    for task in QWEN:
        present = [arm for arm in arms if (task, arm) in groups]
        if not present:
            continue
        turns = turns_of(groups[task, present[0]][0])
        lines += [f"{SCENARIOS[task]}, success by turns:", "", f"| agent | {' | '.join(map(str, turns))} |"]
        lines.append("|---|" + "---|" * len(turns))
        for arm in present:
            cells = (f"{statistics.fmean(success_at(r, t) for r in groups[task, arm]):.1%}" for t in turns)
            lines.append(f"| {arm} | {' | '.join(cells)} |")
        heads = [f"{tries} of {t} turns: success, sampled tokens" for t, tries in TRIES]
        lines += ["", f"| tries | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
        for arm in present:
            cells = (_tries_cell(groups[task, arm], t, tries) for t, tries in TRIES)
            lines.append(f"| {arm} | {' | '.join(cells)} |")
        lines.append("")
    return lines


def _tries_cell(records: Sequence[Record], turns: int, tries: int) -> str:
    """Return the success of the best of `tries` episodes (pass@k) and the sampled tokens of all of them."""
    if any(str(turns) not in r["outcomes"] or not item_rates(r, turns, tries) for r in records):
        return ""
    success = statistics.fmean(success_at(r, turns, tries) for r in records)
    cells = [c for r in records for x in r["results"] if x["max_turns"] == turns for c in x["scenarios"].values()]
    tokens = [c["sampled_tokens"] for c in cells if c.get("sampled_tokens") is not None]
    return f"{success:.1%}, {tries * statistics.fmean(tokens):.0f}" if tokens else f"{success:.1%}"


def generalisation_table(transfers: Sequence[Record], others: Sequence[Record]) -> list[str]:
    """Return a matrix of agents by scenarios: each staged agent where it was and was not trained."""
    groups = by_task_and_arm(transfers)
    own = by_task_and_arm(others)
    seeds = {arm: {r["seed"] for (_, a), records in groups.items() if a == arm for r in records} for _, arm in groups}
    tasks = [task for task in QWEN if any(t == task for t, _ in groups)]
    lines = [f"| agent | {' | '.join(SCENARIOS[task] for task in tasks)} |", "|---|" + "---|" * len(tasks)]
    names = {f"trained on {task}": f"trained on {SCENARIOS[task]}" for task in QWEN}
    names = {"base": "base", **names, "together": "together"}
    for agent, name in names.items():
        cells = []
        for task in tasks:
            if agent == f"trained on {task}":
                chosen = [r for r in own.get((task, "staged"), []) if r["seed"] in seeds.get(agent, ())]
            else:
                chosen = own.get((task, "base"), []) if agent == "base" else groups.get((task, agent), [])
            cells.append(rate_cell(chosen) + (" (own)" if agent == f"trained on {task}" else "") if chosen else "")
        if any(cells):
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines
