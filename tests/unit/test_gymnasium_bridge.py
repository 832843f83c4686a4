"""Gymnasium's environments as text environments, and ours as Gymnasium's."""

from __future__ import annotations

import enum
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy
import pytest
from gymnasium.utils.env_checker import check_env
from servers_for_tests import server_in_thread

from agentgym_rl.commands.train import train
from agentgym_rl.config import load_config
from agentgym_rl.environment import catalog
from agentgym_rl.environment.base import HasOracle, HasStateKey
from agentgym_rl.environment.bridges.gymnasium import as_gymnasium, gymnasium_class
from agentgym_rl.environment.bridges.nethack import describe_screen
from agentgym_rl.environment.conformance import check
from agentgym_rl.environment.pool import LocalPool, RemotePool
from agentgym_rl.errors import ConfigError
from agentgym_rl.viewer.replays import Picture, picture_of

ROOT = Path(__file__).parents[2]
NAMES = sorted(name for name in catalog.BRIDGED if name.startswith("gymnasium:"))
SOLVED = {"gymnasium:FrozenLake-v1": {"is_slippery": False}, "gymnasium:Taxi-v4": {}, "gymnasium:CliffWalking-v1": {}}


class Countdown(gymnasium.Env[Any, str]):
    """Text actions and a dictionary of observations; truncates by itself after three steps."""

    observation_space = gymnasium.spaces.Dict(
        {"left": gymnasium.spaces.Discrete(4), "level": gymnasium.spaces.Box(0, 1, (2,))}
    )
    action_space = gymnasium.spaces.Text(5, charset="abc")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = 3
        return {"left": self.left, "level": self.np_random.random(2)}, {}

    def step(self, action: str) -> Any:
        self.left -= 1
        return {"left": self.left, "level": [0.0, 1.0]}, 1.0, action == "abc", self.left == 0, {}


class Continuous(Countdown):
    action_space = gymnasium.spaces.Box(0, 1, (2,))


class CompassDirection(enum.IntEnum):
    N, W = ord("k"), ord("h")


class Dungeon(gymnasium.Env[Any, int]):
    """Observations, commands and seeds in the form of NLE, whose `reset` ignores its seed."""

    observation_space = gymnasium.spaces.Dict(
        {name: gymnasium.spaces.Box(0, 255, (2, 5), numpy.uint8) for name in ("chars", "message", "blstats")}
    )
    actions = (CompassDirection.N, CompassDirection.W)
    action_space = gymnasium.spaces.Discrete(2)
    nethack = None
    core = 0

    def seed(self, core: int, disp: int, reseed: bool) -> None:
        self.core = core

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        text = numpy.frombuffer(f"Game {self.core % 10}\0".encode().ljust(10, b"\0"), numpy.uint8)
        rows = numpy.frombuffer(b"..@..     ", numpy.uint8).reshape(2, 5)
        return {"message": text, "chars": rows, "blstats": rows}, {}

    def step(self, action: int) -> Any:
        return self.reset()[0], 0.0, False, False, {}


gymnasium.register("test/Dungeon-v0", Dungeon)
gymnasium.register("test/Countdown-v0", Countdown)
gymnasium.register("test/Continuous-v0", Continuous)


def describe_level(observation: Any, env: Any) -> str:
    return f"{env.left} steps are left"


@pytest.mark.parametrize("name", NAMES)
async def test_a_listed_environment_passes_the_conformance_suite(name: str) -> None:
    assert name in catalog.entries()
    findings = await check(name, {})
    assert {finding.check for finding in findings} >= {"random play", "determinism", "hostile actions", "concurrency"}
    assert [finding for finding in findings if finding.level == "error"] == []


async def test_the_example_recipe_trains_on_frozen_lake(tmp_path: Path) -> None:
    small = ["rl.steps=2", "rl.groups_per_step=2", "rl.group_size=2", "warm_start.episodes=10", "eval.episodes=2"]
    config = load_config(ROOT / "examples" / "gymnasium_lake.toml", [*small, "warm_start.sft.epochs=1"])
    summary = await train(config, tmp_path / "run")
    assert summary["steps"] == 2


def test_the_recipes_of_the_guide_are_valid() -> None:
    page = (ROOT / "docs" / "guides" / "bridges.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    names = []
    for block in blocks:
        (environment,) = tomllib.loads(block)["environments"]
        names.append(environment.get("source", environment["name"]))
        assert catalog.is_bridged(names[-1])
        assert environment["kwargs"]
    assert [name.partition(":")[0] for name in names] == ["gymnasium", "mcp", "openenv", "verifiers"]


def test_importing_the_catalog_imports_no_package_of_a_bridge() -> None:
    program = "import sys, agentgym_rl.environment.catalog as c; c.entries(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert not {"gymnasium", "mcp", "websockets", "openenv", "verifiers"} & set(done.stdout.split())


@pytest.mark.parametrize("name", SOLVED)
def test_the_oracle_of_a_transition_table_solves_items(name: str) -> None:
    env: Any = catalog.load(name, SOLVED[name])()
    assert isinstance(env, HasOracle)
    assert isinstance(env, HasStateKey)
    for item in (0, 7, 10_000):
        env.reset(item)
        for _ in range(60):
            action = env.oracle()
            assert action in env.actions()
            step = env.step(action)
            if step.done:
                break
        assert step.info["success"] is True


@pytest.mark.parametrize("name", NAMES)
def test_an_item_is_the_seed_of_the_game(name: str) -> None:
    env_class = catalog.load(name)
    plays = []
    for item in (3, 3, 4, 5, 6):
        env: Any = env_class()
        seen = [env.reset(item)]
        for turn in range(30):
            step = env.step(env.action_names[turn % len(env.action_names)])
            seen.append(step.observation)
            if step.done:
                break
        env.close()
        plays.append(seen)
    assert plays[0] == plays[1]
    assert name == "gymnasium:CliffWalking-v1" or any(play != plays[0] for play in plays[2:])


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_action_does_not_move(name: str) -> None:
    env: Any = catalog.load(name)()
    first = env.reset(0)
    for text in ("", "x" * 10_000, "\ud800", "0", "fly", "<script>"):
        step = env.step(text)
        assert step.info == {"valid": False}
        assert step.observation.endswith(first)
        step.observation.encode()
    assert env.step(f" {env.action_names[0].upper()}. ").info["valid"] is True


@pytest.mark.parametrize("name", NAMES)
def test_the_viewer_gets_the_environments_own_picture(name: str) -> None:
    env: Any = catalog.load(name)()
    env.reset(10_000)
    picture = picture_of(env.render())
    assert isinstance(picture, Picture)
    assert picture.media_type == "image/png"
    env.close()


def test_an_environment_without_pixels_is_shown_as_text() -> None:
    for env_class in (
        catalog.load("gymnasium:FrozenLake-v1", {"render_mode": "ansi"}),
        gymnasium_class("test/Countdown-v0"),
    ):
        env: Any = env_class()
        env.reset(0)
        assert "<pre>" in env.render()
        env.close()


def test_nethack_is_shown_as_its_screen_and_played_by_the_seed_of_the_item() -> None:
    env: Any = gymnasium_class("test/Dungeon-v0")()
    assert env.reset(3) == "Game 3\n..@.."
    assert env.reset(4) == "Game 4\n..@.."
    assert env.actions() == ["move north", "move west"]
    assert env.step("move west").info == {"valid": True}
    screen = {"tty_chars": numpy.frombuffer(b"top  bottom"[:10], numpy.uint8).reshape(2, 5)}
    assert describe_screen(screen) == "top\nbotto"


async def test_a_gymnasium_environment_is_played_over_http() -> None:
    env_class = catalog.load("gymnasium:FrozenLake-v1", {"is_slippery": False, "map_name": "8x8"})
    with server_in_thread({"lake": env_class}) as server:
        for pool in (RemotePool({"lake": server.url}), LocalPool({"lake": env_class})):
            session = await pool.open("lake")
            assert "frozen lake" in session.instruction
            step = await session.reset(10_000)
            assert len(step.observation.splitlines()) == 9
            while not (step := await session.step(await session.oracle())).done:
                pass
            assert step.info["success"] is True
            await pool.close()


def test_text_actions_and_a_truncation_of_the_environment_itself() -> None:
    env_class = gymnasium_class("test/Countdown-v0", num_train=5, num_test=2)
    assert env_class.name == "test-Countdown-v0"
    assert env_class.splits == {"train": range(5), "test": range(5, 7)}
    env = env_class()
    assert env.reset(0).startswith("left: 3\nlevel: [0.")
    assert env.step("xyz").info == {"valid": False}
    steps = [env.step("a") for _ in range(3)]
    assert steps[-1].done
    assert steps[-1].info == {"valid": True, "success": False, "truncated": True}
    env.reset(1)
    assert env.step("abc").info == {"valid": True, "success": True, "truncated": False}
    with pytest.raises(IndexError, match="7"):
        env.reset(7)


def test_a_describer_and_names_may_be_given() -> None:
    path = f"{__name__}:describe_level"
    env = gymnasium_class("test/Countdown-v0", describe=path, instruction="Count down.")()
    assert env.reset(0) == "3 steps are left"
    assert env.instruction.startswith("Count down.")
    lake = gymnasium_class("FrozenLake-v1", action_names=["w", "s", "e", "n"])()
    lake.reset(0)
    assert lake.step("S").info["valid"] is True


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("gymnasium:test/Continuous-v0", {}, "only Discrete and Text are played as text"),
        ("gymnasium:FrozenLake-v99", {}, "FrozenLake"),
        ("gymnasium:no_such_module:X-v0", {}, "no_such_module"),
        ("gymnasium:FrozenLake-v1", {"wind": 3}, "wind"),
        ("gymnasium:FrozenLake-v1", {"action_names": ["a", "A", "b", "c"]}, "as many different names"),
        ("gymnasium:FrozenLake-v1", {"describe": "nowhere:view"}, "describe must be an import path"),
        ("gymnasium:FrozenLake-v1", {"num_test": 0}, "at least 1"),
    ],
)
def test_a_mistake_in_the_settings_is_one_clear_line(name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        catalog.load(name, kwargs)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["maze", "keydoor", "gymnasium:Blackjack-v1"])
def test_our_environments_pass_the_checker_of_gymnasium(name: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="(?!.*alternative render modes)")
        check_env(as_gymnasium(name), skip_render_check=True)


def test_as_gymnasium_plays_an_item_and_truncates() -> None:
    env = as_gymnasium("maze", "test", max_turns=2, render_mode="ansi")
    observation, info = env.reset(options={"item": 5})
    assert info["item"] == 5
    assert env.render() == observation
    assert env.step("move up")[3] is False
    assert env.step("nonsense")[2:4] == (False, True)
    _, info = env.reset(seed=1)
    assert info["item"] in env.unwrapped.text_env.splits["test"]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="no split 'dev'"):
        as_gymnasium("maze", "dev")
