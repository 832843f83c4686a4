"""Settings of judged rewards. Standard library only, so that a recipe can be checked without torch.

The docstring of each field is its entry in the reference of recipe keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agentgym_rl.errors import did_you_mean
from agentgym_rl.training.settings import SettingsSection, require_minimums
from agentgym_rl.types import ENVIRONMENT

READ_BY: dict[str, tuple[str, ...]] = {
    ENVIRONMENT: (),
    "rubric": ("rubric", "per_turn"),
    "ranking": ("rubric",),
    "format": ("pattern",),
    "length": ("tokens",),
    "reward_model": ("path", "device"),
}
"""Built-in kinds of rewards and the settings that each reads besides name and weight."""
RESERVED = ("mean", "total", "failed")
"""Names of metrics under judged/ that are no source's."""
SCORED_TOKENS = 16384
"""Tokens of a pass of a reward model."""
JUDGED_KINDS = ("rubric", "ranking")
"""Kinds that ask the model of [judge]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSettings(SettingsSection):
    """One source of rewards. The reward that is trained on is the weighted sum of all sources."""

    kind: str
    """"environment": the environment's own reward, which has weight 1 if no entry says otherwise. "rubric": a judge
    scores each episode from 0 to 1. "ranking": a judge orders the episodes of a group, best 1, worst 0. "format": the
    share of replies that match `pattern`. "length": 0 up to `tokens` per reply, down to -1 at twice as many.
    "reward_model": the probability, 0 to 1, that a model trained on pairs (method = "reward_model") gives an episode of
    being preferred to an average one. "my_module:function": a Python function."""
    name: str = ""
    """Name in metrics and files; by default the kind, or the function's name. Each name once."""
    weight: float = 1.0
    """Weight in the sum. A negative weight makes a penalty."""
    rubric: str = ""
    """Criteria of the judge, in words. Used by "rubric" and "ranking"."""
    per_turn: bool = False
    """Score every turn instead of the whole episode: a process reward. Used by "rubric"."""
    pattern: str = ""
    """Regular expression that a whole reply must match. Used by "format"."""
    tokens: int = 0
    """Tokens of a reply that cost nothing. Used by "length"."""
    path: str = ""
    """Run or model folder of the reward model. Used by "reward_model"."""
    device: str = "auto"
    """Device of the reward model: `auto`, `cpu`, `cuda`, or one of several such as `cuda:1`."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of a Python function."""

    def __post_init__(self) -> None:
        if ":" not in self.kind and self.kind not in READ_BY:
            raise ValueError(
                f"kind must be {', '.join(READ_BY)} or an import path such as my_module:function, got "
                f"{self.kind!r}{did_you_mean(self.kind, READ_BY)}"
            )
        if not math.isfinite(self.weight):
            raise ValueError(f"weight must be a finite number, got {self.weight}")
        if self.kind == ENVIRONMENT and self.name:
            raise ValueError(f"name is not read by kind = {self.kind!r}: remove it")
        if self.source in RESERVED or (self.source == ENVIRONMENT and self.kind != ENVIRONMENT):
            raise ValueError(f"name {self.source!r} has another meaning: choose another")
        if not re.fullmatch(r"[\w.+-]+", self.source):
            raise ValueError(f"name must consist of letters, digits, '.', '_', '+' and '-', got {self.source!r}")
        defaults = {"rubric": "", "per_turn": False, "pattern": "", "tokens": 0, "kwargs": {}}
        defaults |= {"path": "", "device": "auto"}
        wanted = ("kwargs",) if ":" in self.kind else READ_BY[self.kind]
        for name, default in defaults.items():
            if name not in wanted and getattr(self, name) != default:
                raise ValueError(f"{name} is not read by kind = {self.kind!r}: remove it")
            if name in wanted and name not in ("kwargs", "per_turn", "device") and getattr(self, name) == default:
                raise ValueError(f"kind = {self.kind!r} needs {name}, got none")
        require_minimums(self, tokens=0)
        _require_device(self.device)
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is not a regular expression: {error}") from None

    @property
    def source(self) -> str:
        """Name of the verdicts."""
        return self.name or self.kind.rpartition(":")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSettings(SettingsSection):
    """The model that judges episodes, behind an OpenAI-compatible API or in this process, and what it may cost."""

    url: str | None = None
    """Base address of an OpenAI-compatible API, such as http://127.0.0.1:8000/v1."""
    model: str | None = None
    """Name of the model at `url`."""
    api_key_variable: str | None = None
    """Environment variable that holds the key of `url`. The key itself is never written to a file."""
    path: str | None = None
    """Model folder or hub name of a judge in this process, instead of `url`."""
    device: str = "auto"
    """Device of the judge in `path`: `auto`, `cpu`, `cuda`, or one of several such as `cuda:1`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights of the judge in `path`."""
    temperature: float = 0.0
    """Sampling temperature. 0 takes the most likely token."""
    max_new_tokens: int = 512
    """Longest answer in tokens."""
    max_chars: int = 24_000
    """Most characters that the judge reads for one question: of an episode, or of all episodes that a ranking compares.
    Long messages are cut in the middle."""
    timeout_s: float = 60.0
    """Seconds that one request may take. A judgement may take this times `retries` + 1."""
    retries: int = 3
    """Further attempts after a failed request or an answer without a score."""
    concurrency: int = 16
    """Requests at the same time."""
    max_calls: int = 10_000
    """Most requests of the run, over all its processes, retries and failed ones included. Answers from the cache cost
    nothing."""
    max_total_tokens: int = 0
    """Most tokens of prompts and answers together, over all processes of the run. A failed request counts with its
    prompt. 0 means no limit."""

    def __post_init__(self) -> None:
        require_minimums(self, temperature=0, max_new_tokens=1, max_chars=200, retries=0, concurrency=1, max_calls=1)
        require_minimums(self, max_total_tokens=0)
        if not 0 < self.timeout_s < math.inf or not math.isfinite(self.temperature):
            raise ValueError(
                f"timeout_s must be positive and temperature finite, got {self.timeout_s} and {self.temperature}"
            )
        if (self.url is None) == (self.path is None):
            raise ValueError("set exactly one of url (an OpenAI-compatible API) and path (a model in this process)")
        if (self.url is None) != (self.model is None):
            raise ValueError("url and model belong together: set both, or path alone")
        if self.api_key_variable is not None and self.url is None:
            raise ValueError("api_key_variable is for a judge at url: remove it")
        _require_device(self.device)

    @property
    def max_context(self) -> int:
        """Tokens of a question and its answer for a judge in this process.

        Text has more than two characters a token. A longer question is an error that names max_chars.
        """
        return self.max_chars // 2 + 1024 + self.max_new_tokens


def _require_device(device: str) -> None:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ValueError(f"device must be auto, cpu, cuda, or one of several such as cuda:1, got {device!r}")


def reward_problem(
    rewards: Sequence[RewardSettings], judge: JudgeSettings | None, smallest_group: int, distilled: bool
) -> str:
    """Return why sources of rewards cannot be used together or with the rest of the recipe, or an empty string.

    `distilled`: whether the recipe learns from a teacher alone.
    """
    sources = [reward.source for reward in rewards]
    judged = [reward for reward in rewards if reward.kind in JUDGED_KINDS]
    if len(set(sources)) < len(sources):
        return f"rewards: each name once, got {', '.join(sources)}: set name"
    if judged and judge is None:
        return f"rewards: kind = {judged[0].kind!r} needs [judge] with url and model, or path"
    if judge is not None and not judged:
        return f"[judge] is read by [[rewards]] of kind {' or '.join(JUDGED_KINDS)}, there is none"
    if rewards and distilled:
        return "[[rewards]] count only with rl.distill.reward_weight above 0: set it, or remove them"
    if any(reward.kind == "ranking" for reward in judged) and smallest_group < 2:
        return f"rewards: a ranking compares at least 2 episodes, got group_size = {smallest_group}"
    return ""


def budget_problem(
    rewards: Sequence[RewardSettings], judge: JudgeSettings | None, groups: int, group_size: float
) -> str:
    """Return why `judge.max_calls` does not last for `groups` groups of `group_size` episodes on average, or nothing.

    A rubric is asked about every episode, a ranking about every group. Equal questions, which are asked once, and
    repeated ones are not foreseen.
    """
    if judge is None:
        return ""
    judged = [reward for reward in rewards if reward.kind in JUDGED_KINDS]
    calls = round(sum(groups * (group_size if reward.kind == "rubric" else 1) for reward in judged))
    if calls <= judge.max_calls:
        return ""
    return (
        f"judge.max_calls = {judge.max_calls} is less than the {calls} answers that all steps are expected to need; "
        "the run ends when they are spent: raise it, or resume the run with more"
    )
