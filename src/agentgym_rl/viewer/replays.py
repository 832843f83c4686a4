"""The environment's own picture of every turn of a recorded episode, made by playing its actions again.

Environments are deterministic given the item, so this costs nothing while training. Where that fails (the environment
is not installed, draws nothing, or answers differently from what was recorded) the reason stands for the picture. A
picture that the environment recorded itself, as text under `picture` of a step's info, is shown as it is.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.types import EnvSession
from agentgym_rl.viewer.playground_protocols import Worlds

KEPT_REPLAYS = 32
MAX_PICTURE_BYTES = 8 << 20
TIMEOUT_S = 120.0
"""For a whole episode."""


@dataclass(frozen=True, slots=True)
class Picture:
    """What an environment drew."""

    media_type: str
    data: bytes


Frame = Picture | str
"""A picture, or why there is none."""


def picture_of(drawn: str | bytes) -> Frame:
    """Known kinds only: PNG, SVG, and HTML, which is shown in a frame that runs nothing."""
    data = drawn if isinstance(drawn, bytes) else drawn.encode("utf-8", errors="replace")
    if len(data) > MAX_PICTURE_BYTES:
        return f"the picture has {len(data)} bytes, at most {MAX_PICTURE_BYTES} are shown"
    if data.startswith(b"\x89PNG"):
        return Picture("image/png", data)
    if data.lstrip().startswith((b"<svg", b"<?xml")):
        return Picture("image/svg+xml", data)
    # The last section is what happened last: the page opens there. (Texts are escaped, so this is the drawer's own.)
    before, tag, after = data.rpartition(b"<section")
    return Picture("text/html", before + tag + b' id="now"' + after if tag else data)


async def draw(session: EnvSession) -> Frame:
    try:
        return picture_of(await session.render())
    except (EnvError, ConfigError) as error:
        return str(error)


def replies_and_observations(episode: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What was said, and what the environment showed: one more of these unless the last reply was never played."""
    messages = episode["messages"]
    replies = [str(m["content"]) for m in messages if m["role"] == "assistant"]
    return replies, [str(m["content"]) for m in messages if m["role"] == "user"]


def _recorded_picture(episode: dict[str, Any], turn: int) -> Frame | None:
    """The picture in the info of the step that led to this state; the first state has no such step."""
    infos = episode.get("infos")
    info = infos[turn - 1] if isinstance(infos, list) and 0 < turn <= len(infos) else None
    picture = info.get("picture") if isinstance(info, dict) else None
    return picture_of(picture) if isinstance(picture, str) and picture else None


class Replays:
    """Episodes played again, the last few of them kept."""

    def __init__(self, worlds: Worlds) -> None:
        self._worlds = worlds
        self._kept: OrderedDict[Any, tuple[list[asyncio.Future[Frame]], asyncio.Task[None]]] = OrderedDict()

    async def frame(self, name: Any, episode: dict[str, Any], style: tuple[str, int | None], turn: int) -> Frame:
        """The state in which reply `turn` was given; the one after the last reply is the end."""
        replies, observations = replies_and_observations(episode)
        if not 0 <= turn <= len(replies):
            return f"the episode has {len(replies)} turns, there is no turn {turn}"
        if turn >= len(observations):
            return "the last reply was cut or failed, so the environment never answered it"
        if (recorded := _recorded_picture(episode, turn)) is not None:
            return recorded
        if name not in self._kept:
            frames = [asyncio.get_running_loop().create_future() for _ in observations]
            task = asyncio.create_task(self._play(frames, episode, replies, observations, style))
            self._kept[name] = (frames, task)
            while len(self._kept) > KEPT_REPLAYS:
                _, (_, oldest) = self._kept.popitem(last=False)
                oldest.cancel()
        self._kept.move_to_end(name)
        return await asyncio.shield(self._kept[name][0][turn])

    async def close(self) -> None:
        tasks = [task for _, task in self._kept.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _play(
        self,
        frames: list[asyncio.Future[Frame]],
        episode: dict[str, Any],
        replies: list[str],
        observations: list[str],
        style: tuple[str, int | None],
    ) -> None:
        reason = "the replay was stopped"
        try:
            async with asyncio.timeout(TIMEOUT_S):
                session = await self._worlds.open(str(episode["env"]), *style)
                try:
                    reason = await self._follow(session, frames, int(episode["item"]), replies, observations)
                finally:
                    await session.close()
        except TimeoutError:
            reason = f"the replay took longer than {TIMEOUT_S:g} s"
        except (EnvError, ConfigError) as error:
            reason = str(error)
        finally:
            for frame in frames:
                if not frame.done():
                    frame.set_result(reason)

    @staticmethod
    async def _follow(
        session: EnvSession, frames: list[asyncio.Future[Frame]], item: int, replies: list[str], observations: list[str]
    ) -> str:
        step = await session.reset(item)
        for turn, recorded in enumerate(observations):
            if turn:
                step = await session.step(replies[turn - 1])
            if step.observation.strip() != recorded.strip():
                what = f"after turn {turn}" if turn else "at the start"
                return (
                    f"the replay differs from the record {what}: the environment has changed, or is not deterministic"
                )
            frames[turn].set_result(await draw(session))
            await asyncio.sleep(0)  # cheap environments play inline: let others be answered in between
        return ""
