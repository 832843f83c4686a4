"""Evaluation in an environment of several roles: the agent plays one of them, an opponent plays the others."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Team:
    """Roles of the evaluation."""

    roles: tuple[str, ...]
    role: str
    """Role of the agent."""
    opponent: str
    """Agent of all other roles, as --agent names it."""

    def config(self) -> dict[str, str]:
        """Return what a resumed evaluation must have in common."""
        return {"role": self.role, "opponent": self.opponent}


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
    """The agents of the other roles: one for all of them, or one for each role with adapters of its own."""

    def __init__(self, team: Team, concurrency: int, max_context: int) -> None:
        self._team = team
        self._agents: dict[str, Any] = {}
        """By the folder of their weights."""
        self._by_role: dict[str, Any] = {}
        for role in team.roles:
            if role == team.role:
                continue
            candidate = find_agent(AgentOptions(spec=team.opponent, role=role), "--opponent")
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
