"""The learning curve of a run as a PNG. matplotlib's object interface only: no global figure, no display."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentgym_rl.common.intervals import wilson_interval

INK = "#1f2933"
FAINT = "#7b8794"
GRID = "#e4e7eb"
CURVE = "#0f766e"
HELD_OUT = "#c2410c"
STAGE_FILLS = ("#eef6f5", "#dcedeb")
LABEL_SHARE = (0.065, 0.1)
"""Width and height of an evaluation's label with its margin, as shares of the axes."""
SMOOTHING_SHARE = 0.08
"""Width of the smoothing kernel as a share of the run."""


def learning_curve(
    metrics: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    stages: Sequence[Mapping[str, Any]],
    path: Path,
    title: str,
) -> None:
    """Write the curve to `path`.

    `metrics` are the lines of metrics.jsonl; `evaluations` are `{"step": 20, "success": 0.4, "episodes": 200}`;
    `stages` are as `log.horizon_stages` gives them. Any of them may be empty.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5.4), dpi=160, facecolor="white")
    upper, lower = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": (3.6, 1), "hspace": 0.08, "top": 0.86, "bottom": 0.1}
    )
    figure.subplots_adjust(left=0.075, right=0.975)
    for axes in (upper, lower):
        _plain_axes(axes)
    _set_steps(lower, metrics, evaluations)
    success = _series(metrics, "success/mean")
    _draw_success(upper, success)
    _draw_evaluations(upper, evaluations, success)
    turns = _series(metrics, "turns/mean")
    if turns[0] or stages:
        _draw_turns(lower, turns, stages)
    else:  # offline methods play no episodes while they learn
        lower.set_ylabel("loss", color=FAINT, fontsize=9)
        lower.plot(*_series(metrics, "loss"), color=CURVE, linewidth=1.2)
    _draw_stages(upper, lower, stages)
    figure.align_ylabels((upper, lower))
    figure.text(0.075, 0.94, title, fontsize=14, fontweight="bold", color=INK, va="center")
    if upper.get_legend_handles_labels()[0]:
        below_is_free = not success[1] or success[1][-1] > 0.4
        upper.legend(loc="lower right" if below_is_free else "upper left", frameon=False, fontsize=9, labelcolor=INK)
    _save(figure, path)


def smooth(values: Sequence[float], width: float) -> list[float]:
    """Return the Gaussian mean with a standard deviation of `width` steps. The kernel is renormalised near the ends."""
    reach = math.ceil(3 * width)
    smoothed = []
    for centre in range(len(values)):
        first, last = max(0, centre - reach), min(len(values), centre + reach + 1)
        weights = [math.exp(-0.5 * ((place - centre) / width) ** 2) for place in range(first, last)]
        total = math.fsum(w * v for w, v in zip(weights, values[first:last], strict=True))
        smoothed.append(total / math.fsum(weights))
    return smoothed


def _series(metrics: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    rows = [row for row in metrics if row.get(name) is not None]
    return [row["step"] for row in rows], [row[name] for row in rows]


def _plain_axes(axes: Any) -> None:
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.tick_params(colors=FAINT, labelsize=9, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)


def _draw_success(axes: Any, series: tuple[list[int], list[float]]) -> None:
    steps, rates = series
    axes.set_ylim(0, 1.0)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0], ["0%", "25%", "50%", "75%", "100%"])
    axes.set_ylabel("success", color=FAINT, fontsize=9)
    if not steps:
        return
    axes.plot(steps, rates, color=CURVE, alpha=0.28, linewidth=1.0, label="training episodes, each step")
    axes.plot(steps, _smoothed(rates), color=CURVE, linewidth=2.4, label="training episodes, smoothed")


def _smoothed(rates: Sequence[float]) -> list[float]:
    return smooth(rates, max(1.0, SMOOTHING_SHARE * len(rates) / 2))


def _draw_evaluations(
    axes: Any, evaluations: Sequence[Mapping[str, Any]], success: tuple[list[int], list[float]]
) -> None:
    from matplotlib.patheffects import withStroke

    played = [e for e in evaluations if e["episodes"]]
    if not played:
        return
    rates = [e["success"] for e in played]
    intervals = [wilson_interval(min(e["success"] * e["episodes"], e["episodes"]), e["episodes"]) for e in played]
    below = [max(0.0, rate - low) for rate, (low, _) in zip(rates, intervals, strict=True)]
    above = [max(0.0, high - rate) for rate, (_, high) in zip(rates, intervals, strict=True)]
    axes.errorbar(
        [e["step"] for e in played],
        rates,
        yerr=[below, above],
        fmt="o",
        color=HELD_OUT,
        markersize=6.5,
        markeredgecolor="white",
        markeredgewidth=1.2,
        elinewidth=1.6,
        capsize=0,
        zorder=5,
        clip_on=False,
        label="held-out items, 95% interval",
    )
    left, right = axes.get_xlim()
    for place in (0, -1)[: len(played)]:
        step, (low, high) = played[place]["step"], intervals[place]
        leading = step < (left + right) / 2
        beside = step + (1 if leading else -1) * LABEL_SHARE[0] * (right - left)
        is_below = _label_below(success, sorted((step, beside)), low, high)
        axes.annotate(
            f"{100 * rates[place]:.0f}%",
            (step, low if is_below else high),
            xytext=(-5 if leading else 5, -4 if is_below else 4),
            textcoords="offset points",
            ha="left" if leading else "right",
            va="top" if is_below else "bottom",
            fontsize=12,
            fontweight="bold",
            color=HELD_OUT,
            zorder=6,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )


def _label_below(success: tuple[list[int], list[float]], across: Sequence[float], low: float, high: float) -> bool:
    """Return whether the label of an interval from `low` to `high` belongs below it, where no curve crosses it.

    `across` is where the label begins and ends. Above 100% stand the names of the stages, below 0% the axis.
    """
    import numpy

    steps, rates = success
    places = numpy.linspace(across[0], across[1], 9)
    places = places[(places >= steps[0]) & (places <= steps[-1])] if steps else places[:0]
    lines = [numpy.interp(places, steps, line) for line in (rates, _smoothed(rates))] if len(places) else []

    def crossed(bottom: float) -> float:
        """Return the overlap with the curves. The smoothed line counts more than the faint one."""
        inside = [int(numpy.sum((line > bottom) & (line < bottom + LABEL_SHARE[1]))) for line in lines]
        outside = bottom < 0 or bottom + LABEL_SHARE[1] > 1
        return float("inf") if outside else sum(w * n for w, n in zip((1, 10), inside, strict=False))

    return crossed(low - LABEL_SHARE[1]) < crossed(high)


def _draw_turns(axes: Any, series: tuple[list[int], list[float]], stages: Sequence[Mapping[str, Any]]) -> None:
    steps, turns = series
    ceiling = max([*turns, *(stage["turns"] for stage in stages)], default=1.0)
    axes.set_ylim(0, 1.4 * ceiling)
    axes.set_ylabel("turns used", color=FAINT, fontsize=9)
    axes.yaxis.get_major_locator().set_params(integer=True, nbins=4)
    for stage in stages:
        ends = (stage["first_step"] - 0.5, stage["last_step"] + 0.5)
        axes.plot(ends, (stage["turns"], stage["turns"]), color=FAINT, linewidth=1.1, linestyle=(0, (3, 2)))
    if stages:
        last = stages[-1]
        axes.annotate(
            "horizon",
            (last["last_step"], last["turns"]),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=FAINT,
        )
    if steps:
        axes.plot(steps, turns, color=CURVE, linewidth=1.6)


def _draw_stages(upper: Any, lower: Any, stages: Sequence[Mapping[str, Any]]) -> None:
    """Shade and label the horizon's stages. With several environments their stages overlap: only lines are drawn."""
    left, right = upper.get_xlim()
    several = len({stage.get("env") for stage in stages}) > 1
    for index, stage in enumerate([] if several else stages):
        first, last = stage["first_step"] - 0.5, stage["last_step"] + 0.5
        for axes in (upper, lower):
            axes.axvspan(first, last, color=STAGE_FILLS[index % 2], linewidth=0, zorder=0)
        upper.annotate(
            _stage_label(stage["turns"], (last - first) / (right - left), leading=index == 0),
            ((first + last) / 2, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=INK,
        )


def _stage_label(turns: float, share: float, *, leading: bool) -> str:
    """Return as much text as fits over a stage that takes `share` of the width."""
    unit = "turn" if turns == 1 else "turns"
    if leading and share > 0.13:
        return f"horizon: {turns:g} {unit}"
    if share > 0.07:
        return f"{turns:g} {unit}"
    return f"{turns:g}" if share > 0.02 else ""


def _set_steps(axes: Any, metrics: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> None:
    steps = sorted({row["step"] for row in (*metrics, *evaluations)})
    axes.set_xlabel("training step", color=FAINT, fontsize=9)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if steps:
        margin = max(0.5, 0.012 * (steps[-1] - steps[0]))
        axes.set_xlim(steps[0] - margin, steps[-1] + margin)


def _save(figure: Any, path: Path) -> None:
    """Save atomically, because a viewer may read the file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format="png", metadata={"Software": None})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
