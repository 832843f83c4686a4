"""Checks of a recipe before anything starts: names, files, packages, devices, memory. Most need no torch."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from importlib.util import find_spec

from agentgym_rl.agent.engines.openai import key_headers, require_address
from agentgym_rl.agent.styles import STYLES
from agentgym_rl.agent.templates import resolve_template
from agentgym_rl.config import (
    AgentConfig,
    Config,
    EngineConfig,
    EnvironmentConfig,
    ModelConfig,
    ScaleConfig,
    TeamConfig,
)
from agentgym_rl.environment import catalog
from agentgym_rl.environment.own_class import is_import_path
from agentgym_rl.errors import ConfigError, EngineError
from agentgym_rl.rewards.scores import own_reward
from agentgym_rl.run.environments_pool import load_class, read_recipe_items, read_token, roles_in
from agentgym_rl.run.load_model import base_of_adapters
from agentgym_rl.run.memory_demand import require_memory, shape_of, teacher_shape, why_not_split
from agentgym_rl.run.teams import scripted_policy, team_problem
from agentgym_rl.run.trackers import require_trackers
from agentgym_rl.training.conversations import find_files, is_trajectory_file
from agentgym_rl.training.locate_model import find_model, find_reward_model, folder_of
from agentgym_rl.training.offline_settings import DataSettings
from agentgym_rl.training.preferences import find_preferences
from agentgym_rl.training.reward_settings import JudgeSettings, RewardSettings
from agentgym_rl.training.settings import DistillSettings


def require_recipe(config: Config, *, environments: bool = True) -> None:
    """Raise ConfigError for names, files and packages that are missing, without importing torch.

    `environments`: whether to check the recipe's own; a caller may bring a pool instead.
    """
    require_trackers(config.trackers)
    require_packages(config.model, config.engine, config.scale)
    if environments:
        require_environments(config.environments)
        require_team(config.team, config.environments)
    if any(source is not None and source.mistakes for source in (config.warm_start, config.data)):
        require_recovery(config.environments, "mistakes")
    wrong = any(source is not None and source.wrong_thoughts for source in (config.warm_start, config.data))
    if (wrong or (config.dagger is not None and config.dagger.correct_thoughts)) and not has_thoughts(config.agent):
        setting = "wrong_thoughts" if wrong else "dagger.correct_thoughts"
        raise ConfigError(
            f"{setting} needs replies with thoughts, agent.style = {config.agent.style!r} has none: use 'react'"
        )
    if config.method == "dagger":
        require_recovery(config.environments, "method = 'dagger'")
    require_program(config.agent)
    require_files(config.data, config.method)
    require_rewards(config.rewards, config.judge)
    require_teacher(config.rl.distill)
    require_long_teacher(config.rl.distill, config.model, config.longest_context())
    pairs = config.dpo or config.reward_model
    find_preferences(pairs.preferences if pairs is not None else ())
    resolve_template(config.model.chat_template)
    require_memory(config.model, config.scale)
    if config.model.path is not None:
        find_model(config.model.path)


def has_thoughts(agent: AgentConfig) -> bool:
    """Return whether the oracle's thought is part of its replies."""
    return "{thought}" in STYLES[agent.style].written or agent.style == "tool"


def require_program(agent: AgentConfig) -> None:
    """Raise ConfigError for an external agent whose module or command does not exist."""
    program = agent.program
    if isinstance(program, tuple):
        if program and shutil.which(program[0]) is None:
            raise ConfigError(f"agent.program: there is no command {program[0]!r}: install it, or give its path")
    elif program:
        module, colon, function = program.partition(":")
        if not colon or not function:
            raise ConfigError(
                f"agent.program = {program!r}: name a function as my_module:play, or write a command as a list of words"
            )
        # The program is started in this folder, with Python's search path of this process.
        finder = PathFinder.find_spec(module.partition(".")[0], [os.getcwd(), *sys.path])
        if finder is None:
            raise ConfigError(
                f"agent.program = {program!r}: there is no module {module!r}, neither installed nor in {os.getcwd()}: "
                "start the command in the folder of the module, or set PYTHONPATH"
            )


def require_packages(model: ModelConfig, engine: EngineConfig, scale: ScaleConfig | None) -> None:
    """Raise ConfigError for a package that the recipe needs and that is not installed."""
    # With an address, packages are in the environments of the cluster's nodes.
    vllm_here = engine.kind == "vllm" and not engine.urls and (scale is None or scale.address is None)
    for package, extra, needed, setting in (
        ("peft", "lora", model.lora is not None, "model.lora"),
        ("ray", "scale", scale is not None, "[scale]"),
        ("vllm", "vllm", vllm_here, "engine.kind = 'vllm'"),
    ):
        if needed and find_spec(package) is None:
            raise ConfigError(
                f"{setting} needs the package {package}, which is not installed: pip install 'agentgym-rl[{extra}]'"
            )


def require_environments(environments: tuple[EnvironmentConfig, ...]) -> None:
    """Raise ConfigError for names, items and tokens that do not exist, without opening anything."""
    for env in environments:
        read_token(env)
        if env.items:
            read_recipe_items(env)
        if env.url is not None:
            continue
        env_class = load_class(env)
        catalog.find(env.source or env.name).check()
        for split in (env.split, env.eval_split) if not env.items else ():
            for subset in env.subsets or (None,):
                catalog.require_names(env_class, split, subset)


def require_team(team: TeamConfig | None, environments: Iterable[EnvironmentConfig]) -> None:
    """Raise ConfigError for roles that an environment does not have, and for players that do not exist."""
    for env in environments:
        problem = "" if env.url else team_problem(team, env.name, getattr(load_class(env), "roles", {}))
        if problem:
            raise ConfigError(problem)
    for role in team.roles.values() if team is not None else ():
        for policy in (role.policy, role.eval_policy or ""):
            kind, _, rest = policy.partition(":")
            if kind == "checkpoint":
                folder = folder_of(rest, "team.roles: checkpoint")
                find_model(base_of_adapters(folder) or str(folder), "team.roles: checkpoint")
            elif kind == "scripted":
                scripted_policy(rest)
            elif kind == "openai":
                key_headers(team.api_key_variable if team is not None else None)


async def require_served_team(team: TeamConfig | None, environments: Iterable[EnvironmentConfig]) -> None:
    """Raise ConfigError for roles that an environment on a server does not have. It asks the server."""
    for env in environments:
        problem = team_problem(team, env.name, await roles_in(env)) if env.url else ""
        if problem:
            raise ConfigError(problem)


def require_recovery(environments: tuple[EnvironmentConfig, ...], setting: str) -> None:
    """Raise ConfigError for an oracle that fails off its own path. A server's oracle is not known here."""
    for env in environments:
        source = env.source or env.name
        known = env.url is None and (is_import_path(source) or source in catalog.entries())
        if known and not hasattr(load_class(env), "oracle"):
            raise ConfigError(f"{setting} needs an oracle, and {env.name} has none")
        if known and not getattr(load_class(env), "oracle_recovers", True):
            raise ConfigError(
                f"{setting}: the oracle of {env.name} knows one solution only and cannot continue after a mistake: "
                f"leave out {setting}, or the environment"
            )


def require_rewards(rewards: Iterable[RewardSettings], judge: JudgeSettings | None) -> None:
    """Raise ConfigError for a function, a model or a key of [[rewards]] and [judge] that is missing."""
    for reward in rewards:
        if is_import_path(reward.kind):
            own_reward(reward)
        if reward.kind == "reward_model":
            find_reward_model(reward.path)
    if judge is not None and judge.path is not None:
        find_model(judge.path, "judge.path")
    elif judge is not None:
        require_address(str(judge.url), "judge.url")
        key_headers(judge.api_key_variable)


def require_teacher(distill: DistillSettings | None) -> None:
    """Raise ConfigError for a teacher that does not exist, or for an address or a key that cannot be used."""
    if distill is None:
        return
    if distill.url is not None:
        require_address(distill.url, "rl.distill.url")
        key_headers(distill.api_key_variable)
        return
    folder = folder_of(distill.teacher, "rl.distill.teacher")
    name = str(folder) if folder.is_dir() else distill.teacher
    find_model(base_of_adapters(folder) or name, "rl.distill.teacher")


def require_long_teacher(distill: DistillSettings | None, model: ModelConfig, max_context: int) -> None:
    """Raise ConfigError if episodes may be longer than the teacher reads: it would score them all the same, wrongly."""
    if distill is None or distill.url is not None:
        return
    try:
        own, (teacher, _) = shape_of(model), teacher_shape(distill)
    except ConfigError:
        return  # a model that cannot be read is reported when it is loaded
    longest = min(max_context, own.positions or max_context)
    if teacher is not None and 0 < teacher.positions < longest:
        raise ConfigError(
            f"rl.distill.teacher = {distill.teacher!r} reads {teacher.positions} tokens, and episodes may have "
            f"{longest}: lower agent.max_context"
        )


def require_files(data: DataSettings | None, method: str) -> None:
    """Raise ConfigError if a file of `[data]` is missing or of the wrong kind."""
    for path in find_files(data.files if data else ()):
        if not is_trajectory_file(path) and method in ("dpo", "reward_model"):
            raise ConfigError(
                f"data.files: {path} has no rewards to build pairs from, {method} needs trajectories (.jsonl)"
            )


def require_engine(model: ModelConfig, engine: EngineConfig, scale: ScaleConfig | None) -> None:
    """Raise ConfigError if a vLLM of this machine could not be started."""
    if engine.kind != "vllm" or engine.urls:
        return
    if scale is None or scale.address is None:  # else it runs in the nodes' environments
        from agentgym_rl.agent.engines.vllm.requirements import require_vllm

        try:
            require_vllm()
        except EngineError as error:
            raise ConfigError(str(error)) from error
    try:
        problem = why_not_split(shape_of(model), engine.tensor_parallel)
    except ConfigError:
        return  # an unknown or missing model is reported when it is loaded
    if problem:
        raise ConfigError(problem)
