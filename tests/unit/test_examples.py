"""The example environments run, are served and trained on, and match the page about them."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from servers_for_tests import server_in_thread
from typer.testing import CliRunner

from agentgym_rl.cli import app
from agentgym_rl.commands.train import train
from agentgym_rl.config import load_config
from agentgym_rl.environment.base import HasActions, HasOracle, HasRender, HasStateKey
from agentgym_rl.environment.pool import LocalPool, RemotePool
from agentgym_rl.training.checkpoint import export
from agentgym_rl.training.scratch import build_model, build_tokenizer
from agentgym_rl.training.settings import ScratchSettings

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "number_guessing.py"
PAGE = ROOT / "docs" / "get-started" / "your-environment.md"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLE.parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load("number_guessing")


def test_the_example_runs() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.count("Right.") == 3
    assert done.stdout.startswith("item 0: I have a number from 1 to 100.\n  > 50   Lower.\n")


def test_the_example_of_a_tree_prints_its_paths() -> None:
    script = EXAMPLE.parent / "tree_rollouts.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    assert all(line.startswith("reward ") for line in lines)
    assert [("·" in line) for line in lines] == [False, True, True, True, True], "branches share turns with the root"


def test_the_example_of_two_players_prints_an_episode_per_role() -> None:
    script = EXAMPLE.parent / "two_players.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=True)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*["caller"] * 4, *["echo"] * 4] * 2
    assert all("reward 1" in line for line in lines[:8]), "the careful echo always wins"
    assert any("reward 0" in line for line in lines[8:])


async def test_the_example_of_slow_environments_plays_all_episodes(capsys: pytest.CaptureFixture[str]) -> None:
    await load("slow_environments").main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" in ")[0] for line in lines] == [f"{n} opened ahead: 16 episodes" for n in (0, 2)]


async def test_the_example_of_kept_groups_marks_the_widest(capsys: pytest.CaptureFixture[str]) -> None:
    await load("keep_groups").main()
    lines = capsys.readouterr().out.splitlines()
    spread = {line: float(line.partition("spread ")[2].split()[0]) for line in lines}
    kept = [line for line in lines if line.startswith("kept")]
    assert (len(lines), len(kept)) == (8, 2)
    assert min(spread[line] for line in kept) >= max(spread[line] for line in lines if line not in kept) > 0


def test_every_item_is_solved_within_seven_turns(example: ModuleType) -> None:
    env = example.NumberGuessing()
    for capability in (HasActions, HasOracle, HasStateKey, HasRender):
        assert isinstance(env, capability)
    for split in env.splits.values():
        for item in split:
            env.reset(item)
            steps = [env.step(env.oracle())]
            while not steps[-1].done:
                assert str(env.secret) in env.actions()
                steps.append(env.step(env.oracle()))
            assert steps[-1].info["success"] is True
            assert len(steps) <= 7
    with pytest.raises(IndexError):
        env.reset(100)


@pytest.mark.parametrize("action", ["", "fifty", "5.0", "-1", "٣", "9" * 10_000, "50\n501", "<b>50</b>", "\ud800"])
def test_hostile_actions_are_handled(example: ModuleType, action: str) -> None:
    env = example.NumberGuessing()
    env.reset(3)
    assert env.step(action).info == {"valid": False}


async def test_the_example_is_played_in_process_and_over_http(example: ModuleType) -> None:
    name, env_class = "number_guessing", example.NumberGuessing
    with server_in_thread({name: env_class}) as server:
        for pool in (LocalPool({name: env_class}), RemotePool({name: server.url})):
            session = await pool.open(name)
            await session.reset(80)
            while not (step := await session.step(await session.oracle())).done:
                pass
            assert step.info["success"] is True
            assert "<svg" in str(await session.render())
            assert len(await pool.items(name, "train", "low")) + len(await pool.items(name, "train", "high")) == 80
            await pool.close()
        assert server.sessions.num_open == 0


async def test_the_recipe_of_the_example_trains_on_the_server(example: ModuleType, tmp_path: Path) -> None:
    with server_in_thread({"number_guessing": example.NumberGuessing}) as server:
        small = ["rl.steps=2", "rl.groups_per_step=4", "warm_start.episodes=40", "horizon.steps_per_stage=1"]
        config = load_config(
            ROOT / "examples" / "number_guessing.toml", [*small, f"environments.0.url={server.url}", "eval.episodes=8"]
        )
        summary = await train(config, tmp_path / "run")
        assert server.sessions.num_open == 0
    assert summary["steps"] == 2
    assert [stage["turns"] for stage in summary["stages"]] == [4, 6]


def test_the_page_shows_the_code_of_the_example() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (shown,) = [block for block in blocks if "class Crossroads" in block]
    assert shown.strip() in (ROOT / "examples" / "crossroads.py").read_text()
    assert len(shown.strip().splitlines()) <= 40


async def test_the_recipe_of_the_page_trains_a_hugging_face_model_on_an_own_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train one small step of it, with a tiny model in place of the one from the hub."""
    recipe = ROOT / "examples" / "crossroads_hf.toml"
    assert recipe.read_text().partition("\n")[2].strip() in PAGE.read_text()
    config = load_config(recipe, [])
    assert config.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert config.environments[0].name == "crossroads:Crossroads"
    tokenizer = build_tokenizer(["You see a sign. Reply with left, right or straight. A dead end. You arrive."])
    shape = ScratchSettings(hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2)
    export(build_model(shape, tokenizer, 0), tokenizer, tmp_path / "model")
    monkeypatch.chdir(ROOT / "examples")
    small = ["rl.steps=1", "rl.groups_per_step=2", "rl.group_size=2", "eval.episodes=4", "model.dtype=float32"]
    config = load_config(recipe, [*small, f"model.path={tmp_path / 'model'}"])
    summary = await train(config, tmp_path / "run")
    assert (summary["steps"], summary["after"]["episodes"]) == (1, 4)


def test_the_commands_of_the_page_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands of the page, with shorter training and evaluation and with an exported viewer."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("runs", "*.ipynb"))
    block = re.findall(r"```\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    change, *commands = [line.partition("#")[0].strip() for line in block.strip().splitlines()]
    assert change == "cd examples"
    monkeypatch.chdir(tmp_path / "examples")
    short = ["rl.steps=2", "rl.groups_per_step=4", "warm_start.episodes=40", "warm_start.sft.epochs=1"]
    changed = {"train": short, "eval": ["--limit", "4"], "view": ["--export", "runs.html"]}
    outputs = []
    for command in commands:
        name, *words = command.split()[1:]
        done = CliRunner().invoke(app, [name, *words, *changed.get(name, [])])
        assert done.exit_code == 0, (command, done.output, done.exception)
        outputs.append(done.output)
    assert [command.split()[1] for command in commands] == ["check-env", "play", "train", "eval", "eval", "view"]
    assert "crossroads:Crossroads is ready" in outputs[0]
    assert "success  done, 3 turns, reward 1" in outputs[1]
    assert json.loads(Path("runs/crossroads/summary.json").read_text())["steps"] == 2
    configs = [json.loads(path.read_text())["config"] for path in Path("evals").glob("*/eval.json")]
    played = sorted((c["environment"]["kwargs"]["length"], c["tasks"][0]["max_turns"]) for c in configs)
    assert played == [(3, 3), (6, 6)]  # the run's own, and --kwarg with --turns
    assert Path("runs.html").stat().st_size > 10_000


def test_the_example_with_tools_runs_and_matches_its_guide() -> None:
    program = ROOT / "examples" / "tool_calls.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.count("reward 1") == 3
    assert '  > add({"item": "apple", "count": 2})\ntool: The basket: 2 apple\n' in done.stdout
    guide = (ROOT / "docs" / "guides" / "tools.md").read_text(encoding="utf-8")
    snippet = guide.partition("        return (\n")[2].partition("```")[0]
    assert snippet in program.read_text(encoding="utf-8")
