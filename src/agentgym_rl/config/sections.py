"""Sections of a recipe that are not a trainer's: model, environments, agent, engine, evaluation, scale."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from agentgym_rl.training.settings import HorizonSettings, LoraSettings, ScratchSettings, SFTSettings


class Section(BaseModel):
    """A section of a recipe. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(Section):
    """The model to train. Set exactly one of `path` and `scratch`."""

    path: str | None = None
    """Hugging Face folder or hub name."""
    scratch: ScratchSettings | None = None
    """Small model with random weights and a word tokenizer of its own. It needs a warm start."""
    chat_template: str | None = None
    """Built-in template by name, or path of a Jinja file (from the recipe's folder or the current one), instead of the
    tokenizer's own. `tool_use` is the tokenizer's template of that name."""
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


class EnvironmentConfig(Section):
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
    """Episodes of each task, instead of `group_size` of the method's section, such as `rl.group_size`."""
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


class AgentConfig(Section):
    """Settings of playing episodes."""

    kind: Literal["model", "external"] = "model"
    """model: the model answers the environment's observations. external: a program of yours drives the episode and
    calls the model through a proxy with OpenAI's API."""
    program: str | tuple[str, ...] = ""
    """Program of an external agent: a Python function such as "my_module:play", or a command such as
    ["python", "agent.py"]. Each episode has a process of its own."""
    program_start: Literal["fork", "process"] = "fork"
    """Start of a Python function. fork: one process imports its module once and forks for every episode. process: every
    episode starts Python and imports the module. A command is always a new process."""
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
    attempts: int = Field(3, ge=2)
    """Attempts of style `reflect`."""
    retry: Literal["failure", "always"] = "failure"
    """When style `reflect` starts another attempt: after a failed one, or after every one."""
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
    """Episodes that are played at the same time, over all environments. If several environments wait, slots are shared
    by weight."""
    open_ahead: int | None = Field(None, ge=0)
    """Environments that are opened and reset beside the episodes that are played, so that the engine does not wait for
    them. By default a quarter of `concurrency`, at most 16."""
    opening: int | None = Field(None, ge=1)
    """Environments of one name that are opened and reset at the same time. By default as many as there are cores, at
    least 4, if they run in this process; no bound if they run on a server."""
    retries: int = Field(2, ge=0)
    """Retries of an episode that failed."""
    step_timeout_s: float = Field(60.0, gt=0)
    """Seconds that one call of an environment may take."""
    episode_timeout_s: float = Field(1800.0, gt=0)
    """Seconds that an episode may take."""
    on_timeout: Literal["retry", "truncate"] = "retry"
    """Action when the episode's deadline passes. retry: play it again with another seed, so that slow episodes are
    missing from training. truncate: end it there and train on it like an episode that ran out of turns."""

    @property
    def sessions(self) -> int:
        """Environments that are open at the same time."""
        ahead = min(16, self.concurrency // 4) if self.open_ahead is None else self.open_ahead
        return self.concurrency + ahead


POLICY = re.compile(
    r"learner|adapters|oracle|random|past:[1-9]\d*|checkpoint:.+|openai:[^@]+@https?://.+|scripted:[\w.]+:[\w.]+"
)
"""Policies of a role."""


class RoleConfig(Section):
    """One role of a game."""

    policy: str = "learner"
    """Player of the role. "learner": the weights that are trained. "adapters": LoRA adapters of the role's own on the
    learner's base model, trained on this role only. "past:N": one of the learner's last N snapshots, the same for all
    episodes of a group. "checkpoint:PATH": a frozen model folder, run or hub name. "oracle", "random": the
    environment's own. "scripted:my_module:MyPolicy": called with (session, seed), returns a policy.
    "openai:MODEL@URL": a chat API, such as openai:gpt-4o-mini@https://api.openai.com/v1."""
    eval_policy: str | None = None
    """Player of the role in held-out evaluations, instead of `policy`."""
    max_turns: int | None = Field(None, ge=1)
    """Replies of the role per episode, if fewer than the horizon's. Afterwards the role is silent."""

    @field_validator("policy", "eval_policy")
    @classmethod
    def _known_policy(cls, policy: str | None) -> str | None:
        if policy is not None and not POLICY.fullmatch(policy):
            raise ValueError(
                "must be learner, adapters, oracle, random, past:N, checkpoint:PATH, openai:MODEL@URL or "
                "scripted:MODULE:NAME"
            )
        return policy

    @model_validator(mode="after")
    def _evaluates_own_adapters(self) -> RoleConfig:
        if self.eval_policy == "adapters" != self.policy:
            raise ValueError("eval_policy = 'adapters' needs policy = 'adapters', which trains them")
        return self


class TeamConfig(Section):
    """Several agents in one episode, for an environment with roles."""

    roles: dict[str, RoleConfig] = Field(min_length=2)
    """Settings of each role of the environment, by name."""
    rotate: bool = False
    """Whether players change roles from group to group, so that each plays all of them. `max_turns` stays with the
    role."""
    measure: str | None = None
    """Role whose success held-out evaluations measure; by default the first that the learner plays."""
    snapshot_every: int = Field(10, ge=1)
    """Steps between snapshots of the learner for `past:N`. The first is that of the start."""
    api_key_variable: str | None = None
    """Environment variable that holds the key of `openai:` players. The key itself is never written to a file."""

    @model_validator(mode="after")
    def _has_a_learner(self) -> TeamConfig:
        if not self.learner_roles and not self.adapter_roles:
            raise ValueError("at least one role must have policy = 'learner' or 'adapters', got none")
        if self.adapter_roles and self.league_size and not self.learner_roles:
            raise ValueError("past:N is the past of a role with policy = 'learner', got none")
        if self.adapter_roles and self.rotate:
            raise ValueError("policy = 'adapters' trains adapters for one role, remove rotate")
        if self.measure is not None and (self.measure not in self.roles or self.rotate):
            raise ValueError(f"measure = {self.measure!r}: name one of {', '.join(self.roles)}, without rotate")
        return self

    @property
    def learner_roles(self) -> list[str]:
        """Roles that the learner's shared weights play."""
        return [name for name, role in self.roles.items() if role.policy == "learner"]

    @property
    def adapter_roles(self) -> list[str]:
        """Roles with adapters of their own."""
        return [name for name, role in self.roles.items() if role.policy == "adapters"]

    @property
    def league_size(self) -> int:
        """Snapshots that the largest `past:N` draws from; 0 without one."""
        specs = [spec for role in self.roles.values() for spec in (role.policy, role.eval_policy or "")]
        return max(int(spec.removeprefix("past:")) if spec.startswith("past:") else 0 for spec in specs)


class EngineConfig(Section):
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
    """Devices of one node that each vLLM engine splits its weights over. Needs [scale]."""
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
    files: through the run directory, as servers get them."""

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


class WarmStartConfig(Section):
    """Imitation before RL."""

    policy: Literal["random", "oracle"] = "oracle"
    """Policy to imitate. Random play over actions() teaches the grammar and no skill."""
    episodes: int = Field(512, ge=1)
    """Episodes over all environments. The oracle plays an item once; random play repeats items."""
    max_turns: int = Field(8, ge=1)
    """Turns of a demonstration."""
    mistakes: float = Field(0.0, ge=0, lt=1)
    """Share of the oracle's turns with an injected mistake. The loss skips the mistake and keeps the recovery."""
    wrong_thoughts: float = Field(0.0, ge=0, lt=1)
    """Share of the oracle's turns whose thought errs first. The loss skips that and keeps the correction."""
    through_program: bool = False
    """Play through `agent.program`, which calls the model as always and is answered with the policy's actions. So the
    model imitates in the program's own prompts."""
    sft: SFTSettings = SFTSettings()

    @model_validator(mode="after")
    def _mistakes_of_the_oracle(self) -> WarmStartConfig:
        if (self.mistakes or self.wrong_thoughts) and self.policy != "oracle":
            name = "mistakes" if self.mistakes else "wrong_thoughts"
            raise ValueError(
                f"{name} = {getattr(self, name):g}: random play has no solution to go back to, set policy = 'oracle' "
                f"or leave {name} out"
            )
        return self


class EvalConfig(Section):
    """Held-out evaluation: before training, after it, and every few steps."""

    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates only before and after."""
    episodes: int = Field(200, ge=1)
    """Items per environment, spread evenly over its subsets; fewer if it has fewer."""
    samples: int = Field(1, ge=1)
    """Episodes of each item. Raise it if an environment has few held-out items."""
    max_turns: int = Field(10, ge=1)
    """Turns per episode in evaluation."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature in evaluation. 0 takes the most likely token."""


class CheckpointConfig(Section):
    """Checkpoints of a run."""

    every: int = Field(10, ge=1)
    """Steps between checkpoints. The last step always gets one."""
    keep: int = Field(2, ge=1)
    """Number of checkpoints to keep. Older ones are deleted."""
    optimizer: bool = True
    """Save the optimizer, too. Without it a checkpoint takes a sixth of the space and cannot be resumed."""
    background: bool = False
    """Write checkpoints from a copy in host memory while training continues."""


class ScaleConfig(Section):
    """Processes of a run on a Ray cluster. Without this section everything runs in one process."""

    learners: int = Field(1, ge=1)
    """Learner ranks (FSDP2)."""
    engines: int = Field(1, ge=1)
    """Engine replicas that sample."""
    env_hosts: int = Field(1, ge=1)
    """Processes that play episodes, each with a pool of sessions."""
    layout: Literal["colocated", "disaggregated"] = "disaggregated"
    """colocated: each device of an engine is shared with a learner. disaggregated: each has its own."""
    address: str | None = None
    """Address of a Ray cluster that this machine is part of, auto or head:6379. Without it, the run starts Ray."""
    nodes: int | None = Field(None, ge=1)
    """Nodes of the cluster at `address` to wait for before the run starts, at most worker_timeout_s. The command may
    then be started before the cluster. Without it, the cluster must be there; missing GPUs and cores are waited for."""
    learner_cpus: float = Field(1.0, gt=0, le=1024, allow_inf_nan=False)
    """Cores that each learner reserves."""
    engine_cpus: float = Field(1.0, gt=0, le=1024, allow_inf_nan=False)
    """Cores that each engine reserves."""
    env_host_cpus: float = Field(1.0, gt=0, le=1024, allow_inf_nan=False)
    """Cores that each environment host reserves."""
    object_store_mb: int | None = Field(None, ge=80)
    """Size of Ray's object store, if the run starts Ray; by default Ray's own choice."""
    shard_ranks: int | None = Field(None, ge=1)
    """Ranks that share one copy of the model; by default all. Set it to the GPUs of a node, so that parameters are
    gathered within a node and only gradients are summed between nodes (HSDP)."""
    offload: bool = False
    """Keep each rank's shard of weights, gradients and moments on the host, where the optimizer runs (FSDP2). Adapters
    stay on the device."""
    reduce_gradients: Literal["pass", "update"] = "pass"
    """When to sum gradients over ranks: after each pass, or once per update. The latter sends less, but each rank holds
    whole gradients in float32. Sums between groups of shard_ranks are always made once per update."""
    bucket_mb: int = Field(256, ge=1)
    """Size of the buckets in which weights are sent to engines."""
    worker_timeout_s: float = Field(600.0, gt=0, allow_inf_nan=False)
    """Timeout of starting a worker, the first time or again. Ranks wait longer for each other, because the death of a
    rank is reported at once."""

    @model_validator(mode="after")
    def _pairs(self) -> ScaleConfig:
        if self.learners % (self.shard_ranks or self.learners):
            raise ValueError(f"shard_ranks = {self.shard_ranks} must divide learners = {self.learners}")
        if self.address is not None and self.address.startswith("ray://"):
            raise ValueError(
                f"address = {self.address!r}: the run's own process must be on a node of the cluster, Ray's client "
                "will not do; start the command there with address = 'auto'"
            )
        if self.nodes is not None and self.address is None:
            raise ValueError(f"nodes = {self.nodes} needs the address of a cluster: set address = 'auto'")
        return self
