"""Write the page `teachers` of the results and its figure from the records of the study of that name.

python results/teachers.py [--results results] [--docs docs]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from behaviour import read_rows
from figures import draw_success, new_figure
from paper import rate_cell
from records import (
    Record,
    compare_seeds,
    completeness,
    evaluations_of,
    percent_with_range,
    runs_of,
    success_at,
    turns_of,
)
from study_page import write_page

COLOURS = {"fixed-long": "#c2410c", "staged": "#0f766e"}
TASKS = {"textcraft": "TextCraft", "babyai": "BabyAI"}
STUDENTS = {
    "base 0.5B": "0.5B before training",
    "fixed-long": "0.5B, distilled under the long horizon",
    "staged": "0.5B, distilled under the staged horizon",
    "teacher": "1.5B, the teacher",
}
DAGGER = {
    "DAgger": "actions and corrected thoughts",
    "DAgger, actions only": "actions",
    "DAgger, wrong thoughts": "the first, after demonstrations with wrong thoughts",
}
JUDGED = {"exact match": "exact match; judged, but not paid", "judged": "exact match, the judge's score and length"}
"""Rows of the tables by arm."""
STUCK = 4
"""Times that an episode must end in the same command to count as stuck."""
AT_START_AND_END = 5
"""Steps whose mean is the score at the start of a run and at its end."""
RESULTS = Path(__file__).parent
Column = Callable[[Sequence[Record]], str]
"""A cell of a table for the evaluations of an arm."""
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
- **DAgger**: SmolLM2-135M on TextCraft, depths 1 and 2, four rounds (`recipes/smollm2/textcraft_dagger.toml`,
  [offline methods](../guides/offline.md)). GRPO from the same imitation is `textcraft_renamed` of
  [SmolLM2 on one GPU](smollm2.md): 77.4% (68–85), and 58 of its 65 failures end in one command.
- **Judged rewards**: 40 steps of GRPO of the 0.5B model on SearchQA, and the 1.5B model as the judge
  (`recipes/searchqa/judged.toml`, [rewards](../guides/rewards.md)). Where the judge is paid, so are short replies
  (weight 0.1). Where it is not, its rubric is a shorter one, so the scores of both rows are not to be compared.

## Limits

{limits}
"""


def agents_of(records: Sequence[Record], task: str, arm: str) -> list[Record]:
    """Return the evaluations of an arm by seed."""
    found = [r for r in evaluations_of(records) if (r["task"], r["arm"]) == (task, arm)]
    return sorted(found, key=lambda record: int(record["seed"]))


def runs_behind(records: Sequence[Record], agents: Sequence[Record]) -> list[Record]:
    """Return the runs that made some evaluated agents. A pretrained model has none."""
    evaluated = {agent["job"] for agent in agents}
    return [run for run in runs_of(records) if f"eval-{run['job']}" in evaluated]


def table(records: Sequence[Record], task: str, rows: dict[str, str], columns: Mapping[str, Column]) -> str:
    """Return a table of success and of `columns`, by their headings."""
    lines = [f"| agent | {' | '.join(['success', *columns])} |", "|---|" + "---|" * (1 + len(columns))]
    for arm, title in rows.items():
        if agents := agents_of(records, task, arm):
            cells = [rate_cell(agents), *(column(agents) for column in columns.values())]
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def mean_of_runs(records: Sequence[Record], number: str, unit: str = "") -> Column:
    """Return a column: the mean of a number of the agents' runs."""

    def cell(agents: Sequence[Record]) -> str:
        runs = runs_behind(records, agents)
        return f"{statistics.fmean(run[number] for run in runs):.0f}{unit}" if runs else "–"

    return cell


def success_before(records: Sequence[Record]) -> Column:
    """Return a column: the held-out success of the agents' runs before their first round."""

    def cell(agents: Sequence[Record]) -> str:
        return percent_with_range([run["before"]["success"] for run in runs_behind(records, agents)])

    return cell


def stuck(agents: Sequence[Record]) -> str:
    """Return how many failed episodes end in the same command several times."""
    rows = [row for agent in agents for row in read_rows(RESULTS / "teachers" / f"{agent['job']}.actions.jsonl.xz")]
    failed = [row["actions"] for row in rows if sum(row["rewards"]) <= 0]
    repeated = [a for a in failed if len(a) >= STUCK and len(set(a[-STUCK:])) == 1]
    return f"{len(repeated)} of {len(failed)}"


def recovered(agents: Sequence[Record]) -> str:
    return f"{statistics.fmean(agent['behaviour']['recovered'] for agent in agents):.0%}"


def ends_of(run: Record, curve: str) -> tuple[float, float]:
    """Return the mean of a curve's first and last steps."""
    values = run["curves"][curve]
    return statistics.fmean(values[:AT_START_AND_END]), statistics.fmean(values[-AT_START_AND_END:])


def change(records: Sequence[Record], curve: str, digits: int) -> Column:
    """Return a column: a curve at the start and at the end of the agents' runs."""

    def cell(agents: Sequence[Record]) -> str:
        ends = [ends_of(run, curve) for run in runs_behind(records, agents)]
        return ", ".join(f"{first:.{digits}f} → {last:.{digits}f}" for first, last in ends) or "–"

    return cell


def rates_of_seeds(agents: Sequence[Record], seeds: Sequence[int]) -> list[float]:
    return [success_at(agent, turns_of(agent)[-1]) for agent in agents if agent["seed"] in seeds]


def comparison(records: Sequence[Record], task: str, rows: dict[str, str], first: str, second: str) -> str:
    """Return a sentence about the seeds that both arms have, or an empty string if there are none."""
    agents = [agents_of(records, task, arm) for arm in (first, second)]
    seeds = sorted(set.intersection(*({int(r["seed"]) for r in each} for each in agents)))
    if not seeds:
        return ""
    return f"*{rows[second]}* is {compare_seeds(*(rates_of_seeds(each, seeds) for each in agents))}"


def distilled_tasks(records: Sequence[Record]) -> list[str]:
    """Return the tasks with a student of each horizon."""
    return [task for task in TASKS if all(agents_of(records, task, arm) for arm in COLOURS)]


def sections(records: Sequence[Record]) -> list[str]:
    return [*distillation(records), *dagger(records), *judged(records)]


def distillation(records: Sequence[Record]) -> list[str]:
    if not (tasks := distilled_tasks(records)):
        return []
    columns = {
        "steps": mean_of_runs(records, "steps"),
        "time": mean_of_runs(records, "seconds", " s"),
    }
    parts = ["![Success in training of students, each under its own horizon](../images/teachers.png)"]
    for task in tasks:
        sentence = comparison(records, task, STUDENTS, "fixed-long", "staged")
        parts += [f"## Distillation, {TASKS[task]}", sentence, table(records, task, STUDENTS, columns)]
    return parts


def dagger(records: Sequence[Record]) -> list[str]:
    if not (sentence := comparison(records, "textcraft", DAGGER, "DAgger, actions only", "DAgger")):
        return []
    columns = {
        "before": success_before(records),
        "refused turns followed by a valid one": recovered,
        f"failures that end in one command, {STUCK} times or more": stuck,
    }
    return ["## DAgger", sentence, table(records, "textcraft", DAGGER, columns)]


def judged(records: Sequence[Record]) -> list[str]:
    if not (sentence := comparison(records, "searchqa", JUDGED, "exact match", "judged")):
        return []
    columns = {
        "judge's score in training": change(records, "judged/rubric", 2),
        "turns in training": change(records, "turns/mean", 1),
    }
    return ["## Judged rewards", sentence, table(records, "searchqa", JUDGED, columns), *fooled(records)]


def fooled(records: Sequence[Record]) -> list[str]:
    """Say so if the judge praises answers without a search, which its rubric asks for."""
    runs = [run for run in runs_of(records) if (run["task"], run["arm"]) == ("searchqa", "judged")]
    if not any(ends_of(run, "judged/rubric")[1] > 0.9 and ends_of(run, "turns/mean")[1] < 1.1 for run in runs):
        return []
    return [
        "The rubric asks for searches and for an answer that follows from a passage. At the end the agent answers in\n"
        "its first turn, without a search, and the judge praises it all the same: this small judge is fooled. Read\n"
        "some judged episodes before you pay a judge."
    ]


def page(records: list[Record]) -> str:
    limits = [
        "- Few seeds and short runs. The teacher is trained for 50 steps.",
        "- Success before DAgger is that of 72 held-out episodes.",
        *completeness(records, "teachers"),
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
