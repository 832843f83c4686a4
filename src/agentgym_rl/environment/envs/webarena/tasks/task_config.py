"""A task in WebArena's config format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agentgym_rl.errors import ConfigError

SITES = ("SHOPPING", "SHOPPING_ADMIN", "REDDIT", "GITLAB", "MAP", "WIKIPEDIA", "HOMEPAGE")
"""Site names. Environment variables of these names hold the addresses; configs contain `__SHOPPING__` and so on."""
SUBSETS = {"shopping": "Shopping", "shopping_admin": "CMS", "map": "Map", "gitlab": "GitLab", "reddit": "Reddit"}
"""Subset of each site in a config. A task with several sites belongs to several subsets."""


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """One task, with its addresses filled in."""

    task_id: int
    intent: str
    start_urls: tuple[str, ...]
    """Addresses of the first tabs."""
    storage_state: str | None
    """Name of the file with the cookies of a signed-in user."""
    evaluation: Mapping[str, Any]
    """`eval` of the config: eval_types, reference_answers, reference_url, program_html, string_note."""

    @property
    def needs_judge(self) -> bool:
        return "fuzzy_match" in (self.evaluation.get("reference_answers") or {})


def read_task(raw: Mapping[str, Any], addresses: Mapping[str, str]) -> TaskConfig:
    """Return the task of a config with every `__SITE__` replaced. Raise ConfigError if an address is missing."""
    config = _fill_addresses(raw, addresses)
    return TaskConfig(
        task_id=config["task_id"],
        intent=config["intent"],
        start_urls=tuple(config["start_url"].split(" |AND| ")),
        storage_state=config.get("storage_state"),
        evaluation=config["eval"],
    )


def subsets_of(sites: Iterable[str]) -> tuple[str, ...]:
    return tuple(SUBSETS[site] for site in sites if site in SUBSETS)


def _fill_addresses(value: Any, addresses: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for site in SITES:
            placeholder = f"__{site}__"
            if placeholder not in value:
                continue
            if not addresses.get(site):
                raise ConfigError(
                    f"this task needs the site {site}: set the environment variable {site} to its address, "
                    "for example http://localhost:7770"
                )
            value = value.replace(placeholder, addresses[site])
        return value
    if isinstance(value, Mapping):
        return {key: _fill_addresses(item, addresses) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill_addresses(item, addresses) for item in value]
    return value
