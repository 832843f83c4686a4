"""Write the page `teachers` of the results and its figure from the records of the study of that name.

python results/teachers.py [--results results] [--docs docs]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from figures import draw_success, new_figure
from paper import rate_cell
from records import Record, compare_seeds, describe_missing, evaluations_of, runs_of, success_at, turns_of
from study_page import write_page

COLOURS = {"fixed-long": "#c2410c", "staged": "#0f766e"}
TASKS = {"textcraft": "TextCraft", "babyai": "BabyAI"}
TABLES = {
    "DAgger": {
        "DAgger": "actions and corrected thoughts",
        "DAgger, actions only": "actions",
    },
    "Judged rewards": {
        "exact match": "exact match (judged, but not paid)",
        "judged": "exact match and the judge's score",
    },
}
"""Rows of the tables without students, by heading and arm."""
STUDENTS = {
    "base 0.5B": "0.5B before training",
    "fixed-long": "0.5B, distilled under the long horizon",
    "staged": "0.5B, distilled under the staged horizon",
    "teacher": "1.5B, the teacher",
}
"""Rows of a table of distillation by arm."""
PAGE = """# Teachers and judges

Held-out success with 95% intervals over items and the range of the seeds, from records.

{sections}

## How to repeat it

```
python results/study.py teachers --device cuda --model QWEN-1.5B --model 0.5B=QWEN-0.5B --model 135M=SMOLLM2
python results/teachers.py
```

- **Distillation**: the teacher is Qwen2.5-Coder-1.5B-Instruct after 50 steps of GRPO as LoRA adapters, under the first
  stage of the horizon. Students are Qwen2.5-Coder-0.5B-Instruct; each samples a million tokens
  ([distillation](../guides/distillation.md)).
- **DAgger**: SmolLM2-135M on TextCraft, depths 1 and 2, four rounds (`recipes/smollm2/textcraft_dagger.toml`).
- **Judged rewards**: 40 steps of GRPO of the 0.5B model on SearchQA, and the 1.5B model as the judge
  (`recipes/searchqa/judged.toml`, [rewards](../guides/rewards.md)).

## Limits

{limits}
"""


def agents_of(records: Sequence[Record], task: str, arm: str) -> list[Record]:
    """Return the evaluations of an arm by seed."""
    found = [r for r in evaluations_of(records) if (r["task"], r["arm"]) == (task, arm)]
    return sorted(found, key=lambda record: int(record["seed"]))


def table(records: Sequence[Record], task: str, rows: dict[str, str]) -> str:
    lines = ["| agent | success |", "|---|---|"]
    for arm, title in rows.items():
        if agents := agents_of(records, task, arm):
            lines.append(f"| {title} | {rate_cell(agents)} |")
    return "\n".join(lines)


def rates_of_seeds(agents: Sequence[Record], seeds: Sequence[int]) -> list[float]:
    return [success_at(agent, turns_of(agent)[-1]) for agent in agents if agent["seed"] in seeds]


def comparison(records: Sequence[Record], task: str, first: str, second: str) -> str:
    """Return a sentence about the seeds that both arms have, or an empty string if there are none."""
    agents = [agents_of(records, task, arm) for arm in (first, second)]
    seeds = sorted(set.intersection(*({int(r["seed"]) for r in each} for each in agents)))
    if not seeds:
        return ""
    return f"{second} is {compare_seeds(*(rates_of_seeds(each, seeds) for each in agents))}"


def distilled_tasks(records: Sequence[Record]) -> list[str]:
    """Return the tasks with a student of each horizon."""
    return [task for task in TASKS if all(agents_of(records, task, arm) for arm in COLOURS)]


def sections(records: Sequence[Record]) -> list[str]:
    parts = []
    if distilled_tasks(records):
        parts.append("![Success in training of students under both horizons](../images/teachers.png)")
    for task in distilled_tasks(records):
        sentence = comparison(records, task, "fixed-long", "staged")
        parts += [f"## Distillation, {TASKS[task]}", sentence, table(records, task, STUDENTS)]
    for (heading, rows), task in zip(TABLES.items(), ("textcraft", "searchqa"), strict=True):
        first, second = rows
        if sentence := comparison(records, task, first, second):
            parts += [f"## {heading}", sentence, table(records, task, rows)]
    return parts


def page(records: list[Record]) -> str:
    missing = describe_missing("teachers", records)
    limits = [
        "- Few seeds and short runs. The teacher is trained for 50 steps.",
        *([f"- {missing[0].upper()}{missing[1:]}."] if missing else []),
    ]
    return PAGE.format(sections="\n\n".join(sections(records)), limits="\n".join(limits))


def draw(records: Sequence[Record], path: Path) -> None:
    """Draw a panel for each task with students. Without students there is no figure."""
    if not (tasks := distilled_tasks(records)):
        return
    figure, (row,) = new_figure(1, len(tasks), 2.4 + 4.0 * len(tasks), 3.6)
    for axes, task in zip(row, tasks, strict=True):
        runs = [r for r in runs_of(records) if r["task"] == task]
        draw_success(axes, runs, COLOURS, TASKS[task], "success/mean")
    figure.savefig(path)


if __name__ == "__main__":
    write_page("teachers", __doc__, page, draw)
