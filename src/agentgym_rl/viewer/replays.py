"""Pictures of every turn of a recorded episode, drawn by the environment while its actions are replayed.

Environments are deterministic given the item, so training does not have to record pictures. If the replay fails (the
environment is not installed, draws nothing, or differs from the record), the reason is shown instead. A picture that
the environment recorded itself, as text under `picture` of a step's info, is shown unchanged.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

from agentgym_rl.common.chat_messages import PLAYED_ACTION, PLAYED_CALLS
from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.types import EnvSession, ToolCall
from agentgym_rl.viewer.playground_protocols import Environments

MAX_CACHED_REPLAYS = 32
MAX_PICTURE_BYTES = 8 << 20
REPLAY_TIMEOUT_S = 120.0
"""Seconds for the replay of a whole episode."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture drawn by an environment."""

    media_type: str
    data: bytes


Frame = Picture | str
"""A picture, or the reason why there is none."""


def picture_of(drawn: str | bytes) -> Frame:
    """Return the picture with its media type: PNG, SVG or HTML. HTML is shown in a frame that runs no script."""
    data = drawn if isinstance(drawn, bytes) else drawn.encode("utf-8", errors="replace")
    if len(data) > MAX_PICTURE_BYTES:
        return f"the picture has {len(data)} bytes, at most {MAX_PICTURE_BYTES} are shown"
    if data.startswith(b"\x89PNG"):
        return Picture("image/png", data)
    if data.lstrip().startswith((b"<svg", b"<?xml")):
        return Picture("image/svg+xml", data)
    # The page opens at the last section, the newest. Texts are escaped, so the tag is the environment's own.
    before, tag, after = data.rpartition(b"<section")
    return Picture("text/html", before + tag + b' id="now"' + after if tag else data)


async def draw(session: EnvSession) -> Frame:
    try:
        return picture_of(await session.render())
    except (EnvError, ConfigError) as error:
        return str(error)


_CALL_FIELDS = {field.name for field in fields(ToolCall)}
Style = tuple[str, int | None, int | None, str]
"""Options of `Environments.open` that a run sets: style, turns per attempt, attempts, retry."""
Reply = str | list[ToolCall]
"""A recorded reply: the text to play, or the tool calls."""


def replies_and_observations(episode: dict[str, Any]) -> tuple[list[Reply], list[str]]:
    """Return replies and observations. There is one more observation unless the last reply was not played.

    The results of a reply's tool calls are one observation, as in the environment's answer.
    """
    replies: list[Reply] = []
    observations: list[list[str]] = []
    for message in episode["messages"]:
        if message.get("purpose"):
            continue
        if message["role"] == "assistant":
            calls = message.get("tool_calls")
            reply = str(message["content"]) if calls is None else [_call(call) for call in calls]
            played = played_by_program(episode, len(replies))
            replies.append(reply if played is None else played)
        elif message["role"] != "system":
            if len(observations) == len(replies):
                observations.append([])
            observations[-1].append(str(message["content"]))
    return replies, ["\n".join(texts) for texts in observations]


def _call(row: Any) -> ToolCall:
    """Return a recorded call. One that is unreadable becomes a malformed call, which the environment answers."""
    if isinstance(row, dict) and isinstance(row.get("arguments"), dict) and set(row) <= _CALL_FIELDS:
        return ToolCall(**{"name": "", **row})
    return ToolCall("", error="unreadable record")


def played_by_program(episode: dict[str, Any], turn: int) -> Reply | None:
    """Return what an external program played in a turn, which the model's reply need not show; None without one."""
    infos = episode.get("infos")
    info = infos[turn] if isinstance(infos, list) and turn < len(infos) else None
    if not isinstance(info, dict):
        return None
    if isinstance(calls := info.get(PLAYED_CALLS), list):
        return [_call(call) for call in calls]
    return str(info[PLAYED_ACTION]) if PLAYED_ACTION in info else None


def shown_calls(episode: dict[str, Any]) -> list[list[dict[str, Any]] | None]:
    """Return the tool calls of each message for the pages, or None: name, arguments as text, id, error."""
    shown: list[list[dict[str, Any]] | None] = []
    turn = 0
    for message in episode["messages"]:
        calls = message.get("tool_calls")
        if message["role"] == "assistant" and not message.get("purpose"):
            played, turn = played_by_program(episode, turn), turn + 1
            if isinstance(played, list):
                shown.append(_shown(played))
                continue
        shown.append(_shown([_call(call) for call in calls]) if isinstance(calls, list) else None)
    return shown


def _shown(calls: list[ToolCall]) -> list[dict[str, Any]]:
    return [
        {
            "name": str(call.name),
            "arguments": [[str(name), _value_text(value)] for name, value in dict(call.arguments).items()],
            "id": str(call.id),
            "error": str(call.error),
            "raw": str(call.raw),
        }
        for call in calls
    ]


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _recorded_picture(episode: dict[str, Any], turn: int) -> Frame | None:
    """Return the picture in the info of the step before this state. The first state has no such step."""
    infos = episode.get("infos")
    info = infos[turn - 1] if isinstance(infos, list) and 0 < turn <= len(infos) else None
    picture = info.get("picture") if isinstance(info, dict) else None
    return picture_of(picture) if isinstance(picture, str) and picture else None


def _moves(infos: Any, turn: int, key: str) -> list[str]:
    """Return the actions of other roles that a turn's info records `before` or `after` it."""
    info = infos[turn] if isinstance(infos, list) and 0 <= turn < len(infos) else None
    moves = info.get(key) if isinstance(info, dict) else None
    return (
        [str(move[1]) for move in moves if isinstance(move, list) and len(move) == 2] if isinstance(moves, list) else []
    )


class Replays:
    """Replayed episodes. The most recent ones are cached by content, because a resumed run may give an id again."""

    def __init__(self, environments: Environments) -> None:
        self._environments = environments
        self._cache: OrderedDict[bytes, tuple[list[asyncio.Future[Frame]], asyncio.Task[None]]] = OrderedDict()

    async def frame(self, episode: dict[str, Any], style: Style, turn: int, folder: Path | None = None) -> Frame:
        """Return the state before reply `turn`. The state after the last reply is the end.

        `folder` is the run or evaluation that the episode is part of.
        """
        replies, observations = replies_and_observations(episode)
        if not 0 <= turn <= len(replies):
            return f"the episode has {len(replies)} turns and no turn {turn}"
        if turn >= len(observations):
            return "the last reply was truncated or failed, so the environment did not answer it"
        if (recorded := _recorded_picture(episode, turn)) is not None:
            return recorded
        played = (episode["env"], episode["item"], replies, observations, episode.get("infos"), style, folder)
        key = blake2b(repr(played).encode()).digest()
        if key not in self._cache:
            frames = [asyncio.get_running_loop().create_future() for _ in observations]
            task = asyncio.create_task(self._play(frames, episode, replies, observations, (*style, folder)))
            self._cache[key] = (frames, task)
            while len(self._cache) > MAX_CACHED_REPLAYS:
                _, (_, oldest) = self._cache.popitem(last=False)
                oldest.cancel()
        self._cache.move_to_end(key)
        return await asyncio.shield(self._cache[key][0][turn])

    async def close(self) -> None:
        tasks = [task for _, task in self._cache.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _play(
        self,
        frames: list[asyncio.Future[Frame]],
        episode: dict[str, Any],
        replies: list[Reply],
        observations: list[str],
        options: tuple[Any, ...],
    ) -> None:
        reason = "the replay was stopped"
        try:
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                session = await self._environments.open(str(episode["env"]), *options)
                try:
                    reason = await self._follow(session, frames, episode, replies, observations)
                finally:
                    await session.close()
        except TimeoutError:
            reason = f"the replay took longer than {REPLAY_TIMEOUT_S:g} s"
        except (EnvError, ConfigError) as error:
            reason = str(error)
        finally:
            for frame in frames:
                if not frame.done():
                    frame.set_result(reason)

    @staticmethod
    async def _follow(
        session: EnvSession,
        frames: list[asyncio.Future[Frame]],
        episode: dict[str, Any],
        replies: list[Reply],
        observations: list[str],
    ) -> str:
        step = await session.reset(int(episode["item"]))
        for turn, recorded in enumerate(observations):
            if turn:
                reply = replies[turn - 1]
                step = await (session.step(reply) if isinstance(reply, str) else session.call(reply))
            for action in _moves(episode.get("infos"), max(0, turn - 1), "after" if turn else "before"):
                step = await session.step(action)  # of another role
            # A program writes its own prompts, so those need not show the observation.
            if played_by_program(episode, 0) is None and step.observation.strip() != recorded.strip():
                position = f"after turn {turn}" if turn else "at the start"
                return (
                    f"the replay differs from the record {position}: the environment changed or is not deterministic, "
                    "or it was played with other arguments: start the viewer with --env and the folder of this run"
                )
            frames[turn].set_result(await draw(session))
            await asyncio.sleep(0)  # cheap environments run inline: let the server answer other requests
        return ""
