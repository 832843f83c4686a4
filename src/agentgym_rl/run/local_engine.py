"""The engine of a run in one process: how each kind is started, and how it gets the learner's weights.

A new kind is one function in `START_ENGINE`.
"""

from __future__ import annotations

import asyncio
import copy
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from agentgym_rl.agent.engines.base import Engine
from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.run import backend_vllm
from agentgym_rl.run.context import RunContext
from agentgym_rl.training.checkpoint import export
from agentgym_rl.training.learner import Updater, freeze
from agentgym_rl.training.settings import RLSettings


class RunEngine(Engine, Protocol):
    """Engine of a run."""

    @property
    def max_context(self) -> int:
        """Most tokens of a prompt and its reply together."""


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """An engine and the way to give it the learner's weights."""

    engine: RunEngine
    publish: Callable[[int], Awaitable[None]]
    """Make the engine sample with the learner's present weights, as this version."""
    learning: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    """Makes a context in which the learner may change its weights, up to their publication."""
    beside: NativeEngine | None = None
    """The engine if it can sample while the learner works, up to the change of the weights (`sampling_beside`)."""


MakeEngine = Callable[[Renderer], LocalEngine]
"""Called once, after the learner has been made."""
StartEngine = Callable[[RunContext, Any, Any, AsyncExitStack], Awaitable[MakeEngine]]
"""(context, model, tokenizer, stack): start what must run before the learner takes memory. The stack is closed if the
run fails to start."""


async def start_native(context: RunContext, model: Any, tokenizer: Any, stack: AsyncExitStack) -> MakeEngine:
    """Start nothing: a native engine samples in this process."""
    config = context.config
    sizes = config.sessions_per_engine(), config.longest_context()
    return native_engine(config.rl, *sizes, model, beside=not config.adapter_roles)


def native_engine(
    settings: RLSettings, max_sessions: int, max_context: int, model: Any, *, beside: bool = False
) -> MakeEngine:
    """Return a maker of a native engine, which samples from the learner's own parameters or from a copy.

    With `beside` there is one learner of the model, beside which asynchronous groups may be sampled.
    """

    def make(renderer: Renderer) -> LocalEngine:
        # If episodes are played while the learner works, the engine needs a copy.
        copied = settings.overlap > 0
        played = freeze(copy.deepcopy(model)) if copied else model
        own_stream = beside and settings.max_staleness > 0 and not copied
        engine = make_native_engine(played, renderer, max_sessions, max_context, settings.keep_cache, own_stream)

        async def publish(version: int) -> None:
            await engine.update_weights(model.state_dict() if copied else None, version)

        pause = nullcontext if copied else engine.paused
        return LocalEngine(engine, publish, pause, engine if engine.has_own_stream else None)

    return make


@asynccontextmanager
async def sampling_beside(engine: NativeEngine, learner: Updater) -> AsyncIterator[None]:
    """Let the engine sample until the learner, in another thread, is about to change the weights that both share. Then
    pause it up to the end."""
    loop = asyncio.get_running_loop()
    is_paused = False
    async with AsyncExitStack() as stack:

        def pause() -> None:
            nonlocal is_paused
            if not is_paused:
                asyncio.run_coroutine_threadsafe(stack.enter_async_context(engine.paused()), loop).result()
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()  # prompts that are computed for the next launch read the weights, too
                is_paused = True

        unpaused, learner.before_step = learner.before_step, pause
        try:
            yield
        finally:
            learner.before_step = unpaused


async def start_vllm(context: RunContext, model: Any, tokenizer: Any, stack: AsyncExitStack) -> MakeEngine:
    """Start vLLM, or connect to its servers, with the weights of `model`."""
    config = context.config
    context.console.stage("vLLM", ", ".join(config.engine.urls) or f"{config.engine.replicas} started here")
    weights_dir, adapters = context.log.root / "engine", config.model.lora is not None
    folder = Path(str(config.model.path)) if adapters else weights_dir / "start"
    if not adapters:
        export(model, tokenizer, folder)  # vLLM reads the model's shape from a folder
    engine = backend_vllm.make_vllm(config, folder)
    stack.push_async_callback(engine.close)
    publish = partial(
        backend_vllm.publish,
        engine,
        config.engine,
        model,
        tokenizer,
        weights_dir=weights_dir,
        adapters=adapters,
    )
    await engine.start()
    await publish(0)  # a running server may hold other weights
    shutil.rmtree(weights_dir / "start", ignore_errors=True)
    return lambda renderer: LocalEngine(engine, publish)


START_ENGINE: dict[str, StartEngine] = {"native": start_native, "vllm": start_vllm}
"""By `engine.kind`."""


def make_native_engine(
    model: Any,
    renderer: Renderer,
    max_sessions: int,
    max_context: int,
    keep_cache: bool = False,
    own_stream: bool = False,
) -> NativeEngine:
    """Return a native engine over `model`."""
    return NativeEngine(
        model,
        decode=renderer.decode,
        max_sessions=max_sessions,
        max_context=max_context,
        keep_cache=keep_cache,
        own_stream=own_stream,
    )
