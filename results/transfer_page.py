"""Agents of one scenario on the others: the comparisons, and the text that results/pages.py puts into pages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from behaviour import read_rows
from jobs import RANDOM
from paper import SCENARIOS, by_task_and_arm, generalisation_table, mean_item_rates
from qwen_page import wrapped
from qwen_studies import QWEN
from records import Record, evaluations_of, read_records
from tables import holm
from turn_limits import Comparison, less, refused

STUDY = "qwen-generalisation"
TRAINED_ON = "trained on "
"""Beginning of the arm of an agent that was trained on one scenario."""


@dataclass(frozen=True)
class Transfers:
    """Evaluations of trained agents on scenarios that they were not trained on."""

    transfers: list[Record]
    suite: list[Record]
    """Records of the paper's table: base, random play, and the agents on their own scenarios."""
    refused: dict[str, float]
    """Share of turns that the environment refused, in percent, by job, of the transfers and of the base model."""


def read(results: Path) -> Transfers | None:
    """Return the records, or nothing if no agent was evaluated on another scenario."""
    transfers = evaluations_of(read_records(results, STUDY))
    if not transfers:
        return None
    suite = [r for task in QWEN for r in read_records(results, f"qwen-{task}")]
    base = [(f"qwen-{r['task']}", r) for r in evaluations_of(suite) if r["arm"] == "base"]
    measured = {
        r["job"]: refused(list(read_rows(results / study / f"{r['job']}.actions.jsonl.xz")))
        for study, r in [*base, *((STUDY, r) for r in transfers)]
    }
    return Transfers(transfers, suite, measured)


def comparisons(model: Transfers) -> list[tuple[str, Comparison, Comparison]]:
    """Return each agent less base and less random play on the items of another scenario, by the agent's arm."""
    moved, suite = by_task_and_arm(model.transfers), by_task_and_arm(model.suite)
    compared: list[tuple[str, Comparison, Comparison]] = []
    for task in QWEN:
        for arm in (f"{TRAINED_ON}{trained}" for trained in QWEN):
            if (task, arm) in moved and (task, "base") in suite and (task, RANDOM) in suite:
                agent = mean_item_rates(moved[task, arm])
                over_base, over_chance = (
                    Comparison(task, arm, less(agent, mean_item_rates(suite[task, other])))
                    for other in ("base", RANDOM)
                )
                compared.append((arm, over_base, over_chance))
    return compared


def comparisons_table(model: Transfers) -> list[str]:
    """Return each agent less base and less random play. Holm's correction is over all of them."""
    compared = comparisons(model)
    adjusted = iter(holm([c.p for _, *pair in compared for c in pair]))
    lines = [
        "| agent, on | less base, points (95% interval) | p, Holm | less random play, points (95% interval) | p, Holm "
        "| refused turns: base, agent |",
        "|---|---|---|---|---|---|",
    ]
    moved, suite = by_task_and_arm(model.transfers), by_task_and_arm(model.suite)
    for arm, *pair in compared:
        task = pair[0].task
        cells = [cell for c in pair for cell in (c.with_interval, f"{next(adjusted):.2g}")]
        shares = [model.refused[groups[task, a][0]["job"]] for groups, a in ((suite, "base"), (moved, arm))]
        cells.append(", ".join(f"{share:.0f}%" for share in shares))
        lines.append(f"| {agent_name(arm)}, on {SCENARIOS[task]} | {' | '.join(cells)} |")
    return lines


def agent_name(arm: str) -> str:
    """Return `trained on BabyAI` for `trained on babyai`."""
    return f"{TRAINED_ON}{SCENARIOS[arm.removeprefix(TRAINED_ON)]}"


def texts(results: Path) -> dict[str, str]:
    """Return the generated part of docs/results by name."""
    model = read(results)
    if model is None:
        return {"transfer": ""}
    lines = [*generalisation_table(model.transfers, model.suite), "", *comparisons_table(model)]
    return {"transfer": "\n".join(map(wrapped, lines))}
