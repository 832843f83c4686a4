"""Questions about the databases, each with a reference statement. Parameters are drawn from the item's own rows."""

from __future__ import annotations

import random
import sqlite3
from dataclasses import dataclass
from functools import lru_cache

from agentgym_rl.environment.envs.sqlgym.databases import DATABASES, Database, build

KINDS = ("select", "aggregate", "join", "nested")
SUBSETS = (*KINDS, "new")
"""Kinds of questions, and the questions of the test split whose form does not occur in training."""
SPLITS = {"train": range(4000), "test": range(4000, 4300), "validation": range(4300, 4500)}
MAX_ATTEMPTS = 60


@dataclass(frozen=True, slots=True)
class Template:
    subset: str
    question: str
    """With fields in braces for the parameters."""
    statement: str
    parameters: tuple[tuple[str, str], ...] = ()
    """(name, statement that lists its possible values) of each field."""


@dataclass(frozen=True, slots=True)
class Question:
    database: Database
    form: str
    """The template's question, with fields in braces."""
    subset: str
    text: str
    statement: str
    """The reference, in one line."""
    seed: str

    @property
    def ordered(self) -> bool:
        """Whether the order of the rows matters."""
        return "in this order" in self.text


_GENRE, _COUNTRY, _TOWN = (
    ("genre", "SELECT DISTINCT genre FROM book ORDER BY 1"),
    ("country", "SELECT DISTINCT country FROM author ORDER BY 1"),
    ("town", "SELECT DISTINCT town FROM member ORDER BY 1"),
)
_AUTHOR, _MEMBER, _OPERATOR = (
    ("author", "SELECT name FROM author ORDER BY 1"),
    ("member", "SELECT name FROM member ORDER BY 1"),
    ("operator", "SELECT DISTINCT operator FROM line ORDER BY 1"),
)
_LINE, _REGION, _VALLEY = (
    ("line", "SELECT name FROM line ORDER BY 1"),
    ("region", "SELECT DISTINCT region FROM station ORDER BY 1"),
    ("valley", "SELECT DISTINCT valley FROM grower ORDER BY 1"),
)
_FRUIT, _KIND, _HARVEST_YEAR = (
    ("fruit", "SELECT name FROM fruit ORDER BY 1"),
    ("kind", "SELECT DISTINCT kind FROM fruit ORDER BY 1"),
    ("year", "SELECT DISTINCT year FROM harvest ORDER BY 1"),
)
_PAGES = ("pages", "VALUES (150), (200), (250), (300), (350), (400)")
_SEATS = ("seats", "VALUES (160), (200), (240), (300), (360)")

TEMPLATES: dict[str, tuple[Template, ...]] = {
    "library": (
        Template("select", "What are the names of the authors from {country}, the oldest first, in this order?",
                 "SELECT name FROM author WHERE country = '{country}' ORDER BY born, name", (_COUNTRY,)),
        Template("select", "Which titles have more than {pages} pages and the genre {genre}?",
                 "SELECT title FROM book WHERE pages > {pages} AND genre = '{genre}'", (_PAGES, _GENRE)),
        Template("aggregate", "How many books of the genre {genre} were published before {year}?",
                 "SELECT COUNT(*) FROM book WHERE genre = '{genre}' AND year < {year}",
                 (_GENRE, ("year", "VALUES (1975), (1985), (1995), (2005)"))),
        Template("aggregate", "How many copies does the library have of each genre? Give genre and number.",
                 "SELECT genre, SUM(copies) FROM book GROUP BY genre"),
        Template("join", "Which titles did {author} write?",
                 "SELECT b.title FROM book b JOIN author a ON a.id = b.author_id WHERE a.name = '{author}'",
                 (_AUTHOR,)),
        Template("join", "How many loans did members from {town} make?",
                 "SELECT COUNT(*) FROM loan l JOIN member m ON m.id = l.member_id WHERE m.town = '{town}'", (_TOWN,)),
        Template("join", "Which different titles has {member} borrowed and not returned?",
                 "SELECT DISTINCT b.title FROM loan l JOIN book b ON b.id = l.book_id JOIN member m ON m.id = "
                 "l.member_id WHERE m.name = '{member}' AND l.returned = 0", (_MEMBER,)),
        Template("nested", "Which titles were never lent?",
                 "SELECT title FROM book WHERE id NOT IN (SELECT book_id FROM loan)"),
        Template("nested", "Which titles of the genre {genre} have more pages than the average book?",
                 "SELECT title FROM book WHERE genre = '{genre}' AND pages > (SELECT AVG(pages) FROM book)", (_GENRE,)),
        Template("nested", "Which members made more than {count} loans? Give name and number of loans.",
                 "SELECT m.name, COUNT(*) FROM member m JOIN loan l ON l.member_id = m.id GROUP BY m.id HAVING "
                 "COUNT(*) > {count}", (("count", "VALUES (3), (4), (5), (6)"),)),
    ),
    "railway": (
        Template("select", "Which train numbers have at least {seats} seats and a fare below {fare}?",
                 "SELECT number FROM train WHERE seats >= {seats} AND fare < {fare}",
                 (_SEATS, ("fare", "VALUES (20), (30), (40), (50)"))),
        Template("select", "Which stations in the region {region} have more than {platforms} platforms?",
                 "SELECT name FROM station WHERE region = '{region}' AND platforms > {platforms}",
                 (_REGION, ("platforms", "VALUES (2), (4), (6)"))),
        Template("aggregate", "What is the highest fare of the trains that depart before {time}?",
                 "SELECT MAX(fare) FROM train WHERE departs < '{time}'",
                 (("time", "VALUES ('08:00'), ('10:00'), ('12:00'), ('15:00')"),)),
        Template("aggregate", "How many stations does each region have? Give region and number.",
                 "SELECT region, COUNT(*) FROM station GROUP BY region"),
        Template("join", "Which stations can be reached with {operator}, the oldest first, in this order?",
                 "SELECT s.name FROM station s JOIN line l ON l.id = s.line_id WHERE l.operator = '{operator}' ORDER "
                 "BY s.opened, s.name", (_OPERATOR,)),
        Template("join", "What are the numbers of the trains of {operator}?",
                 "SELECT t.number FROM train t JOIN line l ON l.id = t.line_id WHERE l.operator = '{operator}'",
                 (_OPERATOR,)),
        Template("join", "How many seats do the trains on {line} have in total?",
                 "SELECT SUM(t.seats) FROM train t JOIN line l ON l.id = t.line_id WHERE l.name = '{line}'", (_LINE,)),
        Template("nested", "Which lines have no station? Give their names.",
                 "SELECT name FROM line WHERE id NOT IN (SELECT line_id FROM station)"),
        Template("nested", "What are the numbers of the trains with the most seats on {line}?",
                 "SELECT t.number FROM train t JOIN line l ON l.id = t.line_id WHERE l.name = '{line}' AND t.seats = "
                 "(SELECT MAX(u.seats) FROM train u WHERE u.line_id = l.id)", (_LINE,)),
        Template("nested", "Which lines have more than {count} trains? Give name and number of trains.",
                 "SELECT l.name, COUNT(*) FROM line l JOIN train t ON t.line_id = l.id GROUP BY l.id HAVING "
                 "COUNT(*) > {count}", (("count", "VALUES (4), (5), (6), (7)"),)),
    ),
    "orchard": (
        Template("select", "Which growers in {valley} were founded after {year}?",
                 "SELECT name FROM grower WHERE valley = '{valley}' AND founded > {year}",
                 (_VALLEY, ("year", "VALUES (1930), (1950), (1970)"))),
        Template("select", "Which fruits of the kind {kind} are there, the dearest first, in this order?",
                 "SELECT name FROM fruit WHERE kind = '{kind}' ORDER BY price DESC, name", (_KIND,)),
        Template("aggregate", "How many kilograms were harvested in {year}?",
                 "SELECT SUM(kilograms) FROM harvest WHERE year = {year}", (_HARVEST_YEAR,)),
        Template("aggregate", "How many growers does each valley have? Give valley and number.",
                 "SELECT valley, COUNT(*) FROM grower GROUP BY valley"),
        Template("join", "How many kilograms of {fruit} were harvested in all years?",
                 "SELECT SUM(h.kilograms) FROM harvest h JOIN fruit f ON f.id = h.fruit_id WHERE f.name = '{fruit}'",
                 (_FRUIT,)),
        Template("join", "Which different growers harvested {fruit} in {year}?",
                 "SELECT DISTINCT g.name FROM harvest h JOIN grower g ON g.id = h.grower_id JOIN fruit f ON f.id = "
                 "h.fruit_id WHERE f.name = '{fruit}' AND h.year = {year}", (_FRUIT, _HARVEST_YEAR)),
        Template("join", "How many kilograms did each valley harvest in {year}? Give valley and kilograms.",
                 "SELECT g.valley, SUM(h.kilograms) FROM harvest h JOIN grower g ON g.id = h.grower_id WHERE h.year = "
                 "{year} GROUP BY g.valley", (_HARVEST_YEAR,)),
        Template("nested", "Which growers harvested nothing in {year}?",
                 "SELECT name FROM grower WHERE id NOT IN (SELECT grower_id FROM harvest WHERE year = {year})",
                 (_HARVEST_YEAR,)),
        Template("nested", "Which fruits of the kind {kind} cost more than the average fruit?",
                 "SELECT name FROM fruit WHERE kind = '{kind}' AND price > (SELECT AVG(price) FROM fruit)", (_KIND,)),
        Template("nested", "Which growers harvested more than {weight} kilograms of all fruits together? Give name and "
                 "kilograms.",
                 "SELECT g.name, SUM(h.kilograms) FROM grower g JOIN harvest h ON h.grower_id = g.id GROUP BY g.id "
                 "HAVING SUM(h.kilograms) > {weight}", (("weight", "VALUES (1500), (2000), (2500), (3000)"),)),
    ),
}  # fmt: skip


def _draw(template: Template, connection: sqlite3.Connection, rng: random.Random) -> tuple[str, str]:
    """Return the question and the statement with parameters from the rows."""
    values = {name: rng.choice(connection.execute(source).fetchall())[0] for name, source in template.parameters}
    return template.question.format(**values), template.statement.format(**values)


@lru_cache(maxsize=4096)
def question(item: int) -> Question:
    """Return the question of an item. Its reference statement returns at least one row and no NULL. If the order of the
    rows matters, it is unique."""
    seed = f"sqlgym {item}"
    rng = random.Random(f"{seed} question")
    database, subset = DATABASES[item % len(DATABASES)], subsets_of(item)[0]
    connection = build(database, seed)
    try:
        templates = [template for template in TEMPLATES[database.name] if template.subset == subset]
        # The last form of each kind is held out from training.
        templates = templates[-1:] if "new" in subsets_of(item) else templates[:-1]
        for _ in range(MAX_ATTEMPTS):
            template = rng.choice(templates)
            text, statement = _draw(template, connection, rng)
            rows = connection.execute(statement).fetchall()
            if not rows or None in rows[0]:
                continue
            question = Question(database, template.question, subset, text, statement, seed)
            # The last column only orders ties, of which the question says nothing.
            if not question.ordered or rows == connection.execute(f"{statement} DESC").fetchall():
                return question
    finally:
        connection.close()
    raise ValueError(f"no question about {database.name} for item {item} in {MAX_ATTEMPTS} attempts")


def subsets_of(item: int) -> tuple[str, ...]:
    """Return the kind of the question, and `new` for every other one outside training."""
    kind, number = KINDS[item // len(DATABASES) % len(KINDS)], item // (len(DATABASES) * len(KINDS))
    return (kind, "new") if item not in SPLITS["train"] and number % 2 else (kind,)


def alternatives(question: Question, connection: sqlite3.Connection) -> list[str]:
    """Return a statement of every other template of the database, with the same parameters in every episode."""
    rng = random.Random(f"{question.seed} alternatives")
    return [_draw(template, connection, rng)[1] for template in TEMPLATES[question.database.name]]
