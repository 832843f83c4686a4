"""Write docs/results/against-grpo.md and its figure from the records of the study `against-grpo`.

python results/against_grpo.py [--results results] [--docs docs]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

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
from studies import AGAINST_GRPO
from study_page import write_page

TITLES = {
    "keydoor": "The groups with the largest spread of rewards",
    "lock": "Learned self-correction",
    "nim": "Self-play",
}
SETTINGS = {
    "keydoor": """KeyDoor's layouts of three turns, from one model that imitates random play. *plain* learns from all of
8 groups a step, *widest groups* from the 4 of 16 whose rewards differ most (`rl.keep_groups = 0.25`).""",
    "lock": """`examples/lock.toml`: two attempts at a lock whose sound after the first betrays the code.
*self-correction* has two stages and a bonus for improving, *plain* only the reward of the last attempt. Two independent
guesses open 5 of 9 locks.""",
    "nim": """`recipes/nim/league.toml`, evaluated against an opponent that never errs. *self-play* learns against its
last ten snapshots, *plain* against random moves.""",
}
COLOURS = ("#94a3b8", "#0f766e")
PAGE = """# Other methods against plain GRPO

Three methods beside plain GRPO on small games, at equal sampled tokens. [Trees](trees.md) and [debate](debate.md) have
pages of their own.

![Held-out success against sampled tokens, for GRPO and another method in three games](../images/against-grpo.png)

{sections}

Success is that of held-out episodes, interpolated between evaluations; the range is over {seeds} seeds.

## How to repeat it

```
python results/study.py against-grpo --jobs 2 --device cpu
python results/against_grpo.py
```

## Limits

{limits}
"""


def runs_on(records: Sequence[Record], task: str, arm: str) -> list[Record]:
    """Return the runs of an arm by seed."""
    runs = (record for record in runs_of(records) if (record["task"], record["arm"]) == (task, arm))
    return sorted(runs, key=lambda record: record["seed"])


def section(records: Sequence[Record], task: str) -> str:
    """Describe one comparison: a claim, a table and the settings."""
    arms = {arm: runs_on(records, task, arm) for arm in AGAINST_GRPO[task]}
    tokens = common_tokens([run for runs in arms.values() for run in runs])
    plain, other = (success_at_tokens(runs, tokens) for runs in arms.values())
    _, name = arms
    lines = [
        f"## {TITLES[task]}",
        "",
        f"After {tokens / 1000:.0f}k sampled tokens: {name} {100 * fmean(other):.0f}%, plain GRPO "
        f"{100 * fmean(plain):.0f}%; {compare_seeds(plain, other)}",
        "",
        f"| | steps | before | {tokens / 2000:.0f}k tokens | {tokens / 1000:.0f}k tokens |",
        "|---|---|---|---|---|",
    ]
    for arm, runs in arms.items():
        cells = [percent_with_range(success_at_tokens(runs, x)) for x in (0, tokens / 2, tokens)]
        lines.append(f"| {arm} | {fmean(record['steps'] for record in runs):.0f} | {' | '.join(cells)} |")
    if task == "lock":
        lines += ["", *attempts(arms)]
    return "\n".join([*lines, "", SETTINGS[task]])


ATTEMPTS = {
    "success_1": "attempt 1",
    "success_2": "attempt 2",
    "wrong_to_right": "wrong → right",
    "right_to_wrong": "right → wrong",
    "sampled_twice": "two first attempts",
}
"""Columns of the table of attempts, by the name in a record."""


def attempts(arms: dict[str, list[Record]]) -> list[str]:
    """Return a table of the last evaluation by attempt: whether the second beats a first one that is sampled twice."""
    lines = [f"| | {' | '.join(ATTEMPTS.values())} | attempt 2 beats two first attempts |", f"|{'---|' * 7}"]
    for arm, runs in arms.items():
        last = [run["after"]["attempts"] for run in runs]
        cells = [percent_with_range([attempt[name] for attempt in last]) for name in ATTEMPTS]
        wins = sum(attempt["success_2"] > attempt["sampled_twice"] for attempt in last)
        lines.append(f"| {arm} | {' | '.join(cells)} | {wins} of {len(runs)} seeds |")
    return lines


def page(records: list[Record]) -> str:
    limits = [
        "- Tiny models and easy games: it says little about language models.",
        *completeness(records, "against-grpo"),
    ]
    seeds = len({record["seed"] for record in runs_of(records)})
    sections = "\n\n".join(section(records, task) for task in AGAINST_GRPO)
    return PAGE.format(sections=sections, seeds=seeds, limits="\n".join(limits))


def draw(records: Sequence[Record], path: Path) -> None:
    figure, (row,) = new_figure(1, len(AGAINST_GRPO), 11.0, 3.4)
    for axes, (task, arms) in zip(row, AGAINST_GRPO.items(), strict=True):
        runs = [record for arm in arms for record in runs_on(records, task, arm)]
        draw_success(axes, runs, dict(zip(arms, COLOURS, strict=True)), task)
    figure.savefig(path)


if __name__ == "__main__":
    write_page("against-grpo", __doc__, page, draw)
