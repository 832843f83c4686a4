"""Paired comparison of two evaluations. Items are paired because they differ far more than agents do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentgym_rl.errors import ConfigError
from agentgym_rl.evaluation.folder import read_evaluation, read_records
from agentgym_rl.evaluation.plan import TaskPlan, game_of
from agentgym_rl.evaluation.records import Outcome, Record
from agentgym_rl.evaluation.statistics import mcnemar_exact, mean_interval, sign_flip_test


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two evaluations of a comparison."""

    name: str
    folder: Path
    plans: tuple[TaskPlan, ...]
    samples: int
    turns: tuple[int, ...]
    """Horizons, or empty if each scenario has its own."""
    outcomes: dict[tuple[str, int], list[Outcome]]
    """Outcomes at the compared horizon, by environment and item."""
    errors: int
    """Number of failed episodes. The comparison leaves them out."""
    horizons: dict[str, int]
    """Turns allowed, by environment."""
    game: dict[str, str]
    """Environment arguments, role and opponent, as text by their name."""


def load_side(folder: Path, max_turns: int | None = None) -> Side:
    """Read an evaluation at one of its horizons, by default the longest."""
    row = read_evaluation(folder)
    config = row["config"]
    plans = tuple(TaskPlan.from_json(plan) for plan in config["tasks"])
    turns = tuple(config["turns"] or ())
    if max_turns is not None and turns and max_turns not in turns:
        raise ConfigError(f"{folder} was evaluated with {', '.join(map(str, turns))} turns, not with {max_turns}")
    if max_turns is not None and not turns:
        raise ConfigError(f"{folder} was evaluated with each scenario's own turns: leave --turns out")
    horizon = max_turns or (turns[-1] if turns else None)
    outcomes: dict[tuple[str, int], list[Outcome]] = {}
    errors = 0
    allowed = {(p.env, item): horizon or p.max_turns for p in plans for item in p.items}
    for (env, item, _), attempts in sorted(read_records(folder).items()):
        if (env, item) not in allowed:
            raise ConfigError(
                f"{folder} has an episode of {env} item {item}, which is not among its tasks: remove its line"
            )
        outcome = _first_outcome(attempts, allowed[env, item])
        if outcome is None:
            errors += 1
        else:
            outcomes.setdefault((env, item), []).append(outcome)
    horizons = {plan.env: horizon or plan.max_turns for plan in plans}
    name = config["agent"]["name"]
    return Side(name, folder, plans, config["samples"], turns, outcomes, errors, horizons, game_of(config))


def compare(first: Side, second: Side) -> dict[str, Any]:
    """Compare two evaluations per scenario and over all shared items. Raise ConfigError if they share none.

    Return {"first", "second", "notes": [...], "own_data": [name], "scenarios": {name: numbers}, "all": numbers}. If
    both have the same name, (A) and (B) are appended.
    """
    _require_same_data(first, second)
    if first.name == second.name:
        first, second = replace(first, name=f"{first.name} (A)"), replace(second, name=f"{second.name} (B)")
    shared = [key for key in first.outcomes if key in second.outcomes]
    if not shared:
        raise ConfigError(
            f"{first.folder} and {second.folder} have no item in common that both finished: evaluate both on the "
            "same tasks"
        )
    scenario_of = {(plan.env, item): plan.scenario for plan in first.plans for item in plan.items}
    played = {scenario_of[key] for key in shared}
    scenarios = [name for name in dict.fromkeys(plan.scenario for plan in first.plans) if name in played]
    return {
        "first": {"name": first.name, "folder": str(first.folder), "horizons": first.horizons},
        "second": {"name": second.name, "folder": str(second.folder), "horizons": second.horizons},
        "notes": _notes(first, second, shared),
        "own_data": [name for name in scenarios if any(p.own_data for p in first.plans if p.scenario == name)],
        "scenarios": {
            name: _numbers(first, second, [key for key in shared if scenario_of[key] == name]) for name in scenarios
        },
        "all": _numbers(first, second, shared),
    }


def _numbers(first: Side, second: Side, keys: Sequence[tuple[str, int]]) -> dict[str, Any]:
    successes = [(_rate(first.outcomes[key]), _rate(second.outcomes[key])) for key in keys]
    rewards = [(_reward(first.outcomes[key]), _reward(second.outcomes[key])) for key in keys]
    numbers: dict[str, Any] = {
        "items": len(keys),
        "success": _difference(successes),
        "reward": _difference(rewards),
    }
    if all(len(side.outcomes[key]) == 1 for side in (first, second) for key in keys):
        only_first = sum(a > b for a, b in successes)
        only_second = sum(b > a for a, b in successes)
        numbers["mcnemar"] = {
            "both": sum(a == b == 1 for a, b in successes),
            "only_first": only_first,
            "only_second": only_second,
            "neither": sum(a == b == 0 for a, b in successes),
            "p": mcnemar_exact(only_first, only_second),
        }
    return numbers


def _difference(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return second minus first: mean, 95% paired bootstrap interval and p-value of the paired sign-flip test."""
    differences = [b - a for a, b in pairs]
    low, high = mean_interval(differences)
    return {
        "first": math.fsum(a for a, _ in pairs) / len(pairs),
        "second": math.fsum(b for _, b in pairs) / len(pairs),
        "difference": math.fsum(differences) / len(differences),
        "low": low,
        "high": high,
        "p": sign_flip_test(differences),
    }


def _require_same_data(first: Side, second: Side) -> None:
    """Raise ConfigError if an environment was played on different data, where item numbers mean other items."""
    data = {plan.env: plan.data for plan in first.plans if plan.items}
    for plan in second.plans:
        if plan.items and data.get(plan.env, plan.data) != plan.data:
            raise ConfigError(
                f"{plan.env} was played on different data, so its items are not the same: {first.folder} on "
                f"{data[plan.env]}; {second.folder} on {plan.data}"
            )


def _notes(first: Side, second: Side, shared: Sequence[tuple[str, int]]) -> list[str]:
    notes = []
    requested = {side.name: {(p.env, item) for p in side.plans for item in p.items} for side in (first, second)}
    if requested[first.name] != requested[second.name]:
        counts = ", ".join(f"{name} has {len(items)}" for name, items in requested.items())
        notes.append(f"the items differ ({counts}): compared on the {len(shared)} that both have")
    for side in (first, second):
        missing = len(requested[side.name]) - len(side.outcomes)
        if missing:
            notes.append(f"{side.name}: {missing} of {len(requested[side.name])} items failed or were not played")
        if side.errors:
            episodes = "1 episode" if side.errors == 1 else f"{side.errors} episodes"
            notes.append(f"{side.name}: {episodes} ended as errors and are left out")
    if first.samples != second.samples:
        notes.append(f"samples per item: {first.name} has {first.samples}, {second.name} has {second.samples}")
    for env, turns in first.horizons.items():
        other = second.horizons.get(env, turns)
        if other != turns:
            notes.append(f"{env}: {first.name} was allowed {turns} turns, {second.name} {other}")
    for name, value in first.game.items():
        if second.game[name] != value:
            texts = [side.game[name] or "none" for side in (first, second)]
            notes.append(f"different {name}: {first.name} had {texts[0]}, {second.name} had {texts[1]}")
    return notes


def _first_outcome(attempts: Sequence[Record], max_turns: int) -> Outcome | None:
    return next((outcome for record in attempts if (outcome := record.at_horizon(max_turns)) is not None), None)


def _rate(outcomes: Sequence[Outcome]) -> float:
    return sum(outcome.success for outcome in outcomes) / len(outcomes)


def _reward(outcomes: Sequence[Outcome]) -> float:
    return math.fsum(outcome.reward for outcome in outcomes) / len(outcomes)


def verdict(numbers: Mapping[str, Any], first: str, second: str, level: float = 0.05) -> str:
    """Return one sentence that says which agent has the higher success rate, or that neither has."""
    difference = numbers["success"]
    p = numbers["mcnemar"]["p"] if "mcnemar" in numbers else difference["p"]
    if p >= level:
        return f"no significant difference in success between {first} and {second} (p = {p:.3g})"
    better, worse = (second, first) if difference["difference"] > 0 else (first, second)
    return f"{better} beats {worse} in success (p = {p:.2g})"
