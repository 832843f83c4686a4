"""One keep-alive HTTP/1.1 connection with the few features that an environment client needs.

A general HTTP client takes over a millisecond of CPU time per call, ten times the server's share. With hundreds of
sessions a rollout would wait for that. There are no redirects, cookies, proxies or HTTP/2.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from urllib.parse import urlsplit

from agentgym_rl.errors import ConfigError, EnvUnavailable

KEEPALIVE_S = 4.0
"""Seconds after which an idle connection is not reused. The server closes it a little later (uvicorn after 5 s), and
a request that races with that close fails and cannot be repeated safely."""
MAX_HEAD_BYTES = 1 << 16
MAX_BODY_BYTES = 1 << 24
"""Largest body of an answer. A longer one is an error, and the rest of it is not read."""


class CannotConnect(EnvUnavailable):
    """No connection was made and nothing was sent, so a retry is safe."""


class ConnectionBroken(EnvUnavailable):
    """The connection ended, or the answer is not HTTP, after the request may have been sent."""


@dataclass(slots=True)
class Answer:
    status: int
    content_type: str
    body: bytes


@cache
def tls() -> ssl.SSLContext:
    """Return the TLS settings, made once: reading the certificates takes longer than an episode of a cheap game."""
    return ssl.create_default_context()


class Connection:
    """Sends one request at a time. The caller sets the deadline; a cancelled request drops the connection."""

    def __init__(self, url: str, token: str | None = None) -> None:
        message = f"an environment's address looks like http://127.0.0.1:36001/textcraft, got {url!r}"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ConfigError(message) from None
        if parts.scheme not in ("http", "https") or not parts.hostname or not re.fullmatch(r"[!-~]+", url):
            raise ConfigError(message)
        if token is not None and not re.fullmatch(r"[!-~]+", token):
            raise ConfigError("a token is made of printable ASCII characters without spaces")
        self._tls = tls() if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        authorization = f"Authorization: Bearer {token}\r\n" if token else ""
        self._headers = f"Host: {parts.netloc}\r\n{authorization}Content-Type: application/json\r\n"
        self._lock = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._idle_since = 0.0

    async def request(self, method: str, path: str, content: bytes = b"") -> Answer:
        async with self._lock:
            reader, writer = await self._open()
            try:
                writer.write(self.request_head(method, path, len(content)) + content)
                await writer.drain()
                answer, reusable = await _read(reader)
            except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
                self.drop()
                raise ConnectionBroken(str(error) or type(error).__name__) from error
            except BaseException:
                self.drop()  # the rest of this answer may still arrive: the next request must not read it
                raise
            # After an exception uvicorn closes the connection unannounced: another request would be lost.
            if reusable and answer.status < 500:
                self._idle_since = time.monotonic()
            else:
                self.drop()
            return answer

    def request_head(self, method: str, path: str, size: int) -> bytes:
        """Return the head of a request whose body has `size` bytes."""
        lines = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}Content-Length: {size}\r\n\r\n"
        return lines.encode("latin-1")

    async def open_protocol(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        """Open another connection to the same server, driven by `protocol`."""
        await asyncio.get_running_loop().create_connection(protocol, self._host, self._port, ssl=self._tls)

    def drop(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is not None:
            reader = self._streams[0]
            idle_s = time.monotonic() - self._idle_since
            stale = idle_s > KEEPALIVE_S or reader.at_eof() or reader.exception() is not None
            if not stale:
                return self._streams
            self.drop()
        try:
            self._streams = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=MAX_HEAD_BYTES)
        except OSError as error:
            raise CannotConnect(error.strerror or str(error)) from error
        return self._streams


async def _read(reader: asyncio.StreamReader) -> tuple[Answer, bool]:
    """Return an answer, and whether the connection can be used again."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    status = re.fullmatch(r"HTTP/1\.([01]) (\d{3})(?: .*)?", first)
    if status is None:
        raise ValueError(f"an HTTP/1.1 answer was expected, got {first[:80]!r}")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    reusable = status[1] == "1" and headers.get("connection", "").lower() != "close"
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = await _read_chunks(reader)
    elif "content-length" in headers:
        body = await reader.readexactly(_size(headers["content-length"], 10))
    elif status[2] == "204":
        body = b""
    else:
        body = await _read_until_eof(reader)
        reusable = False
    return Answer(int(status[2]), headers.get("content-type", ""), body), reusable


async def _read_until_eof(reader: asyncio.StreamReader) -> bytes:
    """Return a body without a stated length, which ends with the connection. A single read may return less."""
    body = bytearray()
    while part := await reader.read(MAX_HEAD_BYTES):
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ValueError(f"the answer is over {MAX_BODY_BYTES} bytes")
    return bytes(body)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    chunks: list[bytes] = []
    bytes_left = MAX_BODY_BYTES
    while True:
        size = _size((await reader.readuntil(b"\r\n")).split(b";")[0].decode("latin-1").strip(), 16)
        if size == 0:
            while await reader.readuntil(b"\r\n") != b"\r\n":  # trailers
                pass
            return b"".join(chunks)
        bytes_left -= size
        if bytes_left < 0:
            raise ValueError(f"the answer is over {MAX_BODY_BYTES} bytes")
        chunks.append(await reader.readexactly(size))
        await reader.readexactly(2)


def _size(text: str, base: int) -> int:
    if not re.fullmatch(r"[0-9a-fA-F]+", text):
        raise ValueError(f"a number of bytes was expected, got {text[:20]!r}")
    size = int(text, base)
    if size > MAX_BODY_BYTES:
        raise ValueError(f"the answer has {size} bytes, over the limit of {MAX_BODY_BYTES}")
    return size
