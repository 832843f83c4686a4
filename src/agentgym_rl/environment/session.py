"""A session of one environment in this process. Every answer is checked and every failure is an EnvError.

A cheap environment runs inline on the event loop, so that an episode never depends on thread timing. Any other gets
its own thread for all its calls (some libraries require that) and a deadline for each call. A thread cannot be killed:
a hung one is abandoned, and closes its environment if its call ever returns. As a daemon it does not keep the process
alive. An environment with too many abandoned threads is not opened again.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from agentgym_rl.environment.base import (
    HasActions,
    HasFork,
    HasItemTools,
    HasOracle,
    HasRender,
    HasRoles,
    HasStateKey,
    HasThought,
    TextEnv,
)
from agentgym_rl.environment.tools import ACT, Tool
from agentgym_rl.environment.wire import BadRequest, NotPlaying, NotSupported, checked_step
from agentgym_rl.errors import ConfigError, EnvError, EnvTimeout, describe_error
from agentgym_rl.types import Step

CLOSE_TIMEOUT_S = 10.0
"""Timeout of closing an environment."""
MAX_HUNG_THREADS = 1000
"""Threads of one environment whose calls missed their deadline and have not returned. Each holds little but a stack."""

Value = TypeVar("Value")
Outcome = tuple[Any, BaseException | None]


class Worker:
    """A daemon thread that runs the calls of one environment, in order."""

    hung: ClassVar[dict[str, set[Worker]]] = {}
    """Abandoned workers by environment. Those that have ended since are removed when the next worker starts."""

    def __init__(self, name: str) -> None:
        stuck = self.hung[name] = {worker for worker in self.hung.get(name, set()) if worker.alive}
        if len(stuck) >= MAX_HUNG_THREADS:
            raise EnvError(
                f"{name} is not opened again: {len(stuck)} of its calls missed their deadline and never returned, "
                "each in a thread that cannot be killed. Add timeouts to the environment, or serve it in a process "
                "that can be restarted"
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

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        """End the thread after the jobs submitted so far."""
        self._jobs.put(None)

    def abandon(self) -> None:
        """Count the thread as hung until it ends."""
        self.stop()
        self.hung[self._name].add(self)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Outcome:
        """Run `function` in the thread and return (value, None) or (None, exception)."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()

        def deliver(outcome: Outcome) -> None:
            if not future.done():
                future.set_result(outcome)

        def job() -> None:
            outcome: Outcome
            try:
                outcome = (function(*arguments), None)
            except BaseException as error:  # the thread must survive any exception of an environment
                outcome = (None, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits for the outcome
                loop.call_soon_threadsafe(deliver, outcome)

        self.submit(job)
        return await future


@dataclass(frozen=True, slots=True)
class EpisodeCopy:
    """A running episode at one moment. It is never played itself, so that several sessions can resume from it."""

    env: TextEnv
    key: str | None
    """Its state_key() at that moment; None if it has none."""
    observation: str
    rewards: tuple[float, ...]
    item_tools: list[str] | None
    """Names of its tools at that moment, if they depend on the state."""


def fork_env(env: TextEnv) -> TextEnv | None:
    """Return a copy of an environment: its own `fork`, or a deep copy if it is cheap and can be copied, else None."""
    if isinstance(env, HasFork):
        return env.fork()
    if not env.cheap:
        return None
    try:
        return copy.deepcopy(env)
    except (TypeError, copy.Error):  # it holds a connection, a lock or the like: the caller replays the episode
        return None


def _if_it_has(env: TextEnv, method: str) -> Any:
    """Return the environment if it has the method, else None. `isinstance` of a protocol is slow in Python 3.11."""
    return env if callable(getattr(env, method, None)) else None


def _if_it_has_roles(env: TextEnv) -> Any:
    return _if_it_has(env, "role") if hasattr(env, "roles") else None


class LocalSession:
    """One environment being played. Concurrent calls run one after the other."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name = name
        self.instruction = ""
        self.toolset: Sequence[Tool] = (ACT,)
        self.tool_instruction = ""
        self.takes_messages = False
        self.roles: Mapping[str, str] = {}
        """Instruction of each role; empty for a single agent."""
        self._item_tools: list[str] | None = None
        """Names of the tools of the present state, if they depend on it."""
        self.observation = ""
        """The last observation."""
        self._rewards: list[float] = []
        """Rewards since the last reset."""
        self.hung = False
        self.closed = False
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._worker: Worker | None = None
        self._not_playing = "was not reset"
        """Reason why step() is refused. Empty while an episode is running."""
        self._started = False
        self.uses_agentgym_fields = False
        """Whether the last reset came from an AgentGym client, which reads other fields of the answers."""
        self._env: TextEnv
        self._keyed_env: HasStateKey | None = None
        self._tools_env: HasItemTools | None = None
        self._roles_env: HasRoles | None = None

    @classmethod
    async def open(cls, name: str, factory: Callable[[], TextEnv], timeout_s: float) -> LocalSession:
        """Create the environment, inline if its class is cheap."""
        session = cls(name, timeout_s)
        if not getattr(factory, "cheap", False):
            session._worker = Worker(name)

        def make() -> None:
            session._env = factory()  # set in the thread, so that one created after the deadline is still closed

        try:
            await session._call("create", make)
        except (EnvError, ConfigError):
            if session._worker is not None:
                session._worker.stop()
            raise
        env = session._env
        if session._worker is not None and env.cheap:  # known only now if the factory is not a class
            session._worker.stop()
            session._worker = None
        session._keyed_env, session._tools_env = _if_it_has(env, "state_key"), _if_it_has(env, "item_tools")
        roles_env = session._roles_env = _if_it_has_roles(env)
        session.instruction = env.instruction
        if (tools_env := _if_it_has(env, "tools")) is not None:
            session.toolset = tools_env.tools()
        session.tool_instruction = getattr(env, "tool_instruction", "")
        session.takes_messages = getattr(env, "takes_messages", False)
        session.roles = {} if roles_env is None else roles_env.roles
        return session

    @property
    def environment(self) -> TextEnv:
        """The environment, for reading only. Calls that change it go through the session."""
        return self._env

    @property
    def busy(self) -> bool:
        return self._lock.locked()

    @property
    def score(self) -> float:
        """Sum of rewards since the last reset, rounded once, so that rewards that add up to 1 score exactly 1."""
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

    async def fork(self) -> EpisodeCopy | None:
        """Return a copy of the running episode, or None if the environment cannot be copied."""
        async with self._lock:
            if self._not_playing:
                raise NotPlaying(f"this {self.name} session {self._not_playing}: reset it")
            env, key = await self._call("fork", self._fork, self._env)
            if env is None:
                return None
            return EpisodeCopy(env, key, self.observation, tuple(self._rewards), self._item_tools)

    async def resume(self, episode: EpisodeCopy) -> None:
        """Continue the episode of a copy, which stays as it is. The environment of this session is closed."""
        async with self._lock:
            env, key = await self._call("fork", self._fork, episode.env)
            if env is None:
                raise EnvError(f"{self.name} was copied once and cannot be copied again: fork() must always work")
            if key != episode.key:
                raise EnvError(
                    f"{self.name}.fork() must return a copy that later steps do not change: its state is {key!r:.120} "
                    f"instead of {episode.key!r:.120}"
                )
            await self._call("close", self._env.close)
            self._env, self._keyed_env = env, _if_it_has(env, "state_key")
            self._tools_env = _if_it_has(env, "item_tools")
            self._roles_env = _if_it_has_roles(env)
            self._started, self._not_playing = True, ""
            self._rewards, self.observation = list(episode.rewards), episode.observation
            self._item_tools = episode.item_tools

    async def close(self) -> None:
        """Close the environment and its thread. Never raise, and never wait for a hung thread."""
        if self.closed:
            return
        self.closed = True
        if self.hung:
            return
        # Without the lock: the call that holds it is waiting for this environment.
        if self.busy:
            self._abandon()
            return
        self._timeout_s = min(self._timeout_s, CLOSE_TIMEOUT_S)
        with contextlib.suppress(EnvError, ConfigError):
            await self._call("close", self._env.close)
        if self._worker is not None and not self.hung:
            self._worker.stop()

    @property
    def is_closing(self) -> bool:
        """Whether the session is closed while its thread still runs a call or closes the environment."""
        return self.closed and self._worker is not None and self._worker.alive

    def _reset(self, item: int) -> Step:
        observation = self._env.reset(item)
        self._item_tools = None
        return self._with_state(checked_step(Step(observation), f"{self.name}.reset({item})"))

    def _step(self, text: str) -> Step:
        return self._with_state(checked_step(self._env.step(text), f"{self.name}.step()"))

    def _with_state(self, step: Step) -> Step:
        if self._tools_env is not None and (names := self._tools_env.item_tools()) != self._item_tools:
            self._item_tools = names
            step.info = {**step.info, "tools": names}
        if self._keyed_env is not None and "state_key" not in step.info:
            # A new dict: the environment may return the same one every time.
            step.info = {**step.info, "state_key": self._key(self._keyed_env)}
        if self._roles_env is not None and not step.done:
            step.info = {**step.info, "role": self._text("role", self._roles_env.role())}
        return step

    def _fork(self, env: TextEnv) -> tuple[TextEnv | None, str | None]:
        """Return a copy of an environment, if there is one, and the key of its state."""
        copied = fork_env(env)
        keyed = None if copied is None else _if_it_has(copied, "state_key")
        return copied, None if keyed is None else self._key(keyed)

    def _key(self, env: HasStateKey) -> str:
        return self._text("state_key", env.state_key())

    def _action(self, env: HasOracle) -> str:
        return self._text("oracle", env.oracle())

    def _thought(self, env: HasOracle) -> str:
        return self._text("thought", env.thought()) if isinstance(env, HasThought) else ""

    def _text(self, method: str, answer: Any) -> str:
        if not isinstance(answer, str):
            raise EnvError(f"{self.name}.{method}() must return a string, got {answer!r:.80}")
        return answer

    async def _ask(self, method: str, capability: type, call: Callable[[Any], Value], ended: bool = False) -> Value:
        """Return the answer of an optional method. `ended` allows it after the end of the episode too."""
        async with self._lock:
            if not isinstance(self._env, capability):
                raise NotSupported(f"{self.name} has no {method}()")
            if self._not_playing and not (ended and self._started):
                raise NotPlaying(f"this {self.name} session {self._not_playing}: reset it")
            return await self._call(method, call, self._env)

    async def _call(self, method: str, function: Callable[..., Value], *arguments: Any) -> Value:
        """Run `function`, inline or in the thread. Any exception but ConfigError becomes an EnvError."""
        if self.hung:
            raise EnvTimeout(f"this {self.name} session missed a deadline and was abandoned: open another")
        if self._worker is None:
            try:
                return function(*arguments)
            except (EnvError, ConfigError):
                raise
            except BaseException as error:  # nothing is awaited here, so even a CancelledError is the environment's
                if isinstance(error, KeyboardInterrupt) and _raised_by_signal(error):
                    raise
                raise EnvError(f"{self.name}.{method} raised {describe_error(error)}") from error
        try:
            async with asyncio.timeout(self._timeout_s):
                value, raised = await self._worker.call(function, *arguments)
        except TimeoutError:
            self._abandon()
            raise EnvTimeout(f"{self.name}.{method} took longer than its deadline of {self._timeout_s:g} s") from None
        except asyncio.CancelledError:
            self._abandon()  # the call continues in its thread, so the state is unknown
            raise
        if isinstance(raised, EnvError | ConfigError):
            raise raised
        if raised is not None:
            raise EnvError(f"{self.name}.{method} raised {describe_error(raised)}") from raised
        return value

    def _abandon(self) -> None:
        """Abandon the thread. If its call ever returns, it closes its environment and ends."""
        self.hung = True
        if self._worker is None:
            return

        def close() -> None:
            if hasattr(self, "_env"):
                with contextlib.suppress(BaseException):
                    self._env.close()

        if not self.closed or self.busy:  # otherwise close() itself hangs
            self._worker.submit(close)
        self._worker.abandon()


def _raised_by_signal(error: KeyboardInterrupt) -> bool:
    """Return whether Ctrl-C raised the exception rather than the environment itself."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # leaves no frame in the traceback: assume Ctrl-C
        return True
    function = getattr(handler, "func", handler)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))
