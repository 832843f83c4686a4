"""What an engine is: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

from typing import Any, Protocol

from agentgym_rl.types import Completion, Sampling


class Engine(Protocol):
    """Samples continuations, many at once. Failures raise EngineError."""

    version: int
    """Version of the weights in use."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        """Continue `prompt_ids`, the whole conversation so far. `session` names the trajectory: an engine may keep its
        keys and values between turns and compute only what is new."""
        ...

    async def release(self, session: str) -> None:
        """Forget what is kept for `session`; unknown sessions are fine."""
        ...

    async def update_weights(self, source: Any, version: int) -> None:
        """Use new weights from now on and drop every key and value computed with older ones."""
        ...

    async def close(self) -> None: ...
