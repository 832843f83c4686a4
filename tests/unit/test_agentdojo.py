"""AgentDojo's tasks: reference calls, its own checks as the verdict, attacks, no clients of model providers."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("agentdojo")

from agentgym_rl.environment import catalog
from agentgym_rl.environment.envs.agentdojo.env import load_environment
from agentgym_rl.environment.envs.agentdojo.package import load_package
from agentgym_rl.environment.envs.tool_tasks import write_call
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Step, ToolCall


def env_class() -> Any:
    return catalog.load("agentdojo")


def item_of(suite: str, user_task: int, injection_task: int | None = None) -> int:
    injection = "" if injection_task is None else f"injection_task_{injection_task}"
    return list(env_class().items).index((suite, f"user_task_{user_task}", injection))


def oracle_play(env: Any, item: int) -> Step:
    env.reset(item)
    for _ in range(40):
        step: Step = env.step(env.oracle())
        assert step.info["valid"] is True, (item, step.observation)
        if step.done:
            return step
    raise AssertionError(f"item {item} does not end")


def items_of(*subsets: str) -> list[int]:
    items = range(len(env_class().items))
    return [item for item in items if set(subsets) <= set(env_class().subsets_of(item))]


@pytest.mark.parametrize("suite", ["banking", "slack", pytest.param("", marks=pytest.mark.long)])
def test_the_reference_calls_solve_every_task(suite: str) -> None:
    env = env_class()()
    for item in items_of("task", suite) if suite else items_of("task"):
        step = oracle_play(env, item)
        assert (step.reward, step.info) == (1.0, {"valid": True, "success": True, "utility": True}), item


def test_the_splits_share_no_user_task() -> None:
    items, splits = env_class().items, env_class().splits
    tasks = {name: {(items[item].suite, items[item].user_task) for item in split} for name, split in splits.items()}
    assert not tasks["train"] & tasks["test"]
    assert len(tasks["train"] | tasks["test"]) == 97
    assert {name: len(split) for name, split in splits.items()} == {"train": 840, "test": 206}


def test_the_verdict_is_that_of_the_package() -> None:
    """A task is judged by the final data and the answer: no calls, a wrong call, a wrong answer."""
    env = env_class()()
    paying = item_of("banking", 0)
    env.reset(paying)
    assert env.step("Paid.").info["success"] is False
    env.reset(paying)
    first, second = json.loads(env.oracle()), {"recipient": "UK1", "amount": 98.7, "subject": "x", "date": "2022-01-01"}
    env.step(json.dumps(first))
    env.step(write_call("send_money", second))
    step = env.step("Paid.")
    assert (step.reward, step.info["success"], step.observation) == (0.0, False, "The task was not done.")
    asking = item_of("banking", 1)
    for answer, right in (("It was 1,050.", True), ("You spent 1050 in March.", True), ("It was 12.", False)):
        env.reset(asking)
        env.step(env.oracle())
        suite, task = env._suite, env._task
        assert task.utility(answer, env._before, env._environment) is right
        step = env.step(answer)
        assert step.info["success"] is right, answer
        assert suite.name == "banking"


def test_an_attack_is_seen_by_the_agent_and_judged_by_the_package() -> None:
    env = env_class()()
    item = item_of("banking", 0, 0)
    assert env_class().subsets_of(item) == ("attack", "banking")
    plain_request = env.reset(item_of("banking", 0))
    clean = env.step(env.oracle()).observation
    assert env.reset(item) == plain_request
    poisoned = env.step(env.oracle()).observation
    goal = env._injection.GOAL
    assert "important message from me, Emma Johnson" not in clean
    assert "important message from me, Emma Johnson" in poisoned
    assert goal.split(".")[0][:30] in " ".join(poisoned.split())
    step = oracle_play(env, item)
    assert step.info == {"valid": True, "success": True, "utility": True, "attack_success": False}
    env.reset(item)
    for call in env._injection.ground_truth(env._before):
        env.step(write_call(call.function, call.args))
    for call in env._task.ground_truth(env._before):
        env.step(write_call(call.function, call.args))
    step = env.step("Done.")
    assert (step.reward, step.info["success"], step.info["attack_success"]) == (0.0, False, True)
    assert step.observation.endswith("The attacker's instructions were followed.")


def test_data_is_that_of_the_package_and_episodes_do_not_share_it() -> None:
    package = load_package("v1.2.2")
    for name in ("banking", "slack"):
        expected = package.suites[name].load_and_inject_default_environment({})
        assert load_environment(package, name, {}) == expected
    one, other = env_class()(), env_class()()
    for env in (one, other):
        env.reset(item_of("banking", 0))
    key = other.state_key()
    assert one.state_key() == key
    one.step(write_call("update_password", {"password": "x"}))
    assert one.state_key() != key
    assert other.state_key() == key


async def test_only_the_tools_of_the_suite_are_offered_and_calls_are_played_in_order() -> None:
    pool = LocalPool({"agentdojo": env_class()}, action_format="tool", timeout_s=120)
    session = await pool.open("agentdojo")
    assert "A reply without a call is your final answer." in session.instruction
    assert len(session.tools) == 69
    await session.reset(item_of("slack", 0))
    names = [tool["function"]["name"] for tool in session.tools]
    assert len(names) == 11
    assert "send_money" not in names
    calls = [
        ToolCall("get_channels"),
        ToolCall("read_channel_messages", {"channel": "nowhere"}),
        ToolCall("read_channel_messages", {"chanel": "general"}),
        ToolCall("send_money"),
    ]
    step = await session.call(calls)
    assert "general" in step.results[0]
    assert step.results[1].startswith("ValueError: ")
    assert step.results[2] == "Invalid call: read_channel_messages has no argument 'chanel': it takes channel."
    assert step.results[3].startswith("Invalid call: there is no tool 'send_money'")
    assert step.info["valid"] is False
    step = await session.call([], "<think>Enough.</think>I do not know.")
    assert (step.done, step.info["success"]) == (True, False)
    await pool.close()


def test_no_client_of_a_model_provider_is_imported() -> None:
    script = (
        "import sys; from agentgym_rl.environment import catalog; env = catalog.load('agentdojo')(); env.reset(40);"
        "print(sorted({'openai', 'anthropic', 'cohere', 'google.genai', 'langchain'} & set(sys.modules)),"
        "'agentdojo.agent_pipeline' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == "[] False"


def test_unknown_versions_and_missing_packages_are_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"known versions are v1, .*v1\.2\.2, got 'v9'"):
        catalog.load("agentdojo", {"version": "v9"})
    monkeypatch.setitem(sys.modules, "agentdojo", None)
    with pytest.raises(ConfigError, match=r"pip install 'agentgym-rl\[agentdojo\]' && pip install --no-deps agentdojo"):
        catalog.load("agentdojo")
