"""How AgentGym's own clients speak to this server: what they call the session and the item, and what they read.

Requests of this package name the item `item`, those of AgentGym's clients `data_idx`, `game`, `seed`, `idx` or `id`.
So one path serves both: a session that was reset in AgentGym's words is answered in them until its next reset.
Where AgentGym's numbers name the same games as here, they are translated; otherwise they are this server's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from agentgym_rl.environment import wire
from agentgym_rl.environment.base import HasAgentGymNumbers, TextEnv
from agentgym_rl.errors import EnvError

Answer = dict[str, Any]
_FENCED = re.compile(r"```(.*?)```", re.DOTALL)


def _as_is(answer: Answer, env: TextEnv) -> Any:
    return answer


@dataclass(frozen=True, slots=True)
class Dialect:
    """What AgentGym's client of one environment sends and reads beyond this server's protocol."""

    item_key: str = ""
    """Name of the item in /reset; empty if the client speaks this server's protocol as it is."""
    created: Callable[[bytes, Answer], Any] = lambda raw, answer: answer
    """Answer to /create, given the request's body."""
    action: Callable[[str], str] = lambda text: text
    """The action in what the client sends."""
    after_reset: Callable[[Answer, TextEnv], Any] = _as_is
    after_step: Callable[[Answer, TextEnv], Any] = _as_is
    questions: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Further GET paths: a function of the environment, which must not change it and may be asked before a reset."""

    def read_item(self, body: dict[str, Any], env_class: type[TextEnv]) -> tuple[int, bool]:
        """Return the item of a /reset, and whether it was asked for in AgentGym's words."""
        if "item" in body:
            return wire.integer(body, "item"), False
        if not self.item_key or self.item_key not in body or (self.item_key == "id" and "env_idx" not in body):
            return wire.integer(body, "data_idx"), False
        number = wire.integer(body, self.item_key)
        return (env_class.agentgym_item(number) if issubclass(env_class, HasAgentGymNumbers) else number), True


def session_id(body: dict[str, Any]) -> int:
    return wire.integer(body, "env_idx" if "env_idx" in body else "id")


def created_session(answer: bytes) -> int:
    """Return the session's id in an answer to /create, which may be the bare number."""
    created = orjson.loads(answer)
    return int(created["id"] if isinstance(created, dict) else created)


def _bare_number(raw: bytes, answer: Answer) -> Any:
    """SearchQA's client names an item already here and takes the whole answer for the session's number."""
    try:
        body = orjson.loads(raw) if raw else None
    except orjson.JSONDecodeError:
        body = None
    return answer["id"] if isinstance(body, dict) and "id" in body else answer


def _in_points(answer: Answer, env: TextEnv) -> Answer:
    """ScienceWorld pays up to 100 points where this package pays up to 1."""
    points = answer["info"].get("score", round(100 * answer["score"]))
    return {**answer, "reward": round(100 * answer["reward"]), "score": points}


def _with_description(answer: Answer, env: Any) -> Answer:
    """The client itself puts the task before the first observation."""
    return {**_in_points(answer, env), "task_description": env.task_description, "observation": env.first_look}


def _with_endings(answer: Answer, env: TextEnv) -> Answer:
    return {**answer, "terminated": answer["done"], "truncated": False}


def _fenced_action(text: str) -> str:
    """The client sends the whole reply of a model; the action is what it puts between three backticks first."""
    found = _FENCED.search(text)
    return found[1].strip() if found else text


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
    "wordle": Dialect("seed", questions={"/filtered_vocab": lambda env: env.vocabulary()}),
}
"""By environment. TextCraft's and BabyAI's clients speak this server's protocol as it is."""


def dialect_of(env_class: type[TextEnv]) -> Dialect:
    return DIALECTS.get(env_class.name, Dialect())


def ask(question: Callable[[Any], Any], env: TextEnv) -> Any:
    try:
        return question(env)
    except Exception as error:
        raise EnvError(f"{env.name} raised {type(error).__name__}: {error}") from error
