"""Data-parallel learning with torch.distributed, and FSDP2 to shard parameters, gradients and moments.

Gradients are summed, not averaged, because every rank's loss is normalized by the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import chain
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from agentgym_rl.training.ranks import Ranks, balanced_shares


class ProcessRanks(Ranks):
    """This process among `size` ranks. With `shard` every model is sharded over them, else each has a whole copy. LoRA
    uses copies: policy, reference and critic share frozen weights, and the gradients are small.

    `shard_ranks`: ranks that share one copy of a sharded model; several such groups hold equal copies (HSDP).
    `offload`: parameters, gradients and moments stay on the host, and the optimizer runs there.
    `reduce_once`: sum gradients over ranks once per update. Each rank then holds whole gradients in float32 until then.
    """

    from_meta = True

    def __init__(
        self,
        device: str = "cpu",
        *,
        shard: bool = True,
        shard_ranks: int | None = None,
        offload: bool = False,
        reduce_once: bool = False,
    ) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.shard, self.offload, self.reduce_once = shard, offload, reduce_once
        self._device = torch.device(device)
        copies = self.size // (shard_ranks or self.size)
        shape = {"replicate": copies, "shard": self.size // copies} if copies > 1 else {"shard": self.size}
        self._mesh: DeviceMesh = init_device_mesh(self._device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))

    def device(self, model: Any) -> torch.device:
        return self._device if self.offload and hasattr(model, "gathered") else model.device

    def prepare_model(self, model: Any) -> None:
        if self.shard and not hasattr(model, "gathered"):
            shard_model(model, self._mesh, offload=self.offload)

    def before_pass(self, model: Any, *, last: bool) -> None:
        if not self.shard:
            return
        if self.reduce_once:
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
        elif self._mesh.ndim == 2:  # sums over copies can wait: until then a rank holds only its shard of them
            model.set_requires_all_reduce(last)

    def local_indices(self, lengths: Sequence[int]) -> list[int]:
        return balanced_shares(lengths, self.size)[self.rank]

    def max_over_ranks(self, count: int) -> int:
        highest = torch.tensor(count, device=self._mesh.device_type)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        return int(highest)

    def scale_loss(self, loss: Tensor) -> Tensor:
        # FSDP averages over ranks. The option that changes it has another name in every release, so scale the loss.
        return loss * self.size if self.shard else loss

    def reduce_gradients(self, gradients: Iterable[Tensor]) -> None:
        if not self.shard:
            for gradient in gradients:
                dist.all_reduce(gradient)

    @torch.no_grad()
    def require_equal(self, named: Iterable[tuple[str, Tensor]]) -> None:
        if self.shard and self._mesh.ndim == 1:
            return  # there is one copy
        names, tensors = zip(*named, strict=True)
        sums = torch.stack([_checksum(t.to_local() if isinstance(t, DTensor) else t) for t in tensors])
        highest = torch.cat([sums, -sums])
        dist.all_reduce(highest, dist.ReduceOp.MAX, self._mesh.get_group("replicate") if self.shard else None)
        different = (highest[: len(sums)] != -highest[len(sums) :]).tolist()
        if any(different):
            raise RuntimeError(
                f"{sum(different)} of {len(names)} trained parameters differ between the {self.size} learner ranks "
                f"after an update, such as {names[different.index(True)]}: ranks must hold equal copies. Resume from "
                "the last checkpoint, and report this as a bug"
            )

    def full_tensor(self, value: Tensor) -> Tensor:
        return value.full_tensor() if isinstance(value, DTensor) else value

    def sum_over_ranks(self, metrics: dict[str, float]) -> dict[str, float]:
        gathered: list[dict[str, float]] = [{}] * self.size
        dist.all_gather_object(gathered, metrics)
        return {name: sum(m.get(name, 0.0) for m in gathered) for name in chain(*gathered)}


def _checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits read as integers. Equal tensors have equal sums, also with NaN."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().view(bits).sum(dtype=torch.int64)


def join(rank: int, size: int, address: str, device: str = "cpu", timeout_s: float = 1800.0) -> None:
    """Join the other ranks at `address`, such as tcp://10.0.0.1:29500. Objects are sent over gloo on any device."""
    backend = "gloo" if torch.device(device).type == "cpu" else "cpu:gloo,cuda:nccl"
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=address, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )


def shard_model(model: Any, mesh: DeviceMesh, *, offload: bool = False) -> None:
    """Shard a model's parameters over the mesh, in place: each layer by itself, the rest (embeddings, head) together.

    A pass gathers them layer by layer. Learner code reads parts of a model (its decoder, then its head at action
    positions), so model and layers get a method `gathered` that runs a function with whole parameters. Gradients are
    summed in float32. A critic's head of another type than its decoder is a part of its own.
    """
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True, "mp_policy": policy}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.decoder
    head = getattr(model, "head", None)
    if head is not None and head.weight.dtype is not next(decoder.parameters()).dtype:
        fully_shard(head, **options)
    for part in (*getattr(decoder, "layers", ()), model):
        fully_shard(part, **options)
        part.gathered = MethodType(_gathered, part)
        register_fsdp_forward_method(part, "gathered")


def _gathered(model: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(model, *arguments)
