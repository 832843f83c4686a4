"""From an HTTP request to a site's handler and back."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from agentgym_rl.environment.envs.webarena.sites.html import Html
from agentgym_rl.environment.envs.webarena.sites.store import Episodes, Store

COOKIE = "episode"
MAX_BODY_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Redirect:
    """Go and see another page, which tells `flash` once."""

    to: str
    flash: str = ""


class NotFound(Exception):
    """There is no such page."""


@dataclass(slots=True)
class Visit:
    """What a handler gets to see of a request."""

    store: Store
    path: dict[str, Any]
    query: dict[str, str] = field(default_factory=dict)
    form: dict[str, str] = field(default_factory=dict)

    @property
    def db(self) -> sqlite3.Connection:
        return self.store.db

    def rows(self, sql: str, *arguments: Any) -> list[sqlite3.Row]:
        return self.db.execute(sql, arguments).fetchall()

    def row(self, sql: str, *arguments: Any) -> sqlite3.Row:
        """The one row; NotFound when there is none."""
        found = self.db.execute(sql, arguments).fetchone()
        if found is None:
            raise NotFound
        return found

    def value(self, sql: str, *arguments: Any) -> Any:
        return self.row(sql, *arguments)[0]

    def change(self, sql: str, *arguments: Any) -> int:
        """Execute a change; the id of a row it added."""
        return self.db.execute(sql, arguments).lastrowid or 0

    def flash(self) -> str:
        """What there is to tell, once."""
        told, self.store.flash = self.store.flash, ""
        return told

    def page_number(self) -> int:
        text = self.query.get("page", "1")
        return max(1, int(text)) if text.isascii() and text.isdigit() and len(text) < 6 else 1


Handler = Callable[[Visit], Html | Redirect]


def route(path: str, handler: Handler, method: str = "GET") -> Route:
    """A page (GET) or a change (POST) of a site. Handlers run on the server's loop: they only touch memory."""

    async def endpoint(request: Request) -> Response:
        episodes: Episodes = request.app.state.episodes
        store = episodes.get(request.cookies.get(COOKIE, ""))
        if store is None:
            return HTMLResponse("<title>No episode</title><h1>This episode is over.</h1>", 403)
        visit = Visit(store, dict(request.path_params), dict(request.query_params))
        if method == "POST":
            body = await request.body()
            if len(body) > MAX_BODY_BYTES:
                return HTMLResponse("<title>Too much</title><h1>This form is too long.</h1>", 413)
            # A name that comes twice is a list of checkboxes; commas keep it one value.
            for key, value in parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=100):
                visit.form[key] = f"{visit.form[key]},{value}" if key in visit.form else value.replace("\r\n", "\n")
        try:
            answer = handler(visit)
        except (NotFound, OverflowError):  # a number too large for a row is no row
            return HTMLResponse('<title>Not found</title><h1>Page not found</h1><a href="/">Home</a>', 404)
        if isinstance(answer, Redirect):
            store.flash = answer.flash
            return RedirectResponse(answer.to, 303)
        return HTMLResponse(answer, headers={"Cache-Control": "no-store"})

    return Route(path, endpoint, methods=[method])
