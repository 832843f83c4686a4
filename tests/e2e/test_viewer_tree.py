"""The viewer in a real Chromium: the tree of a group, and a path of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_for_tests import go, only_tab
from playwright.sync_api import Page, expect
from viewer_for_tests import library_of, run, viewer_in_thread, write_episodes

from agentgym_rl.agent.policy import RandomPolicy
from agentgym_rl.agent.trees import Branching, TreeCollector
from agentgym_rl.environment.envs.maze import Maze
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.types import Group, Limits, Task


async def play() -> Group:
    pool = LocalPool({"maze": Maze})
    collect = TreeCollector(Branching(roots=2, branches=2, depth=2), pool, RandomPolicy, 2, 8, prefix="train-")
    (group,) = await collect([Task("maze", 4)], Limits(6, 8, 4096), 1)
    await pool.close()
    return group


@pytest.fixture(scope="module")
def group() -> Group:
    return run(play())


@pytest.fixture(scope="module")
def address(group: Group, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root: Path = tmp_path_factory.mktemp("runs")
    write_episodes(root / "tree", group.trajectories, {"success/mean": 0.0})
    with viewer_in_thread(library_of(root, tmp_path_factory.mktemp("cache"))) as url:
        yield url


@pytest.fixture
def page() -> Iterator[Page]:
    with only_tab() as tab:
        yield tab


def test_the_viewer_draws_a_tree_and_plays_its_paths(page: Page, address: str, group: Group) -> None:
    go(page, f"{address}#/group/tree/step_000001.0")
    tree = page.locator(".tree svg")
    expect(tree).to_be_visible()
    own_turns = sum(t.num_turns - t.shared_turns for t in group.trajectories)
    expect(tree.locator("a.tree-node")).to_have_count(own_turns)  # a shared turn is drawn once
    expect(tree.locator("a.tree-end")).to_have_count(len(group.trajectories))
    last = len(group.trajectories) - 1
    branch = group.trajectories[last]
    assert branch.shared_turns > 0
    # The first own turn of the last branch opens that path at that turn, with the shared turns before it.
    address_of_turn = f"#/episode/tree/step_000001.{last}?turn={branch.shared_turns}"
    tree.locator(f'a.tree-node[href="{address_of_turn}"]').click()
    expect(page.locator(".controls .place")).to_have_text(f"turn {branch.shared_turns + 1} of {branch.num_turns}")
    replies = [message.content for message in branch.messages if message.is_reply]
    expect(page.locator(".turn")).to_contain_text(replies[branch.shared_turns])
    page.keyboard.press("Home")
    expect(page.locator(".turn")).to_contain_text(replies[0])
