"""From trajectories to micro-batches: trained tokens, their weights, and independence of the grouping."""

from __future__ import annotations

import math
import random
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_for_tests import few, group, groups, trajectory

from agentgym_rl.training.batch import (
    Batch,
    estimate,
    gather,
    is_flat,
    overlong_penalty,
    to_samples,
    token_weights,
)
from agentgym_rl.training.microbatch import MicroBatch, micro_batches
from agentgym_rl.training.settings import Algorithm, RLSettings
from agentgym_rl.types import Group, Limits, Message, Sample, StopReason, Trajectory

Aggregate = Literal["token", "trajectory"]


def batch_of(
    played: list[Group], *, drop: bool = False, aggregate: Aggregate = "token", algorithm: Algorithm = "grpo"
) -> Batch:
    rl = RLSettings(algorithm=algorithm, aggregate=aggregate, zero_variance="drop" if drop else "keep")
    return estimate(gather(played, rl), rl)


def action_tokens(micro: list[MicroBatch]) -> list[tuple[float, ...]]:
    """Return (target, weight, log-probability, advantage) of every action token, sorted."""
    rows: list[tuple[float, ...]] = []
    for m in micro:
        columns = (m.targets_A, m.weights_A, m.logprobs_A, m.advantages_A)
        rows += zip(*(c.tolist() for c in columns), strict=True)
    return sorted(rows)


@few(25)
@given(played=groups(), aggregate=st.sampled_from(["token", "trajectory"]))
def test_a_batch_holds_exactly_the_sampled_tokens_of_usable_episodes(played: list[Group], aggregate: Aggregate) -> None:
    batch = batch_of(played, aggregate=aggregate)
    result = action_tokens(micro_batches(batch.samples, batch.weights, 40))
    usable = [t for g in played for t in g.usable]
    all_tokens = sum(len(m.token_ids) for t in usable for m in t.messages if m.role == "assistant")
    expected = []
    for g in played:
        rewards = [t.reward for t in g.usable]
        for t in g.usable:
            mean = math.fsum(rewards) / len(rewards)
            deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1))
            advantage = (t.reward - mean) / (deviation + 1e-6) if len(set(rewards)) > 1 else 0.0
            replies = [m for m in t.messages if m.role == "assistant"]
            own = sum(len(m.token_ids) for m in replies)
            weight = 1 / all_tokens if aggregate == "token" else 1 / (len(usable) * own)
            for message in replies:
                for token, logprob in zip(message.token_ids, message.logprobs or [], strict=True):
                    expected.append((token, weight, logprob, advantage))
    assert len(result) == len(expected)
    for row, target in zip(result, sorted(expected), strict=True):
        assert row == pytest.approx(target, rel=1e-5, abs=1e-6)
    assert sum(row[1] for row in result) == pytest.approx(1.0, rel=1e-5)


@few(25)
@given(played=groups(), seed=st.integers(0, 99), sizes=st.tuples(st.integers(1, 300), st.integers(1, 300)))
def test_order_and_micro_batch_size_change_nothing(played: list[Group], seed: int, sizes: tuple[int, int]) -> None:
    batch = batch_of(played)
    order = list(range(len(batch.samples)))
    random.Random(seed).shuffle(order)
    first = micro_batches(batch.samples, batch.weights, sizes[0])
    second = micro_batches([batch.samples[i] for i in order], [batch.weights[i] for i in order], sizes[1])
    assert action_tokens(first) == action_tokens(second)


@few(25)
@given(played=groups(), max_tokens=st.integers(1, 200))
def test_micro_batches_keep_to_their_size_and_point_at_the_tokens(played: list[Group], max_tokens: int) -> None:
    batch = batch_of(played)
    micro = micro_batches(batch.samples, batch.weights, max_tokens)
    assert sum(len(m.lengths) for m in micro) == len(batch.samples)
    for m in micro:
        assert len(m.token_ids_T) <= max_tokens or len(m.lengths) == 1
        assert torch.equal(m.padded()[0][m.rows_A, m.columns_A], m.targets_A)
        assert (m.columns_A > 0).all()


@few(25)
@given(played=groups())
def test_dropping_groups_without_variance_leaves_the_weights_of_the_others(played: list[Group]) -> None:
    kept, dropped = batch_of(played), batch_of(played, drop=True)
    flat = {t.id for g in played if len({t.reward for t in g.usable}) == 1 for t in g.usable}
    assert (dropped.groups, dropped.zero_variance_groups) == (kept.groups, kept.zero_variance_groups)
    assert kept.zero_variance_groups == sum(len({t.reward for t in g.usable}) == 1 for g in played)
    assert {s.trajectory_id for s in dropped.samples} == {s.trajectory_id for s in kept.samples} - flat
    weight_of = {s.trajectory_id: w for s, w in zip(kept.samples, kept.weights, strict=True)}
    assert all(w == weight_of[s.trajectory_id] for s, w in zip(dropped.samples, dropped.weights, strict=True))
    assert all(a == 0 for s in kept.samples if s.trajectory_id in flat for a in s.advantages)


def test_flat_groups_do_not_count_in_the_weights_of_a_resampled_step() -> None:
    played = [group(1, [0.0, 1.0]), group(2, [1.0, 1.0]), group(3, [0.0, 0.0])]
    rl = RLSettings(kl_coef=0.0, resample_rounds=1)
    alone, among = estimate(gather(played[:1], rl), rl), estimate(gather(played, rl), rl)
    assert [s.trajectory_id for s in among.samples] == [s.trajectory_id for s in alone.samples]
    assert among.weights == alone.weights


@pytest.mark.parametrize("credit", ["outcome", "turns", "anchor"])
def test_a_single_episode_has_no_advantage(credit: Any) -> None:
    alone = trajectory(4, turns=3, reward=1.0)
    for info in alone.infos:
        info["state_key"] = "same"
    rl = RLSettings(kl_coef=0.0, credit=credit, turn_discount=0.5, zero_variance="keep")
    (sample,) = estimate(gather([Group(alone.task, [alone])], rl), rl).samples
    assert set(sample.advantages) == {0.0}


def test_the_reward_of_the_last_turn_reaches_every_action_token_and_no_other() -> None:
    winner, loser = trajectory(5, turns=4, reward=1.0), trajectory(6, turns=2, reward=0.0)
    for sample, sign in zip(batch_of([Group(winner.task, [winner, loser])]).samples, (1, -1), strict=True):
        assert sample.advantages == pytest.approx([sign * math.sqrt(0.5)] * sum(sample.loss_mask), abs=1e-5)


def test_a_sample_holds_exactly_the_sampled_tokens() -> None:
    played = trajectory(7, turns=2)
    played.messages = [Message("user", "", [1, 2]), Message("assistant", "", [3, 4], [-1.0, -2.0], version=3)]
    played.messages += [Message("user", "", [5]), Message("assistant", "", [6], [-3.0], version=4)]
    played.messages += [Message("user", "", [7, 8])]
    [sample] = to_samples(played)
    assert sample.token_ids == [1, 2, 3, 4, 5, 6]
    assert sample.loss_mask == [False, False, True, True, False, True]
    assert sample.logprobs == [-1.0, -2.0, -3.0]
    assert (sample.turn_index, sample.versions) == ([0, 0, 1], [3, 3, 4])
    assert sample.trajectory_id == played.id
    assert to_samples(played, keep_tail=True)[0].token_ids == [1, 2, 3, 4, 5, 6, 7, 8]


def test_failed_episodes_are_left_out_of_baseline_and_batch() -> None:
    played = group(1, [1.0, 0.0, 1.0])
    played.trajectories[1].stop = StopReason.ERROR
    batch = batch_of([played])
    assert batch.zero_variance_groups == 1  # without the failed episode the rewards are equal
    assert [s.trajectory_id for s in batch.samples] == [played.trajectories[0].id, played.trajectories[2].id]


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_a_group_with_one_usable_episode_counts_as_zero_variance(algorithm: Algorithm) -> None:
    played = [group(1, [1.0, 0.0]), group(2, [1.0, 0.0])]
    played[0].trajectories[1].stop = StopReason.ERROR
    batch = batch_of(played, drop=True, algorithm=algorithm)
    assert (batch.groups, batch.zero_variance_groups, len(batch.samples)) == (2, 1, 2)


def test_a_group_of_failures_is_not_counted() -> None:
    played = group(1, [1.0, 0.0], stop=StopReason.ERROR)
    batch = batch_of([played])
    assert (batch.groups, batch.samples, batch.weights) == (0, [], [])


def test_an_episode_without_a_sampled_token_is_skipped() -> None:
    played = group(1, [1.0, 0.0])
    unread = [Message("user", "too long to read")]
    played.trajectories.append(Trajectory("empty", played.task, unread, stop=StopReason.MAX_CONTEXT))
    assert [s.trajectory_id for s in batch_of([played]).samples] == [t.id for t in played.trajectories[:2]]


def test_masked_overlong_episodes_are_compared_with_but_not_trained_on() -> None:
    played = group(1, [1.0, 0.0, 1.0, 0.0])
    played.trajectories[0].stop, played.trajectories[1].stop = StopReason.LENGTH, StopReason.MAX_CONTEXT
    played.trajectories[2].stop = StopReason.MAX_TURNS  # its horizon cut it, not its length
    rl = RLSettings(overlong="mask", aggregate="trajectory", normalize_std=False)
    batch = estimate(gather([played], rl), rl)
    kept = played.trajectories[2:]
    assert [s.trajectory_id for s in batch.samples] == [t.id for t in kept]
    assert batch.weights == pytest.approx([1 / (2 * sum(t.loss_mask)) for t in kept])
    assert [s.advantages[0] for s in batch.samples] == [0.5, -0.5]  # against the mean of all four
    assert len(estimate(gather([played], RLSettings()), RLSettings()).samples) == 4


def test_the_overlong_penalty_rises_over_the_buffer_and_applies_per_turn() -> None:
    rl = RLSettings(overlong="penalty", overlong_buffer=4)
    assert [overlong_penalty(n, 10, rl) for n in (0, 6, 7, 8, 10, 12)] == [0.0, 0.0, 0.25, 0.5, 1.0, 1.0]
    assert overlong_penalty(1, 2, rl) == 0.5  # a buffer cannot be longer than a reply
    played = group(1, [1.0, 0.0], turns=3)
    batch = gather([played], rl, {"toy": Limits(max_turns=9, max_new_tokens=4, max_context=99)})
    for t, episode in zip(played.trajectories, batch.episodes, strict=True):
        replies = [len(m.token_ids) for m in t.messages if m.role == "assistant"]
        assert episode.lengths == replies
        assert episode.rewards == pytest.approx([r - n / 4 for r, n in zip(t.rewards, replies, strict=True)])
    assert played.trajectories[0].rewards == [0.0, 0.0, 1.0]  # the recorded rewards do not change


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_reward_is_subtracted_per_token(estimator: Any) -> None:
    played = group(1, [1.0, 0.0])
    rl = RLSettings(kl_in="reward", kl_estimator=estimator, normalize_std=False)
    batch = gather([played], rl)
    totals = []
    for number, sample in enumerate(batch.samples):
        count = len(sample.logprobs)
        sample.old_logprobs = [-1.0 - 0.1 * i for i in range(count)]
        sample.reference_logprobs = [-1.5 + 0.3 * number] * count
        gaps = [p - q for p, q in zip(sample.old_logprobs, sample.reference_logprobs, strict=True)]
        kl = {"k1": gaps, "k2": [g * g / 2 for g in gaps], "k3": [math.exp(-g) - 1 + g for g in gaps]}[estimator]
        totals.append(1.0 - number - 0.3 * sum(kl))
    result = estimate(batch, rl, kl_coef=0.3)
    assert result.samples[0].advantages[0] == pytest.approx((totals[0] - totals[1]) / 2, rel=1e-5)


@pytest.mark.parametrize(("algorithm", "kept"), [("grpo", 2), ("rloo", 2), ("reinforce++", 4), ("ppo", 4)])
def test_only_algorithms_that_compare_groups_drop_those_of_equal_rewards(algorithm: Algorithm, kept: int) -> None:
    rl = RLSettings(algorithm=algorithm)
    batch = gather([group(1, [1.0, 0.0]), group(2, [1.0, 1.0])], rl)
    for sample in batch.samples:
        sample.values = [0.3] * len(sample.logprobs)
    assert len(estimate(batch, rl).samples) == kept


def test_an_episode_that_timed_out_is_trained_on_as_a_truncation() -> None:
    rl = RLSettings(algorithm="ppo")
    played = group(1, [0.0, 1.0])
    played.trajectories[0].stop = StopReason.TIMEOUT
    played.trajectories[0].messages.pop()  # the environment did not answer the last reply
    batch = gather([played], rl)
    assert (batch.truncated, batch.last_observation_missing) == ([True, False], [True, True])
    for sample in batch.samples:
        sample.values, sample.last_value = [0.6] * len(sample.logprobs), 99.0
    assert [e.last_value for e in estimate(batch, rl).episodes] == [0.6, 0.0]


@pytest.mark.parametrize("stop", [StopReason.MAX_CONTEXT, StopReason.MAX_TURNS])
def test_a_state_without_tokens_takes_the_last_value_the_critic_learns(stop: StopReason) -> None:
    """After a whole reply no token is sampled, so the critic's value there (99) was never trained."""
    turns = {"credit": "turns", "turn_discount": 0.5}
    for settings, expected in (({}, 0.6), (turns, (0.6 - 0.25) / 0.5), (turns | {"turn_discount": 0.0}, 0.0)):
        rl = RLSettings(algorithm="ppo", **settings)  # type: ignore[arg-type]
        played = group(1, [0.25], stop=stop)
        batch = gather([played], rl)
        (sample,) = batch.samples
        sample.values, sample.last_value = [0.3] * (len(sample.logprobs) - 1) + [0.6], 99.0
        assert estimate(batch, rl).episodes[0].last_value == pytest.approx(expected)
        played.trajectories[0].messages.pop()  # a reply that was cut: another token would have followed
        batch = gather([played], rl)
        batch.samples[0].values, batch.samples[0].last_value = sample.values, 0.9
        assert estimate(batch, rl).episodes[0].last_value == 0.9


def test_only_truncations_are_bootstrapped_and_only_if_enabled() -> None:
    played = group(1, [1.0, 0.0, 0.0])
    played.trajectories[1].stop = StopReason.MAX_TURNS
    played.trajectories[1].messages[-1].token_ids = [3]
    for rl, expected in (
        (RLSettings(algorithm="ppo"), [0.0, 0.7, 0.0]),
        (RLSettings(algorithm="ppo", bootstrap=False), [0.0] * 3),
    ):
        batch = gather([played], rl)
        for sample in batch.samples:
            sample.values, sample.last_value = [0.3] * len(sample.logprobs), 0.7
        assert [e.last_value for e in estimate(batch, rl).episodes] == expected


def test_a_flat_group_is_one_whose_episodes_cannot_be_compared() -> None:
    rl = RLSettings()
    assert is_flat(group(1, [0.1 + 0.2, 0.3]), rl)
    assert not is_flat(group(1, [0.0, 1e-3]), rl)
    failed = group(1, [0.0, 1.0])
    for episode in failed.trajectories:
        episode.stop = StopReason.ERROR
        assert is_flat(failed, rl)


def test_a_flat_group_is_told_by_the_rewards_that_are_learned_from() -> None:
    early, late = trajectory(1, turns=2, reward=0.0), trajectory(2, turns=2, reward=1.0)
    early.rewards[0] = 1.0
    equal_totals = Group(early.task, [early, late])
    assert is_flat(equal_totals, RLSettings())
    assert not is_flat(equal_totals, RLSettings(credit="turns"))
    rl, limits = RLSettings(overlong="penalty", overlong_buffer=4), {"toy": Limits(1, 4, 100)}
    for reward in (0.5, 1.0):  # the penalty takes 0.5 off the longer reply
        short, long = trajectory(1, turns=1, reward=0.5), trajectory(2, turns=1, reward=reward)
        for episode, length in ((short, 1), (long, 3)):
            reply = episode.messages[2]
            reply.token_ids, reply.logprobs = [1] * length, [-1.0] * length
        played = Group(short.task, [short, long])
        assert is_flat(played, rl, limits) == (reward == 1.0)
        assert is_flat(played, RLSettings()) == (reward == 0.5)


def test_weights_by_token_and_by_trajectory() -> None:
    short, long = Sample([1, 2], [False, True]), Sample([1, 2, 3, 4], [False, True, True, True])
    assert token_weights([short, long], "token") == [0.25, 0.25]
    assert token_weights([short, long], "trajectory") == [0.5, pytest.approx(1 / 6)]
    assert token_weights([short, long], "constant", 10) == [0.05, 0.05]
    assert token_weights([], "token") == token_weights([], "trajectory") == []


def test_a_trained_token_without_a_logprob_is_refused() -> None:
    sample = Sample([1, 2, 3], [False, True, True], [-1.0, math.nan], trajectory_id="t1")
    with pytest.raises(ValueError, match=r"t1: a trained token needs the sampler.s log-probability"):
        micro_batches([sample], [1.0], 100)


def test_a_trained_first_token_is_refused() -> None:
    with pytest.raises(ValueError, match="t2: the first token"):
        micro_batches([Sample([1, 2], [True, True], trajectory_id="t2")], [1.0], 100)


@pytest.mark.parametrize("name", ["advantages", "old_logprobs", "reference_logprobs", "values", "returns"])
def test_a_list_with_another_length_than_the_trained_tokens_is_refused(name: str) -> None:
    sample = Sample([1, 2, 3], [False, True, True], [-1.0, -1.0], trajectory_id="t3")
    setattr(sample, name, [0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match=f"t3: 2 trained tokens need as many {name}, got 3"):
        micro_batches([sample], [1.0], 100)


@pytest.mark.parametrize("aggregate", ["token", "trajectory", "constant"])
def test_a_step_with_nothing_to_train_on_is_not_an_error(aggregate: Any) -> None:
    played = [group(1, [1.0, 1.0]), group(2, [0.0, 0.0])]
    rl = RLSettings(kl_coef=0.0, aggregate=aggregate, normalize_std=False, resample_rounds=1)
    batch = estimate(gather(played, rl), rl)
    assert (batch.samples, batch.weights, batch.zero_variance_groups) == ([], [], 2)
