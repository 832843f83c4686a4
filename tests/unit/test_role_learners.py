"""Roles with adapters of their own on one base model: shared weights, separate updates, metrics of a step."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from training_for_tests import group, tiny_model

from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.training import lora
from agentgym_rl.training.horizon import make_horizon
from agentgym_rl.training.rl import Hooks, RLState, train_rl
from agentgym_rl.training.rl_learner import RLLearner
from agentgym_rl.training.role_learners import RoleLearners, joined_metrics
from agentgym_rl.training.settings import HorizonSettings, LoraSettings, OptimizerSettings, RLSettings
from agentgym_rl.training.task_source import TaskSource
from agentgym_rl.types import Group, Limits, Sampling, Task

LIMITS = {"toy": Limits(max_turns=8, max_new_tokens=8, max_context=200)}
GUIDE = [("guide", 1, [0.0, 1.0, 1.0]), ("guide", 2, [1.0, 0.0])]
WALKER = [("walker", 3, [0.0, 0.0, 1.0]), ("walker", 4, [1.0, 0.0])]
torch.set_num_threads(1)


def adapted() -> Any:
    model = tiny_model()
    lora.add_adapter(model, LoraSettings(rank=4, alpha=8.0), 0)
    return model


def settings(algorithm: str = "grpo") -> RLSettings:
    return RLSettings(
        algorithm=algorithm,  # type: ignore[arg-type]
        steps=3,
        groups_per_step=4,
        group_size=2,
        kl_coef=0.1,
        minibatches=2,
        optimizer=OptimizerSettings(lr=1e-2),
    )


def learner_of(model: Any, rl: RLSettings) -> RLLearner:
    return RLLearner(model, rl, 1.0, lambda: lora.adapter(model, None))


async def learn(learner: Any, played: list[tuple[str, int, list[float]]], rl: RLSettings) -> list[dict[str, Any]]:
    """Train on the same groups for all steps and return the metrics of each."""
    rows: list[dict[str, Any]] = []

    async def collect(tasks: list[Task], limits: Limits, seed: int) -> list[Group]:
        groups = []
        for role, number, rewards in played:
            groups.append(group(number, rewards))
            for trajectory in groups[-1].trajectories:
                trajectory.role, trajectory.player = role, "learner"
                for message in trajectory.messages:
                    message.version = len(rows) if message.logprobs is not None else None
        return groups

    async def nothing(_: int) -> None:
        return None

    horizon = make_horizon(HorizonSettings(kind="fixed", turns=(8,)))
    state = RLState(TaskSource({"toy": [1, 2, 3, 4]}, seed=1), {"toy": horizon})
    hooks = Hooks(lambda *_: None, lambda *_: None, lambda _, metrics: rows.append(metrics), nothing, nullcontext)
    await train_rl(state, learner, collect, nothing, LIMITS, rl, hooks, seed=5)
    return rows


def matrices(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in lora.matrices(model).items()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce++"])
async def test_a_role_learns_from_its_own_episodes_as_if_it_were_alone(algorithm: str) -> None:
    rl, model = settings(algorithm), adapted()
    start = matrices(model)
    models = {role: lora.copy_with_own_adapters(model) for role in ("guide", "walker")}
    both = RoleLearners({role: learner_of(own, rl) for role, own in models.items()}, None)
    rows = await learn(both, [GUIDE[0], WALKER[0], GUIDE[1], WALKER[1]], rl)
    for role, played in (("guide", GUIDE), ("walker", WALKER)):
        alone = adapted()
        own_rows = await learn(learner_of(alone, rl), played, rl)
        assert equal(matrices(models[role]), matrices(alone)), role
        assert [row[f"roles/{role}_entropy"] for row in rows] == [row["entropy/mean"] for row in own_rows]
        assert [row[f"roles/{role}_kl"] for row in rows] == [row["kl/reference"] for row in own_rows]
    assert not equal(matrices(models["guide"]), matrices(models["walker"]))
    assert equal(matrices(model), start), "the adapters that the roles started from stay as they are"
    assert [row["samples"] for row in rows] == [10.0] * 3


async def test_only_the_role_that_played_changes() -> None:
    rl, model = settings(), adapted()
    models = {role: lora.copy_with_own_adapters(model) for role in ("guide", "walker")}
    learners = RoleLearners({role: learner_of(own, rl) for role, own in models.items()}, learner_of(model, rl))
    start = matrices(model)
    await learn(learners, GUIDE, rl)
    assert not equal(matrices(models["guide"]), start)
    assert equal(matrices(models["walker"]), start)
    assert equal(matrices(model), start)
    await learn(learners, [("scout", 5, [0.0, 1.0])], rl)
    assert equal(matrices(models["walker"]), start)
    assert not equal(matrices(model), start), "a role without adapters of its own trains the shared ones"


def test_roles_share_the_frozen_weights_in_memory() -> None:
    model = adapted()
    own = lora.copy_with_own_adapters(model)
    shared = {name: p.data_ptr() for name, p in model.named_parameters() if not p.requires_grad}
    assert shared == {name: p.data_ptr() for name, p in own.named_parameters() if not p.requires_grad}
    trained = {p.data_ptr() for p in model.parameters() if p.requires_grad}
    assert trained.isdisjoint(p.data_ptr() for p in own.parameters() if p.requires_grad)


async def test_the_engine_of_a_role_samples_with_its_own_adapters(tmp_path: Path) -> None:
    rl, model = settings(), adapted()
    own = lora.copy_with_own_adapters(model)
    await learn(learner_of(own, rl), GUIDE, rl)
    replies = []
    for each in (model, own):
        engine = NativeEngine(each.eval(), max_sessions=2, max_context=64)
        replies.append((await engine.generate([1, 2, 3], Sampling(6, seed=1), "s")).logprobs)
        await engine.close()
    assert replies[0] != pytest.approx(replies[1], abs=1e-3)
    own.save_pretrained(tmp_path)
    lora.restore_adapter(model, tmp_path)
    assert equal(matrices(model), matrices(own))


def test_metrics_of_a_step_are_means_over_the_groups_of_its_learners() -> None:
    guide = {"samples": 4.0, "entropy/mean": 1.0, "importance": "token", "staleness/max": 1.0}
    walker = {"samples": 2.0, "entropy/mean": 2.0, "importance": "token", "staleness/max": 0.0, "loss": 0.5}
    assert joined_metrics([("guide", 1, guide), ("", 3, walker)]) == {
        "samples": 6.0,
        "entropy/mean": 1.75,
        "importance": "token",
        "staleness/max": 1.0,
        "loss": 0.5,
        "roles/guide_entropy": 1.0,
    }
