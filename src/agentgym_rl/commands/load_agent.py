"""Agents to evaluate: `oracle`, `random`, a model folder or hub name, a run (`RUN` or `RUN@STEP`), `openai:MODEL`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentgym_rl.agent.engines.openai import ChatClient, Meter, Prices, Tokens
from agentgym_rl.agent.policy import ChatPolicy, EnginePolicy, OraclePolicy, Policy, RandomPolicy
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.templates import resolve_template
from agentgym_rl.config import AgentConfig, Config, ModelConfig, TeamConfig, load_config
from agentgym_rl.config.error_texts import reason
from agentgym_rl.errors import ConfigError, did_you_mean
from agentgym_rl.run.collectors import context_of
from agentgym_rl.run.load_model import choose_device, load_from
from agentgym_rl.training.locate_model import find_model
from agentgym_rl.types import EnvSession, Sampling

OPENAI = "openai:"
_FINGERPRINT_BYTES = 1 << 20
"""Bytes at each end of a weights file that go into its fingerprint. Reading a large model takes minutes."""


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Options of the command line for an agent. None means the run's own setting, or the default."""

    spec: str
    role: str | None = None
    """Role to play, of several: a run may have adapters for each."""
    name: str | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None
    max_context: int | None = None
    style: str | None = None
    context: str | None = None
    chat_template: str | None = None
    device: str = "auto"
    dtype: str | None = None
    """None means the run's own on a GPU, and float32 otherwise."""
    base_url: str = "https://api.openai.com/v1"
    key_variable: str | None = "OPENAI_API_KEY"
    request_timeout_s: float = 120.0
    request_retries: int = 5
    requests_per_minute: float | None = None
    max_tokens_field: str = "max_tokens"
    prices: Prices | None = None


@dataclass(slots=True)
class Candidate:
    """An agent that is identified but not loaded yet."""

    options: AgentOptions
    kind: str
    """One of oracle, random, model, run and openai."""
    name: str
    identity: dict[str, Any]
    """Identity of the agent, saved in the evaluation's config."""
    playing: AgentConfig
    """Style, instruction, temperature and token limits to play with."""
    own_style: bool
    """True if the style is given or the run's. Otherwise each scenario of a suite has its own."""
    own_context: bool
    model: ModelConfig | None = None
    weights: str = ""
    """Folder or hub name of the weights. For adapters, `model.path` is their base model."""
    step: int = 0


def find_agent(options: AgentOptions, option: str = "--agent") -> Candidate:
    """Return the agent that a spec names. Raise ConfigError before anything is loaded if there is none.

    `option` is the command's option for the spec, for messages.
    """
    spec = options.spec
    if spec in ("oracle", "random"):
        return _candidate(options, spec, spec, {"kind": spec}, AgentConfig())
    if spec.startswith(OPENAI):
        model = spec.removeprefix(OPENAI)
        if not model:
            raise ConfigError(f"{option} openai: needs a model name, such as openai:gpt-4o-mini")
        return _candidate(options, "openai", model, {"kind": "openai", "model": model}, AgentConfig())
    run = run_of(spec)
    if run is not None:
        return _run_candidate(options, *run)
    folder = Path(spec).expanduser()
    is_folder = (folder / "config.json").is_file()
    if not is_folder and (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{option} {spec!r} holds adapters without their base model: name the run that trained them, RUN or "
            "RUN@STEP"
        )
    if not is_folder and (spec.startswith((".", "~", "/")) or spec.count("/") != 1 or folder.exists()):
        raise ConfigError(
            f"{option} {spec!r} is neither oracle, random, openai:MODEL, a run (config.toml), a model folder "
            f"(config.json) nor a hub name (owner/model){_similar_run(folder)}"
        )
    _model_config(options, spec, options.chat_template)
    try:
        find_model(spec)
    except ConfigError as error:
        raise ConfigError(
            f"{option} {spec!r} is neither a run (config.toml) nor a model that can be found: {error}"
            f"{_similar_run(folder)}"
        ) from error
    identity = {"kind": "model", "path": spec} | ({"weights": fingerprint(folder)} if is_folder else {})
    identity |= _template_identity(options)
    candidate = _candidate(options, "model", folder.resolve().name if is_folder else spec, identity, AgentConfig())
    candidate.model, candidate.weights = _model(options, spec, options.chat_template), spec
    return candidate


def _similar_run(path: Path) -> str:
    """Return `; did you mean 'runs/first'?` if a run beside `path` has a similar name, or an empty string."""
    return did_you_mean(str(path), [str(config.parent) for config in path.parent.glob("*/config.toml")])


def run_of(spec: str) -> tuple[Path, int | None] | None:
    """Return (run directory, step or None) if `spec` is RUN or RUN@STEP."""
    path, at, step = spec.rpartition("@")
    if at and step.isdigit() and (Path(path) / "config.toml").is_file():
        return Path(path), int(step)
    return (Path(spec), None) if (Path(spec) / "config.toml").is_file() else None


def _run_candidate(options: AgentOptions, run: Path, step: int | None) -> Candidate:
    from agentgym_rl.training.checkpoint import list_checkpoints

    config: Config = load_config(run / "config.toml", [])
    checkpoints = {int(path.name.rpartition("_")[2]): path for path in list_checkpoints(run / "checkpoints")}
    if not checkpoints or (step is not None and step not in checkpoints):
        steps = ", ".join(map(str, checkpoints)) or "none"
        raise ConfigError(f"{run} has no checkpoint{'' if step is None else f' of step {step}'}: it has {steps}")
    step = max(checkpoints) if step is None else step
    folder = checkpoints[step] / "model" / _adapters_of(options.role, config.team, run)
    identity = {"kind": "run", "run": run.name, "step": step, "weights": fingerprint(folder)}
    identity |= _template_identity(options)
    model = _model(options, str(folder), options.chat_template or config.model.chat_template, config.model.dtype)
    if config.model.lora is not None:
        assert config.model.path is not None
        model = model.model_copy(update={"path": config.model.path, "lora": config.model.lora})
        with _explain_base_model(str(run)):
            find_model(config.model.path)
        base = Path(config.model.path).expanduser()
        identity["base"] = fingerprint(base) if base.is_dir() else config.model.path
    playing = config.agent.model_copy(update={"temperature": config.eval.temperature})
    candidate = _candidate(options, "run", f"{run.resolve().name}@{step}", identity, playing)
    candidate.own_style = candidate.own_context = True
    candidate.step = step
    candidate.model, candidate.weights = model, str(folder)
    return candidate


def _adapters_of(role: str | None, team: TeamConfig | None, run: Path) -> str:
    """Return the folder of the role's own adapters in a checkpoint's model, or an empty string if it has none."""
    own = [] if team is None else team.adapter_roles
    if role in own:
        return str(role)
    if own and team is not None and not team.learner_roles:
        raise ConfigError(
            f"{run} has adapters for the roles {', '.join(own)}, and none for "
            f"{role or 'a single agent'}: name one of them, as `eval` and `export` do with --role"
        )
    return ""


@contextmanager
def _explain_base_model(run: str) -> Iterator[None]:
    """Add to a ConfigError why a model is needed that the command line does not name."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{run} was trained with adapters, which need the run's base model: {error}") from error


def _candidate(
    options: AgentOptions, kind: str, name: str, identity: dict[str, Any], playing: AgentConfig
) -> Candidate:
    given = {"temperature": options.temperature, "style": options.style}
    given |= {"max_new_tokens": options.max_new_tokens, "max_context": options.max_context, "context": options.context}
    # Not validated again, because a temperature of 0 is valid only in evaluation.
    playing = playing.model_copy(update={key: value for key, value in given.items() if value is not None})
    if playing.style == "reflect" and playing.turns_per_attempt is None:
        raise ConfigError("--style reflect needs turns_per_attempt, which only a run's config sets: evaluate a run")
    name = options.name or name
    if not name.isprintable():
        raise ConfigError(f"an agent's name must be one line of printable text, got {name!r}: give another with --name")
    identity = {"name": name, **identity}
    if kind == "openai" and playing.context != "full":
        raise ConfigError(f"agent.context = {playing.context!r} needs a local model, got an API's: set it to 'full'")
    if playing.context != "full":
        identity["context"] = playing.context
    if playing.style == "reflect":
        identity |= {name: getattr(playing, name) for name in ("turns_per_attempt", "attempts", "retry")}
    return Candidate(
        options,
        kind,
        name,
        identity,
        playing,
        own_style=options.style is not None,
        own_context=options.max_context is not None,
    )


def _template_identity(options: AgentOptions) -> dict[str, str]:
    """Return a digest of the chat template, if one is given in place of the model's own."""
    text = resolve_template(options.chat_template)
    return {} if text is None else {"chat_template": hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}


def _model(options: AgentOptions, path: str, chat_template: str | None, trained_dtype: str = "float32") -> ModelConfig:
    model = _model_config(options, path, chat_template)
    device, _ = choose_device(model)
    if options.dtype is None and device.startswith("cuda"):
        model = _model_config(replace(options, dtype=trained_dtype), path, chat_template)
    return model


def _model_config(options: AgentOptions, path: str, chat_template: str | None) -> ModelConfig:
    given = {"path": path, "chat_template": chat_template, "device": options.device}
    try:
        return ModelConfig.model_validate(given | {"dtype": options.dtype or "float32"})
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"--{first['loc'][0]}: {reason(dict(first))}") from error


def fingerprint(folder: Path) -> str:
    """Return a digest of a model folder's config and of the size and both ends of its weights."""
    digest = hashlib.blake2b(digest_size=8)
    suffixes = (".safetensors", ".bin", ".json", ".jinja")
    files = sorted(path for path in folder.iterdir() if path.suffix in suffixes and path.is_file())
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_FINGERPRINT_BYTES))
            file.seek(max(0, size - _FINGERPRINT_BYTES))
            digest.update(file.read())
    return digest.hexdigest()


def load_weights(candidate: Candidate) -> tuple[Any, Any]:
    """Load (model, tokenizer) of a model or a run, for inference."""
    assert candidate.model is not None
    with nullcontext() if candidate.model.lora is None else _explain_base_model(candidate.options.spec):
        model, tokenizer = load_from(candidate.weights, candidate.model)
    return model.eval(), tokenizer


class ScriptedAgent:
    """The oracle, or random play. It has no model."""

    step = 0
    max_context: int | None = None
    fatal_error = ""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def policy(self, session: EnvSession, seed: int) -> Policy:
        return OraclePolicy(session) if self._kind == "oracle" else RandomPolicy(session, seed)

    def usage(self, policy: Policy) -> Sequence[Tokens] | None:
        return None

    async def close(self) -> None:
        return None


class ModelAgent:
    """A local model behind the native engine."""

    fatal_error = ""

    def __init__(self, candidate: Candidate, concurrency: int, max_context: int) -> None:
        assert candidate.model is not None
        from agentgym_rl.agent.engines.native import NativeEngine

        model, tokenizer = load_weights(candidate)
        self.step = candidate.step
        self._playing = candidate.playing
        self._renderer = Renderer(tokenizer, candidate.model.chat_template, thoughts=candidate.playing.thoughts)
        self._engine = NativeEngine(
            model, decode=self._renderer.decode, max_sessions=concurrency, max_context=max_context
        )
        self.max_context: int | None = self._engine.max_context

    def policy(self, session: EnvSession, seed: int) -> Policy:
        sampling = Sampling(self._playing.max_new_tokens, self._playing.temperature, seed=seed)
        return EnginePolicy(
            self._engine,
            self._renderer,
            sampling,
            instruction=session.instruction,
            tools=session.tools,
            context=context_of(self._playing),
        )

    def usage(self, policy: Policy) -> Sequence[Tokens] | None:
        return None

    async def close(self) -> None:
        await self._engine.close()


@dataclass(slots=True)
class ChatAgent:
    """A model behind an OpenAI-compatible chat API."""

    client: ChatClient
    sampling: Sampling
    step: int = 0
    max_context: int | None = None
    _meters: dict[int, Meter] = field(default_factory=dict)

    @property
    def fatal_error(self) -> str:
        return self.client.fatal_error

    def policy(self, session: EnvSession, seed: int) -> Policy:
        meter = Meter(self.client)
        policy = ChatPolicy(
            meter, replace(self.sampling, seed=seed), instruction=session.instruction, tools=session.tools
        )
        self._meters[id(policy)] = meter
        return policy

    def usage(self, policy: Policy) -> Sequence[Tokens] | None:
        return self._meters.pop(id(policy)).answers

    async def close(self) -> None:
        await self.client.close()


def load_agent(candidate: Candidate, concurrency: int, max_context: int) -> ScriptedAgent | ModelAgent | ChatAgent:
    """Load the agent. `max_context` is the largest context of any of its episodes."""
    if candidate.kind in ("oracle", "random"):
        return ScriptedAgent(candidate.kind)
    if candidate.kind != "openai":
        return ModelAgent(candidate, concurrency, max_context)
    options = candidate.options
    client = ChatClient(
        options.base_url,
        candidate.identity["model"],
        api_key_variable=options.key_variable,
        timeout_s=options.request_timeout_s,
        retries=options.request_retries,
        max_tokens_field=options.max_tokens_field,
        requests_per_minute=options.requests_per_minute,
    )
    return ChatAgent(client, Sampling(candidate.playing.max_new_tokens, candidate.playing.temperature))
