"""Trees of rollouts: shared prefixes, forks, replays, where to branch, budgets, and what is trained on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch
from envs_for_tests import Counting
from scripted_engine_for_tests import ScriptedEngine
from servers_for_tests import server_in_thread
from tokenizers_for_tests import byte_level_bpe
from transformers import LlamaConfig, LlamaForCausalLM

from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.agent.policy import EnginePolicy
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.rollout import rollout
from agentgym_rl.agent.trees import Branch, Branching, Path, TreeCollector, choose
from agentgym_rl.common.seeds import stable_seed
from agentgym_rl.environment import catalog
from agentgym_rl.environment.pool import LocalPool, RemotePool
from agentgym_rl.environment.session import fork_env
from agentgym_rl.errors import ConfigError
from agentgym_rl.training.advantages import ESTIMATORS, Episode
from agentgym_rl.training.batch import estimate, gather, to_samples
from agentgym_rl.training.settings import RLSettings, TreeSettings
from agentgym_rl.types import (
    Completion,
    EnvSession,
    Group,
    Limits,
    Message,
    Sampling,
    Step,
    StopReason,
    Task,
    Trajectory,
)

LIMITS = Limits(max_turns=6, max_new_tokens=16, max_context=4000)
TASKS = [Task("counting", 3), Task("counting", 4)]
RENDERER = Renderer(byte_level_bpe("chatml"), "chatml")


class SeededEngine:
    """Says up or down, by the seed of the call alone, and counts the tokens it sampled."""

    version = 0

    def __init__(self, words: Sequence[str] = ("up", "up", "down")) -> None:
        self.words, self.sampled = words, 0

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        chance = random.Random(sampling.seed)
        token_ids = RENDERER.reply_ids(chance.choice(self.words))
        self.sampled += len(token_ids)
        return Completion(token_ids, [-chance.random() for _ in token_ids], "stop", 0)

    async def release(self, session: str) -> None: ...


class OneToken(SeededEngine):
    """A native engine whose replies are a token each."""

    def __init__(self, engine: NativeEngine) -> None:
        super().__init__()
        self.engine = engine

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        completion = await self.engine.generate(prompt_ids, replace(sampling, max_new_tokens=1), session)
        return replace(completion, finish="stop")

    async def release(self, session: str) -> None:
        await self.engine.release(session)


class Unending(Counting):
    """Goes on whatever is said."""

    num_alive: ClassVar[int] = 0

    def step(self, text: str) -> Step:
        return replace(super().step(text), done=False)


class NotCopied(Counting):
    """Cannot be copied, so its branches are played again from the start."""

    num_alive: ClassVar[int] = 0
    num_steps: ClassVar[int] = 0

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("it holds a connection")

    def step(self, text: str) -> Step:
        type(self).num_steps += 1
        return super().step(text)


class Random(NotCopied):
    """Not deterministic: its state depends on how many games were opened before."""

    num_alive: ClassVar[int] = 0
    num_opened: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).num_opened += 1
        self.number = self.num_opened

    def state_key(self) -> str:
        return f"{self.number}: {self.count}"


async def play(
    branching: Branching,
    env: type = Counting,
    engine: SeededEngine | None = None,
    limits: Limits = LIMITS,
    pool: RemotePool | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> list[Group]:
    pool = pool or LocalPool({"counting": env})  # type: ignore[assignment]
    engine = engine or SeededEngine()

    def policy(session: EnvSession, seed: int) -> EnginePolicy:
        return EnginePolicy(engine, RENDERER, Sampling(1, seed=seed), instruction=session.instruction)  # type: ignore[arg-type]

    collect = TreeCollector(branching, pool, policy, branching.roots, 4, prefix="train-", **options)
    groups = await collect(TASKS, limits, 7)
    assert pool.num_open == 0
    await pool.close()
    return groups


def lines(groups: list[Group]) -> list[str]:
    return [replace(t, seconds=0.0).to_json() for group in groups for t in group.trajectories]


async def test_branches_share_the_turns_of_their_parents() -> None:
    groups = await play(Branching(roots=2, branches=3, depth=2))
    for group in groups:
        by_id = {t.id: t for t in group.trajectories}
        assert len(by_id) == 2 * (1 + 3 * 2)
        branches = [t for t in group.trajectories if t.parent]
        assert len(branches) == 12
        assert any(by_id[t.parent].parent for g in groups for t in g.trajectories if t.parent in by_id and t.parent)
        for branch in branches:
            parent = by_id[branch.parent]
            replies = [[m for m in t.messages if m.is_reply] for t in (parent, branch)]
            assert 0 <= branch.shared_turns < parent.num_turns
            for kept, shared in zip(*(r[: branch.shared_turns] for r in replies), strict=True):
                assert (kept.token_ids, kept.content) == (shared.token_ids, shared.content)
                assert shared.logprobs is None
            assert all(m.logprobs is not None for m in replies[1][branch.shared_turns :])
            assert branch.rewards[: branch.shared_turns] == parent.rewards[: branch.shared_turns]
            assert branch.num_turns <= LIMITS.max_turns


def tiny_player() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(RENDERER.tokenizer), **sizes)).eval()


async def test_a_branch_finds_its_prefix_in_the_native_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_player()
    played, computed = [], []
    for shared in (True, False):
        if not shared:
            monkeypatch.setattr(EnginePolicy, "take_session", lambda *_: None)
        engine = OneToken(NativeEngine(model, max_sessions=16))
        played.append(await play(Branching(roots=3, branches=1, depth=1), Unending, engine))
        computed.append(engine.engine.stats()["prompt_tokens_computed"])
        assert engine.engine.stats()["sessions"] == 0
        await engine.engine.close()
    assert lines(played[0]) == lines(played[1])
    branches = [t for group in played[0] for t in group.trajectories if t.parent]
    shared_tokens = [
        sum(len(m.token_ids) for m in takewhile(lambda m: m.logprobs is None, branch.messages)) for branch in branches
    ]
    assert len(branches) == 6
    assert computed[1] - computed[0] == sum(shared_tokens) - len(branches), "the last token is computed for its logits"


class Hanging(SeededEngine):
    """Answers each session twice, and then never."""

    def __init__(self) -> None:
        super().__init__(("up",))
        self.asked: list[str] = []

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        self.asked.append(session)
        if self.asked.count(session) > 2:
            await asyncio.Event().wait()
        return await super().generate(prompt_ids, sampling, session)


async def test_no_branch_takes_a_session_with_a_pending_reply() -> None:
    engine = Hanging()
    options = {"episode_timeout_s": 1.5, "on_timeout": "truncate"}
    groups = await play(Branching(roots=2, branches=1, depth=1), Unending, engine, options=options)
    played = [t for group in groups for t in group.trajectories]
    assert {t.stop for t in played} == {StopReason.TIMEOUT}
    assert any(t.parent for t in played)
    assert max(engine.asked.count(session) for session in engine.asked) <= 3, "nobody asks where a reply is pending"


async def test_a_path_has_the_prompts_that_a_chain_would_have() -> None:
    """Play the replies of every path as a chain: messages, rewards and endings are the same, without any tree."""
    groups = await play(Branching(roots=1, branches=2, depth=2))
    for path in (t for group in groups for t in group.trajectories if t.parent):
        engine = ScriptedEngine([m.token_ids for m in path.messages if m.is_reply])
        session = await LocalPool({"counting": Counting}).open("counting")
        policy = EnginePolicy(engine, RENDERER, Sampling(1), instruction=session.instruction)
        chain = await rollout(path.task, session, policy, LIMITS, id="chain")
        await session.close()
        assert [(m.role, m.content, m.token_ids) for m in chain.messages] == [
            (m.role, m.content, m.token_ids) for m in path.messages
        ]
        assert (chain.rewards, chain.stop, chain.infos) == (path.rewards, path.stop, path.infos)


async def test_sampled_tokens_are_counted_and_trained_once() -> None:
    engine = SeededEngine()
    groups = await play(Branching(roots=2, branches=2, depth=2), engine=engine)
    trajectories = [t for group in groups for t in group.trajectories]
    assert any(t.shared_turns for t in trajectories)
    trained = [s for t in trajectories for s in to_samples(t)]
    assert sum(sum(s.loss_mask) for s in trained) == engine.sampled
    batch = estimate(gather(groups, SETTINGS), SETTINGS)
    assert sum(len(s.advantages) for s in batch.samples) == engine.sampled


async def test_replay_and_fork_give_the_same_trees() -> None:
    NotCopied.num_steps = 0
    shape = Branching(roots=2, branches=2, depth=2)
    forked, replayed = await play(shape), await play(shape, NotCopied)
    assert lines(forked) == lines(replayed)
    assert NotCopied.num_steps == sum(t.num_turns for group in replayed for t in group.trajectories)


class SharedState(Counting):
    """Its fork shares the state with the original."""

    num_alive: ClassVar[int] = 0
    num_steps = 0

    def step(self, text: str) -> Step:
        self.num_steps += 1
        return super().step(text)

    def state_key(self) -> str:
        return f"{self.count} after {self.num_steps} steps"

    def fork(self) -> SharedState:
        return self


async def test_a_fork_that_later_steps_change_is_an_error() -> None:
    groups = await play(Branching(roots=1, branches=1, depth=1), SharedState, options={"retries": 0})
    roots = [group.trajectories[0] for group in groups]
    branches = [t for group in groups for t in group.trajectories if t.parent]
    assert branches
    assert StopReason.ERROR not in {t.stop for t in roots}
    assert all("fork() must return a copy that later steps do not change" in (t.error or "") for t in branches)


async def test_trees_over_http_are_those_in_this_process() -> None:
    shape = Branching(roots=1, branches=2, depth=2)
    with server_in_thread({"counting": Counting}) as server:
        pool = RemotePool({"counting": f"{server.url}/counting"})
        assert lines(await play(shape, pool=pool)) == lines(await play(shape))


async def test_a_tree_is_the_same_again_and_another_with_another_shape() -> None:
    shape = Branching(roots=2, branches=2, depth=2)
    assert lines(await play(shape)) == lines(await play(shape))
    assert lines(await play(shape)) != lines(await play(replace(shape, branch="entropy")))


async def test_a_replay_that_reaches_another_state_is_an_error() -> None:
    groups = await play(Branching(roots=1, branches=1, depth=1), Random)
    for group in groups:
        (root,) = [t for t in group.trajectories if not t.parent]
        failed = [t for t in group.trajectories if t.parent]
        assert root.stop is not StopReason.ERROR
        assert len(failed) == 2, "one retry"
        assert all("must be deterministic to be branched by replay" in str(t.error) for t in failed)


async def test_budgets_end_the_growth_of_a_tree() -> None:
    whole = await play(Branching(roots=1, branches=2, depth=4))
    for budget in ({"max_tokens": 1}, {"max_env_steps": 1}):
        assert [len(g.trajectories) for g in await play(Branching(1, 2, 4, **budget))] == [1, 1]  # type: ignore[arg-type]
    limited = await play(Branching(roots=1, branches=2, depth=4, max_env_steps=10))
    assert [1 < len(a.trajectories) < len(b.trajectories) for a, b in zip(limited, whole, strict=True)] == [True, True]


async def test_the_horizon_bounds_every_path() -> None:
    groups = await play(Branching(2, 2, 3), limits=replace(LIMITS, max_turns=2))
    assert {t.num_turns for group in groups for t in group.trajectories} == {2}


def path_of(name: str, states: list[str], logprobs: list[float]) -> Path:
    messages = [m for p in logprobs for m in (Message("user", ""), Message("assistant", "", [1], [p]))]
    infos = [{"state_key": state} for state in states]
    return Path(Trajectory(name, TASKS[0], messages, [0.0] * len(states), infos, StopReason.DONE), [], [])


def test_a_branch_is_drawn_where_the_setting_says() -> None:
    first = path_of("a", ["s", "x", "y", "z"], [-3.0, -0.5, -2.0, -1.0])
    second = path_of("b", ["s", "z", "q"], [-0.1, -0.1, -0.1])
    candidates = [Branch(first, turn) for turn in (1, 2, 3)]
    assert choose(candidates, "entropy", [first, second], 0).turn == 2
    assert choose(candidates, "anchor", [first, second], 0).turn == 3
    assert {choose(candidates, "random", [first], stable_seed(n)).turn for n in range(20)} == {1, 2, 3}
    without = path_of("c", ["", ""], [-1.0, -1.0])
    with pytest.raises(ConfigError, match="has no state_key"):
        choose([Branch(without, 1)], "anchor", [without], 0)


SETTINGS = RLSettings(tree=TreeSettings(), normalize_std=False, zero_variance="keep", kl_coef=0.0)


def episode(rewards: list[float], sampled_by: str) -> Episode:
    lengths = [int(name == sampled_by[-1]) for name in sampled_by]
    return Episode(0, rewards, lengths, sampled_by=list(sampled_by))


def test_advantages_of_a_tree_are_those_worked_out_by_hand() -> None:
    """Two trees: a has a branch b from its second turn, and c stands alone."""
    episodes = [episode([0, 1], "aa"), episode([0, 0], "ab"), episode([0, 0], "cc")]
    (a, b, c) = ESTIMATORS["grpo"](episodes, SETTINGS).advantages
    mean = 1 / 3
    # Within its tree a is 1/2 above the mean and b 1/2 below. Their shared turn gets the mean of both.
    assert a == pytest.approx([((1 - mean + 1 / 2) + (-mean - 1 / 2)) / 2, 1 - mean + 1 / 2])
    assert b == pytest.approx([-mean - 1 / 2])
    assert c == pytest.approx([-mean, -mean])
    (a, b) = ESTIMATORS["grpo"](episodes[:2], SETTINGS).advantages
    assert (a, b) == ([0.0, 0.5], [-0.5])


def test_a_tree_refuses_settings_that_it_cannot_use() -> None:
    for wrong in ({"algorithm": "ppo"}, {"kl_in": "reward"}, {"keep_groups": 0.0}, {"keep_groups": 1.5}):
        with pytest.raises(ValueError, match=r"tree|keep_groups"):
            RLSettings(tree=TreeSettings(), **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="branches must be at least 1"):
        TreeSettings(branches=0)


async def test_a_branch_is_written_with_its_parent_and_old_files_load() -> None:
    groups = await play(Branching(1, 1, 1))
    branch = groups[0].trajectories[-1]
    read = Trajectory.from_json(branch.to_json())
    assert (read.parent, read.shared_turns) == (branch.parent, branch.shared_turns)
    assert (read.parent, read.shared_turns > 0) == (groups[0].trajectories[0].id, True)
    old = groups[0].trajectories[0].to_json()
    assert '"parent"' not in old
    assert Trajectory.from_json(old).parent == ""


@pytest.mark.parametrize("name", ["keydoor", "textcraft", "searchqa", "maze", "wordle", "webshop", "alfworld"])
def test_a_forked_environment_is_independent(name: str) -> None:
    env: Any = catalog.load(name)()
    env.reset(next(iter(env.splits["train"])))
    env.step(env.oracle())
    key = env.state_key()
    copy: Any = fork_env(env)
    assert copy is not None
    assert copy.state_key() == key
    solutions = []
    for played in (copy, env):
        steps = [played.step(played.oracle())]
        while not steps[-1].done:
            steps.append(played.step(played.oracle()))
        solutions.append(steps)
        if played is copy:
            assert env.state_key() == key, "playing the copy changes nothing"
    assert solutions[0] == solutions[1]
