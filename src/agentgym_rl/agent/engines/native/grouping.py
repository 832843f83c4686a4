"""Divides the rows of a step into forward passes with little padding."""

from __future__ import annotations

from dataclasses import dataclass

from agentgym_rl.agent.engines.native.runner import Row

GROUP_TOKENS = 2048
"""Padded tokens in one prefill pass: enough for efficient matrix products, few enough that activations fit the
processor's cache (larger passes are slower on CPU)."""
GROUP_ROWS = 64
GATHER_COST = 2.5
"""Cost of copying scattered slots and reading the copy, relative to reading a range of slots in place."""


@dataclass(slots=True)
class RowGroup:
    """Rows that are computed together. `indices` are their positions in the step's list."""

    rows: list[Row]
    indices: list[int]

    @property
    def num_new(self) -> int:
        """New tokens of the longest row: the padded length."""
        return max(len(row.token_ids) - row.start for row in self.rows)

    @property
    def length(self) -> int:
        return max(len(row.token_ids) for row in self.rows)

    @property
    def fresh(self) -> bool:
        return all(row.start == 0 for row in self.rows)

    @property
    def slot_range(self) -> tuple[int, int] | None:
        """The range of slots to read in place, or None if gathering only the group's slots is cheaper."""
        slots = [row.slot for row in self.rows]
        low, high = min(slots), max(slots) + 1
        # Unused slots in the range cost as much as the group's own, which pays only if reading them is the whole cost.
        limit = GATHER_COST * len(slots) if self.num_new == 1 else len(slots)
        return (low, high) if high - low <= limit else None


def group_rows(rows: list[Row]) -> list[RowGroup]:
    """Group decoding rows (one new token) together, and other rows by their number of new tokens."""
    decode = [index for index, row in enumerate(rows) if len(row.token_ids) - row.start == 1 and row.start > 0]
    decoding = set(decode)
    prefill = [index for index in range(len(rows)) if index not in decoding]
    prefill.sort(key=lambda index: (rows[index].start > 0, len(rows[index].token_ids) - rows[index].start))
    groups = _decode_groups(rows, decode) if decode else []
    current: list[int] = []
    for index in prefill:
        if current and not _fits(rows, current, index):
            groups.append(RowGroup([rows[i] for i in current], current))
            current = []
        current.append(index)
    if current:
        groups.append(RowGroup([rows[i] for i in current], current))
    return groups


def _fits(rows: list[Row], current: list[int], index: int) -> bool:
    """Return whether a row fits the current group. Rows are sorted by new tokens, so the new row sets the padding."""
    first, row = rows[current[0]], rows[index]
    if (first.start > 0) != (row.start > 0) or len(current) >= GROUP_ROWS:
        return False
    shortest, longest = len(first.token_ids) - first.start, len(row.token_ids) - row.start
    return longest * (len(current) + 1) <= GROUP_TOKENS and longest <= max(1.25 * shortest, shortest + 8)


def _decode_groups(rows: list[Row], indices: list[int]) -> list[RowGroup]:
    """Return one group over a range of slots if they are adjacent and about as long, else gathered groups by length."""
    whole = RowGroup([rows[i] for i in indices], indices)
    slots = [rows[i].slot for i in indices]
    span = max(slots) - min(slots) + 1
    in_place = span * whole.length
    gathered = GATHER_COST * sum(len(rows[i].token_ids) for i in indices)
    if in_place <= gathered:
        return [whole]
    indices = sorted(indices, key=lambda index: len(rows[index].token_ids))
    chunks = [indices[i : i + GROUP_ROWS] for i in range(0, len(indices), GROUP_ROWS)]
    return [RowGroup([rows[i] for i in chunk], chunk) for chunk in chunks]
