"""SciWorld: elementary science experiments in a simulated house, as text."""

from agentgym_rl.environment.envs.sciworld.env import SciWorld

__all__ = ["SciWorld"]
