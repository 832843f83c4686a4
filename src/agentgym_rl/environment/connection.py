"""One kept-alive HTTP/1.1 connection: the little of HTTP that an environment's client needs, done fast.

A general client costs over a millisecond of processor time a call, ten times what the server needs to answer; with
hundreds of sessions that is what a rollout would wait for. Left out on purpose: redirects, cookies, proxies, HTTP/2.
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
"""An idle connection is dropped before the server drops it (uvicorn's default is 5 s): a request that races with the
server's close fails, and could not be sent again safely."""
MAX_HEAD_BYTES = 1 << 16
MAX_BODY_BYTES = 1 << 24
"""Of an answer; a longer one is an error, and the rest of it is not read."""


class CannotConnect(EnvUnavailable):
    """No connection could be made, so nothing was sent: safe to try again."""


class BrokeOff(EnvUnavailable):
    """The connection ended, or what came is not HTTP, after the request may have been sent."""


@dataclass(slots=True)
class Answer:
    status: int
    content_type: str
    body: bytes


@cache
def tls() -> ssl.SSLContext:
    """Made once: reading the certificates takes longer than an episode of a cheap game."""
    return ssl.create_default_context()


class Connection:
    """Requests are made one after the other. The caller sets the deadline; a cancelled request drops the connection."""

    def __init__(self, url: str, token: str | None = None) -> None:
        needed = f"an environment's address looks like http://127.0.0.1:36001/textcraft, got {url!r}"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ConfigError(needed) from None
        if parts.scheme not in ("http", "https") or not parts.hostname or not re.fullmatch(r"[!-~]+", url):
            raise ConfigError(needed)
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
                writer.write(self.head(method, path, len(content)) + content)
                await writer.drain()
                answer, reusable = await _read(reader)
            except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
                self.drop()
                raise BrokeOff(str(error) or type(error).__name__) from error
            except BaseException:
                self.drop()  # half an answer may be under way: the next request must not read it
                raise
            # After an exception uvicorn closes the connection without saying so: another request would be lost.
            if reusable and answer.status < 500:
                self._idle_since = time.monotonic()
            else:
                self.drop()
            return answer

    def head(self, method: str, path: str, size: int) -> bytes:
        """Of a request with a body of so many bytes."""
        lines = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}Content-Length: {size}\r\n\r\n"
        return lines.encode("latin-1")

    async def open_with(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        """Another connection to the same server, for somebody else to use."""
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
    """An answer, and whether the connection can be used again."""
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
        body = await _read_to_the_end(reader)
        reusable = False
    return Answer(int(status[2]), headers.get("content-type", ""), body), reusable


async def _read_to_the_end(reader: asyncio.StreamReader) -> bytes:
    """A body without a stated length ends with the connection; one read returns only what has come so far."""
    body = bytearray()
    while part := await reader.read(MAX_HEAD_BYTES):
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ValueError(f"the answer is over {MAX_BODY_BYTES} bytes")
    return bytes(body)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    chunks: list[bytes] = []
    room = MAX_BODY_BYTES
    while True:
        size = _size((await reader.readuntil(b"\r\n")).split(b";")[0].decode("latin-1").strip(), 16)
        if size == 0:
            while await reader.readuntil(b"\r\n") != b"\r\n":  # trailers
                pass
            return b"".join(chunks)
        room -= size
        if room < 0:
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
