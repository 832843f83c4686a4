"""Whether a run fits: bytes of weights, gradients, moments, activations and cache on each device. No third packages.

Formulas, with P parameters, D learner ranks, b bytes of a weight as passes use it (4 or 2), T tokens of a micro-batch,
H hidden size, I intermediate size, L layers, V vocabulary, N and K query and key/value heads of width w:

    learner, alone in float32      4P weights + 4P gradients + 8P moments
    learner, alone in bfloat16     2P weights + 2P gradients (4P over several passes) + 6P moments and lower halves
    learner, sharded over D ranks  (4P + 4P + 8P) / D, and two layers and the embeddings whole, as a pass needs them
    activations                    T L (4 H + 2 w (N + K) + 3 I) b; with checkpoint_activations T L H b + two layers
    head                           a chunk of logits in float32, 256 MB at most, and its gradient
    engine                         bP weights + 2 L K w b bytes of cache for each token it can hold
    reference                      bP / D;    critic: another learner, without the head

They are estimates: allocators and libraries take a share of their own, for which `RESERVE` is set aside.
"""

from __future__ import annotations

from dataclasses import dataclass, field

GIB = 1 << 30
RESERVE = 0.08
"""Share of a device that frameworks and fragmentation take."""
CONTEXT = 1 * GIB
"""A process's own on a GPU."""
HEAD_CHUNK = 1 << 28
"""Bytes of logits held at once."""


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


@dataclass(slots=True)
class Memory:
    """Bytes on one device, by what they are for."""

    parts: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def fits(self, device_bytes: int) -> bool:
        return self.total <= device_bytes * (1.0 - RESERVE)


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
        parts["gathered"] = b * (2 * shape.layer_parameters + shape.embedding_parameters)
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
    return Memory(parts)


def activation_bytes(d: Demand) -> int:
    """Kept for the backward pass of one micro-batch."""
    shape, tokens, b = d.shape, d.micro_batch_tokens, d.dtype_bytes
    attention = shape.width * (2 * shape.heads + 2 * shape.kv_heads)
    layer = tokens * b * (4 * shape.hidden + attention + 3 * shape.intermediate)
    if d.checkpoint_activations:
        return tokens * b * shape.hidden * shape.layers + 2 * layer
    return layer * shape.layers


def engine_memory(d: Demand) -> Memory:
    """On one engine's device; without weights where it shares the learner's."""
    shape, b = d.shape, d.dtype_bytes
    per_token = 2 * shape.layers * shape.kv_heads * shape.width * b
    own = d.distributed or d.overlap
    return Memory({"weights": b * shape.count if own else 0, "KV cache": per_token * d.sessions * d.context})


def on_each_device(d: Demand) -> dict[str, Memory]:
    """What each kind of device must hold: {"learner": ..., "engine": ...}, or both on "device", where those of one pair
    take turns: the engine's cache is given back while the learner works, which has no activations while it does not."""
    learner, engine = learner_memory(d), engine_memory(d)
    if d.distributed and not d.colocated:
        return {"learner": learner, "engine": engine}
    parts = {f"learner {name}": size for name, size in learner.parts.items()}
    both = parts | {f"engine {name}": size for name, size in engine.parts.items()}
    if not d.distributed:
        return {"device": Memory(both)}
    passing = ("learner activations", "learner gathered")
    return {
        "device, learning": Memory({name: size for name, size in both.items() if name != "engine KV cache"}),
        "device, playing": Memory({name: size for name, size in both.items() if name not in passing}),
    }


def table(found: dict[str, Memory], device_bytes: int) -> tuple[list[str], bool]:
    """(lines to print, whether all of it fits)."""
    lines = []
    for kind, memory in found.items():
        fits = memory.fits(device_bytes)
        lines.append(f"{kind}: {memory.total / GIB:.1f} GiB of {device_bytes / GIB:.0f} GiB, {_verdict(fits)}")
        lines += [f"    {name:24} {size / GIB:8.2f} GiB" for name, size in memory.parts.items() if size]
    return lines, all(memory.fits(device_bytes) for memory in found.values())


def _verdict(fits: bool) -> str:
    return f"fits (less {RESERVE:.0%} in reserve)" if fits else f"does not fit (less {RESERVE:.0%} in reserve)"
