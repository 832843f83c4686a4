"""Real runs of tiny models, each driven into a collapse on purpose: the doctor names it. And one that is healthy."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from envs_for_tests import Counting
from runs_for_tests import counting_config, quiet
from typer.testing import CliRunner

from agentgym_rl.cli import app
from agentgym_rl.commands.train import train
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.run import backend
from agentgym_rl.run.collectors import engine_policies
from agentgym_rl.run.console import Console
from agentgym_rl.run.log import read_metrics
from agentgym_rl.training.doctor import Doctor
from agentgym_rl.types import Step

WORDS = ("red", "green", "blue", "grey")


class Paying:
    """Asks for a word and never calls anything a success. What it pays is the test's choice: `pays(said, asked)`."""

    name: ClassVar[str] = "paying"
    instruction: ClassVar[str] = "Say the word."
    splits: ClassVar[Mapping[str, range]] = {"train": range(0, 100), "test": range(100, 104)}
    subsets: ClassVar[tuple[str, ...]] = ()
    cheap: ClassVar[bool] = True
    choices: ClassVar[Callable[[str], list[str]]] = lambda asked: list(WORDS)
    """What random play, which the warm start imitates, chooses from."""
    pays: ClassVar[Callable[[list[str], str], float]]
    valid: ClassVar[Callable[[str], bool]] = lambda said: True
    num_made: ClassVar[int] = 0

    def __init__(self) -> None:
        self.said: list[str] = []
        type(self).num_made += 1

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return ()

    def reset(self, item: int) -> str:
        self.asked = WORDS[item % len(WORDS)]
        return f"Say {self.asked} ."

    def step(self, text: str) -> Step:
        self.said.append(text)
        cls = type(self)
        return Step(f"Say {self.asked} again .", cls.pays(self.said, self.asked), False, {"valid": cls.valid(text)})

    def actions(self) -> list[str]:
        return type(self).choices(self.asked)

    def close(self) -> None: ...


async def drive(
    folder: Path,
    env: type = Counting,
    console: Console | None = None,
    steps: int = 12,
    turns: int = 2,
    **changes: Any,
) -> Doctor:
    """A run of a few seconds, and the doctor's opinion of it, which is also what the run wrote down."""
    settings = {
        "environments": [{"name": env.name}],
        "horizon": {"kind": "fixed", "turns": [turns]},
        "rl__steps": steps,
        "rl__groups_per_step": 8,
        "rl__optimizer": {"lr": 3e-3},
        "eval": {"episodes": 1, "max_turns": 1},
        "checkpoint": {"every": 1000},
    }
    pool = LocalPool({env.name: env})
    try:
        await train(counting_config(**(settings | changes)), folder, console=console or quiet(), pool=pool)
    finally:
        await pool.close()
    doctor = Doctor(read_metrics(folder / "metrics.jsonl"))
    written = folder / "doctor.jsonl"
    lines = [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []
    assert lines == [finding.line() for finding in doctor.findings]
    return doctor


def named(doctor: Doctor) -> set[str]:
    return {finding.rule for finding in doctor.findings}


def paying(**rules: Any) -> type[Paying]:
    return type("Driven", (Paying,), {name: staticmethod(rule) for name, rule in rules.items()})


async def test_a_run_that_learns_is_healthy(tmp_path: Path) -> None:
    doctor = await drive(tmp_path / "run", steps=14, turns=6)
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert metrics[-1]["reward/mean"] > metrics[0]["reward/mean"] + 0.1
    assert doctor.findings == []
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "run")])
    assert (result.exit_code, "healthy: none of" in result.output) == (0, True), result.output


async def test_nothing_is_paid(tmp_path: Path) -> None:
    assert "zero_advantage" in named(await drive(tmp_path, paying(pays=lambda said, asked: 0.0)))


class Distant(Counting):
    """Pays at the target only, which takes two turns at least."""

    name: ClassVar[str] = "distant"

    def step(self, text: str) -> Step:
        step = super().step(text)
        step.reward = float(step.done)
        return step


async def test_the_horizon_is_too_short(tmp_path: Path) -> None:
    assert "horizon_truncation" in named(await drive(tmp_path, Distant, steps=22, turns=1))


async def test_one_fixed_reply_is_paid(tmp_path: Path) -> None:
    env = paying(pays=lambda said, asked: float(said[-1] == "red"), choices=lambda asked: [asked, asked, asked, "red"])
    with (tmp_path / "output").open("w") as output:
        doctor = await drive(tmp_path / "run", env, Console(output), steps=25, turns=1)
    assert "template_collapse" in named(doctor)
    (finding,) = [f for f in doctor.findings if f.rule == "template_collapse"]
    assert f"! doctor: {finding.message}" in (tmp_path / "output").read_text()
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "run"), "--json"])
    assert result.exit_code == 1
    assert "template_collapse" in [row["rule"] for row in json.loads(result.output)["findings"]]


def digits(*counts: int) -> Callable[[str], list[str]]:
    """Replies of so many digits, each of which is a token."""
    return lambda asked: [" ".join(["7"] * count) for count in counts]


async def test_length_is_paid(tmp_path: Path) -> None:
    env = paying(pays=lambda said, asked: len(said[-1].split()) / 10, choices=digits(1, 1, 1, 2, 3, 9))
    doctor = await drive(tmp_path, env, turns=1, steps=16, agent__max_new_tokens=40, rl__optimizer={"lr": 1e-3})
    assert "length_runaway" in named(doctor)


async def test_brevity_is_paid(tmp_path: Path) -> None:
    env = paying(pays=lambda said, asked: 1 / len(said[-1].split() or ["none"]), choices=digits(2, 20, 22, 24))
    doctor = await drive(tmp_path, env, turns=1, steps=15, agent__max_new_tokens=30)
    assert "length_collapse" in named(doctor)


async def test_repeating_is_paid(tmp_path: Path) -> None:
    env = paying(pays=lambda said, asked: float(len(said) > 1 and said[-1] == said[-2]))
    doctor = await drive(tmp_path, env, turns=3, rl__optimizer={"lr": 1e-2})
    assert "repeated_actions" in named(doctor)


async def test_the_invalid_is_paid(tmp_path: Path) -> None:
    env = paying(pays=lambda said, asked: float(said[-1] == "grey"), valid=lambda said: said != "grey")
    assert "invalid_actions" in named(await drive(tmp_path, env, rl__optimizer={"lr": 1e-2}))


async def test_the_rate_is_absurd(tmp_path: Path) -> None:
    assert "entropy_collapse" in named(await drive(tmp_path, rl__optimizer={"lr": 0.1}))


async def test_randomness_is_paid_and_nothing_holds_the_policy_back(tmp_path: Path) -> None:
    env = paying(pays=lambda said, asked: 0.0)
    doctor = await drive(tmp_path, env, steps=20, rl__entropy_coef=1.0, rl__kl_coef=1e-9, rl__zero_variance="keep")
    assert {"entropy_explosion", "kl_runaway"} <= named(doctor)


async def test_many_large_updates_on_the_same_samples(tmp_path: Path) -> None:
    luck = random.Random(0)
    env = paying(pays=lambda said, asked: luck.random())
    doctor = await drive(
        tmp_path, env, steps=6, rl__epochs=6, rl__clip_high=0.02, rl__clip_low=0.02, rl__optimizer={"lr": 3e-2}
    )
    assert "clipping" in named(doctor)


async def test_rewards_jump_by_orders_of_magnitude(tmp_path: Path) -> None:
    env = paying(pays=lambda said, asked: (1e4 if env.num_made > 300 else 1.0) * (said[-1] == asked))
    doctor = await drive(tmp_path, env, turns=1, rl__normalize_std=False, rl__optimizer={"lr": 1e-5})
    assert "gradient_spikes" in named(doctor)


class Turncoat(Counting):
    """Reaches its target as usual until 300 episodes were played, and never after."""

    name: ClassVar[str] = "turncoat"
    num_made: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).num_made += 1

    def step(self, text: str) -> Step:
        step = super().step(text)
        if self.num_made > 300 and step.done:
            return Step("It is gone.", 0.0, True, {"valid": True, "success": False})
        return step


async def test_success_is_lost(tmp_path: Path) -> None:
    assert "success_collapse" in named(await drive(tmp_path, Turncoat, turns=6, steps=16))


class Failing(Counting):
    """Breaks down in every third episode."""

    name: ClassVar[str] = "failing"

    def reset(self, item: int) -> str:
        if item % 3 == 0:
            raise RuntimeError("out of order")
        return super().reset(item)


async def test_episodes_fail(tmp_path: Path) -> None:
    assert "episode_errors" in named(await drive(tmp_path, Failing, agent__retries=0))


async def test_replies_and_episodes_have_no_room(tmp_path: Path) -> None:
    env = paying(pays=lambda said, asked: 0.0, choices=digits(6))
    assert "length_truncation" in named(await drive(tmp_path / "reply", env, steps=6))
    doctor = await drive(tmp_path / "context", env, steps=6, turns=9, agent__max_new_tokens=8, agent__max_context=40)
    assert "context_truncation" in named(doctor)


async def test_the_sampler_lies_about_its_temperature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = engine_policies
    monkeypatch.setattr(
        backend, "engine_policies", lambda engine, renderer, agent, _, **options: honest(engine, renderer, agent, 3.0)
    )
    assert "sampler_mismatch" in named(await drive(tmp_path, steps=4))
