"""The catalog of environments, and the items of each split and subset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import cast

from agentgym_rl.environment.base import HasAgentGymNumbers, TextEnv
from agentgym_rl.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the catalog."""

    attribute: str
    """Class in the package `environment.envs.NAME`, or a function there that returns it. Imported on first use, so that
    its packages do not slow down other commands."""
    summary: str
    package: str
    """Top-level module it needs beyond this package's own dependencies."""
    extra: str
    """Name of the pip extra that installs it."""
    licence: str
    """Licence of the data or game behind it."""
    check: Callable[[], object] = object
    """Raises ConfigError if something is missing that pip cannot install, such as Chromium."""


def _chromium() -> str:
    from agentgym_rl.environment.envs.webarena.browser import find_chromium

    return find_chromium()


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
    "searchqa": Entry(
        "load_searchqa",
        "answer questions of one to three hops by searching a corpus",
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
}


def load(name: str) -> type[TextEnv]:
    """Return the class of environment `name`. Raise ConfigError if it is unknown or its packages are missing."""
    if name not in CATALOG:
        known = ", ".join(sorted(CATALOG))
        raise ConfigError(f"unknown environment {name!r}: known are {known}{did_you_mean(name, CATALOG)}")
    entry = CATALOG[name]
    if find_spec(entry.package) is None:  # checked first: an environment may import it only in its constructor
        raise ConfigError(
            f"environment {name!r} needs the package {entry.package!r}: pip install 'agentgym-rl[{entry.extra}]'"
        )
    env_class = getattr(import_module(f"agentgym_rl.environment.envs.{name}"), entry.attribute)
    return cast("type[TextEnv]", env_class if isinstance(env_class, type) else env_class())


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
