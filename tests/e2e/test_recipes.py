"""Every recipe is valid. Two steps are run of the small ones, and of those for Qwen models with a tiny model."""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from agentgym_servers_for_tests import AlfWorldServer, SqlGymServer, ToolServer, WebShopServer, running
from runs_for_tests import Process

from agentgym_rl.config import load_config
from agentgym_rl.environment import catalog
from agentgym_rl.environment.agentgym_servers import SERVED
from agentgym_rl.run.log import read_metrics

RECIPES = Path(__file__).parents[2] / "recipes"
ALL = sorted(RECIPES.rglob("*.toml"))
QUICKSTART = RECIPES / "quickstart.toml"
LONGER = [QUICKSTART, RECIPES / "tools" / "keydoor.toml"]
SMALL = [*LONGER, *sorted(RECIPES.glob("*/tiny*.toml"))]
PROGRAMS = sorted(RECIPES.rglob("*.py"))
QUICK = ["textcraft/tiny", "qwen/textcraft", "qwen/babyai-sft"]
"""Recipes that `make test` runs; `make test-long` runs the others."""
SHORTENED = [
    *("rl.steps=2", "rl.groups_per_step=4", "rl.group_size=3", "eval.episodes=6", "eval.every=0"),
    *("warm_start.episodes=60", "warm_start.sft.epochs=1"),
]
"""Overrides for LONGER, the small recipes that take minutes."""

TINY_QWEN = {
    "all": [
        *("model.device=cpu", "model.dtype=float32", "threads=1", "agent.concurrency=4", "agent.max_context=16384"),
        *("agent.max_new_tokens=16", "eval.episodes=1", "eval.max_turns=1", "eval.every=0"),
    ],
    "rl": [
        *("rl.steps=2", "rl.groups_per_step=1", "rl.group_size=2"),
        *("horizon.kind=stepwise", "horizon.turns=[1, 2]", "horizon.steps_per_stage=1"),
    ],
    "sft": ["data.episodes=6", "sft.epochs=2", "sft.batch_size=6"],
}
FEW_DEMONSTRATIONS = ["warm_start.episodes=4", "warm_start.sft.epochs=1"]
"""Overrides for two steps with a model of a few thousand parameters, for every method and for each."""
SERVERS = {
    "webshop": WebShopServer,
    "alfworld": AlfWorldServer,
    "sqlgym": partial(SqlGymServer, may_abandon=True),  # a reply that is cut ends an episode before its statement
}


def names_qwen(recipe: Path) -> bool:
    config = load_config(recipe, [])
    is_qwen = config.model.path is not None and config.model.path.startswith("Qwen/")
    return is_qwen and config.method in TINY_QWEN and not config.rewards  # a judge has tests of its own


QWEN = [recipe for recipe in ALL if names_qwen(recipe)]


def relative_name(path: Path) -> str:
    return str(path.relative_to(RECIPES))


def long_unless_quick(recipes: list[Path]) -> list[Any]:
    quick = [RECIPES / f"{name}.toml" for name in QUICK]
    return [path if path in quick else pytest.param(path, marks=pytest.mark.long) for path in recipes]


def test_the_recipes_exist() -> None:
    assert QUICKSTART in ALL
    assert {RECIPES / f"{name}.toml" for name in QUICK} <= {*SMALL, *QWEN}
    assert len(SMALL) > 1
    covered = {path.parent.name for path in QWEN}
    assert covered >= {*catalog.CATALOG, "qwen", "tools", "agentgym"}, "a recipe of every environment"
    assert PROGRAMS, "recipes/unrolled_grpo.py is part of the project"


@pytest.mark.parametrize("recipe", ALL, ids=relative_name)
def test_a_recipe_is_valid(recipe: Path) -> None:
    config = load_config(recipe, [])
    for env in config.environments:
        if env.url is not None:  # a server's own items and subsets
            assert env.name in SERVED
            continue
        env_class = catalog.load(env.name)
        assert {env.split, env.eval_split} <= set(env_class.splits)
        assert set(env.subsets) <= set(env_class.subsets)


@pytest.mark.parametrize("recipe", long_unless_quick(SMALL), ids=relative_name)
def test_a_small_recipe_runs_two_steps(recipe: Path, tmp_path: Path) -> None:
    overrides = [f"run_dir={tmp_path / 'run'}", "threads=1", *(SHORTENED if recipe in LONGER else [])]
    process = Process(["train", str(recipe), *overrides], tmp_path / "output")
    assert process.wait() == 0, (tmp_path / "output").read_text()
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["after"]["episodes"] > 0


@pytest.mark.parametrize("recipe", long_unless_quick(QWEN), ids=relative_name)
def test_a_qwen_recipe_runs_two_steps_with_a_tiny_qwen2_model(
    recipe: Path, tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("AGENTGYM_SEARCHQA_DATA", "AGENTGYM_SEARCHQA_INDEX"):
        monkeypatch.delenv(variable, raising=False)  # the built-in questions
    config = load_config(recipe, [])
    overrides = [f"run_dir={tmp_path / 'run'}", f"model.path={tiny_qwen}", "model.chat_template=chatml"]
    if config.environments[0].name == "sciworld":  # gold paths of these items are kept with the package
        overrides.append('environments=[{name = "sciworld", subsets = ["Lifespan"]}]')
    with contextlib.ExitStack() as stack:
        for environment in config.environments:
            if environment.url is not None:
                url = stack.enter_context(running(SERVERS.get(environment.name, ToolServer)()))
                overrides.append(f"environments.0.url={url}/{environment.name}")
        overrides += [*TINY_QWEN["all"], *TINY_QWEN[config.method]]
        overrides += FEW_DEMONSTRATIONS if config.warm_start is not None else []
        process = Process(["train", str(recipe), *overrides], tmp_path / "out")
        assert process.wait() == 0, (tmp_path / "out").read_text()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(row["step"], row.get("episodes/error", 0)) for row in rows] == [(1, 0), (2, 0)]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["after"]["episodes"] > 0


@pytest.mark.parametrize("program", PROGRAMS, ids=relative_name)
def test_a_program_runs_two_steps(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--steps=2", "--warm-updates=2", "--groups=2", "--group-size=2"]
    monkeypatch.setattr(sys, "argv", [str(program), *options])
    runpy.run_path(str(program), run_name="__main__")
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["1", "2"]
