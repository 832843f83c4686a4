"""vLLM in place of the native engine: which one a recipe asks for, and how it gets the learner's weights."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from agentgym_rl.agent.engines.base import Engine
from agentgym_rl.agent.engines.replicas import Replicas
from agentgym_rl.agent.engines.vllm import Probe, VllmEngine, VllmServer, probe_model
from agentgym_rl.agent.engines.vllm.requirements import require_vllm
from agentgym_rl.config import Config
from agentgym_rl.errors import ConfigError, EngineError
from agentgym_rl.run.memory_demand import shape_of, why_not_split
from agentgym_rl.training.checkpoint import export
from agentgym_rl.transport.buckets import WeightSource
from agentgym_rl.transport.device import DeviceWeights, Endpoint
from agentgym_rl.transport.host_memory import HostMemory, HostWeights


class RunEngine(Engine, Protocol):
    """What a run needs of its engine."""

    @property
    def max_context(self) -> int:
        """Tokens that prompt and reply may have together."""
        ...


Vllm = VllmEngine | VllmServer | Replicas


def require_engine(config: Config) -> None:
    """ConfigError now rather than after a warm start, where a vLLM of this machine could not be started."""
    engine = config.engine
    if engine.kind != "vllm" or engine.urls:
        return
    if config.scale is None or config.scale.address is None:  # else it runs in the nodes' environments
        try:
            require_vllm()
        except EngineError as error:
            raise ConfigError(str(error)) from error
    try:
        why_not = why_not_split(shape_of(config.model), engine.tensor_parallel)
    except ConfigError:
        return  # of a kind that is not known here, or not there: whoever loads it says so
    if why_not:
        raise ConfigError(why_not)


def make_vllm(config: Config, folder: Path) -> Vllm:
    """The recipe's vLLM, yet to be started, for the model in `folder` (with LoRA: the frozen weights)."""
    settings, agent, lora = config.engine, config.agent, config.model.lora
    options: dict[str, Any] = {}
    # On a device of its own it has no reason to.
    if config.scale is not None and config.scale.layout == "colocated" and torch.cuda.is_available():
        options["enable_sleep_mode"] = True
    if settings.tensor_parallel > 1:
        # Told to it outright: in an actor vLLM would ask Ray for processes of its own, and all devices are this one's.
        options |= {"tensor_parallel_size": settings.tensor_parallel, "distributed_executor_backend": "mp"}
    max_context = max([agent.max_context, *(env.max_context or 0 for env in config.environments)])
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
                lora_rank=None if lora is None or config.scale is not None else lora.rank,
                # Without seeds of requests: replicas that began with vLLM's default would all draw the same numbers.
                options=options if settings.seeded else options | {"seed": secrets.randbits(31)},
            )
            for _ in range(settings.replicas)
        ]
    return engines[0] if len(engines) == 1 else Replicas(engines)


async def start_vllm(config: Config, model: Any, tokenizer: Any, handover: Path) -> Vllm:
    """Started, and with the weights of `model`: a server may hold anything, and a warm start leaves folders behind."""
    folder = handover / "start"
    if config.model.lora is None:
        export(model, tokenizer, folder)  # vLLM reads the model's shape from a folder, weights and all
    else:
        assert config.model.path is not None
        folder = Path(config.model.path)
    engine = make_vllm(config, folder)
    try:
        await engine.start()
        await publish(engine, config, model, tokenizer, 0, handover)
    except BaseException:
        await engine.close()
        raise
    shutil.rmtree(handover / "start", ignore_errors=True)
    return engine


async def publish(engine: Vllm, config: Config, model: Any, tokenizer: Any, version: int, handover: Path) -> None:
    """Weights lent in memory to a vLLM of this process; as a folder to a server, which may be anywhere that sees the
    disk, and for adapters, which vLLM takes no other way. Then both sides score a probe."""
    dtype = None if config.engine.dtype == "auto" else getattr(torch, config.engine.dtype)
    if config.engine.weights == "memory" and not config.engine.urls and config.model.lora is None:
        await engine.update_weights(model.state_dict(), version, probe=probe_model(model, dtype))
        return
    folder = handover / f"weights_{version}"
    shutil.rmtree(folder, ignore_errors=True)
    export(model, tokenizer, folder)
    await engine.update_weights(folder, version, probe=probe_model(model, dtype))
    _forget_but(folder)


def _forget_but(folder: Path) -> None:
    """An adapter's folder is needed as long as it is in use; older ones are not."""
    for other in folder.parent.glob("weights_*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)


def vllm_adapter(config: Config, folder: Path) -> VllmAdapter:
    """One engine of a cluster, which routes and starts as many as it wants. Of a model with adapters it is sent weights
    that have them inside."""
    if config.model.lora is not None:
        assert config.model.path is not None
        folder = Path(config.model.path)
    engine = make_vllm(config, folder)
    assert isinstance(engine, VllmEngine)
    return VllmAdapter(engine)


class VllmAdapter:
    """A vLLM engine as transport/buckets.py gives weights to it."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self._memory: HostMemory | None = None

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def died(self) -> bool:
        return self.engine.died

    async def sleep(self) -> None:
        # A CPU's memory is no device's, and one that was just made again has nothing yet.
        if self.engine.can_sleep and self.engine.started:
            await self.engine.sleep()

    async def wake(self) -> None:
        await self.engine.wake()

    async def open_endpoint(self) -> Endpoint:
        await self.engine.start()
        await self.engine.wake()
        return await self.engine.open_endpoint()

    async def load(self, arrived: WeightSource, version: int, probe: Probe | None = None) -> str:
        await self.engine.start()
        await self.engine.wake()
        await self.engine.update_weights(await self._readable(arrived), version, probe=probe)
        return self.engine.remark

    async def _readable(self, arrived: WeightSource) -> HostWeights | DeviceWeights:
        """By vLLM's workers, who cannot read Ray's memory."""
        if isinstance(arrived, DeviceWeights):
            return arrived
        if isinstance(arrived[0], HostWeights):
            return arrived[0]
        self._memory = self._memory or HostMemory()
        tensors = (pair for bucket in arrived for pair in bucket.tensors())
        return await asyncio.to_thread(self._memory.fill, tensors)
