"""Random combinations of settings: a run works and resumes exactly, or is refused in one line before it starts."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

import pytest
from processes_for_tests import Forked

ROOT = Path(__file__).parents[2]
COMMON = (
    *("agent.style=react", "agent.style=plan", "agent.style=code", "agent.style=tool", "agent.context=window"),
    *("agent.context=summary", "agent.summary_tokens=6", "agent.context_turns=1", "agent.max_context=160"),
    *("agent.max_new_tokens=20", "agent.temperature=0.7", "agent.thoughts=keep", "agent.thoughts=drop"),
    *("agent.train_thoughts=false", "agent.concurrency=2", "model.dtype=bfloat16", "eval.temperature=0"),
    *("checkpoint.background=true", "warm_start.policy=oracle", "warm_start.mistakes=0.2"),
    *("OPTIMIZER.checkpoint_activations=true", "OPTIMIZER.offload_moments=true", "OPTIMIZER.offload_activations=true"),
    *("OPTIMIZER.micro_batch_tokens=300", "OPTIMIZER.decay=cosine", "OPTIMIZER.weight_decay=0.1"),
)
RL = (
    *(f"rl.algorithm={name}" for name in ("rloo", "reinforce++", "reinforce++-baseline", "ppo")),
    *(f"rl.credit={name}" for name in ("turns", "two_level", "anchor")),
    *("rl.loss=gspo", "rl.loss=cispo", "rl.aggregate=trajectory", "rl.aggregate=constant", "rl.normalize_std=false"),
    *("rl.overlong=mask", "rl.overlong=penalty", "rl.overlong_buffer=2", "rl.zero_variance=drop", "rl.keep_groups=0.5"),
    *("rl.resample_rounds=1", "rl.epochs=2", "rl.minibatches=2", "rl.kl_coef=0", "rl.kl_in=reward", "rl.kl_target=0.1"),
    *(
        "rl.kl_estimator=k1",
        "rl.entropy_coef=0.01",
        "rl.overlap=1",
        "rl.importance=sequence_mask",
        "rl.importance=none",
    ),
    *("rl.turn_discount=0.9", "rl.token_discount=0.99", "rl.tree={roots=2, branches=1, depth=1}"),
    *("rl.tree={roots=1, branches=3, branch='entropy'}", "horizon.kind=adaptive", "horizon.kind=linear"),
)
METHODS: dict[str, tuple[str, ...]] = {
    "keydoor/tiny": RL,
    "keydoor/tiny-rewards": RL,
    "nim/tiny": (*RL, "team.rotate=true", "team.snapshot_every=1"),
    "keydoor_duo/tiny": RL,
    "debate/tiny": RL,
    "keydoor/tiny-sft": ("sft.epochs=2", "sft.loss_on=everything", "data.play=random", "data.wrong_thoughts=0.3"),
    "keydoor/tiny-dpo": ("dpo.label_smoothing=0.1", "dpo.normalize_length=true", "dpo.rounds=2", "dpo.epochs=2"),
    "keydoor/tiny-dagger": ("dagger.oracle_share=0", "dagger.oracle_decay=0", "dagger.correct_thoughts=true"),
    "keydoor/tiny-agentevol": ("agentevol.history=all", "agentevol.group_size=2", "agentevol.min_reward=0"),
    "keydoor/tiny-reward_model": ("reward_model.held_out=0.5", "reward_model.center_coef=0", "reward_model.epochs=2"),
}
"""Settings beside the common ones, by recipe. Asynchronous groups are left out: their order depends on time."""
OPTIMIZERS = {"dpo": "dpo.optimizer", "reward_model": "reward_model.optimizer"}
LATE_REFUSALS = ("round ", "warm_start: no ", "warm start: of ", "data: ", "a reward model needs pairs ")
"""Beginnings of refusals that only the episodes of a run can show."""
MEASURED = ("time", "system/", "per_s", "memory")
"""Parts of the names of metrics that no two runs share."""


def combination(seed: int) -> tuple[str, list[str]]:
    """Return a recipe and up to seven settings, at most one of a name."""
    chosen = random.Random(seed)
    recipe = list(METHODS)[seed % len(METHODS)]
    method = recipe.rpartition("tiny-")[2]
    optimizer = OPTIMIZERS.get(method, "rl.optimizer" if METHODS[recipe][: len(RL)] == RL else "sft.optimizer")
    settings = chosen.sample((*METHODS[recipe], *COMMON), chosen.randint(2, 7))
    by_name = dict(setting.replace("OPTIMIZER", optimizer).split("=", 1) for setting in settings)
    if "warm_start.mistakes" in by_name:
        by_name["warm_start.policy"] = "oracle"
    return recipe, [f"{name}={value}" for name, value in by_name.items()]


def train(recipe: str, folder: Path, *arguments: str) -> tuple[int, str]:
    """Run `agentgym-rl train` and return its exit code and output."""
    output = folder.parent / f"{folder.name}.log"
    process = Forked(["train", str(ROOT / f"recipes/{recipe}.toml"), f"run_dir={folder}", *arguments], output)
    code = process.wait(timeout=600)
    return code, output.read_text(errors="replace")


def metrics(folder: Path) -> list[dict[str, float]]:
    """Return the numbers of every step that do not depend on time."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    numbers = [{k: v for k, v in row.items() if isinstance(v, int | float)} for row in rows]
    return [{k: v for k, v in row.items() if not any(part in k for part in MEASURED)} for row in numbers]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
def test_a_combination_works_and_resumes_exactly_or_is_refused(seed: int, tmp_path: Path) -> None:
    recipe, settings = combination(seed)
    arguments = [*settings, "checkpoint.every=1", "checkpoint.keep=100"]
    whole = tmp_path / "whole"
    code, output = train(recipe, whole, *arguments)
    assert "Traceback" not in output, f"{recipe} {settings}: {output[-2000:]}"
    if code:
        [line] = [line for line in output.splitlines() if line.startswith("agentgym-rl: ")]
        late = line.removeprefix("agentgym-rl: ").startswith(LATE_REFUSALS)
        assert late or not whole.exists(), f"{settings} is refused after the run has begun: {line}"
        return
    rows = metrics(whole)
    assert all(math.isfinite(value) for row in rows for value in row.values()), settings
    assert not any(row.get("episodes/failed") for row in rows), settings
    checkpoints = sorted((whole / "checkpoints").glob("step_*"))
    if len(checkpoints) < 2:
        return
    resumed = tmp_path / "resumed"
    shutil.copytree(whole, resumed, symlinks=True)
    for checkpoint in checkpoints[len(checkpoints) // 2 :]:
        shutil.rmtree(resumed / "checkpoints" / checkpoint.name)
    code, output = train(recipe, resumed, *arguments, "--resume")
    assert code == 0, f"{settings}: {output[-2000:]}"
    again = metrics(resumed)
    assert len(again) == len(rows)
    for row, other in zip(rows, again, strict=True):
        assert other == pytest.approx(row, rel=1e-5, abs=1e-6), f"{recipe} {settings}"
