"""Wordle: find a five-letter word in six guesses, with its own word lists."""

from agentgym_rl.environment.envs.wordle.env import Wordle

__all__ = ["Wordle"]
