"""Sessions of the proxy: one episode each, between the program that plays it and the policy that records it."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentgym_rl.agent.proxy.chat import ChatReply, ChatRequest, RequestError, session_ended
from agentgym_rl.agent.segments import Call
from agentgym_rl.types import Step, ToolCall

MAX_ENDED = 4096
"""Ended sessions that are remembered, to tell a late call from one of an unknown session."""


@dataclass(slots=True)
class Submission:
    """An action of the program, or the end of the episode that it declares."""

    action: str = ""
    calls: list[ToolCall] | None = None
    """Tool calls instead of a text action."""
    ending: Step | None = None
    """Last step of the episode, judged by the program."""
    answer: asyncio.Future[dict[str, Any]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Set to the environment's answer."""


class EpisodeModel(Protocol):
    """The model of one episode: one that samples and records, or a demonstrator in its place."""

    calls: list[Call]
    overflowed: bool
    failure: Exception | None

    async def complete(self, request: ChatRequest) -> ChatReply: ...

    async def close(self) -> None: ...


class ProxySession:
    """One episode: its model, its task, and the submissions of its program."""

    def __init__(self, model: EpisodeModel, task: dict[str, Any]) -> None:
        self.id = secrets.token_hex(8)
        self.key = f"sk-{secrets.token_urlsafe(24)}"
        self.model = model
        self.task = task
        """Task for the program: instruction, first observation, tools."""
        self._submissions: asyncio.Queue[Submission] = asyncio.Queue()
        self._pending: Submission | None = None
        self.ended = False

    async def submit(self, submission: Submission) -> dict[str, Any]:
        """Hand an action to the policy and return the environment's answer."""
        if self.ended:
            raise session_ended()
        if self._pending is not None:
            raise RequestError(409, "an action of this session is being played: wait for its answer", "conflict")
        self._pending = submission
        self._submissions.put_nowait(submission)
        return await asyncio.shield(submission.answer)

    async def next_submission(self) -> Submission:
        return await self._submissions.get()

    def answer(self, step: Step, *, done: bool) -> bool:
        """Answer the pending submission. Return whether there was one."""
        pending, self._pending = self._pending, None
        if pending is None:
            return False
        results = {"results": step.results} if step.results else {}
        info = {key: value for key, value in step.info.items() if key != "state_key"}  # may hold what is hidden
        pending.answer.set_result(
            {"observation": step.observation, "reward": step.reward, "done": done, "info": info, **results}
        )
        return True


class Sessions:
    """All sessions of a proxy, by id and by key. Sessions without a program wait here for a client."""

    def __init__(self) -> None:
        self._by_id: dict[str, ProxySession] = {}
        self._by_key: dict[str, ProxySession] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        """Keys of ended sessions by id. They distinguish a late call from one with a wrong key."""
        self._unclaimed: deque[ProxySession] = deque()
        self._opened = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, session: ProxySession, *, claimable: bool) -> None:
        """Add a session. A claimable one is given to the next client that asks."""
        self._closed = False
        self._by_id[session.id] = self._by_key[session.key] = session
        if claimable:
            self._unclaimed.append(session)
            self._opened.set()

    def end(self, session: ProxySession) -> None:
        """Remove a session. Later calls get status 410."""
        session.ended = True
        if self._by_id.pop(session.id, None) is None:
            return
        del self._by_key[session.key]
        if session in self._unclaimed:
            self._unclaimed.remove(session)
        self._ended[session.id] = session.key
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def close(self) -> None:
        """Answer waiting clients: there will be no further session."""
        self._closed = True
        self._opened.set()

    async def claim(self, timeout_s: float) -> ProxySession | None:
        """Return the session that waits longest for a client, or None if none came before the timeout.

        Raise RequestError if the run has ended.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if self._closed:
                        raise RequestError(410, "the run has ended: there are no further episodes", "run_ended")
                    if self._unclaimed:
                        return self._unclaimed.popleft()
                    self._opened.clear()
                    await self._opened.wait()
        except TimeoutError:
            return None

    def find(self, session_id: str | None, key: str) -> ProxySession:
        """Return the session of an id and its key, or of the key alone. Raise RequestError if there is none."""
        if session_id is None:
            session = self._by_key.get(key)
            expected = key if session is not None or key in self._ended.values() else None
        else:
            session = self._by_id.get(session_id)
            expected = self._ended.get(session_id) if session is None else session.key
            if expected is None:
                raise RequestError(404, f"there is no session {session_id[:80]!r}", "session_not_found")
        if expected is None or not secrets.compare_digest(expected.encode(), key.encode()):
            raise RequestError(401, "the API key is not the key of a session: use OPENAI_API_KEY", "invalid_api_key")
        if session is None:
            raise session_ended()
        return session
