"""What is sampled in the part rollout: synthetic episodes. Standard library only, because vLLM's process reads it."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """What every episode does."""

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
        """By turn and episode."""
        return [
            [_ids(1000 * (turn + 1) + index, self.observation, vocabulary) for index in range(self.episodes)]
            for turn in range(self.turns)
        ]


def _ids(seed: int, count: int, vocabulary: int) -> list[int]:
    return random.Random(seed).choices(range(vocabulary), k=count)


def load_of(episodes: int, *, tiny: bool) -> Load:
    """The benchmark's load, or one for trying it out."""
    return Load(episodes, 16, 2, 4, 4) if tiny else Load(episodes, 256, 8, 64, 64)
