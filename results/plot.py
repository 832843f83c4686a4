"""Draw the figures and write the tables of docs/results/evidence.md from the JSON under results/.

    python results/plot.py [--results results] [--out docs/images]

Only studies with records are drawn. Missing records are listed on the console and in tables.md.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import collapse
import paper
from jobs import RANDOM
from records import (
    Record,
    curve,
    describe_missing,
    evaluations_of,
    final_success,
    item_rates,
    mean_curve,
    overall_cell,
    read_records,
    runs_of,
    success_at,
    turns_of,
)
from studies import NO_EXAMPLES, SIZES
from tables import (
    agents_table,
    arms_table,
    before_after_table,
    by_arm,
    contributions_table,
    equal_steps_table,
    gains_table,
    items_table,
    kinds_table,
    mean_and_range,
    mean_success_since_first_evaluations,
    paired_table,
    seed_means_table,
    stages_table,
)

from agentgym_rl.run.plots import FAINT, GRID, INK

ARMS = {
    RANDOM: "#f1f3f5",
    NO_EXAMPLES: "#e4e7eb",
    "base": "#cbd2d9",
    "SFT": "#a16207",
    "RL": "#2563eb",
    "SFT + RL": "#0f766e",
}
HORIZONS = {
    "staged": "#0f766e",
    "adaptive": "#2563eb",
    "fixed-long": "#c2410c",
    "fixed-middle": "#7c3aed",
    "fixed-short": "#a16207",
}
SIZE_COLOURS = {"1M": "#94a3b8", "5M": "#2563eb", "25M": "#0f766e"}
TITLES = {"babyai": "BabyAI", "textcraft": "TextCraft", "searchqa": "SearchQA", "sciworld": "SciWorld"}
PANELS = (
    ("success", "held-out success", "success"),
    ("turns/mean", "turns used in training", "turns per episode"),
    ("truncated/rate", "truncated episodes", "share of episodes"),
    ("entropy/mean", "token entropy", "nats"),
    ("actions/repeated_rate", "repeated actions", "share of actions"),
    ("groups/zero_variance", "groups with equal rewards", "share of groups"),
)
"""Metric, title and y label of each panel. Shares are drawn in percent."""
TRIES, TURNS_PER_TRY = (1, 2, 4), 4
"""Numbers of tries (k of pass@k) and turns per try."""
OVERVIEW_RUNS = (
    ("staged-horizon", "babyai", "B: many rooms, from scratch (1M)"),
    ("horizon-conditions", "far rooms", "B: far rooms, from scratch (1M)"),
    ("horizon-smollm2", "textcraft", "B: TextCraft, SmolLM2-135M after SFT"),
)
"""Study, task and title of the README's horizon panels: tasks that an arm learned (none learned deep crafting)."""
PANELS_PER_ROW = 3


def new_figure(rows: int, columns: int, width: float, height: float) -> tuple[Any, list[list[Any]]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, facecolor="white", layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
        axes.tick_params(colors=INK, labelsize=8)
    return figure, [list(row) for row in grid]


def title_of(task: str) -> str:
    return TITLES.get(task, task)


def set_title(axes: Any, text: str) -> None:
    axes.set_title(text, fontsize=9, loc="left", color=INK)


def label_y(axes: Any, label: str) -> None:
    axes.set_ylabel(label, fontsize=9, color=INK)


def label_y_in_percent(axes: Any, label: str) -> None:
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    label_y(axes, label)


def share_y_limits(panels: Sequence[Any]) -> None:
    """Set y limits from 0 to the same top, so that panels of the same measure can be compared."""
    top = max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(0, top)


def draw_bars(axes: Any, records: Sequence[Record], task: str) -> None:
    """Draw the success of each arm with its interval (claim A), with one bar per seed."""
    center, ticks = 0.0, []
    for arm, colour in ARMS.items():
        bars = sorted((r for r in records if (r["task"], r["arm"]) == (task, arm)), key=lambda r: r["seed"])
        for number, record in enumerate(bars):
            rate = overall_cell(record)["success"]
            x = center + 0.8 * (number + 0.5) / len(bars) - 0.4
            axes.bar(x, rate["value"], 0.76 / len(bars), color=colour)
            axes.plot([x, x], [rate["low"], rate["high"]], color=INK, linewidth=1.2)
            axes.text(x, rate["high"], f"{100 * rate['value']:.0f}", ha="center", va="bottom", fontsize=8, color=INK)
        if bars:
            ticks.append((center, arm.replace(", ", ",\n")))
            center += 1
    axes.set_xticks([x for x, _ in ticks], [name for _, name in ticks])
    axes.grid(axis="x", visible=False)


def draw_curves(axes: Any, runs: Sequence[Record], task: str, name: str) -> None:
    """Draw the mean of each arm against sampled tokens, and every seed as a faint line."""
    for arm, colour in HORIZONS.items():
        curves = [curve(r, name) for r in runs if (r["task"], r["arm"]) == (task, arm)]
        curves = [c for c in curves if c[0]]
        for xs, ys in curves:
            axes.plot([x / 1e3 for x in xs], ys, color=colour, alpha=0.25, linewidth=0.8)
        if curves:
            xs, ys = mean_curve(curves)
            axes.plot([x / 1e3 for x in xs], ys, color=colour, linewidth=2, label=arm)


def draw_turns(axes: Any, evaluated: Sequence[Record], arms: Sequence[tuple[str, str]]) -> None:
    """Draw success against turns by size (claim C), with bars from the lowest to the highest seed."""
    for size, colour in SIZE_COLOURS.items():
        for arm, style in arms:
            records = [r for r in evaluated if r["arm"] == f"{arm} {size}"]
            if records:
                turns = turns_of(records[0])
                values = [[success_at(r, t) for r in records] for t in turns]
                label = f"{size}, {'trained' if arm == 'staged' else arm}"
                mean = [statistics.fmean(by_seed) for by_seed in values]
                axes.plot(turns, mean, style, color=colour, marker="o", markersize=4, label=label)
                for turn, by_seed in zip(turns, values, strict=True):
                    axes.plot([turn, turn], [min(by_seed), max(by_seed)], color=colour, linewidth=1, alpha=0.6)
    for record in (r for r in evaluated if r["arm"] == RANDOM):
        turns = turns_of(record)
        axes.plot(turns, [success_at(record, t) for t in turns], ":", color=FAINT, label=RANDOM)
    _turns_axis(axes, "turns allowed")


def draw_sizes(axes: Any, evaluated: Sequence[Record], arms: Sequence[tuple[str, str]]) -> None:
    """Draw success against size (claim C), with a line for each number of turns."""
    for arm, style in arms:
        by_size = {size: [r for r in evaluated if r["arm"] == f"{arm} {size}"] for size in SIZE_COLOURS}
        sizes = [size for size, agents in by_size.items() if agents]
        for turns in turns_of(by_size[sizes[0]][0]) if sizes else ():
            mean = [statistics.fmean(success_at(r, turns) for r in by_size[size]) for size in sizes]
            parameters = [float(size.removesuffix("M")) for size in sizes]
            alpha = 0.25 + 0.15 * math.log2(turns)
            axes.plot(parameters, mean, style, color=INK, alpha=alpha, marker="o", markersize=4)
            index, offset, alignment = (-1, 6, "left") if arm == "staged" else (0, -6, "right")
            text_options = {"textcoords": "offset points", "fontsize": 8, "ha": alignment}
            axes.annotate(f"{turns} turns", (parameters[index], mean[index]), (offset, -3), **text_options)
    axes.set_xscale("log")
    axes.set_xticks([float(size.removesuffix("M")) for size in SIZE_COLOURS], list(SIZE_COLOURS))
    axes.minorticks_off()
    axes.set_xlim(0.4, 60)
    axes.set_xlabel("parameters (solid: trained, dashed: base)", fontsize=9, color=INK)


def draw_tries(axes: Any, evaluated: Sequence[Record]) -> None:
    """Draw k tries of a few turns each against one episode with the same total of turns."""
    for size, colour in SIZE_COLOURS.items():
        records = [r for r in evaluated if r["arm"] == f"staged {size}"]
        if records:
            spent = [k * TURNS_PER_TRY for k in TRIES]
            single = [statistics.fmean(success_at(r, turns) for r in records) for turns in spent]
            best = [statistics.fmean(success_at(r, TURNS_PER_TRY, k) for r in records) for k in TRIES]
            axes.plot(spent, single, "-", color=colour, marker="o", markersize=4, label=f"{size}, one episode")
            axes.plot(spent, best, ":", color=colour, marker="s", markersize=4, label=f"{size}, tries")
    _turns_axis(axes, "total turns")


def _turns_axis(axes: Any, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks([2, 4, 8, 16, 32], ["2", "4", "8", "16", "32"])
    axes.set_xlabel(label, fontsize=9, color=INK)


def draw_legend(axes: Any, columns: int = 1) -> None:
    """Draw the legend below the axes, where it hides no curve."""
    position: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
    appearance: dict[str, Any] = {"frameon": False, "labelcolor": INK, "handlelength": 2.4, "columnspacing": 1}
    axes.legend(fontsize=8, ncols=columns, **position, **appearance)


def rl_over_base(records: list[Record], out: Path) -> list[str]:
    evaluated = evaluations_of(records)
    if not evaluated:
        return ["No agent has an evaluation so far."]
    tasks = sorted({r["task"] for r in evaluated})
    figure, grid = new_figure(1, len(tasks), 5.2 * len(tasks), 3.4)
    for axes, task in zip(grid[0], tasks, strict=True):
        draw_bars(axes, evaluated, task)
        label_y_in_percent(axes, "held-out success")
        set_title(axes, f"{title_of(task)}: SmolLM2-135M, success with 95% intervals")
    share_y_limits(grid[0])
    figure.savefig(out / "evidence-base.png")
    pairs = [("RL", "base"), ("SFT + RL", "SFT")]
    return [
        *(*agents_table(evaluated, list(ARMS)), "", "On the same items:", "", *items_table(evaluated, pairs)),
        *("", "By kind of item:", "", *kinds_table(evaluated, list(ARMS))),
        *("", "RL runs, on their own evaluations:", "", *before_after_table(rl_runs(runs_of(records)))),
    ]


def rl_runs(runs: Sequence[Record]) -> list[Record]:
    return [r for r in runs if r["arm"] not in ("SFT", "base")]


def horizons(records: list[Record], out: Path) -> list[str]:
    """Draw the metrics of PANELS against sampled tokens, a block per task, and return the tables."""
    runs = [r for r in runs_of(records) if r["arm"] in HORIZONS]
    if not runs:
        return ["Only starting models have records so far."]
    draw_horizons(runs, out / "evidence-horizons.png")
    staged = [(a, b) for a in ("staged", "adaptive") for b in ("fixed-short", "fixed-long")]
    tables = [*arms_table(runs, list(HORIZONS)), "", "Success at the end of the budget:"]
    tables += ["", *paired_table(runs, staged, final_success)]
    for task in sorted({r["task"] for r in runs}):
        task_runs = [r for r in runs if r["task"] == task]
        tables += ["", f"{title_of(task)} alone:", "", *paired_table(task_runs, staged, final_success)]
    tables += ["", "Mean success after every arm's first evaluation:", ""]
    tables += paired_table(runs, staged, mean_success_since_first_evaluations(runs))
    tables += ["", "At equal steps:", "", *equal_steps_table(runs, list(HORIZONS))]
    return [*tables, "", *training_signals(runs)]


def conditions(
    records: list[Record], out: Path, picture: str = "evidence-conditions.png", note: str = "the first row decides"
) -> list[str]:
    """Compare the arms on tasks that rarely end within a short horizon, with 1,200 episodes per agent."""
    runs = [r for r in runs_of(records) if r["arm"] in HORIZONS]
    if not runs:
        return ["Only starting models have records so far."]
    draw_horizons(runs, out / picture)
    agents = [r for r in evaluations_of(records) if r["arm"] in (*HORIZONS, RANDOM)]
    success = {(r["task"], r["arm"], r["seed"]): success_at(r, turns_of(r)[-1]) for r in agents}
    evaluated = [r for r in runs if (r["task"], r["arm"], r["seed"]) in success]
    lines = [*arms_table(runs, list(HORIZONS)), "", "Success of the last model, four episodes per item:", ""]
    lines += agents_table(agents, [*HORIZONS, RANDOM])
    for task in sorted({r["task"] for r in evaluated}):
        task_runs = [r for r in evaluated if r["task"] == task]
        lines += ["", f"The last models, {task}; {note}:", ""]
        tables = [
            paired_table(task_runs, [("staged", arm)], lambda r: success[r["task"], r["arm"], r["seed"]])
            for arm in HORIZONS
            if arm.startswith("fixed")
        ]
        lines += tables[0][:2] + [line for table in tables for line in table[2:]]
        task_agents = [r for r in agents if r["task"] == task]
        lines += ["", *kinds_table(task_agents, [*HORIZONS, RANDOM])]
        lines += ["", *contributions_table(task_agents, "staged", "fixed-long")]
    lines += ["", "At equal steps:", "", *equal_steps_table(runs, list(HORIZONS))]
    return [*lines, "", *training_signals(runs)]


def settings(records: list[Record], out: Path) -> list[str]:
    return conditions(records, out, "evidence-settings.png", "three pairs decide nothing")


def pretrained_horizons(records: list[Record], out: Path) -> list[str]:
    """Compare the arms with a pretrained model item by item."""
    runs = [r for r in runs_of(records) if r["arm"] in HORIZONS]
    if not runs:
        return ["Only starting models have records so far."]
    draw_horizons(runs, out / "evidence-horizons-smollm2.png")
    agents = evaluations_of(records)
    pairs = [("staged", "fixed-short"), ("staged", "fixed-long")]
    return [
        *(*arms_table(runs, list(HORIZONS)), "", "All held-out goals, four samples each:", ""),
        *(*agents_table(agents, list(HORIZONS)), "", "On the same items:", "", *seed_means_table(agents, pairs)),
        *("", "By kind of item:", "", *kinds_table(agents, list(HORIZONS))),
        *("", *contributions_table(agents, "staged", "fixed-long")),
        *("", "RL runs, on their own evaluations:", "", *before_after_table(runs)),
        *("", "At equal steps:", "", *equal_steps_table(runs, list(HORIZONS))),
        *("", *training_signals(runs)),
    ]


def draw_horizons(runs: Sequence[Record], path: Path) -> None:
    horizons_figure(runs).savefig(path)


def horizons_figure(runs: Sequence[Record]) -> Any:
    """Return a figure with two rows of panels per task and the same y limits for the same measure."""
    tasks = sorted({r["task"] for r in runs})
    rows = len(PANELS) // PANELS_PER_ROW
    figure, grid = new_figure(rows * len(tasks), PANELS_PER_ROW, 3.7 * PANELS_PER_ROW, 2.7 * rows * len(tasks))
    panels = [axes for row in grid for axes in row]
    for number, (name, text, label) in enumerate(PANELS):
        same_metric = panels[number :: len(PANELS)]
        for axes, task in zip(same_metric, tasks, strict=True):
            draw_curves(axes, runs, task, name)
            set_title(axes, f"{title_of(task)}: {text}")
            if label.startswith(("success", "share")):
                label_y_in_percent(axes, label)
            else:
                label_y(axes, label)
        share_y_limits(same_metric)
    handles, arms = panels[0].get_legend_handles_labels()
    figure.legend(handles, arms, loc="outside upper center", ncols=len(arms), fontsize=9, frameon=False, labelcolor=INK)
    figure.supxlabel("tokens sampled, thousands", fontsize=9, color=INK)
    return figure


def training_signals(runs: Sequence[Record]) -> list[str]:
    """Return tables of the training metrics by stage and of the doctor's findings."""
    return [
        *("By stage, means over seeds:", "", *stages_table(runs, list(HORIZONS))),
        *("", "Runs with each finding of the doctor:", "", *findings_table(runs)),
    ]


def findings_table(runs: Sequence[Record]) -> list[str]:
    """Return the number of runs of each arm with each finding of the doctor."""
    kinds = sorted({f["rule"] for r in runs for f in r["findings"]})
    if not kinds:
        return ["No run has a finding."]
    lines = [f"| task | arm | runs | {' | '.join(kinds)} |", "|---|---|---|" + "---|" * len(kinds)]
    for task, arm, arm_runs in by_arm(runs, list(HORIZONS)):
        rules = [{f["rule"] for f in r["findings"]} for r in arm_runs]
        counts = " | ".join(str(sum(kind in run_rules for run_rules in rules)) for kind in kinds)
        lines.append(f"| {task} | {arm} | {len(arm_runs)} | {counts} |")
    return lines


def interaction(records: list[Record], out: Path) -> list[str]:
    """Draw success against turns and size and pass@k, and return the tables with the two compared gains."""
    evaluated = evaluations_of(records)
    if not evaluated:
        return ["No agent has an evaluation so far."]
    trained = [r for r in evaluated if r["arm"].startswith("staged")]
    figure, grid = new_figure(1, 3, 14.5, 4.6)
    by_turns, by_size, tries = grid[0]
    arms = (("base", "--"), ("staged", "-"))
    draw_turns(by_turns, evaluated, arms)
    set_title(by_turns, "held-out success against turns, bars from lowest to highest seed")
    draw_sizes(by_size, evaluated, arms)
    set_title(by_size, "the same against size; left: base, right: trained")
    draw_tries(tries, trained)
    set_title(tries, f"trained: one long episode, or tries of {TURNS_PER_TRY} turns (pass@k)")
    for axes in grid[0]:
        label_y_in_percent(axes, "held-out success")
    share_y_limits(grid[0])
    draw_legend(by_turns, 3)
    draw_legend(tries, 3)
    figure.savefig(out / "evidence-interaction.png")
    turns = turns_of(evaluated[0])
    lines = [f"| agent | {' | '.join(map(str, turns))} turns |", "|---|" + "---|" * len(turns)]
    agents = [RANDOM, *(f"{arm} {size}" for size in SIZES for arm in ("base", "staged"))]
    by_agent = {agent: [r for r in evaluated if r["arm"] == agent] for agent in agents}
    for agent, seeds in by_agent.items():
        if seeds:
            rates = (mean_and_range([success_at(r, t) for r in seeds]) for t in turns)
            lines.append(f"| {agent} | {' | '.join(rates)} |")
    lines += ["", f"pass@k, tries of {TURNS_PER_TRY} turns:", ""]
    lines += [f"| agent | {' | '.join(f'k = {k}' for k in TRIES)} |", "|---|" + "---|" * len(TRIES)]
    for agent, seeds in by_agent.items():
        if seeds and all(item_rates(r, TURNS_PER_TRY, TRIES[-1]) for r in seeds):
            rates = (mean_and_range([success_at(r, TURNS_PER_TRY, k) for r in seeds]) for k in TRIES)
            lines.append(f"| {agent} | {' | '.join(rates)} |")
    return [*lines, "", *gains_table(evaluated)]


def ablations(records: list[Record], out: Path) -> list[str]:
    runs = [r for r in runs_of(records) if r["arm"] != "base"]
    if not runs:
        return ["Only starting models have records so far."]
    arms = sorted({r["arm"] for r in runs} - {"unchanged"})
    pairs = [(arm, "unchanged") for arm in arms]
    return [*arms_table(runs, ["unchanged", *arms]), "", *paired_table(runs, pairs, final_success)]


def real_model(task: str, records: list[Record], out: Path) -> list[str]:
    """Draw a task's success over steps, tokens and seconds from the same runs, and return its tables."""
    runs = [r for r in runs_of(records) if r["arm"] in HORIZONS]
    if runs:
        figure, grid = new_figure(1, len(paper.AXES), 3.7 * len(paper.AXES), 3.2)
        paper.draw_curves(grid[0], runs, task, HORIZONS)
        for axes, label in zip(grid[0], paper.AXES, strict=True):
            axes.set_xlabel(label, fontsize=9, color=INK)
            label_y_in_percent(axes, "held-out success")
        set_title(grid[0][0], f"{title_of(task)}, Qwen2.5-Coder-1.5B")
        share_y_limits(grid[0])
        draw_legend(grid[0][0], 2)
        figure.savefig(out / f"paper-{task}.png")
    lines = [*paper.kinds_table(records, task), "", *paper.costs_table(records, task)]
    lines += ["", *paper.arms_against_staged(records, task)]
    return [*lines, "", "Behaviour in training, by stage:", "", *paper.behaviour_table(records, task)]


def first_real_run(records: list[Record], out: Path) -> list[str]:
    """Draw the training success of the first 1.5B run by step and the held-out success by depth, and return tables."""
    run = runs_of(records)[0]
    agents = {arm: r for r in evaluations_of(records) for arm in [r["arm"]]}
    figure, grid = new_figure(1, 2, 10.5, 3.6)
    training, depths = grid[0]
    steps, rates = range(1, run["steps"] + 1), run["curves"]["success/mean"]
    training.plot(steps, rates, color=FAINT, linewidth=0.8)
    means = [statistics.fmean(rates[max(0, i - 4) : i + 1]) for i in range(len(rates))]
    training.plot(steps, means, color=HORIZONS["staged"], linewidth=2)
    for stage in run["stages"]:
        training.axvline(stage["first_step"], color=FAINT, linewidth=0.8, linestyle=":")
        training.text(stage["first_step"] + 2, 1.0, f"{stage['turns']} turns", fontsize=8, color=INK, va="top")
    training.set_xlabel("step of RL (128 episodes each)", fontsize=9, color=INK)
    training.set_ylim(0, 1.04)
    label_y_in_percent(training, "success in training, mean of 5 steps")
    set_title(training, f"Qwen2.5-Coder-1.5B on TextCraft: {run['seconds'] / 60:.0f} minutes on one GPU")
    shown = {
        "base": (FAINT, "before"),
        RANDOM: ("#a16207", "random valid actions"),
        "staged": (HORIZONS["staged"], "after"),
    }
    for number, (arm, (colour, label)) in enumerate(shown.items()):
        tasks = agents[arm]["results"][-1]["tasks"]
        at = [place + 0.27 * (number - 1) for place in range(len(tasks))]
        heights = [cell["success"]["value"] for cell in tasks.values()]
        bars = [[cell["success"][end] for cell in tasks.values()] for end in ("low", "high")]
        error = [
            [h - low for h, low in zip(heights, bars[0], strict=True)],
            [high - h for h, high in zip(heights, bars[1], strict=True)],
        ]
        depths.bar(
            at, heights, 0.25, color=colour, label=label, yerr=error, error_kw={"ecolor": INK, "elinewidth": 0.8}
        )
        depths.set_xticks(
            range(len(tasks)), [f"{k.partition('/')[2].lower()}\n{c['items']} items" for k, c in tasks.items()]
        )
    label_y_in_percent(depths, "held-out success, 30 turns")
    set_title(depths, "by depth of the goal, 95% intervals over items")
    draw_legend(depths, 3)
    figure.savefig(out / "qwen-textcraft.png")
    stages = []
    for stage in run["stages"]:
        last = rates[stage["last_step"] - 10 : stage["last_step"]]
        stages.append(
            f"| {stage['turns']} | {stage['first_step']}–{stage['last_step']} | {statistics.fmean(last):.1%} |"
        )
    tables = [
        *paper.main_table(records),
        "",
        *paper.kinds_table(records, "textcraft"),
        "",
        *paper.over_base_table(records),
    ]
    return [*tables, "", "| turns | steps | success in its last ten steps |", "|---|---|---|", *stages]


def real_sizes(records: list[Record], out: Path) -> list[str]:
    return paper.interaction_tables(records)


def collapse_study(records: list[Record], out: Path) -> list[str]:
    return collapse.report(records)


STUDIES: dict[str, tuple[str, Callable[[list[Record], Path], list[str]]]] = {
    "qwen-first": ("The first run with Qwen2.5-Coder-1.5B", first_real_run),
    **{f"qwen-{task}": (f"{title_of(task)} with Qwen2.5-Coder-1.5B", partial(real_model, task)) for task in paper.QWEN},
    "qwen-interaction": ("Claim C with real models: turns and parameters", real_sizes),
    "collapse": ("Claim B where collapse can happen", collapse_study),
    "rl-over-base": ("Claim A: RL over its base model", rl_over_base),
    "staged-horizon": ("Claim B: horizons", horizons),
    "horizon-conditions": ("Claim B under other conditions", conditions),
    "horizon-settings": ("Claim B under other settings", settings),
    "horizon-smollm2": ("Claim B with SmolLM2", pretrained_horizons),
    "interaction": ("Claim C: turns and parameters", interaction),
    "ablations": ("Ablations", ablations),
}


def overview(records: dict[str, list[Record]], path: Path) -> str:
    """Draw the README's picture: a panel for each task of a claim that an agent learned."""
    panels: list[Callable[[Any], None]] = []
    evaluated = evaluations_of(records["rl-over-base"])
    for task in sorted({r["task"] for r in evaluated}):

        def bars(axes: Any, task: str = task) -> None:
            draw_bars(axes, [r for r in evaluated if r["arm"] != NO_EXAMPLES], task)
            set_title(axes, f"A: {title_of(task)}, SmolLM2-135M before and after")

        panels.append(bars)
    runs = []
    for study, task, text in OVERVIEW_RUNS:
        task_runs = [r for r in runs_of(records[study]) if r["arm"] in HORIZONS and r["task"] == task]

        def curves(axes: Any, runs: list[Record] = task_runs, task: str = task, text: str = text) -> None:
            draw_curves(axes, runs, task, "success")
            set_title(axes, text)
            axes.set_xlabel("tokens sampled, thousands", fontsize=8, color=INK)
            draw_legend(axes, 2)

        if task_runs:
            panels.append(curves)
            runs += task_runs
    agents = [r for r in evaluations_of(records["interaction"]) if r["arm"].startswith(("staged", RANDOM))]
    if agents:

        def turns(axes: Any) -> None:
            draw_turns(axes, agents, (("staged", "-"),))
            set_title(axes, "C: turns and parameters, many rooms")
            draw_legend(axes, 2)

        panels.append(turns)
    absent = [claim for claim, shown in (("A", evaluated), ("B", runs), ("C", agents)) if not shown]
    if panels:
        columns = min(PANELS_PER_ROW, len(panels))
        rows = -(-len(panels) // columns)
        figure, grid = new_figure(rows, columns, 3.9 * columns, 3.4 * rows)
        cells = [axes for row in grid for axes in row]
        for number, (axes, draw) in enumerate(zip(cells, panels, strict=False)):
            draw(axes)
            label_y_in_percent(axes, "" if number % columns else "held-out success")
        share_y_limits(cells[: len(panels)])
        for axes in cells[len(panels) :]:
            figure.delaxes(axes)
        figure.savefig(path)
    content = f"without claim {', '.join(absent)}, which has no results yet" if absent else "complete"
    return f"{path.name}: {content}" if panels else f"{path.name}: not drawn, there are no results yet"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs/images")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    text: list[str] = []
    records = {name: read_records(options.results, name) for name in STUDIES}
    suite = [r for task in paper.QWEN for r in records[f"qwen-{task}"]]
    if evaluations_of(suite):
        text += ["## The paper's table", "", *paper.main_table(suite), "", *paper.over_base_table(suite), ""]
        transfers = read_records(options.results, "qwen-generalisation")
        text += [*paper.generalisation_table(transfers, suite), ""] if transfers else []
    for name, (heading, draw) in STUDIES.items():
        if records[name]:
            text += [f"## {heading}", "", *draw(records[name], options.out), ""]
            if missing := describe_missing(name, records[name]):
                text += [f"Not complete: {missing}.", ""]
        else:
            print(f"{name}: no results yet")
    print(overview(records, options.out / "evidence.png"))
    if text:
        (options.results / "tables.md").write_text("\n".join(text))
        print("\n".join(text))


if __name__ == "__main__":
    main()
