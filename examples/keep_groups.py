"""Which groups a step learns from with `rl.keep_groups`: those whose rewards differ most (RAGEN's StarPO-S).

python keep_groups.py
"""

from __future__ import annotations

import asyncio

from agentgym_rl.agent.collect import Collector
from agentgym_rl.agent.policy import RandomPolicy
from agentgym_rl.environment.envs.keydoor import KeyDoor
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.training.advantages import Episode, return_spread
from agentgym_rl.training.batch import widest_groups
from agentgym_rl.training.settings import RLSettings
from agentgym_rl.types import Limits, Task


async def main() -> None:
    """Play eight groups of random play and print the rewards of each; the kept ones are marked."""
    pool = LocalPool({"keydoor": KeyDoor})
    collect = Collector(pool, RandomPolicy, 8, 8)
    limits = Limits(max_turns=6, max_new_tokens=8, max_context=512)
    groups = await collect([Task("keydoor", item) for item in range(8)], limits, seed=0)
    settings = RLSettings(keep_groups=0.25)
    episodes = [[Episode(i, t.rewards, []) for t in group.trajectories] for i, group in enumerate(groups)]
    kept = widest_groups(episodes, settings)
    for i, group in enumerate(episodes):
        rewards = " ".join(f"{episode.total:g}" for episode in group)
        print(f"{'kept' if i in kept else '    '} spread {return_spread(group, settings):.2f}  rewards {rewards}")
    await pool.close()


if __name__ == "__main__":
    asyncio.run(main())
