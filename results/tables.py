"""Tables of docs/results/evidence-details.md: results of each arm and significance tests of the differences."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from jobs import RANDOM
from records import (
    Record,
    final_success,
    first_evaluation_tokens,
    interpolate,
    item_rates,
    largest_drop,
    mean_success,
    overall_cell,
    success_at,
    turns_of,
)

from agentgym_rl.evaluation.statistics import mcnemar_exact, mean_interval, sign_flip_test


def holm(values: Sequence[float]) -> list[float]:
    """Return Holm's step-down adjusted p-values."""
    order = sorted(range(len(values)), key=values.__getitem__)
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, values[index] * (len(values) - rank)))
        adjusted[index] = highest
    return adjusted


def mean_and_range(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.1%} ({min(values):.1%}–{max(values):.1%})"


def in_points(mean: float, low: float, high: float) -> str:
    return f"{100 * mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f}) points"


def mean_success_since_first_evaluations(records: Sequence[Record]) -> Callable[[Record], float]:
    """Return a function for a run's mean success after every arm of its task has its first evaluation."""
    starts: dict[str, float] = {}
    for record in records:
        starts[record["task"]] = max(starts.get(record["task"], 0.0), first_evaluation_tokens(record))
    return lambda record: mean_success(record, starts[record["task"]])


def by_arm(records: Sequence[Record], arms: Sequence[str]) -> Iterator[tuple[str, str, list[Record]]]:
    """Yield (task, arm, records of the arm) for every arm with records."""
    for task in sorted({r["task"] for r in records}):
        for arm in arms:
            if arm_records := [r for r in records if (r["task"], r["arm"]) == (task, arm)]:
                yield task, arm, arm_records


def arms_table(records: Sequence[Record], arms: Sequence[str]) -> list[str]:
    """Return a table with a row per task and arm."""
    mean_over_run = mean_success_since_first_evaluations(records)
    lines = [
        "| task | arm | seeds | success at the end (lowest–highest) | over the run | fall | steps | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task, arm, runs in by_arm(records, arms):
        steps, seconds = (statistics.fmean(r[n] for r in runs) for n in ("steps", "seconds"))
        numbers = [mean_and_range([value(r) for r in runs]) for value in (final_success, mean_over_run)]
        drop = statistics.fmean(largest_drop(r) for r in runs)
        numbers += [f"{drop:.1%}", f"{steps:.0f}", f"{seconds:.0f}"]
        lines.append(f"| {task} | {arm} | {len(runs)} | {' | '.join(numbers)} |")
    return lines


def stages_table(records: Sequence[Record], arms: Sequence[str]) -> list[str]:
    """Return a table of each horizon stage: groups with differing rewards (only these give a gradient) and entropy."""
    lines = [
        "| task | arm | turns | share of tokens | groups with contrast | of all | per 100k tokens | entropy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task, arm, runs in by_arm(records, arms):
        for stage in range(max(len(r["stages"]) for r in runs)):
            stages = [_stage(r, stage) for r in runs if stage < len(r["stages"])]
            turns, spent, contrast, share, density, entropy = map(statistics.fmean, zip(*stages, strict=True))
            row = f"{turns:.0f} | {spent:.0%} | {contrast:.0f} | {share:.0%} | {density:.0f} | {entropy:.2f}"
            lines.append(f"| {task} | {arm} | {row} |")
    return lines


def _stage(record: Record, number: int) -> tuple[float, ...]:
    """Return turns, token share, groups with contrast, their share, their number per 100k tokens, and token entropy."""
    stage, curves = record["stages"][number], record["curves"]
    first, end = stage["first_step"] - 1, stage["last_step"]
    tokens = [0.0, *curves["tokens/total"]]
    contrast = [1 - uniform for uniform in curves["groups/zero_variance"][first:end]]
    groups = sum(contrast) * record["config"]["rl"]["groups_per_step"]
    entropy = statistics.fmean(value for value in curves["entropy/mean"][first:end] if value is not None)
    spent = tokens[end] - tokens[first]
    return stage["turns"], spent / tokens[-1], groups, statistics.fmean(contrast), 1e5 * groups / spent, entropy


def paired_table(
    records: Sequence[Record], pairs: Sequence[tuple[str, str]], value: Callable[[Record], float]
) -> list[str]:
    """Return differences within (task, seed), their sign-flip test, and Holm's correction over the rows."""
    rows: list[tuple[str, str, list[float], float]] = []
    for first, second in pairs:
        values = {(r["task"], r["seed"], r["arm"]): value(r) for r in records}
        differences = [
            values[task, seed, first] - values[task, seed, second]
            for task, seed in sorted({(task, seed) for task, seed, _ in values})
            if (task, seed, first) in values and (task, seed, second) in values
        ]
        if differences:
            rows.append((first, second, differences, sign_flip_test(differences)))
    corrected = holm([p for *_, p in rows])
    lines = ["| first | second | pairs | mean difference (lowest–highest) | p | p, Holm |", "|---|---|---|---|---|---|"]
    for (first, second, differences, p), adjusted in zip(rows, corrected, strict=True):
        difference = in_points(statistics.fmean(differences), min(differences), max(differences))
        lines.append(f"| {first} | {second} | {len(differences)} | {difference} | {p:.2g} | {adjusted:.2g} |")
    return lines


def agents_table(records: Sequence[Record], arms: Sequence[str]) -> list[str]:
    """Return a table with a row per task, arm and seed: success over episodes with its interval."""
    lines = [
        "| task | arm | seed | items | episodes | success (95% interval) | turns |",
        "|---|---|---|---|---|---|---|",
    ]
    for record in sorted(records, key=lambda r: (r["task"], arms.index(r["arm"]), r["seed"])):
        cell = overall_cell(record)
        rate = "{value:.1%} ({low:.1%}–{high:.1%})".format(**cell["success"])
        agent = f"{record['task']} | {record['arm']} | {record['seed']}"
        lines.append(f"| {agent} | {cell['items']} | {cell['episodes']} | {rate} | {cell['turns']:.1f} |")
    return lines


def kinds_table(records: Sequence[Record], arms: Sequence[str]) -> list[str]:
    """Return a table with a row per kind of item and a column per arm: mean success over seeds in percent."""
    rates: dict[str, dict[str, list[float]]] = {}
    for record in sorted(records, key=lambda r: str(r["task"])):
        for kind, cell in record["results"][-1]["tasks"].items():
            rates.setdefault(kind, {}).setdefault(record["arm"], []).append(cell["success"]["value"])
    present = [arm for arm in arms if any(arm in arm_rates for arm_rates in rates.values())]
    lines = [f"| in percent | {' | '.join(present)} |", "|---|" + "---|" * len(present)]
    for kind, arm_rates in rates.items():
        cells = (f"{100 * statistics.fmean(arm_rates[arm]):.0f}" if arm in arm_rates else "" for arm in present)
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return lines


def items_table(records: Sequence[Record], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Compare two agents item by item: McNemar's exact test with one sample an item, else sign flips over items."""
    by_agent = {(r["task"], r["seed"], r["arm"]): r for r in records}
    rows: list[tuple[str, str, float]] = []
    for task, seed in sorted({(task, seed) for task, seed, _ in by_agent}):
        for first, second in pairs:
            if (task, seed, first) in by_agent and (task, seed, second) in by_agent:
                cells, test, p = _compare_items(by_agent[task, seed, first], by_agent[task, seed, second])
                rows.append((f"| {task} | {first} | {second} | {seed} | {cells}", test, p))
    corrected = holm([p for *_, p in rows])
    lines = [
        "| task | first | second | seed | items | difference (95% interval) | only first, only second | p | p, Holm |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"{row} | {test} | {p:.2g} | {adjusted:.2g} |" for (row, test, p), adjusted in zip(rows, corrected, strict=True)
    ]
    return lines


def _compare_items(first: Record, second: Record) -> tuple[str, str, float]:
    """Return ("items | difference", discordant items, p)."""
    turns = turns_of(first)[-1]
    first_rates, second_rates = item_rates(first, turns), item_rates(second, turns)
    shared = [item for item in first_rates if item in second_rates]
    differences = [first_rates[item] - second_rates[item] for item in shared]
    wins, losses = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    single = all(len(r["outcomes"][str(turns)][item]) == 1 for r in (first, second) for item in shared)
    p = mcnemar_exact(wins, losses) if single else sign_flip_test(differences)
    cells = f"{len(shared)} | {in_points(statistics.fmean(differences), *mean_interval(differences))}"
    return cells, f"{wins}, {losses} ({'McNemar' if single else 'sign flips'})", p


def seed_means_table(records: Sequence[Record], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return differences averaged over seeds, with a bootstrap interval over items, and each seed's difference.

    The interval describes these agents, not agents of other seeds."""
    lines = ["| first | second | mean difference (95% interval over items) | by seed, points |", "|---|---|---|---|"]
    rates = {(r["seed"], r["arm"]): item_rates(r, turns_of(r)[-1]) for r in records}
    for first, second in pairs:
        seeds = sorted(seed for seed, arm in rates if arm == first and (seed, second) in rates)
        by_item: dict[str, list[float]] = {}
        for seed in seeds:
            for item in rates[seed, first].keys() & rates[seed, second].keys():
                by_item.setdefault(item, []).append(rates[seed, first][item] - rates[seed, second][item])
        if seeds:
            means = [statistics.fmean(by_item[item]) for item in sorted(by_item)]
            differences = [
                statistics.fmean(rates[s, first].values()) - statistics.fmean(rates[s, second].values()) for s in seeds
            ]
            by_seed = ", ".join(f"{100 * d:+.1f}" for d in differences)
            interval = in_points(statistics.fmean(means), *mean_interval(means))
            lines.append(f"| {first} | {second} | {interval} | {by_seed} |")
    return lines


def gains_table(records: Sequence[Record], few: int = 4, many: int = 32) -> list[str]:
    """Compare two gains (claim C): more turns for the smallest agent, and more parameters at few turns."""
    agents = {(r["seed"], r["arm"]): r for r in records}
    seeds = sorted({seed for seed, arm in agents if arm == "staged 1M" and (seed, "staged 25M") in agents})
    if not seeds:
        return ["The two gains cannot be compared yet: no seed has both the trained 1M and the trained 25M agent."]
    lines = [
        f"| seed | 1M: from {few} to {many} turns | {few} turns: from 1M to 25M | difference |",
        "|---|---|---|---|",
    ]
    by_item: dict[str, list[float]] = {}
    for seed in seeds:
        small, large = agents[seed, "staged 1M"], agents[seed, "staged 25M"]
        small_few, small_many, large_few = item_rates(small, few), item_rates(small, many), item_rates(large, few)
        for item in (item for item in small_few if item in small_many and item in large_few):
            by_turns, by_size = small_many[item] - small_few[item], large_few[item] - small_few[item]
            by_item.setdefault(item, []).append(by_turns - by_size)
        by_turns = success_at(small, many) - success_at(small, few)
        by_size = success_at(large, few) - success_at(small, few)
        lines.append(f"| {seed} | {100 * by_turns:+.1f} | {100 * by_size:+.1f} | {100 * (by_turns - by_size):+.1f} |")
    means = [statistics.fmean(values) for values in by_item.values()]
    interval = in_points(statistics.fmean(means), *mean_interval(means))
    lines += ["", f"Mean over seeds, 95% bootstrap interval over {len(means)} items: {interval}."]
    return [*lines, "", *gains_over_chance_table(records, few, many)]


def gains_over_chance(records: Sequence[Record], few: int, many: int) -> dict[str, list[float]]:
    """Return each agent's gain from more turns less random play's own, item by item, mean over seeds."""
    chance = next((r for r in records if r["arm"] == RANDOM), None)
    if chance is None:
        return {}
    own = {item: rate - item_rates(chance, few)[item] for item, rate in item_rates(chance, many).items()}
    gains = {}
    for arm in sorted({r["arm"] for r in records if r["arm"] != RANDOM}):
        agents = [(item_rates(r, few), item_rates(r, many)) for r in records if r["arm"] == arm]
        gains[arm] = [statistics.fmean(more[i] - less[i] for less, more in agents) - gain for i, gain in own.items()]
    return gains


def gains_over_chance_table(records: Sequence[Record], few: int, many: int) -> list[str]:
    """Return the gain from more turns less random play's own gain on the same items, by size, before and after RL."""
    gains = gains_over_chance(records, few, many)
    if not gains:
        return ["The gains cannot be compared with random play, which has no record."]
    lines = [
        f"| agent | from {few} to {many} turns, less random play's gain (95% interval over items) | p over items |",
        "|---|---|---|",
    ]
    for arm, values in gains.items():
        gain = in_points(statistics.fmean(values), *mean_interval(values))
        lines.append(f"| {arm} | {gain} | {sign_flip_test(values):.2g} |")
    return lines


def contributions_table(records: Sequence[Record], first: str, second: str) -> list[str]:
    """Return how many points of the difference between two arms each kind of item carries, mean over shared seeds."""
    cells = {(r["arm"], r["seed"]): r["results"][-1]["tasks"] for r in records}
    seeds = sorted(seed for arm, seed in cells if arm == first and (second, seed) in cells)
    lines = [f"| kind | items | {first} less {second}, points of the total |", "|---|---|---|"]
    if not seeds:
        return [f"No seed has both {first} and {second}."]
    total = sum(cell["items"] for cell in cells[first, seeds[0]].values())
    points = []
    for kind, cell in cells[first, seeds[0]].items():
        rates = [[cells[arm, seed][kind]["success"]["value"] for seed in seeds] for arm in (first, second)]
        points.append(100 * cell["items"] / total * (statistics.fmean(rates[0]) - statistics.fmean(rates[1])))
        lines.append(f"| {kind} | {cell['items']} | {points[-1]:+.1f} |")
    return [*lines, f"| all | {total} | {sum(points):+.1f} |"]


def equal_steps_table(records: Sequence[Record], arms: Sequence[str]) -> list[str]:
    """Return success and tokens of each arm after as many steps as the shortest fixed-long run of its task has."""
    lines = [
        "| task | arm | seeds | steps | success | sampled tokens | of fixed-long's |",
        "|---|---|---|---|---|---|---|",
    ]
    for task in sorted({r["task"] for r in records}):
        runs = {arm: [r for r in records if (r["task"], r["arm"]) == (task, arm)] for arm in arms}
        steps = min((r["steps"] for r in runs.get("fixed-long", [])), default=0)
        tokens = {
            arm: statistics.fmean(r["curves"]["tokens/total"][min(steps, r["steps"]) - 1] for r in arm_runs)
            for arm, arm_runs in runs.items()
            if arm_runs and steps
        }
        for arm, spent in tokens.items():
            success = [
                interpolate([e["step"] for e in r["evaluations"]], [e["success"] for e in r["evaluations"]], steps)
                for r in runs[arm]
            ]
            row = f"{steps} | {statistics.fmean(success):.1%} | {spent:,.0f} | {spent / tokens['fixed-long']:.0%}"
            lines.append(f"| {task} | {arm} | {len(success)} | {row} |")
    return lines


def before_after_table(records: Sequence[Record]) -> list[str]:
    """Return each RL run's held-out success before and after, on the items of its own evaluations."""
    lines = ["| run | episodes | before | after | gain, points |", "|---|---|---|---|---|"]
    for record in sorted(records, key=lambda r: str(r["job"])):
        before, *_, after = record["evaluations"]
        gain = 100 * (after["success"] - before["success"])
        cells = f"{after['episodes']} | {before['success']:.1%} | {after['success']:.1%} | {gain:+.1f}"
        lines.append(f"| {record['job']} | {cells} |")
    return lines
