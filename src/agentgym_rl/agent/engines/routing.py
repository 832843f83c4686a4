"""Routes the turns of an episode to the engine that holds its KV cache, and the episodes of a group to one engine."""

from __future__ import annotations

from collections.abc import Collection, Sequence


class SessionRouter:
    """Keeps each session on one engine.

    A new session goes to the engine that has a session with the same first prompt, such as another episode of its
    group, so that this engine can share the prompt's cache. If there is none, or if that engine has `max_sessions`, it
    goes to the engine with the fewest sessions.
    """

    def __init__(self, engines: int, first: int = 0, max_sessions: int | None = None) -> None:
        """`first`: tie-break offset, so that hosts do not all pick the same engine. Without `max_sessions`, prompts are
        not compared."""
        self._num_engines, self._first, self._max_sessions = engines, first, max_sessions
        self._engine_of: dict[str, int] = {}
        self._sessions_of: dict[int, list[str]] = {}
        """Sessions by hash of their first prompt, oldest first."""
        self._prompt_of: dict[str, int] = {}
        self._counts = [0] * engines

    def engine_of(self, session: str, prompt_ids: Sequence[int], down: Collection[int] = ()) -> int:
        """Return the session's engine. A new session avoids engines that are `down`, unless all are."""
        if session not in self._engine_of:
            up = [i for i in range(self._num_engines) if i not in down] or list(range(self._num_engines))
            key = hash(tuple(prompt_ids)) if self._max_sessions else 0
            relatives = [self._engine_of[name] for name in self._sessions_of.get(key, ())]
            free = [i for i in relatives if i in up and self._counts[i] < (self._max_sessions or 0)]
            fewest = min(up, key=lambda i: (self._counts[i], (i - self._first) % self._num_engines))
            self._engine_of[session] = index = free[0] if free else fewest
            self._counts[index] += 1
            if self._max_sessions:
                self._prompt_of[session] = key
                self._sessions_of.setdefault(key, []).append(session)
        return self._engine_of[session]

    def assigned(self, session: str) -> int | None:
        """Return the session's engine if it has one."""
        return self._engine_of.get(session)

    def remove(self, session: str) -> int | None:
        """Forget the session and return its engine."""
        index = self._engine_of.pop(session, None)
        if index is not None:
            self._counts[index] -= 1
            key = self._prompt_of.pop(session, None)
            if key is not None:
                self._sessions_of[key].remove(session)
                if not self._sessions_of[key]:
                    del self._sessions_of[key]
        return index
