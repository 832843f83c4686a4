"""Draws the figures and writes the tables of docs/results/evidence.md from the JSON under results/.

    python results/plot.py [--results results] [--out docs/images]

Only what has records is drawn; what has none yet is said, here and in tables.md.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from records import (
    Record,
    curve,
    evaluations_of,
    item_rates,
    last,
    mean_curve,
    missing,
    read,
    runs_of,
    success_at,
    turns_of,
    whole_cell,
)
from studies import NO_EXAMPLES, RANDOM, SIZES
from tables import (
    agents_table,
    arms_table,
    by_arm,
    gains,
    items_table,
    kinds_table,
    over_seeds,
    paired_table,
    since_all,
    spread_of,
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
TITLES = {"babyai": "BabyAI", "textcraft": "TextCraft"}
PANELS = (
    ("success", "held-out success", "success"),
    ("turns/mean", "turns used in training", "turns an episode"),
    ("truncated/rate", "episodes cut", "share of episodes"),
    ("entropy/mean", "entropy of a token", "nats"),
    ("actions/repeated_rate", "actions repeated", "share of actions"),
    ("groups/zero_variance", "groups all alike", "share of groups"),
)
"""Metric, title, y label. A share is drawn in percent."""
TRIES, TRY_TURNS = (1, 2, 4), 4
"""pass@k: so many tries of so many turns."""
LEARNED = (
    ("staged-horizon", "babyai", "B: many rooms, from nothing (1M)"),
    ("horizon-conditions", "far rooms", "B: far rooms, from nothing (1M)"),
    ("horizon-smollm2", "textcraft", "B: TextCraft, SmolLM2-135M after SFT"),
)
"""Horizons of the README's picture, where some arm learned (none did on deep crafting)."""
ACROSS = 3
"""Panels in a row."""


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


def title(axes: Any, text: str) -> None:
    axes.set_title(text, fontsize=9, loc="left", color=INK)


def labelled(axes: Any, label: str) -> None:
    axes.set_ylabel(label, fontsize=9, color=INK)


def in_percent(axes: Any, label: str) -> None:
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    labelled(axes, label)


def same_limits(compared: Sequence[Any]) -> None:
    """From 0 to the same top: heights of panels that show the same measure can be compared."""
    top = max(axes.get_ylim()[1] for axes in compared)
    for axes in compared:
        axes.set_ylim(0, top)


def draw_bars(axes: Any, records: Sequence[Record], task: str) -> None:
    """Claim A: success of each arm with its interval; of several seeds the bars stand side by side."""
    place, names = 0.0, []
    for arm, colour in ARMS.items():
        bars = sorted((r for r in records if (r["task"], r["arm"]) == (task, arm)), key=lambda r: r["seed"])
        for number, record in enumerate(bars):
            rate = whole_cell(record)["success"]
            x = place + 0.8 * (number + 0.5) / len(bars) - 0.4
            axes.bar(x, rate["value"], 0.76 / len(bars), color=colour)
            axes.plot([x, x], [rate["low"], rate["high"]], color=INK, linewidth=1.2)
            axes.text(x, rate["high"], f"{100 * rate['value']:.0f}", ha="center", va="bottom", fontsize=8, color=INK)
        if bars:
            names.append((place, arm.replace(", ", ",\n")))
            place += 1
    axes.set_xticks([x for x, _ in names], [name for _, name in names])
    axes.grid(axis="x", visible=False)


def draw_curves(axes: Any, runs: Sequence[Record], task: str, name: str) -> None:
    """Every seed faintly and the mean of each arm, against tokens sampled."""
    for arm, colour in HORIZONS.items():
        curves = [curve(r, name) for r in runs if (r["task"], r["arm"]) == (task, arm)]
        curves = [c for c in curves if c[0]]
        for xs, ys in curves:
            axes.plot([x / 1e3 for x in xs], ys, color=colour, alpha=0.25, linewidth=0.8)
        if curves:
            xs, ys = mean_curve(curves)
            axes.plot([x / 1e3 for x in xs], ys, color=colour, linewidth=2, label=arm)


def draw_turns(axes: Any, evaluated: Sequence[Record], arms: Sequence[tuple[str, str]]) -> None:
    """Claim C: success against turns by size; bars from the lowest to the highest seed."""
    for size, colour in SIZE_COLOURS.items():
        for arm, style in arms:
            records = [r for r in evaluated if r["arm"] == f"{arm} {size}"]
            if records:
                turns = turns_of(records[0])
                values = [[success_at(r, t) for r in records] for t in turns]
                label = f"{size}, {'trained' if arm == 'staged' else arm}"
                mean = [statistics.fmean(some) for some in values]
                axes.plot(turns, mean, style, color=colour, marker="o", markersize=4, label=label)
                for turn, some in zip(turns, values, strict=True):
                    axes.plot([turn, turn], [min(some), max(some)], color=colour, linewidth=1, alpha=0.6)
    for record in (r for r in evaluated if r["arm"] == RANDOM):
        turns = turns_of(record)
        axes.plot(turns, [success_at(record, t) for t in turns], ":", color=FAINT, label=RANDOM)
    _turns_axis(axes, "turns allowed")


def draw_sizes(axes: Any, evaluated: Sequence[Record], arms: Sequence[tuple[str, str]]) -> None:
    """Claim C from its other side: success against size, a line for each number of turns."""
    for arm, style in arms:
        by_size = {size: [r for r in evaluated if r["arm"] == f"{arm} {size}"] for size in SIZE_COLOURS}
        sizes = [size for size, some in by_size.items() if some]
        for turns in turns_of(by_size[sizes[0]][0]) if sizes else ():
            mean = [statistics.fmean(success_at(r, turns) for r in by_size[size]) for size in sizes]
            places = [float(size.removesuffix("M")) for size in sizes]
            axes.plot(places, mean, style, color=INK, alpha=0.25 + 0.15 * math.log2(turns), marker="o", markersize=4)
            side, place, away = (-1, 6, "left") if arm == "staged" else (0, -6, "right")
            told = {"textcoords": "offset points", "fontsize": 8, "ha": away}
            axes.annotate(f"{turns} turns", (places[side], mean[side]), (place, -3), **told)
    axes.set_xscale("log")
    axes.set_xticks([float(size.removesuffix("M")) for size in SIZE_COLOURS], list(SIZE_COLOURS))
    axes.minorticks_off()
    axes.set_xlim(0.4, 60)
    axes.set_xlabel("parameters (solid: trained, dashed: base)", fontsize=9, color=INK)


def draw_tries(axes: Any, evaluated: Sequence[Record]) -> None:
    """k tries of a few turns each against one episode with as many turns in all."""
    for size, colour in SIZE_COLOURS.items():
        records = [r for r in evaluated if r["arm"] == f"staged {size}"]
        if records:
            spent = [k * TRY_TURNS for k in TRIES]
            one = [statistics.fmean(success_at(r, turns) for r in records) for turns in spent]
            best = [statistics.fmean(success_at(r, TRY_TURNS, k) for r in records) for k in TRIES]
            axes.plot(spent, one, "-", color=colour, marker="o", markersize=4, label=f"{size}, one")
            axes.plot(spent, best, ":", color=colour, marker="s", markersize=4, label=f"{size}, tries")
    _turns_axis(axes, "turns in all")


def _turns_axis(axes: Any, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks([2, 4, 8, 16, 32], ["2", "4", "8", "16", "32"])
    axes.set_xlabel(label, fontsize=9, color=INK)


def legend(axes: Any, columns: int = 1) -> None:
    """Under the axes, where no curve can be behind it."""
    place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
    look: dict[str, Any] = {"frameon": False, "labelcolor": INK, "handlelength": 2.4, "columnspacing": 1}
    axes.legend(fontsize=8, ncols=columns, **place, **look)


def rl_over_base(records: list[Record], out: Path) -> list[str]:
    evaluated = evaluations_of(records)
    if not evaluated:
        return ["No agent has been evaluated yet."]
    tasks = sorted({r["task"] for r in evaluated})
    figure, grid = new_figure(1, len(tasks), 5.2 * len(tasks), 3.4)
    for axes, task in zip(grid[0], tasks, strict=True):
        draw_bars(axes, evaluated, task)
        in_percent(axes, "held-out success")
        title(axes, f"{title_of(task)}: SmolLM2-135M, success with 95% intervals")
    same_limits(grid[0])
    figure.savefig(out / "evidence-base.png")
    pairs = [("RL", "base"), ("SFT + RL", "SFT")]
    return [
        *(*agents_table(evaluated, list(ARMS)), "", "On the same items:", "", *items_table(evaluated, pairs)),
        *("", "By kind of item:", "", *kinds_table(evaluated, list(ARMS))),
    ]


def horizons(records: list[Record], out: Path) -> list[str]:
    """A row per task: success, turns, truncation, entropy and repetition against sampled tokens."""
    runs = [r for r in runs_of(records) if r["arm"] in HORIZONS]
    if not runs:
        return ["Only starting models are there yet."]
    draw_horizons(runs, out / "evidence-horizons.png")
    staged = [(a, b) for a in ("staged", "adaptive") for b in ("fixed-short", "fixed-long")]
    tables = [*arms_table(runs, list(HORIZONS)), "", "Success at the end of the budget:"]
    tables += ["", *paired_table(runs, staged, last)]
    for task in sorted({r["task"] for r in runs}):
        some = [r for r in runs if r["task"] == task]
        tables += ["", f"{title_of(task)} alone:", "", *paired_table(some, staged, last)]
    tables += ["", "Mean success from where all arms have been evaluated:", ""]
    tables += paired_table(runs, staged, since_all(runs))
    return [*tables, "", *signals(runs)]


def conditions(
    records: list[Record], out: Path, picture: str = "evidence-conditions.png", decides: str = "the first row decides"
) -> list[str]:
    """The same arms on tasks that a short horizon hardly reaches; each agent's success is over 1,200 episodes."""
    runs = [r for r in runs_of(records) if r["arm"] in HORIZONS]
    if not runs:
        return ["Only starting models are there yet."]
    draw_horizons(runs, out / picture)
    agents = [r for r in evaluations_of(records) if r["arm"] in (*HORIZONS, RANDOM)]
    value = {(r["task"], r["arm"], r["seed"]): success_at(r, turns_of(r)[-1]) for r in agents}
    ended = [r for r in runs if (r["task"], r["arm"], r["seed"]) in value]
    lines = [*arms_table(runs, list(HORIZONS)), "", "Success of the last model, four episodes an item:", ""]
    lines += agents_table(agents, [*HORIZONS, RANDOM])
    for task in sorted({r["task"] for r in ended}):
        some = [r for r in ended if r["task"] == task]
        lines += ["", f"The last models, {task}; {decides}:", ""]
        tables = [
            paired_table(some, [("staged", arm)], lambda r: value[r["task"], r["arm"], r["seed"]])
            for arm in HORIZONS
            if arm.startswith("fixed")
        ]
        lines += tables[0][:2] + [line for table in tables for line in table[2:]]
        lines += ["", *kinds_table([r for r in agents if r["task"] == task], [*HORIZONS, RANDOM])]
    return [*lines, "", *signals(runs)]


def settings(records: list[Record], out: Path) -> list[str]:
    return conditions(records, out, "evidence-settings.png", "three pairs decide nothing")


def pretrained_horizons(records: list[Record], out: Path) -> list[str]:
    """The same arms with a pretrained model, compared item by item."""
    runs = [r for r in runs_of(records) if r["arm"] in HORIZONS]
    if not runs:
        return ["Only starting models are there yet."]
    draw_horizons(runs, out / "evidence-horizons-smollm2.png")
    agents = evaluations_of(records)
    pairs = [("staged", "fixed-short"), ("staged", "fixed-long")]
    return [
        *(*arms_table(runs, list(HORIZONS)), "", "All held-out goals, four samples each:", ""),
        *(*agents_table(agents, list(HORIZONS)), "", "On the same items:", "", *over_seeds(agents, pairs)),
        *("", "By kind of item:", "", *kinds_table(agents, list(HORIZONS))),
        *("", *signals(runs)),
    ]


def draw_horizons(runs: Sequence[Record], path: Path) -> None:
    horizons_figure(runs).savefig(path)


def horizons_figure(runs: Sequence[Record]) -> Any:
    """Two rows of panels a task; the same measure has the same y limits in every task."""
    tasks = sorted({r["task"] for r in runs})
    rows = len(PANELS) // ACROSS
    figure, grid = new_figure(rows * len(tasks), ACROSS, 3.7 * ACROSS, 2.7 * rows * len(tasks))
    places = [axes for row in grid for axes in row]
    for number, (name, text, label) in enumerate(PANELS):
        compared = places[number :: len(PANELS)]
        for axes, task in zip(compared, tasks, strict=True):
            draw_curves(axes, runs, task, name)
            title(axes, f"{title_of(task)}: {text}")
            if label.startswith(("success", "share")):
                in_percent(axes, label)
            else:
                labelled(axes, label)
        same_limits(compared)
    handles, arms = places[0].get_legend_handles_labels()
    figure.legend(handles, arms, loc="outside upper center", ncols=len(arms), fontsize=9, frameon=False, labelcolor=INK)
    figure.supxlabel("tokens sampled, thousands", fontsize=9, color=INK)
    return figure


def signals(runs: Sequence[Record]) -> list[str]:
    """What training looked like in every stage, and to the doctor."""
    return [
        *("By stage, means over seeds:", "", *stages_table(runs, list(HORIZONS))),
        *("", "What the doctor said, runs in which it did:", "", *findings_table(runs)),
    ]


def findings_table(runs: Sequence[Record]) -> list[str]:
    """How many runs of each arm had each of the doctor's findings."""
    kinds = sorted({f["rule"] for r in runs for f in r["findings"]})
    if not kinds:
        return ["Nothing, in any run."]
    lines = [f"| task | arm | runs | {' | '.join(kinds)} |", "|---|---|---|" + "---|" * len(kinds)]
    for task, arm, some in by_arm(runs, list(HORIZONS)):
        rules = [{f["rule"] for f in r["findings"]} for r in some]
        counts = " | ".join(str(sum(kind in found for found in rules)) for kind in kinds)
        lines.append(f"| {task} | {arm} | {len(some)} | {counts} |")
    return lines


def interaction(records: list[Record], out: Path) -> list[str]:
    """Success against turns by size, before and after, pass@k beside it; and the two gains that are compared."""
    evaluated = evaluations_of(records)
    if not evaluated:
        return ["No agent has been evaluated yet."]
    trained = [r for r in evaluated if r["arm"].startswith("staged")]
    figure, grid = new_figure(1, 3, 14.5, 4.6)
    by_turns, by_size, tries = grid[0]
    arms = (("base", "--"), ("staged", "-"))
    draw_turns(by_turns, evaluated, arms)
    title(by_turns, "held-out success against turns, bars from lowest to highest seed")
    draw_sizes(by_size, evaluated, arms)
    title(by_size, "the same against size; left: base, right: trained")
    draw_tries(tries, trained)
    title(tries, f"trained: one long episode, or tries of {TRY_TURNS} turns (pass@k)")
    for axes in grid[0]:
        in_percent(axes, "held-out success")
    same_limits(grid[0])
    legend(by_turns, 3)
    legend(tries, 3)
    figure.savefig(out / "evidence-interaction.png")
    turns = turns_of(evaluated[0])
    lines = [f"| agent | {' | '.join(map(str, turns))} turns |", "|---|" + "---|" * len(turns)]
    agents = [RANDOM, *(f"{arm} {size}" for size in SIZES for arm in ("base", "staged"))]
    by_agent = {agent: [r for r in evaluated if r["arm"] == agent] for agent in agents}
    for agent, some in by_agent.items():
        if some:
            lines.append(f"| {agent} | {' | '.join(spread_of([success_at(r, t) for r in some]) for t in turns)} |")
    lines += ["", f"pass@k, tries of {TRY_TURNS} turns:", "", f"| agent | {' | '.join(f'k = {k}' for k in TRIES)} |"]
    lines.append("|---|" + "---|" * len(TRIES))
    for agent, some in by_agent.items():
        if some and all(item_rates(r, TRY_TURNS, TRIES[-1]) for r in some):
            rates = (spread_of([success_at(r, TRY_TURNS, k) for r in some]) for k in TRIES)
            lines.append(f"| {agent} | {' | '.join(rates)} |")
    return [*lines, "", *gains(evaluated)]


def ablations(records: list[Record], out: Path) -> list[str]:
    runs = [r for r in runs_of(records) if r["arm"] != "base"]
    if not runs:
        return ["Only starting models are there yet."]
    arms = sorted({r["arm"] for r in runs} - {"unchanged"})
    pairs = [(arm, "unchanged") for arm in arms]
    return [*arms_table(runs, ["unchanged", *arms]), "", *paired_table(runs, pairs, last)]


STUDIES: dict[str, tuple[str, Callable[[list[Record], Path], list[str]]]] = {
    "rl-over-base": ("Claim A: RL over its base model", rl_over_base),
    "staged-horizon": ("Claim B: horizons", horizons),
    "horizon-conditions": ("Claim B under other conditions", conditions),
    "horizon-settings": ("Claim B under other settings", settings),
    "horizon-smollm2": ("Claim B with SmolLM2", pretrained_horizons),
    "interaction": ("Claim C: turns and parameters", interaction),
    "ablations": ("Ablations", ablations),
}


def overview(found: dict[str, list[Record]], path: Path) -> str:
    """The picture of the README: a panel for each of the claims' tasks on which an agent learned."""
    panels: list[Callable[[Any], None]] = []
    evaluated = evaluations_of(found["rl-over-base"])
    for task in sorted({r["task"] for r in evaluated}):

        def bars(axes: Any, task: str = task) -> None:
            draw_bars(axes, [r for r in evaluated if r["arm"] != NO_EXAMPLES], task)
            title(axes, f"A: {title_of(task)}, SmolLM2-135M before and after")

        panels.append(bars)
    runs = []
    for study, task, text in LEARNED:
        some = [r for r in runs_of(found[study]) if r["arm"] in HORIZONS and r["task"] == task]

        def curves(axes: Any, some: list[Record] = some, task: str = task, text: str = text) -> None:
            draw_curves(axes, some, task, "success")
            title(axes, text)
            axes.set_xlabel("tokens sampled, thousands", fontsize=8, color=INK)
            legend(axes, 2)

        if some:
            panels.append(curves)
            runs += some
    agents = [r for r in evaluations_of(found["interaction"]) if r["arm"].startswith(("staged", RANDOM))]
    if agents:

        def turns(axes: Any) -> None:
            draw_turns(axes, agents, (("staged", "-"),))
            title(axes, "C: turns and parameters, many rooms")
            legend(axes, 2)

        panels.append(turns)
    absent = [name for name, some in (("A", evaluated), ("B", runs), ("C", agents)) if not some]
    if panels:
        columns = min(ACROSS, len(panels))
        rows = -(-len(panels) // columns)
        figure, grid = new_figure(rows, columns, 3.9 * columns, 3.4 * rows)
        places = [axes for row in grid for axes in row]
        for place, (axes, draw) in enumerate(zip(places, panels, strict=False)):
            draw(axes)
            in_percent(axes, "" if place % columns else "held-out success")
        same_limits(places[: len(panels)])
        for axes in places[len(panels) :]:
            figure.delaxes(axes)
        figure.savefig(path)
    left_out = f"without claim {', '.join(absent)}, of which there is nothing to show yet" if absent else "whole"
    return f"{path.name}: {left_out}" if panels else f"{path.name}: not drawn, there are no results yet"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs/images")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    text: list[str] = []
    found = {name: read(options.results, name) for name in STUDIES}
    for name, (heading, draw) in STUDIES.items():
        if found[name]:
            text += [f"## {heading}", "", *draw(found[name], options.out), ""]
            if absent := missing(name, found[name]):
                text += [f"Not complete: {absent}.", ""]
        else:
            print(f"{name}: no results yet")
    print(overview(found, options.out / "evidence.png"))
    if text:
        (options.results / "tables.md").write_text("\n".join(text))
        print("\n".join(text))


if __name__ == "__main__":
    main()
