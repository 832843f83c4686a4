"""Checks of real models after RL under several limits of turns (claim C) for results/check.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from check_a import points
from check_d import (
    CHANCE,
    MODELS,
    TASKS,
    TURNS,
    Compared,
    Lines,
    cell,
    cut,
    less,
    refusals,
    repeats,
    solved_within,
    without_context,
)
from page_numbers import (
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
)

STUDY = "qwen-interaction"
SPLITS = ((8, 4), (16, 2))
"""Turns and number of tries that are compared with one episode of 32 turns."""
WORDS = ("no", "one", "two", "three", "four")


@dataclass(frozen=True)
class Agent:
    """Records of an agent, one per seed, and its episodes."""

    records: list[Record]
    episodes: Lines

    def rates(self, turns: int, tries: int = 1) -> Rates:
        """Return each item's success, averaged over seeds."""
        return by_item([best_of_by_item(record, turns, tries) for record in self.records])

    def success(self, turns: int, tries: int = 1) -> float:
        return points(self.rates(turns, tries).values())

    def gain(self, many: int = 32) -> list[float]:
        return less(self.rates(many), self.rates(4))

    def cost(self, turns: int, tries: int) -> float:
        """Return the sampled tokens of so many tries as a multiple of those of one long episode."""
        short, long = (mean(cell(r, t, "sampled_tokens") or 0 for r in self.records) for t in (turns, 32))
        return tries * short / long


@dataclass(frozen=True)
class Trained:
    """The largest trained model of a task, before and after RL, and random play."""

    size: str
    before: Agent
    after: Agent
    chance: Agent


Agents = list[tuple[str, Trained]]
"""Each trained model and its task."""
Suite = dict[str, tuple[int, dict[int, Lines]]]
"""Limit of turns and episodes by seed of the agents after RL in the paper's table, by task."""


def by_item(seeds: Sequence[Rates]) -> Rates:
    return {item: mean(rates[item] for rates in seeds) for item in seeds[0]}


def read_agent(task: str, arm: str) -> Agent:
    records = [r for r in load(STUDY) if r["task"] == task and r["arm"] == arm and "outcomes" in r]
    return Agent(records, [row for r in records for row in load_lines(STUDY, f"{r['job']}.actions")])


def read_trained() -> dict[str, list[Trained]]:
    """Return the trained sizes by task, from small to large."""
    models: dict[str, list[Trained]] = {}
    for task in TASKS:
        chance = read_agent(task, CHANCE)
        for size in MODELS:
            if (after := read_agent(task, f"staged {size}")).records:
                models.setdefault(task, []).append(Trained(size, read_agent(task, f"base {size}"), after, chance))
    return models


def read_suite(tasks: Iterable[str]) -> Suite:
    suite: Suite = {}
    for task in tasks:
        records = [r for r in load(f"qwen-{task}") if r["arm"] == "staged" and "outcomes" in r]
        if records:
            (turns,) = {int(t) for r in records for t in r["outcomes"]}
            suite[task] = turns, {r["seed"]: load_lines(f"qwen-{task}", f"{r['job']}.actions") for r in records}
    return suite


def on(task: str, model: Trained, note: str = "") -> str:
    return f"{TASKS[task]} ({model.size}{note})"


def joined(parts: Sequence[str], last: str = " and ") -> str:
    return last.join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def turns_after_rl(pages: Pages) -> None:
    """Check what the pages say about real models after RL."""
    models = read_trained()
    if not models:
        pages.require("The same after RL is not measured.", True)
        return
    suite = read_suite(models)
    shown = [(task, model) for task, sizes in models.items() for model in sizes]
    same_games(pages, models)
    compared = comparisons(pages, models, suite)
    tables(pages, models, compared)
    verdict(pages, shown, compared)
    use_of_turns(pages, shown, compared)
    tries(pages, shown, compared)
    seeds(pages, models, suite, compared)
    details(pages, shown)
    evaluated_again(pages, {task: sizes[-1] for task, sizes in models.items()}, suite)


def same_games(pages: Pages, models: dict[str, list[Trained]]) -> None:
    """Check that agents after RL played the items of the others in the same way, and what they were trained on."""
    runs = {r["job"]: r for r in load(STUDY) if "evaluations" in r}
    horizons = []
    for task, sizes in models.items():
        for model in sizes:
            before, after = ([r["config"] for r in a.records] for a in (model.before, model.after))
            played = [
                (c["samples"], c["temperature"], c["max_new_tokens"], c["tasks"], c["turns"], c["dtype"])
                for c in (*before, *after)
            ]
            same = all(values == played[0] for values in played)
            items = [set(r["outcomes"]["32"]) for a in (model.before, model.after, model.chance) for r in a.records]
            pages.require("| after RL, on the same items |", same and all(names == items[0] for names in items))
            agree = all(
                by_item([solved_within(load_lines(STUDY, f"{r['job']}.actions"), t)]) == item_rates(r, t)
                for r in model.after.records
                for t in TURNS
            )
            pages.require("fewer turns are their beginnings", agree)
            horizons.append(trained_under(pages, f"{TASKS[task]}, {model.size}", model.after.records, runs))
    small = [runs[r["config"]["agent"]["run"]] for r in models["babyai"][0].after.records]
    pages.expect(
        "On average a run of 0.5B has # steps and # million sampled tokens and took # minutes on",
        *(mean(r["steps"] for r in small), mean(r["sampled_tokens"] for r in small) / 1e6),
        mean(r["seconds"] for r in small) / 60,
    )
    text = "; ".join(text for text, _ in horizons)
    pages.expect(f"under staged horizons ({text})", *(n for _, numbers in horizons for n in numbers))


def trained_under(
    pages: Pages, name: str, records: Sequence[Record], runs: dict[str, Record]
) -> tuple[str, list[float]]:
    """Check that agents were trained by RL alone under a staged horizon, and return its text and numbers."""
    jobs = [r["config"]["agent"]["run"] for r in records]
    trained = [runs[job]["config"] for job in jobs]
    pages.require("After RL alone under staged horizons", all(c["horizon"]["kind"] == "stepwise" for c in trained))
    pages.require("After RL alone", all(runs[job]["method"] == "rl" for job in jobs))
    pages.require("After RL alone", all("model.path={pretrained" in runs[job]["command"] for job in jobs))
    (stages,) = {tuple(c["horizon"]["turns"]) for c in trained}
    places = joined(["#"] * len(records))
    text = f"{name}: {', '.join('#' * len(stages))} turns, seed{'s'[: len(records) - 1]} {places}"
    return text, [*stages, *(r["seed"] for r in records)]


def comparisons(pages: Pages, models: dict[str, list[Trained]], suite: Suite) -> Compared:
    """Check the table of comparisons after RL and return them."""
    differences: dict[str, tuple[list[float], int]] = {}
    for task, sizes in models.items():
        for m in sizes:
            start, unit = f"{TASKS[task]}, {m.size} after RL:", 4 * len(m.after.records)
            for many in (32, 16):
                over = [a - b for a, b in zip(m.after.gain(many), m.chance.gain(many), strict=True)]
                differences[f"{start} from 4 to {many} turns, less random play's gain"] = over, unit
            change = [a - b for a, b in zip(m.after.gain(), m.before.gain(), strict=True)]
            differences[f"{start} from 4 to 32 turns, less before RL"] = change, unit
            differences[f"{start} 4 turns less 32 before RL"] = less(m.after.rates(4), m.before.rates(32)), unit
            lead = less(m.after.rates(32), m.chance.rates(32))
            differences[f"{start} under 32 turns, less random play"] = lead, unit
            for turns, k in SPLITS:
                name = f"{start} best of {k} tries of {turns} turns less one of 32"
                differences[name] = less(m.after.rates(turns, k), m.after.rates(32)), 3 * unit
    for task, (turns, runs) in suite.items():
        gains = by_item([seed_gain(models[task][0].chance, rows, turns) for rows in runs.values()])
        name = f"{TASKS[task]}, all {len(runs)} seeds: from 4 to {turns} turns, less random play's gain"
        differences[name] = list(gains.values()), 4 * len(runs)
    for task, (turns, runs) in suite.items():
        differences |= sizes_apart(task, models[task], turns, runs)
    p = [sign_flips(d, unit) for d, unit in differences.values()]
    compared = {
        name: (d, raw, adjusted) for (name, (d, _)), raw, adjusted in zip(differences.items(), p, holm(p), strict=True)
    }
    for name, (d, raw, adjusted) in compared.items():
        pages.expect(f"| {name} | # (# to #) | # | # |", points(d), *bootstrap(d), raw, adjusted)
        pages.accept(f"| {name} |")
    pages.expect("and, apart from them, over all # after RL, chosen after the records were seen", len(compared))
    return compared


def sizes_apart(
    task: str, models: list[Trained], limit: int, runs: dict[int, Lines]
) -> dict[str, tuple[list[float], int]]:
    """Return 0.5B against 1.5B after RL, the latter with all seeds of the paper's table."""
    small = next((m.after for m in models if m.size == "0.5B"), None)
    if small is None:
        return {}
    unit = 4 * len(small.records) * len(runs)

    def large(turns: int) -> Rates:
        return by_item([solved_within(rows, turns) for rows in runs.values()])

    name = f"{TASKS[task]}, after RL, all seeds"
    found = {
        f"{name}: from 0.5B to 1.5B under {t} turns": (less(large(t), solved_within(small.episodes, t)), unit)
        for t in (4, 16, limit)
    }
    return found | {
        f"{name}: 0.5B under 32 turns less 1.5B under {t}": (less(small.rates(32), large(t)), unit) for t in (4, 8)
    }


def seed_gain(chance: Agent, rows: Lines, turns: int) -> Rates:
    """Return the gain of a seed of the paper's table from 4 turns less random play's, by item."""
    own, other = ([solved_within(lines, t) for t in (turns, 4)] for lines in (rows, chance.episodes))
    return {item: own[0][item] - own[1][item] - (other[0][item] - other[1][item]) for item in own[0]}


def tables(pages: Pages, models: dict[str, list[Trained]], compared: Compared) -> None:
    """Check the rows after RL of the three tables."""
    for task, sizes in models.items():
        for model in sizes:
            row, agent = f"| {TASKS[task]}: {MODELS[model.size]} after RL |", model.after
            pages.expect(f"{row} #% | #% | #% | #% | #% |", *(agent.success(t) for t in TURNS))
            d, _, p = compared[f"{TASKS[task]}, {model.size} after RL: from 4 to 32 turns, less random play's gain"]
            values: list[Value] = [*(agent.success(t) for t in (4, 16, 32)), points(d), *bootstrap(d), p]
            values += [cut(agent.episodes, stop, 32) for stop in ("max_context", "length")]
            pages.expect(f"{row} #% | #% | #% | # (# to #) | # | #% | #% |", *values)
            values = []
            for turns, k in ((32, 1), (16, 2), (8, 4)):
                spent = mean(cell(record, turns, "sampled_tokens") or 0 for record in agent.records)
                values += [agent.success(turns, k), k * spent]
            pages.expect(f"{row} #%, # | #%, # | #%, # |", *values)


def verdict(pages: Pages, shown: Agents, compared: Compared) -> None:
    over = {
        (task, m.size): compared[f"{TASKS[task]}, {m.size} after RL: from 4 to 32 turns, less random play's gain"]
        for task, m in shown
    }
    holds = not any(mean(d) > 0 and p < 0.05 for d, _, p in over.values())
    pages.require("**Not shown after RL, either.**", holds)
    pages.require("**not shown** for real models, before or after RL |", holds)
    for task in dict.fromkeys(task for task, _ in shown):
        sizes = [m for t, m in shown if t == task]
        parts, values = ["random play gains # points"], [points(sizes[0].chance.gain())]
        for m in sizes:
            d, _, p = over[task, m.size]
            parts.append(f"the trained {m.size} model # (difference #, p = #)")
            values += [points(m.after.gain()), points(d), p]
        leads = [[m.after.success(t) - m.chance.success(t) for m in sizes] for t in (4, 32)]
        places = joined(["#"] * len(sizes))
        who = "It leads" if len(sizes) == 1 else "They lead"
        pages.expect(
            f"On {TASKS[task]} {joined(parts)}. {who} random play by {places} points under # turns and by {places} "
            "under #.",
            *(*values, *leads[0], 4, *leads[1], 32),
        )


def use_of_turns(pages: Pages, shown: Agents, compared: Compared) -> None:
    """Check what RL changes at equal turns and in the use of turns."""
    jumps, slopes, numbers, changes = [], [], [4.0, 32.0], []
    beats = []
    for task, m in shown:
        d, _, p = compared[f"{TASKS[task]}, {m.size} after RL: 4 turns less 32 before RL"]
        jumps.append(f"# points on {on(task, m, ', p = #')}")
        numbers += [points(d), p]
        beats.append(mean(d) > 0 and p < 0.05)
        d, _, p = compared[f"{TASKS[task]}, {m.size} after RL: from 4 to 32 turns, less before RL"]
        slopes.append(f"# (# to #) on {on(task, m, ', p = #')}")
        changes += [points(d), *bootstrap(d), p]
    pages.expect(
        f"**# turns after RL beat # before**, by {joined(jumps)}. RL changes the gain from # to # turns by "
        f"{joined(slopes)}.",
        *(*numbers, 4, 32, *changes),
    )
    pages.require("turns after RL beat", all(beats))
    texts: list[str] = []
    shares: list[Value] = []
    for task, m in shown:
        for measure in (
            refusals,
            repeats_by_seed,
            *(lambda rows, stop=s: cut(rows, stop, 32) for s in ("max_context", "length")),
        ):
            shares += [measure(a.episodes) for a in (m.after, m.before)]
        texts.append(
            f"on {on(task, m)} these are #% (#%), #% (#%), #% (#%) and #% (#%)"
            if texts
            else f"on {on(task, m)} the environment refuses #% (#%) of the actions, #% (#%) of the turns repeat an "
            "action in the same state, #% (#%) of the episodes have no context left and #% (#%) end in a cut reply"
        )
    pages.expect(f"**How turns are used after RL** (before): {'; '.join(texts)}.", *shares)


def repeats_by_seed(rows: Lines) -> float:
    """Return the share of looping turns, averaged over seeds, which lie one after the other."""
    seeds: list[Lines] = [[]]
    for row in rows:
        if seeds[-1] and (row["item"], row["sample"]) == (rows[0]["item"], rows[0]["sample"]):
            seeds.append([])
        seeds[-1].append(row)
    return mean(map(repeats, seeds))


def tries(pages: Pages, shown: Agents, compared: Compared) -> None:
    """Check several tries against one long episode after RL, and tries that sample no more tokens."""
    for turns, k in SPLITS:
        parts, values, costs = [], [float(turns)], []
        for task, m in shown:
            _, _, p = compared[f"{TASKS[task]}, {m.size} after RL: best of {k} tries of {turns} turns less one of 32"]
            parts.append(f"#% of {on(task, m, '; one of #: #%, p = #')}")
            values += [m.after.success(turns, k), 32, m.after.success(32), p]
            costs.append(m.after.cost(turns, k))
        pages.expect(
            f"best of {WORDS[k]} tries of # turns solves {joined(parts)}, with {joined(['#'] * len(costs))} times the "
            "sampled tokens.",
            *(*values, *costs),
        )
    ahead = [mean(less(m.after.rates(8, 4), m.after.rates(32))) > 0 for _, m in shown]
    pages.require("**After RL, tries of 8 turns do not beat one of 32**", not any(ahead))
    pages.accept("**After RL, tries of 8 turns do not beat one of 32**")
    parts, values = [], []
    for task, m in shown:
        for agent, when in ((m.before, "before RL"), (m.after, "after")):
            k = max(k for k in range(1, 5) if agent.cost(8, k) <= 1)
            parts.append(f"{on(task, m)} {when}: {WORDS[k]} (# times the tokens) #%, one of # turns #%")
            values += [agent.cost(8, k), agent.success(8, k), 32, agent.success(32)]
    pages.expect(f"than one episode of # turns, as many of # turns as that allows. {'; '.join(parts)}.", 32, 8, *values)


def seeds(pages: Pages, models: dict[str, list[Trained]], suite: Suite, compared: Compared) -> None:
    """Check which agents were trained, and the seeds of the paper's table under fewer turns."""
    agents = [
        f"{size} on {TASKS[task]} ({WORDS[len(m.after.records)]} seed{'s'[: len(m.after.records) - 1]})"
        for size in MODELS
        for task in TASKS
        for m in models.get(task, [])
        if m.size == size
    ]
    pages.require(f"**Evaluated after RL**: {joined(agents)}.", True)
    several = [(task, m) for task, found in models.items() for m in found if len(m.after.records) > 1]
    pages.require("(0.5B after RL: three seeds)", [(t, m.size) for t, m in several] == [("babyai", "0.5B")])
    pages.require(
        "after it two, on BabyAI alone",
        {task: [m.size for m in found] for task, found in models.items()}
        == {"babyai": ["0.5B", "1.5B"], "textcraft": ["1.5B"]},
    )
    size_against_turns(pages, models, suite, compared)
    parts, values, least = [], [], []
    for task, (turns, runs) in suite.items():
        d, _, p = compared[f"{TASKS[task]}, all {len(runs)} seeds: from 4 to {turns} turns, less random play's gain"]
        model = models[task][-1]
        gains = {seed: points(seed_gain(model.chance, rows, turns).values()) for seed, rows in runs.items()}
        parts.append(f"on {TASKS[task]} from # to # turns # (# to #), p = #, by seed {joined(['#'] * len(gains))}")
        values += [4, turns, points(d), *bootstrap(d), p, *(gains[seed] for seed in sorted(gains))]
        least.append([r["seed"] for r in model.after.records] == [min(gains, key=gains.__getitem__)])
    pages.expect(f"All seeds of the paper's table, gain less random play's: {'; '.join(parts)}.", *values)
    if all(least):
        pages.require("The 1.5B agents of this section are the seeds that gain least.", True)


def size_against_turns(pages: Pages, models: dict[str, list[Trained]], suite: Suite, compared: Compared) -> None:
    """Check the sentences about both sizes after RL on BabyAI, and that both were evaluated in the same way."""
    limit, runs = suite["babyai"]
    small, chance = models["babyai"][0].after, models["babyai"][0].chance
    of_table = [r for r in load("qwen-babyai") if r["arm"] == "staged" and "outcomes" in r]
    ways = [
        (c["samples"], c["temperature"], c["max_new_tokens"], c["dtype"], [t | {"max_turns": 0} for t in c["tasks"]])
        for c in (r["config"] for r in (*small.records, *of_table))
    ]
    pages.require("**Size and turns after RL**", all(way == ways[0] for way in ways))
    pages.accept("**Size and turns after RL**")
    start = "BabyAI, after RL, all seeds: "
    few, some, many = (compared[f"{start}from 0.5B to 1.5B under {t} turns"] for t in (4, 16, limit))
    trades = [compared[f"{start}0.5B under 32 turns less 1.5B under {t}"] for t in (4, 8)]
    limits = (4, 8, 16, limit)
    own = [points(solved_within(small.episodes, t).values()) for t in limits]
    large = [mean(points(solved_within(rows, t).values()) for rows in runs.values()) for t in limits]
    ends = [points(item_rates(r, 32).values()) for r in small.records]
    counts = [f"{WORDS[len(group)]} seeds" for group in (small.records, runs)]
    pages.expect(
        f"on BabyAI 0.5B ({counts[0]}) solves #, #, # and #% under #, #, # and # turns, 1.5B (the {counts[1]} of the "
        "paper's table, in its own evaluation) #, #, # and #%. 1.5B less 0.5B is # points under # turns, # under # and "
        "# (# to #) under # (p = #). Turns less parameters: 0.5B under # turns solves #% (by seed "
        f"{joined(['#'] * len(ends))}%); less 1.5B that is # points under # (p = #) and # under # (p = #). But random "
        "play under # turns less 1.5B is # points under # and # under #.",
        *(*own, *limits, *large, points(few[0]), 4, points(some[0]), 16, points(many[0]), *bootstrap(many[0])),
        *(limit, many[2], 32, small.success(32), *ends, points(trades[0][0]), 4, trades[0][2]),
        *(
            points(trades[1][0]),
            8,
            trades[1][2],
            32,
            chance.success(32) - large[0],
            4,
            chance.success(32) - large[1],
            8,
        ),
    )


def details(pages: Pages, shown: Agents) -> None:
    """Check what is left to gain, what context costs, and the second evaluation of the same agents."""
    parts, values = [], []
    for task, m in shown:
        shares = [100 * points(a.gain()) / (100 - a.success(4)) for a in (m.after, m.chance)]
        parts.append(f"#% on {on(task, m, '; random play: #%')}")
        values += shares
    pages.expect(f"Of what # turns leave unsolved, # turns solve after RL {joined(parts)}.", 4, 32, *values)
    for task, m in shown:
        if task == "babyai":
            context(pages, m)


def context(pages: Pages, babyai: Trained) -> None:
    lost = cut(babyai.after.episodes, "max_context", 32)
    most = babyai.after.success(32) + lost
    pages.expect(
        f"**Context after RL** ({babyai.size}): without its limit success on BabyAI under # turns would be about #% "
        "(Kaplan–Meier, as above), and #% if every episode that it ended succeeded. Even then the gain from # turns",
        *(32, without_context(babyai.after.episodes), most, 4),
    )
    below = most - babyai.after.success(4) < points(babyai.chance.gain())
    pages.require("Even then the gain from 4 turns would be below random play's.", below)


def evaluated_again(pages: Pages, shown: dict[str, Trained], suite: Suite) -> None:
    """Check the agents that this section and the paper's table share, under the latter's limit of turns."""
    parts, values = [], []
    for task, (turns, runs) in suite.items():
        agent = shown[task].after
        again = [r for r in load(f"qwen-{task}") if r["arm"] == "staged" and "outcomes" in r]
        weights = {r["seed"]: r["config"]["agent"]["weights"] for r in again}
        same = all(weights[r["seed"]] == r["config"]["agent"]["weights"] for r in agent.records)
        pages.require("**The same 1.5B agents after RL in two evaluations**", same)
        here = solved_within(agent.episodes, turns)
        there = by_item([solved_within(runs[r["seed"]], turns) for r in agent.records])
        parts.append(f"#% and #% on {TASKS[task]} under # turns (p = #)")
        p = sign_flips(less(here, there), 4 * len(agent.records))
        values += [points(here.values()), points(there.values()), turns, p]
    pages.expect(f"here and in the paper's table: {joined(parts)}.", *values)
