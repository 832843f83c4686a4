"""Access control: the outermost layer of the server.

Any web page can send requests to a loopback server through the user's browser. The Host header must therefore be a
loopback name, which rejects sites that resolve their own name to 127.0.0.1. Requests that change something must come
from the viewer's page, and other origins cannot read answers. On any other address a token is needed as well.
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
"""No inline script, no eval, no other origins and, in browsers with trusted types, no markup from strings."""
PICTURE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'self'; sandbox"
"""Policy of pictures. They may contain text of a model, so they run no script and load nothing."""
MAX_BODY_BYTES = 1 << 20


class Guard:
    """ASGI layer that checks every request and adds security headers to every response."""

    def __init__(self, app: ASGIApp, token: str | None, loopback: bool) -> None:
        self._app = app
        self._token = token
        self._loopback = loopback
        self._secret = hashlib.sha256(f"agentgym-rl view {token}".encode()).hexdigest()
        """Value of the cookie, which is not the token itself."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        cookie = f"agentgym_rl_view_{(scope.get('server') or ('', 0))[1]}"
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _answer(send, *refusal)
        elif self._token and self._has_token_in_query(scope):
            # The link from the terminal. Set a cookie, so that the token leaves the address bar and the history.
            value = f"{cookie}={self._secret}; HttpOnly; SameSite=Lax; Path=/"
            await _answer(send, 303, "", ("location", "/"), ("set-cookie", value))
        elif self._token and not self._is_authorized(headers, cookie):
            text = "A token is needed: open the link that the viewer printed, or send Authorization: Bearer TOKEN.\n"
            await _answer(send, 401, text, ("www-authenticate", "Bearer"))
        else:
            # HEAD is handled as GET; the HTTP server drops the body.
            scope = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self._app(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        source = headers.get("origin"), headers.get("sec-fetch-site")
        status, reason = refusal(scope["method"], headers.get("host", ""), *source, self._loopback)
        if status:
            return status, reason + "\n"
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return 405, "GET, HEAD and POST only.\n"
        if scope["method"] == "POST":
            if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
                return 415, "The request needs a JSON body.\n"
            length = headers.get("content-length", "")
            if not length.isdigit() or int(length) > MAX_BODY_BYTES:
                return 413, f"The request needs a Content-Length of at most {MAX_BODY_BYTES} bytes.\n"
        return None

    def _has_token_in_query(self, scope: Scope) -> bool:
        if scope["path"] != "/" or scope["method"] != "GET":
            return False
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        return hmac.compare_digest(given.encode(), (self._token or "").encode())

    def _is_authorized(self, headers: dict[str, str], cookie: str) -> bool:
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
