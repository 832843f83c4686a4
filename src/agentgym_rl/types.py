"""Data that crosses modules. It imports only the standard library, and every module may import it.

Legend for shapes: T tokens of one segment, A sampled and trained tokens of them, K turns of one trajectory (a turn is
one observation and one reply).
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

Role = Literal["system", "user", "assistant", "tool"]
Observation = str | list[str]
"""Observation as a policy gets it: a text, or one result per tool call of its last reply."""
EPISODE_TIMEOUT = "EpisodeTimeout"
"""Prefix of the error of an episode whose deadline passed."""

MAX_REWARD = 1e9
"""Largest absolute reward of one step, so that sums, squares and float32 stay finite."""

ENVIRONMENT = "environment"
"""Source of the verdict that holds the environment's own reward."""

LEARNER = "learner"
"""Player whose weights are trained, in a game of several roles."""


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
    """Tokens per segment, prompt and replies together. An episode whose context is never cut is one segment."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool in a reply."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    """Links the call to the tool message with its result."""
    error: str = ""
    """Reason why the call cannot be played; empty for a well-formed call."""
    raw: str = ""
    """Sampled text of a malformed call; empty for a well-formed one."""

    def __str__(self) -> str:
        return self.raw or f"{self.name}({json.dumps(self.arguments, ensure_ascii=False)})"


@dataclass(slots=True)
class Step:
    """Answer of an environment to reset(), step() and call()."""

    observation: str
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    """Known keys: `success` (bool, on the last step), `valid` (bool: the action was understood and possible),
    `state_key` (str: equal keys mean the same state, after this step), `mistake` (bool: a demonstrator's, made on
    purpose; it is not imitated), `wrong_thought` (str: the beginning of a demonstrator's thought that is not imitated).
    JSON-serialisable."""
    results: list[str] = field(default_factory=list)
    """One result per tool call of the reply, in order; `observation` has them as one text. Empty without calls."""


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
    """One per token, under the distribution it was sampled from. None if the message was not sampled: not trainable."""
    version: int | None = None
    """Version of the weights that sampled its first token."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each token, if they were updated during the reply; otherwise empty."""
    cut_chars: int = 0
    """Characters cut from the end of an observation that was too long; `content` ends with a line that says so."""
    tool_calls: list[ToolCall] | None = None
    """Tool calls of a reply in order, `content` being the text around them; empty if it should have called a tool and
    did not, or if it is a message. None if the agent has no tools."""
    tool_call_id: str = ""
    """The call that a tool message answers."""
    advice: str = ""
    """The oracle's reply in the same state, if it was asked."""
    segment: int = 0
    """Segment that the message's tokens continue, numbered in the order of their first messages."""
    prefix: tuple[int, int] | None = None
    """Set on the first message of a later segment: (segment, count) of the earlier tokens that it starts with."""
    dropped_turns: int = 0
    """Set where the context was cut: turns of the episode's beginning that the model does not see from here on."""
    purpose: str = ""
    """Empty in the conversation with the environment. `summary`: a request for a summary of the context, or the reply
    to it, which the environment does not get. `call`: an external agent's call of the model before the turn's last."""
    untrained: int = 0
    """Sampled tokens at the beginning without a loss, such as those of a thought."""

    @property
    def is_reply(self) -> bool:
        """Whether it is an agent's reply to the environment: one per turn."""
        return self.role == "assistant" and not self.purpose

    @property
    def text(self) -> str:
        """Content and tool calls as one text, to compare and to show."""
        return "\n".join(part for part in (self.content, *map(str, self.tool_calls or ())) if part)


@dataclass(slots=True)
class Segment:
    """One sequence of tokens that a model continued: a prompt, replies and what was appended between them."""

    token_ids: list[int] = field(default_factory=list)
    """T."""
    loss_mask: list[bool] = field(default_factory=list)
    """T: True where a token was sampled in this segment and is trained on; A of them."""
    logprobs: list[float] = field(default_factory=list)
    """T: NaN where loss_mask is False, so that a leak into a ratio raises."""
    turn_index: list[int] = field(default_factory=list)
    """T: turn of each trained token, -1 elsewhere."""
    versions: list[int] = field(default_factory=list)
    """A: version of the weights that sampled each token."""
    order: list[int] = field(default_factory=list)
    """A: position of each token among the trained tokens of the episode, in the order of sampling."""

    def extend(self, message: Message, turn: int, position: int) -> int:
        """Append a message's tokens. `position` counts trained tokens of the episode; return it after the message."""
        count = len(message.token_ids)
        trained = 0 if message.logprobs is None else count - message.untrained
        self.token_ids += message.token_ids
        self.loss_mask += [False] * (count - trained) + [True] * trained
        self.logprobs += [math.nan] * (count - trained) + (message.logprobs or [])[count - trained :]
        self.turn_index += [-1] * (count - trained) + [turn] * trained
        self.versions += (message.versions or [message.version or 0] * count)[count - trained :]
        self.order += range(position, position + trained)
        return position + trained


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
    cut_chars: int = 0
    """Characters of the episode that the judge did not read, because it was too long."""


@dataclass(slots=True)
class Trajectory:
    """One played episode. Append-only while it is played; token views are derived, never stored twice.

    Its messages are in the order of play. Their tokens form a tree of segments: a segment that is not a continuation of
    an earlier one starts with a prefix of it, perhaps an empty one. A linear episode is one segment.
    """

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
    tools: list[dict[str, Any]] = field(default_factory=list)
    """JSON schemas of the tools that the agent was offered, as chat templates take them."""
    verdicts: list[Verdict] = field(default_factory=list)
    """Scores of every source of rewards, if the recipe has [[rewards]]; else empty."""
    parent: str = ""
    """Id of the episode that it branches off, in a tree of rollouts; else empty."""
    shared_turns: int = 0
    """First turns that it shares with its parent, which sampled them. Only the parent has their log-probabilities."""
    role: str = ""
    """Role that it was played in, if the environment has several."""
    player: str = ""
    """Player of that role: LEARNER, or the name of another policy, which is not trained on."""
    passive_reward: float = 0.0
    """Reward of a role whose game ended before its first reply, so that no turn can hold it."""
    digest: Any = None
    """Numbers of its messages (training.metrics.Digest), if these are stored in another process; else None."""

    @property
    def reward(self) -> float:
        return math.fsum(self.rewards) + self.passive_reward

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
        info = self.infos[-1] if self.infos else {}
        return self.stop is StopReason.DONE and bool(info.get("success", self.reward >= 1.0))

    @property
    def turns(self) -> list[int]:
        """One per message: the turn it belongs to. A summary belongs to the turn of the reply after it."""
        replies = sum(message.is_reply for message in self.messages)
        turns, turn = [], 0
        for message in self.messages:
            turns.append(max(0, min(turn, replies - 1)))
            turn += message.is_reply
        return turns

    @property
    def segments(self) -> list[Segment]:
        """Token sequences of the episode, in the order in which they began."""
        segments: list[Segment] = []
        position = 0
        for message, turn in zip(self.messages, self.turns, strict=True):
            if message.segment == len(segments):
                segments.append(_branch(segments, message.prefix))
            position = segments[message.segment].extend(message, turn, position)
        return segments

    @property
    def num_segments(self) -> int:
        return 1 + max((message.segment for message in self.messages), default=0)

    @property
    def token_ids(self) -> list[int]:
        """T: the ids of a linear episode. Like the next three it raises if the episode has several segments."""
        return self._segment.token_ids

    @property
    def loss_mask(self) -> list[bool]:
        """T: True where a token was sampled and is trained on."""
        return self._segment.loss_mask

    @property
    def logprobs(self) -> list[float]:
        """T: NaN where loss_mask is False."""
        return self._segment.logprobs

    @property
    def turn_index(self) -> list[int]:
        """T: turn of each trained token, -1 elsewhere."""
        return self._segment.turn_index

    @property
    def _segment(self) -> Segment:
        segments = self.segments or [Segment()]
        if len(segments) > 1:
            raise ValueError(f"episode {self.id} has {len(segments)} segments, one is needed: read `segments`")
        return segments[0]

    @property
    def imitated(self) -> list[bool]:
        """One per message: True on replies, except mistakes that were made on purpose."""
        infos = iter(self.infos)
        return [m.is_reply and not next(infos, {}).get("mistake", False) for m in self.messages]

    @property
    def unimitated_chars(self) -> list[int]:
        """One per message: characters at the start of a reply that are not imitated, those of a wrong thought."""
        infos = iter(self.infos)
        chars = []
        for message in self.messages:
            wrong = next(infos, {}).get("wrong_thought", "") if message.is_reply else ""
            chars.append(message.content.find(wrong) + len(wrong) if wrong and wrong in message.content else 0)
        return chars

    @property
    def versions(self) -> list[int]:
        """Distinct weight versions that sampled it, ascending."""
        return sorted({v for m in self.messages if m.version is not None for v in (m.version, *m.versions)})

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
                        **{name: value for name in _RARE if (value := getattr(m, name))},
                        **({} if m.tool_calls is None else {"tool_calls": [asdict(call) for call in m.tool_calls]}),
                        **({"tool_call_id": m.tool_call_id} if m.tool_call_id else {}),
                    }
                    for m in self.messages
                ],
                "rewards": self.rewards,
                "infos": self.infos,
                "stop": self.stop,
                "error": self.error,
                "horizon": self.horizon,
                "seconds": round(self.seconds, 4),
                **({"tools": self.tools} if self.tools else {}),
                **({"verdicts": [asdict(verdict) for verdict in self.verdicts]} if self.verdicts else {}),
                **({"parent": self.parent, "shared_turns": self.shared_turns} if self.parent else {}),
                **({"role": self.role, "player": self.player} if self.role else {}),
                **({"passive_reward": self.passive_reward} if self.passive_reward else {}),
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
            messages=[_message(message) for message in row["messages"]],
            rewards=row["rewards"],
            infos=row["infos"],
            stop=StopReason(row["stop"]) if row["stop"] else None,
            error=row["error"],
            horizon=row["horizon"],
            seconds=row["seconds"],
            tools=row.get("tools", []),
            verdicts=[Verdict(**verdict) for verdict in row.get("verdicts", ())],
            parent=row.get("parent", ""),
            shared_turns=row.get("shared_turns", 0),
            role=row.get("role", ""),
            player=row.get("player", ""),
            passive_reward=row.get("passive_reward", 0.0),
        )


_RARE = ("versions", "cut_chars", "advice", "segment", "prefix", "dropped_turns", "purpose", "untrained")
"""Fields of a message that are written only if they are set."""


def _message(row: dict[str, Any]) -> Message:
    message = Message(**row)
    if message.tool_calls is not None:
        message.tool_calls = [ToolCall(**call) for call in row["tool_calls"]]
    if message.prefix is not None:
        segment, count = message.prefix
        message.prefix = (segment, count)
    return message


def _branch(segments: list[Segment], prefix: tuple[int, int] | None) -> Segment:
    """Return the start of a segment: earlier tokens, none of which is trained on a second time."""
    parent, count = prefix or (0, 0)
    token_ids = segments[parent].token_ids[:count] if count else []
    return Segment(token_ids, [False] * count, [math.nan] * count, [-1] * count)


@dataclass(slots=True)
class Group:
    """Several episodes of one task, failed ones included: the unit of GRPO and RLOO."""

    task: Task
    trajectories: list[Trajectory]
    stored: Any = None
    """Where its messages are (training.stored.StoredGroup), if its trajectories have none; else None."""

    def lines(self) -> Sequence[bytes | memoryview]:
        """Return its trajectories as lines of JSON in UTF-8, without line ends."""
        return self.stored.lines() if self.stored is not None else [t.to_json().encode() for t in self.trajectories]

    @property
    def learns(self) -> bool:
        """Whether the learner played: False for a role that another policy plays."""
        return all(t.player in ("", LEARNER) for t in self.trajectories)

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
    """All a learner sees of one segment of a trajectory: T tokens, of which A were sampled.

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
    order: list[int] = field(default_factory=list)
    """A: position of each token among the trained tokens of its episode; empty if the sample is the whole episode."""
    left_out: list[tuple[int, int]] = field(default_factory=list)
    """(start, length) of tokens without a loss, even one on all text: replies not imitated, repeated beginnings."""
    stored: Any = None
    """Where its tokens are and how many (training.stored.StoredSample), if lists above are empty; else None."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) or (self.stored.num_tokens if self.stored is not None else 0)


def in_order(samples: Sequence[Sample], name: str) -> list[float]:
    """Return values of an episode's tokens in the order of sampling, from its samples; empty if they have none."""
    if len(samples) == 1 or not getattr(samples[0], name):
        return list(getattr(samples[0], name))
    values = {k: v for sample in samples for k, v in zip(sample.order, getattr(sample, name), strict=True)}
    return [values[k] for k in sorted(values)]


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
    """Version of the weights that sampled the first token."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each token, if they were updated during the reply; otherwise empty."""


class EnvSession(Protocol):
    """One running episode of an environment as the agent sees it, local or remote. Failures raise EnvError."""

    name: str
    instruction: str
    tools: list[dict[str, Any]]
    """JSON schemas of the tools that the agent may call, as chat templates take them; empty if it acts by text. It is
    one list for the whole session: if tools depend on the item, reset() and step() change its content."""

    async def reset(self, item: int) -> Step: ...
    async def step(self, text: str) -> Step: ...

    async def call(self, calls: list[ToolCall], message: str = "") -> Step:
        """Play the calls of one reply in order, as one step. A malformed call is answered, not played.

        `message` is the text of the reply. Without calls, it is the action if the environment takes messages.
        """
        ...

    def call_of(self, action: str) -> ToolCall | None:
        """Return the call that stands for a text action; None if the action is a message."""
        ...

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


class CollectFrom(Protocol):
    """A `Collect` that can also play a part of its tasks: those from number `first` on."""

    def __call__(self, tasks: list[Task], limits: Limits, seed: int, first: int = 0, /) -> Awaitable[list[Group]]: ...
