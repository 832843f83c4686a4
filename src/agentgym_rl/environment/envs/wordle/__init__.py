"""Wordle: find a five-letter word in six guesses, with word lists of its own."""

from agentgym_rl.environment.envs.wordle.env import Wordle

__all__ = ["Wordle"]
