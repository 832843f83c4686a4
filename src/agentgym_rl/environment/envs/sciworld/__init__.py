"""SciWorld: elementary science experiments in a simulated house, told in text."""

from agentgym_rl.environment.envs.sciworld.env import SciWorld

__all__ = ["SciWorld"]
