"""BabyAI as a text game."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from agentgym_rl.environment.base import check_item
from agentgym_rl.environment.envs.babyai import levels
from agentgym_rl.environment.envs.babyai.field_of_view import Move, View, look
from agentgym_rl.environment.envs.babyai.moves import make_move
from agentgym_rl.environment.envs.babyai.oracle import Oracle
from agentgym_rl.environment.envs.babyai.picture import draw
from agentgym_rl.environment.envs.babyai.state import StateKeys
from agentgym_rl.environment.envs.babyai.text import (
    CHECK_ACTIONS,
    INSTRUCTION,
    TOOLS,
    build_menu,
    describe,
    normalise,
    read_action,
    refuse,
)
from agentgym_rl.environment.tools import Tool
from agentgym_rl.errors import EnvError
from agentgym_rl.types import Step


class BabyAI:
    """40 levels of minigrid's BabyAI. Item i is level i % 40 + 1 with seed i // 40. Implements TextEnv."""

    name: ClassVar[str] = "babyai"
    instruction: ClassVar[str] = INSTRUCTION
    splits: ClassVar[Mapping[str, range]] = {"train": range(4000, 400_000), "test": range(4000)}
    subsets: ClassVar[tuple[str, ...]] = levels.SUBSETS
    cheap: ClassVar[bool] = True

    def __init__(self) -> None:
        levels.minigrid_levels()  # fails now if minigrid is missing, not at the first episode
        self._item = -1
        self._level: Any = None
        self._states: StateKeys
        self._oracle: Oracle
        self._view: View
        self._menu: dict[str, tuple[Move, ...]] = {}
        self._done = True

    @classmethod
    def tools(cls) -> Sequence[Tool]:
        return TOOLS

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return levels.SUBSETS_OF_LEVEL[item % levels.NUM_LEVELS]

    @classmethod
    def published_item(cls, number: int) -> int:
        """Return `number`: AgentGym uses the same numbers."""
        return number

    agentgym_item = published_item

    def reset(self, item: int) -> str:
        self._level = levels.fresh_level(check_item(self, item))
        self._states = StateKeys(self._level)
        self._item = item
        self._oracle = Oracle(self._level)
        self._done = False
        return self._observe()

    def step(self, text: str) -> Step:
        self._require_running()
        action = normalise(text)
        if action == CHECK_ACTIONS:
            return Step(describe(self._level, self._view, self._menu), info={"valid": True})
        action, moves = read_action(self._view, self._menu, action)
        if moves is None:
            reason = refuse(self._level, self._view, action)
            return Step(f"{reason}\n{describe(self._level, self._view, self._menu)}", info={"valid": False})
        self._oracle.record(action)
        success = self._run(moves)
        if self._done:
            return Step(self._last_observation(success), float(success), True, {"valid": True, "success": success})
        return Step(self._observe(), info={"valid": True})

    def actions(self) -> list[str]:
        """Return the actions that the observation lists; none when the episode is over."""
        return [] if self._done else list(self._menu)

    def oracle(self) -> str:
        """Return the next action of a solution, found with knowledge of the whole grid."""
        self._require_running()
        return self._oracle.advise(self._menu)

    def state_key(self) -> str:
        """Return a key of the grid, the agent, the carried object and the mission progress, without the steps left."""
        self._require_level()
        return f"{self._item}:{self._states.key()}"

    def render(self) -> str:
        """Return an SVG of the whole grid, with the agent's view highlighted and the mission below."""
        self._require_level()
        return draw(self._level, look(self._level))

    def close(self) -> None:
        self._level = None
        self._done = True

    def _require_running(self) -> None:
        if self._done:
            raise EnvError("babyai needs a running episode, but this one is over or was never started: call reset")

    def _require_level(self) -> None:
        if self._level is None:
            raise EnvError("babyai has nothing to show before reset or after close: call reset")

    def _observe(self) -> str:
        self._view = look(self._level)
        self._menu = build_menu(self._level, self._view)
        return describe(self._level, self._view, self._menu)

    def _run(self, moves: tuple[Move, ...]) -> bool:
        """Make the moves until one fails or the episode ends. Return whether the mission is complete."""
        level = self._level
        for move in moves:
            before = level.agent_pos
            success = make_move(level, move)
            if move > Move.FORWARD:
                self._states.grid_changed()
            if success is not None:
                self._done = True
                return success
            if move is Move.FORWARD and level.agent_pos is before:
                break
        return False

    def _last_observation(self, success: bool) -> str:
        if success:
            return "You reached the goal."
        return "You ran out of steps." if self._level.step_count >= self._level.max_steps else "You failed the goal."
