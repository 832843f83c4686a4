"""Claim C with real models after RL: comparisons, and the sentences that results/real_sizes.py puts into pages.

The comparisons were chosen after the records were seen. Holm's correction is over them alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sized

from jobs import RANDOM
from qwen_page import listed, number_word
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
    mean_by_item,
    per_episode,
    rates,
    refused,
    signed,
    solved_within,
    success,
    without_context_limit,
)

SIGNIFICANT = 0.05
SPLITS = ((TURNS_A_TRY, TRIES), (SOME, 2))
"""Turns and number of tries that are compared with one episode of MANY turns."""
Compared = dict[tuple[str, str], tuple[Comparison, float]]
"""Each comparison and its p after Holm, by task and name."""


def comparisons(model: RealSizes) -> list[Comparison]:
    """Return the comparisons after RL, none as long as no trained agent has a record."""
    of_tasks = [comparison for task in TASKS for comparison in _of_task(model, task)]
    of_sizes = [comparison for task in model.suite for comparison in _of_sizes(model, task)]
    return [*of_tasks, *(_of_suite(model, task) for task in model.suite), *of_sizes]


def _of_task(model: RealSizes, task: str) -> Iterator[Comparison]:
    chance = {turns: rates(model, task, RANDOM, turns) for turns in (FEW, SOME, MANY)}
    for size in model.trained_sizes(task):
        before = {turns: rates(model, task, size, turns) for turns in (FEW, MANY)}
        trained = {turns: rates(model, task, after(size), turns) for turns in (FEW, SOME, MANY)}
        for many in (MANY, SOME):
            name = f"{after(size)}: from {FEW} to {many} turns, less random play's gain"
            yield Comparison(task, name, _gains_apart(trained, chance, many))
        yield Comparison(
            task, f"{after(size)}: from {FEW} to {MANY} turns, less before RL", _gains_apart(trained, before, MANY)
        )
        name = f"{after(size)}: {FEW} turns less {MANY} before RL"
        yield Comparison(task, name, less(trained[FEW], before[MANY]))
        yield Comparison(
            task, f"{after(size)}: under {MANY} turns, less random play", less(trained[MANY], chance[MANY])
        )
        for turns, tries in SPLITS:
            best = rates(model, task, after(size), turns, tries)
            yield Comparison(task, tries_name(size, turns, tries), less(best, trained[MANY]))


def tries_name(size: str, turns: int, tries: int) -> str:
    return f"{after(size)}: best of {tries} tries of {turns} turns less one of {MANY}"


def _gains_apart(first: dict[int, dict[str, float]], second: dict[int, dict[str, float]], many: int) -> list[float]:
    """Return the first agent's gain from FEW to `many` turns less the second's, by item."""
    gains = (less(agent[many], agent[FEW]) for agent in (first, second))
    return [a - b for a, b in zip(*gains, strict=True)]


def _of_suite(model: RealSizes, task: str) -> Comparison:
    turns, seeds = model.suite[task]
    name = f"all {len(seeds)} seeds: from {FEW} to {turns} turns, less random play's gain"
    by_item = mean_by_item(_gain_by_item(model, task, seed) for seed in seeds)
    return Comparison(task, name, [by_item[item] for item in sorted(by_item)])


def _of_sizes(model: RealSizes, task: str) -> Iterator[Comparison]:
    """Compare two sizes after RL, all seeds of each. The larger one's are those of the paper's table."""
    if SMALL not in model.trained_sizes(task):
        return
    limit, runs = model.suite[task]

    def small(turns: int) -> dict[str, float]:
        return solved_within(model.episodes[task, after(SMALL)], turns)

    def large(turns: int) -> dict[str, float]:
        return mean_by_item(solved_within(rows, turns) for rows in runs.values())

    for turns in (FEW, SOME, limit):
        yield Comparison(task, size_name(turns), less(large(turns), small(turns)))
    for turns in (FEW, TURNS_A_TRY):
        yield Comparison(task, trade_name(turns), less(small(MANY), large(turns)))


def size_name(turns: int) -> str:
    return f"after RL, from {SMALL} to {LARGE} under {turns} turns"


def trade_name(turns: int) -> str:
    return f"after RL, {SMALL} under {MANY} turns less {LARGE} under {turns}"


def _gain_by_item(model: RealSizes, task: str, seed: int) -> dict[str, float]:
    """Return the gain of a seed of the paper's table less random play's, by item."""
    turns, seeds = model.suite[task]
    limits = (turns, FEW)
    own, chance = ([solved_within(rows, t) for t in limits] for rows in (seeds[seed], model.episodes[task, RANDOM]))
    return {item: own[0][item] - own[1][item] - chance[0][item] + chance[1][item] for item in own[0]}


def by_name(model: RealSizes) -> Compared:
    listed = comparisons(model)
    adjusted = holm([comparison.p for comparison in listed])
    return {(c.task, c.name): (c, p) for c, p in zip(listed, adjusted, strict=True)}


def shown_agents(model: RealSizes) -> dict[str, str]:
    """Return the largest trained size by task: the agents that the sentences are about."""
    return {task: sizes[-1] for task in TASKS if (sizes := model.trained_sizes(task))}


def verdict(model: RealSizes, compared: Compared) -> str:
    """Return what turns bring after RL, in sentences."""
    shown = shown_agents(model)
    if not shown:
        return "The same after RL is not measured."
    gains = {
        task: compared[task, f"{after(size)}: from {FEW} to {MANY} turns, less random play's gain"]
        for task, size in shown.items()
    }
    above = [NAMES[task] for task, (gain, p) in gains.items() if gain.mean > 0 and p < SIGNIFICANT]
    lead = f"**After RL it is shown on {listed(above)}.**" if above else "**Not shown after RL, either.**"
    sentences = [lead]
    for task, (gain, p) in gains.items():
        agents = (after(shown[task]), RANDOM)
        few, many = ([success(model, task, agent, turns) for agent in agents] for turns in (FEW, MANY))
        sentences.append(
            f"On {NAMES[task]} the trained {shown[task]} model gains {many[0] - few[0]:.1f} points and random play "
            f"{many[1] - few[1]:.1f} (difference {gain.points}, p = {p:.2g}). It leads random play by "
            f"{few[0] - few[1]:.1f} points under {FEW} turns and by {many[0] - many[1]:.1f} under {MANY}."
        )
    return " ".join(sentences)


def facts(model: RealSizes, compared: Compared) -> list[str]:
    """Return the list items of the evidence page, none without trained agents."""
    if not shown_agents(model):
        return []
    return [
        *what_rl_changes(model, compared),
        *tries_against_turns(model, compared),
        *size_against_turns(model, compared),
        *seeds_apart(model, compared),
    ]


def what_rl_changes(model: RealSizes, compared: Compared) -> list[str]:
    """Return how success under equal turns, and the use of turns, differ before and after RL."""
    jumps: list[str] = []
    slopes: list[str] = []
    uses: list[str] = []
    for task, size in shown_agents(model).items():
        jump, p = compared[task, f"{after(size)}: {FEW} turns less {MANY} before RL"]
        jumps.append(f"{jump.points} points on {NAMES[task]} (p = {p:.2g})")
        slope, p = compared[task, f"{after(size)}: from {FEW} to {MANY} turns, less before RL"]
        slopes.append(f"{slope.with_interval} on {NAMES[task]} (p = {p:.2g})")
        use = [uses_of_turns(model, task, agent) for agent in (after(size), size)]
        shares = [f"{new:.0f}% ({old:.0f}%)" for new, old in zip(*use, strict=True)]
        uses.append(
            f"on {NAMES[task]} the environment refuses {shares[0]} of the actions, {shares[1]} of the turns repeat an "
            f"action in the same state, {shares[2]} of the episodes have no context left and {shares[3]} end in a cut "
            "reply"
            if not uses
            else f"on {NAMES[task]} these are {listed(shares)}"
        )
    return [
        f"- **{FEW} turns after RL beat {MANY} before**, by {listed(jumps)}. "
        f"RL changes the gain from {FEW} to {MANY} turns by {listed(slopes)}.",
        f"- **How turns are used after RL** (before): {'; '.join(uses)}.",
    ]


def uses_of_turns(model: RealSizes, task: str, agent: str) -> list[float]:
    """Return percentages: refused actions, repeated ones, episodes without context left and with a cut reply."""
    rows = model.episodes[task, agent]
    endings = [ended(rows, stop, MANY) for stop in ("max_context", "length")]
    return [refused(rows), behaviour(model, task, agent, "loops"), *endings]


def tries_against_turns(model: RealSizes, compared: Compared) -> list[str]:
    shown = shown_agents(model)
    sentences = []
    for (turns, tries), lead in zip(SPLITS, ("the best of", "The best of"), strict=True):
        parts = []
        for task, size in shown.items():
            best, one = success(model, task, after(size), turns, tries), success(model, task, after(size), MANY)
            _, p = compared[task, tries_name(size, turns, tries)]
            parts.append(f"{best:.1f}% of {NAMES[task]} (one of {MANY}: {one:.1f}%, p = {p:.2g})")
        costs = listed(f"{cost_of_tries(model, t, after(size), turns, tries):.2f}" for t, size in shown.items())
        sentences.append(
            f"{lead} {number_word(tries)} tries of {turns} turns solves {listed(parts)}, with {costs} times the "
            "sampled tokens."
        )
    return [f"- **After RL, tries of {TURNS_A_TRY} turns do not beat one of {MANY}**: {' '.join(sentences)}"]


def cost_of_tries(model: RealSizes, task: str, agent: str, turns: int, tries: int) -> float:
    """Return the sampled tokens of so many tries as a multiple of those of one long episode."""
    short, long = (per_episode(model, agent, limit, "sampled_tokens", task) for limit in (turns, MANY))
    return tries * short / long


def size_against_turns(model: RealSizes, compared: Compared) -> list[str]:
    """Return what size brings after RL, and turns against it, on the tasks with both sizes."""
    items = []
    for task, (limit, runs) in model.suite.items():
        if SMALL not in model.trained_sizes(task):
            continue
        seeds = f"({seeds_text(model.agents[task, after(SMALL)])}) to {LARGE} ({seeds_text(runs)})"
        few, some, many = (compared[task, size_name(turns)] for turns in (FEW, SOME, limit))
        trades = [compared[task, trade_name(turns)] for turns in (FEW, TURNS_A_TRY)]
        gain, p = compared[task, f"{after(SMALL)}: from {FEW} to {MANY} turns, less random play's gain"]
        items.append(
            f"- **Size and turns after RL**: on {NAMES[task]} success changes from {SMALL} {seeds} by "
            f"{few[0].points} points under {FEW} turns, {some[0].points} under {SOME} and {many[0].with_interval} "
            f"under {limit} (p = {many[1]:.2g}). Turns less parameters: the {SMALL} model under {MANY} turns is "
            f"{trades[0][0].with_interval} points above the {LARGE} model under {FEW} (p = {trades[0][1]:.2g}) and "
            f"{trades[1][0].points} above it under {TURNS_A_TRY} (p = {trades[1][1]:.2g}). But the {SMALL} model's "
            f"gain from {FEW} to {MANY} turns less random play's is {gain.points} (p = {p:.2g})."
        )
    return items


def seeds_text(seeds: Sized) -> str:
    """Return `one seed` or `three seeds`."""
    return f"{number_word(len(seeds))} seed{'s' if len(seeds) > 1 else ''}"


def seeds_apart(model: RealSizes, compared: Compared) -> list[str]:
    """Return which agents were trained, and what other seeds have under fewer turns."""
    sizes = sorted({size for task in TASKS for size in model.trained_sizes(task)})
    agents = [
        f"{size} on {NAMES[task]} ({seeds_text(model.agents[task, after(size)])})"
        for size in MODELS
        for task in TASKS
        if size in model.trained_sizes(task)
    ]
    sentence = f"**Evaluated after RL**: {listed(agents)}{', so parameters cannot be compared' * (len(sizes) == 1)}."
    parts = []
    for task, (turns, runs) in model.suite.items():
        comparison, p = compared[task, _of_suite(model, task).name]
        by_seed = listed(signed(statistics.fmean(_gain_by_item(model, task, seed).values())) for seed in runs)
        parts.append(
            f"on {NAMES[task]} from {FEW} to {turns} turns {comparison.with_interval}, p = {p:.2g}, by seed {by_seed}"
        )
    if parts:
        sentence += f" All seeds of the paper's table, gain less random play's: {'; '.join(parts)}."
        least = f" The {LARGE} agents of this section are the seeds that gain least."
        sentence += least if weakest(model) else ""
    return [f"- {sentence}"]


def weakest(model: RealSizes) -> bool:
    """Return whether the agents here are, on every task, the seed of the paper's table that gains least."""
    answers = []
    for task, (_, seeds) in model.suite.items():
        gains = {seed: statistics.fmean(_gain_by_item(model, task, seed).values()) for seed in seeds}
        own = [record["seed"] for record in model.agents[task, after(shown_agents(model)[task])]]
        answers.append(len(gains) > 1 and own == [min(gains, key=gains.__getitem__)])
    return all(answers)


def comparisons_table(compared: Compared) -> list[str]:
    if not compared:
        return []
    lines = ["| after RL, on the same items | points (95% interval over items) | p | p, Holm |", "|---|---|---|---|"]
    for (task, name), (comparison, p) in compared.items():
        lines.append(f"| {NAMES[task]}, {name} | {comparison.with_interval} | {comparison.p:.2g} | {p:.2g} |")
    return [*lines, ""]


def introduction(model: RealSizes) -> list[str]:
    """Return what was trained, for the details page."""
    agents = []
    for task, size in [(name, size) for name in TASKS for size in model.trained_sizes(name)]:
        records = model.agents[task, after(size)]
        runs = [model.runs[name] for r in records if (name := r["config"]["agent"].get("run")) in model.runs]
        stages = {", ".join(map(str, run["config"]["horizon"]["turns"])) for run in runs}
        seeds = "seed " if len(records) == 1 else "seeds "
        horizon = f"{listed(sorted(stages))} turns, " if stages else ""
        agents.append(f"{NAMES[task]}, {size}: {horizon}{seeds}{listed(str(r['seed']) for r in records)}")
    if not agents:
        return []
    return [
        f"After RL alone under staged horizons ({'; '.join(agents)}). These comparisons were chosen after the records "
        "were seen, and Holm's correction is over this table alone. Rows of all seeds are of the agents of the paper's "
        f"table, in its own evaluation.{_length_of_small_runs(model)}",
        "",
    ]


def _length_of_small_runs(model: RealSizes) -> str:
    """Return the steps, tokens and minutes of the smaller model's runs. Those of the larger one have a table."""
    names = [r["config"]["agent"].get("run") for task in TASKS for r in model.agents.get((task, after(SMALL)), [])]
    runs = [model.runs[name] for name in names if name in model.runs]
    if not runs:
        return ""
    steps, tokens, seconds = (
        statistics.fmean(run[key] for run in runs) for key in ("steps", "sampled_tokens", "seconds")
    )
    return (
        f" A run of {SMALL} has {steps:.0f} steps and {tokens / 1e6:.1f} million sampled tokens, and took "
        f"{seconds / 60:.1f} minutes on one NVIDIA H200 that other runs used, too (means)."
    )


def details(model: RealSizes) -> list[str]:
    """Return the list items of the details page."""
    shown = shown_agents(model)
    if not shown:
        return []
    equal, left = [], []
    for task, size in shown.items():
        for agent, when in ((size, "before RL"), (after(size), "after")):
            cost = {k: cost_of_tries(model, task, agent, TURNS_A_TRY, k) for k in range(1, TRIES + 1)}
            tries = max(k for k in cost if k == 1 or cost[k] <= 1)
            equal.append(
                f"{NAMES[task]} {when}: {number_word(tries)} ({cost[tries]:.2f} times the tokens) "
                f"{success(model, task, agent, TURNS_A_TRY, tries):.1f}%, one of {MANY} turns "
                f"{success(model, task, agent, MANY):.1f}%"
            )
        shares = [share_of_rest(model, task, agent) for agent in (after(size), RANDOM)]
        left.append(f"{shares[0]:.0f}% on {NAMES[task]} (random play: {shares[1]:.0f}%)")
    items = [
        f"- **Tries that sample no more tokens** than one episode of {MANY} turns, as many of {TURNS_A_TRY} turns as "
        f"that allows. {'; '.join(equal)}.",
        f"- **An agent that starts higher has less to gain.** Of what {FEW} turns leave unsolved, {MANY} turns solve "
        f"after RL {listed(left)}.",
    ]
    if "babyai" in shown:
        items.append(_context(model, after(shown["babyai"])))
    return [*items, *_evaluated_again(model)]


def share_of_rest(model: RealSizes, task: str, agent: str) -> float:
    """Return the percentage of what FEW turns leave unsolved that MANY turns solve."""
    few, many = (success(model, task, agent, turns) for turns in (FEW, MANY))
    return 100 * (many - few) / (100 - few)


def _context(model: RealSizes, agent: str) -> str:
    rows = model.episodes["babyai", agent]
    lost, free = ended(rows, "max_context", MANY), without_context_limit(rows)
    gain, chance = (success(model, "babyai", a, MANY) - success(model, "babyai", a, FEW) for a in (agent, RANDOM))
    still = f" Even then the gain from {FEW} turns would be below random play's." if gain + lost < chance else ""
    return (
        f"- **Context after RL**: without its limit success on BabyAI under {MANY} turns would be about {free:.1f}% "
        f"(Kaplan–Meier, as above), and {success(model, 'babyai', agent, MANY) + lost:.1f}% if every episode that it "
        f"ended succeeded.{still}"
    )


def _evaluated_again(model: RealSizes) -> list[str]:
    """Return how far the evaluation of the paper's table lies from this one, for the same agents."""
    parts = []
    for task, (turns, seeds) in model.suite.items():
        agent = after(shown_agents(model)[task])
        if any(record["seed"] not in seeds for record in model.agents[task, agent]):
            continue
        here = solved_within(model.episodes[task, agent], turns)
        there = mean_by_item(solved_within(seeds[record["seed"]], turns) for record in model.agents[task, agent])
        apart = Comparison(task, "", less(here, there))
        first, second = (100 * statistics.fmean(values.values()) for values in (here, there))
        parts.append(f"{first:.1f}% and {second:.1f}% on {NAMES[task]} under {turns} turns (p = {apart.p:.2g})")
    if not parts:
        return []
    return [f"- **The same agents after RL in two evaluations**, here and in the paper's table: {listed(parts)}."]
