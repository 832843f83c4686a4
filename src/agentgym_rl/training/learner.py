"""Updates: one optimizer step from micro-batches and a loss. Gradients accumulate over micro-batches.

Shapes: A action tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from agentgym_rl.errors import ConfigError, DeviceFull
from agentgym_rl.training.batch import token_weights
from agentgym_rl.training.device.host_activations import HostActivations
from agentgym_rl.training.device.optimizer import (
    MasterAdamW,
    clip,
    collecting,
    gradients,
    load_state,
    make_optimizer,
    step,
)
from agentgym_rl.training.device.packed import can_share_prefixes, capture_passes, why_not_packed
from agentgym_rl.training.microbatch import MicroBatch, micro_batches
from agentgym_rl.training.model import action_logprobs, check_plain_head
from agentgym_rl.training.ranks import SINGLE_PROCESS, Ranks
from agentgym_rl.training.settings import OptimizerSettings
from agentgym_rl.types import Sample

MicroLoss = Callable[[MicroBatch], tuple[Tensor, dict[str, Tensor]]]
"""A micro-batch -> (its share of the batch's loss, weighted metrics that add up over micro-batches)."""


class Updater:
    """A model with its optimizer and learning-rate schedule. Subclasses add the loss."""

    def __init__(
        self, model: Any, settings: OptimizerSettings, total_updates: int, ranks: Ranks = SINGLE_PROCESS
    ) -> None:
        self.model, self.settings, self.total_updates, self.ranks = model, settings, total_updates, ranks
        self.updates = 0
        self.before_step: Callable[[], None] = _nothing
        """Called before the weights change."""
        ranks.prepare_model(model)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._names, self._parameters = [name for name, _ in trained], [p for _, p in trained]
        self._optimizer = make_optimizer(self._parameters, settings)
        self._saved_activations = HostActivations if settings.offload_activations else nullcontext
        if settings.checkpoint_activations:
            decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.decoder
            decoder.gradient_checkpointing_enable({"use_reentrant": False})
            # A hook on the embedding that only the reentrant kind needs. Engines do not capture models with hooks.
            decoder.disable_input_require_grads()
        if settings.capture_passes and hasattr(model, "get_decoder"):
            capture_passes(model.get_decoder())

    @property
    def device(self) -> torch.device:
        return self.ranks.device(self.model)

    def learning_rate(self, update: int) -> float:
        """Return the learning rate of an update, counted from 0: a linear warm-up, then constant or decaying."""
        s = self.settings
        if update < s.warmup_steps:
            return s.lr * (update + 1) / s.warmup_steps
        progress = min(1.0, (update - s.warmup_steps) / max(1, self.total_updates - 1 - s.warmup_steps))
        factor = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
        return s.lr * (s.min_lr_ratio + (1.0 - s.min_lr_ratio) * factor[s.decay])

    def micro_batches(self, samples: list[Sample], weights: list[float]) -> list[MicroBatch]:
        """Return the same number of micro-batches on every rank, padded with samples without actions.

        The padding is also appended to `samples`.
        """
        batches = micro_batches(
            samples, weights, self.settings.micro_batch_tokens, self.device, share_prefixes=self._shares_prefixes()
        )
        for micro in idle_passes(len(batches), self.ranks, self.device):
            micro.indices = [len(samples)]
            samples.append(_idle_sample())
            batches.append(micro)
        return batches

    def _shares_prefixes(self) -> bool:
        """Return whether passes compute shared prefixes once (docs/how-it-works/learner.md)."""
        decoder = self.model.get_decoder() if hasattr(self.model, "get_decoder") else self.model.decoder
        if why_not_packed(decoder) is not None or self.settings.capture_passes:
            return False
        return can_share_prefixes(decoder, self.device)

    def update(self, batches: list[MicroBatch], loss: MicroLoss) -> dict[str, float]:
        """Sum the gradients of all micro-batches, clip them, and make one optimizer step."""
        self.model.train()
        totals: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=self.device))
        with self.advising(), collecting(self._optimizer, several=len(batches) > 1) as after_pass:
            for number, batch in enumerate(batches, start=1):
                self.ranks.before_pass(self.model, last=number == len(batches))
                with self._saved_activations():
                    value, metrics = loss(batch)
                self.ranks.scale_loss(value).backward()
                after_pass()
                for name, tensor in {"loss": value, **metrics}.items():
                    totals[name] += tensor.detach()
        self.ranks.reduce_gradients(gradients(self._optimizer, self._parameters))
        norm = self.ranks.full_tensor(clip(self._optimizer, self._parameters, self.settings.max_grad_norm or math.inf))
        lr = self.learning_rate(self.updates)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        skipped = 0.0 if bool(norm.isfinite()) else 1.0
        if not skipped:
            self.before_step()
            step(self._optimizer, self.settings)
        self.ranks.require_equal(zip(self._names, self._parameters, strict=True))
        self._optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        summed = self.ranks.sum_over_ranks({name: float(t) for name, t in totals.items()})
        return summed | {"grad/norm": float(norm), "lr": lr, "skipped": skipped}

    @contextmanager
    def advising(self) -> Iterator[None]:
        """Say what to change if passes do not fit the device."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            reason = str(error).split(". GPU")[0]
            raise DeviceFull(
                f"a pass of up to {self.settings.micro_batch_tokens} tokens, or of one longer sample, does not fit the "
                f"device ({reason}). Lower the optimizer's micro_batch_tokens or agent.max_context, or set its "
                "checkpoint_activations, offload_activations or offload_moments, and go on with --resume. "
                "agentgym-rl doctor counts what a recipe needs"
            ) from error

    def state(self) -> dict[str, Any]:
        return {"optimizer": self._optimizer.state_dict(), "updates": self.updates}

    def restore(self, state: dict[str, Any]) -> None:
        saved, masters = state["optimizer"], state.get("masters")
        if isinstance(self._optimizer, MasterAdamW) and "low" not in saved and masters:
            saved = self._optimizer.from_masters(saved, [masters[name] for name in self._names])
        if isinstance(self._optimizer, MasterAdamW) != ("low" in saved):
            raise ConfigError(
                "the checkpoint has another kind of optimizer than this run, because of another model.dtype: "
                "resume with the one that it was written with"
            )
        load_state(self._optimizer, saved, self.settings)
        self.updates = state["updates"]


class Imitator(Updater):
    """Supervised fine-tuning: mean negative log-likelihood over the action tokens of a batch."""

    def __init__(
        self, model: Any, settings: OptimizerSettings, total_updates: int, ranks: Ranks = SINGLE_PROCESS
    ) -> None:
        check_plain_head(model, ranks)
        super().__init__(model, settings, total_updates, ranks)

    def imitate(self, samples: list[Sample]) -> dict[str, float]:
        weights = token_weights(samples, "token")
        local = self.ranks.local_indices([len(s.token_ids) for s in samples])
        batches = self.micro_batches([samples[i] for i in local], [weights[i] for i in local])
        return self.update(batches, self._loss)

    def _loss(self, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs_A, entropy_A = action_logprobs(self.model, micro, temperature=1.0)
        return -(micro.weights_A * logprobs_A).sum(), {"entropy/mean": (micro.weights_A * entropy_A).sum()}


def idle_passes(count: int, ranks: Ranks, device: torch.device | str) -> list[MicroBatch]:
    """Return empty micro-batches, so that a rank with `count` makes as many passes as the rank with the most."""
    return [micro_batches([_idle_sample()], [0.0], 2, device)[0] for _ in range(ranks.max_over_ranks(count) - count)]


def _nothing() -> None:
    pass


def _idle_sample() -> Sample:
    return Sample(token_ids=[0, 0], loss_mask=[False, False])


def freeze(model: Any) -> Any:
    """Turn off the model's gradients, set evaluation mode and return it."""
    return model.requires_grad_(False).eval()
