"""MiniWoB++: small tasks on single web pages, played in a real browser."""

from agentgym_rl.environment.envs.miniwob.env import MiniWob

__all__ = ["MiniWob"]
