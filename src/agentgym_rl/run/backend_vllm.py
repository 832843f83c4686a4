"""vLLM as the engine of a run: how it is made from a recipe and gets the learner's weights."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from agentgym_rl.agent.engines.replicas import Replicas
from agentgym_rl.agent.engines.vllm import Probe, VllmEngine, VllmServer, probe_model
from agentgym_rl.config import Config, EngineConfig
from agentgym_rl.training.checkpoint import export
from agentgym_rl.training.lora import policy_tensors
from agentgym_rl.transport.broadcast import BroadcastWeights, WeightsInterrupted, WeightSource, untied_state
from agentgym_rl.transport.device import DeviceWeights, Endpoint

Vllm = VllmEngine | VllmServer | Replicas


def make_vllm(config: Config, folder: Path) -> Vllm:
    """Return the recipe's vLLM, not started, for the model in `folder` (with LoRA: the frozen weights)."""
    settings, lora = config.engine, config.model.lora
    options: dict[str, Any] = {}
    # An engine with a device of its own need not sleep.
    if config.scale is not None and config.scale.layout == "colocated" and torch.cuda.is_available():
        options["enable_sleep_mode"] = True
    if settings.tensor_parallel > 1:
        # Explicit: inside an actor vLLM would ask Ray for processes, but this actor owns all devices.
        options |= {"tensor_parallel_size": settings.tensor_parallel, "distributed_executor_backend": "mp"}
    max_context = config.longest_context()
    if settings.urls:
        key = settings.api_key_variable
        engines: Sequence[Any] = [VllmServer(u, max_context=max_context, api_key_variable=key) for u in settings.urls]
    else:
        engines = [
            VllmEngine(
                folder,
                dtype=config.model.dtype if settings.dtype == "auto" else settings.dtype,
                max_sessions=config.sessions_per_engine(),
                max_context=max_context,
                memory_share=settings.memory_share,
                kv_cache_bytes=None if settings.kv_cache_gib is None else int(settings.kv_cache_gib * 2**30),
                eager=settings.eager,
                lora_rank=None if lora is None else lora.rank,
                # Without request seeds, replicas with vLLM's default seed would all draw the same numbers.
                options=options if settings.seeded else options | {"seed": secrets.randbits(31)},
            )
            for _ in range(settings.replicas)
        ]
    return engines[0] if len(engines) == 1 else Replicas(engines, config.sessions_per_engine())


async def publish(
    engine: Vllm,
    settings: EngineConfig,
    model: Any,
    tokenizer: Any,
    version: int,
    weights_dir: Path,
    *,
    adapters: bool,
) -> None:
    """Give an engine the weights of `model`, and check them with a probe.

    A vLLM of this process gets them in memory. A server that sees the same disk gets a folder.
    """
    dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    if settings.weights == "memory" and not settings.urls:
        adapter = dict(policy_tensors(model)) if adapters else {}
        probe = probe_model(model, dtype, adapter=adapter.items())
        await engine.update_weights(adapter or untied_state(model), version, probe=probe)
        return
    folder = weights_dir / f"weights_{version}"
    shutil.rmtree(folder, ignore_errors=True)
    export(model, tokenizer, folder)
    await engine.update_weights(folder, version, probe=probe_model(model, dtype))
    _remove_other_versions(folder)


def _remove_other_versions(folder: Path) -> None:
    """Remove the folders of older weights. An adapter's folder is needed while it is in use."""
    for other in folder.parent.glob("weights_*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)


class VllmAdapter:
    """A vLLM engine behind the interface through which weights are sent (EngineAdapter)."""

    def __init__(self, engine: Vllm) -> None:
        assert isinstance(engine, VllmEngine)
        self.engine = engine
        self._interrupted = False

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def died(self) -> bool:
        """Also after an interrupted update, which leaves vLLM's layers half loaded."""
        return self.engine.died or self._interrupted

    async def start(self) -> None:
        await self.engine.start()

    async def sleep(self) -> None:
        # On a CPU there is no device memory to free, and an engine that was just replaced has none yet.
        if self.engine.can_sleep and self.engine.started:
            await self.engine.sleep()

    async def wake(self) -> None:
        await self.engine.wake()

    async def open_endpoints(self) -> list[Endpoint]:
        await self.engine.wake()
        return await self.engine.open_endpoints()

    async def load(self, source: WeightSource, version: int, probe: Probe | None = None) -> None:
        assert isinstance(source, (DeviceWeights, BroadcastWeights))
        await self.engine.wake()
        try:
            await self.engine.update_weights(source, version, probe=probe)
        except WeightsInterrupted:
            self._interrupted = True
            raise
