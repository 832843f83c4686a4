"""Checks of claim A for results/check.py: the 1.5B model, SmolLM2-135M, and the README's section."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from page_numbers import ROOT, Pages, Record, Value, bootstrap, by_arm, holm, item_rates, load, mean, sign_flips, wilson

NAMES = {"babyai": "BabyAI", "textcraft": "TextCraft"}
ARMS = {"base": "base", "SFT": "imitation", "RL": "RL", "SFT + RL": "imitation, then RL"}
"""Names of the arms on the pages."""
SEEDS = 3
"""Staged agents of the study from which on the first run is no longer shown."""
WORDS = ("no", "one", "two", "three", "four", "five", "six")


def points(values: Iterable[float]) -> float:
    return 100 * mean(values)


def differences(first: Record, second: Record, turns: int = 16) -> list[float]:
    a, b = item_rates(first, turns), item_rates(second, turns)
    return [a[item] - b[item] for item in a if item in b]


def known(run: Record, name: str) -> list[float]:
    return [value for value in run["curves"][name] if value is not None]


def smollm2(pages: Pages) -> None:
    """Check the tables and sentences about SmolLM2-135M."""
    agents = by_arm(load("rl-over-base"), "outcomes")
    rows = {"babyai": "BabyAI, six levels, 300 episodes", "textcraft": "TextCraft, depths 1–3, 388 episodes"}
    for task, title in rows.items():
        values: list[Value] = []
        for arm in ("random play", *ARMS):
            record = agents[task, arm][0]
            rates = list(item_rates(record, 16).values())
            low, high = wilson(rates, sum(map(len, record["outcomes"]["16"].values())))
            values += [points(rates), 100 * low, 100 * high]
        pages.expect(f"| {title} | {' | '.join(['#% (#–#)'] * 5)} |", *values)
    pages.accept(*rows.values())
    compare_arms(pages, agents)
    rate = {key: points(item_rates(runs[0], 16).values()) for key, runs in agents.items()}
    plain = [rate[task, "base, no examples"] for task in rows]
    pages.expect("Without worked examples in the prompt the base model has #% on BabyAI and #% on TextCraft", *plain)
    chance = differences(agents["textcraft", "SFT + RL"][0], agents["textcraft", "random play"][0])
    pages.expect("is above random play (# points, p = #).", points(chance), sign_flips(chance, 4))
    others = [rate["textcraft", arm] < rate["textcraft", "random play"] for arm in ("base", "SFT", "RL")]
    pages.require("On TextCraft only imitation, then RL is above random play", all(others))
    above = rate["babyai", "RL"] - rate["babyai", "random play"]
    pages.expect("# of its # points lie above random play", above, rate["babyai", "RL"] - rate["babyai", "base"])
    by_kind(pages, agents)


def compare_arms(pages: Pages, agents: dict[tuple[str, str], dict[int, Record]]) -> None:
    pairs = [(task, *pair) for task in NAMES for pair in (("RL", "base"), ("SFT + RL", "SFT"))]
    compared = [differences(agents[task, first][0], agents[task, second][0]) for task, first, second in pairs]
    adjusted = holm([sign_flips(d, 4) for d in compared])
    for (task, first, second), d, p in zip(pairs, compared, adjusted, strict=True):
        unit = " points" if (task, first) == ("babyai", "RL") else ""
        won, lost = sum(x > 0 for x in d), sum(x < 0 for x in d)
        row = f"| {NAMES[task]}: {ARMS[first]} − {ARMS[second]} | **#** (# to #){unit} | #, # | # |"
        pages.expect(row, points(d), *bootstrap(d), won, lost, p)
    gains = [points(d) for d in compared]
    pages.expect(
        "RL gains in all four comparisons, by # to # points (p ≤ #, exact", min(gains), max(gains), max(adjusted)
    )


def by_kind(pages: Pages, agents: dict[tuple[str, str], dict[int, Record]]) -> None:
    for task, name in NAMES.items():
        cells = {arm: agents[task, arm][0]["results"][-1]["tasks"] for arm in ("random play", *ARMS)}
        for kind in cells["base"]:
            title = f"{name} {kind.partition('/')[2].replace('Depth', 'depth')}"
            values = [100 * cells[arm][kind]["success"]["value"] for arm in cells]
            pages.expect(f"| {title} | # | # | # | # | # |", *values)
            pages.accept(f"| {title} |")
    deep = [
        agents["textcraft", arm][0]["results"][-1]["tasks"]["TextCraft/Depth 3"]["success"]["value"] for arm in ARMS
    ]
    pages.require("Depth 3 stays at 0% in all arms", max(deep) == 0)
    pages.accept("Depth 3 stays at 0% in all arms", "beyond depth 1 of TextCraft", "RL doubles depth 2.")


def training_of_smollm2(pages: Pages) -> None:
    """Check the runs: gains after imitation, invalid actions and the doctor's findings."""
    runs = by_arm(load("rl-over-base"), "evaluations")
    own = runs["textcraft", "SFT + RL"][0]["evaluations"]
    gain = {
        (arm, seed): 100 * (r["evaluations"][-1]["success"] - r["evaluations"][0]["success"])
        for (_, arm), seeds in by_arm(load("horizon-smollm2"), "evaluations").items()
        for seed, r in seeds.items()
        if arm != "SFT"
    }
    first = 100 * (own[-1]["success"] - own[0]["success"])
    pages.expect(
        "own evaluations (# episodes) they gain # (seed 0, staged); #, #, # (fixed-long); #, #, # (fixed-short); "
        "#, # (staged)",
        *(own[-1]["episodes"], first),
        *(gain[arm, s] for arm in ("fixed-long", "fixed-short") for s in (1, 2, 3)),
        *(gain["staged", s] for s in (1, 2)),
    )
    everything = [first, *gain.values()]
    pages.expect("All nine gain, by # to # points", min(everything), max(everything))
    pages.require("All nine gain", len(everything) == 9 and min(everything) > 0)
    pages.accept("(seeds 0 to 3, three horizons)", "(seeds 1 to 3). With seed 0 of this claim", "(seed 0, staged)")
    invalid = known(runs["babyai", "RL"][0], "actions/invalid_rate")
    pages.expect(
        "#% of its actions are invalid in the first ten steps of RL, #% in the last ten",
        *(points(invalid[:10]), points(invalid[-10:])),
    )
    silent = [not runs["babyai", arm][0]["findings"] for arm in ("RL", "SFT + RL")]
    pages.require("found nothing in the two BabyAI runs", all(silent))
    found = {f["rule"]: f for f in runs["textcraft", "RL"][0]["findings"]}
    pages.expect(
        "groups without contrast, #% of episodes cut in a reply and #% invalid actions at the start, a fall of entropy "
        "from step # on",
        *(percent_of(found["length_truncation"]), percent_of(found["invalid_actions"])),
        found["entropy_collapse"]["since"],
    )
    pages.require("replies that alternate", {"zero_advantage", "repeated_actions"} <= found.keys())
    lengths(pages, runs)
    (late,) = runs["textcraft", "SFT + RL"][0]["findings"]
    pages.expect("it found #% invalid actions from step # on", percent_of(late), late["since"])


def lengths(pages: Pages, runs: dict[tuple[str, str], dict[int, Record]]) -> None:
    """Check steps, episodes, stages and tokens of the RL arms, which the protocol states."""
    first, second = (runs[task, "RL"][0] for task in NAMES)
    episodes = [r["config"]["rl"]["groups_per_step"] * r["config"]["rl"]["group_size"] for r in (first, second)]
    horizon = first["config"]["horizon"]
    pages.expect(
        "have # steps of # episodes (BabyAI) or # (TextCraft) under a staged horizon (#, #, # turns, # steps each)",
        *(first["steps"], *episodes, *horizon["turns"], horizon["steps_per_stage"]),
    )
    tokens = [runs[task, arm][0]["sampled_tokens"] for task in NAMES for arm in ("RL", "SFT + RL")]
    pages.expect(
        "(BabyAI: RL # thousand, after imitation #; TextCraft # and # million)",
        *(tokens[0] / 1e3, tokens[1] / 1e3, tokens[2] / 1e6, tokens[3] / 1e6),
    )


def percent_of(finding: dict[str, Any]) -> float:
    """Return the percentage with which a finding's message begins."""
    number = re.match(r"(\d+)%", finding["message"])
    assert number is not None
    return float(number[1])


def real_rows() -> tuple[dict[str, list[Record]], list[Record]]:
    """Return the 1.5B model's evaluations by row of the table, and the runs of the headline agents."""
    study, first = load("qwen-textcraft"), load("qwen-first")
    rows: dict[str, list[Record]] = {}
    for record in study:
        if "outcomes" in record:
            rows.setdefault(record["arm"], []).append(record)
    runs = [r for r in study if "curves" in r and r["arm"] == "staged"]
    earlier = [r for r in first if r["arm"] == "staged"]
    if len(rows.get("staged", [])) < SEEDS and earlier:
        rows["first"] = [r for r in earlier if "outcomes" in r]
        if "staged" not in rows:
            runs = [r for r in earlier if "curves" in r]
    return rows, runs


def seed_means(records: Sequence[Record]) -> dict[str, float]:
    """Return each item's success over all seeds, at the evaluation's only limit of turns."""
    columns: dict[str, list[float]] = {}
    for record in records:
        for item, rate in item_rates(record, int(next(iter(record["outcomes"])))).items():
            columns.setdefault(item, []).append(rate)
    return {item: mean(values) for item, values in columns.items()}


def real_table(pages: Pages, rows: dict[str, list[Record]]) -> None:
    titles = {
        "random play": "random valid actions",
        "base": "base",
        "SFT": "SFT on the oracle",
        "fixed-short": "RL, fixed short horizon",
        "fixed-long": "RL, fixed long horizon",
        "adaptive": "RL, adaptive horizon",
        "staged": "**RL, staged horizon**",
        "first": "**RL, staged horizon, first run**",
    }
    for arm, records in rows.items():
        rates = list(seed_means(records).values())
        low, high = wilson(rates, sum(len(s) for r in records for s in next(iter(r["outcomes"].values())).values()))
        depths = [
            100 * mean(r["results"][-1]["tasks"][kind]["success"]["value"] for r in records)
            for kind in records[0]["results"][-1]["tasks"]
        ]
        seeds = [points(seed_means([r]).values()) for r in records]
        several = ", seeds #–#" if len(seeds) > 1 else ""
        bold = "**" if titles[arm].startswith("**") else ""
        row = f"| {titles[arm]} | {bold}#% (#–#){several}{bold} | #% | #% | #% | #% |"
        ends = [min(seeds), max(seeds)] if several else []
        pages.expect(row, points(rates), 100 * low, 100 * high, *ends, *depths)
    sources = json.loads((ROOT / "src/agentgym_rl/evaluation/published.json").read_text(encoding="utf-8"))
    paper = next(source for source in sources if "AgentGym-RL-3B" in source["agents"])
    untrained, trained = ("Qwen2.5-3B-Instruct", "Qwen2.5-7B-Instruct", "GPT-4o"), ("AgentGym-RL-3B", "AgentGym-RL-7B")
    for agent in (*untrained, *trained, "ScalingInter-7B"):
        value = paper["agents"][agent][paper["scenarios"].index("TextCraft")]
        pages.expect(f"| *{agent} (published)* | *#%* |", value)
    pages.expect("(the paper's 3B: #%)", paper["agents"]["AgentGym-RL-3B"][paper["scenarios"].index("TextCraft")])
    items = sum(cell["items"] for cell in rows["base"][0]["results"][-1]["tasks"].values())
    pages.expect("| success | all # items | depth 1 | depth 2 | depth 3 | depth 4 |", items)
    pages.accept("| depth 1 | depth 2 | depth 3 | depth 4 |")


def real_model(pages: Pages) -> None:
    """Check the table and the sentences about the 1.5B model, with one run or several seeds."""
    rows, runs = real_rows()
    real_table(pages, rows)
    trained = rows.get("staged") or rows["first"]
    by_seed = [points(seed_means([r]).values()) for r in trained]
    base, chance = (points(seed_means(rows[arm]).values()) for arm in ("base", "random play"))
    who = "one run" if len(trained) == 1 else f"{WORDS[len(trained)]} seeds"
    several = len(trained) > 1
    spread, ends = (", # to #%", [min(by_seed), max(by_seed)]) if several else ("", [])
    pages.expect(
        f"from #% to #% on TextCraft ({who}{spread}). Random valid actions have #%.",
        *(base, mean(by_seed), *ends, chance),
    )
    wide = " (#–#)" if several else ""
    minutes = mean(r["seconds"] for r in runs) / 60
    pages.expect(f"{who}: # to #%{wide} in # minutes", *(base, mean(by_seed), *ends, minutes))
    pages.expect(f"from # to #% on TextCraft ({who}; random play: #%)", base, mean(by_seed), chance)
    means = seed_means(trained)
    for arm, text in (("random play", "On the same items, RL less random play"), ("base", "RL less base")):
        other = seed_means(rows[arm])
        d = [means[item] - other[item] for item in means if item in other]
        p = sign_flips(d, 4 * len(trained))
        pages.expect(f"{text}: # points (# to #, p = #).", points(d), *bootstrap(d), p)
        if arm == "base":
            pages.require("**Holds.** RL alone lifts", mean(d) > 0 and p < 0.05)
    real_babyai(pages)
    pages.require("The 1.5B model has no fixed-horizon arm", not any(arm.startswith("fixed") for arm in rows))
    real_runs(pages, runs)


def real_babyai(pages: Pages) -> None:
    """Check the sentences about the 1.5B model on BabyAI, if it was trained there."""
    evaluated: dict[str, list[Record]] = {}
    for record in load("qwen-babyai"):
        if "outcomes" in record:
            evaluated.setdefault(record["arm"], []).append(record)
    if trained := evaluated.get("staged"):
        by_seed = [points(seed_means([r]).values()) for r in trained]
        base, chance = (points(seed_means(evaluated[arm]).values()) for arm in ("base", "random play"))
        who = "one run" if len(trained) == 1 else f"{WORDS[len(trained)]} seeds"
        spread, ends = (", # to #%", [min(by_seed), max(by_seed)]) if len(trained) > 1 else ("", [])
        text = f"On BabyAI it lifts the model from #% to #% ({who}{spread}; random play: #%)."
        pages.expect(text, base, mean(by_seed), *ends, chance)
        pages.expect(f"from # to #% on BabyAI ({who}; random play: #%)", base, mean(by_seed), chance)


def behaviour_rows(pages: Pages, runs: Sequence[Record], label: str = "") -> list[list[float]]:
    """Check the table of behaviour by stage, and return its rows."""
    scales = {"sequences_per_episode": 1, "states_per_item": 1, "loops": 100, "refused": 100, "recovered": 100}
    scales["success_after_refusal"] = 100
    rows = []
    for number, stage in enumerate(runs[0]["stages"]):
        row = []
        for metric, scale in scales.items():
            of_runs = []
            for run in runs:
                columns = run["behaviour"]["step"]
                first, last = run["stages"][number]["first_step"], run["stages"][number]["last_step"]
                inside = [v for s, v in zip(columns["step"], columns[metric], strict=True) if first <= s <= last]
                of_runs.append(mean(v for v in inside if v is not None))
            row.append(scale * mean(of_runs))
        pages.expect(f"| {label}{stage['turns']:.0f} | # | # | #% | #% | #% | #% |", *row)
        pages.accept(f"| {label}{stage['turns']:.0f} | {row[0]:.2f} |")
        rows.append(row)
    return rows


def behaviour_of_stages(pages: Pages, runs: Sequence[Record]) -> None:
    """Check behaviour by stage and what the page says about its first and last row."""
    rows = behaviour_rows(pages, runs)
    first, last = rows[0], rows[-1]
    pages.require("visit more states together, loops become rare", last[1] > first[1] and last[2] < first[2])
    pages.require("succeeds more often", last[5] > first[5])
    pages.require("become more alike, not more diverse", last[0] < first[0])


def real_runs(pages: Pages, runs: Sequence[Record]) -> None:
    """Check length, stages, invalid actions and agreement of engine and learner of the 1.5B model's runs."""
    rl = runs[0]["config"]["rl"]
    episodes = rl["groups_per_step"] * rl["group_size"]
    pages.expect(
        "A run has # steps of # episodes under #, # and # turns, # million sampled tokens, # minutes on one",
        *(mean(r["steps"] for r in runs), episodes, *(stage["turns"] for stage in runs[0]["stages"])),
        *(mean(r["sampled_tokens"] for r in runs) / 1e6, mean(r["seconds"] for r in runs) / 60),
    )
    short = [r for r in runs if r["steps"] < r["config"]["rl"]["steps"]]
    if short:
        who = "It" if len(runs) == 1 else f"{WORDS[len(short)].capitalize()} of {len(runs)}"
        pages.expect(f"{who} ended before the planned # steps", short[0]["config"]["rl"]["steps"])
    ends = [
        mean(
            mean(r["curves"]["success/mean"][r["stages"][n]["last_step"] - 10 : r["stages"][n]["last_step"]])
            for r in runs
        )
        for n in range(len(runs[0]["stages"]))
    ]
    pages.expect(f"in the last ten steps of each stage: {', '.join(['#%'] * len(ends))}.", *(100 * e for e in ends))
    invalid = [known(r, "actions/invalid_rate") for r in runs]
    early, late = (points(mean(v[part]) for v in invalid) for part in (slice(0, 10), slice(-10, None)))
    pages.expect("Invalid actions: #% in the first ten steps, #% in the last ten.", early, late)
    sampled = mean(r["sampled_tokens"] / (r["steps"] * episodes) for r in runs)
    seconds = mean(math.fsum(known(r, "time/step_s")) for r in runs)
    pages.expect("- # sampled tokens an episode; # s of training steps a run", sampled, seconds)
    behaviour_of_stages(pages, runs)
    gap = mean(mean(known(r, "mismatch/abs")) for r in runs)
    pages.expect("Engine and learner differ by # nats a token in the mean", gap)
    pages.expect("# for 1.5B", rl["kl_coef"])
    pages.expect("by depth of the goal, # turns", runs[0]["config"]["eval"]["max_turns"])
