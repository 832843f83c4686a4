"""Tables of a report or a comparison in a terminal of any width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from agentgym_rl.evaluation.compare import verdict
from agentgym_rl.evaluation.report import OWN_DATA_MARK, OWN_DATA_NOTE, Cell, Entry, Grid, grids, notes


def print_report(console: Console, entries: Sequence[Entry], source: str = "") -> None:
    for grid in grids(entries):
        console.print(Text(f"\n{grid.title}", "bold"))
        for part in _fit_width(grid, console.width):
            console.print(part)
    for line in notes(entries, source):
        console.print(Padding(Text(line, "dim"), (0, 0, 0, 2)))


def _fit_width(grid: Grid, width: int) -> list[Table]:
    """Return the grid as one table. For a narrow terminal, wrap headings, then split it into several tables."""
    columns = range(len(grid.headings))
    full_widths = [max(_width(grid, column), *map(cell_len, grid.headings[column].split("\n"))) for column in columns]
    if sum(full_widths) + 2 * len(full_widths) <= width:
        return [_draw_table(grid, columns, full_widths)]
    widths = [_width(grid, column) for column in columns]
    parts: list[list[int]] = [[0]]
    used = widths[0] + 2
    for column in columns[1:]:
        if len(parts[-1]) > 1 and used + widths[column] + 2 > width:
            parts.append([0])
            used = widths[0] + 2
        parts[-1].append(column)
        used += widths[column] + 2
    return [_draw_table(grid, part, widths) for part in parts]


def _width(grid: Grid, column: int) -> int:
    """Return the width of the longest word of the heading or line of a cell."""
    cells = [row[column] for row in grid.rows]
    texts = [*grid.headings[column].split(), *(cell.text for cell in cells), *(cell.detail for cell in cells)]
    return max(map(cell_len, texts), default=0)


def _draw_table(grid: Grid, columns: Sequence[int], widths: Sequence[int]) -> Table:
    table = _table()
    for column in columns:
        # Only a name longer than the terminal may still have to be folded.
        width = widths[column] if column else None
        table.add_column(grid.headings[column], justify="right" if column else "left", width=width, overflow="fold")
    for row in grid.rows:
        table.add_row(*(_cell(row[column], leading=column == 0) for column in columns))
    return table


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1, 0, 0), border_style="dim", pad_edge=False)


def _cell(cell: Cell, *, leading: bool) -> Text:
    text = Text(cell.text, "cyan" if leading else "")
    if cell.detail:
        text.append(f"\n{cell.detail}", "dim")
    return text


def print_comparison(console: Console, comparison: Mapping[str, Any]) -> None:
    first, second = comparison["first"]["name"], comparison["second"]["name"]
    for side in ("first", "second"):
        console.print(Text(f"  {comparison[side]['name']}: {comparison[side]['folder']}", "dim"))
    grid = Grid("", ["", "items", first, second, "difference", "95% interval", "p", "test"])
    own = comparison["own_data"]
    lines = {f"{name} {OWN_DATA_MARK}" if name in own else name: cell for name, cell in comparison["scenarios"].items()}
    rows = {**lines, "all items": comparison["all"]} if len(lines) > 1 else lines
    for name, numbers in rows.items():
        grid.rows += _comparison_rows(name, numbers)
    for part in _fit_width(grid, console.width):
        console.print(part)
    if "mcnemar" in comparison["all"]:
        m = comparison["all"]["mcnemar"]
        console.print(
            Text(
                f"  solved by both {m['both']}, only by {first} {m['only_first']}, only by {second} "
                f"{m['only_second']}, by neither {m['neither']}",
                "dim",
            )
        )
    if own:
        console.print(Text(f"  {OWN_DATA_NOTE}", "dim"))
    for note in comparison["notes"]:
        console.print(Text.assemble(("  ! ", "bold yellow"), note))
    console.print(Text.assemble(("\n● ", "cyan"), (verdict(comparison["all"], first, second), "bold")))


def _comparison_rows(name: str, numbers: Mapping[str, Any]) -> list[list[Cell]]:
    success, reward = numbers["success"], numbers["reward"]
    exact = "mcnemar" in numbers
    texts = [
        [
            f"{name}  success, %",
            str(numbers["items"]),
            *(f"{100 * success[side]:.1f}" for side in ("first", "second")),
            f"{100 * success['difference']:+.1f}",
            f"{100 * success['low']:+.1f} to {100 * success['high']:+.1f}",
            f"{numbers['mcnemar']['p'] if exact else success['p']:.3g}",
            "McNemar, exact" if exact else "sign flips",
        ],
        [
            f"{name}  reward",
            "",
            *(f"{reward[side]:.3g}" for side in ("first", "second")),
            f"{reward['difference']:+.3g}",
            f"{reward['low']:+.3g} to {reward['high']:+.3g}",
            f"{reward['p']:.3g}",
            "sign flips",
        ],
    ]
    return [[Cell(text) for text in row] for row in texts]
