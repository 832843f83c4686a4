"""Plot of success against turns allowed, as a PNG. Uses matplotlib without a display or global state."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentgym_rl.common.files import write_atomically

INK, FAINT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
COLOURS = ("#0f766e", "#c2410c", "#4338ca", "#a16207", "#be185d", "#475569")


def turns_plot(
    results: Sequence[Mapping[str, Any]], path: Path, title: str, label: Callable[[str], str] = str, footnote: str = ""
) -> None:
    """Plot one line per scenario, and their mean if there is one. `results` of an eval.json have one entry per horizon.

    `label` returns the name of a scenario with its marks. `footnote` explains the marks.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.8), dpi=160, facecolor="white")
    axes = figure.subplots()
    names = [name for name, cell in results[-1]["scenarios"].items() if cell and cell["success"]]
    # With one line the legend fits inside the axes. With several it would cover lines, so it goes to the right.
    figure.subplots_adjust(
        left=0.09, right=0.97 if len(names) < 2 else 0.7, top=0.88, bottom=0.16 if footnote else 0.12
    )
    turns = [result["max_turns"] for result in results]
    for position, name in enumerate(names):
        cells = [result["scenarios"][name] for result in results]
        _line(axes, turns, cells, label(name), COLOURS[position % len(COLOURS)])
    if all(result["overall"] for result in results):
        _line(axes, turns, [result["overall"] for result in results], label("mean of scenarios"), INK)
    _format_axes(axes, turns)
    if names:
        placement: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)} if len(names) > 1 else {}
        axes.legend(frameon=False, fontsize=9, labelcolor=INK, **placement)
    # A model's name may contain a dollar sign, which matplotlib reads as math.
    figure.text(0.09, 0.94, title, fontsize=13, fontweight="bold", color=INK, va="center", parse_math=False)
    figure.text(0.09, 0.03, footnote, fontsize=8, color=FAINT, va="center")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    write_atomically(path, buffer.getvalue())


def _line(axes: Any, turns: Sequence[int], cells: Sequence[Mapping[str, Any]], name: str, colour: str) -> None:
    points = [(t, cell["success"]) for t, cell in zip(turns, cells, strict=True) if cell and cell["success"]]
    positions = [t for t, _ in points]
    axes.fill_between(
        positions, [s["low"] for _, s in points], [s["high"] for _, s in points], color=colour, alpha=0.1, linewidth=0
    )
    axes.plot(positions, [s["value"] for _, s in points], "o-", color=colour, linewidth=2, markersize=5, label=name)


def _format_axes(axes: Any, turns: Sequence[int]) -> None:
    axes.set_ylim(-0.02, 1.02)  # so that a line at 0% or 100% is fully visible
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
