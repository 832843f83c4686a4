"""Layout in a real Chromium: nothing is clipped, axes have titles, and every tab has content."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tomli_w
from browser_for_tests import WAIT_MS, chromium, emptied, go, until
from envs_for_tests import Counting
from playwright.sync_api import Browser, Locator, Page, Route, expect
from servers_for_tests import server_in_thread
from viewer_for_tests import library_of, played, run, viewer_in_thread, write_evaluation, write_run

from agentgym_rl.agent.policy import OraclePolicy
from agentgym_rl.agent.rollout import rollout
from agentgym_rl.commands.view import ViewerEnvironments, served_environments
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.run.log import RunLog
from agentgym_rl.types import Limits, Step, Task
from agentgym_rl.viewer.index import Index
from agentgym_rl.viewer.library import Library


class Drawn(Counting):
    """An environment outside the catalogue. Every second item records its pictures in the info of its steps."""

    name: ClassVar[str] = "drawn"
    num_alive: ClassVar[int] = 0

    def reset(self, item: int) -> str:
        self.records = item % 2 == 1
        return super().reset(item)

    def step(self, text: str) -> Step:
        step = super().step(text)
        if self.records:
            step.info["picture"] = str(self.render())
        return step


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as instance:
        yield instance


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "small")
    shutil.copytree(folder / "small", folder / "other")
    config = tomllib.loads((folder / "other" / "config.toml").read_text())
    config["agent"]["style"] = "react"
    config["rl"] = {"steps": 7}
    (folder / "other" / "config.toml").write_text(tomli_w.dumps(config))
    write_evaluation(folder / "oracle")
    with RunLog.create(folder / "eight", {"name": "eight", "environments": [{"name": "maze"}]}) as log:
        for number, trajectory in enumerate(played("maze", [5] * 8, "random", 4, "train-1")):
            trajectory.id = f"train-1-0-{number}-0"  # one group
            log.write_trajectory(1, trajectory)
    return folder


@pytest.fixture(scope="module")
def url(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with viewer_in_thread(library_of(root, tmp_path_factory.mktemp("cache"))) as address:
        yield address


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Iterator[Page]:
    with browser.new_context(viewport={"width": 1400, "height": 860}) as context:
        context.set_default_timeout(WAIT_MS)
        yield context.new_page()


@pytest.fixture
def page(tab: Page, url: str) -> Iterator[Page]:
    with emptied(tab, url) as errors:
        yield tab
    assert errors == []


def hidden_part(locator: Locator) -> list[float]:
    """Return the pixels of content that do not fit into an element, horizontally and vertically."""
    overflow: list[float] = locator.evaluate("e => [e.scrollWidth - e.clientWidth, e.scrollHeight - e.clientHeight]")
    return overflow


@pytest.mark.parametrize("held_back", ["**/static/page.js", "**/api/overview?*"], ids=["script", "data"])
def test_a_loading_page_says_so(page: Page, url: str, held_back: str) -> None:
    held: list[Route] = []
    page.route(held_back, lambda route: held.append(route))
    page.goto(f"{url}#/runs", wait_until="commit")
    until(page, lambda: len(held), lambda count: count > 0, "the request that is held back")
    expect(page.locator(".starting")).to_be_visible()
    expect(page.locator(".starting")).to_have_text("Loading")
    for route in held:
        route.continue_()
    expect(page.locator("main h1")).to_have_text("Runs")
    expect(page.locator(".starting")).to_have_count(0)


def test_the_playground_clips_no_observation_and_centres_its_button(page: Page, url: str) -> None:
    go(page, f"{url}#/play?env=textcraft&item=380")
    expect(page.locator(".now")).to_contain_text("Goal:")
    page.get_by_role("button", name="one turn").click()
    first = page.locator(".past pre").first
    expect(first).to_contain_text("Goal:")
    assert hidden_part(first) == [0, 0]
    go(page, f"{url}#/play?env=maze&item=3")
    for turn in range(1, 40):
        page.get_by_role("button", name="one turn").click()
        expect(page.locator(".past")).to_have_count(turn)
        if page.locator(".verdict").count():
            break
    centres = """e => { const range = document.createRange(); range.selectNodeContents(e);
      return [e, range].map((part) => part.getBoundingClientRect()).map((box) => box.left + box.width / 2); }"""
    button, text = page.get_by_role("button", name="Play again").evaluate(centres)
    assert abs(button - text) < 1


@pytest.mark.parametrize("width", [1400, 1000])
def test_a_group_of_eight_fits(page: Page, url: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 860})
    go(page, f"{url}#/group/eight/step_000001.0")
    expect(page.locator("thead th a")).to_have_count(8)
    assert hidden_part(page.locator(".side-by-side"))[0] == 0
    turn = page.locator("thead th").first
    lines = """e => { const range = document.createRange(); range.selectNodeContents(e);
      return range.getClientRects().length; }"""
    assert turn.evaluate(lines) == 1  # the word is not broken
    last = page.locator("thead th a").last.bounding_box()
    assert last
    assert last["x"] + last["width"] <= width


def test_axis_titles_overlap_no_numbers(page: Page, url: str) -> None:
    go(page, f"{url}#/run/small")
    chart = page.locator(".chart-card", has_text="Success").first
    expect(chart.locator(".axis-title")).to_have_text(["training step", "share of episodes"])
    page.get_by_role("radio", name="Time").click()
    expect(chart.locator(".axis-title").first).to_have_text("time since the first step")
    boxes = """card => [...card.querySelectorAll(".axis text")].map((e) => {
      const box = e.getBoundingClientRect();
      return [e.classList.contains("axis-title"), box.left, box.top, box.right, box.bottom]; })"""
    for card in page.locator(".charts:not(.more) .chart-card").all():
        texts = card.evaluate(boxes)
        titles = [box for is_title, *box in texts if is_title]
        numbers = [box for is_title, *box in texts if not is_title]
        assert len(titles) == 2
        assert numbers
        for title in titles:
            for other in numbers:
                apart = title[2] <= other[0] or other[2] <= title[0] or title[3] <= other[1] or other[3] <= title[1]
                assert apart, (card.inner_text(), title, other)
    go(page, f"{url}#/eval/oracle")
    expect(page.locator(".scaling .axis-title")).to_have_text(["turns allowed", "success"])


def test_the_config_page_has_settings_and_checkpoints(page: Page, url: str, root: Path) -> None:
    go(page, f"{url}#/run/small")
    page.get_by_role("link", name="Config").click()
    expect(page.locator(".config")).to_contain_text('style = "act"')
    row = page.locator(".checkpoints tbody tr")
    expect(row).to_have_count(1)
    expect(row.locator("td").first).to_have_text("3")
    expect(row).to_contain_text("model")
    (root / "small" / "checkpoints" / "step_000009").mkdir()
    (root / "small" / "checkpoints" / "step_000009" / "trainer.pt").write_bytes(b"x" * 2000)
    expect(row.last).to_contain_text("trainer.pt")  # without a reload
    expect(row.last).to_contain_text("2 kB")
    shutil.rmtree(root / "small" / "checkpoints" / "step_000009")


def test_the_compare_tab_shows_runs_settings_and_tasks(page: Page, url: str) -> None:
    go(page, f"{url}#/config/small")
    page.get_by_role("link", name="Compare with another run").click()
    page.get_by_label("Right run").select_option("other")
    expect(page.get_by_label("Left run")).to_have_value("small")
    cells = page.locator(".differing tbody tr")
    expect(cells).to_have_text(['agent.style"act""react"', "rl.stepsnot set7"])
    go(page, f"{url}#/compare")
    expect(page.get_by_label("Left run")).to_be_visible()
    go(page, f"{url}#/compare?left=small&right=oracle")
    page.locator(".shared tbody a").first.click()
    expect(page.locator(".pair.heads .side")).to_have_count(2)
    go(page, f"{url}#/compare?left=eight&right=oracle")
    page.get_by_role("link", name="eight with itself").click()
    expect(page.locator(".shared tbody a")).to_have_text("maze / 5")


def test_an_evaluation_of_one_subset_is_marked_as_a_part(page: Page, url: str, root: Path) -> None:
    text = (root / "oracle" / "eval.json").read_text()
    (root / "part").mkdir()
    marked = text.replace('"scenarios": {"Maze": {', '"scenarios": {"Maze": {"coverage": "part", ')
    (root / "part" / "eval.json").write_text(marked.replace("the oracle", "in part"))
    go(page, f"{url}#/evals")
    row = page.locator("tbody tr", has_text="in part")
    expect(row.locator(".rate")).to_have_text("– *")
    expect(page.locator(".notes")).to_contain_text("* played in part")
    go(page, f"{url}#/runs")
    expect(page.locator(".eval-row", has_text="part").locator(".run-success")).to_contain_text("in part")
    go(page, f"{url}#/eval/part")
    expect(page.locator("tr.total th")).to_have_text("tasks played *")
    shutil.rmtree(root / "part")


def write_drawn_run(root: Path) -> None:
    async def play() -> list[Any]:
        pool = LocalPool({"drawn": Drawn})
        episodes = []
        for item in (0, 1):
            session = await pool.open("drawn")
            limits = Limits(9, 8, 4096)
            episodes.append(await rollout(Task("drawn", item), session, OraclePolicy(session), limits, id=f"x-{item}"))
            await session.close()
        await pool.close()
        return episodes

    with RunLog.create(root, {"name": "drawn", "environments": [{"name": "drawn", "url": "http://x"}]}) as log:
        for trajectory in run(play()):
            log.write_trajectory(1, trajectory)


def test_pictures_of_an_environment_outside_the_catalogue(page: Page, tmp_path: Path) -> None:
    write_drawn_run(tmp_path / "runs" / "drawn")
    picture, reason = page.locator(".picture img"), page.locator(".no-picture")
    with viewer_in_thread(library_of(tmp_path / "runs", tmp_path)) as url:
        go(page, f"{url}#/episode/drawn/step_000001.0")
        expect(reason).to_contain_text("with --url drawn=http://HOST:PORT")
        go(page, f"{url}#/episode/drawn/step_000001.1?turn=1")  # recorded by the environment
        expect(picture).to_be_visible()
    with server_in_thread({"drawn": Drawn}) as server:
        environments = ViewerEnvironments(urls=served_environments([f"drawn={server.url}/drawn"]))
        library = Library([tmp_path / "runs"], environments, Index(tmp_path / "second.sqlite3"))
        library.indexer.update()
        with viewer_in_thread(library) as url:
            for turn in (0, 1):
                go(page, f"{url}#/episode/drawn/step_000001.0?turn={turn}")
                expect(picture).to_be_visible()
            go(page, f"{url}#/play?env=drawn&item=3")
            expect(page.locator(".now")).to_contain_text("You are at 0")
            page.get_by_role("button", name="one turn").click()
            expect(page.locator(".now")).to_contain_text("You are at 1")
            expect(picture).to_be_visible()
            page.get_by_role("button", name="Random item").click()
            expect(page.locator(".now")).to_contain_text("You are at 0")
