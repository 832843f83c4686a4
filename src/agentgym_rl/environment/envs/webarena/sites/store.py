"""The sites' data: generated once per process and copied for every episode, so that each starts from the same."""

from __future__ import annotations

import secrets
import sqlite3
import threading
from dataclasses import dataclass
from functools import lru_cache

from agentgym_rl.environment.envs.webarena.sites import code_data, forum_data, map_data, shop_data

TODAY = "2026-03-16"
"""The day on which every episode takes place."""


@dataclass(slots=True)
class Store:
    """One episode's data."""

    db: sqlite3.Connection
    flash: str = ""
    """What the next page tells about the last change."""


@lru_cache(maxsize=1)
def pristine() -> bytes:
    """The database of a fresh episode."""
    db = sqlite3.connect(":memory:")
    for data in (shop_data, forum_data, code_data, map_data):
        db.executescript(data.SCHEMA)
        data.fill(db)
    db.commit()
    content = db.serialize()
    db.close()
    return content


def fresh_database() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
    db.deserialize(pristine())
    db.row_factory = sqlite3.Row
    return db


class Episodes:
    """The running episodes' stores by their tokens. Opened and closed in sessions' threads, read in the server's."""

    def __init__(self) -> None:
        self._stores: dict[str, Store] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._stores)

    def open(self) -> str:
        token = secrets.token_hex(16)
        store = Store(fresh_database())
        with self._lock:
            self._stores[token] = store
        return token

    def get(self, token: str) -> Store | None:
        return self._stores.get(token)

    def close(self, token: str) -> None:
        # The connection is not closed here: a request that still holds it ends in peace, then memory is given back.
        with self._lock:
            self._stores.pop(token, None)
