"""Tasks on the map."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from agentgym_rl.environment.envs.webarena.oracle import Move, choose, click, fill, search, stop
from agentgym_rl.environment.envs.webarena.sites.map_data import STREETS
from agentgym_rl.environment.envs.webarena.sites.maps import Route, shortest_route
from agentgym_rl.environment.envs.webarena.tasks.template import (
    Instance,
    Template,
    added,
    at_url,
    column,
    one_of,
    page_has,
    quantity,
    rows_text,
    text_of,
    with_data,
)

MAP = "__MAP__"


def _place(db: sqlite3.Connection, name: str) -> sqlite3.Row:
    row: sqlite3.Row = db.execute("SELECT * FROM place WHERE name = ?", (name,)).fetchone()
    return row


def _route(db: sqlite3.Connection, start: str, end: str) -> Route:
    a, b = _place(db, start), _place(db, end)
    return shortest_route((a["x"], a["y"]), (b["x"], b["y"]))


def _open(name: str) -> tuple[Move, ...]:
    return search("Find a place", name), click("link", name)


def _directions(start: str, end: str, mode: str = "foot") -> tuple[Move, ...]:
    by = (choose("By", mode),) if mode != "foot" else ()
    return click("link", "Directions"), fill("From", start), fill("To", end), *by, click("button", "Go")


PAIRS = (
    ("Maritime Museum", "Blue Heron Cafe"),
    ("Port Ellery Station", "Grand Harbour Hotel"),
    ("Central Library", "Victoria Park"),
    ("Ferry Terminal", "Ellery General Hospital"),
    ("Tide Cinema", "The Salt Cellar"),
    ("Hotel Belvedere", "Museum of Clocks"),
)


def distance(db: sqlite3.Connection) -> Iterator[Instance]:
    for start, end in PAIRS:
        metres = str(_route(db, start, end).metres)
        arguments = {"start": start, "end": end}
        yield Instance(arguments, quantity(metres, "m"), (*_directions(start, end), stop(f"{metres} m")))


def duration(db: sqlite3.Connection) -> Iterator[Instance]:
    for index, (end, start) in enumerate(PAIRS):
        mode = ("bicycle", "car", "foot")[index % 3]
        minutes = str(_route(db, start, end).minutes(mode))
        arguments = {"start": start, "end": end, "mode": mode}
        script = (*_directions(start, end, mode), stop(f"{minutes} minutes"))
        yield Instance(arguments, quantity(minutes, "min"), script)


_DETAILS = {"phone": "phone number", "hours": "opening hours"}


def detail(db: sqlite3.Connection) -> Iterator[Instance]:
    cases = (
        ("Abbey Pharmacy", "phone"),
        ("Museum of Clocks", "hours"),
        ("Northern Bank", "phone"),
        ("Trattoria Nove", "hours"),
        ("Quayside Library", "phone"),
    )
    for name, attribute in cases:
        value = _place(db, name)[attribute]
        checks = one_of(value, column(db, f"SELECT {attribute} FROM place"))
        yield Instance({"place": name, "what": _DETAILS[attribute]}, checks, (*_open(name), stop(value)))


def street(db: sqlite3.Connection) -> Iterator[Instance]:
    streets = [f"{each} Street" for each in STREETS]
    for name in ("Playhouse Theatre", "St Brendan School", "Lotus Garden", "Lighthouse Gardens"):
        value = f"{STREETS[_place(db, name)['y']]} Street"
        yield Instance({"place": name}, one_of(value, streets), (search("Find a place", name), stop(value)))


def nearest(db: sqlite3.Connection) -> Iterator[Instance]:
    cases = (
        ("Grand Harbour Hotel", "cafe"),
        ("Port Ellery Station", "pharmacy"),
        ("Central Library", "restaurant"),
        ("The Anchor Inn", "museum"),
        ("Alder Primary School", "park"),
        ("Ellery House", "hotel"),
    )
    for start, kind in cases:
        distances = sorted(
            (_route(db, start, row["name"]).metres, row["name"])
            for row in db.execute("SELECT * FROM place WHERE category = ?", (kind,)).fetchall()
        )
        if distances[0][0] == distances[1][0]:
            continue  # a tie would be ambiguous
        script = (*_open(start), choose("What is near", kind), click("button", "Show nearest"), stop(distances[0][1]))
        checks = one_of(distances[0][1], [name for _, name in distances])
        yield Instance({"kind": kind, "place": start}, checks, script)


def show_route(db: sqlite3.Connection) -> Iterator[Instance]:
    cases = (
        ("The Copper Kettle", "Playhouse Theatre", "bicycle"),
        ("Ferry Terminal", "Cafe Meridian", "car"),
        ("Mill Meadow", "Central Library", "bicycle"),
        ("Driftwood Coffee", "Harbour Savings Bank", "car"),
    )
    for start, end, mode in cases:
        checks = page_has(("last", text_of("#route"), f"{start} to {end} by {mode}"))
        yield Instance({"start": start, "end": end, "mode": mode}, checks, (*_directions(start, end, mode), stop()))


def show_place(db: sqlite3.Connection) -> Iterator[Instance]:
    for name in ("Ellery General Hospital", "The Old Customs House", "Southside Pharmacy"):
        yield Instance({"place": name}, at_url(f"{MAP}/place/{_place(db, name)['id']}"), (*_open(name), stop()))


def save(db: sqlite3.Connection) -> Iterator[Instance]:
    cases = (
        ("Maritime Museum", "rainy day"),
        ("The Salt Cellar", "birthday dinner"),
        ("Victoria Park", "run on Sunday"),
        ("Lantern Pharmacy", "open late"),
        ("Tide Cinema", "with Farah"),
        ("Northern Bank", "new card"),
    )
    for name, note in cases:
        yield Instance(
            {"place": name, "note": note},
            with_data(
                page_has((f"{MAP}/saved", rows_text("#saved"), f"{name}; {note}")),
                added("saved", place_id=_place(db, name)["id"], note=note),
            ),
            (*_open(name), fill("Note", note), click("button", "Save place"), stop()),
        )


TEMPLATES = (
    Template("map", "How far is it from {{start}} to {{end}} on foot, in metres?", distance),
    Template("map", "How many minutes does it take from {{start}} to {{end}} by {{mode}}?", duration),
    Template("map", "What is the {{what}} of {{place}}?", detail),
    Template("map", "In which street is {{place}}?", street),
    Template("map", "Which {{kind}} is nearest to {{place}}?", nearest),
    Template("map", "Show me the way from {{start}} to {{end}} by {{mode}}.", show_route),
    Template("map", "Open the page of {{place}}.", show_place),
    Template("map", 'Save {{place}} with the note "{{note}}".', save, True),
)
