"""Readers of the JSON under results/: curves over tokens, outcomes by item, and jobs without a record."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies import STUDIES

from agentgym_rl.evaluation.statistics import pass_at_k

Record = dict[str, Any]
STEPS_PER_POINT = 5
"""Training steps averaged into one point of a curve."""


def read_records(results: Path, study: str) -> list[Record]:
    return [json.loads(path.read_text()) for path in sorted((results / study).glob("*.json"))]


def describe_missing(study: str, records: Sequence[Record]) -> str:
    """Return a sentence about the jobs without a record, or an empty string if every job has one."""
    recorded = {record["job"] for record in records}
    absent: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    jobs = STUDIES[study](None)
    for job in jobs:
        if job.name not in recorded:
            absent[{"train": "runs", "eval": "evaluations"}[job.kind], job.task, job.arm].append(job.seed)
    if not absent:
        return ""
    if len(absent) > 6:
        return f"{len(jobs) - sum(map(len, absent.values()))} of {len(jobs)} jobs have a record"
    parts = [f"{kind} of {task}, {arm} (seeds {_listed(seeds)})" for (kind, task, arm), seeds in absent.items()]
    return "no record of " + "; ".join(parts)


def completeness(records: Sequence[Record], *studies: str) -> list[str]:
    """Return the lines of a page about its records: the jobs without one, and the commits of the others."""
    missing = [sentence for study in studies if (sentence := describe_missing(study, records))]
    commits = sorted({record["commit"] for record in records if "commit" in record})
    runs = [f"- Each record names the commit of its run: {', '.join(commits)}."] if commits else []
    return [*(f"- {each[0].upper()}{each[1:]}." for each in missing), *runs]


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def runs_of(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if "evaluations" in record]


def evaluations_of(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if "outcomes" in record]


def curve(record: Record, name: str) -> tuple[list[float], list[float]]:
    """Return (sampled tokens, values) of the held-out success or of a training metric averaged over a few steps."""
    if name == "success":
        return [e["sampled_tokens"] for e in record["evaluations"]], [e["success"] for e in record["evaluations"]]
    tokens, values = record["curves"]["tokens/total"], record["curves"].get(name, [])
    points = [(t, v) for t, v in zip(tokens, values, strict=False) if v is not None]
    blocks = [points[i : i + STEPS_PER_POINT] for i in range(0, len(points), STEPS_PER_POINT)]
    return [b[-1][0] for b in blocks], [statistics.fmean(v for _, v in b) for b in blocks]


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Return y at `x`: linear between points, the nearest point outside their range."""
    for (x0, y0), (x1, y1) in zip(zip(xs, ys, strict=True), zip(xs[1:], ys[1:], strict=True), strict=False):
        if x0 <= x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return ys[0] if x < xs[0] else ys[-1]


def mean_curve(curves: Sequence[tuple[list[float], list[float]]]) -> tuple[list[float], list[float]]:
    """Return the mean of the seeds' curves, up to the end of the shortest."""
    end = min(xs[-1] for xs, _ in curves)
    grid = [end * i / 60 for i in range(61)]
    return grid, [statistics.fmean(interpolate(xs, ys, x) for xs, ys in curves) for x in grid]


def first_evaluation_tokens(record: Record) -> float:
    """Return the tokens sampled before the first evaluation after the start, which differs between arms."""
    return float(record["evaluations"][1]["sampled_tokens"])


def mean_success(record: Record, since: float = 0.0) -> float:
    """Return the mean success between `since` tokens and the end of the budget, a measure of learning speed."""
    xs, ys = curve(record, "success")
    return statistics.fmean(interpolate(xs, ys, since + (xs[-1] - since) * i / 50) for i in range(51))


def largest_drop(record: Record) -> float:
    """Return the drop from the best evaluation to the lowest one after it."""
    success = [e["success"] for e in record["evaluations"]]
    best = success.index(max(success))
    return success[best] - min(success[best:])


def final_success(record: Record) -> float:
    return float(record["evaluations"][-1]["success"])


def turns_of(record: Record) -> list[int]:
    return sorted(map(int, record["outcomes"]))


def item_rates(record: Record, turns: int, k: int = 1) -> dict[str, float]:
    """Return each item's pass@k under a limit of `turns`. Items with fewer than k samples are left out."""
    outcomes = record["outcomes"][str(turns)]
    return {item: pass_at_k(len(s), s.count("1"), k) for item, s in outcomes.items() if len(s) >= k}


def success_at(record: Record, turns: int, k: int = 1) -> float:
    return statistics.fmean(item_rates(record, turns, k).values())


def overall_cell(record: Record) -> dict[str, Any]:
    """Return the evaluation's numbers over all items at its largest turn limit."""
    cell: dict[str, Any]
    (cell,) = record["results"][-1]["scenarios"].values()
    return cell


def success_at_tokens(runs: Sequence[Record], tokens: float) -> list[float]:
    """Return the held-out success of each run after so many sampled tokens, between evaluations by interpolation."""
    return [interpolate(*curve(run, "success"), tokens) for run in runs]


def common_tokens(runs: Sequence[Record]) -> float:
    """Return the tokens that every run has sampled."""
    return float(min(run["evaluations"][-1]["sampled_tokens"] for run in runs))


def compare_seeds(first: Sequence[float], second: Sequence[float]) -> str:
    """Return in how many seeds the second is ahead, and whether the seeds tell both apart."""
    ahead = sum(b > a for a, b in zip(first, second, strict=True))
    if len(first) == 1:
        return f"{'ahead' if ahead else 'not ahead'}, with one seed: this shows no difference."
    apart = min(second) > max(first) or min(first) > max(second)
    verdict = "No seed of one reaches the other." if apart else "The seeds of both overlap: this shows no difference."
    return f"ahead in {ahead} of {len(second)} seeds.\n{verdict}"


def percent_with_range(values: Sequence[float]) -> str:
    """Return mean, lowest and highest of some shares, such as `57% (55 to 60)`."""
    return f"{100 * statistics.fmean(values):.0f}% ({100 * min(values):.0f} to {100 * max(values):.0f})"
