"""The map: places, nearest places, routes on foot, by bicycle and by car, saved places."""

from __future__ import annotations

import heapq
import sqlite3
from dataclasses import dataclass

from agentgym_rl.environment.envs.webarena.sites.html import (
    Child,
    Html,
    a,
    button_form,
    choice,
    el,
    facts,
    field,
    form,
    table,
)
from agentgym_rl.environment.envs.webarena.sites.map_data import AVENUES, BLOCK_M, BRIDGES, PLACES, RIVER_ROW, STREETS
from agentgym_rl.environment.envs.webarena.sites.style import Look
from agentgym_rl.environment.envs.webarena.sites.visit import Redirect, Visit, like, pages, route

SPEEDS_KMH = {"foot": 5, "bicycle": 15, "car": 30}
LOOK = Look(
    "Atlas of Port Ellery",
    "#2d6a3e",
    (("Directions", "/directions"), ("Categories", "/categories"), ("Saved places", "/saved")),
    ("Find a place", "/search"),
)
Corner = tuple[int, int]
_page = pages(LOOK)


def address(place: sqlite3.Row) -> str:
    return f"{place['house']} {STREETS[place['y']]} Street, corner of {AVENUES[place['x']]} Avenue, Port Ellery"


@dataclass(frozen=True, slots=True)
class Route:
    """A shortest route between two corners."""

    corners: tuple[Corner, ...]

    @property
    def metres(self) -> int:
        return (len(self.corners) - 1) * BLOCK_M

    def minutes(self, mode: str) -> int:
        return max(1, round(self.metres / 1000 / SPEEDS_KMH[mode] * 60)) if self.metres else 0

    @property
    def steps(self) -> list[str]:
        """Return the instructions: `Go east on Mill Street for 300 m`, ..."""
        legs: list[tuple[str, str, int]] = []
        for (x, y), (to_x, to_y) in zip(self.corners, self.corners[1:], strict=False):
            heading = "east" if to_x > x else "west" if to_x < x else "south" if to_y > y else "north"
            name = f"{STREETS[y]} Street" if y == to_y else f"{AVENUES[x]} Avenue"
            if legs and legs[-1][:2] == (heading, name):
                legs[-1] = (heading, name, legs[-1][2] + BLOCK_M)
            else:
                legs.append((heading, name, BLOCK_M))
        return [f"Go {heading} on {name} for {metres} m" for heading, name, metres in legs]


def shortest_route(start: Corner, end: Corner) -> Route:
    """Return the route with the fewest blocks, then the fewest turns. Ties are broken deterministically."""
    queue: list[tuple[int, int, tuple[Corner, ...]]] = [(0, 0, (start,))]
    done: set[tuple[Corner, bool]] = set()
    while queue:
        blocks, turns, corners = heapq.heappop(queue)
        x, y = corners[-1]
        if (x, y) == end:
            return Route(corners)
        vertical = len(corners) > 1 and corners[-2][0] == x
        if ((x, y), vertical) in done:
            continue
        done.add(((x, y), vertical))
        for next_x, next_y in ((x - 1, y), (x + 1, y), (x, y - 1), (x, y + 1)):
            if not (0 <= next_x < len(AVENUES) and 0 <= next_y < len(STREETS)):
                continue
            if {y, next_y} == {RIVER_ROW, RIVER_ROW + 1} and x not in BRIDGES:
                continue
            turn = int(len(corners) > 1 and vertical != (next_x == x))
            heapq.heappush(queue, (blocks + 1, turns + turn, (*corners, (next_x, next_y))))
    raise ValueError(f"no route from {start} to {end}")  # the grid is connected


def picture(places: list[sqlite3.Row], trip: Route | None = None) -> Html:
    """Return a drawing of the town. The page gives the same information as text."""

    def pixel(corner: Corner) -> tuple[int, int]:
        return 50 + corner[0] * 68, 26 + corner[1] * 46

    right, bottom = pixel((len(AVENUES) - 1, len(STREETS) - 1))
    river = pixel((0, RIVER_ROW))[1] + 23
    parts = [
        f'<rect width="{right + 60}" height="{bottom + 26}" fill="#eef0e6"/>',
        f'<path d="M0 {river}H{right + 60}" stroke="#9cc7e0" stroke-width="20"/>',
    ]
    heights = [pixel((0, y))[1] for y in range(len(STREETS))]
    parts += [f'<path d="M30 {height}H{right + 20}" stroke="#fff" stroke-width="7"/>' for height in heights]
    for x in range(len(AVENUES)):
        across = pixel((x, 0))[0]
        upper, lower = pixel((x, RIVER_ROW))[1], pixel((x, RIVER_ROW + 1))[1]
        ends = f"M{across} 10V{bottom + 12}" if x in BRIDGES else f"M{across} 10V{upper}M{across} {lower}V{bottom + 12}"
        parts.append(f'<path d="{ends}" stroke="#fff" stroke-width="7"/>')
    label = 'font-size="9" fill="#7a8088"'
    parts += [f'<text x="4" y="{pixel((0, y))[1] + 3}" {label}>{name}</text>' for y, name in enumerate(STREETS)]
    parts += [
        f'<text x="{pixel((x, 0))[0]}" y="{bottom + 23}" text-anchor="middle" {label}>{name}</text>'
        for x, name in enumerate(AVENUES)
    ]
    if trip is not None:
        points = " ".join(f"{x},{y}" for x, y in map(pixel, trip.corners))
        parts.append(f'<polyline points="{points}" fill="none" stroke="#d2452d" stroke-width="5" opacity=".85"/>')
    for place in places:
        x, y = pixel((place["x"], place["y"]))
        parts.append(f'<circle cx="{x}" cy="{y}" r="6" fill="#2d6a3e" stroke="#fff" stroke-width="2"/>')
        if len(places) <= 4:
            name = el("text", place["name"], x=x + 9, y=y - 6, font_size="13", font_weight="bold")
            parts.append(name)
    return Html(
        f'<svg aria-hidden="true" viewBox="0 0 {right + 60} {bottom + 26}" width="100%" '
        f'style="max-height:350px;border:1px solid #dde1e6;border-radius:8px">{"".join(parts)}</svg>'
    )


def _place_table(rows: list[sqlite3.Row]) -> Html:
    return table(
        ("Place", "Kind", "Address"),
        [(a(row["name"], f"/place/{row['id']}"), row["category"], address(row)) for row in rows],
    )


def home(visit: Visit) -> Html:
    rows = visit.rows("SELECT * FROM place ORDER BY name")
    return _page(
        visit,
        "Map",
        picture(rows),
        el("p", f"{len(rows)} places. The river can be crossed on {' and '.join(AVENUES[x] for x in BRIDGES)} Avenue."),
        heading="Port Ellery",
    )


def search(visit: Visit) -> Html:
    text = visit.query.get("q", "").strip()
    pattern = like(text)
    rows = visit.rows("SELECT * FROM place WHERE name || ' ' || category LIKE ? ESCAPE '\\' ORDER BY name", pattern)
    body = _place_table(rows) if rows else el("p", "Nothing was found.")
    return _page(visit, "Search", body, heading=f"Places with '{text}'")


def categories(visit: Visit) -> Html:
    chosen = visit.query.get("kind", "")
    links = [(a(kind, f"/categories?kind={kind}"), "  ") for kind in PLACES]
    rows = visit.rows("SELECT * FROM place WHERE category = ? ORDER BY name", chosen)
    body = [el("h2", f"{chosen} ({len(rows)})"), _place_table(rows)] if rows else None
    return _page(visit, "Categories", el("p", links), body)


def place(visit: Visit) -> Html:
    row = visit.row("SELECT * FROM place WHERE id = ?", visit.path["id"])
    saved = visit.rows("SELECT * FROM saved WHERE place_id = ?", row["id"])
    path = f"/place/{row['id']}"
    save = form(f"{path}/save", field("Note", "note", size="30"), button="Save place")
    if saved:
        save = el("p", "Saved. ", button_form(f"{path}/forget", "Forget place"))
    return _page(
        visit,
        row["name"],
        el(
            "div",
            el(
                "div",
                facts(
                    ("Kind", row["category"]),
                    ("Address", address(row)),
                    ("Phone", row["phone"]),
                    ("Open", row["hours"]),
                    ("Wheelchair access", row["wheelchair"]),
                ),
                el("p", a("Directions from here", f"/directions?from={row['name'].replace(' ', '+')}")),
                el("p", a("Directions to here", f"/directions?to={row['name'].replace(' ', '+')}")),
                form(
                    "/near",
                    el("input", type="hidden", name="place", value=row["id"]),
                    choice("What is near", "kind", [(kind, kind) for kind in PLACES]),
                    button="Show nearest",
                    method="get",
                ),
                save,
                class_="card",
            ),
            picture([row]),
            class_="two",
            style="grid-template-columns:1fr 1fr",
        ),
    )


def near(visit: Visit) -> Html:
    number = visit.query.get("place", "")
    start = visit.row("SELECT * FROM place WHERE id = ?", number)
    kind = visit.query.get("kind", "")
    rows = visit.rows("SELECT * FROM place WHERE category = ? AND id != ?", kind, start["id"])
    trips = [(shortest_route((start["x"], start["y"]), (row["x"], row["y"])), row) for row in rows]
    trips.sort(key=lambda pair: (pair[0].metres, pair[1]["name"]))
    listed = [
        (a(row["name"], f"/place/{row['id']}"), f"{trip.metres} m", f"{trip.minutes('foot')} min on foot")
        for trip, row in trips
    ]
    return _page(
        visit, "Nearby", table(("Place", "Distance", "Time"), listed), heading=f"Nearest {kind} to {start['name']}"
    )


def _find_place(visit: Visit, text: str) -> sqlite3.Row | None:
    """Return the place with this name, or else the only place whose name contains it."""
    text = text.strip()
    exact = visit.rows("SELECT * FROM place WHERE lower(name) = lower(?)", text)
    if exact:
        return exact[0]
    pattern = like(text)
    partial = visit.rows("SELECT * FROM place WHERE name LIKE ? ESCAPE '\\'", pattern) if text else []
    return partial[0] if len(partial) == 1 else None


def directions(visit: Visit) -> Html:
    start_text, end_text = visit.query.get("from", ""), visit.query.get("to", "")
    mode = visit.query.get("mode", "foot")
    mode = mode if mode in SPEEDS_KMH else "foot"
    query_form = el(
        "form",
        el("label", "From", " ", el("input", name="from", value=start_text, size="28"), class_="row"),
        el("label", "To", " ", el("input", name="to", value=end_text, size="28"), class_="row"),
        el(
            "label",
            "By",
            " ",
            el("select", [el("option", name, value=name, selected=name == mode) for name in SPEEDS_KMH], name="mode"),
            class_="row",
        ),
        el("button", "Go"),
        action="/directions",
        method="get",
        class_="card",
    )
    answer: Child = None
    if start_text and end_text:
        start, end = _find_place(visit, start_text), _find_place(visit, end_text)
        if start is None or end is None:
            missing = start_text if start is None else end_text
            answer = el("p", f"'{missing}' is not one place here: search for its full name.")
        else:
            trip = shortest_route((start["x"], start["y"]), (end["x"], end["y"]))
            answer = el(
                "div",
                el("div", picture([start, end], trip)),
                el(
                    "div",
                    el("h2", f"{start['name']} to {end['name']} by {mode}", id="route"),
                    facts(("Distance", f"{trip.metres} m"), ("Time", f"{trip.minutes(mode)} min")),
                    el("ol", [el("li", step) for step in trip.steps]),
                    class_="card",
                ),
                class_="two",
            )
    return _page(visit, "Directions", query_form, answer)


def save(visit: Visit) -> Redirect:
    row = visit.row("SELECT * FROM place WHERE id = ?", visit.path["id"])
    visit.change("REPLACE INTO saved VALUES (?, ?)", row["id"], visit.form.get("note", "").strip()[:300])
    return Redirect(f"/place/{row['id']}", f"{row['name']} was saved.")


def forget(visit: Visit) -> Redirect:
    row = visit.row("SELECT * FROM place WHERE id = ?", visit.path["id"])
    visit.change("DELETE FROM saved WHERE place_id = ?", row["id"])
    return Redirect(f"/place/{row['id']}", f"{row['name']} was forgotten.")


def saved(visit: Visit) -> Html:
    rows = visit.rows("SELECT p.*, s.note FROM saved s JOIN place p ON p.id = s.place_id ORDER BY p.name")
    listed = [(a(row["name"], f"/place/{row['id']}"), row["note"]) for row in rows]
    body = el("div", table(("Place", "Note"), listed), id="saved") if rows else el("p", "None yet.", id="saved")
    return _page(visit, "Saved places", body)


ROUTES = [
    route("/", home),
    route("/search", search),
    route("/categories", categories),
    route("/place/{id:int}", place),
    route("/place/{id:int}/save", save, "POST"),
    route("/place/{id:int}/forget", forget, "POST"),
    route("/near", near),
    route("/directions", directions),
    route("/saved", saved),
]
