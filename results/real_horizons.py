"""Claim B with Qwen2.5-Coder-0.5B on BabyAI: its part of docs/results/evidence.md.

The rule is that of results/qwen-babyai-0.5B/PROTOCOL.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from collapse import compare, gain_of, mean_until, pairs_of, verdict
from collapse_page import ROWS, adjusted, arms_of, falls, interval
from paper import by_task_and_arm, mean_item_rates
from qwen_page import listed, number_word, seeds_text, wrapped
from qwen_studies import SMALL_SEEDS
from records import Record, read_records, runs_of, turns_of
from turn_limits import less, signed

from agentgym_rl.evaluation.statistics import mean_interval, sign_flip_test

STUDY, TASK = "qwen-babyai-0.5B", "babyai"
ARMS = ("staged", "fixed-long")
SHOWN = 3
"""Seeds with both arms from which the page shows them."""
OTHERS = (("staged", "fixed-short"), ("adaptive", "fixed-long"))
"""Comparisons without a verdict."""


def of_rule(records: Sequence[Record]) -> list[Record]:
    """Return the records of the rule's seeds. Staged runs of earlier seeds were known when it was written."""
    return [r for r in records if r["seed"] in SMALL_SEEDS]


def claim(records: Sequence[Record]) -> str:
    pairs = pairs_of(records, TASK, *ARMS)
    by_rule = verdict(compare(pairs), gain_of(records, TASK))
    long = arms_of(pairs)[1]
    if len(pairs) < len(SMALL_SEEDS):
        text = f"The rule written before the runs gives no verdict before {seeds_text(SMALL_SEEDS)}"
        text += f"; with {number_word(len(pairs))}: {by_rule}."
    else:
        text = f"By the rule written before the runs: **{by_rule}**."
    return f"{text} {falls(long)} runs of fixed-long collapsed."


def caption(records: Sequence[Record]) -> str:
    """Return what the picture shows."""
    run = next(r for r in runs_of(records) if r["arm"] == "staged")
    turns = [f"{stage['turns']:.0f}" for stage in run["stages"]]
    (limit,) = {turns_of(r)[-1] for r in records if "outcomes" in r}
    arms = {r["arm"] for r in runs_of(records)}
    others = {
        "fixed-short": f"fixed-short {turns[0]}",
        "adaptive": "adaptive the same stages, entered when success stalls",
    }
    more = "".join(f", {text}" for arm, text in others.items() if arm in arms)
    return (
        f"*Qwen2.5-Coder-0.5B on BabyAI from the base model, {run['steps']} steps. Thin lines are seeds, thick lines "
        f"their mean. Staged has {listed(turns)} turns, fixed-long {limit}{more}; all are evaluated under {limit}. "
        "Runs shared the GPU, so seconds are comparable only roughly.*"
    )


def table(records: Sequence[Record]) -> list[str]:
    """Return the outcomes of the rule."""
    pairs = pairs_of(records, TASK, *ARMS)
    outcomes = compare(pairs)
    heads = f"{' | '.join(ARMS)} | difference (95% interval over seeds) | p, Holm"
    lines = [f"| {seeds_text(pairs)} | {heads} |", "|---|---|---|---|---|"]
    for outcome in outcomes:
        rates = [f"{100 * value:.1f}%" for value in (outcome.first, outcome.second)]
        cells = [*rates, interval(outcome.differences)]
        if outcome.name == "collapsed":
            cells = [*map(falls, arms_of(pairs)), ""]
        lines.append(f"| {ROWS[outcome.name]} | {' | '.join(cells)} | {adjusted(outcomes)[outcome.name]:.2g} |")
    return lines


def at_the_end(records: Sequence[Record], first: str, second: str) -> str:
    """Return one arm less another on the same items at the end, over the seeds that both have, or nothing."""
    groups = by_task_and_arm(records)
    by_seed = [{r["seed"]: r for r in groups.get((TASK, arm), [])} for arm in (first, second)]
    seeds = sorted(by_seed[0].keys() & by_seed[1].keys())
    if not seeds:
        return ""
    apart = less(*(mean_item_rates([arm[seed] for seed in seeds]) for arm in by_seed))
    low, high = mean_interval(apart)
    gap = f"{signed(statistics.fmean(apart))} ({signed(low)} to {signed(high)}), p = {sign_flip_test(apart):.2g}"
    return f"{first} less {second} {gap} ({seeds_text(seeds)})"


def mean_over_steps(run: Record) -> float:
    """Return the mean held-out success of a run over its steps, in percent."""
    steps = [float(e["step"]) for e in run["evaluations"]]
    return 100 * mean_until(steps, [e["success"] for e in run["evaluations"]], steps[-1])


def facts(records: Sequence[Record]) -> list[str]:
    """Return the list below the table."""
    runs = dict(zip(ARMS, arms_of(pairs_of(records, TASK, *ARMS)), strict=True))
    ends = [text for arms in (ARMS, *OTHERS) if (text := at_the_end(records, *arms))]
    steps = [statistics.fmean(map(mean_over_steps, runs[arm])) for arm in ARMS]
    costs = []
    for arm in ARMS:
        tokens = statistics.fmean(run["sampled_tokens"] for run in runs[arm]) / 1e6
        seconds = statistics.fmean(sum(s or 0.0 for s in run["curves"]["time/step_s"]) for run in runs[arm])
        costs.append(f"one of {arm} {tokens:.1f} million sampled tokens and {seconds:.0f} s of training steps")
    return [
        f"- Over items instead of seeds, at the end, in points: {'; '.join(ends)}. p is exact, without a correction.",
        f"- Over equal steps, the paper's axis, mean held-out success is {steps[0]:.1f}% (staged) and {steps[1]:.1f}% "
        "(fixed-long).",
        f"- A run takes, in the mean: {'; '.join(costs)}.",
    ]


def texts(results: Path) -> dict[str, str]:
    """Return the generated part of docs/results/evidence.md by name, empty before some seeds have run."""
    records = of_rule(read_records(results, STUDY))
    if len(pairs_of(records, TASK, *ARMS)) < SHOWN:
        return {"real-horizons": ""}
    picture = "![Held-out success of each horizon over steps, sampled tokens and seconds](../images/paper-{}.png)"
    lines = ["### A pretrained chat model", "", claim(records), "", picture.format("babyai-0.5B"), ""]
    lines += [caption(records), "", *table(records), "", *facts(records)]
    return {"real-horizons": "\n".join(map(wrapped, lines))}
