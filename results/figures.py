"""Drawing parts of the figures: axes, bars with intervals, curves over tokens, success against turns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jobs import RANDOM
from records import Record, curve, mean_curve, overall_cell, success_at, turns_of
from studies import NO_EXAMPLES

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
TRIES, TURNS_PER_TRY = (1, 2, 4), 4
"""Numbers of tries (k of pass@k) and turns per try."""


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


def draw_seeds(axes: Any, curves: Sequence[tuple[list[float], list[float]]], colour: str, label: str) -> None:
    """Draw every seed's curve as a faint line and their mean as a thick one."""
    for xs, ys in curves:
        axes.plot(xs, ys, color=colour, alpha=0.25, linewidth=0.8)
    axes.plot(*mean_curve(curves), color=colour, linewidth=2, label=label)


def draw_arms(axes: Any, runs: Sequence[Record], name: str, colours: Mapping[str, str]) -> None:
    """Draw the mean of each arm against sampled tokens, and every seed as a faint line. The runs are of one task."""
    for arm, colour in colours.items():
        curves = [curve(r, name) for r in runs if r["arm"] == arm]
        curves = [([x / 1e3 for x in xs], ys) for xs, ys in curves if xs]
        if curves:
            draw_seeds(axes, curves, colour, arm)


def draw_curves(axes: Any, runs: Sequence[Record], task: str, name: str) -> None:
    """Draw the horizons of one task's runs."""
    draw_arms(axes, [run for run in runs if run["task"] == task], name, HORIZONS)


def draw_success(
    axes: Any, runs: Sequence[Record], colours: Mapping[str, str], title: str, name: str = "success"
) -> None:
    """Draw a panel of success against sampled tokens by arm: held-out success, or `success/mean` of training."""
    draw_arms(axes, runs, name, colours)
    axes.set_xlabel("sampled tokens (thousands)", fontsize=9)
    label_y_in_percent(axes, "held-out success" if name == "success" else "success in training")
    set_title(axes, title)
    draw_legend(axes)


def draw_turns(
    axes: Any, evaluated: Sequence[Record], arms: Sequence[tuple[str, str]], colours: Mapping[str, str] = SIZE_COLOURS
) -> None:
    """Draw success against turns by size (claim C), with bars from the lowest to the highest seed."""
    for size, colour in colours.items():
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
