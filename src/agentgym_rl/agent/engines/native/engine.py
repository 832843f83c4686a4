"""Continuous batching over one model: requests join and leave between steps, one token a step for each of them.

On a CUDA device several steps run in one launch, and requests join and leave between launches.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Literal, cast

import torch

from agentgym_rl.agent.engines.native.decoder import unwrap
from agentgym_rl.agent.engines.native.in_place import evaluating, load_in_place
from agentgym_rl.agent.engines.native.request import Flight, Request
from agentgym_rl.agent.engines.native.runner import MAX_STOPS, DecodeRow, LaunchRunner, Row, Runner
from agentgym_rl.agent.engines.native.sampling import sample, signed_64
from agentgym_rl.agent.engines.native.select_runner import make_runner
from agentgym_rl.agent.engines.native.slots import SessionTable
from agentgym_rl.errors import EngineError
from agentgym_rl.types import Completion, Sampling

SETTLE_ROUNDS = 3
"""Event-loop iterations between steps, so that environments that answer together join the next step together. An
iteration in which requests arrived is followed by another, up to MAX_SETTLE_ROUNDS; not on a device, where later
requests join the next launch."""
MAX_SETTLE_ROUNDS = 12
LAUNCHES_PER_REPLY = 8
"""Launches that a reply of the average length takes. A row that ends early idles for half a launch on average, and a
new request waits for one."""
REPLIES_PER_PORTION = 64
"""Replies delivered at once, so that their next prompts arrive before the other replies are delivered."""
LAUNCH_STEPS = (2, 16)
"""Minimum and maximum steps of a launch."""


class NativeEngine:
    """Samples from a transformers causal language model in this process, sharing its parameters (no copy).

    `decode` turns token ids into text and is needed only for stop strings. At most `max_sessions` sequences run at
    once; further requests wait. `max_context` bounds prompt and reply together. `runner` computes the model; the
    default is the fastest that computes it exactly. With `keep_cache` a weight update does not drop the KV cache.
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
        runner: Runner | LaunchRunner | None = None,
        keep_cache: bool = False,
    ) -> None:
        config = unwrap(model).config
        if getattr(config, "is_encoder_decoder", False):
            raise EngineError(f"The native engine needs a decoder-only model, got {type(unwrap(model)).__name__}.")
        if max_sessions < 1:
            raise EngineError(f"max_sessions must be at least 1, got {max_sessions}.")
        positions = getattr(config, "max_position_embeddings", None)
        self.max_context = min(n for n in (max_context, positions, 1 << 20) if n is not None)
        self.version = version
        self._model = model
        self._decode = decode
        self._vocabulary = unwrap(model).get_input_embeddings().weight.shape[0]
        if runner is None:
            runner = make_runner(model, max_slots=max_sessions, max_length=self.max_context)
        self._runner: Runner | LaunchRunner = runner
        self._launches = hasattr(runner, "launch")
        self._waiter = ThreadPoolExecutor(1, "native-engine") if self._launches else None
        self._usual_reply = 64.0
        """Tokens of an average reply."""
        self._tokens_per_step = 1.0
        """Tokens of a row and a step in the last launch: more than 1 if guesses came true."""
        self._flights: deque[Flight] = deque()
        self._rows: list[Request] = []
        """Rows on the device, in order. Rows that ended are among them until the next launch."""
        self._rows_updates = 0
        self._sessions, self._max_sessions = SessionTable(max_sessions), max_sessions
        self._seeds = random.Random(seed)
        self._waiting: deque[Request] = deque()
        self._running: dict[Request, None] = {}
        self._busy_sessions: set[str] = set()
        self._arrivals = 0
        self._updates = 0
        self._keep_cache = keep_cache
        self._task: asyncio.Task[None] | None = None
        self._may_step, self._nothing_runs = asyncio.Event(), asyncio.Event()
        self._may_step.set()
        self._nothing_runs.set()
        self._pauses = 0
        self._closed = False
        self.reset_stats()

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        num_reusable = self._sessions.num_reusable(session, prompt_ids)
        self._check(prompt_ids, num_reusable, sampling, session)
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        request = Request(
            session_name=session,
            token_ids=list(prompt_ids),
            num_prompt=len(prompt_ids),
            sampling=sampling,
            seed=signed_64(seed),
            limit=min(len(prompt_ids) + sampling.max_new_tokens, self.max_context),
            num_reusable=num_reusable,
            future=asyncio.get_running_loop().create_future(),
        )
        self._waiting.append(request)
        self._busy_sessions.add(session)
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
        """Copy a state dict in, or with `source` None use weights that were changed in place. Pending replies continue
        with the new weights, and with a recomputed KV cache unless `keep_cache`."""
        if source is not None:
            load_in_place(self._model, source)
        if self._keep_cache:
            self._sessions.forget_released()
        else:
            self._sessions.invalidate()
        self._updates += 1
        self.version = version

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Sample nothing inside, so that shared weights can be changed in place. Requests wait."""
        self._may_step.clear()
        self._pauses += 1
        try:
            await self._nothing_runs.wait()
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._may_step.set()

    async def sleep(self) -> None:
        """Free the memory of the KV cache until the next request. Pending replies finish first."""
        while self._task is not None:
            await asyncio.wait([self._task])
        self._limit_sessions(self._max_sessions)

    def abort(self, reason: str) -> None:
        """Fail every pending reply."""
        self._fail([*self._waiting, *self._running], reason)

    async def close(self) -> None:
        self._closed = True
        self._may_step.set()
        self.abort("The engine was closed.")
        if self._task is not None:
            await asyncio.wait([self._task])
        self._sessions.invalidate()
        self._runner.free()
        if self._waiter is not None:
            self._waiter.shutdown()

    def stats(self) -> dict[str, float]:
        """Return the counters since the last reset. Prompt tokens were `computed`, `reused` from the session's cache,
        or `shared` with an identical prompt of the same step. A weight update during a reply recomputes some."""
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

    def _check(self, prompt_ids: list[int], num_known: int, sampling: Sampling, session: str) -> None:
        if self._closed:
            raise EngineError("The engine was closed; make another.")
        if session in self._busy_sessions:
            raise EngineError(f"Session {session!r} has a pending reply: give every trajectory its own session.")
        if not prompt_ids:
            raise EngineError("The prompt is empty: at least one token is needed.")
        if len(prompt_ids) >= self.max_context:
            raise EngineError(
                f"The prompt has {len(prompt_ids)} tokens and the engine's max_context is {self.max_context}, a reply "
                "included: end the episode earlier (limits.max_context) or raise max_context."
            )
        new = prompt_ids[num_known:]
        if new and (min(new) < 0 or max(new) >= self._vocabulary):
            raise EngineError(
                f"The prompt has token ids from {min(new)} to {max(new)}; the model knows 0 to "
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
        """Step while there are requests. Runs on the event loop, so only the callers decide which requests share a
        step."""
        try:
            while self._waiting or self._running or self._flights:
                if not self._flights:
                    await self._may_step.wait()
                await self._settle()
                may_step = self._may_step.is_set()
                if may_step:
                    self._admit()
                if self._launches:
                    await self._advance(may_step)
                elif self._running and may_step:
                    self._step()
        finally:
            self._task = None
            self._forget_rows()
            self._fail([*self._waiting, *self._running], "The event loop ended while a reply was being sampled.")

    async def _settle(self) -> None:
        for done_rounds in range(1, MAX_SETTLE_ROUNDS + 1):
            arrivals = self._arrivals
            await asyncio.sleep(0)
            if done_rounds >= SETTLE_ROUNDS and (self._launches or self._arrivals == arrivals):
                return

    def _admit(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            session = self._sessions.acquire(request.session_name)
            if session is None:
                return
            self._waiting.popleft()
            # At least one token is computed, for the logits that follow it.
            session.num_cached = min(session.num_cached, request.num_reusable, request.num_prompt - 1)
            session.token_ids = request.token_ids
            request.session = session
            self._running[request] = None
            if request.logprobs:  # it had started and was put back because memory ran out
                continue
            request.version = self.version
            self._stats["requests"] += 1
            self._stats["prompt_tokens_reused"] += session.num_cached

    def _step(self) -> None:
        """Sample one token for every running request."""
        runner = cast(Runner, self._runner)
        started = time.perf_counter()
        requests = list(self._running)
        rows = [Row(r.session.slot, r.token_ids, r.session.num_cached) for r in requests if r.session is not None]
        try:
            with evaluating(self._model):
                logits, num_computed = runner.forward(rows)
            tokens, logprobs = self._sample(requests, logits)
        except torch.OutOfMemoryError as error:
            reason = str(error)  # the error itself would keep frames with tensors alive
        except Exception as error:
            # Caught here, because the callers are not on this stack and each must get the error.
            self._fail(requests, f"A step of the model failed: {type(error).__name__}: {error}", error)
            return
        else:
            reason = ""
        if reason:
            self._reduce_sessions(reason)
            return
        self._count_prompts(requests, rows, num_computed)
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            self._append(request, token, logprob)
        stats = self._stats
        stats["steps"] += 1
        stats["new_tokens"] += len(requests)
        stats["busy_seconds"] += time.perf_counter() - started

    def _count_prompts(self, requests: list[Request], rows: list[Row], num_computed: int) -> None:
        num_requested = sum(len(row.token_ids) - row.start for row in rows)
        # A request's later steps compute the token that it sampled last, which is no prompt token.
        num_decoded = sum(
            bool(request.logprobs) and len(row.token_ids) - row.start == 1
            for request, row in zip(requests, rows, strict=True)
        )
        self._stats["prompt_tokens_computed"] += num_computed - num_decoded
        self._stats["prompt_tokens_shared"] += num_requested - num_computed

    async def _advance(self, may_launch: bool) -> None:
        """Start a launch for the running requests while the previous one runs, then read the previous one.

        The rows' state stays on the device, so that requests join and leave without waiting for the device.
        """
        started = time.perf_counter()
        reason = ""
        try:
            num_flights = len(self._flights)
            if may_launch and (num_flights == 0 or self._can_join()):
                self._start_launch()
            if len(self._flights) > 1 or len(self._flights) == num_flights > 0:
                await self._read_launch()
        except torch.OutOfMemoryError as error:
            reason = str(error)  # the error itself would keep frames with tensors alive
        except Exception as error:
            self._forget_rows()
            self._fail(list(self._running), f"A launch on the device failed: {type(error).__name__}: {error}", error)
        if reason:
            self._reduce_sessions(reason)
        self._stats["busy_seconds"] += time.perf_counter() - started

    def _can_join(self) -> bool:
        """Return whether rows may change while launches run: not after a weight update, nor if the cache must grow."""
        runner = cast(LaunchRunner, self._runner)
        longest = max((request.limit for request in self._running), default=0)
        return self._updates == self._rows_updates and runner.fits(longest)

    def _start_launch(self) -> None:
        """Start a launch for the rows that continue and for new ones, unless most rows end in the one that runs."""
        if not self._running:
            return
        runner = cast(LaunchRunner, self._runner)
        if not self._flights:
            runner.refresh(updated=self._updates != self._rows_updates)
            runner.reserve(max(request.limit for request in self._running))
            self._rows, self._rows_updates = [], self._updates
        known = set(self._rows)
        new = [request for request in self._running if request not in known]
        if self._flights and not new and not self._worth_launching():
            return
        decode_rows = self._prefill(new)
        kept = [index for index, request in enumerate(self._rows) if request in self._running]
        runner.arrange(kept, decode_rows)
        self._rows = [*(self._rows[index] for index in kept), *new]
        launch = runner.launch(min(max(request.tokens_left for request in self._rows), self._launch_steps()))
        for request in self._rows:
            request.running_steps += launch.steps
        self._flights.append(Flight(launch, self._rows, self._updates, self.version))
        self._nothing_runs.clear()

    def _prefill(self, new: list[Request]) -> list[DecodeRow]:
        """Compute the prompts of new rows and return the rows."""
        rows = [Row(r.session.slot, r.token_ids, r.session.num_cached) for r in new if r.session is not None]
        runner = cast(LaunchRunner, self._runner)
        num_computed = runner.prefill(rows, beside=self._slots_are_free()) + len(rows)
        self._count_prompts(new, rows, num_computed)
        decode_rows = []
        for request, row in zip(new, rows, strict=True):
            if not request.logprobs:  # weights may have changed since it was admitted
                request.version = self.version
            decode_rows.append(
                DecodeRow(
                    slot=row.slot,
                    token=row.token_ids[-1],
                    position=len(row.token_ids) - 1,
                    remaining=request.limit - len(row.token_ids),
                    seed=request.seed,
                    temperature=float(request.sampling.temperature),
                    top_p=request.sampling.top_p,
                    stop_token_ids=request.sampling.stop_token_ids,
                )
            )
        return decode_rows

    def _slots_are_free(self) -> bool:
        """Return whether the launches that run write to slots of pending requests only. They also write for a reply
        that only the host knows to have ended, such as by a stop string."""
        rows = (request for flight in self._flights for request in flight.requests)
        return all(request in self._running or request.ended_on_device for request in rows)

    def _worth_launching(self) -> bool:
        """Return whether to start another launch for the same rows before the last one is read."""
        rows = [request for request in self._rows if request in self._running]
        continuing = sum(request.tokens_left > 0 for request in rows)
        return not self._closed and continuing > 0 and 2 * continuing >= len(self._rows)

    async def _read_launch(self) -> None:
        flight = self._flights[0]
        await asyncio.get_running_loop().run_in_executor(self._waiter, flight.launch.wait)
        tokens, logprobs = flight.launch.read()
        self._flights.popleft()
        if not self._flights:
            self._nothing_runs.set()
        self._stats["steps"] += flight.launch.steps
        num_done = 0
        if counts := [len(new) for new in tokens if len(new) >= flight.launch.steps]:  # the others ended early
            self._tokens_per_step = sum(counts) / len(counts) / flight.launch.steps
        for request in flight.requests:
            request.running_steps -= flight.launch.steps
        for request, new, values in zip(flight.requests, tokens, logprobs, strict=True):
            if not new or request not in self._running:
                continue
            self._stats["new_tokens"] += self._extend(request, new, values, flight.version)
            # The cache of older weights must not be reused.
            if request.session is not None and self._updates != flight.updates and not self._keep_cache:
                request.session.num_cached = 0
            num_done += request not in self._running
            if num_done == REPLIES_PER_PORTION:
                num_done = 0
                await self._prefill_early()

    def _forget_rows(self) -> None:
        """Forget the rows on the device and the launches that run."""
        for request in self._rows:
            request.running_steps = 0
        self._flights.clear()
        self._nothing_runs.set()
        self._rows = []

    def _reduce_sessions(self, reason: str) -> None:
        """Drop the KV cache after running out of memory, and continue with half as many sequences at once.

        Pending requests are put back and computed again, so that long episodes are not lost. A request fails only if it
        does not fit alone.
        """
        requests, slots = list(self._running), self._sessions.max_sessions
        longest = max((len(request.token_ids) for request in requests), default=0)
        if slots == 1:
            self._fail(requests, f"There is not enough memory for one sequence of {longest} tokens: {reason}")
            self._limit_sessions(self._max_sessions)
            return
        warnings.warn(
            f"The engine ran out of memory with up to {slots} sequences, the longest of {longest} tokens. Their KV "
            f"cache is computed again; from now on at most {slots // 2} sequences run at once. Lower agent.concurrency "
            f"or limits.max_context to avoid this. ({reason.splitlines()[0]})",
            stacklevel=2,
        )
        self._sessions.evictions += len(self._sessions)
        for request in requests:
            request.session = None
        self._forget_rows()
        self._running.clear()
        self._waiting.extendleft(reversed(requests))
        self._limit_sessions(slots // 2)

    def _limit_sessions(self, count: int) -> None:
        self._sessions.resize(count)
        self._runner.resize(count)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _launch_steps(self) -> int:
        minimum, maximum = LAUNCH_STEPS
        return min(maximum, max(minimum, round(self._usual_reply / self._tokens_per_step / LAUNCHES_PER_REPLY)))

    async def _prefill_early(self) -> None:
        """Compute the prompts of requests that follow delivered replies, so that the device works while the host
        delivers the other replies. After a weight update or a pause the next launch does it."""
        await self._settle()
        if self._updates != self._rows_updates or not self._may_step.is_set():
            return
        known = len(self._running)
        self._admit()
        runner = cast(LaunchRunner, self._runner)
        requests = [r for r in list(self._running)[known:] if runner.fits(r.limit)]
        rows = [Row(r.session.slot, r.token_ids, r.session.num_cached) for r in requests if r.session is not None]
        num_computed = runner.prefill(rows, beside=self._slots_are_free())
        self._stats["prompt_tokens_computed"] += num_computed
        self._stats["prompt_tokens_shared"] -= num_computed
        for request in requests:
            if request.session is not None:
                self._stats["prompt_tokens_shared"] += len(request.token_ids) - 1 - request.session.num_cached
                request.session.num_cached = len(request.token_ids) - 1

    def _extend(self, request: Request, new: list[int], logprobs: list[float], version: int) -> int:
        """Append a launch's tokens to a request, up to its stop. Return how many were appended."""
        session = request.session
        assert session is not None
        if not math.isfinite(logprobs[-1]):
            self._runner.clear(session.slot)
            self._fail([request], "The model's logits are not finite: its weights may have diverged.")
            return 0
        try:
            stop = self._first_stop(request, new)
        except Exception as error:
            reply = request.token_ids[request.num_prompt :] + new
            self._fail([request], f"decode() failed on {reply}: {type(error).__name__}: {error}", error)
            return 0
        if stop is not None and stop + 1 < len(new):
            new, logprobs = new[: stop + 1], logprobs[: stop + 1]
        request.extend(new, logprobs, version)
        session.num_cached = len(request.token_ids) - 1
        if stop is not None or len(request.token_ids) >= request.limit:
            self._complete(request, stop is not None)
        return len(new)

    def _first_stop(self, request: Request, new: list[int]) -> int | None:
        """Return the index in `new` at which the reply stops. The device stops at up to MAX_STOPS stop tokens itself,
        so then the last token tells.

        Stop strings are searched after every token, as in `_append`: text that a later token would change, such as half
        a character, ends the reply too.
        """
        sampling = request.sampling
        if not sampling.stop and len(sampling.stop_token_ids) <= MAX_STOPS:
            return len(new) - 1 if new[-1] in sampling.stop_token_ids else None
        reply = request.token_ids[request.num_prompt :]
        for index, token in enumerate(new):
            reply.append(token)
            if token in sampling.stop_token_ids or self._completes_stop(reply, sampling.stop):
                return index
        return None

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
        if cast(Runner, self._runner).keeps_cache:
            session.num_cached = len(request.token_ids)
        request.extend([token], [logprob], self.version)
        reply = request.token_ids[request.num_prompt :]
        try:
            stopped = token in request.sampling.stop_token_ids or self._completes_stop(reply, request.sampling.stop)
        except Exception as error:
            self._fail([request], f"decode() failed on {reply}: {type(error).__name__}: {error}", error)
            return
        if stopped or len(request.token_ids) >= request.limit:
            self._complete(request, stopped)

    def _complete(self, request: Request, stopped: bool) -> None:
        self._remove(request)
        if request.session is not None:
            self._sessions.finish(request.session)
        reply = request.token_ids[request.num_prompt :]
        self._usual_reply += 0.02 * (len(reply) - self._usual_reply)
        if not request.future.done():
            finish: Literal["stop", "length"] = "stop" if stopped else "length"
            request.future.set_result(Completion(reply, request.logprobs, finish, request.version, request.versions))

    def _completes_stop(self, reply: list[int], stops: tuple[str, ...]) -> bool:
        if not stops or self._decode is None:
            return False
        text = self._decode(reply)
        return any(stop in text for stop in stops)

    def _remove(self, request: Request) -> None:
        self._busy_sessions.discard(request.session_name)
        if request in self._running:
            del self._running[request]
        elif request in self._waiting:
            self._waiting.remove(request)

    def _forget(self, request: Request) -> None:
        """Remove a cancelled or failed request and free its slot, whose contents may be incomplete."""
        self._remove(request)
        if request.session is not None:
            self._sessions.drop(request.session)

    def _fail(self, requests: Iterable[Request], message: str, cause: BaseException | None = None) -> None:
        for request in list(requests):
            self._forget(request)
            if not request.future.done():
                error = EngineError(message)
                error.__cause__ = cause
                request.future.set_exception(error)
