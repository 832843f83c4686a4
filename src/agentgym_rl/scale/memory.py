"""Whether a run fits: bytes on each device and on each node's host, by what they are for. No third packages.

Formulas, with P parameters, D learner ranks, b bytes of a weight as passes use it (4 or 2), T tokens of a micro-batch,
H hidden size, I intermediate size, L layers, l parameters of one layer, E those of embedding and head, N and K query
and key/value heads of width w:

    learner, alone in float32      4P weights + 4P gradients + 8P moments
    learner, alone in bfloat16     2P weights + 2P gradients (4P over several passes) + 6P moments and lower halves
    learner, sharded over D ranks  (4P + 4P + 8P) / D; and while a pass goes
                                   b (2l + E) gathered weights: a layer, the next one, and what belongs to no layer
                                   b (l + E) gradients before they are spread: the root's wait for the end of the pass
                                   4 max(l, E) bytes of float32 that are being summed over ranks, one group at a time
    activations                    T L (4 H + 2 w (N + K) + 3 I) b; with checkpoint_activations T L H b + two layers
    head                           a chunk of logits in float32, 160 MB at most, and its gradient
    engine, native                 bP weights + 2 L K w b bytes of cache for each token it can hold, and a layer's share
                                   of that once more while the cache grows
    engine, vLLM                   its memory_share of the whole device, which must hold bP weights, one episode and its
                                   buffers; what weights, buffers and a cache of a given size take more than that; and
                                   its process, since it starts only where its share is free when CUDA is up
    reference                      bP / D, and whole before it is spread;    critic: another learner, without the head
    warm start                     a learner without reference and critic, before there are engines
    weights, colocated             (4 + 2b) V, and 2b V more for vLLM, with V parameters of the embedding: gathered in
                                   float32, in the engine's type, in the room it is lent in (a bucket's size at least),
                                   and as vLLM keeps it twice
    host                           `on_each_host`

They are estimates: allocators and libraries take a share of their own, for which `RESERVE` is set aside.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

GIB = 1 << 30
RESERVE = 0.08
"""Share of a device that frameworks and fragmentation take."""
CONTEXT = 1 * GIB
"""Of a process on a GPU: the driver's own, and buffers of libraries."""
HEAD_CHUNK = 4 * (40 << 20)
"""Bytes of logits held at once."""
PASSING = ("gradients", "gathered", "whole gradients", "summed gradients", "activations")
"""What a learner holds only while it works."""


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
    """0: counted from the rest."""
    positions: int = 0
    """Tokens that it can read at once; 0: not said."""

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


SHAPES = {
    "1.5B": Shape(1536, 8960, 28, 12, 2, 151_936, tied=True),
    "7B": Shape(3584, 18944, 28, 28, 4, 152_064),
    "32B": Shape(5120, 27648, 64, 40, 8, 152_064),
}
"""The Qwen2.5 family."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a recipe asks of memory."""

    shape: Shape
    dtype_bytes: int
    """Of a weight as passes use it: 4 for float32, 2 for bfloat16."""
    learners: int = 1
    engines: int = 1
    distributed: bool = False
    """Engines are processes of their own; else they share the learner's weights."""
    colocated: bool = True
    """Learner and engine share a device."""
    reference: bool = False
    critic: bool = False
    overlap: bool = False
    """The engine has weights of its own, to play while the learner works, or because it is vLLM."""
    trained: int | None = None
    """Trained parameters (LoRA); None for all."""
    micro_batch_tokens: int = 16384
    checkpoint_activations: bool = False
    sessions: int = 256
    """Episodes that one engine holds at once."""
    context: int = 8192
    """Tokens of each at most."""
    engine: Literal["native", "vllm", "elsewhere"] = "native"
    """elsewhere: servers with memory of their own."""
    engine_bytes: int = 2
    """Of a weight in vLLM."""
    memory_share: float = 0.4
    """vLLM's, of a device."""
    cache_bytes: int | None = None
    """vLLM's cache, where it is set."""
    replicas: int = 1
    """vLLMs on the device of one process."""
    tensor_parallel: int = 1
    """Devices that one vLLM is spread over."""
    bucket_bytes: int = 256 << 20
    """Of weights on their way."""
    warm_start: tuple[int, bool] | None = None
    """(micro_batch_tokens, checkpoint_activations) of the imitation before RL."""
    gpu: bool = True
    """The device is one; else its memory is the host's."""


@dataclass(slots=True)
class Memory:
    """Bytes on one device, by what they are for."""

    parts: dict[str, int] = field(default_factory=dict)
    problem: str = ""
    """Why it cannot work, whatever room there is."""
    budget: int = 0
    """Of the bytes, those that somebody keeps to by himself: no reserve is needed for them."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def fits(self, device_bytes: int) -> bool:
        rest = (device_bytes - self.budget) * (1.0 - RESERVE)
        return not self.problem and self.total - self.budget <= rest


def learner_memory(d: Demand) -> Memory:
    """On one learner's device."""
    shape, b = d.shape, d.dtype_bytes
    parts: dict[str, int] = {}
    if d.trained is not None:  # frozen weights whole on every rank, adapters in float32 with everything
        parts["weights"] = b * shape.count + 4 * d.trained
        parts["gradients"], parts["optimizer"] = 4 * d.trained, 8 * d.trained
    elif d.distributed:
        parts["weights"] = 4 * shape.count // d.learners
        parts["gradients"], parts["optimizer"] = 4 * shape.count // d.learners, 8 * shape.count // d.learners
        # Gathered as a pass goes: two layers (the next is fetched while one works), and what belongs to no layer.
        layer, root = shape.layer_parameters, shape.embedding_parameters
        parts["gathered"] = b * (2 * layer + root)
        parts["whole gradients"] = b * (layer + root)
        parts["summed gradients"] = 4 * max(layer, root)
    else:
        parts["weights"] = b * shape.count
        parts["gradients"] = 4 * shape.count
        parts["optimizer"] = (8 if b == 4 else 6) * shape.count
    if d.reference and d.trained is None:
        parts["reference"] = b * shape.count // (d.learners if d.distributed else 1)
    if d.critic:
        trained = d.trained if d.trained is not None else shape.count - shape.embedding_parameters // 2
        parts["critic"] = 16 * trained // (d.learners if d.distributed and d.trained is None else 1)
    parts["activations"] = activation_bytes(d) + 2 * HEAD_CHUNK
    parts["process"] = CONTEXT if d.gpu else 0
    return Memory(parts)


def warm_start_memory(d: Demand) -> Memory:
    """On one learner's device, while it imitates."""
    assert d.warm_start is not None
    tokens, checkpoint = d.warm_start
    plain = replace(d, reference=False, critic=False)
    return learner_memory(replace(plain, micro_batch_tokens=tokens, checkpoint_activations=checkpoint))


def activation_bytes(d: Demand) -> int:
    """Kept for the backward pass of one micro-batch."""
    shape, tokens, b = d.shape, d.micro_batch_tokens, d.dtype_bytes
    attention = shape.width * (2 * shape.heads + 2 * shape.kv_heads)
    layer = tokens * b * (4 * shape.hidden + attention + 3 * shape.intermediate)
    if d.checkpoint_activations:
        return tokens * b * shape.hidden * shape.layers + 2 * layer
    return layer * shape.layers


def engine_memory(d: Demand, device_bytes: int = 0) -> Memory:
    """On one engine's device; without weights where it shares the learner's."""
    shape, b = d.shape, d.dtype_bytes
    per_token = 2 * shape.layers * shape.kv_heads * shape.width
    if d.engine == "elsewhere":
        return Memory()
    if d.engine == "vllm":
        heads = max(1, shape.kv_heads // d.tensor_parallel)  # on each device; fewer than devices are there twice
        return _vllm_memory(d, per_token // shape.kv_heads * heads * d.engine_bytes * d.context, device_bytes)
    own = d.distributed or d.overlap
    cache = per_token * b * d.sessions * d.context
    parts = {"weights": b * shape.count if own else 0, "KV cache": cache, "growing cache": cache // shape.layers}
    return Memory(parts | {"process": CONTEXT if d.gpu and d.distributed else 0})


def _vllm_memory(d: Demand, episode: int, device_bytes: int) -> Memory:
    """`episode`: bytes of cache without which it refuses to start."""
    process = CONTEXT if d.gpu else 0
    least = d.engine_bytes * d.shape.count // d.tensor_parallel + process  # weights, and its own buffers
    share = int(d.memory_share * device_bytes)
    problem, more = "", 0
    if d.cache_bytes is not None:
        # Its share is then no limit, but it still refuses to start where less than that is free.
        more = max(0, least + d.cache_bytes - share)
        if d.cache_bytes < episode:
            problem = (
                f"engine.kv_cache_gib = {d.cache_bytes / GIB:.3g} cannot hold one episode of {d.context} tokens, which "
                f"takes {episode / GIB:.3g} GiB"
            )
    elif share < least + episode:
        problem = (
            f"engine.memory_share = {d.memory_share:g} is {share / GIB:.1f} GiB, and vLLM needs "
            f"{(least + episode) / GIB:.1f} GiB for weights and one episode of {d.context} tokens"
        )
    count = 1 if d.distributed else d.replicas
    parts = {"vLLM's share": share, "beyond its share": more, "process": process}
    return Memory({name: size * count for name, size in parts.items()}, problem, share * count)


def on_each_device(d: Demand, device_bytes: int = 0) -> dict[str, Memory]:
    """What each kind of device must hold: {"learner": ..., "engine": ...}, or both on "device", where those of one pair
    take turns: an engine gives its cache back while the learner works (vLLM everything), which has neither gradients
    nor activations while it does not. Before that come a warm start and the loading of the reference."""
    learner, engine = learner_memory(d), engine_memory(d, device_bytes)
    found: dict[str, Memory] = {}
    if d.warm_start is not None:
        found["device, warm start" if d.colocated else "learner, warm start"] = warm_start_memory(d)
    learners = {f"learner {name}": size for name, size in learner.parts.items()}
    engines = {f"engine {name}": size for name, size in engine.parts.items()}
    if not d.distributed:
        return found | {"device": Memory(learners | engines, engine.problem, engine.budget)}
    whole = {"reference, whole": d.dtype_bytes * d.shape.count} if d.reference and d.trained is None else {}
    if not d.colocated:
        if whole:
            found["learner, loading"] = Memory(whole | {"process": CONTEXT * d.gpu})
        return found | {"learner": learner} | ({"engine": engine} if engine.parts else {})
    if whole:
        beside = {"engine weights": engine.parts.get("weights", 0)}
        found["device, loading"] = Memory(whole | beside | {"processes": 2 * CONTEXT * d.gpu})
    asleep = {name: size for name, size in engines.items() if name in ("engine weights", "engine process")}
    if d.engine == "vllm":
        asleep = {"engine process": CONTEXT * d.gpu}
    kept = {name: size for name, size in learners.items() if name.removeprefix("learner ") not in PASSING}
    found["device, learning"] = Memory(learners | asleep)
    if d.gpu:
        kept["learner weights on their way"] = _lent_bytes(d)
    found["device, playing"] = Memory(kept | engines, engine.problem, engine.budget)
    return found


def _lent_bytes(d: Demand) -> int:
    """Beside an engine that is awake: the largest tensor, wherever it is at once. Frozen weights are whole already, but
    for vLLM, which is sent them in float32 with the adapters inside."""
    largest = d.shape.vocabulary * d.shape.hidden
    gathered = 4 + d.dtype_bytes if d.trained is None else 4 if d.engine == "vllm" else 0
    room = max(_sent_bytes(d) * largest, d.bucket_bytes)
    return largest * gathered + room + (2 * d.dtype_bytes * largest if d.engine == "vllm" else 0)


def _sent_bytes(d: Demand) -> int:
    """Of a weight on its way to an engine."""
    return 4 if d.trained is not None and d.engine == "vllm" else d.dtype_bytes


def on_each_host(d: Demand, per_node: int, host_bytes: int = 0) -> dict[str, Memory]:
    """What nodes of so many processes of a kind need of their own memory, beside environments.

    Every rank loads the whole model in float32 (LoRA: as passes use it), and the reference or a copy for the critic
    beside it, before its part goes to the device. Weights on their way to engines are on each node in two versions, old
    and new; the first rank's copy of a checkpoint is a third. On another node than the first rank's a vLLM copies what
    it takes out of Ray's store, whose memory its worker cannot read; one that shares its device leaves its weights here
    while it sleeps. The native engine loads its first weights here.
    """
    shape, b = d.shape, d.dtype_bytes
    if not d.distributed:
        return {"host, loading": Memory({"weights": b * shape.count})} if d.gpu else {}
    ranks, engines = min(d.learners, per_node), min(d.engines, max(1, per_node // d.tensor_parallel))
    one_node = per_node >= (d.learners if d.colocated else d.learners + d.engines * d.tensor_parallel)
    each = 4 * shape.count if d.trained is None else b * shape.count
    copied = b * shape.count if d.reference else 0
    if d.critic:
        copied = max(copied, 4 * (shape.count - shape.embedding_parameters // 2))
    load = {f"weights of {ranks} ranks": each * ranks}
    if d.trained is None:
        load["reference or critic"] = copied * ranks
    store = {"weights on their way": 2 * _sent_bytes(d) * shape.count}
    learning = store | {"checkpoint": b * shape.count}
    copies = _sent_bytes(d) * shape.count * engines if d.engine == "vllm" and not one_node else 0
    playing = {f"copies of {engines} vLLMs": copies}
    if d.engine == "vllm" and d.colocated and d.gpu:
        learning[f"{engines} sleeping vLLMs"] = d.engine_bytes * shape.count * engines
    start = {f"weights of {engines} engines": b * shape.count * engines} if d.engine == "native" else {}
    if not d.gpu:
        learner, engine = learner_memory(d), engine_memory(d, host_bytes)
        own = {f"{ranks} ranks": ranks * learner.total, f"{engines} engines": engines * engine.total}
        warm = 0 if d.warm_start is None else ranks * warm_start_memory(d).total
        return {
            "host, warm start": Memory({f"{ranks} ranks": warm}),
            "host, loading": Memory(load | start),
            "host, running": Memory(own | learning | playing),
        }
    if d.colocated or one_node:
        return {"host, loading": Memory(load | start), "host, running": Memory(learning | playing)}
    return {
        "host of learners, loading": Memory(load),
        "host of learners, running": Memory(learning),
        "host of engines, loading": Memory(start),
        "host of engines, running": Memory(store | playing),
    }


def table(found: dict[str, Memory], room: int | None) -> tuple[list[str], bool]:
    """(lines to print, whether all of it fits). Nothing is known to be too large where `room` is not known."""
    lines, all_fit = [], True
    for kind, memory in found.items():
        if not memory.total and not memory.problem:
            continue
        line = f"{kind}: {memory.total / GIB:.1f} GiB"
        if room is not None:
            fits = memory.fits(room)
            all_fit = all_fit and fits
            line += f" of {room / GIB:.0f} GiB, {'fits' if fits else 'does not fit'} (less {RESERVE:.0%} in reserve)"
        lines.append(f"{line}: {memory.problem}" if memory.problem else line)
        lines += [f"    {name:26} {size / GIB:8.2f} GiB" for name, size in memory.parts.items() if size]
    return lines, all_fit
