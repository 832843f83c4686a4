"""Handles by which a run's driver calls its learner ranks, and the results that ranks return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentgym_rl.run.log import learned_line
from agentgym_rl.run.system import over_ranks
from agentgym_rl.training.batch import Batch, split_batch
from agentgym_rl.training.offline_settings import PairSettings
from agentgym_rl.training.ranks import balanced_shares
from agentgym_rl.training.rl_learner import means
from agentgym_rl.training.settings import RLSettings, SFTSettings
from agentgym_rl.types import Sample

SCORED_FIELDS = ("old_logprobs", "entropies", "reference_logprobs", "teacher_logprobs", "values", "last_value")
"""Fields of a sample that a learner fills in."""
SampleResult = dict[str, Any] | bytes
"""Fields of a sample, or the line of the log if the driver needs no more."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """Result of a rank's `learn`."""

    metrics: dict[str, float]
    kl_coef: float
    turn_sums: dict[str, tuple[float, int]]
    """Sums of the metrics by turn, over this rank's samples."""
    samples: list[SampleResult]


def result_of_score(sample: Sample, policy_only: bool) -> SampleResult:
    """Return the scores of a sample. Metrics of the policy also compare them with what was stored."""
    names = (*SCORED_FIELDS, "logprobs", "turn_index") if policy_only and sample.stored else SCORED_FIELDS
    return {name: getattr(sample, name) for name in names}


def result_of_learning(sample: Sample) -> SampleResult:
    """Return the line of the log for a stored sample that is a whole episode, else the sample's scores."""
    if sample.stored is not None and not sample.order:
        return learned_line(sample.trajectory_id, [sample])
    return result_of_score(sample, policy_only=False)


class TrainerHandle:
    """A `Trainer` on ranks: every rank has all data and takes its share of a batch."""

    def __init__(self, app: Any, data: list[Any], settings: SFTSettings | PairSettings, seed: int | str) -> None:
        self._app = app
        claim_device(app)
        self.total: int = app.on_all("make_trainer", data, settings, seed)[0]
        self.updates = 0

    def step(self) -> dict[str, float]:
        claim_device(self._app)
        metrics = self._app.on_all("step")[0]
        self.updates += 1
        return metrics

    def restored(self, updates: int, kl_coef: float) -> None:
        self.updates = updates


class LearnerHandle:
    """The learner of `train_rl` on ranks: gives each rank its share and joins their results."""

    def __init__(self, app: Any, settings: RLSettings) -> None:
        self._app, self._rl, self._size = app, settings, app.plan.learners
        self.kl_coef = settings.kl_coef

    def score(self, samples: list[Sample], *, policy_only: bool = False) -> None:
        claim_device(self._app)
        shares = balanced_shares([s.num_tokens for s in samples], self._size)
        rank_results = self._app.on_ranks("score", [([samples[i] for i in share], policy_only) for share in shares])
        for share, results in zip(shares, rank_results, strict=True):
            fill([samples[i] for i in share], results)

    def learn(self, batch: Batch, seed: int) -> dict[str, float]:
        claim_device(self._app)
        shares, indices = split_batch(batch, self._size, self._rl.minibatches, seed)
        results: list[RankResult] = self._app.on_ranks("learn", [(share, seed) for share in shares])
        for known, result in zip(indices, results, strict=True):
            fill([batch.samples[i] for i in known], result.samples)
        self.kl_coef = results[0].kl_coef
        averages = over_ranks([result.metrics for result in results])
        return results[0].metrics | averages | means([result.turn_sums for result in results])

    def restored(self, updates: int, kl_coef: float) -> None:
        self.kl_coef = kl_coef


def claim_device(app: Any) -> None:
    """Free the device for ranks if they share it with engines."""
    if app.plan.layout == "colocated":
        app.sleep_engines()


def fill(samples: list[Sample], results: list[SampleResult]) -> None:
    """Give samples what the ranks found out about them."""
    for sample, result in zip(samples, results, strict=True):
        if isinstance(result, bytes):
            sample.stored.learned_line = result
            continue
        for name, value in result.items():
            setattr(sample, name, value)
