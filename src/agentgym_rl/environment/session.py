"""One environment being played in this process, guarded: every answer is checked and every failure is an EnvError.

A cheap environment runs inline on the event loop, so that an episode never depends on thread timing. Any other gets a
thread of its own, in which all its calls are made (some libraries insist on one thread), and a deadline on each call.
A thread cannot be killed: one that hangs is abandoned, closes its environment if it ever comes back, and being a
daemon does not keep the process alive. An environment with too many abandoned threads is not opened again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from agentgym_rl.environment.base import HasActions, HasOracle, HasRender, HasStateKey, HasThought, TextEnv
from agentgym_rl.environment.wire import BadRequest, NotPlaying, NotSupported, checked_step
from agentgym_rl.errors import ConfigError, EnvError, EnvTimeout
from agentgym_rl.types import Step

CLOSE_TIMEOUT_S = 10.0
"""Nobody waits longer than this for an environment to close."""
MAX_HUNG_THREADS = 1000
"""Threads of one environment whose calls missed their deadline and have not returned. Each holds little but a stack."""

Value = TypeVar("Value")
Outcome = tuple[Any, BaseException | None]


class Worker:
    """A daemon thread that makes the calls of one environment, in order."""

    hung: ClassVar[dict[str, set[Worker]]] = {}
    """By environment: workers that were abandoned; those that came back are removed when the next one is made."""

    def __init__(self, name: str) -> None:
        stuck = self.hung[name] = {worker for worker in self.hung.get(name, set()) if worker.alive}
        if len(stuck) >= MAX_HUNG_THREADS:
            raise EnvError(
                f"{name} is not opened again: {len(stuck)} of its calls missed their deadline and never came back, "
                "each in a thread that cannot be ended. Give the environment time-outs of its own, or serve it in a "
                "process that can be restarted"
            )
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"environment-{name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def post(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        """End the thread after what was posted before."""
        self._jobs.put(None)

    def abandon(self) -> None:
        """Count the thread among the hung ones until it ends."""
        self.stop()
        self.hung[self._name].add(self)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Outcome:
        """(value, None) or (None, what it raised)."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()

        def deliver(outcome: Outcome) -> None:
            if not future.done():
                future.set_result(outcome)

        def job() -> None:
            outcome: Outcome
            try:
                outcome = (function(*arguments), None)
            except BaseException as error:  # the thread must survive whatever an environment raises
                outcome = (None, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(deliver, outcome)

        self.post(job)
        return await future


class LocalSession:
    """One environment being played. Concurrent calls are served one after the other."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name = name
        self.instruction = ""
        self.observation = ""
        """The last one."""
        self._rewards: list[float] = []
        """Since the last reset."""
        self.hung = False
        self.closed = False
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._worker: Worker | None = None
        self._not_playing = "was not reset"
        """Why step() is refused; empty while an episode is running."""
        self._started = False
        self.in_agentgym_words = False
        """Whether the last reset was asked for as AgentGym's clients do, who then read other fields."""
        self._env: TextEnv
        self._states: HasStateKey | None = None

    @classmethod
    async def open(cls, name: str, factory: Callable[[], TextEnv], timeout_s: float, explain: str = "") -> LocalSession:
        """Make the environment, inline when its class says it is cheap; `explain` is appended to the instruction."""
        session = cls(name, timeout_s)
        if not getattr(factory, "cheap", False):
            session._worker = Worker(name)

        def make() -> None:
            session._env = factory()  # here and not after the wait, so that a late one is still closed

        try:
            await session._call("create", make)
        except (EnvError, ConfigError):
            if session._worker is not None:
                session._worker.stop()
            raise
        env = session._env
        if session._worker is not None and env.cheap:  # a factory that is no class could not say so before
            session._worker.stop()
            session._worker = None
        session._states = env if isinstance(env, HasStateKey) else None
        session.instruction = env.instruction
        return session

    @property
    def environment(self) -> TextEnv:
        """To look at; calls that change it go through the session."""
        return self._env

    @property
    def busy(self) -> bool:
        return self._lock.locked()

    @property
    def score(self) -> float:
        """Sum of rewards since the last reset, rounded once: rewards that add up to 1 score 1."""
        return math.fsum(self._rewards)

    def check_started(self) -> None:
        if not self._started:
            raise NotPlaying(f"this {self.name} session {self._not_playing}: reset it")

    async def reset(self, item: int) -> Step:
        async with self._lock:
            splits = self._env.splits
            if not any(item in split for split in splits.values()):
                known = ", ".join(f"{name} {r.start}..{r.stop - 1}" for name, r in splits.items())
                raise BadRequest(f"{self.name} has no item {item}: it has {known}")
            self._not_playing = "was not reset since it failed"
            self._started = False
            step = await self._call("reset", self._reset, item)
            self._started = True
            self._not_playing = ""
            self._rewards = []
            self.observation = step.observation
            return step

    async def step(self, text: str) -> Step:
        async with self._lock:
            if self._not_playing:
                raise NotPlaying(f"this {self.name} session {self._not_playing}: reset it")
            self._not_playing = "was not reset since it failed"
            step = await self._call("step", self._step, text)
            self._not_playing = "has ended its episode" if step.done else ""
            self._rewards.append(step.reward)
            self.observation = step.observation
            return step

    async def actions(self) -> list[str]:
        answer = await self._ask("actions", HasActions, lambda env: env.actions())
        if not isinstance(answer, list) or not all(isinstance(action, str) for action in answer):
            raise EnvError(f"{self.name}.actions() must return a list of strings, got {answer!r:.80}")
        return answer

    async def oracle(self) -> str:
        return await self._ask("oracle", HasOracle, self._action)

    async def advice(self) -> tuple[str, str]:
        return await self._ask("oracle", HasOracle, lambda env: (self._thought(env), self._action(env)))

    async def state_key(self) -> str:
        return await self._ask("state_key", HasStateKey, self._key, ended=True)

    async def render(self) -> str | bytes:
        answer = await self._ask("render", HasRender, lambda env: env.render(), ended=True)
        if not isinstance(answer, str | bytes):
            raise EnvError(f"{self.name}.render() must return a string or bytes, got {type(answer).__name__}")
        return answer

    async def close(self) -> None:
        """Close the environment and its thread; never raises, never waits for a thread that hangs."""
        if self.closed:
            return
        self.closed = True
        if self.hung:
            return
        # Not behind the lock: whoever holds it waits for this very environment.
        if self.busy:
            self._abandon()
            return
        self._timeout_s = min(self._timeout_s, CLOSE_TIMEOUT_S)
        with contextlib.suppress(EnvError, ConfigError):
            await self._call("close", self._env.close)
        if self._worker is not None and not self.hung:
            self._worker.stop()

    @property
    def ending(self) -> bool:
        """Closed, but its thread still has a call to come back from before it closes the environment."""
        return self.closed and self._worker is not None and self._worker.alive

    def _reset(self, item: int) -> Step:
        observation = self._env.reset(item)
        return self._with_state(checked_step(Step(observation), f"{self.name}.reset({item})"))

    def _step(self, text: str) -> Step:
        return self._with_state(checked_step(self._env.step(text), f"{self.name}.step()"))

    def _with_state(self, step: Step) -> Step:
        if self._states is not None and "state_key" not in step.info:
            # A new dict: the environment may hand out the same one every time.
            step.info = {**step.info, "state_key": self._key(self._states)}
        return step

    def _key(self, env: HasStateKey) -> str:
        return self._text("state_key", env.state_key())

    def _action(self, env: HasOracle) -> str:
        return self._text("oracle", env.oracle())

    def _thought(self, env: HasOracle) -> str:
        return self._text("thought", env.thought()) if isinstance(env, HasThought) else ""

    def _text(self, what: str, answer: Any) -> str:
        if not isinstance(answer, str):
            raise EnvError(f"{self.name}.{what}() must return a string, got {answer!r:.80}")
        return answer

    async def _ask(self, what: str, capability: type, question: Callable[[Any], Value], ended: bool = False) -> Value:
        """Answer of an optional method; `ended`: also after the episode is over."""
        async with self._lock:
            if not isinstance(self._env, capability):
                raise NotSupported(f"{self.name} has no {what}()")
            if self._not_playing and not (ended and self._started):
                raise NotPlaying(f"this {self.name} session {self._not_playing}: reset it")
            return await self._call(what, question, self._env)

    async def _call(self, what: str, function: Callable[..., Value], *arguments: Any) -> Value:
        """Run `function`, inline or in the thread; what it raises becomes an EnvError unless it is a ConfigError."""
        if self.hung:
            raise EnvTimeout(f"this {self.name} session missed a deadline and was given up: open another")
        if self._worker is None:
            try:
                return function(*arguments)
            except (EnvError, ConfigError):
                raise
            except BaseException as error:  # nothing is awaited here: not even a CancelledError is meant for us
                if isinstance(error, KeyboardInterrupt) and _by_signal(error):
                    raise
                raise EnvError(f"{self.name}.{what} raised {type(error).__name__}: {error}") from error
        try:
            async with asyncio.timeout(self._timeout_s):
                value, raised = await self._worker.call(function, *arguments)
        except TimeoutError:
            self._abandon()
            raise EnvTimeout(f"{self.name}.{what} took longer than its deadline of {self._timeout_s:g} s") from None
        except asyncio.CancelledError:
            self._abandon()  # the call goes on in its thread: the state is unknown
            raise
        if isinstance(raised, EnvError | ConfigError):
            raise raised
        if raised is not None:
            raise EnvError(f"{self.name}.{what} raised {type(raised).__name__}: {raised}") from raised
        return value

    def _abandon(self) -> None:
        """Give the thread up; if it ever comes back it closes its environment and ends."""
        self.hung = True
        if self._worker is None:
            return

        def close() -> None:
            if hasattr(self, "_env"):
                with contextlib.suppress(BaseException):
                    self._env.close()

        if not self.closed or self.busy:  # else it is close() itself that hangs
            self._worker.post(close)
        self._worker.abandon()


def _by_signal(error: KeyboardInterrupt) -> bool:
    """Whether Ctrl-C was pressed, or the environment itself raised it."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # leaves no trace: cannot be told
        return True
    function = getattr(handler, "func", handler)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))
