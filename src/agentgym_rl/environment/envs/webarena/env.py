"""WebArena as a text environment: the agent reads an accessibility tree and acts in a real browser."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, ClassVar

from playwright.async_api import Error

from agentgym_rl.environment.envs.webarena.actions import TOOLS, Refused, parse
from agentgym_rl.environment.envs.webarena.addresses import on_sites
from agentgym_rl.environment.envs.webarena.browser import LAUNCH_TIMEOUT_S, find_chromium
from agentgym_rl.environment.envs.webarena.embedded_stage import EmbeddedStage
from agentgym_rl.environment.envs.webarena.evaluators import evaluate, llm_judge
from agentgym_rl.environment.envs.webarena.evaluators.program import target_holds
from agentgym_rl.environment.envs.webarena.observation import CLICKABLE, TYPABLE, View
from agentgym_rl.environment.envs.webarena.official_stage import OfficialStage
from agentgym_rl.environment.envs.webarena.stage import Stage
from agentgym_rl.environment.envs.webarena.tabs import Tabs
from agentgym_rl.environment.envs.webarena.tasks.embedded import embedded_splits, embedded_subsets
from agentgym_rl.environment.envs.webarena.tasks.official import OFFICIAL, official_subsets, published_item
from agentgym_rl.environment.envs.webarena.tasks.task_config import SITES, SUBSETS, TaskConfig
from agentgym_rl.environment.tools import Tool
from agentgym_rl.errors import EnvError
from agentgym_rl.types import Step

logger = logging.getLogger(__name__)

INSTRUCTION = """\
You do a task in a web browser. The first message gives the objective. Each message shows the page you are on as an \
accessibility tree: one element a line, as [id] role 'name', indented by where it stands. Only what is in the \
window is shown; a note says when the page goes on.

Give exactly one action a turn:
- click [id]: click the element. An option of a drop-down list is chosen by clicking it.
- type [id] [content] [press_enter_after]: replace the text in a field; the last bracket is 1 (press Enter afterwards, \
the default) or 0.
- hover [id]: move the pointer over the element.
- press [key_comb]: press a key or combination, for example press [Enter] or press [Ctrl+a].
- scroll [down] or scroll [up]: move the window by about its height.
- new_tab, tab_focus [n], close_tab: open a tab, go to tab n, close the current one.
- goto [url]: open an address of the task's sites.
- go_back, go_forward: move in the tab's history.
- stop [answer]: end the task. If the objective asks for something, give the answer in the brackets, and nothing \
else; otherwise leave them empty.

Example: to search for "lamp" in the field [7], write
type [7] [lamp] [1]"""

PAGE_TIMEOUT_S = 15.0
CALL_TIMEOUT_S = 30.0
"""Seconds for one action and all it loads. LAUNCH_TIMEOUT_S is added at reset. Both fit into a session's deadline."""


class WebArena:
    """WebArena: 240 tasks on embedded sites and 812 published tasks on sites that the user runs. Implements TextEnv."""

    name: ClassVar[str] = "webarena"
    instruction: ClassVar[str] = INSTRUCTION
    splits: ClassVar[Mapping[str, range]] = {**embedded_splits(), "official": OFFICIAL}
    subsets: ClassVar[tuple[str, ...]] = tuple(SUBSETS.values())
    cheap: ClassVar[bool] = False

    def __init__(self) -> None:
        find_chromium()  # fails now, not at the first reset, if there is no browser
        self._stage: Stage
        self._task: TaskConfig
        self._item = -1
        self._tabs: Tabs | None = None
        self._view = View((), False, False)
        self._observation = ""
        """The page as last shown to the agent."""
        self._playing = False

    @classmethod
    def tools(cls) -> Sequence[Tool]:
        return TOOLS

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        cls._check(item)
        return official_subsets(item) if item in OFFICIAL else embedded_subsets(item)

    @classmethod
    def published_item(cls, number: int) -> int:
        return published_item(number)

    @classmethod
    def agentgym_item(cls, number: int) -> int:
        """Return the published item if an address of its sites is set, otherwise the embedded item of that number."""
        if any(os.environ.get(site) for site in SITES):
            return cls.published_item(number)
        _warn_about_embedded_tasks()
        return number

    @classmethod
    def _check(cls, item: int) -> None:
        if not any(item in split for split in cls.splits.values()):
            known = ", ".join(f"{split.start} to {split.stop - 1}" for split in cls.splits.values())
            raise IndexError(f"webarena has items {known}, got {item}")

    def reset(self, item: int) -> str:
        self._check(item)
        self.close()
        stage: Stage = OfficialStage() if item in OFFICIAL else EmbeddedStage()
        self._stage, self._item = stage, item
        self._task, options = stage.begin(item)
        if self._task.needs_judge:
            llm_judge.require_judge()
        opening = Tabs.open(stage.chromium, self._task.start_urls, self._allowed, PAGE_TIMEOUT_S, **options)
        try:
            self._tabs = self._run(opening, CALL_TIMEOUT_S + LAUNCH_TIMEOUT_S, "open the task's pages")
        except Refused as error:
            raise EnvError(f"webarena item {item} could not start: {error}") from error
        self._playing = True
        self._observe()
        return f"Objective: {self._task.intent}\n\n{self._observation}"

    def step(self, text: str) -> Step:
        tabs = self._require_playing()
        try:
            action = parse(text)
        except Refused as refusal:
            return Step(str(refusal), info={"valid": False})
        if action.kind == "stop":
            return self._finish(action.text)
        before = self._view
        try:
            self._run(tabs.act(action, before), CALL_TIMEOUT_S, f"carry out {action.kind}")
        except Refused as refusal:
            before_refusal = self._observation
            self._observe()
            # An address that fails to open can leave another page in the tab; then the agent has to see it.
            changed = "" if self._observation == before_refusal else f"\n\n{self._observation}"
            return Step(f"{refusal}{changed}", info={"valid": False})
        self._stage.record_action(text.strip(), before)
        self._observe()
        return Step(self._observation_with_notes(), info={"valid": True})

    def close(self) -> None:
        tabs, self._tabs = self._tabs, None
        self._playing = False
        if tabs is not None:
            with contextlib.suppress(EnvError):  # a dead browser has nothing left to close
                self._run(tabs.close(), 10.0, "close a context")
        if self._item >= 0:
            self._stage.end()

    def oracle(self) -> str:
        """Return the next action of the scripted solution. The published tasks have none."""
        self._require_playing()
        return self._stage.oracle(self._view)

    def state_key(self) -> str:
        """Return the item and a digest of tabs, page, scrolling and (embedded sites only) the episode's data."""
        current, urls = self._require_open().tabs
        lines = [(element.line, element.visible) for element in self._view.elements]
        digest = hashlib.sha256(f"{current} {urls} {lines}".encode("utf-8", "replace"))
        digest.update(self._stage.data())
        return f"{self._item}|{digest.hexdigest()[:24]}"

    def actions(self) -> list[str]:
        """Return the clicks, scrolls and stops possible now, and texts of the objective to type into visible fields."""
        if not self._playing:
            return []
        texts = self._typable_texts()
        actions = []
        for element in self._view.elements:
            if element.visible and element.role in CLICKABLE and ("disabled", True) not in element.properties:
                actions.append(f"click [{element.id}]")
            elif element.visible and element.role in TYPABLE:
                enter = int(element.role == "searchbox")
                actions += [f"type [{element.id}] [{text}] [{enter}]" for text in texts]
        if self._view.below:
            actions.append("scroll [down]")
        if self._view.above:
            actions.append("scroll [up]")
        can_go_back = self._run(self._require_playing().can_go_back(), CALL_TIMEOUT_S, "read the tab's history")
        return [*actions, *(["go_back"] if can_go_back else []), "stop []"]

    def render(self) -> bytes:
        """Return a PNG of the browser's window."""
        if self._tabs is None:
            raise EnvError("webarena has nothing to draw yet: call reset first")
        return self._run(self._tabs.screenshot(), CALL_TIMEOUT_S, "take a picture")

    def _finish(self, answer: str) -> Step:
        tabs = self._require_playing()
        check = partial(self._check_pages, tabs)
        success = evaluate(self._task, answer, tabs.page.url, check, self._stage.only_changed)
        self._playing = False
        message = "The task is done." if success else "The task ended without success."
        return Step(message, float(success), True, {"valid": True, "success": success})

    def _check_pages(self, tabs: Tabs, targets: list[Mapping[str, Any]]) -> bool:
        """Return whether all targets hold. Each has its own deadline, because some tasks check ten pages."""
        return all(
            self._run(target_holds(target, tabs.page, self._stage.addresses), CALL_TIMEOUT_S, "check a page")
            for target in targets
        )

    def _observe(self) -> None:
        tabs = self._require_playing()
        header, self._view = self._run(_observe_with_retry(tabs), CALL_TIMEOUT_S, "read the page")
        self._observation = f"{header}\n\n{self._view.text}"

    def _observation_with_notes(self) -> str:
        notes, self._require_playing().notes = self._require_playing().notes, []
        return "\n".join([*notes, self._observation])

    def _typable_texts(self) -> list[str]:
        """Return up to four quoted (or else capitalised) texts of the objective."""
        quoted = re.findall(r'"([^"]+)"', self._task.intent)
        named = re.findall(r"\b[A-Z0-9][\w./-]*(?: (?:[A-Z0-9][\w./-]*|of|the))*", self._task.intent[1:])
        return list(dict.fromkeys(quoted or [name.rstrip(".") for name in named]))[:4]

    def _allowed(self, url: str) -> bool:
        return on_sites(url, self._stage.addresses.values())

    def _require_open(self) -> Tabs:
        if self._tabs is None:
            raise EnvError("webarena needs an episode: call reset first")
        return self._tabs

    def _require_playing(self) -> Tabs:
        tabs = self._require_open()
        if not self._playing:
            raise EnvError("webarena needs a running episode: call reset first")
        return tabs

    def _run(self, coroutine: Any, timeout_s: float, purpose: str) -> Any:
        return self._stage.chromium.thread.run(coroutine, timeout_s, purpose)


@cache
def _warn_about_embedded_tasks() -> None:
    """Log the warning once per process."""
    logger.warning("webarena: no address of a published site is set, so AgentGym's clients play the embedded tasks")


async def _observe_with_retry(tabs: Tabs) -> tuple[str, View]:
    """Observe the page. Retry if it navigates while it is read."""
    for attempt in range(3):
        try:
            return await tabs.observe()
        except Error:
            browser = tabs.context.browser
            if attempt == 2 or browser is None or not browser.is_connected():
                raise
            await tabs.settle()
    raise AssertionError("unreachable")
