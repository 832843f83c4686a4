"""The same tables in a terminal, narrow or wide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from agentgym_rl.evaluation.compare import verdict
from agentgym_rl.evaluation.report import Cell, Entry, Grid, grids, notes


def print_report(console: Console, entries: Sequence[Entry], source: str = "") -> None:
    for grid in grids(entries):
        console.print(_drawn(grid))
    for line in notes(entries, source):
        console.print(Padding(Text(line, "dim"), (0, 0, 0, 2)))


def _drawn(grid: Grid) -> RenderableType:
    table = _table()
    for place, heading in enumerate(grid.headings):
        table.add_column(heading, justify="right" if place else "left", vertical="top", overflow="fold")
    for row in grid.rows:
        table.add_row(*(_cell(cell, leading=place == 0) for place, cell in enumerate(row)))
    return Group(Text(f"\n{grid.title}", "bold"), table)


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1, 0, 0), border_style="dim", pad_edge=False)


def _cell(cell: Cell, *, leading: bool) -> Text:
    text = Text(cell.text, "cyan" if leading else "")
    if cell.small:
        text.append(f"\n{cell.small}", "dim")
    return text


def print_comparison(console: Console, comparison: Mapping[str, Any]) -> None:
    first, second = comparison["first"]["name"], comparison["second"]["name"]
    if first == second:
        first, second = f"{first} (A)", f"{second} (B)"
    table = _table()
    for heading in ("", "items", first, second, "difference", "95% interval", "p", "test"):
        table.add_column(heading, justify="left" if heading in ("", "test") else "right", overflow="fold")
    lines = comparison["scenarios"]
    rows = {**lines, "all items": comparison["all"]} if len(lines) > 1 else lines
    for name, numbers in rows.items():
        _compared(table, name, numbers)
    console.print(table)
    if "mcnemar" in comparison["all"]:
        m = comparison["all"]["mcnemar"]
        console.print(
            Text(
                f"  solved by both {m['both']}, only by {first} {m['only_first']}, only by {second} "
                f"{m['only_second']}, by neither {m['neither']}",
                "dim",
            )
        )
    for note in comparison["notes"]:
        console.print(Text.assemble(("  ! ", "bold yellow"), note))
    console.print(Text.assemble(("\n● ", "cyan"), (verdict(comparison["all"], first, second), "bold")))


def _compared(table: Table, name: str, numbers: Mapping[str, Any]) -> None:
    success, reward = numbers["success"], numbers["reward"]
    exact = "mcnemar" in numbers
    table.add_row(
        Text.assemble((name, "cyan"), "  success, %"),
        str(numbers["items"]),
        *(f"{100 * success[side]:.1f}" for side in ("first", "second")),
        f"{100 * success['difference']:+.1f}",
        f"{100 * success['low']:+.1f} to {100 * success['high']:+.1f}",
        f"{numbers['mcnemar']['p'] if exact else success['p']:.3g}",
        "McNemar, exact" if exact else "sign flips",
    )
    table.add_row(
        Text("reward", justify="right"),
        "",
        *(f"{reward[side]:.3g}" for side in ("first", "second")),
        f"{reward['difference']:+.3g}",
        f"{reward['low']:+.3g} to {reward['high']:+.3g}",
        f"{reward['p']:.3g}",
        "sign flips",
    )
