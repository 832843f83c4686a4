"""The command `rescore`: judge the stored episodes of a run again and show how their ranks change."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import orjson
from rich.table import Table

from agentgym_rl.commands.report import PLAIN_WIDTH
from agentgym_rl.common.files import write_atomically
from agentgym_rl.common.screen import Screen
from agentgym_rl.config import load_config
from agentgym_rl.errors import ConfigError
from agentgym_rl.rewards.rank_changes import Rescored, compare, summary
from agentgym_rl.run.judging import make_rewards
from agentgym_rl.run.log import read_trajectories
from agentgym_rl.run.preflight import require_rewards
from agentgym_rl.types import Group, Task, Trajectory

CACHE_NAME = "rescore_judge.jsonl"
"""Answers of the judge to this command. It does not read those of training: the judge is asked again."""
SHOWN = 10
"""Episodes with the largest change that are printed."""


async def rescore(
    run: Path,
    overrides: list[str],
    *,
    recipe: Path | None,
    step: int | None,
    limit: int | None,
    out: Path | None,
    fresh: bool,
    as_json: bool,
) -> dict[str, Any]:
    """Score the training episodes of `run` by the rewards of its config or of `recipe`; return the summary.

    The run's own files stay as they are: the new verdicts go to `out`.
    """
    if not (run / "config.toml").is_file():
        raise ConfigError(f"rescore needs a run directory with a config.toml in it, {run} is none")
    if out is not None and not out.parent.is_dir():  # before the judge is paid
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    config = load_config(recipe or run / "config.toml", overrides)
    if not config.rewards:
        raise ConfigError(
            f"{recipe or run / 'config.toml'} has no [[rewards]]: name a recipe that has some with --recipe"
        )
    config.require_allowed_variables()
    require_rewards(config.rewards, config.judge)
    groups = stored_groups(run, step)[:limit]
    cache = run / CACHE_NAME
    if fresh:
        cache.unlink(missing_ok=True)
    rewards = make_rewards(config.rewards, config.judge, cache)
    assert rewards is not None
    before = {id(t): t.training_reward for _, group in groups for t in group.trajectories}
    answered = rewards.judge.calls if rewards.judge is not None else 0
    try:
        await rewards.score([group for _, group in groups])
    finally:
        await rewards.close()
    failed = [t.judge_error for _, group in groups for t in group.trajectories if t.judge_error]
    compared = [compare(number, group.trainable, [before[id(t)] for t in group.trainable]) for number, group in groups]
    result = summary([group for group in compared if group]) | {"failed": len(failed)}
    if rewards.judge is not None:
        result["judge_calls"] = rewards.judge.calls - answered
    episodes = [episode for group in compared for episode in group]
    target = out or run / "rescored.jsonl"
    write_atomically(target, b"".join(orjson.dumps(episode.row()) + b"\n" for episode in episodes))
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        _print(result, episodes, failed, target)
    return result


def stored_groups(run: Path, step: int | None) -> list[tuple[int, Group]]:
    """Return (step, group) of the stored training episodes, of one step or of all, without those that failed and those
    of roles that are not trained.

    An episode whose judge failed in training has no earlier reward and is left out. A step may have several groups of
    one task: those of the roles of a team, and those of an environment with few items.
    """
    pattern = "step_*.jsonl" if step is None else f"step_{step:06d}.jsonl"
    groups: list[tuple[int, Group]] = []
    for path in sorted((run / "trajectories").glob(pattern)):
        played: dict[tuple[Task, str, str], list[Trajectory]] = defaultdict(list)
        for trajectory in read_trajectories(path):
            # An id ends in the number of the episode in its group, and that of the attempt.
            played[trajectory.task, trajectory.role, trajectory.id.rsplit("-", 2)[0]].append(trajectory)
        number = int(path.stem.rpartition("_")[2])
        stored = [Group(task, trajectories) for (task, _, _), trajectories in played.items()]
        kept = [Group(group.task, [t for t in group.trainable if t.num_turns]) for group in stored]
        groups += [(number, group) for group in kept if group.trajectories and group.learns]
    if not groups:
        raise ConfigError(f"{run} has no training episodes{'' if step is None else f' of step {step}'} to score")
    return groups


def _print(result: dict[str, Any], episodes: list[Rescored], failed: list[str], target: Path) -> None:
    screen = Screen(highlight=False)
    if not screen.is_terminal:
        screen.width = PLAIN_WIDTH
    screen.print(f"{result['episodes']} episodes of {result['groups']} groups scored again, {result['failed']} not")
    if failed:
        screen.print(f"the first that could not be scored: {failed[0]}")
    if "judge_calls" in result:
        screen.print(f"the judge was asked {result['judge_calls']} times; further answers came from {CACHE_NAME}")
    if result["pairs"]:
        screen.print(
            f"{result['pairs']} pairs had an order: {result['reversed_pairs']:.1%} are reversed now, "
            f"{result['tied_pairs']:.1%} are equal"
        )
    if result["best_changed"] is not None:
        screen.print(f"another episode is the best in {result['best_changed']:.1%} of the groups that had one")
    moved = sorted(episodes, key=lambda e: -abs(e.rank_after - e.rank_before))[:SHOWN]
    if moved and moved[0].rank_after != moved[0].rank_before:
        table = Table("step", "episode", "rank", "reward", title="Largest changes", title_justify="left")
        for e in moved:
            ranks = f"{e.rank_before:g} → {e.rank_after:g} of {e.group_size}"
            table.add_row(str(e.step), e.trajectory.id, ranks, f"{e.before:.3f} → {e.after:.3f}")
        screen.print(table)
    screen.print(f"wrote {target}")
