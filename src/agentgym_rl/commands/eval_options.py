"""Parsing of `eval` options that hold more than one value."""

from __future__ import annotations

from agentgym_rl.agent.engines.openai import Prices
from agentgym_rl.errors import ConfigError


def parse_turns(text: str | None) -> tuple[int, ...]:
    """Parse `2,4,8` into ascending numbers. Return an empty tuple for None: each scenario has its own turns."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--turns needs whole numbers from 1 on, such as 30 or 2,4,8,16, got {text!r}")
    return tuple(sorted({int(part) for part in parts}))


def parse_prices(prompt: float | None, completion: float | None, cached: float | None) -> Prices | None:
    """Return the prices, or None if none is given. Prompt and completion prices are needed together."""
    if prompt is None and completion is None and cached is None:
        return None
    if prompt is None or completion is None:
        raise ConfigError("prices need both --price-prompt and --price-completion, in dollars per million tokens")
    return Prices(prompt, completion, cached)


def parse_urls(given: list[str] | str | None, suite: str | None) -> tuple[str | None, dict[str, str]]:
    """Return the server of --env, or with a suite the servers by environment, from `NAME=URL` each."""
    given = [given] if isinstance(given, str) else given  # the Python API takes one address as a string
    if not given or suite is None:
        if len(given or ()) > 1:
            raise ConfigError(f"--url may be given once without --suite, got {len(given or ())}: leave the others out")
        return (given[0] if given else None), {}
    named = [text.partition("=") for text in given]
    if not all(name.isidentifier() and url for name, _, url in named):
        raise ConfigError(
            f"--url needs NAME=URL with a suite, such as webshop=agentgym+http://127.0.0.1:36001/webshop, got {given}"
        )
    return None, {name: url for name, _, url in named}


def wants_published(text: str | None) -> bool:
    if text not in (None, "published"):
        raise ConfigError(
            f"--compare needs `published`, got {text!r}; to compare two evaluations: agentgym-rl compare A B"
        )
    return text is not None
