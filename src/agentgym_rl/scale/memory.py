"""Memory estimate of a run: bytes on each device and on each host, by purpose. Standard library only.

Formulas, with P parameters, D ranks that share a copy of the model, b bytes of a weight in a pass (4 or 2), T tokens
of a micro-batch, H hidden size, I intermediate size, L layers, l parameters of one layer, E those of embedding and
head, N and K query and key/value heads of width w:

    learner, alone in float32      4P weights + 4P gradients + 8P moments
    learner, alone in bfloat16     2P weights + 2P gradients (4P over several passes) + 6P moments and lower halves
    learner, sharded over D ranks  the same / D, or with offload on the host; and during a pass
                                   b (2l + E) gathered weights: a layer, the next one, and the root outside of layers
                                   b (l + E) gradients before they are sharded: the root's last until the pass ends
                                   4 max(l, E) bytes of float32 that are being summed over ranks, one group at a time
                                   4P whole gradients more, if they are summed over ranks once per update
    offload_moments                moments and lower halves of a part of the model, on the device only in a step,
                                   without activations
    activations                    T L (4 H + 2 w (N + K) + 3 I) b; with checkpoint_activations T L H b + two layers;
                                   with offload_activations two layers, the rest on the host
    head                           a chunk of logits in float32, 160 MB at most, and its gradient
    engine, native                 bP weights + 2 L K w b bytes of cache for each token it can hold, and a layer's share
                                   of that once more while the cache grows
    engine, vLLM                   its memory_share of the whole device, which must hold bP weights, one episode and its
                                   buffers; the excess of weights, buffers and a cache of a given size over it; and
                                   its process, because vLLM starts only if its share is free after CUDA has started
    reference                      bP / D;   critic: another learner, without the head
    teacher, of P' parameters      bP' / D; its passes keep two layers of activations and gather as the learner's do.
                                   One with adapters is whole on every rank for a moment, before it is sharded
    driver                         weights and cache of a judge, weights of a reward model: in the process of the run,
                                   or with ranks in that of the driver, which may be on any of their devices
    warm start                     a learner without reference and critic, before there are engines
    weights, colocated             2b V, and 2b V more for vLLM, with V parameters of the embedding: gathered, in the
                                   shared buffer (at least a bucket), and vLLM's two copies
    host                           `on_each_host`

These are estimates. `RESERVE` covers allocators and libraries.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

GIB = 1 << 30
RESERVE = 0.08
"""Share of a device lost to frameworks and fragmentation."""
PROCESS_BYTES = 1 * GIB
"""GPU memory of a process: the driver's context and buffers of libraries."""
LOADING_BYTES = GIB // 5
"""Host memory of a process that loads, beside the weights: mapped pages of a file, code of the model
(benchmarks/loading.py)."""
HEAD_CHUNK_BYTES = 4 * (40 << 20)
"""Bytes of logits in memory at once."""
TEMPORARY_PARTS = ("gradients", "gathered", "whole gradients", "summed gradients", "activations")
"""Parts that a learner needs only while it learns."""
PART_PARAMETERS = 128 << 20
"""Parameters whose moments are on the device at once with offload_moments, unless one tensor has more."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's size."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_width: int = 0
    """0: hidden / heads."""
    tied: bool = False
    """The head is the embedding."""
    parameters: int = 0
    """0: computed from the other fields."""
    positions: int = 0
    """Maximum context in tokens; 0: unknown."""

    @property
    def width(self) -> int:
        return self.head_width or self.hidden // self.heads

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden * self.width * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def count(self) -> int:
        return self.parameters or self.layers * self.layer_parameters + self.embedding_parameters + self.hidden


@dataclass(frozen=True, slots=True)
class Demand:
    """Settings of a recipe that determine its memory."""

    shape: Shape
    dtype_bytes: int
    """Bytes of a weight in a pass: 4 for float32, 2 for bfloat16."""
    learners: int = 1
    engines: int = 1
    distributed: bool = False
    """Engines are separate processes; else they share the learner's weights."""
    colocated: bool = True
    """Learner and engine share a device."""
    reference: bool = False
    critic: bool = False
    teacher: Shape | None = None
    """Teacher of distillation in the learner's process, with the type of the learner's weights."""
    teacher_has_adapters: bool = False
    """The teacher is loaded whole on every rank and then sharded."""
    driver: dict[str, dict[str, int]] = field(default_factory=dict)
    """Bytes of the models in the driver's process (judge, reward models), by place and purpose. Places: `device`, one
    of the run's; `host`; or the name of a GPU that the run does not use, such as `cuda:1`."""
    overlap: bool = False
    """The engine has its own weights, to play while the learner works, or because it is vLLM."""
    trained: int | None = None
    """Trained parameters (LoRA); None for all."""
    micro_batch_tokens: int = 16384
    checkpoint_activations: bool = False
    shard_ranks: int | None = None
    """Learners that share one copy of the model; None for all."""
    offload: bool = False
    """Shards of weights, gradients and moments stay on the host."""
    offload_moments: bool = False
    offload_activations: bool = False
    reduce_once: bool = False
    """Gradients are summed over ranks once per update."""
    background: bool = False
    """Checkpoints are written from copies on the host."""
    sessions: int = 256
    """Episodes that one engine plays at once."""
    context: int = 8192
    """Maximum tokens of an episode."""
    engine: Literal["native", "vllm", "elsewhere"] = "native"
    """elsewhere: servers with their own memory."""
    engine_bytes: int = 2
    """Bytes of a weight in vLLM."""
    memory_share: float = 0.4
    """vLLM's share of a device."""
    cache_bytes: int | None = None
    """Size of vLLM's cache, if set."""
    replicas: int = 1
    """vLLM engines on the device of one process."""
    tensor_parallel: int = 1
    """Devices of one vLLM engine."""
    bucket_bytes: int = 256 << 20
    """Size of the buckets in which weights are sent."""
    warm_start: dict[str, Any] | None = None
    """Fields with other values during the imitation before RL, such as micro_batch_tokens."""
    gpu: bool = True
    """The device is a GPU; else its memory is the host's."""

    @property
    def shards(self) -> int:
        """Number of parts of one copy of the model."""
        return (self.shard_ranks or self.learners) if self.distributed and self.trained is None else 1

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of moments, and in bfloat16 lower halves, of one learner."""
        if self.trained is not None:
            return 8 * self.trained
        return (8 if self.dtype_bytes == 4 else 6) * self.shape.count // self.shards


@dataclass(slots=True)
class Memory:
    """Bytes on one device, by purpose."""

    parts: dict[str, int] = field(default_factory=dict)
    problem: str = ""
    """Why the run cannot work, however large the device is."""
    budget: int = 0
    """Bytes of a part that limits itself (vLLM's share), for which no reserve is needed."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def fits(self, device_bytes: int) -> bool:
        usable = (device_bytes - self.budget) * (1.0 - RESERVE)
        return not self.problem and self.total - self.budget <= usable


def learner_memory(d: Demand) -> Memory:
    """Return the memory of a learner on its device."""
    shape, b = d.shape, d.dtype_bytes
    parts: dict[str, int] = {}
    kept = 0 if d.offload and d.gpu and d.trained is None else 1
    if d.trained is not None:  # whole frozen weights on every rank; float32 adapters with gradients and moments
        parts["weights"], parts["gradients"] = b * shape.count + 4 * d.trained, 4 * d.trained
    else:
        parts["weights"], parts["gradients"] = (kept * size * shape.count // d.shards for size in (b, 4))
    parts["optimizer"] = kept * d.optimizer_bytes
    if d.distributed and d.trained is None:
        # A pass gathers two layers (one computes while the next is fetched), and the root outside of layers.
        layer, root = shape.layer_parameters, shape.embedding_parameters
        models = [shape] if d.teacher is None else [shape, d.teacher]
        parts["gathered"] = b * max(2 * model.layer_parameters + model.embedding_parameters for model in models)
        parts["whole gradients"] = b * (layer + root) + (4 * shape.count if d.reduce_once else 0)
        parts["summed gradients"] = 4 * max(layer, root)
    if d.reference and d.trained is None:
        parts["reference"] = kept * b * shape.count // d.shards
    if d.teacher is not None:
        parts["teacher"] = kept * b * d.teacher.count // d.shards
    if d.critic:
        trained = d.trained if d.trained is not None else shape.count - shape.embedding_parameters // 2
        parts["critic"] = kept * (12 if b == 2 and d.trained is None else 16) * trained // d.shards
    parts["activations"] = activation_bytes(d) + 2 * HEAD_CHUNK_BYTES
    parts["process"] = PROCESS_BYTES if d.gpu else 0
    if d.offload_moments and d.gpu:
        passing = sum(parts.get(name, 0) for name in TEMPORARY_PARTS if name != "gradients")
        largest = max(PART_PARAMETERS, shape.vocabulary * shape.hidden // d.shards)
        share = min(1.0, largest / (d.trained or shape.count // d.shards))
        parts["optimizer"] = max(0, int(parts["optimizer"] * share) - passing)
    return Memory(parts)


def warm_start_memory(d: Demand) -> Memory:
    """Return the memory of a learner on its device during the warm start."""
    return learner_memory(replace(d, reference=False, critic=False, teacher=None, **d.warm_start or {}))


def activation_bytes(d: Demand) -> int:
    """Return the bytes kept for the backward pass of one micro-batch, or for the teacher's pass if it needs more."""
    shape, tokens, b = d.shape, d.micro_batch_tokens, d.dtype_bytes
    layer = _layer_activation_bytes(shape, tokens, b)
    scoring = 0 if d.teacher is None else scoring_bytes(d.teacher, tokens, b)
    if d.offload_activations and d.gpu:
        return max(scoring, 2 * layer)
    if d.checkpoint_activations:
        return max(scoring, tokens * b * shape.hidden * shape.layers + 2 * layer)
    return max(scoring, layer * shape.layers)


def scoring_bytes(shape: Shape, tokens: int, dtype_bytes: int) -> int:
    """Return the bytes of the activations of a pass without gradients: those of two layers."""
    return 2 * _layer_activation_bytes(shape, tokens, dtype_bytes)


def _layer_activation_bytes(shape: Shape, tokens: int, dtype_bytes: int) -> int:
    attention = shape.width * (2 * shape.heads + 2 * shape.kv_heads)
    return tokens * dtype_bytes * (4 * shape.hidden + attention + 3 * shape.intermediate)


def engine_memory(d: Demand, device_bytes: int = 0) -> Memory:
    """Return the memory of an engine on its device, without weights if it shares the learner's."""
    shape, b = d.shape, d.dtype_bytes
    per_token = 2 * shape.layers * shape.kv_heads * shape.width
    if d.engine == "elsewhere":
        return Memory()
    if d.engine == "vllm":
        heads = max(1, shape.kv_heads // d.tensor_parallel)  # per device; fewer heads than devices are replicated
        return _vllm_memory(d, per_token // shape.kv_heads * heads * d.engine_bytes * d.context, device_bytes)
    own = d.distributed or d.overlap
    cache = per_token * b * d.sessions * d.context
    parts = {"weights": b * shape.count if own else 0, "KV cache": cache, "growing cache": cache // shape.layers}
    return Memory(parts | {"process": PROCESS_BYTES if d.gpu and d.distributed else 0})


def _vllm_memory(d: Demand, episode: int, device_bytes: int) -> Memory:
    """Return vLLM's memory. `episode`: bytes of cache without which it refuses to start."""
    process = PROCESS_BYTES if d.gpu else 0
    # Weights, the adapter and vLLM's buffers.
    fixed = d.engine_bytes * (d.shape.count // d.tensor_parallel + (d.trained or 0)) + process
    share = int(d.memory_share * device_bytes)
    problem, excess = "", 0
    if d.cache_bytes is not None:
        # The share is then no limit, but vLLM still refuses to start if less is free.
        excess = max(0, fixed + d.cache_bytes - share)
        if d.cache_bytes < episode:
            problem = (
                f"engine.kv_cache_gib = {d.cache_bytes / GIB:.3g} cannot hold one episode of {d.context} tokens, which "
                f"takes {episode / GIB:.3g} GiB"
            )
    elif share < fixed + episode:
        problem = (
            f"engine.memory_share = {d.memory_share:g} is {share / GIB:.1f} GiB, and vLLM needs "
            f"{(fixed + episode) / GIB:.1f} GiB for weights and one episode of {d.context} tokens"
        )
    count = 1 if d.distributed else d.replicas
    parts = {"vLLM's share": share, "beyond its share": excess, "process": process}
    return Memory({name: size * count for name, size in parts.items()}, problem, share * count)


def on_each_device(d: Demand, device_bytes: int = 0) -> dict[str, Memory]:
    """Return the memory of each kind of device: {"learner": ..., "engine": ...}, or "device" if a pair shares one. The
    pair takes turns: while the learner works, the engine frees its cache (vLLM everything); while it does not, it has
    no gradients and no activations. A warm start and the loading of a teacher come first. Any device of several may
    have the driver's models, too."""
    learner, engine = learner_memory(d), engine_memory(d, device_bytes)
    devices: dict[str, Memory] = {}
    kind = "device" if d.colocated else "learner"
    if d.warm_start is not None:
        devices[f"{kind}, warm start"] = warm_start_memory(d)
    if d.teacher is not None and d.teacher_has_adapters and d.shards > 1:
        loaded = {name: learner.parts[name] for name in ("weights", "reference", "process") if name in learner.parts}
        devices[f"{kind}, loading the teacher"] = Memory(loaded | {"teacher": d.dtype_bytes * d.teacher.count})
    driver = _driver_parts(d, "device") if d.gpu or not d.distributed else {}
    learners = {f"learner {name}": size for name, size in learner.parts.items()}
    engines = {f"engine {name}": size for name, size in engine.parts.items()}
    if not d.distributed:
        return devices | {"device": Memory(learners | engines | driver, engine.problem, engine.budget)}
    if not d.colocated:
        if d.gpu and engine.parts:
            engine.parts["weights on their way"] = _in_transit_bytes(d)
        learner.parts |= driver
        engine.parts |= driver if engine.parts else {}
        return devices | {"learner": learner} | ({"engine": engine} if engine.parts else {})
    sleeping = {name: size for name, size in engines.items() if name in ("engine weights", "engine process")}
    if d.engine == "vllm":
        sleeping = {"engine process": PROCESS_BYTES * d.gpu}
    kept = {name: size for name, size in learners.items() if name.removeprefix("learner ") not in TEMPORARY_PARTS}
    devices["device, learning"] = Memory(learners | sleeping | driver)
    if d.gpu:
        kept["learner weights on their way"] = _in_transit_bytes(d)
    devices["device, playing"] = Memory(kept | engines | driver, engine.problem, engine.budget)
    return devices


def on_other_devices(d: Demand) -> dict[str, Memory]:
    """Return the memory of the driver's models on GPUs that the run does not use otherwise."""
    return {place: Memory(_driver_parts(d, place)) for place in d.driver if place not in ("device", "host")}


def _driver_parts(d: Demand, place: str) -> dict[str, int]:
    """Return the parts of the driver's models in a place. On a GPU without the learner the process counts, too."""
    parts = dict(d.driver.get(place, {}))
    own_process = d.distributed and d.gpu if place == "device" else place != "host"
    return parts | ({"driver process": PROCESS_BYTES} if parts and own_process else {})


def _driver_loading_bytes(d: Demand) -> int:
    """Return the host memory of the driver's largest model while it is loaded for a GPU."""
    parts = [part for place, models in d.driver.items() if place != "host" for part in models.items()]
    return max((size for name, size in parts if name.endswith(" weights")), default=0)


def _in_transit_bytes(d: Demand) -> int:
    """Return the bytes of all simultaneous copies of the largest tensor on an engine's device while weights are sent. A
    learner on the device gathers it, unless it is frozen. vLLM is sent adapters without the frozen weights."""
    if d.trained is not None and d.engine == "vllm":
        return d.bucket_bytes
    largest = d.dtype_bytes * d.shape.vocabulary * d.shape.hidden
    gathered = largest if d.colocated and d.trained is None else 0
    return gathered + max(largest, d.bucket_bytes) + (2 * largest if d.engine == "vllm" else 0)


def on_each_host(d: Demand, per_node: int, host_bytes: int = 0) -> dict[str, Memory]:
    """Return the host memory of nodes with `per_node` processes of a kind, without environments.

    Ranks and native engines read files straight into the memory where weights stay. For a GPU the pages of the files
    are counted once, although the kernel can drop them. The driver loads a model whole. Each rank holds its share of a
    checkpoint's model. A vLLM that shares its device keeps its weights on the host while it sleeps.
    """
    shape, b = d.shape, d.dtype_bytes
    if not d.distributed:
        kept = {f"{name} of 1 ranks": size for name, size in _on_host(d).items()} | _driver_parts(d, "host")
        running = {"host, running": Memory(kept)} if kept else {}
        # One model after the other.
        whole = max(b * shape.count, b * d.teacher.count if d.teacher else 0, _driver_loading_bytes(d))
        return {"host, loading": Memory({"weights": whole}), **running} if d.gpu else {}
    ranks, engines = min(d.learners, per_node), min(d.engines, max(1, per_node // d.tensor_parallel))
    one_node = per_node >= (d.learners if d.colocated else d.learners + d.engines * d.tensor_parallel)
    load = {"pages of files": b * shape.count}
    if not d.gpu:
        engines_here = engines if d.engine == "native" else 0
        load = {f"weights of {ranks} ranks": b * shape.count * ranks // d.shards}
        load |= {f"weights of {engines} engines": b * shape.count * engines_here}
        load |= {"loading": LOADING_BYTES * (ranks + engines_here)}
    if d.teacher is not None:
        shared = 1 if d.teacher_has_adapters else d.shards
        copies = 1 if d.gpu and not d.teacher_has_adapters else ranks / shared
        load["teacher"] = int(b * d.teacher.count * copies)
    if d.gpu and (driver := _driver_loading_bytes(d)):
        load["model of the driver"] = driver
    learning = {"checkpoint": b * shape.count * ranks // d.learners if d.trained is None else 4 * d.trained}
    learning |= {f"{name} of {ranks} ranks": ranks * size for name, size in _on_host(d).items()}
    learning |= _driver_parts(d, "host") if d.gpu else _driver_parts(d, "device")
    if d.engine == "vllm" and d.colocated and d.gpu:
        learning[f"{engines} sleeping vLLMs"] = d.engine_bytes * shape.count * engines
    if not d.gpu:
        learner, engine = learner_memory(d), engine_memory(d, host_bytes)
        own = {f"{ranks} ranks": ranks * learner.total, f"{engines} engines": engines * engine.total}
        warm = 0 if d.warm_start is None else ranks * warm_start_memory(d).total
        return {
            "host, warm start": Memory({f"{ranks} ranks": warm}),
            "host, loading": Memory(load),
            "host, running": Memory(own | learning),
        }
    if d.colocated or one_node:
        return {"host, loading": Memory(load), "host, running": Memory(learning)}
    return {
        "host of learners, loading": Memory(load),
        "host of learners, running": Memory(learning),
        "host of engines, loading": Memory(load if d.engine == "native" else {}),
    }


def _on_host(d: Demand) -> dict[str, int]:
    """Return what one learner keeps on the host of its device, by purpose."""
    parts: dict[str, int] = {}
    whole = learner_memory(replace(d, offload=False, offload_moments=False, offload_activations=False, gpu=False)).parts
    if d.gpu and d.offload and d.trained is None:
        parts["shards"] = sum(
            whole.get(name, 0) for name in ("weights", "gradients", "optimizer", "reference", "teacher", "critic")
        )
    elif d.gpu and d.offload_moments:
        parts["moments"] = d.optimizer_bytes
    if d.gpu and d.offload_activations:
        parts["activations"] = activation_bytes(replace(d, offload_activations=False))
    if d.background:
        model = 4 * d.trained if d.trained is not None else d.dtype_bytes * d.shape.count // d.learners
        parts["copies for checkpoints"] = d.optimizer_bytes + model
    return parts


def table(devices: dict[str, Memory], available: int | None) -> tuple[list[str], bool]:
    """Return (lines to print, whether everything fits). Without `available` bytes everything fits."""
    lines, all_fit = [], True
    for kind, memory in devices.items():
        if not memory.total and not memory.problem:
            continue
        line = f"{kind}: {memory.total / GIB:.1f} GiB"
        if available is not None:
            fits = memory.fits(available)
            all_fit = all_fit and fits
            verdict = "fits" if fits else "does not fit"
            line += f" of {available / GIB:.0f} GiB, {verdict} (less {RESERVE:.0%} in reserve)"
        lines.append(f"{line}: {memory.problem}" if memory.problem else line)
        lines += [f"    {name:26} {size / GIB:8.2f} GiB" for name, size in memory.parts.items() if size]
    return lines, all_fit
