"""Episodes played from the browser, by hand or by a policy, one turn at a time. Nothing is written."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.types import EnvSession, Message, Step
from agentgym_rl.viewer.playground_protocols import Policy, Worlds
from agentgym_rl.viewer.replays import Frame, draw

MAX_GAMES = 8
"""Open at once; a ninth closes the one that was idle longest."""
IDLE_S = 1800.0


@dataclass(slots=True)
class Game:
    """One episode in a browser tab."""

    env: str
    item: int
    session: EnvSession
    step: Step
    messages: list[Message] = field(default_factory=list)
    """What was said so far, without the observation nobody has answered yet."""
    turns: list[dict[str, Any]] = field(default_factory=list)
    policies: dict[str, Policy] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    used: float = field(default_factory=time.monotonic)

    async def close(self) -> None:
        for policy in self.policies.values():
            await policy.close()
        await self.session.close()


class NoSuchGame(EnvError):
    """The id is not that of an open game."""


class Playground:
    """Every open game by id."""

    def __init__(self, worlds: Worlds) -> None:
        self._worlds = worlds
        self._games: dict[str, Game] = {}

    async def open(self, env: str, item: int) -> dict[str, Any]:
        await self._make_room()
        session = await self._worlds.open(env)
        try:
            step = await session.reset(item)
        except BaseException:
            await session.close()
            raise
        game_id = secrets.token_urlsafe(16)
        self._games[game_id] = Game(env, item, session, step)
        return await self._describe(game_id)

    async def act(self, game_id: str, action: str) -> dict[str, Any]:
        """Play what a person typed."""
        game = self._game(game_id)
        async with game.lock:
            heard = [Message("user", game.step.observation)]
            if not game.messages and game.session.instruction:
                heard.insert(0, Message("system", game.session.instruction))
            await self._play(game, heard, Message("assistant", action), action, "you")
        return await self._describe(game_id)

    async def let_play(self, game_id: str, name: str) -> dict[str, Any]:
        """One turn by the policy of that name."""
        game = self._game(game_id)
        if name not in self._worlds.policies:
            raise ConfigError(f"there is no policy {name!r}: there are {', '.join(self._worlds.policies)}")
        async with game.lock:
            if game.step.done:
                raise EnvError("this episode is over: start another")
            if name not in game.policies:
                game.policies[name] = self._worlds.policies[name](game.session, secrets.randbits(31))
            reply = await game.policies[name].reply(game.messages, game.step.observation, self._worlds.limits)
            if reply.action is None:
                raise EnvError(f"{name} has no room left to reply: its context is full")
            action = self._worlds.action_in(name, reply.action.content)
            await self._play(game, reply.observation, reply.action, action, name)
        return await self._describe(game_id)

    async def picture(self, game_id: str) -> Frame:
        game = self._game(game_id)
        async with game.lock:
            return await draw(game.session)

    async def close(self, game_id: str) -> None:
        await self._game(game_id).close()
        self._games.pop(game_id, None)

    async def close_all(self) -> None:
        games = list(self._games.values())
        self._games.clear()
        await asyncio.gather(*(game.close() for game in games))

    async def _play(self, game: Game, heard: list[Message], said: Message, action: str, who: str) -> None:
        if game.step.done:
            raise EnvError("this episode is over: start another")
        step = await game.session.step(action)
        game.messages += [*heard, said]
        game.turns.append(
            {
                "observation": game.step.observation,
                "reply": said.content,
                "action": action,
                "by": who,
                "reward": step.reward,
                "valid": step.info.get("valid", True),
            }
        )
        game.step = step

    async def _describe(self, game_id: str) -> dict[str, Any]:
        game = self._game(game_id)
        actions: list[str] = []
        note = ""
        if not game.step.done:
            try:
                actions = await game.session.actions()
            except EnvError as error:
                note = str(error)
        reward = sum(turn["reward"] for turn in game.turns)
        return {
            "session": game_id,
            "env": game.env,
            "item": game.item,
            "instruction": game.session.instruction,
            "observation": game.step.observation,
            "turns": game.turns,
            "reward": reward,
            "done": game.step.done,
            "success": game.step.done and bool(game.step.info.get("success", reward >= 1.0)),
            "actions": actions,
            "note": note,
        }

    def _game(self, game_id: str) -> Game:
        if game_id not in self._games:
            raise NoSuchGame("this episode is closed (idle too long, or too many open): start another")
        game = self._games[game_id]
        game.used = time.monotonic()
        return game

    async def _make_room(self) -> None:
        oldest = sorted(self._games, key=lambda game_id: self._games[game_id].used)
        idle = [g for g in oldest if time.monotonic() - self._games[g].used > IDLE_S]
        surplus = oldest[: max(0, len(oldest) - MAX_GAMES + 1)]
        for game_id in dict.fromkeys([*idle, *surplus]):
            await self._games.pop(game_id).close()
