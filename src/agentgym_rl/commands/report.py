"""The commands `report` and `compare`. They read evaluation folders and need no model."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from agentgym_rl.commands.eval_options import wants_published
from agentgym_rl.common.files import write_atomically
from agentgym_rl.common.screen import Screen
from agentgym_rl.evaluation.compare import compare as compare_sides
from agentgym_rl.evaluation.compare import load_side
from agentgym_rl.evaluation.folder import explain_write_errors, read_evaluation
from agentgym_rl.evaluation.report import entry_of, markdown, published_entries
from agentgym_rl.evaluation.terminal import print_comparison, print_report

PLAIN_WIDTH = 140
"""Columns of the output if it is not a terminal."""


def report(folders: list[Path], compared: str | None, out: Path | None) -> None:
    """Print several evaluations as one table. Write it to `out` as Markdown, if given."""
    published = wants_published(compared)
    entries = [entry_of(read_evaluation(folder)) for folder in folders]
    names = [entry.name for entry in entries]
    entries = [
        replace(entry, name=f"{entry.name} ({folder.resolve().name})") if names.count(entry.name) > 1 else entry
        for entry, folder in zip(entries, folders, strict=True)
    ]
    source = ""
    if published:
        source, published_rows = published_entries(plan.scenario for entry in entries for plan in entry.plans)
        entries += published_rows
    print_report(_console(), entries, source)
    if out is not None:
        with explain_write_errors(out):
            write_atomically(out, markdown(entries, source).encode())


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
