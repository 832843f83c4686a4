"""AgentEvol: explore, keep successes, retrain from the base model, repeat. Xi et al. 2024 (arXiv 2406.04151).

A round plays training items with the current model, keeps the episodes with enough reward, adds the expert data, and
fine-tunes the *base* model on all of it. Mistakes of one round are not carried into the next. run/offline.py runs the
rounds; this module selects the episodes.
"""

from __future__ import annotations

import random

from agentgym_rl.training.settings import AgentEvolSettings
from agentgym_rl.types import Group, Task, Trajectory


def select_episodes(groups: list[Group], settings: AgentEvolSettings, seed: int | str) -> list[Trajectory]:
    """Return episodes with a reward of at least `min_reward`, at most `keep_per_item` of each item.

    The choice depends on the episodes and the seed, not on their order.
    """
    by_task: dict[Task, list[Trajectory]] = {}
    for group in groups:
        good = [t for t in group.usable if t.num_turns and t.reward >= settings.min_reward - 1e-9]
        by_task.setdefault(group.task, []).extend(good)
    kept = []
    for task in sorted(by_task, key=lambda task: (task.env, task.item)):
        episodes = sorted(by_task[task], key=lambda t: (t.id, [m.content for m in t.messages]))
        count = min(settings.keep_per_item or len(episodes), len(episodes))
        kept += random.Random(f"{seed}/{task.key}").sample(episodes, count)
    return kept
