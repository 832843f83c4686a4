"""Write docs/results/debate.md and its figure from the records of the studies `debate` and `qwen-debate`.

python results/debate.py [--results results] [--docs docs]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from figures import draw_legend, draw_seeds, label_y_in_percent, new_figure, set_title
from records import Record, completeness, final_success, percent_with_range, runs_of
from studies import DEBATE_ARMS
from study_page import write_page

ALONE = "alone"
STUDIES = {
    "debate": ("Invented kingdoms, a tiny model", DEBATE_ARMS),
    "qwen-debate": ("SearchQA, Qwen2.5-Coder-1.5B", (ALONE, "debate")),
}
"""Title and arms by study."""
DEBATERS = {"debate": "debaters that learn"}
"""Rows of the tables whose arm says too little."""
COLOURS = dict(zip((*DEBATE_ARMS, "debate"), ("#94a3b8", "#0f766e", "#c2410c", "#0f766e"), strict=True))
PAGE = """# Does a judge learn from a debate?

![Held-out success of the judge over training steps, alone and with debaters](../images/debate.png)

{sections}

Success is that of held-out questions; the range is over seeds.

## How to repeat it

```
python results/study.py debate --jobs 2 --device cpu
python results/study.py qwen-debate --device cuda --model FOLDER
python results/debate.py
```

**Invented kingdoms.** A question asks whether the flag of a kingdom is red or blue. Held-out kingdoms are new, so the
judge alone can only guess. A debater quotes one of two passages: that of the kingdom, or that of another kingdom with
the colour that it defends. Only quotes reach the judge (`recipes/evidence/debate-judge.toml`,
[debate](../reference/environments/debate.md)).

- *alone*: the judge hears nothing.
- *quotes at random*: either passage, even if it speaks against the debater's own answer. The colour that is named more
  often is then right in 75% of the debates, and the best judge in 88%.
- *quotes for its answer*: the passage with the colour that the debater defends. The judge must find out which of two
  quotes is about the question.

**SearchQA.** The built-in questions, one round, and one model that learns to argue and to judge, from the base model
(`recipes/qwen/debate.toml`). *alone*: the same judge learns without arguments.

## Limits

{limits}
"""


def arm_of(records: Sequence[Record], study: str, arm: str) -> list[Record]:
    """Return the runs of an arm by seed."""
    runs = (r for r in runs_of(records) if (r["study"], r["arm"]) == (study, arm))
    return sorted(runs, key=lambda record: record["seed"])


def complete_studies(records: Sequence[Record]) -> list[str]:
    """Return the studies with a run of every arm."""
    return [study for study, (_, arms) in STUDIES.items() if all(arm_of(records, study, arm) for arm in arms)]


def table(records: Sequence[Record], study: str) -> str:
    lines = ["| debaters | before | after | questions | seeds |", "|---|---|---|---|---|"]
    for arm in STUDIES[study][1]:
        runs = arm_of(records, study, arm)
        before = percent_with_range([record["evaluations"][0]["success"] for record in runs])
        after = percent_with_range([final_success(record) for record in runs])
        episodes = runs[0]["evaluations"][-1]["episodes"]
        lines.append(f"| {DEBATERS.get(arm, arm)} | {before} | {after} | {episodes} | {len(runs)} |")
    return "\n".join(lines)


def claim(records: Sequence[Record], study: str) -> str:
    """Say how often each judge is right at the end, and whether the seeds tell it from the one alone."""
    alone = [final_success(record) for record in arm_of(records, study, ALONE)]
    sentences = [f"After training alone, a judge is right in {100 * fmean(alone):.0f}% of held-out questions."]
    for arm in (arm for arm in STUDIES[study][1] if arm != ALONE):
        heard = [final_success(record) for record in arm_of(records, study, arm)]
        apart = "above every seed alone" if min(heard) > max(alone) else "not apart from alone"
        who = "debaters that learn" if arm == "debate" else f"a debater that {arm}"
        sentences.append(f"With {who}: {100 * fmean(heard):.0f}%, {apart}.")
    return "\n".join(sentences)


def page(records: list[Record]) -> str:
    studies = complete_studies(records)
    sections = [f"## {STUDIES[study][0]}\n\n{claim(records, study)}\n\n{table(records, study)}" for study in studies]
    limits = [
        "- Kingdoms: a tiny model from scratch, one round, and debaters that do not learn. It says little about",
        "  language models.",
        "- SearchQA: alone, the judge gives as many right answers as with debaters. The model seems to know the",
        "  built-in geography, so that a debate has little to add; questions that it cannot know would ask more.",
        *completeness(records, *STUDIES),
    ]
    return PAGE.format(sections="\n\n".join(sections), limits="\n".join(limits))


def draw(records: Sequence[Record], path: Path) -> None:
    studies = complete_studies(records)
    figure, (row,) = new_figure(1, len(studies), 1.4 + 5.0 * len(studies), 3.6)
    for axes, study in zip(row, studies, strict=True):
        title, arms = STUDIES[study]
        for arm in arms:
            evaluations = [record["evaluations"] for record in arm_of(records, study, arm)]
            curves = [([e["step"] for e in rows], [e["success"] for e in rows]) for rows in evaluations]
            draw_seeds(axes, curves, COLOURS[arm], DEBATERS.get(arm, arm))
        axes.set_xlabel("training steps", fontsize=9)
        label_y_in_percent(axes, "held-out success of the judge")
        set_title(axes, title)
        draw_legend(axes)
    figure.savefig(path)


if __name__ == "__main__":
    write_page("debate", __doc__, page, draw, "qwen-debate")
