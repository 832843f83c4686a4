"""The Python API: `import agentgym_rl as ag`. Every function here is also a command of the CLI."""

from __future__ import annotations

import asyncio
import inspect
import tomllib
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agentgym_rl.environment.base import TextEnv
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Limits, Task, Trajectory

if TYPE_CHECKING:
    from agentgym_rl.config import Config

Result = TypeVar("Result")


def load_recipe(
    recipe: str | Path, overrides: Mapping[str, Any] | None = None, *, env: str | type[TextEnv] | None = None
) -> Config:
    """Return a checked recipe: a TOML file, or a name that `agentgym-rl recipes` lists.

    `overrides` are settings by dotted key, such as {"rl.steps": 50}. An `env`, a class of your own or a name, replaces
    the environments.
    """
    from agentgym_rl.commands.recipes import find_recipe
    from agentgym_rl.config import load_config

    settings = dict(overrides or {})
    if env is not None:
        settings["environments"] = [{"name": env if isinstance(env, str) else env.name}]
    return load_config(find_recipe(Path(recipe)), [f"{key}={_toml(value)}" for key, value in settings.items()])


def train(
    recipe: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    env: str | type[TextEnv] | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Train an agent as a recipe says and return the summary of the run.

    Examples:
        >>> summary = train("quickstart", {"rl.steps": 20, "run_dir": "runs/short"})  # doctest: +SKIP
        >>> summary["before"]["success"], summary["after"]["success"]  # doctest: +SKIP
    """
    from agentgym_rl.agent.styles import STYLES
    from agentgym_rl.commands.train import train as run
    from agentgym_rl.environment.pool import LocalPool

    config = load_recipe(recipe, overrides, env=env)
    pool = None
    if env is not None and not isinstance(env, str):
        pool = LocalPool(
            {env.name: env},
            max_sessions=config.agent.sessions,
            timeout_s=config.agent.step_timeout_s,
            action_format=STYLES[config.agent.style].action_format,
        )
    return _run(run(config, config.folder(resume=resume), resume=resume, pool=pool))


def evaluate(agent: str | Path, **options: Any) -> dict[str, Any]:
    """Evaluate an agent and return the content of its eval.json; options are those of `agentgym-rl eval`.

    `agent` is a run directory, a model folder, a hub name, "oracle", "random" or "openai:MODEL".

    Examples:
        >>> evaluate("runs/short", env="babyai", subset=["GoTo"], limit=50)["results"]  # doctest: +SKIP
    """
    from agentgym_rl.cli import evaluate as command
    from agentgym_rl.commands.evaluate import evaluate as run
    from agentgym_rl.commands.evaluate import request_of

    parameters = inspect.signature(command).parameters
    if unknown := sorted(options.keys() - parameters.keys()):
        raise ConfigError(f"evaluate has no option {unknown[0]!r}: it has {', '.join(parameters)}")
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    return _run(run(request_of({**defaults, **options, "agent": str(agent)})))


def make_env(env: str | type[TextEnv], **kwargs: Any) -> TextEnv:
    """Return a new environment: by its name in the catalog, by an import path, or of a class of your own.

    >>> make_env("my_module:MyEnv", size=5)  # doctest: +SKIP
    """
    from agentgym_rl.environment import catalog

    return catalog.load(env, kwargs)() if isinstance(env, str) else env(**kwargs)


def play(env: str | type[TextEnv], policy: Callable[[str], str], item: int = 0, *, max_turns: int = 30) -> Trajectory:
    """Play one episode with a function from observation to action, and return it."""
    from agentgym_rl.agent.policy import HumanPolicy
    from agentgym_rl.agent.rollout import rollout
    from agentgym_rl.environment import catalog
    from agentgym_rl.environment.pool import LocalPool

    env_class = catalog.load(env) if isinstance(env, str) else env

    async def episode() -> Trajectory:
        pool = LocalPool({env_class.name: env_class})
        try:
            session = await pool.open(env_class.name)
            limits = Limits(max_turns=max_turns, max_new_tokens=1, max_context=1)
            task = Task(env_class.name, item)
            return await rollout(task, session, HumanPolicy(policy, session.instruction), limits, id="play")
        finally:
            await pool.close()

    return _run(episode())


def load_model(path: str | Path, *, device: str = "auto", dtype: str = "float32") -> tuple[Any, Any]:
    """Return (model, tokenizer) of a folder or a hub name, or of the last checkpoint of a run."""
    from agentgym_rl.config import Config, ModelConfig
    from agentgym_rl.run.load_model import load_from
    from agentgym_rl.training.checkpoint import list_checkpoints

    run = Path(path)
    if not (run / "config.toml").is_file():
        return load_from(path, ModelConfig.model_validate({"path": str(path), "device": device, "dtype": dtype}))
    checkpoints = list_checkpoints(run / "checkpoints")
    if not checkpoints:
        raise ConfigError(f"{run} has no checkpoint yet")
    config = Config.model_validate(tomllib.loads((run / "config.toml").read_text(encoding="utf-8")))
    settings = config.model.model_copy(update={"device": device, "dtype": dtype})
    return load_from(checkpoints[-1] / "model", settings)


def load_trajectories(run: str | Path, kind: str = "eval", step: int | None = None) -> list[Trajectory]:
    """Return the episodes of a run after `step`, the last by default. `kind`: eval, step or warmstart."""
    from agentgym_rl.run.log import read_trajectories

    files = sorted((Path(run) / "trajectories").glob(f"{kind}_*.jsonl"))
    if step is not None:
        files = [path for path in files if path.stem == f"{kind}_{step:06d}"]
    if not files:
        raise ConfigError(f"{run} has no episodes of kind {kind!r}{'' if step is None else f' at step {step}'}")
    return list(read_trajectories(files[-1]))


def _toml(value: Any) -> str:
    """Return a value as a TOML literal on one line, as overrides are written."""
    import tomli_w

    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").strip()


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run to the end, also inside a notebook, whose event loop runs already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, work).result()
