"""Write docs/results/long-context.md and its figure from the records of the study `long-context`.

python results/long_context.py [--results results] [--docs docs]
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from figures import draw_legend, draw_seeds, label_y_in_percent, new_figure, set_title
from records import Record, completeness, percent_with_range, runs_of
from studies import LONG_CONTEXTS
from study_page import write_page

from agentgym_rl.evaluation.statistics import wilson_interval

COLOURS = {"truncation": "#6b7280", "window": "#0f766e", "summary": "#c2410c"}
PAGE = """# 200 turns in a context of 2,048 tokens

{claim}

![Held-out success against training steps, for truncation, window and summary](../images/long-context.png)

{table}

Success: a tour of twelve mazes was finished within 200 turns ({episodes} held-out tours, the same for all). Reward: the
share of its mazes. Numbers are means over {seeds} seeds and, in parentheses, their range. Segments and turns are those
of the last training step.

## What is compared

Only `agent.context` differs ([long episodes](../guides/long-context.md)). With *truncation* (`full`) an episode ends
when its context is full. *window* keeps the task and the last 8 turns. *summary* asks the model for 16 tokens that
replace the conversation. All three start from the same weights, which imitate random walks and have no skill
(`recipes/evidence/long-maze-base.toml`). They train for {steps} steps of 32 episodes by GRPO with anchor states
(`recipes/evidence/long-maze-rl.toml`).

## How to repeat it

```
python results/study.py long-context --jobs 9
python results/long_context.py
```

A run took {minutes} minutes on one x86 core beside eight others.

## Limits

{limits}
"""


def runs_of_arm(records: Sequence[Record], arm: str) -> list[Record]:
    """Return the runs of an arm, in the order of their seeds."""
    return sorted((r for r in runs_of(records) if r["arm"] == arm), key=lambda record: record["seed"])


def successes(runs: Sequence[Record], index: int) -> list[float]:
    """Return the held-out success of each run at its evaluation `index`."""
    return [run["evaluations"][index]["success"] for run in runs]


def mean_with_range(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def table(records: Sequence[Record]) -> str:
    steps = [evaluation["step"] for evaluation in runs_of_arm(records, "window")[0]["evaluations"]]
    columns = " | ".join("before" if step == 0 else f"step {step}" for step in steps)
    lines = [f"| | {columns} | reward at the end | segments | turns |", "|---|" + "---|" * (len(steps) + 3)]
    for arm in LONG_CONTEXTS:
        runs = runs_of_arm(records, arm)
        cells = [percent_with_range(successes(runs, index)) for index in range(len(steps))]
        cells.append(percent_with_range([run["evaluations"][-1]["reward"] for run in runs]))
        cells.append(mean_with_range([run["curves"].get("segments/per_episode", [1.0])[-1] for run in runs]))
        cells.append(mean_with_range([run["curves"]["turns/mean"][-1] for run in runs]))
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def claim(records: Sequence[Record]) -> str:
    """Say what each context reached, and whether every seed of both contexts beats every seed of truncation."""
    end = {arm: successes(runs_of_arm(records, arm), -1) for arm in LONG_CONTEXTS}
    start = {arm: successes(runs_of_arm(records, arm), 0) for arm in LONG_CONTEXTS}
    managed = [value for arm, values in end.items() if arm != "truncation" for value in values]
    apart = min(managed) > max(end["truncation"])
    sentences = [
        f"{arm} learns from {100 * statistics.fmean(start[arm]):.0f} to {100 * statistics.fmean(end[arm]):.0f}%"
        for arm in ("window", "summary")
    ]
    cut = f"truncation reaches {100 * statistics.fmean(end['truncation']):.0f}%"
    verdict = (
        "The worst seed of window and summary is above the best of truncation."
        if apart
        else "The seeds of truncation and of the others overlap."
    )
    return f"Held-out success: {', '.join(sentences)}; {cut}.\n{verdict}"


def page(records: list[Record]) -> str:
    runs = [run for arm in LONG_CONTEXTS for run in runs_of_arm(records, arm)]
    episodes = runs[0]["evaluations"][-1]["episodes"]
    low, high = wilson_interval(episodes // 2, episodes)
    limits = [
        "- A tiny model from scratch and a task that needs little memory: a maze of nine rooms. It shows that long",
        "  episodes play and learn, not that summaries carry knowledge.",
        f"- {episodes} episodes per evaluation: a rate of 50% has a 95% interval of {100 * low:.0f} to "
        f"{100 * high:.0f}%.",
        "- Equal steps are not equal tokens: truncated episodes are shorter.",
        *completeness(records, "long-context"),
    ]
    minutes = [run["seconds"] / 60 for run in runs]
    return PAGE.format(
        claim=claim(records),
        table=table(records),
        episodes=episodes,
        seeds=len({run["seed"] for run in runs}),
        steps=runs[0]["steps"],
        minutes=f"{min(minutes):.0f} to {max(minutes):.0f}",
        limits="\n".join(limits),
    )


def draw(records: Sequence[Record], path: Path) -> None:
    figure, ((axes,),) = new_figure(1, 1, 6.4, 3.6)
    for arm, colour in COLOURS.items():
        curves = [
            ([e["step"] for e in run["evaluations"]], [e["success"] for e in run["evaluations"]])
            for run in runs_of_arm(records, arm)
        ]
        draw_seeds(axes, curves, colour, arm)
    axes.set_xlabel("training step", fontsize=9)
    label_y_in_percent(axes, "held-out success")
    set_title(axes, "Tours of twelve mazes, 200 turns in 2,048 tokens: mean and every seed")
    draw_legend(axes)
    figure.savefig(path)


if __name__ == "__main__":
    write_page("long-context", __doc__, page, draw)
