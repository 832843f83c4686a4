"""The learner of online RL: it scores samples and updates the policy on them.

Shapes: A action tokens of a micro-batch.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from agentgym_rl.training.batch import Batch, sample_parts
from agentgym_rl.training.critic import Critic, ValueModel
from agentgym_rl.training.learner import Updater, freeze
from agentgym_rl.training.losses import CORRECTIONS, KL_ESTIMATORS, POLICY_LOSSES
from agentgym_rl.training.metrics import turn_name
from agentgym_rl.training.microbatch import MicroBatch
from agentgym_rl.training.model import ModelContext, action_logprobs, check_plain_head
from agentgym_rl.training.ranks import SINGLE_PROCESS, Ranks
from agentgym_rl.training.settings import RLSettings
from agentgym_rl.types import Sample

WEIGHTED = (
    *("entropy/mean", "clip/fraction", "mismatch/abs", "mismatch/kl", "kl/reference", "importance/kept"),
    "value/error",
)
"""Metrics that are sums weighted by token weights."""


class RLLearner(Updater):
    """Policy gradient on token-exact samples."""

    def __init__(
        self,
        model: Any,
        settings: RLSettings,
        temperature: float,
        reference: ModelContext | None = None,
        critic: ValueModel | None = None,
        ranks: Ranks = SINGLE_PROCESS,
        teacher: ModelContext | None = None,
    ) -> None:
        check_plain_head(model, ranks)
        updates = settings.updates_per_step
        waiting = settings.critic.warmup_steps if settings.algorithm == "ppo" else 0
        # Copy the model before it is sharded over ranks. The caller shards what it passes in.
        if settings.kl_coef == 0.0:
            reference = None
        elif reference is None:
            frozen = freeze(copy.deepcopy(model))
            ranks.prepare_model(frozen)
            reference = lambda: nullcontext(frozen)  # noqa: E731
        if settings.algorithm == "ppo" and critic is None:
            critic = ValueModel(copy.deepcopy(model.get_decoder()), model.config.hidden_size)
        super().__init__(model, settings.optimizer, max(1, settings.steps - waiting) * updates, ranks)
        self._rl, self._temperature = settings, temperature
        self.kl_coef = settings.kl_coef
        """Current weight of the KL term; `kl_target` changes it."""
        self.steps = 0
        self._reference, self._teacher = reference, teacher
        self.critic: Critic | None = None
        if settings.algorithm == "ppo":
            assert critic is not None
            self.critic = Critic(critic, settings.critic, settings.steps * updates, ranks)

    def score(self, samples: list[Sample], *, policy_only: bool = False) -> None:
        """Add what the estimator or the loss needs from the models before an update, to samples that lack it.

        That is: this policy's log-probabilities, if it is updated more than once or KL is in the reward; the
        reference's and the teacher's, if they are used; the critic's values, if there is one. `policy_only` adds only
        this policy's.
        """
        kl_in_reward = self._reference is not None and self._rl.kl_in == "reward"
        old = policy_only or self._rl.updates_per_step > 1 or kl_in_reward
        pending = [
            s
            for s in samples
            if not (s.old_logprobs if old else s.reference_logprobs or s.teacher_logprobs or s.values)
        ]
        if not (old or self._reference or self._teacher or self.critic) or not self.ranks.max_over_ranks(len(pending)):
            return
        with self.advising():
            for micro in self.micro_batches(pending, [0.0] * len(pending)):
                self._score_pass(micro, [pending[i] for i in micro.indices], old, policy_only)

    def _score_pass(self, micro: MicroBatch, rows: list[Sample], old: bool, policy_only: bool) -> None:
        if old:
            self.model.eval()
            with torch.no_grad():
                logprobs_A, entropy_A = action_logprobs(self.model, micro, self._temperature)
            _put(rows, "old_logprobs", micro.by_row(logprobs_A))
            _put(rows, "entropies", micro.by_row(entropy_A))
        if policy_only:
            return
        for name, frozen in (("reference_logprobs", self._reference), ("teacher_logprobs", self._teacher)):
            if frozen is not None:
                with frozen() as other, torch.no_grad():
                    logprobs_A, _ = action_logprobs(other, micro, self._temperature)
                _put(rows, name, micro.by_row(logprobs_A))
        if self.critic is not None:
            values_A, last_B = self.critic.values(micro)
            _put(rows, "values", micro.by_row(values_A))
            for sample, value in zip(rows, last_B.tolist(), strict=True):
                sample.last_value = value

    def learn(self, batch: Batch, seed: int) -> dict[str, float]:
        """Make epochs x minibatches updates on one step's samples. `seed` orders the minibatches."""
        self.score(batch.samples)
        policy_frozen = self.critic is not None and self.steps < self._rl.critic.warmup_steps
        parts = self._minibatches(batch, seed)
        results = []
        for _ in range(self._rl.epochs):
            for samples, policy_part, critic_part in parts:
                if not policy_frozen:
                    results.append(self.update(policy_part, lambda m, s=samples: self._loss(m, s)))  # type: ignore[misc]
                if self.critic is not None:
                    results.append(self.critic.learn(critic_part))
        self.steps += 1
        metrics = _average(results) | by_turn(batch.samples)
        if self._reference is not None and "kl/reference" in metrics:
            metrics["kl/coef"] = self.kl_coef
            self._adapt_kl_coef(metrics["kl/reference"])
        return metrics

    def state(self) -> dict[str, Any]:
        critic = None if self.critic is None else self.critic.state()
        return {**super().state(), "kl_coef": self.kl_coef, "steps": self.steps, "critic": critic}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.kl_coef, self.steps = state["kl_coef"], state["steps"]
        if self.critic is not None:
            self.critic.restore(state["critic"])

    def _minibatches(self, batch: Batch, seed: int) -> list[tuple[list[Sample], list[MicroBatch], list[MicroBatch]]]:
        """Return equal shares of the batch as (samples, micro-batches of the policy, micro-batches of the critic).

        Weights are scaled so that each share is normalised like a whole batch.
        """
        shares = batch.parts or sample_parts(batch, self._rl.minibatches, seed)
        parts = []
        for share in shares:
            samples = [batch.samples[i] for i in share]
            weights = [batch.weights[i] * len(shares) for i in share]
            critic_part = [] if self.critic is None else self.critic.micro_batches(list(samples), weights)
            parts.append((samples, self.micro_batches(samples, weights), critic_part))
        return parts

    def _loss(self, micro: MicroBatch, samples: list[Sample]) -> tuple[Tensor, dict[str, Tensor]]:
        settings, weights_A = self._rl, micro.weights_A
        logprobs_A, entropy_A = action_logprobs(self.model, micro, self._temperature)
        if len(micro.old_logprobs_A):
            old_A = micro.old_logprobs_A
        else:
            # With a single update the policy is still the old one, so this pass has its log-probabilities.
            old_A = logprobs_A.detach()
            rows = [samples[i] for i in micro.indices]
            _put(rows, "old_logprobs", micro.by_row(logprobs_A))
            _put(rows, "entropies", micro.by_row(entropy_A))
        loss_A, clipped_A = POLICY_LOSSES[settings.loss](
            logprobs_A, old_A, micro.advantages_A, micro.rows_A, settings.clip_low, settings.clip_high
        )
        gap_A = (old_A - micro.logprobs_A).detach()
        kept_A = torch.ones_like(gap_A)
        if settings.importance != "none":
            kept_A = CORRECTIONS[settings.importance](old_A, micro.logprobs_A, micro.rows_A, settings)
        metrics = {
            "policy_loss": (weights_A * kept_A * loss_A).sum(),
            "entropy/mean": (weights_A * entropy_A).sum(),
            "clip/fraction": (weights_A * clipped_A).sum(),
            "mismatch/abs": (weights_A * gap_A.abs()).sum(),
            "mismatch/kl": (weights_A * (gap_A.exp() - 1.0 - gap_A)).sum(),
            "importance/kept": (weights_A * (kept_A > 0)).sum(),
            "covered": weights_A.sum(),
        }
        value = metrics["policy_loss"]
        if len(micro.reference_logprobs_A):
            kl_A = KL_ESTIMATORS[settings.kl_estimator](logprobs_A, micro.reference_logprobs_A)
            metrics["kl/reference"] = (weights_A * kl_A).sum()
            if settings.kl_in == "loss":
                value = value + self.kl_coef * metrics["kl/reference"]
        if settings.entropy_coef != 0.0:
            value = value - settings.entropy_coef * metrics["entropy/mean"]
        return value, metrics

    def _adapt_kl_coef(self, measured: float) -> None:
        """Change kl_coef in proportion to the distance of KL from kl_target. Ziegler et al. (arXiv 1909.08593)."""
        target = self._rl.kl_target
        if target:
            error = max(-1.0, min(1.0, measured / target - 1.0))
            self.kl_coef *= 1.0 + self._rl.kl_rate * error


def _put(samples: list[Sample], name: str, values: list[list[float]]) -> None:
    for sample, sample_values in zip(samples, values, strict=True):
        setattr(sample, name, sample_values)


def policy_metrics(samples: list[Sample]) -> dict[str, float]:
    """Return the policy's metrics that `learn` reports, as token means of samples that were only scored."""
    gaps = [p - q for s in samples for p, q in zip(s.old_logprobs, s.logprobs, strict=True)]
    entropies = [entropy for s in samples for entropy in s.entropies]
    if not gaps:
        return {}
    return by_turn(samples) | {
        "entropy/mean": sum(entropies) / len(gaps),
        "mismatch/abs": sum(map(abs, gaps)) / len(gaps),
        "mismatch/kl": sum(math.exp(gap) - 1.0 - gap for gap in gaps) / len(gaps),
    }


def by_turn(samples: list[Sample]) -> dict[str, float]:
    """Return mean entropy and |learner - sampler| of each turn's tokens: `entropy/turn_1`, ..., `entropy/turn_9+`."""
    return means([turn_sums(samples)])


def turn_sums(samples: list[Sample]) -> dict[str, tuple[float, int]]:
    """Return (sum, tokens) of the metrics of `by_turn`, which ranks add up."""
    values_by_name: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if not sample.entropies:
            continue
        gaps = (abs(p - q) for p, q in zip(sample.old_logprobs, sample.logprobs, strict=True))
        for turn, entropy, gap in zip(sample.turn_index, sample.entropies, gaps, strict=True):
            name = turn_name(turn + 1)
            values_by_name[f"entropy/{name}"].append(entropy)
            values_by_name[f"mismatch/{name}"].append(gap)
    return {name: (sum(values), len(values)) for name, values in values_by_name.items()}


def means(parts: Sequence[Mapping[str, tuple[float, int]]]) -> dict[str, float]:
    """Return the means of sums over several parts of a batch."""
    names = sorted({name for part in parts for name in part})
    totals = {name: [part[name] for part in parts if name in part] for name in names}
    return {name: sum(s for s, _ in sums) / sum(n for _, n in sums) for name, sums in totals.items()}


def _average(results: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean over updates. Divide the WEIGHTED sums by the weight of the tokens run (`covered`)."""
    names = sorted({name for result in results for name in result})
    means = {}
    for name in names:
        values = [result[name] for result in results if name in result]
        means[name] = sum(values) / len(values)
    covered = means.pop("covered", 1.0)
    return {name: value / covered if name in WEIGHTED else value for name, value in means.items()}
