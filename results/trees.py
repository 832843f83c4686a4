"""Write docs/results/trees.md and its figure from the records of the studies `trees` and `qwen-trees`.

python results/trees.py [--results results] [--docs docs]
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from collapse import collapsed
from figures import draw_success, new_figure
from records import (
    Record,
    common_tokens,
    compare_seeds,
    completeness,
    percent_with_range,
    runs_of,
    success_at_tokens,
)
from studies import TREE_ARMS
from study_page import write_page

COLOURS = {"chains": "#c2410c", "trees": "#0f766e"}
TASKS = {
    "keydoor": "KeyDoor, a tiny model",
    "textcraft": "TextCraft, Qwen2.5-Coder-1.5B",
    "searchqa": "SearchQA, Qwen2.5-Coder-1.5B",
}
POINTS = 4
"""Equal shares of the budget at which success is read."""
PAGE = """# Trees against chains

![Held-out success against sampled tokens, for chains and trees](../images/trees.png)

{sections}

Success is that of held-out episodes (40 of KeyDoor, 100 of the others), interpolated between evaluations; the range is
over seeds. A shared token is counted once, where it was sampled. The time is the mean over runs, of which two or three
shared the GPU by CUDA's MPS (two the processor for KeyDoor).

## How to repeat it

```
python results/study.py trees --jobs 2 --device cpu
python results/study.py qwen-trees --device cuda --model FOLDER
python results/trees.py
```

*chains*: eight episodes of each task. *trees*: four episodes of each task and one continuation of each from a random
turn ([trees](../guides/trees.md)). KeyDoor: layouts of three turns, all runs from one model that imitates random play
(`recipes/evidence/keydoor-base.toml`, `keydoor-rl.toml`). TextCraft and SearchQA: Qwen2.5-Coder-1.5B-Instruct, from the
base model (`recipes/qwen`), with the turns of the first stage (10 and 5), on one GPU.

## Limits

{limits}
"""


def runs_by_seed(records: Sequence[Record]) -> list[Record]:
    """Return the runs of both arms, without the starting model."""
    return sorted((r for r in runs_of(records) if r["arm"] in TREE_ARMS), key=lambda record: record["seed"])


def runs_of_arm(records: Sequence[Record], arm: str) -> list[Record]:
    return [record for record in records if record["arm"] == arm]


def points(records: Sequence[Record]) -> list[float]:
    """Return the numbers of tokens to compare at: equal shares of what every run has sampled."""
    return [common_tokens(records) * (k + 1) / POINTS for k in range(POINTS)]


def table(records: Sequence[Record]) -> str:
    columns = points(records)
    heads = " | ".join(f"{tokens / 1000:.1f}k tokens" for tokens in columns)
    lines = [f"| | steps | time | endings per 1,000 tokens | {heads} |", "|---|---|---|---|" + "---|" * len(columns)]
    for arm in TREE_ARMS:
        runs = runs_of_arm(records, arm)
        steps = statistics.fmean(record["steps"] for record in runs)
        endings = statistics.fmean(
            1000 * sum(record["curves"]["episodes/usable"]) / record["sampled_tokens"] for record in runs
        )
        cells = [percent_with_range(success_at_tokens(runs, tokens)) for tokens in columns]
        seconds = statistics.fmean(record["seconds"] for record in runs)
        lines.append(f"| {arm} | {steps:.0f} | {seconds:.0f} s | {endings:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def claim(records: Sequence[Record]) -> str:
    """Say how both arms did at the end, and whether the seeds tell them apart."""
    end = common_tokens(records)
    chains, trees = (success_at_tokens(runs_of_arm(records, arm), end) for arm in TREE_ARMS)
    return (
        f"After {end / 1000:.0f}k sampled tokens: trees {100 * statistics.fmean(trees):.0f}% held-out success, chains "
        f"{100 * statistics.fmean(chains):.0f}%; {compare_seeds(chains, trees)}"
    )


def by_task(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the runs of the seeds that both arms have, by task."""
    found: dict[str, list[Record]] = {}
    for task in TASKS:
        runs = [record for record in runs_by_seed(records) if record["task"] == task]
        both = set.intersection(*({r["seed"] for r in runs if r["arm"] == arm} for arm in TREE_ARMS))
        if both:
            found[task] = [record for record in runs if record["seed"] in both]
    return found


def collapse(run: Record) -> str:
    """Say how far the success of a collapsed run fell, and which findings of the doctor were severe."""
    successes = [evaluation["success"] for evaluation in run["evaluations"]]
    severe: dict[str, int] = {}
    for finding in run["findings"]:
        if finding["severity"] == "severe":
            severe.setdefault(finding["rule"], finding["step"])
    named = ", ".join(f"`{rule}` at step {step}" for rule, step in severe.items())
    fall = f"from {100 * max(successes):.0f}% to {100 * successes[-1]:.0f}%"
    return f"- Run {run['job']} collapsed, {fall}. The doctor's severe findings: {named or 'none'}."


def page(records: list[Record]) -> str:
    sections = [f"## {TASKS[task]}\n\n{claim(runs)}\n\n{table(runs)}" for task, runs in by_task(records).items()]
    limits = [
        "- Few seeds and short runs. A tiny model and an easy game say little about language models.",
        "- Equal sampled tokens are not equal time: rounds of branching wait for each other.",
        *(collapse(run) for run in runs_by_seed(records) if collapsed(run)),
        *(f"- Run {r['job']} was stopped {r['stopped']}." for r in records if "stopped" in r),
        *completeness(records, "trees", "qwen-trees"),
    ]
    return PAGE.format(sections="\n\n".join(sections), limits="\n".join(limits))


def draw(records: Sequence[Record], path: Path) -> None:
    tasks = by_task(records)
    figure, (row,) = new_figure(1, len(tasks), 2.4 + 4.0 * len(tasks), 3.6)
    for axes, (task, runs) in zip(row, tasks.items(), strict=True):
        draw_success(axes, runs, COLOURS, TASKS[task])
    figure.savefig(path)


if __name__ == "__main__":
    write_page("trees", __doc__, page, draw, "qwen-trees")
