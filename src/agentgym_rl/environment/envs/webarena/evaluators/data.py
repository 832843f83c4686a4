"""Comparison of the embedded sites' data before and after an episode."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NEW = "new"
"""Row number of a row that the episode adds."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One row that was changed, added or deleted."""

    table: str
    row: int | str
    """Rowid, or NEW."""
    values: Mapping[str, Any]
    """Changed columns and their new values. All columns of a new row, none of a deleted row."""

    def is_wanted(self, wanted: Mapping[str, Any]) -> bool:
        """Return whether it matches. A changed row must match exactly; a new row may have more columns."""
        if (self.table, self.row) != (wanted["table"], wanted["row"]):
            return False
        if self.row != NEW and set(self.values) != set(wanted["values"]):
            return False
        return all(self.values[column] == value for column, value in wanted["values"].items())


def only_changed(wanted: Sequence[Mapping[str, Any]], before: sqlite3.Connection, after: sqlite3.Connection) -> bool:
    """Return whether the differences between the two databases match the wanted ones one to one."""
    missing = list(wanted)
    for difference in differences(before, after):
        match = next((each for each in missing if difference.is_wanted(each)), None)
        if match is None:
            return False
        missing.remove(match)
    return not missing


def differences(before: sqlite3.Connection, after: sqlite3.Connection) -> list[Difference]:
    result = []
    for (table,) in before.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"):
        old, new = _rows(before, table), _rows(after, table)
        result += [Difference(table, number, {}) for number in old.keys() - new.keys()]
        for number, row in new.items():
            if number not in old:
                result.append(Difference(table, NEW, row))
            elif row != old[number]:
                changed = {column: value for column, value in row.items() if value != old[number][column]}
                result.append(Difference(table, number, changed))
    return result


def _rows(db: sqlite3.Connection, table: str) -> dict[int, dict[str, Any]]:
    rows = db.execute(f"SELECT rowid AS row_number, * FROM {table}").fetchall()
    return {row["row_number"]: {key: row[key] for key in row.keys() if key != "row_number"} for row in rows}  # noqa: SIM118
