"""Parsing of `eval` options that hold more than one value."""

from __future__ import annotations

from agentgym_rl.agent.engines.openai import Prices
from agentgym_rl.errors import ConfigError


def parse_turns(text: str | None) -> tuple[int, ...]:
    """Parse `2,4,8` into ascending numbers. Return an empty tuple for None: each scenario has its own turns."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"--turns needs whole numbers from 1 on, such as 30 or 2,4,8,16, got {text!r}")
    return tuple(sorted({int(part) for part in parts}))


def parse_prices(prompt: float | None, completion: float | None, cached: float | None) -> Prices | None:
    """Return the prices, or None if none is given. Prompt and completion prices are needed together."""
    if prompt is None and completion is None and cached is None:
        return None
    if prompt is None or completion is None:
        raise ConfigError("prices need both --price-prompt and --price-completion, in dollars per million tokens")
    return Prices(prompt, completion, cached)


def wants_published(text: str | None) -> bool:
    if text not in (None, "published"):
        raise ConfigError(
            f"--compare needs `published`, got {text!r}; to compare two evaluations: agentgym-rl compare A B"
        )
    return text is not None
