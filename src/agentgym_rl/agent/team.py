"""Several agents in one episode: each role of a game has its own policy, messages, horizon and reward.

`rollout` plays every role, all of them at the same time. They share one session of the environment through a `World`,
and a role's session answers only when it is that role's turn again. So a role sees an ordinary environment.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from agentgym_rl.agent.collect import Collector, together
from agentgym_rl.agent.policy import Policy, PolicyFactory, Reply
from agentgym_rl.agent.rollout import rollout
from agentgym_rl.agent.session_wrapper import SessionWrapper
from agentgym_rl.agent.stages import EpisodeStage
from agentgym_rl.common.seeds import stable_seed
from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.types import (
    EPISODE_TIMEOUT,
    LEARNER,
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


@runtime_checkable
class SharedSession(Protocol):
    """A session of an environment with several roles. `info["role"]` of a step is the role whose turn it is."""

    roles: Mapping[str, str]
    """Instruction of each role, in the order of play."""


def roles_of(session: EnvSession) -> Mapping[str, str]:
    """Return the instruction of each role, or nothing if the environment has a single agent."""
    return session.roles if isinstance(session, SharedSession) else {}


@dataclass(frozen=True, slots=True)
class Player:
    """The policy of a role."""

    name: str
    """LEARNER, or the name of a policy that is not trained."""
    make_policy: PolicyFactory
    max_turns: int | None = None
    """Replies of the role per episode, if fewer than the horizon's."""
    wrap: Callable[[EnvSession], EnvSession] | None = None
    """Wrapper of the player's session, if not the one of the other players."""


Cast = Callable[[int, int], Mapping[str, Player]]
"""(seed of the call, index of the task) -> the player of each role. All episodes of a group have the same players."""


class World:
    """One running game. A role that has no more turns is silent: the empty action is played for it."""

    def __init__(self, env: EnvSession, roles: Mapping[str, Any]) -> None:
        self._env = env
        self._changed = asyncio.Condition()
        self._step: Step | None = None
        self._role = ""
        """Role whose turn it is."""
        self._active = set(roles)
        """Roles that still act themselves."""
        self.unpaid = dict.fromkeys(roles, 0.0)
        """Rewards that a role's session has not returned yet."""
        self.paid = dict.fromkeys(roles, 0.0)
        """All rewards of a role."""
        self.moves: list[tuple[str, str]] = []
        """(role, action) of every move, in order."""
        self._error = ""
        """Reason why the game cannot continue, or an empty string."""

    async def reset(self, item: int) -> None:
        """Start the game, unless another role did."""
        async with self._changed:
            if self._step is None and not self._error:
                await self._play("", self._env.reset(item))

    async def act(self, role: str, action: str, *, last: bool) -> dict[str, Any]:
        """Play a role's action and return the environment's info on it. After the `last` one the role is silent."""
        async with self._changed:
            self._require_running()
            if role != self._role:
                raise EnvError(f"{role} acts, but it is {self._role or 'nobody'}'s turn")
            self.moves.append((role, action))
            if last:
                self._active.discard(role)
            return await self._play(role, self._env.step(action))

    async def retire(self, role: str) -> None:
        """Make a role silent from now on, because its reply was cut."""
        async with self._changed:
            self._active.discard(role)
            await self._play(role)

    async def fail(self, reason: str) -> None:
        """End the game for every role."""
        async with self._changed:
            self._error = self._error or reason
            self._changed.notify_all()

    async def wait(self, role: str, *, until_end: bool) -> Step:
        """Return the state when it is the role's turn, or at the end, with its rewards since the last call."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._error or self._over or (not until_end and self._role == role))
            if not self._over:
                self._require_running()
            assert self._step is not None
            reward, self.unpaid[role] = self.unpaid[role], 0.0
            info = {key: value for key, value in self._step.info.items() if key == "state_key"}
            return Step(self._step.observation, reward, self._step.done, info)

    @property
    def _over(self) -> bool:
        """Whether nothing happens any more: the game has ended, or no role acts."""
        return self._step is not None and (self._step.done or not self._active)

    def _require_running(self) -> None:
        if self._error:
            raise EnvError(f"the game cannot continue: {self._error}")

    async def _play(self, role: str, answer: Awaitable[Step] | None = None) -> dict[str, Any]:
        """Keep the answer to a role's action, then play silent roles. Return the info on the action."""
        info: dict[str, Any] = {}
        try:
            if answer is not None:
                info = self._keep(role, await answer)
            while not self._over and self._role not in self._active:
                self.moves.append((self._role, ""))
                self._keep(self._role, await self._env.step(""))
        except Exception as error:
            # A cancellation is no failure of the game: it is the deadline, which the other roles have as well.
            self._error = self._error or f"{type(error).__name__}: {error}"
            raise
        finally:
            self._changed.notify_all()
        return info

    def _keep(self, role: str, step: Step) -> dict[str, Any]:
        """Make a step the present state, and credit its rewards. Return its info, without what is not the role's."""
        info = dict(step.info)
        turn, rewards = info.pop("role", None), info.pop("rewards", {role: step.reward} if role else {})
        info.pop("state_key", None)
        info.pop("success", None)  # of the role that moved last; a role's own success follows from its reward
        if not step.done and turn not in self.unpaid:
            wanted = ", ".join(self.unpaid)
            raise EnvError(f"{self._env.name} must name the role whose turn it is, one of {wanted}, got {turn!r:.60}")
        known = isinstance(rewards, dict) and set(rewards) <= set(self.unpaid)
        if not known or not all(isinstance(r, int | float) and math.isfinite(r) for r in rewards.values()):
            raise EnvError(f"{self._env.name} needs info['rewards'] = {{role: reward}}, got {rewards!r:.120}")
        for name, reward in rewards.items():
            self.unpaid[name] += reward
            self.paid[name] += reward
        self._step, self._role = step, "" if step.done else turn
        return info


class RoleSession(SessionWrapper):
    """The game as one role sees it: its step returns when it is the role's turn again, or at the end."""

    def __init__(self, world: World, env: EnvSession, role: str, max_turns: int) -> None:
        super().__init__(env)
        self.instruction, self.tools = roles_of(env)[role], []
        self._world, self._role = world, role
        self._turns_left = max_turns

    async def reset(self, item: int) -> Step:
        await self._world.reset(item)
        return await self._world.wait(self._role, until_end=False)

    async def step(self, text: str) -> Step:
        self._turns_left -= 1
        last = self._turns_left == 0
        info = await self._world.act(self._role, text, last=last)
        step = await self._world.wait(self._role, until_end=last)
        step.info |= info
        return step

    async def call(self, calls: list[ToolCall], message: str = "") -> Step:
        raise EnvError(f"{self.name} has several roles, which act by text: use a style other than 'tool'")

    def call_of(self, action: str) -> ToolCall | None:
        return None

    async def close(self) -> None:
        """Do nothing: the owner of the game closes its session."""


class PlayerPolicy:
    """The policy of one role. It tells the others when it can no longer play."""

    def __init__(self, policy: Policy, world: World, role: str, *, trained: bool) -> None:
        self._policy, self._world, self._role, self._trained = policy, world, role, trained

    async def reply(self, messages: list[Message], observation: Observation, limits: Limits) -> Reply:
        try:
            reply = await self._policy.reply(messages, observation, limits)
        except Exception as error:
            await self._world.fail(f"{self._role} failed with {type(error).__name__}: {error}")
            raise
        if reply.action is None or reply.finish != "stop":
            await self._world.retire(self._role)
        if self._trained or reply.action is None:
            return reply
        # Without log-probabilities a reply is neither trained on nor counted as sampled by the learner.
        untrained = [replace(m, logprobs=None, version=None, versions=[]) for m in (*reply.observation, reply.action)]
        return Reply(untrained[:-1], untrained[-1], reply.finish)

    def unanswered(self, messages: list[Message], observation: Observation, limits: Limits) -> list[Message]:
        return self._policy.unanswered(messages, observation, limits)

    async def close(self) -> None:
        await self._policy.close()


def new_world(env: EnvSession, players: Mapping[str, Player]) -> World:
    """Return a game that has not been started. Raise ConfigError if the players are not those of its roles."""
    if set(players) != set(roles_of(env)):
        wanted = ", ".join(roles_of(env)) or "none"
        raise ConfigError(f"{env.name} has the roles {wanted}, players were given for {', '.join(players) or 'none'}")
    return World(env, players)


async def play_team(
    task: Task,
    env: EnvSession,
    players: Mapping[str, Player],
    limits: Limits,
    *,
    ids: Mapping[str, str],
    seed: int,
    wrap: Callable[[EnvSession], EnvSession] = lambda session: session,
    timeout_s: float | None = None,
    truncate: bool = False,
    world: World | None = None,
) -> list[Trajectory]:
    """Play one game and return one episode per role. `ids` are those of the episodes, by role.

    If a role fails, the episodes of all roles end as ERROR. The caller closes `env`. `world` is the game, if it has
    been started already.
    """
    world = world or new_world(env, players)

    async def play(role: str, player: Player) -> Trajectory:
        turns = min(limits.max_turns, player.max_turns or limits.max_turns)
        session = (player.wrap or wrap)(RoleSession(world, env, role, turns))
        trained = player.name == LEARNER
        policy = PlayerPolicy(player.make_policy(session, stable_seed(seed, role)), world, role, trained=trained)
        own = replace(limits, max_turns=turns)
        episode = await rollout(task, session, policy, own, id=ids[role], timeout_s=timeout_s, truncate=truncate)
        if episode.stop is StopReason.ERROR:  # the others must not wait for its next move until the deadline
            await world.fail(f"{role} failed with {episode.error}")
        return episode

    episodes = await together(play(role, player) for role, player in players.items())
    failed = next((role for role, t in zip(players, episodes, strict=True) if t.stop is StopReason.ERROR), None)
    for (role, player), trajectory in zip(players.items(), episodes, strict=True):
        trajectory.role, trajectory.player = role, player.name
        if failed is not None and trajectory.stop is not StopReason.ERROR:
            trajectory.stop, trajectory.error = StopReason.ERROR, f"EnvError: the episode of {failed} failed"
        if trajectory.rewards:  # what a role earned after its last reply, if that was cut
            trajectory.rewards[-1] += world.unpaid[role]
        else:
            trajectory.passive_reward = world.paid[role]
        _add_moves(trajectory, world.moves)
    return episodes


def _add_moves(trajectory: Trajectory, moves: list[tuple[str, str]]) -> None:
    """Record the moves of other roles in the infos: `before` the first reply, and `after` each."""
    own = [i for i, (role, _) in enumerate(moves) if role == trajectory.role][: trajectory.num_turns]
    for k, (start, end) in enumerate(zip(own, [*own, len(moves)][1:], strict=True)):
        if end > start + 1:
            trajectory.infos[k]["after"] = [list(move) for move in moves[start + 1 : end]]
    if own and own[0]:
        trajectory.infos[0]["before"] = [list(move) for move in moves[: own[0]]]


class TeamCollector(Collector):
    """Plays games of several roles. A task has one group per role, so that each is compared with its own kind.

    With `measured`, a task has one group only: that of the first role that the learner plays.
    """

    def __init__(self, cast: Cast, *arguments: Any, measured: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._cast, self._measured = cast, measured

    async def __call__(self, tasks: list[Task], limits: Limits, seed: int, first: int = 0) -> list[Group]:
        size = self._group_size
        casts = [self._cast(seed, index) for index in range(first, first + len(tasks))]
        games = await together(
            self._play_games(task, limits, seed, index, member, players)
            for index, (task, players) in enumerate(zip(tasks, casts, strict=True), first)
            for member in range(size)
        )
        groups: list[Group] = []
        for i, (task, players) in enumerate(zip(tasks, casts, strict=True)):
            played = [t for attempts in games[i * size : (i + 1) * size] for t in attempts]
            groups += [Group(task, [t for t in played if t.role == role]) for role in self._kept_roles(players)]
        return groups

    def _kept_roles(self, players: Mapping[str, Player]) -> list[str]:
        return [measured_role(players)] if self._measured else list(players)

    async def _play_games(
        self, task: Task, limits: Limits, seed: int, index: int, member: int, players: Mapping[str, Player]
    ) -> list[Trajectory]:
        """Play all attempts at one game of a group, and return the episodes of the roles that are kept."""

        async def play(stage: EpisodeStage, attempt: int) -> list[Trajectory]:
            ids = {role: f"{self.prefix}{seed}-{index}-{role}-{member}-{attempt}" for role in players}
            game = await self._game(
                task, limits, players, stage, ids=ids, seed=stable_seed(seed, index, member, attempt)
            )
            # A failed game has failed for every role, so the others need not be looked at.
            return [trajectory for trajectory in game if trajectory.role in self._kept_roles(players)]

        return await self._attempt(task, play)

    async def _game(
        self,
        task: Task,
        limits: Limits,
        players: Mapping[str, Player],
        stage: EpisodeStage,
        *,
        ids: Mapping[str, str],
        seed: int,
    ) -> list[Trajectory]:
        def failed(error: str) -> list[Trajectory]:
            return [
                Trajectory(ids[role], task, stop=StopReason.ERROR, error=error, role=role, player=player.name)
                for role, player in players.items()
            ]

        session = await self._open(task)
        if isinstance(session, str):
            return failed(session)
        try:
            world = new_world(session, players)
            try:
                # Before a slot to play is taken: a slow reset must not keep another game from the engine.
                async with asyncio.timeout(self._episode_timeout_s) as deadline:
                    await world.reset(task.item)
            except Exception as error:
                late = isinstance(error, TimeoutError) and deadline.expired()
                reason = f"{EPISODE_TIMEOUT}: the reset did not end within {self._episode_timeout_s:g} s"
                return failed(reason if late else f"{type(error).__name__}: {error}")
            if (waiting := stage.play()) is not None:
                await waiting
            return await play_team(
                task,
                session,
                players,
                limits,
                ids=ids,
                seed=seed,
                wrap=self._wrap or (lambda session: session),
                timeout_s=self._episode_timeout_s,
                truncate=self._truncate,
                world=world,
            )
        finally:
            stage.leave()
            await self._close(session)


def measured_role(players: Mapping[str, Player]) -> str:
    """Return the first role that the learner plays; without one, the first role."""
    return next((role for role, player in players.items() if player.name == LEARNER), next(iter(players)))
