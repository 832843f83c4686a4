"""A picture of the game for people: an SVG with the goal, the inventory and the goal's recipe tree."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape

from agentgym_rl.environment.envs.textcraft.planner import best_plan
from agentgym_rl.environment.envs.textcraft.problems import Problem
from agentgym_rl.environment.envs.textcraft.recipe_book import Book

_INK, _SOFT, _LINE = "#1f2933", "#6b7785", "#c9d1d9"
_STATES = {
    "have": ("#e8f6ec", "#2f9e56"),
    "some": ("#fff6e0", "#d99a1c"),
    "none": ("#ffffff", "#c9d1d9"),
}
"""Fill and border by state of a node."""
_HUES = {
    **dict.fromkeys(("oak", "spruce", "stick", "bowl", "chest", "wooden", "leather", "planks", "logs"), (28, 48)),
    **dict.fromkeys(("birch", "sand", "sandstone", "string", "paper", "bamboo", "wheat", "hay"), (44, 50)),
    **dict.fromkeys(("jungle", "acacia", "brick", "bricks", "terracotta", "orange", "copper", "pumpkin"), (18, 60)),
    **dict.fromkeys(("red", "redstone", "crimson", "nether", "tnt", "beetroot", "poppy", "rose"), (2, 62)),
    **dict.fromkeys(("gold", "golden", "yellow", "dandelion", "glowstone", "honey", "blaze", "sunflower"), (46, 85)),
    **dict.fromkeys(("green", "lime", "emerald", "slime", "cactus", "kelp", "melon", "vine"), (125, 50)),
    **dict.fromkeys(("diamond", "cyan", "prismarine", "warped", "ice"), (180, 55)),
    **dict.fromkeys(("blue", "lapis", "water", "cornflower"), (220, 60)),
    **dict.fromkeys(("purple", "purpur", "magenta", "ender", "amethyst", "allium", "chorus"), (285, 45)),
    **dict.fromkeys(("pink", "peony"), (340, 65)),
    **dict.fromkeys(("iron", "stone", "cobblestone", "andesite", "gray", "gravel", "flint", "minecart"), (210, 6)),
    **dict.fromkeys(("white", "bone", "quartz", "diorite", "snow", "glass", "wool", "milk", "egg"), (210, 12)),
    **dict.fromkeys(("coal", "charcoal", "black", "blackstone", "netherite", "obsidian", "ink"), (230, 10)),
}
"""Hue and saturation of a tile by word of the item's name. The first known word counts; else the name's hash."""
_DARK = {"coal", "coals", "charcoal", "black", "blackstone", "netherite", "obsidian", "ink", "dark"}
_PALE = {"white", "bone", "quartz", "diorite", "snow", "glass", "paper", "string", "birch", "milk", "egg"}

_CARD_H, _GAP_X, _GAP_Y = 46, 44, 12
_MARGIN, _TILE = 28, 30


@dataclass(slots=True)
class _Node:
    name: str
    need: int
    have: int
    used_up: bool
    """Whether it was used for an item that is held."""
    parts: list[_Node] = field(default_factory=list)
    row: float = 0.0

    @property
    def state(self) -> str:
        return "have" if self.used_up or self.have >= self.need else "some" if self.have else "none"


def draw(book: Book, problem: Problem, held: Mapping[str, int]) -> str:
    """Draw the recipe tree with the goal on the left and raw items on the right. Green is held, amber partly held."""
    tree = _grow(book, problem, held)
    num_rows = _place(tree, 0)
    nodes = list(_walk(tree))
    num_columns = 1 + max(column for _, column, _ in nodes)
    card_width = max(150, 60 + round(8.6 * max(len(node.name) for node, _, _ in nodes)))
    width = max(2 * _MARGIN + num_columns * (card_width + _GAP_X) - _GAP_X, 760)
    inventory, inventory_height = _inventory(held, width)
    top = 104 + inventory_height + 46
    height = top + num_rows * (_CARD_H + _GAP_Y) - _GAP_Y + 54
    done = held.get(problem.goal, 0) > 0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:g}" '
        f'viewBox="0 0 {width} {height:g}" font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif">',
        f"<title>TextCraft: craft {escape(problem.goal)}</title>",
        f'<rect width="{width}" height="{height:g}" fill="#f7f8fa"/>',
        *_header(problem.goal, done, width),
        *inventory,
        _label(_MARGIN, top - 14, "RECIPE TREE"),
        *(
            _branch(parent, node, _MARGIN + column * (card_width + _GAP_X), top)
            for node, column, parent in nodes
            if parent is not None
        ),
        *(_card(node, _MARGIN + column * (card_width + _GAP_X), top, card_width) for node, column, _ in nodes),
        *_legend(height - 18),
        "</svg>",
    ]
    return "\n".join(parts)


def _grow(book: Book, problem: Problem, held: Mapping[str, int]) -> _Node:
    """Return the tree of the shortest plan from here. Held items are assigned from the top.

    Below a held item, the tree shows the usual way to make it, down to generic ingredients.
    """
    usual = best_plan(book, problem.goal, {}, problem.favourites)
    plan = best_plan(book, problem.goal, held, problem.favourites)
    crafts = usual.crafts | plan.crafts
    left = dict(held)

    def grow(name: str, need: int, used_up: bool) -> _Node:
        have = 0
        for member in () if used_up else book.generics.get(name, (name,)):
            used = min(left.get(member, 0), need - have)
            if used > 0:
                left[member] -= used
                have += used
        node = _Node(name, need, have, used_up)
        settled = used_up or have == need
        missing = need if settled else need - have
        parts: tuple[tuple[str, int], ...] = ()
        if plan.members.get(name) in crafts and not settled:
            parts = ((plan.members[name], missing),)
        elif name in crafts:
            recipe, _ = crafts[name]
            times = -(-missing // recipe.count)
            parts = tuple((part, count * times) for part, count in recipe.needs)
        node.parts = [grow(part, count, settled) for part, count in parts]
        return node

    return grow(problem.goal, 1, False)


def _place(node: _Node, row: int) -> int:
    """Give each leaf its own row and centre parents on their parts. Return the next free row."""
    if not node.parts:
        node.row = row
        return row + 1
    for part in node.parts:
        row = _place(part, row)
    node.row = (node.parts[0].row + node.parts[-1].row) / 2
    return row


def _walk(node: _Node, column: int = 0, parent: _Node | None = None) -> Iterator[tuple[_Node, int, _Node | None]]:
    yield node, column, parent
    for part in node.parts:
        yield from _walk(part, column + 1, node)


def _header(goal: str, done: bool, width: int) -> list[str]:
    fill, text = ("#2f9e56", "crafted") if done else ("#3a6ea5", "to do")
    return [
        *_tile(goal, _MARGIN, 24, 52),
        _label(_MARGIN + 68, 42, "GOAL"),
        f'<text x="{_MARGIN + 68}" y="70" font-size="26" font-weight="700" fill="{_INK}">{escape(goal)}</text>',
        f'<rect x="{width - _MARGIN - 92}" y="34" width="92" height="30" rx="15" fill="{fill}"/>',
        f'<text x="{width - _MARGIN - 46}" y="54" font-size="14" font-weight="600" fill="#fff" '
        f'text-anchor="middle">{text}</text>',
    ]


def _inventory(held: Mapping[str, int], width: int) -> tuple[list[str], int]:
    """Return the cards of the inventory, wrapped to the width, and their height."""
    top = 116
    parts = [_label(_MARGIN, top - 10, "INVENTORY")]
    if not held:
        parts.append(f'<text x="{_MARGIN}" y="{top + 22}" font-size="15" fill="{_SOFT}">nothing yet</text>')
        return parts, 40
    x, y = _MARGIN, top
    for name, count in sorted(held.items()):
        card_width = 58 + round(7.6 * len(name)) + 12 + 9 * len(str(count))
        if x > _MARGIN and x + card_width > width - _MARGIN:
            x, y = _MARGIN, y + 50
        parts += [
            f'<rect x="{x}" y="{y}" width="{card_width}" height="42" rx="8" fill="#fff" stroke="{_LINE}"/>',
            *_tile(name, x + 7, y + 6, _TILE),
            f'<text x="{x + 45}" y="{y + 26}" font-size="14" fill="{_INK}">{escape(name)}</text>',
            f'<text x="{x + card_width - 10}" y="{y + 26}" font-size="14" font-weight="700" fill="{_INK}" '
            f'text-anchor="end">{count}</text>',
        ]
        x += card_width + 10
    return parts, y + 50 - top


def _card(node: _Node, x: int, top: float, width: int) -> str:
    y = top + node.row * (_CARD_H + _GAP_Y)
    fill, border = _STATES[node.state]
    count = "done ✓" if node.used_up else f"{node.have} of {node.need}" + " ✓" * (node.state == "have")
    return "\n".join(
        [
            f'<rect x="{x}" y="{y:g}" width="{width}" height="{_CARD_H}" rx="8" fill="{fill}" stroke="{border}" '
            'stroke-width="1.5"/>',
            *_tile(node.name, x + 8, y + 8, _TILE),
            f'<text x="{x + 47}" y="{y + 20:g}" font-size="14" font-weight="600" fill="{_INK}">'
            f"{escape(node.name)}</text>",
            f'<text x="{x + 47}" y="{y + 37:g}" font-size="12" fill="{_SOFT}">{count}</text>',
        ]
    )


def _branch(parent: _Node, node: _Node, end_x: int, top: float) -> str:
    start_x = end_x - _GAP_X
    middle = (start_x + end_x) / 2
    start_y, end_y = (top + n.row * (_CARD_H + _GAP_Y) + _CARD_H / 2 for n in (parent, node))
    colour = _STATES["have"][1] if node.state == "have" else _LINE
    return (
        f'<path d="M{start_x} {start_y:g}C{middle:g} {start_y:g} {middle:g} {end_y:g} {end_x} {end_y:g}" fill="none" '
        f'stroke="{colour}" stroke-width="2"/>'
    )


def _legend(y: float) -> Iterator[str]:
    x = _MARGIN
    for state, text in (("have", "there"), ("some", "part of it"), ("none", "missing")):
        fill, border = _STATES[state]
        yield f'<rect x="{x}" y="{y - 11:g}" width="14" height="14" rx="3" fill="{fill}" stroke="{border}"/>'
        yield f'<text x="{x + 20}" y="{y:g}" font-size="12" fill="{_SOFT}">{text}</text>'
        x += 100


def _label(x: float, y: float, text: str) -> str:
    return f'<text x="{x}" y="{y:g}" font-size="12" font-weight="600" letter-spacing="1" fill="{_SOFT}">{text}</text>'


def _tile(name: str, x: float, y: float, size: float) -> Iterator[str]:
    """Draw a small mirrored pixel pattern, fixed for each name, in the colour of its material."""
    digest = hashlib.sha256(name.encode()).digest()
    words = name.split()
    hue, saturation = next((_HUES[word] for word in words if word in _HUES), (digest[0] * 360 // 256, 40))
    base = 34 if _DARK.intersection(words) else 74 if _PALE.intersection(words) else 54
    yield f'<rect x="{x:g}" y="{y:g}" width="{size}" height="{size}" rx="5" fill="hsl({hue} {saturation}% {base}%)"/>'
    pixel = size / 6
    paths: dict[int, str] = {}
    for row in range(1, 5):
        for column in (1, 2):
            shade = digest[row * 2 + column] % 3 - 1
            for mirrored in (column, 5 - column) if shade else ():
                corner = f"M{x + mirrored * pixel:g} {y + row * pixel:g}h{pixel:g}v{pixel:g}h-{pixel:g}z"
                paths[shade] = paths.get(shade, "") + corner
    for shade, path in sorted(paths.items()):
        yield f'<path d="{path}" fill="hsl({hue} {saturation}% {base + 14 * shade}%)"/>'
