"""The viewer in a real Chromium: pages, replays, filters, the playground and a live run."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from browser_for_tests import WAIT_MS, chromium, emptied, go, still_box, until
from playwright.sync_api import Browser, ConsoleMessage, Page, Route, expect
from viewer_for_tests import (
    GROUP_SIZE,
    GROUPS,
    STEPS,
    library_of,
    played,
    run,
    viewer_in_thread,
    wait_for_index,
    write_evaluation,
    write_run,
)

from agentgym_rl.run.log import RunLog
from agentgym_rl.types import Verdict
from agentgym_rl.viewer.library import Library
from agentgym_rl.viewer.page_export import exported_page
from agentgym_rl.viewer.queries import Filter

TRAINED = STEPS * GROUPS * GROUP_SIZE
HELD_OUT = 4 * (STEPS + 1)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as instance:
        yield instance


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "small")
    shutil.copytree(folder / "small", folder / "twin")
    write_evaluation(folder / "oracle")
    return folder


@pytest.fixture(scope="module")
def library(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Library:
    return library_of(root, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def url(library: Library) -> Iterator[str]:
    with viewer_in_thread(library) as address:
        yield address


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Iterator[Page]:
    with browser.new_context(viewport={"width": 1280, "height": 860}) as context:
        context.set_default_timeout(WAIT_MS)
        yield context.new_page()


@pytest.fixture
def page(tab: Page, url: str) -> Iterator[Page]:
    violations: list[str] = []

    def read(line: ConsoleMessage) -> None:
        if "Content Security Policy" in line.text:
            violations.append(line.text)

    with emptied(tab, url) as errors:
        tab.on("console", read)
        yield tab
        tab.remove_listener("console", read)
    assert errors + violations == []


def put(path: Path, content: object) -> None:
    """Replace a JSON file atomically, as a run does."""
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".new").write_text(json.dumps(content))
    os.replace(path.with_suffix(".new"), path)


PAGES = {
    "runs": "Runs",
    "run/small": "small",
    "config/small": "small",
    "compare": "Compare",
    "episodes/small": "small",
    "groups/small": "small",
    "episode/small/step_000002.0": "maze / 20",
    "episode/small/step_000002.0?view=transcript": "maze / 20",
    "episode/small/step_000002.0?view=tokens": "maze / 20",
    "group/small/step_000002.0": "Group maze / 20",
    "compare?a=small|eval_000000.1": "Compare maze / 1",
    "play?env=maze&item=3": "Playground",
    "evals": "Evaluations",
    "eval/oracle": "oracle",
}


def test_a_page_that_loads_late_does_not_change_the_address(page: Page, url: str) -> None:
    go(page, f"{url}#/runs")
    expect(page.locator("main h1")).to_have_text("Runs")
    leave = (
        "async ([a, b, ms]) => { location.hash = a; await new Promise((r) => setTimeout(r, ms)); location.hash = b }"
    )
    late, wanted = "#/episode/small/step_000002.0?view=tokens&turn=1", "#/group/small/step_000002.0"
    for wait_ms in range(0, 60, 3):
        page.evaluate(leave, [late, wanted, wait_ms])
        expect(page.locator("main:not(.loading) h1")).to_have_text("Group maze / 20")
        assert page.evaluate("location.hash") == wanted


@pytest.mark.parametrize("width", [1280, 390], ids=["wide", "phone"])
def test_every_page_opens_and_fits(page: Page, url: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 860})
    widths = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    for address, heading in PAGES.items():
        go(page, f"{url}#/{address}")
        expect(page.locator("main h1")).to_have_text(heading)
        expect(page.locator(".message.error")).to_have_count(0)
        until(page, lambda: page.evaluate(widths), lambda size: size[0] <= size[1], f"the width of {address}")
    go(page, f"{url}#/episodes/small")
    order = still_box(page.get_by_label("order"))
    assert order["x"] >= 0
    assert order["x"] + order["width"] <= width
    go(page, f"{url}#/run/nowhere")
    expect(page.locator(".message.error")).to_contain_text("no run")


def test_curves_show_values_stages_and_several_runs(page: Page, url: str) -> None:
    go(page, f"{url}#/run/small")
    expect(page.locator(".doctor")).to_contain_text("entropy fell to 0.5")
    success = page.locator(".chart-card", has_text="Success").first
    labels = success.locator(".stage-label")
    expect(labels).to_have_text(["5 turns", "6 turns", "7 turns"])
    spans = labels.evaluate_all("l => l.map(e => e.getBoundingClientRect()).map(r => [r.left, r.right])")
    assert len(spans) == 3
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    page.set_viewport_size({"width": 330, "height": 800})
    drawing = success.locator("svg").element_handle()
    expect(labels.last).to_have_text("7")  # "7 turns" does not fit on a phone
    page.set_viewport_size({"width": 1280, "height": 860})
    expect(labels.last).to_have_text("7 turns")
    assert drawing.evaluate("e => e.isConnected")  # redrawn in the same element
    expect(success.locator(".mark")).to_have_count(STEPS + 1)
    box = still_box(success.locator("svg"))
    success.locator("svg").hover(position={"x": box["width"] - 16, "y": 60})
    tip = success.locator(".tip")
    expect(tip).to_contain_text("step 3")
    expect(tip).to_contain_text("100% of 4")
    ticks = "async values => (await import('/static/chart.js')).ticks(...values, 4)"
    assert page.evaluate(ticks, [0, 1]) == pytest.approx([0, 0.5, 1])
    assert page.evaluate(ticks, [1e20, 1e20]) == [1e20]  # and terminates
    go(page, f"{url}#/runs")
    for name in ("small", "twin"):
        expect(page.get_by_label(f"Show curves of {name}")).to_be_checked()
    expect(page.locator(".chart-card").first.locator(".line")).to_have_count(2)
    page.get_by_label("Show curves of twin").uncheck()
    expect(page.locator(".chart-card").first.locator(".line")).to_have_count(1)
    expect(page).to_have_url(re.compile("show=small"))
    page.reload()
    expect(page.locator(".chart-card").first.locator(".line")).to_have_count(1)


def test_filters_of_episodes_are_kept_in_the_address(page: Page, url: str, library: Library) -> None:
    go(page, f"{url}#/episodes/small")
    expect(page.locator(".total")).to_have_text(f"{TRAINED + HELD_OUT} episodes")
    page.locator("[data-filter=kind]").select_option("eval")
    expect(page.locator(".total")).to_have_text(f"{HELD_OUT} episodes")
    page.locator("[data-filter=success]").select_option("true")
    page.locator("[data-filter=step]").select_option("2")
    expect(page.locator(".total")).to_have_text("4 episodes")
    expect(page.locator(".row")).to_have_count(4)
    expect(page.locator(".row .outcome.good")).to_have_count(4)
    page.reload()
    expect(page.locator(".total")).to_have_text("4 episodes")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("main h1")).to_have_text("maze / 1")
    page.go_back()
    item = page.get_by_label("item", exact=True)
    item.fill("9" * 20)
    item.press("Enter")
    expect(page.locator(".list .empty")).to_contain_text("item: Input should be less than")
    expect(page.locator(".total")).to_have_text("0 episodes")
    page.reload()
    expect(page.locator(".total")).to_have_text("0 episodes")
    page.get_by_role("button", name="Clear").click()
    expect(page.locator(".total")).to_have_text(f"{TRAINED + HELD_OUT} episodes")


def test_a_replay_is_stepped_played_and_linked(page: Page, url: str, library: Library) -> None:
    row = library.episodes("oracle", Filter(), "step", 0, 1)["rows"][0]
    turns = row["turns"]
    go(page, f"{url}#/episode/oracle/{row['key']}")
    picture = page.locator(".picture img")
    expect(page.locator(".place")).to_have_text(f"turn 1 of {turns}")
    expect(picture).to_be_visible()
    first = picture.get_attribute("src")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".place")).to_have_text(f"turn 2 of {turns}")
    expect(picture).not_to_have_attribute("src", first or "")
    expect(page).to_have_url(re.compile(r"\?turn=1$"))
    page.reload()
    expect(page.locator(".place")).to_have_text(f"turn 2 of {turns}")
    expect(page.locator(".block.action")).to_contain_text(re.compile("up|down|left|right"))
    page.get_by_label("Speed").select_option("4")
    page.locator(".tick").nth(turns - 1).click()
    page.keyboard.press("Space")
    expect(page.locator(".place")).to_have_text("the end")
    expect(page.locator(".turn")).to_contain_text("reward 1")
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    expect(page.locator(".crumbs a").first).to_have_text("Evaluations")
    expect(page.locator(".top nav a[aria-current]")).to_have_text("Evals")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("?")
    expect(page.locator("dialog")).to_contain_text("play or pause")


def test_a_replay_that_differs_shows_the_reason(page: Page, url: str, root: Path, library: Library) -> None:
    path = root / "oracle" / "trajectories" / "changed.jsonl"
    line = (root / "oracle" / "trajectories" / "maze.jsonl").read_text().splitlines()[1]
    path.write_text(line.replace('"item": 1', '"item": 7') + "\n")
    wait_for_index(library, 5, "oracle")
    go(page, f"{url}#/episode/oracle/changed.0")
    expect(page.locator(".no-picture")).to_contain_text("differs from the record at the start")
    path.unlink()
    wait_for_index(library, 4, "oracle")


def test_an_episode_shows_its_verdicts_and_what_the_judge_said(
    page: Page, url: str, root: Path, library: Library
) -> None:
    (trajectory,) = played("maze", [5], "oracle", 30, "judged")
    last = [0.0] * (trajectory.num_turns - 1)
    trajectory.verdicts = [
        Verdict("environment", 1.0, trajectory.rewards),
        Verdict("rubric", 0.5, [*last, 0.7], "It is <b>short</b>.\nScore: 7"),
        Verdict("ranking", 1.0, [], error="the budget is spent"),
    ]
    path = root / "oracle" / "trajectories" / "judged.jsonl"
    path.write_text(f'{{"step": 0, "kind": "eval", {trajectory.to_json()[1:]}\n')
    wait_for_index(library, 5, "oracle")
    go(page, f"{url}#/episode/oracle/judged.0")
    shown = page.locator(".verdicts")
    expect(shown).to_contain_text("not trained on")
    expect(shown.locator(".verdict").nth(1)).to_contain_text("0.7")
    expect(shown.locator("pre")).to_have_text("It is <b>short</b>.\nScore: 7")
    expect(shown.locator(".invalid")).to_have_text("the budget is spent")
    path.unlink()
    wait_for_index(library, 4, "oracle")
    go(page, f"{url}#/episode/oracle/maze.0")
    expect(page.locator(".verdicts")).to_have_count(0)


def test_tokens_are_coloured_and_masked_ones_hatched(page: Page, url: str, library: Library) -> None:
    episode = library.episode("small", "step_000002.0")
    num_tokens = sum(len(m["token_ids"]) for m in episode["messages"])
    go(page, f"{url}#/episode/small/step_000002.0?view=tokens")
    expect(page.locator(".token")).to_have_count(num_tokens)
    expect(page.locator(".token.masked")).to_have_count(num_tokens - episode["sampled"])
    hatch = page.locator(".token.masked").first.evaluate("e => getComputedStyle(e).backgroundImage")
    assert "repeating-linear-gradient" in hatch
    likely = min(m["logprobs"][1] for m in episode["messages"] if m["logprobs"])
    assert likely < 0
    sampled = page.locator(".token:not(.masked)").nth(1)
    before = sampled.evaluate("e => e.style.backgroundColor")
    assert "surprise" in before
    sampled.hover()
    expect(page.locator(".token-detail")).to_contain_text("entropy 0.7")
    page.get_by_role("radio", name="Advantage").click()
    expect(sampled).to_have_attribute("style", re.compile("plus|minus"))
    go(page, f"{url}#/episode/small/step_000001.0?view=tokens&colour=entropy")
    expect(page.locator(".legend")).to_contain_text("not recorded")


def test_a_group_is_shown_side_by_side_with_its_advantages(page: Page, url: str) -> None:
    go(page, f"{url}#/groups/small?kind=train&step=2&mixed=true")
    expect(page.locator("a.row")).to_have_count(1)
    page.locator("a.row").click()
    expect(page.locator("thead th a")).to_have_count(GROUP_SIZE)
    expect(page.locator(".advantage")).to_have_text(["+0.5", "−0.5", "−0.5", "−0.5"])
    go(page, f"{url}#/group/small/step_000001.0")
    expect(page.locator(".badges")).to_contain_text("advantages not recorded")


def test_two_checkpoints_are_compared_turn_by_turn(page: Page, url: str) -> None:
    go(page, f"{url}#/episode/small/eval_000000.1")
    page.locator("main").get_by_role("link", name="Compare").click()
    expect(page.locator("main h1")).to_have_text("Compare maze / 1")
    heads = page.locator(".pair.heads .side")
    expect(heads.nth(0)).to_contain_text("no success")
    expect(heads.nth(1).locator(".badge.good")).to_have_text("success")
    expect(page.locator(".split")).to_have_count(1)
    expect(page.locator(".pair:not(.heads) .picture img").first).to_be_visible()
    expect(heads.locator(".letter")).to_have_text(["A", "B"])
    options = page.get_by_label("Right episode").locator("option").all_text_contents()
    assert len(options) == len(set(options)) == STEPS + 2 + STEPS + 1 - 1  # without the one on the left
    chosen_left = page.get_by_label("Left episode").input_value()
    assert chosen_left not in page.get_by_label("Right episode").locator("option").evaluate_all(
        "o => o.map(e => e.value)"
    )
    chosen = next(text for text in options if text.startswith("oracle"))
    page.get_by_label("Right episode").select_option(label=chosen)
    expect(heads.nth(1).locator(".run-name")).to_contain_text("oracle")


def test_a_game_is_won_by_hand_and_by_the_oracle(page: Page, url: str) -> None:
    go(page, f"{url}#/play?env=maze&item=3")
    expect(page.locator(".picture img")).to_be_visible()
    page.locator(".action-button").first.click()
    expect(page.locator(".past")).to_have_count(1)
    page.get_by_label("Action", exact=True).fill("<b>jump</b>")
    page.get_by_label("Action", exact=True).press("Enter")
    expect(page.locator(".past")).to_have_count(2)
    expect(page.locator(".past").nth(1)).to_contain_text("<b>jump</b>")
    expect(page.locator(".past").nth(1)).to_contain_text("invalid")
    for turn in range(3, 40):
        page.get_by_role("button", name="one turn").click()
        expect(page.locator(".past")).to_have_count(turn)
        if page.locator(".verdict").count():
            break
    expect(page.locator(".verdict.good")).to_contain_text("Success")


def test_the_playground_opens_the_last_choice_and_clears_on_error(page: Page, url: str) -> None:
    go(page, f"{url}#/play?env=maze&item=3")
    expect(page.locator(".action-button").first).to_be_visible()
    environment = page.get_by_label("Environment")
    for name in ("wordle", "maze", "keydoor"):  # each while the previous one is still being opened
        environment.select_option(name)
    expect(page.locator(".now")).to_contain_text(re.compile("key|door", re.IGNORECASE))
    expect(page).to_have_url(re.compile("env=keydoor"))
    expect(page.locator(".page.busy")).to_have_count(0)
    item = page.get_by_label("Item")
    for wrong, text in (("99999999", "99999999"), ("1.5", "a whole number"), ("-5", "-5")):
        item.fill(wrong)
        item.press("Enter")
        expect(page.locator(".message.error")).to_contain_text(text)
        expect(page.locator(".now, .action-button, .picture img")).to_have_count(0)
    item.fill("2")
    item.press("Enter")
    expect(page.locator(".now")).to_be_visible()
    expect(page.locator(".message.error")).to_have_count(0)
    environment.select_option("gymnasium:CliffWalking-v1")
    width = page.evaluate(
        """() => {
            const select = document.querySelector('.setup select');
            const context = document.createElement('canvas').getContext('2d');
            context.font = getComputedStyle(select).font;
            return select.clientWidth - context.measureText(select.value).width;
        }"""
    )
    assert width > 0, "the name is cut"
    go(page, f"{url}#/play?env=maze&item=3&subset=nowhere")
    expect(page.locator(".now")).to_be_visible()
    page.get_by_role("button", name="Random item").click()
    expect(page.locator(".message.error")).to_contain_text("nowhere")


def test_evaluations_have_tables_and_the_scaling_plot(page: Page, url: str) -> None:
    go(page, f"{url}#/evals")
    expect(page.locator("tbody th a")).to_have_text("the oracle")
    expect(page.locator("tbody .rate b").first).to_have_text("75.0")
    page.locator("tbody th a").click()
    expect(page.locator(".scaling .mark")).to_have_count(2)
    expect(page.locator(".numbers tbody tr")).to_have_count(3)


def evaluation_json(own_name: bool, success: float, state: str = "finished") -> dict[str, object]:
    """Return an eval.json of a suite with a task without data, or with `own_name` one of a whole environment."""
    rate = {"value": success, "low": 0.1, "high": 0.9}
    cell: dict[str, object] = {"items": 4, "episodes": 3, "errors": 1, "unplayed": 0, "success": rate}
    cell |= {"success_errors_as_failures": 0.375, "turns": 5.0, "truncated": 0.25, "unreported": 0, "cost_usd": 6e-6}
    cell |= {"reward": {"value": 0.5, "low": 0.21, "high": 0.78}, "prompt_tokens": 1234.0, "sampled_tokens": 56.0}
    unknown = cell | {"cost_usd": 0.0, "unreported": 3}
    maze = "maze" if own_name else "Maze"
    plan: dict[str, object] = {"scenario": maze, "name": "all", "env": "maze", "items": [1, 2], "max_turns": 9}
    plan |= {"data": "mazes", "own_data": False, "missing": ""}
    plans = [plan, *([] if own_name else [plan | {"name": "far", "items": [], "missing": "its maps are needed"}])]
    plans += [
        plan | {"scenario": "Stand-in", "env": "web", "own_data": True},
        plan | {"scenario": "Absent", "items": []},
    ]
    tasks = {f"{maze}/all": cell, f"{maze}/far": None, "Stand-in/all": unknown, "Absent/all": None}
    scenarios = {maze: cell, "Stand-in": unknown, "Absent": None}
    overall = {"success": rate, "scenarios": [maze, "Stand-in"], "own_data": True}
    total: dict[str, object] = {"items": 8, "episodes": 6, "errors": 2, "unplayed": 0, "unreported": 3, "cost_usd": 0.0}
    total |= {"causes": {"<b>the server</b> said 500": 1}}
    result = {"tasks": tasks, "scenarios": scenarios, "overall": overall, "total": total}
    results = [result | {"max_turns": turns} for turns in (4, 9)]
    return {"state": state, "config": {"agent": {"name": "an agent"}, "tasks": plans}, "results": results}


def test_a_live_evaluation_shows_every_number_and_mark(page: Page, url: str, root: Path) -> None:
    go(page, f"{url}#/eval/suite")
    expect(page.locator(".message.error")).to_contain_text("has not started yet")
    heading = page.locator("main h1")
    for name, own_name in (("suite", False), ("whole", True)):
        put(root / name / "eval.json", evaluation_json(own_name, 0.5, "running"))
    expect(heading).to_have_text("suite")  # without a reload
    go(page, f"{url}#/evals")
    expect(page.locator("thead th")).to_have_text(["Agent", "Maze", "Stand-in †", "Mean", "Episodes"])
    row = page.locator("tbody tr", has_text="whole")
    expect(row.locator(".rate b")).to_have_text(["50.0", "50.0", "50.0 †"])
    expect(row.locator(".rate").nth(2)).to_contain_text("10–90")
    # A scenario played in part has no overall, and there is no mean over it.
    expect(page.locator("tbody tr", has_text="suite").locator(".rate")).to_have_text(["– *", "50.010–90", "–"])
    expect(page.locator(".notes")).to_contain_text("† own data")
    expect(page.locator(".notes")).to_contain_text("* played in part")
    expect(page.locator(".legend-lines")).not_to_contain_text("Absent")
    put(root / "whole" / "eval.json", evaluation_json(True, 0.75))
    expect(row.locator(".rate b").first).to_have_text("75.0")

    go(page, f"{url}#/eval/whole")
    facts = page.locator(".facts")
    expect(facts).to_contain_text(re.compile(r"Mean of 2 scenarios\s*75\.0% \(10–90\)"))
    go(page, f"{url}#/eval/suite")
    table = page.locator("section", has_text="its maps are needed").locator("table")
    expect(table.locator("tbody tr").first).to_be_visible()
    first = "t => [t.querySelectorAll('thead th'), t.querySelectorAll('tbody tr:first-child > *')].map(cells)"
    cells = "const cells = (row) => [...row].map((cell) => cell.textContent)"
    texts = dict(zip(*table.evaluate(f"table => {{ {cells}; return ({first})(table) }}"), strict=True))
    assert texts["Reward"] == "0.5 0.21 to 0.78"
    assert (texts["Truncated"], texts["Prompt tokens"], texts["With errors as failures"]) == ("25%", "1,234", "38%")
    assert texts["Cost"] == "$0.000006"
    cost = "async rows => { const { cost } = await import('/static/format.js'); return rows.map(cost); }"
    amounts = {0.000687: "≥ $0.00068", 0.00068: "≥ $0.00068", 0.0299999: "≥ $0.0299", 1234.567: "≥ $1,234.56"}
    rows = [{"cost_usd": amount, "unreported": 1} for amount in amounts]
    assert page.evaluate(cost, rows) == list(amounts.values())
    assert page.evaluate(cost, [{"cost_usd": 0.000687}, {"cost_usd": 0.5}, {"cost_usd": 0}]) == [
        "$0.00069",
        "$0.50",
        "$0",
    ]
    expect(page.locator("section", has_text="Stand-in †").last.locator("tbody")).to_contain_text("unknown")
    expect(facts).to_contain_text("Success, tasks played")
    expect(page.locator("tr.total th")).to_have_text("tasks played *")
    expect(facts).to_contain_text(re.compile(r"Cost\s*unknown"))
    expect(page.locator(".causes li")).to_have_text(["1 × <b>the server</b> said 500", "1 × other causes"])
    put(root / "suite" / "eval.json", {"results": "x"})
    expect(page.locator(".message.warning")).to_contain_text("results must be a list, got 'x'")
    go(page, f"{url}#/runs")
    expect(page.locator(".run-row", has_text="suite")).to_contain_text("results must be a list")
    expect(page.locator(".run-row")).to_have_count(5)
    go(page, f"{url}#/evals")
    expect(page.locator("tbody tr")).to_have_count(3)
    for name in ("suite", "whole"):
        shutil.rmtree(root / name)


def test_a_live_run_is_followed(page: Page, url: str, root: Path, library: Library) -> None:
    with RunLog.create(root / "live", {"name": "live", "environments": [{"name": "maze"}]}) as log:
        go(page, f"{url}#/runs")
        row = page.locator(".run-row", has_text="live")
        expect(row.locator(".state")).to_have_text("running")
        held: list[Route] = []
        page.route("**/api/run?*", lambda route: held.append(route))
        with page.expect_response("**/api/episodes?*"):
            page.goto(f"{url}#/episodes/live")
        for step in (1, 2):
            for trajectory in played("maze", [step] * 3, "random", 4, f"train-{step}"):
                log.write_trajectory(step, trajectory)
            log.log(step, {"success/mean": 0.5})
            if step == 1:  # while the page, which has loaded the list, is still being opened
                wait_for_index(library, 3, "live")
                for _ in range(2):  # one may have been requested before
                    page.wait_for_event("response", lambda answer: "/api/changes" in answer.url)
                for route in held:
                    route.continue_()
                page.unroute("**/api/run?*")
            expect(page.locator(".total")).to_have_text(f"{3 * step} episodes")
    go(page, f"{url}#/runs")
    expect(row.locator(".state")).to_have_text("finished")


def test_the_chosen_theme_is_kept_and_the_default_is_the_systems(browser: Browser, url: str) -> None:
    context = browser.new_context(color_scheme="dark")
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    background = "getComputedStyle(document.documentElement).backgroundColor"
    go(page, f"{url}#/evals")
    expect(page.locator("h1")).to_be_visible()
    dark = page.evaluate(background)
    page.keyboard.press("d")  # from automatic to light
    light = until(page, lambda: page.evaluate(background), lambda colour: colour != dark, "another background")
    page.reload()
    expect(page.locator("h1")).to_be_visible()
    until(page, lambda: page.evaluate(background), lambda colour: colour == light, "the chosen background")
    context.close()


def test_an_export_gives_the_same_answers_as_the_server(page: Page, url: str, root: Path, tmp_path: Path) -> None:
    async def export() -> bytes:
        library = library_of(root, tmp_path)
        text, _ = await exported_page(library, episodes=10_000, pictures=True)
        await library.environments.close()
        return text

    questions = [
        "facets?run=small",
        "facets?run=small&success=true&kind=train",
        "episodes?run=small&limit=7&offset=5",
        "episodes?run=small&order=reward&kind=train&limit=500",
        "episodes?run=small&order=turns&stop=max_turns&limit=500",
        "groups?run=small&kind=train&mixed=true",
        "groups?run=small&kind=train&step=2",
        "same_task?env=maze&item=2",
        "shared_tasks?left=small&right=small",
        "shared_tasks?left=small&right=oracle",
    ]
    go(page, f"{url}#/evals")
    ask = "async questions => Promise.all(questions.map(async q => (await fetch('api/' + q)).json()))"
    from_server = page.evaluate(ask, questions)
    text = run(export()).decode()
    # The same page with its offline API exposed to the test.
    peek = text.replace("begin();\n", "begin(); globalThis.peek = get;\n")
    script = peek.partition('<script type="module">')[2].partition("</script>")[0]
    peek = re.sub(r"script-src '[^']*'", "script-src 'unsafe-inline'", peek)
    assert "globalThis.peek" in script
    (tmp_path / "peek.html").write_text(peek)
    page.goto((tmp_path / "peek.html").as_uri())
    expect(page.locator(".run-row").first).to_be_visible()
    answer = """async questions => Promise.all(questions.map(q => {
      const [path, query] = q.split("?");
      return peek(path, Object.fromEntries(new URLSearchParams(query)));
    }))"""
    for question, offline, online in zip(questions, page.evaluate(answer, questions), from_server, strict=True):
        assert json.dumps(_comparable(offline), sort_keys=True) == json.dumps(_comparable(online), sort_keys=True), (
            question
        )
    (tmp_path / "out.html").write_text(text)
    go(page, f"{(tmp_path / 'out.html').as_uri()}#/episode/oracle/maze.2?turn=1")
    expect(page.locator(".picture img")).to_be_visible()
    expect(page.locator(".notice")).to_contain_text("Exported on")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".place")).to_contain_text("turn 3")
    go(page, f"{(tmp_path / 'out.html').as_uri()}#/run/small")
    expect(page.locator(".chart-card").first.locator(".line")).to_have_count(1)


def _comparable(answer: object) -> object:
    """Return an answer without the index numbers, which the export leaves out on purpose."""
    if isinstance(answer, dict):
        return {name: _comparable(value) for name, value in answer.items() if name != "file"}
    if isinstance(answer, list):
        return [_comparable(value) for value in answer]
    return answer
