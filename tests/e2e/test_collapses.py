"""Real runs of tiny models, each driven into a collapse that the doctor must name, and a healthy run.

`make test` has a few of them; tests/unit/test_doctor.py checks every rule on written metrics."""

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
    """Asks for a word and never reports success. A test sets its reward: `pays(replies, asked)`."""

    name: ClassVar[str] = "paying"
    instruction: ClassVar[str] = "Say the word."
    splits: ClassVar[Mapping[str, range]] = {"train": range(0, 100), "test": range(100, 104)}
    subsets: ClassVar[tuple[str, ...]] = ()
    cheap: ClassVar[bool] = True
    choices: ClassVar[Callable[[str], list[str]]] = lambda asked: list(WORDS)
    """Replies of random play, which the warm start imitates."""
    pays: ClassVar[Callable[[list[str], str], float]]
    valid: ClassVar[Callable[[str], bool]] = lambda reply: True
    num_created: ClassVar[int] = 0

    def __init__(self) -> None:
        self.replies: list[str] = []
        type(self).num_created += 1

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return ()

    def reset(self, item: int) -> str:
        self.asked = WORDS[item % len(WORDS)]
        return f"Say {self.asked} ."

    def step(self, text: str) -> Step:
        self.replies.append(text)
        cls = type(self)
        return Step(f"Say {self.asked} again .", cls.pays(self.replies, self.asked), False, {"valid": cls.valid(text)})

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
    """Train for a few seconds. Return the doctor of the run, whose findings equal those the run recorded."""
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


def rules_of(doctor: Doctor) -> set[str]:
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


async def test_rewards_of_zero_are_named_zero_advantage(tmp_path: Path) -> None:
    assert "zero_advantage" in rules_of(await drive(tmp_path, paying(pays=lambda replies, asked: 0.0)))


class Distant(Counting):
    """Pays only at the target, which takes at least two turns."""

    name: ClassVar[str] = "distant"

    def step(self, text: str) -> Step:
        step = super().step(text)
        step.reward = float(step.done)
        return step


@pytest.mark.long
async def test_a_horizon_that_is_too_short_is_named(tmp_path: Path) -> None:
    assert "horizon_truncation" in rules_of(await drive(tmp_path, Distant, steps=22, turns=1))


async def test_a_reward_for_one_fixed_reply_is_named_template_collapse(tmp_path: Path) -> None:
    env = paying(
        pays=lambda replies, asked: float(replies[-1] == "red"), choices=lambda asked: [asked, asked, asked, "red"]
    )
    with (tmp_path / "output").open("w") as output:
        doctor = await drive(tmp_path / "run", env, Console(output), steps=25, turns=1)
    assert "template_collapse" in rules_of(doctor)
    (finding,) = [f for f in doctor.findings if f.rule == "template_collapse"]
    assert f"! doctor: {finding.message}" in (tmp_path / "output").read_text()
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "run"), "--json"])
    assert result.exit_code == 1
    assert "template_collapse" in [row["rule"] for row in json.loads(result.output)["findings"]]


def digits(*counts: int) -> Callable[[str], list[str]]:
    """Return a choice of replies with these numbers of digits. Each digit is a token."""
    return lambda asked: [" ".join(["7"] * count) for count in counts]


@pytest.mark.long
async def test_a_reward_for_length_is_named_length_runaway(tmp_path: Path) -> None:
    env = paying(pays=lambda replies, asked: len(replies[-1].split()) / 10, choices=digits(1, 1, 1, 2, 3, 9))
    doctor = await drive(tmp_path, env, turns=1, steps=16, agent__max_new_tokens=40, rl__optimizer={"lr": 1e-3})
    assert "length_runaway" in rules_of(doctor)


@pytest.mark.long
async def test_a_reward_for_brevity_is_named_length_collapse(tmp_path: Path) -> None:
    env = paying(pays=lambda replies, asked: 1 / len(replies[-1].split() or ["none"]), choices=digits(2, 20, 22, 24))
    doctor = await drive(tmp_path, env, turns=1, steps=15, agent__max_new_tokens=30)
    assert "length_collapse" in rules_of(doctor)


@pytest.mark.long
async def test_a_reward_for_repetition_is_named_repeated_actions(tmp_path: Path) -> None:
    env = paying(pays=lambda replies, asked: float(len(replies) > 1 and replies[-1] == replies[-2]))
    doctor = await drive(tmp_path, env, turns=3, rl__optimizer={"lr": 1e-2})
    assert "repeated_actions" in rules_of(doctor)


@pytest.mark.long
async def test_a_reward_for_invalid_actions_is_named(tmp_path: Path) -> None:
    env = paying(pays=lambda replies, asked: float(replies[-1] == "grey"), valid=lambda reply: reply != "grey")
    assert "invalid_actions" in rules_of(await drive(tmp_path, env, rl__optimizer={"lr": 1e-2}))


@pytest.mark.long
async def test_a_huge_learning_rate_is_named_entropy_collapse(tmp_path: Path) -> None:
    assert "entropy_collapse" in rules_of(await drive(tmp_path, rl__optimizer={"lr": 0.1}))


@pytest.mark.long
async def test_episodes_that_repeat_each_other_are_named_echo_trap(tmp_path: Path) -> None:
    """Updates that are too large make all episodes of a group alike, and their rewards with them."""
    doctor = await drive(tmp_path, rl__optimizer={"lr": 0.1}, turns=4)
    assert "echo_trap" in rules_of(doctor)
    (finding,) = [f for f in doctor.findings if f.rule == "echo_trap"]
    assert "the echo trap: the episodes of a group repeat each other" in finding.message
    rows = read_metrics(tmp_path / "metrics.jsonl")
    for name in ("reward/spread", "replies/diversity"):
        assert rows[-1][name] < rows[0][name] / 3


@pytest.mark.long
async def test_a_huge_entropy_bonus_is_named_entropy_explosion_and_kl_runaway(tmp_path: Path) -> None:
    env = paying(pays=lambda replies, asked: 0.0)
    doctor = await drive(tmp_path, env, steps=20, rl__entropy_coef=1.0, rl__kl_coef=1e-9, rl__zero_variance="keep")
    assert {"entropy_explosion", "kl_runaway"} <= rules_of(doctor)


@pytest.mark.long
async def test_many_large_updates_on_the_same_samples_are_named_clipping(tmp_path: Path) -> None:
    luck = random.Random(0)
    env = paying(pays=lambda replies, asked: luck.random())
    doctor = await drive(
        tmp_path, env, steps=6, rl__epochs=6, rl__clip_high=0.02, rl__clip_low=0.02, rl__optimizer={"lr": 3e-2}
    )
    assert "clipping" in rules_of(doctor)


@pytest.mark.long
async def test_a_jump_in_rewards_is_named_gradient_spikes(tmp_path: Path) -> None:
    env = paying(pays=lambda replies, asked: (1e4 if env.num_created > 300 else 1.0) * (replies[-1] == asked))
    doctor = await drive(tmp_path, env, turns=1, rl__normalize_std=False, rl__optimizer={"lr": 1e-5})
    assert "gradient_spikes" in rules_of(doctor)


class FailsLater(Counting):
    """Can be solved in the first 300 episodes and never after."""

    name: ClassVar[str] = "fails_later"
    num_created: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).num_created += 1

    def step(self, text: str) -> Step:
        step = super().step(text)
        if self.num_created > 300 and step.done:
            return Step("It is gone.", 0.0, True, {"valid": True, "success": False})
        return step


@pytest.mark.long
async def test_lost_success_is_named_success_collapse(tmp_path: Path) -> None:
    assert "success_collapse" in rules_of(await drive(tmp_path, FailsLater, turns=6, steps=16))


class Failing(Counting):
    """Raises an error in every third episode."""

    name: ClassVar[str] = "failing"

    def reset(self, item: int) -> str:
        if item % 3 == 0:
            raise RuntimeError("out of order")
        return super().reset(item)


async def test_failing_episodes_are_named_episode_errors(tmp_path: Path) -> None:
    assert "episode_errors" in rules_of(await drive(tmp_path, Failing, agent__retries=0))


@pytest.mark.long
async def test_truncated_replies_and_contexts_are_named(tmp_path: Path) -> None:
    env = paying(pays=lambda replies, asked: 0.0, choices=digits(6))
    assert "length_truncation" in rules_of(await drive(tmp_path / "reply", env, steps=6))
    small = {"warm_start__max_turns": 1, "agent__max_new_tokens": 8, "agent__max_context": 40}
    doctor = await drive(tmp_path / "context", env, steps=6, turns=9, **small)
    assert "context_truncation" in rules_of(doctor)


async def test_another_sampling_temperature_is_named_sampler_mismatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        backend,
        "engine_policies",
        lambda engine, **options: engine_policies(engine, **options | {"temperature": 3.0}),
    )
    assert "sampler_mismatch" in rules_of(await drive(tmp_path, steps=4))
