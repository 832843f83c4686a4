"""Claim C with real models: comparisons before RL, picture, and the text that results/pages.py puts into pages.

results/after_rl.py has the comparisons and the sentences after RL.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import after_rl
from behaviour import Row, read_rows
from figures import draw_legend, draw_turns, label_y_in_percent, new_figure, set_title, share_y_limits
from jobs import RANDOM
from qwen_page import listed, number_word, seeds_text, wrapped
from records import Record, evaluations_of, item_rates, read_records, runs_of, turns_of
from tables import holm
from turn_limits import (
    FEW,
    LARGE,
    MANY,
    MODELS,
    NAMES,
    SMALL,
    SOME,
    TASKS,
    TRIES,
    TURNS_A_TRY,
    Comparison,
    RealSizes,
    after,
    behaviour,
    ended,
    less,
    per_episode,
    rates,
    refused,
    signed,
    solved_within,
    success,
    without_context_limit,
)

from agentgym_rl.run.plots import INK

STUDY, AGAIN = "qwen-interaction", "qwen-babyai"
"""The study, and the one with a second evaluation of the largest model."""
PICTURE = "evidence-sizes.png"
COLOURS = {"135M": "#94a3b8", "0.5B": "#2563eb", "1.5B": "#0f766e"}
ENDINGS = {
    "done": ("#0f766e", "solved"),
    "max_turns": ("#cbd2d9", "turns used up"),
    "max_context": ("#a16207", "no context left"),
    "length": ("#c2410c", "reply cut"),
}
"""Colour and label of the ways in which an episode ends."""
UNSOLVED = "#1f2933"
"""Colour of episodes that the environment ended without success."""


def read(results: Path) -> RealSizes | None:
    """Return the records, or nothing as long as one of an untrained model is missing."""
    agents: dict[tuple[str, str], list[Record]] = {}
    records = read_records(results, STUDY)
    for record in evaluations_of(records):
        kind, _, size = record["arm"].partition(" ")
        if record["arm"] == RANDOM:
            agents.setdefault((record["task"], RANDOM), []).append(record)
        elif kind in ("base", "staged") and size in MODELS:
            agents.setdefault((record["task"], size if kind == "base" else after(size)), []).append(record)
    if any((task, size) not in agents for task in TASKS for size in (RANDOM, *MODELS)):
        return None
    episodes = {
        key: [row for r in seeds for row in read_rows(results / STUDY / f"{r['job']}.actions.jsonl.xz")]
        for key, seeds in agents.items()
    }
    again = [r for r in evaluations_of(read_records(results, AGAIN)) if r["arm"] == "base"]
    runs = {record["job"]: record for record in runs_of(records)}
    suite = {task: read_suite(results, task) for task in TASKS if (task, after(LARGE)) in agents}
    return RealSizes(agents, episodes, again[0] if again else None, runs, {t: s for t, s in suite.items() if s[1]})


def read_suite(results: Path, task: str) -> tuple[int, dict[int, list[Row]]]:
    """Return the limit of turns of the paper's table and its episodes after RL by seed."""
    folder = results / f"qwen-{task}"
    records = [r for r in evaluations_of(read_records(results, folder.name)) if r["arm"] == "staged"]
    files = {record["seed"]: folder / f"{record['job']}.actions.jsonl.xz" for record in records}
    turns = max((max(turns_of(record)) for record in records), default=0)
    return turns, {seed: list(read_rows(path)) for seed, path in sorted(files.items()) if path.exists()}


def comparisons(model: RealSizes) -> list[Comparison]:
    """Return the comparisons before RL. Holm's correction is over all of them."""
    return [comparison for task in TASKS for comparison in _of_task(model, task)]


def _of_task(model: RealSizes, task: str) -> Iterator[Comparison]:
    def of_agent(size: str, turns: int, tries: int = 1) -> dict[str, float]:
        return rates(model, task, size, turns, tries)

    for many in (MANY, SOME):
        own = less(of_agent(RANDOM, many), of_agent(RANDOM, FEW))
        for size in (SMALL, LARGE):
            gain = less(of_agent(size, many), of_agent(size, FEW))
            over = [a - b for a, b in zip(gain, own, strict=True)]
            yield Comparison(task, f"{size}: from {FEW} to {many} turns, less random play's gain", over)
    for turns in (FEW, SOME, MANY):
        name = f"from {SMALL} to {LARGE} under {turns} turns"
        yield Comparison(task, name, less(of_agent(LARGE, turns), of_agent(SMALL, turns)))
    for turns in (FEW, TURNS_A_TRY):
        name = f"{SMALL} under {MANY} turns less {LARGE} under {turns}"
        yield Comparison(task, name, less(of_agent(SMALL, MANY), of_agent(LARGE, turns)))
    for size in (SMALL, LARGE):
        name = f"{size}: best of {TRIES} tries of {TURNS_A_TRY} turns less one of {MANY}"
        yield Comparison(task, name, less(of_agent(size, TURNS_A_TRY, TRIES), of_agent(size, MANY)))


def by_name(model: RealSizes) -> dict[tuple[str, str], tuple[Comparison, float]]:
    """Return each comparison and its p after Holm, by task and name."""
    found = comparisons(model)
    adjusted = holm([c.p for c in found])
    return {(c.task, c.name): (c, p) for c, p in zip(found, adjusted, strict=True)}


def table(model: RealSizes) -> list[str]:
    """Return the table of the evidence page."""
    compared = by_name(model) | after_rl.by_name(model)
    lines = [
        f"| agent | {FEW} turns | {SOME} | {MANY} | from {FEW} to {MANY}, less random play's gain (95% interval) "
        "| p, Holm | no context left | reply cut |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task in TASKS:
        for agent, title in model.agents_of(task).items():
            cells = " | ".join(f"{success(model, task, agent, turns):.1f}%" for turns in (FEW, SOME, MANY))
            gain, endings = " | ", " | "
            name = f"{agent}: from {FEW} to {MANY} turns, less random play's gain"
            if (row := compared.get((task, name))) is not None:
                gain = f"{row[0].with_interval} | {row[1]:.2g}"
            if agent != RANDOM:
                rows = model.episodes[task, agent]
                endings = f"{ended(rows, 'max_context', MANY):.0f}% | {ended(rows, 'length', MANY):.0f}%"
            lines.append(f"| {NAMES[task]}: {title} | {cells} | {gain} | {endings} |")
    return lines


def verdict(model: RealSizes) -> str:
    gains = {
        size: success(model, "babyai", size, MANY) - success(model, "babyai", size, FEW) for size in (SMALL, LARGE)
    }
    chance = success(model, "babyai", RANDOM, MANY) - success(model, "babyai", RANDOM, FEW)
    best = max(success(model, "textcraft", size, MANY) for size in MODELS)
    return (
        f"**Not shown before RL.** From {FEW} to {MANY} turns on BabyAI the untrained {SMALL} model gains "
        f"{gains[SMALL]:.1f} points and the {LARGE} model {gains[LARGE]:.1f}; random play gains {chance:.1f}. On "
        f"TextCraft no model is above {best:.1f}%. {after_rl.verdict(model, after_rl.by_name(model))}"
    )


def caption(model: RealSizes) -> str:
    (config, *_) = (record["config"] for record in model.agents["babyai", LARGE])
    items = [len(rates(model, task, LARGE, MANY)) for task in TASKS]
    context = max(task["max_context"] for task in config["tasks"])
    trained = len(after_rl.comparisons(model))
    families = f"{len(comparisons(model))} comparisons before RL"
    if trained:
        families += f" and, apart from them, over all {trained} after RL, chosen after the records were seen"
    several = [f"{agent}: {seeds_text(records)}" for (_, agent), records in model.agents.items() if len(records) > 1]
    seeds = f" ({listed(several)})" if several else ""
    return (
        f"*One evaluation each{seeds}: {items[0]} items of BabyAI, {items[1]} of TextCraft, "
        f"{number_word(config['samples'])} samples. Dashed: before RL; bars: lowest to highest seed. Right: how "
        f"episodes under {MANY} turns end; a reply ends at "
        f"{config['max_new_tokens']} tokens, an episode at {context:,}. p is over all {families} "
        "([details](evidence-details.md#c-real-models-before-and-after-rl)).*"
    )


def facts(model: RealSizes) -> list[str]:
    """Return the list below the table."""
    before = [*sizes_and_turns(model), *tries_against_turns(model), *endings(model)]
    return [*before, *after_rl.facts(model, after_rl.by_name(model))]


def sizes_and_turns(model: RealSizes) -> list[str]:
    """Return what size brings at equal turns, and against turns."""
    compared = by_name(model)
    few, some, many = (compared["babyai", f"from {SMALL} to {LARGE} under {t} turns"] for t in (FEW, SOME, MANY))
    traded, level = (
        compared["babyai", f"{SMALL} under {MANY} turns less {LARGE} under {t}"] for t in (FEW, TURNS_A_TRY)
    )
    again = ""
    if model.again is not None:
        turns, first, second, small = under_turns_of_again(model)
        lead = Comparison("babyai", "lead", less(second, small))
        again = (
            f" But a second evaluation of the {LARGE} model lowers its lead under {turns} turns from "
            f"{signed(statistics.fmean(less(first, small)))} to {lead.points} (p = {lead.p:.2g})."
        )
    return [
        f"- **Size shows with more turns, if at all**: on BabyAI success changes from {SMALL} to {LARGE} by "
        f"{few[0].points} points under {FEW} turns, {some[0].points} under {SOME} and {many[0].with_interval} under "
        f"{MANY} (p = {many[1]:.2g}).{again}",
        f"- **Turns against size**: by claim C's test, turns less parameters, {traded[0].with_interval}, "
        f"p = {traded[1]:.2g}. Under {TURNS_A_TRY} turns the {LARGE} model has "
        f"{success(model, 'babyai', LARGE, TURNS_A_TRY):.1f}%, the {SMALL} model under {MANY} has "
        f"{success(model, 'babyai', SMALL, MANY):.1f}% (p = {level[1]:.2g}).",
    ]


def tries_against_turns(model: RealSizes) -> list[str]:
    tries = [success(model, "babyai", size, TURNS_A_TRY, TRIES) for size in (SMALL, LARGE, RANDOM)]
    one = [success(model, "babyai", size, MANY) for size in (SMALL, LARGE, RANDOM)]
    compared = by_name(model)
    names = [f"{size}: best of {TRIES} tries of {TURNS_A_TRY} turns less one of {MANY}" for size in (SMALL, LARGE)]
    p = max(compared["babyai", name][1] for name in names)
    return [
        f"- **New tries beat more turns**: the best of {number_word(TRIES)} tries of {TURNS_A_TRY} turns solves "
        f"{tries[0]:.1f}% ({SMALL}) and {tries[1]:.1f}% ({LARGE}) of BabyAI, one try of {MANY} turns {one[0]:.1f} and "
        f"{one[1]:.1f}% (p ≤ {p:.2g}; random play: {tries[2]:.1f} and {one[2]:.1f}%). But somebody must "
        "choose the try.",
    ]


def endings(model: RealSizes) -> list[str]:
    """Return what context, cut replies and refused actions say about the table."""
    compared = by_name(model)
    late, early = ([ended(model.episodes["babyai", s], "max_context", t) for s in (SMALL, LARGE)] for t in (MANY, SOME))
    up_to = [compared["babyai", f"{s}: from {FEW} to {SOME} turns, less random play's gain"] for s in (SMALL, LARGE)]
    cut = min(ended(model.episodes[task, "135M"], "length", MANY) for task in TASKS)
    no = [refused(model.episodes["textcraft", size]) for size in (SMALL, LARGE)]
    return [
        f"- **Context ends long episodes**: on BabyAI {late[0]:.0f}% ({SMALL}) and {late[1]:.0f}% ({LARGE}) have none "
        f"left by turn {MANY}, {early[0]:.0f}% and {early[1]:.0f}% by turn {SOME}. So context, too, limits "
        f"success under {MANY} turns. Up to {SOME} turns both also gain less than random play, by "
        f"{up_to[0][0].points.lstrip('−')} and {up_to[1][0].points.lstrip('−')} points "
        f"(p ≤ {max(p for _, p in up_to):.2g}), and would if each of those {early[0]:.0f}% and "
        f"{early[1]:.0f}% succeeded.",
        f"- **Where turns cannot help**: {cut:.0f}% of SmolLM2's episodes end in a cut reply. On TextCraft the "
        f"environment refuses {no[0]:.0f}% ({SMALL}) and {no[1]:.0f}% ({LARGE}) of the actions.",
    ]


def turns_table(model: RealSizes) -> list[str]:
    """Return success under every limit of turns."""
    turns = turns_of(model.agents["babyai", LARGE][0])
    lines = [f"| success under | {turns[0]} turns | {' | '.join(map(str, turns[1:]))} |", "|---|" + "---|" * len(turns)]
    for task in TASKS:
        for agent, title in model.agents_of(task).items():
            cells = (f"{success(model, task, agent, t):.1f}%" for t in turns)
            lines.append(f"| {NAMES[task]}: {title} | {' | '.join(cells)} |")
    return lines


def tries_table(model: RealSizes) -> list[str]:
    """Return tries at equal turns in all: success of the best, and sampled tokens of all."""
    splits = ((MANY, 1), (SOME, 2), (TURNS_A_TRY, TRIES))
    heads = " | ".join(f"{tries} of {turns} turns" for turns, tries in splits)
    lines = [f"| best of several tries: success, sampled tokens | {heads} |", "|---|" + "---|" * len(splits)]
    for task in TASKS:
        for agent, title in model.agents_of(task).items():
            if agent == "135M":
                continue
            cells = []
            for turns, tries in splits:
                spent = 0.0 if agent == RANDOM else tries * per_episode(model, agent, turns, "sampled_tokens", task)
                cells.append(f"{success(model, task, agent, turns, tries):.1f}%, {spent:,.0f}")
            lines.append(f"| {NAMES[task]}: {title} | {' | '.join(cells)} |")
    return lines


def comparisons_table(model: RealSizes) -> list[str]:
    lines = ["| on the same items | points (95% interval over items) | p | p, Holm |", "|---|---|---|---|"]
    for (task, name), (comparison, p) in by_name(model).items():
        lines.append(f"| {NAMES[task]}, {name} | {comparison.with_interval} | {comparison.p:.2g} | {p:.2g} |")
    return lines


def under_turns_of_again(model: RealSizes) -> tuple[int, dict[str, float], dict[str, float], dict[str, float]]:
    """Return the turns of the second evaluation, and under them each item's success: of the larger model here and
    there, and of the smaller."""
    assert model.again is not None
    (turns,) = turns_of(model.again)
    first, small = (solved_within(model.episodes["babyai", size], turns) for size in (LARGE, SMALL))
    return turns, first, item_rates(model.again, turns), small


def repeated(model: RealSizes) -> list[str]:
    """Return how far a second evaluation of the larger model lies from this one."""
    if model.again is None:
        return []
    turns, first, second, small = under_turns_of_again(model)
    apart, lead = (Comparison("babyai", "", less(a, b)) for a, b in ((first, second), (second, small)))
    rates = [100 * statistics.fmean(values.values()) for values in (first, second, small)]
    return [
        f"- **One evaluation a model is little.** Under {turns} turns the {LARGE} model has {rates[0]:.1f}% here and "
        f"{rates[1]:.1f}% in the evaluation of the paper's table ({apart.points} points, p = {apart.p:.2g}). By that "
        f"one it leads the {SMALL} model ({rates[2]:.1f}%) by {lead.with_interval} points, p = {lead.p:.2g}.",
    ]


def details(model: RealSizes) -> list[str]:
    """Return the list of the details page."""
    loops, rejected = (
        [behaviour(model, "babyai", size, name) for size in (SMALL, LARGE, RANDOM)] for name in ("loops", "refused")
    )
    sampled, read_again = (
        [TRIES * per_episode(model, s, TURNS_A_TRY, name) / per_episode(model, s, MANY, name) for s in (SMALL, LARGE)]
        for name in ("sampled_tokens", "prompt_tokens")
    )
    free = [without_context_limit(model.episodes["babyai", size]) for size in (SMALL, LARGE)]
    return [
        f"- **What the turns are spent on**: on BabyAI the environment refuses {rejected[0]:.0f}% ({SMALL}) and "
        f"{rejected[1]:.0f}% ({LARGE}) of the actions, and {loops[0]:.0f}% and {loops[1]:.0f}% of the turns repeat an "
        f"action in the same state (random play: {rejected[2]:.0f}% and {loops[2]:.0f}%).",
        f"- **What tries cost**: on BabyAI {number_word(TRIES)} tries of {TURNS_A_TRY} turns sample {sampled[0]:.2f} "
        f"({SMALL}) and {sampled[1]:.2f} ({LARGE}) times the tokens of one of {MANY}, and read {read_again[0]:.2f} and "
        f"{read_again[1]:.2f} times the prompt tokens.",
        f"- **Without the limit of context** success under {MANY} turns would be about {free[0]:.1f}% ({SMALL}) and "
        f"{free[1]:.1f}% ({LARGE}), if the episodes that it ended had gone on like the others (Kaplan–Meier). The gain "
        f"from {FEW} turns would still be below random play's.",
        *repeated(model),
    ]


def texts(model: RealSizes | None) -> dict[str, str]:
    """Return the generated parts of docs/results by name."""
    if model is None:
        return {"sizes": "", "sizes-details": ""}
    alternative = "Success against turns on BabyAI and TextCraft before and after RL; how long episodes end"
    picture = f"![{alternative}](../images/{PICTURE})"
    claim = [verdict(model), "", picture, "", caption(model), "", *table(model), "", *facts(model)]
    trained = after_rl.by_name(model)
    families = [*comparisons_table(model), "", *after_rl.introduction(model), *after_rl.comparisons_table(trained)]
    items = [*details(model), *after_rl.details(model)]
    more = [*turns_table(model), "", *families, *tries_table(model), "", *items]
    return {"sizes": "\n".join(map(wrapped, claim)), "sizes-details": "\n".join(map(wrapped, more))}


def draw(model: RealSizes | None, path: Path) -> bool:
    """Draw success against turns on both tasks, and how episodes end. Return whether there are records."""
    if model is None:
        return False
    figure, grid = new_figure(1, 3, 14.5, 4.2)
    panels = grid[0][: len(TASKS)]
    for axes, task in zip(panels, TASKS, strict=True):
        records = [record for (of, _), seeds in model.agents.items() if of == task for record in seeds]
        draw_turns(axes, records, (("base", "--"), ("staged", "-")), COLOURS)
        set_title(axes, f"{NAMES[task]}: success against turns")
        label_y_in_percent(axes, "success")
        draw_legend(axes, 3)
    share_y_limits(panels)
    draw_endings(grid[0][-1], model)
    figure.savefig(path)
    return True


def draw_endings(axes: Any, model: RealSizes) -> None:
    """Draw how the episodes under MANY turns end: a bar for each model, from the top down by task."""
    bars = [(task, agent) for task in TASKS for agent in model.agents_of(task) if agent != RANDOM]
    heights = [-place - 0.6 * TASKS.index(task) for place, (task, _) in enumerate(bars)]
    left = [0.0] * len(bars)
    for stop, (colour, label) in ENDINGS.items():
        shares = [
            (success(model, *bar, MANY) if stop == "done" else ended(model.episodes[bar], stop, MANY)) / 100
            for bar in bars
        ]
        axes.barh(heights, shares, 0.75, left=left, color=colour, label=label)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    axes.barh(heights, [1 - start for start in left], 0.75, left=left, color=UNSOLVED, label="over, not solved")
    axes.set_yticks(heights, [f"{NAMES[task]}, {agent}" for task, agent in bars])
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    axes.set_xlabel("share of episodes", fontsize=9, color=INK)
    axes.grid(axis="y", visible=False)
    set_title(axes, f"how episodes under {MANY} turns end")
    draw_legend(axes, 3)
