"""The sites' data: generated once per process and copied for every episode."""

from __future__ import annotations

import secrets
import sqlite3
import threading
from dataclasses import dataclass
from functools import lru_cache

from agentgym_rl.environment.envs.webarena.sites import code_data, forum_data, map_data, shop_data

TODAY = "2026-03-16"
"""Current date in every episode."""


@dataclass(slots=True)
class Store:
    """One episode's data."""

    db: sqlite3.Connection
    flash: str = ""
    """Message about the last change, shown on the next page."""


@lru_cache(maxsize=1)
def pristine() -> bytes:
    """Return the serialised database of a fresh episode."""
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
    """Stores of the running episodes by token. Sessions' threads open and close them; the server reads them."""

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
        # Do not close the connection: a request may still use it. It is freed with its last reference.
        with self._lock:
            self._stores.pop(token, None)
