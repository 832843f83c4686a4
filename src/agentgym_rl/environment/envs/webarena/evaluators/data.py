"""What an episode changed in the embedded sites' data: all that was asked for, and nothing else."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NEW = "new"
"""Stands for the number of a row that the episode adds."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One row that is not as it was."""

    table: str
    row: int | str
    """Its rowid, or NEW."""
    values: Mapping[str, Any]
    """The columns that changed and what they hold now; of a new row all columns; of a deleted one none."""

    def is_wanted(self, wanted: Mapping[str, Any]) -> bool:
        """A changed row has exactly the wanted changes; a new one may have more columns than the task speaks of."""
        if (self.table, self.row) != (wanted["table"], wanted["row"]):
            return False
        if self.row != NEW and set(self.values) != set(wanted["values"]):
            return False
        return all(self.values[column] == value for column, value in wanted["values"].items())


def only_changed(wanted: Sequence[Mapping[str, Any]], before: sqlite3.Connection, after: sqlite3.Connection) -> bool:
    """Whether the differences between the two are those that are wanted, one for one."""
    left = list(wanted)
    for difference in differences(before, after):
        fits = next((each for each in left if difference.is_wanted(each)), None)
        if fits is None:
            return False
        left.remove(fits)
    return not left


def differences(before: sqlite3.Connection, after: sqlite3.Connection) -> list[Difference]:
    found = []
    for (table,) in before.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"):
        old, new = _rows(before, table), _rows(after, table)
        found += [Difference(table, number, {}) for number in old.keys() - new.keys()]
        for number, row in new.items():
            if number not in old:
                found.append(Difference(table, NEW, row))
            elif row != old[number]:
                changed = {column: value for column, value in row.items() if value != old[number][column]}
                found.append(Difference(table, number, changed))
    return found


def _rows(db: sqlite3.Connection, table: str) -> dict[int, dict[str, Any]]:
    rows = db.execute(f"SELECT rowid AS row_number, * FROM {table}").fetchall()
    return {row["row_number"]: {key: row[key] for key in row.keys() if key != "row_number"} for row in rows}  # noqa: SIM118
