"""MiniWoB++ in a real browser: the oracle solves the tasks, seeds decide the page, wrong clicks earn nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentgym_rl.environment.conformance import picture_problem
from agentgym_rl.environment.envs.miniwob import MiniWob
from agentgym_rl.environment.envs.miniwob import env as env_module
from agentgym_rl.environment.envs.miniwob import pages as pages_module
from agentgym_rl.environment.envs.miniwob.oracle import SOLVERS
from agentgym_rl.environment.envs.miniwob.tasks import TASKS, TEST, TRAIN, task_of
from agentgym_rl.environment.envs.webarena import browser as browser_module
from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.types import Step

QUICK = ("choose-list", "login-user-popup", "search-engine")
"""Tasks of the quick test: a list, a popup, several pages of results. The long test plays all."""


def item_of(task: str, number: int = 0) -> int:
    """Return a test item of a task."""
    return TEST.start + (TASKS.index(task) - TEST.start) % len(TASKS) + number * len(TASKS)


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise all timeouts for busy machines."""
    monkeypatch.setattr(env_module, "PAGE_TIMEOUT_S", 60.0)
    monkeypatch.setattr(env_module, "CALL_TIMEOUT_S", 120.0)
    for module in (env_module, browser_module):
        monkeypatch.setattr(module, "LAUNCH_TIMEOUT_S", 100.0)


@pytest.fixture
def env() -> Iterator[MiniWob]:
    miniwob = MiniWob()
    yield miniwob
    miniwob.close()


def solve(env: MiniWob, item: int) -> Step:
    env.reset(item)
    for _ in range(30):
        step = env.step(env.oracle())
        assert step.info["valid"], (task_of(item), item, step.observation)
        if step.done:
            return step
    raise AssertionError(f"item {item} ({task_of(item)}) was not solved in 30 turns")


@pytest.mark.parametrize("task", QUICK)
def test_the_oracle_solves_a_task_of_several_turns(task: str, env: MiniWob) -> None:
    step = solve(env, item_of(task))
    assert (step.reward, step.info["success"], step.info["raw_reward"]) == (1.0, True, 1.0)
    assert picture_problem(env.render()) == ""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_oracle_solves_every_task(env: MiniWob) -> None:
    items = [item for task in TASKS for item in (TASKS.index(task), item_of(task, 1), item_of(task, 2))]
    failed = [(task_of(item), item) for item in items if not solve(env, item).info["success"]]
    assert failed == []


def test_every_task_has_a_page_and_a_solver() -> None:
    pages = {path.stem for path in pages_module.pages_folder().glob("*.html")}
    assert set(TASKS) <= pages
    assert set(SOLVERS) == set(TASKS)
    assert (
        {task_of(item) for item in TRAIN[: len(TASKS)]} == {task_of(item) for item in TEST[: len(TASKS)]} == set(TASKS)
    )


def test_the_seed_of_an_item_decides_the_page(env: MiniWob) -> None:
    item = item_of("click-checkboxes")
    first = env.reset(item)
    assert first.startswith("Task: Select ")
    assert "Last reward" not in first  # MiniWoB's counters would give the time away
    assert "file:" not in first
    assert env.reset(item + len(TASKS)) != first
    assert env.reset(item) == first


def test_a_wrong_click_ends_the_task_with_reward_0(env: MiniWob) -> None:
    page = env.reset(item_of("click-test-2"))
    assert "Click button ONE" in page
    (wrong,) = [line for line in page.splitlines() if "button 'TWO'" in line]
    step = env.step("click " + wrong.strip().partition("]")[0] + "]")
    assert (step.reward, step.done, step.info["success"], step.info["raw_reward"]) == (0.0, True, False, -1.0)
    with pytest.raises(EnvError, match="call reset"):
        env.step("click [2]")


def test_the_page_cannot_be_left(env: MiniWob) -> None:
    env.reset(item_of("click-button"))
    before = env.state_key()
    for action in ("goto [http://example.org/]", "new_tab", "go_back", "stop [done]", "click [999]"):
        step = env.step(action)
        assert step.info == {"valid": False}, action
        assert not step.done
    assert env.state_key() == before
    assert env.step(env.oracle()).info["success"]


def test_missing_pages_name_the_package_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pages_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'agentgym-rl\[miniwob\]'"):
        MiniWob()


def test_the_docs_page_names_every_page_of_the_package_once() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "environments" / "miniwob.md").read_text()
    tables = page[page.index("## Items") : page.index("## For programs")]
    played, excluded = tables.split("### Tasks that are not played")
    listed = re.findall(r"`([a-z0-9-]+)`", played.partition("Subsets are the tasks")[2])
    assert sorted(listed) == sorted(TASKS)
    others = re.findall(r"`([a-z0-9-]+)`", excluded)
    assert sorted(listed + others) == sorted(path.stem for path in pages_module.pages_folder().glob("*.html"))
