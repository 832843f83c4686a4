"""The players of a game of several roles: the learner, its past, frozen models, APIs and scripts."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentgym_rl.agent.engines.openai import ChatClient
from agentgym_rl.agent.policy import ChatPolicy, Policy, PolicyFactory
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.team import Cast, Player
from agentgym_rl.common.import_paths import import_named
from agentgym_rl.common.seeds import stable_seed
from agentgym_rl.config import AgentConfig, Config, ModelConfig, TeamConfig
from agentgym_rl.errors import ConfigError, EngineError
from agentgym_rl.run.collectors import demonstrators, engine_policies, session_wrapper
from agentgym_rl.run.load_model import load_from, load_frozen
from agentgym_rl.training.locate_model import folder_of
from agentgym_rl.types import LEARNER, EnvSession, Group, Sampling, StopReason, Trajectory

ADAPTERS = "adapters"
"""Policy of a role with adapters of its own, which are trained: its player is the learner."""
START_RATING = 1000.0
"""Rating of the learner at the start of a run, and of every player that is no snapshot."""
RATING_STEP = 4.0
"""Points of a game between equals: half of them are won or lost (Elo's K)."""
SNAPSHOT = "past@"
"""Start of the name of a player that is a snapshot of the learner. Its step follows."""


class Frozen:
    """A model that plays and does not learn, behind an engine of its own."""

    def __init__(
        self, model: Any, tokenizer: Any, chat_template: str | None, agent: AgentConfig, max_context: int
    ) -> None:
        from agentgym_rl.agent.engines.native import NativeEngine

        self._agent = agent
        self._renderer = Renderer(tokenizer, chat_template, thoughts=agent.thoughts)
        self._engine = NativeEngine(
            model, decode=self._renderer.decode, max_sessions=agent.concurrency, max_context=max_context
        )

    def policies(self, temperature: float) -> PolicyFactory:
        return engine_policies(self._engine, self._renderer, self._agent, temperature)

    async def close(self) -> None:
        await self._engine.close()


class League:
    """Snapshots of the learner in a folder, one per `every` steps, and the learner's Elo rating against them.

    A snapshot keeps the rating that the learner had when it was taken. Games that end after its folder is deleted are
    rated with it, too.
    """

    def __init__(self, root: Path, size: int, every: int, export: Callable[[Path], None]) -> None:
        self._root, self._size, self._every, self._export = root, size, every, export
        self.ratings = {LEARNER: START_RATING}
        self.known: Sequence[int] | None = None
        """Steps of the snapshots, if another process takes them; None if they are listed from the folder."""

    @property
    def steps(self) -> list[int]:
        """Steps after which the snapshots were taken, ascending."""
        if self.known is not None:
            return list(self.known)
        return sorted(int(path.name.rpartition("_")[2]) for path in self._root.glob("step_*"))

    def folder(self, step: int) -> Path:
        return self._root / f"step_{step:06d}"

    def add(self, step: int) -> None:
        """Take a snapshot if one is due after `step`. Once it is there, it is complete."""
        if not self._size or step % self._every or self.folder(step).exists():
            return
        temporary = self._root / f".step_{step:06d}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        self._export(temporary)
        temporary.rename(self.folder(step))
        self.ratings[snapshot_name(step)] = self.ratings[LEARNER]

    def restart(self) -> None:
        """Start the league of a new run with the model that it starts from."""
        self.restore(-1, {LEARNER: START_RATING})
        self.add(0)

    def choose(self, count: int, seed: int) -> int:
        """Return the step of one of the last `count` snapshots."""
        return random.Random(seed).choice(self.steps[-count:])

    def restore(self, step: int, ratings: Mapping[str, float]) -> None:
        """Return to the state after `step`, from which a run is resumed; before the first one, `step` is -1.

        Raise ConfigError if a snapshot is missing that players would be drawn from.
        """
        rated = sorted(int(name.partition("@")[2]) for name in ratings if name != LEARNER)
        missing = [s for s in rated[-max(1, self._size) :] if not self.folder(s).is_dir()]
        if missing:
            names = ", ".join(self.folder(s).name for s in missing)
            raise ConfigError(f"{self._root} must hold the snapshots that the run plays against; missing: {names}")
        for later in (s for s in self.steps if s > step):
            shutil.rmtree(self.folder(later))
        self.ratings = dict(ratings)

    def prune(self, oldest_checkpoint: int) -> None:
        """Delete snapshots that no run needs which is resumed from any of its checkpoints."""
        for step in [s for s in self.steps if s <= oldest_checkpoint][: -self._size]:
            shutil.rmtree(self.folder(step))

    def observe(self, groups: Iterable[Group]) -> None:
        """Update the learner's rating with games against other players, in their order."""
        for learner, others in games_of(groups):
            for other in others:
                expected = 1.0 / (1.0 + 10 ** ((self._rating(other.player) - self.ratings[LEARNER]) / 400.0))
                score = 0.5 * (1 + (learner.reward > other.reward) - (learner.reward < other.reward))
                self.ratings[LEARNER] += RATING_STEP * (score - expected)

    def _rating(self, player: str) -> float:
        return self.ratings[player] if player.startswith(SNAPSHOT) else START_RATING

    def metrics(self) -> dict[str, float]:
        """Return the learner's rating; nothing if no role is played by the learner's past."""
        return {"elo/learner": self.ratings[LEARNER]} if self._size else {}


def snapshot_name(step: int) -> str:
    """Return the name of the player that is a snapshot of the learner."""
    return f"{SNAPSHOT}{step}"


def games_of(groups: Iterable[Group]) -> Sequence[tuple[Trajectory, list[Trajectory]]]:
    """Return (an episode of the learner, those of other players) of every game that did not fail."""
    games: dict[tuple[str, str, str], list[Trajectory]] = {}
    for trajectory in (t for group in groups for t in group.trajectories if t.stop is not StopReason.ERROR):
        head, member, attempt = trajectory.id.rsplit("-", 2)
        games.setdefault((head.removesuffix(f"-{trajectory.role}"), member, attempt), []).append(trajectory)
    return [
        (learner, [t for t in game if t.player != LEARNER])
        for game in games.values()
        for learner in [t for t in game if t.player == LEARNER][:1]
    ]


class Team:
    """The players of a run. `export` writes the learner's model to a folder."""

    def __init__(
        self,
        team: TeamConfig,
        agent: AgentConfig,
        model: ModelConfig,
        max_context: int,
        root: Path,
        export: Callable[[Path], None],
    ) -> None:
        self._team, self._agent, self._model, self._max_context = team, agent, model, max_context
        self.league = League(root, team.league_size, team.snapshot_every, export)
        self._frozen: dict[str, Frozen] = {}
        self._clients: dict[str, ChatClient] = {}
        self._counted: dict[str, tuple[int, int]] = {}
        """Answers and failures of each client at the last check."""

    def collector_options(
        self,
        learner: PolicyFactory,
        temperature: float,
        own: Mapping[str, PolicyFactory] | None = None,
        *,
        measured: bool,
    ) -> dict[str, Any]:
        """Return the options of a collector that plays with this team."""
        return {"cast": self.cast(learner, temperature, own or {}, evaluating=measured), "measured": measured}

    def cast(
        self, learner: PolicyFactory, temperature: float, own: Mapping[str, PolicyFactory], *, evaluating: bool
    ) -> Cast:
        """Return who plays which role in each group.

        `learner` makes the policies of the weights that roles share, and `own` those of each role's own adapters.
        """
        roles, agent = self._team.roles, self._agent.model_copy(update={"instruction": None})

        def choose(seed: int, index: int) -> Mapping[str, Player]:
            sources = list(roles.values())
            shift = (seed + index) % len(sources) if self._team.rotate else 0
            players: dict[str, Player] = {}
            for number, (role, settings) in enumerate(roles.items()):
                source = sources[(number + shift) % len(sources)]
                policy = (evaluating and source.eval_policy) or source.policy
                trained = own[role] if policy == ADAPTERS else learner
                drawn = stable_seed(seed, index, number, "league")
                name, make = self._player(policy, role, trained, temperature, drawn)
                # An API has not learned the game, so it gets the rules even if the recipe leaves them out.
                with_rules = session_wrapper(agent) if policy.startswith("openai:") else None
                players[role] = Player(name, make, settings.max_turns, with_rules)
            first = self._team.measure
            return {first: players[first], **players} if evaluating and first is not None else players

        return choose

    def _player(
        self, policy: str, role: str, learner: PolicyFactory, temperature: float, seed: int
    ) -> tuple[str, PolicyFactory]:
        kind, _, rest = policy.partition(":")
        if policy in (LEARNER, ADAPTERS):
            return LEARNER, learner
        if kind in ("oracle", "random"):
            return policy, demonstrators(policy)
        if kind == "scripted":
            return policy, scripted_policy(rest)
        if kind == "openai":
            return policy, self._chat(rest, temperature)
        name = snapshot_name(self.league.choose(int(rest), seed)) if kind == "past" else policy
        return name, self._load(name if kind == "past" else role_folder(rest, role)).policies(temperature)

    def _load(self, name: str) -> Frozen:
        """Return the engine of a snapshot, or of a model folder or hub name."""
        if name not in self._frozen:
            from agentgym_rl.training.learner import freeze

            kind, _, step = name.partition("@")
            settings = self._model
            if kind == "past" and step.isdigit():
                model, tokenizer = load_from(self.league.folder(int(step)), settings)
            else:
                model, tokenizer = load_frozen(name, "team.roles: checkpoint", settings)
            self._frozen[name] = Frozen(
                freeze(model), tokenizer, settings.chat_template, self._agent, self._max_context
            )
        return self._frozen[name]

    def _chat(self, rest: str, temperature: float) -> PolicyFactory:
        model, _, url = rest.partition("@")
        if rest not in self._clients:
            variable = self._team.api_key_variable
            self._clients[rest] = ChatClient(url, model, api_key_variable=variable, setting="team.roles: openai")
        sampling = Sampling(self._agent.max_new_tokens, temperature)

        def make(session: EnvSession, seed: int) -> Policy:
            return ChatPolicy(self._clients[rest], replace(sampling, seed=seed), instruction=session.instruction)

        return make

    def require_clients(self) -> None:
        """Raise EngineError if an API has answered no request since the last call, though there were some. Games that
        survive it are those it had no part in."""
        for name, client in self._clients.items():
            answers, failures = self._counted.get(name, (0, 0))
            self._counted[name] = client.answers, client.failures
            if client.answers == answers and client.failures > failures:
                when = "never answered" if not client.answers else "answers no more"
                raise EngineError(f"a player {when}: {client.last_error}")

    async def advance(self, step: int) -> None:
        """Take a snapshot if one is due after `step`. Free the engines of those that are not drawn from any more."""
        self.league.add(step)
        await self._free_unused()

    async def follow(self, snapshots: Sequence[int]) -> None:
        """Draw from the snapshots of these steps, which another process has taken."""
        self.league.known = snapshots
        await self._free_unused()

    @property
    def snapshots(self) -> tuple[int, ...]:
        """Steps of the snapshots that players are drawn from."""
        return tuple(self.league.steps[-max(1, self._team.league_size) :])

    async def _free_unused(self) -> None:
        needed = {snapshot_name(step) for step in self.snapshots}
        for name in [n for n in self._frozen if n.startswith(SNAPSHOT) and n not in needed]:
            await self._frozen.pop(name).close()

    async def close(self) -> None:
        for player in self._frozen.values():
            await player.close()
        for client in self._clients.values():
            await client.close()


def role_folder(path: str, role: str) -> str:
    """Return the folder that `checkpoint:PATH` names for a role: that of its own adapters, if the model has some."""
    own = folder_of(path, "team.roles: checkpoint") / role
    return str(own) if (own / "adapter_config.json").is_file() else path


def scripted_policy(path: str) -> PolicyFactory:
    """Return the factory that `my_module:MyPolicy` names: called with (session, seed), it returns a policy."""
    make = import_named(path, f"team.roles: scripted:{path}", "a policy of your own", "my_module:MyPolicy")
    if not callable(make):
        raise ConfigError(f"team.roles: scripted:{path} must be callable with (session, seed), got {make!r:.60}")
    factory: PolicyFactory = make
    return factory


def team_of_host(config: Config, root: Path) -> Team:
    """Return the players in a process that plays games for another, which takes the snapshots in `root`.

    Such a process has no device, so frozen models play on its CPUs.
    """
    import torch

    assert config.scale is not None
    assert config.team is not None
    torch.set_num_threads(config.threads or max(1, int(config.scale.env_host_cpus)))
    model = config.model.model_copy(update={"device": "cpu"})
    return Team(config.team, config.agent, model, config.longest_context(), root, _taken_elsewhere)


def _taken_elsewhere(folder: Path) -> None:
    raise RuntimeError(f"{folder}: another process takes the snapshots of this run")


def absolute_players(team: TeamConfig) -> TeamConfig:
    """Return the team with full paths of checkpoints, for processes in other folders."""

    def absolute(policy: str | None) -> str | None:
        kind, _, path = (policy or "").partition(":")
        folder = Path(path).expanduser()
        return f"checkpoint:{folder.absolute()}" if kind == "checkpoint" and folder.is_dir() else policy

    roles = {
        name: role.model_copy(update={key: absolute(getattr(role, key)) for key in ("policy", "eval_policy")})
        for name, role in team.roles.items()
    }
    return team.model_copy(update={"roles": roles})


def demonstrating_cast(team: TeamConfig | None, policy: str) -> Cast | None:
    """Return a cast in which one demonstrator, `oracle` or `random`, plays every role; None for a single agent."""
    if team is None:
        return None
    players = {role: Player(policy, demonstrators(policy), s.max_turns) for role, s in team.roles.items()}
    return lambda seed, index: players


def team_problem(team: TeamConfig | None, env: str, roles: Collection[str]) -> str:
    """Return why an environment cannot be played by the recipe's team, or an empty string."""
    if team is None:
        example = "\n".join(f"[team.roles.{role}]" for role in roles)
        return f"{env} has several roles, say who plays each:\n{example}" if roles else ""
    if set(roles) != set(team.roles):
        return f"[team.roles] has {', '.join(team.roles)}, {env} has the roles {', '.join(roles) or 'none'}"
    return ""
