"""The engine protocol: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from agentgym_rl.types import Completion, Sampling

if TYPE_CHECKING:  # it imports torch, which engines behind an address do not need
    from agentgym_rl.transport.broadcast import WeightSource


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


class EngineAdapter(Protocol):
    """An engine that receives weights."""

    engine: Any
    """The Engine, which samples."""

    @property
    def version(self) -> int: ...

    @property
    def died(self) -> bool:
        """Whether the engine cannot go on, because its own processes died, and must be restarted."""

    async def start(self) -> None:
        """Start the engine's own processes, if it has any. Called before every transfer."""

    async def load(self, source: WeightSource, version: int, probe: Any = None) -> None:
        """Load these weights; no token is sampled until they are complete. A `probe` holds the learner's
        log-probabilities to check the engine against. Raises WeightsInterrupted if the transfer can be tried again."""

    async def open_endpoints(self) -> list[Any]:
        """Wake the engine if needed and prepare to `load` weights from learners on the same devices, one each."""

    async def sleep(self) -> None:
        """Free device memory that is not needed until `wake` or `load`."""

    async def wake(self) -> None:
        """Prepare to sample again after `sleep`."""
