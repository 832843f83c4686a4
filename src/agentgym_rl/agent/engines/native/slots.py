"""Assigns cache slots to trajectories and tracks how much of each slot is valid."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(slots=True)
class Session:
    """One trajectory's slot in the cache."""

    name: str
    slot: int
    token_ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    """The slot holds keys and values of token_ids[:num_cached]."""
    busy: bool = False
    """A reply is being sampled, so the session must not be evicted."""
    released: bool = False
    """It was released while busy."""

    def common_prefix(self, prompt_ids: list[int]) -> int:
        """Return how many tokens of the prompt are cached."""
        length = min(self.num_cached, len(prompt_ids))
        if self.token_ids[:length] == prompt_ids[:length]:
            return length
        return next(i for i in range(length) if self.token_ids[i] != prompt_ids[i])


class SessionTable:
    """Assigns slots, lowest first so that used slots are adjacent. Evicts the least recently used idle session."""

    def __init__(self, max_sessions: int) -> None:
        self.evictions = 0
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self.resize(max_sessions)

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, name: str) -> bool:
        return name in self._sessions

    def resize(self, max_sessions: int) -> None:
        """Forget all sessions, busy ones too, and set the number of slots."""
        self._sessions.clear()
        self._free = list(range(max_sessions))
        self.max_sessions = max_sessions

    def num_reusable(self, name: str, prompt_ids: list[int]) -> int:
        """Return how many tokens of the prompt the session has cached."""
        session = self._sessions.get(name)
        return 0 if session is None else session.common_prefix(prompt_ids)

    def acquire(self, name: str) -> Session | None:
        """Return the session, marked busy, with its own slot; None while every slot is busy."""
        session = self._sessions.get(name)
        if session is None:
            if not self._free and not self._evict():
                return None
            session = self._sessions[name] = Session(name, heapq.heappop(self._free))
        self._sessions.move_to_end(name)
        session.busy = True
        return session

    def finish(self, session: Session) -> None:
        """Keep an idle session for its next turn, unless it was released meanwhile."""
        session.busy = False
        if session.released:
            self.drop(session)

    def release(self, name: str) -> None:
        session = self._sessions.get(name)
        if session is not None and session.busy:
            session.released = True
        elif session is not None:
            self.drop(session)

    def drop(self, session: Session) -> None:
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]
            heapq.heappush(self._free, session.slot)

    def invalidate(self) -> None:
        """Invalidate the whole cache. Busy sessions keep their slots and are computed again."""
        for session in list(self._sessions.values()):
            session.num_cached = 0
            if not session.busy:
                self.drop(session)

    def _evict(self) -> bool:
        for session in self._sessions.values():
            if not session.busy:
                self.drop(session)
                self.evictions += 1
                return True
        return False
