"""The viewer in a real Chromium: an episode whose context was cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browser_for_tests import chromium, go
from playwright.sync_api import Page, expect
from scripted_engine_for_tests import ScriptedEngine
from tokenizers_for_tests import byte_level_bpe
from viewer_for_tests import library_of, run, viewer_in_thread

from agentgym_rl.agent.context_management import Context
from agentgym_rl.agent.policy import EnginePolicy
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.rollout import rollout
from agentgym_rl.environment.envs.maze import Maze
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.run.log import RunLog
from agentgym_rl.training.batch import to_samples
from agentgym_rl.types import Limits, Sampling, Task, Trajectory

SUMMARY = "I walked up and down."


async def play() -> Trajectory:
    renderer = Renderer(byte_level_bpe("chatml"), "chatml")
    replies = ["move up"] * 5 + [SUMMARY] + ["move left"] * 20
    session = await LocalPool({"maze": Maze}).open("maze")
    policy = EnginePolicy(
        ScriptedEngine(replies, encode=renderer.reply_ids),
        renderer,
        Sampling(1),
        context=Context("summary", 0, 30),
    )
    trajectory = await rollout(Task("maze", 4), session, policy, Limits(7, 16, 620), id="train-1-0-0-0")
    await session.close()
    return trajectory


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root: Path = tmp_path_factory.mktemp("runs")
    trajectory = run(play())
    assert [m.dropped_turns for m in trajectory.messages if m.dropped_turns] == [5]
    log = RunLog.create(root / "cut", {"name": "cut", "environments": [{"name": "maze"}], "agent": {"style": "act"}})
    log.write_trajectory(1, trajectory)
    samples = to_samples(trajectory)
    assert len(samples) == 2
    for sample in samples:  # a token's advantage is its place among the episode's tokens
        values = [float(k) for k in sample.order]
        sample.advantages, sample.entropies, sample.old_logprobs = values, values, sample.logprobs
    log.write_learned(1, [replace(sample) for sample in samples])
    log.log(1, {"success/mean": 0.0})
    log.close()
    library = library_of(root, tmp_path_factory.mktemp("cache"))
    with viewer_in_thread(library) as url:
        yield f"{url}#/episode/cut/step_000001.0"


@pytest.fixture
def page() -> Iterator[Page]:
    with chromium() as browser:
        page = browser.new_page()
        yield page
        page.close()


def test_the_viewer_shows_cuts_summaries_and_segments(page: Page, address: str) -> None:
    go(page, f"{address}?view=transcript")
    expect(page.locator(".badges")).to_contain_text("2 segments")
    expect(page.locator("article.card")).to_have_count(7)  # the summary is no turn
    cut = page.locator("article.card").nth(5)
    expect(cut.locator(".cut")).to_have_text("The context is cut here: the first 5 turns are left out from now on.")
    expect(cut.locator(".block.summary pre")).to_have_text(SUMMARY)
    expect(page.locator(".cut")).to_have_count(1)
    go(page, f"{address}?turn=5")
    expect(page.locator(".turn .cut")).to_be_visible()
    expect(page.locator(".tick.cut-before, .tick.invalid").first).to_be_visible()
    go(page, f"{address}?view=tokens&colour=advantage")
    expect(page.locator(".tokens .cut")).to_contain_text("Segment 2: a new context")
    sampled = page.locator(".token:not(.masked)")
    for k in (0, 9, sampled.count() - 1):
        sampled.nth(k).hover()
        expect(page.locator(".token-detail")).to_contain_text(f"advantage {'+' if k else ''}{k}")
