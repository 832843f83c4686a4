"""The learner: samples in, one or more optimizer updates out. Gradients accumulate over micro-batches.

Shapes: A action tokens of a micro-batch.
"""

from __future__ import annotations

import copy
import math
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from agentgym_rl.training.batch import Batch, MicroBatch, micro_batches, token_weights
from agentgym_rl.training.losses import KL_ESTIMATORS, clipped_policy_loss, importance_weights
from agentgym_rl.training.model import action_logprobs, check_plain_head
from agentgym_rl.training.settings import OptimizerSettings, RLSettings
from agentgym_rl.types import Sample

MicroLoss = Callable[[MicroBatch], tuple[Tensor, dict[str, Tensor]]]
"""A micro-batch -> (its share of the batch's loss, weighted metrics that add up over micro-batches)."""


class Updater:
    """A model, its optimizer and its learning-rate schedule: everything an update needs but the loss."""

    def __init__(self, model: Any, settings: OptimizerSettings, total_updates: int) -> None:
        check_plain_head(model)
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


class RLLearner(Updater):
    """Policy gradient on token-exact samples."""

    def __init__(self, model: Any, settings: RLSettings, temperature: float, reference: Any | None = None) -> None:
        super().__init__(model, settings.optimizer, settings.steps * settings.epochs * settings.minibatches)
        self._rl, self._temperature = settings, temperature
        self._reference = reference
        if settings.kl_coef != 0.0 and reference is None:
            self._reference = freeze(copy.deepcopy(model))

    def learn(self, batch: Batch, seed: int) -> dict[str, float]:
        """epochs x minibatches updates over one step's samples. `seed` orders the minibatches."""
        settings = self._rl
        parts = self._minibatches(batch, seed)
        # The first update is made by the policy that the samples are from: its old log-probabilities are its own.
        needs_old = [settings.epochs > 1 or i > 0 for i in range(len(parts))]
        old = [
            [self._evaluate(self.model, micro) if needed else None for micro in part]
            for part, needed in zip(parts, needs_old, strict=True)
        ]
        reference = [[self._evaluate(self._reference, micro) for micro in part] for part in parts]
        results = []
        for _ in range(settings.epochs):
            for part, old_part, reference_part in zip(parts, old, reference, strict=True):
                extra = {id(m): (o, r) for m, o, r in zip(part, old_part, reference_part, strict=True)}
                results.append(self.update(part, lambda m, extra=extra: self._loss(m, *extra[id(m)])))  # type: ignore[misc]
        return _average(results)

    def _minibatches(self, batch: Batch, seed: int) -> list[list[MicroBatch]]:
        """Equal shares of the samples; weights are scaled so that each share is normalised like a whole batch."""
        order = list(range(len(batch.samples)))
        random.Random(seed).shuffle(order)
        count = min(self._rl.minibatches, len(order))
        shares = [order[i::count] for i in range(count)]
        limit, device = self.settings.micro_batch_tokens, self.model.device
        return [
            micro_batches([batch.samples[i] for i in share], [batch.weights[i] * count for i in share], limit, device)
            for share in shares
        ]

    @torch.no_grad()
    def _evaluate(self, model: Any, micro: MicroBatch) -> Tensor | None:
        if model is None:
            return None
        model.eval()
        return action_logprobs(model, micro, self._temperature)[0]

    def _loss(self, micro: MicroBatch, old_A: Tensor | None, reference_A: Tensor | None) -> tuple[Tensor, dict]:
        settings, weights_A = self._rl, micro.weights_A
        logprobs_A, entropy_A = action_logprobs(self.model, micro, self._temperature)
        old_A = logprobs_A.detach() if old_A is None else old_A
        loss_A, clipped_A = clipped_policy_loss(
            logprobs_A, old_A, micro.advantages_A, settings.clip_low, settings.clip_high
        )
        gap_A = (old_A - micro.logprobs_A).detach()
        if settings.importance == "truncated":
            loss_A = loss_A * importance_weights(old_A, micro.logprobs_A, settings.importance_cap)
        covered = weights_A.sum()
        metrics = {
            "policy_loss": (weights_A * loss_A).sum(),
            "entropy/mean": (weights_A * entropy_A).sum(),
            "clip/fraction": (weights_A * clipped_A).sum(),
            "mismatch/abs": (weights_A * gap_A.abs()).sum(),
            "mismatch/kl": (weights_A * (gap_A.exp() - 1.0 - gap_A)).sum(),
            "covered": covered,
        }
        value = metrics["policy_loss"]
        if reference_A is not None:
            kl_A = KL_ESTIMATORS[settings.kl_estimator](logprobs_A, reference_A)
            metrics["kl/reference"] = (weights_A * kl_A).sum()
            value = value + settings.kl_coef * metrics["kl/reference"]
        if settings.entropy_coef != 0.0:
            value = value - settings.entropy_coef * metrics["entropy/mean"]
        return value, metrics


class Imitator(Updater):
    """Supervised fine-tuning: mean negative log-likelihood over the action tokens of a batch."""

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


def _average(results: list[dict[str, float]]) -> dict[str, float]:
    """Mean over updates. Sums weighted by token weights become means over the tokens that were run (`covered`)."""
    means = {name: sum(r[name] for r in results) / len(results) for name in results[0]}
    covered = means.pop("covered")
    for name in ("entropy/mean", "clip/fraction", "mismatch/abs", "mismatch/kl", "kl/reference"):
        if name in means:
            means[name] /= covered
    return means
