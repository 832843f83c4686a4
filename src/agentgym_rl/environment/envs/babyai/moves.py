"""Moves in a minigrid level, by minigrid's rules. Turns and steps, the most frequent ones, need no arrays here."""

from __future__ import annotations

from typing import Any

from agentgym_rl.environment.envs.babyai.field_of_view import DIRECTIONS, Move


def make_move(level: Any, move: Move) -> bool | None:
    """Make a move. Return None while the episode goes on, at its end whether the mission is complete."""
    if move > Move.FORWARD:
        _, reward, terminated, truncated, _ = level.step(move)
        return bool(reward > 0) if terminated or truncated else None
    level.step_count += 1
    if move is Move.FORWARD:
        x, y = front_of(level)
        thing = level.grid.grid[y * level.grid.width + x]
        if thing is None or thing.can_overlap():
            level.agent_pos = (x, y)
    else:
        level.agent_dir = (level.agent_dir + (1 if move is Move.RIGHT else 3)) % 4
    status = level.instrs.verify(move)
    if status == "continue" and level.step_count < level.max_steps:
        return None
    return bool(status == "success")


def front_of(level: Any) -> tuple[int, int]:
    """Return the cell in front of the agent."""
    (x, y), (ahead_x, ahead_y) = level.agent_pos, DIRECTIONS[level.agent_dir]
    return int(x) + ahead_x, int(y) + ahead_y
