"""One test for each mistake of earlier systems. Other files test the same behaviour in detail."""

from __future__ import annotations

import ast
import asyncio
import math
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
import torch
from envs_for_tests import Counting, Raising
from scripted_engine_for_tests import ScriptedEngine, scripted_logprob
from servers_for_tests import server_in_thread
from test_rollout import Corridor
from tokenizers_for_tests import byte_level_bpe, split_segmentation, word_level
from training_for_tests import counting_player, group, tiny_model, trajectory

from agentgym_rl.agent.collect import Collector
from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.agent.policy import EnginePolicy, OraclePolicy, ScriptedPolicy
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.rollout import rollout
from agentgym_rl.environment import catalog
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.training.batch import Batch, estimate, gather
from agentgym_rl.training.horizon import make_horizon
from agentgym_rl.training.metrics import episode_metrics
from agentgym_rl.training.microbatch import micro_batches
from agentgym_rl.training.rl import Hooks, RLState, train_rl
from agentgym_rl.training.rl_learner import RLLearner
from agentgym_rl.training.settings import Algorithm, CriticSettings, HorizonSettings, OptimizerSettings, RLSettings
from agentgym_rl.training.task_source import TaskSource
from agentgym_rl.types import Group, Limits, Message, Sampling, StopReason, Task, Trajectory

ROOT = Path(__file__).parents[2]
LIMITS = Limits(max_turns=3, max_new_tokens=32, max_context=2000)
SETTINGS = RLSettings(kl_coef=0.0, optimizer=OptimizerSettings(lr=1e-2))


ALGORITHMS = get_args(Algorithm)


def batch_of(
    groups: list[Group], *, drop: bool = False, aggregate: Any = "token", algorithm: Algorithm = "grpo"
) -> Batch:
    rl = replace(SETTINGS, algorithm=algorithm, zero_variance="drop" if drop else "keep", aggregate=aggregate)
    batch = gather(groups, rl)
    RLLearner(tiny_model(), rl, 1.0).score(batch.samples)
    return estimate(batch, rl)


async def played(renderer: Renderer, replies: list[Any], sampling: Sampling, reward: float) -> Trajectory:
    engine = ScriptedEngine(replies)
    policy = EnginePolicy(engine, renderer, sampling, instruction="Walk.")
    result = await rollout(Task("corridor", 1), Corridor(), policy, LIMITS, id=f"t{reward}")
    result.rewards[-1] = reward
    return result


@pytest.mark.parametrize("kind", ["lossy", "other segmentation"])
async def test_mistake_01_sampled_text_is_never_encoded_again(kind: str) -> None:
    if kind == "lossy":
        renderer = Renderer(word_level(), "chatml")
        unknown = renderer.tokenizer.unk_token_id
        replies = [[unknown, *renderer.encode("go"), renderer.end_of_turn], renderer.reply_ids("north get")] * 2
    else:
        renderer = Renderer(byte_level_bpe("chatml"), "chatml")
        replies = [[*split_segmentation(renderer.tokenizer, "go north"), renderer.end_of_turn]] * 3
    again = [renderer.reply_ids(renderer.decode(reply)) for reply in replies]
    assert again != replies, "this tokenizer must not survive decode and encode"
    members = [await played(renderer, replies[:3], Sampling(max_new_tokens=1), reward) for reward in (0.0, 1.0)]
    batch = batch_of([Group(members[0].task, members)])
    for micro in micro_batches(batch.samples, batch.weights, 1):
        assert micro.targets_A.tolist() == [token for reply in replies[:3] for token in reply]
        assert micro.logprobs_A.tolist() == [scripted_logprob(token) for reply in replies[:3] for token in reply]


async def test_mistake_01_an_end_of_turn_that_was_not_sampled_is_not_trained_on() -> None:
    renderer = Renderer(byte_level_bpe("chatml"), "chatml")
    reply_ids = renderer.encode("go north")  # ended by a stop string or the length limit, without an end-of-turn token
    members = [await played(renderer, [reply_ids] * 3, Sampling(max_new_tokens=1), reward) for reward in (0.0, 1.0)]
    assert members[0].num_turns == 3
    batch = batch_of([Group(members[0].task, members)])
    (micro,) = micro_batches(batch.samples, batch.weights, 10_000)
    assert renderer.end_of_turn not in micro.targets_A.tolist()
    assert renderer.end_of_turn in members[0].token_ids  # but the next prompt contains it


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_mistake_02_the_final_reward_reaches_the_trained_tokens(algorithm: Algorithm) -> None:
    """Check that a success gives every sampled token, and no other, a positive advantage."""
    won, lost = trajectory(1, turns=4, reward=1.0), trajectory(2, turns=3, reward=0.0)
    for episode in (won, lost):
        episode.messages[-1].token_ids = [1, 2, 3]
    batch = batch_of([Group(won.task, [won, lost])], algorithm=algorithm)
    (micro,) = micro_batches(batch.samples, batch.weights, 10_000)
    good = micro.rows_A == micro.indices.index(0)
    assert (micro.advantages_A[good] > 0).all()
    assert (micro.advantages_A[~good] < 0).all()
    assert int(good.sum()) == sum(won.loss_mask)
    if algorithm == "ppo":
        assert (micro.returns_A[good] == 1.0).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_mistake_03_all_inputs_of_a_loss_have_one_shape(algorithm: Algorithm) -> None:
    batch = batch_of([group(1, [0.0, 1.0, 1.0])], algorithm=algorithm)
    known = ["logprobs", "advantages", "turn_index", "versions"]
    known += ["values", "returns"] if algorithm == "ppo" else []
    for sample in batch.samples:
        assert {len(getattr(sample, name)) for name in known} == {sum(sample.loss_mask)}
    (micro,) = micro_batches(batch.samples, batch.weights, 10_000)
    flat = [micro.rows_A, micro.columns_A, micro.targets_A, micro.weights_A, micro.logprobs_A, micro.advantages_A]
    flat += [micro.values_A, micro.returns_A] if algorithm == "ppo" else []
    assert {tuple(t.shape) for t in flat} == {(micro.num_actions,)}
    batch.samples[0].values = [0.0] * len(batch.samples[0].token_ids)  # values of a critic over the whole sequence
    with pytest.raises(ValueError, match="trained tokens need as many values"):
        micro_batches(batch.samples, batch.weights, 10_000)


def test_mistake_04_every_reward_counts_and_a_failed_episode_is_not_a_zero() -> None:
    early, never, broken = (trajectory(i, turns=3, reward=0.0) for i in (1, 2, 3))
    early.rewards[0] = 1.0
    broken.stop, broken.error = StopReason.ERROR, "EnvError: gone"
    groups = [Group(early.task, [early, never, broken])]
    assert {s.trajectory_id: round(max(s.advantages, key=abs)) for s in batch_of(groups).samples} == {"t1": 1, "t2": -1}
    assert episode_metrics(groups)["reward/mean"] == 0.5
    assert episode_metrics(groups)["episodes/error"] == 1


async def test_mistake_05_a_slow_environment_does_not_block_the_others() -> None:
    others_done = asyncio.Event()
    finished: list[Trajectory] = []

    class Waiting(Corridor):
        async def step(self, text: str) -> Any:
            await others_done.wait()  # in lock-step no episode could finish before this step
            return await super().step(text)

    class Pool:
        async def open(self, env: str) -> Any:
            return Waiting() if env == "waiting" else Corridor()

    def note(ended: Trajectory) -> None:
        finished.append(ended)
        if len(finished) == 5:
            others_done.set()

    collect = Collector(Pool(), lambda session, seed: ScriptedPolicy(["go"] * 3), 1, 6, on_trajectory=note)  # type: ignore[arg-type]
    tasks = [Task("waiting", 0), *(Task("corridor", i) for i in range(5))]
    groups = await asyncio.wait_for(collect(tasks, LIMITS, 0), timeout=20)
    assert [g.trajectories[0].stop for g in groups] == [StopReason.DONE] * 6
    assert finished[-1].task.env == "waiting"


async def test_mistake_06_a_resumed_schedule_skips_no_step() -> None:
    async def run(killed_after: int) -> list[int]:
        turns: list[int] = []
        saved: dict[str, Any] = {}

        def fresh() -> RLState:
            horizon = make_horizon(HorizonSettings(kind="stepwise", turns=(1, 2, 4), steps_per_stage=2))
            return RLState(TaskSource({"toy": [1, 2, 3]}, 0), {"toy": horizon})

        class Learner:
            kl_coef = 0.0

            def score(self, samples: Any, *, policy_only: bool = False) -> None: ...
            def learn(self, batch: Any, seed: int) -> dict[str, float]:
                return {"mismatch/abs": 0.0}

        async def collect(tasks: list[Task], limits: Limits, seed: int) -> list[Group]:
            turns.append(limits.max_turns)
            groups = [Group(task, group(task.item, [0.0, 1.0]).trajectories) for task in tasks]
            for message in (m for g in groups for t in g.trajectories for m in t.messages):
                message.version = state.version
            return groups

        async def nothing(number: int) -> None:
            saved.update(state.state())

        for steps in (killed_after, 7):
            state = fresh()
            if saved:
                state.restore(saved, killed_after)
            settings = RLSettings(steps=steps, groups_per_step=1, group_size=2)
            hooks = Hooks(lambda *_: None, lambda *_: None, lambda *_: None, nothing, nullcontext)
            await train_rl(state, Learner(), collect, nothing, {"toy": LIMITS}, settings, hooks, 0)
        return turns

    for killed_after in range(8):
        assert await run(killed_after) == [1, 1, 2, 2, 4, 4, 4]


async def test_mistake_07_sessions_are_closed_and_ids_are_unique() -> None:
    pool = LocalPool({"raising": Raising}, max_sessions=3)

    def policy(session: Any, seed: int) -> Any:
        return ScriptedPolicy(["up", "raise"]) if seed % 2 else OraclePolicy(session)

    collect = Collector(pool, policy, group_size=4, concurrency=3, retries=1)
    groups = await collect([Task("raising", item) for item in (12, 13, 14, 15)], replace(LIMITS, max_turns=9), 5)
    stops = {t.stop for g in groups for t in g.trajectories}
    assert stops == {StopReason.DONE, StopReason.ERROR}
    ids = [t.id for g in groups for t in g.trajectories]
    assert len(set(ids)) == len(ids)
    assert (pool.num_open, Raising.num_alive) == (0, 0)


@pytest.mark.parametrize("aggregate", ["token", "trajectory", "constant"])
@pytest.mark.parametrize("algorithm", ["grpo", "reinforce++", "ppo"])
def test_mistake_08_micro_batches_and_rows_do_not_change_the_weights(algorithm: Algorithm, aggregate: Any) -> None:
    groups = [group(1, [0.0, 1.0, 0.0]), group(2, [1.0, 0.0])]
    usable = [t for g in groups for t in g.trajectories]
    updates = []
    for micro_batch_tokens in (1, 30, 10_000):
        optimizer = OptimizerSettings(lr=0.0, max_grad_norm=0.0, micro_batch_tokens=micro_batch_tokens)
        settings = replace(SETTINGS, algorithm=algorithm, optimizer=optimizer, aggregate=aggregate)
        settings = replace(settings, critic=CriticSettings(optimizer=optimizer))
        batch = batch_of(groups, aggregate=aggregate, algorithm=algorithm)
        metrics = RLLearner(tiny_model(), settings, 1.0).learn(batch, 0)
        names = ("loss", "grad/norm", *(("value/loss", "value/grad_norm") if algorithm == "ppo" else ()))
        updates.append([metrics[name] for name in names])
    assert updates[1] == pytest.approx(updates[0], rel=1e-4, abs=1e-7)
    assert updates[2] == pytest.approx(updates[0], rel=1e-4, abs=1e-7)
    assert len(batch.samples) == len(usable)  # one row per trajectory, for any number of turns
    shares = [weight * sum(s.loss_mask) for s, weight in zip(batch.samples, batch.weights, strict=True)]
    tokens = [sum(t.loss_mask) for t in usable]
    expected = {
        "token": [n / sum(tokens) for n in tokens],
        "trajectory": [1 / len(usable)] * len(usable),
        "constant": [n / (len(usable) * SETTINGS.aggregate_length) for n in tokens],
    }
    assert shares == pytest.approx(expected[aggregate])


async def test_mistake_09_no_cache_of_old_weights_is_reused() -> None:
    model, tokenizer = counting_player()
    renderer = Renderer(tokenizer)
    prompt = renderer.prompt([Message("user", "Goal: 4. You are at 0.")])
    sampling = Sampling(max_new_tokens=6, seed=3)
    engine = NativeEngine(model, max_sessions=4, max_context=200)
    first = await engine.generate(prompt, sampling, "session")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    await engine.update_weights(None, 1)
    longer = [*prompt, *first.token_ids, *renderer.follow_up("You are at 1.")]
    continued = await engine.generate(longer, sampling, "session")
    fresh = await NativeEngine(model, max_sessions=4, max_context=200).generate(longer, sampling, "other")
    assert continued.token_ids == fresh.token_ids
    assert continued.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)
    assert (first.version, continued.version) == (0, 1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_mistake_10_placeholders_cannot_reach_a_ratio(algorithm: Algorithm) -> None:
    settings = replace(SETTINGS, algorithm=algorithm, epochs=2, kl_coef=0.1)
    batch = batch_of([group(1, [0.0, 1.0])], algorithm=algorithm)
    for sample in batch.samples:
        assert len(sample.logprobs) == sum(sample.loss_mask)  # no element is left for a placeholder
    metrics = RLLearner(tiny_model(), settings, 1.0).learn(batch, 0)
    assert all(math.isfinite(value) for value in metrics.values())
    for sample in batch.samples:
        for name in ("logprobs", "old_logprobs", "reference_logprobs", "advantages"):
            assert len(getattr(sample, name)) == sum(sample.loss_mask)
    batch.samples[0].loss_mask = [False] + [True] * (len(batch.samples[0].loss_mask) - 1)  # an inconsistent mask
    with pytest.raises(ValueError, match="trained tokens need as many logprobs"):
        RLLearner(tiny_model(), settings, 1.0).learn(batch, 0)


def test_mistake_11_no_code_evaluates_model_output() -> None:
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), f"{path}:{node.lineno} calls {node.func.id}"


def test_mistake_11_every_error_has_its_own_http_status() -> None:
    with server_in_thread({"counting": Counting}) as server, httpx.Client(base_url=server.url) as http:
        assert http.post("/step", json={"id": 99, "action": "up"}).status_code == 404
        assert http.post("/reset", json={"data_idx": "x"}).status_code == 422
        session = http.post("/create", json={}).json()["id"]
        assert http.post("/step", json={"id": session, "action": "up"}).status_code == 409


async def test_mistake_11_every_metric_is_documented() -> None:
    defined = (ROOT / "docs" / "reference" / "run-directory.md").read_text(encoding="utf-8")
    settings = replace(SETTINGS, algorithm="ppo", kl_coef=0.1, steps=1, groups_per_step=1, group_size=2)
    rows: list[dict[str, float | str]] = []

    async def collect(tasks: list[Task], limits: Limits, seed: int) -> list[Group]:
        return [Group(task, group(task.item, [0.0, 1.0]).trajectories) for task in tasks]

    async def nothing(number: int) -> None: ...

    horizon = make_horizon(HorizonSettings(turns=(4,)))
    state = RLState(TaskSource({"toy": [1]}, 0), {"toy": horizon})
    hooks = Hooks(lambda *_: None, lambda *_: None, lambda step, row: rows.append(row), nothing, nullcontext)
    learner = RLLearner(tiny_model(), settings, 1.0)
    await train_rl(state, learner, collect, nothing, {"toy": LIMITS}, settings, hooks, 0)
    names = {re.sub(r"turn_\d.*", "turn_K", name).replace("horizon/toy", "horizon/<env>") for name in rows[0]}
    assert {"value/loss", "kl/reference", "staleness/max", "entropy/turn_K", "time/step_s"} <= names
    assert [name for name in sorted(names) if f"`{name}`" not in defined] == []


@pytest.mark.parametrize("name", ["textcraft", "babyai"])
def test_mistake_12_train_and_test_share_no_item(name: str) -> None:
    splits = catalog.load(name).splits
    seen: set[int] = set()
    for items in splits.values():
        assert not seen & set(items)
        seen |= set(items)
    assert {"train", "test"} <= set(splits)


def test_mistake_12_items_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "import hashlib; from agentgym_rl.environment import catalog\n"
        "for name in ('textcraft', 'babyai'):\n"
        "    env = catalog.load(name)()\n"
        "    print(name, hashlib.sha256(''.join(env.reset(i) for i in range(40)).encode()).hexdigest())\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
