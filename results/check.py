"""Recompute the numbers of docs/results/evidence.md from the JSON, with the standard library only.

    python results/check.py [--uncovered]

None of the project's code is used, so that an error in it shows. A check is a piece of the page with `#` for each
number, and the numbers as computed here. A number must agree as far as it is written; bootstrap limits may differ by
their own noise. `--uncovered` lists the numbers of verdicts and results that no check covers: settings, counts and
history.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from page_numbers import PAGE, Page, Value, best_of, bootstrap, by_arm, holm, item_rates, load, mean, sign_flips, wilson

Groups = dict[tuple[str, str], dict[int, dict[str, Any]]]
NAMES = {"babyai": "BabyAI", "textcraft": "TextCraft"}


def points(values: Iterable[float]) -> float:
    return 100 * mean(values)


def differences(first: dict[str, Any], second: dict[str, Any], turns: int = 16) -> list[float]:
    a, b = item_rates(first, turns), item_rates(second, turns)
    return [a[item] - b[item] for item in a if item in b]


def claim_a(page: Page) -> None:
    agents = by_arm(load("rl-over-base"), "outcomes")
    rows = {"babyai": "BabyAI, six subsets, 300 episodes", "textcraft": "TextCraft, depths 1–3, 388 episodes"}
    for task, title in rows.items():
        cells: list[str] = []
        values: list[Value] = []
        for arm in ("random play", "base, no examples", "base", "SFT", "RL", "SFT + RL"):
            record = agents[task, arm][0]
            rates = list(item_rates(record, 16).values())
            low, high = wilson(rates, sum(map(len, record["outcomes"]["16"].values())))
            plain = arm == "base, no examples"
            cells.append("#%" if plain else "#% (#–#)")
            values += [points(rates)] if plain else [points(rates), 100 * low, 100 * high]
        page.expect(f"| {title} | {' | '.join(cells)} |", *values)
    pairs = [(task, *pair) for task in rows for pair in (("RL", "base"), ("SFT + RL", "SFT"))]
    compared = [differences(agents[task, first][0], agents[task, second][0]) for task, first, second in pairs]
    adjusted = holm([sign_flips(d, 4) for d in compared])
    for (task, first, second), d, p in zip(pairs, compared, adjusted, strict=True):
        unit = " points" if (task, first) == ("babyai", "RL") else ""
        won, lost = sum(x > 0 for x in d), sum(x < 0 for x in d)
        row = f"| {NAMES[task]}: {first} − {second} | **#** (# to #){unit} | #, # | # |"
        page.expect(row, points(d), *bootstrap(d), won, lost, p)
    chance = differences(agents["textcraft", "SFT + RL"][0], agents["textcraft", "random play"][0])
    page.expect("it (# points, p = #).", points(chance), sign_flips(chance, 4))
    rate = {key: points(item_rates(runs[0], 16).values()) for key, runs in agents.items()}
    page.expect(
        "RL alone: # → #% on BabyAI, # → #% on TextCraft. RL after imitation: # → #% and # → #%. Random play: # and #%",
        *(rate["babyai", "base"], rate["babyai", "RL"], rate["textcraft", "base"], rate["textcraft", "RL"]),
        *(rate["babyai", "SFT"], rate["babyai", "SFT + RL"], rate["textcraft", "SFT"], rate["textcraft", "SFT + RL"]),
        *(rate["babyai", "random play"], rate["textcraft", "random play"]),
    )
    evaluations = by_arm(load("rl-over-base"), "evaluations")["textcraft", "SFT + RL"][0]["evaluations"]
    gain = {
        (arm, seed): 100 * (r["evaluations"][-1]["success"] - r["evaluations"][0]["success"])
        for (task, arm), seeds in by_arm(load("horizon-smollm2"), "evaluations").items()
        for seed, r in seeds.items()
        if arm != "SFT" and task == "textcraft"
    }
    own = 100 * (evaluations[-1]["success"] - evaluations[0]["success"])
    page.expect(
        "are # (seed 0, staged); #, #, # (fixed-long); #, #, # (fixed-short); #, # (staged)",
        *(own, *(gain["fixed-long", s] for s in (1, 2, 3)), *(gain["fixed-short", s] for s in (1, 2, 3))),
        *(gain["staged", s] for s in (1, 2)),
    )
    everything = [own, *gain.values()]
    page.expect("three horizons) gain, by # to # points", min(everything), max(everything))


def claim_b(page: Page) -> None:
    runs = by_arm(load("staged-horizon"), "evaluations")
    ends = {key: {s: r["evaluations"][-1]["success"] for s, r in seeds.items()} for key, seeds in runs.items()}
    arms = ("staged", "adaptive", "fixed-long", "fixed-short")
    for task, title in (("babyai", "*many rooms*, 400k tokens"), ("textcraft", "*deep crafting*, 800k tokens")):
        values: list[Value] = [100 * mean(r["evaluations"][0]["success"] for r in runs[task, "staged"].values())]
        for arm in arms:
            end = [100 * v for v in ends[task, arm].values()]
            values += [mean(end), min(end), max(end)]
        chance = {"babyai": "21%", "textcraft": "12.5%"}[task]
        page.expect(f"| {title} | {chance} | #% | {' | '.join(['#% (#–#)'] * 4)} |", *values)
    falls = [100 * mean(largest_drop(r) for r in runs["babyai", arm].values()) for arm in arms]
    page.expect("best to lowest after it | | | # points | # | # | # |", *falls)
    spent = [(mean(r["steps"] for r in runs["babyai", a].values())) for a in arms]
    seconds = [mean(r["seconds"] for r in runs["babyai", a].values()) for a in arms]
    page.expect("| #; # | #; # | #; # | #; # |", *(v for pair in zip(spent, seconds, strict=True) for v in pair))
    table: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    pairs = [(a, b) for a in ("staged", "adaptive") for b in ("fixed-short", "fixed-long")]
    adjusted: dict[tuple[str, str], list[float]] = defaultdict(list)
    for tasks in (("babyai", "textcraft"), ("babyai",), ("textcraft",)):
        columns = {(a, b): [ends[t, a][s] - ends[t, b][s] for t in tasks for s in sorted(ends[t, a])] for a, b in pairs}
        tests = [listed_sign_flips(columns[pair]) for pair in pairs]
        for pair, p, q in zip(pairs, tests, holm(tests), strict=True):
            table[pair].append((points(columns[pair]), p))
            adjusted[pair].append(q)
    for (a, b), cells in table.items():
        values = [v for (d, p), q in zip(cells, adjusted[a, b], strict=True) for v in (d, p, q)]
        bold = ("**#** points" if (a, b) == ("staged", "fixed-long") else "#") + ", #, #"
        page.expect(f"| {a} − {b} | {bold} | #, #, # | #, #, # |", *values)
    page.expect(
        "staged ends # points above fixed-long (p = #)",
        table["staged", "fixed-long"][0][0],
        adjusted["staged", "fixed-long"][0],
    )
    equal = equal_steps(runs, "babyai", 73)
    page.expect(
        "after 73 steps on *many rooms* staged has #% with #% of fixed-long's tokens (#%), adaptive #% with #%, "
        "fixed-short #% with #%",
        *(*equal["staged"], equal["fixed-long"][0], *equal["adaptive"], *equal["fixed-short"]),
    )
    far = equal_steps(by_arm(load("horizon-conditions"), "evaluations"), "far rooms", 73)
    page.expect("staged has #% with #% of the tokens of fixed-long (#%)", *far["staged"], far["fixed-long"][0])


def largest_drop(record: dict[str, Any]) -> float:
    success = [e["success"] for e in record["evaluations"]]
    best = success.index(max(success))
    return success[best] - min(success[best:])


def listed_sign_flips(values: Sequence[float]) -> float:
    """Return the exact two-sided p-value by listing all signs of up to twelve differences."""
    nonzero = [v for v in values if abs(v) > 1e-12]
    observed = abs(math.fsum(nonzero)) - 1e-9
    extreme = 0
    for signs in range(2 ** len(nonzero)):
        extreme += abs(math.fsum(v if signs >> i & 1 else -v for i, v in enumerate(nonzero))) >= observed
    return extreme / 2 ** len(nonzero)


def equal_steps(runs: Groups, task: str, steps: int) -> dict[str, tuple[float, float]]:
    """Return success and share of fixed-long's tokens of each arm after some steps, in percent."""
    tokens, success = {}, {}
    for (name, arm), seeds in runs.items():
        if name == task and arm != "base":
            tokens[arm] = mean(r["curves"]["tokens/total"][steps - 1] for r in seeds.values())
            success[arm] = mean(at_step(r["evaluations"], steps) for r in seeds.values())
    return {arm: (100 * success[arm], 100 * tokens[arm] / tokens["fixed-long"]) for arm in tokens}


def at_step(evaluations: Sequence[dict[str, Any]], step: int) -> float:
    for a, b in pairwise(evaluations):
        if a["step"] <= step <= b["step"]:
            return a["success"] + (b["success"] - a["success"]) * (step - a["step"]) / (b["step"] - a["step"])
    return float(evaluations[-1]["success"])


def conditions(page: Page) -> None:
    agents = by_arm(load("horizon-conditions"), "outcomes")
    end = {
        arm: {s: mean(item_rates(r, 16).values()) for s, r in agents["far rooms", arm].items()}
        for arm in ("staged", "fixed-long", "fixed-middle", "fixed-short")
    }
    values = [
        v
        for rates in end.values()
        for v in (points(rates.values()), 100 * min(rates.values()), 100 * max(rates.values()))
    ]
    page.expect(f"| success, mean (lowest to highest seed) | {' | '.join(['#% (#–#)'] * 4)} |", *values)
    less = {arm: [end["staged"][s] - end[arm][s] for s in sorted(end[arm])] for arm in end if arm != "staged"}
    page.expect(
        "| staged less it, p | | **#** points, # | #, # | #, # |",
        *(v for d in less.values() for v in (points(d), listed_sign_flips(d))),
    )
    key = {
        arm: points(
            r["results"][-1]["tasks"]["BabyAI/KeyInBox"]["success"]["value"] for r in agents["far rooms", arm].values()
        )
        for arm in end
    }
    page.expect("| KeyInBox alone | #% | #% | #% | #% |", *key.values())
    page.expect(
        "*KeyInBox* carries # of the # points", -(key["staged"] - key["fixed-long"]) / 6, -points(less["fixed-long"])
    )


def smollm2_conditions(page: Page) -> None:
    small = by_arm(load("horizon-smollm2"), "outcomes")
    rate = {(arm, s): points(item_rates(r, 16).values()) for (_, arm), seeds in small.items() for s, r in seeds.items()}
    page.expect(
        "| success by seed | #, #% | #, #, #% | #, #, #% |",
        rate["staged", 1],
        rate["staged", 2],
        *(rate[a, s] for a in ("fixed-long", "fixed-short") for s in (1, 2, 3)),
    )
    depth = {
        arm: [
            points(
                r["results"][-1]["tasks"][f"TextCraft/Depth {n}"]["success"]["value"]
                for r in small["textcraft", arm].values()
            )
            for n in (1, 2, 3)
        ]
        for arm in ("staged", "fixed-long", "fixed-short")
    }
    page.expect(
        "| depth 1, depth 2, depth 3 | #, #, #% | #, #, #% | #, #, #% |", *(v for arm in depth for v in depth[arm])
    )
    both = {
        arm: mean_differences(
            [differences(small["textcraft", "staged"][s], small["textcraft", arm][s]) for s in (1, 2)]
        )
        for arm in ("fixed-long", "fixed-short")
    }
    page.expect(
        "(95% interval over items) | | **#** (# to #) points, both seeds # | # (# to #) |",
        points(both["fixed-long"]),
        *bootstrap(both["fixed-long"]),
        rate["staged", 1] - rate["fixed-long", 1],
        points(both["fixed-short"]),
        *bootstrap(both["fixed-short"]),
    )
    share = [
        sum(
            (r["results"][-1]["tasks"][f"TextCraft/Depth {n}"]["success"]["value"] * sign)
            for arm, sign in (("fixed-long", 0.5), ("staged", -0.5))
            for s in (1, 2)
            for r in [small["textcraft", arm][s]]
        )
        * count
        / 97
        * 100
        for n, count in ((1, 31), (2, 41), (3, 25))
    ]
    page.expect("depth 2 carries # of the # points, depth 1 # and depth 3 #", share[1], sum(share), share[0], share[2])


def other_settings(page: Page) -> None:
    other = by_arm(load("horizon-settings"), "outcomes")
    for task, title in (
        ("far rooms, lr x 3", "three times the learning rate"),
        ("far rooms, credit by turns", "credit by turns"),
    ):
        a, b = (
            {s: points(item_rates(r, 16).values()) for s, r in other[task, arm].items()}
            for arm in ("staged", "fixed-long")
        )
        page.expect(
            f"| {title} | #% | #% | #, #, # |", mean(a.values()), mean(b.values()), *(a[s] - b[s] for s in (0, 1, 2))
        )


def mean_differences(columns: Sequence[Sequence[float]]) -> list[float]:
    return [mean(values) for values in zip(*columns, strict=True)]


def rates_by_turns(page: Page, agents: Groups) -> dict[tuple[str, int, int], float]:
    """Check the table of success by turns. Return the success of each agent by (arm, turns, seed)."""
    turns = (2, 4, 8, 16, 32)
    chance = agents["babyai", "random play"][0]
    page.expect("| random play | #% | #% | #% | #% | #% |", *(points(item_rates(chance, t).values()) for t in turns))
    rates: dict[tuple[str, int, int], float] = {}
    for size in ("1M", "5M", "25M"):
        for arm, word in (("base", "untrained"), ("staged", "trained")):
            values: list[Value] = []
            for t in turns:
                seeds = [points(item_rates(r, t).values()) for r in agents["babyai", f"{arm} {size}"].values()]
                values += [mean(seeds), min(seeds), max(seeds)]
                rates |= {(f"{arm} {size}", t, s): v for s, v in enumerate(seeds)}
            page.expect(f"| {size}, {word} | {' | '.join(['#% (#–#)'] * 5)} |", *values)
    return rates


def claim_c(page: Page) -> None:
    agents = by_arm(load("interaction"), "outcomes")
    chance = agents["babyai", "random play"][0]
    rates = rates_by_turns(page, agents)
    by_seed = [rates["staged 1M", 32, s] - rates["staged 25M", 4, s] for s in range(3)]
    gains = mean_differences(
        [
            [
                item_rates(agents["babyai", "staged 1M"][s], 32)[i]
                - item_rates(agents["babyai", "staged 25M"][s], 4)[i]
                for i in item_rates(chance, 4)
            ]
            for s in range(3)
        ]
    )
    page.expect(
        "at 4 turns is # points (95% interval over items # to #), #, # and # by seed",
        points(gains),
        *bootstrap(gains),
        *by_seed,
    )
    own = dict(
        zip(
            item_rates(chance, 4),
            (b - a for a, b in zip(item_rates(chance, 4).values(), item_rates(chance, 32).values(), strict=True)),
            strict=True,
        )
    )
    over = {}
    for arm in (f"{kind} {size}" for kind in ("base", "staged") for size in ("1M", "5M", "25M")):
        columns = [
            [item_rates(r, 32)[i] - item_rates(r, 4)[i] - own[i] for i in own] for r in agents["babyai", arm].values()
        ]
        over[arm] = mean_differences(columns)
    page.expect("Random play gains # points from the same turns", points(own.values()))
    page.expect(
        "has # points (# to #, p = #): not separable",
        points(over["staged 1M"]),
        *bootstrap(over["staged 1M"]),
        sign_flips(over["staged 1M"], 12),
    )
    page.expect(
        "have # (# to #, p = #) and # (# to #, p = #); untrained models gain less than random play (# to #)",
        *(
            v
            for size in ("5M", "25M")
            for v in (
                points(over[f"staged {size}"]),
                *bootstrap(over[f"staged {size}"]),
                sign_flips(over[f"staged {size}"], 12),
            )
        ),
        max(points(over[f"base {size}"]) for size in ("1M", "5M", "25M")),
        min(points(over[f"base {size}"]) for size in ("1M", "5M", "25M")),
    )
    gained = mean(rates["staged 1M", 32, s] - rates["staged 1M", 4, s] for s in range(3))
    page.expect(
        "a trained 1M model gains # points and random play #: # (# to #) over chance; 5M # (# to #), 25M # (# to #)",
        gained,
        points(own.values()),
        *(
            v
            for size in ("1M", "5M", "25M")
            for v in (points(over[f"staged {size}"]), *bootstrap(over[f"staged {size}"]))
        ),
    )
    size_gain = mean(rates["staged 25M", 4, s] - rates["staged 1M", 4, s] for s in range(3))
    page.expect("Parameters at 4 turns bring nothing (#)", size_gain)
    tries = [
        best_of(r, 4, 4) * 100 for size in ("1M", "5M", "25M") for r in agents["babyai", f"staged {size}"].values()
    ]
    means = [mean(tries[i : i + 3]) for i in (0, 3, 6)]
    page.expect("the best of four tries of 4 turns # to #%", min(means), max(means))


def ablations(page: Page) -> None:
    runs = by_arm(load("ablations"), "evaluations")
    end = {
        arm: [100 * r["evaluations"][-1]["success"] for _, r in sorted(seeds.items())]
        for (_, arm), seeds in runs.items()
    }
    page.expect("| nothing | #% | |", mean(end["unchanged"]))
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
        page.expect(f"| {title} | #% | {difference} (# to #) |", mean(end[arm]), mean(d), min(d), max(d))
    gains = [mean(end[arm]) - mean(end["unchanged"]) for arm in ("credit by turns", "anchor states")]
    page.expect("anchor states brought # and # points", *gains)


def mean_over_run(record: dict[str, Any], since: float) -> float:
    """Return the mean of success at 51 points of the token axis from `since` to the end of the run."""
    xs, ys = ([e[name] for e in record["evaluations"]] for name in ("sampled_tokens", "success"))

    def at(x: float) -> float:
        for (x0, y0), (x1, y1) in pairwise(zip(xs, ys, strict=True)):
            if x0 <= x <= x1:
                return float(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
        return float(ys[0] if x < xs[0] else ys[-1])

    return mean(at(since + (xs[-1] - since) * i / 50) for i in range(51))


def contrast(record: dict[str, Any], stage: dict[str, Any]) -> tuple[float, float, float]:
    """Return groups with differing rewards per 100k tokens, their share in percent, and the entropy of a stage."""
    first, end = stage["first_step"] - 1, stage["last_step"]
    curves = record["curves"]
    tokens = [0.0, *curves["tokens/total"]]
    shares = [1 - equal for equal in curves["groups/zero_variance"][first:end]]
    groups = sum(shares) * record["config"]["rl"]["groups_per_step"]
    entropy = mean(v for v in curves["entropy/mean"][first:end] if v is not None)
    return 1e5 * groups / (tokens[end] - tokens[first]), points(shares), entropy


def details(page: Page) -> None:
    """Check the sentences and smaller tables of claim B and the limits."""
    rooms, far, small = (
        by_arm(load(s), "evaluations") for s in ("staged-horizon", "horizon-conditions", "horizon-smollm2")
    )
    arms = ("staged", "adaptive", "fixed-long", "fixed-short")
    since = max(r["evaluations"][1]["sampled_tokens"] for a in arms for r in rooms["babyai", a].values())
    over = [points(mean_over_run(r, since) for r in rooms["babyai", a].values()) for a in arms]
    page.expect("| – mean from #k tokens on | | | #% | #% | #% | #% |", since / 1e3, *over)
    long_runs = [
        r for g in (rooms, far, small) for (_, arm), seeds in g.items() if arm == "fixed-long" for r in seeds.values()
    ]
    page.expect(
        "collapse from about 125 | # to # |", min(r["steps"] for r in long_runs), max(r["steps"] for r in long_runs)
    )
    episodes = defaultdict(list)
    for r in long_runs:
        rl = r["config"]["rl"]
        episodes[r["study"], r["task"]].append(
            r["sampled_tokens"] / (r["steps"] * rl["groups_per_step"] * rl["group_size"])
        )
    each = [mean(values) for values in episodes.values()]
    page.expect("long horizon | thousands | # to # |", min(each), max(each))
    for groups, task, title in (
        (rooms, "babyai", "*many rooms*, 1M | 51%"),
        (far, "far rooms", "*far rooms*, 1M | 23%"),
        (small, "textcraft", "*crafting*, SmolLM2 | 51%"),
    ):
        stages = [
            mean(contrast(r, r["stages"][n])[0] for r in groups[task, "staged"].values() if n < len(r["stages"]))
            for n in range(3)
        ]
        fixed = mean(contrast(r, r["stages"][0])[0] for r in groups[task, "fixed-long"].values())
        page.expect(f"| {title} | #, #, # | # |", *stages, fixed)
    shares = [mean(contrast(r, r["stages"][n])[1] for r in far["far rooms", "staged"].values()) for n in range(2)]
    fixed = mean(contrast(r, r["stages"][0])[1] for r in far["far rooms", "fixed-long"].values())
    page.expect("share of all groups (#% and #% against #%)", *shares, fixed)
    entropy = [
        mean(contrast(r, r["stages"][n])[2] for r in small["textcraft", arm].values())
        for arm, n in (("staged", 2), ("fixed-long", 0))
    ]
    page.expect("its entropy (# against # nats a token)", *entropy)


def far_rooms(page: Page) -> None:
    """Check the sentences about far rooms and the table of other settings there."""
    agents = by_arm(load("horizon-conditions"), "outcomes")
    keys = {
        arm: sorted(
            100 * r["results"][-1]["tasks"]["BabyAI/KeyInBox"]["success"]["value"]
            for r in agents["far rooms", arm].values()
        )
        for arm in ("staged", "fixed-long", "fixed-middle", "fixed-short")
    }
    page.expect(
        "in two of six seeds (# and #%), fixed-middle in one (#%), fixed-long always did (# to #%)",
        *keys["staged"][:2],
        keys["fixed-middle"][0],
        keys["fixed-long"][0],
        keys["fixed-long"][-1],
    )
    page.expect("fixed-short never (at most #%)", keys["fixed-short"][-1])
    page.expect("random play has #%", points(item_rates(agents["far rooms", "random play"][0], 16).values()))
    first = {
        a: {s: points(item_rates(r, 16).values()) for s, r in agents["far rooms", a].items()}
        for a in ("staged", "fixed-long")
    }
    far = by_arm(load("horizon-conditions"), "evaluations")
    drops = [points(largest_drop(r) for r in far["far rooms", a].values()) for a in ("staged", "fixed-long")]
    page.expect(
        "| as above | #% | #% | #, #, # | # and # points (six seeds) |",
        *(mean(first[a][s] for s in range(3)) for a in first),
        *(first["staged"][s] - first["fixed-long"][s] for s in range(3)),
        *drops,
    )
    settings, runs = (by_arm(load("horizon-settings"), key) for key in ("outcomes", "evaluations"))
    for task, unit in (("far rooms, lr x 3", " points"), ("far rooms, credit by turns", "")):
        drops = [points(largest_drop(r) for r in runs[task, a].values()) for a in ("staged", "fixed-long")]
        title = {"": "credit by turns", " points": "three times the learning rate"}[unit]
        a, b = ({s: points(item_rates(r, 16).values()) for s, r in settings[task, arm].items()} for arm in first)
        page.expect(
            f"| {title} | #% | #% | #, #, # | # and #{unit} |",
            mean(a.values()),
            mean(b.values()),
            *(a[s] - b[s] for s in range(3)),
            *drops,
        )
        if unit:
            page.expect(
                "made both worse (fixed-long by seed #, #, #)", *(b[s] - first["fixed-long"][s] for s in range(3))
            )
    less = [first["staged"][s] - first["fixed-long"][s] for s in sorted(first["staged"])]
    page.expect("it ends # points below fixed-long (p = #)", -mean(less), listed_sign_flips(less))


def real_model(page: Page) -> None:
    """Check the table and the sentences about the first 1.5B run."""
    records = load("qwen-first")
    agents = {r["arm"]: r for r in records if "outcomes" in r}
    for arm, title, bold in (
        ("base", "base", ""),
        ("random play", "random valid actions", ""),
        ("staged", "**RL, ScalingInter**", "**"),
    ):
        outcomes = agents[arm]["outcomes"]["30"]
        rates = [mean(map(int, samples)) for samples in outcomes.values()]
        low, high = wilson(rates, sum(map(len, outcomes.values())))
        depths = [100 * cell["success"]["value"] for cell in agents[arm]["results"][-1]["tasks"].values()]
        row = f"| {title} | {bold}#% (#–#){bold} | #% | #% | #% | #% |"
        page.expect(row, points(rates), 100 * low, 100 * high, *depths)
    ends = [points(item_rates(agents[arm], 30).values()) for arm in ("base", "staged", "random play")]
    page.expect(
        "RL alone: # → #% on the suite's TextCraft items (one run; the paper's RL-3B has 75%; random valid actions #%)",
        *ends,
    )
    (run,) = (r for r in records if "curves" in r)
    curves = {name: [v for v in values if v is not None] for name, values in run["curves"].items()}
    page.expect("# s of training steps and # minutes in all", math.fsum(curves["time/step_s"]), run["seconds"] / 60)
    page.expect("on one H200; # million sampled tokens", run["sampled_tokens"] / 1e6)
    last = [points(curves["success/mean"][s["last_step"] - 10 : s["last_step"]]) for s in run["stages"]]
    page.expect("the last ten steps of each stage: #%, #%, #%", *last)
    page.expect("#% of its actions in the first ten steps are invalid", points(curves["actions/invalid_rate"][:10]))
    easy = [
        (cell["success"]["value"] * cell["episodes"], cell["episodes"])
        for arm in ("staged", "base")
        for name, cell in agents[arm]["results"][-1]["tasks"].items()
        if name.endswith(("Depth 1", "Depth 2"))
    ]
    rates = [100 * sum(c for c, _ in half) / sum(n for _, n in half) for half in (easy[:2], easy[2:])]
    page.expect("Over base on depths 1 and 2: # points", rates[0] - rates[1])


CHECKS = (
    *(real_model, claim_a, claim_b, conditions, smollm2_conditions, other_settings),
    *(claim_c, ablations, details, far_rooms),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--uncovered", action="store_true", help="list the numbers that no check covers")
    options = parser.parse_args()
    page = Page(options.page.read_text())
    for check in CHECKS:
        check(page)
    rest = page.uncovered()
    print("\n".join(page.failures + (rest if options.uncovered else [])))
    print(
        f"{page.checks} checks, {len(page.covered)} numbers, {len(page.failures)} wrong; {len(rest)} lines have others"
    )
    sys.exit(1 if page.failures else 0)


if __name__ == "__main__":
    main()
