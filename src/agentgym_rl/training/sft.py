"""Supervised fine-tuning on demonstrations."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from agentgym_rl.errors import ConfigError
from agentgym_rl.training.learner import Imitator
from agentgym_rl.training.settings import SFTSettings
from agentgym_rl.types import Sample


def train_sft(
    model: Any, samples: list[Sample], settings: SFTSettings, seed: int, log: Callable[[int, dict[str, float]], None]
) -> None:
    """`epochs` passes in a seeded order; the last batch of a pass may be smaller."""
    samples = [s for s in samples if any(s.loss_mask)]
    if not samples:
        raise ConfigError("no demonstration to imitate: every one is empty or has no assistant turn")
    if settings.loss_on == "everything":
        samples = [replace(s, loss_mask=[False] + [True] * (len(s.token_ids) - 1)) for s in samples]
    starts = range(0, len(samples), settings.batch_size)
    imitator = Imitator(model, settings.optimizer, settings.epochs * len(starts))
    for epoch in range(settings.epochs):
        order = list(samples)
        random.Random(f"{seed}/{epoch}").shuffle(order)
        for start in starts:
            update = imitator.updates
            log(update, imitator.imitate(order[start : start + settings.batch_size]))
    model.eval()
