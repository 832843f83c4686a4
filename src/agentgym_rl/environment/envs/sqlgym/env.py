"""SQL tasks as a text game: run statements, look at their rows, submit the last result."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from agentgym_rl.environment.base import check_item
from agentgym_rl.environment.envs.sqlgym import tasks
from agentgym_rl.environment.envs.sqlgym.databases import build
from agentgym_rl.environment.envs.text_svg import Panel, draw
from agentgym_rl.environment.plain_text import plain
from agentgym_rl.environment.tools import Tool
from agentgym_rl.errors import EnvError
from agentgym_rl.types import Step

INSTRUCTION = """\
You answer a question about an SQLite database. The first message shows its tables and the question.

Each turn, reply with exactly one action and nothing else:
- an SQL statement that reads (SELECT or WITH). It is executed, and you see its first rows.
- submit: give the rows of your last statement as the answer and end the task.

For example: SELECT name FROM city WHERE population > 1000000

The answer is right if its rows and columns are those that the question asks for. The order of rows matters only if \
the question says "in this order". Nothing can be changed in the database."""

TOOLS = (
    Tool("submit", "Give the rows of your last statement as the answer and end the task.", "submit"),
    Tool(
        "query",
        "Execute a statement that reads (SELECT or WITH) and see its first rows.",
        "{statement}",
        {"statement": {"type": "string"}},
    ),
)

MAX_CHARS = 2000
MAX_ROWS = 200
"""Rows that are read of a result. A longer one is cut, and is never the answer."""
_ROWS_SHOWN, _CELL_CHARS = 10, 40
_PROGRESS_STEPS, _MAX_PROGRESS_CALLS = 1000, 300
"""SQLite calls back after so many instructions, and stops a statement after so many calls: some milliseconds."""
_MAX_VALUE_BYTES = 100_000
_FENCE = re.compile(r"```(?:sql)?\s*(.*?)\s*```", re.DOTALL | re.IGNORECASE)
_FUNCTIONS = frozenset((
    "abs", "avg", "coalesce", "count", "dense_rank", "first_value", "group_concat", "ifnull", "iif", "instr",
    "lag", "last_value", "lead", "length", "like", "lower", "ltrim", "max", "min", "ntile", "nullif", "rank",
    "replace", "round", "row_number", "rtrim", "substr", "substring", "sum", "total", "trim", "typeof", "upper",
))  # fmt: skip
"""Functions that a statement may call. Those left out are random, depend on the clock or write."""

Row = tuple[Any, ...]


class _Refused(Exception):
    """The action is not possible. The message is the game's answer."""


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE):
        return sqlite3.SQLITE_OK
    allowed = action == sqlite3.SQLITE_FUNCTION and str(second).lower() in _FUNCTIONS
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


class SqlGym:
    """4,500 questions about three kinds of databases. Implements TextEnv."""

    name: ClassVar[str] = "sqlgym"
    instruction: ClassVar[str] = INSTRUCTION
    splits: ClassVar[Mapping[str, range]] = tasks.SPLITS
    subsets: ClassVar[tuple[str, ...]] = tasks.SUBSETS
    cheap: ClassVar[bool] = True

    def __init__(self) -> None:
        self._item = -1
        self._connection: sqlite3.Connection | None = None
        self._statement = ""
        """The last statement that worked."""
        self._columns: list[str] = []
        self._rows: list[Row] = []
        self._num_turns = 0
        self._success: bool | None = None

    @classmethod
    def tools(cls) -> Sequence[Tool]:
        return TOOLS

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return tasks.subsets_of(check_item(cls, item))

    def reset(self, item: int) -> str:
        self._question = tasks.question(check_item(self, item))
        self.close()
        self._connection = build(self._question.database, self._question.seed)
        self._reference = self._connection.execute(self._question.statement).fetchall()
        self._alternatives = tasks.alternatives(self._question, self._connection)
        _restrict(self._connection)
        self._item, self._success, self._num_turns = item, None, 0
        self._statement, self._columns, self._rows = "", [], []
        return f"Tables of the database {self._question.database.name}:\n{self._question.database.schema}\n\n" + (
            f"Question: {self._question.text}"
        )

    def step(self, text: str) -> Step:
        connection = self._require_playing()
        self._num_turns += 1
        action = _read_action(text)
        if action.rstrip(";. ").lower() == "submit":
            return self._submit()
        try:
            columns, rows = _run(connection, action)
        except _Refused as refusal:
            return Step(str(refusal), info={"valid": False})
        self._statement, self._columns, self._rows = " ".join(action.split()), columns, rows
        return Step(_table(columns, rows), info={"valid": True})

    def _submit(self) -> Step:
        if not self._statement:
            return Step("There is nothing to submit yet: run a statement first.", info={"valid": False})
        self._success = self._is_answer()
        self._close_connection()
        text = "The answer is right." if self._success else "The answer is wrong."
        return Step(text, float(self._success), True, {"valid": True, "success": self._success})

    def close(self) -> None:
        self._close_connection()

    def actions(self) -> list[str]:
        """Return looks at the tables, statements of the item's database (the reference among them), and submit."""
        if self._connection is None:
            return []
        looks = [f"SELECT * FROM {table} LIMIT 5" for table in self._question.database.tables]
        submit = ["submit"] if self._statement else []
        return sorted({*looks, *self._alternatives, self._question.statement}) + submit

    def oracle(self) -> str:
        """Return the reference statement, or submit once the last result is the answer."""
        self._require_playing()
        return "submit" if self._statement and self._is_answer() else self._question.statement

    def state_key(self) -> str:
        """Return `12|SELECT ...`: the item and the last statement, whose result would be submitted."""
        ended = "" if self._success is None else "|submitted"
        return f"{self._item}|{self._statement}{ended}"

    def render(self) -> str:
        """Return an SVG of the question, the last statement and its rows."""
        if self._item < 0:
            raise EnvError("sqlgym has nothing to draw yet: call reset first")
        state = "playing" if self._success is None else "solved" if self._success else "failed"
        status = {"playing": f"turn {self._num_turns}", "solved": "right", "failed": "wrong"}[state]
        panels = [Panel("Tables", self._question.database.schema, mono=True), Panel("Question", self._question.text)]
        if self._statement:
            panels.append(Panel("Last statement", self._statement, mono=True, colour="#eef4fb"))
            panels.append(Panel("Rows", _table(self._columns, self._rows), mono=True))
        title = f"SQL, item {self._item}: {self._question.subset}"
        return draw(title, self._question.database.name, status, state, panels)

    def _is_answer(self) -> bool:
        given, right = _rounded(self._rows), _rounded(self._reference)
        return given == right if self._question.ordered else sorted(given, key=repr) == sorted(right, key=repr)

    def _close_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _require_playing(self) -> sqlite3.Connection:
        if self._connection is None:
            raise EnvError("sqlgym needs a running episode: call reset first")
        return self._connection


def _restrict(connection: sqlite3.Connection) -> None:
    connection.set_authorizer(_authorize)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)


def _run(connection: sqlite3.Connection, statement: str) -> tuple[list[str], list[Row]]:
    """Return columns and rows of a statement, or refuse it."""
    if not statement or len(statement) > MAX_CHARS:
        raise _Refused(f"Could not run {len(statement)} characters: reply with one SQL statement, or submit.")
    calls = iter(range(_MAX_PROGRESS_CALLS))
    connection.set_progress_handler(lambda: next(calls, None) is None, _PROGRESS_STEPS)
    try:
        cursor = connection.execute(statement)
        rows = cursor.fetchmany(MAX_ROWS + 1)
        columns = [name for name, *_ in cursor.description or ()]
        cursor.close()
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        reason = "it takes too long" if str(error) == "interrupted" else _clean(str(error))
        raise _Refused(f"The statement failed: {reason.rstrip('.')}.") from None
    if not columns:
        raise _Refused("This is no statement that reads: start with SELECT or WITH, or reply with submit.")
    return columns, rows


def _read_action(text: str) -> str:
    fenced = _FENCE.fullmatch(text.strip())
    return (fenced[1] if fenced else text).strip()


def _rounded(rows: list[Row]) -> list[Row]:
    """Round numbers, so that 3 and 3.0 and sums in another order are equal."""
    return [tuple(round(float(cell), 6) if isinstance(cell, int | float) else cell for cell in row) for row in rows]


def _table(columns: list[str], rows: list[Row]) -> str:
    if not rows:
        return f"{' | '.join(map(_clean, columns))}\n(no rows)"
    shown = [" | ".join(_cell(cell) for cell in row) for row in rows[:_ROWS_SHOWN]]
    count = f"over {MAX_ROWS} rows" if len(rows) > MAX_ROWS else "1 row" if len(rows) == 1 else f"{len(rows)} rows"
    note = f"({count}; the first {_ROWS_SHOWN} are shown)" if len(rows) > _ROWS_SHOWN else f"({count})"
    return "\n".join([" | ".join(map(_clean, columns)), *shown, note])


def _cell(value: Any) -> str:
    text = "NULL" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return plain(text, _CELL_CHARS)


def _clean(text: str) -> str:
    """Return text that may repeat the player's, short and in plain characters."""
    return plain(text, 120) or "nothing"
