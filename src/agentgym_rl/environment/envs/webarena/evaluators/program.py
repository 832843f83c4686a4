"""The evaluator program_html: checks the contents of the agent's page or of pages opened afresh."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from html import unescape
from typing import Any

from playwright.async_api import Error, Page

from agentgym_rl.environment.envs.webarena.evaluators import helpers
from agentgym_rl.environment.envs.webarena.evaluators.strings import any_included, exact_match
from agentgym_rl.errors import ConfigError


async def target_holds(target: Mapping[str, Any], page: Page, addresses: Mapping[str, str]) -> bool:
    """Return whether one target holds. Other pages open in new tabs, so the agent's `page` is unchanged."""
    context = helpers.HelperContext(page, page.url, addresses)
    url = target["url"]
    if url.startswith("func:"):
        url = await helpers.call(url, context)
        if not url:
            return False
    if url == "last":
        return await _page_matches(target, page, context)
    other = await page.context.new_page()
    try:
        await other.goto(url, wait_until="load")
        return await _page_matches(target, other, helpers.HelperContext(other, page.url, addresses))
    finally:
        await other.close()


async def _page_matches(target: Mapping[str, Any], page: Page, context: helpers.HelperContext) -> bool:
    for preparation in target.get("prep_actions") or ():
        with contextlib.suppress(Error):
            await page.evaluate(f"() => {preparation}")
    content = unescape(await _read_content(target["locator"].strip(), page, context))
    required = target["required_contents"]
    if "exact_match" in required:
        return exact_match(required["exact_match"], content)
    if "must_include" in required:
        return all(any_included(reference, content) for reference in required["must_include"])
    raise ConfigError(f"required_contents must be exact_match or must_include, got {', '.join(required)}")


async def _read_content(locator: str, page: Page, context: helpers.HelperContext) -> str:
    """Return the text at a locator, or an empty string if the page has no such element."""
    if not locator:
        return await page.content()
    if locator.startswith("func:"):
        return await helpers.call(locator, context)
    if not locator.startswith(("document.", "[...document.")):
        raise ConfigError(f"a locator starts with document. or func:, got {locator!r:.120}")
    try:
        value = await page.evaluate(f"() => {locator}")  # from the task's author, never from the agent
    except Error:
        if page.is_closed() or page.context.browser is None or not page.context.browser.is_connected():
            raise
        return ""
    return "" if value is None else str(value)
