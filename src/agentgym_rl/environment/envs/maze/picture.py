"""A picture of the game for people: an SVG of the maze from above."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agentgym_rl.environment.envs.maze.layout import Cell, Layout

_INK, _SOFT, _WALL = "#1f2933", "#6b7785", "#334155"
_UNSEEN, _SEEN, _TRAIL, _AGENT, _GOAL = "#e4e7eb", "#ffffff", "#8fb8de", "#2f6fb0", "#2f9e56"
_MARGIN, _TOP = 28, 92


def draw(item: int, layout: Layout, path: Sequence[Cell]) -> str:
    """Draw visited rooms in white, the way walked as a line, the player as a disc and the goal as a flag."""
    side = max(36, min(64, 384 // layout.size))
    board = side * layout.size
    width = max(board, 384) + 2 * _MARGIN
    left, height = (width - board) / 2, _TOP + board + _MARGIN

    def centre(cell: Cell) -> tuple[float, float]:
        return left + (cell[1] + 0.5) * side, _TOP + (cell[0] + 0.5) * side

    points = " ".join(f"{x:g},{y:g}" for x, y in map(centre, path))
    start_x, start_y = centre(path[0])
    x, y = centre(path[-1])
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif">',
            f"<title>Maze, item {item}: {len(path) - 1} moves</title>",
            f'<rect width="{width}" height="{height}" fill="#f7f8fa"/>',
            *_header(item, layout, path, width),
            *_rooms(layout, path, left, side),
            f'<polyline points="{points}" fill="none" stroke="{_TRAIL}" stroke-width="{side / 8:g}" '
            'stroke-linecap="round" stroke-linejoin="round"/>',
            f'<circle cx="{start_x:g}" cy="{start_y:g}" r="{side / 8:g}" fill="{_TRAIL}"/>',
            *_flag(*centre(layout.goal), side),
            f'<circle cx="{x:g}" cy="{y:g}" r="{side / 4.5:g}" fill="{_AGENT}" stroke="#fff" stroke-width="2"/>',
            *_walls(layout, left, side),
            "</svg>",
        ]
    )


def _header(item: int, layout: Layout, path: Sequence[Cell], width: float) -> Iterator[str]:
    moves, done = len(path) - 1, path[-1] == layout.goal
    status, colour = ("reached", _GOAL) if done else (f"{layout.distance[path[-1]]} to go", "#3a6ea5")
    yield (
        f'<text x="{_MARGIN}" y="44" font-size="12" font-weight="600" letter-spacing="1" fill="{_SOFT}">'
        f"MAZE {layout.size} x {layout.size}, ITEM {item}</text>"
    )
    yield (
        f'<text x="{_MARGIN}" y="70" font-size="22" font-weight="700" fill="{_INK}">'
        f"{moves} {'move' if moves == 1 else 'moves'}</text>"
    )
    yield f'<rect x="{width - _MARGIN - 100}" y="40" width="100" height="30" rx="15" fill="{colour}"/>'
    yield (
        f'<text x="{width - _MARGIN - 50}" y="60" font-size="14" font-weight="600" fill="#fff" '
        f'text-anchor="middle">{status}</text>'
    )


def _rooms(layout: Layout, path: Sequence[Cell], left: float, side: int) -> Iterator[str]:
    for row, column in layout.exits:
        fill = _SEEN if (row, column) in path else _UNSEEN
        x, y = left + column * side, _TOP + row * side
        yield f'<rect x="{x:g}" y="{y}" width="{side}" height="{side}" fill="{fill}"/>'


def _walls(layout: Layout, left: float, side: int) -> Iterator[str]:
    """Draw each wall once: above and left of every room, and the lower and right edge."""
    lines = []
    for (row, column), exits in layout.exits.items():
        x, y = left + column * side, _TOP + row * side
        if "up" not in exits:
            lines.append(f"M{x:g} {y}h{side}")
        if "left" not in exits:
            lines.append(f"M{x:g} {y}v{side}")
    board = layout.size * side
    lines.append(f"M{left:g} {_TOP + board}h{board}v-{board}")
    yield f'<path d="{"".join(lines)}" fill="none" stroke="{_WALL}" stroke-width="4" stroke-linecap="round"/>'


def _flag(x: float, y: float, side: int) -> Iterator[str]:
    half = side / 4
    pole = x - half / 2
    yield f'<path d="M{pole:g} {y + half:g}v-{2 * half:g}" stroke="{_INK}" stroke-width="2.5" stroke-linecap="round"/>'
    cloth = f"l{1.5 * half:g} {half / 2:g}l-{1.5 * half:g} {half / 2:g}z"
    yield f'<path d="M{pole:g} {y - half:g}{cloth}" fill="{_GOAL}"/>'
