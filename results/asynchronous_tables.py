"""Tables of docs/results/benchmarks.md about asynchronous groups, from records. scripts/docs_pages.py fills them in."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

from agentgym_rl.common.intervals import wilson_interval

RESULTS = Path(__file__).parent
Table = tuple[list[str], list[list[str]]]
"""A header and rows."""


def success_by_bound(study: str) -> Table:
    """Return the success of a study's runs by bound of staleness, over the seeds."""
    bounds: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((RESULTS / study).glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        bounds.setdefault(record["arm"].removeprefix("max_staleness "), []).append(record)
    rows = []
    for bound, records in bounds.items():
        after = [record["after"]["success"] for record in records]
        age = statistics.fmean(x for record in records for x in record["curves"]["staleness/mean"])
        rows.append(
            [
                f"`{bound}`",
                ", ".join(f"{100 * p:.1f}" for p in after),
                pooled_success(records),
                f"{age:.2f}",
                f"{statistics.median(record['seconds'] for record in records):.0f} s",
            ]
        )
    success = ["success of each seed, %", "mean (95% interval), %"]
    return ["`rl.max_staleness`", *success, "mean age of a token, updates", "time, median"], rows


def times(study: str) -> Table:
    """Return the times of a study's runs by model, episodes a step and bound of staleness. The first step, which fills
    the queue, is left out."""
    rows: list[list[str]] = []
    synchronous: dict[str, tuple[float, float]] = {}
    paths = (RESULTS / study).glob("*staleness*.json")
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for record in sorted(records, key=lambda record: (-record["parameters"], record["task"], record["arm"])):
        rl, curves = record["config"]["rl"], record["curves"]
        run = f"{record['parameters'] / 1e9:.1f}B, {rl['groups_per_step'] * rl['group_size']} episodes"
        step_s, learn_s = (statistics.fmean(curves[name][1:]) for name in ("time/step_s", "time/learn_s"))
        tokens = (curves["tokens/total"][-1] - curves["tokens/total"][0]) / (len(curves["tokens/total"]) - 1)
        first = synchronous.setdefault(run, (step_s, step_s / tokens))
        rows.append(
            [
                run,
                f"`{record['arm'].removeprefix('max_staleness ')}`",
                f"{step_s:.2f} s",
                f"{learn_s:.2f} s",
                f"{tokens:,.0f}",
                f"{first[0] / step_s:.2f}×",
                f"{first[1] * tokens / step_s:.2f}×",
                pooled_success([record]),
            ]
        )
    times = ["a step", "learning", "sampled tokens", "steps/s", "sampled tokens/s"]
    return ["model and step", "`rl.max_staleness`", *times, "success (95% interval), %"], rows


RACE_SHARE, RACE_END, RACE_WINDOW = 0.9, 20, 20
"""Runs of `asynchronous-long` and `asynchronous-long-first` race to this share of what the synchronous ones have in
their last steps, in the mean success of so many steps. The rule was set before the runs."""


def race(study: str) -> Table:
    """Return the time that a study's runs need for a fixed success, by bound of staleness, over the seeds."""
    runs: dict[str, dict[int, dict[str, Any]]] = {}
    for path in sorted((RESULTS / study).glob("*staleness*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        runs.setdefault(record["arm"].removeprefix("max_staleness "), {})[record["seed"]] = record
    success = race_success(list(runs["0"].values()))
    synchronous = {seed: time_to_success(record, success) for seed, record in runs["0"].items()}
    rows = []
    for bound, records in runs.items():
        times = {seed: time_to_success(record, success) for seed, record in records.items()}
        ratios = [synchronous[seed] / seconds for seed, seconds in times.items()]
        curves = [record["curves"] for record in records.values()]
        slowest = [x / y for curve in curves for x, y in zip(curve["turns/max"], curve["turns/median"], strict=True)]
        rows.append(
            [
                f"`{bound}`",
                f"{statistics.fmean(x for curve in curves for x in curve['time/step_s']):.2f} s",
                f"{statistics.fmean(x for curve in curves for x in curve['time/learn_s']):.2f} s",
                f"{statistics.median(slowest):.0f}×",
                ", ".join(f"{seconds:.0f}" for seconds in times.values()) + " s",
                f"**{statistics.fmean(ratios):.2f}×** ({min(ratios):.2f} to {max(ratios):.2f})",
                pooled_success(list(records.values())),
            ]
        )
    header = ["`rl.max_staleness`", "a step", "learning", "slowest episode", f"time to {100 * success:.0f}%"]
    return [*header, "faster than synchronous", "success (95% interval), %"], rows


def race_success(synchronous: list[dict[str, Any]]) -> float:
    """Return the success that runs race to."""
    ends = [statistics.fmean(record["curves"]["success/mean"][-RACE_END:]) for record in synchronous]
    return RACE_SHARE * statistics.fmean(ends)


def time_to_success(record: dict[str, Any], wanted: float) -> float:
    """Return the seconds of a run up to the first step at which the mean success of its last steps is `wanted`.

    It is infinite if there is none.
    """
    success, seconds = record["curves"]["success/mean"], record["curves"]["time/step_s"]
    for step in range(RACE_WINDOW, len(success) + 1):
        if statistics.fmean(success[step - RACE_WINDOW : step]) >= wanted:
            return sum(seconds[:step])
    return math.inf


def pooled_success(records: list[dict[str, Any]]) -> str:
    """Return the success of runs after training, in percent, with its 95% interval over their episodes."""
    episodes = sum(record["after"]["episodes"] for record in records)
    successes = sum(round(record["after"]["success"] * record["after"]["episodes"]) for record in records)
    low, high = wilson_interval(successes, episodes)
    return f"{100 * successes / episodes:.1f} ({100 * low:.1f}–{100 * high:.1f})"
