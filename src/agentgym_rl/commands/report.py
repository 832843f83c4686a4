"""The commands `report` and `compare`: they read folders and need no model."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from agentgym_rl.commands.eval_options import wants_published
from agentgym_rl.common.screen import Screen
from agentgym_rl.evaluation.compare import compare as compare_sides
from agentgym_rl.evaluation.compare import load_side
from agentgym_rl.evaluation.folder import read_evaluation, write_atomically, writing
from agentgym_rl.evaluation.report import entry_of, markdown, published_entries
from agentgym_rl.evaluation.terminal import print_comparison, print_report

PLAIN_WIDTH = 140
"""Where there is no terminal to ask."""


def report(folders: list[Path], compared: str | None, out: Path | None) -> None:
    """Print several evaluations as one table, and write it where asked."""
    published = wants_published(compared)
    entries = [entry_of(read_evaluation(folder)) for folder in folders]
    names = [entry.name for entry in entries]
    entries = [
        replace(entry, name=f"{entry.name} ({folder.resolve().name})") if names.count(entry.name) > 1 else entry
        for entry, folder in zip(entries, folders, strict=True)
    ]
    source = ""
    if published:
        source, others = published_entries(plan.scenario for entry in entries for plan in entry.plans)
        entries += others
    print_report(_console(), entries, source)
    if out is not None:
        with writing(out):
            write_atomically(out, markdown(entries, source))


def compare(first: Path, second: Path, max_turns: int | None, *, as_json: bool) -> None:
    """Print the paired comparison of two evaluations."""
    comparison = compare_sides(load_side(first, max_turns), load_side(second, max_turns))
    if as_json:
        sys.stdout.write(json.dumps(comparison, indent=2, ensure_ascii=False) + "\n")
    else:
        print_comparison(_console(), comparison)


def _console() -> Screen:
    console = Screen(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console
