"""Facts about AgentGym's own servers: the dialect of each, and the instruction and items that it does not serve.

The servers differ in the names of session and item, in what a reward means and in the form of an action.
`agentgym.py` has the client. Item ranges, names of tools and answers are those of AgentGym's repository.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from agentgym_rl.environment import agentgym_tools as tools

SessionKey = Literal["id", "env_idx"]

_FENCED_SQL = re.compile(r"```(?:sql)?\s*(.*?)```", re.DOTALL | re.IGNORECASE)
_TOOL_CALL = re.compile(r"(?:.*Action:)?\s*(\S+)\s+with\s+Action Input:\s*(.*)", re.DOTALL)


def sql_of(text: str) -> str:
    """Return the statement in the last fenced block, or the text if there is none."""
    blocks = _FENCED_SQL.findall(text)
    return (blocks[-1] if blocks else text).strip()


def tool_call_of(text: str) -> str:
    """Return `Action: NAME with Action Input: {...}` in one line, the only form that the tool servers read.

    The agent's style has already removed the word `Action:`. Other text is sent as it is; the server refuses it.
    """
    call = _TOOL_CALL.fullmatch(text.strip())
    return f"Action: {call[1]} with Action Input: {' '.join(call[2].splitlines())}" if call else text


@dataclass(frozen=True, slots=True)
class Dialect:
    session_key: SessionKey | None = None
    """Name of the session id. None uses the name in the answer to /create."""
    item_keys: tuple[str, ...] = ()
    """Names of the item in /reset. Empty means the default: `data_idx` with `id`, and `id` with `env_idx`."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of /reset."""
    success_at: float = 1.0
    """Smallest sum of rewards that makes an ended episode a success."""
    reward_is_total: bool = False
    """True if each answer holds the reward of the whole episode so far instead of the step's."""
    write_action: Callable[[str], str] = str
    """Returns the text to send for an agent's action."""
    lists_actions: bool = False
    """True if answers hold `available_actions` that the agent must see in the observation."""
    refusals: tuple[str, ...] = ()
    """First words of the answers to an invalid action. Empty if the server does not tell."""
    max_sessions: int | None = None
    """Sessions that may play at the same time. Further ones would share a game or an account with another."""


_TOOL = Dialect(
    "env_idx",
    ("id",),
    reward_is_total=True,
    write_action=tool_call_of,
    refusals=("Format error", "Observation: ERROR"),
)
KNOWN_DIALECTS: dict[str, Dialect] = {
    "textcraft": Dialect("id", ("data_idx",)),
    "babyai": Dialect("id", ("data_idx",), success_at=0.5),  # a win is 1 minus the cost of the moves, above 0.5
    "sciworld": Dialect("id", ("data_idx",), success_at=100.0),
    "alfworld": Dialect(
        "id", ("data_idx", "game"), {"world_type": "Text"}, lists_actions=True, refusals=("Nothing happens",)
    ),
    "maze": Dialect("id", ("data_idx", "game")),
    "wordle": Dialect("id", ("data_idx", "seed")),
    "webshop": Dialect("env_idx", ("session_id",)),
    "sqlgym": Dialect("env_idx", ("item_id",), write_action=sql_of, max_sessions=8),
    "webarena": Dialect("env_idx", ("idx",), {"seed": 0}),
    "searchqa": Dialect("env_idx", ("id",)),
    **dict.fromkeys(("weather", "movie", "academia", "sheet"), _TOOL),
    "todo": replace(_TOOL, max_sessions=1),  # all sessions use one account, which a reset empties
}


@dataclass(frozen=True, slots=True)
class ServedEnvironment:
    """An environment that needs AgentGym's server."""

    summary: str
    instruction: str
    splits: Mapping[str, range]
    command: str
    """Starts the server, in the environment that AgentGym's set-up script creates."""
    needs: str
    """Data, account or key that the server needs."""


SERVED: dict[str, ServedEnvironment] = {
    "webshop": ServedEnvironment(
        "buy a product that fits a description, among 1,000 of a real shop",
        tools.WEBSHOP,
        # WebShop's own order: 500 for the test, 1,000 for validation, the rest for training.
        {"train": range(1500, 6910), "test": range(500), "validation": range(500, 1500)},
        "webshop --port 36001",
        "product files of WebShop, Java",
    ),
    "alfworld": ServedEnvironment(
        "household tasks: find, clean, heat, cool and place things",
        tools.ALFWORLD,
        {"train": range(2420), "test": range(2420, 2620)},
        "alfworld --port 36001",
        "game files of ALFWorld",
    ),
    "sqlgym": ServedEnvironment(
        "answer a question about a database with one SQL statement (BIRD)",
        tools.SQLGYM,
        {"train": range(9428), "test": range(9428, 10962)},
        "AGENTENV_SQLGYM_BIRD_PATH=bird sqlgym --port 36001",
        "databases of BIRD",
    ),
    "weather": ServedEnvironment(
        "answer questions about the weather with 19 tools",
        tools.WEATHER,
        {"train": range(323), "test": range(323, 343)},
        "weather --port 36001",
        "a connection to open-meteo.com",
    ),
    "movie": ServedEnvironment(
        "answer questions about films and people with 16 tools",
        tools.MOVIE,
        {"train": range(218), "test": range(218, 238)},
        "movie --port 36001",
        "a key of themoviedb.org",
    ),
    "academia": ServedEnvironment(
        "answer questions about papers and authors with 9 tools",
        tools.ACADEMIA,
        {"test": range(20)},
        "academia --port 36001",
        "the citation graphs of AgentBoard",
    ),
    "sheet": ServedEnvironment(
        "edit a spreadsheet as asked with 20 tools",
        tools.SHEET,
        {"test": range(20)},
        "sheet --port 36001",
        "credentials of Google Sheets",
    ),
    "todo": ServedEnvironment(
        "answer questions about a to-do list and change it with 12 tools",
        tools.TODO,
        {"train": range(135), "test": range(135, 155)},
        "todo --port 36001",
        "a key of Todoist",
    ),
}
"""AgentGym's environments beyond those of this package, by name. For weather, movie and todo the last 20 items are the
test split; AgentEval tests 20 others, which its list names. Academia and Sheet have only the 20 of AgentEval."""
