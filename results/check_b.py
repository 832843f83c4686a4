"""Checks of claim B for results/check.py: staged against fixed horizons."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from check_a import differences, known, points
from page_numbers import Pages, Record, Value, bootstrap, by_arm, holm, item_rates, load, mean

Groups = dict[tuple[str, str], dict[int, Record]]
Turns = dict[str, int | None]
"""Turns of the oracle by item; None if it does not succeed."""
ARMS = ("staged", "adaptive", "fixed-long", "fixed-short")
FAR_ARMS = ("staged", "fixed-long", "fixed-middle", "fixed-short")


def final(record: Record) -> float:
    return float(record["evaluations"][-1]["success"])


def largest_drop(record: Record) -> float:
    """Return the fall from the best evaluation to the lowest after it."""
    success = [e["success"] for e in record["evaluations"]]
    best = success.index(max(success))
    return float(success[best] - min(success[best:]))


def deepest_dip(record: Record) -> float:
    """Return the largest fall from any evaluation to a later one."""
    best = dip = 0.0
    for evaluation in record["evaluations"]:
        best = max(best, evaluation["success"])
        dip = max(dip, best - evaluation["success"])
    return dip


def listed_sign_flips(values: Sequence[float]) -> float:
    """Return the exact two-sided p-value by listing all signs of up to twelve differences."""
    nonzero = [v for v in values if abs(v) > 1e-12]
    observed = abs(math.fsum(nonzero)) - 1e-9
    extreme = 0
    for signs in range(2 ** len(nonzero)):
        extreme += abs(math.fsum(v if signs >> i & 1 else -v for i, v in enumerate(nonzero))) >= observed
    return extreme / 2 ** len(nonzero)


def mean_differences(columns: Sequence[Sequence[float]]) -> list[float]:
    return [mean(values) for values in zip(*columns, strict=True)]


def two_tasks(pages: Pages) -> None:
    """Check the arms' table on many rooms and deep crafting."""
    runs = by_arm(load("staged-horizon"), "evaluations")
    rooms = by_arm(load("interaction"), "outcomes")["babyai", "random play"][0]
    cells = by_arm(load("rl-over-base"), "outcomes")["textcraft", "random play"][0]["results"][-1]["tasks"]
    deep = [cells[f"TextCraft/Depth {n}"] for n in (2, 3)]
    chance = {
        "babyai": points(item_rates(rooms, 16).values()),
        "textcraft": 100 * sum(c["success"]["value"] * c["items"] for c in deep) / sum(c["items"] for c in deep),
    }
    for task, title in (("babyai", "*many rooms*, #k tokens"), ("textcraft", "*deep crafting*, #k tokens")):
        budget = runs[task, "staged"][0]["config"]["rl"]["token_budget"] / 1e3
        values: list[Value] = [budget, chance[task]]
        values.append(100 * mean(r["evaluations"][0]["success"] for r in runs[task, "staged"].values()))
        for arm in ARMS:
            ends = [100 * final(r) for r in runs[task, arm].values()]
            values += [mean(ends), min(ends), max(ends)]
        pages.expect(f"| {title} | #% | #% | {' | '.join(['#% (#–#)'] * 4)} |", *values)
    falls = [points(largest_drop(r) for r in runs["babyai", arm].values()) for arm in ARMS]
    pages.expect("best to lowest after it | | | # points | # | # | # |", *falls)
    spent = [mean(r["steps"] for r in runs["babyai", a].values()) for a in ARMS]
    seconds = [mean(r["seconds"] for r in runs["babyai", a].values()) for a in ARMS]
    pages.expect("| #; # | #; # | #; # | #; # |", *(v for pair in zip(spent, seconds, strict=True) for v in pair))
    pages.expect("updates of the same tokens (# against #)", spent[3], spent[2])
    since = max(r["evaluations"][1]["sampled_tokens"] for a in ARMS for r in runs["babyai", a].values())
    over = [points(mean_over_run(r, since) for r in runs["babyai", a].values()) for a in ARMS]
    pages.expect("| – mean from #k tokens on | | | #% | #% | #% | #% |", since / 1e3, *over)
    dips = {arm: 100 * max(deepest_dip(r) for r in runs["babyai", arm].values()) for arm in ARMS}
    pages.expect("are # points (staged), # (adaptive) and # (fixed-long", *(dips[a] for a in ARMS[:3]))
    pages.expect("and # (fixed-long and fixed-short)", dips["fixed-short"])
    findings(pages, runs)
    pages.accept("seconds beside 13 to 18 others")


def findings(pages: Pages, runs: Groups) -> None:
    """Check what the runs of the two tasks say beside success: contrast, depth 3, the doctor."""
    crafting = [r for (task, arm), seeds in runs.items() if task == "textcraft" and arm in ARMS for r in seeds.values()]
    pages.expect("had no contrast in all # runs", len(crafting))
    without = [mean(known(r, "groups/zero_variance")) for r in crafting]
    pages.require("More than nine groups in ten had no contrast in all", min(without) > 0.9)
    solved = max(e["subsets"]["depth3"]["success"] for r in crafting for e in r["evaluations"])
    pages.require("depth 3 was never solved", solved == 0)
    pages.accept("depth 3 was never solved")
    called = {
        arm: [r for r in runs["babyai", arm].values() if "success_collapse" in {f["rule"] for f in r["findings"]}]
        for arm in ARMS
    }
    counts = [len(called[arm]) for arm in ARMS]
    pages.require("in all six fixed-short runs on many rooms and in one staged run", counts == [1, 0, 0, 6])
    worst = 100 * max(deepest_dip(r) for records in called.values() for r in records)
    pages.expect("held-out success fell by # points at most", worst)
    ends = {arm: {s: 100 * final(r) for s, r in runs["babyai", arm].items()} for arm in ARMS}
    behind = sum(ends["staged"][s] < ends["fixed-short"][s] for s in range(6))
    pages.require("below fixed-short in two of six seeds", behind == 2)
    rest = mean(ends["staged"][s] - ends["fixed-short"][s] for s in range(1, 6))
    pages.expect("without seed 0 (#%) its lead is # points", ends["staged"][0], rest)
    pages.accept("without seed 0 (")
    starts = mean(r["evaluations"][0]["success"] for r in runs["textcraft", "staged"].values())
    means = {arm: mean(final(r) for r in runs["textcraft", arm].values()) for arm in ARMS}
    falls_least = max(means.values()) == means["staged"] < starts
    pages.require("every arm ends below its starting model and staged falls least", falls_least)


def deciding(pages: Pages) -> None:
    """Check the comparisons of the protocol on both tasks and on each."""
    runs = by_arm(load("staged-horizon"), "evaluations")
    ends = {key: {s: final(r) for s, r in seeds.items()} for key, seeds in runs.items()}
    pairs = [(a, b) for a in ("staged", "adaptive") for b in ("fixed-short", "fixed-long")]
    table: dict[tuple[str, str], list[tuple[float, float, float]]] = defaultdict(list)
    for tasks in (("babyai", "textcraft"), ("babyai",), ("textcraft",)):
        columns = {(a, b): [ends[t, a][s] - ends[t, b][s] for t in tasks for s in sorted(ends[t, a])] for a, b in pairs}
        tests = [listed_sign_flips(columns[pair]) for pair in pairs]
        for pair, p, q in zip(pairs, tests, holm(tests), strict=True):
            table[pair].append((points(columns[pair]), p, q))
    for (a, b), cells in table.items():
        bold = ("**#** points" if (a, b) == ("staged", "fixed-long") else "#") + ", #, #"
        pages.expect(f"| {a} − {b} | {bold} | #, #, # | #, #, # |", *(v for cell in cells for v in cell))
    pages.accept("both tasks, 12 pairs: difference", "*many rooms*, 6 pairs | *deep crafting*, 6 pairs")
    pages.accept("Six pairs alone cannot reach 5% after Holm", "| 12 pairs | | |")
    long, short = table["staged", "fixed-long"], table["staged", "fixed-short"]
    pages.expect("staged ends # points above fixed-long over the two tasks of the protocol (p = # after Holm)",
                 long[0][0], long[0][2])  # fmt: skip
    pages.expect("| 12 pairs | | | **#** | **#**, Holm # |", *long[0])
    pages.expect("staged ends # points higher over the two tasks (p = # after Holm)", short[0][0], short[0][2])
    beyond = [pair for pair, cells in table.items() if cells[0][2] < 0.05]
    pages.require("One of the four comparisons that decide is beyond chance", beyond == [("staged", "fixed-long")])
    equal = equal_steps(runs, "babyai", 73)
    pages.expect(
        "after # steps staged has #% with #% of fixed-long's tokens (#%), adaptive #% with #%, fixed-short #% with #%",
        *(73, *equal["staged"], equal["fixed-long"][0], *equal["adaptive"], *equal["fixed-short"]),
    )
    far = equal_steps(by_arm(load("horizon-conditions"), "evaluations"), "far rooms", 73)
    pages.expect("after #, staged has #% with #% of the tokens of fixed-long (#%)",
                 73, *far["staged"], far["fixed-long"][0])  # fmt: skip
    pages.expect(
        "after # steps: on many rooms staged has #% with #% of the tokens of fixed-long (#%), in far rooms #% with #% "
        "of its tokens (#%)",
        *(73, *equal["staged"], equal["fixed-long"][0], *far["staged"], far["fixed-long"][0]),
    )


def mean_over_run(record: Record, since: float) -> float:
    """Return the mean of success at 51 points of the token axis from `since` to the end of the run."""
    xs, ys = ([e[name] for e in record["evaluations"]] for name in ("sampled_tokens", "success"))

    def at(x: float) -> float:
        for (x0, y0), (x1, y1) in pairwise(zip(xs, ys, strict=True)):
            if x0 <= x <= x1:
                return float(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
        return float(ys[0] if x < xs[0] else ys[-1])

    return mean(at(since + (xs[-1] - since) * i / 50) for i in range(51))


def equal_steps(runs: Groups, task: str, steps: int) -> dict[str, tuple[float, float]]:
    """Return success and share of fixed-long's tokens of each arm after some steps, in percent."""
    tokens, success = {}, {}
    for (name, arm), seeds in runs.items():
        if name == task and arm != "base":
            tokens[arm] = mean(r["curves"]["tokens/total"][steps - 1] for r in seeds.values())
            success[arm] = mean(at_step(r["evaluations"], steps) for r in seeds.values())
    return {arm: (100 * success[arm], 100 * tokens[arm] / tokens["fixed-long"]) for arm in tokens}


def at_step(evaluations: Sequence[Record], step: int) -> float:
    for a, b in pairwise(evaluations):
        if a["step"] <= step <= b["step"]:
            return float(a["success"] + (b["success"] - a["success"]) * (step - a["step"]) / (b["step"] - a["step"]))
    return float(evaluations[-1]["success"])


def kind_rate(record: Record, kind: str) -> float:
    return float(100 * record["results"][-1]["tasks"][kind]["success"]["value"])


def far_rooms(pages: Pages) -> None:
    """Check the table and the sentences about far rooms."""
    agents = by_arm(load("horizon-conditions"), "outcomes")
    runs = by_arm(load("horizon-conditions"), "evaluations")
    by_seed = {arm: [r for _, r in sorted(agents["far rooms", arm].items())] for arm in FAR_ARMS}
    end = {arm: [points(item_rates(r, 16).values()) for r in records] for arm, records in by_seed.items()}
    pages.expect(
        f"| success, mean (lowest to highest seed) | {' | '.join(['#% (#–#)'] * 4)} |",
        *(v for rates in end.values() for v in (mean(rates), min(rates), max(rates))),
    )
    less = {arm: [a - b for a, b in zip(end["staged"], end[arm], strict=True)] for arm in FAR_ARMS[1:]}
    pages.expect(
        "| staged less it, p | | **#** points, # | #, # | #, # |",
        *(v for d in less.values() for v in (mean(d), listed_sign_flips(d))),
    )
    keys = {arm: sorted(kind_rate(r, "BabyAI/KeyInBox") for r in by_seed[arm]) for arm in FAR_ARMS}
    pages.expect("| KeyInBox alone | #% | #% | #% | #% |", *map(mean, keys.values()))
    kinds = [kind for kind in by_seed["staged"][0]["results"][-1]["tasks"] if "KeyInBox" not in kind]
    others = [mean(kind_rate(r, kind) for r in by_seed[arm] for kind in kinds) for arm in FAR_ARMS]
    pages.expect("| the other five levels | #% | #% | #% | #% |", *others)
    share = (mean(keys["fixed-long"]) - mean(keys["staged"])) / 6
    pages.expect("KeyInBox carries # of the # points", share, -mean(less["fixed-long"]))
    pages.expect("KeyInBox, # of the #: staged", share, -mean(less["fixed-long"]))
    pages.expect(
        "in two of six seeds (# and #%), fixed-middle in one (#%); fixed-long always did (# to #%), fixed-short never "
        "(at most #%)",
        *(*keys["staged"][:2], keys["fixed-middle"][0], keys["fixed-long"][0], keys["fixed-long"][-1]),
        keys["fixed-short"][-1],
    )
    chance = agents["far rooms", "random play"][0]
    start = points(r["evaluations"][0]["success"] for r in runs["far rooms", "staged"].values())
    pages.expect("Random play has #%, the starting models #%", points(item_rates(chance, 16).values()), start)
    pages.expect("KeyInBox (random play #%)", kind_rate(chance, "BabyAI/KeyInBox"))
    pages.expect("# episodes an agent. Random play", sum(map(len, chance["outcomes"]["16"].values())))
    curves = [points(final(r) for r in runs["far rooms", arm].values()) for arm in ("fixed-long", "staged")]
    pages.expect("on other items, end # points apart", curves[0] - curves[1])
    row = "| far rooms, 1M | # | #% | #% | # | # |"
    d = less["fixed-long"]
    pages.expect("within chance over seeds (p ≥ #)", listed_sign_flips(d))
    pages.require("it ends below, within chance over seeds", mean(d) < 0)
    pages.expect(row, len(d), mean(end["staged"]), mean(end["fixed-long"]), mean(d), listed_sign_flips(d))
    turns = {arm: runs["far rooms", arm][0]["config"]["horizon"]["turns"] for arm in FAR_ARMS}
    pages.expect(
        "Staged has #, #, then # turns, fixed-short #, fixed-middle #, fixed-long #.",
        *(*turns["staged"], *turns["fixed-short"], *turns["fixed-middle"], *turns["fixed-long"]),
    )
    pages.expect("| B: # → # → #;", *turns["staged"])
    warned = [
        sum("zero_advantage" in {f["rule"] for f in r["findings"]} for r in runs["far rooms", arm].values())
        for arm in ("staged", "fixed-long")
    ]
    pages.require("warned in all six staged runs there and in no fixed-long one", warned == [6, 0])
    other_settings(pages, {arm: end[arm][:3] for arm in ("staged", "fixed-long")})


def other_settings(pages: Pages, usual: dict[str, list[float]]) -> None:
    """Check the learning rate and credit by turns in far rooms. `usual` has the first three seeds without a change."""
    far = by_arm(load("horizon-conditions"), "evaluations")
    drops = [points(largest_drop(r) for r in far["far rooms", a].values()) for a in usual]
    pages.expect(
        "| as above | #% | #% | #, #, # | # and # points (six seeds) |",
        *map(mean, usual.values()),
        *(a - b for a, b in zip(*usual.values(), strict=True)),
        *drops,
    )
    pages.accept("last models, seeds 0 to 2")
    settings, runs = (by_arm(load("horizon-settings"), key) for key in ("outcomes", "evaluations"))
    for task, title, unit in (
        ("far rooms, lr x 3", "three times the learning rate", " points"),
        ("far rooms, credit by turns", "credit by turns", ""),
    ):
        ends = {
            arm: [points(item_rates(r, 16).values()) for _, r in sorted(settings[task, arm].items())] for arm in usual
        }
        d = [a - b for a, b in zip(*ends.values(), strict=True)]
        drops = [points(largest_drop(r) for r in runs[task, a].values()) for a in usual]
        pages.expect(f"| {title} | #% | #% | #, #, # | # and #{unit} |", *map(mean, ends.values()), *d, *drops)
        row = f"| far rooms, {title} | # | #% | #% | # | # |"
        pages.expect(row, len(d), *map(mean, ends.values()), mean(d), listed_sign_flips(d))
        higher = [mean(ends[arm]) > mean(usual[arm]) for arm in usual]
        if unit:
            worse = [a - b for a, b in zip(ends["fixed-long"], usual["fixed-long"], strict=True)]
            pages.expect("made both worse (fixed-long by seed #, #, #)", *worse)
            pages.require("the higher rate made both worse", not any(higher))
        else:
            pages.require("Credit by turns made both better", all(higher))


def smollm2_horizons(pages: Pages) -> None:
    """Check the horizons of SmolLM2 on crafting."""
    small, runs = (by_arm(load("horizon-smollm2"), key) for key in ("outcomes", "evaluations"))
    rate = {(arm, s): points(item_rates(r, 16).values()) for (_, arm), seeds in small.items() for s, r in seeds.items()}
    pages.expect(
        "| success by seed | #, #% | #, #, #% | #, #, #% |",
        *(rate["staged", 1], rate["staged", 2]),
        *(rate[a, s] for a in ("fixed-long", "fixed-short") for s in (1, 2, 3)),
    )
    pages.accept("| staged (seeds 1, 2) | fixed-long (1 to 3) | fixed-short (1 to 3) |")
    depth = [
        mean(kind_rate(r, f"TextCraft/Depth {n}") for r in small["textcraft", arm].values())
        for arm in ("staged", "fixed-long", "fixed-short")
        for n in (1, 2, 3)
    ]
    pages.expect("| depth 1, depth 2, depth 3 | #, #, #% | #, #, #% | #, #, #% |", *depth)
    pages.accept("| depth 1, depth 2, depth 3 |")
    both = {
        arm: mean_differences(
            [differences(small["textcraft", "staged"][s], small["textcraft", arm][s]) for s in (1, 2)]
        )
        for arm in ("fixed-long", "fixed-short")
    }
    by_seed = [rate["staged", s] - rate["fixed-long", s] for s in (1, 2)]
    pages.expect(
        "(95% interval over items) | | **#** (# to #) points, both seeds # | # (# to #) |",
        *(points(both["fixed-long"]), *bootstrap(both["fixed-long"]), by_seed[0]),
        *(points(both["fixed-short"]), *bootstrap(both["fixed-short"])),
    )
    ends = [mean(rate[arm, s] for s in (1, 2)) for arm in ("staged", "fixed-long")]
    pages.expect(
        "| crafting, SmolLM2 after imitation | # | #% | #% | **#** (# to # over items) | # |",
        *(2, *ends, mean(by_seed), *bootstrap(both["fixed-long"]), listed_sign_flips(by_seed)),
    )
    share = [
        mean(
            kind_rate(small["textcraft", "fixed-long"][s], f"TextCraft/Depth {n}")
            - kind_rate(small["textcraft", "staged"][s], f"TextCraft/Depth {n}")
            for s in (1, 2)
        )
        * small["textcraft", "staged"][1]["results"][-1]["tasks"][f"TextCraft/Depth {n}"]["items"]
        / 97
        for n in (1, 2, 3)
    ]
    pages.expect("depth 2 carries # of the # points, depth 1 # and depth 3 #", share[1], sum(share), share[0], share[2])
    pages.accept("on crafting depth 2 carries", "points, depth 1", "and depth 3 ")
    pages.expect("goals of depth 2 carry # of the #, and", share[1], sum(share))
    pages.accept("goals of depth 2 carry")
    before = [r["evaluations"][0]["success"] for (_, arm), s in runs.items() if arm != "SFT" for r in s.values()]
    pages.expect("After imitation (# to #% on the runs' own", 100 * min(before), 100 * max(before))
    played = sum(map(len, small["textcraft", "staged"][1]["outcomes"]["16"].values()))
    pages.expect("own evaluations); # episodes an agent", played)


def contrast(record: Record, stage: Record) -> tuple[float, float, float]:
    """Return groups with differing rewards per 100k tokens, their share in percent, and the entropy of a stage."""
    first, end = stage["first_step"] - 1, stage["last_step"]
    curves = record["curves"]
    tokens = [0.0, *curves["tokens/total"]]
    shares = [1 - equal for equal in curves["groups/zero_variance"][first:end]]
    groups = sum(shares) * record["config"]["rl"]["groups_per_step"]
    entropy = mean(v for v in curves["entropy/mean"][first:end] if v is not None)
    return 1e5 * groups / (tokens[end] - tokens[first]), points(shares), entropy


def merged(by_subset: dict[str, Turns]) -> Turns:
    return {item: turns for items in by_subset.values() for item, turns in items.items()}


def share_within(turns: Turns, limit: int = 4) -> float:
    """Return the percentage of items that the oracle ends within a limit of turns."""
    return 100 * sum(t is not None and t <= limit for t in turns.values()) / len(turns)


def needs_of_the_oracle(pages: Pages, oracle: dict[str, dict[str, Turns]]) -> None:
    """Check what the protocol says was measured: range and medians by level, and the share that fits four turns."""
    medians = {
        task: [statistics.median(t for t in items.values() if t is not None) for items in by_level.values()]
        for task, by_level in oracle.items()
    }
    turns = [t for t in merged(oracle["many-rooms"]).values() if t is not None]
    pages.expect(
        "measured are # to #, with medians of # to #. For far rooms",
        *(min(turns), max(turns), min(medians["many-rooms"]), max(medians["many-rooms"])),
    )
    share = share_within(merged(oracle["far-rooms"]))
    pages.expect(
        "measured are #%, with medians of # to #.", share, min(medians["far-rooms"]), max(medians["far-rooms"])
    )


def beyond_the_short_stage(pages: Pages, oracle: dict[str, dict[str, Turns]], far: Groups, small: Groups) -> None:
    """Check how many points of fixed-long's lead lie on items for which the oracle needs more than four turns."""
    parts = []
    for group, task, name, env, seeds in (
        (small, "textcraft", "crafting", "textcraft", (1, 2)),
        (far, "far rooms", "far-rooms", "babyai", range(6)),
    ):
        turns = {f"{env}/{item}": t for item, t in merged(oracle[name]).items()}
        lead = {True: 0.0, False: 0.0}
        for seed in seeds:
            long, staged = (item_rates(group[task, arm][seed], 16) for arm in ("fixed-long", "staged"))
            for item in long:
                needed = turns[item]
                beyond = needed is None or needed > 4
                lead[beyond] += 100 * (long[item] - staged[item]) / len(long) / len(seeds)
        parts.append(lead)
    texts = ("carry # of the # points on crafting and # of the # in far rooms", "the other items carry # and #")
    pages.expect(texts[0], *(v for lead in parts for v in (lead[True], sum(lead.values()))))
    pages.expect(texts[1], *(lead[False] for lead in parts))


def when_it_helps(pages: Pages) -> None:
    """Check the table of stages, what the oracle needs, and the rows of the two tasks on the main page."""
    rooms, far, small = (
        by_arm(load(s), "evaluations") for s in ("staged-horizon", "horizon-conditions", "horizon-smollm2")
    )
    oracle = {record["task"]: record["turns"] for record in load("oracle")}
    ends = {arm: [final(r) for _, r in sorted(rooms["babyai", arm].items())] for arm in ("staged", "fixed-long")}
    agents = [by_arm(load(s), "outcomes") for s in ("horizon-conditions", "horizon-smollm2")]
    lead = [100 * (mean(ends["staged"]) - mean(ends["fixed-long"]))]
    for group, task, seeds in ((agents[0], "far rooms", range(6)), (agents[1], "textcraft", (1, 2))):
        sides = [
            mean(mean(item_rates(group[task, a][s], 16).values()) for s in seeds) for a in ("staged", "fixed-long")
        ]
        lead.append(100 * (sides[0] - sides[1]))
    for groups, task, title, name, ahead in (
        (rooms, "babyai", "*many rooms*, 1M", "many-rooms", lead[0]),
        (far, "far rooms", "*far rooms*, 1M", "far-rooms", lead[1]),
        (small, "textcraft", "*crafting*, SmolLM2", "crafting", lead[2]),
    ):
        within = share_within(merged(oracle[name]))
        stages = [
            mean(contrast(r, r["stages"][n])[0] for r in groups[task, "staged"].values() if n < len(r["stages"]))
            for n in range(3)
        ]
        fixed = mean(contrast(r, r["stages"][0])[0] for r in groups[task, "fixed-long"].values())
        pages.expect(f"| {title} | #% | #, #, # | # | #", within, *stages, fixed, ahead)
    pages.accept("oracle in 4 turns | groups with contrast per 100k tokens, staged: 4, 8, 16 turns")
    reached = [share_within(oracle["crafting"]["depth2"]), share_within(oracle["far-rooms"]["KeyInBox"])]
    pages.expect("The oracle ends #% of depth 2 and #% of KeyInBox in four turns", *reached)
    pages.accept("of depth 2 and")
    pages.expect("The oracle ends #% of many rooms in four turns", share_within(merged(oracle["many-rooms"])))
    needs_of_the_oracle(pages, oracle)
    beyond_the_short_stage(pages, oracle, agents[0], agents[1])
    shares = [mean(contrast(r, r["stages"][n])[1] for r in far["far rooms", "staged"].values()) for n in range(2)]
    fixed = mean(contrast(r, r["stages"][0])[1] for r in far["far rooms", "fixed-long"].values())
    pages.expect("share of all groups (#% and #% against #%)", *shares, fixed)
    entropy = [
        mean(contrast(r, r["stages"][n])[2] for r in small["textcraft", arm].values())
        for arm, n in (("staged", 2), ("fixed-long", 0))
    ]
    pages.expect("its entropy (# against # nats a token)", *entropy)
    pages.accept("under 16 turns half as many")
    rows = (("babyai", "many rooms, 1M", ""), ("textcraft", "deep crafting, 1M: not learned", " (start #%)"))
    for task, title, start in rows:
        values = {
            arm: [100 * final(r) for _, r in sorted(rooms[task, arm].items())] for arm in ("staged", "fixed-long")
        }
        d = [a - b for a, b in zip(*values.values(), strict=True)]
        begun = [points(r["evaluations"][0]["success"] for r in rooms[task, "staged"].values())] if start else []
        row = f"| {title}{start} | # | #% | #% | # | # |"
        pages.expect(row, *begun, len(d), *map(mean, values.values()), mean(d), listed_sign_flips(d))
    pages.expect("never more than # points behind a staged one in the mean, and once # ahead", lead[0], -lead[2])
    long_runs(pages, rooms, far, small)


def long_runs(pages: Pages, *studies: Groups) -> None:
    """Check how many fixed-long runs there are, how long they are, and that none fell far."""
    settings = by_arm(load("horizon-settings"), "evaluations")
    main = [r for g in studies for (_, arm), seeds in g.items() if arm == "fixed-long" for r in seeds.values()]
    every = main + [r for (_, arm), seeds in settings.items() if arm == "fixed-long" for r in seeds.values()]
    pages.expect("in # runs.", len(every))
    pages.expect("not in one of # fixed-long runs", len(every))
    learned = [r for r in every if (r["study"], r["task"]) != ("staged-horizon", "textcraft")]
    halved = [r for r in learned if final(r) < max(e["success"] for e in r["evaluations"]) / 2]
    pages.require("**A long horizon never broke**", not halved)
    pages.require("(six of which learned nothing, on deep crafting)", len(every) - len(learned) == 6)
    rates = sorted({r["config"]["rl"]["optimizer"]["lr"] for r in every if r["parameters"] < 1e7})
    pages.expect("neither at a rate of # nor at #", *rates)
    steps = [r["steps"] for r in main]
    pages.expect("| B: # to #; mazes: 300 |\n| sampled tokens", min(steps), max(steps))
    episodes = defaultdict(list)
    for r in main:
        rl = r["config"]["rl"]
        played = r["steps"] * rl["groups_per_step"] * rl["group_size"]
        episodes[r["study"], r["task"]].append(r["sampled_tokens"] / played)
    each = [mean(values) for values in episodes.values()]
    pages.expect("long horizon | thousands | B: # to #; mazes", min(each), max(each))
    coefficients = {r["config"]["rl"]["kl_coef"] for r in main if r["study"] != "horizon-smollm2"}
    none = {r["config"]["rl"]["kl_coef"] for r in main if r["study"] == "horizon-smollm2"}
    pages.require("none for SmolLM2", none == {0})
    (coefficient,) = coefficients
    pages.expect("| # from scratch; none for SmolLM2", coefficient)
