"""Checks of claim C and of the ablations for results/check.py."""

from __future__ import annotations

from check_a import points
from check_b import ARMS, Groups, deepest_dip, final, mean_differences
from page_numbers import (
    Pages,
    Record,
    Value,
    best_of,
    bootstrap,
    by_arm,
    holm,
    item_rates,
    load,
    mean,
    sign_flips,
)

SIZES = ("1M", "5M", "25M")
TURNS = (2, 4, 8, 16, 32)
Rates = dict[tuple[str, int, int], float]
"""Success in percent by arm, turns and seed."""


def rates_by_turns(pages: Pages, agents: Groups) -> Rates:
    """Check the table of success by turns. Return the success of each agent."""
    chance = agents["babyai", "random play"][0]
    pages.expect("| random play | #% | #% | #% | #% | #% |", *(points(item_rates(chance, t).values()) for t in TURNS))
    pages.accept("| success under | 2 turns | 4 | 8 | 16 | 32 |")
    rates: Rates = {}
    for size in SIZES:
        for arm, word in (("base", "untrained"), ("staged", "trained")):
            values: list[Value] = []
            for t in TURNS:
                seeds = [
                    points(item_rates(r, t).values()) for _, r in sorted(agents["babyai", f"{arm} {size}"].items())
                ]
                values += [mean(seeds), min(seeds), max(seeds)]
                rates |= {(f"{arm} {size}", t, s): v for s, v in enumerate(seeds)}
            pages.expect(f"| {size}, {word} | {' | '.join(['#% (#–#)'] * 5)} |", *values)
    return rates


def over_chance(agents: Groups) -> tuple[list[float], dict[str, list[float]]]:
    """Return random play's gain from 4 to 32 turns by item, and each arm's gain less that."""
    chance = agents["babyai", "random play"][0]
    few, many = item_rates(chance, 4), item_rates(chance, 32)
    own = {item: many[item] - few[item] for item in few}
    over = {}
    for arm in (f"{kind} {size}" for kind in ("base", "staged") for size in SIZES):
        columns = [
            [item_rates(r, 32)[i] - item_rates(r, 4)[i] - own[i] for i in own] for r in agents["babyai", arm].values()
        ]
        over[arm] = mean_differences(columns)
    return list(own.values()), over


def claim_c(pages: Pages) -> None:
    """Check the gains from turns and from parameters."""
    agents = by_arm(load("interaction"), "outcomes")
    rates = rates_by_turns(pages, agents)
    own, over = over_chance(agents)
    at = {(size, t): mean(rates[f"staged {size}", t, s] for s in range(3)) for size in SIZES for t in TURNS}
    chance = {t: points(item_rates(agents["babyai", "random play"][0], t).values()) for t in TURNS}
    pages.accept("| agent, trained | 4 turns | 32 turns |")
    pages.expect("| random play | #% | #% | # | | |", chance[4], chance[32], points(own))
    adjusted = holm([sign_flips(over[f"staged {size}"], 12) for size in SIZES])
    for size, after_holm in zip(SIZES, adjusted, strict=True):
        d = over[f"staged {size}"]
        bold = "**#**" if size == "1M" else "#"
        row = f"| {size} | #% | #% | # | {bold} (# to #) | # |"
        gain = at[size, 32] - at[size, 4]
        pages.expect(row, at[size, 4], at[size, 32], gain, points(d), *bootstrap(d), after_holm)
    small = over["staged 1M"]
    p = sign_flips(small, 12)
    gain = at["1M", 32] - at["1M", 4]
    pages.expect(
        "From # to # turns the trained 1M model gains # points, but random play gains #. The difference is # points "
        "(# to #, p = #).",
        *(4, 32, gain, points(own), points(small), *bootstrap(small), p),
    )
    pages.require("**Not separable from chance at 1M.**", p > 0.05)
    pages.expect(
        "raise success by # points at 1M, # more than they raise random play (within noise); 5M and 25M gain # and #",
        *(gain, points(small), points(over["staged 5M"]), points(over["staged 25M"])),
    )
    untrained = [-points(over[f"base {size}"]) for size in SIZES]
    pages.expect("gain less than random play does (by # to # points)", min(untrained), max(untrained))
    columns = []
    for seed in range(3):
        large, least = (item_rates(agents["babyai", f"staged {size}"][seed], 4) for size in ("25M", "1M"))
        columns.append([large[item] - least[item] for item in large])
    by_size = mean_differences(columns)
    p_size = sign_flips(by_size, 12)
    pages.expect(
        "parameters at # turns success changes by # points (# to #, p = #)",
        *(4, points(by_size), *bootstrap(by_size), p_size),
    )
    pages.require("there parameters bring nothing that shows", p_size > 0.05)
    beforehand(pages, agents, rates)
    tries(pages, agents, rates)
    limits(pages, agents, rates)
    base = mean(rates["base 1M", 32, s] - rates["base 1M", 4, s] for s in range(3))
    pages.expect(
        "Random play gains # points from # to # turns, the untrained 1M model #, the trained one #",
        *(points(own), 4, 32, base, gain),
    )


def beforehand(pages: Pages, agents: Groups, rates: Rates) -> None:
    """Check the test that was fixed beforehand: 1M under 32 turns less 25M under 4."""
    columns = []
    for seed in range(3):
        small, large = agents["babyai", "staged 1M"][seed], agents["babyai", "staged 25M"][seed]
        many, few = item_rates(small, 32), item_rates(large, 4)
        columns.append([many[item] - few[item] for item in many])
    gains = mean_differences(columns)
    by_seed = [rates["staged 1M", 32, s] - rates["staged 25M", 4, s] for s in range(3)]
    pages.expect(
        "at 4 turns is # points (95% interval over items # to #), #, # and # by seed",
        *(points(gains), *bootstrap(gains), *by_seed),
    )
    pages.expect("turns less parameters, the difference is # points (# to #)", points(gains), *bootstrap(gains))
    pages.accept(
        "the gain from 4 to 32 turns at 1M less that from 1M to 25M at 4 turns", "; gain from 4 to 32 turns over"
    )
    pages.accept("Episodes are played once, under 32 turns", "comes down to 1M under 32 turns less 25M under 4")


def scenario(record: Record, turns: int) -> Record:
    (cell,) = (r["scenarios"]["BabyAI"] for r in record["results"] if r["max_turns"] == turns)
    return dict(cell)


def tries(pages: Pages, agents: Groups, rates: Rates) -> None:
    """Check one long episode against several tries."""
    single = [mean(rates[f"staged {size}", 16, s] for s in range(3)) for size in SIZES]
    best = [100 * mean(best_of(r, 4, 4) for r in agents["babyai", f"staged {size}"].values()) for size in SIZES]
    chance = agents["babyai", "random play"][0]
    pages.expect(
        "one of up to # turns solves # to #% by size, the best of four tries of # turns # to #% (random play # and #%)",
        *(16, min(single), max(single), 4, min(best), max(best)),
        *(points(item_rates(chance, 16).values()), 100 * best_of(chance, 4, 4)),
    )
    pages.require("**Trained models from scratch have it the other way round**", min(single) > max(best))
    small = list(agents["babyai", "staged 1M"].values())
    turns = [4 * mean(scenario(r, 4)["turns"] for r in small), mean(scenario(r, 16)["turns"] for r in small)]
    tokens = [
        4 * mean(scenario(r, 4)["prompt_tokens"] for r in small),
        mean(scenario(r, 16)["prompt_tokens"] for r in small),
    ]
    pages.expect("take more turns (# against #) and #% of the prompt tokens", *turns, 100 * tokens[0] / tokens[1])


def limits(pages: Pages, agents: Groups, rates: Rates) -> None:
    """Check what size shows, and what turns and parameters cost."""
    at = {(size, t): mean(rates[f"staged {size}", t, s] for s in range(3)) for size in SIZES for t in TURNS}
    apart = max(max(at[s, t] for s in SIZES) - min(at[s, t] for s in SIZES) for t in (2, 4, 8))
    pages.expect(
        "at # to # turns all sizes are within # points, at # turns 5M and 25M lead 1M by # and # points",
        *(2, 8, apart, 32, at["5M", 32] - at["1M", 32], at["25M", 32] - at["1M", 32]),
    )
    small = list(agents["babyai", "staged 1M"].values())
    longer = mean(scenario(r, 32)["turns"] for r in small) / mean(scenario(r, 4)["turns"] for r in small)
    records = [r for r in load("interaction") if r["arm"] == "staged"]
    sizes = {size: {r["parameters"] for r in records if f"-{size}-" in r["job"]} for size in SIZES}
    ratio = max(sizes["25M"]) / max(sizes["1M"])
    pages.expect("Under # turns instead of # an episode of the trained 1M model has # times the turns", 32, 4, longer)
    pages.expect("the 25M model has # times the parameters", ratio)
    budget = {r["config"]["rl"]["token_budget"] for r in records}
    pages.expect("the same RL of # thousand tokens", budget.pop() / 1e3)
    pages.require("and the same RL of", not budget)
    in_training(pages)


def in_training(pages: Pages) -> None:
    """Check fixed-long less fixed-short on three tasks."""
    far, small = (by_arm(load(s), "outcomes") for s in ("horizon-conditions", "horizon-smollm2"))
    rooms = by_arm(load("staged-horizon"), "evaluations")
    ahead = mean(
        points(item_rates(far["far rooms", "fixed-long"][s], 16).values())
        - points(item_rates(far["far rooms", "fixed-short"][s], 16).values())
        for s in range(6)
    )
    by_seed = [
        points(item_rates(small["textcraft", "fixed-long"][s], 16).values())
        - points(item_rates(small["textcraft", "fixed-short"][s], 16).values())
        for s in (1, 2, 3)
    ]
    level = [points(final(r) for r in rooms["babyai", arm].values()) for arm in ("fixed-long", "fixed-short")]
    pages.expect(
        "fixed-long is # points above fixed-short in far rooms and # with SmolLM2 on TextCraft (by seed #, #, #), and "
        "level with it on many rooms (#)",
        *(ahead, mean(by_seed), *by_seed, level[0] - level[1]),
    )


def ablations(pages: Pages) -> None:
    """Check the table of the ablations."""
    runs = by_arm(load("ablations"), "evaluations")
    end = {arm: [100 * final(r) for _, r in sorted(seeds.items())] for (_, arm), seeds in runs.items()}
    pages.expect("| nothing | #% | |", mean(end["unchanged"]))
    titles = {
        "anchor states": "anchor states (GiGPO)",
        "credit by turns": "credit by turns",
        "temperature 1.3": "temperature 1.3 in training",
        "temperature 0.7": "temperature 0.7 in training",
        "overlap, corrected": "overlap, importance corrected",
        "overlap, uncorrected": "overlap, uncorrected",
        "group of 4": "groups of 4 (32 a step)",
        "group of 16": "groups of 16 (8 a step)",
    }
    for arm, title in titles.items():
        d = [a - b for a, b in zip(end[arm], end["unchanged"], strict=True)]
        difference = "**#**" if mean(d) > 5 else "#"
        pages.expect(f"| {title} | #% | {difference} (# to #) |", mean(end[arm]), mean(d), min(d), max(d))
        pages.accept(f"| {title} |")
    gains = [mean(end[arm]) - mean(end["unchanged"]) for arm in ("anchor states", "credit by turns")]
    pages.expect("anchor states (GiGPO) brought # points and credit by turns # on the same budget", *gains)
    horizons = by_arm(load("staged-horizon"), "evaluations")
    schedules = [points(final(r) for r in horizons["babyai", arm].values()) for arm in ARMS]
    pages.require("more than any schedule did there", min(gains) > max(schedules) - min(schedules))
    dips = {
        arm: [100 * deepest_dip(r) for _, r in sorted(runs["babyai", arm].items())]
        for arm in ("overlap, uncorrected", "overlap, corrected")
    }
    pages.expect(
        "dipped by #, # and # points on their way, with it by #, # and #", *(v for d in dips.values() for v in d)
    )
    pages.accept("(300 episodes at temperature 1), means of three seeds, which prove nothing at 5%")
