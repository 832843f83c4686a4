"""The learner against a slow loop: one unpadded forward pass per trajectory, plain autograd."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slow_learner_for_tests import CASES, SlowLearner, prepared, settings_of, small_critic
from training_for_tests import (
    VOCABULARY,
    Catching,
    batch_of,
    catch,
    few,
    group,
    groups,
    slow_logprobs,
    tiny_model,
    varied_groups,
)
from transformers import Gemma2Config, Gemma2ForCausalLM

from agentgym_rl.errors import ConfigError, DeviceFull
from agentgym_rl.training.batch import Batch
from agentgym_rl.training.device import packed
from agentgym_rl.training.learner import Imitator, Updater, freeze
from agentgym_rl.training.microbatch import micro_batches
from agentgym_rl.training.model import action_logprobs
from agentgym_rl.training.rl_learner import RLLearner, policy_metrics
from agentgym_rl.training.settings import OptimizerSettings, RLSettings
from agentgym_rl.types import Group, StopReason

PLAIN = OptimizerSettings(lr=0.0, max_grad_norm=0.0)
SETTINGS = RLSettings(kl_coef=0.0, optimizer=PLAIN)
ONE_BATCH = [group(1, [0.0, 1.0, 1.0]), group(2, [1.0, 0.0]), group(3, [1.0, 1.0])]
torch.set_num_threads(1)


def assert_same_gradients(gradients: dict[str, torch.Tensor], module: Any) -> None:
    for name, parameter in module.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(gradients.get(name, torch.zeros_like(parameter)), expected, atol=3e-5, rtol=2e-3)


@pytest.mark.parametrize("name", sorted(CASES))
def test_two_updates_agree_with_a_slow_loop(name: str) -> None:
    """Compare loss and gradients of two updates; the second uses the old log-probabilities and values."""
    rl, temperature, played = settings_of(name, epochs=2), 0.7, varied_groups()
    reference = freeze(tiny_model(2))
    value_model = small_critic() if rl.algorithm == "ppo" else None
    slow = SlowLearner(played, rl, temperature, reference, copy.deepcopy(value_model))
    learner = RLLearner(tiny_model(1), rl, temperature, lambda: nullcontext(reference), value_model)
    caught = catch(learner)
    valued = catch(learner.critic) if learner.critic else []
    batch = prepared(learner, played, rl)
    metrics = learner.learn(batch, seed=0)
    assert (learner.updates, len(caught)) == (2, 2)
    model, losses = tiny_model(1), []
    for weights, gradients in caught:
        model.load_state_dict(weights, strict=False)
        model.zero_grad()
        losses.append(slow.policy_loss(model))
        losses[-1].backward()
        assert_same_gradients(gradients, model)
    assert metrics["loss"] == pytest.approx(sum(x.item() for x in losses) / 2, abs=1e-4)
    assert any(not torch.equal(caught[0][0][n], caught[1][0][n]) for n in caught[0][0])
    assert (0.1 < metrics["importance/kept"] < 0.9) == (rl.importance == "sequence_mask")
    if value_model is None:
        return
    critic, losses = small_critic(), []
    assert len(valued) == 2
    for weights, gradients in valued:
        critic.load_state_dict(weights, strict=False)
        critic.zero_grad()
        losses.append(slow.critic_loss(critic))
        losses[-1].backward()
        assert_same_gradients(gradients, critic)
    assert metrics["value/loss"] == pytest.approx(sum(x.item() for x in losses) / 2, rel=1e-4)


@few(10)
@given(played=groups(), name=st.sampled_from(sorted(CASES)), tokens=st.sampled_from([1, 60, 10_000]))
def test_an_update_on_random_episodes_agrees_with_a_slow_loop(played: list[Group], name: str, tokens: int) -> None:
    """Episodes have any shape, and some failed."""
    rl = settings_of(name, micro_batch_tokens=tokens)
    reference = freeze(tiny_model(2))
    critic = small_critic() if rl.algorithm == "ppo" else None
    slow = SlowLearner(played, rl, 1.0, reference, copy.deepcopy(critic))
    learner = Catching(tiny_model(1), rl, 1.0, lambda: nullcontext(reference), critic)
    metrics = learner.learn(prepared(learner, played, rl), 0)
    model = tiny_model(1)
    loss = slow.policy_loss(model)
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-4)
    assert_same_gradients(learner.gradients[0], model)


@pytest.mark.parametrize("name", ["grpo", "gspo", "rloo, cispo", "reinforce++", "baseline", "ppo, turns"])
def test_nothing_depends_on_order_padding_micro_batches_or_ranks(name: str) -> None:
    """A rank's samples keep the weights of the whole batch, so that gradients add up."""
    played = varied_groups()
    reference = freeze(tiny_model(2))

    def learner_of(tokens: int) -> tuple[Catching, Batch]:
        rl = settings_of(name, micro_batch_tokens=tokens)
        critic = small_critic() if rl.algorithm == "ppo" else None
        learner = Catching(tiny_model(1), rl, 1.0, lambda: nullcontext(reference), critic)
        return learner, prepared(learner, played, rl)

    def learn(learner: Catching, batch: Batch) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        valued = catch(learner.critic) if learner.critic else []
        metrics = learner.learn(batch, 0)
        gradients = {
            **learner.gradients[0],
            **{f"critic.{n}": g for _, critic_gradients in valued for n, g in critic_gradients.items()},
        }
        return metrics, gradients

    whole_metrics, whole = learn(*learner_of(10_000))
    for tokens in (1, 70):
        played = played[::-1]
        for g in played:
            g.trajectories.reverse()
        metrics, gradients = learn(*learner_of(tokens))
        assert metrics == pytest.approx(whole_metrics, rel=1e-3, abs=1e-5)
        for key, gradient in whole.items():
            torch.testing.assert_close(gradients[key], gradient, atol=2e-5, rtol=1e-3)
    for ranks in (2, 3):
        total: dict[str, torch.Tensor] = {}
        loss = 0.0
        for rank in range(ranks):
            learner, batch = learner_of(70)
            share = Batch(samples=batch.samples[rank::ranks], weights=batch.weights[rank::ranks])
            metrics, gradients = learn(learner, share)
            loss += metrics["loss"]
            total = {key: total.get(key, 0) + gradient for key, gradient in gradients.items()}
        assert loss == pytest.approx(whole_metrics["loss"], rel=1e-3, abs=1e-5)
        for key, gradient in whole.items():
            torch.testing.assert_close(total[key], gradient, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("max_read_share", [0.0, 0.5])
@pytest.mark.parametrize("name", ["grpo", "gspo", "rloo, cispo", "reinforce++", "baseline", "ppo", "ppo, turns"])
def test_observation_tokens_have_exactly_no_gradient(
    name: str, max_read_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By autograd: loss and value loss depend only on the states before action tokens.

    With a share of 0.5, the policy's last layer gets all tokens and returns only those states.
    """
    monkeypatch.setattr(packed, "MAX_READ_SHARE", max_read_share)
    rl = settings_of(name, zero_variance="keep", importance="none")
    critic = small_critic() if rl.algorithm == "ppo" else None
    learner = RLLearner(tiny_model(1), rl, 1.0, None, critic)
    batch = prepared(learner, varied_groups(), rl)
    (micro,) = micro_batches(batch.samples, batch.weights, 10_000)
    expected = torch.zeros(len(micro.token_ids_T), dtype=torch.bool)
    expected[micro.places_A - 1] = True
    assert not expected.all()
    seen: list[torch.Tensor] = []

    def keep(module: Any, arguments: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        seen.append(output)

    losses = [(learner.model.get_decoder(), lambda: learner._loss(micro, batch.samples))]
    if learner.critic is not None:
        losses.append((learner.critic.model.decoder, lambda: learner.critic._loss(micro)))  # type: ignore[union-attr]
    for decoder, loss in losses:
        seen.clear()
        decoder.norm.register_forward_hook(keep)
        loss()[0].backward()
        states, gradient = seen[0], seen[0].grad
        assert gradient is not None
        if max_read_share and decoder is losses[0][0]:
            right = packed.packed_states(decoder, micro)[expected]
            torch.testing.assert_close(states, right, atol=1e-5, rtol=1e-4)  # so there are no others
        else:
            assert (gradient[~expected] == 0).all()
            gradient = gradient[expected]
        moved = gradient.abs().sum(-1) > 0
        assert moved.float().mean() > 0.5  # an advantage or an error may happen to be 0


def test_a_critic_reads_before_each_action_and_after_the_last_token() -> None:
    rl, played = settings_of("ppo"), varied_groups()
    critic = small_critic()
    slow = SlowLearner(played, rl, 1.0, freeze(tiny_model(2)), critic)
    learner = RLLearner(tiny_model(1), rl, 1.0, None, copy.deepcopy(critic))
    batch = prepared(learner, played, rl)
    bootstrapped = 0
    for (_, t), expected, sample, episode in zip(slow.played, slow.values, batch.samples, batch.episodes, strict=True):
        assert sample.token_ids == t.token_ids  # with the tokens after the last reply
        assert sample.values == pytest.approx(expected[:-1], abs=1e-5)
        assert sample.last_value == pytest.approx(expected[-1], abs=1e-5)
        unread = t.stop is StopReason.MAX_CONTEXT
        assert episode.last_value == (
            0.0 if t.stop is StopReason.DONE else (sample.values[-1] if unread else sample.last_value)
        )
        if t.stop is StopReason.MAX_TURNS:
            bootstrapped += 1
            blind = slow.critic_values(critic, replace(t, messages=t.messages[:-1]))[-1].item()
            assert abs(sample.last_value - blind) > 1e-4  # the observation after the last reply counts
    assert bootstrapped == 2


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (3, 2)])
def test_ppo_makes_every_update_of_policy_and_critic_with_fixed_old_values(epochs: int, minibatches: int) -> None:
    rl = settings_of("ppo", epochs=epochs, minibatches=minibatches)
    learner = RLLearner(tiny_model(1), rl, 1.0, None, small_critic())
    batch = prepared(learner, varied_groups(), rl)
    before = [(list(s.values), list(s.returns), list(s.advantages)) for s in batch.samples]
    caught, critic = catch(learner), learner.critic
    assert critic is not None
    valued = catch(critic)
    learner.learn(batch, 0)
    assert learner.updates == critic.updates == len(caught) == len(valued) == epochs * minibatches
    assert [(s.values, s.returns, s.advantages) for s in batch.samples] == before
    weights = [w["head.weight"] for w, _ in valued]
    assert all(not torch.equal(a, b) for a, b in pairwise(weights))
    old = [(s.old_logprobs, s.values) for s in batch.samples]
    learner.score(batch.samples)  # values from before the updates are kept
    assert [(s.old_logprobs, s.values) for s in batch.samples] == old


def test_a_step_without_an_update_reports_the_same_policy_metrics() -> None:
    rl = replace(SETTINGS, aggregate="token", zero_variance="keep")
    learner = RLLearner(tiny_model(1), rl, 1.0)
    batch = prepared(learner, ONE_BATCH, rl)
    learner.score(batch.samples, policy_only=True)
    seen, learned = policy_metrics(batch.samples), learner.learn(batch, 0)
    assert learned["mismatch/abs"] > 1e-3  # another model sampled them
    assert {"entropy/mean", "mismatch/abs", "mismatch/kl", "mismatch/turn_1"} <= set(seen)
    assert seen == pytest.approx({name: learned[name] for name in seen}, rel=1e-5)
    assert policy_metrics([]) == {}


@pytest.mark.parametrize("minibatches", [1, 2], ids=["update", "score"])
def test_a_pass_that_does_not_fit_the_device_says_what_to_change(
    minibatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two updates the log-probabilities before them are computed first, in passes of their own."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 144.00 MiB. GPU 0 has ...")

    rl = replace(SETTINGS, minibatches=minibatches)
    learner = RLLearner(tiny_model(1), rl, 1.0)
    batch = prepared(learner, ONE_BATCH, rl)
    for sample in batch.samples:
        sample.old_logprobs = []
    monkeypatch.setattr("agentgym_rl.training.rl_learner.action_logprobs", full)
    with pytest.raises(DeviceFull, match=r"allocate 144.00 MiB\). Lower the optimizer's micro_batch_tokens"):
        learner.score(batch.samples) if minibatches > 1 else learner.learn(batch, 0)


def test_the_policy_waits_while_the_critic_warms_up() -> None:
    rl = settings_of("ppo", critic={"warmup_steps": 2})
    learner = RLLearner(tiny_model(1), rl, 1.0)
    counts = []
    for _ in range(3):
        learner.learn(prepared(learner, varied_groups(), rl), 0)
        counts.append((learner.updates, learner.critic.updates if learner.critic else 0))
    assert counts == [(0, 1), (0, 2), (1, 3)]


def test_scoring_the_policy_keeps_the_values_of_the_critic() -> None:
    rl = settings_of("ppo", critic={"warmup_steps": 1})
    learner = RLLearner(tiny_model(1), rl, 1.0)
    batch = prepared(learner, varied_groups(), rl)
    values = [list(sample.values) for sample in batch.samples]
    learner.learn(batch, 0)  # changes the critic
    learner.score(batch.samples, policy_only=True)
    assert [sample.values for sample in batch.samples] == values
    assert all(len(sample.old_logprobs) == len(sample.logprobs) for sample in batch.samples)


def test_a_new_critic_returns_zero_and_learns_the_values_of_states() -> None:
    rl = settings_of("ppo", micro_batch_tokens=10_000, epochs=3)
    learner = RLLearner(tiny_model(1), rl, 1.0)
    first = prepared(learner, ONE_BATCH, rl)
    assert all(v == 0.0 for s in first.samples for v in s.values)
    errors = [learner.learn(prepared(learner, ONE_BATCH, rl), 0)["value/error"] for _ in range(6)]
    assert errors[-1] < 0.5 * errors[0]


def test_a_masked_trajectory_is_left_out_and_counted() -> None:
    rl = settings_of("rloo, cispo", sequence_mask_low=1.0, sequence_mask_high=1.0 + 1e-6, zero_variance="keep")
    learner = Catching(tiny_model(1), rl, 1.0)
    metrics = learner.learn(prepared(learner, varied_groups(), rl), 0)
    assert (metrics["importance/kept"], metrics["grad/norm"]) == (0.0, 0.0)


def test_kl_coefficient_follows_its_target_and_is_saved() -> None:
    rl = replace(SETTINGS, kl_coef=0.5, kl_target=0.01, kl_rate=0.2)
    far = RLLearner(tiny_model(1), rl, 1.0, lambda: nullcontext(freeze(tiny_model(2))))
    assert far.learn(batch_of(ONE_BATCH, rl), 0)["kl/coef"] == 0.5
    assert far.kl_coef == pytest.approx(0.5 * 1.2)  # much too far: the largest change of one step
    near = RLLearner(tiny_model(1), rl, 1.0)
    near.learn(batch_of(ONE_BATCH, rl), 0)
    assert near.kl_coef == pytest.approx(0.5 * 0.8)  # no distance at all
    measured = far.learn(batch_of(ONE_BATCH, rl), 0)["kl/reference"]
    between = RLLearner(tiny_model(1), replace(rl, kl_target=measured / 1.5), 1.0, far._reference)
    assert between.learn(batch_of(ONE_BATCH, rl), 0)["kl/reference"] == pytest.approx(measured, rel=1e-4)
    assert between.kl_coef == pytest.approx(0.5 * (1 + 0.2 * 0.5), rel=1e-4)
    resumed = RLLearner(tiny_model(1), rl, 1.0)
    resumed.restore(far.state())
    assert resumed.kl_coef == far.kl_coef
    fixed = RLLearner(tiny_model(1), replace(rl, kl_target=0.0), 1.0)
    fixed.learn(batch_of(ONE_BATCH, rl), 0)
    assert fixed.kl_coef == 0.5


def test_kl_in_the_reward_is_not_in_the_loss_as_well() -> None:
    """With equal advantages the gradient is the same as without KL."""
    rl = replace(SETTINGS, kl_coef=0.4, kl_in="reward", zero_variance="keep")
    learner = Catching(tiny_model(1), rl, 1.0, lambda: nullcontext(freeze(tiny_model(2))))
    batch = prepared(learner, ONE_BATCH, rl)
    without = Catching(tiny_model(1), replace(rl, kl_coef=0.0), 1.0)
    plain = batch_of(ONE_BATCH, replace(rl, kl_coef=0.0))
    assert [s.advantages for s in batch.samples] != [s.advantages for s in plain.samples]
    for sample, other in zip(batch.samples, plain.samples, strict=True):
        other.advantages = list(sample.advantages)
    assert learner.learn(batch, 0)["kl/reference"] > 0.01
    without.learn(plain, 0)
    for name, gradient in without.gradients[0].items():
        torch.testing.assert_close(learner.gradients[0][name], gradient, atol=1e-6, rtol=1e-4)


def test_log_probabilities_do_not_depend_on_padding_or_neighbours() -> None:
    model = tiny_model().eval()
    batch = batch_of(ONE_BATCH, replace(SETTINGS, zero_variance="keep"))
    for max_tokens in (1, 50, 10_000):
        for micro in micro_batches(batch.samples, batch.weights, max_tokens):
            logprobs, _ = action_logprobs(model, micro, 1.0)
            for value, row, column in zip(logprobs, micro.rows_A, micro.columns_A, strict=True):
                alone = micro.padded()[0][row].tolist()[: int(column) + 1]
                assert value.item() == pytest.approx(slow_logprobs(model, alone)[-1].item(), abs=1e-5)


def test_entropy_is_that_of_the_distribution_sampled_from() -> None:
    model = tiny_model().eval()
    batch = batch_of(ONE_BATCH, SETTINGS)
    (micro,) = micro_batches(batch.samples, batch.weights, 10_000)
    _, entropy_A = action_logprobs(model, micro, 0.5)
    logits = model(input_ids=micro.padded()[0]).logits[micro.rows_A, micro.columns_A - 1] / 0.5
    torch.testing.assert_close(entropy_A, torch.distributions.Categorical(logits=logits).entropy())


def test_the_entropy_bonus_raises_entropy() -> None:
    def entropy_after(coefficient: float) -> float:
        rl = replace(SETTINGS, entropy_coef=coefficient, optimizer=replace(PLAIN, lr=1e-2))
        learner = RLLearner(tiny_model(), rl, 1.0)
        for _ in range(5):
            metrics = learner.learn(batch_of(ONE_BATCH, rl), 0)
        return metrics["entropy/mean"]

    assert entropy_after(1.0) > entropy_after(0.0) + 0.05


def test_a_group_without_variance_gives_no_gradient() -> None:
    flat = [group(4, [1.0, 1.0]), group(5, [0.0, 0.0])]
    rl = replace(SETTINGS, zero_variance="keep")
    learner = Catching(tiny_model(), rl, 1.0)
    metrics = learner.learn(batch_of(flat, rl), 0)
    assert metrics["grad/norm"] == 0.0
    assert all((g == 0).all() for g in learner.gradients[0].values())


def test_keeping_groups_without_variance_adds_nothing_but_their_kl() -> None:
    gradients = []
    for zero_variance in ("keep", "drop"):
        rl = replace(SETTINGS, zero_variance=zero_variance)  # type: ignore[arg-type]
        learner = Catching(tiny_model(), rl, 1.0)
        learner.learn(batch_of(ONE_BATCH, rl), 0)
        gradients.append(learner.gradients[0])
    for name in gradients[0]:
        torch.testing.assert_close(gradients[0][name], gradients[1][name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (3, 1), (1, 2), (2, 3)])
def test_every_epoch_and_minibatch_is_an_update(epochs: int, minibatches: int) -> None:
    rl = replace(SETTINGS, epochs=epochs, minibatches=minibatches, zero_variance="keep")
    learner = Catching(tiny_model(), rl, 1.0)
    learner.learn(batch_of(ONE_BATCH, rl), 0)
    assert len(learner.gradients) == learner.updates == epochs * minibatches


def test_minibatches_average_to_the_whole_batch() -> None:
    """With a learning rate of 0 their mean gradient is that of one update on the whole batch."""
    whole = Catching(tiny_model(), SETTINGS, 1.0)
    whole.learn(batch_of(ONE_BATCH, SETTINGS), 0)
    rl = replace(SETTINGS, minibatches=3)
    parts = Catching(tiny_model(), rl, 1.0)
    parts.learn(batch_of(ONE_BATCH, rl), 0)
    for name, gradient in whole.gradients[0].items():
        mean = sum(g[name] for g in parts.gradients) / 3
        torch.testing.assert_close(mean, gradient, atol=1e-6, rtol=1e-4)


def test_the_order_of_minibatches_comes_from_the_seed() -> None:
    rl = replace(SETTINGS, minibatches=2, zero_variance="keep", optimizer=replace(PLAIN, lr=1e-2))

    def weights(seed: int) -> torch.Tensor:
        learner = RLLearner(tiny_model(), rl, 1.0)
        learner.learn(batch_of(ONE_BATCH, rl), seed)
        return learner.model.lm_head.weight.detach()

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_later_epochs_are_clipped_against_the_policy_before_the_step() -> None:
    rl = replace(SETTINGS, epochs=8, importance="none", optimizer=replace(PLAIN, lr=3e-2))
    metrics = RLLearner(tiny_model(), rl, 1.0).learn(batch_of(ONE_BATCH, rl), 0)
    assert metrics["clip/fraction"] > 0.1
    once = RLLearner(tiny_model(), replace(rl, epochs=1), 1.0).learn(batch_of(ONE_BATCH, rl), 0)
    assert once["clip/fraction"] == 0.0


def test_metrics_are_means_over_the_tokens_that_were_run() -> None:
    """Dropped groups must not lower entropy or mismatch."""
    model = tiny_model().eval()
    mixed = ONE_BATCH[:1]
    many_flat = [*mixed, *(group(10 + i, [1.0, 1.0]) for i in range(6))]
    alone = RLLearner(copy.deepcopy(model), SETTINGS, 1.0).learn(batch_of(mixed, SETTINGS), 0)
    among = RLLearner(copy.deepcopy(model), SETTINGS, 1.0).learn(batch_of(many_flat, SETTINGS), 0)
    for name in ("entropy/mean", "mismatch/abs", "mismatch/kl"):
        assert among[name] == pytest.approx(alone[name], rel=1e-4)
    assert abs(among["grad/norm"]) < 0.5 * alone["grad/norm"]  # but the loss is normalised over all episodes


def test_mismatch_is_zero_for_log_probabilities_of_the_learner_itself() -> None:
    played = copy.deepcopy(ONE_BATCH)
    model = tiny_model().eval()
    for g in played:
        for t in g.trajectories:
            exact = slow_logprobs(model, t.token_ids)
            position = 0
            for message in t.messages:
                if message.logprobs is not None:
                    places = range(position, position + len(message.token_ids))
                    message.logprobs = [exact[i - 1].item() for i in places]
                position += len(message.token_ids)
    metrics = RLLearner(model, SETTINGS, 1.0).learn(batch_of(played, SETTINGS), 0)
    assert metrics["mismatch/abs"] < 1e-5
    assert metrics["mismatch/kl"] < 1e-5


def test_no_kl_no_reference() -> None:
    learner = RLLearner(tiny_model(), SETTINGS, 1.0)
    assert learner._reference is None
    assert "kl/reference" not in learner.learn(batch_of(ONE_BATCH, SETTINGS), 0)


def test_the_reference_is_a_frozen_copy_of_the_start() -> None:
    rl = replace(SETTINGS, kl_coef=0.1, optimizer=replace(PLAIN, lr=1e-2))
    model = tiny_model()
    learner = RLLearner(model, rl, 1.0)
    first = learner.learn(batch_of(ONE_BATCH, rl), 0)
    second = learner.learn(batch_of(ONE_BATCH, rl), 0)
    assert first["kl/reference"] == pytest.approx(0.0, abs=1e-6)
    assert second["kl/reference"] > 1e-4
    assert learner._reference is not None
    with learner._reference() as reference:
        pairs = zip(reference.parameters(), tiny_model().parameters(), strict=True)
        assert all(torch.equal(a, b) and not a.requires_grad for a, b in pairs)


def test_learning_makes_good_replies_likelier_than_bad_ones() -> None:
    rl = replace(SETTINGS, optimizer=replace(PLAIN, lr=3e-3))
    model = tiny_model()
    good, bad = group(1, [1.0, 0.0]).trajectories

    def gap() -> float:
        def likelihood(t: Any) -> float:
            pairs = zip(slow_logprobs(model, t.token_ids), t.loss_mask[1:], strict=True)
            return sum(p.item() for p, trained in pairs if trained)

        return likelihood(good) - likelihood(bad)

    before = gap()
    learner = RLLearner(model, rl, 1.0)
    for _ in range(10):
        learner.learn(batch_of([group(1, [1.0, 0.0])], rl), 0)
    assert gap() > before + 1.0


def rates(total: int, **options: Any) -> list[float]:
    updater = Updater(tiny_model(), OptimizerSettings(lr=1.0, **options), total)
    return [updater.learning_rate(i) for i in range(total)]


def test_warm_up_rises_linearly_and_then_stays() -> None:
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(3) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_decay_starts_at_the_full_rate_and_ends_at_the_minimum(decay: str) -> None:
    schedule = rates(11, decay=decay, min_lr_ratio=0.2)
    assert (schedule[0], schedule[-1]) == (1.0, pytest.approx(0.2))
    assert schedule[5] == pytest.approx(0.6)
    assert schedule == sorted(schedule, reverse=True)
    warm = rates(11, decay=decay, min_lr_ratio=0.2, warmup_steps=3)
    assert warm[:4] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])
    assert warm[-1] == pytest.approx(0.2)


def test_a_run_longer_than_planned_keeps_the_minimum_rate() -> None:
    updater = Updater(tiny_model(), OptimizerSettings(lr=1.0, decay="linear", min_lr_ratio=0.1), 5)
    assert updater.learning_rate(50) == pytest.approx(0.1)


def test_gradients_are_clipped_to_the_norm() -> None:
    free = Catching(tiny_model(), SETTINGS, 1.0)
    norm = free.learn(batch_of(ONE_BATCH, SETTINGS), 0)["grad/norm"]
    rl = replace(SETTINGS, optimizer=replace(PLAIN, max_grad_norm=norm / 10))
    clipped = Catching(tiny_model(), rl, 1.0)
    assert clipped.learn(batch_of(ONE_BATCH, rl), 0)["grad/norm"] == pytest.approx(norm)  # reported as it was
    total = math.sqrt(sum(float((g**2).sum()) for g in clipped.gradients[0].values()))
    assert total == pytest.approx(norm / 10, rel=1e-3)
    for name, gradient in clipped.gradients[0].items():
        torch.testing.assert_close(gradient, free.gradients[0][name] / 10, atol=1e-6, rtol=1e-3)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted() -> None:
    rl = replace(SETTINGS, optimizer=replace(PLAIN, lr=1e-2))
    model = tiny_model()
    learner = RLLearner(model, rl, 1.0)
    batch = batch_of(ONE_BATCH, rl)
    before = model.lm_head.weight.detach().clone()
    batch.weights[0] = math.inf
    metrics = learner.learn(batch, 0)
    assert metrics["skipped"] == 1.0
    assert torch.equal(model.lm_head.weight, before)
    assert learner.learn(batch_of(ONE_BATCH, rl), 0)["skipped"] == 0.0
    assert not torch.equal(model.lm_head.weight, before)


def test_a_skipped_update_of_the_critic_is_counted() -> None:
    for warmup_steps, share in ((0, 0.5), (1, 1.0)):  # the policy's update is made, or there is none
        rl = settings_of("ppo", critic={"warmup_steps": warmup_steps})
        learner = RLLearner(tiny_model(1), rl, 1.0)
        batch = prepared(learner, ONE_BATCH, rl)
        batch.samples[0].returns = [math.inf] * len(batch.samples[0].returns)
        assert learner.learn(batch, 0)["skipped"] == share


def test_an_optimizer_of_another_kind_is_refused_with_a_reason() -> None:
    whole, half = RLLearner(tiny_model(), SETTINGS, 1.0), RLLearner(tiny_model().bfloat16(), SETTINGS, 1.0)
    for learner, other in ((whole, half), (half, whole)):
        learner.restore(learner.state())
        with pytest.raises(ConfigError, match="resume with the one that it was written with"):
            learner.restore(other.state())


def test_restoring_a_learner_continues_exactly() -> None:
    rl = replace(SETTINGS, optimizer=OptimizerSettings(lr=1e-2, warmup_steps=3), steps=5)
    whole = RLLearner(tiny_model(), rl, 1.0)
    whole.learn(batch_of(ONE_BATCH, rl), 0)
    saved_weights, saved = copy.deepcopy(whole.model.state_dict()), copy.deepcopy(whole.state())
    expected = whole.learn(batch_of(ONE_BATCH, rl), 1)
    model = tiny_model(9)
    model.load_state_dict(saved_weights)
    resumed = RLLearner(model, rl, 1.0)
    resumed.restore(saved)
    assert resumed.learn(batch_of(ONE_BATCH, rl), 1) == expected
    assert torch.equal(resumed.model.lm_head.weight, whole.model.lm_head.weight)


def test_a_model_that_transforms_its_logits_is_refused() -> None:
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=0.5,
    )
    with pytest.raises(ConfigError, match="transforms its logits"):
        Imitator(Gemma2ForCausalLM(config), PLAIN, 1)
    with pytest.raises(ConfigError, match="transforms its logits"):
        RLLearner(Gemma2ForCausalLM(config), SETTINGS, 1.0)
