"""Maze: find the way to a goal, seeing only the walls around you."""

from agentgym_rl.environment.envs.maze.env import Maze

__all__ = ["Maze"]
