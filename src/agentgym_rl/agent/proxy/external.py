"""An agent that is somebody else's program: it calls the model through the proxy and drives the episode.

The loop stays `rollout`. A turn of `ExternalPolicy` is everything that the program does up to its next action. The
reply of a turn is the last call of the model before that action; earlier calls of the turn have the purpose `call`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any

from agentgym_rl.agent.engines.base import Engine
from agentgym_rl.agent.policy import Reply, observation_message
from agentgym_rl.agent.proxy.app import Proxy
from agentgym_rl.agent.proxy.chat import RecordedModel
from agentgym_rl.agent.proxy.client import SESSION_URL
from agentgym_rl.agent.proxy.sessions import ProxySession, Submission
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.segments import stitch
from agentgym_rl.errors import ProgramError
from agentgym_rl.types import EnvSession, Limits, Message, Observation, Sampling, Step, ToolCall

CALL = "call"
"""Purpose of the model calls of a turn that are not its last."""
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "PYTHONPATH", "VIRTUAL_ENV", "SYSTEMROOT")
"""Environment variables that every program gets. Others, such as keys, only if the recipe names them."""
EXIT_TIMEOUT_S = 10.0
"""Seconds that a program has to exit after its episode has ended."""
OUTPUT_SHOWN = 2000
"""Last characters of a failed program's output in the episode's error."""


class ExternalSession:
    """An environment whose next step is the program's submission, whatever the reply says."""

    def __init__(self, env: EnvSession) -> None:
        self.name, self.instruction, self.tools = env.name, env.instruction, env.tools
        self._env = env
        self.submission: Submission | None = None
        self.last_step = Step("")
        """The environment's last answer."""

    async def reset(self, item: int) -> Step:
        self.last_step = await self._env.reset(item)
        return self.last_step

    async def step(self, text: str) -> Step:
        submission, self.submission = self.submission, None
        if submission is None:  # a policy that is no program
            self.last_step = await self._env.step(text)
        elif submission.ending is not None:
            self.last_step = submission.ending
        elif submission.calls is not None:
            self.last_step = await self._env.call(submission.calls)
        else:
            self.last_step = await self._env.step(submission.action)
        return self.last_step

    async def call(self, calls: list[ToolCall], message: str = "") -> Step:
        self.last_step = await self._env.call(calls, message)
        return self.last_step

    def call_of(self, action: str) -> ToolCall | None:
        return self._env.call_of(action)

    async def actions(self) -> list[str]:
        return await self._env.actions()

    async def oracle(self) -> str:
        return await self._env.oracle()

    async def advice(self) -> tuple[str, str]:
        return await self._env.advice()

    async def render(self) -> str | bytes:
        return await self._env.render()

    async def close(self) -> None:
        await self._env.close()


@dataclass(frozen=True, slots=True)
class Program:
    """The user's program."""

    command: tuple[str, ...]
    """Command and arguments, or a Python function as `my_module:play`. Empty: a client claims the episode."""
    variables: tuple[str, ...] = ()
    """Further environment variables that it gets."""

    @property
    def is_function(self) -> bool:
        return len(self.command) == 1 and ":" in self.command[0]

    @property
    def argv(self) -> list[str]:
        return (
            [sys.executable, "-m", "agentgym_rl.agent.proxy.client", *self.command]
            if self.is_function
            else [*self.command]
        )

    def environment(self, links: dict[str, str]) -> dict[str, str]:
        """Return the program's environment variables."""
        kept = {name: os.environ[name] for name in (*KEPT_VARIABLES, *self.variables) if name in os.environ}
        if self.is_function:  # what this process can import, the function's process can, too
            kept["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        base = {"OPENAI_BASE_URL": links["base_url"], "OPENAI_API_KEY": links["api_key"], SESSION_URL: links["url"]}
        return kept | base


@dataclass(slots=True)
class RunningProgram:
    """A process with the output that it has written."""

    process: asyncio.subprocess.Process
    output: IO[bytes]
    exited: asyncio.Task[int] = field(init=False)

    def __post_init__(self) -> None:
        self.exited = asyncio.create_task(self.process.wait())

    @classmethod
    async def start(cls, argv: Sequence[str], variables: dict[str, str]) -> RunningProgram:
        output = tempfile.TemporaryFile()  # noqa: SIM115, closed with the program
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                env=variables,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except OSError as error:
            output.close()
            raise ProgramError(f"the program {argv[0]!r} cannot be started: {error.strerror}") from error
        return cls(process, output)

    def tail(self) -> str:
        """Return the end of the output."""
        size = self.output.seek(0, os.SEEK_END)
        self.output.seek(max(0, size - 4 * OUTPUT_SHOWN))
        return self.output.read().decode(errors="replace").strip()[-OUTPUT_SHOWN:]

    async def stop(self, timeout_s: float) -> None:
        """Wait for the program to exit, then kill it and every process that it left behind."""
        try:
            if timeout_s:
                await asyncio.wait([self.exited], timeout=timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            await self.exited
            self.output.close()


class ExternalPolicy:
    """A program that plays one episode through the proxy, or a client that claims it."""

    def __init__(
        self,
        proxy: Proxy,
        program: Program,
        engine: Engine,
        renderer: Renderer,
        sampling: Sampling,
        env: ExternalSession,
    ) -> None:
        self._proxy, self._program, self._env = proxy, program, env
        self._engine, self._renderer, self._sampling = engine, renderer, sampling
        self._session: ProxySession | None = None
        self._running: RunningProgram | None = None
        self._num_recorded = 0
        """Calls of the model that are in the trajectory."""
        self._acted = False

    async def reply(self, messages: list[Message], observation: Observation, limits: Limits) -> Reply:
        if self._session is None:
            await self._start(limits)
        else:
            self._session.answer(self._env.last_step, done=False)
        assert self._session is not None
        submission = await self._next_submission(self._session)
        recorded = self._new_messages()
        if submission is None:
            return Reply([*recorded, observation_message(_text(observation))], None, "max_context")
        self._env.submission, self._acted = submission, True
        *earlier, action = recorded or [
            observation_message(_text(observation)),
            Message("assistant", submission.action),
        ]
        return Reply([*(replace(m, purpose=CALL) for m in earlier[:-1]), earlier[-1]], action)

    def unanswered(self, messages: list[Message], observation: Observation, limits: Limits) -> list[Message]:
        return [observation_message(_text(observation))]

    async def close(self) -> None:
        acted = False
        try:
            if self._session is not None:
                self._proxy.sessions.end(self._session)
                acted = self._session.answer(self._env.last_step, done=True)
                await self._session.model.close()
        finally:
            if self._running is not None:
                # Only a program that was told of the end can be expected to exit.
                await self._running.stop(EXIT_TIMEOUT_S if acted else 0.0)

    async def _start(self, limits: Limits) -> None:
        await self._proxy.start()
        model = RecordedModel(self._engine, self._renderer, self._sampling, limits, uuid.uuid4().hex)
        env = self._env
        task: dict[str, Any] = {
            "env": env.name,
            "instruction": env.instruction,
            "observation": env.last_step.observation,
            "tools": env.tools,
        }
        self._session = ProxySession(model, task)
        self._proxy.sessions.open(self._session, claimable=not self._program.command)
        if self._program.command:
            variables = self._program.environment(self._proxy.links(self._session))
            self._running = await RunningProgram.start(self._program.argv, variables)

    async def _next_submission(self, session: ProxySession) -> Submission | None:
        """Return the program's next action or its ending; None if it failed because the context was full."""
        submitted = asyncio.ensure_future(session.next_submission())
        waiting: set[asyncio.Future[Any]] = {submitted}
        if self._running is not None:
            waiting.add(self._running.exited)
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if submitted.done():
                return submitted.result()
        finally:
            submitted.cancel()
        if session.model.failure is not None:
            raise session.model.failure
        assert self._running is not None
        code = self._running.exited.result()
        if code and session.model.overflowed:
            return None
        if code:
            raise ProgramError(f"the program exited with code {code}: {self._running.tail()}")
        if not self._acted:
            raise ProgramError(
                "the program exited without an action and without a reward: call step or end, or return a number"
            )
        return Submission(ending=Step("", done=True))

    def _new_messages(self) -> list[Message]:
        """Return the messages of the model's calls since the last turn."""
        assert self._session is not None
        calls = self._session.model.calls
        first, self._num_recorded = self._num_recorded, len(calls)
        return stitch(calls)[2 * first : 2 * len(calls)]


def _text(observation: Observation) -> str:
    return observation if isinstance(observation, str) else "\n".join(observation)
