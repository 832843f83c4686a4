"""Analysis of the study of collapse by the rule of results/collapse/PROTOCOL.md, which was written before its runs.

python results/collapse.py [--results results]
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from records import Record, evaluations_of, interpolate, largest_drop, read_records, runs_of, success_at, turns_of
from studies import COLLAPSE_ARMS
from tables import holm, in_points

from agentgym_rl.evaluation.statistics import mcnemar_exact, mean_interval, sign_flip_test

LEARNED = 0.15
"""Gain in success at the end from which the task counts as learned."""
SIGNIFICANT = 0.05
SEEDS = 12
REPRODUCED = 3
"""Seeds in which fixed-64 must collapse for the collapse to count as reproduced."""


def collapsed(record: Record) -> bool:
    """Return whether success fell below half of its best at two evaluations in a row, or the gradient was no number."""
    if any(not math.isfinite(value) for value in record["curves"].get("grad/norm", []) if value is not None):
        return True
    return any(a and b for a, b in pairwise(low_evaluations(record)))


def low_evaluations(record: Record) -> list[bool]:
    """Return for each evaluation whether its success was below half of the best one before it."""
    best, low = 0.0, []
    for evaluation in record["evaluations"]:
        low.append(evaluation["success"] < best / 2)
        best = max(best, evaluation["success"])
    return low


def processed_curve(record: Record) -> tuple[list[float], list[float]]:
    """Return (processed tokens, held-out success) at each evaluation. Observations count as processed."""
    curves = record["curves"]
    by_step = [a * b for a, b in zip(curves["tokens/per_episode"], curves["episodes/usable"], strict=True)]
    totals = [0.0, *accumulate(by_step)]
    evaluations = record["evaluations"]
    return [totals[e["step"]] for e in evaluations], [e["success"] for e in evaluations]


def mean_until(xs: Sequence[float], ys: Sequence[float], end: float) -> float:
    """Return the mean of the piecewise linear curve from its start to `end`, by trapezoids."""
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if x < end] + [(end, interpolate(xs, ys, end))]
    if end <= xs[0]:
        return ys[0]
    area = sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in pairwise(points))
    return area / (end - xs[0])


def areas(first: Record, second: Record) -> tuple[float, float]:
    """Return both runs' mean success up to the processed tokens that both reached."""
    curves = processed_curve(first), processed_curve(second)
    end = min(xs[-1] for xs, _ in curves)
    return mean_until(*curves[0], end), mean_until(*curves[1], end)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One outcome of a comparison over seeds."""

    name: str
    first: float
    second: float
    differences: tuple[float, ...]
    p: float
    better: int
    """Direction that favours the first arm: -1 for collapse, 1 for success."""

    @property
    def favours_first(self) -> bool:
        return self.better * math.fsum(self.differences) > 0


Pair = tuple[Record, Record, float, float]
"""Runs of both arms of a seed, and their success at the end."""


def pairs_of(records: Sequence[Record], task: str, first: str, second: str) -> list[Pair]:
    """Return the seeds with both runs and both evaluations."""
    runs = {(r["arm"], r["seed"]): r for r in runs_of(records) if r["task"] == task}
    ends = {(r["arm"], r["seed"]): success_at(r, turns_of(r)[-1]) for r in evaluations_of(records) if r["task"] == task}
    seeds = sorted({seed for _, seed in runs})
    keys = [((first, s), (second, s)) for s in seeds]
    return [(runs[a], runs[b], ends[a], ends[b]) for a, b in keys if {a, b} <= runs.keys() and {a, b} <= ends.keys()]


def compare(pairs: Sequence[Pair]) -> list[Outcome]:
    """Return the three outcomes of the protocol for pairs of runs."""
    falls = [(collapsed(a), collapsed(b)) for a, b, _, _ in pairs]
    only_first = sum(a and not b for a, b in falls)
    only_second = sum(b and not a for a, b in falls)
    ends = [(x, y) for _, _, x, y in pairs]
    means = [areas(a, b) for a, b, _, _ in pairs]
    exact = mcnemar_exact(only_first, only_second)
    outcomes = [_outcome("collapsed", [(float(a), float(b)) for a, b in falls], lambda _: exact, -1)]
    outcomes.append(_outcome("success at the end", ends, sign_flip_test, 1))
    outcomes.append(_outcome("mean success at equal processed tokens", means, sign_flip_test, 1))
    return outcomes


def _outcome(
    name: str, values: Sequence[tuple[float, float]], test: Callable[[Sequence[float]], float], better: int
) -> Outcome:
    differences = tuple(a - b for a, b in values)
    first, second = (statistics.fmean(column) for column in zip(*values, strict=True))
    return Outcome(name, first, second, differences, test(differences), better)


def verdict(outcomes: Sequence[Outcome], gain: float) -> str:
    """Return the verdict by the rule. `gain` is the largest mean gain of an arm over its starting models."""
    if gain < LEARNED:
        return "void"
    adjusted = holm([o.p for o in outcomes])
    significant = [o for o, p in zip(outcomes, adjusted, strict=True) if p < SIGNIFICANT]
    helps, hurts = (any(o.favours_first is wanted for o in significant) for wanted in (True, False))
    return {(True, True): "mixed", (True, False): "staging helps", (False, True): "staging hurts"}.get(
        (helps, hurts), "not shown"
    )


def gain_of(records: Sequence[Record], task: str) -> float:
    """Return the largest mean gain of an arm: success at the end less that of the starting models."""
    starts = {r["seed"]: r["evaluations"][0]["success"] for r in runs_of(records) if r["task"] == task}
    gains: dict[str, list[float]] = {}
    for record in evaluations_of(records):
        if record["task"] == task and record["seed"] in starts:
            end = success_at(record, turns_of(record)[-1])
            gains.setdefault(record["arm"], []).append(end - starts[record["seed"]])
    return max((statistics.fmean(values) for values in gains.values()), default=0.0)


def comparison_table(outcomes: Sequence[Outcome], first: str, second: str) -> list[str]:
    lines = [
        f"| outcome | {first} | {second} | difference (95% interval over seeds) | p | p, Holm |",
        "|---|---|---|---|---|---|",
    ]
    for outcome, adjusted in zip(outcomes, holm([o.p for o in outcomes]), strict=True):
        difference = in_points(statistics.fmean(outcome.differences), *mean_interval(outcome.differences))
        rates = f"{outcome.first:.1%} | {outcome.second:.1%}"
        lines.append(f"| {outcome.name} | {rates} | {difference} | {outcome.p:.3g} | {adjusted:.3g} |")
    return lines


def arms_table(records: Sequence[Record], task: str) -> list[str]:
    """Return a row per arm: seeds, collapses, success at the end, drop, processed tokens, seconds."""
    lines = [
        "| arm | runs | collapsed | success at the end (lowest–highest) | largest drop | processed tokens | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm in COLLAPSE_ARMS:
        runs = [r for r in runs_of(records) if (r["task"], r["arm"]) == (task, arm)]
        ends = [success_at(r, turns_of(r)[-1]) for r in evaluations_of(records) if (r["task"], r["arm"]) == (task, arm)]
        if runs:
            end = f"{statistics.fmean(ends):.1%} ({min(ends):.1%}–{max(ends):.1%})" if ends else ""
            drop = statistics.fmean(largest_drop(r) for r in runs)
            tokens = statistics.fmean(processed_curve(r)[0][-1] for r in runs)
            seconds = statistics.fmean(r["seconds"] for r in runs)
            falls = sum(collapsed(r) for r in runs)
            lines.append(f"| {arm} | {len(runs)} | {falls} | {end} | {drop:.1%} | {tokens:,.0f} | {seconds:.0f} |")
    return lines


def report(records: Sequence[Record]) -> list[str]:
    """Return the tables and the verdict of each condition."""
    lines: list[str] = []
    for task in ("maze, paper-like", "maze, calm"):
        if not any(r["task"] == task for r in runs_of(records)):
            continue
        lines += [f"### {task}", "", *arms_table(records, task), ""]
        for arms in (("staged", "fixed-64"), ("staged", "fixed-16"), ("too-short", "staged")):
            lines += report_of(records, task, arms, SEEDS if arms == ("staged", "fixed-64") else 0)
    return lines or ["No run has a record so far."]


def report_of(records: Sequence[Record], task: str, arms: tuple[str, str], seeds: int) -> list[str]:
    """Return the outcomes of an arm against another, and the verdict if it needs `seeds`; nothing without pairs."""
    pairs = pairs_of(records, task, *arms)
    if not pairs:
        return []
    outcomes = compare(pairs)
    lines = [f"{arms[0]} against {arms[1]}, {len(pairs)} seeds:", "", *comparison_table(outcomes, *arms), ""]
    if seeds:
        falls = sum(collapsed(b) for _, b, _, _ in pairs)
        seen = "reproduced" if falls >= REPRODUCED else "not reproduced"
        so_far = "Verdict" if len(pairs) >= seeds else f"No verdict before {seeds} seeds; so far"
        lines += [
            f"**{so_far}: {verdict(outcomes, gain_of(records, task))}.** Largest gain "
            f"{100 * gain_of(records, task):+.1f} points. The collapse of {arms[1]} is {seen} ({falls} of {len(pairs)} "
            "seeds).",
            "",
        ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    print("\n".join(report(read_records(options.results, "collapse"))))


if __name__ == "__main__":
    main()
