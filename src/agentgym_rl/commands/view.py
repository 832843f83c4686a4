"""The command `view`: connects the viewer to environments and policies."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from agentgym_rl.agent.policy import OraclePolicy, PolicyFactory, RandomPolicy
from agentgym_rl.agent.styles import STYLES
from agentgym_rl.config import load_config
from agentgym_rl.environment import catalog
from agentgym_rl.environment.base import TextEnv
from agentgym_rl.environment.formats import action_format
from agentgym_rl.environment.own_class import is_import_path
from agentgym_rl.environment.pool import LocalPool, RemotePool
from agentgym_rl.errors import AgentGymError, ConfigError
from agentgym_rl.run.environments_pool import load_class
from agentgym_rl.types import EnvSession, Limits, Message, Observation

MAX_SESSIONS = 64
OwnClasses = Mapping[tuple[Path | None, str], type[TextEnv]]
"""Classes by name, and by the folder of the run or evaluation whose arguments they have. None stands for all others."""


@dataclass(frozen=True, slots=True)
class ModelPlayer:
    """A model that plays episodes in the viewer."""

    make_policy: PolicyFactory
    limits: Limits
    parse: Callable[[str], str]
    """Function from a reply to the action in it."""
    calls_tools: bool = False
    """Whether it acts by tool calls."""


class ViewerEnvironments:
    """Environments of the viewer, in this process or on servers, and the policies that can play them."""

    def __init__(
        self,
        model: ModelPlayer | None = None,
        urls: Mapping[str, str] | None = None,
        token: str | None = None,
        own: OwnClasses | None = None,
    ) -> None:
        """`own`: classes besides those of the catalog. A run alone never makes the viewer import one."""
        self.policies: dict[str, PolicyFactory] = {
            "oracle": lambda session, seed: OraclePolicy(session),
            "random": RandomPolicy,
        }
        if model is not None:
            self.policies["model"] = model.make_policy
        self._model = model
        self.limits = model.limits if model else Limits(max_turns=1000, max_new_tokens=512, max_context=8192)
        self._pools: dict[tuple[str, type[TextEnv] | None, str], LocalPool | RemotePool] = {}
        self._urls = dict(urls or {})
        self._token = token
        self._own = dict(own or {})

    def describe(self) -> list[dict[str, Any]]:
        served = [asyncio.run(self._describe_served(name, url)) for name, url in self._urls.items()]
        classes = {name: cls for (folder, name), cls in self._own.items() if folder is None and name not in self._urls}
        own = [_describe_class(name, env_class) for name, env_class in classes.items()]
        local = {n: entry for n, entry in catalog.entries().items() if n not in self._urls and n not in classes}
        return [*served, *own, *(_describe(name, entry) for name, entry in local.items())]

    async def _describe_served(self, env: str, url: str) -> dict[str, Any]:
        """Describe a server's environment. A server that does not answer may do so later, so its row has no ranges."""
        row = {"name": env, "summary": f"served at {url}", "licence": "", "installed": True, "missing": ""}
        pool = RemotePool({env: url}, self._token, 1)
        try:
            info = await pool.info(env)
        except AgentGymError as error:
            return row | {"summary": str(error), "ranges": {}, "subsets": []}
        finally:
            await pool.close()
        return row | {"ranges": info.get("splits", {}), "subsets": info.get("subsets", [])}

    def action_in(self, policy: str, reply: str) -> str:
        return self._model.parse(reply) if self._model and policy == "model" else reply

    def subsets_of(self, env: str, item: int) -> tuple[str, ...]:
        if (own := self._own.get((None, env))) is not None:
            return tuple(own.subsets_of(item)) if _has_item(own, item) else ()
        return () if env in self._urls else _subsets_of(env, item)

    async def open(
        self,
        env: str,
        style: str | None = None,
        turns_per_attempt: int | None = None,
        attempts: int | None = None,
        retry: str = "failure",
        folder: Path | None = None,
    ) -> EnvSession:
        if style is None:
            style = "tool" if self._model is not None and self._model.calls_tools else "act"
        if style not in STYLES:
            raise ConfigError(f"the run's style {style!r} is unknown: known are {', '.join(STYLES)}")
        session = await (await self._pool(env, STYLES[style].action_format, folder)).open(env)
        return STYLES[style].wrap(session, turns_per_attempt, attempts, "always" if retry == "always" else "failure")

    async def _pool(self, env: str, action_format: str, folder: Path | None = None) -> LocalPool | RemotePool:
        # Loading imports the environment's packages, which can take seconds.
        env_class = None if env in self._urls else await asyncio.to_thread(self._load, env, folder)
        key = env, env_class, action_format
        if key not in self._pools:
            self._pools[key] = (
                RemotePool(
                    {env: self._urls[env]}, self._token, MAX_SESSIONS, wait_timeout_s=10.0, action_format=action_format
                )
                if env_class is None
                else LocalPool({env: env_class}, MAX_SESSIONS, wait_timeout_s=10.0, action_format=action_format)
            )
        return self._pools[key]

    async def items(self, env: str, split: str, subset: str | None = None) -> list[int]:
        if env in self._urls:
            return await (await self._pool(env, STYLES["act"].action_format)).items(env, split, subset)
        return list(await asyncio.to_thread(lambda: catalog.items(self._load(env), split, subset)))

    def _load(self, env: str, folder: Path | None = None) -> type[TextEnv]:
        keys = ((folder.resolve(), env) if folder is not None else (None, env), (None, env))
        for key in keys:
            if key in self._own:
                return self._own[key]
        if env not in catalog.entries():  # a name of a run's files: an import path would run code of their author
            raise ConfigError(
                f"unknown environment {env!r}: if it is a class of your own, start the viewer with "
                f"--env {env if is_import_path(env) else 'RECIPE.toml'}; if it has a server, with --url {env}=http://HOST:PORT"
            )
        return catalog.load(env)

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))


def _describe(name: str, entry: catalog.Entry) -> dict[str, Any]:
    row: dict[str, Any] = {"summary": entry.summary, "licence": entry.licence}
    try:
        env = catalog.load(name)
        entry.check()
    except ConfigError as error:
        return row | {"name": name, "installed": False, "missing": str(error), "ranges": {}, "subsets": []}
    return _describe_class(name, env) | row


def _describe_class(name: str, env: type[TextEnv]) -> dict[str, Any]:
    summary = (inspect.getdoc(env) or env.name).partition("\n")[0]
    ranges = {split: [items.start, items.stop] for split, items in env.splits.items()}
    row = {"name": name, "summary": summary, "licence": "", "installed": True, "missing": ""}
    return row | {"ranges": ranges, "subsets": list(env.subsets)}


def _has_item(env_class: type[TextEnv], item: int) -> bool:
    return any(item in items for items in env_class.splits.values())


def _subsets_of(env: str, item: int) -> tuple[str, ...]:
    # Subsets only help filtering. They remain empty if the environment is not installed or has no such item.
    env_class = _installed_class(env)
    with contextlib.suppress(Exception):
        return () if env_class is None else tuple(env_class.subsets_of(item))
    return ()


@lru_cache(maxsize=256)
def _installed_class(env: str) -> type[TextEnv] | None:
    """Return the class of a listed environment, or None if it is not installed. Finding it takes milliseconds."""
    with contextlib.suppress(Exception):
        return catalog.load(env) if env in catalog.entries() else None
    return None


def load_policy(name: str) -> ModelPlayer:
    """Load a local model by the spec of `eval --agent`, to play as it would be evaluated."""
    from agentgym_rl.agent.engines.native import NativeEngine
    from agentgym_rl.agent.policy import EnginePolicy, Policy
    from agentgym_rl.agent.renderer import Renderer
    from agentgym_rl.commands.load_agent import AgentOptions, find_agent, load_weights
    from agentgym_rl.run.collectors import context_of
    from agentgym_rl.types import Sampling

    candidate = find_agent(AgentOptions(name), "--policy")
    if candidate.model is None:
        raise ConfigError(f"--policy needs a model's folder, a hub name, RUN or RUN@STEP, got {name!r}")
    playing = candidate.playing
    style = STYLES[playing.style]
    model, tokenizer = load_weights(candidate)
    renderer = Renderer(tokenizer, candidate.model.chat_template, thoughts=playing.thoughts)
    limits = Limits(max_turns=1000, max_new_tokens=playing.max_new_tokens, max_context=playing.max_context)
    engine = NativeEngine(model, decode=renderer.decode, max_sessions=MAX_SESSIONS, max_context=limits.max_context)

    class Model(EnginePolicy):
        """A policy that also reads turns of other players, which have no token ids yet."""

        async def reply(self, messages: list[Message], observation: Observation, limits: Limits) -> Any:
            return await super().reply(_with_ids(renderer, messages, self._tools), observation, limits)

    def make(session: EnvSession, seed: int) -> Policy:
        task = session.instruction if playing.instruction is None else playing.instruction
        explained = bool(session.tools) and playing.instruction is None
        parts = (task, "" if explained else action_format(style.action_format).explain, style.suffix)
        instruction = "\n\n".join(part for part in parts if part)
        sampling = Sampling(limits.max_new_tokens, playing.temperature, seed=seed)
        context = context_of(playing)
        return Model(engine, renderer, sampling, instruction=instruction, tools=session.tools, context=context)

    limits = replace(limits, max_context=min(limits.max_context, engine.max_context))
    syntax = action_format(style.action_format)
    return ModelPlayer(make, limits, syntax.parse, syntax.tools)


def _with_ids(renderer: Any, messages: list[Message], tools: Any = ()) -> list[Message]:
    """Return `messages` with missing token ids filled in, tokenized as in a rollout."""
    if not messages or all(message.token_ids for message in messages):
        return messages
    replies = [i for i, message in enumerate(messages) if message.role == "assistant"]
    filled = list(messages)
    opening = renderer.opening([replace(m, token_ids=[]) for m in messages[: replies[0]]], tools)
    filled[: replies[0]] = [m if m.token_ids else new for m, new in zip(messages, opening, strict=False)]
    for i in replies:
        message = messages[i]
        filled[i] = replace(
            message, token_ids=message.token_ids or renderer.reply_ids(message.content, message.tool_calls)
        )
    for start, end in pairwise(replies):
        if not messages[end - 1].token_ids:
            filled[end - 1] = replace(messages[end - 1], token_ids=renderer.observation_ids(messages[start + 1 : end]))
    return filled


def served_environments(options: list[str]) -> dict[str, str]:
    """Parse the `NAME=URL` of every --url."""
    urls: dict[str, str] = {}
    for text in options:
        name, _, url = text.partition("=")
        if not name or not url.removeprefix("agentgym+").startswith(("http://", "https://")):
            raise ConfigError(f"--url needs NAME=URL such as mine=http://127.0.0.1:36001/mine, got {text!r}")
        urls[name] = url
    return urls


def own_environments(options: list[str]) -> OwnClasses:
    """Return the classes of every --env: a name, an import path, or all of a recipe, a run or an evaluation."""
    classes: dict[tuple[Path | None, str], type[TextEnv]] = {}
    for text in options:
        folder = Path(text).resolve() if Path(text).is_dir() else None
        if folder is not None and (folder / "eval.json").exists():
            named = _classes_of_evaluation(folder / "eval.json")
        elif folder is not None or text.endswith(".toml"):
            recipe = load_config(Path(text) / "config.toml" if folder is not None else Path(text), []).environments
            named = {env.name: load_class(env) for env in recipe if env.url is None}
        else:
            named = {text: catalog.load(text)}
        for name, env_class in named.items():
            classes[folder, name] = env_class
            classes.setdefault((None, name), env_class)  # a name given by itself has its own arguments
    return classes


def _classes_of_evaluation(path: Path) -> dict[str, type[TextEnv]]:
    """Return the classes that an evaluation played with arguments or by an import path."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))["config"]
        names = {str(task["env"]) for task in config["tasks"]}
        settings = config.get("environment") or {"source": None, "kwargs": {}}
        own = {name for name in names if "environment" in config or is_import_path(name)}
        return {name: catalog.load(settings["source"] or name, settings["kwargs"]) for name in own}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--env {path.parent}: {path.name} cannot be read: {error!r}") from error


def view(
    folders: list[Path],
    host: str,
    port: int,
    token: str | None,
    policy: str | None,
    announce: Callable[[str], None],
    *,
    urls: Mapping[str, str] | None = None,
    environment_token: str | None = None,
    own: OwnClasses | None = None,
) -> None:
    """Serve the viewer until interrupted."""
    from agentgym_rl.viewer.library import Library
    from agentgym_rl.viewer.server import serve

    library = Library(
        folders, ViewerEnvironments(load_policy(policy) if policy else None, urls, environment_token, own)
    )
    if library.index.note:
        announce(library.index.note)
    serve(library, host, port, token, announce)


def export(
    folders: list[Path],
    out: Path,
    *,
    episodes: int,
    pictures: bool,
    announce: Callable[[str], None],
    urls: Mapping[str, str] | None = None,
    environment_token: str | None = None,
    own: OwnClasses | None = None,
) -> None:
    """Write the viewer's content into one HTML file."""
    from rich.progress import Progress

    from agentgym_rl.viewer.library import Library
    from agentgym_rl.viewer.page_export import exported_page

    library = Library(folders, ViewerEnvironments(None, urls, environment_token, own))
    if not library.run_folders():
        raise ConfigError(f"no run found below {', '.join(map(str, folders))}: name a folder that contains runs")

    async def make_page() -> tuple[bytes, str]:
        with Progress(transient=True) as bar:
            task = bar.add_task("reading")

            def advance(description: str, done: int, total: int) -> None:
                bar.update(task, description=description, completed=done, total=total)

            try:
                return await exported_page(library, episodes=episodes, pictures=pictures, on_progress=advance)
            finally:
                await library.environments.close()

    page, summary = asyncio.run(make_page())
    try:
        out.write_bytes(page)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        library.close()
    announce(f"wrote {out}: {summary}, {len(page) / 1e6:.1f} MB")
