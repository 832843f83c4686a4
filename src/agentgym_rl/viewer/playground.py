"""Episodes played in the browser, by hand or by a policy, one turn at a time. Nothing is written to disk."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.types import EnvSession, Message, Step
from agentgym_rl.viewer.playground_protocols import Environments, Policy
from agentgym_rl.viewer.replays import Frame, draw

MAX_GAMES = 8
"""Open games. Opening one more closes the game that was idle longest."""
IDLE_TIMEOUT_S = 1800.0
"""Idle seconds after which a game may be closed."""


@dataclass(slots=True)
class Game:
    """One episode in a browser tab."""

    env: str
    item: int
    session: EnvSession
    step: Step
    messages: list[Message] = field(default_factory=list)
    """Messages so far, without the last observation, which has no reply yet."""
    turns: list[dict[str, Any]] = field(default_factory=list)
    policies: dict[str, Policy] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    used: float = field(default_factory=time.monotonic)

    async def close(self) -> None:
        for policy in self.policies.values():
            await policy.close()
        await self.session.close()


class NoSuchGame(EnvError):
    """An id that belongs to no open game."""


class Playground:
    """All open games by id."""

    def __init__(self, environments: Environments) -> None:
        self._environments = environments
        self._games: dict[str, Game] = {}

    async def open(self, env: str, item: int) -> dict[str, Any]:
        await self._close_idle_games()
        session = await self._environments.open(env)
        try:
            step = await session.reset(item)
        except BaseException:
            await session.close()
            raise
        game_id = secrets.token_urlsafe(16)
        self._games[game_id] = Game(env, item, session, step)
        return await self._describe(game_id)

    async def act(self, game_id: str, action: str) -> dict[str, Any]:
        """Play the action that a person typed."""
        game = self._game(game_id)
        async with game.lock:
            messages = self._unread(game)
            if not game.messages and game.session.instruction:
                messages.insert(0, Message("system", game.session.instruction))
            await self._play(game, messages, Message("assistant", action), action, "you")
        return await self._describe(game_id)

    async def play_turn(self, game_id: str, name: str) -> dict[str, Any]:
        """Let a policy play one turn."""
        game = self._game(game_id)
        if name not in self._environments.policies:
            raise ConfigError(f"unknown policy {name!r}: known are {', '.join(self._environments.policies)}")
        async with game.lock:
            if game.step.done:
                raise EnvError("this episode has ended: start another")
            if name not in game.policies:
                game.policies[name] = self._environments.policies[name](game.session, secrets.randbits(31))
            reply = await game.policies[name].reply(
                game.messages, game.step.results or game.step.observation, self._environments.limits
            )
            if reply.action is None:
                raise EnvError(f"{name} cannot reply: its context is full")
            action = self._environments.action_in(name, reply.action.content)
            if reply.action.tool_calls is not None:
                action = reply.action.text
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

    @staticmethod
    def _unread(game: Game) -> list[Message]:
        """Return the last observation as messages: the results of tool calls, or one text."""
        calls = game.messages[-1].tool_calls if game.messages else None
        if not game.step.results or calls is None:
            return [Message("user", game.step.observation)]
        pairs = zip(game.step.results, calls, strict=True)
        return [Message("tool", result, tool_call_id=call.id) for result, call in pairs]

    async def _play(self, game: Game, observation: list[Message], reply: Message, action: str, player: str) -> None:
        if game.step.done:
            raise EnvError("this episode has ended: start another")
        calls = reply.tool_calls
        step = await (game.session.step(action) if calls is None else game.session.call(calls, reply.content))
        game.messages += [*observation, reply]
        game.turns.append(
            {
                "observation": game.step.observation,
                "reply": reply.text,
                "action": action,
                "by": player,
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
            raise NoSuchGame("this episode was closed (idle too long, or too many open): start another")
        game = self._games[game_id]
        game.used = time.monotonic()
        return game

    async def _close_idle_games(self) -> None:
        while self._games:
            oldest = min(self._games, key=lambda game_id: self._games[game_id].used)
            idle_s = time.monotonic() - self._games[oldest].used
            if len(self._games) < MAX_GAMES and idle_s <= IDLE_TIMEOUT_S:
                return
            await self._games.pop(oldest).close()
