"""A slow learner groups of plain loops, and one set of settings for each feature of the learner."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from training_for_tests import slow_logprobs, tiny_model

from agentgym_rl.training.advantages import ESTIMATORS, Episode
from agentgym_rl.training.batch import Batch, estimate, gather
from agentgym_rl.training.critic import ValueModel
from agentgym_rl.training.losses import KL_ESTIMATORS
from agentgym_rl.training.rl_learner import RLLearner
from agentgym_rl.training.settings import CriticSettings, OptimizerSettings, RLSettings
from agentgym_rl.types import Group, StopReason, Trajectory


def prepared(learner: RLLearner, groups: list[Group], rl: RLSettings) -> Batch:
    """Return the batch as train_rl prepares it between playing and learning."""
    batch = gather(groups, rl)
    if rl.algorithm == "ppo" or rl.kl_in == "reward":
        learner.score(batch.samples)
    return estimate(batch, rl, learner.kl_coef)


class SlowLearner:
    """The learner in plain loops: one unpadded forward pass per trajectory, plain autograd."""

    def __init__(self, groups: list[Group], rl: RLSettings, temperature: float, reference: Any, critic: Any) -> None:
        self.rl, self.temperature, self.critic = rl, temperature, critic
        self.played = [(number, t) for number, g in enumerate(groups) for t in g.usable]
        start = tiny_model(1)
        self.old = [[p.item() for p in self.actions(start, t)] for _, t in self.played]
        self.reference = [[p.item() for p in self.actions(reference, t)] for _, t in self.played]
        self.sampled = [[p for p in t.logprobs if not math.isnan(p)] for _, t in self.played]
        self.values = [[v.item() for v in self.critic_values(critic, t)] for _, t in self.played]
        estimated = ESTIMATORS[rl.algorithm]([self.episode(i) for i in range(len(self.played))], rl)
        self.advantages, self.returns = estimated.advantages, estimated.returns
        flat = {n for n in range(len(groups)) if not any(any(a) for a, (m, _) in self.pairs() if m == n)}
        self.dropped = flat if rl.zero_variance == "drop" and rl.algorithm in ("grpo", "rloo") else set()
        total = sum(len(old) for old in self.old)
        count = len(self.played)
        by_aggregate = {
            "token": [1 / total] * count,
            "trajectory": [1 / (count * len(old)) for old in self.old],
            "constant": [1 / (count * rl.aggregate_length)] * count,
        }
        self.weights = by_aggregate[rl.aggregate]

    def pairs(self) -> Any:
        return zip(self.advantages, self.played, strict=True)

    def actions(self, model: Any, t: Trajectory) -> list[torch.Tensor]:
        logprobs = slow_logprobs(model, t.token_ids, self.temperature)
        return [p for p, trained in zip(logprobs, t.loss_mask[1:], strict=True) if trained]

    def entropies(self, model: Any, t: Trajectory) -> list[torch.Tensor]:
        logits = model(input_ids=torch.tensor([t.token_ids])).logits[0] / self.temperature
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        return [entropy[i - 1] for i, trained in enumerate(t.loss_mask) if trained]

    def critic_values(self, critic: Any, t: Trajectory) -> list[torch.Tensor]:
        """Return the values before each action token, and the value after the last token."""
        if critic is None:
            return []
        hidden = critic.decoder(input_ids=torch.tensor([t.token_ids])).last_hidden_state[0]
        places = [i - 1 for i, trained in enumerate(t.loss_mask) if trained] + [len(t.token_ids) - 1]
        return [critic.head(hidden[place])[0] for place in places]

    def episode(self, i: int) -> Episode:
        number, t = self.played[i]
        penalties = []
        if self.rl.kl_in == "reward":
            kl = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}
            gaps = [p - q for p, q in zip(self.old[i], self.reference[i], strict=True)]
            penalties = [self.rl.kl_coef * kl[self.rl.kl_estimator](gap) for gap in gaps]
        cut = t.stop in (StopReason.MAX_TURNS, StopReason.LENGTH, StopReason.MAX_CONTEXT)
        last_value = self.values[i][-1] if self.values[i] else 0.0
        if self.values[i] and t.stop is StopReason.MAX_CONTEXT:  # the last observation has no tokens
            last_value = self.values[i][-2]
            if self.rl.credit != "outcome":
                last_value = (last_value - t.rewards[-1]) / self.rl.turn_discount
        return Episode(
            number,
            list(t.rewards),
            [len(m.token_ids) for m in t.messages if m.role == "assistant"],
            [info.get("state_key") for info in t.infos],
            penalties,
            self.values[i][:-1],
            last_value if cut and self.rl.bootstrap else 0.0,
        )

    def correction(self, i: int, token: int) -> float:
        gaps = [p - q for p, q in zip(self.old[i], self.sampled[i], strict=True)]
        cap = self.rl.importance_cap
        if self.rl.importance == "none":
            return 1.0
        inside = self.rl.sequence_mask_low <= math.exp(sum(gaps) / len(gaps)) <= self.rl.sequence_mask_high
        if self.rl.importance == "sequence_mask" and not inside:
            return 0.0
        return min(math.exp(gaps[token]), cap)

    def bounded(self, ratio: torch.Tensor, advantage: float) -> torch.Tensor:
        """Return -min(r A, clip(r) A) by cases."""
        rl = self.rl
        if advantage > 0 and ratio.item() > 1 + rl.clip_high:
            return torch.tensor(-(1 + rl.clip_high) * advantage)
        if advantage < 0 and ratio.item() < 1 - rl.clip_low:
            return torch.tensor(-(1 - rl.clip_low) * advantage)
        return -ratio * advantage

    def policy_loss(self, model: Any) -> torch.Tensor:
        rl, total = self.rl, torch.zeros(())
        for i, (number, t) in enumerate(self.played):
            if number in self.dropped:
                continue
            now, weight = self.actions(model, t), self.weights[i]
            if rl.loss == "gspo":  # the sequence form; all tokens of an episode have the same advantage here
                ratio = torch.exp(sum(p - q for p, q in zip(now, self.old[i], strict=True)) / len(now))
                if rl.importance == "none":
                    total = total + weight * len(now) * self.bounded(ratio, self.advantages[i][0])
                else:  # token weights: each token's part of the same gradient
                    for token, p in enumerate(now):
                        part = ratio.detach() * torch.exp(p - p.detach())
                        total = total + weight * self.correction(i, token) * self.bounded(part, self.advantages[i][0])
            for token, (p, advantage) in enumerate(zip(now, self.advantages[i], strict=True)):
                ratio = torch.exp(p - self.old[i][token])
                if rl.loss == "clip":
                    total = total + weight * self.correction(i, token) * self.bounded(ratio, advantage)
                if rl.loss == "cispo":
                    bounded = min(max(ratio.item(), 1 - rl.clip_low), 1 + rl.clip_high)
                    total = total - weight * self.correction(i, token) * bounded * advantage * p
                if rl.kl_coef and rl.kl_in == "loss":
                    kl = KL_ESTIMATORS[rl.kl_estimator](p, torch.tensor(self.reference[i][token]))
                    total = total + weight * rl.kl_coef * kl
            if rl.entropy_coef:
                total = total - rl.entropy_coef * weight * sum(self.entropies(model, t))
        return total

    def critic_loss(self, critic: Any) -> torch.Tensor:
        total, bound = torch.zeros(()), self.rl.critic.clip
        for i, (_, t) in enumerate(self.played):
            now = self.critic_values(critic, t)[:-1]
            for value, old, target in zip(now, self.values[i][:-1], self.returns[i], strict=True):
                error = (value - target) ** 2
                if bound and abs(value.item() - old) > bound:
                    near = (old + math.copysign(bound, value.item() - old) - target) ** 2
                    error = error if error.item() > near else torch.tensor(near)
                total = total + self.weights[i] * 0.5 * error
        return total


def small_critic() -> ValueModel:
    """Return a critic whose head is not 0."""
    critic = ValueModel(tiny_model(3).get_decoder(), 16)
    with torch.no_grad():
        critic.head.weight.copy_(torch.linspace(-0.3, 0.3, 16)[None])
        critic.head.bias.fill_(0.1)
    return critic


CASES: dict[str, dict[str, Any]] = {
    "grpo": {"kl_coef": 0.3, "kl_estimator": "k3"},
    "dr. grpo": {"normalize_std": False, "aggregate": "constant", "aggregate_length": 9, "zero_variance": "keep"},
    "gigpo": {
        "credit": "anchor",
        "turn_discount": 0.9,
        "aggregate": "trajectory",
        "kl_coef": 0.2,
        "kl_estimator": "k2",
    },
    "gspo": {"loss": "gspo", "aggregate": "trajectory", "importance": "none", "clip_low": 0.05, "clip_high": 0.05},
    "gspo, masked": {
        "loss": "gspo",
        "aggregate": "trajectory",
        "importance": "sequence_mask",
        "sequence_mask_low": 0.75,
        "sequence_mask_high": 1.3,
    },
    "rloo, cispo": {
        "algorithm": "rloo",
        "credit": "turns",
        "loss": "cispo",
        "importance": "sequence_mask",
        "importance_cap": 1.3,
        "sequence_mask_low": 0.75,
        "sequence_mask_high": 1.3,
    },
    "reinforce++": {"algorithm": "reinforce++", "kl_coef": 0.2, "kl_in": "reward", "kl_estimator": "k1"},
    "baseline": {"algorithm": "reinforce++-baseline", "entropy_coef": 0.1, "kl_coef": 0.3, "kl_estimator": "k1"},
    "ppo": {"algorithm": "ppo", "gae_lambda": 0.9, "entropy_coef": 0.1},
    "ppo, turns": {"algorithm": "ppo", "credit": "turns", "turn_discount": 0.8, "kl_coef": 0.2, "kl_in": "reward"},
    "ppo, two levels": {"algorithm": "ppo", "credit": "two_level", "loss": "cispo", "critic": {"clip": 0.05}},
    "ppo, free critic": {
        "algorithm": "ppo",
        "token_discount": 0.95,
        "credit": "turns",
        "critic": {"clip": 0.0},
        "bootstrap": False,
    },
}


def settings_of(name: str, **more: Any) -> RLSettings:
    chosen = {**CASES[name], **more}
    moving = OptimizerSettings(lr=2e-2, max_grad_norm=0.0, micro_batch_tokens=chosen.pop("micro_batch_tokens", 60))
    critic = CriticSettings(optimizer=moving, **chosen.pop("critic", {}))
    return replace(RLSettings(kl_coef=0.0), optimizer=moving, critic=critic, **chosen)
