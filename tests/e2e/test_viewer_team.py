"""The viewer in a real Chromium: games of several roles, and the rating of a league."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_for_tests import go, only_tab
from playwright.sync_api import Page, expect
from viewer_for_tests import library_of, run, viewer_in_thread, write_episodes, write_evaluation

from agentgym_rl.agent.policy import OraclePolicy, ScriptedPolicy
from agentgym_rl.agent.team import Player, TeamCollector
from agentgym_rl.environment.envs.nim import Nim
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.types import LEARNER, Group, Limits, Task


async def play() -> list[Group]:
    """Play two games that the learner, as second, wins before its first reply."""
    pool = LocalPool({"nim": Nim})
    players = {
        "first": Player("past@0", lambda session, seed: ScriptedPolicy(["pass"])),
        "second": Player(LEARNER, lambda session, seed: OraclePolicy(session)),
    }
    collect = TeamCollector(
        lambda seed, index: players, pool, lambda session, seed: OraclePolicy(session), 2, 4, prefix="train-"
    )
    groups = await collect([Task("nim", 4)], Limits(6, 8, 4096), 1)
    await pool.close()
    return groups


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root: Path = tmp_path_factory.mktemp("runs")
    ratings = ({"success/mean": 0.0, "elo/learner": rating} for rating in (1000.0, 1250.0))
    write_episodes(root / "team", (t for group in run(play()) for t in group.trajectories), *ratings)
    with viewer_in_thread(library_of(root, tmp_path_factory.mktemp("cache"))) as url:
        yield url


@pytest.fixture
def page() -> Iterator[Page]:
    with only_tab() as tab:
        yield tab


def test_a_group_says_which_role_it_is_and_who_played_it(page: Page, address: str) -> None:
    go(page, f"{address}#/group/team/step_000001.0")
    expect(page.locator(".badges")).to_contain_text("first, played by past@0")
    go(page, f"{address}#/group/team/step_000001.2")
    expect(page.locator(".badges")).to_contain_text("second, played by learner")
    expect(page.locator(".badges")).to_contain_text("2 of 2 succeeded")
    expect(page.locator(".badges")).to_contain_text("mean reward 1")


def test_the_page_of_a_run_draws_the_rating(page: Page, address: str) -> None:
    go(page, f"{address}#/run/team")
    card = page.locator(".card", has_text="Elo rating").last
    expect(card).to_be_visible()
    expect(card).to_contain_text("points")


@pytest.mark.parametrize(
    ("configs", "note"),
    [
        ([{"opponent": "random"}, {"opponent": "oracle"}], "the rows differ in opponent;"),
        (
            [{"opponent": "runs/a", "opponent_weights": {"second": digest}} for digest in "ab"],
            "the rows differ in opponent;",
        ),
        ([{"role": "first", "opponent": "random"}, {"role": "second", "opponent": "random"}], "differ in role;"),
        ([{"environment": {"kwargs": {"heaps": n}}} for n in (2, 3)], "differ in arguments of the environment;"),
        ([{"role": "first", "opponent": "random"}] * 2, None),
    ],
)
def test_a_table_says_that_its_rows_played_other_games(
    configs: list[dict[str, object]], note: str | None, page: Page, tmp_path: Path
) -> None:
    for number, config in enumerate(configs):
        path = write_evaluation(tmp_path / "runs" / f"eval{number}") / "eval.json"
        row = json.loads(path.read_text())
        path.write_text(json.dumps(row | {"config": row["config"] | config}))
    with viewer_in_thread(library_of(tmp_path / "runs", tmp_path)) as url:
        go(page, f"{url}#/evals")
        expect(page.locator("table").first).to_be_visible()
        notes = page.locator(".notes li", has_text="the rows differ in")
        if note is None:
            expect(notes).to_have_count(0)
        else:
            expect(notes).to_have_count(1)
            expect(notes).to_contain_text(note)
