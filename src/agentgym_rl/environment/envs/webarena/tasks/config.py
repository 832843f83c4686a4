"""A task in WebArena's config format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agentgym_rl.errors import ConfigError

SITES = ("SHOPPING", "SHOPPING_ADMIN", "REDDIT", "GITLAB", "MAP", "WIKIPEDIA", "HOMEPAGE")
"""Names of the sites: environment variables that hold their addresses, and `__SHOPPING__` and so on in a config."""
SUBSETS = {"shopping": "Shopping", "shopping_admin": "CMS", "map": "Map", "gitlab": "GitLab", "reddit": "Reddit"}
"""Site in a config -> name of the subset; what needs several sites belongs to several subsets."""


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """One task, its addresses filled in."""

    task_id: int
    sites: tuple[str, ...]
    intent: str
    start_urls: tuple[str, ...]
    """One tab each."""
    storage_state: str | None
    """File with the cookies of somebody signed in, relative to where these are kept."""
    evaluation: Mapping[str, Any]
    """`eval` of the config: eval_types, reference_answers, reference_url, program_html, string_note."""

    @property
    def needs_judge(self) -> bool:
        return "fuzzy_match" in (self.evaluation.get("reference_answers") or {})


def read(raw: Mapping[str, Any], addresses: Mapping[str, str]) -> TaskConfig:
    """A config with every `__SITE__` replaced; ConfigError when one is needed whose address is unknown."""
    filled = _fill(raw, addresses)
    return TaskConfig(
        task_id=filled["task_id"],
        sites=tuple(filled["sites"]),
        intent=filled["intent"],
        start_urls=tuple(filled["start_url"].split(" |AND| ")),
        storage_state=filled.get("storage_state"),
        evaluation=filled["eval"],
    )


def subsets_of(sites: Iterable[str]) -> tuple[str, ...]:
    return tuple(SUBSETS[site] for site in sites if site in SUBSETS)


def _fill(value: Any, addresses: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for site in SITES:
            mark = f"__{site}__"
            if mark not in value:
                continue
            if not addresses.get(site):
                raise ConfigError(
                    f"this task needs the site {site}: set the environment variable {site} to its address, "
                    "for example http://localhost:7770"
                )
            value = value.replace(mark, addresses[site])
        return value
    if isinstance(value, Mapping):
        return {key: _fill(inner, addresses) for key, inner in value.items()}
    if isinstance(value, list):
        return [_fill(inner, addresses) for inner in value]
    return value
