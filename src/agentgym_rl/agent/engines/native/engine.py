"""Continuous batching over one model: requests join and leave between steps, one token a step for each of them."""

from __future__ import annotations

import asyncio
import math
import random
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from agentgym_rl.agent.engines.native.decoder import DecoderRunner, unwrap, why_unsupported
from agentgym_rl.agent.engines.native.recompute import RecomputeRunner
from agentgym_rl.agent.engines.native.runner import Row, Runner
from agentgym_rl.agent.engines.native.sampling import sample, signed_64
from agentgym_rl.agent.engines.native.sessions import Session, SessionTable
from agentgym_rl.agent.engines.native.weights import evaluating, load_in_place
from agentgym_rl.errors import EngineError
from agentgym_rl.types import Completion, Sampling

SETTLE_ROUNDS = 3
"""Turns of the event loop given to other tasks between steps, so that a wave of environments answers and joins the next
step together. A round in which requests arrived is followed by another, up to SETTLE_ROUNDS_MOST."""
SETTLE_ROUNDS_MOST = 12


@dataclass(slots=True, eq=False)
class Request:
    """One generate() call."""

    session_name: str
    token_ids: list[int]
    """Prompt and reply; grows by a token a step."""
    num_prompt: int
    sampling: Sampling
    seed: int
    limit: int
    """Length of token_ids at which the reply ends."""
    future: asyncio.Future[Completion]
    logprobs: list[float] = field(default_factory=list)
    session: Session | None = None
    version: int = 0
    """Of the first weights that sampled a token of it."""


class NativeEngine:
    """Samples from a transformers causal language model in this process, sharing its parameters (no copy).

    `decode` turns token ids into text and is needed for stop strings only. `max_sessions` sequences have room at once;
    further requests wait. `max_context` bounds prompt and reply together.
    """

    def __init__(
        self,
        model: Any,
        *,
        decode: Callable[[list[int]], str] | None = None,
        max_sessions: int = 256,
        max_context: int | None = None,
        version: int = 0,
        seed: int = 0,
    ) -> None:
        config = unwrap(model).config
        if getattr(config, "is_encoder_decoder", False):
            raise EngineError(f"The native engine needs a decoder-only model, got {type(unwrap(model)).__name__}.")
        if max_sessions < 1:
            raise EngineError(f"max_sessions must be at least 1, got {max_sessions}.")
        most = getattr(config, "max_position_embeddings", None)
        self.max_context = min(n for n in (max_context, most, 1 << 20) if n is not None)
        self.version = version
        self._model = model
        self._decode = decode
        self._vocabulary = unwrap(model).get_input_embeddings().weight.shape[0]
        reason = why_unsupported(model)
        self._runner: Runner
        if reason is None:
            self._runner = DecoderRunner(model, max_slots=max_sessions, max_length=self.max_context)
        else:
            self._runner = RecomputeRunner(model)
            warnings.warn(
                f"The native engine has no fast path for this model ({reason}): every token recomputes its whole "
                "sequence through the model's own forward. Results are right, but slow.",
                stacklevel=2,
            )
        self._sessions = SessionTable(max_sessions)
        self._seeds = random.Random(seed)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._names: set[str] = set()
        self._arrivals = 0
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.reset_stats()

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        self._check(prompt_ids, sampling, session)
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        request = Request(
            session_name=session,
            token_ids=list(prompt_ids),
            num_prompt=len(prompt_ids),
            sampling=sampling,
            seed=signed_64(seed),
            limit=min(len(prompt_ids) + sampling.max_new_tokens, self.max_context),
            future=asyncio.get_running_loop().create_future(),
        )
        self._waiting.append(request)
        self._names.add(session)
        self._arrivals += 1
        if self._task is None:
            self._task = asyncio.create_task(self._drive(), name="native-engine")
        try:
            return await request.future
        except asyncio.CancelledError:
            if request in self._running or request in self._waiting:
                self._forget(request)
            raise

    async def release(self, session: str) -> None:
        self._sessions.release(session)

    async def update_weights(self, source: Mapping[str, Any] | None, version: int) -> None:
        """`source` None: the weights were changed in place; a state dict: copy it in. Replies under way go on with the
        new weights, their keys and values computed again."""
        if source is not None:
            load_in_place(self._model, source)
        self._sessions.invalidate()
        self.version = version

    async def close(self) -> None:
        self._closed = True
        self._fail(self._waiting + deque(self._running), "The engine was closed.")
        if self._task is not None:
            await asyncio.wait([self._task])
        self._sessions.invalidate()
        self._runner.free()

    def stats(self) -> dict[str, float]:
        """Counters since the last reset. Prompt tokens were `computed`, `reused` from the session's own cache, or
        `shared` with an identical prompt of the same step; a mid-reply weight update computes some again."""
        return {**self._stats, "evictions": self._sessions.evictions, "sessions": len(self._sessions)}

    def reset_stats(self) -> None:
        self._sessions.evictions = 0
        self._stats: dict[str, float] = {
            "requests": 0,
            "steps": 0,
            "prompt_tokens_computed": 0,
            "prompt_tokens_reused": 0,
            "prompt_tokens_shared": 0,
            "new_tokens": 0,
            "busy_seconds": 0.0,
        }

    def _check(self, prompt_ids: list[int], sampling: Sampling, session: str) -> None:
        if self._closed:
            raise EngineError("The engine was closed; make another.")
        if session in self._names:
            raise EngineError(f"Session {session!r} has a reply under way: give every trajectory a session of its own.")
        if not prompt_ids:
            raise EngineError("The prompt is empty: at least one token is needed.")
        if len(prompt_ids) >= self.max_context:
            raise EngineError(
                f"The prompt has {len(prompt_ids)} tokens and the engine's max_context is {self.max_context}, a reply "
                "included: end the episode earlier (limits.max_context) or raise max_context."
            )
        if min(prompt_ids) < 0 or max(prompt_ids) >= self._vocabulary:
            raise EngineError(
                f"The prompt has token ids from {min(prompt_ids)} to {max(prompt_ids)}; the model knows 0 to "
                f"{self._vocabulary - 1}: tokenizer and model do not belong together."
            )
        if sampling.max_new_tokens < 1:
            raise EngineError(f"max_new_tokens must be at least 1, got {sampling.max_new_tokens}.")
        if not 0 <= sampling.temperature < math.inf or not 0 < sampling.top_p <= 1:
            raise EngineError(
                f"temperature must be 0 or more and top_p in (0, 1], got {sampling.temperature} and {sampling.top_p}."
            )
        if sampling.stop and self._decode is None:
            raise EngineError("Stop strings need NativeEngine(decode=...); or use stop_token_ids.")

    async def _drive(self) -> None:
        """Step while there are requests. Runs on the event loop: what joins a step depends on the callers alone."""
        try:
            while self._waiting or self._running:
                await self._settle()
                self._admit()
                if self._running:
                    self._step()
        finally:
            self._task = None
            self._fail(self._waiting + deque(self._running), "The event loop ended while a reply was being sampled.")

    async def _settle(self) -> None:
        for done_rounds in range(1, SETTLE_ROUNDS_MOST + 1):
            arrivals = self._arrivals
            await asyncio.sleep(0)
            if done_rounds >= SETTLE_ROUNDS and self._arrivals == arrivals:
                return

    def _admit(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            session = self._sessions.acquire(request.session_name)
            if session is None:
                return
            self._waiting.popleft()
            # At least one token is computed, for the logits that follow it.
            session.num_cached = min(session.common_prefix(request.token_ids), request.num_prompt - 1)
            session.token_ids = request.token_ids
            request.session, request.version = session, self.version
            self._running.append(request)
            self._stats["requests"] += 1
            self._stats["prompt_tokens_reused"] += session.num_cached

    def _step(self) -> None:
        """One token for every running request."""
        started = time.perf_counter()
        requests = list(self._running)
        rows = [Row(r.session.slot, r.token_ids, r.session.num_cached) for r in requests if r.session is not None]
        try:
            with evaluating(self._model):
                logits, num_computed = self._runner.forward(rows)
            tokens, logprobs = self._sample(requests, logits)
        except Exception as error:
            # Caught here and not higher: the callers are not on this stack, and each of them must be told.
            self._fail(requests, f"A step of the model failed: {type(error).__name__}: {error}", error)
            return
        num_asked = sum(len(row.token_ids) - row.start for row in rows)
        # A request's later steps compute the token it sampled last: that one is no prompt token.
        num_decoded = sum(
            bool(r.logprobs) and len(r.token_ids) - r.session.num_cached == 1 for r in requests if r.session
        )
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            self._append(request, token, logprob)
        stats = self._stats
        stats["steps"] += 1
        stats["new_tokens"] += len(requests)
        stats["prompt_tokens_computed"] += num_computed - num_decoded
        stats["prompt_tokens_shared"] += num_asked - num_computed
        stats["busy_seconds"] += time.perf_counter() - started

    def _sample(self, requests: list[Request], logits: torch.Tensor) -> tuple[list[int], list[float]]:
        device = logits.device
        top_p = None
        if any(r.sampling.top_p < 1 for r in requests):
            top_p = torch.tensor([r.sampling.top_p for r in requests], device=device)
        tokens, logprobs = sample(
            logits,
            temperature=torch.tensor([float(r.sampling.temperature) for r in requests], device=device),
            top_p=top_p,
            seeds=torch.tensor([r.seed for r in requests], device=device),
            positions=torch.tensor([len(r.token_ids) for r in requests], device=device),
        )
        return tokens.tolist(), logprobs.tolist()

    def _append(self, request: Request, token: int, logprob: float) -> None:
        session = request.session
        assert session is not None
        if not math.isfinite(logprob):
            self._runner.clear(session.slot)
            self._fail([request], "The model's logits are not finite: its weights may have diverged.")
            return
        if self._runner.keeps_cache:
            session.num_cached = len(request.token_ids)
        request.token_ids.append(token)
        request.logprobs.append(logprob)
        reply = request.token_ids[request.num_prompt :]
        try:
            stopped = token in request.sampling.stop_token_ids or self._completes_stop(reply, request.sampling.stop)
        except Exception as error:
            self._fail([request], f"decode() failed on {reply}: {type(error).__name__}: {error}", error)
            return
        if stopped or len(request.token_ids) >= request.limit:
            self._remove(request)
            self._sessions.finish(session)
            if not request.future.done():
                request.future.set_result(
                    Completion(reply, request.logprobs, "stop" if stopped else "length", request.version)
                )

    def _completes_stop(self, reply: list[int], stops: tuple[str, ...]) -> bool:
        if not stops or self._decode is None:
            return False
        text = self._decode(reply)
        return any(stop in text for stop in stops)

    def _remove(self, request: Request) -> None:
        self._names.discard(request.session_name)
        if request in self._running:
            self._running.remove(request)
        if request in self._waiting:
            self._waiting.remove(request)

    def _forget(self, request: Request) -> None:
        """A cancelled or failed request gives its slot back: what it holds may be half written."""
        self._remove(request)
        if request.session is not None:
            self._sessions.drop(request.session)

    def _fail(self, requests: Any, message: str, cause: BaseException | None = None) -> None:
        for request in list(requests):
            self._forget(request)
            if not request.future.done():
                error = EngineError(message)
                error.__cause__ = cause
                request.future.set_exception(error)
