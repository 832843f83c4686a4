"""Data-parallel learning with torch.distributed, and FSDP2 to shard parameters, gradients and moments.

Gradients are summed, not averaged, because every rank's loss is normalized by the whole batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from agentgym_rl.training.ranks import Ranks, balanced_shares


class ProcessRanks(Ranks):
    """This process among `size` ranks. With `shard` every model is sharded over them, else each has a whole copy. LoRA
    uses copies: policy, reference and critic share frozen weights, and the gradients are small."""

    def __init__(self, device: str = "cpu", *, shard: bool = True, dtype: torch.dtype = torch.float32) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.shard = shard
        self._dtype = dtype
        self._mesh: DeviceMesh = init_device_mesh(torch.device(device).type, (self.size,))

    def prepare_model(self, model: Any) -> None:
        if self.shard and not hasattr(model, "gathered"):
            shard_model(model, self._mesh, self._dtype)

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
        if self.shard:
            return
        names, tensors = zip(*named, strict=True)
        sums = torch.stack([_checksum(tensor) for tensor in tensors])
        highest = torch.cat([sums, -sums])
        dist.all_reduce(highest, dist.ReduceOp.MAX)
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
        totals: dict[str, float] = defaultdict(float)
        for rank_metrics in gathered:
            for name, value in rank_metrics.items():
                totals[name] += value
        return dict(totals)


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


def leave() -> None:
    with suppress(Exception):  # the group is already gone if a rank died
        dist.destroy_process_group()


def shard_model(model: Any, mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> None:
    """Shard a model's parameters over the mesh, in place: each layer by itself, the rest (embeddings, head) together.

    A pass gathers them layer by layer. Learner code reads parts of a model (its decoder, then its head at action
    positions), so model and layers get a method `gathered` that runs a function with whole parameters. Passes run in
    `dtype`. The stored parameters remain float32, and gradients are summed in float32.
    """
    compute = None if next(model.parameters()).dtype is dtype else dtype
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True, "mp_policy": policy}
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.decoder
    for part in (*getattr(decoder, "layers", ()), model):
        fully_shard(part, **options)
        part.gathered = MethodType(_gathered, part)
        register_fsdp_forward_method(part, "gathered")


def _gathered(model: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(model, *arguments)


def whole_state(model: Any) -> Iterable[tuple[str, Tensor]]:
    """Yield (name, whole tensor on this device) of a model's state. Every rank must read all of them.

    Tied tensors (a head that is the embedding) appear once under the first name, as in a saved model.
    """
    all_names = dict(model.named_parameters(remove_duplicate=False)).keys()
    tied = all_names - dict(model.named_parameters()).keys()
    for name, value in model.state_dict().items():
        if name not in tied:
            value = value.detach()
            yield name, value.full_tensor() if isinstance(value, DTensor) else value
