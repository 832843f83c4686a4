"""vLLM in this process: the scheduler and the model run in processes of its own, which end with `close()`."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import torch

from agentgym_rl.agent.engines.vllm.guard import owned
from agentgym_rl.agent.engines.vllm.probe import Probe
from agentgym_rl.agent.engines.vllm.requirements import EXTENSION, lora_room, reply_room, require_vllm, signed_64
from agentgym_rl.errors import EngineError
from agentgym_rl.transport.device import Door, LentWeights
from agentgym_rl.transport.host_memory import HostMemory, HostWeights, pack
from agentgym_rl.types import Completion, Sampling

Source = str | Path | Mapping[str, Any] | HostWeights | LentWeights
"""Weights: a Hugging Face folder, a peft adapter's folder, a state dict of this process, tensors in memory that another
process of this machine lends, or such as come through the door of `expect()`, from a process on the same device."""
LOOK_S = 1.0
"""Between looks whether vLLM's processes live, where it would not say."""


class VllmEngine:
    """Samples from the model in `folder` through vLLM's AsyncLLM. Start it with `await engine.start()`.

    `memory_share` is vLLM's share of the device's memory (on a CPU: of the machine's), weights included;
    `kv_cache_bytes` sets the cache alone. `lora_rank` makes room for adapters of that rank. `options` go to
    AsyncEngineArgs as they are.
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
        most = json.loads((self._folder / "config.json").read_text()).get("max_position_embeddings")
        self.max_context = min(max_context, most or max_context)
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
            "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
            "worker_extension_cls": EXTENSION,
            "disable_log_stats": True,
        }
        if lora_rank is not None:
            self._arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": lora_room(lora_rank)}
        if not torch.cuda.is_available():
            # vLLM on a CPU dies of a request with a seed whose prompt it splits between steps.
            self._arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(self.max_context, 8192)}
        self._arguments |= options or {}
        self._llm: Any = None
        self._adapter: Any = None
        self._numbers = itertools.count()
        self._open = asyncio.Event()
        self._lock = asyncio.Lock()
        self._asleep = False
        self._died = False
        self._memory: HostMemory | None = None
        self.remark = ""
        """Why the last update took longer than it should."""
        self._why_closed = "The engine was not started: await engine.start() first."
        self.reset_stats()

    async def start(self) -> None:
        """Start vLLM's processes and load the model: the better part of a minute."""
        if self._llm is not None:
            return
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its progress would run through the console's
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            with owned():
                self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments))
        except Exception as error:
            raise EngineError(f"vLLM {self._vllm_version} did not start: {_words(error)}") from error
        self._open.set()

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        room = reply_room(prompt_ids, sampling, self.max_context)
        if sampling.stop and not self._has_tokenizer:
            raise EngineError(f"Stop strings need a tokenizer in {self._folder}; or use stop_token_ids.")
        await self._gate()
        version = self.version
        output = await self._ask(
            prompt_ids,
            {
                "max_tokens": room,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "seed": None if sampling.seed is None else signed_64(sampling.seed),
                "stop_token_ids": list(sampling.stop_token_ids),
                "stop": list(sampling.stop),
                "logprobs": 0,
                "detokenize": bool(sampling.stop),
            },
        )
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
        """Log-probability of every token but the first, at temperature 1."""
        await self._gate()
        return await self._score(token_ids)

    async def release(self, session: str) -> None:
        """Nothing: blocks no request uses stay until others need the room, and are found again by their content."""

    async def update_weights(self, source: Source, version: int, probe: Probe | None = None) -> None:
        """Use new weights from now on. Replies under way are finished with the old ones first, so each has one version.
        With a `probe` the engine must agree with the learner, or this raises."""
        async with self._lock:
            await self._gate()
            self._open.clear()  # requests that come now begin with the new weights
            try:
                await self._unless_it_dies(self._update(source, version, probe))
            except BaseException as error:
                self._why_closed = f"Its update to weights {version} failed: {_words(error)}"
                self._died = self.died
                await self._stop()
                if isinstance(error, EngineError) or not isinstance(error, Exception):
                    raise
                raise EngineError(f"vLLM could not take weights {version}: {_words(error)}") from error
            self._open.set()

    async def expect(self) -> Door:
        """Where another process on the same device may lend weights, once: hand it to `lending.lend` there, and to
        `update_weights` as LentWeights."""
        async with self._lock:
            await self._gate()
            (found,) = await self._unless_it_dies(self._llm.collective_rpc("agentgym_expect"))
            return Door(*found)

    def stats(self) -> dict[str, int]:
        """Counters since the last reset; reused prompt tokens were in the cache already."""
        return dict(self._stats)

    def reset_stats(self) -> None:
        self._stats = dict.fromkeys(("requests", "new_tokens", "prompt_tokens", "prompt_tokens_reused"), 0)

    @property
    def died(self) -> bool:
        """Whether vLLM's own processes came to an end unasked: only another engine helps."""
        return self._died or (self._llm is not None and self._llm.errored)

    @property
    def started(self) -> bool:
        return self._llm is not None

    @property
    def can_sleep(self) -> bool:
        return bool(self._arguments.get("enable_sleep_mode"))

    async def sleep(self) -> None:
        """Give the device's memory back while something else needs it: weights go to the host, the cache is dropped.
        Requests wait for wake(). The start needs options enable_sleep_mode, which only CUDA has."""
        if not self.can_sleep:
            raise EngineError("vLLM sleeps only if it was started for it: options={'enable_sleep_mode': True}")
        async with self._lock:
            if self._asleep:
                return
            await self._gate()
            self._open.clear()
            self._asleep = True
            await self._unless_it_dies(self._llm.pause_generation(mode="wait", clear_cache=True))
            await self._unless_it_dies(self._llm.sleep(level=1))

    async def wake(self) -> None:
        """Take the memory again, if it sleeps."""
        async with self._lock:
            if not self._asleep or self._llm is None:
                return
            await self._unless_it_dies(self._llm.wake_up())
            await self._unless_it_dies(self._llm.resume_generation())
            self._asleep = False
            self._open.set()

    async def close(self) -> None:
        self._why_closed = "The engine was closed."
        await self._stop()

    async def _update(self, source: Source, version: int, probe: Probe | None) -> None:
        await self._llm.pause_generation(mode="wait", clear_cache=True)
        await self._load(source, version)
        # vLLM's reload keeps the cache. The salt keeps versions apart too, also where this were to fail.
        if not await self._llm.reset_prefix_cache():
            raise EngineError("vLLM did not drop the keys and values of the old weights")
        self.version = version
        await self._llm.resume_generation()
        if probe is not None:
            if probe.checksums:
                found = await self._llm.collective_rpc("agentgym_held", args=(probe.shapes,))
                probe.check_held(found, version)
            probe.check(await self._score(probe.token_ids), version)

    async def _load(self, source: Source, version: int) -> None:
        if isinstance(source, LentWeights):
            await self._drop_adapter()
            await self._llm.collective_rpc("agentgym_load_lent", args=(list(source.door), source.version))
            self.remark = ""
        elif isinstance(source, (Mapping, HostWeights)):
            await self._drop_adapter()
            if isinstance(source, Mapping):
                self._memory = self._memory or HostMemory()
            message, lent = pack(source, self._memory)
            remarks = await self._llm.collective_rpc("agentgym_load_shared", args=(message,))
            self.remark = next(filter(None, remarks), "")
            del lent
        elif (Path(source) / "adapter_config.json").is_file():
            await self._add_adapter(Path(source), version)
        else:
            await self._drop_adapter()
            await self._llm.collective_rpc("agentgym_load_folder", args=(str(source),))

    async def _add_adapter(self, folder: Path, version: int) -> None:
        from vllm.lora.request import LoRARequest

        if not self._arguments.get("enable_lora"):
            raise EngineError(f"{folder} holds an adapter and the engine has no room for one: set lora_rank")
        adapter = LoRARequest(f"weights-{version}", version + 1, str(folder))  # vLLM counts from 1
        await self._drop_adapter()
        if not await self._llm.add_lora(adapter):
            raise EngineError(f"vLLM did not load the adapter in {folder}")
        self._adapter = adapter

    async def _drop_adapter(self) -> None:
        """Whole weights come without one, and a new one takes its place."""
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
            async for output in self._llm.generate(  # noqa: B007 - there is one, the last
                prompt,
                SamplingParams(**(final | parameters)),
                request_id=str(next(self._numbers)),
                lora_request=self._adapter,
            ):
                pass
        except Exception as error:
            raise EngineError(f"vLLM failed: {_words(error)}") from error
        if output is None:
            raise EngineError("vLLM gave no reply.")
        return output

    async def _unless_it_dies(self, work: Coroutine[Any, Any, Any]) -> Any:
        """vLLM's processes may die with an answer owed, and vLLM then waits for it for ever."""
        task = asyncio.create_task(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=LOOK_S)
                if self.died and not task.done():
                    raise EngineError("vLLM's processes died.")
            return task.result()
        finally:
            task.cancel()

    async def _gate(self) -> None:
        if self._llm is None:
            raise EngineError(self._why_closed)
        await self._open.wait()
        if self._llm is None:
            raise EngineError(self._why_closed)

    async def _stop(self) -> None:
        llm, self._llm = self._llm, None
        self._open.set()  # whoever waits is told
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if llm is None:
            return
        try:
            # Else those who wait for a reply would wait for ever.
            async with asyncio.timeout(10):
                await llm.pause_generation(mode="abort", clear_cache=False)
        except Exception:
            pass  # the processes are ended next, whatever state they are in
        llm.shutdown()


def _words(error: BaseException) -> str:
    """One line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
