"""What a trainer can be told. Standard library only, so that the config file can be checked without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Literal


def _require(settings: Any, **least: float) -> None:
    """ValueError, which a config check reports with its place, unless each named value is at least this."""
    for name, smallest in least.items():
        value = getattr(settings, name)
        if not value >= smallest:
            raise ValueError(f"{name} must be at least {smallest:g}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScratchSettings:
    """Shape of a small Llama that starts from random weights."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    hidden_size: int = 96
    intermediate_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    max_context: int = 2048

    def __post_init__(self) -> None:
        _require(self, hidden_size=1, intermediate_size=1, num_layers=1, num_heads=1, max_context=2)
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size must be a multiple of 2 * num_heads (rotary embeddings pair up a head's width), "
                f"got {self.hidden_size} and {self.num_heads} heads"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters: only they are trained, saved and kept in optimizer memory."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    rank: int = 16
    alpha: float = 32.0
    """Their product is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Names of the layers that get one, such as ["q_proj", "v_proj"]; all-linear for all but the head."""

    def __post_init__(self) -> None:
        _require(self, rank=1, alpha=0)
        if not self.target_modules:
            raise ValueError("target_modules needs at least one name, got none")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW with warm-up."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    lr: float = 1e-6
    warmup_steps: int = 0
    """Updates over which the rate rises linearly from lr / warmup_steps to lr."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """From lr after the warm-up down to `min_lr_ratio * lr` at the last step."""
    min_lr_ratio: float = 0.1
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 means never."""
    micro_batch_tokens: int = 16384
    """Tokens per forward and backward pass. Gradients accumulate over passes; results do not depend on it."""
    checkpoint_activations: bool = False
    """Keep only what goes into each layer and compute the rest again for its gradient: a third more work, and a small
    fraction of the memory."""
    capture_passes: bool = False
    """On CUDA: passes of sizes that come again are replayed as graphs, which keep their memory. It pays where the host
    is slower than the device: small models in small passes. Not together with checkpoint_activations."""

    def __post_init__(self) -> None:
        if self.capture_passes and self.checkpoint_activations:
            raise ValueError("capture_passes and checkpoint_activations do not go together: choose speed or memory")
        _require(self, lr=0, warmup_steps=0, min_lr_ratio=0, weight_decay=0, max_grad_norm=0, micro_batch_tokens=1)
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), got {self.betas}")
        for name in ("lr", "min_lr_ratio", "weight_decay", "max_grad_norm"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTSettings:
    """Imitation of demonstrations: mean negative log-likelihood of assistant tokens."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    epochs: int = 1
    batch_size: int = 32
    """Demonstrations per update."""
    loss_on: Literal["replies", "everything"] = "replies"
    """What is imitated. `everything` also learns to predict observations: a model from nothing learns to read that way,
    because an observation repeats itself (what is in view comes again in the list of actions)."""
    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(lr=1e-5))

    def __post_init__(self) -> None:
        _require(self, epochs=1, batch_size=1)


Algorithm = Literal["grpo", "rloo", "reinforce++", "reinforce++-baseline", "ppo"]
Credit = Literal["outcome", "turns", "two_level", "anchor"]

GROUP_ALGORITHMS: tuple[Algorithm, ...] = ("grpo", "rloo", "reinforce++-baseline")
"""Those that compare the episodes of a group."""

INVALID: dict[tuple[str, str], str] = {
    ("grpo", "two_level"): "it is built of the values of a critic, which only ppo has",
    ("rloo", "two_level"): "it is built of the values of a critic, which only ppo has",
    ("reinforce++", "two_level"): "it is built of the values of a critic, which only ppo has",
    ("reinforce++-baseline", "two_level"): "it is built of the values of a critic, which only ppo has",
    ("reinforce++", "anchor"): "it compares the episodes of a group, which reinforce++ does not",
    ("reinforce++-baseline", "anchor"): "its normalisation over the batch would undo that within anchor states",
    ("ppo", "anchor"): "the critic's value is a baseline for every state already",
}
"""(algorithm, credit) that do not go together, and why. docs/guides/algorithms.md shows the same as a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings:
    """PPO's value function: a copy of the starting model (with LoRA: an adapter of its own) under a scalar head."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    clip: float = 0.2
    """A value may move this far from what it was before the step's updates; 0 for no bound."""
    warmup_steps: int = 0
    """Steps in which only the critic learns."""
    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(lr=1e-5))

    def __post_init__(self) -> None:
        _require(self, clip=0, warmup_steps=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RLSettings:
    """Online RL. Defaults are the paper's GRPO; docs/guides/algorithms.md has the formulas."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    algorithm: Algorithm = "grpo"
    credit: Credit = "outcome"
    """How a trajectory's rewards reach its turns. outcome: their sum, to every turn. turns: to each turn what was paid
    from there on, discounted. two_level: GAE over turns, then over the tokens of each. anchor: outcome plus a
    comparison among turns taken in the same state (GiGPO)."""
    steps: int = 100
    token_budget: int = 0
    """End after the step that brings the tokens sampled in all to this, if that comes before `steps`; 0: no such bound.
    It makes runs under different horizons comparable."""
    groups_per_step: int = 16
    group_size: int = 8
    normalize_std: bool = True
    """Divide advantages by their standard deviation (GRPO: of the group; PPO: of the batch) or not (Dr. GRPO)."""
    turn_discount: float = 1.0
    """Per turn, for every credit but outcome."""
    token_discount: float = 1.0
    """Per token within a turn, for every credit but outcome; ppo and reinforce++."""
    gae_lambda: float = 1.0
    """Between tokens; ppo."""
    turn_lambda: float = 0.95
    """Between turns; ppo with two_level."""
    bootstrap: bool = True
    """ppo: after a truncation the critic's value stands for what would have come; else nothing does. Without a
    turn_discount below 1 it makes waiting as good as acting: an agent that never ends an episode never fails."""
    anchor_weight: float = 1.0
    """Weight of the comparison within anchor states against that of whole episodes."""
    zero_variance: Literal["drop", "keep"] = "drop"
    """Groups whose advantages are all 0 carry no policy gradient: `drop` saves their forward pass, `keep` runs it
    (needed if the KL or entropy term shall see them). The batch is normalised over all of them either way, unless they
    are made up for by resample_rounds."""
    resample_rounds: int = 0
    """Dynamic sampling: play up to this many further rounds of new tasks in place of groups whose rewards are equal."""
    overlong: Literal["keep", "mask", "penalty"] = "keep"
    """Episodes cut by max_new_tokens or max_context. mask: not trained on. penalty: a reply's reward sinks by up to 1
    over the last `overlong_buffer` tokens before max_new_tokens."""
    overlong_buffer: int = 64
    loss: Literal["clip", "gspo", "cispo"] = "clip"
    """clip: PPO's, a ratio per token. gspo: one ratio per trajectory. cispo: clips the weight, never the gradient."""
    aggregate: Literal["token", "trajectory", "constant"] = "token"
    """Mean over all action tokens of the batch; or over trajectories of the mean over their action tokens; or over
    trajectories of the sum divided by `aggregate_length`, so that length carries no weight (Dr. GRPO)."""
    aggregate_length: int = 1024
    clip_low: float = 0.2
    clip_high: float = 0.2
    """The ratio between new and old policy is clipped to [1 - clip_low, 1 + clip_high]. DAPO: clip_high = 0.28."""
    epochs: int = 1
    """Passes over a step's samples."""
    minibatches: int = 1
    """Updates per pass."""
    kl_coef: float = 0.001
    """Weight of the KL term to the reference model; 0 skips the reference altogether."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_target: float = 0.0
    """KL per token that kl_coef is steered towards after every step; 0 leaves kl_coef as it is."""
    kl_rate: float = 0.1
    """The most kl_coef may change in one step while it is steered, as a share."""
    entropy_coef: float = 0.0
    """Bonus on the entropy of the policy."""
    overlap: int = 0
    """1: the next step's episodes are played while this one's are learned from, with weights one update old."""
    importance: Literal["token", "sequence_mask", "none"] = "token"
    """Correction for a sampler that differs from the learner. token: weight min(learner / sampler, cap) per token.
    sequence_mask: the same, and trajectories whose mean ratio lies outside its bounds are left out."""
    importance_cap: float = 2.0
    """Largest weight of a token."""
    sequence_mask_low: float = 0.98
    sequence_mask_high: float = 1.02
    """sequence_mask: bounds of a trajectory's geometric mean of learner / sampler. The mean hides length: 2,000 tokens
    at a mean of 1.02 are 40 nats off."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    critic: CriticSettings = field(default_factory=CriticSettings)

    def __post_init__(self) -> None:
        _require(self, steps=0, token_budget=0, groups_per_step=1, group_size=1, epochs=1, minibatches=1)
        _require(self, clip_low=0, clip_high=0, kl_coef=0, kl_target=0, kl_rate=0, importance_cap=1, overlap=0)
        _require(self, sequence_mask_low=0, sequence_mask_high=1)
        _require(self, overlong_buffer=1, aggregate_length=1, anchor_weight=0, resample_rounds=0)
        for name in ("turn_discount", "token_discount", "gae_lambda", "turn_lambda"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}")
        for problem in self._problems():
            raise ValueError(problem)

    def _problems(self) -> Iterator[str]:
        """What does not go together."""
        algorithm, credit = self.algorithm, self.credit
        if (algorithm, credit) in INVALID:
            yield f"credit = {credit!r} cannot be used with {algorithm}: {INVALID[algorithm, credit]}"
        if algorithm in GROUP_ALGORITHMS and self.group_size < 2:
            yield (
                f"group_size: {algorithm} compares the episodes of a group, so it needs at least 2, "
                f"got {self.group_size}"
            )
        if self.loss == "gspo" and algorithm == "ppo":
            yield "loss = 'gspo' cannot be used with ppo: it has one ratio a trajectory, GAE one advantage a token"
        if self.resample_rounds and algorithm not in ("grpo", "rloo"):
            yield "resample_rounds makes up for groups without an advantage, which only grpo and rloo leave out"
        if self.kl_rate >= 1.0:
            yield f"kl_rate must be below 1, or kl_coef could sink to nothing in one step, got {self.kl_rate}"
        bounds = ("clip_low", "clip_high", "importance_cap", "sequence_mask_high")
        for name in ("kl_coef", "entropy_coef", "kl_target", *bounds):
            if not math.isfinite(getattr(self, name)):
                yield f"{name} must be a finite number, got {getattr(self, name)}"
        if self.sequence_mask_low > 1.0:
            yield (
                f"sequence_mask_low must be at most 1, or equal policies would be left out, "
                f"got {self.sequence_mask_low}"
            )
        if self.kl_target and not self.kl_coef:
            yield "kl_target steers kl_coef, which is 0: set a kl_coef to start from"
        if self.overlap > 1:
            yield f"overlap must be 0 (on-policy) or 1 (one step off), got {self.overlap}"

    @property
    def updates_per_step(self) -> int:
        return self.epochs * self.minibatches


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizonSettings:
    """How the number of turns grows over training; docs/guides/horizon.md has the rules."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["fixed", "stepwise", "linear", "adaptive"] = "fixed"
    turns: tuple[int, ...] = (10,)
    """fixed: one number; stepwise and adaptive: one per stage, ascending; linear: first and last."""
    steps_per_stage: int = 100
    """stepwise: steps of every stage but the last; linear: steps from first to last; adaptive: the most a stage may
    last, 0 for no such limit."""
    window: int = 10
    """adaptive: steps in each of the two windows compared; a stage lasts at least two windows."""
    min_gain: float = 0.02
    """adaptive: success that rises by less than this from one window to the next has stalled."""
    min_truncated: float = 0.1
    """adaptive: only expand while at least this share of episodes ends at the horizon."""

    def __post_init__(self) -> None:
        turns, kind = tuple(self.turns), self.kind
        count = {"fixed": len(turns) == 1, "linear": len(turns) == 2}.get(kind, len(turns) >= 1)
        if not count or any(t < 1 for t in turns):
            wanted = {"fixed": "one number", "linear": "two numbers, first and last"}.get(kind, "one number per stage")
            raise ValueError(f"a {kind} horizon needs turns = {wanted}, each at least 1, got {list(turns)}")
        if any(a >= b for a, b in pairwise(turns)):
            raise ValueError(f"a {kind} horizon needs ascending turns, got {list(turns)}")
        _require(self, steps_per_stage=1 if kind in ("stepwise", "linear") else 0, window=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Conversations to learn from: files, play, or both. docs/guides/offline.md has the formats."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    files: tuple[str, ...] = ()
    """Trajectories (`.jsonl`), AgentGym's conversations (`.json`), globs of either, or run directories, of which the
    training episodes are read."""
    keep: Literal["success", "all"] | None = None
    """Which trajectories of `files` are read: by default successes to imitate, all to build pairs from. Conversations
    have no outcome and are all read."""
    play: Literal["oracle", "random"] | None = None
    """Also play the environments' training items: of the oracle its successes are taken, of random play all."""
    episodes: int = 512
    """Of `play`, over all environments. The oracle plays an item once, random play comes round to it again."""
    max_turns: int = 30
    """Of `play`."""
    mistakes: float = 0.0
    """play = 'oracle': share of turns in which it plays something else; they are not imitated, how it goes on is."""

    def __post_init__(self) -> None:
        _require(self, episodes=1, max_turns=1)
        if not self.files and self.play is None:
            raise ValueError("needs files, or play = 'oracle' or 'random': got neither")
        if not 0.0 <= self.mistakes < 1.0:
            raise ValueError(f"mistakes must lie in [0, 1), got {self.mistakes}")
        if self.mistakes and self.play != "oracle":
            raise ValueError(
                f"mistakes = {self.mistakes:g}: they are the oracle's, set play = 'oracle' or leave them out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOSettings:
    """Direct preference optimisation on pairs of whole episodes of one item. Defaults are the paper's."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    beta: float = 0.5
    """Strength of the pull to the reference: an implicit reward is beta * log(pi / reference)."""
    label_smoothing: float = 0.0
    """Probability that a preference is the wrong way round."""
    normalize_length: bool = False
    """Divide an episode's log-probability by its number of sampled tokens."""
    rounds: int = 1
    """With more than one, each round samples new groups with the model so far and takes that model as reference."""
    sample_groups: int = 0
    """Items played in each round to build pairs from; 0 takes them from data.files only."""
    group_size: int = 8
    """Episodes of each sampled item."""
    max_turns: int = 10
    """Of sampled episodes."""
    min_gap: float = 0.5
    """A pair needs rewards at least this far apart."""
    pairs_per_item: int = 4
    """At most this many of an item's pairs, chosen by the seed."""
    epochs: int = 1
    batch_size: int = 32
    """Pairs per update."""
    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(lr=5e-7))

    def __post_init__(self) -> None:
        _require(self, rounds=1, sample_groups=0, group_size=2, max_turns=1, pairs_per_item=1, epochs=1, batch_size=1)
        if not (self.beta > 0 and self.min_gap > 0 and 0 <= self.label_smoothing < 0.5):
            raise ValueError(
                f"beta and min_gap must be positive and label_smoothing lie in [0, 0.5), "
                f"got {self.beta}, {self.min_gap} and {self.label_smoothing}"
            )
        if self.rounds > 1 and not self.sample_groups:
            raise ValueError("rounds: a second round needs new episodes, set sample_groups")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEvolSettings:
    """Explore, keep what succeeded, retrain from the base model on it and the expert data; repeat."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    rounds: int = 3
    """With 1 and no expert data it is rejection-sampling fine-tuning."""
    tasks: int = 512
    """Items played in each round."""
    group_size: int = 1
    """Episodes of each item."""
    max_turns: int = 10
    """Of explored episodes."""
    min_reward: float = 1.0
    """Episodes of at least this reward are kept."""
    keep_per_item: int = 1
    """At most this many kept episodes of an item, chosen by the seed; 0 keeps all."""
    history: Literal["last", "all"] = "last"
    """Train on what this round kept, or on what all rounds so far kept. The expert data is always added."""

    def __post_init__(self) -> None:
        _require(self, rounds=1, tasks=1, group_size=1, max_turns=1, keep_per_item=0)
