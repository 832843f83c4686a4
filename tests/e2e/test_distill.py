"""On-policy distillation: a student learns from a teacher's probabilities of its own tokens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from runs_for_tests import Process, comparable_metrics, quiet
from teacher_for_tests import teacher_server

from agentgym_rl.commands.train import train
from agentgym_rl.config import Config, load_config
from agentgym_rl.errors import ConfigError, EngineError

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


@pytest.mark.timeout(900)
async def test_the_student_learns_what_the_teacher_knows(teacher: Path, tmp_path: Path) -> None:
    summary = await train(student(teacher), tmp_path / "run", console=quiet())
    assert summary["before"]["success"] < 0.3
    assert summary["after"]["success"] >= 0.8, [(e["step"], e["success"]) for e in summary["evaluations"]]
    rows = comparable_metrics(tmp_path / "run")
    assert rows[0]["kl/teacher"] > 5 * rows[-1]["kl/teacher"]
    assert [row["horizon/keydoor"] for row in rows][::15] == [2.0, 4.0]


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


FEW = ("rl.steps=2", "rl.groups_per_step=8", "eval.episodes=4", "horizon.steps_per_stage=1")


@pytest.mark.timeout(900)
async def test_a_teacher_behind_an_api_teaches_what_one_in_this_process_does(teacher: Path, tmp_path: Path) -> None:
    await train(student(teacher, *FEW), tmp_path / "here", console=quiet())
    expected = comparable_metrics(tmp_path / "here")
    with teacher_server(teacher) as server:
        for api in ("prompt_logprobs", "echo"):
            server.faults = ["500", "429", "malformed"]
            there = (f"rl.distill.url={server.url}", f"rl.distill.api={api}")
            await train(student(teacher, *FEW, *there), tmp_path / api, console=quiet())
            assert not server.faults
            rows = comparable_metrics(tmp_path / api)
            assert [row.keys() for row in rows] == [row.keys() for row in expected]
            for row, wanted in zip(rows, expected, strict=True):
                for name in ("kl/teacher", "loss", "grad/norm", "reward/mean", "tokens/total", "entropy/mean"):
                    assert row[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-5), (api, name)
    assert {body["model"] for body in server.asked} == {str(teacher)}


@pytest.mark.timeout(900)
async def test_a_teacher_is_a_term_of_rl(teacher: Path, tmp_path: Path) -> None:
    """The same episodes give another gradient with the teacher than without, and than from the teacher alone."""
    common = ("rl.steps=1", "rl.groups_per_step=8", "rl.group_size=8", "eval.episodes=4", "rl.distill.reward_weight=1")
    rows = {}
    for coef in (0.0, 0.05):
        run = tmp_path / f"{coef}"
        await train(student(teacher, "method=rl", *common, f"rl.distill.coef={coef}"), run, console=quiet())
        (rows[coef],) = comparable_metrics(run)
    await train(student(teacher, *common, "rl.distill.reward_weight=0.0"), tmp_path / "alone", console=quiet())
    (alone,) = comparable_metrics(tmp_path / "alone")
    rewarded, mixed = rows[0.0], rows[0.05]
    assert rewarded["kl/teacher"] == mixed["kl/teacher"] == alone["kl/teacher"] > 0
    assert rewarded["reward/mean"] == mixed["reward/mean"] > 0
    assert len({row["grad/norm"] for row in (rewarded, mixed, alone)}) == 3


@pytest.mark.timeout(900)
async def test_a_teacher_behind_an_api_that_cannot_be_used_is_explained(teacher: Path, tmp_path: Path) -> None:
    with teacher_server(teacher) as server:
        there = (*FEW, f"rl.distill.url={server.url}", "rl.distill.retries=0")
        vocabulary = server.tokenizer
        server.tokenizer = _Shifted(vocabulary)
        with pytest.raises(ConfigError, match=r"needs the agent's tokenizer: id \d+ is '.*' here and '.*' there"):
            await train(student(teacher, *there), tmp_path / "tokens", console=quiet())
        server.tokenizer = vocabulary
        for fault, message in {"401": "refused: HTTP 401", "500": "failed 1 time", "malformed": "not a comp"}.items():
            server.always = fault
            with pytest.raises(EngineError, match=message):
                await train(student(teacher, *there), tmp_path / fault, console=quiet())
        server.always = "hang"
        with pytest.raises(EngineError, match=r"no answer within 0\.5 s"):
            await train(student(teacher, *there, "rl.distill.timeout_s=0.5"), tmp_path / "hang", console=quiet())
    with pytest.raises(EngineError, match="cannot be reached"):
        await train(student(teacher, *there), tmp_path / "gone", console=quiet())
    with pytest.raises(ConfigError, match="an API returns probabilities at temperature 1"):
        student(teacher, *there, "agent.temperature=0.7")


class _Shifted:
    """A tokenizer of the same size with other ids."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode([ids[0] - 1])
