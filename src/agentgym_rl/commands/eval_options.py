"""Reading the options of `eval` that are more than one value."""

from __future__ import annotations

from agentgym_rl.agent.engines.openai import Prices
from agentgym_rl.errors import ConfigError


def turns_of(text: str | None) -> tuple[int, ...]:
    """`2,4,8` as ascending numbers; nothing for each scenario's own."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"--turns needs whole numbers from 1 on, such as 30 or 2,4,8,16, got {text!r}")
    return tuple(sorted({int(part) for part in parts}))


def prices_of(prompt: float | None, completion: float | None, cached: float | None) -> Prices | None:
    """Prices where they are given: both of prompt and completion, or none."""
    if prompt is None and completion is None and cached is None:
        return None
    if prompt is None or completion is None:
        raise ConfigError("prices need both --price-prompt and --price-completion, in dollars a million tokens")
    return Prices(prompt, completion, cached)


def wants_published(text: str | None) -> bool:
    if text not in (None, "published"):
        raise ConfigError(
            f"--compare knows only `published`, got {text!r}; for two of your own: agentgym-rl compare A B"
        )
    return text is not None
