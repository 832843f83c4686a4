"""The command `check-env`: check an environment and say what to change."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from agentgym_rl.environment import catalog, own_class
from agentgym_rl.environment.conformance import Finding, check
from agentgym_rl.errors import ConfigError

MARKS = {"ok": ("✓", "green"), "advice": ("!", "yellow"), "error": ("✗", "red")}


def findings_of(name: str, kwargs: Mapping[str, Any]) -> list[Finding]:
    """Return a finding per check. If the class has the wrong shape, only its problems."""
    is_class = own_class.is_import_path(name) and not catalog.is_bridged(name)
    env_class = own_class.import_class(name) if is_class else None
    problems = own_class.all_problems(env_class, kwargs, name) if env_class is not None else []
    if problems:
        return [Finding("class", "error", problem) for problem in problems]
    try:
        catalog.load(name, kwargs)
    except ConfigError as error:
        return [Finding("class", "error", str(error))]
    return [Finding("class", "ok", "attributes and methods are there"), *asyncio.run(check(name, kwargs))]


def print_findings(name: str, findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    from agentgym_rl.common.screen import Screen

    table = Table.grid(padding=(0, 2))
    for finding in findings:
        mark, colour = MARKS[finding.level]
        table.add_row(Text(mark, colour), Text(finding.check, "bold"), Text(finding.text))
    screen = Screen(highlight=False)
    screen.print(table)
    errors = sum(finding.level == "error" for finding in findings)
    screen.print(Text(f"{name}: {errors} to fix" if errors else f"{name} is ready", "red" if errors else "green"))


def as_json(findings: list[Finding]) -> list[dict[str, str]]:
    return [asdict(finding) for finding in findings]
