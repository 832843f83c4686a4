"""From episodes to the numbers of a table. docs/reference/evaluation.md defines each of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentgym_rl.agent.engines.openai import Prices
from agentgym_rl.evaluation.plan import TaskPlan
from agentgym_rl.evaluation.records import Outcome, Record
from agentgym_rl.evaluation.statistics import combined_interval, mean_interval, pass_at_k, rate_interval
from agentgym_rl.evaluation.suites import coverage

Key = tuple[str, int, int]
Attempts = Mapping[Key, Sequence[Record]]
"""Every attempt at every episode."""
CAUSES_KEPT, CAUSE_LENGTH = 5, 300
"""Of what episodes failed with: so many texts, so many characters of each."""
INTERVALS = (
    "95% intervals: Wilson score over items for success and pass@k (with several samples an item, of the effective "
    "size); percentile bootstrap over items for reward; MOVER from the scenarios' intervals for the mean."
)


def results(
    plans: Sequence[TaskPlan], attempts: Attempts, samples: int, turns: Sequence[int] | None, prices: Prices | None
) -> list[dict[str, Any]]:
    """One entry a horizon, shortest first; a single one with `max_turns` None when each scenario has its own.

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
        own = [plan for plan in plans if plan.scenario == name]
        cell = _cell(own, attempts, samples, horizon, prices)
        scenarios[name] = cell and cell | {"coverage": coverage(own)}
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
    """The numbers of one column over the items of `plans`; None when there is nothing to play."""
    turns_of = {(plan.env, item): horizon or plan.max_turns for plan in plans for item in plan.items}
    if not turns_of:
        return None
    outcomes: list[list[Outcome]] = []
    with_errors: list[float] = []
    unplayed = 0
    causes: list[str] = []
    spent: list[tuple[Record, int]] = []
    for (env, item), allowed in turns_of.items():
        scored: list[Outcome] = []
        failed = 0  # of this item
        for sample in range(samples):
            tried = attempts.get((env, item, sample), ())
            spent += [(record, allowed) for record in tried]
            found = next((outcome for record in tried if (outcome := record.under(allowed)) is not None), None)
            if found is not None:
                scored.append(found)
            elif tried:
                failed += 1
                causes.append(" ".join(tried[-1].error.split())[:CAUSE_LENGTH])
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
        return {**counts, "success": None, **_costs(spent, prices)}
    scores = _scores(outcomes, samples) | {"success_errors_as_failures": _mean(with_errors)}
    return {**counts, **scores, **_costs(spent, prices)}


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
            # Items with failed samples may have too few for this k; they are left out of it.
            enough = [scored for scored in outcomes if len(scored) >= k]
            values = [pass_at_k(len(scored), sum(o.success for o in scored), k) for scored in enough]
            if values:
                interval = rate_interval(values, sum(map(len, enough)))
                scores[f"pass@{k}"] = {**_with_interval(_mean(values), interval), "items": len(values)}
    return scores


def _costs(spent: Sequence[tuple[Record, int]], prices: Prices | None) -> dict[str, Any]:
    """Tokens per episode that counts; money over all attempts, failed ones included: it was paid."""
    answers = [tokens for record, allowed in spent for tokens in record.tokens_under(allowed)]
    if not answers:
        # No answer costs nothing; who needs none (oracle, random play) has no cost at all.
        asked = prices is not None and any(record.tokens is not None for record, _ in spent)
        return {"prompt_tokens": None, "sampled_tokens": None, "cost_usd": 0.0 if asked else None, "unreported": 0}
    unreported = sum(not tokens.reported for tokens in answers)
    good = [(record, allowed) for record, allowed in spent if record.under(allowed) is not None]
    counted = [tokens for record, allowed in good for tokens in record.tokens_under(allowed)]
    known = good and not any(not tokens.reported for tokens in counted)
    return {
        "prompt_tokens": sum(tokens.prompt for tokens in counted) / len(good) if known else None,
        "sampled_tokens": sum(tokens.completion for tokens in counted) / len(good) if known else None,
        "cost_usd": math.fsum(prices.cost(tokens) for tokens in answers) if prices else None,
        "unreported": unreported,
    }


def _overall(plans: Sequence[TaskPlan], scenarios: Mapping[str, Any]) -> dict[str, Any] | None:
    """Plain mean over the scenarios played; None unless there are several, each played as a whole, and no environment
    is without a result."""
    played = {name: cell["success"] for name, cell in scenarios.items() if cell and cell["success"]}
    environments = {plan.env for plan in plans if plan.scenario in played}
    in_part = any(cell["coverage"] == "part" for cell in scenarios.values() if cell)
    if len(played) < 2 or in_part or any(plan.env not in environments for plan in plans):
        return None
    interval = combined_interval([(rate["value"], rate["low"], rate["high"]) for rate in played.values()])
    own = any(plan.own_data for plan in plans if plan.scenario in played)
    success = _with_interval(_mean(rate["value"] for rate in played.values()), interval)
    return {"success": success, "scenarios": list(played), "own_data": own}


def _totals(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts over everything. An item counts in each scenario it is in."""
    totals: dict[str, Any] = {
        name: sum(cell[name] for cell in cells) for name in ("items", "episodes", "errors", "unplayed", "unreported")
    }
    costs = [cell["cost_usd"] for cell in cells if cell["cost_usd"] is not None]
    causes: Counter[str] = Counter()
    for cell in cells:
        causes.update(cell["causes"])
    return totals | {"causes": _most_common(causes), "cost_usd": math.fsum(costs) if costs else None}


def _most_common(causes: Counter[str]) -> dict[str, int]:
    return dict(causes.most_common(CAUSES_KEPT))


def _powers(samples: int) -> list[int]:
    """1, 2, 4, ... and the number of samples itself."""
    powers = [2**i for i in range(samples.bit_length()) if 2**i < samples]
    return [*powers, samples]


def _with_interval(value: float, interval: tuple[float, float]) -> dict[str, float]:
    return {"value": value, "low": interval[0], "high": interval[1]}


def _mean(values: Iterable[float]) -> float:
    found = [float(value) for value in values]
    return math.fsum(found) / len(found)
