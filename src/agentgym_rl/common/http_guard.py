"""Request limits and origin checks that the environment server and the viewer share.

uvicorn reads heads of any size for any time, before an application can look at a token.
"""

from __future__ import annotations

import asyncio
import ipaddress
from typing import Any
from urllib.parse import urlsplit

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEAD_BYTES = 1 << 16
"""Most bytes of a request line with its headers; trailers of a chunked body count, too."""
REQUEST_TIMEOUT_S = 30.0
"""Seconds for a request with its body to arrive, from the connection or the first byte of a later request."""
LATE_READ_S = 1.0
"""Seconds added to that, because a blocked event loop has yet to read data that has arrived."""


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with limits on the size of a head and the time of a request. Pass it as `http=`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline: asyncio.TimerHandle | None = None
        self._arriving = False
        """Whether a request has begun and is not complete."""
        self._body_came = False
        self._upgraded = False
        self._unparsed_bytes = self._parsed_bytes = 0
        """Head bytes of this request: received and not yet parsed, and parsed."""
        self._refuse_after(REQUEST_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._body_came = False
        super().data_received(data)
        if self.transport.is_closing() or self._upgraded:
            return
        if self._arriving and not self._body_came:
            self._unparsed_bytes += len(data)
            if self._unparsed_bytes > MAX_HEAD_BYTES:
                self.send_400_response("")
                return
        if self._deadline is None and (self._arriving or self.cycle is None or self.cycle.response_complete):
            self._refuse_after(REQUEST_TIMEOUT_S)

    def on_message_begin(self) -> None:
        self._arriving = True
        self._unparsed_bytes = self._parsed_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._body_came = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._arriving = False
        self._clear_deadline()
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        self._upgraded = True  # the WebSocket takes the connection over
        self._clear_deadline()
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP, and a head over the limit, at which the parser was stopped."""
        if max(self._parsed_bytes, self._unparsed_bytes) > MAX_HEAD_BYTES:
            self._refuse(431, f"the head of a request may have {MAX_HEAD_BYTES} bytes, this one has more")
        else:
            super().send_400_response(msg)

    def _count(self, size: int) -> None:
        self._parsed_bytes += size
        if self._parsed_bytes > MAX_HEAD_BYTES:
            raise ValueError("the head is over the limit")  # stops the parser, which then sends the 400

    def _refuse(self, status: int, detail: str) -> None:
        """Answer unless an answer is under way, and close the connection."""
        if self.cycle is None or self.cycle.response_complete:
            body = b'{"detail":"%s"}' % detail.encode()
            lines = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + lines + body)
        self.transport.close()

    def _refuse_after(self, delay_s: float, *, late: bool = False) -> None:
        def expired() -> None:
            if self.flow.read_paused:  # by us, while an earlier request is answered
                self._refuse_after(REQUEST_TIMEOUT_S)
            elif not late:
                self._refuse_after(LATE_READ_S, late=True)
            else:
                self._refuse(408, f"the request did not come within {REQUEST_TIMEOUT_S:g} s")

        self._deadline = self.loop.call_later(delay_s, expired)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


HTTP_OPTIONS: dict[str, Any] = {"http": BoundedHttp, "ws": "none"}
"""Options of uvicorn.Config. WebSockets are off: only the bridge to OpenEnv uses them, with limits of its own."""


def is_loopback(host: str) -> bool:
    """Return whether a name or address without a port means this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def refusal(method: str, host: str, origin: str | None, fetch_site: str | None, loopback: bool) -> tuple[int, str]:
    """Return (status, reason) to refuse a request that another site's page may have sent through a browser, or (0, "").

    Bound to loopback, the Host header must be a loopback name: a site can point a name of its own at 127.0.0.1.
    A POST must come from a page of this server, or from no page.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        origin_netloc = host if origin is None else urlsplit(origin).netloc
    except ValueError:  # such as "[::1"
        return 400, "The Host or Origin header is no address."
    if loopback and not is_loopback(name):
        return 421, f"This server answers to loopback names only (127.0.0.1, localhost), not to {name[:80]!r}."
    if method == "POST" and (origin_netloc != host or fetch_site not in (None, "same-origin", "none")):
        return 403, "Requests from other sites are refused."
    return 0, ""
