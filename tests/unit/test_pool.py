"""Both pools behind one interface: the same episodes, the same errors, no slot ever lost."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from envs_for_tests import (
    GARBAGE,
    UNUSUAL,
    Bare,
    Counting,
    Garbage,
    Hanging,
    HangingOnClose,
    Raising,
    RaisingInThread,
    SlowCounting,
    Thinking,
)
from servers_for_tests import server_in_thread, server_process, wait_until

from agentgym_rl.environment.pool import LocalPool, RemotePool
from agentgym_rl.environment.wire import BadRequest, NotPlaying, NotSupported
from agentgym_rl.errors import ConfigError, EnvError, EnvTimeout, EnvUnavailable
from agentgym_rl.types import EnvPool, Step

ENVIRONMENTS = {
    env.name: env for env in (Counting, SlowCounting, Raising, RaisingInThread, Hanging, Garbage, Bare, Thinking)
}


@pytest.fixture(scope="module")
def server():
    with server_in_thread(ENVIRONMENTS, step_timeout_s=60.0) as running:
        yield running


@pytest.fixture(params=["local", "remote"])
async def pool(request, server):
    if request.param == "local":
        pool = LocalPool(ENVIRONMENTS, max_sessions=64, timeout_s=60.0)
    else:
        pool = RemotePool({name: f"{server.url}/{name}" for name in ENVIRONMENTS}, max_sessions=64, timeout_s=60)
    yield pool
    await pool.close()
    assert pool.num_open == 0
    assert server.sessions.num_open == 0


async def play(pool: EnvPool, env: str, item: int) -> list[Step]:
    session = await pool.open(env)
    try:
        steps = [await session.reset(item)]
        while not steps[-1].done:
            steps.append(await session.step(await session.oracle()))
        return steps
    finally:
        await session.close()


async def test_an_episode_gives_the_same_steps_in_both_pools(pool):
    assert await play(pool, "counting", 0) == [
        Step("Goal: 2. You are at 0.", 0.0, False, {"state_key": "0"}),
        Step("You are at 1.", 0.5, False, {"valid": True, "state_key": "1"}),
        Step("You are at 2.", 0.5, True, {"valid": True, "success": True, "state_key": "2"}),
    ]
    assert pool.num_open == 0


async def test_advice_is_the_oracles_thought_and_action(pool):
    session = await pool.open("thinking")
    await session.reset(0)
    await session.step("up")
    assert await session.advice() == ("1 is less than 2.", await session.oracle())
    await session.reset(1)
    with pytest.raises(EnvError, match=r"thought\(\) must return a string, got None"):
        await session.advice()
    without_thoughts = await pool.open("counting")
    await without_thoughts.reset(0)
    assert await without_thoughts.advice() == ("", "up")


async def test_a_session_can_be_reset_and_played_again(pool):
    session = await pool.open("counting")
    assert session.name == "counting"
    assert session.instruction == Counting.instruction
    await session.reset(0)
    await session.step("  up\n")  # the plain format strips
    assert (await session.step("down")).observation == "You are at 0."
    assert (await session.step("jump")).info["valid"] is False
    assert (await session.reset(1)).observation == "Goal: 3. You are at 0."
    assert await session.actions() == ["up", "down"]
    assert "<svg" in await session.render()
    await session.close()
    slow = await pool.open("slow_counting")
    await slow.reset(0)
    assert (await slow.render()).startswith(b"\x89PNG")


async def test_64_sessions_run_concurrently(pool):
    episodes = await asyncio.gather(*(play(pool, "slow_counting", item) for item in range(64)))
    assert [len(steps) - 1 for steps in episodes] == [item % 5 + 2 for item in range(64)]
    assert pool.num_open == 0


async def test_items_of_a_split_and_a_subset_are_listed(pool):
    assert await pool.items("counting", "test") == list(range(100, 120))
    assert await pool.items("counting", "train", "odd") == list(range(1, 100, 2))
    for arguments, text in [
        (("counting", "dev"), "no split 'dev'"),
        (("counting", "test", "prime"), "no subset 'prime'"),
        (("bare", "test", "prime"), "no subset 'prime': known are none"),
        (("chess", "test"), "no environment 'chess'"),
    ]:
        with pytest.raises(ConfigError, match=text):
            await pool.items(*arguments)


async def test_an_unknown_environment_is_a_config_error(pool):
    with pytest.raises(ConfigError, match="no environment 'chess': it has counting, slow_counting"):
        await pool.open("chess")
    assert pool.num_open == 0


async def test_wrong_use_of_a_session_is_a_clear_error(pool):
    session = await pool.open("counting")
    with pytest.raises(NotPlaying, match="was not reset"):
        await session.step("up")
    with pytest.raises(BadRequest, match=r"counting has no item 500: it has train 0\.\.99, test 100\.\.119"):
        await session.reset(500)
    await session.reset(0)
    await session.step("up")
    await session.step("up")
    with pytest.raises(NotPlaying, match="has ended its episode"):
        await session.step("up")
    await session.close()
    await session.close()
    with pytest.raises(EnvError, match="is closed"):
        await session.step("up")
    assert pool.num_open == 0
    bare = await pool.open("bare")
    await bare.reset(0)
    with pytest.raises(NotSupported, match=r"bare has no oracle\(\)"):
        await bare.oracle()
    with pytest.raises(NotSupported, match=r"bare has no oracle\(\)"):
        await bare.advice()


@pytest.mark.parametrize("env", ["raising", "raising_in_thread"])
async def test_an_exception_of_an_environment_is_an_env_error(pool, env):
    session = await pool.open(env)
    with pytest.raises(EnvError, match=rf"{env}\.reset raised ValueError: unlucky"):
        await session.reset(13)
    await session.reset(1)
    with pytest.raises(EnvError, match=rf"{env}\.step raised ZeroDivisionError: the game broke"):
        await session.step("raise")
    with pytest.raises(NotPlaying, match="since it failed"):
        await session.step("up")
    await session.reset(1)
    assert (await session.step("up")).observation == "You are at 1."
    await session.close()
    assert pool.num_open == 0


@pytest.mark.parametrize("env", ["raising", "raising_in_thread"])
@pytest.mark.parametrize("action", list(UNUSUAL))
async def test_exceptions_that_end_a_program_end_only_the_episode(pool, env, action):
    session = await pool.open(env)
    await session.reset(1)
    with pytest.raises(EnvError, match=rf"{env}\.step raised {UNUSUAL[action].__name__}"):
        await session.step(action)
    await session.reset(1)
    assert (await session.step("up")).observation == "You are at 1."


def test_ctrl_c_during_a_cheap_step_ends_the_program():
    """The first Ctrl-C cancels the main task, which waits for the step. The second ends the program."""
    program = """
import asyncio, os, signal
from envs_for_tests import Counting
from agentgym_rl.environment.pool import LocalPool

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored

class Interrupted(Counting):
    def step(self, text):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

async def main():
    session = await LocalPool({"interrupted": Interrupted}).open("interrupted")
    await session.reset(0)
    await session.step("up")

asyncio.run(main())
"""
    folder = Path(__file__).parents[1]
    completed = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=120)
    assert completed.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in completed.stderr
    assert "EnvError" not in completed.stderr


async def test_a_close_that_hangs_is_bounded_in_time_and_number(monkeypatch):
    monkeypatch.setattr("agentgym_rl.environment.session.CLOSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr("agentgym_rl.environment.session.MAX_HUNG_THREADS", 3)
    HangingOnClose.release.clear()
    pool = LocalPool({"closing": HangingOnClose}, max_sessions=8)

    def threads():
        return [thread for thread in threading.enumerate() if thread.name == "environment-closing"]

    for _ in range(3):
        await (await pool.open("closing")).close()
    assert len(threads()) == 3
    with pytest.raises(EnvError, match="closing is not opened again: 3 of its calls missed their deadline"):
        await pool.open("closing")
    assert pool.num_open == 0
    HangingOnClose.release.set()
    wait_until(lambda: not threads())
    assert HangingOnClose.num_alive == 0  # each was closed once
    await (await pool.open("closing")).close()


@pytest.mark.parametrize("action", list(GARBAGE))
async def test_an_invalid_step_of_an_environment_is_an_env_error(pool, action):
    session = await pool.open("garbage")
    await session.reset(1)
    with pytest.raises(EnvError, match=r"garbage\.step\(\) must"):
        await session.step(action)


async def test_invalid_observations_oracles_and_actions_are_env_errors(pool):
    session = await pool.open("garbage")
    with pytest.raises(EnvError, match=r"garbage\.reset\(0\) must return a string as observation, got NoneType"):
        await session.reset(0)
    await session.reset(1)
    with pytest.raises(EnvError, match=r"oracle\(\) must return a string"):
        await session.oracle()
    with pytest.raises(EnvError, match=r"actions\(\) must return a list of strings"):
        await session.actions()


@pytest.mark.parametrize("where", ["local", "remote"])
async def test_an_environment_that_hangs_times_out_and_frees_its_slot(where):
    Hanging.release.clear()
    with server_in_thread({"hanging": Hanging}, step_timeout_s=2.0) as server:
        if where == "local":
            pool = LocalPool({"hanging": Hanging}, timeout_s=2.0)
        else:
            pool = RemotePool({"hanging": server.url}, timeout_s=60)
        session = await pool.open("hanging")
        await session.reset(0)
        started_at = time.monotonic()
        with pytest.raises(EnvTimeout, match=r"deadline of 2 s"):
            await session.step("hang")
        with pytest.raises(EnvError):
            await session.step("up")
        await session.close()
        assert time.monotonic() - started_at < 30
        assert pool.num_open == 0
        await pool.close()
    # The thread closes its environment when its call returns.
    alive = Hanging.num_alive
    Hanging.release.set()
    wait_until(lambda: Hanging.num_alive == alive - 1)


async def test_a_cancelled_step_frees_its_slot(pool):
    Hanging.release.clear()
    session = await pool.open("hanging")
    await session.reset(0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await session.step("hang")
    await session.close()
    assert pool.num_open == 0
    Hanging.release.set()
    wait_until(lambda: Hanging.num_alive == 0)


@pytest.mark.parametrize(
    ("format_name", "reply"),
    [("react", "Thought: on.\nAction: up"), ("function_call", '{"name": "up"}'), ("code", "```\nup\n```")],
)
async def test_replies_are_parsed_in_the_pools_action_format(server, format_name, reply):
    local = LocalPool({"counting": Counting}, action_format=format_name)
    remote = RemotePool({"counting": f"{server.url}/counting"}, action_format=format_name)
    for pool in (local, remote):
        session = await pool.open("counting")
        assert session.instruction.startswith(Counting.instruction + "\n\n")
        await session.reset(0)
        assert (await session.step(reply)).observation == "You are at 1."
        invalid = await session.step("up")
        assert invalid.observation == "I do not know '(no action found)'."
        assert invalid.info["valid"] is False
        await pool.close()
    with pytest.raises(ConfigError, match="unknown action format"):
        LocalPool({"counting": Counting}, action_format="xml")


async def test_open_waits_for_a_slot_until_its_deadline():
    pool = LocalPool({"counting": Counting}, max_sessions=1, wait_timeout_s=1.5)
    first = await pool.open("counting")
    with pytest.raises(EnvUnavailable, match=r"none of the pool's 1 sessions became free within 1\.5 s"):
        await pool.open("counting")
    waiting = asyncio.create_task(pool.open("counting"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await first.close()
    second = await waiting
    assert pool.num_open == 1
    await second.close()
    assert pool.num_open == 0


async def test_a_closed_pool_opens_nothing():
    alive = Counting.num_alive
    pool = LocalPool({"counting": Counting}, max_sessions=3)
    for _ in range(3):
        await pool.open("counting")
    waiting = asyncio.create_task(pool.open("counting"))
    await asyncio.sleep(0)
    await pool.close()
    with pytest.raises(EnvUnavailable, match="the pool is closed"):
        await waiting
    assert pool.num_open == 0
    assert Counting.num_alive == alive


async def test_an_environment_that_fails_to_start_releases_its_slot():
    def broken():
        raise OSError("no such data")

    pool = LocalPool({"broken": broken}, max_sessions=1)
    for _ in range(3):
        with pytest.raises(EnvError, match=r"broken\.create raised OSError: no such data"):
            await pool.open("broken")
        assert pool.num_open == 0


@pytest.mark.parametrize("cheap", [True, False])
async def test_a_config_error_of_an_environment_is_raised_unchanged(cheap):
    class NeedsSetUp(Counting):
        def __init__(self):
            raise ConfigError("counting needs a data file: download it")

    NeedsSetUp.cheap = cheap
    pool = LocalPool({"counting": NeedsSetUp})
    with pytest.raises(ConfigError, match="download it"):
        await pool.open("counting")
    assert pool.num_open == 0


async def test_a_cheap_environment_runs_inline_and_any_other_in_its_own_thread():
    instances = []

    class Watched(Counting):
        def __init__(self):
            super().__init__()
            instances.append(self)

    class WatchedSlow(SlowCounting):
        def __init__(self):
            super().__init__()
            instances.append(self)

    pool = LocalPool({"cheap": Watched, "factory": lambda: Watched(), "slow": WatchedSlow})
    for name in ("cheap", "factory", "slow"):
        await play(pool, name, 4)
    main_thread = threading.get_ident()
    cheap, factory, slow = instances
    assert cheap.threads == factory.threads == {main_thread}
    assert len(slow.threads) == 1
    assert slow.threads != {main_thread}


async def test_closed_sessions_leave_no_thread():
    def threads():
        return [thread for thread in threading.enumerate() if thread.name == "environment-watched"]

    pool = LocalPool({"watched": SlowCounting}, max_sessions=8)
    sessions = [await pool.open("watched") for _ in range(8)]
    assert len(threads()) == 8
    await asyncio.gather(*(session.close() for session in sessions))
    wait_until(lambda: not threads())


async def test_a_cheap_episode_never_yields_to_the_event_loop():
    """No other task can run between two steps of a local episode. This makes runs repeatable."""
    pool = LocalPool({"counting": Counting})
    order = []

    async def player(name):
        session = await pool.open("counting")
        await session.reset(1)
        for _ in range(3):
            await session.step("up")
            order.append(name)
        await session.close()

    await asyncio.gather(player("a"), player("b"))
    assert order == ["a", "a", "a", "b", "b", "b"]


async def test_a_server_killed_during_an_episode_is_unavailable():
    with server_process("Counting") as (url, process):
        pool = RemotePool({"counting": url}, max_sessions=8, timeout_s=20)
        sessions = [await pool.open("counting") for _ in range(8)]
        for session in sessions:
            await session.reset(0)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        started_at = time.monotonic()
        answers = await asyncio.gather(*(session.step("up") for session in sessions), return_exceptions=True)
        assert [type(answer) for answer in answers] == [EnvUnavailable] * 8
        await asyncio.gather(*(session.close() for session in sessions))
        assert pool.num_open == 0
        with pytest.raises(EnvUnavailable, match="is the server running"):
            await pool.open("counting")
        assert pool.num_open == 0
        assert time.monotonic() - started_at < 18
        await pool.close()


async def test_a_server_killed_during_a_step_is_unavailable():
    with server_process("Hanging") as (url, process):
        pool = RemotePool({"hanging": url}, timeout_s=20)
        session = await pool.open("hanging")
        await session.reset(0)
        step = asyncio.create_task(session.step("hang"))
        await asyncio.sleep(0.3)
        os.kill(process.pid, signal.SIGKILL)
        started_at = time.monotonic()
        with pytest.raises(EnvUnavailable, match="did not send a complete HTTP answer"):
            await step
        await session.close()
        assert time.monotonic() - started_at < 18
        assert pool.num_open == 0
        await pool.close()
