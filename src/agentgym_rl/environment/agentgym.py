"""Client of AgentGym's own environment servers: `agentgym+http://127.0.0.1:36001/textcraft`.

They use two dialects. One names a session `id` and an item `data_idx`, and reports errors as 200 with
`{"error": ...}`. The other names a session `env_idx`, and the name of the item differs between servers. Servers ignore
unknown fields, so the item is sent under every name that some version uses. Some servers use a path, some the root.
Some have no /close; a finished session of theirs is kept and reused.

Such a server does not list its items, splits or instruction. For the environments of `agentgym_servers.SERVED` they
are known here; for others they come from the config.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

from agentgym_rl.environment import catalog, wire
from agentgym_rl.environment.agentgym_servers import KNOWN_DIALECTS, SERVED, Dialect, SessionKey
from agentgym_rl.environment.client import EnvClient
from agentgym_rl.environment.connection import Answer
from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.types import Step

SCHEMES = {"agentgym+http": "http", "agentgym+https": "https"}
INSTRUCTION = (
    "You act in a text environment. Each message tells you what you see or what your last action led to. "
    "Reply with exactly one action and nothing else."
)
SUM_TOLERANCE = 1e-6
"""Largest rounding error of a sum of rewards."""
_NO_SUCH_PATH = (404, 405)
_KEPT_INFO = ("success", "valid", "state_key")


def is_agentgym(url: str) -> bool:
    return urlsplit(url).scheme in SCHEMES


class Server:
    """Address, dialect and state of one server, shared by all clients of a pool."""

    def __init__(self, url: str, name: str = "") -> None:
        """Choose the dialect by the path's last word or `name`. The query overrides it, see `_apply_overrides`."""
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES:
            raise ConfigError(
                f"an AgentGym server's address looks like agentgym+http://host:36001/textcraft, got {url!r}"
            )
        path = parts.path.rstrip("/")
        parent, _, last = path.rpartition("/")
        known = KNOWN_DIALECTS.get(last) or KNOWN_DIALECTS.get(name) or Dialect()
        self.url = f"{SCHEMES[parts.scheme]}://{parts.netloc}"
        self.dialect = _apply_overrides(known, dict(parse_qsl(parts.query, keep_blank_values=True)), url)
        self.served = SERVED.get(last) or SERVED.get(name)
        """Instruction and items of the environment, if they are known."""
        self.prefixes = [path, parent] if path else [""]
        """Candidate paths: the given one, and its parent in case the last word is only a name. One once it is known."""
        self.has_close: bool | None = None
        """Whether the server has /close. None until it was tried."""
        self.in_use: set[int] = set()
        self.idle: list[int] = []
        """Reusable sessions: they ended without an error on a server without /close."""
        self.num_created = 0


def _apply_overrides(dialect: Dialect, query: dict[str, str], url: str) -> Dialect:
    for key, value in sorted(query.items()):  # the dialect first
        if key == "dialect" and value in ("id", "env_idx"):
            # The known names of the item belong to the known dialect.
            keys = dialect.item_keys if dialect.session_key == value else ()
            dialect = replace(dialect, session_key=cast(SessionKey, value), item_keys=keys)
        elif key == "reset_key" and value:
            dialect = replace(dialect, item_keys=(value,))
        elif key == "success_at" and re.fullmatch(r"-?\d+(\.\d+)?", value):
            dialect = replace(dialect, success_at=float(value))
        else:
            raise ConfigError(
                f"{url}: ?{key}={value} is not understood: known are dialect=id, dialect=env_idx, reset_key=NAME, "
                "success_at=NUMBER"
            )
    return dialect


class AgentGymClient(EnvClient):
    """One connection to an AgentGym server. A failed call is not retried, and its session is not reused."""

    def __init__(self, server: Server, token: str | None = None, timeout_s: float = 60.0) -> None:
        super().__init__(server.url, token, timeout_s)
        self._server = server
        self._rewards: dict[int, list[float]] = {}
        """Rewards since the last reset, starting with the reset's own, of sessions whose last call succeeded."""

    async def _create(self, owner: str) -> int:
        server = self._server
        session_id = server.idle.pop() if server.idle else await self._create_within_limit()
        if session_id in server.in_use:
            raise EnvError(f"{self.url} returned session {session_id} twice: two episodes would play the same game")
        server.in_use.add(session_id)
        self._rewards[session_id] = [0.0]
        return session_id

    async def _create_within_limit(self) -> int:
        server = self._server
        limit = server.dialect.max_sessions
        if limit is not None and server.num_created >= limit:
            raise wire.Full(f"{self.url} has {limit} sessions and all are in use: lower agent.concurrency to {limit}")
        server.num_created += 1
        try:
            return await self._new_session()
        except BaseException:
            server.num_created -= 1
            raise

    async def _new_session(self) -> int:
        server = self._server
        # Some `env_idx` servers need an item here; reset sets the real one.
        body = {} if server.dialect.session_key == "id" else {"id": 0}
        for prefix in server.prefixes:
            answer = await self._exchange("POST", f"{prefix}/create", body)
            if answer.status not in _NO_SUCH_PATH:
                created = self._read(answer, f"{prefix}/create")
                server.prefixes = [prefix]
                return self._read_session_id(created, f"{self.url}{prefix}/create")
        tried = " or ".join(f"{self.url}{prefix}/create" for prefix in server.prefixes)
        raise ConfigError(f"no AgentGym server answers at {tried}: check the address")

    def _read_session_id(self, created: Any, where: str) -> int:
        """Return the number in `{"id": 3}` or `{"env_idx": 3}` or `3`."""
        server = self._server
        session_key = server.dialect.session_key
        keys: tuple[SessionKey, ...] = ("id", "env_idx") if session_key is None else (session_key,)
        numbers = {key: created.get(key) for key in keys} if isinstance(created, dict) else {"env_idx": created}
        for key, number in numbers.items():
            if type(number) is int and key in keys:
                server.dialect = replace(server.dialect, session_key=key)
                return number
        raise EnvError(
            f"{where} must answer with a session's number under {' or '.join(keys)}, got {created!r:.80}: "
            "if it uses the other dialect, add ?dialect=id or ?dialect=env_idx to the address"
        )

    async def reset(self, session_id: int, item: int) -> Step:
        self._rewards.pop(session_id, None)
        dialect = self._server.dialect
        keys = dialect.item_keys or (("data_idx",) if dialect.session_key == "id" else ("id",))
        body = {self._key: session_id, **dict.fromkeys(keys, item), **dialect.extra}
        answer, where = await self._call("/reset", body)
        if isinstance(answer, list) and answer and isinstance(answer[0], str):
            answer = answer[0]
        if isinstance(answer, str):
            answer = {"observation": answer}
        if not isinstance(answer, dict):
            raise EnvError(f"{where} must answer with an observation, got {answer!r:.80}")
        step = self._step({"done": False, **answer, "reward": 0.0}, where)
        task = answer.get("task_description")
        if isinstance(task, str) and task not in step.observation:
            step.observation = f"{task}\n{step.observation}"
        # SciWorld's reset looks around, which may earn a reward. A reset is no turn, so the first step adds it.
        reward = answer.get("reward")
        reset_reward = float(reward) if isinstance(reward, int | float) and math.isfinite(reward) else 0.0
        self._rewards[session_id] = [reset_reward]
        return step

    async def step(self, session_id: int, action: str) -> Step:
        rewards = self._rewards.pop(session_id, [0.0])
        dialect = self._server.dialect
        answer, where = await self._call("/step", {self._key: session_id, "action": dialect.write_action(action)})
        step = self._step(answer, where)
        if dialect.reward_is_total:
            step.reward -= math.fsum(rewards)
        self._rewards[session_id] = rewards = [*rewards, step.reward]
        if len(rewards) == 2:
            step.reward += rewards[0]
        if step.done and "success" not in step.info:
            # Rewards such as 0.07 are rounded, and so is their sum.
            step.info["success"] = math.fsum(rewards) >= dialect.success_at - SUM_TOLERANCE
        return step

    async def close(self, session_id: int, timeout_s: float | None = None) -> None:
        """Close the session, or keep it for the next `create` if the server has no /close."""
        server = self._server
        # A server with a fixed number of sessions has no others, and a reset starts any of them anew.
        is_reusable = self._rewards.pop(session_id, None) is not None or server.dialect.max_sessions is not None
        try:
            if server.has_close is not False:
                path = f"{server.prefixes[0]}/close"
                answer = await self._exchange("POST", path, {self._key: session_id}, timeout_s)
                if answer.status not in _NO_SUCH_PATH or server.has_close:
                    self._read(answer, path, plain_text=True)
                    server.has_close = True
                    return
                server.has_close = False
            if is_reusable:
                server.idle.append(session_id)
        finally:
            server.in_use.discard(session_id)

    async def actions(self, session_id: int) -> list[str]:
        path = f"{self._server.prefixes[0]}/available_actions?{self._key}={session_id}"
        answer = await self._exchange("GET", path)
        actions = None if answer.status in _NO_SUCH_PATH else self._read(answer, path)
        if isinstance(actions, dict) and isinstance(actions.get("clickables"), list):  # WebShop; a search is free text
            actions = [f"click[{text}]" for text in actions["clickables"] if text != "search"]
        if not isinstance(actions, list) or not all(isinstance(action, str) for action in actions):
            raise wire.NotSupported(f"{self.url}{path} does not list actions: this AgentGym server offers none")
        return actions

    async def observation(self, session_id: int) -> str:
        return str(await self._json("GET", f"{self._server.prefixes[0]}/observation?{self._key}={session_id}"))

    async def oracle(self, session_id: int) -> str:
        raise wire.NotSupported(f"{self.url}: AgentGym servers have no oracle")

    async def advice(self, session_id: int) -> tuple[str, str]:
        return "", await self.oracle(session_id)

    async def state_key(self, session_id: int) -> str:
        raise wire.NotSupported(f"{self.url}: AgentGym servers have no state keys")

    async def render(self, session_id: int) -> str | bytes:
        raise wire.NotSupported(f"{self.url}: AgentGym servers draw no pictures")

    async def info(self) -> dict[str, Any]:
        served = self._server.served
        if served is None:
            return {"instruction": INSTRUCTION, "splits": {}, "subsets": []}
        splits = {split: [items.start, items.stop] for split, items in served.splits.items()}
        return {"instruction": served.instruction, "splits": splits, "subsets": []}

    async def items(self, split: str, subset: str | None = None) -> list[int]:
        served = self._server.served
        if served is not None and subset is None and split in served.splits:
            return list(served.splits[split])
        known = "" if served is None else f"; known here is {', '.join(served.splits)}"
        raise ConfigError(
            f"{self.url}: an AgentGym server does not list its items{known}: set items of the environment, for example "
            f'items = {{ {split} = "0-373" }}, and no subsets'
        )

    @property
    def _key(self) -> str:
        return self._server.dialect.session_key or "id"

    async def _call(self, path: str, body: Mapping[str, Any]) -> tuple[Any, str]:
        path = self._server.prefixes[0] + path
        return await self._json("POST", path, body), self.url + path

    def _read(self, answer: Answer, path: str, *, plain_text: bool = False) -> Any:
        where = self.url + path
        if answer.status != 200:
            raise wire.error_from(answer.status, answer.body, where)
        try:
            return wire.read_answer(answer.body, where)
        except EnvError:
            if plain_text and not answer.body.lstrip().startswith(b"{"):
                return answer.body.decode(errors="replace")  # one server answers with a bare `closed`
            raise

    def _step(self, answer: Any, where: str) -> Step:
        """Read a step: `observation` or `state`; `reward`; `done`, or `terminated` and `truncated`."""
        if not isinstance(answer, dict):
            raise EnvError(f"{where} must answer with an object, got {answer!r:.80}")
        observation = answer["observation"] if "observation" in answer else answer.get("state")
        if isinstance(observation, dict):
            observation = observation.get("text")
        endings = [answer[key] for key in ("done", "terminated", "truncated") if isinstance(answer.get(key), bool)]
        reward = answer.get("reward")
        if not isinstance(observation, str) or not endings or not isinstance(reward, int | float):
            raise EnvError(
                f"{where} must answer with observation or state, reward, and done or terminated, got {answer!r:.200}"
            )
        info = answer.get("info")
        kept = {key: info[key] for key in _KEPT_INFO if key in info} if isinstance(info, dict) else {}
        dialect = self._server.dialect
        if observation.startswith(dialect.refusals):
            kept["valid"] = False
        actions = answer.get("available_actions")
        if dialect.lists_actions and isinstance(actions, list) and not any(endings):
            observation += f"\nAVAILABLE ACTIONS: {', '.join(map(str, actions))}"
        return wire.checked_step(Step(observation, float(reward), any(endings), kept), where)


def read_items(text: str, env: str | None = None, url: str | None = None) -> list[int]:
    """Read items from `0-373`, `0-9,20` or a JSON file of numbers or AgentGym's `[{"item_id": "babyai_12"}]`.

    Bare numbers are items of the environment that is played; if `url` is AgentGym's server, of that server.
    AgentGym's ids are translated to items of this package. ConfigError if there is no such item or `env` differs.
    """
    if re.fullmatch(r"\s*\d+(\s*-\s*\d+)?(\s*,\s*\d+(\s*-\s*\d+)?)*\s*", text):
        items: list[int] = []
        for part in text.split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            if not numbers:
                raise ConfigError(f"items {text!r}: {part.strip()} goes down: write the smaller number first")
            items += numbers
    else:
        items = _read_task_list(Path(text), env, published=url is None or not is_agentgym(url))
    if not items:
        raise ConfigError(f"items {text!r} name no item: write them as 0-373, or as the path of a task list")
    return list(dict.fromkeys(items))


def _read_task_list(path: Path, env: str | None, *, published: bool) -> list[int]:
    expected = f"items {str(path)!r}: expected numbers such as 0-373 or 0-9,20, or the path of a JSON list of items"
    if not path.is_file():
        raise ConfigError(expected)
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{expected}: {error}") from None
    if not isinstance(rows, list):
        raise ConfigError(f"{expected}: it holds a {type(rows).__name__}")
    items = []
    for row in rows:
        name = row.get("task", row.get("item_id")) if isinstance(row, dict) else row
        parts = re.fullmatch(r"(?:(.*)([_/]))?(\d+)", str(name))
        if parts is None or isinstance(name, bool):
            raise ConfigError(f"{expected}: {row!r:.80} is not an item")
        item_env, number = (parts[1] or "").lower().replace("_", ""), int(parts[3])
        if env is not None and item_env != env and (item_env in catalog.CATALOG or item_env in KNOWN_DIALECTS):
            raise ConfigError(f"items {str(path)!r}: needs items of {env}, but {name} is an item of {item_env}")
        if published and item_env == env and item_env in catalog.CATALOG and parts[2] == "_":
            try:
                number = catalog.published_item(item_env, number)
            except ConfigError as error:
                raise ConfigError(f"items {str(path)!r}: {error}") from None
        items.append(number)
    return items
