"""Updates: micro-batches and a loss in, one optimizer step out. Gradients accumulate over micro-batches.

Shapes: A action tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from agentgym_rl.training.batch import token_weights
from agentgym_rl.training.microbatch import MicroBatch, micro_batches
from agentgym_rl.training.model import action_logprobs, check_plain_head
from agentgym_rl.training.settings import OptimizerSettings
from agentgym_rl.types import Sample

MicroLoss = Callable[[MicroBatch], tuple[Tensor, dict[str, Tensor]]]
"""A micro-batch -> (its share of the batch's loss, weighted metrics that add up over micro-batches)."""


class Updater:
    """A model, its optimizer and its learning-rate schedule: everything an update needs but the loss."""

    def __init__(self, model: Any, settings: OptimizerSettings, total_updates: int) -> None:
        self.model, self.settings, self.total_updates = model, settings, total_updates
        self.updates = 0
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=model.device.type in ("cpu", "cuda"),
        )

    def learning_rate(self, update: int) -> float:
        """Of the 0-based update: a linear warm-up, then constant or decaying."""
        s = self.settings
        if update < s.warmup_steps:
            return s.lr * (update + 1) / s.warmup_steps
        progress = min(1.0, (update - s.warmup_steps) / max(1, self.total_updates - 1 - s.warmup_steps))
        left = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
        return s.lr * (s.min_lr_ratio + (1.0 - s.min_lr_ratio) * left[s.decay])

    def update(self, batches: list[MicroBatch], loss: MicroLoss) -> dict[str, float]:
        """Add up the gradients of all micro-batches, clip, and step once."""
        self.model.train()
        totals: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=self.model.device))
        for batch in batches:
            value, metrics = loss(batch)
            value.backward()
            for name, tensor in {"loss": value, **metrics}.items():
                totals[name] += tensor.detach()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.settings.max_grad_norm or math.inf)
        lr = self.learning_rate(self.updates)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if bool(norm.isfinite()):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        skipped = 0.0 if bool(norm.isfinite()) else 1.0
        return {name: float(t) for name, t in totals.items()} | {"grad/norm": float(norm), "lr": lr, "skipped": skipped}

    def state(self) -> dict[str, Any]:
        return {"optimizer": self._optimizer.state_dict(), "updates": self.updates}

    def restore(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]


class Imitator(Updater):
    """Supervised fine-tuning: mean negative log-likelihood over the action tokens of a batch."""

    def __init__(self, model: Any, settings: OptimizerSettings, total_updates: int) -> None:
        check_plain_head(model)
        super().__init__(model, settings, total_updates)

    def imitate(self, samples: list[Sample]) -> dict[str, float]:
        weights = token_weights(samples, "token")
        batches = micro_batches(samples, weights, self.settings.micro_batch_tokens, self.model.device)
        return self.update(batches, self._loss)

    def _loss(self, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs_A, entropy_A = action_logprobs(self.model, micro, temperature=1.0)
        return -(micro.weights_A * logprobs_A).sum(), {"entropy/mean": (micro.weights_A * entropy_A).sum()}


def freeze(model: Any) -> Any:
    """The model with no gradients, in evaluation mode."""
    return model.requires_grad_(False).eval()
