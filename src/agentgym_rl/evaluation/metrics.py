"""Metrics of an evaluation, computed from its episodes. docs/reference/evaluation.md defines each of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from agentgym_rl.agent.engines.openai import Prices
from agentgym_rl.evaluation.plan import TaskPlan
from agentgym_rl.evaluation.records import Outcome, Record
from agentgym_rl.evaluation.statistics import combined_interval, mean_interval, pass_at_k, rate_interval
from agentgym_rl.evaluation.suites import coverage

Key = tuple[str, int, int]
Attempts = Mapping[Key, Sequence[Record]]
"""Every attempt, by episode key."""
MAX_CAUSES, MAX_CAUSE_LENGTH = 5, 300
"""Number of error texts that a cell keeps, and the characters kept of each."""
INTERVALS = (
    "95% intervals: Wilson score over items for success and pass@k (with the effective sample size if items have "
    "several samples); percentile bootstrap over items for reward"
)
MEAN_INTERVAL = "; MOVER on the scenarios' intervals for the mean"


def results(
    plans: Sequence[TaskPlan], attempts: Attempts, samples: int, turns: Sequence[int] | None, prices: Prices | None
) -> list[dict[str, Any]]:
    """Return one entry per horizon, shortest first, or one entry with `max_turns` None if each scenario has its own.

    `{"max_turns", "tasks": {"TextCraft/Depth 1": cell}, "scenarios": {"TextCraft": cell}, "overall": {...} or None}`
    """
    horizons: Sequence[int | None] = turns or (None,)
    return [_result(plans, attempts, samples, horizon, prices) for horizon in horizons]


def _result(
    plans: Sequence[TaskPlan], attempts: Attempts, samples: int, horizon: int | None, prices: Prices | None
) -> dict[str, Any]:
    tasks: dict[str, Any] = {}
    scenarios: dict[str, Any] = {}
    for plan in plans:
        tasks[plan.key] = _cell([plan], attempts, samples, horizon, prices)
    for name in dict.fromkeys(plan.scenario for plan in plans):
        scenario_plans = [plan for plan in plans if plan.scenario == name]
        cell = _cell(scenario_plans, attempts, samples, horizon, prices)
        scenarios[name] = cell and cell | {"coverage": coverage(scenario_plans)}
    return {
        "max_turns": horizon,
        "tasks": tasks,
        "scenarios": scenarios,
        "overall": _overall(plans, scenarios),
        "total": _totals([cell for cell in scenarios.values() if cell]),
    }


def _cell(
    plans: Sequence[TaskPlan], attempts: Attempts, samples: int, horizon: int | None, prices: Prices | None
) -> dict[str, Any] | None:
    """Return the metrics of one column over the items of `plans`, or None if there are no items."""
    turns_of = {(plan.env, item): horizon or plan.max_turns for plan in plans for item in plan.items}
    if not turns_of:
        return None
    outcomes: list[list[Outcome]] = []
    with_errors: list[float] = []
    unplayed = 0
    causes: list[str] = []
    all_attempts: list[tuple[Record, int]] = []
    for (env, item), allowed in turns_of.items():
        scored: list[Outcome] = []
        failed = 0  # samples of this item
        for sample in range(samples):
            records = attempts.get((env, item, sample), ())
            all_attempts += [(record, allowed) for record in records]
            outcome = next((end for record in records if (end := record.at_horizon(allowed)) is not None), None)
            if outcome is not None:
                scored.append(outcome)
            elif records:
                failed += 1
                causes.append(" ".join(records[-1].error.split())[:MAX_CAUSE_LENGTH])
            else:
                unplayed += 1
        if scored:
            outcomes.append(scored)
        if scored or failed:
            with_errors.append(sum(outcome.success for outcome in scored) / (len(scored) + failed))
    played = [outcome for scored in outcomes for outcome in scored]
    counts: dict[str, Any] = {"items": len(turns_of), "episodes": len(played), "errors": len(causes)}
    counts |= {"unplayed": unplayed, "causes": _most_common(Counter(causes))}
    if not played:
        return {**counts, "success": None, **_costs(all_attempts, prices)}
    scores = _scores(outcomes, samples) | {"success_errors_as_failures": _mean(with_errors)}
    return {**counts, **scores, **_costs(all_attempts, prices)}


def _scores(outcomes: list[list[Outcome]], samples: int) -> dict[str, Any]:
    played = [outcome for scored in outcomes for outcome in scored]
    rates = [_mean(outcome.success for outcome in scored) for scored in outcomes]
    rewards = [_mean(outcome.reward for outcome in scored) for scored in outcomes]
    success = _with_interval(_mean(rates), rate_interval(rates, len(played)))
    scores: dict[str, Any] = {
        "success": success,
        "reward": _with_interval(_mean(rewards), mean_interval(rewards)),
        "turns": _mean(outcome.turns for outcome in played),
        "truncated": _mean(outcome.truncated for outcome in played),
    }
    if samples > 1:
        scores["samples"] = samples
        scores[f"avg@{samples}"] = success
        for k in _powers(samples):
            # An item with failed samples may have fewer than k. pass@k leaves it out.
            enough = [scored for scored in outcomes if len(scored) >= k]
            values = [pass_at_k(len(scored), sum(o.success for o in scored), k) for scored in enough]
            if values:
                interval = rate_interval(values, sum(map(len, enough)))
                scores[f"pass@{k}"] = {**_with_interval(_mean(values), interval), "items": len(values)}
    if any(outcome.tries for outcome in played):
        scores["attempts"] = _attempt_shares(outcomes)
    return scores


def _attempt_shares(outcomes: list[list[Outcome]]) -> dict[str, Any]:
    """Return the success of each attempt of style reflect. An attempt that was not needed counts as its predecessor,
    one that was cut off as failed."""
    most = max(len(outcome.tries) for scored in outcomes for outcome in scored)
    rows = [[[*o.tries, *[o.success] * (most - len(o.tries))] for o in scored] for scored in outcomes]
    shares: dict[str, Callable[[list[bool]], bool]] = {
        **{f"attempt {k + 1}": lambda row, k=k: row[k] for k in range(most)},  # type: ignore[misc]
        "wrong → right": lambda row: not row[0] and row[-1],
        "right → wrong": lambda row: row[0] and not row[-1],
    }
    played = sum(map(len, rows))
    rates = {name: [_mean(of(row) for row in scored) for scored in rows] for name, of in shares.items()}
    return {name: _with_interval(_mean(values), rate_interval(values, played)) for name, values in rates.items()}


def _costs(attempts: Sequence[tuple[Record, int]], prices: Prices | None) -> dict[str, Any]:
    """Return tokens per scored episode, and the cost of all attempts. Failed attempts were paid for too."""
    answers = [tokens for record, allowed in attempts for tokens in record.tokens_at_horizon(allowed)]
    if not answers:
        # An API agent without answers costs 0. The oracle and random play have no cost.
        priced = prices is not None and any(record.tokens is not None for record, _ in attempts)
        return {"prompt_tokens": None, "sampled_tokens": None, "cost_usd": 0.0 if priced else None, "unreported": 0}
    unreported = sum(not tokens.reported for tokens in answers)
    scored = [(record, allowed) for record, allowed in attempts if record.at_horizon(allowed) is not None]
    counted = [tokens for record, allowed in scored for tokens in record.tokens_at_horizon(allowed)]
    known = scored and not any(not tokens.reported for tokens in counted)
    return {
        "prompt_tokens": sum(tokens.prompt for tokens in counted) / len(scored) if known else None,
        "sampled_tokens": sum(tokens.completion for tokens in counted) / len(scored) if known else None,
        "cost_usd": math.fsum(prices.cost(tokens) for tokens in answers) if prices else None,
        "unreported": unreported,
    }


def _overall(plans: Sequence[TaskPlan], scenarios: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the unweighted mean over the played scenarios.

    Return None if there are fewer than two, one was played in part, or an environment has no result.
    """
    played = {name: cell["success"] for name, cell in scenarios.items() if cell and cell["success"]}
    played_environments = {plan.env for plan in plans if plan.scenario in played}
    in_part = any(cell["coverage"] == "part" for cell in scenarios.values() if cell)
    if len(played) < 2 or in_part or any(plan.env not in played_environments for plan in plans):
        return None
    interval = combined_interval([(rate["value"], rate["low"], rate["high"]) for rate in played.values()])
    own_data = any(plan.own_data for plan in plans if plan.scenario in played)
    success = _with_interval(_mean(rate["value"] for rate in played.values()), interval)
    return {"success": success, "scenarios": list(played), "own_data": own_data}


def _totals(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums over all scenarios. An item counts once in each scenario that contains it."""
    totals: dict[str, Any] = {
        name: sum(cell[name] for cell in cells) for name in ("items", "episodes", "errors", "unplayed", "unreported")
    }
    costs = [cell["cost_usd"] for cell in cells if cell["cost_usd"] is not None]
    causes: Counter[str] = Counter()
    for cell in cells:
        causes.update(cell["causes"])
    return totals | {"causes": _most_common(causes), "cost_usd": math.fsum(costs) if costs else None}


def _most_common(causes: Counter[str]) -> dict[str, int]:
    return dict(causes.most_common(MAX_CAUSES))


def _powers(samples: int) -> list[int]:
    """Return 1, 2, 4, ... below `samples`, and `samples` itself."""
    powers = [2**i for i in range(samples.bit_length()) if 2**i < samples]
    return [*powers, samples]


def _with_interval(value: float, interval: tuple[float, float]) -> dict[str, float]:
    return {"value": value, "low": interval[0], "high": interval[1]}


def _mean(values: Iterable[float]) -> float:
    floats = [float(value) for value in values]
    return math.fsum(floats) / len(floats)
