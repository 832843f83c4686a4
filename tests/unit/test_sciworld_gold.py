"""SciWorld's gold paths: stored with the code, or computed once in a separate process and cached."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_sciworld import item_of

from agentgym_rl.environment.envs.sciworld import SciWorld, gold, jvm, tasks
from agentgym_rl.environment.envs.sciworld.jvm import GOLD_POOL, POOL
from agentgym_rl.environment.envs.sciworld.snapshot import checked_path
from agentgym_rl.environment.envs.sciworld.world import World

SHORT = "lifespan-longest-lived", 0
LONG = "test-conductivity", 0


@pytest.fixture(autouse=True, scope="module")
def one_process() -> Iterator[None]:
    """Use one process for playing and one for computing paths."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(jvm.PROCESSES_VARIABLE, "1")
        for pool in (POOL, GOLD_POOL):
            pool.close()
        yield
        for pool in (POOL, GOLD_POOL):
            pool.close()


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Remove all known paths. Return the cache folder of computed ones."""
    monkeypatch.setattr(gold, "stored_paths", dict)
    monkeypatch.setattr(gold, "_computed", {})
    monkeypatch.setenv(gold.CACHE_VARIABLE, str(tmp_path))
    return gold.cache_folder()


def playing(task: str, variation: int) -> SciWorld:
    env = SciWorld()
    env.reset(item_of(task, variation))
    return env


def test_the_stored_paths_belong_to_items_and_are_valid_text() -> None:
    paths = gold.stored_paths()
    all_items = {(task.name, number) for task in tasks.TASKS for number in range(task.num_variations)}
    assert set(paths) <= all_items
    assert len(paths) > 1000
    assert all((task.name, task.variations("test")[0]) in paths for task in tasks.TASKS)
    assert gold.STORE.stat().st_size < 3_000_000
    for path in paths.values():
        assert path
        assert all(0 < len(action) <= 300 and action.isascii() and action.isprintable() for action in path)


def test_a_stored_path_is_immediate_and_starts_no_java() -> None:
    for task in ("lifespan-longest-lived", "boil", "chemistry-mix"):
        assert (task, 0) in gold.stored_paths()
    env = playing(*SHORT)
    GOLD_POOL.close()
    started = time.process_time()
    assert env.oracle() == gold.stored_paths()[SHORT][0]
    assert time.process_time() - started < 0.1
    assert GOLD_POOL.jvms == ()
    while not (step := env.step(env.oracle())).done:
        pass
    assert step.info["success"]
    env.close()


def test_paths_are_written_and_read_for_one_version_of_the_simulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    paths = {("boil", 1): ("a", "b", "a"), ("boil", 10): ("c",), ("melt", 0): ("b", "ö")}
    first, second = tmp_path / "1.xz", tmp_path / "2.xz"
    gold.write_paths(first, paths)
    gold.write_paths(second, dict(reversed(paths.items())))
    assert gold.read_paths(first) == paths
    assert first.read_bytes() == second.read_bytes()
    assert sorted(tmp_path.iterdir()) == [first, second]
    monkeypatch.setattr(gold, "_simulator_version", lambda: "9.9")
    assert gold.read_paths(first) == {}
    assert "are not used with 9.9" in caplog.text


@pytest.mark.long
def test_no_session_waits_while_another_asks_for_its_oracle(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    compute = gold._compute
    monkeypatch.setattr(gold, "_compute", lambda *key: computed.append(key) or compute(*key))
    player, askers = playing("boil", 0), [playing(*LONG) for _ in range(2)]
    assert len({session._world.jvm for session in (player, *askers) if session._world}) == 1

    def step_time() -> float:
        started = time.perf_counter()
        assert player.step("wait1").info["valid"]
        return time.perf_counter() - started

    undisturbed = sorted(step_time() for _ in range(15))
    with ThreadPoolExecutor() as threads:
        started = time.perf_counter()
        asked = [threads.submit(asker.oracle) for asker in askers]
        disturbed = []
        while not all(question.done() for question in asked):
            disturbed.append(step_time())
        oracle_time = time.perf_counter() - started
    # A step that waited for a gold path would take about as long as the path. Three processes share the cores, so a
    # step may take a few times as long as alone.
    assert oracle_time > 20 * undisturbed[7]
    assert max(disturbed) < oracle_time / 3
    assert sorted(disturbed)[len(disturbed) // 2] < 5 * undisturbed[7] + 0.05
    assert len({question.result() for question in asked}) == 1
    assert computed == [LONG], "two sessions of one item must compute its path once"

    gold._computed.clear()
    GOLD_POOL.close()
    assert askers[0].oracle() == asked[0].result()
    assert GOLD_POOL.jvms == (), "the next process must find the path on disk"
    for session in (player, *askers):
        session.close()


@pytest.mark.long
def test_a_broken_cache_is_a_warning_and_not_an_error(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = gold.gold_path(*SHORT)
    (file,) = empty_cache.iterdir()
    file.write_text('["open door')
    gold._computed.clear()
    with caplog.at_level(logging.WARNING):
        assert gold.gold_path(*SHORT)
    assert f"{file} cannot be read and is computed again" in caplog.text
    assert gold._cached(*SHORT) == gold._computed[SHORT]
    gold._computed.clear()
    monkeypatch.setenv(gold.CACHE_VARIABLE, str(file))
    with caplog.at_level(logging.WARNING):
        assert len(gold.gold_path(*SHORT)) >= len(path) - 2
    assert "set AGENTGYM_SCIWORLD_CACHE" in caplog.text


def test_a_checked_path_ends_with_the_action_that_solves_the_task() -> None:
    world = World(GOLD_POOL)
    path = checked_path(world, *SHORT)
    assert path
    world.load(*SHORT)
    scores = [world.step(action).score for action in path]
    assert (scores[-1], max(scores[:-1]) < 100) == (100, True)
    world.close()


@pytest.mark.long
def test_a_killed_process_is_an_error_and_the_next_call_starts_another(empty_cache: Path) -> None:
    gold.gold_path(*SHORT)
    env = playing("boil", 0)
    (process,) = GOLD_POOL.jvms
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            gold.gold_path(*LONG)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.3)
    assert process._process is not None
    process._process.kill()
    thread.join(60)
    assert "Java process" in str(failures[0])
    assert env.step("look around").info["valid"]
    env.close()
    gold._computed.clear()
    (empty_cache / f"{SHORT[0]}-{SHORT[1]}.json").unlink()
    assert gold.gold_path(*SHORT)


def test_an_item_does_not_wait_for_another(empty_cache: Path) -> None:
    with ThreadPoolExecutor() as threads:
        with gold._locks.of_item(LONG):  # as while that path is computed
            assert threads.submit(gold.gold_path, *SHORT).result(timeout=60)
        assert 1 <= len(GOLD_POOL.jvms) <= jvm.MAX_GOLD_PROCESSES
    assert len(list(empty_cache.iterdir())) == 1
    GOLD_POOL.close()


@pytest.mark.long
def test_several_items_are_computed_at_once(empty_cache: Path) -> None:
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(gold.gold_path, SHORT[0], variation) for variation in range(3)]
        assert all(question.result(timeout=60) for question in asked)
        assert 1 <= len(GOLD_POOL.jvms) <= jvm.MAX_GOLD_PROCESSES
    assert len(list(empty_cache.iterdir())) == 3
    GOLD_POOL.close()
