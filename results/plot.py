"""Draws the figures and writes the tables of docs/evidence.md from the JSON under results/.

    python results/plot.py [--results results] [--out docs/images]

What a study has not run yet is left out, and said.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from agentgym_rl.evaluation.statistics import sign_flip_test
from agentgym_rl.plots import FAINT, GRID, INK

Record = dict[str, Any]
COLOURS = {"staged": "#0f766e", "adaptive": "#2563eb", "fixed-long": "#c2410c", "fixed-short": "#a16207"}
SIZE_COLOURS = {"1M": "#94a3b8", "5M": "#2563eb", "25M": "#0f766e"}
PANELS = (
    ("success", "held-out success under 16 turns"),
    ("turns/mean", "turns used in training"),
    ("truncated/rate", "share of episodes cut"),
    ("entropy/mean", "entropy of a token"),
)
SMOOTHED = 5
"""Steps over which the metrics of single steps are averaged."""


def read(results: Path, study: str) -> list[Record]:
    return [json.loads(path.read_text()) for path in sorted((results / study).glob("*.json"))]


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


def curve(record: Record, name: str) -> tuple[list[float], list[float]]:
    """(sampled tokens, values): held-out evaluations, or a metric of training averaged over a few steps."""
    if name == "success":
        return [e["sampled_tokens"] for e in record["evaluations"]], [e["success"] for e in record["evaluations"]]
    tokens, values = record["curves"]["tokens/total"], record["curves"].get(name, [])
    points = [(t, v) for t, v in zip(tokens, values, strict=False) if v is not None]
    blocks = [points[i : i + SMOOTHED] for i in range(0, len(points), SMOOTHED)]
    return [b[-1][0] for b in blocks], [statistics.fmean(v for _, v in b) for b in blocks]


def at(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Linear between points, the nearest point beyond them."""
    for (x0, y0), (x1, y1) in zip(zip(xs, ys, strict=True), zip(xs[1:], ys[1:], strict=True), strict=False):
        if x0 <= x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return ys[0] if x < xs[0] else ys[-1]


def mean_curve(curves: Sequence[tuple[list[float], list[float]]]) -> tuple[list[float], list[float]]:
    """Over seeds, up to where the shortest of them ends."""
    end = min(xs[-1] for xs, _ in curves)
    places = [end * i / 60 for i in range(61)]
    return places, [statistics.fmean(at(xs, ys, x) for xs, ys in curves) for x in places]


def draw_horizons(records: list[Record], path: Path) -> None:
    """A row per task: success, turns, truncation and entropy against sampled tokens, every seed and the mean."""
    runs = [r for r in records if r["arm"] in COLOURS]
    tasks = sorted({r["task"] for r in runs})
    figure, grid = new_figure(len(tasks), len(PANELS), 14, 3.1 * len(tasks))
    for row, task in zip(grid, tasks, strict=True):
        for axes, (name, title) in zip(row, PANELS, strict=True):
            for arm, colour in COLOURS.items():
                curves = [curve(r, name) for r in runs if (r["task"], r["arm"]) == (task, arm)]
                curves = [c for c in curves if c[0]]
                for xs, ys in curves:
                    axes.plot([x / 1e3 for x in xs], ys, color=colour, alpha=0.25, linewidth=0.8)
                if curves:
                    xs, ys = mean_curve(curves)
                    axes.plot([x / 1e3 for x in xs], ys, color=colour, linewidth=2, label=arm)
            axes.set_title(f"{task}: {title}", fontsize=9, loc="left", color=INK)
            axes.set_ylim(bottom=0)
        row[0].legend(fontsize=8, frameon=False, labelcolor=INK)
    figure.supxlabel("tokens sampled, thousands", fontsize=9, color=INK)
    figure.savefig(path)


def over_curve(record: Record) -> float:
    """Mean success over the budget: how soon it was learned."""
    xs, ys = curve(record, "success")
    return statistics.fmean(at(xs, ys, xs[-1] * i / 50) for i in range(51))


def fall(record: Record) -> float:
    """From the best evaluation to the last."""
    success = [e["success"] for e in record["evaluations"]]
    return max(success) - success[-1]


def last(record: Record) -> float:
    return float(record["evaluations"][-1]["success"])


def spread_of(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.1%} ({min(values):.1%}–{max(values):.1%})"


def arms_table(records: list[Record], arms: Sequence[str]) -> list[str]:
    """A row per task and arm."""
    lines = [
        "| task | arm | seeds | success at the end (lowest–highest) | over the run | fall | steps | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task in sorted({r["task"] for r in records}):
        for arm in arms:
            runs = [r for r in records if (r["task"], r["arm"]) == (task, arm)]
            if runs:
                steps, seconds = (statistics.fmean(r[n] for r in runs) for n in ("steps", "seconds"))
                numbers = [spread_of([value(r) for r in runs]) for value in (last, over_curve)]
                falls = statistics.fmean(fall(r) for r in runs)
                numbers += [f"{falls:.1%}", f"{steps:.0f}", f"{seconds:.0f}"]
                lines.append(f"| {task} | {arm} | {len(runs)} | {' | '.join(numbers)} |")
    return lines


def paired_table(
    records: list[Record], pairs: Sequence[tuple[str, str]], value: Callable[[Record], float]
) -> list[str]:
    """Differences within (task, seed), a sign-flip test over them, and Holm's correction over the rows."""
    rows: list[tuple[str, str, list[float], float]] = []
    for first, second in pairs:
        found = {(r["task"], r["seed"], r["arm"]): value(r) for r in records}
        places = sorted({(task, seed) for task, seed, _ in found})
        differences = [
            found[*place, first] - found[*place, second]
            for place in places
            if (*place, first) in found and (*place, second) in found
        ]
        if differences:
            rows.append((first, second, differences, sign_flip_test(differences)))
    corrected = holm([p for *_, p in rows])
    lines = ["| first | second | pairs | mean difference (lowest–highest) | p | p, Holm |", "|---|---|---|---|---|---|"]
    for (first, second, differences, p), adjusted in zip(rows, corrected, strict=True):
        mean, low, high = (100 * f(differences) for f in (statistics.fmean, min, max))
        points = f"{mean:+.1f} ({low:+.1f} to {high:+.1f}) points"
        lines.append(f"| {first} | {second} | {len(differences)} | {points} | {p:.3f} | {adjusted:.3f} |")
    return lines


def holm(values: Sequence[float]) -> list[float]:
    """Step-down p-values: the smallest times their number, the next times one less, never falling."""
    order = sorted(range(len(values)), key=values.__getitem__)
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, values[place] * (len(values) - rank)))
        adjusted[place] = highest
    return adjusted


def horizons(records: list[Record], out: Path) -> list[str]:
    draw_horizons(records, out / "evidence-horizons.png")
    staged = [(a, b) for a in ("staged", "adaptive") for b in ("fixed-short", "fixed-long")]
    return [
        "## Claim B: horizons",
        *("", *arms_table(records, list(COLOURS)), "", "Success at the end of the budget:"),
        *("", *paired_table(records, staged, last), "", "Mean success over the run:"),
        *("", *paired_table(records, staged, over_curve)),
    ]


def by_turns(record: Record) -> tuple[list[int], list[float]]:
    rows = sorted(record["results"], key=lambda row: row["max_turns"])
    return [row["max_turns"] for row in rows], [row["scenarios"]["BabyAI"]["success"]["value"] for row in rows]


def interaction(records: list[Record], out: Path) -> list[str]:
    """Success against turns by size, before and after; and the two gains that are compared."""
    evaluated = [r for r in records if "results" in r]
    figure, grid = new_figure(1, 1, 7, 4.2)
    (axes,) = grid[0]
    for size, colour in SIZE_COLOURS.items():
        for arm, style in (("base", "--"), ("staged", "-")):
            curves = [by_turns(r) for r in evaluated if r["arm"] == f"{arm} {size}"]
            if curves:
                turns = curves[0][0]
                mean = [statistics.fmean(ys[i] for _, ys in curves) for i in range(len(turns))]
                axes.plot(turns, mean, style, color=colour, marker="o", markersize=4, label=f"{size}, {arm}")
                for place, turn in enumerate(turns):
                    values = [ys[place] for _, ys in curves]
                    axes.plot([turn, turn], [min(values), max(values)], color=colour, linewidth=1, alpha=0.6)
    axes.set_xscale("log", base=2)
    axes.set_xticks([2, 4, 8, 16, 32], ["2", "4", "8", "16", "32"])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("turns allowed", fontsize=9, color=INK)
    axes.set_ylabel("held-out success", fontsize=9, color=INK)
    axes.legend(fontsize=8, frameon=False, labelcolor=INK, ncols=3)
    figure.savefig(out / "evidence-interaction.png")
    lines = [
        "## Claim C: turns and parameters",
        "",
        "| agent | 2 | 4 | 8 | 16 | 32 turns |",
        "|---|---|---|---|---|---|",
    ]
    for arm in sorted({r["arm"] for r in evaluated}):
        columns = zip(*(by_turns(r)[1] for r in evaluated if r["arm"] == arm), strict=True)
        lines.append(f"| {arm} | {' | '.join(spread_of(values) for values in columns)} |")
    return lines


def ablations(records: list[Record], out: Path) -> list[str]:
    runs = [r for r in records if r["arm"] != "base"]
    arms = sorted({r["arm"] for r in runs})
    pairs = [
        (a, b) for a, b in combinations(["unchanged", *(a for a in arms if a != "unchanged")], 2) if a == "unchanged"
    ]
    return ["## Ablations", "", *arms_table(runs, arms), "", *paired_table(runs, pairs, last)]


STUDIES: dict[str, Callable[[list[Record], Path], list[str]]] = {
    "staged-horizon": horizons,
    "interaction": interaction,
    "ablations": ablations,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs/images")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    text: list[str] = []
    for name, draw in STUDIES.items():
        if records := read(options.results, name):
            text += [*draw(records, options.out), ""]
        else:
            print(f"{name}: no results yet")
    (options.results / "tables.md").write_text("\n".join(text))
    print("\n".join(text))


if __name__ == "__main__":
    main()
