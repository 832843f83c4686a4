"""Routing of HTTP requests to the handlers of the sites."""

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
    """Answer that sends the browser to another page, which shows `flash` once."""

    to: str
    flash: str = ""


class NotFound(Exception):
    """There is no such page."""


@dataclass(slots=True)
class Visit:
    """A request as a handler sees it."""

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
        """Return the first row. Raise NotFound if there is none."""
        row = self.db.execute(sql, arguments).fetchone()
        if row is None:
            raise NotFound
        return row

    def value(self, sql: str, *arguments: Any) -> Any:
        return self.row(sql, *arguments)[0]

    def change(self, sql: str, *arguments: Any) -> int:
        """Execute a change and return the id of the added row."""
        return self.db.execute(sql, arguments).lastrowid or 0

    def flash(self) -> str:
        """Return the pending message and clear it."""
        message, self.store.flash = self.store.flash, ""
        return message

    def page_number(self) -> int:
        text = self.query.get("page", "1")
        return max(1, int(text)) if text.isascii() and text.isdigit() and len(text) < 6 else 1


Handler = Callable[[Visit], Html | Redirect]


class Page(Protocol):
    """Function that returns a page of a site."""

    def __call__(self, visit: Visit, title: str, *body: Child, heading: str = "", below: Child = None) -> Html: ...


def pages(look: Look) -> Page:
    """Return the page function of a site. Its pages show the pending message, then the body."""

    def site_page(visit: Visit, title: str, *body: Child, heading: str = "", below: Child = None) -> Html:
        return page(look, title, *body, heading=heading, flash=visit.flash(), below=below)

    return site_page


def like(text: str) -> str:
    """Return a pattern for `LIKE ? ESCAPE '\\'` that finds a text literally, anywhere."""
    return "%" + text.strip().replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"


def notice(title: str, status: int, text: str = "") -> HTMLResponse:
    """Return a page that says why there is no page."""
    body = join(el("title", title), el("h1", title), el("p", text) if text else None, a("Home", "/"))
    return HTMLResponse(body, status)


async def http_notice(request: Request, error: Exception) -> Response:
    """Return the notice for a request without a route."""
    return notice("Page not found", error.status_code if isinstance(error, HTTPException) else 404)


def _in_transaction(handler: Handler, visit: Visit) -> Html | Redirect:
    """Call a handler in a transaction."""
    visit.db.execute("BEGIN")
    try:
        answer = handler(visit)
    except BaseException:
        visit.db.execute("ROLLBACK")
        raise
    visit.db.execute("COMMIT")
    return answer


def route(path: str, handler: Handler, method: str = "GET") -> Route:
    """Return the route of a page (GET) or a change (POST). Handlers run on the event loop, so they only use memory."""

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
            # A repeated name is a list of checkboxes: join its values with commas.
            for key, value in parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=100):
                visit.form[key] = f"{visit.form[key]},{value}" if key in visit.form else value.replace("\r\n", "\n")
        try:
            answer = _in_transaction(handler, visit)
        except (NotFound, OverflowError):  # a number too large for SQLite matches no row
            return notice("Page not found", 404)
        except Exception:
            logger.exception("an embedded site failed to answer %s %s", method, request.url)
            return notice("Something went wrong on our side", 500, "Nothing was changed.")
        if isinstance(answer, Redirect):
            store.flash = answer.flash
            return RedirectResponse(answer.to, 303)
        return HTMLResponse(answer, headers={"Cache-Control": "no-store"})

    return Route(path, endpoint, methods=[method])
