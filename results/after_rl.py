"""Claim C with real models after RL: comparisons, and the sentences that results/real_sizes.py puts into pages.

The comparisons were chosen after the records were seen. Holm's correction is over them alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator

from jobs import RANDOM
from qwen_page import listed, number_word, seeds_text
from records import success_at
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
    limit, _ = model.suite[task]
    for turns in (FEW, SOME, limit):
        small, large = (of_all_seeds(model, task, size, turns) for size in (SMALL, LARGE))
        yield Comparison(task, size_name(turns), less(large, small))
    for turns in (FEW, TURNS_A_TRY):
        small, large = of_all_seeds(model, task, SMALL, MANY), of_all_seeds(model, task, LARGE, turns)
        yield Comparison(task, trade_name(turns), less(small, large))


def of_all_seeds(model: RealSizes, task: str, size: str, turns: int) -> dict[str, float]:
    """Return each item's success after RL, averaged over seeds. Those of the larger model are the paper's table's."""
    if size == SMALL:
        return solved_within(model.episodes[task, after(SMALL)], turns)
    return mean_by_item(solved_within(rows, turns) for rows in model.suite[task][1].values())


def size_name(turns: int) -> str:
    return f"after RL, all seeds: from {SMALL} to {LARGE} under {turns} turns"


def trade_name(turns: int) -> str:
    return f"after RL, all seeds: {SMALL} under {MANY} turns less {LARGE} under {turns}"


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


def trained_agents(model: RealSizes) -> list[tuple[str, str]]:
    """Return task and size of each trained agent."""
    return [(task, size) for task in TASKS for size in model.trained_sizes(task)]


def agent_name(task: str, size: str, note: str = "") -> str:
    """Return `BabyAI (0.5B)`, with a note in the brackets."""
    return f"{NAMES[task]} ({size}{note})"


def verdict(model: RealSizes, compared: Compared) -> str:
    """Return what turns bring after RL, in sentences."""
    agents = trained_agents(model)
    if not agents:
        return "The same after RL is not measured."
    gains = {
        (task, size): compared[task, f"{after(size)}: from {FEW} to {MANY} turns, less random play's gain"]
        for task, size in agents
    }
    above = [agent_name(*agent) for agent, (gain, p) in gains.items() if gain.mean > 0 and p < SIGNIFICANT]
    sentences = [f"**After RL it is shown on {listed(above)}.**" if above else "**Not shown after RL, either.**"]
    for task in dict.fromkeys(task for task, _ in agents):
        chance = [success(model, task, RANDOM, turns) for turns in (FEW, MANY)]
        gained, leads = [f"random play gains {chance[1] - chance[0]:.1f} points"], []
        for size in model.trained_sizes(task):
            few, many = (success(model, task, after(size), turns) for turns in (FEW, MANY))
            gain, p = gains[task, size]
            gained.append(f"the trained {size} model {many - few:.1f} (difference {gain.points}, p = {p:.2g})")
            leads.append((few - chance[0], many - chance[1]))
        by_turns = [listed(f"{lead:.1f}" for lead in column) for column in zip(*leads, strict=True)]
        who = "It leads" if len(leads) == 1 else "They lead"
        sentences.append(
            f"On {NAMES[task]} {listed(gained)}. {who} random play by {by_turns[0]} points under {FEW} turns and by "
            f"{by_turns[1]} under {MANY}."
        )
    return " ".join(sentences)


def facts(model: RealSizes, compared: Compared) -> list[str]:
    """Return the list items of the evidence page, none without trained agents."""
    if not trained_agents(model):
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
    for task, size in trained_agents(model):
        jump, p = compared[task, f"{after(size)}: {FEW} turns less {MANY} before RL"]
        jumps.append(f"{jump.points} points on {agent_name(task, size, f', p = {p:.2g}')}")
        slope, p = compared[task, f"{after(size)}: from {FEW} to {MANY} turns, less before RL"]
        slopes.append(f"{slope.with_interval} on {agent_name(task, size, f', p = {p:.2g}')}")
        use = [uses_of_turns(model, task, agent) for agent in (after(size), size)]
        shares = [f"{new:.0f}% ({old:.0f}%)" for new, old in zip(*use, strict=True)]
        uses.append(
            f"on {agent_name(task, size)} the environment refuses {shares[0]} of the actions, {shares[1]} of the turns "
            f"repeat an action in the same state, {shares[2]} of the episodes have no context left and {shares[3]} "
            "end in a cut reply"
            if not uses
            else f"on {agent_name(task, size)} these are {listed(shares)}"
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
    agents = trained_agents(model)
    sentences = []
    for (turns, tries), lead in zip(SPLITS, ("the best of", "The best of"), strict=True):
        parts = []
        for task, size in agents:
            best, one = success(model, task, after(size), turns, tries), success(model, task, after(size), MANY)
            _, p = compared[task, tries_name(size, turns, tries)]
            note = f"; one of {MANY}: {one:.1f}%, p = {p:.2g}"
            parts.append(f"{best:.1f}% of {agent_name(task, size, note)}")
        costs = listed(f"{cost_of_tries(model, t, after(size), turns, tries):.2f}" for t, size in agents)
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
        few, some, many = (compared[task, size_name(turns)] for turns in (FEW, SOME, limit))
        trades = [compared[task, trade_name(turns)] for turns in (FEW, TURNS_A_TRY)]
        limits = (FEW, TURNS_A_TRY, SOME, limit)
        small, large = (
            [100 * statistics.fmean(of_all_seeds(model, task, size, t).values()) for t in limits]
            for size in (SMALL, LARGE)
        )
        chance = success(model, task, RANDOM, MANY)
        ends = [100 * success_at(r, MANY) for r in model.agents[task, after(SMALL)]]
        items.append(
            f"- **Size and turns after RL**: on {NAMES[task]} {SMALL} ({seeds_text(ends)}) solves {shares_text(small)} "
            f"under {listed(map(str, limits))} turns, {LARGE} (the {seeds_text(runs)} of the paper's table, in its own "
            f"evaluation) {shares_text(large)}. {LARGE} less {SMALL} is {few[0].points} points under {FEW} turns, "
            f"{some[0].points} under {SOME} and {many[0].with_interval} under {limit} (p = {many[1]:.2g}). Turns less "
            f"parameters: {SMALL} under {MANY} turns solves {success(model, task, after(SMALL), MANY):.1f}% (by seed "
            f"{shares_text(ends)}); less {LARGE} that is {trades[0][0].points} points under {FEW} (p = "
            f"{trades[0][1]:.2g}) and {trades[1][0].points} under {TURNS_A_TRY} (p = {trades[1][1]:.2g}). But "
            f"random play under {MANY} turns less {LARGE} is {signed((chance - large[0]) / 100)} points "
            f"under {FEW} and {signed((chance - large[1]) / 100)} under {TURNS_A_TRY}."
        )
    return items


def shares_text(percentages: Iterable[float]) -> str:
    """Return `46.9, 56.6 and 66.7%`."""
    return f"{listed(f'{share:.1f}' for share in percentages)}%"


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
        own = [record["seed"] for record in model.agents[task, after(LARGE)]]
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
    for task, size in trained_agents(model):
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
        f" On average a run of {SMALL} has {steps:.0f} steps and {tokens / 1e6:.1f} million sampled tokens and took "
        f"{seconds / 60:.1f} minutes on an H200 that it shared with other runs."
    )


def details(model: RealSizes) -> list[str]:
    """Return the list items of the details page."""
    agents = trained_agents(model)
    if not agents:
        return []
    equal, left = [], []
    for task, size in agents:
        for agent, when in ((size, "before RL"), (after(size), "after")):
            cost = {k: cost_of_tries(model, task, agent, TURNS_A_TRY, k) for k in range(1, TRIES + 1)}
            tries = max(k for k in cost if k == 1 or cost[k] <= 1)
            equal.append(
                f"{agent_name(task, size)} {when}: {number_word(tries)} ({cost[tries]:.2f} times the tokens) "
                f"{success(model, task, agent, TURNS_A_TRY, tries):.1f}%, one of {MANY} turns "
                f"{success(model, task, agent, MANY):.1f}%"
            )
        shares = [share_of_rest(model, task, agent) for agent in (after(size), RANDOM)]
        left.append(f"{shares[0]:.0f}% on {agent_name(task, size, f'; random play: {shares[1]:.0f}%')}")
    items = [
        f"- **Tries that sample no more tokens** than one episode of {MANY} turns, as many of {TURNS_A_TRY} turns as "
        f"that allows. {'; '.join(equal)}.",
        f"- **An agent that starts higher has less to gain.** Of what {FEW} turns leave unsolved, {MANY} turns solve "
        f"after RL {listed(left)}.",
    ]
    items += [_context(model, size) for task, size in agents if task == "babyai"]
    return [*items, *_evaluated_again(model)]


def share_of_rest(model: RealSizes, task: str, agent: str) -> float:
    """Return the percentage of what FEW turns leave unsolved that MANY turns solve."""
    few, many = (success(model, task, agent, turns) for turns in (FEW, MANY))
    return 100 * (many - few) / (100 - few)


def _context(model: RealSizes, size: str) -> str:
    agent = after(size)
    rows = model.episodes["babyai", agent]
    lost, free = ended(rows, "max_context", MANY), without_context_limit(rows)
    gain, chance = (success(model, "babyai", a, MANY) - success(model, "babyai", a, FEW) for a in (agent, RANDOM))
    still = f" Even then the gain from {FEW} turns would be below random play's." if gain + lost < chance else ""
    return (
        f"- **Context after RL** ({size}): without its limit success on BabyAI under {MANY} turns would be about "
        f"{free:.1f}% (Kaplan–Meier, as above), and {success(model, 'babyai', agent, MANY) + lost:.1f}% if every "
        f"episode that it ended succeeded.{still}"
    )


def _evaluated_again(model: RealSizes) -> list[str]:
    """Return how far the evaluation of the paper's table lies from this one, for the same agents."""
    parts = []
    for task, (turns, seeds) in model.suite.items():
        agent = after(LARGE)
        if any(record["seed"] not in seeds for record in model.agents[task, agent]):
            continue
        here = solved_within(model.episodes[task, agent], turns)
        there = mean_by_item(solved_within(seeds[record["seed"]], turns) for record in model.agents[task, agent])
        apart = Comparison(task, "", less(here, there))
        first, second = (100 * statistics.fmean(values.values()) for values in (here, there))
        parts.append(f"{first:.1f}% and {second:.1f}% on {NAMES[task]} under {turns} turns (p = {apart.p:.2g})")
    if not parts:
        return []
    return [
        f"- **The same {LARGE} agents after RL in two evaluations**, here and in the paper's table: {listed(parts)}."
    ]
