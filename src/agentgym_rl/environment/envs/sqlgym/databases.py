"""Three small databases. The rows of an item are drawn from its seed, so that no two items have the same rows."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass

FIRST = (
    "Ada", "Bela", "Carin", "Dorian", "Edda", "Falk", "Greta", "Hugo", "Iris", "Jonas", "Kira", "Levin", "Mara",
    "Nils", "Oda", "Piet", "Ronja", "Sven", "Tilda", "Veit",
)  # fmt: skip
LAST = (
    "Alder", "Brandt", "Castell", "Dorn", "Eichel", "Fink", "Gruber", "Hollin", "Immer", "Jansen", "Keller",
    "Lund", "Moser", "Norden", "Ostler", "Pahl", "Rask", "Selm", "Thorn", "Ulmer",
)  # fmt: skip
TOWNS = (
    "Ashford", "Brookton", "Calder Bay", "Dunmere", "Eastmere", "Fairholm", "Greyhaven", "Norvale",
    "Port Ellery", "Stonebridge", "Westling", "Wynford",
)  # fmt: skip
COUNTRIES = ("Denmark", "Estonia", "Ireland", "Norway", "Portugal", "Slovenia")
GENRES = ("crime", "essay", "fantasy", "history", "poetry", "travel")
ADJECTIVES = ("Silent", "Northern", "Hidden", "Second", "Burning", "Paper", "Distant", "Golden", "Broken", "Winter")
NOUNS = ("Harbour", "Garden", "Letter", "River", "Mirror", "Orchard", "Compass", "Lantern", "Island", "Bridge")
OPERATORS = ("Coastal Rail", "Inland Express", "Northway", "Valley Trains")
REGIONS = ("north", "east", "south", "west", "centre")
VALLEYS = ("Amber Valley", "Birch Valley", "Clover Valley", "Dale End", "Elm Hollow")
FRUITS = (
    ("apple", "pome"), ("pear", "pome"), ("quince", "pome"), ("plum", "stone"), ("cherry", "stone"),
    ("apricot", "stone"), ("raspberry", "berry"), ("currant", "berry"), ("gooseberry", "berry"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Database:
    """One schema, and how its rows are drawn."""

    name: str
    schema: str
    """Statements that create the tables. The player sees them."""
    tables: tuple[str, ...]
    fill: Callable[[sqlite3.Connection, random.Random], None]


def people(rng: random.Random, count: int) -> list[str]:
    """Return different full names."""
    return [
        f"{FIRST[n % len(FIRST)]} {LAST[n // len(FIRST)]}" for n in rng.sample(range(len(FIRST) * len(LAST)), count)
    ]


def date(rng: random.Random, years: Sequence[int]) -> str:
    return f"{rng.choice(years)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def _insert(connection: sqlite3.Connection, table: str, rows: Sequence[tuple[object, ...]]) -> None:
    connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)


def _fill_library(connection: sqlite3.Connection, rng: random.Random) -> None:
    authors = people(rng, 10)
    titles = rng.sample([f"The {adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS], 32)
    _insert(
        connection,
        "author",
        [(n, name, rng.choice(COUNTRIES), rng.randint(1880, 1985)) for n, name in enumerate(authors, 1)],
    )
    books = [
        (
            n,
            title,
            rng.randint(1, 10),
            rng.choice(GENRES),
            rng.randint(1950, 2020),
            rng.randint(80, 620),
            rng.randint(1, 6),
        )
        for n, title in enumerate(titles, 1)
    ]
    _insert(connection, "book", books)
    members = [(n, name, rng.choice(TOWNS[:6]), rng.randint(2005, 2023)) for n, name in enumerate(people(rng, 14), 1)]
    _insert(connection, "member", members)
    loans = [
        (n, rng.randint(1, 32), rng.randint(1, 14), date(rng, (2022, 2023, 2024)), rng.choice((1, 1, 1, 0)))
        for n in range(1, 71)
    ]
    _insert(connection, "loan", loans)


def _fill_railway(connection: sqlite3.Connection, rng: random.Random) -> None:
    lines = [(n, f"Line {letter}", rng.choice(OPERATORS)) for n, letter in enumerate("ABCDEF", 1)]
    _insert(connection, "line", lines)
    stations = [
        (n, town, rng.randint(1, 6), rng.choice(REGIONS), rng.randint(1, 12), rng.randint(1860, 1990))
        for n, town in enumerate(rng.sample(TOWNS, len(TOWNS)), 1)
    ]
    _insert(connection, "station", stations)
    numbers = rng.sample(range(100, 990), 36)
    trains = []
    for n, number in enumerate(numbers, 1):
        departs = f"{rng.randint(5, 22):02}:{rng.choice((0, 15, 30, 45)):02}"
        trains.append((n, number, rng.randint(1, 6), 20 * rng.randint(4, 24), departs, rng.randint(8, 60)))
    _insert(connection, "train", trains)


def _fill_orchard(connection: sqlite3.Connection, rng: random.Random) -> None:
    growers = [(n, name, rng.choice(VALLEYS), rng.randint(1920, 2010)) for n, name in enumerate(people(rng, 12), 1)]
    _insert(connection, "grower", growers)
    _insert(
        connection, "fruit", [(n, name, kind, rng.randint(12, 75) / 10) for n, (name, kind) in enumerate(FRUITS, 1)]
    )
    pairs = rng.sample([(g, f, y) for g in range(1, 13) for f in range(1, 10) for y in (2021, 2022, 2023)], 64)
    _insert(
        connection, "harvest", [(n, g, f, y, 10 * rng.randint(3, 90)) for n, (g, f, y) in enumerate(sorted(pairs), 1)]
    )


DATABASES: tuple[Database, ...] = (
    Database(
        "library",
        "CREATE TABLE author (id INTEGER PRIMARY KEY, name TEXT, country TEXT, born INTEGER);\n"
        "CREATE TABLE book (id INTEGER PRIMARY KEY, title TEXT, author_id INTEGER REFERENCES author(id), genre TEXT, "
        "year INTEGER, pages INTEGER, copies INTEGER);\n"
        "CREATE TABLE member (id INTEGER PRIMARY KEY, name TEXT, town TEXT, joined INTEGER);\n"
        "CREATE TABLE loan (id INTEGER PRIMARY KEY, book_id INTEGER REFERENCES book(id), member_id INTEGER REFERENCES "
        "member(id), day TEXT, returned INTEGER);",
        ("author", "book", "member", "loan"),
        _fill_library,
    ),
    Database(
        "railway",
        "CREATE TABLE line (id INTEGER PRIMARY KEY, name TEXT, operator TEXT);\n"
        "CREATE TABLE station (id INTEGER PRIMARY KEY, name TEXT, line_id INTEGER REFERENCES line(id), region TEXT, "
        "platforms INTEGER, opened INTEGER);\n"
        "CREATE TABLE train (id INTEGER PRIMARY KEY, number INTEGER, line_id INTEGER REFERENCES line(id), "
        "seats INTEGER, departs TEXT, fare INTEGER);",
        ("line", "station", "train"),
        _fill_railway,
    ),
    Database(
        "orchard",
        "CREATE TABLE grower (id INTEGER PRIMARY KEY, name TEXT, valley TEXT, founded INTEGER);\n"
        "CREATE TABLE fruit (id INTEGER PRIMARY KEY, name TEXT, kind TEXT, price REAL);\n"
        "CREATE TABLE harvest (id INTEGER PRIMARY KEY, grower_id INTEGER REFERENCES grower(id), fruit_id INTEGER "
        "REFERENCES fruit(id), year INTEGER, kilograms INTEGER);",
        ("grower", "fruit", "harvest"),
        _fill_orchard,
    ),
)


def build(database: Database, seed: str) -> sqlite3.Connection:
    """Return a new database in memory, with the rows of `seed`."""
    # An episode may be continued in another thread of the same process, never in two at once.
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    connection.executescript(database.schema)
    database.fill(connection, random.Random(seed))
    connection.commit()
    return connection
