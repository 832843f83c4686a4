"""WebArena: tasks in a real browser, on embedded sites or on the published benchmark's own."""

from agentgym_rl.environment.envs.webarena.env import WebArena

__all__ = ["WebArena"]
