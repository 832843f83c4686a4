"""Results of a run: its learning curve, rows of a table, and ten held-out episodes before and after training.

    python scripts/results.py RUN [RUN ...] --images docs/images --transcripts results/transcripts [--base RUN ...]

For each run it writes IMAGES/results-NAME.png and TRANSCRIPTS/NAME.md and prints rows for the table in
docs/results/smollm2.md. `--base` names, in the same order, untrained runs of the same recipe, whose evaluation goes
into the table too. The ten items are the first of each subset in the order of evaluation.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any

from agentgym_rl.common.intervals import wilson_interval
from agentgym_rl.environment import catalog
from agentgym_rl.run.log import horizon_stages, read_metrics, read_trajectories
from agentgym_rl.run.plots import learning_curve
from agentgym_rl.types import Trajectory

EPISODES = 10
TURNS_SHOWN = 8


def read_summary(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def rate(evaluation: dict[str, Any] | None) -> str:
    """Return a success rate with its interval: `91.4% (87–94)`."""
    if evaluation is None:
        return "–"
    count = evaluation["episodes"]
    low, high = wilson_interval(round(evaluation["success"] * count), count)
    return f"{evaluation['success']:.1%} ({low:.0%}–{high:.0%})".replace("%–", "–").replace("%)", ")")


def rows(run: Path, base: Path | None) -> list[str]:
    """Return a row per subset and one for all items: untrained, before RL, after RL."""
    summary = read_summary(run)
    untrained = None if base is None else read_summary(base)["before"]
    table_rows = []
    for name in [*summary["after"]["subsets"], "all"]:
        evaluations = [
            evaluation if evaluation is None or name == "all" else evaluation["subsets"][name]
            for evaluation in (untrained, summary["before"], summary["after"])
        ]
        cells = " | ".join(rate(evaluation) for evaluation in evaluations)
        episodes = evaluations[-1]["episodes"] if evaluations[-1] else 0
        table_rows.append(f"| {summary['name']} | {name} | {episodes} | {cells} |")
    return table_rows


def paired_episodes(run: Path) -> list[tuple[Trajectory, Trajectory]]:
    """Return (before, after) episodes of the first items of each subset, from the first and last evaluation."""
    files = sorted((run / "trajectories").glob("eval_*.jsonl"))
    evaluations = [{t.task.item: t for t in read_trajectories(path) if t.error is None} for path in files]
    first, last = evaluations[0], evaluations[-1]
    common = [item for item in first if item in last]
    if not common:
        raise SystemExit(f"{run}: needed two evaluations of the same items, got a first and a last that share none")
    env = catalog.load(first[common[0]].task.env)
    subsets = list(read_summary(run)["after"]["subsets"])
    share = -(-EPISODES // max(1, len(subsets)))
    # Keep the order of evaluation.
    chosen = [i for name in subsets for i in [i for i in common if name in env.subsets_of(i)][:share]] or common
    return [(first[item], last[item]) for item in chosen[:EPISODES]]


def transcript(trajectory: Trajectory) -> list[str]:
    """Return the episode as a quoted block. Late turns are counted, not shown."""
    lines, turns = [], 0
    for message in trajectory.messages:
        if message.role == "system":
            continue
        if message.role == "assistant":
            turns += 1
        if turns > TURNS_SHOWN:
            lines.append(f"... and {trajectory.num_turns - TURNS_SHOWN} more turns")
            break
        prefix = ">>> " if message.role == "assistant" else ""
        lines += [prefix + line for line in (message.content.strip() or "(nothing)").splitlines()]
    assert trajectory.stop is not None
    ending = "success" if trajectory.success else f"no success ({trajectory.stop.value})"
    return ["```text", *(line.replace("```", "'''") for line in lines), f"=== {ending}", "```"]


def page(run: Path) -> str:
    summary = read_summary(run)
    last = max((run / "trajectories").glob("eval_*.jsonl")).stem.removeprefix("eval_").lstrip("0")
    parts = [f"# {summary['name']}: ten held-out episodes before and after RL", ""]
    parts += [
        f"After: step {last}. `>>>` marks the replies of the model. The items are the first of "
        f"{' and of '.join(summary['after']['subsets'])} in the order of evaluation, without selection.",
        "",
    ]
    for number, (before, after) in enumerate(paired_episodes(run), 1):
        parts += [f"## {number}. {before.task.key}", "", "Before:", "", *transcript(before), ""]
        parts += ["After:", "", *transcript(after), ""]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--base", nargs="*", type=Path, default=[])
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--transcripts", type=Path, required=True)
    options = parser.parse_args()
    for folder in (options.images, options.transcripts):
        folder.mkdir(parents=True, exist_ok=True)
    lines = ["| run | levels or goals | episodes | untrained | before RL | after RL |", "|---|---|---|---|---|---|"]
    for run, base in zip_longest(options.runs, options.base[: len(options.runs)]):
        summary, metrics = read_summary(run), read_metrics(run / "metrics.jsonl")
        name = summary["name"]
        curve = options.images / f"results-{name}.png"
        learning_curve(metrics, summary["evaluations"], horizon_stages(metrics), curve, name)
        (options.transcripts / f"{name}.md").write_text(page(run))
        lines += rows(run, base)
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
