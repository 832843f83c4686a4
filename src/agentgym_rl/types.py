"""Data that crosses modules. It imports only the standard library, and every module may import it.

Legend for shapes: T tokens of one trajectory, K turns of one trajectory (a turn is one observation and one reply).
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

Role = Literal["system", "user", "assistant"]
EPISODE_TIMEOUT = "EpisodeTimeout"
"""Prefix of the error of an episode whose deadline passed."""

MAX_REWARD = 1e9
"""Largest absolute reward of one step, so that sums, squares and float32 stay finite."""

ENVIRONMENT = "environment"
"""Source of the verdict that holds the environment's own reward."""


class StopReason(StrEnum):
    """Reason why an episode ended. Every ending has a name."""

    DONE = "done"
    """The environment ended it, by success or failure."""
    MAX_TURNS = "max_turns"
    """The horizon was reached: a truncation."""
    MAX_CONTEXT = "max_context"
    """The context has no space for another reply: a truncation."""
    LENGTH = "length"
    """A reply hit max_new_tokens before its end-of-turn token: a truncation."""
    TIMEOUT = "timeout"
    """The episode's deadline passed and the run counts that as a truncation; by default it is an ERROR."""
    ERROR = "error"
    """The environment or the engine failed: recorded, retried, never trained on."""

    @property
    def truncated(self) -> bool:
        return self in (StopReason.MAX_TURNS, StopReason.MAX_CONTEXT, StopReason.LENGTH, StopReason.TIMEOUT)


@dataclass(frozen=True, slots=True)
class Task:
    """One problem to play: an environment's name and an item of it."""

    env: str
    item: int

    @property
    def key(self) -> str:
        return f"{self.env}/{self.item}"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one episode. A horizon schedule does `replace(limits, max_turns=...)` and nothing else."""

    max_turns: int
    """Replies per episode."""
    max_new_tokens: int
    """Sampled tokens per reply."""
    max_context: int
    """Tokens per episode, prompt and replies together."""


@dataclass(slots=True)
class Step:
    """Answer of an environment to reset() and to step()."""

    observation: str
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    """Known keys: `success` (bool, on the last step), `valid` (bool: the action was understood and possible),
    `state_key` (str: equal keys mean the same state, after this step), `mistake` (bool: a demonstrator's, made on
    purpose; it is not imitated). JSON-serialisable."""


@dataclass(slots=True)
class Message:
    """One message of a conversation, holding only the tokens it *adds*.

    The generation prompt belongs to the observation before it, so an assistant's ids are exactly the sampled ids.
    """

    role: Role
    content: str
    token_ids: list[int] = field(default_factory=list)
    """Empty if no tokenizer was involved (human, oracle, API)."""
    logprobs: list[float] | None = None
    """One per token, under the distribution it was sampled from; None if the message was not sampled. Trainable iff not
    None."""
    version: int | None = None
    """Version of the weights that sampled it."""
    cut_chars: int = 0
    """Characters cut from the end of an observation that was too long; `content` ends with a line that says so."""
    advice: str = ""
    """The oracle's reply in the same state, if it was asked."""


@dataclass(slots=True)
class Verdict:
    """Score of an episode by one source of rewards, such as a judge or the environment itself."""

    source: str
    """Name of the source; `environment` is the environment's own reward."""
    weight: float
    """Weight of the scores in the reward that is trained on."""
    scores: list[float]
    """K: one per turn; empty if the source failed."""
    reason: str = ""
    """Text of the judge's answer."""
    error: str = ""
    """Reason why there are no scores. The episode is then not trained on."""


@dataclass(slots=True)
class Trajectory:
    """One played episode. Append-only while it is played; token views are derived, never stored twice."""

    id: str
    """Unique in a run: step, task, place in the group and attempt."""
    task: Task
    messages: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """K: one per turn."""
    infos: list[dict[str, Any]] = field(default_factory=list)
    """K: the environment's info about each turn; `state_key` is the state in which the reply was given."""
    stop: StopReason | None = None
    """None only while the episode is played."""
    error: str | None = None
    """Type and text of the failure when stop is ERROR."""
    horizon: int = 0
    """Value of max_turns during the episode."""
    seconds: float = 0.0
    """Wall time of the episode."""
    verdicts: list[Verdict] = field(default_factory=list)
    """Scores of every source of rewards, if the recipe has [[rewards]]; else empty."""

    @property
    def reward(self) -> float:
        return math.fsum(self.rewards)

    @property
    def training_rewards(self) -> list[float]:
        """K: the weighted sum of all verdicts; without verdicts the environment's rewards."""
        if not self.verdicts:
            return list(self.rewards)
        turns = zip(*([v.weight * score for score in v.scores] for v in self.verdicts), strict=True)
        return [math.fsum(turn) for turn in turns]

    @property
    def training_reward(self) -> float:
        return math.fsum(self.training_rewards)

    @property
    def judge_error(self) -> str:
        """Reason why a source of rewards has no score, or an empty string."""
        return next((f"{v.source}: {v.error}" for v in self.verdicts if v.error), "")

    @property
    def num_turns(self) -> int:
        return len(self.rewards)

    @property
    def timed_out(self) -> bool:
        """Whether the deadline passed, as an error or as a truncation."""
        return self.stop is StopReason.TIMEOUT or (self.error or "").startswith(EPISODE_TIMEOUT)

    @property
    def success(self) -> bool:
        """True when the environment ended the episode and called it a success (or, if it does not say, paid >= 1)."""
        if self.stop is not StopReason.DONE or not self.infos:
            return False
        return bool(self.infos[-1].get("success", self.reward >= 1.0))

    @property
    def token_ids(self) -> list[int]:
        """T."""
        return [token for message in self.messages for token in message.token_ids]

    @property
    def loss_mask(self) -> list[bool]:
        """T: True where a token was sampled."""
        return [message.logprobs is not None for message in self.messages for _ in message.token_ids]

    @property
    def logprobs(self) -> list[float]:
        """T: NaN where nothing was sampled, so that a leak into a ratio raises."""
        return [p for m in self.messages for p in (m.logprobs or [math.nan] * len(m.token_ids))]

    @property
    def turn_index(self) -> list[int]:
        """T: turn of each sampled token, -1 elsewhere."""
        turns: list[int] = []
        turn = -1
        for message in self.messages:
            turn += message.role == "assistant"
            turns += [turn if message.logprobs is not None else -1] * len(message.token_ids)
        return turns

    @property
    def imitated(self) -> list[bool]:
        """One per message: True on replies, except mistakes that were made on purpose."""
        infos = iter(self.infos)
        return [m.role == "assistant" and not next(infos, {}).get("mistake", False) for m in self.messages]

    @property
    def versions(self) -> list[int]:
        """Distinct weight versions that sampled it, ascending."""
        return sorted({m.version for m in self.messages if m.version is not None})

    def to_json(self) -> str:
        """Return one line of JSON; `from_json` is its inverse."""
        return json.dumps(
            {
                "id": self.id,
                "env": self.task.env,
                "item": self.task.item,
                "messages": [
                    {
                        "role": m.role,
                        "content": m.content,
                        "token_ids": m.token_ids,
                        "logprobs": m.logprobs,
                        "version": m.version,
                        **({"cut_chars": m.cut_chars} if m.cut_chars else {}),
                        **({"advice": m.advice} if m.advice else {}),
                    }
                    for m in self.messages
                ],
                "rewards": self.rewards,
                "infos": self.infos,
                "stop": self.stop,
                "error": self.error,
                "horizon": self.horizon,
                "seconds": round(self.seconds, 4),
                **({"verdicts": [asdict(verdict) for verdict in self.verdicts]} if self.verdicts else {}),
            },
            ensure_ascii=False,
        )

    @classmethod
    def from_json(cls, line: str) -> Trajectory:
        """Return the trajectory that `to_json` wrote."""
        row = json.loads(line)
        return cls(
            id=row["id"],
            task=Task(row["env"], row["item"]),
            messages=[Message(**message) for message in row["messages"]],
            rewards=row["rewards"],
            infos=row["infos"],
            stop=StopReason(row["stop"]) if row["stop"] else None,
            error=row["error"],
            horizon=row["horizon"],
            seconds=row["seconds"],
            verdicts=[Verdict(**verdict) for verdict in row.get("verdicts", ())],
        )


@dataclass(slots=True)
class Group:
    """Several episodes of one task, failed ones included: the unit of GRPO and RLOO."""

    task: Task
    trajectories: list[Trajectory]

    @property
    def usable(self) -> list[Trajectory]:
        """Trajectories of episodes that did not fail."""
        return [t for t in self.trajectories if t.stop is not StopReason.ERROR]

    @property
    def trainable(self) -> list[Trajectory]:
        """Trajectories that may be trained on: those that did not fail and that every judge has scored."""
        return [t for t in self.usable if not t.judge_error]


@dataclass(slots=True)
class Sample:
    """All a learner sees of one trajectory: T tokens, of which A were sampled.

    Values of sampled tokens have one entry for each of them and none for the rest, so that nothing can leak from a
    token that was not sampled. Everything after `loss_mask` is empty for supervised samples or until it is computed.
    """

    token_ids: list[int]
    """T."""
    loss_mask: list[bool]
    """T: True where the loss is taken; A of them."""
    logprobs: list[float] = field(default_factory=list)
    """A: log-probabilities under the sampler."""
    turn_index: list[int] = field(default_factory=list)
    """A: the turn of each sampled token, from 0."""
    versions: list[int] = field(default_factory=list)
    """A: version of the weights that sampled each token."""
    advantages: list[float] = field(default_factory=list)
    """A."""
    old_logprobs: list[float] = field(default_factory=list)
    """A: log-probabilities under the learner, before the step's updates."""
    reference_logprobs: list[float] = field(default_factory=list)
    """A: log-probabilities under the reference model."""
    teacher_logprobs: list[float] = field(default_factory=list)
    """A: log-probabilities under the teacher of distillation."""
    entropies: list[float] = field(default_factory=list)
    """A: entropy of the learner's distribution at each token, before the step's updates."""
    values: list[float] = field(default_factory=list)
    """A: the critic's value of the state before each token."""
    returns: list[float] = field(default_factory=list)
    """A: targets of the critic."""
    last_value: float = 0.0
    """The critic's value of the state after the last token."""
    trajectory_id: str = ""
    left_out: list[tuple[int, int]] = field(default_factory=list)
    """(start, length) of replies that are not imitated: no loss is taken on them, even if it is on other text."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of an engine's sampling."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    """A reply ends with the first of these, which is part of the reply."""
    stop: tuple[str, ...] = ()
    """A reply ends with the token that completes one of these strings; every sampled token is kept."""
    seed: int | None = None
    """The same prompt, weights and seed give the same reply, whatever else runs at the same time."""


@dataclass(slots=True)
class Completion:
    """Tokens that an engine sampled."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-probability of each token under the distribution it was drawn from: after temperature and top-p
    (at temperature 0: of the unscaled distribution)."""
    finish: Literal["stop", "length"]
    version: int
    """Version of the weights."""


class EnvSession(Protocol):
    """One running episode of an environment as the agent sees it, local or remote. Failures raise EnvError."""

    name: str
    instruction: str

    async def reset(self, item: int) -> Step: ...
    async def step(self, text: str) -> Step: ...
    async def actions(self) -> list[str]: ...
    async def oracle(self) -> str: ...

    async def advice(self) -> tuple[str, str]:
        """Return (thought, action): the oracle's action and its reason, empty if the environment gives none."""

    async def render(self) -> str | bytes: ...
    async def close(self) -> None: ...


class EnvPool(Protocol):
    """Source of sessions. `open` waits for a free slot; closing a session frees it."""

    async def open(self, env: str) -> EnvSession: ...
    async def items(self, env: str, split: str, subset: str | None = None) -> list[int]: ...
    async def close(self) -> None: ...


Collect = Callable[[list[Task], Limits, int], Awaitable[list[Group]]]
"""(tasks, limits, seed) -> one group per task. The same weights, tasks, limits and seed give the same groups."""
