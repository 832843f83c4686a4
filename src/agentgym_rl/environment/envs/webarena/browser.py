"""One Chromium for all sessions of this process.

Playwright's objects belong to one event loop, but sessions run in several threads. So one background thread runs an
event loop with the browser, and sessions submit coroutines to it, each with a deadline. If the browser dies, its
episodes fail with EnvError and the next episode starts a new browser.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import shutil
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from playwright.async_api import Browser, BrowserContext, Error, Playwright, async_playwright

from agentgym_rl.errors import ConfigError, EnvError, EnvTimeout

Value = TypeVar("Value")

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
LAUNCH_TIMEOUT_S = 25.0


def find_chromium() -> str:
    """Return the path of Chromium: WEBARENA_CHROMIUM if set, otherwise the first one on the PATH."""
    configured = os.environ.get("WEBARENA_CHROMIUM")
    if configured:
        if not (path := shutil.which(configured)):
            raise ConfigError(f"WEBARENA_CHROMIUM is {configured!r}, not a program: set it to the path of a Chromium")
        return path
    for program in PROGRAMS:
        if path := shutil.which(program):
            return path
    raise ConfigError(
        "the browser environments need Chromium and found none on the PATH: install it with 'apt-get install "
        "chromium' (Debian, as root) or your system's package manager, or set WEBARENA_CHROMIUM to the program"
    )


class LoopThread:
    """A daemon thread that runs an event loop for coroutines of other threads."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Value], timeout_s: float, purpose: str) -> Value:
        """Return the coroutine's result. Raise EnvTimeout past the deadline, EnvError if the browser fails."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            future.cancel()
            raise EnvTimeout(f"the browser took longer than {timeout_s:g} s to {purpose}") from error
        except Error as error:
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise EnvError(f"the browser failed to {purpose}: {first_line}") from error


class Chromium:
    """A browser that starts on first use and again after a crash. Its coroutines run in the loop of `thread`."""

    def __init__(self, thread: LoopThread, flags: tuple[str, ...]) -> None:
        self.thread = thread
        self._flags = flags
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None
        self._starting = asyncio.Lock()
        self._closing: set[asyncio.Future[None]] = set()

    @property
    def num_contexts(self) -> int:
        return len(self._browser.contexts) if self._browser is not None and self._browser.is_connected() else 0

    async def new_context(self, **options: Any) -> BrowserContext:
        """Return a context with its own cookies and storage, in a live browser."""
        creation = asyncio.ensure_future(self._new_context(options))
        try:
            return await asyncio.shield(creation)
        except asyncio.CancelledError:
            # The caller has given up, but the browser may still create the context: close it then.
            creation.add_done_callback(self._close_abandoned)
            raise

    async def _new_context(self, options: dict[str, Any]) -> BrowserContext:
        return await (await self._connected_browser()).new_context(**options)

    def _close_abandoned(self, creation: asyncio.Future[BrowserContext]) -> None:
        if not creation.cancelled() and creation.exception() is None:
            closing = asyncio.ensure_future(creation.result().close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _connected_browser(self) -> Browser:
        async with self._starting:
            if self._browser is not None and self._browser.is_connected():
                return self._browser
            program = find_chromium()
            if self._playwright is None:
                self._playwright = await async_playwright().start()
            is_root = os.geteuid() == 0 if hasattr(os, "geteuid") else False
            self._browser = await self._playwright.chromium.launch(
                executable_path=program,
                headless=True,
                chromium_sandbox=not is_root,
                args=[*FLAGS, *self._flags],
                timeout=LAUNCH_TIMEOUT_S * 1000,
                handle_sigint=False,
                handle_sigterm=False,
                handle_sighup=False,
            )
            return self._browser

    async def stop(self) -> None:
        with contextlib.suppress(Error):
            if self._browser is not None:
                await self._browser.close()
            if self._playwright is not None:
                await self._playwright.stop()
        self._browser = self._playwright = None


_lock = threading.Lock()
_thread: LoopThread | None = None
_browsers: dict[tuple[str, ...], Chromium] = {}


def shared_chromium(*flags: str) -> Chromium:
    """Return the process's browser with these extra flags. It starts with its first context."""
    global _thread
    with _lock:
        if _thread is None:
            _thread = LoopThread("webarena-browser")
            atexit.register(_stop_all)
        if flags not in _browsers:
            _browsers[flags] = Chromium(_thread, flags)
        return _browsers[flags]


def _stop_all() -> None:
    with _lock:
        for chromium in _browsers.values():
            with contextlib.suppress(EnvError):
                chromium.thread.run(chromium.stop(), 5.0, "stop")
        _browsers.clear()
