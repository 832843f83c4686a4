"""BabyAI's items whose first layout minigrid cannot finish."""

from __future__ import annotations

from agentgym_rl.environment.envs.babyai import BabyAI
from agentgym_rl.environment.envs.babyai.levels import fresh_level


def test_a_room_without_a_place_for_the_agent_gives_way_to_the_next_layout() -> None:
    item = 69674
    assert item in BabyAI.splits["train"]
    assert BabyAI.subsets_of(item) == ("SynthS5R2",)
    level = fresh_level(item)  # minigrid's own search never ends here
    front = level.grid.get(*level.front_pos)
    assert front is None or front.type == "wall"
    env = BabyAI()
    env.reset(item)
    for _ in range(60):
        step = env.step(env.oracle())
        if step.done:
            break
    assert step.info["success"]
