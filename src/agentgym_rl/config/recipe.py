"""The recipe: a TOML file and `key=value` overrides, checked before anything starts. Unknown keys fail."""

from __future__ import annotations

import math
import os
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from agentgym_rl.config.error_texts import first_error
from agentgym_rl.config.overrides import apply_override
from agentgym_rl.config.sections import (
    AgentConfig,
    CheckpointConfig,
    EngineConfig,
    EnvironmentConfig,
    EvalConfig,
    ModelConfig,
    ScaleConfig,
    Section,
    TeamConfig,
    WarmStartConfig,
)
from agentgym_rl.errors import ConfigError
from agentgym_rl.training.offline_settings import (
    AgentEvolSettings,
    DaggerSettings,
    DataSettings,
    DPOSettings,
    RewardModelSettings,
)
from agentgym_rl.training.reward_settings import JudgeSettings, RewardSettings, reward_problem
from agentgym_rl.training.settings import (
    HorizonSettings,
    RLSettings,
    SFTSettings,
    distill_problem,
    play_problem,
)

Method = Literal["rl", "sft", "dpo", "agentevol", "dagger", "distill", "reward_model"]

SECTIONS: dict[Method, tuple[str, ...]] = {
    "rl": ("rl", "horizon", "rewards", "judge", "team"),
    "sft": ("sft", "data"),
    "dpo": ("dpo", "data"),
    "agentevol": ("agentevol", "sft", "data"),
    "dagger": ("dagger", "sft", "data"),
    "distill": ("rl", "horizon", "rewards", "judge", "team"),
    "reward_model": ("reward_model", "data"),
}
"""Sections that only some methods read. A recipe with a section that its method does not read is refused."""
OPTIONAL = ("data", "rewards", "judge", "team")
"""Sections that a method reads if they are there."""
ALLOWED_VARIABLES = "AGENTGYM_ALLOWED_VARIABLES"
"""Environment variable that lists further variables that recipes may send to the addresses they name."""
_VARIABLE = re.compile(r"AGENTGYM_[A-Z0-9_]+|VLLM_API_KEY")
"""Names of variables that are meant for such addresses."""
ENGINE_SLACK = 1.25
"""Sessions of an engine relative to its even share: hosts round up, and others take over for a lost engine."""


class Config(Section):
    """A recipe: everything a run depends on."""

    name: str = "run"
    """Name of the run. Its directory is `runs/<name>`."""
    run_dir: str | None = None
    """Folder of the run; by default runs/<name>, or runs/<name>-2 and so on if that exists."""
    seed: int = 0
    """Seed of every random number of the run."""
    method: Method = "rl"
    """How the agent learns: rl from its own episodes, sft by imitation, dpo from pairs, agentevol by exploring and
    imitating in turn, dagger by imitating the oracle in the agent's own states, distill from a teacher's
    probabilities of what the agent sampled. reward_model trains a judge of episodes instead of an agent."""
    threads: int = Field(0, ge=0, le=1024)
    """Torch threads of each process. 0 is torch's own choice, or with [scale] the cores of a learner or an engine."""
    model: ModelConfig
    environments: tuple[EnvironmentConfig, ...] = Field(min_length=1)
    agent: AgentConfig = AgentConfig()
    engine: EngineConfig = EngineConfig()
    warm_start: WarmStartConfig | None = None
    horizon: HorizonSettings = HorizonSettings()
    rl: RLSettings = RLSettings()
    rewards: tuple[RewardSettings, ...] = ()
    judge: JudgeSettings | None = None
    team: TeamConfig | None = None
    data: DataSettings | None = None
    """Data to imitate (sft), to build pairs from (dpo, reward_model), or of the expert (agentevol, dagger)."""
    sft: SFTSettings | None = None
    """Settings of sft, and of each retraining of agentevol and dagger."""
    dpo: DPOSettings | None = None
    agentevol: AgentEvolSettings | None = None
    dagger: DaggerSettings | None = None
    reward_model: RewardModelSettings | None = None
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Dashboards that get a copy of the metrics. Each needs the extra of its name."""
    scale: ScaleConfig | None = None

    @field_validator("name")
    @classmethod
    def _name_of_a_folder(cls, name: str) -> str:
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError("must consist of letters, digits, '.', '_' and '-', because a folder is named after it")
        return name

    @model_validator(mode="before")
    @classmethod
    def _sections_of_the_method(cls, raw: Any) -> Any:
        """Refuse sections that the method does not read, and fill in those it does."""
        method = raw.get("method", "rl") if isinstance(raw, dict) else None
        if method not in tuple(SECTIONS):  # a list or a section has no hash
            return raw
        foreign = {name for names in SECTIONS.values() for name in names} - set(SECTIONS[method])
        for section in sorted(foreign & {name for name, value in raw.items() if value not in (None, (), [])}):
            readers = " or ".join(repr(m) for m, names in SECTIONS.items() if section in names)
            raise ValueError(f"[{section}] is read by method = {readers}, this is {method!r}: remove it or set method")
        wanted = [name for name in SECTIONS[method] if name not in OPTIONAL]
        return {**{name: {} for name in wanted}, **{k: v for k, v in raw.items() if v is not None}}

    @model_validator(mode="after")
    def _data_fits_the_method(self) -> Config:
        method, data = self.method, self.data
        if method == "sft" and data is None:
            raise ValueError("method = 'sft' needs [data]: files, or play = 'oracle' or 'random'")
        pairs = self.dpo or self.reward_model
        if pairs is not None and data is not None and data.play is not None:
            others = f"{method}.sample_groups or data.files"
            raise ValueError(f"data.play: {method} compares what a model did, set {others} instead")
        if pairs is not None and data is not None and data.keep == "success":
            raise ValueError(f"data.keep: {method} needs failures to compare successes with, set keep = 'all'")
        if pairs is not None and data is None and not (pairs.sample_groups or pairs.preferences):
            names = f"{method}.sample_groups or data.files for pairs, or {method}.preferences"
            raise ValueError(f"method = {method!r} needs {names}")
        distilled = self.rl.distill is not None and not self.rl.distill.reward_weight
        problem = distill_problem(self.rl.distill, method, self.agent.temperature)
        problem = problem or reward_problem(self.rewards, self.judge, min(self.group_sizes().values()), distilled)
        own_size = any(env.group_size is not None for env in self.environments)
        if problem := problem or play_problem(self.rl, self.agent.style, self.agent.retry, own_size):
            raise ValueError(problem)
        self._check_correction()
        horizons = [env.name for env in self.environments if env.horizon is not None]
        if not self.online and horizons:
            raise ValueError(f"environments: a horizon is read by method = 'rl', this is {method!r}: {horizons[0]}")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        names = [e.name for e in self.environments]
        if len(set(names)) != len(names):
            raise ValueError(
                f"environments: each name once, got {', '.join(names)}; to list one class twice, set source to it and "
                "name to any"
            )
        if self.model.scratch is not None and self.warm_start is None and self.method != "sft":
            raise ValueError("model.scratch needs warm_start: its tokenizer and grammar come from there")
        if self.scale is not None and not self.checkpoint.optimizer:
            raise ValueError("checkpoint.optimizer = false is for runs in one process: remove it or [scale]")
        self._check_group_sizes()
        if self.scale is not None and self.scale.layout == "colocated" and self.rl.asynchronous:
            raise ValueError(
                "scale.layout = 'colocated' frees the engines' memory for the learner, rl.overlap and rl.max_staleness "
                "have episodes under way then: use layout = 'disaggregated', or set both to 0"
            )
        if self.engine.kind == "vllm" and self.rl.keep_cache:
            raise ValueError("rl.keep_cache is for engine.kind = 'native': vLLM ends pending replies before an update")
        if self.engine.kind == "vllm" and not self.online:
            raise ValueError(f"engine.kind = 'vllm' plays for method = 'rl', this is {self.method!r}: use 'native'")
        if self.scale is not None and self.model.device.startswith("cuda:"):
            raise ValueError(
                f"model.device = {self.model.device!r}: with [scale] each process is given a device of its own and "
                "sees no other, use 'cuda' or 'auto'"
            )
        devices = self.engine.tensor_parallel
        if devices > 1 and self.scale is None:
            raise ValueError(
                f"engine.tensor_parallel = {devices}: engines are given several devices by [scale]: add it"
            )
        if self.scale is not None and self.scale.layout == "colocated":
            learners, engines = self.scale.learners, self.scale.engines
            if learners != engines * devices:
                each = (
                    f"; with engine.tensor_parallel = {devices}, {devices} learners per engine" if devices > 1 else ""
                )
                raise ValueError(
                    "scale.layout = 'colocated' pairs each device of an engine with a learner and needs as many of "
                    f"each{each}, got {learners} learners and {engines} engines"
                )
        if self.engine.kind == "vllm" and self.scale is not None:
            if self.engine.weights == "files":
                raise ValueError(
                    "engine.weights = 'files': [scale] sends weights on the device or by a broadcast, remove it"
                )
            if self.engine.urls or self.engine.replicas > 1:
                raise ValueError("[scale] starts vLLM itself: remove engine.urls and engine.replicas")
        if self.agent.style == "tool" and self.method == "dagger":
            raise ValueError(
                "agent.style = 'tool': method 'dagger' compares written actions with the oracle's, use a style of text "
                "such as 'act' or 'function_call'"
            )
        self._check_external_agent()
        self._check_team()
        if self.agent.style == "reflect" and self.agent.turns_per_attempt is None:
            raise ValueError("agent.turns_per_attempt: style 'reflect' needs it, got none")
        if self.method in ("dpo", "dagger", "reward_model") and self.agent.context != "full":
            raise ValueError(f"agent.context: {self.method} needs 'full', got {self.agent.context!r}: remove it")
        return self

    def _check_group_sizes(self) -> None:
        comparison = self.rl.group_comparison() if self.online else ""
        sizes = self.group_sizes()
        if (pairs := self.dpo or self.reward_model) is not None and pairs.sample_groups:
            comparison = f"{self.method} builds pairs of the episodes of a group"
            sizes = {env.name: env.group_size or pairs.group_size for env in self.environments}
        for env in self.environments:
            size = sizes[env.name]
            if comparison and size < 2:
                setting = "rl.group_size" if env.group_size is None else f"environment {env.name}: group_size"
                raise ValueError(f"{setting}: {comparison}, so it needs at least 2, got {size}")

    def _check_external_agent(self) -> None:
        agent, warm = self.agent, self.warm_start
        if warm is not None and warm.through_program and not agent.program:
            raise ValueError("warm_start.through_program needs agent.program, got none: name it, or remove the setting")
        if warm is not None and warm.through_program and (warm.mistakes or warm.wrong_thoughts):
            raise ValueError(
                "warm_start.mistakes and wrong_thoughts are injected without a program: remove them or through_program"
            )
        if agent.kind != "external":
            if agent.program or agent.program_variables:
                raise ValueError("agent.program is read by agent.kind = 'external', this is 'model': set kind")
            return
        if not agent.program and not agent.proxy_port:
            raise ValueError("agent.kind = 'external' needs agent.program, or clients: use `agentgym-rl proxy RECIPE`")
        if self.method != "rl":
            raise ValueError(f"agent.kind = 'external' learns by method = 'rl', this is {self.method!r}")
        for is_set, setting in (
            (self.scale is not None, "[scale]"),
            (agent.style == "reflect", "agent.style = 'reflect'"),
            (agent.context != "full", "agent.context"),
            (not agent.train_thoughts, "agent.train_thoughts = false"),
            (self.rl.tree is not None, "[rl.tree]"),
        ):
            if is_set:
                raise ValueError(f"agent.kind = 'external': the program drives the episode, remove {setting}")

    def _check_correction(self) -> None:
        """Check that a horizon allows a second attempt at all: one turn for each attempt and each reflection."""
        if self.rl.correction is None:
            return
        if self.rewards:
            raise ValueError("[rl.correction] pays each attempt the environment's reward: remove [[rewards]]")
        needed = 2 * self.agent.attempts - 1
        for horizon in [env.horizon or self.horizon for env in self.environments]:
            if max(horizon.turns) < needed:
                raise ValueError(
                    f"[rl.correction] compares {self.agent.attempts} attempts with a reflection between them, so it "
                    f"needs a horizon of at least {needed} turns, got {max(horizon.turns)}: raise horizon.turns"
                )

    def _check_team(self) -> None:
        if self.team is None:
            return
        for is_set, setting in (
            (self.agent.kind == "external", "agent.kind = 'external'"),
            (self.agent.style in ("tool", "reflect"), f"agent.style = {self.agent.style!r}"),
            (self.rl.tree is not None, "[rl.tree]"),
            (self.rl.max_staleness > 0, "rl.max_staleness"),
            (self.rl.resample_rounds > 0, "rl.resample_rounds"),
        ):
            if is_set:
                raise ValueError(f"[team] cannot be combined with it, remove {setting}")
        self._check_role_adapters()

    def _check_role_adapters(self) -> None:
        roles = self.adapter_roles
        if not roles:
            return
        if self.model.lora is None:
            raise ValueError(f"team.roles.{roles[0]}.policy = 'adapters' needs [model.lora], got none: add it")
        for is_set, setting in (
            (self.scale is not None, "[scale]: adapters of roles are trained in one process"),
            (self.engine.kind != "native", f"engine.kind = {self.engine.kind!r}"),
            (self.rl.overlap, "rl.overlap"),
            (self.rl.distill is not None, "[rl.distill]"),
        ):
            if is_set:
                raise ValueError(
                    f"team.roles.{roles[0]}.policy = 'adapters' cannot be combined with it, remove {setting}"
                )
        if unsafe := [role for role in roles if not re.fullmatch(r"\w[\w-]*", role)]:
            raise ValueError(f"team.roles.{unsafe[0]}: a folder of adapters needs a name of letters, digits, '_', '-'")

    @property
    def adapter_roles(self) -> list[str]:
        """Roles with adapters of their own; none for a single agent."""
        return [] if self.team is None else self.team.adapter_roles

    @property
    def online(self) -> bool:
        """Whether the run plays and learns step by step: RL, or distillation."""
        return self.method in ("rl", "distill")

    def longest_context(self) -> int:
        """Return the tokens of the longest episode that any of the environments allows."""
        return max([self.agent.max_context, *(env.max_context or 0 for env in self.environments)])

    def group_sizes(self, group_size: int | None = None) -> dict[str, int]:
        """Return episodes of a group by environment: `group_size` for all, the paths of trees, or each one's own."""
        if group_size is None and self.rl.tree is not None:
            group_size = self.rl.tree.paths
        return {env.name: group_size or env.group_size or self.rl.group_size for env in self.environments}

    def judged_groups(self) -> tuple[int, float]:
        """Return (groups of all steps, mean episodes of a group) that sources of rewards score.

        How many groups a token budget lasts for is not known: 0. In a team the roles that are trained are scored.
        """
        sizes, drawn = self.group_sizes(), sum(env.weight for env in self.environments)
        mean_size = sum(env.weight * sizes[env.name] for env in self.environments) / drawn
        roles = 1 if self.team is None else len(self.team.learner_roles + self.team.adapter_roles)
        return 0 if self.rl.token_budget else self.rl.steps * self.rl.groups_per_step * roles, mean_size

    def sessions_per_engine(self) -> int:
        """Return the episodes that each engine holds at the same time. Further episodes wait."""
        engines = self.scale.engines if self.scale is not None else len(self.engine.urls) or self.engine.replicas
        roles = 1 if self.team is None else max(1, len(self.team.learner_roles))
        return roles * min(self.agent.concurrency, math.ceil(self.agent.concurrency / engines * ENGINE_SLACK))

    def require_allowed_variables(self) -> None:
        """Refuse a recipe that sends a variable such as GITHUB_TOKEN to an address that it names."""
        named = {f"environment {env.name}: token_variable": env.token_variable for env in self.environments if env.url}
        if self.engine.urls:
            named["engine.api_key_variable"] = self.engine.api_key_variable
        if self.judge is not None:
            named["judge.api_key_variable"] = self.judge.api_key_variable
        if self.team is not None:
            named["team.api_key_variable"] = self.team.api_key_variable
        if self.rl.distill is not None:
            named["rl.distill.api_key_variable"] = self.rl.distill.api_key_variable
        allowed = os.environ.get(ALLOWED_VARIABLES, "").replace(",", " ").split()
        for setting, name in named.items():
            if name is not None and not _VARIABLE.fullmatch(name) and name not in allowed:
                raise ConfigError(
                    f"{setting} = {name!r}: the recipe would send this variable of yours to an address that it names. "
                    f"Call the variable AGENTGYM_…, or, if you trust the recipe, export {ALLOWED_VARIABLES}={name}"
                )

    def resolved(self) -> dict[str, Any]:
        """Return the config as it is saved, without the sections of other methods."""
        foreign = {name for names in SECTIONS.values() for name in names} - set(SECTIONS[self.method])
        return self.model_dump(mode="json", exclude=foreign)

    def folder(self, *, resume: bool) -> Path:
        """Return the folder of the run: a new one, or with `resume` the newest with a run of this name and seed."""
        if self.run_dir:
            return Path(self.run_dir)
        fresh, number = Path("runs") / self.name, 1
        folders = [fresh]
        while fresh.exists():
            folders.append(fresh)
            number += 1
            fresh = Path("runs") / f"{self.name}-{number}"
        same_seed = [path for path in folders if _seed_of(path) == self.seed]
        return (same_seed or folders)[-1] if resume else fresh


def completed(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a config that an earlier version saved, with the keys that it lacks."""
    try:
        return Config.model_validate(saved).resolved()
    except ValidationError as error:
        raise ConfigError(
            f"this version cannot read the config that the run was saved with ({first_error(error, Config)}): use "
            "the version that saved it, or start a new run in another directory"
        ) from error


def _seed_of(run: Path) -> int | None:
    saved = run / "config.toml"
    return tomllib.loads(saved.read_text(encoding="utf-8")).get("seed") if saved.is_file() else None


def load_config(path: Path | None, overrides: list[str]) -> Config:
    """Read a recipe and apply `section.key=value` overrides, whose values are TOML literals or bare strings."""
    raw: dict[str, Any] = {}
    if path is not None:
        if not path.is_file():
            raise ConfigError(f"recipe {path}: no such file")
        try:
            raw = tomllib.loads(path.read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"recipe {path} is not valid TOML: {error}") from error
        _find_template(raw, path.parent)
    for override in overrides:
        apply_override(raw, override)
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(first_error(error, Config)) from error


def _find_template(raw: dict[str, Any], folder: Path) -> None:
    """Resolve a template's relative path from the recipe's folder if it is there, else from the current folder."""
    model = raw.get("model")
    template = model.get("chat_template") if isinstance(model, dict) else None
    if isinstance(model, dict) and isinstance(template, str) and os.path.isfile(folder / template):
        path, here = os.path.abspath(folder / template), os.path.abspath(os.curdir)
        # Relative if possible, so that a run can be resumed after its checkout was moved.
        model["chat_template"] = os.path.relpath(path, here) if path.startswith(here + os.sep) else path
