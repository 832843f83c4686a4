"""Settings as `section.key=value`: TOML literals or bare strings, set in a nested dict."""

from __future__ import annotations

import tomllib
from typing import Any

from agentgym_rl.errors import ConfigError


def parse_assignments(options: list[str]) -> dict[str, Any]:
    """Return `key=value` options as a dict. Values are TOML literals or bare strings, as in overrides."""
    values: dict[str, Any] = {}
    for option in options:
        apply_override(values, option)
    return values


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one dotted key in place. A number in the key is an index into a list: environments.0.name=textcraft."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: expected key=value, for example rl.steps=50")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = key.strip().split(".")
    node: Any = raw
    for part in parents:
        node = _descend(node, part, override)
    if isinstance(node, list):
        node[_index(node, last, override)] = value
    else:
        node[last] = value


def _descend(node: Any, part: str, override: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, part, override)]
    child = node.setdefault(part, {})
    if not isinstance(child, dict | list):
        raise ConfigError(f"override {override!r}: {part} is a value, not a section")
    return child


def _index(node: list[Any], part: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(node):
        raise ConfigError(f"override {override!r}: {part} is not a place in a list of {len(node)}")
    return int(part)
