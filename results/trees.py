"""Write docs/results/trees.md and its figure from the records of the study `trees`.

python results/trees.py [--results results] [--docs docs]
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from figures import draw_legend, draw_seeds, label_y_in_percent, new_figure, set_title
from records import Record, curve, describe_missing, interpolate, percent_with_range, runs_of
from studies import TREE_ARMS
from study_page import write_page

COLOURS = {"chains": "#c2410c", "trees": "#0f766e"}
POINTS = 4
"""Equal shares of the budget at which success is read."""
PAGE = """# Trees against chains

{claim}

![Held-out success against sampled tokens, for chains and trees](../images/trees.png)

{table}

Success is that of 40 held-out episodes, interpolated between evaluations; the range is over seeds. A shared token is
counted once, where it was sampled.

## How to repeat it

```
python results/study.py trees --jobs 2 --device cpu
python results/trees.py
```

KeyDoor's layouts of three turns, {seeds} seeds, all from one model that imitates random play
(`recipes/evidence/keydoor-base.toml`, `keydoor-rl.toml`). *chains*: eight episodes of each task. *trees*: four episodes
of each task and one continuation of each from a random turn ([trees](../guides/trees.md)).

TextCraft and SearchQA with models of 0.5B and 1.5B parameters need a GPU:

```
python results/study.py qwen-trees --device cuda --model 0.5B=FOLDER --model FOLDER
```

## Limits

{limits}
"""


def runs_by_seed(records: Sequence[Record]) -> list[Record]:
    """Return the runs of both arms, without the starting model."""
    return sorted((r for r in runs_of(records) if r["arm"] in TREE_ARMS), key=lambda record: record["seed"])


def success_at_tokens(records: Sequence[Record], arm: str, tokens: float) -> list[float]:
    return [interpolate(*curve(record, "success"), tokens) for record in records if record["arm"] == arm]


def points(records: Sequence[Record]) -> list[float]:
    """Return the numbers of tokens to compare at: equal shares of what every run has sampled."""
    most = min(record["evaluations"][-1]["sampled_tokens"] for record in records)
    return [most * (k + 1) / POINTS for k in range(POINTS)]


def table(records: Sequence[Record]) -> str:
    columns = points(records)
    heads = " | ".join(f"{tokens / 1000:.1f}k tokens" for tokens in columns)
    lines = [f"| | steps | endings per 1,000 tokens | {heads} |", "|---|---|---|" + "---|" * len(columns)]
    for arm in TREE_ARMS:
        runs = [record for record in records if record["arm"] == arm]
        steps = statistics.fmean(record["steps"] for record in runs)
        endings = statistics.fmean(
            1000 * sum(record["curves"]["episodes/usable"]) / record["sampled_tokens"] for record in runs
        )
        cells = [percent_with_range(success_at_tokens(records, arm, tokens)) for tokens in columns]
        lines.append(f"| {arm} | {steps:.0f} | {endings:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def claim(records: Sequence[Record]) -> str:
    """Say how both arms did at the end, and whether the seeds tell them apart."""
    end = points(records)[-1]
    chains, trees = (success_at_tokens(records, arm, end) for arm in TREE_ARMS)
    better = sum(b > a for a, b in zip(chains, trees, strict=True))
    apart = min(trees) > max(chains) or min(chains) > max(trees)
    return (
        f"After {end / 1000:.0f}k sampled tokens of KeyDoor, trees reach {100 * statistics.fmean(trees):.0f}% held-out "
        f"success\n"
        f"and chains {100 * statistics.fmean(chains):.0f}%; trees are ahead in {better} of {len(trees)} seeds. "
        f"{'No seed of one reaches the other.' if apart else 'The seeds of both overlap: this shows no difference.'}"
    )


def page(records: list[Record]) -> str:
    missing, runs = describe_missing("trees", records), runs_by_seed(records)
    limits = [
        "- A tiny model, an easy game and few seeds: it says little about language models.",
        "- Equal sampled tokens are not equal time: rounds of branching wait for each other.",
        *([f"- {missing[0].upper()}{missing[1:]}."] if missing else []),
    ]
    seeds = len({record["seed"] for record in runs})
    return PAGE.format(claim=claim(runs), table=table(runs), seeds=seeds, limits="\n".join(limits))


def draw(records: Sequence[Record], path: Path) -> None:
    figure, ((axes,),) = new_figure(1, 1, 6.4, 3.6)
    for arm, colour in COLOURS.items():
        curves = [curve(record, "success") for record in runs_by_seed(records) if record["arm"] == arm]
        draw_seeds(axes, [([x / 1e3 for x in xs], ys) for xs, ys in curves], colour, arm)
    axes.set_xlabel("sampled tokens (thousands)", fontsize=9)
    label_y_in_percent(axes, "held-out success")
    set_title(axes, "KeyDoor from scratch, mean and every seed")
    draw_legend(axes)
    figure.savefig(path)


if __name__ == "__main__":
    write_page("trees", __doc__, page, draw)
