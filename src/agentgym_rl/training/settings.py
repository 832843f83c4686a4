"""Settings of the trainers. Standard library only, so that a recipe can be checked without torch.

The docstring of each field is its entry in the reference of recipe keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Literal, get_args


def require_minimums(settings: Any, **minimums: float) -> None:
    """Raise ValueError if a named value is below its minimum. The config check adds the key's place."""
    for name, minimum in minimums.items():
        value = getattr(settings, name)
        if not value >= minimum:
            raise ValueError(f"{name} must be at least {minimum:g}, got {value}")


class SettingsSection:
    """A section of a recipe. Unknown keys are errors."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScratchSettings(SettingsSection):
    """Shape of a small Llama that starts from random weights."""

    hidden_size: int = 96
    """Width of the hidden states. Must be a multiple of 2 * num_heads."""
    intermediate_size: int = 256
    """Width of the feed-forward layers."""
    num_layers: int = 4
    """Number of decoder layers."""
    num_heads: int = 4
    """Attention heads per layer."""
    max_context: int = 2048
    """Longest sequence in tokens. Raise it if whole episodes do not fit."""

    def __post_init__(self) -> None:
        require_minimums(self, hidden_size=1, intermediate_size=1, num_layers=1, num_heads=1, max_context=2)
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size must be a multiple of 2 * num_heads (rotary embeddings need an even head width), "
                f"got {self.hidden_size} and {self.num_heads} heads"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings(SettingsSection):
    """LoRA adapters. Only the adapters are trained, saved and held in optimizer memory."""

    rank: int = 16
    """Rank of the adapter matrices. A higher rank can learn more and costs more memory."""
    alpha: float = 32.0
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Layers that get an adapter, such as ["q_proj", "v_proj"]. "all-linear" means every linear layer but the head."""

    def __post_init__(self) -> None:
        require_minimums(self, rank=1, alpha=0)
        if not self.target_modules:
            raise ValueError("target_modules needs at least one name, got none")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings(SettingsSection):
    """AdamW with warm-up, decay and gradient clipping."""

    lr: float = 1e-6
    """Peak learning rate. Lower it if entropy, KL or gradient norms run away."""
    warmup_steps: int = 0
    """Updates over which the learning rate rises linearly from lr / warmup_steps to lr."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up: stay at lr, or fall to min_lr_ratio * lr at the last update."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a share of lr. Used by the linear and cosine schedules."""
    weight_decay: float = 0.0
    """Decoupled weight decay: each update shrinks the weights by learning rate * weight_decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment, each in [0, 1)."""
    max_grad_norm: float = 1.0
    """Gradients with a larger norm are scaled down to this norm. 0 turns clipping off."""
    micro_batch_tokens: int = 16384
    """Tokens per forward and backward pass. Lower it if memory runs out. Gradients accumulate over passes, so results
    do not depend on it."""
    checkpoint_activations: bool = False
    """Store only each layer's input and recompute the rest in the backward pass. Costs a third more compute and needs
    a small fraction of the activation memory."""
    offload_activations: bool = False
    """Keep activations on the host between the forward and the backward pass; with checkpoint_activations the layers'
    inputs. Costs two copies over the bus."""
    offload_moments: bool = False
    """Keep the optimizer's moments, and in bfloat16 the lower halves of the masters, on the host between updates."""
    capture_passes: bool = False
    """Replay passes of recurring sizes as CUDA graphs, which keep their memory. Faster if the host is slower than the
    device (small models, small passes). Cannot be combined with checkpoint_activations."""

    def __post_init__(self) -> None:
        if self.capture_passes and (self.checkpoint_activations or self.offload_activations):
            raise ValueError(
                "capture_passes cannot be combined with checkpoint_activations or offload_activations: choose speed or "
                "memory"
            )
        require_minimums(
            self, lr=0, warmup_steps=0, min_lr_ratio=0, weight_decay=0, max_grad_norm=0, micro_batch_tokens=1
        )
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), got {self.betas}")
        for name in ("lr", "min_lr_ratio", "weight_decay", "max_grad_norm"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTSettings(SettingsSection):
    """Supervised fine-tuning on demonstrations: mean negative log-likelihood of assistant tokens."""

    epochs: int = 1
    """Passes over the demonstrations."""
    batch_size: int = 32
    """Demonstrations per update."""
    loss_on: Literal["replies", "everything"] = "replies"
    """Tokens in the loss. "replies": assistant tokens. "everything": observations too, which helps a model that starts
    from scratch learn to read. What a later segment of an episode repeats has no loss there."""
    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(lr=1e-5))
    """Optimizer of the fine-tuning."""

    def __post_init__(self) -> None:
        require_minimums(self, epochs=1, batch_size=1)


Algorithm = Literal["grpo", "rloo", "reinforce++", "reinforce++-baseline", "ppo"]
Credit = Literal["outcome", "turns", "two_level", "anchor"]

GROUP_ALGORITHMS: tuple[Algorithm, ...] = ("grpo", "rloo", "reinforce++-baseline")
"""Algorithms that compare the episodes of a group."""
ZERO_VARIANCE_ALGORITHMS: tuple[Algorithm, ...] = ("grpo", "rloo")
"""Algorithms that give a group of equal rewards no advantage, so that it can be left out or replaced."""

_NEEDS_CRITIC = "it needs a critic's values, which only ppo has"
INVALID: dict[tuple[str, str], str] = {
    **{(algorithm, "two_level"): _NEEDS_CRITIC for algorithm in get_args(Algorithm) if algorithm != "ppo"},
    ("reinforce++", "anchor"): "it compares the episodes of a group, which reinforce++ does not",
    ("reinforce++-baseline", "anchor"): "normalising over the batch would undo the comparison within anchor states",
    ("ppo", "anchor"): "the critic's value is already a baseline for every state",
}
"""(algorithm, credit) pairs that cannot be combined, and why. docs/guides/algorithms.md shows them as a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings(SettingsSection):
    """PPO's value function: a copy of the starting model (with LoRA: its own adapter) with a scalar head."""

    clip: float = 0.2
    """Largest change of a value within one step's updates. 0 means no bound."""
    warmup_steps: int = 0
    """Steps at the start in which only the critic learns. Raise it if early policy updates are erratic."""
    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(lr=1e-5))
    """Optimizer of the critic."""

    def __post_init__(self) -> None:
        require_minimums(self, clip=0, warmup_steps=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillSettings(SettingsSection):
    """On-policy distillation: a teacher scores every token that the agent sampled."""

    teacher: str
    """The teacher: a model's folder, a run, or a hub name; with `url`, the name of the model there. It needs the
    agent's tokenizer."""
    url: str | None = None
    """Base address of an OpenAI-compatible API that scores prompts of token ids, such as http://127.0.0.1:8000/v1.
    Without it, the teacher is loaded here. agent.temperature must be 1."""
    api: Literal["prompt_logprobs", "echo"] = "prompt_logprobs"
    """How the server at `url` returns a prompt's log-probabilities. "prompt_logprobs": as vLLM does. "echo": as the
    completions API does with `echo` and `logprobs`."""
    api_key_variable: str | None = None
    """Environment variable that holds the key of `url`. The key itself is never written to a file."""
    timeout_s: float = 120.0
    """Seconds that one request to `url` may take."""
    retries: int = 5
    """Further attempts after a failed request. Then the run ends and can be resumed."""
    concurrency: int = 16
    """Requests to `url` at the same time."""
    coef: float = 1.0
    """Weight of log(teacher / agent) of a token in its advantage: the gradient is that of the reverse KL."""
    reward_weight: float = 0.0
    """Weight of the advantages that come from the environment's rewards. 0 learns from the teacher alone."""

    def __post_init__(self) -> None:
        require_minimums(self, coef=0, reward_weight=0, retries=0, concurrency=1)
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s must be positive and finite, got {self.timeout_s}")
        if self.url is None and (self.api != "prompt_logprobs" or self.api_key_variable is not None):
            raise ValueError("api and api_key_variable are for a teacher at url: remove them, or set url")
        if not math.isfinite(self.coef) or not math.isfinite(self.reward_weight):
            raise ValueError(f"coef and reward_weight must be finite, got {self.coef} and {self.reward_weight}")
        if not self.coef and not self.reward_weight:
            raise ValueError("coef and reward_weight are both 0, which leaves nothing to learn from: raise one of them")
        if not self.teacher.strip():
            raise ValueError("teacher is empty: name a model's folder, a run or a hub name")


def distill_problem(distill: DistillSettings | None, method: str, temperature: float) -> str:
    """Return why a teacher cannot be used with the rest of the recipe, or an empty string."""
    if distill is None:
        if method == "distill":
            return "method = 'distill' needs [rl.distill] with a teacher: a model's folder, a run or a hub name"
        return ""
    if method == "rl" and not distill.reward_weight:
        return "rl.distill without reward_weight ignores the environment's rewards: set method = 'distill'"
    if distill.url is not None and temperature != 1.0:
        return (
            f"rl.distill.url: an API returns probabilities at temperature 1, agent.temperature is {temperature:g}: set "
            "it to 1, or load the teacher here"
        )
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSettings(SettingsSection):
    """Trees of rollouts (Tree-GRPO): several continuations are drawn from some turns of an episode. A group has
    roots * (1 + branches * depth) episodes, and `group_size` is not read."""

    roots: int = 2
    """Episodes of each task that start at the first turn. Each is the root of a tree."""
    branches: int = 3
    """Continuations drawn from each place that is branched, besides the one that is there."""
    depth: int = 1
    """Rounds of branching. Each branches one turn of every tree. The horizon bounds every path."""
    branch: Literal["random", "entropy", "anchor"] = "random"
    """Turn to branch. "random": any. "entropy": that of the least likely reply. "anchor": that of the state in which
    most turns of the group were, which needs the environment's state_key()."""
    max_tokens: int = 0
    """Budget of a tree: no new round once it has sampled this many tokens. 0 means no budget."""
    max_env_steps: int = 0
    """Budget of a tree in steps of its environment, with those that a replay repeats. 0 means no budget."""

    def __post_init__(self) -> None:
        require_minimums(self, roots=1, branches=1, depth=1, max_tokens=0, max_env_steps=0)

    @property
    def paths(self) -> int:
        """Most episodes of a group."""
        return self.roots * (1 + self.branches * self.depth)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSettings(SettingsSection):
    """Learned self-correction (SCoRe) for agent.style = "reflect": attempts are trained by rewards of their own."""

    first_stage_steps: int = 50
    """Steps of the first stage, in which only the later attempts learn and the first is held near the start."""
    hold: float = 1.0
    """First stage: weight of log(reference / agent) in the advantages of the first attempt's tokens."""
    bonus: float = 1.0
    """Second stage: weight of the gain over the attempt before in the reward of every later attempt."""

    def __post_init__(self) -> None:
        require_minimums(self, first_stage_steps=0, hold=0, bonus=0)
        if not math.isfinite(self.hold) or not math.isfinite(self.bonus):
            raise ValueError(f"hold and bonus must be finite, got {self.hold} and {self.bonus}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RLSettings(SettingsSection):
    """Online RL. The defaults are the paper's GRPO. docs/guides/algorithms.md has formulas and valid combinations."""

    algorithm: Algorithm = "grpo"
    """Advantage estimator. "ppo" trains a critic; "grpo", "rloo" and "reinforce++-baseline" compare the episodes of a
    group; "reinforce++" needs neither."""
    credit: Credit = "outcome"
    """Assignment of a trajectory's rewards to its turns. "outcome": every turn gets their sum. "turns": each turn gets
    its discounted reward to go. "two_level": GAE over turns, then over the tokens of each turn. "anchor": outcome plus
    a comparison of turns taken in the same state (GiGPO)."""
    steps: int = 100
    """Training steps. Each step collects episodes, learns from them and publishes new weights."""
    token_budget: int = 0
    """Stop after the step in which the tokens sampled in total reach this number, even before `steps`. 0 means no
    budget. Set it to compare runs with different horizons."""
    groups_per_step: int = 16
    """Tasks per step. Raise it if gradients are noisy."""
    group_size: int = 8
    """Episodes of each task. Algorithms that compare episodes need at least 2. Raise it if groups end alike."""
    normalize_std: bool = True
    """Divide advantages by their standard deviation (GRPO: of the group; PPO: of the batch). False is Dr. GRPO."""
    turn_discount: float = 1.0
    """Discount per turn, in [0, 1]. Used by every credit but "outcome"."""
    token_discount: float = 1.0
    """Discount per token within a turn, in [0, 1]. Used by ppo and reinforce++ with every credit but "outcome"."""
    gae_lambda: float = 1.0
    """GAE's lambda between tokens, in [0, 1]. Used by ppo."""
    turn_lambda: float = 0.95
    """GAE's lambda between turns, in [0, 1]. Used by ppo with credit "two_level"."""
    bootstrap: bool = True
    """For ppo: add the critic's value after a truncated episode. Use it with turn_discount below 1, or an agent that
    never ends an episode never fails."""
    anchor_weight: float = 1.0
    """Weight of the comparison within anchor states relative to that of whole episodes. Used by credit "anchor"."""
    zero_variance: Literal["drop", "keep"] = "drop"
    """Handling of groups whose advantages are all 0. "drop" saves their forward pass. "keep" runs it, so that the KL
    and entropy terms see them. Both count in the batch's normalisation; with resample_rounds dropped groups do not."""
    resample_rounds: int = 0
    """Dynamic sampling: extra rounds of new tasks that replace groups whose rewards give no advantage. Replaced groups
    count in the metrics only. Used by grpo and rloo."""
    keep_groups: float = 1.0
    """Share of the groups with a trainable episode to train on, in (0, 1]: those with the largest spread (standard
    deviation) of returns. A return is the sum of the rewards trained on, after the penalty of `overlong` and without
    KL; with `[rl.correction]` each attempt has its own. RAGEN uses 0.25. The other groups count in the metrics only."""
    overlong: Literal["keep", "mask", "penalty"] = "keep"
    """Handling of episodes cut by max_new_tokens or max_context. "mask" does not train on them. "penalty" takes up to 1
    off a reply's reward over the last `overlong_buffer` tokens before max_new_tokens."""
    overlong_buffer: int = 64
    """Tokens before max_new_tokens over which the penalty rises from 0 to 1."""
    loss: Literal["clip", "gspo", "cispo"] = "clip"
    """Policy loss. "clip": PPO's, one ratio per token. "gspo": one ratio per trajectory. "cispo": clips the weight of a
    token but keeps its gradient."""
    aggregate: Literal["token", "trajectory", "constant"] = "token"
    """Average of the token losses. "token": mean over all action tokens of the batch. "trajectory": mean over
    trajectories of their token means. "constant": sum divided by `aggregate_length`, so that length has no weight
    (Dr. GRPO)."""
    aggregate_length: int = 1024
    """Divisor in tokens for aggregate "constant". Use about the most action tokens an episode may have."""
    clip_low: float = 0.2
    """Lower clip range: the ratio of new to old policy is clipped at 1 - clip_low."""
    clip_high: float = 0.2
    """Upper clip range: the ratio is clipped at 1 + clip_high. DAPO uses 0.28 to keep exploring."""
    epochs: int = 1
    """Passes over a step's samples. More passes reuse samples and move further from the sampling policy."""
    minibatches: int = 1
    """Updates per pass over a step's samples."""
    kl_coef: float = 0.001
    """Weight of the KL term to the reference model. 0 skips the reference. Raise it if the policy drifts too far."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL per token. "k3" is unbiased and never negative."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Place of the KL term: added to the loss, or subtracted from the reward of each token."""
    kl_target: float = 0.0
    """Target KL per token. After every step kl_coef moves towards it. 0 keeps kl_coef constant."""
    kl_rate: float = 0.1
    """Largest relative change of kl_coef in one step. Used with kl_target."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus. Raise it if entropy collapses."""
    overlap: int = 0
    """Steps of overlap. 1 plays the next step's episodes during learning, with weights one update old. 0 is strictly
    on-policy."""
    max_staleness: int = 0
    """Asynchronous groups: episodes of that many further steps are under way while the learner works, and go on through
    weight updates. A token is at most that many updates old when it is learned from. 0 is synchronous."""
    keep_cache: bool = False
    """Whether episodes under way keep the keys and values of older weights after an update. Otherwise they are computed
    again with the new ones. Used with max_staleness and the native engine."""
    importance: Literal["token", "sequence_mask", "none"] = "token"
    """Correction for differences between sampler and learner. "token": weight min(learner / sampler, cap) per token.
    "sequence_mask": also skips trajectories whose mean ratio is outside its bounds."""
    importance_cap: float = 2.0
    """Largest importance weight of a token, at least 1."""
    sequence_mask_low: float = 0.98
    """Lower bound of a trajectory's geometric mean of learner / sampler. Used by importance "sequence_mask"."""
    sequence_mask_high: float = 1.02
    """Upper bound of that mean. The mean hides length: 2,000 tokens at a mean of 1.02 are 40 nats apart."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    """Optimizer of the policy."""
    critic: CriticSettings = field(default_factory=CriticSettings)
    """The critic. Used by ppo."""
    distill: DistillSettings | None = None
    """The teacher of on-policy distillation."""
    tree: TreeSettings | None = None
    """Trees of rollouts instead of groups of independent episodes."""
    correction: CorrectionSettings | None = None
    """Learned self-correction of agent.style = "reflect"."""

    def __post_init__(self) -> None:
        require_minimums(self, steps=0, token_budget=0, groups_per_step=1, group_size=1, epochs=1, minibatches=1)
        require_minimums(
            self,
            clip_low=0,
            clip_high=0,
            kl_coef=0,
            kl_target=0,
            kl_rate=0,
            importance_cap=1,
            overlap=0,
            max_staleness=0,
        )
        require_minimums(self, sequence_mask_low=0, sequence_mask_high=1)
        require_minimums(self, overlong_buffer=1, aggregate_length=1, anchor_weight=0, resample_rounds=0)
        for name in ("turn_discount", "token_discount", "gae_lambda", "turn_lambda"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}")
        for problem in self._problems():
            raise ValueError(problem)

    def _problems(self) -> Iterator[str]:
        """Yield a line for each invalid value or combination."""
        algorithm, credit = self.algorithm, self.credit
        if (algorithm, credit) in INVALID:
            yield f"credit = {credit!r} cannot be used with {algorithm}: {INVALID[algorithm, credit]}"
        if self.loss == "gspo" and algorithm == "ppo":
            yield "loss = 'gspo' cannot be used with ppo: it has one ratio per trajectory, GAE one advantage per token"
        if self.resample_rounds and algorithm not in ZERO_VARIANCE_ALGORITHMS:
            yield f"resample_rounds replaces groups without an advantage: it needs grpo or rloo, got {algorithm}"
        if self.kl_rate >= 1.0:
            yield f"kl_rate must be below 1, or kl_coef could drop to 0 in one step, got {self.kl_rate}"
        bounds = ("clip_low", "clip_high", "importance_cap", "sequence_mask_high")
        for name in ("kl_coef", "entropy_coef", "kl_target", *bounds):
            if not math.isfinite(getattr(self, name)):
                yield f"{name} must be a finite number, got {getattr(self, name)}"
        if self.sequence_mask_low > 1.0:
            yield (
                f"sequence_mask_low must be at most 1, or trajectories of equal policies would be skipped, "
                f"got {self.sequence_mask_low}"
            )
        if self.kl_target and not self.kl_coef:
            yield "kl_target adapts kl_coef, which is 0: set kl_coef to a positive start value"
        if self.distill is not None and self.loss == "gspo":
            yield "loss = 'gspo' cannot be used with distill: it has one ratio per trajectory, a teacher scores tokens"
        if self.distill is not None and not self.distill.reward_weight:
            if self.kl_coef and self.kl_in == "reward":
                yield "kl_in = 'reward': distill without reward_weight ignores rewards, use kl_in = 'loss'"
            if self.resample_rounds:
                yield "resample_rounds compares rewards, which distill without reward_weight ignores: set it to 0"
            if self.keep_groups < 1.0:
                yield "keep_groups compares rewards, which distill without reward_weight ignores: set keep_groups = 1"
        yield from self._tree_problems()
        yield from self._correction_problems()
        if not 0.0 < self.keep_groups <= 1.0:
            yield f"keep_groups must lie in (0, 1], got {self.keep_groups}"
        if self.overlap > 1:
            yield f"overlap must be 0 (on-policy) or 1 (one step off), got {self.overlap}"
        if self.max_staleness and self.overlap:
            yield "max_staleness begins episodes of later steps early, as overlap does: set overlap = 0"
        if self.max_staleness and self.resample_rounds:
            yield "max_staleness learns from every group that was played: set resample_rounds = 0"

    @property
    def asynchronous(self) -> bool:
        """Whether episodes of later steps are under way while the learner works."""
        return self.overlap > 0 or self.max_staleness > 0

    def _tree_problems(self) -> Iterator[str]:
        if self.tree is None:
            return
        if self.algorithm not in ZERO_VARIANCE_ALGORITHMS:
            yield f"tree: paths are compared within and between trees, which needs grpo or rloo, got {self.algorithm}"
        if self.kl_in == "reward":
            yield "tree: kl_in = 'reward' needs every token's penalty on every path: use kl_in = 'loss'"
        if self.correction is not None:
            yield "tree and correction cannot be combined: both replace the comparison of whole episodes"

    def _correction_problems(self) -> Iterator[str]:
        if self.correction is None:
            return
        if self.algorithm not in ZERO_VARIANCE_ALGORITHMS or self.credit != "outcome":
            yield (
                f"correction compares attempts by their outcomes: it needs grpo or rloo and credit = 'outcome', got "
                f"{self.algorithm} and {self.credit!r}"
            )
        if self.overlong == "penalty":
            yield "correction pays each attempt its own outcome: overlong = 'penalty' has no place in it"
        if self.kl_in == "reward":
            yield "correction pays each attempt its own outcome: kl_in = 'reward' has no place in it, use 'loss'"
        if not self.kl_coef:
            yield "correction holds the first attempt near the reference model: set kl_coef above 0"

    def stage_problem(self) -> str:
        """Return why the second stage of self-correction is not reached, or nothing."""
        if self.correction is None or not 0 < self.steps <= self.correction.first_stage_steps:
            return ""
        return (
            f"rl.correction.first_stage_steps = {self.correction.first_stage_steps} leaves none of rl.steps = "
            f"{self.steps} for both attempts to learn: lower it"
        )

    def group_comparison(self) -> str:
        """Return what compares the episodes of a group, which then needs at least 2, or nothing."""
        if self.algorithm in GROUP_ALGORITHMS:
            return f"{self.algorithm} compares the episodes of a group"
        return "rl.keep_groups compares the rewards of a group" if self.keep_groups < 1.0 else ""

    @property
    def updates_per_step(self) -> int:
        return self.epochs * self.minibatches


def play_problem(rl: RLSettings, style: str, retry: str, own_group_size: bool) -> str:
    """Return why episodes cannot be played as [rl] needs them, or an empty string."""
    if rl.tree is not None and own_group_size:
        return "[rl.tree] decides the size of a group: remove group_size of the environments"
    if rl.correction is not None and (style, retry) != ("reflect", "always"):
        return "[rl.correction] compares attempts: set agent.style = 'reflect' and agent.retry = 'always'"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizonSettings(SettingsSection):
    """Schedule of the number of turns an episode may take. docs/guides/horizon.md has the rules."""

    kind: Literal["fixed", "stepwise", "linear", "adaptive"] = "fixed"
    """Kind of schedule. "fixed" never changes. "stepwise" grows in stages of equal length, "linear" evenly,
    "adaptive" when success stalls."""
    turns: tuple[int, ...] = (10,)
    """Turns per episode. "fixed": one number. "stepwise" and "adaptive": one per stage, ascending. "linear": the first
    and the last."""
    steps_per_stage: int = 100
    """Length in steps. "stepwise": of every stage but the last. "linear": from the first to the last number of turns.
    "adaptive": the longest a stage may last, 0 for no limit."""
    window: int = 10
    """For "adaptive": steps in each of the two windows compared. A stage lasts at least two windows."""
    min_gain: float = 0.02
    """For "adaptive": success has stalled if it rises by less than this from one window to the next."""
    min_truncated: float = 0.1
    """For "adaptive": smallest share of episodes that end at the horizon for it to grow."""

    def __post_init__(self) -> None:
        turns, kind = tuple(self.turns), self.kind
        count = {"fixed": len(turns) == 1, "linear": len(turns) == 2}.get(kind, len(turns) >= 1)
        if not count or any(t < 1 for t in turns):
            wanted = {"fixed": "one number", "linear": "two numbers, first and last"}.get(kind, "one number per stage")
            raise ValueError(f"a {kind} horizon needs turns = {wanted}, each at least 1, got {list(turns)}")
        if any(a >= b for a, b in pairwise(turns)):
            raise ValueError(f"a {kind} horizon needs ascending turns, got {list(turns)}")
        require_minimums(self, steps_per_stage=1 if kind in ("stepwise", "linear") else 0, window=1)
