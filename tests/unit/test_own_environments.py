"""Environments of the user's own: named by import path or entry point, with kwargs, known to every command."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs_for_tests import context_with_items
from servers_for_tests import server_in_thread

import agentgym_rl as ag
from agentgym_rl.cli import app
from agentgym_rl.commands.evaluate import Request, evaluate
from agentgym_rl.commands.load_agent import AgentOptions
from agentgym_rl.commands.play import play
from agentgym_rl.commands.view import ViewerEnvironments, own_environments
from agentgym_rl.config import Config, load_config
from agentgym_rl.environment import catalog
from agentgym_rl.environment.pool import LocalPool, RemotePool
from agentgym_rl.environment.server import load_served
from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.run.demonstrations import play_demonstrations
from agentgym_rl.run.environments_pool import EnvironmentsPool
from agentgym_rl.run.preflight import require_environments

NAME = "echo_for_tests:Echo"
ENVIRONMENT = '''
"""Say the number of the item, `size` items a split."""
from agentgym_rl.types import Step


class Echo:
    """Say the number that you see."""

    name = "echo"
    instruction = "Say the number that you see."
    subsets = ("even", "odd")
    cheap = True

    def __init__(self, size=4, word="say"):
        self.size, self.word = size, word
        self.splits = {"train": range(size), "test": range(size, 2 * size)}

    def subsets_of(self, item):
        return ("odd" if item % 2 else "even",)

    def reset(self, item):
        if not 0 <= item < 2 * self.size:
            raise IndexError(f"echo has no item {item}")
        self.item = item
        return f"{self.word} {item}"

    def step(self, text):
        right = text.strip() == str(self.item)
        return Step("right" if right else "wrong", float(right), True, {"valid": True, "success": right})

    def oracle(self):
        return str(self.item)

    def actions(self):
        return [str(number) for number in range(2 * self.size)]

    def render(self):
        return f"<svg xmlns='http://www.w3.org/2000/svg'><text>{self.item}</text></svg>"

    def close(self):
        pass


class Whole(Echo):
    splits = {"train": range(4), "test": range(4, 8)}

    @classmethod
    def subsets_of(cls, item):
        return ()


class Breaks(Whole):
    def step(self, text):
        if text == "3":
            raise ValueError("boom")
        return super().step(text)


class NoStep:
    name, instruction, splits, subsets, cheap = "x", "x", {"train": range(1), "test": range(1, 2)}, (), True
    def reset(self, item): return ""
    def close(self): pass
    @classmethod
    def subsets_of(cls, item): return ()


class NoItem(Whole):
    def reset(self): return ""


class Async(Whole):
    async def step(self, text): return None


class NoCheap(Whole):
    cheap = "yes"


class Overlap(Whole):
    splits = {"train": range(4), "test": range(3, 8)}


class NoTest(Whole):
    splits = {"train": range(4)}


class Listed(Whole):
    splits = {"train": [0, 1], "test": range(4, 8)}


class Nameless:
    def __init__(self): self.instruction = ""
    def reset(self, item): return ""
    def step(self, text): return None
    def close(self): pass
    def subsets_of(self, item): return ()


class Failing(Whole):
    """Nothing but the constructor needs an instance."""
    def __init__(self): raise OSError("no database\\nat all")


class Exiting(Whole):
    def __init__(self): raise SystemExit(3)


class NotClosing(Whole):
    def close(self): raise OSError("no database")


class NotStarting(Whole):
    def reset(self, item): raise OSError(f"no item\\n{item}")


def make(): return Echo()
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make the current folder one that holds the module, which no search path names."""
    (tmp_path / "echo_for_tests.py").write_text(ENVIRONMENT)
    (tmp_path / "broken_for_tests.py").write_text("import json\nraise ValueError('first line\\nsecond line')\n")
    (tmp_path / "needy_for_tests.py").write_text("import no_such_package_at_all\n")
    (tmp_path / "exiting_for_tests.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    yield tmp_path
    for name in [name for name in sys.modules if name.endswith("_for_tests") and name.split("_")[0] in WRITTEN]:
        del sys.modules[name]


WRITTEN = ("echo", "broken", "needy", "exiting", "installed")


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        ("ech_for_tests:Echo", {}, ["no module 'ech_for_tests'", "PYTHONPATH"]),
        ("echo_for_tests.deeper:Echo", {}, ["no module 'echo_for_tests.deeper'"]),
        ("echo_for_tests:Ecko", {}, ["has no 'Ecko'", "did you mean 'Echo'?", "echo_for_tests.py"]),
        ("echo_for_tests:make", {}, ["must name a class", "function"]),
        ("echo_for_tests:", {}, ["my_module:MyEnv"]),
        ("echo for tests:Echo", {}, ["my_module:MyEnv"]),
        ("needy_for_tests:Echo", {}, ["needy_for_tests imports 'no_such_package_at_all', which is not installed"]),
        ("broken_for_tests:Echo", {}, ["importing broken_for_tests raised ValueError: first line second line"]),
        ("exiting_for_tests:Echo", {}, ["importing exiting_for_tests raised SystemExit"]),
        (NAME, {"sise": 5}, ["Echo(sise=5)", "Echo(size=4, word='say')", "unexpected keyword argument 'sise'"]),
        (NAME, {"size": 0}, ["splits['train'] is range(0, 0)"]),
        ("echo_for_tests:NoStep", {}, ["no method step", "def step(self, text: str) -> Step"]),
        ("echo_for_tests:NoItem", {}, ["reset(self) has the wrong signature", "def reset(self, item: int) -> str"]),
        ("echo_for_tests:Async", {}, ["step is async"]),
        ("echo_for_tests:NoCheap", {}, ["cheap is 'yes', of type str", "cheap = False"]),
        ("echo_for_tests:Overlap", {}, ["'train' and 'test' share item 3"]),
        ("echo_for_tests:NoTest", {}, ["splits has no 'test'"]),
        ("echo_for_tests:Listed", {}, ["splits['train'] is [0, 1]", "must be a range"]),
        ("echo_for_tests:Nameless", {}, ["no attribute name", 'name = "my_env"', "and 3 more", "check-env"]),
        ("echo_for_tests:Failing", {}, ["Failing() raised OSError: no database at all"]),
        ("echo_for_tests:Exiting", {}, ["Exiting() raised SystemExit: 3"]),
        ("echo_for_tests:NotClosing", {}, ["NotClosing.close() raised OSError: no database"]),
    ],
)
def test_a_mistake_is_one_clear_line(name: str, kwargs: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        catalog.load(name, kwargs)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_class_that_cannot_be_made_is_not_served() -> None:
    with pytest.raises(ConfigError, match=r"Failing\(\) raised OSError: no database at all"):
        load_served(["maze", "echo_for_tests:Failing"], None)


def test_an_environment_without_its_browser_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBARENA_CHROMIUM", "no-such-browser")
    with pytest.raises(ConfigError, match="WEBARENA_CHROMIUM is 'no-such-browser', not a program"):
        load_served(["webarena"], None)


@pytest.mark.parametrize("cheap", [True, False])
async def test_an_error_of_an_episode_is_one_line(cheap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    env_class = catalog.load("echo_for_tests:NotStarting")
    monkeypatch.setattr(env_class, "cheap", cheap)
    session = await LocalPool({"x": env_class}).open("x")
    with pytest.raises(EnvError, match=r"x.reset raised OSError: no item 2$"):
        await session.reset(2)
    await session.close()


def test_a_class_is_loaded_with_its_arguments_bound() -> None:
    plain, large = catalog.load(NAME), catalog.load(NAME, {"size": 10, "word": "write"})
    assert (plain.splits["test"], large.splits["test"]) == (range(4, 8), range(10, 20))
    assert large().reset(12) == "write 12"
    assert large.subsets_of(3) == ("odd",)
    assert catalog.items(large, "train", "even") == (0, 2, 4, 6, 8)
    assert catalog.load(NAME, {"word": "write", "size": 10}) is large
    assert catalog.load("echo_for_tests:Whole") is sys.modules["echo_for_tests"].Whole  # nothing to bind
    env = ag.make_env(NAME, size=2)
    assert env.reset(3) == "say 3"
    with pytest.raises(ConfigError, match=r"textcraft.*unexpected keyword argument 'size'"):
        catalog.load("textcraft", {"size": 3})


def test_an_installed_module_is_not_replaced_by_a_file_of_the_current_folder(folder: Path) -> None:
    (folder / "textwrap.py").write_text("raise ValueError('not the standard library')")
    (folder / "orjson.py").write_text("raise ValueError('not the package')")
    program = (
        "from agentgym_rl.environment import catalog; catalog.load('echo_for_tests:Echo'); import textwrap, orjson"
    )
    # -P: the folder is not first on the path, as with the installed command
    subprocess.run([sys.executable, "-P", "-c", program], cwd=folder, check=True, timeout=120)


def test_a_mistake_in_a_recipe_is_reported_before_torch_is_imported(folder: Path) -> None:
    (folder / "mine.toml").write_text(
        "[model.scratch]\n[warm_start]\n[[environments]]\nname = 'echo_for_tests:Ecko'\nkwargs = { size = 3 }\n"
    )
    program = (
        "import sys; from agentgym_rl.cli import app\n"
        "try: app(['train', 'mine.toml'], standalone_mode=False)\n"
        "except Exception as error: print(type(error).__name__, error, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=folder, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.startswith("ConfigError environment 'echo_for_tests:Ecko'")
    assert done.stdout.endswith("did you mean 'Echo'? False\n")
    assert not (folder / "runs").exists()


def test_a_recipe_lists_one_class_twice_with_different_arguments(folder: Path) -> None:
    recipe = folder / "mine.toml"
    recipe.write_text(
        textwrap.dedent("""\
        [model]
        path = "model"
        [[environments]]
        name = "small"
        source = "echo_for_tests:Echo"
        kwargs = { size = 3 }
        [[environments]]
        name = "echo_for_tests:Echo"
        kwargs = { size = 9, word = "repeat" }
        items = { train = "0-3", test = "9-11" }
        """)
    )
    config = load_config(recipe, ["environments.0.kwargs.word=shout"])
    require_environments(config.environments)
    assert config.environments[0].kwargs == {"size": 3, "word": "shout"}
    with pytest.raises(ConfigError, match=r"items.test names 18"):
        require_environments(load_config(recipe, ['environments.1.items={ test = "18" }']).environments)
    with pytest.raises(ConfigError, match="kwargs is for one in this process; with url the server decides"):
        load_config(recipe, ["environments.0.url=http://127.0.0.1:1"])
    with pytest.raises(ConfigError, match=r"each name once.*set source"):
        load_config(recipe, ["environments.0.name=echo_for_tests:Echo"])


async def test_it_is_played_served_and_evaluated(folder: Path) -> None:
    trajectory = await play(NAME, 11, 3, oracle=True, kwargs={"size": 10})
    assert trajectory.success
    assert trajectory.task.key == f"{NAME}/11"
    served = load_served([NAME], {"size": 10})
    assert list(served) == ["echo"]
    with server_in_thread(served) as server:
        pool = RemotePool({"echo": f"{server.url}/echo"})
        assert await pool.items("echo", "test", "odd") == [11, 13, 15, 17, 19]
        session = await pool.open("echo")
        assert (await session.reset(19)).observation == "say 19"
        await pool.close()
    with pytest.raises(ConfigError, match="--kwarg is for one environment"):
        load_served([NAME, "maze"], {"size": 10})
    with pytest.raises(ConfigError, match="'echo': two environments have it"):
        load_served([NAME, "echo_for_tests:Whole"], None)
    request = Request(AgentOptions("oracle"), env=NAME, kwargs={"size": 10}, limit=5, out=folder / "evaluation")
    row = await evaluate(request)
    assert row["results"][-1]["scenarios"][NAME]["success"]["value"] == 1.0
    assert row["config"]["environment"]["kwargs"] == {"size": 10}
    assert row["config"]["tasks"][0]["data"] == f"items of {NAME}"
    with pytest.raises(ConfigError, match="size"):  # other items: not the same evaluation
        await evaluate(
            Request(AgentOptions("oracle"), env=NAME, kwargs={"size": 12}, limit=5, out=folder / "evaluation")
        )


async def test_episodes_that_fail_in_the_warm_start_are_reported(folder: Path) -> None:
    config = Config.model_validate(
        {
            "model": {"scratch": {}},
            "environments": [{"name": "echo_for_tests:Breaks"}],
            "warm_start": {"policy": "random", "episodes": 40},
        }
    )
    pool = EnvironmentsPool(config.environments, config.agent)
    async with context_with_items(config, folder / "run", pool) as context:
        played = await play_demonstrations(context, "warmstart", "random", episodes=40, max_turns=2, mistakes=0.0)
    assert len(played) == 40
    (event,) = map(json.loads, (folder / "run" / "events.jsonl").read_text().splitlines())
    assert event["kind"] == "episodes_failed"
    assert "episodes failed and are not used; the first, of echo_for_tests:Breaks: " in event["message"]
    assert "boom" in event["message"]


async def test_the_viewer_imports_only_classes_named_on_its_command_line(folder: Path) -> None:
    unaware = ViewerEnvironments()
    with pytest.raises(ConfigError, match=f"start the viewer with --env {NAME}"):
        await unaware.open(NAME)
    assert unaware.subsets_of(NAME, 1) == ()
    assert "echo_for_tests" not in sys.modules
    (folder / "run").mkdir()
    (folder / "run" / "config.toml").write_text(
        f"[model]\npath = 'x'\n[[environments]]\nname = 'big'\nsource = '{NAME}'\nkwargs = {{ size = 50 }}\n"
    )
    viewer = ViewerEnvironments(own=own_environments([NAME, "run"]))
    session = await viewer.open("big")
    await session.reset(99)
    assert "<text>99</text>" in str(await session.render())
    assert viewer.subsets_of("big", 99) == ("odd",)
    assert viewer.subsets_of("big", 100) == ()
    assert await viewer.items(NAME, "test") == [4, 5, 6, 7]
    await viewer.close()


async def test_the_viewer_replays_each_evaluation_with_its_own_arguments(folder: Path) -> None:
    for size in (10, 50):
        out = folder / f"size {size}"
        await evaluate(Request(AgentOptions("oracle"), env=NAME, kwargs={"size": size}, limit=2, out=out))
    viewer = ViewerEnvironments(own=own_environments(["size 50", "size 10", NAME]))
    session = await viewer.open(NAME, folder=folder / "size 50")
    assert (await session.reset(99)).observation
    other = await viewer.open(NAME, folder=folder / "size 10")
    with pytest.raises(EnvError, match="99"):
        await other.reset(99)
    assert await viewer.items(NAME, "test") == [4, 5, 6, 7], "a folder not named has the arguments of the class"
    await viewer.close()
    (folder / "size 10" / "eval.json").write_text("{")
    with pytest.raises(ConfigError, match=r"size 10: eval\.json cannot be read"):
        own_environments(["size 10"])


def test_the_playground_lists_classes_named_on_the_command_line() -> None:
    rows = {row["name"]: row for row in ViewerEnvironments(own=own_environments([NAME])).describe()}
    assert rows[NAME]["summary"] == "Say the number that you see."
    assert rows[NAME]["ranges"] == {"train": [0, 4], "test": [4, 8]}
    assert "textcraft" in rows


def install(folder: Path, entry_points: str) -> None:
    """Write an installed package with entry points, as pip does."""
    info = folder / "installed_for_tests-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: installed-for-tests\nVersion: 1.0\nSummary: Says numbers.\n"
        "License-Expression: MIT\n"
    )
    (info / "entry_points.txt").write_text(f"[agentgym_rl.environments]\n{entry_points}\n")


def test_an_installed_package_adds_environments(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(folder, f"echo = {NAME}\ntextcraft = {NAME}\nbroken = echo_for_tests:Nothing")
    monkeypatch.syspath_prepend(folder)
    entries = catalog.entries()
    assert (entries["echo"].summary, entries["echo"].licence) == ("Says numbers.", "MIT (installed-for-tests)")
    assert catalog.load("echo", {"size": 7})().reset(13) == "say 13"
    assert catalog.load("textcraft").__name__ == "TextCraft"  # a name of the catalog keeps its meaning
    app(["envs", "--json"], standalone_mode=False)
    listed = capsys.readouterr().out
    assert '"name": "echo"' in listed
    assert "has no 'Nothing'" in listed
    assert any(row["name"] == "echo" and row["installed"] for row in ViewerEnvironments().describe())
    with pytest.raises(ConfigError, match=r"unknown environment 'ecko'.*did you mean 'echo'"):
        catalog.load("ecko")
