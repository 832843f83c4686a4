"""Success against turns allowed, as a PNG. matplotlib's object interface only: no global figure, no display."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

INK, FAINT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
COLOURS = ("#0f766e", "#c2410c", "#4338ca", "#a16207", "#be185d", "#475569")


def turns_plot(
    results: Sequence[Mapping[str, Any]], path: Path, title: str, label: Callable[[str], str] = str, footnote: str = ""
) -> None:
    """`results` are those of an eval.json, one a horizon. A line a scenario, and their mean where there is one.

    `label` is what a scenario is called, its marks included, which `footnote` explains.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.8), dpi=160, facecolor="white")
    axes = figure.subplots()
    names = [name for name, cell in results[-1]["scenarios"].items() if cell and cell["success"]]
    # One line has room for its name; several would be crossed by a list of theirs.
    figure.subplots_adjust(
        left=0.09, right=0.97 if len(names) < 2 else 0.7, top=0.88, bottom=0.16 if footnote else 0.12
    )
    turns = [result["max_turns"] for result in results]
    for place, name in enumerate(names):
        cells = [result["scenarios"][name] for result in results]
        _line(axes, turns, cells, label(name), COLOURS[place % len(COLOURS)])
    if all(result["overall"] for result in results):
        _line(axes, turns, [result["overall"] for result in results], label("mean of scenarios"), INK)
    _plain(axes, turns)
    if names:
        where: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)} if len(names) > 1 else {}
        axes.legend(frameon=False, fontsize=9, labelcolor=INK, **where)
    # A model's name may hold a dollar sign, which would be read as mathematics.
    figure.text(0.09, 0.94, title, fontsize=13, fontweight="bold", color=INK, va="center", parse_math=False)
    figure.text(0.09, 0.03, footnote, fontsize=8, color=FAINT, va="center")
    _save(figure, path)


def _line(axes: Any, turns: Sequence[int], cells: Sequence[Mapping[str, Any]], name: str, colour: str) -> None:
    points = [(t, cell["success"]) for t, cell in zip(turns, cells, strict=True) if cell and cell["success"]]
    places = [t for t, _ in points]
    axes.fill_between(
        places, [s["low"] for _, s in points], [s["high"] for _, s in points], color=colour, alpha=0.1, linewidth=0
    )
    axes.plot(places, [s["value"] for _, s in points], "o-", color=colour, linewidth=2, markersize=5, label=name)


def _plain(axes: Any, turns: Sequence[int]) -> None:
    axes.set_ylim(-0.02, 1.02)  # A line at 0% or 100% is seen whole.
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0], ["0%", "25%", "50%", "75%", "100%"])
    if len(turns) > 2 and turns[-1] / turns[0] >= 8:
        axes.set_xscale("log", base=2)
    axes.set_xticks(turns, [str(t) for t in turns])
    axes.minorticks_off()
    axes.set_xlabel("turns allowed", color=FAINT, fontsize=9)
    axes.set_ylabel("success, 95% interval shaded", color=FAINT, fontsize=9)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.tick_params(colors=FAINT, labelsize=9, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)


def _save(figure: Any, path: Path) -> None:
    """Atomically: a viewer may be looking."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format="png", metadata={"Software": None})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
