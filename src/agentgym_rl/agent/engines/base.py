"""The engine protocol: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

from typing import Any, Protocol

from agentgym_rl.types import Completion, Sampling


class Engine(Protocol):
    """Samples continuations, many at once. Failures raise EngineError."""

    version: int
    """Version of the weights in use."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        """Continue `prompt_ids`, the whole conversation so far. `session` names the trajectory: an engine may keep its
        KV cache between turns and compute only new tokens."""

    async def release(self, session: str) -> None:
        """Free the resources of `session`. Unknown sessions are ignored."""

    async def update_weights(self, source: Any, version: int) -> None:
        """Load new weights and drop the KV cache computed with older ones."""

    async def close(self) -> None: ...
