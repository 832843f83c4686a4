"""An external agent: a program that calls the model through the proxy and drives the episode.

The loop stays `rollout`. A turn of `ExternalPolicy` is everything that the program does up to its next action. The
reply of a turn is the last call of the model before that action; earlier calls of the turn have the purpose `call`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Literal

from agentgym_rl.agent.engines.base import Engine
from agentgym_rl.agent.policy import Policy, Reply, observation_message
from agentgym_rl.agent.proxy.app import Proxy
from agentgym_rl.agent.proxy.chat import RecordedModel
from agentgym_rl.agent.proxy.demonstrated import DemonstratedConversation, DemonstratedModel
from agentgym_rl.agent.proxy.programs import Program, RunningProgram
from agentgym_rl.agent.proxy.sessions import EpisodeModel, ProxySession, Submission
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.segments import Stitcher
from agentgym_rl.agent.session_wrapper import SessionWrapper
from agentgym_rl.common.chat_messages import PLAYED_ACTION, PLAYED_CALLS
from agentgym_rl.errors import ProgramError
from agentgym_rl.types import EnvSession, Limits, Message, Observation, Sampling, Step, ToolCall

CALL = "call"
"""Purpose of the model calls of a turn that are not its last."""
EXIT_TIMEOUT_S = 10.0
"""Seconds that a program has to exit after its episode has ended."""


class ExternalSession(SessionWrapper):
    """An environment whose next step is the program's submission, whatever the reply says."""

    def __init__(self, env: EnvSession) -> None:
        super().__init__(env)
        self.submission: Submission | None = None
        self.last_step = Step("")
        """The environment's last answer."""

    async def reset(self, item: int) -> Step:
        self.last_step = await self._env.reset(item)
        return self.last_step

    async def step(self, text: str) -> Step:
        submission, self.submission = self.submission, None
        played: dict[str, Any] = {}
        if submission is None:  # a policy that is no program
            self.last_step = await self._env.step(text)
        elif submission.ending is not None:
            self.last_step = submission.ending
        elif submission.calls is not None:
            self.last_step = await self._env.call(submission.calls)
            played = {PLAYED_CALLS: [asdict(call) for call in submission.calls]}
        else:
            self.last_step = await self._env.step(submission.action)
            played = {PLAYED_ACTION: submission.action}
        # The loop pairs results with the calls of a reply, but the program may have written its calls itself.
        return replace(self.last_step, results=[], info=self.last_step.info | played)

    async def call(self, calls: list[ToolCall], message: str = "") -> Step:
        self.last_step = await self._env.call(calls, message)
        return self.last_step


class ExternalPolicy:
    """A program that plays one episode through the proxy, or a client that claims it.

    `make_model` makes the model that the program calls.
    """

    def __init__(
        self, proxy: Proxy, program: Program, make_model: Callable[[Limits], EpisodeModel], env: ExternalSession
    ) -> None:
        self._proxy, self._program, self._env = proxy, program, env
        self._make_model = make_model
        self._session: ProxySession | None = None
        self._running: RunningProgram | None = None
        self._stitcher = Stitcher()
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
            if not recorded:
                return Reply([observation_message(_text(observation))], None, "max_context")
            # The calls of the unfinished turn are trained on, so the last of them is its reply: a turn with a reward.
            return _turn(recorded, "max_context")
        self._env.submission, self._acted = submission, True
        written = Message("assistant", submission.action, tool_calls=submission.calls).text
        return _turn(recorded or [observation_message(_text(observation)), Message("assistant", written)])

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
        env = self._env
        task: dict[str, Any] = {
            "env": env.name,
            "instruction": env.instruction,
            "observation": env.last_step.observation,
            "tools": env.tools,
        }
        self._session = ProxySession(self._make_model(limits), task)
        self._proxy.sessions.open(self._session, claimable=not self._program.command)
        if self._program.command:
            self._running = await self._program.start(self._proxy.links(self._session))

    async def _next_submission(self, session: ProxySession) -> Submission | None:
        """Return the program's next action or its ending; None if it failed because the context was full."""
        submitted = asyncio.ensure_future(session.next_submission())
        waiting: set[asyncio.Future[Any]] = {submitted}
        if self._running is not None:
            waiting.add(self._running.exited)
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if submitted.done():
                submission = submitted.result()
                # A reward after a failure of the engine would blame the program for it.
                if submission.ending is None or session.model.failure is None:
                    return submission
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
        calls = self._session.model.calls[self._num_recorded :]
        self._num_recorded += len(calls)
        return [message for call in calls for message in self._stitcher.add(call)]


def sampled_model(engine: Engine, renderer: Renderer, sampling: Sampling) -> Callable[[Limits], EpisodeModel]:
    """Return a factory of models that sample from `engine` and record every call."""
    return lambda limits: RecordedModel(engine, renderer, sampling, limits, uuid.uuid4().hex)


class DemonstratingPolicy(ExternalPolicy):
    """A program whose calls of the model are answered by a demonstrator: an oracle or random play."""

    def __init__(self, proxy: Proxy, program: Program, demonstrator: Policy, env: ExternalSession) -> None:
        super().__init__(proxy, program, self._demonstrated, env)
        self._demonstrator = demonstrator
        self._model: DemonstratedModel | None = None
        self.episode: list[Message] = []
        """The messages of the episode's trajectory, to find the policy that played it."""

    @property
    def conversations(self) -> list[DemonstratedConversation]:
        """Conversations of the program with the model."""
        return self._model.conversations if self._model is not None else []

    async def reply(self, messages: list[Message], observation: Observation, limits: Limits) -> Reply:
        self.episode = messages
        reply = await super().reply(messages, observation, limits)
        assert self._model is not None
        self._model.mark_action()
        return reply

    def _demonstrated(self, limits: Limits) -> EpisodeModel:
        self._model = DemonstratedModel(self._demonstrator, limits)
        return self._model


def _turn(recorded: list[Message], finish: Literal["stop", "max_context"] = "stop") -> Reply:
    """Return the messages of a turn's calls as a reply: the last call is the action."""
    *earlier, prompt, action = recorded
    return Reply([*(replace(m, purpose=CALL) for m in earlier), prompt], action, finish)


def _text(observation: Observation) -> str:
    return observation if isinstance(observation, str) else "\n".join(observation)
