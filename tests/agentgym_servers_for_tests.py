"""Servers with the requests, answers and rules of reward of AgentGym's own, which need data, accounts or keys."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import re
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from servers_for_tests import wait_until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentgym_rl.environment.server import bind


@dataclass
class ServerBase:
    """Routes and a record of the actions received."""

    actions: list[str] = field(default_factory=list)
    num_created: int = 0

    def routes(self) -> list[Route]:
        posts = [Route(f"/{name}", getattr(self, name), methods=["POST"]) for name in ("create", "reset", "step")]
        return [*posts, *(Route(f"/{n}", getattr(self, n)) for n in ("available_actions",) if hasattr(self, n))]


def require(body: dict[str, Any], **kinds: type) -> Response | None:
    """Return the 422 of a pydantic model if a field is missing or of another type."""
    wrong = [name for name, kind in kinds.items() if type(body.get(name)) is not kind]
    return (
        JSONResponse({"detail": [{"loc": ["body", name], "msg": "Field required"} for name in wrong]}, 422)
        if wrong
        else None
    )


@dataclass
class ToolServer(ServerBase):
    """Reads `Action: NAME with Action Input: {...}` in one line. The reward is that of the episode so far."""

    keeps_a_state: bool = False
    """Like Todo: the final reward needs the right answer and the right state."""
    episodes: dict[int, dict[str, Any]] = field(default_factory=dict)

    async def create(self, request: Request) -> Response:
        body = await request.json()
        if (refused := require(body, id=int)) is not None:
            return refused
        self.num_created += 1
        self.episodes[self.num_created - 1] = {}
        return JSONResponse(self.num_created - 1)

    async def reset(self, request: Request) -> Response:
        body = await request.json()
        if (refused := require(body, env_idx=int, id=int)) is not None:
            return refused
        self.episodes[body["env_idx"]] = {"item": body["id"], "reward": 0.0, "done": False, "changed": False}
        goal = f"Now new trial starts.\nYou should perform actions to accomplish the goal: find number {body['id']}"
        return JSONResponse(f"{goal}\nGive me one action.")

    async def step(self, request: Request) -> Response:
        body = await request.json()
        if (refused := require(body, env_idx=int, action=str)) is not None:
            return refused
        self.actions.append(body["action"])
        episode = self.episodes[body["env_idx"]]
        match = re.search(r"\s*(.*?)\s*with\s*Action Input:\s*(.*?)$", body["action"])
        if match is None:
            text = 'Format error, please response in the format of "Action: [your action] with Action Input: [...]'
        else:
            text = f"Observation: {self._call(episode, *match.groups())}\nGive me one action."
        return JSONResponse({"observation": text, "reward": float(episode["reward"]), "done": episode["done"]})

    def _call(self, episode: dict[str, Any], name: str, arguments: str) -> str:
        if not name.startswith("Action:"):
            return "ERROR | TypeError(cannot unpack non-iterable NoneType object)"
        name = name.removeprefix("Action:").strip()
        try:
            values = ast.literal_eval(arguments)
        except (SyntaxError, ValueError):
            return "ERROR | Exception(Parameters in action input are not valid, please change your action input.)"
        if name == "look":
            episode["reward"] = max(episode["reward"], 0.5)
            return str({"number": episode["item"]})
        if name == "change":
            episode["changed"] = True
            return "changed"
        if name == "finish":
            episode["done"] = True
            right = values.get("answer") == episode["item"]
            episode["reward"] = 1.0 if right else episode["reward"]
            if self.keeps_a_state:
                episode["reward"] = right and episode["changed"]
            return str(values.get("answer"))
        return f"ERROR | Invalid action: {name}."


@dataclass
class AlfWorldServer(ServerBase):
    """Reports errors as 200, lists the possible actions beside the observation, and has no /close."""

    games: dict[int, int] = field(default_factory=dict)

    async def create(self, request: Request) -> Response:
        self.num_created += 1
        return JSONResponse({"id": self.num_created - 1})

    async def reset(self, request: Request) -> Response:
        body = await request.json()
        if (refused := require(body, id=int, game=int, world_type=str)) is not None:
            return refused
        if body["world_type"] not in ("Text", "Embody", "Hybrid"):
            return JSONResponse({"error": 'world_type must be one of "Text", "Embody" and "Hybrid"'})
        self.games[body["id"]] = body["game"]
        text = "You are in the middle of a room. You see a shelf 1.\nYour task is to: go to the shelf."
        answer = {"id": body["id"], "observation": text, "available_actions": ["go to shelf 1", "look"]}
        return JSONResponse({**answer, "task_type": "pick_and_place_simple-Mug-None-Shelf-1/trial"})

    async def step(self, request: Request) -> Response:
        body = await request.json()
        if (refused := require(body, id=int, action=str)) is not None:
            return refused
        if body["id"] not in self.games:
            return JSONResponse({"error": f"The id {body['id']} is not valid."})
        self.actions.append(body["action"])
        won = body["action"] == "go to shelf 1"
        text = "On the shelf 1, you see nothing." if won else "Nothing happens."
        answer = {"observation": text, "reward": float(won), "available_actions": ["look"], "done": won}
        return JSONResponse(answer)

    async def available_actions(self, request: Request) -> Response:
        return JSONResponse(["go to shelf 1", "look"])


@dataclass
class SqlGymServer(ServerBase):
    """Has eight sessions. A further /create returns one of them. One statement ends the episode."""

    may_abandon: bool = False
    """Whether an episode may be reset before it ended. Otherwise that shows that two episodes share a session."""
    sessions: list[int] = field(default_factory=list)
    items: dict[int, int | None] = field(default_factory=dict)

    async def create(self, request: Request) -> Response:
        self.num_created += 1
        if len(self.sessions) == 8:
            return JSONResponse(self.sessions[(self.num_created - 1) % 8])
        self.sessions.append(1000 + 7 * self.num_created)
        self.items[self.sessions[-1]] = None
        return JSONResponse(self.sessions[-1])

    async def reset(self, request: Request) -> Response:
        body = await request.json()
        if (refused := require(body, env_idx=int, item_id=int)) is not None:
            return refused
        assert self.may_abandon or self.items[body["env_idx"]] is None, "two episodes play in one session"
        self.items[body["env_idx"]] = body["item_id"]
        return JSONResponse([f"numbers contains tables such as n. What is {body['item_id']} plus one?", None])

    async def step(self, request: Request) -> Response:
        body = await request.json()
        if (refused := require(body, env_idx=int, action=str)) is not None:
            return refused
        self.actions.append(body["action"])
        await asyncio.sleep(0.01)
        item = self.items[body["env_idx"]]
        assert item is not None
        self.items[body["env_idx"]] = None
        try:
            rows: Any = sqlite3.connect(":memory:").execute(body["action"]).fetchall()
        except sqlite3.Error as error:
            rows = error
        reward = 0.0 if isinstance(rows, Exception) else float(set(rows) == {(item + 1,)})
        return JSONResponse({"state": str(rows)[:100], "reward": reward, "done": True, "info": {"ground_truth": "..."}})


CLICKABLES = {"results": ["back to search", "b001"], "product": ["back to search", "< prev", "red", "buy now"]}


@dataclass
class WebShopServer(ServerBase):
    """Answers /reset with a pair, names the page `state`, and has no /close."""

    pages: dict[int, str] = field(default_factory=dict)

    async def create(self, request: Request) -> Response:
        self.num_created += 1
        return JSONResponse(48_000_000 + self.num_created)

    async def reset(self, request: Request) -> Response:
        body = await request.json()
        if (refused := require(body, env_idx=int, session_id=int)) is not None:
            return refused
        self.pages[body["env_idx"]] = "search"
        return JSONResponse(["WebShop [SEP] Instruction: [SEP] Find me a red mug [SEP] Search", None])

    async def step(self, request: Request) -> Response:
        body = await request.json()
        if (refused := require(body, env_idx=int, action=str)) is not None:
            return refused
        self.actions.append(body["action"])
        number, action = body["env_idx"], body["action"]
        before = self.pages[number]
        after = {("search", "search[red mug]"): "results", ("results", "click[b001]"): "product"}.get((before, action))
        bought = (before, action) == ("product", "click[buy now]")
        self.pages[number] = after or before
        state = "Thank you for shopping with us!" if bought else self.pages[number]
        return JSONResponse({"state": state, "reward": 0.75 if bought else 0.0, "done": bought, "info": None})

    async def available_actions(self, request: Request) -> Response:
        page = self.pages[int(request.query_params["env_idx"])]
        return JSONResponse({"has_search_bar": page == "search", "clickables": CLICKABLES.get(page, ["search"])})


@contextlib.contextmanager
def running(server: ServerBase) -> Iterator[str]:
    """Run the server on a free loopback port; yield its address."""
    listener = bind("127.0.0.1", 0)
    web = uvicorn.Server(uvicorn.Config(Starlette(routes=server.routes()), log_level="critical", lifespan="off"))
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: web.started)
        yield f"agentgym+http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        web.should_exit = True
        thread.join(10)
        assert not thread.is_alive()
