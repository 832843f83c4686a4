"""Checks of real models before RL (claim C) and of the paper's table for results/check.py."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from check_a import behaviour_rows, points
from page_numbers import (
    ROOT,
    Pages,
    Rates,
    Record,
    Value,
    best_of_by_item,
    bootstrap,
    holm,
    item_rates,
    load,
    load_lines,
    mean,
    sign_flips,
    wilson,
)

TASKS = {"babyai": "BabyAI", "textcraft": "TextCraft"}
MODELS = {"135M": "SmolLM2-135M", "0.5B": "Qwen2.5-Coder-0.5B", "1.5B": "Qwen2.5-Coder-1.5B"}
PAIR = ("0.5B", "1.5B")
CHANCE = "random play"
TURNS = (2, 4, 8, 16, 32)
Lines = list[dict[str, Any]]
Agents = dict[tuple[str, str], Record]
Episodes = dict[tuple[str, str], Lines]
Compared = dict[str, tuple[list[float], float, float]]
"""Differences by item, p and p after Holm, by the name of a comparison."""


def less(first: Rates, second: Rates) -> list[float]:
    return [first[item] - second[item] for item in first]


def cut(rows: Lines, stop: str, turns: int) -> float:
    """Return the percentage of episodes that ended so after at most so many replies."""
    return points(row["stop"] == stop and len(row["actions"]) <= turns for row in rows)


def solved(row: dict[str, Any]) -> bool:
    return bool(row["rewards"]) and row["rewards"][-1] == 1


def solved_within(rows: Lines, turns: int) -> Rates:
    samples: dict[str, list[bool]] = {}
    for row in rows:
        samples.setdefault(row["item"], []).append(solved(row) and len(row["actions"]) <= turns)
    return {item: mean(values) for item, values in samples.items()}


def read_agents() -> tuple[Agents, Episodes]:
    agents: Agents = {}
    episodes: Episodes = {}
    for record in load("qwen-interaction"):
        size = record["arm"].removeprefix("base ")
        if size in (CHANCE, *MODELS):
            agents[record["task"], size] = record
            episodes[record["task"], size] = load_lines("qwen-interaction", f"{record['job']}.actions")
    return agents, episodes


def real_sizes(pages: Pages) -> None:
    """Check what the pages say about models of several sizes before RL."""
    agents, episodes = read_agents()
    same_games(pages, agents, episodes)
    compared = comparisons(pages, agents)
    rates_table(pages, agents, episodes, compared)
    verdict(pages, agents, compared)
    sizes(pages, agents, episodes, compared)
    tries(pages, agents, compared)
    endings(pages, agents, episodes, compared)


def same_games(pages: Pages, agents: Agents, episodes: Episodes) -> None:
    """Check that all sizes played the same items, as often, under the same limits, and that turns are beginnings."""
    for task in TASKS:
        items = [set(outcomes) for (t, _), r in agents.items() if t == task for outcomes in r["outcomes"].values()]
        pages.require("| on the same items | points", all(names == items[0] for names in items))
        samples = {
            len(s) for (t, _), r in agents.items() if t == task for o in r["outcomes"].values() for s in o.values()
        }
        pages.require("four samples an item at temperature 1", samples == {4})
        for size in (CHANCE, *MODELS):
            record, rows = agents[task, size], episodes[task, size]
            agree = all(solved_within(rows, t) == item_rates(record, t) for t in TURNS)
            pages.require("fewer turns are their beginnings", agree)
    models = [agents[task, size]["config"] for task in TASKS for size in MODELS]
    pages.require("four samples an item at temperature 1", {c["temperature"] for c in models} == {1})
    limits = {(c["max_new_tokens"], t["max_context"], t["style"]) for c in models for t in c["tasks"]}
    ((reply, context, style),) = limits
    pages.require("thoughts before actions, no worked examples", style == "react")
    counts = [len(agents[task, CHANCE]["outcomes"]["32"]) for task in TASKS]
    pages.expect("(# of BabyAI, # of TextCraft), four samples an item at temperature #", *counts, 1)
    pages.expect(
        ": # items of BabyAI, # of TextCraft, four samples. Dashed: before RL; bars: lowest to highest seed. Right: "
        "how episodes under # turns end; a reply ends at # tokens, an episode at #.",
        *(*counts, TURNS[-1], reply, context),
    )
    pages.expect("with one or two evaluations each and # tokens of context", context)
    played = sum(len(s) for task in TASKS for s in agents[task, "135M"]["outcomes"]["32"].values())
    pages.expect("SmolLM2 solves no item before RL (# of # episodes)", 0, played)
    pages.require(
        "SmolLM2 solves no item before RL",
        all(not any(item_rates(agents[task, "135M"], t).values()) for task in TASKS for t in TURNS),
    )
    pages.expect("played once, under # turns; fewer turns are their beginnings", TURNS[-1])
    pages.require("No model above 1.5B was evaluated here", set(MODELS) == {"135M", "0.5B", "1.5B"})


def comparisons(pages: Pages, agents: Agents) -> Compared:
    """Check the table of comparisons and return them."""
    differences: dict[str, tuple[list[float], int]] = {}
    for task, title in TASKS.items():
        at = {(size, t): item_rates(agents[task, size], t) for size in (CHANCE, *PAIR) for t in TURNS}
        for many in (32, 16):
            own = less(at[CHANCE, many], at[CHANCE, 4])
            for size in PAIR:
                gain = [g - o for g, o in zip(less(at[size, many], at[size, 4]), own, strict=True)]
                differences[f"{title}, {size}: from 4 to {many} turns, less random play's gain"] = gain, 4
        for t in (4, 16, 32):
            differences[f"{title}, from 0.5B to 1.5B under {t} turns"] = less(at["1.5B", t], at["0.5B", t]), 4
        for t in (4, 8):
            differences[f"{title}, 0.5B under 32 turns less 1.5B under {t}"] = less(at["0.5B", 32], at["1.5B", t]), 4
        for size in PAIR:
            best = best_of_by_item(agents[task, size], 8, 4)
            name = f"{title}, {size}: best of 4 tries of 8 turns less one of 32"
            differences[name] = less(best, at[size, 32]), 12
    p = [sign_flips(d, unit) for d, unit in differences.values()]
    compared = {
        name: (d, raw, adjusted) for (name, (d, _)), raw, adjusted in zip(differences.items(), p, holm(p), strict=True)
    }
    for name, (d, raw, adjusted) in compared.items():
        pages.expect(f"| {name} | # (# to #) | # | # |", points(d), *bootstrap(d), raw, adjusted)
        pages.accept(f"| {name} |")
    pages.expect("p is over all # comparisons before RL", len(compared))
    return compared


def rates_table(pages: Pages, agents: Agents, episodes: Episodes, compared: Compared) -> None:
    """Check success by turns on both pages, with the endings."""
    pages.accept("| agent | 4 turns | 16 | 32 | from 4 to 32, less random play's gain")
    for task, title in TASKS.items():
        for size, name in {CHANCE: CHANCE, **MODELS}.items():
            rate = {t: points(item_rates(agents[task, size], t).values()) for t in TURNS}
            pages.expect(f"| {title}: {name} | #% | #% | #% | #% | #% |", *rate.values())
            values: list[Value] = [rate[4], rate[16], rate[32]]
            row = "| #% | #% | #% | | |"
            if size in PAIR:
                d, _, p = compared[f"{title}, {size}: from 4 to 32 turns, less random play's gain"]
                values += [points(d), *bootstrap(d), p]
                row = "| #% | #% | #% | # (# to #) | # |"
            if size == CHANCE:
                pages.expect(f"| {title}: {name} {row} | |", *values)
            else:
                ends = [cut(episodes[task, size], stop, 32) for stop in ("max_context", "length")]
                pages.expect(f"| {title}: {name} {row} #% | #% |", *values, *ends)


def verdict(pages: Pages, agents: Agents, compared: Compared) -> None:
    at = {size: [points(item_rates(agents["babyai", size], t).values()) for t in (4, 32)] for size in (CHANCE, *PAIR)}
    gain = {size: last - first for size, (first, last) in at.items()}
    best = max(points(item_rates(agents["textcraft", size], t).values()) for size in MODELS for t in TURNS)
    pages.expect(
        "From # to # turns on BabyAI the untrained 0.5B model gains # points and the 1.5B model #; random play gains "
        "#. On TextCraft no model is above #%.",
        *(4, 32, *(gain[size] for size in (*PAIR, CHANCE)), best),
    )
    over = [
        compared[f"{title}, {size}: from 4 to 32 turns, less random play's gain"]
        for title in TASKS.values()
        for size in PAIR
    ]
    pages.require("**Not shown before RL.**", all(mean(d) < 0 and p < 0.05 for d, _, p in over))


def sizes(pages: Pages, agents: Agents, episodes: Episodes, compared: Compared) -> None:
    """Check what size brings, and the second evaluation of the larger model."""
    few, some, many = (compared[f"BabyAI, from 0.5B to 1.5B under {t} turns"] for t in (4, 16, 32))
    pages.expect(
        "on BabyAI success changes from 0.5B to 1.5B by # points under # turns, # under # and # (# to #) under # "
        "(p = #).",
        *(points(few[0]), 4, points(some[0]), 16, points(many[0]), *bootstrap(many[0]), 32, many[2]),
    )
    (again,) = (r for r in load("qwen-babyai") if r["arm"] == "base")
    same = again["config"]["agent"]["weights"] == agents["babyai", "1.5B"]["config"]["agent"]["weights"]
    second = item_rates(again, 20)
    first, small = (solved_within(episodes["babyai", size], 20) for size in ("1.5B", "0.5B"))
    lead = [second[item] - small[item] for item in small]
    apart = [first[item] - second[item] for item in first]
    p = sign_flips(lead, 4)
    pages.require("a second evaluation of the 1.5B model", same and first.keys() == second.keys())
    pages.require("**Size shows with more turns, if at all**", few[2] > 0.05 > many[2] and p > 0.05)
    ahead = points(less(first, small))
    pages.expect("lowers its lead under # turns from # to # (p = #).", 20, ahead, points(lead), p)
    pages.expect(
        "Under # turns the 1.5B model has #% here and #% in the evaluation of the paper's table (# points, p = #). By "
        "that one it leads the 0.5B model (#%) by # (# to #) points, p = #.",
        *(20, points(first.values()), points(second.values()), points(apart), sign_flips(apart, 4)),
        *(points(small.values()), points(lead), *bootstrap(lead), p),
    )
    traded, level = (compared[f"BabyAI, 0.5B under 32 turns less 1.5B under {t}"] for t in (4, 8))
    pages.expect(
        "turns less parameters, # (# to #), p = #. Under # turns the 1.5B model has #%, the 0.5B model under # has #% "
        "(p = #).",
        *(points(traded[0]), *bootstrap(traded[0]), traded[2]),
        *(8, points(item_rates(agents["babyai", "1.5B"], 8).values())),
        *(32, points(item_rates(agents["babyai", "0.5B"], 32).values()), level[2]),
    )


def cell(record: Record, turns: int, name: str) -> float | None:
    (result,) = (r for r in record["results"] if r["max_turns"] == turns)
    (total,) = result["scenarios"].values()
    value: float | None = total[name]
    return value


def tries(pages: Pages, agents: Agents, compared: Compared) -> None:
    """Check the best of several tries against one long episode, and what they cost."""
    splits = ((32, 1), (16, 2), (8, 4))
    pages.accept("| best of several tries: success, sampled tokens | 1 of 32 turns | 2 of 16 turns | 4 of 8 turns |")
    best = {}
    for task, title in TASKS.items():
        for size in (CHANCE, *PAIR):
            values = []
            for turns, k in splits:
                best[task, size, k] = points(best_of_by_item(agents[task, size], turns, k).values())
                spent = cell(agents[task, size], turns, "sampled_tokens")
                values += [best[task, size, k], k * (spent or 0)]
            pages.expect(f"| {title}: {MODELS.get(size, size)} | #%, # | #%, # | #%, # |", *values)
    won = [compared[f"BabyAI, {size}: best of 4 tries of 8 turns less one of 32"] for size in PAIR]
    pages.expect(
        "the best of four tries of # turns solves #% (0.5B) and #% (1.5B) of BabyAI, one try of # turns # and #% "
        "(p ≤ #; random play: # and #%).",
        *(8, best["babyai", "0.5B", 4], best["babyai", "1.5B", 4]),
        *(32, best["babyai", "0.5B", 1], best["babyai", "1.5B", 1], max(p for _, _, p in won)),
        *(best["babyai", CHANCE, 4], best["babyai", CHANCE, 1]),
    )
    pages.require("**New tries beat more turns**", all(mean(d) > 0 and p < 0.05 for d, _, p in won))
    ratios = []
    for name in ("sampled_tokens", "prompt_tokens"):
        for size in PAIR:
            short, long = (cell(agents["babyai", size], t, name) for t in (8, 32))
            assert short is not None
            assert long is not None
            ratios.append(4 * short / long)
    pages.expect(
        "four tries of # turns sample # (0.5B) and # (1.5B) times the tokens of one of #, and read # and # times the "
        "prompt tokens",
        *(8, *ratios[:2], 32, *ratios[2:]),
    )


def without_context(rows: Lines) -> float:
    """Return the Kaplan-Meier estimate of success within 32 turns in percent, with lack of context as censoring."""
    exits = sorted((len(row["actions"]) if solved(row) or row["stop"] == "max_context" else math.inf) for row in rows)
    unsolved = 1.0
    for turn in range(1, 33):
        playing = sum(end >= turn for end in exits)
        unsolved *= 1 - sum(solved(row) and len(row["actions"]) == turn for row in rows) / playing
    return 100 * (1 - unsolved)


def repeats(rows: Lines) -> float:
    """Return the percentage of turns with an action that the episode took before in the same state."""
    turns = again = 0
    for row in rows:
        pairs = list(zip(row["states"], row["actions"], strict=False))
        turns += len(pairs)
        again += len(pairs) - len(set(pairs))
    return 100 * again / turns


def refusals(rows: Lines) -> float:
    return 100 * sum(len(row["refused"]) for row in rows) / sum(len(row["actions"]) for row in rows)


def endings(pages: Pages, agents: Agents, episodes: Episodes, compared: Compared) -> None:
    """Check what ended episodes, and how turns were spent."""
    late, early = ([cut(episodes["babyai", size], "max_context", t) for size in PAIR] for t in (32, 16))
    up_to = [compared[f"BabyAI, {size}: from 4 to 16 turns, less random play's gain"] for size in PAIR]
    pages.expect(
        "on BabyAI #% (0.5B) and #% (1.5B) have none left by turn #, #% and #% by turn #. So context, too, limits "
        "success under # turns. Up to # turns both also gain less than random play, by # and # points (p ≤ #), and "
        "would if each of those #% and #% succeeded.",
        *(*late, 32, *early, 16, 32, 16, *(-points(d) for d, _, _ in up_to), max(p for _, _, p in up_to), *early),
    )
    spared = all(points(d) + share < 0 for (d, _, _), share in zip(up_to, early, strict=True))
    pages.require("and would if each of those", spared)
    pages.require("both also gain less than random play", all(mean(d) < 0 and p < 0.05 for d, _, p in up_to))
    replies = min(cut(episodes[task, "135M"], "length", 32) for task in TASKS)
    pages.expect(
        "#% of SmolLM2's episodes end in a cut reply. On TextCraft the environment refuses #% (0.5B) and #% (1.5B) of "
        "the actions.",
        *(replies, *(refusals(episodes["textcraft", size]) for size in PAIR)),
    )
    rejected, loops = (
        [measure(episodes["babyai", size]) for size in (*PAIR, CHANCE)] for measure in (refusals, repeats)
    )
    pages.expect(
        "on BabyAI the environment refuses #% (0.5B) and #% (1.5B) of the actions, and #% and #% of the turns repeat "
        "an action in the same state (random play: #% and #%)",
        *(*rejected[:2], *loops[:2], rejected[2], loops[2]),
    )
    free = [without_context(episodes["babyai", size]) for size in PAIR]
    pages.expect("success under # turns would be about #% (0.5B) and #% (1.5B)", 32, *free)
    start, chance = (points(item_rates(agents["babyai", s], 4).values()) for s in ("1.5B", CHANCE))
    own = points(item_rates(agents["babyai", CHANCE], 32).values()) - chance
    still = "The gain from 4 turns would still be below random play's."
    pages.require(still, free[1] - start < own and free[0] < free[1])
    pages.accept(still)
    gap = {size: points(item_rates(agents[task, size], 32).values()) for task in TASKS for size in ("135M",)}
    pages.expect("**SmolLM2-135M's #%** agrees with claim A", gap["135M"])


SCENARIOS = {
    "textcraft": "TextCraft",
    "babyai": "BabyAI",
    "searchqa": "Deep search",
    "sciworld": "SciWorld",
    "webarena": "Web, built-in sites",
}
ROWS = {CHANCE: CHANCE, "base": "base", "SFT": "SFT on the oracle", "staged": "RL, ScalingInter"}
PUBLISHED = ("Qwen2.5-3B-Instruct", "AgentGym-RL-3B", "AgentGym-RL-7B", "ScalingInter-7B")


COPIED = r"""(click|hover|tab_focus)\s*\[\s*\d+\s*\][ \t]+([A-Za-z]+[ \t]+)?('[^'\[\]]*'|"[^"\[\]]*")"""
"""An action that names its element as the page shows it."""


def rate_of(records: Sequence[Record]) -> tuple[Rates, list[float]]:
    """Return each item's success over all seeds under the most turns, and its mean with the limits of its interval."""
    columns: dict[str, list[float]] = {}
    for record in records:
        for item, rate in item_rates(record, max(map(int, record["outcomes"]))).items():
            columns.setdefault(item, []).append(rate)
    rates = {item: mean(values) for item, values in columns.items()}
    episodes = sum(len(s) for r in records for s in r["outcomes"][max(r["outcomes"], key=int)].values())
    low, high = wilson(list(rates.values()), episodes)
    return rates, [points(rates.values()), 100 * low, 100 * high]


def paper_table(pages: Pages) -> None:
    """Check the paper's table: rows, scenarios, base against random play, kinds of items, and what is missing."""
    found: dict[tuple[str, str], list[Record]] = {}
    for task in SCENARIOS:
        for record in load(f"qwen-{task}"):
            if "outcomes" in record:
                found.setdefault((task, record["arm"]), []).append(record)
    pages.require(f"| success | {' | '.join(SCENARIOS.values())} |", {t for t, _ in found} == set(SCENARIOS))
    for arm, title in ROWS.items():
        cells, values = [], []
        for task in SCENARIOS:
            cells.append("")
            if records := found.get((task, arm)):
                values += rate_of(records)[1]
                cells[-1] = "#% (#–#)"
                if len(records) > 1:
                    seeds = [rate_of([r])[1][0] for r in records]
                    values += [min(seeds), max(seeds)]
                    cells[-1] += ", seeds #–#"
        pages.expect(f"| {title} | {' | '.join(cells)} |", *values)
    published_rows(pages, found)
    scenarios(pages, found)
    differences(pages, found)
    aims(pages, found)
    kinds(pages, found)
    runs(pages)
    lists_of_actions(pages)
    absent = "RL, fixed short horizon; RL, fixed long horizon; RL, adaptive horizon"
    pages.require(f"Missing rows: {absent}.", {arm for _, arm in found} == set(ROWS))
    gaps = {(task, arm) for task in SCENARIOS for arm in ROWS} - found.keys()
    expected = {("webarena", "SFT"), ("sciworld", "staged"), ("webarena", "staged")}
    absent_cells = "SFT on the oracle on Web; RL, ScalingInter on SciWorld and Web"
    pages.require(f"Missing cells: {absent_cells}.", gaps == expected)
    in_words(pages, found)


def in_words(pages: Pages, found: dict[tuple[str, str], list[Record]]) -> None:
    """Check the sentences below the table."""
    ends = {key: points(rate_of(records)[0].values()) for key, records in found.items()}
    rates = {key: rate_of(records)[0] for key, records in found.items()}
    gaps = [less(rates[task, "staged"], rates[task, "SFT"]) for task in ("textcraft", "babyai")]
    limits = [[v[0] if isinstance(v, tuple) else v for v in bootstrap(gap)] for gap in gaps]
    shown = "No difference between RL and imitation of the oracle is shown on TextCraft and BabyAI"
    pages.require(shown, all(low < 0 < high for low, high in limits))
    widest = [(max(-low, high), 0.1) for low, high in limits]
    pages.expect("(within about # and # points)", *widest)
    pages.require("In deep search RL is ahead.", ends["searchqa", "staged"] > ends["searchqa", "SFT"])
    of_arm = {
        arm: [r for t in SCENARIOS for r in load(f"qwen-{t}") if "curves" in r and r["arm"] == arm] for arm in ROWS
    }
    seconds = [r["seconds"] / 60 for r in of_arm["staged"] if r["task"] in ("textcraft", "babyai")]
    pages.expect("Imitation takes a minute instead of # to #,", min(seconds), max(seconds))
    pages.require(
        "Imitation takes a minute",
        all(r["seconds"] < 60 for r in of_arm["SFT"] if r["task"] in ("textcraft", "babyai")),
    )
    demonstrations = [r["rounds"][0]["expert"] for r in of_arm["SFT"]]
    pages.expect("SFT has one seed and # to # demonstrations", min(demonstrations), max(demonstrations))
    pages.require("SFT has one seed", all(len(r) == 1 for (_, arm), r in found.items() if arm == "SFT"))
    pages.require(
        "On the built-in sites neither base nor random play solves a task.",
        ends["webarena", "base"] == ends["webarena", CHANCE] == 0,
    )
    episodes = load_lines("qwen-webarena", "eval-qwen-base-webarena.actions")
    rewarded = [row for row in episodes if any(row["rewards"])]
    pages.require("Base earned no reward there, so RL from base can hardly start", not rewarded)
    copied = [sum(bool(re.fullmatch(COPIED, a)) for a in row["actions"]) for row in episodes]
    share = 100 * sum(copied) / sum(len(row["actions"]) for row in episodes)
    values = (share, sum(map(bool, copied)), len(episodes))
    pages.expect("#% of base's actions, in # of # episodes, copied the element as the page shows it", *values)
    pages.accept("(`click [13] link 'Outdoors'`)")


def published_rows(pages: Pages, found: dict[tuple[str, str], list[Record]]) -> None:
    sources = json.loads((ROOT / "src/agentgym_rl/evaluation/published.json").read_text(encoding="utf-8"))
    paper = next(source for source in sources if "AgentGym-RL-3B" in source["agents"])
    columns = [paper["scenarios"].index(name) for name in SCENARIOS.values() if name in paper["scenarios"]]
    for agent in PUBLISHED:
        values = [paper["agents"][agent][column] for column in columns]
        pages.expect(f"| *{agent} (published)* | #% | #% | #% | #% |  |", *values)
    untrained = paper["agents"]["Qwen2.5-3B-Instruct"][paper["scenarios"].index("BabyAI")]
    _, (_, low, high) = rate_of(found["babyai", CHANCE])
    pages.require("it is about level with the published untrained 3B model", low < untrained < high)


def scenarios(pages: Pages, found: dict[tuple[str, str], list[Record]]) -> None:
    """Check items, turns and samples of each scenario."""
    for task, title in SCENARIOS.items():
        records = [r for (t, _), group in found.items() if t == task for r in group]
        outcomes = [o for r in records for o in r["outcomes"].values()]
        (items,) = {len(o) for o in outcomes}
        (turns,) = {int(t) for r in records for t in r["outcomes"]}
        samples = sorted({len(s) for o in outcomes for s in o.values()})
        tasks = records[0]["config"]["tasks"]
        without = [t["name"] for t in tasks if not any(t["name"] == u["name"] and u["items"] for u in tasks)]
        text = f"#, no {' or '.join(without)}" if without else "#"
        pages.expect(f"| {title} | {text} | # | {', '.join('#' for _ in samples)} |", items, turns, *samples)


def differences(pages: Pages, found: dict[tuple[str, str], list[Record]]) -> None:
    """Check the agents of the table against each other."""
    pages.accept("| score 100 |")
    units = {"textcraft": 4, "babyai": 4, "searchqa": 2, "sciworld": 2, "webarena": 4}
    for title, arm, other in (
        ("RL, ScalingInter, less base", "staged", "base"),
        ("SFT less base", "SFT", "base"),
        ("RL, ScalingInter, less SFT", "staged", "SFT"),
        ("Base less random play", "base", CHANCE),
    ):
        tasks = [task for task in units if {(task, arm), (task, other)} <= found.keys()]
        gaps = {task: less(*(rate_of(found[task, each])[0] for each in (arm, other))) for task in tasks}
        draws = {task: units[task] * len(found[task, arm]) * len(found[task, other]) for task in tasks}
        adjusted = holm([sign_flips(d, draws[task]) for task, d in gaps.items()])
        values: list[Value] = []
        for d, p in zip(gaps.values(), adjusted, strict=True):
            values += [points(d), *bootstrap(d), p]
        parts = "; ".join(f"{SCENARIOS[task]} # (# to #, p = #)" for task in tasks)
        pages.expect(f"- {title} on the same items, in points: {parts}. p is exact, after Holm.", *values)


def aims(pages: Pages, found: dict[tuple[str, str], list[Record]]) -> None:
    """Check the gains over base that the study aimed at. The oracle's record has the items of each depth."""
    (oracle,) = (r for r in load("oracle") if r["task"] == "crafting")
    easy = [f"textcraft/{item}" for depth in ("depth1", "depth2") for item in oracle["turns"][depth]]
    for name, task, aim in (("TextCraft, depths 1 and 2", "textcraft", 60), ("BabyAI", "babyai", 35)):
        base, *agents = (rate_of([r])[0] for r in (*found[task, "base"], *found[task, "staged"]))
        items = easy if task == "textcraft" else list(base)
        gains = [mean(agent[item] for agent in agents) - base[item] for item in items]
        seeds = [100 * mean(agent[item] - base[item] for item in items) for agent in agents]
        snippet = f"{name} # (# to #; seeds # to #; aim #)"
        pages.expect(snippet, points(gains), *bootstrap(gains), min(seeds), max(seeds), aim)
        pages.accept(name)


def kinds(pages: Pages, found: dict[tuple[str, str], list[Record]]) -> None:
    for task in ("babyai", "searchqa", "sciworld", "webarena"):
        arms = [arm for arm in ROWS if (task, arm) in found]
        for kind, cell_of_kind in found[task, CHANCE][0]["results"][-1]["tasks"].items():
            if cell_of_kind is not None:
                name = kind.partition("/")[2]
                rates = [100 * mean(kind_rate(record, kind) for record in found[task, arm]) for arm in arms]
                pages.expect(f"| {name} | # | {' | '.join(['#'] * len(arms))} |", cell_of_kind["items"], *rates)
                pages.accept(f"| {name} |")


def runs(pages: Pages) -> None:
    """Check length and time of each run, and behaviour by stage."""
    less_diverse, recovering, ends = [], [], {}
    for task, title in SCENARIOS.items():
        trained = [r for r in load(f"qwen-{task}") if "curves" in r]
        for run in trained:
            name = f"| {title}, {ROWS[run['arm']]}, seed {run['seed']} |"
            end, minutes = f"| # | `{run['commit'][:7]}` |", run["seconds"] / 60
            pages.accept(name)
            if run["arm"] == "SFT":
                pages.expect(f"{name} # of # |  |  {end}", run["steps"], run["config"]["sft"]["batch_size"], minutes)
                continue
            rl, stages = run["config"]["rl"], [stage["turns"] for stage in run["stages"]]
            episodes = rl["groups_per_step"] * rl["group_size"]
            values = (run["steps"], episodes, *stages, run["sampled_tokens"] / 1e6, minutes)
            pages.expect(f"{name} # of # | # → # → # | # {end}", *values)
        staged = [r for r in trained if r["arm"] == "staged"]
        if staged:
            rows = behaviour_rows(pages, staged, "" if task == "textcraft" else f"{title}, ")
            less_diverse.append(rows[-1][0] <= rows[0][0])
            recovering.append(rows[-1][-1] > rows[0][-1])
            ends[task] = (rows[0], rows[-1])
    pages.require("In none of the three scenarios", len(less_diverse) == 3 and all(less_diverse))
    pages.require("Success after a refusal rises in all three.", all(recovering))
    settings_of_runs(pages)
    open_answers(pages)
    loops, states = ([ends[task][end][column] for end in (0, 1)] for task, column in (("babyai", 2), ("searchqa", 1)))
    pages.require("on BabyAI loops become more frequent", loops[1] > loops[0])
    pages.require("in deep search the episodes of an item visit fewer states together", states[1] < states[0])
    pages.require(
        "which other jobs used, too",
        all("H200" in r["hardware"] for t in SCENARIOS for r in load(f"qwen-{t}") if "curves" in r),
    )


def open_answers(pages: Pages) -> None:
    """Check how often the agents of deep search leave the tag of an answer open, and the turns refused for it."""
    episodes = {s: load_lines("qwen-searchqa", f"eval-qwen-staged-searchqa-{s}.actions") for s in (0, 2)}
    still_open = [r for r in episodes[2] if any(r["actions"][i].startswith("<answer>") for i in r["refused"])]
    rest = sum(len(row["refused"]) for row in episodes[0])
    pages.expect("open in # of # episodes", len(still_open), len(episodes[2]))
    same = [r for r in still_open if answer_of(r["actions"][-2]) == answer_of(r["actions"][-1])]
    pages.expect("in # of them around the same answer", len(same))
    pages.expect("That of the other seed has # refused turns in all", rest)
    pages.require("closes it in the next turn", all(r["stop"] == "done" for r in still_open))


def answer_of(action: str) -> str:
    return action.split("<answer>")[-1].split("</answer>")[0].strip()


def settings_of_runs(pages: Pages) -> None:
    """Check stages and KL term of the 1.5B model's runs."""
    staged = {t: [r for r in load(f"qwen-{t}") if r.get("stages")] for t in ("textcraft", "babyai", "searchqa")}
    schedules = sorted({tuple(s["turns"] for s in r["stages"]) for records in staged.values() for r in records})
    pages.expect("1.5B: # → # → # to # → # → # |", *schedules[0], *schedules[-1])
    terms = {task: {r["config"]["rl"]["kl_coef"] for r in records} for task, records in staged.items()}
    pages.require("for 1.5B, none on BabyAI", terms == {"textcraft": {0.01}, "babyai": {0}, "searchqa": {0.01}})


def kind_rate(record: Record, kind: str) -> float:
    rate: float = record["results"][-1]["tasks"][kind]["success"]["value"]
    return rate


def lists_of_actions(pages: Pages) -> None:
    """Check that of the observations only BabyAI's list the actions of random play."""
    jobs = {"textcraft": "eval-qwen-base-textcraft", "babyai": "eval-qwen-base-babyai"}
    jobs |= {"searchqa": "eval-qwen-base-searchqa", "sciworld": "eval-qwen-base-sciworld"}
    jobs |= {"webarena": "eval-qwen-base-webarena"}
    listed = set()
    for task, job in jobs.items():
        episodes = load_lines(f"qwen-{task}", f"{job}.episodes")
        first = [next(m["content"] for m in row["messages"] if m["role"] == "user") for row in episodes]
        if any("available actions" in text for text in first):
            listed.add(task)
    pages.require("of which only BabyAI's observations tell the models", listed == {"babyai"})
