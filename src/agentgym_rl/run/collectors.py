"""Collectors: policies, limits and wrappers of the recipe, put together to play episodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from agentgym_rl.agent.advised import AdvisedPolicy
from agentgym_rl.agent.collect import Collector
from agentgym_rl.agent.context_management import Context
from agentgym_rl.agent.engines.base import Engine
from agentgym_rl.agent.policy import EnginePolicy, OraclePolicy, Policy, PolicyFactory, RandomPolicy
from agentgym_rl.agent.proxy.app import Proxy
from agentgym_rl.agent.proxy.external import DemonstratingPolicy, ExternalPolicy, ExternalSession, sampled_model
from agentgym_rl.agent.proxy.programs import Program
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.stages import Stages
from agentgym_rl.agent.styles import STYLES, Style
from agentgym_rl.agent.team import Cast, TeamCollector
from agentgym_rl.agent.trees import Branching, TreeCollector
from agentgym_rl.common.cores import num_cores
from agentgym_rl.config import AgentConfig, EnvironmentConfig
from agentgym_rl.environment.formats import action_format
from agentgym_rl.training.conversations import Conversation
from agentgym_rl.training.settings import TreeSettings
from agentgym_rl.types import CollectFrom, EnvPool, EnvSession, Group, Limits, Sampling, Task, Trajectory

PROXY_TOKEN = "AGENTGYM_RL_TOKEN"
"""Environment variable with the token that clients of the proxy send, as of the environment server."""
MIN_OPENING = 4
"""Environments in this process that are opened at once on a machine with fewer cores."""
Wrap = Callable[[EnvSession], EnvSession]


def limits_of(
    agent: AgentConfig, max_turns: int, engine_context: int | None = None, env: EnvironmentConfig | None = None
) -> Limits:
    """Return the limits of an episode, from the agent's settings or the environment's own.

    `engine_context` is the number of tokens that the engine can hold: a longer episode ends as max_context.
    """
    max_context = (env and env.max_context) or agent.max_context
    max_new_tokens = (env and env.max_new_tokens) or agent.max_new_tokens
    if engine_context is not None:
        max_context = min(max_context, engine_context)
    return Limits(max_turns=max_turns, max_new_tokens=max_new_tokens, max_context=max_context)


def context_of(agent: AgentConfig) -> Context:
    """Return the agent's context management."""
    return Context(agent.context, agent.context_turns, agent.summary_tokens)


def engine_policies(
    engine: Engine,
    renderer: Renderer,
    agent: AgentConfig,
    temperature: float,
    *,
    seeded: bool = True,
    oracle_share: float | None = None,
    external: tuple[Proxy, Program] | None = None,
) -> PolicyFactory:
    """Return a factory of policies that sample from `engine`. With `oracle_share` the oracle advises them, too.

    With an `external` program it plays, through the proxy.
    """

    def make(session: EnvSession, seed: int) -> Policy:
        sampling = Sampling(agent.max_new_tokens, temperature, seed=seed if seeded else None)
        if external is not None:
            assert isinstance(session, ExternalSession)
            return ExternalPolicy(*external, sampled_model(engine, renderer, sampling), session)
        policy = EnginePolicy(
            engine,
            renderer,
            sampling,
            instruction=session.instruction,
            tools=session.tools,
            context=context_of(agent),
            train_thoughts=agent.train_thoughts,
        )
        return policy if oracle_share is None else AdvisedPolicy(policy, session, renderer, oracle_share, seed)

    return make


def make_external(agent: AgentConfig) -> tuple[Proxy, Program] | None:
    """Return the proxy and the program of an external agent. Away from loopback the proxy needs a token."""
    if agent.kind != "external":
        return None
    command = (agent.program,) if isinstance(agent.program, str) and agent.program else tuple(agent.program)
    proxy = Proxy(agent.proxy_host, agent.proxy_port, os.environ.get(PROXY_TOKEN))
    return proxy, Program(command, agent.program_variables, agent.program_start)


def demonstrators(name: str) -> PolicyFactory:
    """Return a factory of policies to imitate: `oracle` or `random`."""
    return {"oracle": lambda session, seed: OraclePolicy(session), "random": RandomPolicy}[name]


def make_stages(agent: AgentConfig, environments: Sequence[EnvironmentConfig]) -> Stages:
    """Return the bounds of the stages of a run's episodes, shared by its environments by weight."""
    weights = {env.name: env.weight for env in environments}
    # The cores of a server are not known, and it has bounds of its own.
    bounded = [env.name for env in environments if env.url is None or agent.opening is not None]
    opening = agent.opening or max(MIN_OPENING, num_cores())
    return Stages(agent.concurrency, agent.sessions - agent.concurrency, dict.fromkeys(bounded, opening), weights)


class ProgramDemonstrations:
    """A demonstrator that plays through the program of an external agent, in the program's own prompts.

    Call it to make a policy. `conversations` returns what the policies' programs asked and were answered.
    """

    def __init__(self, external: tuple[Proxy, Program], name: str) -> None:
        self._external, self._make_demonstrator = external, demonstrators(name)
        self._policies: list[DemonstratingPolicy] = []

    def __call__(self, session: EnvSession, seed: int) -> Policy:
        assert isinstance(session, ExternalSession)
        policy = DemonstratingPolicy(*self._external, self._make_demonstrator(session, seed), session)
        self._policies.append(policy)
        return policy

    def conversations(self, trajectory: Trajectory) -> list[Conversation]:
        """Return the conversations of an episode that have a reply on which the program acted."""
        task = trajectory.task
        return [
            Conversation(f"{task.env}_{task.item}", kept.messages, kept.trained, kept.tools)
            for policy in self._policies
            if policy.episode is trajectory.messages
            for kept in policy.conversations
            if any(kept.trained)
        ]

    async def close(self) -> None:
        for part in self._external:
            await part.close()


def _unwrapped(session: EnvSession) -> EnvSession:
    return session


def session_wrapper(agent: AgentConfig, inner: Wrap = _unwrapped) -> Wrap:
    """Return a function that wraps a session in `inner`, then in the recipe's style and instruction."""
    style: Style = STYLES[agent.style]

    def wrap(session: EnvSession) -> EnvSession:
        if agent.instruction is not None:
            # Replaces the environment's part only: how to write an action is still explained.
            explain = action_format(style.action_format).explain
            session.instruction = "\n\n".join(text for text in (agent.instruction, explain) if text)
        styled = style.wrap(inner(session), agent.turns_per_attempt, agent.attempts, agent.retry)
        return ExternalSession(styled) if agent.kind == "external" else styled

    return wrap


def make_collector(
    agent: AgentConfig,
    pool: EnvPool,
    make_policy: PolicyFactory,
    group_size: int,
    prefix: str,
    stages: Stages,
    *,
    inner: Wrap = _unwrapped,
    tree: TreeSettings | None = None,
    cast: Cast | None = None,
    **options: Any,
) -> Collector:
    """Return a collector of groups, of trees, or with a `cast` of games of several roles.

    Collectors that play at the same time share `stages`.
    """
    make: Callable[..., Collector] = Collector
    if tree is not None:
        make = partial(TreeCollector, Branching(**asdict(tree)))
    elif cast is not None:
        make = partial(TeamCollector, cast)
    return make(
        pool,
        make_policy,
        group_size,
        stages,
        agent.retries,
        agent.episode_timeout_s,
        wrap=session_wrapper(agent, inner),
        prefix=prefix,
        on_timeout=agent.on_timeout,
        **options,
    )


def collect_each(
    agent: AgentConfig,
    environments: tuple[EnvironmentConfig, ...],
    pool: EnvPool,
    make_policy: PolicyFactory,
    group_sizes: Mapping[str, int],
    prefix: str,
    **options: Any,
) -> CollectFrom:
    """Return a function that plays episodes of any of the environments, at most `agent.concurrency` at once."""
    stages = make_stages(agent, environments)
    collectors = {
        env.name: make_collector(agent, pool, make_policy, group_sizes[env.name], prefix, stages, **options)
        for env in environments
    }

    async def collect(tasks: list[Task], limits: Limits, seed: int, first: int = 0, /) -> list[Group]:
        """Play tasks of one environment: the trainer calls each with limits of its own."""
        (env,) = {task.env for task in tasks}
        return await collectors[env](tasks, limits, seed, first)

    return collect
