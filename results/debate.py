"""Write docs/results/debate.md and its figure from the records of the study `debate`.

python results/debate.py [--results results] [--docs docs]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from figures import draw_legend, draw_seeds, label_y_in_percent, new_figure, set_title
from records import Record, describe_missing, final_success, percent_with_range, runs_of
from studies import DEBATE_ARMS
from study_page import write_page

ALONE = "alone"
COLOURS = dict(zip(DEBATE_ARMS, ("#94a3b8", "#0f766e", "#c2410c"), strict=True))
PAGE = """# Does a judge learn from a debate?

{claim}

![Held-out success of the judge over training steps, alone and with debaters](../images/debate.png)

{table}

Success is that of {episodes} held-out questions; the range is over {seeds} seeds.

## How to repeat it

```
python results/study.py debate --jobs 2 --device cpu
python results/debate.py
```

A question asks whether the flag of an invented kingdom is red or blue. Held-out kingdoms are new, so the judge alone
can only guess. A debater quotes one of two passages: that of the kingdom, or that of another kingdom with the colour
that it defends. Only quotes reach the judge (`recipes/evidence/debate-judge.toml`,
[debate](../reference/environments/debate.md)).

- *alone*: the judge hears nothing.
- *quotes at random*: either passage, even if it speaks against the debater's own answer. The colour that is named more
  often is then right in 75% of the debates, and the best judge in 88%.
- *quotes for its answer*: the passage with the colour that the debater defends. The judge must find out which of two
  quotes is about the question.

Questions of SearchQA and debaters that learn, with a model of 1.5B parameters, need a GPU:

```
python results/study.py qwen-debate --device cuda --model FOLDER
```

## Limits

{limits}
"""


def arm_of(records: Sequence[Record], arm: str) -> list[Record]:
    """Return the runs of an arm by seed."""
    return sorted((r for r in runs_of(records) if r["arm"] == arm), key=lambda record: record["seed"])


def table(records: Sequence[Record]) -> str:
    lines = ["| debaters | before | after |", "|---|---|---|"]
    for arm in DEBATE_ARMS:
        runs = arm_of(records, arm)
        before = percent_with_range([record["evaluations"][0]["success"] for record in runs])
        lines.append(f"| {arm} | {before} | {percent_with_range([final_success(record) for record in runs])} |")
    return "\n".join(lines)


def claim(records: Sequence[Record]) -> str:
    """Say how often each judge is right at the end, and whether the seeds tell it from the one alone."""
    alone = [final_success(record) for record in arm_of(records, ALONE)]
    sentences = [f"After training alone, a judge is right in {100 * fmean(alone):.0f}% of held-out questions."]
    for arm in (arm for arm in DEBATE_ARMS if arm != ALONE):
        heard = [final_success(record) for record in arm_of(records, arm)]
        apart = "above every seed alone" if min(heard) > max(alone) else "not apart from alone"
        sentences.append(f"With a debater that {arm}: {100 * fmean(heard):.0f}%, {apart}.")
    return "\n".join(sentences)


def page(records: list[Record]) -> str:
    missing, runs = describe_missing("debate", records), runs_of(records)
    limits = [
        "- A tiny model from scratch, one round, and debaters that do not learn: it says little about language models.",
        *([f"- {missing[0].upper()}{missing[1:]}."] if missing else []),
    ]
    return PAGE.format(
        claim=claim(records),
        table=table(records),
        episodes=runs[0]["evaluations"][-1]["episodes"],
        seeds=len({record["seed"] for record in runs}),
        limits="\n".join(limits),
    )


def draw(records: Sequence[Record], path: Path) -> None:
    figure, ((axes,),) = new_figure(1, 1, 6.4, 3.6)
    for arm, colour in COLOURS.items():
        evaluations = [record["evaluations"] for record in arm_of(records, arm)]
        curves = [([e["step"] for e in rows], [e["success"] for e in rows]) for rows in evaluations]
        draw_seeds(axes, curves, colour, arm)
    axes.set_xlabel("training steps", fontsize=9)
    label_y_in_percent(axes, "held-out success of the judge")
    set_title(axes, "Debate about invented kingdoms, mean and every seed")
    draw_legend(axes)
    figure.savefig(path)


if __name__ == "__main__":
    write_page("debate", __doc__, page, draw)
