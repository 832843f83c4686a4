"""Advantage estimators: what a batch of episodes was paid in, one advantage per action token out.

Pure functions in a plain dict. K turns and A action tokens of one episode. A reward belongs to a turn, a turn to its
sampled tokens: no reward can fall on a token outside the loss.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from agentgym_rl.training.settings import RLSettings

EPSILON = 1e-6


@dataclass(slots=True)
class Episode:
    """All an estimator sees of one trajectory."""

    group: int
    """Episodes of one task share it."""
    rewards: list[float]
    """K."""
    lengths: list[int]
    """K: action tokens of each turn; they add up to A."""
    states: list[str | None] = field(default_factory=list)
    """K: equal keys mean that the reply was given in the same state; None or empty where nobody can tell."""
    penalties: list[float] = field(default_factory=list)
    """A: what is taken off the reward at each token (KL in the reward); empty for nothing."""
    values: list[float] = field(default_factory=list)
    """A: the critic's value of the state before each token; empty without a critic."""
    last_value: float = 0.0
    """The critic's value of the state the episode was truncated in; 0 where it truly ended."""

    @property
    def turn_rewards(self) -> list[float]:
        """K: rewards less the penalties of their tokens."""
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
    """Of each episode, in order."""

    advantages: list[list[float]]
    """A each."""
    returns: list[list[float]] = field(default_factory=list)
    """A each: what the critic should have said; empty without a critic."""


Estimator = Callable[[list[Episode], RLSettings], Estimate]


def grpo(episodes: list[Episode], settings: RLSettings) -> Estimate:
    """A = (G - mean G) / (std G + eps) over the group; without the division it is Dr. GRPO.

    outcome: G is an episode's total, the same for all its turns. turns: G is a turn's discounted reward to go, compared
    with those of all turns of the group (process supervision). anchor: see `anchor_advantages`. std is that of a
    sample. Shao et al. 2024 (arXiv 2402.03300), Liu et al. 2025 (arXiv 2503.20783).
    """

    def centre(returns: Sequence[float], owners: Sequence[int]) -> list[float]:
        return _standardise(returns, settings.normalize_std)

    return _by_group(episodes, settings, centre)


def rloo(episodes: list[Episode], settings: RLSettings) -> Estimate:
    """A_i = G_i - mean of the other episodes' G. Ahmadian et al. 2024 (arXiv 2402.14740).

    outcome, turns and anchor as in `grpo`; the baseline of a turn is the mean over all turns of the other episodes.
    """
    return _by_group(episodes, settings, _leave_one_out)


def reinforce_plus_plus(episodes: list[Episode], settings: RLSettings) -> Estimate:
    """Reward to go at every token, less the KL penalties to go, standardised over all action tokens of the batch.

    Hu et al. 2025 (arXiv 2501.03262). There is no group: one episode a task will do.
    """
    return Estimate(whiten([_rewards_to_go(episode, settings) for episode in episodes]))


def reinforce_plus_plus_baseline(episodes: list[Episode], settings: RLSettings) -> Estimate:
    """As REINFORCE++, after the mean over the group has been taken off. Hu et al. 2025 (arXiv 2501.03262), section 3.

    A group whose returns are all equal is 0 before the batch is standardised; the batch mean may still move it.
    """

    def centre(returns: Sequence[float], owners: Sequence[int]) -> list[float]:
        return _standardise(returns, divide=False)

    return Estimate(whiten(_by_group(episodes, settings, centre).advantages))


def ppo(episodes: list[Episode], settings: RLSettings) -> Estimate:
    """Generalised advantage estimation over action tokens; observations take no part.

    delta_t = r_t + d_t V_{t+1} - V_t,  A_t = delta_t + d_t lambda A_{t+1},  returns = A + V. d_t is token_discount
    within a turn and turn_discount at its end (both 1 for outcome, which pays at the last token). After the last token
    comes `last_value`. Schulman et al. 2016 (arXiv 1506.02438), 2017 (arXiv 1707.06347).
    """
    gae = two_level_gae if settings.credit == "two_level" else token_gae
    raw = [gae(episode, settings) for episode in episodes]
    returns = [[a + v for a, v in zip(some, e.values, strict=True)] for some, e in zip(raw, episodes, strict=True)]
    return Estimate(whiten(raw) if settings.normalize_std else raw, returns)


ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce++": reinforce_plus_plus,
    "reinforce++-baseline": reinforce_plus_plus_baseline,
    "ppo": ppo,
}


def token_gae(episode: Episode, settings: RLSettings) -> list[float]:
    """One recursion over all action tokens of an episode (see `ppo`)."""
    rewards, discounts = _token_rewards(episode, settings)
    advantages = [0.0] * len(rewards)
    following, next_value = 0.0, episode.last_value
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + discounts[t] * next_value - episode.values[t]
        following = delta + discounts[t] * settings.gae_lambda * following
        advantages[t], next_value = following, episode.values[t]
    return advantages


def two_level_gae(episode: Episode, settings: RLSettings) -> list[float]:
    """GAE over turns, whose lambda-return is then the reward at the end of a GAE over the tokens of each turn.

    With V_k the value before a turn's first token, target_k = r_k + gamma (V_{k+1} + lambda A_{k+1}) and
    A_k = target_k - V_k; within the turn delta_t = V_{t+1} - V_t, and target_k - V_t at its last token. After the
    Bi-Level GAE of Wang et al. 2025 (VAGEN), which gives A_k itself to the last token and so counts V_k twice.
    """
    gamma, lam = settings.turn_discount, settings.turn_lambda
    advantages: list[float] = [0.0] * len(episode.values)
    beyond = episode.last_value
    for reward, length, end in reversed(
        list(zip(episode.rewards, episode.lengths, _ends(episode.lengths), strict=True))
    ):
        target = reward + gamma * beyond
        if not length:  # nothing was sampled in this turn: what it was paid belongs to what came before
            beyond = target
            continue
        inside, ahead = 0.0, target
        for t in reversed(range(end - length, end)):
            discount = 1.0 if t == end - 1 else settings.token_discount
            penalty = episode.penalties[t] if episode.penalties else 0.0
            inside = discount * ahead - penalty - episode.values[t] + discount * settings.gae_lambda * inside
            advantages[t], ahead = inside, episode.values[t]
        first, paid = episode.values[end - length], math.fsum(episode.penalties[end - length : end])
        beyond = first + lam * (target - paid - first)
    return advantages


def anchor_advantages(
    episodes: list[Episode], settings: RLSettings, centre: Callable[[Sequence[float], Sequence[int]], list[float]]
) -> list[list[float]]:
    """K each: a turn's discounted reward to go compared with those of turns that the group took in the same state.

    A state met once says nothing: 0. Feng et al. 2025, GiGPO (arXiv 2505.10978).
    """
    found: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
    for i, episode in enumerate(episodes):
        returns = _discounted(episode.turn_rewards, settings.turn_discount)
        for k, (state, value) in enumerate(zip(episode.states, returns, strict=False)):
            if state is not None:
                found[state].append((i, k, value))
    advantages = [[0.0] * len(episode.rewards) for episode in episodes]
    for turns in found.values():
        if len(turns) > 1:
            # Within a state every turn is compared with every other, the same episode's included.
            for (i, k, _), a in zip(turns, centre([v for *_, v in turns], range(len(turns))), strict=True):
                advantages[i][k] = a
    return advantages


def whiten(values: list[list[float]]) -> list[list[float]]:
    """(x - mean) / (std + eps) over all tokens of the batch; a batch of equal values becomes 0."""
    everything = [x for some in values for x in some]
    standard = iter(_standardise(everything, divide=True))
    return [[next(standard) for _ in some] for some in values]


def _by_group(
    episodes: list[Episode],
    settings: RLSettings,
    centre: Callable[[Sequence[float], Sequence[int]], list[float]],
) -> Estimate:
    """Compare returns within each group by `centre(returns, episode of each)` and hand them to tokens."""
    per_turn: list[list[float]] = [[] for _ in episodes]
    for members in _groups(episodes):
        group = [episodes[i] for i in members]
        if len(group) < 2:  # its turns would be compared with each other, which says nothing about what to do
            found = [[0.0] * len(group[0].rewards)]
        elif settings.credit == "turns":
            returns = [_discounted(e.turn_rewards, settings.turn_discount) for e in group]
            owners = [i for i, some in enumerate(returns) for _ in some]
            flat = iter(centre([g for some in returns for g in some], owners))
            found = [[next(flat) for _ in some] for some in returns]
        else:
            whole = centre([e.total for e in group], range(len(group)))
            found = [[a] * len(e.rewards) for a, e in zip(whole, group, strict=True)]
        if settings.credit == "anchor" and len(group) > 1:
            anchored = anchor_advantages(group, settings, centre)
            found = [
                [a + settings.anchor_weight * b for a, b in zip(some, others, strict=True)]
                for some, others in zip(found, anchored, strict=True)
            ]
        for i, some in zip(members, found, strict=True):
            per_turn[i] = some
    return Estimate([_to_tokens(some, e.lengths) for some, e in zip(per_turn, episodes, strict=True)])


def _standardise(values: Sequence[float], divide: bool) -> list[float]:
    # Equal values leave rounding noise behind the mean, which the division would blow up.
    if len(values) < 2 or max(values) - min(values) < EPSILON:
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    scale = math.sqrt(variance) + EPSILON if divide else 1.0
    return [(v - mean) / scale for v in values]


def _leave_one_out(values: Sequence[float], owners: Sequence[int]) -> list[float]:
    """Each value less the mean of those with another owner; 0 where there is none."""
    if not values or max(values) - min(values) < EPSILON:
        return [0.0] * len(values)
    total, count = math.fsum(values), len(values)
    own: dict[int, list[float]] = defaultdict(list)
    for value, owner in zip(values, owners, strict=True):
        own[owner].append(value)
    sums = {owner: (math.fsum(some), len(some)) for owner, some in own.items()}
    return [
        value - (total - sums[owner][0]) / (count - sums[owner][1]) if count > sums[owner][1] else 0.0
        for value, owner in zip(values, owners, strict=True)
    ]


def _groups(episodes: list[Episode]) -> Iterable[list[int]]:
    members: dict[int, list[int]] = defaultdict(list)
    for i, episode in enumerate(episodes):
        members[episode.group].append(i)
    return members.values()


def _discounted(rewards: list[float], discount: float) -> list[float]:
    """K: G_k = r_k + discount * G_{k+1}."""
    returns, ahead = [0.0] * len(rewards), 0.0
    for k in reversed(range(len(rewards))):
        ahead = rewards[k] + discount * ahead
        returns[k] = ahead
    return returns


def _rewards_to_go(episode: Episode, settings: RLSettings) -> list[float]:
    rewards, discounts = _token_rewards(episode, settings)
    ahead = 0.0
    for t in reversed(range(len(rewards))):
        ahead = rewards[t] + discounts[t] * ahead
        rewards[t] = ahead
    return rewards


def _token_rewards(episode: Episode, settings: RLSettings) -> tuple[list[float], list[float]]:
    """(A rewards, A discounts to the next token). A turn pays at its last token; outcome pays all at the very last."""
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
        elif end:  # nothing was sampled in this turn: it pays the token before it, where there is one
            rewards[end - 1] += discounts[end - 1] * reward
            discounts[end - 1] *= settings.turn_discount
    return rewards, discounts


def _to_tokens(per_turn: list[float], lengths: list[int]) -> list[float]:
    return [a for a, n in zip(per_turn, lengths, strict=True) for _ in range(n)]


def _ends(lengths: list[int]) -> list[int]:
    """K: index after the last token of each turn."""
    ends, end = [], 0
    for length in lengths:
        end += length
        ends.append(end)
    return ends
