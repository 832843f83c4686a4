"""From an HTTP request to a site's handler and back."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import parse_qsl

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from agentgym_rl.environment.envs.webarena.sites.html import Child, Html, a, el, join
from agentgym_rl.environment.envs.webarena.sites.store import Episodes, Store
from agentgym_rl.environment.envs.webarena.sites.style import Look, page

logger = logging.getLogger(__name__)

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


class Page(Protocol):
    """Makes a page of a site."""

    def __call__(self, visit: Visit, title: str, *body: Child, heading: str = "", below: Child = None) -> Html: ...


def pages(look: Look) -> Page:
    """For a site whose pages all look the same: they tell what there is to tell, then show their body."""

    def made(visit: Visit, title: str, *body: Child, heading: str = "", below: Child = None) -> Html:
        return page(look, title, *body, heading=heading, flash=visit.flash(), below=below)

    return made


def like(text: str) -> str:
    """A pattern for `LIKE ? ESCAPE '\\'` that finds a text anywhere, whatever signs it has."""
    return "%" + text.strip().replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"


def notice(title: str, status: int, text: str = "") -> HTMLResponse:
    """A page that says why there is no page."""
    body = join(el("title", title), el("h1", title), el("p", text) if text else None, a("Home", "/"))
    return HTMLResponse(body, status)


async def http_notice(request: Request, error: Exception) -> Response:
    """What no route answers, in the same words."""
    return notice("Page not found", error.status_code if isinstance(error, HTTPException) else 404)


def _whole(handler: Handler, visit: Visit) -> Html | Redirect:
    """Call a handler; what it changes is changed altogether or not at all."""
    visit.db.execute("BEGIN")
    try:
        answer = handler(visit)
    except BaseException:
        visit.db.execute("ROLLBACK")
        raise
    visit.db.execute("COMMIT")
    return answer


def route(path: str, handler: Handler, method: str = "GET") -> Route:
    """A page (GET) or a change (POST) of a site. Handlers run on the server's loop: they only touch memory."""

    async def endpoint(request: Request) -> Response:
        episodes: Episodes = request.app.state.episodes
        store = episodes.get(request.cookies.get(COOKIE, ""))
        if store is None:
            return notice("This episode is over", 403)
        visit = Visit(store, dict(request.path_params), dict(request.query_params))
        if method == "POST":
            body = await request.body()
            if len(body) > MAX_BODY_BYTES:
                return notice("This form is too long", 413)
            # A name that comes twice is a list of checkboxes; commas keep it one value.
            for key, value in parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=100):
                visit.form[key] = f"{visit.form[key]},{value}" if key in visit.form else value.replace("\r\n", "\n")
        try:
            answer = _whole(handler, visit)
        except (NotFound, OverflowError):  # a number too large for a row is no row
            return notice("Page not found", 404)
        except Exception:
            logger.exception("an embedded site failed to answer %s %s", method, request.url)
            return notice("Something went wrong on our side", 500, "Nothing was changed.")
        if isinstance(answer, Redirect):
            store.flash = answer.flash
            return RedirectResponse(answer.to, 303)
        return HTMLResponse(answer, headers={"Cache-Control": "no-store"})

    return Route(path, endpoint, methods=[method])
