"""The public API: its names, and training, evaluating and playing through it."""

from __future__ import annotations

import asyncio
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from envs_for_tests import Counting

import agentgym_rl as ag

TINY = {
    "threads": 1,
    "agent.concurrency": 16,
    "rl.steps": 1,
    "rl.groups_per_step": 2,
    "rl.group_size": 2,
    "eval.episodes": 4,
    "warm_start.episodes": 24,
}


def test_every_public_name_can_be_imported() -> None:
    assert ag.__all__ == sorted(ag.__all__)
    assert all(getattr(ag, name) is not None for name in ag.__all__)
    assert set(ag._HOMES) == set(ag.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ag.nonsense


def test_importing_the_package_loads_no_other_module() -> None:
    """Not even `typing`, which loads two dozen modules: commands and workers import the package before all else."""
    code = "import sys; before = set(sys.modules); import agentgym_rl; print(set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "{'agentgym_rl'}"


def test_public_names_are_completed_before_they_are_used() -> None:
    code = (
        "import agentgym_rl, rlcompleter; complete = rlcompleter.Completer({'ag': agentgym_rl}).attr_matches;"
        "print(*complete('ag.tr'), *complete('ag.Tas'), *complete('ag.__ver'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["ag.train(", "ag.Task(", "ag.__version__"]


def test_a_run_is_trained_evaluated_and_looked_at(tmp_path: Path) -> None:
    run = tmp_path / "run"
    summary = ag.train("keydoor/tiny", {**TINY, "run_dir": str(run)})
    assert summary["steps"] == 1
    results = ag.evaluate(run, env="keydoor", limit=4, turns="2", out=tmp_path / "eval")["results"]
    assert results[0]["total"]["episodes"] == 4
    (episode, *_) = ag.load_trajectories(run)
    assert isinstance(episode, ag.Trajectory)
    model, tokenizer = ag.load_model(run, device="cpu")
    assert model.num_parameters() == summary["parameters"]
    assert tokenizer.decode(tokenizer.encode("go")) == "go"
    with pytest.raises(ag.ConfigError, match="no episodes of kind 'step' at step 7"):
        ag.load_trajectories(run, "step", 7)
    with pytest.raises(ag.ConfigError, match="no option 'limits'"):
        ag.evaluate(run, limits=3)


def test_a_class_of_ones_own_is_played_and_trained_inside_a_running_loop(tmp_path: Path) -> None:
    episode = ag.play(Counting, lambda observation: "up", item=1, max_turns=3)
    assert episode.num_turns == 3
    assert isinstance(ag.make_env("keydoor").reset(0), str)

    async def notebook() -> dict[str, object]:
        return ag.train("keydoor/tiny", {**TINY, "run_dir": str(tmp_path / "run")}, env=Counting)

    assert asyncio.run(notebook())["steps"] == 1


def test_the_example_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    short = example.replace('"rl.steps": 40', ", ".join(f'"{key}": {value}' for key, value in TINY.items()))
    assert short != example
    program = tmp_path / "example.py"
    program.write_text(short.replace("limit=50", "limit=4"))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(program), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1] == "1.0"
