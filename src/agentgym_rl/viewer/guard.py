"""Who may ask: the outermost layer of the server.

On loopback every page of the web can send requests here through the user's browser. So the Host header must be a
loopback name (a site that points its own name at 127.0.0.1 is refused), requests that change something must come from
our own page, and nothing is readable from elsewhere. Bound to another address, a token is needed as well.
"""

from __future__ import annotations

import hashlib
import hmac
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentgym_rl.common.http_guard import refusal

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
"""No inline script, no eval, nothing from elsewhere, and in browsers that know trusted types no markup from strings."""
PICTURE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'self'; sandbox"
"""What an environment drew may hold text of a model: it runs nothing and loads nothing."""
MAX_BODY_BYTES = 1 << 20


class Guard:
    """Checks every request and adds the headers every answer has."""

    def __init__(self, app: ASGIApp, token: str | None, loopback: bool) -> None:
        self._app = app
        self._token = token
        self._loopback = loopback
        self._secret = hashlib.sha256(f"agentgym-rl view {token}".encode()).hexdigest()
        """What the cookie holds: not the token itself."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        cookie = f"agentgym_rl_view_{(scope.get('server') or ('', 0))[1]}"
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _answer(send, *refusal)
        elif self._token and self._brings_token(scope):
            # The link from the terminal: keep the token as a cookie, and out of the address bar and the history.
            value = f"{cookie}={self._secret}; HttpOnly; SameSite=Lax; Path=/"
            await _answer(send, 303, "", ("location", "/"), ("set-cookie", value))
        elif self._token and not self._knows_token(headers, cookie):
            text = "A token is needed: open the link that the viewer printed, or send Authorization: Bearer TOKEN.\n"
            await _answer(send, 401, text, ("www-authenticate", "Bearer"))
        else:
            # What can be read can be asked for without its body; the server below us leaves the body out.
            asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self._app(asked, receive, _with_headers(send))

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        asked_by = headers.get("origin"), headers.get("sec-fetch-site")
        status, reason = refusal(scope["method"], headers.get("host", ""), *asked_by, self._loopback)
        if status:
            return status, reason + "\n"
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return 405, "GET, HEAD and POST only.\n"
        if scope["method"] == "POST":
            if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
                return 415, "A JSON body is needed.\n"
            length = headers.get("content-length", "")
            if not length.isdigit() or int(length) > MAX_BODY_BYTES:
                return 413, f"A body of a stated length of at most {MAX_BODY_BYTES} bytes is needed.\n"
        return None

    def _brings_token(self, scope: Scope) -> bool:
        if scope["path"] != "/" or scope["method"] != "GET":
            return False
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        return hmac.compare_digest(given.encode(), (self._token or "").encode())

    def _knows_token(self, headers: dict[str, str], cookie: str) -> bool:
        bearer = f"Bearer {self._token}".encode()
        if hmac.compare_digest(headers.get("authorization", "").encode(), bearer):
            return True
        try:
            jar = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return False
        return cookie in jar and hmac.compare_digest(jar[cookie].value.encode(), self._secret.encode())


_COMMON = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)


def _with_headers(send: Send) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            lines = [*message["headers"], *_COMMON]
            present = {name for name, _ in lines}
            if b"content-security-policy" not in present:
                lines.append((b"content-security-policy", PAGE_POLICY.encode()))
            if b"cache-control" not in present:
                lines.append((b"cache-control", b"no-store"))
            message = {**message, "headers": lines}
        await send(message)

    return wrapped


async def _answer(send: Send, status: int, text: str, *headers: tuple[str, str]) -> None:
    body = text.encode()
    lines = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", b"%d" % len(body)),
        (b"cache-control", b"no-store"),
        *_COMMON,
        *((name.encode(), value.encode("latin-1")) for name, value in headers),
    ]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})
