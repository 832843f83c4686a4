"""The engine of a run in one process: how each kind is started, and how it gets the learner's weights.

A new kind is one function in `START_ENGINE`.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from agentgym_rl.agent.engines.base import Engine
from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.run import backend_vllm
from agentgym_rl.run.context import RunContext
from agentgym_rl.training.checkpoint import export
from agentgym_rl.training.learner import freeze
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


MakeEngine = Callable[[Renderer], LocalEngine]
"""Called once, after the learner has been made."""
StartEngine = Callable[[RunContext, Any, Any, AsyncExitStack], Awaitable[MakeEngine]]
"""(context, model, tokenizer, stack): start what must run before the learner takes memory. The stack is closed if the
run fails to start."""


async def start_native(context: RunContext, model: Any, tokenizer: Any, stack: AsyncExitStack) -> MakeEngine:
    """Start nothing: a native engine samples in this process."""
    config = context.config
    return native_engine(config.rl, config.sessions_per_engine(), config.longest_context(), model)


def native_engine(settings: RLSettings, max_sessions: int, max_context: int, model: Any) -> MakeEngine:
    """Return a maker of a native engine, which samples from the learner's own parameters or from a copy."""

    def make(renderer: Renderer) -> LocalEngine:
        # If episodes are played while the learner works, the engine needs a copy.
        copied = settings.overlap > 0
        played = freeze(copy.deepcopy(model)) if copied else model
        engine = make_native_engine(played, renderer, max_sessions, max_context, settings.keep_cache)

        async def publish(version: int) -> None:
            await engine.update_weights(model.state_dict() if copied else None, version)

        return LocalEngine(engine, publish, nullcontext if copied else engine.paused)

    return make


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
    model: Any, renderer: Renderer, max_sessions: int, max_context: int, keep_cache: bool = False
) -> NativeEngine:
    """Return a native engine over `model`."""
    return NativeEngine(
        model, decode=renderer.decode, max_sessions=max_sessions, max_context=max_context, keep_cache=keep_cache
    )
