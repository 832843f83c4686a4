"""Synthetic episodes of the part rollout. Standard library only, because vLLM's process imports it."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """Number and lengths of the episodes."""

    episodes: int
    prompt: int
    turns: int
    new: int
    observation: int

    @property
    def new_tokens(self) -> int:
        return self.episodes * self.turns * self.new

    @property
    def context(self) -> int:
        return self.prompt + self.turns * (self.new + self.observation)

    def prompts(self, vocabulary: int) -> list[list[int]]:
        return [_ids(index, self.prompt, vocabulary) for index in range(self.episodes)]

    def observations(self, vocabulary: int) -> list[list[list[int]]]:
        """Return the token ids of the observations by turn and episode."""
        return [
            [_ids(1000 * (turn + 1) + index, self.observation, vocabulary) for index in range(self.episodes)]
            for turn in range(self.turns)
        ]


def _ids(seed: int, count: int, vocabulary: int) -> list[int]:
    return random.Random(seed).choices(range(vocabulary), k=count)


def load_of(episodes: int, *, tiny: bool) -> Load:
    """Return the benchmark's load, or a tiny one for a smoke test."""
    return Load(episodes, 16, 2, 4, 4) if tiny else Load(episodes, 256, 8, 64, 64)
