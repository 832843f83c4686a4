"""A household of this project with ALFWorld's tasks and action words."""

from agentgym_rl.environment.envs.alfworld.env import AlfWorld

__all__ = ["AlfWorld"]
