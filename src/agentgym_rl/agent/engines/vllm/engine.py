"""vLLM as an engine of this process. Its scheduler and model run in separate processes, which end with `close()`."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import torch

from agentgym_rl.agent.engines.vllm.probe import Probe
from agentgym_rl.agent.engines.vllm.process_cleanup import owning_processes
from agentgym_rl.agent.engines.vllm.requirements import EXTENSION, max_lora_rank, reply_limit, require_vllm, signed_64
from agentgym_rl.errors import EngineError
from agentgym_rl.transport.broadcast import BroadcastWeights, WeightsInterrupted
from agentgym_rl.transport.device import DeviceWeights, Endpoint, send_weights
from agentgym_rl.types import Completion, Sampling

Source = str | Path | Mapping[str, Any] | DeviceWeights | BroadcastWeights
"""Weights: a Hugging Face folder, a peft adapter's folder, a state dict of this process, a transfer on the device to
the endpoints of `open_endpoints()`, or a broadcast. The last three may also be tensors of an adapter, named as by peft
and to be read with alpha = rank."""
BUCKET_BYTES = 256 << 20
"""Size of the buckets in which a state dict of this process is sent."""
POLL_INTERVAL_S = 1.0
"""Seconds between checks whether vLLM's processes are alive while a call to them is pending."""


class VllmEngine:
    """Samples from the model in `folder` through vLLM's AsyncLLM. Start it with `await engine.start()`.

    `memory_share` is vLLM's share of the device's memory (on a CPU: of the machine's), weights included;
    `kv_cache_bytes` sets the cache alone. `lora_rank` reserves memory for adapters of that rank. `options` are passed
    to AsyncEngineArgs unchanged.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: str = "auto",
        max_sessions: int = 256,
        max_context: int = 8192,
        memory_share: float = 0.9,
        kv_cache_bytes: int | None = None,
        eager: bool = False,
        lora_rank: int | None = None,
        version: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._vllm_version = require_vllm()
        self._folder = Path(folder)
        if not (self._folder / "config.json").is_file():
            raise EngineError(f"vLLM needs a Hugging Face model folder, {folder} has no config.json")
        positions = json.loads((self._folder / "config.json").read_text()).get("max_position_embeddings")
        self.max_context = min(max_context, positions or max_context)
        self.version = version
        self._has_tokenizer = (self._folder / "tokenizer_config.json").is_file()
        self._arguments: dict[str, Any] = {
            "model": str(self._folder),
            "skip_tokenizer_init": not self._has_tokenizer,
            "dtype": dtype,
            "max_model_len": self.max_context,
            "max_num_seqs": max_sessions,
            "gpu_memory_utilization": memory_share,
            "kv_cache_memory_bytes": kv_cache_bytes,
            "enforce_eager": eager,
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",  # of the distribution after temperature and top_p
            "worker_extension_cls": EXTENSION,
            "disable_log_stats": True,
        }
        if lora_rank is not None:
            self._arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": max_lora_rank(lora_rank)}
        if not torch.cuda.is_available():
            # On a CPU vLLM crashes if a request has a seed and its prompt is split over several steps.
            self._arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(self.max_context, 8192)}
        self._arguments |= options or {}
        self._llm: Any = None
        self._adapter: Any = None
        self._request_ids = itertools.count()
        self._ready = asyncio.Event()
        self._lock = asyncio.Lock()
        self._sleeping = False
        self._died = False
        self._why_closed = "The engine was not started: await engine.start() first."
        self.reset_stats()

    async def start(self) -> None:
        """Start vLLM's processes and load the model, which takes most of a minute."""
        if self._llm is not None:
            return
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its progress bars would disturb the console
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            with owning_processes():
                self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments))
        except Exception as error:
            raise EngineError(f"vLLM {self._vllm_version} did not start: {_one_line(error)}") from error
        self._ready.set()

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        max_tokens = reply_limit(prompt_ids, sampling, self.max_context)
        if sampling.stop and not self._has_tokenizer:
            raise EngineError(f"Stop strings need a tokenizer in {self._folder}; or use stop_token_ids.")
        parameters = {
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": None if sampling.seed is None else signed_64(sampling.seed),
            "stop_token_ids": list(sampling.stop_token_ids),
            "stop": list(sampling.stop),
            "logprobs": 0,
            "detokenize": bool(sampling.stop),
        }
        while True:
            await self._wait_until_open()
            version = self.version
            output = await self._ask(prompt_ids, parameters)
            if version == self.version:  # otherwise vLLM may have admitted the request after an update
                break
        (reply,) = output.outputs
        if reply.finish_reason not in ("stop", "length"):
            raise EngineError(
                f"vLLM ended the reply of {session} as {reply.finish_reason!r}. {self._why_closed}".strip()
            )
        token_ids = list(reply.token_ids)
        self._stats["requests"] += 1
        self._stats["new_tokens"] += len(token_ids)
        self._stats["prompt_tokens"] += len(prompt_ids)
        self._stats["prompt_tokens_reused"] += output.num_cached_tokens or 0
        logprobs = [row[token].logprob for row, token in zip(reply.logprobs, token_ids, strict=True)]
        return Completion(token_ids, logprobs, reply.finish_reason, version)

    async def score(self, token_ids: list[int]) -> list[float]:
        """Return the log-probability of every token but the first, at temperature 1."""
        await self._wait_until_open()
        return await self._score(token_ids)

    async def release(self, session: str) -> None:
        """Do nothing: vLLM keeps unused cache blocks until it needs the memory, and finds them by content."""

    async def update_weights(self, source: Source, version: int, probe: Probe | None = None) -> None:
        """Load new weights. Pending replies finish with the old ones first, so each has one version.
        With a `probe`, raises EngineError if the engine disagrees with the learner."""
        async with self._lock:
            await self._wait_until_open()
            self._ready.clear()  # new requests wait for the new weights
            try:
                await self._or_fail_if_died(self._update(source, version, probe))
            except BaseException as error:
                self._why_closed = f"Its update to weights {version} failed: {_one_line(error)}"
                self._died = self.died
                await self._stop()
                if isinstance(error, EngineError) or not isinstance(error, Exception):
                    raise
                raise EngineError(f"vLLM could not load weights {version}: {_one_line(error)}") from error
            self._ready.set()

    async def open_endpoints(self) -> list[Endpoint]:
        """Return an endpoint of each device for one transfer from another process on that device. Pass them to
        `transport.device.send_weights` there, and the first to `update_weights` as DeviceWeights."""
        async with self._lock:
            await self._wait_until_open()
            return await self._or_fail_if_died(self._open_endpoints())

    def stats(self) -> dict[str, int]:
        """Return the counters since the last reset. Reused prompt tokens were already in the cache."""
        return dict(self._stats)

    def reset_stats(self) -> None:
        self._stats = dict.fromkeys(("requests", "new_tokens", "prompt_tokens", "prompt_tokens_reused"), 0)

    @property
    def died(self) -> bool:
        """Whether vLLM's processes ended unexpectedly, so that a new engine is needed."""
        return self._died or (self._llm is not None and self._llm.errored)

    @property
    def started(self) -> bool:
        return self._llm is not None

    @property
    def can_sleep(self) -> bool:
        return bool(self._arguments.get("enable_sleep_mode"))

    async def sleep(self) -> None:
        """Free the device's memory: weights move to the host and the cache is dropped. Requests wait for wake().
        Needs the option enable_sleep_mode, which only CUDA has."""
        if not self.can_sleep:
            raise EngineError("sleep needs a vLLM started with options={'enable_sleep_mode': True}")
        async with self._lock:
            if self._sleeping:
                return
            await self._wait_until_open()
            self._ready.clear()
            self._sleeping = True
            await self._or_fail_if_died(self._llm.pause_generation(mode="wait", clear_cache=True))
            await self._or_fail_if_died(self._llm.sleep(level=1))

    async def wake(self) -> None:
        """Take the memory back, if the engine sleeps."""
        async with self._lock:
            if not self._sleeping or self._llm is None:
                return
            await self._or_fail_if_died(self._llm.wake_up())
            await self._or_fail_if_died(self._llm.resume_generation())
            self._sleeping = False
            self._ready.set()

    async def close(self) -> None:
        self._why_closed = "The engine was closed."
        await self._stop()

    async def _update(self, source: Source, version: int, probe: Probe | None) -> None:
        await self._llm.pause_generation(mode="wait", clear_cache=True)
        await self._load(source, version)
        # vLLM's reload keeps the cache. The cache salt also separates versions, even if this fails.
        if not await self._llm.reset_prefix_cache():
            raise EngineError("vLLM did not drop the KV cache of the old weights")
        self.version = version
        await self._llm.resume_generation()
        if probe is not None:
            if probe.checksums:
                checksums = await self._llm.collective_rpc("agentgym_checksums", args=(probe.shapes,))
                probe.check_checksums(checksums, version)
            probe.check(await self._score(probe.token_ids), version)

    async def _load(self, source: Source, version: int) -> None:
        if isinstance(source, (DeviceWeights, BroadcastWeights)):
            await self._drop_adapter()
            message, adapter_id = pickle.dumps(source), version + 1  # vLLM counts adapters from 1
            results = await self._llm.collective_rpc("agentgym_load_tensors", args=(message, adapter_id))
            if reason := next((reason for reason, _ in results if reason), ""):
                raise WeightsInterrupted(f"weights {version} are incomplete: {reason}")
            if results[0][1]:
                self._adapter = _adapter_request(version, "sent by the learner")
        elif isinstance(source, Mapping):
            endpoints = await self._open_endpoints()
            arguments = (source.items(), version, endpoints, BUCKET_BYTES)
            sending = asyncio.create_task(asyncio.to_thread(send_weights, *arguments))
            await self._load(DeviceWeights(endpoints[0], version), version)
            if failed := await sending:
                raise EngineError(f"vLLM did not get weights {version}: {next(iter(failed.values()))}")
        elif (Path(source) / "adapter_config.json").is_file():
            await self._add_adapter(Path(source), version)
        else:
            await self._drop_adapter()
            await self._llm.collective_rpc("agentgym_load_folder", args=(str(source),))

    async def _open_endpoints(self) -> list[Endpoint]:
        return [Endpoint(*fields) for fields in await self._llm.collective_rpc("agentgym_open_endpoint")]

    async def _add_adapter(self, folder: Path, version: int) -> None:
        if not self._arguments.get("enable_lora"):
            raise EngineError(f"{folder} holds an adapter, but the engine has no memory for one: set lora_rank")
        adapter = _adapter_request(version, str(folder))
        await self._drop_adapter()
        if not await self._llm.add_lora(adapter):
            raise EngineError(f"vLLM did not load the adapter in {folder}")
        self._adapter = adapter

    async def _drop_adapter(self) -> None:
        """Remove the adapter before whole weights or another adapter are loaded."""
        if self._adapter is not None:
            await self._llm.remove_lora(self._adapter.lora_int_id)
            self._adapter = None

    async def _score(self, token_ids: list[int]) -> list[float]:
        output = await self._ask(token_ids, {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0})
        rows = list(output.prompt_logprobs)[1:]
        return [row[token].logprob for row, token in zip(rows, token_ids[1:], strict=True)]

    async def _ask(self, prompt_ids: list[int], parameters: dict[str, Any]) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        final = {"detokenize": False, "ignore_eos": True, "output_kind": RequestOutputKind.FINAL_ONLY}
        prompt = {"prompt_token_ids": list(prompt_ids), "cache_salt": f"weights-{self.version}"}
        output = None
        try:
            async for output in self._llm.generate(  # noqa: B007 - there is one output, the final one
                prompt,
                SamplingParams(**(final | parameters)),
                request_id=str(next(self._request_ids)),
                lora_request=self._adapter,
            ):
                pass
        except Exception as error:
            raise EngineError(f"vLLM failed: {_one_line(error)}") from error
        if output is None:
            raise EngineError("vLLM gave no reply.")
        return output

    async def _or_fail_if_died(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Await `work`, and fail if vLLM's processes die: vLLM itself would wait for their answer forever."""
        task = asyncio.create_task(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=POLL_INTERVAL_S)
                if self.died and not task.done():
                    raise EngineError("vLLM's processes died.")
            return task.result()
        finally:
            task.cancel()

    async def _wait_until_open(self) -> None:
        if self._llm is None:
            raise EngineError(self._why_closed)
        await self._ready.wait()
        if self._llm is None:
            raise EngineError(self._why_closed)

    async def _stop(self) -> None:
        llm, self._llm = self._llm, None
        self._ready.set()  # waiting requests raise
        if llm is None:
            return
        try:
            # Otherwise pending requests would wait forever.
            async with asyncio.timeout(10):
                await llm.pause_generation(mode="abort", clear_cache=False)
        except Exception:
            pass  # the processes are ended next in any case
        llm.shutdown()


def _adapter_request(version: int, folder: str) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"weights-{version}", version + 1, folder)  # vLLM counts from 1


def _one_line(error: BaseException) -> str:
    """Return the error's type and text in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
