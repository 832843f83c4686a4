"""How the rows of a step are divided into forward passes that waste little on padding."""

from __future__ import annotations

from dataclasses import dataclass

from agentgym_rl.agent.engines.native.runner import Row

GROUP_TOKENS = 2048
"""Padded tokens in one prefill pass: enough to keep matrix products efficient, few enough that activations stay in the
processor's cache (larger passes were slower on CPU)."""
GROUP_ROWS = 64
GATHER_COST = 2.5
"""Copying scattered slots next to each other and reading the copy, against reading a range of slots in place."""


@dataclass(slots=True)
class RowGroup:
    """Rows that go through the model together; `places` are their positions in the step's list."""

    rows: list[Row]
    places: list[int]

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
        """The range of slots to read in place, or None where gathering only the group's slots is cheaper."""
        slots = [row.slot for row in self.rows]
        low, high = min(slots), max(slots) + 1
        # Other slots in the range cost as much as the group's own: worth it only where reading them is the whole cost.
        most = GATHER_COST * len(slots) if self.num_new == 1 else len(slots)
        return (low, high) if high - low <= most else None


def group_rows(rows: list[Row]) -> list[RowGroup]:
    """Decoding rows (one new token) together, others with rows of about as many new tokens."""
    decode = [place for place, row in enumerate(rows) if len(row.token_ids) - row.start == 1 and row.start > 0]
    decoding = set(decode)
    prefill = [place for place in range(len(rows)) if place not in decoding]
    prefill.sort(key=lambda place: (rows[place].start > 0, len(rows[place].token_ids) - rows[place].start))
    groups = _decode_groups(rows, decode) if decode else []
    current: list[int] = []
    for place in prefill:
        if current and not _fits(rows, current, place):
            groups.append(RowGroup([rows[p] for p in current], current))
            current = []
        current.append(place)
    if current:
        groups.append(RowGroup([rows[p] for p in current], current))
    return groups


def _fits(rows: list[Row], current: list[int], place: int) -> bool:
    """Rows come in order of new tokens, so the new one sets the padded length."""
    first, row = rows[current[0]], rows[place]
    if (first.start > 0) != (row.start > 0) or len(current) >= GROUP_ROWS:
        return False
    shortest, longest = len(first.token_ids) - first.start, len(row.token_ids) - row.start
    return longest * (len(current) + 1) <= GROUP_TOKENS and longest <= max(1.25 * shortest, shortest + 8)


def _decode_groups(rows: list[Row], places: list[int]) -> list[RowGroup]:
    """One group over a range of slots when they lie close and are about as long; else gathered groups by length."""
    everything = RowGroup([rows[p] for p in places], places)
    slots = [rows[p].slot for p in places]
    span = max(slots) - min(slots) + 1
    in_place = span * everything.length
    gathered = GATHER_COST * sum(len(rows[p].token_ids) for p in places)
    if in_place <= gathered:
        return [everything]
    places = sorted(places, key=lambda place: len(rows[place].token_ids))
    chunks = [places[i : i + GROUP_ROWS] for i in range(0, len(places), GROUP_ROWS)]
    return [RowGroup([rows[p] for p in chunk], chunk) for chunk in chunks]
