"""Routes the turns of a trajectory to the engine that holds its KV cache."""

from __future__ import annotations

from collections.abc import Collection


class SessionRouter:
    """Assigns each session to the engine with the fewest sessions of this host, and keeps it there."""

    def __init__(self, engines: int, first: int = 0) -> None:
        """`first`: tie-break offset, so that hosts do not all pick the same engine."""
        self._num_engines, self._first = engines, first
        self._engine_of: dict[str, int] = {}

    def engine_of(self, session: str, down: Collection[int]) -> int:
        """Return the session's engine. A new session avoids engines that are `down`, unless all are."""
        if session not in self._engine_of:
            counts = [0] * self._num_engines
            for index in self._engine_of.values():
                counts[index] += 1
            up = [i for i in range(self._num_engines) if i not in down] or list(range(self._num_engines))
            self._engine_of[session] = min(up, key=lambda i: (counts[i], (i - self._first) % self._num_engines))
        return self._engine_of[session]

    def remove(self, session: str) -> int | None:
        """Forget the session and return its engine."""
        return self._engine_of.pop(session, None)

    def clear(self) -> None:
        self._engine_of.clear()
