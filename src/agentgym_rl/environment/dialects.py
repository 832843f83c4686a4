"""Dialects of AgentGym's own clients: their field names of session and item, and the fields they read.

This package's requests name the item `item`; AgentGym's clients call it `data_idx`, `game`, `seed`, `idx` or `id`.
So one path serves both. A session that was reset with AgentGym's fields is answered with them until its next reset.
AgentGym's item numbers are translated if they name the same games as here; otherwise they are this server's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from agentgym_rl.environment import wire
from agentgym_rl.environment.base import HasAgentGymNumbers, TextEnv
from agentgym_rl.errors import EnvError, describe_error

Answer = dict[str, Any]
_FENCED = re.compile(r"```(.*?)```", re.DOTALL)


def _as_is(answer: Answer, env: TextEnv) -> Any:
    return answer


@dataclass(frozen=True, slots=True)
class Dialect:
    """Fields that AgentGym's client of one environment sends and reads beyond this server's protocol."""

    item_key: str = ""
    """Name of the item in /reset. Empty if the client uses this server's protocol unchanged."""
    after_create: Callable[[bytes, Answer], Any] = lambda raw, answer: answer
    """Returns the answer to /create, given the request's body."""
    read_action: Callable[[str], str] = lambda text: text
    """Returns the action in the text that the client sends."""
    after_reset: Callable[[Answer, TextEnv], Any] = _as_is
    after_step: Callable[[Answer, TextEnv], Any] = _as_is
    queries: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Further GET paths. Each reads the environment without changing it, and works before a reset too."""

    def read_item(self, body: dict[str, Any], env_class: type[TextEnv]) -> tuple[int, bool]:
        """Return the item of a /reset, and whether the request uses AgentGym's fields."""
        if "item" in body:
            return wire.integer(body, "item"), False
        if not self.item_key or self.item_key not in body or (self.item_key == "id" and "env_idx" not in body):
            return wire.integer(body, "data_idx"), False
        number = wire.integer(body, self.item_key)
        return (env_class.agentgym_item(number) if issubclass(env_class, HasAgentGymNumbers) else number), True


def session_id(body: dict[str, Any]) -> int:
    return wire.integer(body, "env_idx" if "env_idx" in body else "id")


def created_session_id(answer: bytes) -> int:
    """Return the session id in an answer to /create, which may be a bare number."""
    created = orjson.loads(answer)
    return int(created["id"] if isinstance(created, dict) else created)


def _bare_number(raw: bytes, answer: Answer) -> Any:
    """Return the bare session id to SearchQA's client, which sends an item here and reads the answer as the id."""
    try:
        body = orjson.loads(raw) if raw else None
    except orjson.JSONDecodeError:
        body = None
    return answer["id"] if isinstance(body, dict) and "id" in body else answer


def _in_points(answer: Answer, env: TextEnv) -> Answer:
    """Scale rewards to ScienceWorld's 100 points. This package's rewards add up to 1."""
    points = answer["info"].get("score", round(100 * answer["score"]))
    return {**answer, "reward": round(100 * answer["reward"]), "score": points}


def _with_description(answer: Answer, env: Any) -> Answer:
    """Add the task description, which the client itself puts before the first observation."""
    return {**_in_points(answer, env), "task_description": env.task_description, "observation": env.first_look}


def _with_endings(answer: Answer, env: TextEnv) -> Answer:
    return {**answer, "terminated": answer["done"], "truncated": False}


def _fenced_action(text: str) -> str:
    """Return the action in a whole model reply: the text of its first block in three backticks."""
    block = _FENCED.search(text)
    return block[1].strip() if block else text


DIALECTS: dict[str, Dialect] = {
    "sciworld": Dialect("data_idx", after_reset=_with_description, after_step=_in_points),
    "searchqa": Dialect("id", _bare_number, after_reset=lambda answer, env: answer["observation"]),
    "webarena": Dialect(
        "idx",
        lambda raw, answer: {**answer, "env_idx": answer["id"]},
        _fenced_action,
        after_reset=_with_endings,
        after_step=_with_endings,
    ),
    "maze": Dialect("game"),
    "wordle": Dialect("seed", queries={"/filtered_vocab": lambda env: env.vocabulary()}),
}
"""Dialects by environment. TextCraft's and BabyAI's clients use this server's protocol unchanged."""


def dialect_of(env_class: type[TextEnv]) -> Dialect:
    return DIALECTS.get(env_class.name, Dialect())


def run_query(query: Callable[[Any], Any], env: TextEnv) -> Any:
    try:
        return query(env)
    except Exception as error:
        raise EnvError(f"{env.name} raised {describe_error(error)}") from error
