"""On-policy distillation: a student learns from a teacher's probabilities of its own tokens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from runs_for_tests import Process, comparable_metrics, quiet

from agentgym_rl.commands.train import train
from agentgym_rl.config import Config, load_config
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.preflight import require_recipe

RECIPES = Path(__file__).parents[2] / "recipes" / "keydoor"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of DAgger, whose base model is the student."""
    run = tmp_path_factory.mktemp("teacher") / "run"
    config = load_config(RECIPES / "dagger.toml", ["threads=1"])
    summary = asyncio.run(train(config, run, console=quiet()))
    assert summary["before"]["success"] < 0.3
    assert summary["after"]["success"] >= 0.9
    return run


def student(teacher: Path, *overrides: str) -> Config:
    paths = (f"model.path={teacher / 'base'}", f"rl.distill.teacher={teacher}", "threads=1")
    return load_config(RECIPES / "distill.toml", [*paths, *overrides])


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_the_student_learns_what_the_teacher_knows(teacher: Path, tmp_path: Path) -> None:
    summary = await train(student(teacher), tmp_path / "run", console=quiet())
    assert summary["before"]["success"] < 0.3
    assert summary["after"]["success"] >= 0.8, [(e["step"], e["success"]) for e in summary["evaluations"]]
    rows = comparable_metrics(tmp_path / "run")
    assert rows[0]["kl/teacher"] > 5 * rows[-1]["kl/teacher"]
    assert [row["horizon/keydoor"] for row in rows][::15] == [2.0, 4.0]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_and_resumed_distillation_equals_an_uninterrupted_one(teacher: Path, tmp_path: Path) -> None:
    def command(run: Path) -> list[str]:
        paths = [f"model.path={teacher / 'base'}", f"rl.distill.teacher={teacher}", f"run_dir={run}"]
        small = ["threads=1", "rl.steps=4", "rl.groups_per_step=8", "checkpoint.every=1", "eval.episodes=4"]
        return ["train", str(RECIPES / "distill.toml"), *paths, *small]

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert Process(command(whole), tmp_path / "whole.out").wait(280) == 0
    first = Process(command(killed), tmp_path / "killed.out")
    first.kill_when(lambda: (killed / "checkpoints" / "step_000002").is_dir(), 280)
    assert Process([*command(killed), "--resume"], tmp_path / "resumed.out").wait(280) == 0
    assert comparable_metrics(killed) == comparable_metrics(whole)


@pytest.mark.long
async def test_a_teacher_with_another_vocabulary_is_refused(teacher: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in (teacher / "base").iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = student(teacher, f"rl.distill.teacher={other}")
    with pytest.raises(ConfigError, match="the vocabularies differ"):
        await train(config, tmp_path / "run", console=quiet())


def test_distillation_needs_a_teacher() -> None:
    with pytest.raises(ConfigError, match=r"needs \[rl.distill\] with a teacher"):
        load_config(RECIPES / "tiny.toml", ["method=distill"])
    with pytest.raises(ConfigError, match="set method = 'distill'"):
        load_config(RECIPES / "tiny.toml", ["rl.distill.teacher=runs/x"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rl.distill.teacher=/nowhere", r"rl\.distill\.teacher = '/nowhere': no Hugging Face model folder"),
        ("rl.distill.url=foo", r"rl\.distill\.url must look like https://.*, got 'foo'"),
    ],
)
def test_a_teacher_that_cannot_exist_is_refused_before_anything_starts(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_recipe(load_config(RECIPES / "distill.toml", ["model.path=/nowhere", override]))


def test_a_teacher_that_reads_less_than_episodes_may_have_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    for name, positions in (("own", 4096), ("short", 64)):
        (tmp_path / name).mkdir()
        config = {**sizes, "vocab_size": 9, "max_position_embeddings": positions, "model_type": "llama"}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    options = [f"model.path={tmp_path / 'own'}", f"rl.distill.teacher={tmp_path / 'short'}", "agent.max_context=65"]
    with pytest.raises(ConfigError, match=r"short' reads 64 tokens, and episodes may have 65: lower agent.max_context"):
        require_recipe(load_config(RECIPES / "distill.toml", options))
    require_recipe(load_config(RECIPES / "distill.toml", [*options, "agent.max_context=64"]))


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_teacher_is_a_term_of_rl(teacher: Path, tmp_path: Path) -> None:
    """The same episodes give another gradient with the teacher than without."""
    common = (
        *("rl.steps=1", "rl.groups_per_step=8", "rl.group_size=8", "eval.episodes=2", "rl.distill.reward_weight=1"),
        *("horizon.kind=fixed", "horizon.turns=[4]"),  # long enough for a success
    )
    rows = []
    for coef in (0.0, 0.05):
        run = tmp_path / f"{coef}"
        await train(student(teacher, "method=rl", *common, f"rl.distill.coef={coef}"), run, console=quiet())
        rows += comparable_metrics(run)
    rewarded, mixed = rows
    assert rewarded["kl/teacher"] == mixed["kl/teacher"] > 0
    assert rewarded["reward/mean"] == mixed["reward/mean"] > 0
    assert 0 < rewarded["grad/norm"] != mixed["grad/norm"]
