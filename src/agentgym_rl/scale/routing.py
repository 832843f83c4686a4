"""Which engine a trajectory's turns go to: the one that holds its keys and values."""

from __future__ import annotations

from collections.abc import Collection


class Homes:
    """Every session stays where it came to: with the engine that then had fewest of this host's."""

    def __init__(self, engines: int, first: int = 0) -> None:
        """`first`: where this host begins among equally busy ones; if all began with the same, that had most."""
        self._engines, self._first = engines, first
        self._home: dict[str, int] = {}

    def of(self, session: str, down: Collection[int]) -> int:
        """Its engine; a new session's is none of those that are `down`, unless all are."""
        if session not in self._home:
            counts = [0] * self._engines
            for index in self._home.values():
                counts[index] += 1
            up = [i for i in range(self._engines) if i not in down] or list(range(self._engines))
            self._home[session] = min(up, key=lambda i: (counts[i], (i - self._first) % self._engines))
        return self._home[session]

    def leave(self, session: str) -> int | None:
        """The engine it had."""
        return self._home.pop(session, None)

    def clear(self) -> None:
        self._home.clear()
