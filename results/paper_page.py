"""The paper's table as far as it has records, and the text that results/pages.py puts into pages."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs import RANDOM
from paper import AIMS, ROWS, SCENARIOS, by_task_and_arm, gains_over_base, kinds_table, main_table, mean_item_rates
from qwen_page import BEHAVIOUR_HEADER, behaviour_by_stage, listed, wrapped
from qwen_studies import QWEN
from records import Record, evaluations_of, read_records, runs_of, turns_of
from tables import holm
from turn_limits import signed

from agentgym_rl.evaluation.statistics import mean_interval, sign_flip_test

METRICS = {
    "textcraft": "the goal is crafted",
    "babyai": "the mission is done",
    "searchqa": "exact match of the answer, after normalisation",
    "sciworld": "score 100",
    "webarena": "the site's own check",
}
"""Condition of a success, by task."""


def read(results: Path) -> list[Record]:
    return [r for task in QWEN for r in evaluations_of(read_records(results, f"qwen-{task}"))]


def scenarios_table(records: Sequence[Record]) -> list[str]:
    """Return items, turns, samples and metric of each scenario."""
    groups = by_task_and_arm(records)
    lines = ["| scenario | items | turns | samples an item | success |", "|---|---|---|---|---|"]
    for task in QWEN:
        evaluated = [r for (t, _), group in groups.items() if t == task for r in group]
        if not evaluated:
            continue
        subsets = evaluated[0]["config"]["tasks"]
        items = f"{sum(subset['items'] for subset in subsets)}"
        present = {subset["name"] for subset in subsets if subset["items"]}
        if absent := [subset["name"] for subset in subsets if subset["name"] not in present]:
            items += f", no {' or '.join(absent)}"
        turns = sorted({turns_of(r)[-1] for r in evaluated})
        samples = sorted({r["config"]["samples"] for r in evaluated})
        cells = (SCENARIOS[task], items, *(", ".join(map(str, numbers)) for numbers in (turns, samples)))
        lines.append(f"| {' | '.join(cells)} | {METRICS[task]} |")
    return lines


def trained(results: Path) -> dict[str, list[Record]]:
    """Return the training runs of the table's agents by task, in the order of their seeds."""
    runs = {task: runs_of(read_records(results, f"qwen-{task}")) for task in QWEN}
    return {task: sorted(records, key=lambda r: (r["arm"], r["seed"])) for task, records in runs.items() if records}


def runs_table(runs: dict[str, list[Record]]) -> list[str]:
    """Return the length and the time of each run."""
    lines = [
        "| run | steps of episodes | turns | million sampled tokens | minutes | commit |",
        "|---|---|---|---|---|---|",
    ]
    for task, records in runs.items():
        for run in records:
            stages = " → ".join(f"{stage['turns']:g}" for stage in run["stages"])
            steps = f"{run['steps']} of {episodes_a_step(run['config'])}"
            tokens = f"{run['sampled_tokens'] / 1e6:.1f}" if "sampled_tokens" in run else ""
            name = f"{SCENARIOS[task].partition(',')[0]}, {ROWS[run['arm']]}, seed {run['seed']}"
            cells = (name, steps, stages, tokens, f"{run['seconds'] / 60:.0f}", f"`{run['commit'][:7]}`")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def episodes_a_step(config: dict[str, Any]) -> int:
    """Return the sampled episodes of a step of RL, or the demonstrations of a step of SFT."""
    if config.get("method") == "sft":
        return int(config["sft"]["batch_size"])
    return int(config["rl"]["groups_per_step"] * config["rl"]["group_size"])


def behaviour(runs: dict[str, list[Record]]) -> list[str]:
    """Return behaviour in training by stage under the growing horizon, of the tasks besides TextCraft."""
    lines = list(BEHAVIOUR_HEADER)
    for task, records in runs.items():
        if task != "textcraft":
            staged = [run for run in records if run["arm"] == "staged"]
            lines += behaviour_by_stage(staged, f"{SCENARIOS[task].partition(',')[0]}, ") if staged else []
    return lines


def difference(records: Sequence[Record], arm: str, other: str, title: str) -> list[str]:
    """Return a line with one arm less another on the items of each scenario that has both, if there is one."""
    groups = by_task_and_arm(records)
    compared: dict[str, list[float]] = {}
    for task in QWEN:
        if (task, arm) in groups and (task, other) in groups:
            ours, theirs = (mean_item_rates(groups[task, each]) for each in (arm, other))
            compared[task] = [ours[item] - theirs[item] for item in sorted(ours)]
    adjusted = holm([sign_flip_test(d) for d in compared.values()])
    parts = []
    for (task, d), p in zip(compared.items(), adjusted, strict=True):
        low, high = mean_interval(d)
        gap = f"{signed(statistics.fmean(d))} ({signed(low)} to {signed(high)}"
        parts.append(f"{SCENARIOS[task]} {gap}, p = {p:.2g})")
    return [f"- {title} on the same items, in points: {'; '.join(parts)}. p is exact, after Holm."] if parts else []


def gains_of_aims(records: Sequence[Record]) -> list[str]:
    """Return a line with the gains over base that had an aim, on their items and by seed, if all have records."""
    groups = by_task_and_arm(records)
    parts = []
    for task, (subsets, aim) in AIMS.items():
        if (task, "staged") not in groups or (task, "base") not in groups:
            return []
        gains, seeds = gains_over_base(groups[task, "staged"], groups[task, "base"], subsets)
        low, high = mean_interval(gains)
        name = f"{SCENARIOS[task]}{', depths 1 and 2' if subsets else ''}"
        gain = f"{signed(statistics.fmean(gains))} ({signed(low)} to {signed(high)}"
        parts.append(f"{name} {gain}; seeds {signed(min(seeds))} to {signed(max(seeds))}; aim {100 * aim:+.0f})")
    return [f"- RL, ScalingInter, less base, where an aim was set before the runs: {'; '.join(parts)}."]


def missing(records: Sequence[Record]) -> str:
    """Return the rows, columns and cells of the table that have no record."""
    groups = by_task_and_arm(records)
    names = {task: SCENARIOS[task].partition(",")[0] for task in QWEN}
    columns = [task for task in QWEN if any(t == task for t, _ in groups)]
    rows = [arm for arm in ROWS if any((task, arm) in groups for task in columns)]
    gaps = {arm: [names[task] for task in columns if (task, arm) not in groups] for arm in rows}
    parts = {
        "rows": [title for arm, title in ROWS.items() if arm not in rows],
        "columns": [name for task, name in names.items() if task not in columns],
        "cells": [f"{ROWS[arm]} on {listed(absent)}" for arm, absent in gaps.items() if absent],
    }
    return " ".join(["-", *(f"Missing {kind}: {'; '.join(absent)}." for kind, absent in parts.items() if absent)])


def texts(results: Path) -> dict[str, str]:
    """Return the generated parts of docs/results by name."""
    records = read(results)
    if not records:
        return {"paper-table": "", "paper-kinds": "", "paper-runs": "", "paper-behaviour": ""}
    differences = [
        *difference(records, "staged", "base", "RL, ScalingInter, less base"),
        *gains_of_aims(records),
        *difference(records, "SFT", "base", "SFT less base"),
        *difference(records, "staged", "SFT", "RL, ScalingInter, less SFT"),
        *difference(records, "base", RANDOM, "Base less random play"),
    ]
    lines = [*main_table(records), "", *scenarios_table(records), "", *differences, missing(records)]
    kinds: list[str] = []
    for task in QWEN:
        if task != "textcraft" and any(r["task"] == task for r in records):
            kinds += [f"{SCENARIOS[task]}:", "", *kinds_table(records, task), ""]
    runs = trained(results)
    return {
        "paper-table": "\n".join(map(wrapped, lines)),
        "paper-kinds": "\n".join(kinds).rstrip(),
        "paper-runs": "\n".join(runs_table(runs)) if runs else "",
        "paper-behaviour": "\n".join(behaviour(runs)) if runs else "",
    }
