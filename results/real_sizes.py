"""Claim C with real models before RL: comparisons, picture, and the text that results/pages.py puts into pages.

Episodes are played once, under the most turns; fewer turns are their beginnings. The endings of episodes come from
`<job>.actions.jsonl.xz` beside a record.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from behaviour import Row, read_rows
from figures import draw_legend, draw_turns, label_y_in_percent, new_figure, set_title, share_y_limits
from jobs import RANDOM
from qwen_page import number_word, wrapped
from records import Record, evaluations_of, item_rates, read_records, success_at, turns_of
from tables import holm

from agentgym_rl.evaluation.statistics import mean_interval, sign_flip_test
from agentgym_rl.run.plots import INK

STUDY, AGAIN = "qwen-interaction", "qwen-babyai"
"""The study, and the one with a second evaluation of the largest model."""
TASKS = ("babyai", "textcraft")
MODELS = {"135M": "SmolLM2-135M", "0.5B": "Qwen2.5-Coder-0.5B", "1.5B": "Qwen2.5-Coder-1.5B"}
"""Models by size. The comparisons are of the last two, which are of one family."""
SMALL, LARGE = "0.5B", "1.5B"
FEW, SOME, MANY = 4, 16, 32
"""Limits of turns that are compared."""
TRIES, TURNS_A_TRY = 4, 8
"""Tries with as many turns in all as one long episode."""
PICTURE = "evidence-sizes.png"
COLOURS = {"135M": "#94a3b8", "0.5B": "#2563eb", "1.5B": "#0f766e"}
NAMES = {"babyai": "BabyAI", "textcraft": "TextCraft"}


@dataclass(frozen=True)
class RealSizes:
    """Evaluations of untrained models and of random play under several limits of turns."""

    agents: dict[tuple[str, str], Record]
    """Record by task and size, or `random play`."""
    episodes: dict[tuple[str, str], list[Row]]
    """Actions and endings of the same episodes."""
    again: Record | None
    """A second evaluation of the largest model on BabyAI."""


def signed(share: float) -> str:
    """Return a difference of shares in points, with a sign."""
    return f"{100 * share:+.1f}".replace("-", "−")


@dataclass(frozen=True)
class Comparison:
    """A difference on the same items."""

    task: str
    name: str
    differences: list[float]
    """One an item."""

    @property
    def p(self) -> float:
        return sign_flip_test(self.differences)

    @property
    def points(self) -> str:
        return signed(statistics.fmean(self.differences))

    @property
    def with_interval(self) -> str:
        low, high = mean_interval(self.differences)
        return f"{self.points} ({signed(low)} to {signed(high)})"


def read(results: Path) -> RealSizes | None:
    """Return the records, or nothing as long as one of an untrained model is missing."""
    agents: dict[tuple[str, str], Record] = {}
    for record in evaluations_of(read_records(results, STUDY)):
        size = record["arm"].removeprefix("base ")
        if size in (RANDOM, *MODELS):
            agents[record["task"], size] = record
    if any((task, size) not in agents for task in TASKS for size in (RANDOM, *MODELS)):
        return None
    episodes = {
        key: list(read_rows(results / STUDY / f"{record['job']}.actions.jsonl.xz")) for key, record in agents.items()
    }
    again = [r for r in evaluations_of(read_records(results, AGAIN)) if r["arm"] == "base"]
    return RealSizes(agents, episodes, again[0] if again else None)


def success(model: RealSizes, task: str, size: str, turns: int, tries: int = 1) -> float:
    """Return success in percent."""
    return 100 * success_at(model.agents[task, size], turns, tries)


def ended(rows: Sequence[Row], stop: str, turns: int) -> float:
    """Return the percentage of episodes that ended so after at most so many turns."""
    return 100 * statistics.fmean(row["stop"] == stop and len(row["actions"]) <= turns for row in rows)


def refused(rows: Sequence[Row]) -> float:
    """Return the percentage of turns that the environment refused."""
    return 100 * sum(len(row["refused"]) for row in rows) / sum(len(row["actions"]) for row in rows)


def solved_within(rows: Sequence[Row], turns: int) -> dict[str, float]:
    """Return each item's success within any number of turns. A reward of 1 ends an episode of these environments."""
    samples: dict[str, list[bool]] = {}
    for row in rows:
        samples.setdefault(row["item"], []).append(sum(row["rewards"]) > 0 and len(row["actions"]) <= turns)
    return {item: statistics.fmean(values) for item, values in samples.items()}


def less(first: dict[str, float], second: dict[str, float]) -> list[float]:
    return [first[item] - second[item] for item in sorted(first)]


def comparisons(model: RealSizes) -> list[Comparison]:
    """Return the comparisons of the details page. Holm's correction is over all of them."""
    return [comparison for task in TASKS for comparison in _of_task(model, task)]


def _of_task(model: RealSizes, task: str) -> Iterator[Comparison]:
    def rates(size: str, turns: int, tries: int = 1) -> dict[str, float]:
        return item_rates(model.agents[task, size], turns, tries)

    for many in (MANY, SOME):
        own = less(rates(RANDOM, many), rates(RANDOM, FEW))
        for size in (SMALL, LARGE):
            gain = less(rates(size, many), rates(size, FEW))
            over = [a - b for a, b in zip(gain, own, strict=True)]
            yield Comparison(task, f"{size}: from {FEW} to {many} turns, less random play's gain", over)
    for turns in (FEW, SOME, MANY):
        name = f"from {SMALL} to {LARGE} under {turns} turns"
        yield Comparison(task, name, less(rates(LARGE, turns), rates(SMALL, turns)))
    for turns in (FEW, TURNS_A_TRY):
        name = f"{SMALL} under {MANY} turns less {LARGE} under {turns}"
        yield Comparison(task, name, less(rates(SMALL, MANY), rates(LARGE, turns)))
    for size in (SMALL, LARGE):
        name = f"{size}: best of {TRIES} tries of {TURNS_A_TRY} turns less one of {MANY}"
        yield Comparison(task, name, less(rates(size, TURNS_A_TRY, TRIES), rates(size, MANY)))


def by_name(model: RealSizes) -> dict[tuple[str, str], tuple[Comparison, float]]:
    """Return each comparison and its p after Holm, by task and name."""
    found = comparisons(model)
    adjusted = holm([c.p for c in found])
    return {(c.task, c.name): (c, p) for c, p in zip(found, adjusted, strict=True)}


def per_episode(model: RealSizes, size: str, turns: int, name: str, task: str = "babyai") -> float:
    """Return the tokens of an episode: `sampled_tokens` or `prompt_tokens`."""
    (result,) = (r for r in model.agents[task, size]["results"] if r["max_turns"] == turns)
    (cell,) = result["scenarios"].values()
    return float(cell[name])


def table(model: RealSizes) -> list[str]:
    """Return the table of the evidence page."""
    compared = by_name(model)
    lines = [
        f"| agent, before RL | {FEW} turns | {SOME} | {MANY} | from {FEW} to {MANY}, less random play's gain "
        "(95% interval) | p, Holm | no context left | reply cut |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task in TASKS:
        for size, title in {RANDOM: RANDOM, **MODELS}.items():
            rates = " | ".join(f"{success(model, task, size, turns):.1f}%" for turns in (FEW, SOME, MANY))
            gain, endings = " | ", " | "
            if (task, key := f"{size}: from {FEW} to {MANY} turns, less random play's gain") in compared:
                comparison, p = compared[task, key]
                gain = f"{comparison.with_interval} | {p:.2g}"
            if size != RANDOM:
                rows = model.episodes[task, size]
                endings = f"{ended(rows, 'max_context', MANY):.0f}% | {ended(rows, 'length', MANY):.0f}%"
            lines.append(f"| {NAMES[task]}: {title} | {rates} | {gain} | {endings} |")
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
        f"TextCraft no model is above {best:.1f}%. The same after RL is not measured."
    )


def caption(model: RealSizes) -> str:
    config = model.agents["babyai", LARGE]["config"]
    items = len(next(iter(model.agents["babyai", LARGE]["outcomes"].values())))
    context = max(task["max_context"] for task in config["tasks"])
    return (
        f"*BabyAI, untrained models, one evaluation each: {items} items, {number_word(config['samples'])} samples. "
        f"Right: a reply ends at {config['max_new_tokens']} tokens, an episode at {context:,}. The table has the "
        f"endings under {MANY} turns, and p over all {len(comparisons(model))} comparisons of the "
        "[details](evidence-details.md#c-real-models-before-rl).*"
    )


def facts(model: RealSizes) -> list[str]:
    """Return the list below the table."""
    return [*sizes_and_turns(model), *tries_against_turns(model), *endings(model)]


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
            f"{Comparison('babyai', 'lead', less(first, small)).points} to {lead.points} (p = {lead.p:.2g})."
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
    turns = turns_of(model.agents["babyai", LARGE])
    lines = [f"| success under | {turns[0]} turns | {' | '.join(map(str, turns[1:]))} |", "|---|" + "---|" * len(turns)]
    for task in TASKS:
        for size, title in {RANDOM: RANDOM, **MODELS}.items():
            cells = (f"{success(model, task, size, t):.1f}%" for t in turns)
            lines.append(f"| {NAMES[task]}: {title} | {' | '.join(cells)} |")
    return lines


def tries_table(model: RealSizes) -> list[str]:
    """Return tries at equal turns in all: success of the best, and sampled tokens of all."""
    splits = ((MANY, 1), (SOME, 2), (TURNS_A_TRY, TRIES))
    heads = " | ".join(f"{tries} of {turns} turns" for turns, tries in splits)
    lines = [f"| best of several tries: success, sampled tokens | {heads} |", "|---|" + "---|" * len(splits)]
    for task in TASKS:
        for size in (RANDOM, SMALL, LARGE):
            cells = []
            for turns, tries in splits:
                spent = 0.0 if size == RANDOM else tries * per_episode(model, size, turns, "sampled_tokens", task)
                cells.append(f"{success(model, task, size, turns, tries):.1f}%, {spent:,.0f}")
            title = MODELS.get(size, RANDOM)
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


def without_context_limit(rows: Sequence[Row]) -> float:
    """Return the Kaplan-Meier estimate of success within MANY turns in percent, if only context is lifted.

    An episode that ran out of context counts as long as it lasted. One that ended in another way stays unsolved.
    """
    unsolved = 1.0
    for turn in range(1, MANY + 1):
        solved = sum(len(row["actions"]) == turn and sum(row["rewards"]) > 0 for row in rows)
        before = sum(len(row["actions"]) < turn and sum(row["rewards"]) > 0 for row in rows)
        gone = sum(len(row["actions"]) < turn and row["stop"] == "max_context" for row in rows)
        if solved:
            unsolved *= 1 - solved / (len(rows) - before - gone)
    return 100 * (1 - unsolved)


def details(model: RealSizes) -> list[str]:
    """Return the list of the details page."""
    loops, rejected = (
        [100 * model.agents["babyai", size]["behaviour"][name] for size in (SMALL, LARGE, RANDOM)]
        for name in ("loops", "refused")
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
    alternative = "Success of untrained models against turns; episodes without context or with a cut reply"
    picture = f"![{alternative}](../images/{PICTURE})"
    claim = [verdict(model), "", picture, "", caption(model), "", *table(model), "", *facts(model)]
    more = [*turns_table(model), "", *comparisons_table(model), "", *tries_table(model), "", *details(model)]
    return {"sizes": "\n".join(map(wrapped, claim)), "sizes-details": "\n".join(map(wrapped, more))}


def draw(model: RealSizes | None, path: Path) -> bool:
    """Draw success and endings on BabyAI against turns. Return whether there are records."""
    if model is None:
        return False
    figure, grid = new_figure(1, 2, 9.6, 3.9)
    by_turns, endings = grid[0]
    records = [record for (task, _), record in model.agents.items() if task == "babyai"]
    draw_turns(by_turns, records, (("base", "-"),), COLOURS)
    set_title(by_turns, "BabyAI before RL: success against turns")
    label_y_in_percent(by_turns, "success")
    draw_endings(endings, model)
    share_y_limits([by_turns])
    draw_legend(by_turns, 2)
    draw_legend(endings, 2)
    figure.savefig(path)
    return True


def draw_endings(axes: Any, model: RealSizes) -> None:
    """Draw the share of episodes without context left, and of those that ended in a cut reply, by turn."""
    turns = range(1, MANY + 1)
    for size, colour in COLOURS.items():
        rows = model.episodes["babyai", size]
        for stop, style, text in (("max_context", "-", "no context left"), ("length", "--", "reply cut")):
            shares = [ended(rows, stop, t) / 100 for t in turns]
            axes.plot(turns, shares, style, color=colour, label=f"{size}, {text}")
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    axes.set_xlabel("after so many turns", fontsize=9, color=INK)
    axes.set_ylim(0, 1.04)
    label_y_in_percent(axes, "episodes that ended so")
    set_title(axes, "episodes that ended without a result")
