"""PPO's critic beside the policy: micro-batches and schedules of their own, and its metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from slow_learner_for_tests import prepared, settings_of, small_critic
from training_for_tests import catch, tiny_model, varied_groups

from agentgym_rl.errors import DeviceFull
from agentgym_rl.training.critic import Critic
from agentgym_rl.training.rl_learner import RLLearner
from agentgym_rl.training.settings import RLSettings

torch.set_num_threads(1)


def critic_with(tokens: int) -> tuple[RLSettings, RLLearner, Critic]:
    """Return settings with this micro_batch_tokens of the critic, a learner and its critic."""
    rl = settings_of("ppo")
    critic = replace(rl.critic, optimizer=replace(rl.critic.optimizer, micro_batch_tokens=tokens))
    rl = replace(rl, critic=critic)
    learner = RLLearner(tiny_model(1), rl, 1.0, None, small_critic())
    assert learner.critic is not None
    return rl, learner, learner.critic


@pytest.mark.parametrize("tokens", [1, 30, 10_000])
def test_the_critic_learns_on_micro_batches_of_its_own_size(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients, lengths = [], []
    for size in (60, tokens):
        rl, learner, critic = critic_with(size)
        batch, caught, loss = prepared(learner, varied_groups(), rl), catch(critic), critic._loss
        passes: list[list[int]] = []
        monkeypatch.setattr(critic, "_loss", lambda m, f=loss, p=passes: (p.append(m.lengths), f(m))[1])
        learner.learn(batch, 0)
        gradients.append(caught[0][1])
        lengths.append(passes)
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradients[1][name], gradient, atol=1e-5), name
    assert [n for own in lengths[1] for n in own] == [n for own in lengths[0] for n in own], "all samples"
    assert all(sum(own) <= tokens or len(own) == 1 for own in lengths[1])
    assert (len(lengths[1]) == 1) == (tokens == 10_000)


def test_a_pass_of_the_critic_that_does_not_fit_names_its_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 144.00 MiB. GPU 0 has ...")

    rl, learner, critic = critic_with(30)
    batch = prepared(learner, varied_groups(), rl)
    monkeypatch.setattr(critic, "_loss", full)
    with pytest.raises(DeviceFull, match="a pass of up to 30 tokens"):
        learner.learn(batch, 0)


def test_the_policy_decays_to_its_minimum_after_the_critics_warm_up() -> None:
    rl = settings_of("ppo", steps=4, minibatches=2, critic={"warmup_steps": 2})
    decaying = replace(rl.optimizer, lr=1e-3, decay="linear", min_lr_ratio=0.1)
    rl = replace(rl, optimizer=decaying, critic=replace(rl.critic, optimizer=decaying))
    rates: list[float] = []
    critic_rates: list[float] = []
    learner = RLLearner(tiny_model(1), rl, 1.0, None, small_critic())
    for step in range(rl.steps):
        if step == 3:  # a resumed run continues the schedules
            saved = learner.state()
            learner = RLLearner(tiny_model(1), rl, 1.0, None, small_critic())
            learner.restore(saved)
        assert learner.critic is not None
        before, critic_before = learner.updates, learner.critic.updates
        learner.learn(prepared(learner, varied_groups(), rl), step)
        rates += [learner.learning_rate(i) for i in range(before, learner.updates)]
        critic_rates += [learner.critic.learning_rate(i) for i in range(critic_before, learner.critic.updates)]
    assert rates == pytest.approx([1e-3, 7e-4, 4e-4, 1e-4])
    assert critic_rates == pytest.approx([1e-3 - i * 9e-4 / 7 for i in range(8)])


@pytest.mark.parametrize("aggregate", ["token", "trajectory", "constant"])
@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_the_values_error_is_a_mean_whatever_the_aggregate(aggregate: Any, warmup_steps: int) -> None:
    rl = settings_of("ppo", aggregate=aggregate, critic={"warmup_steps": warmup_steps})
    learner = RLLearner(tiny_model(1), rl, 1.0, None, small_critic())
    batch = prepared(learner, varied_groups(), rl)
    errors = [[abs(v - g) for v, g in zip(s.values, s.returns, strict=True)] for s in batch.samples]
    weights = [weight for weight, own in zip(batch.weights, errors, strict=True) for _ in own]
    total = sum(w * e for w, e in zip(weights, (e for own in errors for e in own), strict=True))
    assert learner.learn(batch, 0)["value/error"] == pytest.approx(total / sum(weights), rel=1e-5)
