"""Checks of agents on scenarios that they never saw, for results/check.py."""

from __future__ import annotations

from check_a import points
from check_d import CHANCE, SCENARIOS, less, rate_of, refusals
from page_numbers import Pages, Rates, Record, bootstrap, holm, load, load_lines, mean, sign_flips

STUDY = "qwen-generalisation"
TRAINED = ("textcraft", "babyai")
UNITS = {"textcraft": 16, "babyai": 16, "searchqa": 4, "sciworld": 4}
"""Products of the samples an item of the compared agents: differences of success are multiples of one over these."""
Found = dict[tuple[str, str], Record]


def evaluations() -> tuple[Found, Found]:
    """Return transfers by (scenario, scenario of training), and the table's evaluations by (scenario, arm or seed)."""
    moved = {(r["task"], r["arm"].removeprefix("trained on ")): r for r in load(STUDY) if "outcomes" in r}
    seeds = {trained: r["seed"] for (_, trained), r in moved.items()}
    suite: Found = {}
    for task in UNITS:
        for record in load(f"qwen-{task}"):
            if "outcomes" in record and record["arm"] in ("base", CHANCE):
                suite[task, record["arm"]] = record
            elif "outcomes" in record and record["arm"] == "staged" and record["seed"] == seeds.get(task):
                suite[task, "own"] = record
    return moved, suite


def transfer(pages: Pages) -> None:
    """Check the matrix of agents by scenarios, their differences, and the sentences about them."""
    moved, suite = evaluations()
    matrix(pages, moved, suite)
    gaps = differences(pages, moved, suite)
    on_babyai, base = (
        points(rate_of([r])[0].values()) for r in (moved["babyai", "textcraft"], suite["babyai", "base"])
    )
    chance = points(rate_of([suite["babyai", CHANCE]])[0].values())
    snippet = "The agent of TextCraft solves #% of BabyAI, which it was not trained on (base #%; random play #%"
    pages.expect(snippet, on_babyai, base, chance)
    twice = [points(rate_of([r])[0].values()) for r in (moved["searchqa", "textcraft"], suite["searchqa", "base"])]
    pages.require("twice as much of deep search as base", round(twice[0] / twice[1]) == 2)
    crafted, over_chance = (gaps["textcraft", "babyai"][other] for other in ("base", CHANCE))
    pages.require(
        "That of BabyAI solves more of TextCraft than base, and far less than random play.",
        mean(crafted) > 0 and mean(over_chance) < -0.2,
    )
    over_base = [gaps["sciworld", trained]["base"] for trained in TRAINED]
    shown = [sign_flips(gap, UNITS["sciworld"]) < 0.05 for gap in over_base]
    pages.require("On SciWorld neither is shown to be above base.", not any(shown))
    fewer = {
        (task, trained): refusals(lines(f"qwen-{task}", suite[task, "base"])) - refusals(lines(STUDY, record))
        for (task, trained), record in moved.items()
    }
    swapped = [fewer["babyai", "textcraft"], fewer["textcraft", "babyai"]]
    pages.require("the environment refuses fewer turns of the agent that came from the other", min(swapped) > 10)
    pages.require("In deep search they hardly change for TextCraft's agent", abs(fewer["searchqa", "textcraft"]) < 5)
    pages.require("and rise for BabyAI's.", fewer["searchqa", "babyai"] < -10)
    evaluated = [r for r in load(STUDY) if "outcomes" in r]
    pages.require("One agent of each scenario, one seed each", len(moved) == len(evaluated))


def lines(study: str, record: Record) -> list[dict[str, object]]:
    return load_lines(study, f"{record['job']}.actions")


def matrix(pages: Pages, moved: Found, suite: Found) -> None:
    """Check success of base and of both agents by scenario."""
    rows: dict[str, list[tuple[str, Record]]] = {"base": [("#% (#–#)", suite[task, "base"]) for task in UNITS]}
    for trained in TRAINED:
        own = ("#% (#–#) (own)", suite[trained, "own"])
        cells = [own if task == trained else ("#% (#–#)", moved[task, trained]) for task in UNITS]
        rows[f"trained on {SCENARIOS[trained]}"] = cells
    for name, cells in rows.items():
        values = [value for _, record in cells for value in rate_of([record])[1]]
        pages.expect(f"| {name} | {' | '.join(text for text, _ in cells)} |", *values)


def differences(pages: Pages, moved: Found, suite: Found) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Check each agent less base and less random play, with p after Holm over all of them, and refused turns."""
    gaps: dict[tuple[str, str], dict[str, list[float]]] = {}
    for task in UNITS:
        for trained in TRAINED:
            if (task, trained) in moved:
                agent: Rates = rate_of([moved[task, trained]])[0]
                others = {other: rate_of([suite[task, other]])[0] for other in ("base", CHANCE)}
                gaps[task, trained] = {other: less(agent, rates) for other, rates in others.items()}
    flat = [(key, other, values) for key, pair in gaps.items() for other, values in pair.items()]
    adjusted = holm([sign_flips(values, UNITS[task]) for (task, _), _, values in flat])
    p = {(key, other): q for (key, other, _), q in zip(flat, adjusted, strict=True)}
    for (task, trained), pair in gaps.items():
        values = [v for other, d in pair.items() for v in (points(d), *bootstrap(d), p[(task, trained), other])]
        base, agent_lines = lines(f"qwen-{task}", suite[task, "base"]), lines(STUDY, moved[task, trained])
        pages.expect(
            f"| trained on {SCENARIOS[trained]}, on {SCENARIOS[task]} | # (# to #) | # | # (# to #) | # | #%, #% |",
            *(*values, refusals(base), refusals(agent_lines)),
        )
    return gaps
