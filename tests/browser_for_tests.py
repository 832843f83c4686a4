"""A real Chromium for the viewer's tests, and reads that wait for what they read.

A page is drawn when its data have come: whatever is read must be waited for, and by something that only the page asked
for can have, because the page before stays in sight until then.
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
"""For what takes a fraction of a second on a machine that has nothing else to do."""
PAUSE_MS = 25
expect.set_options(timeout=WAIT_MS)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        program = find_chromium()
        made = playwright.chromium.launch(executable_path=program, chromium_sandbox=not root, timeout=WAIT_MS)
        yield made
        made.close()


def go(page: Page, address: str) -> None:
    """Open an address of the viewer and wait until its page, and not the one before, is drawn."""
    page.evaluate("document.querySelectorAll('main > .page').forEach((old) => old.setAttribute('data-left', ''))")
    if page.evaluate("location.href") == address:
        page.reload()
    else:
        page.goto(address)
    expect(page.locator("main:not(.loading) > .page:not([data-left])")).to_be_visible()


def until(page: Page, read: Callable[[], Value], holds: Callable[[Value], bool], what: str) -> Value:
    """What `read` gives once it holds; for what `expect` has no words for."""
    value = read()
    for _ in range(WAIT_MS // PAUSE_MS):
        if holds(value):
            return value
        page.wait_for_timeout(PAUSE_MS)
        value = read()
    raise AssertionError(f"{what} did not come: it is {value!r}")


def still_box(locator: Locator) -> FloatRect:
    """Where an element is, once it is drawn and has stayed there for a moment."""
    seen: list[FloatRect | None] = [None]

    def held(box: FloatRect | None) -> bool:
        before, seen[0] = seen[0], box
        return box is not None and box["width"] > 0 and box == before

    expect(locator).to_be_visible()
    box = until(locator.page, locator.bounding_box, held, "an element that holds still")
    assert box
    return box
