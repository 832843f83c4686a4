"""The catalog of environments, and the items of each split and subset."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from inspect import signature
from typing import Any, cast

from agentgym_rl.environment.agentgym_servers import SERVED
from agentgym_rl.environment.base import HasAgentGymNumbers, TextEnv
from agentgym_rl.environment.own_class import bind, import_class, is_import_path
from agentgym_rl.errors import ConfigError, describe_error, did_you_mean

ENTRY_POINTS = "agentgym_rl.environments"
"""Group of entry points by which an installed package adds environments."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the catalog."""

    attribute: str
    """Class in the package `environment.envs.NAME`, a function there that takes a recipe's kwargs and returns it, or an
    import path. Imported on first use, so that its packages do not slow down other commands."""
    summary: str
    package: str
    """Top-level module it needs beyond this package's own dependencies."""
    extra: str
    """Name of the pip extra that installs it."""
    licence: str
    """Licence of the data or game behind it."""
    check: Callable[[], object] = object
    """Raises ConfigError if something is missing that pip cannot install, such as Chromium."""
    install: str = ""
    """Arguments of pip that install the package, if its own requirements are too heavy for an extra."""


def _chromium() -> str:
    from agentgym_rl.environment.envs.webarena.browser import find_chromium

    return find_chromium()


def _miniwob() -> None:
    from agentgym_rl.environment.envs.miniwob.pages import pages_folder

    pages_folder()
    _chromium()


CATALOG: dict[str, Entry] = {
    "textcraft": Entry(
        "TextCraft",
        "craft a Minecraft item from a list of recipes, some of them distractors",
        package="minecraft_data",
        extra="textcraft",
        licence="MIT (minecraft_data)",
    ),
    "babyai": Entry(
        "BabyAI",
        "follow an instruction in a grid world of rooms, doors, keys and balls",
        package="minigrid",
        extra="babyai",
        licence="Apache-2.0 (minigrid)",
    ),
    "wordle": Entry(
        "Wordle",
        "find a five-letter word in six guesses",
        package="agentgym_rl",
        extra="",
        licence="MIT (wonderwords, SymSpell)",
    ),
    "maze": Entry(
        "Maze",
        "find the way through a maze, seeing only the walls around you",
        package="agentgym_rl",
        extra="",
        licence="Apache-2.0 (our own)",
    ),
    "keydoor": Entry(
        "KeyDoor",
        "fetch the key of the right door: two rooms, thirty words, learned in a minute",
        package="agentgym_rl",
        extra="",
        licence="Apache-2.0 (our own)",
    ),
    "keydoor_duo": Entry(
        "KeyDoorDuo",
        "KeyDoor for two roles: a guide who sees and talks, a walker who acts",
        package="agentgym_rl",
        extra="",
        licence="Apache-2.0 (our own)",
    ),
    "nim": Entry(
        "Nim",
        "take the last stone: a zero-sum game of two roles",
        package="agentgym_rl",
        extra="",
        licence="Apache-2.0 (our own)",
    ),
    "searchqa": Entry(
        "load_searchqa",
        "answer questions of one to three hops by searching a corpus",
        package="tantivy",
        extra="searchqa",
        licence="CC BY 4.0 (GeoNames), Unicode (CLDR)",
    ),
    "debate": Entry(
        "load_debate",
        "two debaters argue about a question of SearchQA, a judge answers it",
        package="tantivy",
        extra="searchqa",
        licence="CC BY 4.0 (GeoNames), Unicode (CLDR)",
    ),
    "sciworld": Entry(
        "SciWorld",
        "carry out science experiments in a simulated house",
        package="scienceworld",
        extra="sciworld",
        licence="Apache-2.0 (scienceworld)",
    ),
    "webarena": Entry(
        "WebArena",
        "do tasks in a real browser: a shop, its administration, a forum, code, a map",
        package="playwright",
        extra="webarena",
        licence="Apache-2.0 (our own; WebArena)",
        check=_chromium,
    ),
    "miniwob": Entry(
        "MiniWob",
        "do small tasks on single web pages in a real browser: click, type, search",
        package="playwright",
        extra="miniwob",
        licence="MIT (MiniWoB++)",
        check=_miniwob,
    ),
    "webshop": Entry(
        "WebShop",
        "buy a product that fits a description, in a shop of our own †",
        package="agentgym_rl",
        extra="",
        licence="Apache-2.0 (our own)",
    ),
    "alfworld": Entry(
        "AlfWorld",
        "find, clean, heat, cool and place things in a household of our own †",
        package="agentgym_rl",
        extra="",
        licence="Apache-2.0 (our own)",
    ),
    "sqlgym": Entry(
        "SqlGym",
        "answer questions with SQL over small databases of our own †",
        package="agentgym_rl",
        extra="",
        licence="Apache-2.0 (our own)",
    ),
    "agentdojo": Entry(
        "load_agentdojo",
        "do a user's tasks with tools for mail, money, chat and travel, also under attack",
        package="agentdojo",
        extra="agentdojo",
        licence="MIT (AgentDojo)",
        install="--no-deps agentdojo",
    ),
    "bfcl": Entry(
        "load_bfcl",
        "do a user's requests with functions of simulated APIs, several in one episode",
        package="bfcl_eval",
        extra="bfcl",
        licence="Apache-2.0 (BFCL)",
        install="--no-deps bfcl-eval",
    ),
}
"""Environments by name. † marks tasks of our own that replace those of a published environment of this name."""


BRIDGES: dict[str, Entry] = {
    "gymnasium": Entry("gymnasium_class", "an environment of Gymnasium", "gymnasium", "gymnasium", "MIT (Gymnasium)"),
    "openenv": Entry(
        "openenv_class", "an environment of an OpenEnv server", "websockets", "openenv", "licence of the server"
    ),
    "mcp": Entry("mcp_class", "the tools of an MCP server", "mcp", "mcp", "licence of the server"),
    "verifiers": Entry(
        "verifiers_class", "an environment of verifiers", "verifiers", "verifiers", "licence of the environment"
    ),
}
"""Entries of the bridges by the prefix of a name, such as gymnasium:FrozenLake-v1. `attribute` is a function of the
module bridges/PREFIX.py; it takes the rest of the name, and the kwargs."""
BRIDGED = {
    "gymnasium:FrozenLake-v1": "cross a frozen lake without falling into a hole",
    "gymnasium:Taxi-v4": "fetch a passenger and bring him to his destination",
    "gymnasium:Blackjack-v1": "get closer to 21 than the dealer",
    "gymnasium:CliffWalking-v1": "walk to the goal along a cliff",
}
"""Environments of other packages that are listed by name."""
_bridged: dict[tuple[str, str], type[TextEnv]] = {}
"""Classes that bridges made: the same name and arguments give the same class."""


def entries() -> dict[str, Entry]:
    """Return the catalog and the environments of installed packages. A name of the catalog keeps its meaning."""
    installed = {point.name: _entry_of(point) for point in entry_points(group=ENTRY_POINTS)}
    bridged = {name: replace(_bridge(name), summary=summary) for name, summary in BRIDGED.items()}
    return {**CATALOG, **{name: entry for name, entry in sorted(installed.items()) if name not in CATALOG}, **bridged}


def is_bridged(name: str) -> bool:
    """Return whether a name has the prefix of a bridge, as in gymnasium:FrozenLake-v1."""
    return name.partition(":")[0] in BRIDGES and ":" in name


def _bridge(name: str) -> Entry:
    return replace(BRIDGES[name.partition(":")[0]], summary=name)


def _load_bridged(name: str, attribute: str, kwargs: Mapping[str, Any]) -> type[TextEnv]:
    key = name, json.dumps(kwargs, sort_keys=True, default=repr)
    if key not in _bridged:
        prefix, _, rest = name.partition(":")
        make = getattr(import_module(f"agentgym_rl.environment.bridges.{prefix}"), attribute)
        try:
            signature(make).bind(rest, **kwargs)
        except TypeError as error:
            takes = ", ".join(list(signature(make).parameters)[1:])
            raise ConfigError(f"environment {name}: kwargs: {error}; it takes {takes}") from None
        _bridged[key] = _made(name, partial(make, rest), kwargs)
    return _bridged[key]


def _entry_of(point: EntryPoint) -> Entry:
    about: Any = point.dist.metadata if point.dist is not None else {}
    summary, package = about.get("Summary") or point.value, about.get("Name") or point.value
    licence = about.get("License-Expression") or about.get("License") or "licence not stated"
    return Entry(point.value, summary, "agentgym_rl", "", f"{licence} ({package})")


def find(name: str) -> Entry:
    """Return the entry of a name of the catalog, of an installed package, or of an import path `my_module:MyEnv`."""
    if name in CATALOG:
        return CATALOG[name]
    if is_bridged(name):
        return _bridge(name)
    if is_import_path(name):
        return Entry(name, name, "agentgym_rl", "", "")
    known = entries()
    if name in known:
        return known[name]
    if name in SERVED:
        raise ConfigError(
            f"environment {name!r} needs AgentGym's server ({SERVED[name].command}): play it with "
            f"url = agentgym+http://127.0.0.1:36001/{name} or --url"
        )
    hint = did_you_mean(name, known) or "; a class of your own is named by its import path, such as my_module:MyEnv"
    raise ConfigError(f"unknown environment {name!r}: known are {', '.join(sorted(known))}{hint}")


def load(name: str, kwargs: Mapping[str, Any] | None = None) -> type[TextEnv]:
    """Return the class of environment `name`, with the arguments of its constructor bound.

    Raise ConfigError if the name is unknown, its packages are missing, or the class or `kwargs` do not fit.
    """
    entry, kwargs = find(name), dict(kwargs or {})
    if find_spec(entry.package) is None:  # checked first: an environment may import it only in its constructor
        extra = f"pip install 'agentgym-rl[{entry.extra}]'"
        command = f"{extra} && pip install {entry.install}" if entry.install else extra
        raise ConfigError(f"environment {name!r} needs the package {entry.package!r}: {command}")
    if is_bridged(name):
        return _load_bridged(name, entry.attribute, kwargs)
    target: Any = _import(name, entry.attribute)
    if isinstance(target, type):
        env_class = cast("type[TextEnv]", target)
        return bind(env_class, kwargs, name) if kwargs or name not in CATALOG else env_class
    try:
        signature(target).bind(**kwargs)
    except TypeError as error:
        takes = ", ".join(signature(target).parameters)
        raise ConfigError(f"environment {name}: kwargs: {error}; it takes {takes}") from None
    return _made(name, target, kwargs)


def _made(name: str, make: Callable[..., Any], kwargs: Mapping[str, Any]) -> type[TextEnv]:
    """Return the class that a function makes from a recipe's kwargs, whose types are not checked before."""
    try:
        return cast("type[TextEnv]", make(**kwargs))
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(f"environment {name}: kwargs {dict(kwargs)} raised {describe_error(error)}") from error


def _import(name: str, attribute: str) -> Any:
    if is_import_path(attribute):
        return import_class(attribute)
    return getattr(import_module(f"agentgym_rl.environment.envs.{name}"), attribute)


def published_item(name: str, number: int) -> int:
    """Return the item here that AgentGym's published lists call `name_number`; ConfigError if there is none."""
    env_class = load(name)
    if not issubclass(env_class, HasAgentGymNumbers):
        raise ConfigError(
            f"{name}_{number} is an item of AgentGym's {name}, whose games or numbers differ from this package's: "
            f"choose items by their number here, such as 0-99, or play AgentGym's own server at "
            f"agentgym+http://HOST:PORT/{name}"
        )
    return env_class.published_item(number)


def require_names(env_class: type[TextEnv], split: str, subset: str | None = None) -> None:
    """Raise ConfigError for a split or a subset that the environment does not have."""
    if split not in env_class.splits:
        known, hint = ", ".join(env_class.splits), did_you_mean(split, env_class.splits)
        raise ConfigError(f"{env_class.name} has no split {split!r}: known are {known}{hint}")
    if subset is not None and subset not in env_class.subsets:
        known = ", ".join(env_class.subsets) or "none"
        hint = did_you_mean(subset, env_class.subsets)
        raise ConfigError(f"{env_class.name} has no subset {subset!r}: known are {known}{hint}")


def items(env_class: type[TextEnv], split: str, subset: str | None = None) -> Sequence[int]:
    """Return the items of a split, ascending: its range, or with a subset a cached tuple."""
    require_names(env_class, split, subset)
    return env_class.splits[split] if subset is None else _subset_items(env_class, split, subset)


@lru_cache(maxsize=64)
def _subset_items(env_class: type[TextEnv], split: str, subset: str) -> tuple[int, ...]:
    return tuple(item for item in env_class.splits[split] if subset in env_class.subsets_of(item))


def class_of(factory: Callable[[], TextEnv]) -> type[TextEnv]:
    """Return the class behind a factory: a class itself, the class of a partial, or that of a new instance."""
    if isinstance(factory, partial):
        return class_of(factory.func)
    if isinstance(factory, type):
        return factory
    env = factory()
    env.close()
    return type(env)
