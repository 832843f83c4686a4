"""Advantage estimators: from the rewards of a batch of episodes to one advantage per action token.

Pure functions in a plain dict. Shapes: K turns and A action tokens of one episode. A reward belongs to a turn, and a
turn to its sampled tokens, so no token outside the loss gets a reward.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

from agentgym_rl.training.settings import RLSettings

EPSILON = 1e-6


@dataclass(slots=True)
class Episode:
    """The input of an estimator for one trajectory."""

    group: int
    """Number of the group, shared by the episodes of one task."""
    rewards: list[float]
    """K: reward of each turn."""
    lengths: list[int]
    """K: action tokens of each turn; they add up to A."""
    states: list[str | None] = field(default_factory=list)
    """K: key of the state in which each reply was given; None or empty if unknown."""
    penalties: list[float] = field(default_factory=list)
    """A: penalty subtracted from the reward at each token (KL in the reward); empty for none."""
    values: list[float] = field(default_factory=list)
    """A: the critic's value of the state before each token; empty without a critic."""
    last_value: float = 0.0
    """The critic's value of the state in which the episode was truncated; 0 if the episode ended."""
    sampled_by: list[str] = field(default_factory=list)
    """K: id of the episode that sampled each turn, in a tree; that of the first is the tree's. Empty otherwise."""
    attempts: list[int] = field(default_factory=list)
    """K: attempt of each turn, from 1, if attempts are trained by rewards of their own. Empty otherwise."""

    @property
    def turn_rewards(self) -> list[float]:
        """K: rewards minus the penalties of their tokens."""
        if not self.penalties:
            return list(self.rewards)
        ends = _ends(self.lengths)
        return [
            r - math.fsum(self.penalties[e - n : e]) for r, n, e in zip(self.rewards, self.lengths, ends, strict=True)
        ]

    @property
    def total(self) -> float:
        return math.fsum(self.rewards) - math.fsum(self.penalties)


@dataclass(slots=True)
class Estimate:
    """Results of an estimator, one list per episode."""

    advantages: list[list[float]]
    """A each."""
    returns: list[list[float]] = field(default_factory=list)
    """A each: regression targets of the critic; empty without a critic."""


class Repeated(list[float]):
    """One value for many tokens, which is sent to another process as two numbers. Do not change its items."""

    def __init__(self, value: float, count: int) -> None:
        super().__init__([value] * count)

    def __reduce__(self) -> Any:
        return Repeated, (self[0] if self else 0.0, len(self))


Estimator = Callable[[list[Episode], RLSettings], Estimate]
Baseline = Callable[[Sequence[float], Sequence[int]], list[float]]
"""(returns of a group, the episode of each) -> returns relative to a baseline."""


def grpo(episodes: list[Episode], settings: RLSettings) -> Estimate:
    """Return A = (G - mean G) / (std G + eps) over the group. Without the division it is Dr. GRPO.

    outcome: G is an episode's total, the same for all its turns. turns: G is a turn's discounted reward to go, compared
    with all turns of the group (process supervision). anchor: see `anchor_advantages`. std is the sample standard
    deviation. Shao et al. 2024 (arXiv 2402.03300), Liu et al. 2025 (arXiv 2503.20783).
    """

    def standardise(returns: Sequence[float], episode_indices: Sequence[int]) -> list[float]:
        return _standardise(returns, settings.normalize_std)

    return _by_group(episodes, settings, standardise)


def rloo(episodes: list[Episode], settings: RLSettings) -> Estimate:
    """Return A_i = G_i - mean of the other episodes' G. Ahmadian et al. 2024 (arXiv 2402.14740).

    outcome, turns and anchor as in `grpo`. The baseline of a turn is the mean over all turns of the other episodes.
    """
    return _by_group(episodes, settings, _leave_one_out)


def reinforce_plus_plus(episodes: list[Episode], settings: RLSettings) -> Estimate:
    """Return each token's reward to go minus the KL penalties to go, standardised over the batch's action tokens.

    Hu et al. 2025 (arXiv 2501.03262). There are no groups: one episode per task is enough.
    """
    return Estimate(whiten([_rewards_to_go(episode, settings) for episode in episodes]))


def reinforce_plus_plus_baseline(episodes: list[Episode], settings: RLSettings) -> Estimate:
    """Subtract the group mean, then standardise as REINFORCE++. Hu et al. 2025 (arXiv 2501.03262), section 3.

    A group with equal returns is 0 before the batch is standardised; the batch mean may still shift it.
    """

    def subtract_mean(returns: Sequence[float], episode_indices: Sequence[int]) -> list[float]:
        return _standardise(returns, divide=False)

    return Estimate(whiten(_by_group(episodes, settings, subtract_mean).advantages))


def ppo(episodes: list[Episode], settings: RLSettings) -> Estimate:
    """Return generalised advantages over action tokens; observations are skipped.

    delta_t = r_t + d_t V_{t+1} - V_t,  A_t = delta_t + d_t lambda A_{t+1},  returns = A + V. d_t is token_discount
    within a turn and turn_discount at its end (both 1 for outcome, which pays at the last token). The value after the
    last token is `last_value`. Schulman et al. 2016 (arXiv 1506.02438), 2017 (arXiv 1707.06347).
    """
    gae = two_level_gae if settings.credit == "two_level" else token_gae
    advantages = [gae(episode, settings) for episode in episodes]
    returns = [[a + v for a, v in zip(own, e.values, strict=True)] for own, e in zip(advantages, episodes, strict=True)]
    return Estimate(whiten(advantages) if settings.normalize_std else advantages, returns)


ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce++": reinforce_plus_plus,
    "reinforce++-baseline": reinforce_plus_plus_baseline,
    "ppo": ppo,
}


def token_gae(episode: Episode, settings: RLSettings) -> list[float]:
    """Return GAE as one recursion over all action tokens of an episode (see `ppo`)."""
    rewards, discounts = _token_rewards(episode, settings)
    advantages = [0.0] * len(rewards)
    following, next_value = 0.0, episode.last_value
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + discounts[t] * next_value - episode.values[t]
        following = delta + discounts[t] * settings.gae_lambda * following
        advantages[t], next_value = following, episode.values[t]
    return advantages


def two_level_gae(episode: Episode, settings: RLSettings) -> list[float]:
    """Return GAE over turns, whose lambda-return is the final reward of a GAE over the tokens of each turn.

    With V_k the value before a turn's first token, target_k = r_k + gamma (V_{k+1} + lambda A_{k+1}) and
    A_k = target_k - V_k; within the turn delta_t = V_{t+1} - V_t, and target_k - V_t at its last token. After the
    Bi-Level GAE of Wang et al. 2025 (VAGEN), which gives A_k itself to the last token and so counts V_k twice.
    """
    gamma, lam = settings.turn_discount, settings.turn_lambda
    advantages: list[float] = [0.0] * len(episode.values)
    next_return = episode.last_value
    for reward, length, end in reversed(
        list(zip(episode.rewards, episode.lengths, _ends(episode.lengths), strict=True))
    ):
        target = reward + gamma * next_return
        if not length:  # no token was sampled in this turn: its reward goes to the turn before
            next_return = target
            continue
        advantage, next_value = 0.0, target
        for t in reversed(range(end - length, end)):
            discount = 1.0 if t == end - 1 else settings.token_discount
            penalty = episode.penalties[t] if episode.penalties else 0.0
            delta = discount * next_value - penalty - episode.values[t]
            advantage = delta + discount * settings.gae_lambda * advantage
            advantages[t], next_value = advantage, episode.values[t]
        first, penalties = episode.values[end - length], math.fsum(episode.penalties[end - length : end])
        next_return = first + lam * (target - penalties - first)
    return advantages


def anchor_advantages(episodes: list[Episode], settings: RLSettings, baseline: Baseline) -> list[list[float]]:
    """Compare each turn's discounted reward to go with those of the group's turns in the same state; K each.

    A state that occurs once gives 0. Feng et al. 2025, GiGPO (arXiv 2505.10978).
    """
    turns_by_state: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
    for i, episode in enumerate(episodes):
        returns = _discounted(episode.turn_rewards, settings.turn_discount)
        for k, (state, value) in enumerate(zip(episode.states, returns, strict=False)):
            if state is not None:
                turns_by_state[state].append((i, k, value))
    advantages = [[0.0] * len(episode.rewards) for episode in episodes]
    for turns in turns_by_state.values():
        if len(turns) > 1:
            # Within a state every turn counts as an episode, so turns of the same episode are compared too.
            for (i, k, _), a in zip(turns, baseline([v for *_, v in turns], range(len(turns))), strict=True):
                advantages[i][k] = a
    return advantages


def tree_advantages(episodes: list[Episode], settings: RLSettings, baseline: Baseline) -> list[list[float]]:
    """Compare each path with all paths of the group and with those of its tree, and add both; K each.

    A turn that several paths share gets the mean of their advantages, because it led to all of them. A group with one
    tree is compared once. Ji et al. 2025, Tree-GRPO (arXiv 2509.21240), where every path trains its shared turns again.
    """
    trees: dict[str, list[int]] = defaultdict(list)
    for i, episode in enumerate(episodes):
        trees[episode.sampled_by[0]].append(i)
    per_turn = _turn_advantages(episodes, settings, baseline)
    for members in trees.values() if len(trees) > 1 else ():
        within = _turn_advantages([episodes[i] for i in members], settings, baseline)
        for i, row in zip(members, within, strict=True):
            per_turn[i] = [a + b for a, b in zip(per_turn[i], row, strict=True)]
    through: dict[tuple[str, int], list[float]] = defaultdict(list)
    for episode, row in zip(episodes, per_turn, strict=True):
        for k, (sampler, advantage) in enumerate(zip(episode.sampled_by, row, strict=True)):
            through[sampler, k].append(advantage)
    return [[fmean(through[sampler, k]) for k, sampler in enumerate(episode.sampled_by)] for episode in episodes]


def attempt_advantages(group: list[Episode], settings: RLSettings, baseline: Baseline) -> list[list[float]]:
    """Compare the attempts of a group by returns of their own; K each. A reflection belongs to the attempt after it."""
    advantages = [[0.0] * len(episode.rewards) for episode in group]
    for attempt, returns in attempt_returns(group, settings).items():
        relative = baseline(list(returns.values()), range(len(returns)))
        for i, advantage in zip(returns, relative, strict=True):
            for k, number in enumerate(group[i].attempts):
                if number == attempt:
                    advantages[i][k] = advantage
    return advantages


def attempt_returns(group: list[Episode], settings: RLSettings) -> dict[int, dict[int, float]]:
    """Return the returns of each attempt that at least two episodes began, by attempt and index of the episode.

    First stage: an attempt's reward, without the first attempt. Second stage: every attempt's reward, plus `bonus`
    times its gain over the attempt before. So nothing is gained by a bad first attempt, whose turns get no share of
    the bonus. Kumar et al. 2024, SCoRe (arXiv 2409.12917).
    """
    assert settings.correction is not None
    first_stage, bonus = settings.correction.first_stage_steps > 0, settings.correction.bonus
    rewards = [attempt_rewards(episode) for episode in group]
    returns: dict[int, dict[int, float]] = {}
    for attempt in range(1, 1 + max((number for row in rewards for number in row), default=0)):
        members = [i for i, row in enumerate(rewards) if attempt in row]
        if len(members) < 2 or (first_stage and attempt == 1):
            continue
        returns[attempt] = {}
        for i in members:
            row = rewards[i]
            gain = 0.0 if first_stage or attempt == 1 else row[attempt] - row.get(attempt - 1, 0.0)
            returns[attempt][i] = row[attempt] + bonus * gain
    return returns


def attempt_rewards(episode: Episode) -> dict[int, float]:
    """Return the reward of every attempt that was begun, by its number from 1."""
    rewards: dict[int, float] = defaultdict(float)
    for number, reward in zip(episode.attempts, episode.rewards, strict=True):
        rewards[number] += reward
    return rewards


def return_spread(group: list[Episode], settings: RLSettings) -> float:
    """Return the standard deviation of the totals of a group's episodes; 0 if there are fewer than two.

    With correction: the largest one of the returns of an attempt.
    """
    totals = {0: dict(enumerate(e.total for e in group))}
    compared = totals if settings.correction is None else attempt_returns(group, settings)
    return max((pstdev(returns.values()) for returns in compared.values() if len(returns) > 1), default=0.0)


def whiten(values: list[list[float]]) -> list[list[float]]:
    """Return (x - mean) / (std + eps) over all tokens of the batch. A batch of equal values becomes 0."""
    standard = iter(_standardise([x for row in values for x in row], divide=True))
    return [[next(standard) for _ in row] for row in values]


def _by_group(episodes: list[Episode], settings: RLSettings, baseline: Baseline) -> Estimate:
    """Subtract a baseline from the returns of each group and assign the results to tokens."""
    per_turn: list[list[float]] = [[] for _ in episodes]
    compare = _turn_advantages if settings.tree is None else tree_advantages
    compare = compare if settings.correction is None else attempt_advantages
    for members in _groups(episodes):
        for i, row in zip(members, compare([episodes[i] for i in members], settings, baseline), strict=True):
            per_turn[i] = row
    return Estimate([_to_tokens(row, e.lengths) for row, e in zip(per_turn, episodes, strict=True)])


def _turn_advantages(group: list[Episode], settings: RLSettings, baseline: Baseline) -> list[list[float]]:
    """Return the advantages of the turns of each episode of a group, K each."""
    if len(group) < 2:  # comparing an episode's turns with each other says nothing about what to do
        return [[0.0] * len(group[0].rewards)]
    if settings.credit == "turns":
        returns = [_discounted(e.turn_rewards, settings.turn_discount) for e in group]
        episode_indices = [i for i, row in enumerate(returns) for _ in row]
        flat = iter(baseline([g for row in returns for g in row], episode_indices))
        return [[next(flat) for _ in row] for row in returns]
    totals = baseline([e.total for e in group], range(len(group)))
    advantages = [[a] * len(e.rewards) for a, e in zip(totals, group, strict=True)]
    if settings.credit != "anchor":
        return advantages
    anchored = anchor_advantages(group, settings, baseline)
    return [
        [a + settings.anchor_weight * b for a, b in zip(row, anchored_row, strict=True)]
        for row, anchored_row in zip(advantages, anchored, strict=True)
    ]


def _standardise(values: Sequence[float], divide: bool) -> list[float]:
    # Equal values minus their mean leave rounding noise, which the division would amplify.
    if len(values) < 2 or max(values) - min(values) < EPSILON:
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    scale = math.sqrt(variance) + EPSILON if divide else 1.0
    return [(v - mean) / scale for v in values]


def _leave_one_out(values: Sequence[float], episode_indices: Sequence[int]) -> list[float]:
    """Subtract from each value the mean of those of other episodes. Return 0 if there are none."""
    if not values or max(values) - min(values) < EPSILON:
        return [0.0] * len(values)
    total, count = math.fsum(values), len(values)
    by_episode: dict[int, list[float]] = defaultdict(list)
    for value, episode in zip(values, episode_indices, strict=True):
        by_episode[episode].append(value)
    sums = {episode: (math.fsum(own_values), len(own_values)) for episode, own_values in by_episode.items()}
    return [
        value - (total - sums[episode][0]) / (count - sums[episode][1]) if count > sums[episode][1] else 0.0
        for value, episode in zip(values, episode_indices, strict=True)
    ]


def _groups(episodes: list[Episode]) -> Iterable[list[int]]:
    members: dict[int, list[int]] = defaultdict(list)
    for i, episode in enumerate(episodes):
        members[episode.group].append(i)
    return members.values()


def _discounted(rewards: list[float], discount: float) -> list[float]:
    """Return G_k = r_k + discount * G_{k+1}, K."""
    returns, following = [0.0] * len(rewards), 0.0
    for k in reversed(range(len(rewards))):
        following = rewards[k] + discount * following
        returns[k] = following
    return returns


def _rewards_to_go(episode: Episode, settings: RLSettings) -> list[float]:
    rewards, discounts = _token_rewards(episode, settings)
    following = 0.0
    for t in reversed(range(len(rewards))):
        following = rewards[t] + discounts[t] * following
        rewards[t] = following
    return rewards


def _token_rewards(episode: Episode, settings: RLSettings) -> tuple[list[float], list[float]]:
    """Return (A rewards, A discounts to the next token). A turn pays at its last token, outcome at the very last."""
    count, outcome = sum(episode.lengths), settings.credit == "outcome"
    rewards = [-p for p in episode.penalties] or [0.0] * count
    discounts = [1.0 if outcome else settings.token_discount] * count
    if outcome:
        rewards[-1] += math.fsum(episode.rewards)
        return rewards, discounts
    for reward, length, end in zip(episode.rewards, episode.lengths, _ends(episode.lengths), strict=True):
        if length:
            rewards[end - 1] += reward
            discounts[end - 1] = settings.turn_discount
        elif end:  # no token was sampled in this turn: its reward goes to the token before, if there is one
            rewards[end - 1] += discounts[end - 1] * reward
            discounts[end - 1] *= settings.turn_discount
    return rewards, discounts


def _to_tokens(per_turn: list[float], lengths: list[int]) -> list[float]:
    if len(set(per_turn)) == 1:
        return Repeated(per_turn[0], sum(lengths))
    tokens: list[float] = []
    for advantage, count in zip(per_turn, lengths, strict=True):
        tokens += [advantage] * count
    return tokens


def _ends(lengths: list[int]) -> list[int]:
    """Return the index after the last token of each turn, K."""
    ends, end = [], 0
    for length in lengths:
        end += length
        ends.append(end)
    return ends
