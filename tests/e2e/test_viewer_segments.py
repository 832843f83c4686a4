"""The viewer in a real Chromium: an episode whose context was cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browser_for_tests import go, only_tab, still_box
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


async def play(context: Context, limits: Limits, replies: list[str], name: str) -> Trajectory:
    renderer = Renderer(byte_level_bpe("chatml"), "chatml")
    session = await LocalPool({"maze": Maze}).open("maze")
    policy = EnginePolicy(
        ScriptedEngine(replies, encode=renderer.reply_ids),
        renderer,
        Sampling(1),
        context=context,
    )
    trajectory = await rollout(Task("maze", 4), session, policy, limits, id=name)
    await session.close()
    return trajectory


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root: Path = tmp_path_factory.mktemp("runs")
    replies = ["move up"] * 5 + [SUMMARY] + ["move left"] * 20
    trajectory = run(play(Context("summary", 0, 30), Limits(7, 16, 620), replies, "train-1-0-0-0"))
    long = run(play(Context("window", 2), Limits(60, 16, 900), ["move up", "move down"] * 30, "train-1-0-1-0"))
    assert [m.dropped_turns for m in trajectory.messages if m.dropped_turns] == [5]
    log = RunLog.create(root / "cut", {"name": "cut", "environments": [{"name": "maze"}], "agent": {"style": "act"}})
    log.write_trajectory(1, trajectory)
    log.write_trajectory(1, long)
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
        yield f"{url}#/episode/cut/step_000001."


@pytest.fixture
def page() -> Iterator[Page]:
    with only_tab() as tab:
        yield tab


def test_the_viewer_shows_cuts_summaries_and_segments(page: Page, address: str) -> None:
    address += "0"
    go(page, f"{address}?view=transcript")
    expect(page.locator(".badges")).to_contain_text("2 segments")
    expect(page.locator("article.card")).to_have_count(7)  # the summary is no turn
    cut = page.locator("article.card").nth(5)
    expect(cut.locator(".cut")).to_have_text("The context is cut here: the first 5 turns are left out from now on.")
    expect(cut.locator(".block.summary pre")).to_have_text(SUMMARY)
    expect(page.locator(".cut")).to_have_count(1)
    go(page, f"{address}?turn=5")
    expect(page.locator(".turn .cut")).to_be_visible()
    expect(page.locator(".tick.cut-before")).to_have_text("6")
    go(page, f"{address}?view=tokens&colour=advantage")
    expect(page.locator(".tokens .cut")).to_contain_text("Segment 2: a new context")
    sampled = page.locator(".token:not(.masked)")
    for k in (0, 9, sampled.count() - 1):
        sampled.nth(k).hover()
        expect(page.locator(".token-detail")).to_contain_text(f"advantage {'+' if k else ''}{k}")


def test_a_long_episode_shows_its_current_turn_and_cut_in_a_narrow_window(page: Page, address: str) -> None:
    page.set_viewport_size({"width": 800, "height": 900})
    go(page, f"{address}1?turn=40")
    turns = [int(text) - 1 for text in page.locator(".tick.cut-before").all_inner_texts()]
    assert len(turns) > 2, "the context is cut several times"
    expect(page.locator('.tick[aria-selected="true"]')).to_have_text("41")
    expect(page.locator('.tick[aria-selected="true"]')).to_be_in_viewport(ratio=1)
    go(page, f"{address}1?turn={turns[-1]}")
    expect(page.locator(".turn .cut")).to_be_visible()
    left, first, speed = (
        still_box(page.locator(name).first) for name in (".see", ".controls button", ".controls select")
    )
    assert first["x"] >= left["x"], "no control is outside of its column"
    assert speed["width"] > 40, "the speed can be read"
    line = "getComputedStyle(document.querySelector('.turn .cut'), '::before').width"
    assert float(page.evaluate(line).removesuffix("px")) >= 20, "the line of a cut remains when its text wraps"
