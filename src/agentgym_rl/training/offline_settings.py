"""Settings of the methods that learn from data: SFT's data, DPO, reward models, AgentEvol and DAgger.

Standard library only, as settings.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from agentgym_rl.training.settings import OptimizerSettings, SettingsSection, require_minimums


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings(SettingsSection):
    """Conversations to learn from: files, generated episodes, or both. docs/guides/offline.md has the formats."""

    files: tuple[str, ...] = ()
    """Sources: trajectories (`.jsonl`), AgentGym conversations (`.json`), globs of either, or run directories, whose
    training episodes are read."""
    keep: Literal["success", "all"] | None = None
    """Trajectories to read from `files`. The default is "success" to imitate and "all" to build pairs. Conversations
    have no outcome and are always read."""
    play: Literal["oracle", "random"] | None = None
    """Also play the environments' training items. "oracle" keeps the oracle's successes, "random" keeps every
    episode."""
    episodes: int = 512
    """Episodes of `play` over all environments. The oracle plays each item once; random play may repeat items."""
    max_turns: int = 30
    """Turns per episode of `play`."""
    mistakes: float = 0.0
    """For play = "oracle": share of turns with an injected mistake, in [0, 1). The loss skips the mistake and keeps the
    recovery."""
    wrong_thoughts: float = 0.0
    """For play = "oracle": share of turns whose thought errs first, in [0, 1). The loss skips the wrong thought and
    keeps the correction after it. Needs a style with thoughts."""

    def __post_init__(self) -> None:
        require_minimums(self, episodes=1, max_turns=1)
        if not self.files and self.play is None:
            raise ValueError("needs files, or play = 'oracle' or 'random': got neither")
        for name in ("mistakes", "wrong_thoughts"):
            share = getattr(self, name)
            if not 0.0 <= share < 1.0:
                raise ValueError(f"{name} must lie in [0, 1), got {share}")
            if share and self.play != "oracle":
                raise ValueError(
                    f"{name} = {share:g} needs the oracle, got play = {self.play!r}: set play = 'oracle' or {name} = 0"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOSettings(SettingsSection):
    """Direct preference optimisation on pairs of whole episodes of one item. The defaults are the paper's."""

    beta: float = 0.5
    """Strength of the pull to the reference. The implicit reward is beta * log(policy / reference)."""
    label_smoothing: float = 0.0
    """Assumed share of wrong preferences, in [0, 0.5). Raise it if rewards are noisy."""
    normalize_length: bool = False
    """Divide an episode's log-probability by its number of sampled tokens. Use it if lengths differ much."""
    rounds: int = 1
    """Rounds of sampling and training. Each later round samples with the current model, which is also its
    reference. More than 1 needs sample_groups."""
    sample_groups: int = 0
    """Items played in each round to build pairs from. 0 builds pairs from data.files only."""
    preferences: tuple[str, ...] = ()
    """Pairs that people chose in the viewer: run directories, or their preferences.jsonl. Used in the first round."""
    group_size: int = 8
    """Episodes per sampled item."""
    max_turns: int = 10
    """Turns per sampled episode."""
    min_gap: float = 0.5
    """Smallest difference in reward between the two episodes of a pair."""
    pairs_per_item: int = 4
    """Largest number of pairs per item. The seed chooses among them."""
    epochs: int = 1
    """Passes over the pairs of a round."""
    batch_size: int = 32
    """Pairs per update."""
    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(lr=5e-7))
    """Optimizer of the policy."""

    def __post_init__(self) -> None:
        require_minimums(
            self, rounds=1, sample_groups=0, group_size=2, max_turns=1, pairs_per_item=1, epochs=1, batch_size=1
        )
        if not (self.beta > 0 and self.min_gap > 0 and 0 <= self.label_smoothing < 0.5):
            raise ValueError(
                f"beta and min_gap must be positive and label_smoothing lie in [0, 0.5), "
                f"got {self.beta}, {self.min_gap} and {self.label_smoothing}"
            )
        if self.rounds > 1 and not self.sample_groups:
            raise ValueError(f"rounds = {self.rounds} needs new episodes in every round: set sample_groups")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelSettings(SettingsSection):
    """A reward model: a scalar head on the model, trained on pairs of whole episodes of one item."""

    sample_groups: int = 0
    """Items played first to build pairs from. 0 builds pairs from data.files and `preferences` only."""
    preferences: tuple[str, ...] = ()
    """Pairs that people chose in the viewer: run directories, or their preferences.jsonl."""
    group_size: int = 8
    """Episodes per sampled item."""
    max_turns: int = 10
    """Turns per sampled episode."""
    min_gap: float = 0.5
    """Smallest difference in reward between the two episodes of a pair that nobody chose."""
    pairs_per_item: int = 4
    """Largest number of such pairs per item. The seed chooses among them."""
    held_out: float = 0.2
    """Share of the items whose pairs are not trained on. The evaluations measure how often their order is right."""
    center_coef: float = 0.01
    """Weight of (score of the better + score of the worse episode) squared, which keeps scores around 0."""
    epochs: int = 1
    """Passes over the pairs. More than a few overfit small sets of pairs."""
    batch_size: int = 32
    """Pairs per update."""
    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(lr=1e-5))
    """Optimizer of the head and the model under it."""

    def __post_init__(self) -> None:
        require_minimums(self, sample_groups=0, group_size=2, max_turns=1, pairs_per_item=1, epochs=1, batch_size=1)
        if not (self.min_gap > 0 and 0 < self.held_out < 1 and 0 <= self.center_coef < math.inf):
            raise ValueError(
                "min_gap must be positive, held_out lie in (0, 1), and center_coef be 0 or more and finite, got "
                f"{self.min_gap}, {self.held_out} and {self.center_coef}"
            )


PairSettings = DPOSettings | RewardModelSettings
"""Settings of the methods that learn from pairs of episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEvolSettings(SettingsSection):
    """AgentEvol: explore, keep successes, retrain the base model on them and the expert data, repeat."""

    rounds: int = 3
    """Rounds of exploration and training. 1 without expert data is rejection-sampling fine-tuning."""
    tasks: int = 512
    """Items played in each round."""
    group_size: int = 1
    """Episodes per item."""
    max_turns: int = 10
    """Turns per explored episode."""
    min_reward: float = 1.0
    """Smallest reward of an episode that is kept. Lower it if too few episodes succeed."""
    keep_per_item: int = 1
    """Largest number of kept episodes per item, chosen by the seed. 0 keeps all."""
    history: Literal["last", "all"] = "last"
    """Episodes to train on: those kept in this round, or in all rounds so far. Expert data is always added."""

    def __post_init__(self) -> None:
        require_minimums(self, rounds=1, tasks=1, group_size=1, max_turns=1, keep_per_item=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaggerSettings(SettingsSection):
    """DAgger: the agent plays, the oracle says what it should have done, and the base model imitates all of it."""

    rounds: int = 3
    """Rounds of playing, asking the oracle and training."""
    tasks: int = 256
    """Items played in each round."""
    group_size: int = 1
    """Episodes per item."""
    max_turns: int = 10
    """Turns per episode."""
    oracle_share: float = 0.5
    """Share of turns that the oracle plays in the first round, so that a weak agent reaches later states."""
    oracle_decay: float = 0.5
    """Factor of that share from one round to the next, in [0, 1]. 0: the oracle plays in the first round only."""
    correct_thoughts: bool = False
    """Where the agent's action is not the oracle's, also imitate a correction of the thought that led to it: the loss
    skips the agent's thought and keeps what follows. Needs a style with thoughts."""

    def __post_init__(self) -> None:
        require_minimums(self, rounds=1, tasks=1, group_size=1, max_turns=1)
        for name in ("oracle_share", "oracle_decay"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}")

    def share(self, number: int) -> float:
        """Return the share of the oracle's turns in round `number` of play, from 1."""
        return float(self.oracle_share * self.oracle_decay ** (number - 1))
