"""Tables of docs/results/evidence.md: what each arm reached, and which differences are more than chance."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from records import Record, fall, first_evaluation, item_rates, last, over_curve, success_at, turns_of, whole_cell

from agentgym_rl.evaluation.statistics import mcnemar_exact, mean_interval, sign_flip_test


def holm(values: Sequence[float]) -> list[float]:
    """Step-down p-values: the smallest times their number, the next times one less, never falling."""
    order = sorted(range(len(values)), key=values.__getitem__)
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, values[place] * (len(values) - rank)))
        adjusted[place] = highest
    return adjusted


def spread_of(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.1%} ({min(values):.1%}–{max(values):.1%})"


def points(mean: float, low: float, high: float) -> str:
    return f"{100 * mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f}) points"


def since_all(records: Sequence[Record]) -> Callable[[Record], float]:
    """Mean success from where every arm of a task has been evaluated after its start."""
    starts: dict[str, float] = {}
    for record in records:
        starts[record["task"]] = max(starts.get(record["task"], 0.0), first_evaluation(record))
    return lambda record: over_curve(record, starts[record["task"]])


def by_arm(records: Sequence[Record], arms: Sequence[str]) -> Iterator[tuple[str, str, list[Record]]]:
    """(task, arm, its records), of arms that have some."""
    for task in sorted({r["task"] for r in records}):
        for arm in arms:
            if some := [r for r in records if (r["task"], r["arm"]) == (task, arm)]:
                yield task, arm, some


def arms_table(records: Sequence[Record], arms: Sequence[str]) -> list[str]:
    """A row per task and arm."""
    over = since_all(records)
    lines = [
        "| task | arm | seeds | success at the end (lowest–highest) | over the run | fall | steps | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task, arm, runs in by_arm(records, arms):
        steps, seconds = (statistics.fmean(r[n] for r in runs) for n in ("steps", "seconds"))
        numbers = [spread_of([value(r) for r in runs]) for value in (last, over)]
        falls = statistics.fmean(fall(r) for r in runs)
        numbers += [f"{falls:.1%}", f"{steps:.0f}", f"{seconds:.0f}"]
        lines.append(f"| {task} | {arm} | {len(runs)} | {' | '.join(numbers)} |")
    return lines


def stages_table(records: Sequence[Record], arms: Sequence[str]) -> list[str]:
    """What each horizon got for its tokens: groups that do not all end alike (they alone teach), and entropy."""
    lines = [
        "| task | arm | turns | share of tokens | groups with contrast | of all | per 100k tokens | entropy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task, arm, runs in by_arm(records, arms):
        for stage in range(max(len(r["stages"]) for r in runs)):
            of_runs = [_stage(r, stage) for r in runs if stage < len(r["stages"])]
            turns, spent, contrast, share, density, entropy = map(statistics.fmean, zip(*of_runs, strict=True))
            row = f"{turns:.0f} | {spent:.0%} | {contrast:.0f} | {share:.0%} | {density:.0f} | {entropy:.2f}"
            lines.append(f"| {task} | {arm} | {row} |")
    return lines


def _stage(record: Record, number: int) -> tuple[float, ...]:
    """Turns, share of the tokens, groups with contrast, of all groups, per 100k tokens, and a token's entropy."""
    stage, curves = record["stages"][number], record["curves"]
    first, end = stage["first_step"] - 1, stage["last_step"]
    tokens = [0.0, *curves["tokens/total"]]
    contrast = [1 - alike for alike in curves["groups/zero_variance"][first:end]]
    groups = sum(contrast) * record["config"]["rl"]["groups_per_step"]
    entropy = statistics.fmean(value for value in curves["entropy/mean"][first:end] if value is not None)
    spent = tokens[end] - tokens[first]
    return stage["turns"], spent / tokens[-1], groups, statistics.fmean(contrast), 1e5 * groups / spent, entropy


def paired_table(
    records: Sequence[Record], pairs: Sequence[tuple[str, str]], value: Callable[[Record], float]
) -> list[str]:
    """Differences within (task, seed), a sign-flip test over them, and Holm's correction over the rows."""
    rows: list[tuple[str, str, list[float], float]] = []
    for first, second in pairs:
        found = {(r["task"], r["seed"], r["arm"]): value(r) for r in records}
        places = sorted({(task, seed) for task, seed, _ in found})
        differences = [
            found[*place, first] - found[*place, second]
            for place in places
            if (*place, first) in found and (*place, second) in found
        ]
        if differences:
            rows.append((first, second, differences, sign_flip_test(differences)))
    corrected = holm([p for *_, p in rows])
    lines = ["| first | second | pairs | mean difference (lowest–highest) | p | p, Holm |", "|---|---|---|---|---|---|"]
    for (first, second, differences, p), adjusted in zip(rows, corrected, strict=True):
        said = points(statistics.fmean(differences), min(differences), max(differences))
        lines.append(f"| {first} | {second} | {len(differences)} | {said} | {p:.2g} | {adjusted:.2g} |")
    return lines


def agents_table(records: Sequence[Record], arms: Sequence[str]) -> list[str]:
    """A row per task, arm and seed: success over episodes with its interval."""
    lines = [
        "| task | arm | seed | items | episodes | success (95% interval) | turns |",
        "|---|---|---|---|---|---|---|",
    ]
    for record in sorted(records, key=lambda r: (r["task"], arms.index(r["arm"]), r["seed"])):
        cell = whole_cell(record)
        rate = "{value:.1%} ({low:.1%}–{high:.1%})".format(**cell["success"])
        place = f"{record['task']} | {record['arm']} | {record['seed']}"
        lines.append(f"| {place} | {cell['items']} | {cell['episodes']} | {rate} | {cell['turns']:.1f} |")
    return lines


def kinds_table(records: Sequence[Record], arms: Sequence[str]) -> list[str]:
    """A row per kind of item, a column per arm: success in percent, over seeds."""
    found: dict[str, dict[str, list[float]]] = {}
    for record in sorted(records, key=lambda r: str(r["task"])):
        for kind, cell in record["results"][-1]["tasks"].items():
            found.setdefault(kind, {}).setdefault(record["arm"], []).append(cell["success"]["value"])
    present = [arm for arm in arms if any(arm in by_arm for by_arm in found.values())]
    lines = [f"| in percent | {' | '.join(present)} |", "|---|" + "---|" * len(present)]
    for kind, by_arm in found.items():
        cells = (f"{100 * statistics.fmean(by_arm[arm]):.0f}" if arm in by_arm else "" for arm in present)
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return lines


def items_table(records: Sequence[Record], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Two agents on the same items: McNemar's exact test with one sample an item, else sign flips over items."""
    found = {(r["task"], r["seed"], r["arm"]): r for r in records}
    rows: list[tuple[str, str, float]] = []
    for task, seed in sorted({(task, seed) for task, seed, _ in found}):
        for better, start in pairs:
            if (task, seed, better) in found and (task, seed, start) in found:
                said, test, p = _on_items(found[task, seed, better], found[task, seed, start])
                rows.append((f"| {task} | {better} | {start} | {seed} | {said}", test, p))
    corrected = holm([p for *_, p in rows])
    lines = [
        "| task | first | second | seed | items | difference (95% interval) | only first, only second | p | p, Holm |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"{row} | {test} | {p:.2g} | {adjusted:.2g} |" for (row, test, p), adjusted in zip(rows, corrected, strict=True)
    ]
    return lines


def _on_items(first: Record, second: Record) -> tuple[str, str, float]:
    """("items | difference", discordant items, p)."""
    turns = turns_of(first)[-1]
    one, other = item_rates(first, turns), item_rates(second, turns)
    shared = [item for item in one if item in other]
    differences = [one[item] - other[item] for item in shared]
    wins, losses = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    single = all(len(r["outcomes"][str(turns)][item]) == 1 for r in (first, second) for item in shared)
    p = mcnemar_exact(wins, losses) if single else sign_flip_test(differences)
    said = f"{len(shared)} | {points(statistics.fmean(differences), *mean_interval(differences))}"
    return said, f"{wins}, {losses} ({'McNemar' if single else 'sign flips'})", p


def over_seeds(records: Sequence[Record], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Items averaged over seeds, with a bootstrap interval over items, and each seed's difference: it speaks of these
    agents, not of what another seed would give."""
    lines = ["| first | second | mean difference (95% interval over items) | by seed, points |", "|---|---|---|---|"]
    found = {(r["seed"], r["arm"]): item_rates(r, turns_of(r)[-1]) for r in records}
    for first, second in pairs:
        seeds = sorted(seed for seed, arm in found if arm == first and (seed, second) in found)
        by_item: dict[str, list[float]] = {}
        for seed in seeds:
            for item in found[seed, first].keys() & found[seed, second].keys():
                by_item.setdefault(item, []).append(found[seed, first][item] - found[seed, second][item])
        if seeds:
            means = [statistics.fmean(by_item[item]) for item in sorted(by_item)]
            each = [
                statistics.fmean(found[s, first].values()) - statistics.fmean(found[s, second].values()) for s in seeds
            ]
            said = ", ".join(f"{100 * d:+.1f}" for d in each)
            lines.append(f"| {first} | {second} | {points(statistics.fmean(means), *mean_interval(means))} | {said} |")
    return lines


def gains(records: Sequence[Record], few: int = 4, many: int = 32) -> list[str]:
    """Claim C: what more turns bring the smallest agent against what more parameters bring at few turns."""
    found = {(r["seed"], r["arm"]): r for r in records}
    seeds = sorted({seed for seed, arm in found if arm == "staged 1M" and (seed, "staged 25M") in found})
    if not seeds:
        return ["The two gains cannot be compared yet: no seed has both the trained 1M and the trained 25M agent."]
    lines = [
        f"| seed | 1M: from {few} to {many} turns | {few} turns: from 1M to 25M | the first less the second |",
        "|---|---|---|---|",
    ]
    by_item: dict[str, list[float]] = {}
    for seed in seeds:
        small, large = found[seed, "staged 1M"], found[seed, "staged 25M"]
        low, high, wide = item_rates(small, few), item_rates(small, many), item_rates(large, few)
        for item in low:
            if item in high and item in wide:
                by_item.setdefault(item, []).append((high[item] - low[item]) - (wide[item] - low[item]))
        by_turns = success_at(small, many) - success_at(small, few)
        by_size = success_at(large, few) - success_at(small, few)
        lines.append(f"| {seed} | {100 * by_turns:+.1f} | {100 * by_size:+.1f} | {100 * (by_turns - by_size):+.1f} |")
    means = [statistics.fmean(values) for values in by_item.values()]
    interval = points(statistics.fmean(means), *mean_interval(means))
    return [*lines, "", f"Mean over seeds, 95% bootstrap interval over {len(means)} items: {interval}."]
