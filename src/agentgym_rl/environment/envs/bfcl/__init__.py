"""The multi-turn tasks of the Berkeley Function-Calling Leaderboard, with the APIs and checkers of its own package."""

from agentgym_rl.environment.envs.bfcl.env import load_bfcl

__all__ = ["load_bfcl"]
