"""program_html: look at pages, as the agent left them or opened anew, and check what they hold."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from html import unescape
from typing import Any

from playwright.async_api import Error, Page

from agentgym_rl.environment.envs.webarena.evaluators import helpers
from agentgym_rl.environment.envs.webarena.evaluators.strings import any_included, exact_match
from agentgym_rl.errors import ConfigError


async def holds(target: Mapping[str, Any], page: Page, addresses: Mapping[str, str]) -> bool:
    """Whether one target holds. `page` is the agent's; other pages are opened beside it, so it stays as it is."""
    around = helpers.Surroundings(page, page.url, addresses)
    url = target["url"]
    if url.startswith("func:"):
        url = await helpers.call(url, around)
        if not url:
            return False
    if url == "last":
        return await _page_holds(target, page, around)
    other = await page.context.new_page()
    try:
        await other.goto(url, wait_until="load")
        return await _page_holds(target, other, helpers.Surroundings(other, page.url, addresses))
    finally:
        await other.close()


async def _page_holds(target: Mapping[str, Any], page: Page, around: helpers.Surroundings) -> bool:
    for preparation in target.get("prep_actions") or ():
        with contextlib.suppress(Error):
            await page.evaluate(f"() => {preparation}")
    found = unescape(await _look_up(target["locator"].strip(), page, around))
    required = target["required_contents"]
    if "exact_match" in required:
        return exact_match(required["exact_match"], found)
    if "must_include" in required:
        return all(any_included(reference, found) for reference in required["must_include"])
    raise ConfigError(f"required_contents must be exact_match or must_include, got {', '.join(required)}")


async def _look_up(locator: str, page: Page, around: helpers.Surroundings) -> str:
    """What a locator finds; empty when there is nothing there, which is a fact about the page and no failure."""
    if not locator:
        return await page.content()
    if locator.startswith("func:"):
        return await helpers.call(locator, around)
    if not locator.startswith(("document.", "[...document.")):
        raise ConfigError(f"a locator starts with document. or func:, got {locator!r:.120}")
    try:
        value = await page.evaluate(f"() => {locator}")  # written by the task's author, never by the agent
    except Error:
        if page.is_closed() or page.context.browser is None or not page.context.browser.is_connected():
            raise
        return ""
    return "" if value is None else str(value)
