"""The recipe: a TOML file and `key=value` overrides, checked before anything starts. Unknown keys fail."""

from __future__ import annotations

import math
import os
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from agentgym_rl.config_errors import first_error
from agentgym_rl.config_overrides import apply_override
from agentgym_rl.errors import ConfigError
from agentgym_rl.training.reward_settings import JudgeSettings, RewardSettings, reward_problem
from agentgym_rl.training.settings import (
    GROUP_ALGORITHMS,
    AgentEvolSettings,
    DaggerSettings,
    DataSettings,
    DPOSettings,
    HorizonSettings,
    LoraSettings,
    RLSettings,
    ScratchSettings,
    SFTSettings,
)

Method = Literal["rl", "sft", "dpo", "agentevol", "dagger", "distill"]

SECTIONS: dict[Method, tuple[str, ...]] = {
    "rl": ("rl", "horizon", "rewards", "judge"),
    "sft": ("sft", "data"),
    "dpo": ("dpo", "data"),
    "agentevol": ("agentevol", "sft", "data"),
    "dagger": ("dagger", "sft", "data"),
    "distill": ("rl", "horizon", "rewards", "judge"),
}
"""Sections that only some methods read. A recipe with a section that its method does not read is refused."""
OPTIONAL = ("data", "rewards", "judge")
"""Sections that a method reads if they are there."""
ALLOWED_VARIABLES = "AGENTGYM_ALLOWED_VARIABLES"
"""Environment variable that lists further variables that recipes may send to the addresses they name."""
_VARIABLE = re.compile(r"AGENTGYM_[A-Z0-9_]+|VLLM_API_KEY")
"""Names of variables that are meant for such addresses."""
ENGINE_SLACK = 1.25
"""Sessions of an engine relative to its even share: hosts round up, and others take over for a lost engine."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Section):
    """The model to train. Set exactly one of `path` and `scratch`."""

    path: str | None = None
    """Hugging Face folder or hub name."""
    scratch: ScratchSettings | None = None
    """Small model with random weights and a word tokenizer of its own. It needs a warm start."""
    chat_template: str | None = None
    """Built-in template by name, or path of a Jinja file (from the recipe's folder or the current one), instead of the
    tokenizer's own."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, or one of several devices such as `cuda:1`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights. With bfloat16 the optimizer keeps float32 master weights."""

    lora: LoraSettings | None = None
    """Settings of low-rank adapters, which are trained instead of the weights."""

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError("must be auto, cpu, cuda, or one of several such as cuda:1")
        return device

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.path is None) == (self.scratch is None):
            raise ValueError("set exactly one of model.path and model.scratch")
        if self.lora is not None and self.scratch is not None:
            raise ValueError("model.lora adapts weights that are there: it needs model.path, not model.scratch")
        return self


class EnvironmentConfig(_Section):
    """One environment of a run."""

    name: str
    """Name in the catalog, import path of a class (my_module:MyEnv), name on the server, or with `source` any."""
    source: str | None = None
    """Name in the catalog or import path, if `name` is another: one class with different `kwargs` is listed twice."""
    kwargs: dict[str, Any] = {}
    """Arguments of the environment's constructor, such as { size = 5 }."""
    url: str | None = None
    """Base address of its server; without one it runs in this process. `agentgym+http://host:36001/webshop` is one of
    AgentGym's own servers."""
    token_variable: str | None = None
    """Environment variable that holds the server's bearer token. The token itself is never written to a file."""
    split: str = "train"
    """Split to train on."""
    subsets: tuple[str, ...] = ()
    """Subsets to draw items from; empty means all."""
    items: dict[str, str] = {}
    """Items of each split, such as { train = "0-373", test = "374-473" }, or the path of a task list. By default the
    environment's own; AgentGym's servers have none."""
    eval_split: str = "test"
    """Split to evaluate on."""
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Share of groups drawn from this environment, relative to the others'."""
    horizon: HorizonSettings | None = None
    """Horizon of this environment, instead of the run's."""
    group_size: int | None = Field(None, ge=1)
    """Episodes of each task, instead of `rl.group_size`."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Longest reply in tokens, instead of `agent.max_new_tokens`."""
    max_context: int | None = Field(None, ge=2)
    """Longest episode in tokens, instead of `agent.max_context`."""
    eval_max_turns: int | None = Field(None, ge=1)
    """Turns per episode in evaluation, instead of `eval.max_turns`."""

    @model_validator(mode="after")
    def _items_or_subsets(self) -> EnvironmentConfig:
        if self.items and self.subsets:
            raise ValueError(f"environment {self.name}: set items or subsets, not both")
        if self.url is not None and (self.source is not None or self.kwargs):
            setting = "kwargs" if self.kwargs else "source"
            raise ValueError(
                f"environment {self.name}: {setting} is for one in this process; with url the server decides"
            )
        return self


class AgentConfig(_Section):
    """Settings of playing episodes."""

    kind: Literal["model", "external"] = "model"
    """model: the model answers the environment's observations. external: a program of yours drives the episode and
    calls the model through a proxy with OpenAI's API."""
    program: str | tuple[str, ...] = ""
    """Program of an external agent: a Python function such as "my_module:play", or a command such as
    ["python", "agent.py"]. Each episode starts it in a process of its own."""
    program_variables: tuple[str, ...] = ()
    """Environment variables that the program gets, besides PATH, HOME and the like. Others are hidden from it."""
    proxy_host: str = "127.0.0.1"
    """Address that the proxy of an external agent listens on."""
    proxy_port: int = Field(0, ge=0, le=65535)
    """Port of the proxy; 0 chooses a free one."""
    style: Literal["act", "react", "plan", "reflect", "tool", "function_call", "code"] = "act"
    """Form of a reply. "act": an action. "react": a thought, then an action. "plan": the same, with a plan in the first
    thought. "reflect": several attempts at a task, with a reflection between them. "tool": a native tool call.
    "function_call": an action as JSON text. "code": an action in a fenced block."""
    turns_per_attempt: int | None = Field(None, ge=1)
    """Turns of one attempt, for style `reflect`. The horizon bounds all attempts and reflections together."""
    instruction: str | None = None
    """System message instead of the environment's own. An empty string means no system message."""
    temperature: float = Field(1.0, gt=0, le=100)
    """Sampling temperature in training."""
    max_new_tokens: int = Field(512, ge=1)
    """Longest reply in tokens."""
    max_context: int = Field(8192, ge=2)
    """Tokens that the model sees at a time, prompt and replies together."""
    context: Literal["full", "window", "summary"] = "full"
    """Action when the context is full. full: the episode ends. window: the oldest turns are left out. summary: the
    model writes a summary of the conversation, which replaces it. The first observation, the task, always remains."""
    context_turns: int = Field(4, ge=0)
    """Last turns that remain when the context is cut; fewer if they do not fit."""
    summary_tokens: int = Field(256, ge=1)
    """Sampled tokens per summary."""
    thoughts: Literal["template", "keep", "drop"] = "template"
    """Thoughts (<think>...</think>) of earlier replies in later prompts: as the model's chat template renders them,
    always kept, or always dropped."""
    train_thoughts: bool = True
    """Whether the loss includes thoughts. They are sampled either way."""
    concurrency: int = Field(256, ge=1)
    """Episodes at the same time, over all environments. If several environments wait, slots are shared by weight."""
    retries: int = Field(2, ge=0)
    """Retries of an episode that failed."""
    step_timeout_s: float = Field(60.0, gt=0)
    """Seconds that one call of an environment may take."""
    episode_timeout_s: float = Field(1800.0, gt=0)
    """Seconds that an episode may take."""
    on_timeout: Literal["retry", "truncate"] = "retry"
    """Action when the episode's deadline passes. retry: play it again with another seed, so that slow episodes are
    missing from training. truncate: end it there and train on it like an episode that ran out of turns."""


class EngineConfig(_Section):
    """The engine that samples replies."""

    kind: Literal["native", "vllm"] = "native"
    """native: in this process, with the learner's own weights. vllm: vLLM, from the extra of that name."""
    urls: tuple[str, ...] = ()
    """Addresses of running `vllm serve` processes, one per replica. Without any, this process starts vLLM."""
    api_key_variable: str | None = None
    """Environment variable that holds the key of the servers in `urls`."""
    replicas: int = Field(1, ge=1)
    """Number of vLLM engines to start, without `urls`."""
    tensor_parallel: int = Field(1, ge=1)
    """Devices of one node that each vLLM engine splits its weights over. Needs [scale], layout = 'disaggregated'."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of vLLM's weights; auto is the learner's."""
    memory_share: float = Field(0.4, gt=0, allow_inf_nan=False)
    """vLLM's share of the device's memory, weights included. The learner needs the rest."""
    kv_cache_gib: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Size of vLLM's cache, instead of a share of the memory."""
    eager: bool = False
    """Run vLLM without compilation and captured graphs: it starts sooner and samples slower."""
    seeded: bool = True
    """Give every vLLM request a seed, so that replies can be repeated; vLLM then samples row by row. false is faster
    with many requests, and no two runs are the same."""
    weights: Literal["memory", "files"] = "memory"
    """How new weights reach a vLLM started here. memory: from the learner's memory (CUDA IPC; shared memory on a CPU).
    files: through the run directory, as servers and adapters get them."""

    @model_validator(mode="after")
    def _read_by_its_kind(self) -> EngineConfig:
        # Not model_fields_set: a run's saved config has every key.
        given = {n for n, f in EngineConfig.model_fields.items() if getattr(self, n) != f.default} - {"kind"}
        if self.memory_share >= 1:
            raise ValueError(
                f"memory_share = {self.memory_share:g} must be below 1: vLLM starts only where its share of the device "
                "is free, and CUDA itself takes some of it; 0.9 is much for a device of its own"
            )
        if self.kind == "native" and given:
            raise ValueError(f"engine.{min(given)} is read by kind = 'vllm', this is 'native': remove it or set kind")
        here = given & {"replicas", "tensor_parallel", "dtype", "memory_share", "kv_cache_gib", "eager", "weights"}
        if self.urls and here - {"dtype"}:
            raise ValueError(f"engine.{min(here - {'dtype'})} is for a vLLM started here; with urls the servers decide")
        return self


class WarmStartConfig(_Section):
    """Imitation before RL."""

    policy: Literal["random", "oracle"] = "oracle"
    """Policy to imitate. Random play over actions() teaches the grammar and no skill."""
    episodes: int = Field(512, ge=1)
    """Episodes over all environments. The oracle plays an item once; random play repeats items."""
    max_turns: int = Field(8, ge=1)
    """Turns of a demonstration."""
    mistakes: float = Field(0.0, ge=0, lt=1)
    """Share of the oracle's turns with an injected mistake. The loss skips the mistake and keeps the recovery."""
    sft: SFTSettings = SFTSettings()

    @model_validator(mode="after")
    def _mistakes_of_the_oracle(self) -> WarmStartConfig:
        if self.mistakes and self.policy != "oracle":
            raise ValueError(
                f"mistakes = {self.mistakes:g}: random play has no solution to go back to, set policy = 'oracle' or "
                "leave mistakes out"
            )
        return self


class EvalConfig(_Section):
    """Held-out evaluation: before training, after it, and every few steps."""

    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates only before and after."""
    episodes: int = Field(200, ge=1)
    """Episodes per environment, spread evenly over its subsets."""
    max_turns: int = Field(10, ge=1)
    """Turns per episode in evaluation."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature in evaluation. 0 takes the most likely token."""


class CheckpointConfig(_Section):
    """Checkpoints of a run."""

    every: int = Field(10, ge=1)
    """Steps between checkpoints. The last step always gets one."""
    keep: int = Field(2, ge=1)
    """Number of checkpoints to keep. Older ones are deleted."""
    optimizer: bool = True
    """Save the optimizer, too. Without it a checkpoint takes a sixth of the space and cannot be resumed."""
    background: bool = False
    """Write checkpoints from a copy in host memory while training continues."""


class ScaleConfig(_Section):
    """Processes of a run on a Ray cluster. Without this section everything runs in one process."""

    learners: int = Field(1, ge=1)
    """Learner ranks (FSDP2)."""
    engines: int = Field(1, ge=1)
    """Engine replicas that sample."""
    env_hosts: int = Field(1, ge=1)
    """Processes that play episodes, each with a pool of sessions."""
    layout: Literal["colocated", "disaggregated"] = "disaggregated"
    """colocated: learner n and engine n share a device. disaggregated: each has its own."""
    address: str | None = None
    """Address of a Ray cluster that this machine is part of, auto or head:6379. Without it, the run starts Ray."""
    learner_cpus: float = Field(1.0, gt=0, le=1024, allow_inf_nan=False)
    """Cores that each learner reserves."""
    engine_cpus: float = Field(1.0, gt=0, le=1024, allow_inf_nan=False)
    """Cores that each engine reserves."""
    env_host_cpus: float = Field(1.0, gt=0, le=1024, allow_inf_nan=False)
    """Cores that each environment host reserves."""
    object_store_mb: int | None = Field(None, ge=80)
    """Size of Ray's object store, if the run starts Ray; by default Ray's own choice."""
    shard_ranks: int | None = Field(None, ge=1)
    """Ranks that share one copy of the model (HSDP), such as those of a node; by default all."""
    offload: bool = False
    """Keep each rank's shard of weights, gradients and moments on the host, where the optimizer runs. Not for LoRA."""
    reduce_gradients: Literal["pass", "update"] = "pass"
    """When to sum gradients over ranks. Once per update sends less, but each rank holds whole float32 gradients."""
    bucket_mb: int = Field(256, ge=1)
    """Size of the buckets in which weights are sent to engines."""
    worker_timeout_s: float = Field(600.0, gt=0, allow_inf_nan=False)
    """Timeout of starting a worker, the first time or again. Ranks wait longer for each other, because the death of a
    rank is reported at once."""

    @model_validator(mode="after")
    def _pairs(self) -> ScaleConfig:
        if self.layout == "colocated" and self.learners != self.engines:
            raise ValueError(
                f"layout = 'colocated' pairs learners with engines and needs as many of each, "
                f"got {self.learners} and {self.engines}"
            )
        if self.learners % (self.shard_ranks or self.learners):
            raise ValueError(f"shard_ranks = {self.shard_ranks} must divide learners = {self.learners}")
        if self.address is not None and self.address.startswith("ray://"):
            raise ValueError(
                f"address = {self.address!r}: the run's own process must be on a node of the cluster, Ray's client "
                "will not do; start the command there with address = 'auto'"
            )
        return self


class Config(_Section):
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
    probabilities of what the agent sampled."""
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
    data: DataSettings | None = None
    """Data to imitate (sft), to build pairs from (dpo), or of the expert (agentevol, dagger)."""
    sft: SFTSettings | None = None
    """Settings of sft, and of each retraining of agentevol and dagger."""
    dpo: DPOSettings | None = None
    agentevol: AgentEvolSettings | None = None
    dagger: DaggerSettings | None = None
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
        if method == "dpo" and data is not None and data.play is not None:
            raise ValueError("data.play: dpo compares what a model did, set dpo.sample_groups or data.files instead")
        if method == "dpo" and data is not None and data.keep == "success":
            raise ValueError("data.keep: dpo needs failures to compare successes with, set keep = 'all'")
        if self.dpo is not None and data is None and not (self.dpo.sample_groups or self.dpo.preferences):
            raise ValueError("method = 'dpo' needs dpo.sample_groups or data.files for pairs, or dpo.preferences")
        if method == "distill" and self.rl.distill is None:
            raise ValueError(
                "method = 'distill' needs [rl.distill] with a teacher: a model's folder, a run or a hub name"
            )
        if method == "rl" and self.rl.distill is not None and not self.rl.distill.reward_weight:
            raise ValueError(
                "rl.distill without reward_weight ignores the environment's rewards: set method = 'distill'"
            )
        distilled = self.rl.distill is not None and not self.rl.distill.reward_weight
        problem = reward_problem(self.rewards, self.judge, min(self.group_sizes().values()), distilled)
        if problem:
            raise ValueError(problem)
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
        for env in self.environments:
            compared = self.online and self.rl.algorithm in GROUP_ALGORITHMS
            if compared and env.group_size is not None and env.group_size < 2:
                raise ValueError(
                    f"environment {env.name}: {self.rl.algorithm} compares the episodes of a group, so group_size must "
                    f"be at least 2, got {env.group_size}"
                )
        if self.scale is not None and self.scale.layout == "colocated" and self.rl.asynchronous:
            raise ValueError(
                "scale.layout = 'colocated' takes turns on a device, rl.overlap and rl.max_staleness play while the "
                "learner works: use layout = 'disaggregated', or set both to 0"
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
        if self.engine.tensor_parallel > 1 and (self.scale is None or self.scale.layout == "colocated"):
            raise ValueError(
                f"engine.tensor_parallel = {self.engine.tensor_parallel}: devices that a learner has no part in are "
                "given to an engine by [scale] with layout = 'disaggregated'"
            )
        if self.engine.kind == "vllm" and self.scale is not None:
            if self.engine.weights == "files":
                raise ValueError(
                    "engine.weights = 'files': [scale] sends weights through memory of the node or Ray's object store, "
                    "remove it"
                )
            if self.engine.urls or self.engine.replicas > 1:
                raise ValueError("[scale] starts vLLM itself: remove engine.urls and engine.replicas")
            dtype = self.model.dtype if self.engine.dtype == "auto" else self.engine.dtype
            if self.model.lora is not None and dtype != "float32":
                raise ValueError(
                    f"model.lora: with [scale] vLLM is sent weights with the adapters inside, and its are {dtype}, in "
                    "which most of a small update is rounded away: use engine.kind = 'native', engine.dtype = "
                    "'float32', or no [scale], where vLLM takes the adapters as they are"
                )
        if self.agent.style == "tool" and self.method == "dagger":
            raise ValueError(
                "agent.style = 'tool': method 'dagger' compares written actions with the oracle's, use a style of text "
                "such as 'act' or 'function_call'"
            )
        self._check_external_agent()
        if self.agent.style == "reflect" and self.agent.turns_per_attempt is None:
            raise ValueError("agent.turns_per_attempt: style 'reflect' needs it, got none")
        if self.method in ("dpo", "dagger") and self.agent.context != "full":
            raise ValueError(f"agent.context: {self.method} needs 'full', got {self.agent.context!r}: remove it")
        return self

    def _check_external_agent(self) -> None:
        agent = self.agent
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
        ):
            if is_set:
                raise ValueError(f"agent.kind = 'external': the program drives the episode, remove {setting}")

    @property
    def online(self) -> bool:
        """Whether the run plays and learns step by step: RL, or distillation."""
        return self.method in ("rl", "distill")

    def longest_context(self) -> int:
        """Return the tokens of the longest episode that any of the environments allows."""
        return max([self.agent.max_context, *(env.max_context or 0 for env in self.environments)])

    def group_sizes(self, group_size: int | None = None) -> dict[str, int]:
        """Return episodes of a group by environment: `group_size` for all, or each one's own."""
        return {env.name: group_size or env.group_size or self.rl.group_size for env in self.environments}

    def sessions_per_engine(self) -> int:
        """Return the episodes that each engine holds at the same time. Further episodes wait."""
        engines = self.scale.engines if self.scale is not None else self.engine.replicas
        return min(self.agent.concurrency, math.ceil(self.agent.concurrency / engines * ENGINE_SLACK))

    def require_allowed_variables(self) -> None:
        """Refuse a recipe that sends a variable such as GITHUB_TOKEN to an address that it names."""
        named = {f"environment {env.name}: token_variable": env.token_variable for env in self.environments if env.url}
        if self.engine.urls:
            named["engine.api_key_variable"] = self.engine.api_key_variable
        if self.judge is not None:
            named["judge.api_key_variable"] = self.judge.api_key_variable
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
