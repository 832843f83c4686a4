"""Checks of the study of collapse (claim B, long episodes) for results/check.py."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise

from check_a import points
from page_numbers import RESULTS, Pages, Record, Value, bootstrap, holm, item_rates, load, mean

CONDITIONS = {"paper-like": "maze, paper-like", "calm": "maze, calm"}
ARMS = ("staged", "fixed-64", "fixed-16", "too-short")
TURNS = 64
Study = dict[tuple[str, str, int], tuple[Record, float]]
"""Run and success at the end by condition, arm and seed."""
Outcomes = tuple[list[tuple[bool, bool]], list[float], list[float]]
"""Collapses of two arms, differences at the end and differences of the areas, each by seed."""


def read() -> Study:
    records = load("collapse")
    ends = {(r["task"], r["arm"], r["seed"]): mean(item_rates(r, TURNS).values()) for r in records if "outcomes" in r}
    runs = {(r["task"], r["arm"], r["seed"]): r for r in records if "evaluations" in r}
    return {key: (runs[key], end) for key, end in ends.items()}


def fell(run: Record) -> bool:
    """Return whether two successive evaluations were below half of the best one before them."""
    low = run_of_low = 0
    best = 0.0
    for evaluation in run["evaluations"]:
        run_of_low = run_of_low + 1 if evaluation["success"] < best / 2 else 0
        low = max(low, run_of_low)
        best = max(best, evaluation["success"])
    return low > 1


def points_of(run: Record) -> list[tuple[float, float]]:
    """Return processed tokens and held-out success of each evaluation."""
    totals = [0.0]
    for tokens, episodes in zip(run["curves"]["tokens/per_episode"], run["curves"]["episodes/usable"], strict=True):
        totals.append(totals[-1] + tokens * episodes)
    return [(totals[e["step"]], e["success"]) for e in run["evaluations"]]


def area(curve: Sequence[tuple[float, float]], end: float) -> float:
    """Return the mean height of a piecewise linear curve up to `end`."""
    total = 0.0
    for (x, y), (following, height) in pairwise(curve):
        if x < end:
            stop = min(following, end)
            at_stop = y + (height - y) * (stop - x) / (following - x)
            total += (stop - x) * (y + at_stop) / 2
    return total / end


def differences(study: Study, condition: str, first: str, second: str) -> Outcomes:
    task = CONDITIONS[condition]
    falls, ends, areas = [], [], []
    for seed in sorted({s for t, arm, s in study if (t, arm) == (task, first)}):
        (one, end), (other, other_end) = study[task, first, seed], study[task, second, seed]
        curves = points_of(one), points_of(other)
        common = min(curve[-1][0] for curve in curves)
        falls.append((fell(one), fell(other)))
        ends.append(end - other_end)
        areas.append(area(curves[0], common) - area(curves[1], common))
    return falls, ends, areas


def every_sign(values: Sequence[float]) -> float:
    """Return the exact two-sided p-value over all signs of the differences."""
    observed = abs(math.fsum(values)) - 1e-9
    totals = [0.0]
    for value in values:
        totals = [total + sign * value for total in totals for sign in (1, -1)]
    return sum(abs(total) >= observed for total in totals) / len(totals)


def mcnemar(falls: Sequence[tuple[bool, bool]]) -> float:
    only = [sum(a and not b for a, b in falls), sum(b and not a for a, b in falls)]
    n = sum(only)
    tail = sum(math.comb(n, k) for k in range(max(only), n + 1)) / 2**n
    return min(1.0, 2 * tail)


def collapse(pages: Pages) -> None:
    """Check verdicts, table and list of the study of collapse."""
    study = read()
    seeds = {seed for _, _, seed in study}
    arms = {(task, arm) for task, arm, _ in study}
    complete = len(study) == len(arms) * len(seeds) and arms == {(t, a) for t in CONDITIONS.values() for a in ARMS}
    (parameters,) = {run["parameters"] for run, _ in study.values()}
    pages.expect("a model of # parameters, # seeds, 300 steps.", parameters, len(seeds))
    pages.accept(
        "Mazes of size 4,",
        "12 seeds, 300 steps",
        "Staged has 16, 32, then 64 turns, too-short 4, 16, then 64; all are evaluated under 64, where",
        "random play 60%.",
        "has no KL term (the paper's is 0.001), a learning rate of",
        "every 20 steps with 200 episodes",
        "over 1,000 episodes",
    )
    starts = [run["evaluations"][0]["success"] for (_, arm, _), (run, _) in study.items() if arm == "staged"]
    pages.expect("the starting models have #%", points(starts))
    conditions(pages, study)
    pages.require(
        "12 seeds, 300 steps",
        complete and {len(run["curves"]["episodes/usable"]) for run, _ in study.values()} == {300},
    )
    compared = {c: differences(study, c, "staged", "fixed-64") for c in CONDITIONS}
    adjusted = {c: holm([mcnemar(f), every_sign(e), every_sign(a)]) for c, (f, e, a) in compared.items()}
    for condition, (falls, ends, areas) in compared.items():
        task, p = CONDITIONS[condition], adjusted[condition]
        both = [sum(column) for column in zip(*falls, strict=True)]
        pages.expect(
            f"| {condition}: runs that collapsed | # of # | # of # | | # |",
            both[0],
            len(falls),
            both[1],
            len(falls),
            p[0],
        )
        arm_ends = [points(end for (t, a, _), (_, end) in study.items() if (t, a) == (task, arm)) for arm in ARMS[:2]]
        pages.expect(f"| {condition}: success at the end | #% | #% | # (# to #) | # |", *arm_ends, *gap(ends), p[1])
        commons = [common_areas(study, task, seed) for seed in sorted(seeds)]
        means = [points(column) for column in zip(*commons, strict=True)]
        row = f"| {condition}: mean success at equal processed tokens | #% | #% | # (# to #) | # |"
        pages.expect(row, *means, *gap(areas), p[2])
    helps = all(mean(d) > 0 for d, p in zip(compared["calm"][1:], adjusted["calm"][1:], strict=True) if p < 0.05)
    pages.require("**not shown** in the paper-like condition", min(adjusted["paper-like"]) >= 0.05)
    per_token = [areas > 0 and p[2] < 0.05 for areas, p in ((mean(compared[c][2]), adjusted[c]) for c in CONDITIONS)]
    for text in ("in long mazes it saves tokens in one of two conditions", "for its tokens in one of two conditions"):
        pages.require(text, sum(per_token) == 1)
    pages.require("in neither is it shown to end higher", all(adjusted[c][1] >= 0.05 for c in CONDITIONS))
    pages.require("(six and twelve seeds)", len(seeds) == 12)
    deciding = [p < 0.05 for p in adjusted["calm"]]
    pages.require("by mean success at equal processed tokens alone", deciding == [False, False, True])
    pages.require("**staging helps** in the calm condition", min(adjusted["calm"]) < 0.05 and helps)
    long_falls = [b for falls, _, _ in compared.values() for _, b in falls]
    pages.expect(
        "The paper's collapse is not reproduced: # of # runs of fixed-64 collapsed.", sum(long_falls), len(long_falls)
    )
    pages.require("The paper's collapse is not reproduced", sum(long_falls) < 3)
    other_arms(pages, study)


def common_areas(study: Study, task: str, seed: int) -> tuple[float, float]:
    curves = [points_of(study[task, arm, seed][0]) for arm in ARMS[:2]]
    end = min(curve[-1][0] for curve in curves)
    return area(curves[0], end), area(curves[1], end)


def gap(values: Sequence[float]) -> list[Value]:
    return [points(values), *bootstrap(values)]


def conditions(pages: Pages, study: Study) -> None:
    """Check the settings of the conditions, and what the page says about the length of their runs."""
    by_task = {task: [r["config"]["rl"] for (t, _, _), (r, _) in study.items() if t == task] for task, *_ in study}
    found = {}
    for condition, task in CONDITIONS.items():
        names = ("kl_coef", "minibatches", "overlap", "importance")
        (settings,) = {(*(rl[n] for n in names), rl["optimizer"]["lr"], rl["aggregate"]) for rl in by_task[task]}
        found[condition] = settings
    pages.require("samples that are one update old and no correction", found["paper-like"][2:4] == (1, "none"))
    pages.require("The paper-like condition has no KL term", found["paper-like"][0] == 0)
    pages.expect("a learning rate of #, # mini-batches, samples", found["paper-like"][4], found["paper-like"][1])
    calm = found["calm"]
    pages.expect("a KL term of #, a learning rate of #, # mini-batches and fresh", calm[0], calm[4], calm[1])
    pages.require("mini-batches and fresh samples", calm[2] == 0)
    pages.require("mazes: over trajectories", {settings[5] for settings in found.values()} == {"trajectory"})
    horizons = {
        tuple(run["config"]["eval"][n] for n in ("every", "episodes", "max_turns")) for run, _ in study.values()
    }
    pages.require("every 20 steps with 200 episodes", horizons == {(20, 200, TURNS)})
    long_runs = {
        task: [r for (t, arm, _), (r, _) in study.items() if (t, arm) == (task, "fixed-64")] for task in by_task
    }
    sampled, processed = [], []
    for runs in long_runs.values():
        played = [math.fsum(run["curves"]["episodes/usable"]) for run in runs]
        sampled.append(mean(run["sampled_tokens"] / n for run, n in zip(runs, played, strict=True)))
        processed.append(mean(tokens_until(run)[-1] / n for run, n in zip(runs, played, strict=True)))
    pages.expect(
        "mazes: # to # (# to # with observations)", *(min(sampled), max(sampled)), *(min(processed), max(processed))
    )
    pages.accept("B: 44 to 85; mazes: 300 |", "mazes: 16 → 32 → 64;")


def tokens_until(run: Record) -> list[float]:
    """Return the processed tokens up to each step, from step 1."""
    totals = [0.0]
    for tokens, episodes in zip(run["curves"]["tokens/per_episode"], run["curves"]["episodes/usable"], strict=True):
        totals.append(totals[-1] + tokens * episodes)
    return totals[1:]


def equal_at(study: Study, longer: str, shorter: str) -> list[int]:
    """Return the lowest and highest step of one arm that its tokens and those of another arm's whole run allow."""
    steps = []
    for (task, arm, seed), (run, _) in study.items():
        if arm == longer:
            end = tokens_until(study[task, shorter, seed][0])[-1]
            steps.append(sum(total <= end for total in tokens_until(run)))
    return [min(steps), max(steps)]


def adjusted(parts: Outcomes) -> list[float]:
    falls, ends, areas = parts
    return holm([mcnemar(falls), every_sign(ends), every_sign(areas)])


def gap_of(parts: Outcomes, outcome: int) -> list[Value]:
    """Return the mean difference and its interval of the success at the end (1) or of the areas (2)."""
    return gap(parts[1] if outcome == 1 else parts[2])


def expect_both(pages: Pages, before: str, compared: dict[str, Outcomes], outcome: int) -> None:
    """Check one outcome of a comparison in both conditions."""
    text = "# points (# to #), p = # (paper-like) and # points (# to #), p = # (calm)."
    values = []
    for condition in CONDITIONS:
        values += [*gap_of(compared[condition], outcome), adjusted(compared[condition])[outcome]]
    pages.expect(f"{before} {text}", *values)


def other_arms(pages: Pages, study: Study) -> None:
    """Check what the list says about tokens, fixed-16 and too-short."""
    pages.expect("processed as many at step # to # of", *equal_at(study, "fixed-64", "staged"))
    pages.accept("of 300. Staged has")
    totals = {
        (task, arm): math.fsum(tokens_until(run)[-1] for (t, a, _), (run, _) in study.items() if (t, a) == (task, arm))
        for task, arm, _ in study
    }
    shares = {arm: [100 * totals[t, arm] / totals[t, "fixed-64"] for t in CONDITIONS.values()] for arm in ARMS}
    both = sorted(shares["staged"])
    pages.expect("Staged has # to #% of the tokens of fixed-64, fixed-16 #%.", *both, shares["fixed-16"][0])
    pages.require("fixed-16 37%", {round(share) for share in shares["fixed-16"]} == {37})
    pages.expect("with #% of the tokens of fixed-64.", shares["fixed-16"][1])
    pages.expect("tokens end at step # to # of staged", *equal_at(study, "staged", "fixed-16"))
    pages.accept("whose 64 turns begin at step 201")
    medium, long, short = (
        {c: differences(study, c, *arms) for c in CONDITIONS}
        for arms in (("staged", "fixed-16"), ("fixed-16", "fixed-64"), ("too-short", "staged"))
    )
    expect_both(pages, "Staged less fixed-16 at equal processed tokens:", medium, 2)
    expect_both(pages, "whose 64 turns begin at step 201. At the end:", medium, 1)
    pages.require("Whether it is the growth that saves tokens", min(adjusted(medium[c])[2] for c in CONDITIONS) > 0.05)
    text = "# points (# to #), p = # (paper-like) and # points (# to #), p = # (calm)."
    parts = [(c, outcome) for outcome in (2, 1) for c in CONDITIONS]
    pages.expect(
        f"compared after the runs were seen. At equal processed tokens: {text} At the end: {text}",
        *(value for c, outcome in parts for value in (*gap_of(long[c], outcome), adjusted(long[c])[outcome])),
    )
    pages.expect("ended below fixed-64 (p = #)", adjusted(long["paper-like"])[1])
    pages.require("fixed-16 ended highest", min(mean(long["calm"][1]), -mean(medium["calm"][1])) > 0)
    low_runs(pages, study, medium["paper-like"][0])
    expect_both(pages, "Too-short less staged at equal processed tokens:", short, 2)
    expect_both(pages, "At the end it is not shown:", short, 1)
    pages.require("At the end it is not shown", all(adjusted(short[c])[1] >= 0.05 for c in CONDITIONS))
    counts = [n for c in CONDITIONS for n in (sum(a for a, _ in short[c][0]), len(short[c][0]))]
    pages.expect("evaluations in a row in # of # (paper-like) and # of # runs (calm), all within that stage.", *counts)
    fell_at = [first_fall(run) for (_, arm, _), (run, _) in study.items() if arm == "too-short" and fell(run)]
    pages.require("all within that stage", max(fell_at) <= 100)
    named: dict[bool, list[int]] = {True: [], False: []}
    for (_, arm, _), (run, _) in study.items():
        steps = [finding["step"] for finding in run["findings"] if finding["rule"] == "horizon_truncation"]
        named[arm == "too-short"].append(min(steps, default=0))
    (step,) = set(named[True])
    pages.expect(
        "at step # in # of # runs of too-short, and in # of # others.",
        *(step, len(named[True]), len(named[True]), sum(map(bool, named[False])), len(named[False])),
    )
    pages.accept("**A first stage of 4 turns costs", "Fixed-16 less fixed-64,")
    text = "in the mazes a first stage of 4 turns cost success on the way"
    pages.accept(text)
    pages.require(text, all(mean(short[c][2]) < 0 and adjusted(short[c])[2] < 0.05 for c in CONDITIONS))


def low_runs(pages: Pages, study: Study, falls: Sequence[tuple[bool, bool]]) -> None:
    """Check collapses of staged and fixed-16 in the paper-like condition, and single low evaluations."""
    counts = [sum(b for _, b in falls), len(falls), sum(a for a, _ in falls), len(falls)]
    text = "fixed-16 collapsed in # of # runs and staged in # of #, all while they trained under # turns"
    pages.expect(text, *counts, 16)
    pages.accept("Evaluations have 64.")
    runs = {(arm, s): v for (task, arm, s), v in study.items() if task == CONDITIONS["paper-like"]}
    fallen = {key: value for key, value in runs.items() if key[0] in ("staged", "fixed-16") and fell(value[0])}
    firsts = [first_fall(run) for (arm, _), (run, _) in fallen.items() if arm == "staged"]
    pages.require("all while they trained under 16 turns", max(firsts) <= 100)
    rose = [end >= max(e["success"] for e in run["evaluations"]) / 2 for run, end in fallen.values()]
    pages.require("all of these rose again", all(rose))
    single = {a: [s for (arm, s), (r, _) in runs.items() if arm == a and any(is_low(r)) and not fell(r)] for a in ARMS}
    pages.expect(
        "it happened to # run of fixed-64, # of staged and # of fixed-16 besides",
        *(len(single[arm]) for arm in ("fixed-64", "staged", "fixed-16")),
    )
    (last,) = [s for s in single["staged"] if is_low(runs["staged", s][0])[-1]]
    pages.expect(
        "In # run of staged it was the last one, and success at the end is #%.", 1, points([runs["staged", last][1]])
    )


def is_low(run: Record) -> list[bool]:
    """Return whether each evaluation was below half of the best one before it."""
    rates = [evaluation["success"] for evaluation in run["evaluations"]]
    return [rate < max(rates[:at], default=0.0) / 2 for at, rate in enumerate(rates)]


def first_fall(run: Record) -> int:
    """Return the step of the second of two successive evaluations below half of the best one before them."""
    best, was_low = 0.0, False
    for evaluation in run["evaluations"]:
        is_low = evaluation["success"] < best / 2
        if is_low and was_low:
            return int(evaluation["step"])
        best, was_low = max(best, evaluation["success"]), is_low
    raise AssertionError("the run did not fall")


Products = dict[str, list[float]]


def gradients(pages: Pages) -> None:
    """Check how well updates under shorter horizons agree with the gradient under the longest one."""
    models = {path.stem: json.loads(path.read_text()) for path in sorted((RESULTS / "gradient-noise").glob("*.json"))}
    gains = {name: gains_of(model["horizons"]) for name, model in models.items()}
    start, calm, paper = (gains[f"fixed-64-{name}"] for name in ("calm-0-0", "calm-0-300", "paper-like-0-300"))
    pages.require("None does:", all(gain < 2 * error for gain, error in start.values()))
    signs = (("agree worse, by", start, -1), ("they agree better, by", calm, 1))
    for words, of, sign in signs:
        values = [value for turns in (16, 32) for value in (sign * of[turns][0], of[turns][1])]
        pages.expect(f"{words} # ± # and # ± #", *values)
    pages.require("updates under 16 and 32 turns agree worse", all(start[t][0] < -2 * start[t][1] for t in (16, 32)))
    pages.accept("updates under 16 and 32 turns agree worse", "gradient under 64 turns more closely")
    pages.require("no horizon differs by two standard errors", all(abs(g) < 2 * e for g, e in paper.values()))
    pages.accept("After 300 steps of the calm condition", "After 300 paper-like steps")
    middle = [g for c in CONDITIONS for g in gains[f"fixed-64-{c}-0-100"].values()]
    pages.require("After 100 steps none does in either condition.", all(gain < 2 * error for gain, error in middle))
    pages.accept("After 100 steps none does in either condition.", "Step 200 was not measured.")
    (mazes,) = {len(model["horizons"][0]["own"]) for model in models.values()}
    pages.expect("This is one seed, # mazes a model", mazes)
    pages.accept("Its runs repeat seed 0 of the study")
    why = "an update under 16 or 32 turns agrees less with the true gradient under 64 turns than one under 64"
    pages.require(f"at the start {why}", all(start[turns][0] < 0 for turns in (16, 32)))
    pages.require("and after 300 calm steps more", all(calm[turns][0] > 0 for turns in (16, 32)))
    pages.accept(why, "and after 300 calm steps more")


def gains_of(horizons: Sequence[Record]) -> dict[int, tuple[float, float]]:
    """Return the agreement of each shorter horizon less that of the longest, with its jackknife error."""
    longest = horizons[-1]
    n, tokens = len(longest["own"]), 8 * longest["processed_tokens_per_group"]
    truths = [signal for signal, *_ in moments(longest)]
    agreements: dict[int, list[float]] = {}
    for row in horizons:
        groups = tokens / row["processed_tokens_per_group"]
        parts = zip(moments(row), truths, strict=True)
        cosines = [shared / math.sqrt(truth * (signal + noise / groups)) for (signal, noise, shared), truth in parts]
        agreements[int(row["turns"])] = cosines
    gains = {}
    for turns, cosines in list(agreements.items())[:-1]:
        gain, *without = (a - b for a, b in zip(cosines, agreements[int(longest["turns"])], strict=True))
        center = mean(without)
        gains[turns] = (gain, math.sqrt((n - 1) / n * math.fsum((value - center) ** 2 for value in without)))
    return gains


def moments(row: Record) -> list[tuple[float, float, float]]:
    """Return signal, noise and the product with the longest horizon's gradient: of all groups, then without each."""
    names = ("own", "with_sum", "with_longest", "with_longest_sum", "longest_with_sum")
    groups = list(zip(*(row[name] for name in names), strict=True))
    own, both, same, mixed = (math.fsum(row[name]) for name in names[:4])
    sums = [(len(groups), own, both, same, mixed)]
    for g, g_sum, g_long, g_long_sum, long_g_sum in groups:
        less_both, less_mixed = both + g - 2 * g_sum, mixed + g_long - g_long_sum - long_g_sum
        sums.append((len(groups) - 1, own - g, less_both, same - g_long, less_mixed))
    found = []
    for n, squares, total, alike, crossed in sums:
        signal = (total - squares) / (n * (n - 1))
        found.append((signal, squares / n - signal, (crossed - alike) / (n * (n - 1))))
    return found
