"""The study of collapse (results/collapse/PROTOCOL.md): its picture, and its part of docs/results/evidence.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from collapse import (
    REPRODUCED,
    SEEDS,
    SIGNIFICANT,
    Outcome,
    Pair,
    collapsed,
    compare,
    gain_of,
    low_evaluations,
    pairs_of,
    processed_curve,
    verdict,
)
from figures import draw_legend, draw_seeds, label_y_in_percent, new_figure, set_title, share_y_limits
from qwen_page import wrapped
from records import Record, read_records, runs_of
from studies import COLLAPSE_ARMS
from tables import holm
from turn_limits import signed

from agentgym_rl.evaluation.statistics import mean_interval

PICTURE = "evidence-collapse.png"
CONDITIONS = {"maze, paper-like": "paper-like", "maze, calm": "calm"}
"""Conditions by the task of their records."""
ROWS = {
    "collapsed": "runs that collapsed",
    "success at the end": "success at the end",
    "mean success at equal processed tokens": "mean success at equal processed tokens",
}
"""Rows of a table by the name of an outcome."""
TOO_SHORT = "horizon_truncation"
"""The doctor's rule for a horizon that nearly all episodes reach without success."""
COLOURS = {"staged": "#0f766e", "fixed-64": "#c2410c", "fixed-16": "#7c3aed", "too-short": "#94a3b8"}


def adjusted(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return p after Holm by the name of an outcome."""
    return dict(zip((o.name for o in outcomes), holm([o.p for o in outcomes]), strict=True))


def falls(runs: Sequence[Record]) -> str:
    """Return `1 of 12`, the runs that collapsed."""
    return f"{sum(map(collapsed, runs))} of {len(runs)}"


def arms_of(pairs: Sequence[Pair]) -> tuple[list[Record], list[Record]]:
    """Return the runs of both arms."""
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def table(records: Sequence[Record]) -> list[str]:
    """Return staged against fixed-64 in both conditions."""
    lines = ["| staged against fixed-64 | staged | fixed-64 | difference (95% interval over seeds) | p, Holm |"]
    lines.append("|---|---|---|---|---|")
    for task, condition in CONDITIONS.items():
        pairs = pairs_of(records, task, "staged", "fixed-64")
        outcomes = compare(pairs)
        for outcome in outcomes:
            p = f"{adjusted(outcomes)[outcome.name]:.2g}"
            if outcome.name == "collapsed":
                cells = [*map(falls, arms_of(pairs)), ""]
            else:
                rates = (f"{100 * value:.1f}%" for value in (outcome.first, outcome.second))
                cells = [*rates, interval(outcome.differences)]
            lines.append(f"| {condition}: {ROWS[outcome.name]} | {' | '.join(cells)} | {p} |")
    return lines


def interval(differences: Sequence[float]) -> str:
    """Return a mean difference in points with its interval over seeds."""
    low, high = mean_interval(differences)
    return f"{signed(statistics.fmean(differences))} ({signed(low)} to {signed(high)})"


def claim(records: Sequence[Record]) -> str:
    """Return the verdicts of both conditions, with the outcomes that decide them."""
    sentences = []
    for task, condition in CONDITIONS.items():
        outcomes = compare(pairs_of(records, task, "staged", "fixed-64"))
        by_rule = verdict(outcomes, gain_of(records, task))
        deciding = [ROWS[name] for name, p in adjusted(outcomes).items() if p < SIGNIFICANT]
        by = f", by {' and '.join(deciding)} alone" if len(deciding) == 1 else ""
        sentences.append(f"**{by_rule}** in the {condition} condition{by}")
    long_runs = [arms_of(pairs_of(records, task, "staged", "fixed-64"))[1] for task in CONDITIONS]
    seen = max(sum(map(collapsed, runs)) for runs in long_runs) >= REPRODUCED
    return (
        f"By the rule written before the runs: {'; '.join(sentences)}. The paper's collapse is "
        f"{'' if seen else 'not '}reproduced: {falls([run for runs in long_runs for run in runs])} runs of fixed-64 "
        "collapsed."
    )


def caption(records: Sequence[Record]) -> str:
    run = next(r for r in runs_of(records) if r["arm"] == "staged")
    steps = run["config"]["rl"]["steps"]
    start = 100 * statistics.fmean(r["evaluations"][0]["success"] for r in runs_of(records) if r["arm"] == "staged")
    return (
        f"*Mazes of size 4, a model of {run['parameters']:,} parameters, {SEEDS} seeds, {steps} steps. Thin lines are "
        "seeds, thick lines their mean as far as all seeds reach. Staged has 16, 32, then 64 turns, too-short 4, 16, "
        "then 64; all are evaluated under 64, where the starting models have "
        f"{start:.1f}% and random play 60%. Processed tokens include observations.*"
    )


def against(records: Sequence[Record], task: str, first: str, second: str, name: str) -> str:
    """Return one outcome of one arm less another: `+2.3 points (-1.2 to +5.2), p = 0.68`."""
    outcomes = compare(pairs_of(records, task, first, second))
    (outcome,) = (o for o in outcomes if o.name == name)
    gap = interval(outcome.differences).replace(" (", " points (", 1)
    return f"{gap}, p = {adjusted(outcomes)[name]:.2g}"


def against_in_both(records: Sequence[Record], first: str, second: str, name: str) -> str:
    """Return one outcome of one arm less another in both conditions."""
    texts = [f"{against(records, task, first, second, name)} ({title})" for task, title in CONDITIONS.items()]
    return " and ".join(texts)


def tokens_of(run: Record) -> list[float]:
    """Return the processed tokens of each step."""
    curves = run["curves"]
    return [a * b for a, b in zip(curves["tokens/per_episode"], curves["episodes/usable"], strict=True)]


def steps_at_equal_tokens(records: Sequence[Record], longer: str, shorter: str) -> str:
    """Return at which steps of one arm the tokens of another arm's whole run are reached, such as `143 to 199`."""
    pairs = [pair for task in CONDITIONS for pair in pairs_of(records, task, longer, shorter)]
    ends = [(a, math.fsum(tokens_of(b))) for a, b, _, _ in pairs]
    steps = [sum(total <= end for total in accumulate(tokens_of(run))) for run, end in ends]
    return f"{min(steps)} to {max(steps)}"


def share_of_tokens(records: Sequence[Record], arm: str) -> str:
    """Return the tokens of an arm's runs in percent of those of fixed-64, such as `61 to 62`, over the conditions."""
    totals = {
        (task, name): sum(math.fsum(tokens_of(r)) for r in runs_of(records) if (r["task"], r["arm"]) == (task, name))
        for task in CONDITIONS
        for name in (arm, "fixed-64")
    }
    shares = sorted({f"{100 * totals[task, arm] / totals[task, 'fixed-64']:.0f}" for task in CONDITIONS})
    return " to ".join(shares)


def dipped(runs: Sequence[Record]) -> int:
    """Return how many runs did not collapse, but were below half of their best at an evaluation."""
    return sum(any(low_evaluations(run)) and not collapsed(run) for run in runs)


def ended_low(pairs: Sequence[Pair]) -> str:
    """Return a sentence about the runs of the first arm that ended below half of their best, but did not collapse."""
    low = [end for run, _, end, _ in pairs if low_evaluations(run)[-1] and not collapsed(run)]
    if not low:
        return "No run of staged ended so."
    ends = " and ".join(f"{100 * end:.1f}%" for end in low)
    return f"In {len(low)} run of staged it was the last one, and success at the end is {ends}."


def facts(records: Sequence[Record]) -> list[str]:
    """Return the list below the table."""
    named = named_too_short([run for run in runs_of(records) if run["arm"] == "too-short"])
    others = [run for run in runs_of(records) if run["arm"] in COLLAPSE_ARMS and run["arm"] != "too-short"]
    wrongly_named = named_too_short(others)
    paper, calm = CONDITIONS
    staged, medium = arms_of(pairs_of(records, paper, "staged", "fixed-16"))
    long = arms_of(pairs_of(records, paper, "staged", "fixed-64"))[1]
    short = {task: arms_of(pairs_of(records, task, "too-short", "staged"))[0] for task in CONDITIONS}
    area, end = "mean success at equal processed tokens", "success at the end"
    shares = [share_of_tokens(records, arm) for arm in ("staged", "fixed-16")]
    return [
        "- **At equal tokens staged's whole run is compared with about half of one of fixed-64**, which has processed "
        f"as many at step {steps_at_equal_tokens(records, 'fixed-64', 'staged')} of 300. Staged has "
        f"{shares[0]}% of the tokens of fixed-64, fixed-16 {shares[1]}%.",
        "- **Whether it is the growth that saves tokens, this does not say.** Staged less fixed-16 at equal processed "
        f"tokens: {against_in_both(records, 'staged', 'fixed-16', area)}. But fixed-16's tokens end at step "
        f"{steps_at_equal_tokens(records, 'staged', 'fixed-16')} of staged, whose 64 turns begin at step 201. At the "
        f"end: {against_in_both(records, 'staged', 'fixed-16', end)}.",
        "- Fixed-16 less fixed-64, compared after the runs were seen. At equal processed tokens: "
        f"{against_in_both(records, 'fixed-16', 'fixed-64', area)}. At the end: "
        f"{against_in_both(records, 'fixed-16', 'fixed-64', end)}.",
        f"- In the paper-like condition fixed-16 collapsed in {falls(medium)} runs and staged in "
        f"{falls(staged)}, all while they trained under 16 turns, and all of these rose again. Evaluations have 64.",
        "- The rule does not count a single low evaluation. In that condition it happened to "
        f"{dipped(long)} run of fixed-64, {dipped(staged)} of staged and {dipped(medium)} of fixed-16 besides. "
        f"{ended_low(pairs_of(records, paper, 'staged', 'fixed-64'))}",
        "- **A first stage of 4 turns costs success on the way.** Held-out success fell below half of its best at two "
        f"evaluations in a row in {falls(short[paper])} (paper-like) and {falls(short[calm])} runs (calm), all within "
        "that stage. Too-short less staged at equal processed tokens: "
        f"{against_in_both(records, 'too-short', 'staged', area)}. At the end it is not shown: "
        f"{against_in_both(records, 'too-short', 'staged', end)}. Its second stage is shorter, too.",
        f"- **The doctor names such a stage**: `{TOO_SHORT}` at step {first_step(named)} in {len(named)} of "
        f"{sum(map(len, short.values()))} runs of too-short, and in {len(wrongly_named)} of {len(others)} others.",
    ]


def named_too_short(runs: Sequence[Record]) -> list[Record]:
    """Return the runs in which the doctor found a horizon that is too short."""
    return [run for run in runs if any(finding["rule"] == TOO_SHORT for finding in run["findings"])]


def first_step(runs: Sequence[Record]) -> str:
    """Return the step of the doctor's first finding of a short horizon: `20`, or `20 to 139`."""
    steps = [min(f["step"] for f in run["findings"] if f["rule"] == TOO_SHORT) for run in runs]
    return f"{min(steps)}" if min(steps) == max(steps) else f"{min(steps)} to {max(steps)}"


def texts(results: Path) -> dict[str, str]:
    """Return the generated part of docs/results/evidence.md by name, empty before all seeds have run."""
    records = read_records(results, "collapse")
    if any(len(pairs_of(records, task, "staged", "fixed-64")) < SEEDS for task in CONDITIONS):
        return {"collapse": ""}
    picture = "![Held-out success over processed tokens by horizon, in both conditions](../images/{})"
    lines = [claim(records), "", picture.format(PICTURE), "", caption(records), "", *table(records), ""]
    return {"collapse": "\n".join(map(wrapped, [*lines, *facts(records)]))}


def draw(results: Path, path: Path) -> bool:
    """Draw held-out success over processed tokens in both conditions. Return whether there are runs."""
    runs = runs_of(read_records(results, "collapse"))
    if not runs:
        return False
    figure, grid = new_figure(1, len(CONDITIONS), 10.5, 3.6)
    for axes, (task, condition) in zip(grid[0], CONDITIONS.items(), strict=True):
        for arm in COLLAPSE_ARMS:
            curves = [processed_curve(r) for r in runs if (r["task"], r["arm"]) == (task, arm)]
            in_millions = [([x / 1e6 for x in xs], ys) for xs, ys in curves]
            if in_millions:
                draw_seeds(axes, in_millions, COLOURS[arm], arm)
        axes.set_xlabel("processed tokens (millions)", fontsize=9)
        label_y_in_percent(axes, "held-out success, 64 turns")
        set_title(axes, f"{condition.capitalize()} condition, {SEEDS} seeds")
    share_y_limits(grid[0])
    draw_legend(grid[0][0], 2)
    figure.savefig(path)
    return True
