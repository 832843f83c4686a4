"""BabyAI: missions in a grid of rooms, on the `minigrid` package."""

from agentgym_rl.environment.envs.babyai.env import BabyAI

__all__ = ["BabyAI"]
