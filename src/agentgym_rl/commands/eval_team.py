"""Evaluation in an environment of several roles: the agent plays one of them, an opponent plays the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from agentgym_rl.agent.policy import PolicyFactory
from agentgym_rl.agent.team import Cast, Player
from agentgym_rl.commands.load_agent import AgentOptions, find_agent, load_agent
from agentgym_rl.config import EnvironmentConfig
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.environments_pool import roles_in
from agentgym_rl.types import LEARNER

OPPONENT = "oracle"
"""Default opponent."""
SHARED = (
    *("device", "dtype", "base_url", "key_variable", "request_timeout_s", "request_retries"),
    *("requests_per_minute", "max_tokens_field"),
)
"""Options of the agent that are its opponent's, too."""


@dataclass(frozen=True, slots=True)
class Team:
    """Roles of the evaluation."""

    roles: tuple[str, ...]
    role: str
    """Role of the agent."""
    opponent: str
    """Agent of all other roles, as --agent names it."""


async def find_team(env: EnvironmentConfig | None, role: str | None, opponent: str | None) -> Team | None:
    """Return the team that plays an environment; None if it has a single agent, or for a suite."""
    roles = () if env is None else await roles_in(env)
    if not roles:
        if role is not None or opponent is not None:
            raise ConfigError("--role and --opponent are for one environment with several roles, such as nim")
        return None
    if role is not None and role not in roles:
        raise ConfigError(f"--role {role!r}: the roles are {', '.join(roles)}")
    return Team(roles, role or roles[0], opponent or OPPONENT)


class Opponent:
    """The agents of the other roles: one for all of them, or one for each role with adapters of its own.

    The device and the settings of an API are the agent's, because there is one option for both.
    """

    def __init__(self, team: Team, agent: AgentOptions) -> None:
        """Find the agents. Raise ConfigError if there is none."""
        self._team = team
        self._agents: dict[str, Any] = {}
        """By the folder of their weights."""
        self._by_role: dict[str, Any] = {}
        defaults = AgentOptions(team.opponent)
        options = replace(defaults, **{name: getattr(agent, name) for name in SHARED})
        others = (role for role in team.roles if role != team.role)
        self._candidates = {role: find_agent(replace(options, role=role), "--opponent") for role in others}

    def config(self) -> dict[str, Any]:
        """Return what a resumed evaluation must have in common."""
        identities = {role: candidate.identity for role, candidate in self._candidates.items()}
        weights = {role: identity["weights"] for role, identity in identities.items() if "weights" in identity}
        named = {"role": self._team.role, "opponent": self._team.opponent}
        return named | ({"opponent_weights": weights} if weights else {})

    def load(self, concurrency: int, max_context: int) -> None:
        """Load the agents."""
        for role, candidate in self._candidates.items():
            if candidate.weights not in self._agents:
                self._agents[candidate.weights] = load_agent(candidate, concurrency, max_context)
            self._by_role[role] = self._agents[candidate.weights]

    def cast(self, make_policy: PolicyFactory) -> Cast:
        """Return the players of the roles, of which `make_policy` makes the agent's."""
        others = {role: Player(self._team.opponent, agent.policy) for role, agent in self._by_role.items()}
        players = others | {self._team.role: Player(LEARNER, make_policy)}
        return lambda seed, index: {role: players[role] for role in self._team.roles}

    async def close(self) -> None:
        for agent in self._agents.values():
            await agent.close()
