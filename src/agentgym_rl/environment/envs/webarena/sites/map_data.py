"""Data of the map: the invented town of Port Ellery, a grid of streets with a river and two bridges."""

from __future__ import annotations

import random
import sqlite3

SCHEMA = """
CREATE TABLE place(id INTEGER PRIMARY KEY, name TEXT, category TEXT, house INT, x INT, y INT, phone TEXT, hours TEXT,
    wheelchair TEXT);
CREATE TABLE saved(place_id INTEGER PRIMARY KEY, note TEXT);
"""

AVENUES = ["Alder", "Birch", "Cedar", "Dogwood", "Elm", "Fir", "Gorse", "Hazel", "Ivy", "Juniper"]
"""Avenues run north to south. Listed from west to east."""
STREETS = ("North", "Abbey", "Mill", "Market", "Chapel", "Harbour", "Quay", "South")
"""Streets run west to east. Listed from north to south."""
BLOCK_M = 150
RIVER_ROW = 4
"""The river flows between this street and the next one south."""
BRIDGES = (2, 7)
"""Avenues that cross the river."""

PLACES: dict[str, tuple[str, ...]] = {
    "cafe": ("Blue Heron Cafe", "The Copper Kettle", "Driftwood Coffee", "Cafe Meridian"),
    "museum": ("Maritime Museum", "Museum of Clocks", "Ellery House"),
    "hotel": ("Grand Harbour Hotel", "The Anchor Inn", "Hotel Belvedere"),
    "pharmacy": ("Abbey Pharmacy", "Southside Pharmacy", "Lantern Pharmacy"),
    "library": ("Central Library", "Quayside Library"),
    "school": ("Alder Primary School", "St Brendan School"),
    "station": ("Port Ellery Station", "Ferry Terminal"),
    "park": ("Victoria Park", "Lighthouse Gardens", "Mill Meadow"),
    "restaurant": ("The Salt Cellar", "Trattoria Nove", "Lotus Garden", "The Old Customs House"),
    "hospital": ("Ellery General Hospital",),
    "bank": ("Harbour Savings Bank", "Northern Bank"),
    "theatre": ("Playhouse Theatre", "Tide Cinema"),
}
HOURS = ("08:00-17:00", "09:00-18:00", "10:00-16:00", "07:30-22:00", "12:00-23:00")


def fill(db: sqlite3.Connection) -> None:
    rng = random.Random(53)
    corners = rng.sample([(x, y) for x in range(len(AVENUES)) for y in range(len(STREETS))], 40)
    number = 0
    for category, names in PLACES.items():
        for name in names:
            x, y = corners[number]
            number += 1
            hours = "open all day" if category in ("park", "hospital", "station", "hotel") else rng.choice(HOURS)
            db.execute(
                "INSERT INTO place VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    number,
                    name,
                    category,
                    rng.randint(1, 99),
                    x,
                    y,
                    f"0555 {rng.randint(100, 999)} {rng.randint(100, 999)}",
                    hours,
                    rng.choice(("yes", "yes", "limited", "no")),
                ),
            )
