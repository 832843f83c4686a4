"""The 1.5B model on TextCraft: its records, its picture, and the text that results/pages.py puts into pages."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from figures import HORIZONS, draw_legend, label_y_in_percent, new_figure, set_title
from jobs import RANDOM
from paper import arms_against_staged, behaviour_in_stage, mean_item_rates, rate_cell, runs_with_evaluations
from records import Record, evaluations_of, read_records, runs_of, success_at, turns_of

from agentgym_rl.evaluation.statistics import mean_interval, rate_interval, sign_flip_test
from agentgym_rl.run.plots import FAINT, INK

STUDY, FIRST = "qwen-textcraft", "qwen-first"
"""The study, and the single earlier run that is shown as long as the study has fewer than SEEDS staged agents."""
SEEDS = 3
PICTURE = "qwen-textcraft.png"
ROWS = {
    RANDOM: "random valid actions",
    "base": "base",
    "SFT": "SFT on the oracle",
    "fixed-short": "RL, fixed short horizon",
    "fixed-long": "RL, fixed long horizon",
    "adaptive": "RL, adaptive horizon",
    "staged": "**RL, staged horizon**",
    FIRST: "**RL, staged horizon, first run**",
}
"""Rows of the table by arm."""
PUBLISHED = (
    *("Qwen2.5-3B-Instruct", "Qwen2.5-7B-Instruct", "GPT-4o"),
    *("AgentGym-RL-3B", "AgentGym-RL-7B", "ScalingInter-7B"),
)
BARS = {
    "base": (FAINT, "before"),
    RANDOM: ("#a16207", "random valid actions"),
    "staged": (HORIZONS["staged"], "after"),
}
"""Colour and label of the bars by depth."""
NUMBER_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
SMOOTHED = 5
"""Steps of training averaged into a point."""
LAST_STEPS = 10


@dataclass(frozen=True)
class RealModel:
    """Records of the 1.5B model on TextCraft."""

    agents: dict[str, list[Record]]
    """Evaluations by arm, one per seed. `staged` holds the first run as long as the study has no staged agent."""
    runs: list[Record]
    """Training runs of the agents under `staged`."""
    rows: dict[str, list[Record]]
    """Evaluations by row of the table."""
    study: list[Record]
    """All records of the study."""
    babyai: dict[str, list[Record]]
    """Evaluations on BabyAI by arm."""


def read(results: Path) -> RealModel:
    """Return the study's records, and the first run's as long as the study has fewer than SEEDS staged agents."""
    study, first = ([r for r in read_records(results, name) if r["task"] == "textcraft"] for name in (STUDY, FIRST))
    rows: dict[str, list[Record]] = {}
    for record in evaluations_of(study):
        rows.setdefault(record["arm"], []).append(record)
    source = study if "staged" in rows else first
    if len(rows.get("staged", [])) < SEEDS and (earlier := [r for r in evaluations_of(first) if r["arm"] == "staged"]):
        rows[FIRST] = earlier
    agents = {arm: records for arm, records in rows.items() if arm != FIRST}
    if "staged" not in agents and FIRST in rows:
        agents["staged"] = rows[FIRST]
    runs = [r for r in runs_of(source) if r["arm"] == "staged"]
    babyai: dict[str, list[Record]] = {}
    for record in evaluations_of(read_records(results, "qwen-babyai")):
        babyai.setdefault(record["arm"], []).append(record)
    return RealModel(agents, sorted(runs, key=lambda r: int(r["seed"])), rows, study, babyai)


def number_word(number: int) -> str:
    return NUMBER_WORDS[number] if number < len(NUMBER_WORDS) else str(number)


def seeds_text(seeds: Sized) -> str:
    """Return `one seed` or `three seeds`."""
    return f"{number_word(len(seeds))} seed{'' if len(seeds) == 1 else 's'}"


def listed(parts: Iterable[str]) -> str:
    """Return `a`, `a and b` or `a, b and c`."""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def runs_text(records: Sequence[Record]) -> str:
    """Return `one run` or `three seeds`."""
    return "one run" if len(records) == 1 else f"{number_word(len(records))} seeds"


def rates(records: Sequence[Record]) -> list[float]:
    """Return each seed's success in percent."""
    return [100 * success_at(r, turns_of(r)[-1]) for r in records]


def kinds(record: Record) -> dict[str, dict[str, Any]]:
    """Return the cells of an evaluation by depth, such as `Depth 1`."""
    return {name.partition("/")[2]: cell for name, cell in record["results"][-1]["tasks"].items()}


def table(model: RealModel) -> list[str]:
    """Return success by agent and depth, with the paper's published rows."""
    depths = list(kinds(model.agents["base"][0]))
    num_items = sum(cell["items"] for cell in kinds(model.agents["base"][0]).values())
    lines = [
        f"| success | all {num_items} items | {' | '.join(map(str.lower, depths))} |",
        "|---|---|" + "---|" * len(depths),
    ]
    for arm, title in ROWS.items():
        if records := model.rows.get(arm):
            cells = [f"{100 * statistics.fmean(kinds(r)[d]['success']['value'] for r in records):.0f}%" for d in depths]
            bold = "**" if title.startswith("**") else ""
            lines.append(f"| {title} | {bold}{rate_cell(records)}{bold} | {' | '.join(cells)} |")
    for agent, value in published().items():
        lines.append(f"| *{agent} (published)* | *{value:g}%* |{' |' * len(depths)}")
    return lines


def published() -> dict[str, float]:
    """Return the paper's success on TextCraft in percent, by agent."""
    sources = json.loads(files("agentgym_rl.evaluation").joinpath("published.json").read_text(encoding="utf-8"))
    (data,) = (source for source in sources if PUBLISHED[0] in source["agents"])
    column = data["scenarios"].index("TextCraft")
    return {agent: data["agents"][agent][column] for agent in PUBLISHED}


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return `73.0 to 77.5`, the lowest and highest of several values."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def verdict(model: RealModel) -> str:
    """Return the sentence of claim A about this model."""
    (base,), (chance,) = rates(model.agents["base"]), rates(model.agents[RANDOM])
    trained = rates(model.agents["staged"])
    seeds = runs_text(model.agents["staged"]) + (f", {spread(trained)}%" if len(trained) > 1 else "")
    text = (
        f"RL alone lifts Qwen2.5-Coder-1.5B-Instruct from {base:.1f}% to {statistics.fmean(trained):.1f}% on TextCraft "
        f"({seeds}). Random valid actions have {chance:.1f}%."
    )
    if after := model.babyai.get("staged"):
        before, random = (statistics.fmean(rates(model.babyai[arm])) for arm in ("base", RANDOM))
        seeds = runs_text(after) + (f", {spread(rates(after))}%" if len(after) > 1 else "")
        text += (
            f" On BabyAI it lifts the model from {before:.1f}% to {statistics.fmean(rates(after)):.1f}% ({seeds}; "
            f"random play: {random:.1f}%)."
        )
    return text


def caption(model: RealModel) -> str:
    shown = "one run" if len(model.runs) == 1 else f"{number_word(len(model.runs))} runs and their mean"
    return (
        f"*Left: success in training, mean of {number_word(SMOOTHED)} steps, {shown}. Right: held-out success by depth "
        f"of the goal, {turns_of(model.agents['staged'][0])[-1]} turns, 95% intervals over items.*"
    )


def difference(model: RealModel, arm: str) -> str:
    """Return the trained agent less another on the same items: points, interval over items and exact p."""
    trained, other = (mean_item_rates(model.agents[a]) for a in ("staged", arm))
    values = [trained[item] - other[item] for item in trained if item in other]
    low, high = mean_interval(values)
    mean = f"{100 * statistics.fmean(values):+.1f}"
    return f"{mean} points ({100 * low:+.1f} to {100 * high:+.1f}, p = {sign_flip_test(values):.2g})"


def length_of_runs(model: RealModel) -> str:
    """Return how long a run is: steps, episodes, turns, tokens and minutes."""
    run, rl = model.runs[0], model.runs[0]["config"]["rl"]
    turns = [f"{stage['turns']:g}" for stage in run["stages"]]
    steps, tokens, seconds = (
        statistics.fmean(r[n] for r in model.runs) for n in ("steps", "sampled_tokens", "seconds")
    )
    minutes = f"{seconds / 60:.0f} minutes on one {run['hardware'].partition(',')[0]} that other jobs used, too"
    text = (
        f"A run has {steps:.0f} steps of {rl['groups_per_step'] * rl['group_size']} episodes under "
        f"{', '.join(turns[:-1])} and {turns[-1]} turns, {tokens / 1e6:.1f} million sampled tokens, {minutes}."
    )
    cut = [r for r in model.runs if r["steps"] < r["config"]["rl"]["steps"]]
    if cut:
        who = "It" if len(model.runs) == 1 else f"{number_word(len(cut)).capitalize()} of {len(model.runs)}"
        text += f" {who} ended before the planned {cut[0]['config']['rl']['steps']} steps."
    return text


def facts(model: RealModel) -> list[str]:
    """Return the list below the table."""
    return [
        f"- On the same items, RL less random play: {difference(model, RANDOM)}.",
        f"- RL less base: {difference(model, 'base')}.",
        "- Random play picks from the environment's list of valid actions, which no model sees.",
        f"- {length_of_runs(model)}",
    ]


def training(model: RealModel) -> list[str]:
    """Return the list of the details page: success by stage, invalid actions, agreement of engine and learner."""
    ends = [100 * statistics.fmean(values) for values in zip(*map(stage_ends, model.runs), strict=False)]
    invalid = [known(r, "actions/invalid_rate") for r in model.runs]
    early, late = (
        100 * statistics.fmean(statistics.fmean(values[part]) for values in invalid)
        for part in (slice(None, LAST_STEPS), slice(-LAST_STEPS, None))
    )
    mismatch = statistics.fmean(statistics.fmean(known(r, "mismatch/abs")) for r in model.runs)
    seconds = statistics.fmean(sum(known(r, "time/step_s")) for r in model.runs)
    per_episode = statistics.fmean(sampled_per_episode(r) for r in model.runs)
    return [
        f"- Success in training in the last ten steps of each stage: {', '.join(f'{e:.1f}%' for e in ends)}.",
        f"- Invalid actions: {early:.0f}% in the first ten steps, {late:.0f}% in the last ten.",
        f"- {per_episode:.0f} sampled tokens an episode; {seconds:.0f} s of training steps a run.",
        f"- Engine and learner differ by {mismatch:.4f} nats a token in the mean.",
    ]


BEHAVIOUR = {
    "distinct action sequences an episode": ("sequences_per_episode", "{:.2f}"),
    "states an item": ("states_per_item", "{:.1f}"),
    "looping turns": ("loops", "{:.0%}"),
    "refused turns": ("refused", "{:.0%}"),
    "refusals followed by a valid turn": ("recovered", "{:.0%}"),
    "success after a refusal": ("success_after_refusal", "{:.0%}"),
}
"""Columns of the table of behaviour: metric of results/behaviour.py and its format."""


BEHAVIOUR_HEADER = (f"| turns | {' | '.join(BEHAVIOUR)} |", "|---|" + "---|" * len(BEHAVIOUR))


def behaviour_by_stage(runs: Sequence[Record], label: str = "") -> list[str]:
    """Return rows of behaviour in training by stage, mean over runs, or nothing if a record lacks it."""
    if not all(run.get("behaviour", {}).get("step") for run in runs):
        return []
    lines = []
    for number, stage in enumerate(runs[0]["stages"]):
        cells = []
        for metric, form in BEHAVIOUR.values():
            means = [statistics.fmean(behaviour_in_stage(run, number, metric)) for run in runs]
            cells.append(form.format(statistics.fmean(means)))
        lines.append(f"| {label}{stage['turns']:.0f} | {' | '.join(cells)} |")
    return lines


def comparison(model: RealModel) -> list[str]:
    """Return the picture and table of the arms against each other, or nothing as long as only one arm has runs."""
    arms = {r["arm"] for r in runs_with_evaluations(model.study, "textcraft", list(HORIZONS))}
    if len(arms) < 2:
        return []
    picture = "![Held-out success of each horizon over steps, tokens and seconds](../images/paper-textcraft.png)"
    return ["", picture, "", *arms_against_staged(model.study, "textcraft")]


def known(run: Record, name: str) -> list[float]:
    return [value for value in run["curves"][name] if value is not None]


def stage_ends(run: Record) -> list[float]:
    """Return the training success in the last steps of each stage."""
    success = run["curves"]["success/mean"]
    return [statistics.fmean(success[max(0, s["last_step"] - LAST_STEPS) : s["last_step"]]) for s in run["stages"]]


def sampled_per_episode(run: Record) -> float:
    rl = run["config"]["rl"]
    return float(run["sampled_tokens"] / (run["steps"] * rl["groups_per_step"] * rl["group_size"]))


def texts(model: RealModel) -> dict[str, str]:
    """Return the generated parts of docs/results by name."""
    picture = "![Success in training over three stages; held-out success by depth before and after](../images/{})"
    claim = [f"**Holds.** {verdict(model)}", "", picture.format(PICTURE), "", caption(model), "", *table(model), ""]
    stages = behaviour_by_stage(model.runs)
    behaviour = ["", *BEHAVIOUR_HEADER, *stages] if stages else []
    return {
        "qwen": "\n".join(map(wrapped, [*claim, *facts(model)])),
        "qwen-training": "\n".join(map(wrapped, [*training(model), *behaviour, *comparison(model)])),
    }


def wrapped(text: str) -> str:
    """Return a paragraph or list item in lines of at most 120 characters; tables and pictures stay as they are."""
    if text.startswith(("|", "![")):
        return text
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def readme_caption(model: RealModel) -> str:
    """Return the line below the README's picture."""
    base, trained = statistics.fmean(rates(model.agents["base"])), rates(model.agents["staged"])
    minutes, paper = statistics.fmean(r["seconds"] for r in model.runs) / 60, published()["AgentGym-RL-3B"]
    seeds = f" ({min(trained):.0f}–{max(trained):.0f})" if len(trained) > 1 else ""
    return (
        f"*Qwen2.5-Coder-1.5B on TextCraft by RL, {runs_text(model.agents['staged'])}: {base:.0f} to "
        f"{statistics.fmean(trained):.0f}%{seeds} in {minutes:.0f} minutes on one GPU (the paper's 3B: {paper:g}%).*"
    )


def readme_sentence(model: RealModel) -> str:
    base, chance, trained = (statistics.fmean(rates(model.agents[arm])) for arm in ("base", RANDOM, "staged"))
    gain = f"from {base:.0f} to {trained:.0f}%"
    seeds = runs_text(model.agents["staged"])
    text = f"RL lifts Qwen2.5-Coder-1.5B {gain} on TextCraft ({seeds}; random play: {chance:.0f}%)"
    if after := model.babyai.get("staged"):
        before, chance = (statistics.fmean(rates(model.babyai[arm])) for arm in ("base", RANDOM))
        gain = f"from {before:.0f} to {statistics.fmean(rates(after)):.0f}%"
        text += f" and {gain} on BabyAI ({runs_text(after)}; random play: {chance:.0f}%)"
    return f"{text}."


def draw(model: RealModel, path: Path) -> bool:
    """Draw success in training by step and held-out success by depth. Return whether there is a trained agent."""
    if not model.runs or not {"base", RANDOM, "staged"} <= model.agents.keys():
        return False
    figure, grid = new_figure(1, 2, 10.5, 3.6)
    draw_training(grid[0][0], model.runs)
    draw_depths(grid[0][1], model)
    figure.savefig(path)
    return True


def smoothed(values: Sequence[float]) -> list[float]:
    return [statistics.fmean(values[max(0, i + 1 - SMOOTHED) : i + 1]) for i in range(len(values))]


def draw_training(axes: Any, runs: Sequence[Record]) -> None:
    """Draw each run as a faint line, the mean over runs as a thick one, and where the horizon grows."""
    curves = [[float(v) for v in r["curves"]["success/mean"]] for r in runs]
    for values in curves:
        shown = values if len(curves) == 1 else smoothed(values)
        axes.plot(range(1, len(shown) + 1), shown, color=FAINT, linewidth=0.8)
    mean = smoothed([statistics.fmean(step) for step in zip(*curves, strict=False)])
    axes.plot(range(1, len(mean) + 1), mean, color=HORIZONS["staged"], linewidth=2)
    for stage in runs[0]["stages"]:
        axes.axvline(stage["first_step"], color=FAINT, linewidth=0.8, linestyle=":")
        axes.text(stage["first_step"] + 2, 1.0, f"{stage['turns']:g} turns", fontsize=8, color=INK, va="top")
    rl = runs[0]["config"]["rl"]
    axes.set_xlabel(f"step of RL ({rl['groups_per_step'] * rl['group_size']} episodes each)", fontsize=9, color=INK)
    axes.set_ylim(0, 1.04)
    label_y_in_percent(axes, "success in training")
    set_title(axes, f"Qwen2.5-Coder-1.5B on TextCraft: {runs_text(runs)}")


def draw_depths(axes: Any, model: RealModel) -> None:
    """Draw held-out success by depth with intervals over items, and the seeds as dots."""
    cells = kinds(model.agents["base"][0])
    for number, (arm, (colour, label)) in enumerate(BARS.items()):
        records = model.agents[arm]
        for place, depth in enumerate(cells):
            at = place + 0.27 * (number - 1)
            values = list(mean_item_rates(records, [depth.lower().replace(" ", "")]).values())
            low, high = rate_interval(values, sum(kinds(r)[depth]["episodes"] for r in records))
            axes.bar(at, statistics.fmean(values), 0.25, color=colour, label=None if place else label)
            axes.plot([at, at], [low, high], color=INK, linewidth=0.8)
            if len(records) > 1:
                axes.plot([at] * len(records), [kinds(r)[depth]["success"]["value"] for r in records], ".", color=INK)
    axes.set_xticks(range(len(cells)), [f"{depth.lower()}\n{cell['items']} items" for depth, cell in cells.items()])
    label_y_in_percent(axes, f"held-out success, {turns_of(model.agents['staged'][0])[-1]} turns")
    set_title(axes, "by depth of the goal, 95% intervals over items")
    draw_legend(axes, 3)
