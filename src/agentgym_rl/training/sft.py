"""Supervised fine-tuning on demonstrations."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from agentgym_rl.errors import ConfigError
from agentgym_rl.training.learner import Imitator
from agentgym_rl.training.ranks import SINGLE_PROCESS, Ranks
from agentgym_rl.training.settings import SFTSettings
from agentgym_rl.types import Sample


class SFT(Imitator):
    """`epochs` passes over the samples in a seeded order; the last batch of a pass may be smaller.

    The batch of the n-th update depends on n and the seed only. To resume, only the number of updates is needed.
    """

    def __init__(
        self, model: Any, samples: list[Sample], settings: SFTSettings, seed: int | str, ranks: Ranks = SINGLE_PROCESS
    ) -> None:
        samples = [s for s in samples if any(s.loss_mask)]
        if not samples:
            raise ConfigError("SFT needs at least one demonstration with an assistant turn, got none")
        if settings.loss_on == "everything":
            samples = [replace(s, loss_mask=_everything(s)) for s in samples]
        self._samples, self._sft, self._seed = samples, settings, seed
        self._updates_per_epoch = -(-len(samples) // settings.batch_size)
        self.total = settings.epochs * self._updates_per_epoch
        """Total number of updates."""
        super().__init__(model, settings.optimizer, self.total, ranks)

    def step(self) -> dict[str, float]:
        """Make the next update."""
        epoch, place = divmod(self.updates, self._updates_per_epoch)
        order = list(self._samples)
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        size = self._sft.batch_size
        batch = order[place * size : (place + 1) * size]
        metrics = self.imitate(batch)
        tokens = float(sum(map(sum, (s.loss_mask for s in batch))))
        return metrics | {"epoch": epoch + 1.0, "samples": float(len(batch)), "tokens/trained": tokens}


def _everything(sample: Sample) -> list[bool]:
    """Return a mask of all tokens but the first, which has no prediction, and replies that are not imitated."""
    mask = [False] + [True] * (len(sample.token_ids) - 1)
    for start, length in sample.left_out:
        mask[start : start + length] = [False] * length
    return mask
