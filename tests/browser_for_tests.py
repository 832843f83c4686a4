"""A real Chromium for the viewer's tests, and helpers that wait for the page.

A page is drawn when its data has loaded; until then the previous page is visible. So a test must wait for something
that only the new page has.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

from playwright.sync_api import Browser, FloatRect, Locator, Page, expect, sync_playwright

from agentgym_rl.environment.envs.webarena.browser import find_chromium

Value = TypeVar("Value")
WAIT_MS = 60_000
"""Timeout of every wait. On an idle machine a wait takes a fraction of a second."""
PAUSE_MS = 25
expect.set_options(timeout=WAIT_MS)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        program = find_chromium()
        browser = playwright.chromium.launch(executable_path=program, chromium_sandbox=not root, timeout=WAIT_MS)
        yield browser
        browser.close()


@contextlib.contextmanager
def only_tab(height: int = 1000) -> Iterator[Page]:
    """Yield the tab of a browser of its own. Raise AssertionError if a page had an error."""
    with chromium() as browser:
        tab = browser.new_page(viewport={"width": 1280, "height": height})
        tab.set_default_timeout(WAIT_MS)
        errors: list[str] = []
        tab.on("pageerror", lambda error: errors.append(f"{error}"))
        yield tab
        assert errors == []


@contextlib.contextmanager
def emptied(tab: Page, url: str) -> Iterator[list[str]]:
    """Yield the list of errors that the tab will have, then reset the tab. A new context takes more than a second."""
    errors: list[str] = []
    viewport = tab.viewport_size

    def add(error: object) -> None:
        errors.append(f"{error}")

    tab.on("pageerror", add)
    yield errors
    tab.remove_listener("pageerror", add)
    tab.unroute_all()
    tab.goto("about:blank")
    tab.mouse.move(0, 0)
    if viewport:
        tab.set_viewport_size(viewport)
    session = tab.context.new_cdp_session(tab)
    session.send("Storage.clearDataForOrigin", {"origin": url.rstrip("/"), "storageTypes": "all"})
    session.detach()


def go(page: Page, address: str) -> None:
    """Open an address of the viewer and wait until its page has replaced the previous one."""
    page.evaluate("document.querySelectorAll('main > .page').forEach((old) => old.setAttribute('data-left', ''))")
    if page.evaluate("location.href") == address:
        page.reload()
    else:
        page.goto(address)
    expect(page.locator("main:not(.loading) > .page:not([data-left])")).to_be_visible()


def until(page: Page, read: Callable[[], Value], holds: Callable[[Value], bool], what: str) -> Value:
    """Poll `read` until its value satisfies `holds`, and return it. For conditions that `expect` does not cover."""
    value = read()
    for _ in range(WAIT_MS // PAUSE_MS):
        if holds(value):
            return value
        page.wait_for_timeout(PAUSE_MS)
        value = read()
    raise AssertionError(f"timed out waiting for {what}: got {value!r}")


def still_box(locator: Locator) -> FloatRect:
    """Return an element's box once it is visible and has stopped moving."""
    last_box: list[FloatRect | None] = [None]

    def is_still(box: FloatRect | None) -> bool:
        previous, last_box[0] = last_box[0], box
        return box is not None and box["width"] > 0 and box == previous

    expect(locator).to_be_visible()
    box = until(locator.page, locator.bounding_box, is_still, "an element to stop moving")
    assert box
    return box
