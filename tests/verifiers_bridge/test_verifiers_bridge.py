"""Environments of verifiers played by name. `make test-verifiers` runs this in an environment of its own."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers", reason="its dependencies exclude those of other extras: make test-verifiers")

from servers_for_tests import server_in_thread

from agentgym_rl.environment import catalog
from agentgym_rl.environment.conformance import check
from agentgym_rl.environment.pool import RemotePool
from agentgym_rl.errors import ConfigError, EnvError, EnvTimeout

sys.path.append(str(Path(__file__).parent))
SUMS, GUESSING = "verifiers:sums_for_tests", "verifiers:guessing_for_tests"


def play(env: Any, item: int, replies: list[str]) -> list[Any]:
    env.reset(item)
    return [env.step(reply) for reply in replies]


def test_rows_of_both_data_sets_are_items() -> None:
    env_class = catalog.load(SUMS, {"num_rows": 6})
    assert env_class.name == "sums_for_tests"
    assert env_class.instruction == "Answer with a number only."
    assert env_class.splits == {"train": range(6), "test": range(6, 9)}
    env = env_class()
    assert env.reset(0) == "What is 0 + 1?"
    assert env.reset(6) == "What is 100 + 101?"
    with pytest.raises(IndexError, match="items 0 to 8, got 9"):
        env.reset(9)
    env.close()


def test_the_reward_of_a_single_turn_is_the_weighted_sum_of_the_rubric() -> None:
    env = catalog.load(SUMS)()
    (right,) = play(env, 3, [" 7 "])
    assert (right.reward, right.done, right.info["success"]) == (1.5, True, True)
    assert right.info["metrics"]["exact"] == 1.0
    (wrong,) = play(env, 3, ["It is 8, I think."])
    assert (wrong.reward, wrong.done, wrong.info["success"]) == (0.0, True, False)
    (short,) = play(env, 3, ["8"])
    assert (short.reward, short.info["success"]) == (0.5, False)
    with pytest.raises(EnvError, match="call reset"):
        env.step("7")


def test_several_turns_show_only_what_the_environment_adds() -> None:
    env_class = catalog.load(GUESSING, {"num_test": 2})
    assert env_class.splits == {"train": range(7), "test": range(7, 9)}
    env = env_class()
    assert env.reset(5) == "Guess my number from 1 to 9."
    assert [env.step(reply).observation for reply in ("2", "many", "8")] == [
        "Higher.",
        "Reply with a number.",
        "Lower.",
    ]
    last = env.step("6")
    assert (last.reward, last.done, last.info["success"], last.info["stop"]) == (1.0, True, True, "guessed")
    lost = play(env, 5, ["1"] * 5)
    assert [step.done for step in lost] == [False] * 4 + [True]
    assert (lost[-1].reward, lost[-1].info["success"], lost[-1].info["stop"]) == (0.0, False, "max_turns_reached")


@pytest.mark.parametrize("name", [SUMS, GUESSING])
async def test_an_environment_passes_the_conformance_suite(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)  # another process finds the module in the current folder
    findings = await check(name, {})
    assert {finding.check for finding in findings} >= {"determinism", "hostile actions", "concurrency"}
    assert [finding for finding in findings if finding.level == "error"] == []


async def test_an_environment_is_played_over_http() -> None:
    with server_in_thread({"guessing": catalog.load(GUESSING)}) as server:
        pool = RemotePool({"guessing": server.url}, timeout_s=120)
        session = await pool.open("guessing")
        step = await session.reset(2)
        assert step.observation == "Guess my number from 1 to 9."
        assert (await session.step("5")).observation == "Lower."
        step = await session.step("3")
        assert (step.reward, step.done, step.info["success"]) == (1.0, True, True)
        await pool.close()


@pytest.mark.parametrize(("rubric", "reason"), [("judged", "judge model over an API"), ("ranked", "a group")])
def test_rewards_of_a_judge_or_a_group_are_refused(rubric: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        catalog.load(SUMS, {"rubric": rubric})


def test_a_judge_without_a_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="judge's API"):
        catalog.load(SUMS, {"rubric": "keyed"})
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with pytest.raises(ConfigError, match="JudgeRubric asks a judge model"):
        catalog.load(SUMS, {"rubric": "keyed"})


def test_tools_and_unknown_environments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import guessing_for_tests

    monkeypatch.setattr(guessing_for_tests, "load_environment", lambda tools: guessing_for_tests.load_tools())
    with pytest.raises(ConfigError, match="calls tools"):
        catalog.load(GUESSING, {"tools": True})
    with pytest.raises(ConfigError, match="Could not import 'no-such-env'"):
        catalog.load("verifiers:no-such-env")


def test_a_failure_is_an_error_and_not_a_reward_of_0() -> None:
    env = catalog.load(SUMS, {"rubric": "broken"})()
    env.reset(0)
    with pytest.raises(EnvError, match="RuntimeError: no such file"):
        env.step("1")
    failing = catalog.load(GUESSING, {"fails": True})()
    failing.reset(0)
    with pytest.raises(EnvError, match="lost"):
        failing.step("9")


def test_a_reply_that_takes_too_long_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    import guessing_for_tests

    async def sleep(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(60)

    env = catalog.load(GUESSING, {"timeout_s": 1.0})()
    env.reset(0)
    monkeypatch.setattr(guessing_for_tests.Guessing, "env_response", sleep)
    with pytest.raises(EnvTimeout, match="longer than 1 s"):
        env.step("9")


def test_loading_keeps_signal_handlers_and_works_in_a_thread() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    loaded: list[Any] = []
    thread = threading.Thread(target=lambda: loaded.append(catalog.load(SUMS, {"num_rows": 5})))
    thread.start()
    thread.join()
    assert loaded
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
