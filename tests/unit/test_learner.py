"""The learner against a slow loop: one unpadded forward pass per trajectory, plain autograd."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from training_for_tests import VOCABULARY, Catching, batch_of, group, groups, slow_logprobs, tiny_model
from transformers import Gemma2Config, Gemma2ForCausalLM

from agentgym_rl.errors import ConfigError
from agentgym_rl.training.learner import Imitator, Updater, freeze
from agentgym_rl.training.losses import KL_ESTIMATORS
from agentgym_rl.training.microbatch import micro_batches
from agentgym_rl.training.model import action_logprobs
from agentgym_rl.training.rl_learner import RLLearner
from agentgym_rl.training.settings import OptimizerSettings, RLSettings
from agentgym_rl.types import Group

PLAIN = OptimizerSettings(lr=0.0, max_grad_norm=0.0)
SETTINGS = RLSettings(kl_coef=0.0, optimizer=PLAIN)
ONE_BATCH = [group(1, [0.0, 1.0, 1.0]), group(2, [1.0, 0.0]), group(3, [1.0, 1.0])]
torch.set_num_threads(1)


def slow_loss(model: Any, reference: Any, made: list[Group], rl: RLSettings, temperature: float) -> torch.Tensor:
    """The same loss with nothing but loops, for one update on samples from the present policy."""
    usable = [t for g in made for t in g.usable]
    all_actions = sum(sum(t.loss_mask) for t in usable)
    total = torch.zeros(())
    for g in made:
        rewards = torch.tensor([t.reward for t in g.usable], dtype=torch.float64)
        flat = len(set(rewards.tolist())) <= 1
        if flat and rl.zero_variance == "drop":
            continue
        for t, reward in zip(g.usable, rewards, strict=True):
            advantage = 0.0 if flat else float((reward - rewards.mean()) / (rewards.std(correction=1) + 1e-6))
            own = sum(t.loss_mask)
            weight = 1 / all_actions if rl.aggregate == "token" else 1 / (len(usable) * own)
            logprobs = slow_logprobs(model, t.token_ids, temperature)
            reference_logprobs = slow_logprobs(reference, t.token_ids, temperature) if rl.kl_coef else logprobs
            for place in range(1, len(t.token_ids)):
                if not t.loss_mask[place]:
                    continue
                p = logprobs[place - 1]
                ratio = torch.exp(p - p.detach())
                correction = min(math.exp(float(p.detach()) - t.logprobs[place]), rl.importance_cap)
                loss = -ratio * advantage * (correction if rl.importance == "token" else 1.0)
                if rl.kl_coef:
                    loss = loss + rl.kl_coef * KL_ESTIMATORS[rl.kl_estimator](p, reference_logprobs[place - 1].detach())
                total = total + weight * loss
    return total


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    made=groups(),
    aggregate=st.sampled_from(["token", "trajectory"]),
    importance=st.sampled_from(["token", "none"]),
    kl=st.sampled_from([(0.0, "k3"), (0.3, "k1"), (0.3, "k2"), (0.3, "k3")]),
    zero_variance=st.sampled_from(["drop", "keep"]),
    temperature=st.sampled_from([1.0, 0.7]),
    micro_batch_tokens=st.sampled_from([1, 60, 10_000]),
)
def test_gradients_agree_with_a_slow_loop(
    made: list[Group],
    aggregate: Literal["token", "trajectory"],
    importance: Literal["token", "none"],
    kl: tuple[float, Literal["k1", "k2", "k3"]],
    zero_variance: Literal["drop", "keep"],
    temperature: float,
    micro_batch_tokens: int,
) -> None:
    rl = replace(
        SETTINGS,
        aggregate=aggregate,
        importance=importance,
        kl_coef=kl[0],
        kl_estimator=kl[1],
        zero_variance=zero_variance,
        optimizer=replace(PLAIN, micro_batch_tokens=micro_batch_tokens),
    )
    model, reference = tiny_model(1), freeze(tiny_model(2))
    learner = Catching(model, rl, temperature, lambda: nullcontext(reference))
    metrics = learner.learn(batch_of(made, rl), seed=0)
    slow = tiny_model(1)
    loss = slow_loss(slow, reference, made, rl, temperature)
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert len(learner.gradients) == 1
    for name, parameter in slow.named_parameters():
        torch.testing.assert_close(learner.gradients[0][name], parameter.grad, atol=2e-5, rtol=1e-3)


def test_observation_tokens_have_no_gradient_of_their_own() -> None:
    """By autograd: the loss depends on the logits before action tokens only, whatever the mask says."""
    model = tiny_model()
    batch = batch_of(ONE_BATCH, SETTINGS)
    (micro,) = micro_batches(batch.samples, batch.weights, 10_000)
    seen: list[torch.Tensor] = []

    def keep(module: Any, arguments: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        seen.append(output)

    learner = RLLearner(model, SETTINGS, 1.0)
    model.model.norm.register_forward_hook(keep)
    learner._loss(micro, batch.samples)[0].backward()
    (hidden_BLH,) = seen
    assert hidden_BLH.grad is not None
    moved = hidden_BLH.grad.abs().sum(-1) > 0
    expected = torch.zeros_like(moved)
    expected[micro.rows_A, micro.columns_A - 1] = True
    assert torch.equal(moved, expected)


def test_log_probabilities_do_not_depend_on_padding_or_neighbours() -> None:
    model = tiny_model().eval()
    batch = batch_of(ONE_BATCH, replace(SETTINGS, zero_variance="keep"))
    for max_tokens in (1, 50, 10_000):
        for micro in micro_batches(batch.samples, batch.weights, max_tokens):
            found, _ = action_logprobs(model, micro, 1.0)
            for value, row, column in zip(found, micro.rows_A, micro.columns_A, strict=True):
                alone = micro.input_ids_BL[row].tolist()[: int(column) + 1]
                assert value.item() == pytest.approx(slow_logprobs(model, alone)[-1].item(), abs=1e-5)


def test_entropy_is_that_of_the_distribution_sampled_from() -> None:
    model = tiny_model().eval()
    batch = batch_of(ONE_BATCH, SETTINGS)
    (micro,) = micro_batches(batch.samples, batch.weights, 10_000)
    _, entropy_A = action_logprobs(model, micro, 0.5)
    logits = model(input_ids=micro.input_ids_BL).logits[micro.rows_A, micro.columns_A - 1] / 0.5
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
    """With a rate of 0 nothing moves between them, so their mean gradient is that of one update on everything."""
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
    """Dropping groups must not make entropy or mismatch look smaller."""
    model = tiny_model().eval()
    mixed = ONE_BATCH[:1]
    many_flat = [*mixed, *(group(10 + i, [1.0, 1.0]) for i in range(6))]
    alone = RLLearner(copy.deepcopy(model), SETTINGS, 1.0).learn(batch_of(mixed, SETTINGS), 0)
    among = RLLearner(copy.deepcopy(model), SETTINGS, 1.0).learn(batch_of(many_flat, SETTINGS), 0)
    for name in ("entropy/mean", "mismatch/abs", "mismatch/kl"):
        assert among[name] == pytest.approx(alone[name], rel=1e-4)
    assert abs(among["grad/norm"]) < 0.5 * alone["grad/norm"]  # but the loss is normalised over all episodes


def test_mismatch_is_zero_for_what_the_learner_itself_would_say() -> None:
    made = copy.deepcopy(ONE_BATCH)
    model = tiny_model().eval()
    for g in made:
        for t in g.trajectories:
            exact = slow_logprobs(model, t.token_ids)
            position = 0
            for message in t.messages:
                if message.logprobs is not None:
                    places = range(position, position + len(message.token_ids))
                    message.logprobs = [exact[i - 1].item() for i in places]
                position += len(message.token_ids)
    metrics = RLLearner(model, SETTINGS, 1.0).learn(batch_of(made, SETTINGS), 0)
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
def test_decay_starts_at_the_full_rate_and_ends_at_the_least(decay: str) -> None:
    found = rates(11, decay=decay, min_lr_ratio=0.2)
    assert (found[0], found[-1]) == (1.0, pytest.approx(0.2))
    assert found[5] == pytest.approx(0.6)
    assert found == sorted(found, reverse=True)
    warm = rates(11, decay=decay, min_lr_ratio=0.2, warmup_steps=3)
    assert warm[:4] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])
    assert warm[-1] == pytest.approx(0.2)


def test_a_run_longer_than_planned_keeps_the_least_rate() -> None:
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


def test_a_model_that_bends_its_logits_is_refused() -> None:
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
