"""Measures of real models under several limits of turns (claim C), before and after RL.

Episodes are played once, under the most turns; fewer turns are their beginnings. The endings of episodes come from
`<job>.actions.jsonl.xz` beside a record.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from behaviour import Row
from jobs import RANDOM
from records import Record, item_rates

from agentgym_rl.evaluation.statistics import mean_interval, sign_flip_test

TASKS = ("babyai", "textcraft")
NAMES = {"babyai": "BabyAI", "textcraft": "TextCraft"}
MODELS = {"135M": "SmolLM2-135M", "0.5B": "Qwen2.5-Coder-0.5B", "1.5B": "Qwen2.5-Coder-1.5B"}
"""Models by size. The comparisons are of the last two, which are of one family."""
SMALL, LARGE = "0.5B", "1.5B"
FEW, SOME, MANY = 4, 16, 32
"""Limits of turns that are compared."""
TRIES, TURNS_A_TRY = 4, 8
"""Tries with as many turns in all as one long episode."""


@dataclass(frozen=True)
class RealSizes:
    """Evaluations of real models and of random play under several limits of turns."""

    agents: dict[tuple[str, str], list[Record]]
    """Records, one per seed, by task and agent: a size, `<size> after RL`, or `random play`."""
    episodes: dict[tuple[str, str], list[Row]]
    """Actions and endings of the same episodes."""
    again: Record | None
    """A second evaluation of the largest untrained model on BabyAI."""
    runs: dict[str, Record]
    """Training runs by name."""
    suite: dict[str, tuple[int, dict[int, list[Row]]]]
    """Agents after RL in the paper's table: the limit of turns and the episodes by seed, by task."""

    def agents_of(self, task: str) -> dict[str, str]:
        """Return the titles of a task's agents by their key, in the order of the tables."""
        titles = {RANDOM: RANDOM, **MODELS, **{after(size): f"{MODELS[size]} after RL" for size in MODELS}}
        return {agent: title for agent, title in titles.items() if (task, agent) in self.agents}

    def trained_sizes(self, task: str) -> list[str]:
        """Return the sizes that were trained on a task."""
        return [size for size in MODELS if (task, after(size)) in self.agents]


def after(size: str) -> str:
    """Return the key of the agent that RL made of a model."""
    return f"{size} after RL"


def signed(share: float) -> str:
    """Return a difference of shares in points, with a sign."""
    return f"{100 * share:+.1f}".replace("-", "−")


@dataclass(frozen=True)
class Comparison:
    """A difference on the same items."""

    task: str
    name: str
    differences: list[float]
    """One an item."""

    @property
    def p(self) -> float:
        return sign_flip_test(self.differences)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.differences)

    @property
    def points(self) -> str:
        return signed(self.mean)

    @property
    def with_interval(self) -> str:
        low, high = mean_interval(self.differences)
        return f"{self.points} ({signed(low)} to {signed(high)})"


def rates(model: RealSizes, task: str, agent: str, turns: int, tries: int = 1) -> dict[str, float]:
    """Return each item's success, averaged over seeds."""
    return mean_by_item(item_rates(record, turns, tries) for record in model.agents[task, agent])


def mean_by_item(seeds: Iterable[dict[str, float]]) -> dict[str, float]:
    by_seed = list(seeds)
    return {item: statistics.fmean(rates[item] for rates in by_seed) for item in by_seed[0]}


def success(model: RealSizes, task: str, agent: str, turns: int, tries: int = 1) -> float:
    """Return success in percent."""
    return 100 * statistics.fmean(rates(model, task, agent, turns, tries).values())


def ended(rows: Sequence[Row], stop: str, turns: int) -> float:
    """Return the percentage of episodes that ended so after at most so many turns."""
    return 100 * statistics.fmean(row["stop"] == stop and len(row["actions"]) <= turns for row in rows)


def refused(rows: Sequence[Row]) -> float:
    """Return the percentage of turns that the environment refused."""
    return 100 * sum(len(row["refused"]) for row in rows) / sum(len(row["actions"]) for row in rows)


def solved_within(rows: Sequence[Row], turns: int) -> dict[str, float]:
    """Return each item's success within any number of turns. A reward of 1 ends an episode of these environments."""
    samples: dict[str, list[bool]] = {}
    for row in rows:
        samples.setdefault(row["item"], []).append(sum(row["rewards"]) > 0 and len(row["actions"]) <= turns)
    return {item: statistics.fmean(values) for item, values in samples.items()}


def less(first: dict[str, float], second: dict[str, float]) -> list[float]:
    return [first[item] - second[item] for item in sorted(first)]


def per_episode(model: RealSizes, agent: str, turns: int, name: str, task: str = "babyai") -> float:
    """Return the tokens of an episode, averaged over seeds: `sampled_tokens` or `prompt_tokens`."""
    results = [r for record in model.agents[task, agent] for r in record["results"] if r["max_turns"] == turns]
    return statistics.fmean(cell[name] for result in results for cell in result["scenarios"].values())


def behaviour(model: RealSizes, task: str, agent: str, name: str) -> float:
    """Return a share of turns in percent, averaged over seeds: `loops` or `refused`."""
    return 100 * statistics.fmean(record["behaviour"][name] for record in model.agents[task, agent])


def without_context_limit(rows: Sequence[Row]) -> float:
    """Return the Kaplan-Meier estimate of success within MANY turns in percent, if only context is lifted.

    An episode that ran out of context counts as long as it lasted. One that ended in another way stays unsolved.
    """
    unsolved = 1.0
    for turn in range(1, MANY + 1):
        solved = sum(len(row["actions"]) == turn and sum(row["rewards"]) > 0 for row in rows)
        before = sum(len(row["actions"]) < turn and sum(row["rewards"]) > 0 for row in rows)
        gone = sum(len(row["actions"]) < turn and row["stop"] == "max_context" for row in rows)
        if solved:
            unsolved *= 1 - solved / (len(rows) - before - gone)
    return 100 * (1 - unsolved)
