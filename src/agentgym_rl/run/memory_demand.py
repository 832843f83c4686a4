"""Memory that a recipe needs, before it starts (`agentgym-rl doctor recipe.toml`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agentgym_rl.config import Config, ModelConfig, ScaleConfig
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.load_model import base_of_adapters, loaded_dtype
from agentgym_rl.scale.memory import (
    GIB,
    Demand,
    Shape,
    engine_memory,
    on_each_device,
    on_each_host,
    on_other_devices,
    scoring_bytes,
    table,
)
from agentgym_rl.training.locate_model import find_model, find_reward_model, folder_of
from agentgym_rl.training.reward_settings import SCORED_TOKENS, JudgeSettings, RewardSettings
from agentgym_rl.training.settings import DistillSettings, OptimizerSettings

GPUS_PER_NODE = 8
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of a config.json with the number of experts."""
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "head_dim",
    "max_position_embeddings",
)
"""Keys of a config.json that memory is computed from."""


def demand_of(config: Config, *, gpu: bool = True) -> Demand:
    """Return the memory demand of a recipe."""
    shape = shape_of(config.model)
    scale, rl, engine = config.scale, config.rl, config.engine
    optimizer = rl.optimizer if config.online else (config.sft or config.dpo or config.reward_model or rl).optimizer
    lora = config.model.lora
    longest = config.longest_context()
    teacher, teacher_has_adapters = teacher_shape(rl.distill if config.online else None)
    passes = _memory_settings(optimizer)
    critic = config.online and rl.algorithm == "ppo"
    if critic:
        passes["micro_batch_tokens"] = max(optimizer.micro_batch_tokens, rl.critic.optimizer.micro_batch_tokens)
    place = partial(_place, own=config.model.device, any_is_own=scale is not None, gpu=gpu)
    return Demand(
        shape=shape,
        dtype_bytes=BYTES[config.model.dtype],
        learners=scale.learners if scale else 1,
        engines=scale.engines if scale else 1,
        distributed=scale is not None,
        colocated=scale is None or scale.layout == "colocated",
        reference=config.online and rl.kl_coef > 0,
        critic=critic,
        teacher=teacher,
        teacher_has_adapters=teacher_has_adapters,
        driver=_driver_models(config.judge, config.rewards, place),
        overlap=config.online and (rl.overlap > 0 or config.engine.kind == "vllm"),
        trained=None if lora is None else _adapter_parameters(shape, lora.rank),
        **passes,
        shard_ranks=scale.shard_ranks if scale else None,
        offload=scale is not None and scale.offload,
        reduce_once=scale is not None and scale.reduce_gradients == "update",
        background=config.checkpoint.background,
        sessions=config.sessions_per_engine(),
        context=min(longest, shape.positions or longest),
        engine="elsewhere" if engine.urls else engine.kind,
        engine_bytes=BYTES[config.model.dtype if engine.dtype == "auto" else engine.dtype],
        memory_share=engine.memory_share,
        cache_bytes=None if engine.kv_cache_gib is None else int(engine.kv_cache_gib * GIB),
        replicas=engine.replicas,
        tensor_parallel=engine.tensor_parallel,
        bucket_bytes=scale.bucket_mb << 20 if scale else 0,
        warm_start=None if config.warm_start is None else _memory_settings(config.warm_start.sft.optimizer),
        gpu=gpu,
    )


def _memory_settings(optimizer: OptimizerSettings) -> dict[str, Any]:
    """Return the settings of an optimizer that change a learner's memory, by their names in a Demand."""
    names = ("micro_batch_tokens", "checkpoint_activations", "offload_activations", "offload_moments")
    return {name: getattr(optimizer, name) for name in names}


def teacher_shape(distill: DistillSettings | None) -> tuple[Shape | None, bool]:
    """Return the shape of a teacher in the learner's process, and whether it has adapters. One at a url has none."""
    if distill is None or distill.url is not None:
        return None, False
    return _frozen_shape(folder_of(distill.teacher, "rl.distill.teacher"), distill.teacher, "rl.distill.teacher")


def _frozen_shape(folder: Path, path: str, setting: str) -> tuple[Shape, bool]:
    """Return the shape of a model that `setting` names, or of the base of its adapters, and whether it has some."""
    base = base_of_adapters(folder)
    name = base or (str(folder) if folder.is_dir() else path)
    return shape_of_folder(name, setting), base is not None


def _driver_models(
    judge: JudgeSettings | None, rewards: Sequence[RewardSettings], place_of: Callable[[str], str]
) -> dict[str, dict[str, int]]:
    """Return the bytes of the judge and of reward models in the driver's process, by place (see Demand).

    `place_of` returns the place of a device that the recipe names.
    """
    places: dict[str, dict[str, int]] = {}
    if judge is not None and judge.path is not None:
        shape = shape_of_folder(judge.path, "judge.path")
        context = min(judge.max_context, shape.positions or judge.max_context)
        size = BYTES[judge.dtype]
        parts = engine_memory(Demand(shape, size, overlap=True, sessions=judge.concurrency, context=context)).parts
        place = places.setdefault(place_of(judge.device), {})
        place |= {f"judge {name}": part for name, part in parts.items() if part}
    for reward in rewards:
        if reward.kind == "reward_model":
            folder = find_reward_model(reward.path)
            shape, _ = _frozen_shape(folder, reward.path, "rewards.path")
            size = BYTES[loaded_dtype(folder)]
            place = places.setdefault(place_of(reward.device), {})
            place[f"{reward.source} weights"] = size * shape.count
            place[f"{reward.source} activations"] = scoring_bytes(shape, SCORED_TOKENS, size)
    return places


def _place(device: str, *, own: str, any_is_own: bool, gpu: bool) -> str:
    """Return where a model of the driver is: on a `device` of the run, on its `host`, or on another GPU.

    `own` is the device of the run. With `any_is_own` the run may use every GPU.
    """
    if device == "cpu" or (device == "auto" and not gpu and _cuda_bytes() is None):
        return "host" if gpu else "device"
    name, own_name = (gpu_name if ":" in gpu_name else "cuda:0" for gpu_name in (device, own))
    return "device" if gpu and (any_is_own or name == own_name) else name


def shape_of(model: ModelConfig) -> Shape:
    """Return the shape of a model from its config.json or the recipe's scratch settings."""
    if model.scratch is not None:
        s = model.scratch
        sizes = (s.hidden_size, s.intermediate_size, s.num_layers, s.num_heads, s.num_heads, 1000)
        return Shape(*sizes, positions=s.max_context)
    return shape_of_folder(str(model.path), "model.path")


def shape_of_folder(path: str, setting: str) -> Shape:
    """Return the shape of a model from its config.json. Errors name `setting`, the key of the recipe."""
    raw = _read(path, setting)
    if any((raw.get(name) or 0) > 1 for name in EXPERTS):
        raise ConfigError(f"{setting} = {path!r} is a mixture of experts, whose memory is not known here")
    try:
        return Shape(
            hidden=raw["hidden_size"],
            intermediate=raw["intermediate_size"],
            layers=raw["num_hidden_layers"],
            heads=raw["num_attention_heads"],
            kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            vocabulary=raw["vocab_size"],
            head_width=raw.get("head_dim") or 0,
            tied=bool(raw.get("tie_word_embeddings")),
            positions=raw.get("max_position_embeddings") or 0,
        )
    except KeyError as error:
        raise ConfigError(f"{setting} = {path!r}: its config.json does not say {error}") from error


def why_not_split(shape: Shape, devices: int) -> str:
    """Return why vLLM cannot split a model over `devices`, or an empty string.

    If there are fewer key/value heads than devices, vLLM replicates them evenly.
    """
    heads, kv_heads = shape.heads, shape.kv_heads
    if heads % devices == 0 and (kv_heads % devices == 0 or devices % kv_heads == 0):
        return ""
    return f"engine.tensor_parallel = {devices} does not divide the model's heads, {heads} and {kv_heads} of keys"


def diagnose_recipe(
    config: Config, device_gib: float | None, host_gib: float | None = None, gpus_per_node: int = GPUS_PER_NODE
) -> tuple[list[str], bool]:
    """Return (lines to print, whether the recipe fits).

    By default the sizes are those of this machine. With `device_gib` alone, hosts get no verdict.
    """
    gpu = config.model.device != "cpu" and (device_gib is not None or _cuda_bytes() is not None)
    device_bytes = int(device_gib * GIB) if device_gib is not None else _cuda_bytes() if gpu else _host_bytes()
    assert device_bytes is not None
    host_bytes = int(host_gib * GIB) if host_gib is not None else None if device_gib is not None else _host_bytes()
    demand = demand_of(config, gpu=gpu)
    # Without an address all processes are on one machine.
    everybody = demand.learners + demand.engines * demand.tensor_parallel
    per_node = gpus_per_node if config.scale is not None and config.scale.address else everybody
    lines, fits = table(on_each_device(demand, device_bytes), device_bytes)
    others, others_fit = table(on_other_devices(demand), device_bytes if gpu else _cuda_bytes())
    on_hosts, hosts_fit = table(on_each_host(demand, per_node, host_bytes or 0), host_bytes)
    split = why_not_split(demand.shape, demand.tensor_parallel)
    if not split and demand.tensor_parallel > per_node:
        split = f"engine.tensor_parallel = {demand.tensor_parallel}: an engine is on one node, of {per_node} GPUs"
    if split:
        lines.append(f"engine, over its devices: does not fit: {split}")
    count = demand.shape.count
    size = f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"
    head = f"{config.name}: {size} parameters, {config.model.dtype}"
    if demand.distributed:
        head += f", sharded over {demand.learners} learners" if demand.trained is None else ", whole on every learner"
    return [head, *lines, *others, *on_hosts], fits and others_fit and hosts_fit and not split


def too_large(config: Config) -> str | None:
    """Return a warning if a run will probably run out of memory, or None. An estimate does not refuse a run."""
    if config.scale is not None and config.scale.address and config.model.device != "cpu" and _cuda_bytes() is None:
        return None  # the devices are on other machines
    try:
        lines, fits = diagnose_recipe(config, None)
    except ConfigError:
        return None  # loading the model gives a better error
    if fits:
        return None
    (first, *_) = [line for line in lines if "does not fit" in line]
    return f"by the doctor's arithmetic this is too large: {first}; `agentgym-rl doctor RECIPE` shows the parts"


def require_memory(model: ModelConfig, scale: ScaleConfig | None) -> None:
    """Raise ConfigError if the weights of a model from scratch, made in float32 here, exceed the memory."""
    if model.scratch is None or (scale is not None and scale.address):
        return
    parameters, memory = shape_of(model).count, _host_bytes()
    if 4 * parameters > memory:
        raise ConfigError(
            f"model.scratch asks for {parameters / 1e9:,.0f} billion parameters, {4 * parameters / GIB:,.0f} GiB of "
            f"weights, and this machine has {memory / GIB:,.0f} GiB: set a smaller hidden_size, intermediate_size or "
            "num_layers"
        )


def _read(path: str, setting: str) -> dict[str, Any]:
    local = Path(path).expanduser() / "config.json"
    if local.is_file():
        return _checked(path, setting, local)
    folder = find_model(path, setting)
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder).to_dict()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting} = {path!r} cannot be read: {str(error).splitlines()[0]}") from error


def _checked(path: str, setting: str, local: Path) -> dict[str, Any]:
    """Return the config.json of a folder, with its sizes checked."""
    try:
        raw = json.loads(local.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting} = {path!r}: its config.json cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{setting} = {path!r}: its config.json should hold an object, got {type(raw).__name__}")
    for name in (*SIZES, *EXPERTS):
        value = raw.get(name)
        if value is not None and (not isinstance(value, int) or value < (name in SIZES)):
            raise ConfigError(f"{setting} = {path!r}: {name} of its config.json should be a size, got {value!r:.80}")
    return raw


def _adapter_parameters(shape: Shape, rank: int) -> int:
    """Return the parameters of adapters on every linear layer."""
    query, key_value = shape.heads * shape.width, shape.kv_heads * shape.width
    pairs = [(shape.hidden, query), (shape.hidden, key_value), (shape.hidden, key_value), (query, shape.hidden)]
    pairs += [(shape.hidden, shape.intermediate)] * 2 + [(shape.intermediate, shape.hidden)]
    return shape.layers * rank * sum(a + b for a, b in pairs)


def _cuda_bytes() -> int | None:
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def _host_bytes() -> int:
    """Return the memory of this machine, or of its container."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    granted = [path.read_text().strip() for path in CGROUP_LIMITS if path.is_file()]
    return min([memory, *(int(text) for text in granted if text.isdigit())])
