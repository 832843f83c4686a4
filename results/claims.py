"""Pictures of claims B and C on docs/results/evidence.md, one each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from figures import (
    HORIZONS,
    SIZE_COLOURS,
    draw_curves,
    draw_legend,
    draw_turns,
    label_y_in_percent,
    new_figure,
    set_title,
    share_y_limits,
)
from jobs import RANDOM
from records import Record, evaluations_of, final_success, runs_of, success_at, turns_of
from tables import gains_over_chance

from agentgym_rl.evaluation.statistics import mean_interval
from agentgym_rl.run.plots import FAINT, INK

Records = Mapping[str, list[Record]]
"""Records by study."""
CURVES = (
    ("staged-horizon", "babyai", "many rooms, 1M from scratch"),
    ("horizon-conditions", "far rooms", "far rooms, 1M from scratch"),
    ("horizon-smollm2", "textcraft", "crafting, SmolLM2-135M after SFT"),
)
"""Study, task and title of the curves of claim B: tasks that an arm learned (none learned deep crafting)."""
COMPARED = (
    ("staged-horizon", "babyai", "many rooms"),
    ("staged-horizon", "textcraft", "deep crafting\n(not learned)"),
    ("horizon-conditions", "far rooms", "far rooms"),
    ("horizon-settings", "far rooms, lr x 3", "far rooms,\nlearning rate × 3"),
    ("horizon-settings", "far rooms, credit by turns", "far rooms,\ncredit by turns"),
    ("horizon-smollm2", "textcraft", "crafting,\nSmolLM2"),
)
"""Study, task and label of the differences between staged and fixed-long."""


def staged_less_fixed_long(records: Sequence[Record], task: str) -> list[float]:
    """Return the difference in success within each seed: of the last models' evaluations, else at the curves' ends."""
    runs = [r for r in runs_of(records) if r["task"] == task and r["arm"] in HORIZONS]
    values = {(r["arm"], r["seed"]): final_success(r) for r in runs}
    agents = [r for r in evaluations_of(records) if r["task"] == task]
    values |= {(r["arm"], r["seed"]): success_at(r, turns_of(r)[-1]) for r in agents}
    seeds = sorted(seed for arm, seed in values if arm == "staged" and ("fixed-long", seed) in values)
    return [values["staged", seed] - values["fixed-long", seed] for seed in seeds]


def draw_differences(axes: Any, rows: Sequence[tuple[str, Sequence[float]]]) -> None:
    """Draw each seed's difference in points as a dot and their mean as a bar, a row per condition."""
    for y, (_, differences) in enumerate(rows):
        points = [100 * d for d in differences]
        axes.plot(points, [y] * len(points), "o", color=HORIZONS["staged"], alpha=0.45, markersize=5)
        mean = statistics.fmean(points)
        axes.plot([mean, mean], [y - 0.28, y + 0.28], color=INK, linewidth=2)
        axes.annotate(f"{mean:+.1f}", (mean, y - 0.3), ha="center", va="bottom", fontsize=7, color=INK)
    axes.axvline(0, color=FAINT, linewidth=1)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.8)
    axes.set_xlabel("staged less fixed-long at the end, points", fontsize=9, color=INK)


def draw_staged(records: Records, path: Path) -> bool:
    """Draw claim B: learning curves at equal tokens, and staged less fixed-long by seed. Return whether it is drawn."""
    shown = []
    for study, task, text in CURVES:
        runs = [r for r in runs_of(records[study]) if r["arm"] in HORIZONS and r["task"] == task]
        if runs:
            shown.append((task, text, runs))
    rows = [(label, staged_less_fixed_long(records[study], task)) for study, task, label in COMPARED]
    rows = [(label, differences) for label, differences in rows if differences]
    if not shown:
        return False
    figure, grid = new_figure(2, 2, 8.6, 7.2)
    panels = [axes for row in grid for axes in row]
    for axes, (task, text, runs) in zip(panels, shown, strict=False):
        draw_curves(axes, runs, task, "success")
        set_title(axes, text)
        axes.set_xlabel("tokens sampled, thousands", fontsize=9, color=INK)
        label_y_in_percent(axes, "held-out success")
        draw_legend(axes, 2)
    share_y_limits(panels[: len(shown)])
    if rows:
        draw_differences(panels[-1], rows)
        set_title(panels[-1], "dots are seeds, bars their mean")
    for axes in panels[len(shown) : len(panels) - bool(rows)]:
        figure.delaxes(axes)
    figure.savefig(path)
    return True


def draw_gains(axes: Any, evaluated: Sequence[Record]) -> None:
    """Draw the gain from 4 to 32 turns less random play's own, by size, with intervals over items."""
    gains = gains_over_chance(evaluated, 4, 32)
    labels: list[str] = []
    for size, colour in SIZE_COLOURS.items():
        for kind, marker in (("staged", "o"), ("base", "s")):
            if f"{kind} {size}" not in gains:
                continue
            values = gains[f"{kind} {size}"]
            low, high = mean_interval(values)
            y = len(labels)
            axes.plot([100 * low, 100 * high], [y, y], color=colour, linewidth=2)
            axes.plot(100 * statistics.fmean(values), y, marker, color=colour, markersize=6)
            labels.append(f"{size}, {'trained' if kind == 'staged' else 'untrained'}")
    axes.axvline(0, color=FAINT, linewidth=1)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel("gain over random play's own gain, points", fontsize=9, color=INK)


def draw_interaction(records: Records, path: Path) -> bool:
    """Draw claim C: success against turns, and what turns bring beyond chance. Return whether it is drawn."""
    evaluated = evaluations_of(records["interaction"])
    trained = [r for r in evaluated if r["arm"].startswith(("staged", RANDOM))]
    if not trained:
        return False
    figure, grid = new_figure(1, 2, 9.6, 3.9)
    turns, gains = grid[0]
    draw_turns(turns, trained, (("staged", "-"),))
    set_title(turns, "many rooms: success against turns")
    label_y_in_percent(turns, "held-out success")
    turns.set_ylim(bottom=0)
    draw_legend(turns, 2)
    if any(r["arm"] == RANDOM for r in evaluated):
        draw_gains(gains, evaluated)
        set_title(gains, "gain from 4 to 32 turns less random play's, 95% intervals")
    else:
        figure.delaxes(gains)
    figure.savefig(path)
    return True


PICTURES: dict[str, Callable[[Records, Path], bool]] = {
    "evidence-staged.png": draw_staged,
    "evidence-turns.png": draw_interaction,
}
