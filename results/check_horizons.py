"""Checks of claim B with Qwen2.5-Coder-0.5B on BabyAI for results/check.py."""

from __future__ import annotations

from check_a import points
from check_collapse import area, every_sign, fell, gap, mcnemar, points_of
from check_d import less, rate_of
from page_numbers import Pages, Record, Value, bootstrap, holm, load, mean, sign_flips

STUDY = "qwen-babyai-0.5B"
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
SEEDS = range(3, 11)
Runs = dict[str, dict[int, Record]]
"""Records by arm and seed."""


def by_arm(records: list[Record], key: str) -> Runs:
    found: Runs = {}
    for record in records:
        if key in record:
            found.setdefault(record["arm"], {})[record["seed"]] = record
    return found


def horizons_of_0_5b(pages: Pages) -> None:
    """Check the section about a pretrained chat model, once three seeds have both arms."""
    records = [r for r in load(STUDY) if r["seed"] in SEEDS]
    runs, ends = by_arm(records, "evaluations"), by_arm(records, "outcomes")
    arms = ("staged", "fixed-long")
    seeds = sorted(set.intersection(*(set(found.get(arm, {})) for found in (runs, ends) for arm in arms)))
    shown = "### A pretrained chat model" in pages.texts["docs/results/evidence.md"]
    if len(seeds) < 3 or not shown:
        pages.require("### Long episodes, where a horizon can collapse", shown == (len(seeds) >= 3))
        return
    outcomes(pages, runs, ends, seeds)
    over_items(pages, ends)
    costs: list[Value] = []
    for arm in arms:
        chosen = [runs[arm][seed] for seed in seeds]
        costs += [mean(r["sampled_tokens"] for r in chosen) / 1e6]
        costs += [mean(sum(s or 0 for s in r["curves"]["time/step_s"]) for r in chosen)]
    parts = "; ".join(f"one of {arm} # million sampled tokens and # s of training steps" for arm in arms)
    pages.expect(f"A run takes, in the mean: {parts}.", *costs)
    curves = {arm: [[(e["step"], e["success"]) for e in runs[arm][s]["evaluations"]] for s in seeds] for arm in arms}
    means = [100 * mean(area(curve, curve[-1][0]) for curve in curves[arm]) for arm in arms]
    pages.expect("mean held-out success is #% (staged) and #% (fixed-long)", *means)
    stages = [s["turns"] for s in runs["staged"][seeds[0]]["stages"]]
    more, numbers = "", [s["turns"] for r in runs["fixed-long"].values() for s in r["stages"]][:1]
    if "fixed-short" in runs:
        more += ", fixed-short #"
        numbers += [s["turns"] for r in runs["fixed-short"].values() for s in r["stages"]][:1]
    if "adaptive" in runs:
        more += ", adaptive the same stages, entered when success stalls"
    pages.expect(
        "BabyAI from the base model, # steps. Thin lines are seeds, thick lines their mean. Staged has #, # and # "
        f"turns, fixed-long #{more}; all are evaluated under #.",
        *({r["steps"] for found in runs.values() for r in found.values()}),
        *(*stages, *numbers),
        *({int(t) for found in ends.values() for r in found.values() for t in r["outcomes"]}),
    )


def outcomes(pages: Pages, runs: Runs, ends: Runs, seeds: list[int]) -> None:
    """Check the table and the verdict of the rule."""
    pairs = [(runs["staged"][s], runs["fixed-long"][s]) for s in seeds]
    falls = [(fell(a), fell(b)) for a, b in pairs]
    success = [tuple(mean(rate_of([ends[arm][s]])[0].values()) for arm in ("staged", "fixed-long")) for s in seeds]
    heights = []
    for pair in pairs:
        curves = [points_of(run) for run in pair]
        common = min(curve[-1][0] for curve in curves)
        heights.append(tuple(area(curve, common) for curve in curves))
    gaps = [[a - b for a, b in values] for values in (success, heights)]
    p = holm([mcnemar(falls), *map(every_sign, gaps)])
    both = [sum(column) for column in zip(*falls, strict=True)]
    n = len(seeds)
    pages.expect("| runs that collapsed | # of # | # of # | | # |", both[0], n, both[1], n, p[0])
    for name, values, apart, q in zip(
        ("success at the end", "mean success at equal processed tokens"), (success, heights), gaps, p[1:], strict=True
    ):
        sides = [points(column) for column in zip(*values, strict=True)]
        pages.expect(f"| {name} | #% | #% | # (# to #) | # |", *sides, *gap(apart), q)
    starts = {r["seed"]: r["evaluations"][0]["success"] for found in runs.values() for r in found.values()}
    gains = [
        mean(mean(rate_of([r])[0].values()) - starts[seed] for seed, r in found.items() if seed in starts)
        for found in ends.values()
    ]
    ahead = [both[0] < both[1], *(mean(d) > 0 for d in gaps)]
    shown = {better for better, q in zip(ahead, p, strict=True) if q < 0.05}
    by_rule = "mixed" if len(shown) == 2 else "staging helps" if True in shown else "staging hurts"
    by_rule = "void" if max(gains) < 0.15 else by_rule if shown else "not shown"
    few = f"gives no verdict before eight seeds; with {WORDS[n]}: {by_rule}."
    pages.require(few if n < 8 else f"By the rule written before the runs: **{by_rule}**.", True)
    pages.expect("# of # runs of fixed-long collapsed.", both[1], n)


def over_items(pages: Pages, ends: Runs) -> None:
    """Check the arms against each other on the items at the end."""
    parts, values = [], []
    for first, second in (("staged", "fixed-long"), ("staged", "fixed-short"), ("adaptive", "fixed-long")):
        seeds = sorted(ends.get(first, {}).keys() & ends.get(second, {}).keys())
        if seeds:
            apart = less(*(rate_of([ends[arm][s] for s in seeds])[0] for arm in (first, second)))
            parts.append(f"{first} less {second} # (# to #), p = # ({WORDS[len(seeds)]} seed{'s'[: len(seeds) - 1]})")
            values += [points(apart), *bootstrap(apart), sign_flips(apart, 4 * len(seeds))]
    pages.expect(f"Over items instead of seeds, at the end, in points: {'; '.join(parts)}.", *values)
