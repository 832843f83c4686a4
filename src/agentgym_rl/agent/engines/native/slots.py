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
    """Assigns slots, lowest first so that used slots are adjacent. Evicts the least recently used idle session.

    A released session can be acquired again by its name until its slot is given to another one; that of the session
    released first is given first. Slots are used for twice as many sessions as were alive at once.
    """

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
        self._released: dict[str, Session] = {}
        """Released sessions whose slots are free, in the order of their release."""
        self._free = list(range(max_sessions))
        self._most_alive = 0
        self.max_sessions = max_sessions

    def num_reusable(self, name: str, prompt_ids: list[int]) -> int:
        """Return how many tokens of the prompt the session has cached."""
        session = self._sessions.get(name) or self._released.get(name)
        return 0 if session is None else session.common_prefix(prompt_ids)

    def acquire(self, name: str) -> Session | None:
        """Return the session, marked busy, with its own slot; None while every slot is busy."""
        session = self._sessions.get(name)
        if session is None:
            if not self._free and not self._released and not self._evict():
                return None
            released = self._released.pop(name) if name in self._released else None
            session = self._sessions[name] = released or Session(name, self._take_slot())
        self._sessions.move_to_end(name)
        session.busy = True
        return session

    def finish(self, session: Session) -> None:
        """Keep an idle session for its next turn, unless it was released meanwhile."""
        session.busy = False
        if session.released:
            self._retire(session)

    def release(self, name: str) -> None:
        session = self._sessions.get(name)
        if session is not None and session.busy:
            session.released = True
        elif session is not None:
            self._retire(session)

    def drop(self, session: Session) -> None:
        """Free the slot of a session and forget its contents."""
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]
            heapq.heappush(self._free, session.slot)

    def invalidate(self) -> None:
        """Invalidate the whole cache. Busy sessions keep their slots and are computed again."""
        self.forget_released()
        for session in list(self._sessions.values()):
            session.num_cached = 0
            if not session.busy:
                self.drop(session)

    def forget_released(self) -> None:
        """Forget the contents of released sessions."""
        for session in self._released.values():
            heapq.heappush(self._free, session.slot)
        self._released.clear()

    def _retire(self, session: Session) -> None:
        """Release an idle session."""
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]
            session.released = False
            self._released[session.name] = session

    def _take_slot(self) -> int:
        self._most_alive = max(self._most_alive, len(self._sessions) + 1)
        if self._free and len(self._sessions) + len(self._released) < 2 * self._most_alive:
            return heapq.heappop(self._free)
        return self._released.pop(next(iter(self._released))).slot

    def _evict(self) -> bool:
        for session in self._sessions.values():
            if not session.busy:
                self.drop(session)
                self.evictions += 1
                return True
        return False
