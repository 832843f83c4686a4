"""Trees of rollouts: from some turns of an episode several continuations are drawn. `rollout` plays every path.

A node is one whole turn. A branch is an episode of its own whose policy first repeats the replies it shares with its
parent, and whose session first repeats their steps. The session continues from a copy of the environment if there is
one. Otherwise it plays the shared replies again and checks that it reaches the same states. The first branch of a
path continues in its session of the engine, whose cache holds the prefix.

Tree-GRPO: Ji et al. 2025 (arXiv 2509.21240).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from agentgym_rl.agent.collect import Collector, together
from agentgym_rl.agent.policy import EnginePolicy, Policy, Reply
from agentgym_rl.agent.session_wrapper import ForkableSession, SessionWrapper
from agentgym_rl.common.seeds import stable_seed
from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.types import (
    EnvSession,
    Group,
    Limits,
    Message,
    Observation,
    Step,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
)


@dataclass(frozen=True, slots=True)
class Branching:
    """Shape of the trees of a group. `training.settings.TreeSettings` documents the fields."""

    roots: int
    branches: int
    depth: int
    branch: Literal["random", "entropy", "anchor"] = "random"
    max_tokens: int = 0
    max_env_steps: int = 0


@dataclass(slots=True)
class Path:
    """An episode of a tree, with what its branches need."""

    trajectory: Trajectory
    steps: list[Step]
    """K + 1: the answers to reset and to every reply; K if the last step failed or the last reply was cut."""
    copies: list[object | None]
    """One per step: a copy of the environment after it, or None."""
    policy: Policy | None = None
    """Its policy, if a branch can take over its session of the engine."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A place to draw continuations from."""

    path: Path
    turn: int
    """Turn that is sampled again. All turns before it are shared."""

    @property
    def copy(self) -> object | None:
        """A copy of the environment in the state of that turn, or None if the shared replies must be played again."""
        return self.path.copies[self.turn]


class TreeSession(SessionWrapper):
    """A session that keeps its steps and, on a branch, starts with those of the parent."""

    def __init__(self, env: EnvSession, branch: Branch | None = None) -> None:
        super().__init__(env)
        self._branch = branch
        self.steps: list[Step] = []
        self.copies: list[object | None] = []

    async def reset(self, item: int) -> Step:
        self.steps, self.copies = [], []
        if self._branch is not None and self._branch.copy is not None:
            self.tools[:] = self._branch.path.trajectory.tools  # a reset would set those of the item
        return await self._next(lambda: self._env.reset(item))

    async def step(self, text: str) -> Step:
        return await self._next(lambda: self._env.step(text))

    async def call(self, calls: list[ToolCall], message: str = "") -> Step:
        return await self._next(lambda: self._env.call(calls, message))

    async def _next(self, play: Callable[[], Awaitable[Step]]) -> Step:
        turn, branch = len(self.steps), self._branch
        if branch is None or turn > branch.turn:
            step = await play()
        elif branch.copy is None:
            step = await play()
            self._check(step, branch.path.steps[turn], turn)
        else:
            step = branch.path.steps[turn]
            if turn == branch.turn:
                assert isinstance(self._env, ForkableSession)
                await self._env.resume(branch.copy)
        self.steps.append(step)
        # No path branches again at a turn that it shares, so those turns need no copy.
        shared = branch is not None and turn <= branch.turn
        self.copies.append(None if shared or step.done else await self._copy())
        return step

    async def _copy(self) -> object | None:
        return await self._env.fork() if isinstance(self._env, ForkableSession) else None

    def _check(self, step: Step, expected: Step, turn: int) -> None:
        """Compare a replayed step with the parent's: by `state_key` if the environment has one, else by the text."""
        got, wanted = (s.info.get("state_key", s.observation) for s in (step, expected))
        if got != wanted or step.done != expected.done:
            raise EnvError(
                f"{self.name} must be deterministic to be branched by replay: the same replies led to another state "
                f"at turn {turn + 1}, {got!r:.120} instead of {wanted!r:.120}. Give it a fork(), or remove [rl.tree]"
            )


class BranchPolicy:
    """A policy that repeats the shared replies of a branch before it answers itself.

    Repeated replies have ids and no log-probabilities, so a shared turn is trained on, and counted, in its parent only.
    """

    def __init__(self, policy: Policy, messages: Sequence[Message], turns: int) -> None:
        self._policy = policy
        self._shared: list[Reply] = []
        observation: list[Message] = []
        for message in messages:
            if len(self._shared) == turns:
                break
            message = replace(message, logprobs=None)
            if message.is_reply:
                self._shared.append(Reply(observation, message))
                observation = []
            else:
                observation.append(message)

    async def reply(self, messages: list[Message], observation: Observation, limits: Limits) -> Reply:
        turn = sum(message.is_reply for message in messages)
        if turn < len(self._shared):
            return self._shared[turn]
        return await self._policy.reply(messages, observation, limits)

    def unanswered(self, messages: list[Message], observation: Observation, limits: Limits) -> list[Message]:
        return self._policy.unanswered(messages, observation, limits)

    async def close(self) -> None:
        await self._policy.close()


@dataclass(slots=True)
class _Tree:
    """One tree while it grows."""

    paths: list[Path] = field(default_factory=list)
    """Paths of episodes that did not fail, parents first."""
    used: set[tuple[str, int]] = field(default_factory=set)
    """(episode, turn) of places that were branched."""
    tokens: int = 0
    """Sampled tokens, failed attempts included."""
    env_steps: int = 0
    """Steps of the environment, with those that a replay repeated and without those that a copy saved."""

    def add(self, path: Path, *, forked: bool) -> None:
        trajectory = path.trajectory
        self.tokens += sum(len(m.token_ids) for m in trajectory.messages if m.logprobs is not None)
        self.env_steps += trajectory.num_turns - (trajectory.shared_turns if forked else 0)
        if trajectory.stop is not StopReason.ERROR:
            self.paths.append(path)

    def within(self, branching: Branching) -> bool:
        """Return whether the budgets allow another round."""
        tokens, env_steps = branching.max_tokens, branching.max_env_steps
        return not (0 < tokens <= self.tokens or 0 < env_steps <= self.env_steps)

    def candidates(self) -> list[Branch]:
        """Return the places that can be branched. The first turn is one only if there is no other."""
        branches = [
            Branch(path, turn)
            for path in self.paths
            for turn in range(path.trajectory.shared_turns + 1, path.trajectory.num_turns)
        ]
        branches = branches or [Branch(path, 0) for path in self.paths[:1] if path.trajectory.num_turns]
        return [branch for branch in branches if (branch.path.trajectory.id, branch.turn) not in self.used]


def choose(
    candidates: list[Branch], kind: Literal["random", "entropy", "anchor"], group: Sequence[Path], seed: int
) -> Branch:
    """Return the place to branch: any, the most uncertain reply, or the state that most turns of the group were in."""
    if kind == "random":
        return random.Random(seed).choice(candidates)
    if kind == "entropy":
        return max(candidates, key=_surprise)
    visits = Counter(
        state for path in group for state in _states(path.trajectory)[path.trajectory.shared_turns :] if state
    )
    if not visits:
        raise ConfigError(
            "rl.tree.branch = 'anchor' branches at states that several episodes were in, and this environment has no "
            "state_key(): use 'entropy' or 'random'"
        )
    return max(candidates, key=lambda b: (visits[_states(b.path.trajectory)[b.turn]], _surprise(b)))


def _states(trajectory: Trajectory) -> list[str]:
    return [str(info.get("state_key", "")) for info in trajectory.infos]


def _surprise(branch: Branch) -> float:
    """Return minus the mean log-probability of the turn's reply: the sampler's estimate of the entropy there."""
    reply = [m for m in branch.path.trajectory.messages if m.is_reply][branch.turn]
    return -sum(reply.logprobs or ()) / max(1, len(reply.logprobs or ()))


class TreeCollector(Collector):
    """Plays groups of trees instead of groups of independent episodes.

    All roots of a group are played first. Then each of `depth` rounds draws `branches` continuations from one turn of
    every tree. Seeds depend on the number in the group, so a group is the same however its episodes are scheduled.
    """

    def __init__(self, branching: Branching, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._branching = branching

    async def __call__(self, tasks: list[Task], limits: Limits, seed: int, first: int = 0) -> list[Group]:
        groups = await together(self._group(task, limits, seed, index) for index, task in enumerate(tasks, first))
        return [Group(task, trajectories) for task, trajectories in zip(tasks, groups, strict=True)]

    async def _group(self, task: Task, limits: Limits, seed: int, index: int) -> list[Trajectory]:
        shape, played = self._branching, []
        trees = [_Tree() for _ in range(shape.roots)]
        growing: list[tuple[_Tree, Branch | None]] = [(tree, None) for tree in trees]
        members = range(shape.roots)
        for number in range(shape.depth + 1):
            attempts = await together(
                self._grow(branch, task, limits, seed, index, member)
                for member, (_, branch) in zip(members, growing, strict=True)
            )
            # Added in the order of the group, not of endings, so that the choice of branches can be repeated.
            for (tree, branch), paths in zip(growing, attempts, strict=True):
                for path in paths:
                    tree.add(path, forked=branch is not None and branch.copy is not None)
                    played.append(path.trajectory)
            if number == shape.depth:
                break
            growing = []
            for position, tree in enumerate(trees):
                candidates = tree.candidates() if tree.within(shape) else []
                if candidates:
                    group = [path for other in trees for path in other.paths]
                    branch = choose(candidates, shape.branch, group, stable_seed(seed, index, position, number, "tree"))
                    tree.used.add((branch.path.trajectory.id, branch.turn))
                    growing += [(tree, branch)] * shape.branches
            members = range(members.stop, members.stop + len(growing))
        return played

    async def _grow(
        self, branch: Branch | None, task: Task, limits: Limits, seed: int, index: int, member: int
    ) -> list[Path]:
        """Play all attempts at one path."""
        sessions: list[TreeSession] = []
        policies: list[Policy] = []

        def start(env: EnvSession, policy: Policy) -> tuple[EnvSession, Policy]:
            sessions.append(TreeSession(env, branch))
            policies.append(policy)
            if branch is None:
                return sessions[-1], policy
            if isinstance(policy, EnginePolicy):
                policy.show_tools(branch.path.trajectory.tools)
                if isinstance(branch.path.policy, EnginePolicy):
                    policy.take_session(branch.path.policy)
                    branch.path.policy = None
            return sessions[-1], BranchPolicy(policy, branch.path.trajectory.messages, branch.turn)

        parent = ("", 0) if branch is None else (branch.path.trajectory.id, branch.turn)
        *failed, last = await self._play_attempts(task, limits, seed, index, member, start, parent)
        paths = [Path(trajectory, [], []) for trajectory in failed]  # never branched
        if not sessions:
            return [*paths, Path(last, [], [])]
        # A reply that was cut off may still be pending in its session.
        policy = policies[-1] if last.stop is not StopReason.TIMEOUT else None
        return [*paths, Path(last, sessions[-1].steps, sessions[-1].copies, policy)]
