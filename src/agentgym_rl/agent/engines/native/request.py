"""Requests of the native engine, and launches that sample for them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from agentgym_rl.agent.engines.native.runner import MAX_STOPS, Launch
from agentgym_rl.agent.engines.native.slots import Session
from agentgym_rl.types import Completion, Sampling


@dataclass(slots=True, eq=False)
class Request:
    """One generate() call."""

    session_name: str
    token_ids: list[int]
    """Prompt and reply; grows by one token per step."""
    num_prompt: int
    sampling: Sampling
    seed: int
    limit: int
    """Length of token_ids at which the reply ends."""
    future: asyncio.Future[Completion]
    num_reusable: int
    """Prompt tokens that its session had cached on arrival."""
    logprobs: list[float] = field(default_factory=list)
    session: Session | None = None
    version: int = 0
    """Version of the weights that sampled its first token."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each token, if they were updated since the first; otherwise empty."""
    running_steps: int = 0
    """Steps of launches that run for it."""

    @property
    def tokens_left(self) -> int:
        """Tokens that it may still sample after the launches that run."""
        return self.limit - len(self.token_ids) - self.running_steps

    @property
    def ended_on_device(self) -> bool:
        """Whether the device knows that the reply has ended: then later steps write nothing to its slot."""
        stops = self.sampling.stop_token_ids[:MAX_STOPS]
        return bool(self.logprobs) and (len(self.token_ids) >= self.limit or self.token_ids[-1] in stops)

    def extend(self, new: list[int], logprobs: list[float], version: int) -> None:
        """Append tokens that weights of `version` sampled."""
        if self.versions or version != self.version:
            self.versions = (self.versions or [self.version] * len(self.logprobs)) + [version] * len(new)
        self.token_ids += new
        self.logprobs += logprobs


@dataclass(slots=True)
class Flight:
    """A launch that was started and not read yet."""

    launch: Launch
    requests: list[Request]
    """Request of each row."""
    updates: int
    """Weight updates before it."""
    version: int
    """Version of the weights that it samples with."""
