"""Episodes with tool calls in a real Chromium: calls, results, malformed calls and the replayed pictures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_for_tests import go, only_tab
from playwright.sync_api import Page, expect
from viewer_for_tests import library_of, run, viewer_in_thread, wait_for_index

from agentgym_rl.agent.policy import Reply, observation_messages
from agentgym_rl.agent.rollout import rollout
from agentgym_rl.agent.styles import STYLES
from agentgym_rl.environment.envs.keydoor import KeyDoor
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.run.log import RunLog
from agentgym_rl.types import Limits, Message, Observation, Task, ToolCall, Trajectory

CONFIG = {"name": "calls", "environments": [{"name": "keydoor"}], "agent": {"style": "tool"}}
ITEM = 757
"""The treasure is behind the green door, and its key is in the garden."""
REPLIES = [
    Message("assistant", "The key is in the garden.", tool_calls=[
        ToolCall("go_to", {"room": "garden"}, "a"), ToolCall("take_key", {"colour": "green"}, "b")]),
    Message("assistant", "", tool_calls=[ToolCall("", {}, "c", "not valid JSON", '<tool_call>{"name": "go_to"')]),
    Message("assistant", "I go to the hall.", tool_calls=[]),
    Message("assistant", "", tool_calls=[ToolCall("go_to", {"room": "hall"}, "d")]),
    Message("assistant", "", tool_calls=[ToolCall("open_door", {"colour": "green"}, "e"),
                                         ToolCall("take_treasure", {}, "f")]),
]  # fmt: skip


class Recorded:
    """A policy that gives recorded messages."""

    def __init__(self, instruction: str) -> None:
        self._instruction, self._replies = instruction, iter(REPLIES)

    async def reply(self, messages: list[Message], observation: Observation, limits: Limits) -> Reply:
        return Reply(self.unanswered(messages, observation, limits), next(self._replies))

    def unanswered(self, messages: list[Message], observation: Observation, limits: Limits) -> list[Message]:
        return observation_messages(messages, self._instruction, observation)

    async def close(self) -> None:
        return None


async def play() -> Trajectory:
    pool = LocalPool({"keydoor": KeyDoor}, action_format="tool")
    session = STYLES["tool"].wrap(await pool.open("keydoor"))
    policy = Recorded(session.instruction)
    trajectory = await rollout(Task("keydoor", ITEM), session, policy, Limits(9, 9, 9), id="t-0-0-0")
    await pool.close()
    return trajectory


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("runs")
    log = RunLog.create(root / "calls", CONFIG)
    trajectory = run(play())
    assert trajectory.success
    log.write_trajectory(1, trajectory)
    log.set_status("finished", step=1, steps=1)
    log.close()
    library = library_of(root, tmp_path_factory.mktemp("cache"))
    with viewer_in_thread(library) as address:
        wait_for_index(library, 1, "calls")
        yield address


@pytest.fixture
def page() -> Iterator[Page]:
    with only_tab(1500) as tab:
        yield tab


def screenshot(page: Page, name: str) -> None:
    """Keep a picture for people, if AGENTGYM_SCREENSHOTS names a folder."""
    if folder := os.environ.get("AGENTGYM_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_calls_and_results_have_blocks_of_their_own(url: str, page: Page) -> None:
    go(page, f"{url}#/episode/calls/step_000001.0?view=transcript")
    turns = page.locator(".transcript article")
    expect(turns).to_have_count(5)
    first, malformed, silent, _, last = (turns.nth(i) for i in range(5))
    expect(first.locator(".block.thought pre")).to_have_text("The key is in the garden.")
    expect(first.locator(".block.call h3")).to_have_text(["Tool call", "Tool call"])
    expect(first.locator(".block.call pre")).to_have_text(["go_toroom garden", "take_keycolour green"])
    expect(malformed.locator(".block.result h3")).to_have_text(["Result of go_to", "Result of take_key"])
    expect(malformed.locator(".block.call h3")).to_have_text(["Malformed call"])
    expect(malformed.locator(".block.call .invalid")).to_have_text("not valid JSON")
    expect(malformed.locator(".paid .invalid")).to_have_text("invalid action")
    expect(silent.locator(".block.result pre")).to_have_text("Invalid call: not valid JSON.")
    expect(silent.locator(".block.action pre")).to_have_text("I go to the hall.")
    expect(silent.locator(".block.action h3")).to_have_text("Reply without a tool call")
    expect(last.locator(".block.call pre")).to_have_text(["open_doorcolour green", "take_treasure"])
    ending = page.locator(".transcript > .block.result")
    expect(ending.locator("h3")).to_have_text(["Result of open_door", "Result of take_treasure"])
    screenshot(page, "tools-transcript")


def test_the_replay_plays_the_calls_again(url: str, page: Page) -> None:
    go(page, f"{url}#/episode/calls/step_000001.0?turn=1")
    expect(page.locator(".block.result h3")).to_have_text(["Result of go_to", "Result of take_key"])
    expect(page.locator(".picture img")).to_be_visible()
    screenshot(page, "tools-replay")
    go(page, f"{url}#/episode/calls/step_000001.0?turn=5")
    expect(page.locator(".block.result").last).to_contain_text("You have the treasure.")
    expect(page.locator(".picture img")).to_be_visible()
