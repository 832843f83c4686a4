"""Checks of the study of collapse (claim B, long episodes) for results/check.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from check_a import points
from page_numbers import Pages, Record, Value, bootstrap, holm, item_rates, load, mean

CONDITIONS = {"paper-like": "maze, paper-like", "calm": "maze, calm"}
ARMS = ("staged", "fixed-64", "fixed-16", "too-short")
TURNS = 64
Study = dict[tuple[str, str, int], tuple[Record, float]]
"""Run and success at the end by condition, arm and seed."""
Outcomes = tuple[list[tuple[bool, bool]], list[float], list[float]]
"""Of two arms by seed: whether each collapsed, difference at the end, difference of the areas."""


def read() -> Study:
    records = load("collapse")
    ends = {(r["task"], r["arm"], r["seed"]): mean(item_rates(r, TURNS).values()) for r in records if "outcomes" in r}
    runs = {(r["task"], r["arm"], r["seed"]): r for r in records if "evaluations" in r}
    return {key: (runs[key], end) for key, end in ends.items()}


def fell(run: Record) -> bool:
    """Return whether two successive evaluations were below half of the best one before them."""
    low = run_of_low = 0
    best = 0.0
    for evaluation in run["evaluations"]:
        run_of_low = run_of_low + 1 if evaluation["success"] < best / 2 else 0
        low = max(low, run_of_low)
        best = max(best, evaluation["success"])
    return low > 1


def points_of(run: Record) -> list[tuple[float, float]]:
    """Return processed tokens and held-out success of each evaluation."""
    totals = [0.0]
    for tokens, episodes in zip(run["curves"]["tokens/per_episode"], run["curves"]["episodes/usable"], strict=True):
        totals.append(totals[-1] + tokens * episodes)
    return [(totals[e["step"]], e["success"]) for e in run["evaluations"]]


def area(curve: Sequence[tuple[float, float]], end: float) -> float:
    """Return the mean height of a piecewise linear curve up to `end`."""
    total = 0.0
    for (x, y), (following, height) in pairwise(curve):
        if x < end:
            stop = min(following, end)
            at_stop = y + (height - y) * (stop - x) / (following - x)
            total += (stop - x) * (y + at_stop) / 2
    return total / end


def differences(study: Study, condition: str, first: str, second: str) -> Outcomes:
    task = CONDITIONS[condition]
    falls, ends, areas = [], [], []
    for seed in sorted({s for t, arm, s in study if (t, arm) == (task, first)}):
        (one, end), (other, other_end) = study[task, first, seed], study[task, second, seed]
        curves = points_of(one), points_of(other)
        common = min(curve[-1][0] for curve in curves)
        falls.append((fell(one), fell(other)))
        ends.append(end - other_end)
        areas.append(area(curves[0], common) - area(curves[1], common))
    return falls, ends, areas


def every_sign(values: Sequence[float]) -> float:
    """Return the exact two-sided p-value over all signs of the differences."""
    observed = abs(math.fsum(values)) - 1e-9
    totals = [0.0]
    for value in values:
        totals = [total + sign * value for total in totals for sign in (1, -1)]
    return sum(abs(total) >= observed for total in totals) / len(totals)


def mcnemar(falls: Sequence[tuple[bool, bool]]) -> float:
    only = [sum(a and not b for a, b in falls), sum(b and not a for a, b in falls)]
    n = sum(only)
    tail = sum(math.comb(n, k) for k in range(max(only), n + 1)) / 2**n
    return min(1.0, 2 * tail)


def collapse(pages: Pages) -> None:
    """Check verdicts, table and list of the study of collapse."""
    study = read()
    seeds = {seed for _, _, seed in study}
    arms = {(task, arm) for task, arm, _ in study}
    complete = len(study) == len(arms) * len(seeds) and arms == {(t, a) for t in CONDITIONS.values() for a in ARMS}
    (parameters,) = {run["parameters"] for run, _ in study.values()}
    pages.expect("a model of # parameters, # seeds, 300 steps.", parameters, len(seeds))
    pages.accept(
        "Mazes of size 4,",
        "12 seeds, 300 steps",
        "Staged has 16, 32, then 64 turns, too-short 4, 16, then 64; all are evaluated under 64.",
        "4 mini-batches, samples that are one update old",
        "the calm one has a KL term of 0.02 and 2 mini-batches",
    )
    pages.require(
        "12 seeds, 300 steps",
        complete and {len(run["curves"]["episodes/usable"]) for run, _ in study.values()} == {300},
    )
    compared = {c: differences(study, c, "staged", "fixed-64") for c in CONDITIONS}
    adjusted = {c: holm([mcnemar(f), every_sign(e), every_sign(a)]) for c, (f, e, a) in compared.items()}
    for condition, (falls, ends, areas) in compared.items():
        task, p = CONDITIONS[condition], adjusted[condition]
        both = [sum(column) for column in zip(*falls, strict=True)]
        pages.expect(
            f"| {condition}: runs that collapsed | # of # | # of # | | # |",
            both[0],
            len(falls),
            both[1],
            len(falls),
            p[0],
        )
        arm_ends = [points(end for (t, a, _), (_, end) in study.items() if (t, a) == (task, arm)) for arm in ARMS[:2]]
        pages.expect(f"| {condition}: success at the end | #% | #% | # (# to #) | # |", *arm_ends, *gap(ends), p[1])
        commons = [common_areas(study, task, seed) for seed in sorted(seeds)]
        means = [points(column) for column in zip(*commons, strict=True)]
        row = f"| {condition}: mean success at equal processed tokens | #% | #% | # (# to #) | # |"
        pages.expect(row, *means, *gap(areas), p[2])
    helps = all(mean(d) > 0 for d, p in zip(compared["calm"][1:], adjusted["calm"][1:], strict=True) if p < 0.05)
    pages.require("**not shown** in the paper-like condition", min(adjusted["paper-like"]) >= 0.05)
    per_token = [areas > 0 and p[2] < 0.05 for areas, p in ((mean(compared[c][2]), adjusted[c]) for c in CONDITIONS)]
    pages.require(
        "At equal tokens a staged horizon beats a fixed long one in one of two conditions", sum(per_token) == 1
    )
    pages.require("and a fixed shorter one in none (twelve seeds)", len(seeds) == 12)
    pages.require("**staging helps** in the calm condition", min(adjusted["calm"]) < 0.05 and helps)
    long_falls = [b for falls, _, _ in compared.values() for _, b in falls]
    pages.expect(
        "The paper's collapse is not reproduced: # of # runs of fixed-64 collapsed.", sum(long_falls), len(long_falls)
    )
    pages.require("The paper's collapse is not reproduced", sum(long_falls) < 3)
    other_arms(pages, study)


def common_areas(study: Study, task: str, seed: int) -> tuple[float, float]:
    curves = [points_of(study[task, arm, seed][0]) for arm in ARMS[:2]]
    end = min(curve[-1][0] for curve in curves)
    return area(curves[0], end), area(curves[1], end)


def gap(values: Sequence[float]) -> list[Value]:
    return [points(values), *bootstrap(values)]


def other_arms(pages: Pages, study: Study) -> None:
    """Check staged against fixed-16 and too-short against staged."""
    medium, short = (
        {c: differences(study, c, *arms) for c in CONDITIONS}
        for arms in (("staged", "fixed-16"), ("too-short", "staged"))
    )
    p = {c: holm([mcnemar(f), every_sign(e), every_sign(a)]) for c, (f, e, a) in medium.items()}
    pages.expect(
        "Staged less fixed-16 at equal processed tokens: # points (# to #), p = # (paper-like) and # points (# to #), "
        "p = # (calm). At the end of the calm runs fixed-16 is ahead: # points (# to #), p = #.",
        *(*gap(medium["paper-like"][2]), p["paper-like"][2], *gap(medium["calm"][2]), p["calm"][2]),
        *(*gap(medium["calm"][1]), p["calm"][1]),
    )
    pages.require("that it grows adds nothing that shows", min(p[c][2] for c in CONDITIONS) > 0.05)
    falls = medium["paper-like"][0]
    counts = [sum(b for _, b in falls), len(falls), sum(a for a, _ in falls), len(falls)]
    pages.expect(
        "fixed-16 collapsed in # of # runs and staged in # of #, all while they trained under # turns.", *counts, 16
    )
    pages.accept("Evaluations have 64.")
    firsts = [first_fall(run) for (_, arm, _), (run, _) in study.items() if arm == "staged" and fell(run)]
    pages.require("all while they trained under 16 turns", max(firsts) <= 100)
    p = {c: holm([mcnemar(f), every_sign(e), every_sign(a)]) for c, (f, e, a) in short.items()}
    counts = [n for c in CONDITIONS for n in (sum(a for a, _ in short[c][0]), len(short[c][0]))]
    pages.expect(
        "With # turns first, held-out success fell below half of its best in # of # and # of # runs. Less staged at "
        "equal processed tokens: # points (# to #), p = # and # points (# to #), p = #.",
        *(4, *counts, *gap(short["paper-like"][2]), p["paper-like"][2], *gap(short["calm"][2]), p["calm"][2]),
    )
    pages.accept("on long episodes a first stage of 4 turns lost most")
    pages.require("on long episodes a first stage of 4 turns lost most", all(p[c][2] < 0.05 for c in CONDITIONS))


def first_fall(run: Record) -> int:
    """Return the step of the second of two successive evaluations below half of the best one before them."""
    best, was_low = 0.0, False
    for evaluation in run["evaluations"]:
        is_low = evaluation["success"] < best / 2
        if is_low and was_low:
            return int(evaluation["step"])
        best, was_low = max(best, evaluation["success"]), is_low
    raise AssertionError("the run did not fall")
