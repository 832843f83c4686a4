"""One Chromium for all sessions of this process.

Playwright's objects belong to one event loop, sessions live in threads of their own: so one background thread runs a
loop with the browser in it, and sessions hand coroutines to it, each with a deadline. A browser that dies is replaced
when the next episode begins; the episodes that were in it fail with EnvError.
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
    """Path of the system's Chromium, or what WEBARENA_CHROMIUM names; ConfigError says how to install one."""
    named = os.environ.get("WEBARENA_CHROMIUM")
    if named:
        if not (path := shutil.which(named)):
            raise ConfigError(f"WEBARENA_CHROMIUM is {named!r}, which is no program: give the path of a Chromium")
        return path
    for program in PROGRAMS:
        if path := shutil.which(program):
            return path
    raise ConfigError(
        "webarena needs Chromium and found none on the PATH: install it with 'apt-get install chromium' (Debian, as "
        "root) or your system's package manager, or set WEBARENA_CHROMIUM to the program"
    )


class LoopThread:
    """A daemon thread that runs an event loop; coroutines are handed to it from any other thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Value], timeout_s: float, what: str) -> Value:
        """Its result; past the deadline it is cancelled and EnvTimeout raised. What the browser raises is EnvError."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            future.cancel()
            raise EnvTimeout(f"the browser took longer than {timeout_s:g} s to {what}") from error
        except Error as error:
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise EnvError(f"the browser failed to {what}: {first_line}") from error


class Chromium:
    """A browser that is started on first use and again after a crash. Coroutines run in the loop of `thread`."""

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
        """A context of its own (cookies, storage), in a browser that is alive."""
        making = asyncio.ensure_future(self._new_context(options))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            # Whoever asked has given up. The browser has not: what it still makes would stay open for ever.
            making.add_done_callback(self._close_late)
            raise

    async def _new_context(self, options: dict[str, Any]) -> BrowserContext:
        return await (await self._alive()).new_context(**options)

    def _close_late(self, making: asyncio.Future[BrowserContext]) -> None:
        if not making.cancelled() and making.exception() is None:
            closing = asyncio.ensure_future(making.result().close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _alive(self) -> Browser:
        async with self._starting:
            if self._browser is not None and self._browser.is_connected():
                return self._browser
            program = find_chromium()
            if self._playwright is None:
                self._playwright = await async_playwright().start()
            root = os.geteuid() == 0 if hasattr(os, "geteuid") else False
            self._browser = await self._playwright.chromium.launch(
                executable_path=program,
                headless=True,
                chromium_sandbox=not root,
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
    """The process's browser with these further flags; started when its first context is asked for."""
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
