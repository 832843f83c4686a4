"""Where the modules meet: builds pools, models, policies and collectors from a config."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym_rl.agent.collect import Collector, Places
from agentgym_rl.agent.engines.base import Engine
from agentgym_rl.agent.policy import EnginePolicy, OraclePolicy, Policy, PolicyFactory, RandomPolicy
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.styles import STYLES, Style
from agentgym_rl.config import AgentConfig, Config, EnvironmentConfig, ModelConfig
from agentgym_rl.environment import catalog
from agentgym_rl.environment.agentgym import read_items
from agentgym_rl.environment.formats import action_format
from agentgym_rl.environment.pool import LocalPool, RemotePool
from agentgym_rl.errors import ConfigError
from agentgym_rl.training.lookup import find_model
from agentgym_rl.types import Collect, EnvPool, EnvSession, Group, Limits, Sampling, Task

if TYPE_CHECKING:
    import torch

Wrap = Callable[[EnvSession], EnvSession]


def _as_it_is(session: EnvSession) -> EnvSession:
    return session


class EnvironmentsPool:
    """Every environment of a run, wherever it lives, behind one pool."""

    def __init__(self, environments: tuple[EnvironmentConfig, ...], agent: AgentConfig) -> None:
        style = STYLES[agent.style]
        self._pools: dict[str, LocalPool | RemotePool] = {}
        self._items = {env.name: _chosen_items(env) for env in environments if env.items}
        for env in environments:
            common: dict[str, Any] = {
                "max_sessions": agent.concurrency,
                "timeout_s": agent.step_timeout_s,
                "action_format": style.action_format,
            }
            if env.url is None:
                self._pools[env.name] = LocalPool({env.name: catalog.load(env.name)}, **common)
            else:
                self._pools[env.name] = RemotePool({env.name: env.url}, _token(env), **common)

    @property
    def num_open(self) -> int:
        return sum(pool.num_open for pool in self._pools.values())

    async def open(self, env: str) -> EnvSession:
        return await self._pools[env].open(env)

    async def items(self, env: str, split: str, subset: str | None = None) -> list[int]:
        if env not in self._items:
            return await self._pools[env].items(env, split, subset)
        if split not in self._items[env]:
            known = ", ".join(self._items[env])
            raise ConfigError(f"environment {env}: items has no split {split!r}, it has {known}: add it, or set split")
        return self._items[env][split]

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))


def _chosen_items(env: EnvironmentConfig) -> dict[str, list[int]]:
    """Items by split as the config names them; what is trained on is never evaluated on."""
    items = {split: read_items(text, env.name, env.url) for split, text in env.items.items()}
    if env.url is None:
        _require_known(env, items)
    both = set(items.get(env.split, ())) & set(items.get(env.eval_split, ()))
    if both and env.split != env.eval_split:
        raise ConfigError(f"environment {env.name}: item {min(both)} is in both {env.split} and {env.eval_split}")
    return items


def _require_known(env: EnvironmentConfig, items: dict[str, list[int]]) -> None:
    """An item that an environment here does not have is a mistake of the recipe, not an episode that fails."""
    there = catalog.load(env.name).splits.values()
    for split, numbers in items.items():
        missing = [item for item in numbers if not any(item in some for some in there)]
        if missing:
            raise ConfigError(f"environment {env.name}: items.{split} names {missing[0]}, which it does not have")


def _token(env: EnvironmentConfig) -> str | None:
    if env.token_variable is None:
        return None
    if env.token_variable not in os.environ:
        raise ConfigError(
            f"environment {env.name}: the variable {env.token_variable} should hold its token, it is not set"
        )
    return os.environ[env.token_variable]


def require_environments(environments: tuple[EnvironmentConfig, ...]) -> None:
    """Raise ConfigError for names, items and tokens that are not there, without opening anything."""
    for env in environments:
        _token(env)
        if env.items:
            _chosen_items(env)
        if env.url is not None:
            continue
        env_class = catalog.load(env.name)
        catalog.CATALOG[env.name].check()
        for split in (env.split, env.eval_split) if not env.items else ():
            for subset in env.subsets or (None,):
                catalog.require_names(env_class, split, subset)


def choose_device(model: ModelConfig) -> tuple[str, torch.dtype]:
    """(device, dtype): CUDA where there is one, else the CPU, unless the config says otherwise."""
    import torch

    device = model.device if model.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"model.device = {device!r} needs a CUDA device, none is here: use 'cpu', or 'auto'")
    return device, getattr(torch, model.dtype)


def load_from(folder: str | Path, model: ModelConfig) -> tuple[Any, Any]:
    """(model, tokenizer) on the device and in the type the config wants."""
    from agentgym_rl.training import lora
    from agentgym_rl.training.model import load_model

    device, dtype = choose_device(model)
    if model.lora is not None and (Path(folder) / "adapter_config.json").is_file():
        assert model.path is not None
        base, tokenizer = load_model(model.path, device=device, dtype=dtype)
        lora.load_adapter(base, Path(folder))
        return base, tokenizer
    return load_model(str(folder), device=device, dtype=dtype)


def limits_of(
    agent: AgentConfig, max_turns: int, room: int | None = None, env: EnvironmentConfig | None = None
) -> Limits:
    """What bounds an episode, by the agent's settings or the environment's own.

    `room` is what the engine can hold: an episode that outgrows it ends as max_context, not as an error.
    """
    most = (env and env.max_context) or agent.max_context
    new = (env and env.max_new_tokens) or agent.max_new_tokens
    return Limits(max_turns=max_turns, max_new_tokens=new, max_context=most if room is None else min(most, room))


def longest_context(config: Config) -> int:
    """Tokens of the longest episode that any of the run's environments allows."""
    return max([config.agent.max_context, *(env.max_context or 0 for env in config.environments)])


def collect_each(
    config: Config, pool: EnvPool, make_policy: PolicyFactory, group_size: int | None, prefix: str, **options: Any
) -> Collect:
    """Episodes of any of the run's environments, in groups of `group_size` or of the size each one wants. All of them
    together are at most `agent.concurrency` at once."""
    options = {"places": places_of(config)} | options
    collectors = {
        env.name: make_collector(
            config, pool, make_policy, group_size or env.group_size or config.rl.group_size, prefix, **options
        )
        for env in config.environments
    }

    async def collect(tasks: list[Task], limits: Limits, seed: int) -> list[Group]:
        """All of one environment: the trainer asks for each with limits of its own."""
        (env,) = {task.env for task in tasks}
        return await collectors[env](tasks, limits, seed)

    return collect


def wrap_of(agent: AgentConfig, inner: Wrap = _as_it_is) -> Wrap:
    """Dresses a session, wrapped in `inner` first, in the config's style and instruction."""
    style: Style = STYLES[agent.style]

    def wrap(session: EnvSession) -> EnvSession:
        if agent.instruction is not None:
            # Only the environment's part: how to write an action is still to be told.
            explain = action_format(style.action_format).explain
            session.instruction = "\n\n".join(text for text in (agent.instruction, explain) if text)
        return style.wrap(inner(session), agent.turns_per_attempt)

    return wrap


def engine_policies(engine: Engine, renderer: Renderer, config: Config, temperature: float) -> PolicyFactory:
    def make(session: EnvSession, seed: int) -> Policy:
        sampling = Sampling(config.agent.max_new_tokens, temperature, seed=seed if config.engine.seeded else None)
        return EnginePolicy(engine, renderer, sampling, instruction=session.instruction)

    return make


def demonstrators(name: str) -> PolicyFactory:
    """Policies to imitate."""
    return {"oracle": lambda session, seed: OraclePolicy(session), "random": RandomPolicy}[name]


def places_of(config: Config) -> Places:
    """Room for the episodes that a run plays at once, for its environments by weight."""
    return Places(config.agent.concurrency, {env.name: env.weight for env in config.environments})


def make_collector(
    config: Config,
    pool: EnvPool,
    make_policy: PolicyFactory,
    group_size: int,
    prefix: str,
    *,
    inner: Wrap = _as_it_is,
    places: Places | None = None,
    **options: Any,
) -> Collector:
    """`inner` wraps sessions before they are dressed in the agent's style. Collectors that play at the same time share
    `places`."""
    agent = config.agent
    return Collector(
        pool,
        make_policy,
        group_size,
        places or places_of(config),
        agent.retries,
        agent.episode_timeout_s,
        wrap=wrap_of(agent, inner),
        prefix=prefix,
        on_timeout=agent.on_timeout,
        **options,
    )


def require_model(model: ModelConfig) -> None:
    """Raise ConfigError for a model that is not there, without loading anything."""
    if model.path is not None:
        find_model(model.path)


def require_recovery(config: Config) -> None:
    """ConfigError where an oracle would fail after its first mistake. What a server's oracle can do is not known."""
    err = any(some is not None and some.mistakes for some in (config.warm_start, config.data))
    for env in config.environments if err else ():
        known = env.url is None and env.name in catalog.CATALOG
        if known and not getattr(catalog.load(env.name), "oracle_recovers", True):
            raise ConfigError(
                f"mistakes: the oracle of {env.name} knows one way only and cannot go on once it has left it: "
                "leave mistakes out, or the environment"
            )


@dataclass(frozen=True, slots=True)
class Items:
    """What there is to play: items by environment and subset."""

    train: dict[str, dict[str, list[int]]]
    held_out: dict[str, dict[str, list[int]]]


async def all_items(pool: EnvPool, environments: tuple[EnvironmentConfig, ...]) -> Items:
    return Items(
        {env.name: await _items_by_subset(pool, env, env.split) for env in environments},
        {env.name: await _items_by_subset(pool, env, env.eval_split) for env in environments},
    )


async def _items_by_subset(pool: EnvPool, env: EnvironmentConfig, split: str) -> dict[str, list[int]]:
    """Items of each subset the config names, or all of them under the environment's name."""
    if not env.subsets:
        return {env.name: await pool.items(env.name, split)}
    found = {subset: await pool.items(env.name, split, subset) for subset in env.subsets}
    empty = [subset for subset, items in found.items() if not items]
    if empty:
        raise ConfigError(f"{env.name} has no items of {', '.join(empty)} in its split {split!r}: leave them out")
    return found
