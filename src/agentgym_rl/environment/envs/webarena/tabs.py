"""Browser context of one episode: tabs, actions and observations. Its coroutines run in the browser's event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from playwright.async_api import BrowserContext, CDPSession, Dialog, Error, Frame, Page, Request

from agentgym_rl.environment.envs.webarena.actions import Action, Refused, quote
from agentgym_rl.environment.envs.webarena.addresses import address
from agentgym_rl.environment.envs.webarena.browser import Chromium
from agentgym_rl.environment.envs.webarena.observation import Element, Numbering, View, build_view, read_layout
from agentgym_rl.errors import EnvError

VIEWPORT = (1280, 720)
MAX_TABS = 8
SETTLE_DELAY_S = 0.03
"""Seconds to wait after an action for a navigation that the page has not requested yet."""
NAVIGATION_START_TIMEOUT_S = 5.0
"""Seconds within which a requested navigation must start. The browser may be busy."""

_TWO_TASKS = "new Promise(done => setTimeout(() => setTimeout(done, 0), 0))"
"""Two tasks of the page's event loop. By then click handlers and form submissions have run."""
_SELECT_OPTION = """function() {
    const list = this.closest('select');
    if (!list || list.disabled || this.disabled) return false;
    if (list.multiple) this.selected = !this.selected; else list.value = this.value;
    list.dispatchEvent(new Event('input', {bubbles: true}));
    list.dispatchEvent(new Event('change', {bubbles: true}));
    return true;
}"""
_FOCUS_FIELD = """function() {
    const field = this.nodeType === 1 ? this : this.parentElement;
    if (!field || field.disabled || field.readOnly) return false;
    const typable = field.isContentEditable || field.tagName === 'TEXTAREA' || (field.tagName === 'INPUT' &&
        !['button', 'checkbox', 'color', 'file', 'hidden', 'image', 'radio', 'range', 'reset', 'submit']
        .includes(field.type));
    if (!typable) return false;
    field.focus();
    if (field.select) field.select(); else document.getSelection().selectAllChildren(field);
    return true;
}"""


class _Tab:
    """A page and its loading state."""

    def __init__(self, page: Page, cdp: CDPSession, frame_id: str) -> None:
        self.page = page
        self.cdp = cdp
        self._frame_id = frame_id
        self.title = ""
        """Title at the last observation."""
        self.numbering = Numbering()
        self.num_navigations = 0
        self._start_deadline = 0.0
        self.crashed = False
        cdp.on("Page.frameRequestedNavigation", self._on_navigation_requested)
        page.on("framenavigated", self._on_navigated)
        page.on("request", self._on_request)
        page.on("requestfailed", self._on_request_end)
        page.on("requestfinished", self._on_request_end)
        page.on("crash", self._on_crash)

    @property
    def is_navigating(self) -> bool:
        """Return whether a navigation has been requested or is under way."""
        return self.num_navigations > 0 or asyncio.get_running_loop().time() < self._start_deadline

    def _on_navigation_requested(self, event: dict[str, Any]) -> None:
        # The renderer sends this event before it answers any request made after the click.
        if event["frameId"] == self._frame_id and event["disposition"] == "currentTab":
            self._start_deadline = asyncio.get_running_loop().time() + NAVIGATION_START_TIMEOUT_S

    def _on_navigated(self, frame: Frame) -> None:
        if frame == self.page.main_frame:
            self._start_deadline = 0.0

    def _on_request(self, request: Request) -> None:
        if request.is_navigation_request() and request.frame == self.page.main_frame:
            self.num_navigations += 1
            self._start_deadline = 0.0

    def _on_request_end(self, request: Request) -> None:
        if request.is_navigation_request() and request.frame == self.page.main_frame:
            self.num_navigations -= 1

    def _on_crash(self, _: Page) -> None:
        self.crashed = True


class Tabs:
    """The tabs of one episode. `allowed` returns whether an address belongs to the sites."""

    def __init__(self, context: BrowserContext, allowed: Callable[[str], bool], load_timeout_s: float) -> None:
        self.context = context
        self.notes: list[str] = []
        """Events besides the action (dialogs, slow pages), shown with the next observation."""
        self._allowed = allowed
        self._load_timeout_s = load_timeout_s
        self._tabs: list[_Tab] = []
        self._current = 0
        self._opening_tab = False
        self._new_windows: list[Page] = []
        """Windows that the site opened and that are not tabs yet."""
        self._pending_windows = 0
        """Number of windows that the site requested and that have not opened yet."""

    @classmethod
    async def open(
        cls,
        chromium: Chromium,
        urls: Sequence[str],
        allowed: Callable[[str], bool],
        load_timeout_s: float,
        cookies: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> Tabs:
        """Open a fresh context with one tab per address, the first in front."""
        context = await chromium.new_context(
            viewport={"width": VIEWPORT[0], "height": VIEWPORT[1]},
            locale="en-GB",
            timezone_id="UTC",
            reduced_motion="reduce",
            accept_downloads=False,
            service_workers="block",
            **options,
        )
        try:
            if cookies:
                await context.add_cookies([dict(cookie) for cookie in cookies])  # type: ignore[misc]
            tabs = cls(context, allowed, load_timeout_s)
            context.set_default_timeout(load_timeout_s * 1000)
            for url in urls:
                await tabs._open_tab()
                await tabs._load(url)
                tabs._tab.title = await tabs.page.title()
            tabs._current = 0
            await tabs._tab.page.bring_to_front()
            context.on("page", tabs._on_page)
        except BaseException:
            with contextlib.suppress(Error):
                await context.close()
            raise
        return tabs

    async def close(self) -> None:
        with contextlib.suppress(Error):
            await self.context.close()

    @property
    def page(self) -> Page:
        return self._tab.page

    @property
    def tabs(self) -> tuple[int, list[str]]:
        """Return the number of the current tab and the addresses of all tabs."""
        return self._current, [tab.page.url for tab in self._tabs]

    async def act(self, action: Action, view: View) -> None:
        """Carry out an action and wait until the page has settled. Raise Refused if it is impossible."""
        await _HANDLERS[action.kind](self, action, view)
        await self.settle()

    async def observe(self) -> tuple[str, View]:
        """Return the header (tabs and URL) and the view of the current tab."""
        tab = self._tab
        if tab.crashed:
            raise EnvError("the browser's page crashed")
        tree, snapshot = await asyncio.gather(
            tab.cdp.send("Accessibility.getFullAXTree"),
            tab.cdp.send("DOMSnapshot.captureSnapshot", {"computedStyles": []}),
        )
        layout = read_layout(snapshot)
        tab.title = layout.title
        header = " | ".join(
            f"Tab {n}{' (current)' if n == self._current else ''}: {each.title}" for n, each in enumerate(self._tabs)
        )
        return f"{header}\nURL: {tab.page.url}", build_view(tree["nodes"], layout, VIEWPORT, tab.numbering)

    async def screenshot(self) -> bytes:
        return await self.page.screenshot(type="png", timeout=self._load_timeout_s * 1000)

    @property
    def _tab(self) -> _Tab:
        return self._tabs[self._current]

    async def _open_tab(self) -> None:
        """Open an empty tab for the agent, in front."""
        self._opening_tab = True
        try:
            page = await self.context.new_page()
        finally:
            self._opening_tab = False
        await self._add(page)

    async def _add(self, page: Page) -> None:
        cdp = await self.context.new_cdp_session(page)
        page.on("dialog", self._on_dialog)
        cdp.on("Page.windowOpen", self._on_window_open)
        await cdp.send("Page.enable")
        frames = await cdp.send("Page.getFrameTree")
        self._tabs.append(_Tab(page, cdp, frames["frameTree"]["frame"]["id"]))
        self._current = len(self._tabs) - 1

    def _on_window_open(self, _: Any) -> None:
        self._pending_windows += 1

    def _on_page(self, page: Page) -> None:
        if not self._opening_tab:
            self._new_windows.append(page)

    async def _add_window(self, page: Page) -> None:
        """Make a window that the site opened the current tab, or close it if there are too many tabs."""
        self._pending_windows = max(0, self._pending_windows - 1)
        if len(self._tabs) < MAX_TABS:
            await self._add(page)
        else:
            await page.close()
            self.notes.append(f"The site wanted another window; there are {MAX_TABS} tabs open already.")

    async def _on_dialog(self, dialog: Dialog) -> None:
        self.notes.append(f"The page asked {quote(dialog.message)}; this was accepted.")
        with contextlib.suppress(Error):
            await dialog.accept()

    async def settle(self) -> None:
        """Wait until no navigation is under way and the page is loaded, at most until the deadline."""
        deadline = asyncio.get_running_loop().time() + self._load_timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    with contextlib.suppress(Error):  # a navigation destroys the document this runs in
                        await self._tab.cdp.send("Runtime.evaluate", {"expression": _TWO_TASKS, "awaitPromise": True})
                    await asyncio.sleep(SETTLE_DELAY_S)
                    while self._new_windows:
                        await self._add_window(self._new_windows.pop(0))
                    if self._tab.crashed or self._tab.page.is_closed():
                        break
                    if self._tab.is_navigating or self._pending_windows:
                        continue
                    await self._tab.page.wait_for_load_state("load", timeout=self._load_timeout_s * 1000)
                    if not self._tab.is_navigating:
                        break
        except (TimeoutError, Error) as error:
            if self._tab.crashed or not self.context.browser or not self.context.browser.is_connected():
                raise EnvError("the browser crashed") from error
            self._pending_windows = 0
            # A pending load would block the next request to this tab.
            await self._tab.cdp.send("Page.stopLoading")
            self.notes.append(f"The page was still loading after {self._load_timeout_s:g} s and was stopped.")
        if not self._allowed(self.page.url):
            outside_url = self.page.url
            await self._move_back(1)
            self.notes.append(f"{quote(outside_url)} is outside the sites of this task; you were taken back.")

    async def _load(self, url: str) -> None:
        try:
            await self._tab.page.goto(url, timeout=self._load_timeout_s * 1000, wait_until="load")
        except Error as error:
            if self.context.browser is None or not self.context.browser.is_connected():
                raise
            with contextlib.suppress(Error):  # a pending load would block the next request
                await self._tab.cdp.send("Page.stopLoading")
            reason = str(error).splitlines()[0].removeprefix("Page.goto: ")
            raise Refused(f"{quote(url)} could not be opened: {reason}.") from error

    async def _center(self, element: Element) -> tuple[float, float]:
        """Scroll an element into view and return its centre."""
        cdp = self._tab.cdp
        try:
            await cdp.send("DOM.scrollIntoViewIfNeeded", {"backendNodeId": element.backend_id})
            quads = (await cdp.send("DOM.getContentQuads", {"backendNodeId": element.backend_id}))["quads"]
        except Error as error:
            self._check_alive()
            raise Refused(f"Element [{element.id}] has no place on the page: nothing happened.") from error
        if not quads:
            raise Refused(f"Element [{element.id}] has no place on the page: nothing happened.")
        quad = quads[0]
        return sum(quad[0::2]) / 4, sum(quad[1::2]) / 4

    def _check_alive(self) -> None:
        if self._tab.crashed or self.context.browser is None or not self.context.browser.is_connected():
            raise EnvError("the browser crashed")

    async def _call_on(self, element: Element, function: str) -> bool:
        try:
            node = await self._tab.cdp.send("DOM.resolveNode", {"backendNodeId": element.backend_id})
            answer = await self._tab.cdp.send(
                "Runtime.callFunctionOn",
                {
                    "functionDeclaration": function,
                    "objectId": node["object"]["objectId"],
                    "returnByValue": True,
                    "userGesture": True,
                },
            )
        except Error as error:
            self._check_alive()
            raise Refused(f"Element [{element.id}] is no longer on the page.") from error
        return bool(answer["result"].get("value"))

    async def _click(self, action: Action, view: View) -> None:
        element = _visible_element(view, action.element)
        if element.role == "option" and await self._call_on(element, _SELECT_OPTION):
            return
        await self.page.mouse.click(*await self._center(element))

    async def _hover(self, action: Action, view: View) -> None:
        await self.page.mouse.move(*await self._center(_visible_element(view, action.element)))

    async def _type(self, action: Action, view: View) -> None:
        element = _visible_element(view, action.element)
        point = await self._center(element)
        if not await self._call_on(element, _FOCUS_FIELD):
            raise Refused(f"Element [{element.id}] is a {element.role}: nothing can be typed there.")
        await self.page.mouse.move(*point)
        if action.text:
            await self.page.keyboard.insert_text(action.text)
        else:
            await self.page.keyboard.press("Delete")
        if action.enter:
            await self.page.keyboard.press("Enter")

    async def _press(self, action: Action, view: View) -> None:
        await self.page.keyboard.press(action.text)

    async def _scroll(self, action: Action, view: View) -> None:
        if not (view.below if action.text == "down" else view.above):
            raise Refused(f"The page does not go on {'below' if action.text == 'down' else 'above'}.")
        # A little less than the window, so that a line cut at the edge is whole in one of the two views.
        distance = (VIEWPORT[1] - 40) * (1 if action.text == "down" else -1)
        await self.page.evaluate("distance => window.scrollBy(0, distance)", distance)

    async def _new_tab(self, action: Action, view: View) -> None:
        if len(self._tabs) >= MAX_TABS:
            raise Refused(f"There are {MAX_TABS} tabs open already: close one first.")
        await self._open_tab()

    async def _tab_focus(self, action: Action, view: View) -> None:
        if action.element >= len(self._tabs):
            raise Refused(f"There is no tab {action.element}: tabs are 0 to {len(self._tabs) - 1}.")
        self._current = action.element
        await self.page.bring_to_front()

    async def _close_tab(self, action: Action, view: View) -> None:
        if len(self._tabs) == 1:
            raise Refused("This is the only tab: it stays open.")
        closed = self._tabs.pop(self._current)
        self._current = min(self._current, len(self._tabs) - 1)
        await closed.page.close()
        await self.page.bring_to_front()

    async def _goto(self, action: Action, view: View) -> None:
        await self._load(address(action.text, self._allowed))

    async def _go_back(self, action: Action, view: View) -> None:
        if not await self._move_back(1):
            raise Refused("There is no earlier page in this tab.")

    async def _go_forward(self, action: Action, view: View) -> None:
        if not await self._move_back(-1):
            raise Refused("There is no later page in this tab.")

    async def _move_back(self, steps: int) -> bool:
        """Move back in the tab's history (forward if negative). Return False if there is no such entry."""
        entry = await self._entry(steps)
        if entry is None:
            return False
        await self._tab.cdp.send("Page.navigateToHistoryEntry", {"entryId": entry["id"]})
        url = entry["url"]
        with contextlib.suppress(Error):
            await self.page.wait_for_url(lambda current_url: current_url == url, timeout=self._load_timeout_s * 1000)
        return True

    async def can_go_back(self) -> bool:
        return await self._entry(1) is not None

    async def _entry(self, steps: int) -> Mapping[str, Any] | None:
        """Return the entry of the tab's history so many steps back, or None if there is none."""
        history = await self._tab.cdp.send("Page.getNavigationHistory")
        index = history["currentIndex"] - steps
        if not 0 <= index < len(history["entries"]) or history["entries"][index]["url"] == "about:blank":
            return None
        entry: Mapping[str, Any] = history["entries"][index]
        return entry


def _visible_element(view: View, element_id: int) -> Element:
    element = view.find(element_id)
    if element is None or not element.backend_id:
        raise Refused(f"There is no element [{element_id}] in view.")
    return element


_HANDLERS: dict[str, Callable[..., Any]] = {
    "click": Tabs._click,
    "hover": Tabs._hover,
    "type": Tabs._type,
    "press": Tabs._press,
    "scroll": Tabs._scroll,
    "new_tab": Tabs._new_tab,
    "tab_focus": Tabs._tab_focus,
    "close_tab": Tabs._close_tab,
    "goto": Tabs._goto,
    "go_back": Tabs._go_back,
    "go_forward": Tabs._go_forward,
}
