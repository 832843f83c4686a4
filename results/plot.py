"""Draw the figures and write the tables of docs/results/evidence*.md from the JSON under results/.

    python results/plot.py [--results results] [--out docs/images]

Only studies with records are drawn. Missing records are listed on the console and in tables.md. With the project's own
records the generated parts of pages are written anew, too (results/pages.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import claims
import collapse
import collapse_page
import pages
import paper
import qwen_page
import real_horizons
import real_sizes
from figures import (
    ARMS,
    HORIZONS,
    TRIES,
    TURNS_PER_TRY,
    draw_bars,
    draw_curves,
    draw_legend,
    draw_sizes,
    draw_tries,
    draw_turns,
    label_y,
    label_y_in_percent,
    new_figure,
    set_title,
    share_y_limits,
    title_of,
)
from jobs import RANDOM
from qwen_studies import SMALL_SEEDS
from records import (
    Record,
    describe_missing,
    evaluations_of,
    final_success,
    item_rates,
    read_records,
    runs_of,
    success_at,
    turns_of,
)
from studies import SIZES
from tables import (
    agents_table,
    arms_table,
    before_after_table,
    by_arm,
    contributions_table,
    equal_steps_table,
    gains_table,
    items_table,
    kinds_table,
    mean_and_range,
    mean_success_since_first_evaluations,
    paired_table,
    seed_means_table,
    stages_table,
)

from agentgym_rl.run.plots import INK

PANELS = (
    ("success", "held-out success", "success"),
    ("turns/mean", "turns used in training", "turns per episode"),
    ("truncated/rate", "truncated episodes", "share of episodes"),
    ("entropy/mean", "token entropy", "nats"),
    ("actions/repeated_rate", "repeated actions", "share of actions"),
    ("groups/zero_variance", "groups with equal rewards", "share of groups"),
)
"""Metric, title and y label of each panel. Shares are drawn in percent."""
PANELS_PER_ROW = 3


def rl_over_base(records: list[Record], out: Path) -> list[str]:
    evaluated = evaluations_of(records)
    if not evaluated:
        return ["No agent has an evaluation so far."]
    tasks = sorted({r["task"] for r in evaluated})
    figure, grid = new_figure(1, len(tasks), 5.2 * len(tasks), 3.4)
    for axes, task in zip(grid[0], tasks, strict=True):
        draw_bars(axes, evaluated, task)
        label_y_in_percent(axes, "held-out success")
        set_title(axes, f"{title_of(task)}: SmolLM2-135M, success with 95% intervals")
    share_y_limits(grid[0])
    figure.savefig(out / "evidence-base.png")
    pairs = [("RL", "base"), ("SFT + RL", "SFT")]
    return [
        *(*agents_table(evaluated, list(ARMS)), "", "On the same items:", "", *items_table(evaluated, pairs)),
        *("", "By kind of item:", "", *kinds_table(evaluated, list(ARMS))),
        *("", "RL runs, on their own evaluations:", "", *before_after_table(rl_runs(runs_of(records)))),
    ]


def rl_runs(runs: Sequence[Record]) -> list[Record]:
    return [r for r in runs if r["arm"] not in ("SFT", "base")]


def horizons(records: list[Record], out: Path) -> list[str]:
    """Draw the metrics of PANELS against sampled tokens, a block per task, and return the tables."""
    runs = [r for r in runs_of(records) if r["arm"] in HORIZONS]
    if not runs:
        return ["Only starting models have records so far."]
    draw_horizons(runs, out / "evidence-horizons.png")
    staged = [(a, b) for a in ("staged", "adaptive") for b in ("fixed-short", "fixed-long")]
    tables = [*arms_table(runs, list(HORIZONS)), "", "Success at the end of the budget:"]
    tables += ["", *paired_table(runs, staged, final_success)]
    for task in sorted({r["task"] for r in runs}):
        task_runs = [r for r in runs if r["task"] == task]
        tables += ["", f"{title_of(task)} alone:", "", *paired_table(task_runs, staged, final_success)]
    tables += ["", "Mean success after every arm's first evaluation:", ""]
    tables += paired_table(runs, staged, mean_success_since_first_evaluations(runs))
    tables += ["", "At equal steps:", "", *equal_steps_table(runs, list(HORIZONS))]
    return [*tables, "", *training_signals(runs)]


def conditions(
    records: list[Record], out: Path, picture: str = "evidence-conditions.png", note: str = "the first row decides"
) -> list[str]:
    """Compare the arms on tasks that rarely end within a short horizon, with 1,200 episodes per agent."""
    runs = [r for r in runs_of(records) if r["arm"] in HORIZONS]
    if not runs:
        return ["Only starting models have records so far."]
    draw_horizons(runs, out / picture)
    agents = [r for r in evaluations_of(records) if r["arm"] in (*HORIZONS, RANDOM)]
    success = {(r["task"], r["arm"], r["seed"]): success_at(r, turns_of(r)[-1]) for r in agents}
    evaluated = [r for r in runs if (r["task"], r["arm"], r["seed"]) in success]
    lines = [*arms_table(runs, list(HORIZONS)), "", "Success of the last model, four episodes per item:", ""]
    lines += agents_table(agents, [*HORIZONS, RANDOM])
    for task in sorted({r["task"] for r in evaluated}):
        task_runs = [r for r in evaluated if r["task"] == task]
        lines += ["", f"The last models, {task}; {note}:", ""]
        tables = [
            paired_table(task_runs, [("staged", arm)], lambda r: success[r["task"], r["arm"], r["seed"]])
            for arm in HORIZONS
            if arm.startswith("fixed")
        ]
        lines += tables[0][:2] + [line for table in tables for line in table[2:]]
        task_agents = [r for r in agents if r["task"] == task]
        lines += ["", *kinds_table(task_agents, [*HORIZONS, RANDOM])]
        lines += ["", *contributions_table(task_agents, "staged", "fixed-long")]
    lines += ["", "At equal steps:", "", *equal_steps_table(runs, list(HORIZONS))]
    return [*lines, "", *training_signals(runs)]


def settings(records: list[Record], out: Path) -> list[str]:
    return conditions(records, out, "evidence-settings.png", "three pairs decide nothing")


def pretrained_horizons(records: list[Record], out: Path) -> list[str]:
    """Compare the arms with a pretrained model item by item."""
    runs = [r for r in runs_of(records) if r["arm"] in HORIZONS]
    if not runs:
        return ["Only starting models have records so far."]
    draw_horizons(runs, out / "evidence-horizons-smollm2.png")
    agents = evaluations_of(records)
    pairs = [("staged", "fixed-short"), ("staged", "fixed-long")]
    return [
        *(*arms_table(runs, list(HORIZONS)), "", "All held-out goals, four samples each:", ""),
        *(*agents_table(agents, list(HORIZONS)), "", "On the same items:", "", *seed_means_table(agents, pairs)),
        *("", "By kind of item:", "", *kinds_table(agents, list(HORIZONS))),
        *("", *contributions_table(agents, "staged", "fixed-long")),
        *("", "RL runs, on their own evaluations:", "", *before_after_table(runs)),
        *("", "At equal steps:", "", *equal_steps_table(runs, list(HORIZONS))),
        *("", *training_signals(runs)),
    ]


def draw_horizons(runs: Sequence[Record], path: Path) -> None:
    horizons_figure(runs).savefig(path)


def horizons_figure(runs: Sequence[Record]) -> Any:
    """Return a figure with two rows of panels per task and the same y limits for the same measure."""
    tasks = sorted({r["task"] for r in runs})
    rows = len(PANELS) // PANELS_PER_ROW
    figure, grid = new_figure(rows * len(tasks), PANELS_PER_ROW, 3.7 * PANELS_PER_ROW, 2.7 * rows * len(tasks))
    panels = [axes for row in grid for axes in row]
    for number, (name, text, label) in enumerate(PANELS):
        same_metric = panels[number :: len(PANELS)]
        for axes, task in zip(same_metric, tasks, strict=True):
            draw_curves(axes, runs, task, name)
            set_title(axes, f"{title_of(task)}: {text}")
            if label.startswith(("success", "share")):
                label_y_in_percent(axes, label)
            else:
                label_y(axes, label)
        share_y_limits(same_metric)
    handles, arms = panels[0].get_legend_handles_labels()
    figure.legend(handles, arms, loc="outside upper center", ncols=len(arms), fontsize=9, frameon=False, labelcolor=INK)
    figure.supxlabel("tokens sampled, thousands", fontsize=9, color=INK)
    return figure


def training_signals(runs: Sequence[Record]) -> list[str]:
    """Return tables of the training metrics by stage and of the doctor's findings."""
    return [
        *("By stage, means over seeds:", "", *stages_table(runs, list(HORIZONS))),
        *("", "Runs with each finding of the doctor:", "", *findings_table(runs)),
    ]


def findings_table(runs: Sequence[Record]) -> list[str]:
    """Return the number of runs of each arm with each finding of the doctor."""
    kinds = sorted({f["rule"] for r in runs for f in r["findings"]})
    if not kinds:
        return ["No run has a finding."]
    lines = [f"| task | arm | runs | {' | '.join(kinds)} |", "|---|---|---|" + "---|" * len(kinds)]
    for task, arm, arm_runs in by_arm(runs, list(HORIZONS)):
        rules = [{f["rule"] for f in r["findings"]} for r in arm_runs]
        counts = " | ".join(str(sum(kind in run_rules for run_rules in rules)) for kind in kinds)
        lines.append(f"| {task} | {arm} | {len(arm_runs)} | {counts} |")
    return lines


def interaction(records: list[Record], out: Path) -> list[str]:
    """Draw success against turns and size and pass@k, and return the tables with the two compared gains."""
    evaluated = evaluations_of(records)
    if not evaluated:
        return ["No agent has an evaluation so far."]
    trained = [r for r in evaluated if r["arm"].startswith("staged")]
    figure, grid = new_figure(1, 3, 14.5, 4.6)
    by_turns, by_size, tries = grid[0]
    arms = (("base", "--"), ("staged", "-"))
    draw_turns(by_turns, evaluated, arms)
    set_title(by_turns, "held-out success against turns, bars from lowest to highest seed")
    draw_sizes(by_size, evaluated, arms)
    set_title(by_size, "the same against size; left: base, right: trained")
    draw_tries(tries, trained)
    set_title(tries, f"trained: one long episode, or tries of {TURNS_PER_TRY} turns (pass@k)")
    for axes in grid[0]:
        label_y_in_percent(axes, "held-out success")
    share_y_limits(grid[0])
    draw_legend(by_turns, 3)
    draw_legend(tries, 3)
    figure.savefig(out / "evidence-interaction.png")
    turns = turns_of(evaluated[0])
    lines = [f"| agent | {' | '.join(map(str, turns))} turns |", "|---|" + "---|" * len(turns)]
    agents = [RANDOM, *(f"{arm} {size}" for size in SIZES for arm in ("base", "staged"))]
    by_agent = {agent: [r for r in evaluated if r["arm"] == agent] for agent in agents}
    for agent, seeds in by_agent.items():
        if seeds:
            rates = (mean_and_range([success_at(r, t) for r in seeds]) for t in turns)
            lines.append(f"| {agent} | {' | '.join(rates)} |")
    lines += ["", f"pass@k, tries of {TURNS_PER_TRY} turns:", ""]
    lines += [f"| agent | {' | '.join(f'k = {k}' for k in TRIES)} |", "|---|" + "---|" * len(TRIES)]
    for agent, seeds in by_agent.items():
        if seeds and all(item_rates(r, TURNS_PER_TRY, TRIES[-1]) for r in seeds):
            rates = (mean_and_range([success_at(r, TURNS_PER_TRY, k) for r in seeds]) for k in TRIES)
            lines.append(f"| {agent} | {' | '.join(rates)} |")
    return [*lines, "", *gains_table(evaluated)]


def ablations(records: list[Record], out: Path) -> list[str]:
    runs = [r for r in runs_of(records) if r["arm"] != "base"]
    if not runs:
        return ["Only starting models have records so far."]
    arms = sorted({r["arm"] for r in runs} - {"unchanged"})
    pairs = [(arm, "unchanged") for arm in arms]
    return [*arms_table(runs, ["unchanged", *arms]), "", *paired_table(runs, pairs, final_success)]


def real_model(task: str, records: list[Record], out: Path, size: str = "1.5B") -> list[str]:
    """Draw a task's success over steps, tokens and seconds if arms can be compared, and return its tables."""
    runs = paper.runs_with_evaluations(records, task, list(HORIZONS))
    if len({r["arm"] for r in runs}) > 1:
        figure, grid = new_figure(1, len(paper.AXES), 3.7 * len(paper.AXES), 3.2)
        paper.draw_curves(grid[0], runs, task, HORIZONS)
        for axes, label in zip(grid[0], paper.AXES, strict=True):
            axes.set_xlabel(label, fontsize=9, color=INK)
            label_y_in_percent(axes, "held-out success")
        set_title(grid[0][0], f"{title_of(task)}, Qwen2.5-Coder-{size}")
        share_y_limits(grid[0])
        draw_legend(grid[0][0], 2)
        figure.savefig(out / (f"paper-{task}.png" if size == "1.5B" else f"paper-{task}-{size}.png"))
    lines = [*paper.kinds_table(records, task), "", *paper.costs_table(records, task)]
    lines += ["", *paper.arms_against_staged(records, task)]
    return [*lines, "", "Behaviour in training, by stage:", "", *paper.behaviour_table(records, task)]


def small_model(records: list[Record], out: Path) -> list[str]:
    """Return the tables of the 0.5B model's horizons, with the verdict of results/qwen-babyai-0.5B/PROTOCOL.md."""
    records = real_horizons.of_rule(records)
    if not records:
        return ["Only runs that were known before the rule have records so far."]
    lines = real_model("babyai", records, out, size="0.5B")
    return [*lines, "", *collapse.report_of(records, "babyai", real_horizons.ARMS, len(SMALL_SEEDS))]


def tables_of_real_sizes(records: list[Record], out: Path) -> list[str]:
    return paper.interaction_tables(records)


def collapse_study(records: list[Record], out: Path) -> list[str]:
    return collapse.report(records)


STUDIES: dict[str, tuple[str, Callable[[list[Record], Path], list[str]]]] = {
    **{f"qwen-{task}": (f"{title_of(task)} with Qwen2.5-Coder-1.5B", partial(real_model, task)) for task in paper.QWEN},
    "qwen-babyai-0.5B": ("Claim B with Qwen2.5-Coder-0.5B on BabyAI", small_model),
    "qwen-interaction": ("Claim C with real models: turns and parameters", tables_of_real_sizes),
    "collapse": ("Claim B where collapse can happen", collapse_study),
    "rl-over-base": ("Claim A: RL over its base model", rl_over_base),
    "staged-horizon": ("Claim B: horizons", horizons),
    "horizon-conditions": ("Claim B under other conditions", conditions),
    "horizon-settings": ("Claim B under other settings", settings),
    "horizon-smollm2": ("Claim B with SmolLM2", pretrained_horizons),
    "interaction": ("Claim C: turns and parameters", interaction),
    "ablations": ("Ablations", ablations),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs/images")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    text: list[str] = []
    records = {name: read_records(options.results, name) for name in STUDIES}
    suite = [r for task in paper.QWEN for r in records[f"qwen-{task}"]]
    if evaluations_of(suite):
        text += ["## The paper's table", "", *paper.main_table(suite), "", *paper.over_base_table(suite), ""]
        transfers = read_records(options.results, "qwen-generalisation")
        text += [*paper.generalisation_table(transfers, suite), ""] if transfers else []
    for name, (heading, draw) in STUDIES.items():
        if records[name]:
            text += [f"## {heading}", "", *draw(records[name], options.out), ""]
            if missing := describe_missing(name, records[name]):
                text += [f"Not complete: {missing}.", ""]
        else:
            print(f"{name}: no results yet")
    for name, draw_claim in claims.PICTURES.items():
        print(f"{name}: {'drawn' if draw_claim(records, options.out / name) else 'not drawn, no results yet'}")
    drawn = qwen_page.draw(qwen_page.read(options.results), options.out / qwen_page.PICTURE)
    print(f"{qwen_page.PICTURE}: {'drawn' if drawn else 'not drawn, no results yet'}")
    drawn = real_sizes.draw(real_sizes.read(options.results), options.out / real_sizes.PICTURE)
    print(f"{real_sizes.PICTURE}: {'drawn' if drawn else 'not drawn, no results yet'}")
    drawn = collapse_page.draw(options.results, options.out / collapse_page.PICTURE)
    print(f"{collapse_page.PICTURE}: {'drawn' if drawn else 'not drawn, no results yet'}")
    if options.results.resolve() == pages.RESULTS:
        pages.write()
    if text:
        (options.results / "tables.md").write_text("\n".join(text))
        print("\n".join(text))


if __name__ == "__main__":
    main()
