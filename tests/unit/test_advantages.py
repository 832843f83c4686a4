"""Advantage estimators against slow versions of the formulas: explicit sums instead of recursion."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_for_tests import few

from agentgym_rl.training.advantages import ESTIMATORS, Episode
from agentgym_rl.training.settings import INVALID, RLSettings

ALGORITHMS = ("grpo", "rloo", "reinforce++", "reinforce++-baseline", "ppo")
CREDITS = ("outcome", "turns", "two_level", "anchor")
VALID = [pair for pair in product(ALGORITHMS, CREDITS) if pair not in INVALID]
NUMBER = st.floats(-2, 2).map(lambda x: round(x, 2))


@dataclass
class Slow:
    """One episode, token by token."""

    episode: Episode
    credit: str
    turn_discount: float
    token_discount: float

    def __post_init__(self) -> None:
        e = self.episode
        self.turn = [k for k, n in enumerate(e.lengths) for _ in range(n)]
        self.count = len(self.turn)
        self.penalty = e.penalties or [0.0] * self.count
        self.value = [*(e.values or [0.0] * self.count), e.last_value]

    def is_last_of_turn(self, t: int) -> bool:
        return t == self.count - 1 or self.turn[t + 1] != self.turn[t]

    def reward(self, t: int) -> float:
        """Return the reward of token t."""
        e = self.episode
        if self.credit == "outcome":
            return (sum(e.rewards) if t == self.count - 1 else 0.0) - self.penalty[t]
        return (e.rewards[self.turn[t]] if self.is_last_of_turn(t) else 0.0) - self.penalty[t]

    def discount(self, t: int) -> float:
        """Return the discount from token t to the next."""
        if self.credit == "outcome":
            return 1.0
        return self.turn_discount if self.is_last_of_turn(t) else self.token_discount

    def turn_reward(self, k: int) -> float:
        return self.episode.rewards[k] - sum(p for p, turn in zip(self.penalty, self.turn, strict=True) if turn == k)

    def turn_return(self, k: int) -> float:
        """Return the discounted reward to go of a turn."""
        last = len(self.episode.rewards)
        return sum(self.turn_discount ** (m - k) * self.turn_reward(m) for m in range(k, last))

    def total(self) -> float:
        return sum(self.episode.rewards) - sum(self.penalty)

    def return_of_token(self, t: int) -> float:
        result = 0.0
        for later in range(t, self.count):
            weight = float(numpy.prod([self.discount(s) for s in range(t, later)]))
            result += weight * self.reward(later)
        return result

    def gae(self, t: int, lam: float) -> float:
        result = 0.0
        for later in range(t, self.count):
            weight = float(numpy.prod([lam * self.discount(s) for s in range(t, later)]))
            error = self.reward(later) + self.discount(later) * self.value[later + 1] - self.value[later]
            result += weight * error
        return result

    def value_of_turn(self, k: int) -> float:
        return self.episode.last_value if k == len(self.episode.rewards) else self.value[self.turn.index(k)]

    def turn_gae(self, k: int, lam: float) -> float:
        result = 0.0
        for m in range(k, len(self.episode.rewards)):
            error = self.turn_reward(m) + self.turn_discount * self.value_of_turn(m + 1) - self.value_of_turn(m)
            result += (self.turn_discount * lam) ** (m - k) * error
        return result

    def two_level(self, t: int, lam: float, turn_lambda: float) -> float:
        """Return GAE within the turn, with the lambda-return of the GAE over turns as its final reward."""
        k = self.turn[t]
        following = self.value_of_turn(k + 1) + turn_lambda * self.turn_gae(k + 1, turn_lambda)
        target = self.episode.rewards[k] + self.turn_discount * following
        result, weight = 0.0, 1.0
        for s in range(t, self.count):
            if self.is_last_of_turn(s):
                return result + weight * (target - self.penalty[s] - self.value[s])
            result += weight * (self.token_discount * self.value[s + 1] - self.penalty[s] - self.value[s])
            weight *= self.token_discount * lam
        raise AssertionError("a turn has a last token")


def standard(values: list[float], divide: bool = True) -> list[float]:
    if len(values) < 2 or max(values) - min(values) < 1e-6:
        return [0.0] * len(values)
    centred = numpy.array(values) - numpy.mean(values)
    return list(centred / (numpy.std(values, ddof=1) + 1e-6) if divide else centred)


def against_others(values: list[float], episode_indices: list[int]) -> list[float]:
    """Subtract from each value the mean of other episodes' values. Return 0 if alone, or if all are equal."""
    if max(values) - min(values) < 1e-6:
        return [0.0] * len(values)
    result = []
    for value, episode in zip(values, episode_indices, strict=True):
        others = [v for v, o in zip(values, episode_indices, strict=True) if o != episode]
        result.append(value - float(numpy.mean(others)) if others else 0.0)
    return result


def by_hand(episodes: list[Episode], rl: RLSettings) -> list[list[float]]:
    """Return one advantage per token of each episode."""
    slow = [Slow(e, rl.credit, rl.turn_discount, rl.token_discount) for e in episodes]
    if rl.algorithm == "ppo":
        raw = [
            [
                s.two_level(t, rl.gae_lambda, rl.turn_lambda) if rl.credit == "two_level" else s.gae(t, rl.gae_lambda)
                for t in range(s.count)
            ]
            for s in slow
        ]
        return whitened(raw) if rl.normalize_std else raw
    if rl.algorithm == "reinforce++":
        return whitened([[s.return_of_token(t) for t in range(s.count)] for s in slow])

    def compared(values: list[float], episode_indices: list[int]) -> list[float]:
        if rl.algorithm == "rloo":
            return against_others(values, episode_indices)
        return standard(values, divide=rl.normalize_std and rl.algorithm == "grpo")

    result: list[list[float]] = [[] for _ in episodes]
    for number in {e.group for e in episodes}:
        members = [i for i, e in enumerate(episodes) if e.group == number]
        turns = [(i, k) for i in members for k in range(len(episodes[i].rewards))]
        if rl.credit == "turns":
            values = compared([slow[i].turn_return(k) for i, k in turns], [i for i, _ in turns])
        else:
            whole = dict(zip(members, compared([slow[i].total() for i in members], members), strict=True))
            values = [whole[i] for i, _ in turns]
        if rl.credit == "anchor":
            for n, (i, k) in enumerate(turns):
                state = episodes[i].states[k]
                same = [(j, m) for j, m in turns if episodes[j].states[m] == state]
                if state is not None and len(same) > 1:
                    anchored = compared([slow[j].turn_return(m) for j, m in same], list(range(len(same))))
                    values[n] += rl.anchor_weight * anchored[same.index((i, k))]
        if len(members) == 1:
            values = [0.0] * len(turns)  # nothing to compare with
        for (i, k), value in zip(turns, values, strict=True):
            result[i] += [value] * episodes[i].lengths[k]
    return whitened(result) if rl.algorithm == "reinforce++-baseline" else result


def whitened(values: list[list[float]]) -> list[list[float]]:
    flat = standard([x for row in values for x in row])
    return [[flat.pop(0) for _ in row] for row in values]


@st.composite
def episodes(draw: st.DrawFn) -> list[Episode]:
    """Draw 1 to 3 groups of 1 to 4 episodes of 1 to 4 turns, with every input of an estimator, in any order."""
    batch = []
    for number in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(1, 4))):
            lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
            per_token = st.lists(NUMBER, min_size=sum(lengths), max_size=sum(lengths))
            reward = st.one_of(NUMBER, st.sampled_from([0.0, 1.0]))
            batch.append(
                Episode(
                    number,
                    draw(st.lists(reward, min_size=len(lengths), max_size=len(lengths))),
                    lengths,
                    draw(st.lists(st.sampled_from(["x", "y", None]), min_size=len(lengths), max_size=len(lengths))),
                    draw(st.one_of(st.just([]), per_token)),
                    draw(per_token),
                    draw(st.one_of(st.just(0.0), NUMBER)),
                )
            )
    return draw(st.permutations(batch))


DISCOUNT = st.sampled_from([1.0, 0.9, 0.5, 0.0])


@pytest.mark.parametrize(("algorithm", "credit"), VALID)
@few(20)
@given(data=st.data(), batch=episodes(), normalize_std=st.booleans())
def test_estimators_agree_with_their_formulas(
    algorithm: Any, credit: Any, data: st.DataObject, batch: list[Episode], normalize_std: bool
) -> None:
    rl = RLSettings(
        algorithm=algorithm,
        credit=credit,
        normalize_std=normalize_std,
        turn_discount=data.draw(DISCOUNT),
        token_discount=data.draw(DISCOUNT),
        gae_lambda=data.draw(DISCOUNT),
        turn_lambda=data.draw(DISCOUNT),
        anchor_weight=data.draw(st.sampled_from([1.0, 0.3])),
    )
    result = ESTIMATORS[algorithm](batch, rl)
    for actual, expected in zip(result.advantages, by_hand(batch, rl), strict=True):
        numpy.testing.assert_allclose(actual, expected, rtol=1e-7, atol=1e-7)
    if algorithm != "ppo":
        assert result.returns == []
        return
    raw = by_hand(batch, replace(rl, normalize_std=False))
    for returns, advantages, episode in zip(result.returns, raw, batch, strict=True):
        numpy.testing.assert_allclose(returns, numpy.add(advantages, episode.values), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(("algorithm", "credit"), VALID)
def test_a_reward_on_the_last_turn_reaches_every_action_token(algorithm: Any, credit: Any) -> None:
    won = Episode(0, [0.0, 0.0, 0.0, 1.0], [2, 1, 3, 2], ["x", "y", "z", "w"], values=[0.0] * 8)
    lost = Episode(0, [0.0, 0.0], [1, 4], ["x", "y"], values=[0.0] * 5)
    rl = RLSettings(algorithm=algorithm, credit=credit, turn_discount=0.97, token_discount=0.99)
    good, bad = ESTIMATORS[algorithm]([won, lost], rl).advantages
    assert (len(good), len(bad)) == (8, 5)
    assert min(good) > 0 > max(bad)


@pytest.mark.parametrize("credit", ["outcome", "turns", "anchor"])
@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "reinforce++-baseline"])
def test_a_group_of_equal_rewards_has_advantages_of_exactly_zero(algorithm: Any, credit: Any) -> None:
    rl = RLSettings(algorithm=algorithm, credit=credit if (algorithm, credit) not in INVALID else "outcome")
    for rewards in ([0.1 + 0.2, 0.3, 0.3], [1.0], [0.0, 0.0]):
        batch = [Episode(0, [r], [2], ["x"]) for r in rewards]
        assert ESTIMATORS[algorithm](batch, rl).advantages == [[0.0, 0.0]] * len(rewards)
    assert all(a != 0.0 for a, _ in ESTIMATORS[algorithm]([Episode(0, [r], [2]) for r in (0.0, 1e-3)], rl).advantages)


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "reinforce++", "reinforce++-baseline"])
def test_a_reward_given_to_all_changes_nothing(algorithm: Any) -> None:
    rl = RLSettings(algorithm=algorithm)
    results = []
    for shift in (0.0, 7.0):
        batch = [Episode(i // 2, [r + shift], [1 + i]) for i, r in enumerate((0.0, 1.0, 0.3, 0.9))]
        results.append(ESTIMATORS[algorithm](batch, rl).advantages)
    for before, after in zip(*results, strict=True):
        numpy.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-9)


@few(20)
@given(batch=episodes())
def test_gae_with_lambdas_and_discounts_of_one_is_return_minus_value(batch: list[Episode]) -> None:
    for credit in ("outcome", "turns", "two_level"):
        rl = RLSettings(algorithm="ppo", credit=credit, turn_lambda=1.0, normalize_std=False)  # type: ignore[arg-type]
        for episode, returns in zip(batch, ESTIMATORS["ppo"](batch, rl).returns, strict=True):
            slow = Slow(episode, "turns", 1.0, 1.0)
            expected = [slow.return_of_token(t) + episode.last_value for t in range(slow.count)]
            if credit == "outcome":  # everything is paid at the end
                missing = sum(episode.rewards)
                expected = [missing + episode.last_value - sum(slow.penalty[t:]) for t in range(slow.count)]
            numpy.testing.assert_allclose(returns, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("credit", ["turns", "two_level"])
def test_the_reward_of_a_turn_without_tokens_goes_to_the_turns_before(credit: Any) -> None:
    rl = RLSettings(algorithm="ppo", credit=credit, turn_discount=0.5, normalize_std=False, turn_lambda=1.0)
    episode = Episode(0, [3.0, 1.0, 2.0, 4.0], [0, 2, 0, 1], values=[0.0] * 3)
    (returns,) = ESTIMATORS["ppo"]([episode], rl).returns
    assert returns == [1 + 0.5 * 2 + 0.25 * 4] * 2 + [4.0]  # the first turn's 3 goes to no token


def test_an_exact_critic_leaves_no_advantage_even_after_a_truncation() -> None:
    exact = Episode(0, [0.0, 1.0], [2, 2], values=[1.0] * 4)
    rl = RLSettings(algorithm="ppo", normalize_std=False, gae_lambda=0.9)
    assert ESTIMATORS["ppo"]([exact], rl).advantages == [[0.0] * 4]
    cut = Episode(0, [0.0], [2], values=[1.0] * 2, last_value=1.0)
    assert ESTIMATORS["ppo"]([cut], rl).advantages == [[0.0] * 2]
    ended = replace(cut, last_value=0.0)
    assert max(ESTIMATORS["ppo"]([ended], rl).advantages[0]) < 0.0


def test_the_sum_of_all_turns_rewards_counts_for_outcome() -> None:
    early, late = Episode(0, [1.0, 0.0, 0.0], [1, 1, 1]), Episode(0, [0.0, 0.0, 1.0], [1, 1, 1])
    other = Episode(0, [0.0], [2])
    first, second, third = ESTIMATORS["grpo"]([early, late, other], RLSettings(normalize_std=False)).advantages
    assert first == second == pytest.approx([1 / 3] * 3)
    assert third == pytest.approx([-2 / 3] * 2)


def test_gigpo_tells_two_turns_of_a_lost_episode_apart() -> None:
    """State x has a reply that led to a win and one that did not; state y has a single reply."""
    won, lost = Episode(0, [0.0, 1.0], [1, 1], ["x", "z"]), Episode(0, [0.0, 0.0], [1, 1], ["x", "y"])
    rl = RLSettings(credit="anchor", normalize_std=False, turn_discount=0.5)
    good, bad = ESTIMATORS["grpo"]([won, lost], rl).advantages
    assert good == [0.5 + 0.25, 0.5]
    assert bad == [-0.5 - 0.25, -0.5]
