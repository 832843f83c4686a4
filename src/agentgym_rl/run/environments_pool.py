"""The environments of a run behind one pool."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from agentgym_rl.agent.styles import STYLES
from agentgym_rl.config import AgentConfig, EnvironmentConfig
from agentgym_rl.environment import catalog
from agentgym_rl.environment.agentgym import is_agentgym, read_items
from agentgym_rl.environment.base import TextEnv
from agentgym_rl.environment.pool import LocalPool, RemotePool
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import EnvSession


class EnvironmentsPool:
    """Every environment of a run, in this process or on a server."""

    def __init__(self, environments: tuple[EnvironmentConfig, ...], agent: AgentConfig) -> None:
        self._pools: dict[str, LocalPool | RemotePool] = {}
        self._items = {env.name: read_recipe_items(env) for env in environments if env.items}
        for env in environments:
            settings: dict[str, Any] = {
                "max_sessions": agent.sessions,
                "timeout_s": agent.step_timeout_s,
                "action_format": STYLES[agent.style].action_format,
            }
            if env.url is None:
                self._pools[env.name] = LocalPool({env.name: load_class(env)}, **settings)
            else:
                self._pools[env.name] = RemotePool({env.name: env.url}, read_token(env), **settings)

    @property
    def num_open(self) -> int:
        """Sessions that are open now."""
        return sum(pool.num_open for pool in self._pools.values())

    async def open(self, env: str) -> EnvSession:
        """Open a session of `env`."""
        return await self._pools[env].open(env)

    async def items(self, env: str, split: str, subset: str | None = None) -> list[int]:
        """Return the items of a split that the recipe names, or the environment's own."""
        if env not in self._items:
            return await self._pools[env].items(env, split, subset)
        if split not in self._items[env]:
            known = ", ".join(self._items[env])
            raise ConfigError(f"environment {env}: items has no split {split!r}, it has {known}: add it, or set split")
        return self._items[env][split]

    async def close(self) -> None:
        """Close every pool."""
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))


def load_class(env: EnvironmentConfig) -> type[TextEnv]:
    """Return the class of an environment in this process, with the recipe's arguments bound."""
    return catalog.load(env.source or env.name, env.kwargs)


async def roles_in(env: EnvironmentConfig) -> tuple[str, ...]:
    """Return the roles of an environment, in this process or on a server; none if it has a single agent."""
    if env.url is None:
        return tuple(getattr(load_class(env), "roles", ()))
    if is_agentgym(env.url):
        return ()
    pool = RemotePool({env.name: env.url}, read_token(env), 1)
    try:
        return tuple((await pool.info(env.name)).get("roles") or ())
    finally:
        await pool.close()


def read_recipe_items(env: EnvironmentConfig) -> dict[str, list[int]]:
    """Return the items that the recipe names, by split. No item may be both trained and evaluated on."""
    items = {split: read_items(text, env.source or env.name, env.url) for split, text in env.items.items()}
    if env.url is None:
        _require_known(env, items)
    both = set(items.get(env.split, ())) & set(items.get(env.eval_split, ()))
    if both and env.split != env.eval_split:
        raise ConfigError(f"environment {env.name}: item {min(both)} is in both {env.split} and {env.eval_split}")
    return items


def _require_known(env: EnvironmentConfig, items: dict[str, list[int]]) -> None:
    """Raise ConfigError for an item that a local environment does not have."""
    known = load_class(env).splits.values()
    for split, numbers in items.items():
        missing = [item for item in numbers if not any(item in known_items for known_items in known)]
        if missing:
            raise ConfigError(f"environment {env.name}: items.{split} names {missing[0]}, which it does not have")


def read_token(env: EnvironmentConfig) -> str | None:
    """Return the bearer token of a server, from the environment variable that the recipe names."""
    if env.token_variable is None:
        return None
    if env.token_variable not in os.environ:
        raise ConfigError(
            f"environment {env.name}: the variable {env.token_variable} should hold its token, it is not set"
        )
    return os.environ[env.token_variable]
