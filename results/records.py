"""What the JSON under results/ says: curves over tokens, outcomes by item, and which jobs have no record yet."""

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
SMOOTHED = 5
"""Steps over which the metrics of single steps are averaged."""


def read(results: Path, study: str) -> list[Record]:
    return [json.loads(path.read_text()) for path in sorted((results / study).glob("*.json"))]


def missing(study: str, records: Sequence[Record]) -> str:
    """Which jobs of the protocol have no record, in words; nothing when all have one."""
    there = {record["job"] for record in records}
    absent: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    jobs = STUDIES[study](None)
    for job in jobs:
        if job.name not in there:
            absent[{"train": "runs", "eval": "evaluations"}[job.kind], job.task, job.arm].append(job.seed)
    if not absent:
        return ""
    if len(absent) > 6:
        return f"{len(jobs) - sum(map(len, absent.values()))} of {len(jobs)} jobs have a record"
    parts = [f"{kind} of {task}, {arm} (seeds {_listed(seeds)})" for (kind, task, arm), seeds in absent.items()]
    return "no record of " + "; ".join(parts)


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def runs_of(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if "evaluations" in record]


def evaluations_of(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if "outcomes" in record]


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


def first_evaluation(record: Record) -> float:
    """Tokens sampled until the first one after the start. Arms have theirs at other times."""
    return float(record["evaluations"][1]["sampled_tokens"])


def over_curve(record: Record, since: float = 0.0) -> float:
    """Mean success from `since` to the end of the budget: how soon it was learned."""
    xs, ys = curve(record, "success")
    return statistics.fmean(at(xs, ys, since + (xs[-1] - since) * i / 50) for i in range(51))


def fall(record: Record) -> float:
    """From the best evaluation to the lowest after it."""
    success = [e["success"] for e in record["evaluations"]]
    best = success.index(max(success))
    return success[best] - min(success[best:])


def last(record: Record) -> float:
    return float(record["evaluations"][-1]["success"])


def turns_of(record: Record) -> list[int]:
    return sorted(map(int, record["outcomes"]))


def item_rates(record: Record, turns: int, k: int = 1) -> dict[str, float]:
    """Of each item: the chance that one of k samples succeeds under so many turns. Items with fewer are left out."""
    outcomes = record["outcomes"][str(turns)]
    return {item: pass_at_k(len(s), s.count("1"), k) for item, s in outcomes.items() if len(s) >= k}


def success_at(record: Record, turns: int, k: int = 1) -> float:
    return statistics.fmean(item_rates(record, turns, k).values())


def whole_cell(record: Record) -> dict[str, Any]:
    """The evaluation's own numbers over all its items, at the most turns it was given."""
    (cell,) = record["results"][-1]["scenarios"].values()
    found: dict[str, Any] = cell
    return found
