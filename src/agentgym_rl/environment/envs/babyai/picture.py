"""An SVG of the whole grid: the agent, the highlighted cells that it sees, and the mission below."""

from __future__ import annotations

import textwrap
from html import escape
from typing import Any

from agentgym_rl.environment.envs.babyai.field_of_view import DIRECTIONS, HALF, SIZE, View

_TILE = 32
_COLORS = {
    "red": "#e0433f",
    "green": "#3fa34d",
    "blue": "#3d6fe0",
    "purple": "#8e4fc6",
    "yellow": "#e3b21c",
    "grey": "#8b9299",
}


def draw(level: Any, view: View) -> str:
    width, height = level.grid.width, level.grid.height
    lit = _lit_cells(level, view)
    shapes = [
        _draw_cell(x, y, level.grid.grid[y * width + x], (x, y) in lit) for y in range(height) for x in range(width)
    ]
    shapes.append(_draw_agent(level))
    columns = max(width * _TILE // 8, 20)
    lines = textwrap.wrap(f"Goal: {level.mission}", columns)
    if level.carrying is not None:
        lines.append(f"Carries: {level.carrying.color} {level.carrying.type}")
    bottom = height * _TILE
    for number, line in enumerate(lines):
        shapes.append(f'<text x="6" y="{bottom + 20 + 18 * number}">{escape(line)}</text>')
    full_width, full_height = max(width * _TILE, 180), bottom + 18 * len(lines) + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{full_width}" height="{full_height}" '
        f'viewBox="0 0 {full_width} {full_height}" font-family="sans-serif" font-size="14">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(shapes)}</svg>'
    )


def _lit_cells(level: Any, view: View) -> set[tuple[int, int]]:
    x, y = int(level.agent_pos[0]), int(level.agent_pos[1])
    ahead_x, ahead_y = DIRECTIONS[level.agent_dir]
    lit = set()
    for cell, seen in enumerate(view.visible):
        if seen:
            forward, side = cell // SIZE, cell % SIZE - HALF
            lit.add((x + forward * ahead_x - side * ahead_y, y + forward * ahead_y + side * ahead_x))
    return lit


def _draw_cell(x: int, y: int, thing: Any, lit: bool) -> str:
    if thing is not None and thing.type == "wall":
        floor = "#6b7280" if lit else "#4b5563"
    else:
        floor = "#fff6d6" if lit else "#e5e7eb"
    tile = f'<rect width="{_TILE}" height="{_TILE}" fill="{floor}" stroke="#c3c8cf" stroke-width="0.5"/>'
    drawing = "" if thing is None or thing.type == "wall" else _DRAWERS[thing.type](thing, _COLORS[thing.color])
    return f'<g transform="translate({x * _TILE} {y * _TILE})">{tile}{drawing}</g>'


def _draw_ball(thing: Any, color: str) -> str:
    return f'<circle cx="16" cy="16" r="9" fill="{color}"/>'


def _draw_box(thing: Any, color: str) -> str:
    return (
        f'<rect x="6" y="6" width="20" height="20" rx="2" fill="none" stroke="{color}" stroke-width="4"/>'
        f'<path d="M6 16H26" stroke="{color}" stroke-width="3"/>'
    )


def _draw_key(thing: Any, color: str) -> str:
    return (
        f'<circle cx="16" cy="10" r="5" fill="none" stroke="{color}" stroke-width="3.5"/>'
        f'<path d="M16 15V27M16 21H11M16 26H11" stroke="{color}" stroke-width="3.5" fill="none"/>'
    )


def _draw_door(thing: Any, color: str) -> str:
    if thing.is_open:
        return f'<path d="M2 1V31M30 1V31" stroke="{color}" stroke-width="4"/>'
    lock = '<path d="M16 13v7" stroke="#111827" stroke-width="4"/><circle cx="16" cy="12" r="4" fill="#111827"/>'
    knob = '<circle cx="25" cy="16" r="2.5" fill="#111827"/>'
    return (
        f'<rect x="1.5" y="1.5" width="29" height="29" fill="{color}" stroke="#111827" stroke-width="1.5"/>'
        f"{lock if thing.is_locked else knob}"
    )


_DRAWERS = {"ball": _draw_ball, "box": _draw_box, "key": _draw_key, "door": _draw_door}


def _draw_agent(level: Any) -> str:
    x, y = int(level.agent_pos[0]) * _TILE, int(level.agent_pos[1]) * _TILE
    return (
        f'<g transform="translate({x} {y}) rotate({90 * int(level.agent_dir)} 16 16)">'
        '<path d="M5 6L28 16L5 26L10 16Z" fill="#111827" stroke="#ffffff" stroke-width="1.5"/></g>'
    )
