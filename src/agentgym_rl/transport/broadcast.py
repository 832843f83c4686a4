"""Weights broadcast from learner ranks to engines over torch.distributed: NCCL between GPUs, gloo otherwise.

    driver      describes a group: the sending ranks first, then the engines (`Member`)
    ranks       `send_weights(tensors, member, ...)`: each gathers all tensors; they broadcast buckets in turns, while
                the next bucket is gathered
    engine      `BroadcastWeights(member, version).tensors()`: yields the tensors of each bucket, to be copied in place

A bucket is a flat byte array with consecutive tensors of a state dict, at most as large as a setting says, or as one
larger tensor; transport/device.py has the same ones. Here it is three broadcasts: the sizes of its data and header, the
header (JSON with names, types and shapes), and the data. A header of size 0 ends the version.

A process is a member of one such group at a time, besides the groups it has for other purposes (FSDP, vLLM), so the
group is made without torch's default group. Its members cannot change. If one dies, the others fail: gloo sees the
closed connection, and the driver calls `abort_group`, which every waiting member polls. The ranks finish gathering, the
engines have no version, and the driver makes a new group of the members that are left.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentgym_rl.errors import EngineError

TIMEOUT_S = 1800.0
"""Seconds without progress after which a member gives up. It can be long, because the driver reports dead members."""
POLL_INTERVAL_S = 0.05
"""Longest pause between checks whether a broadcast has ended or was aborted."""
ABORTED = "aborted"
"""Key of the store that ends a group."""
NCCL_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Environment variable of torch. By default the death of an engine would end the process of every learner."""
ALIGNMENT = 64
Entry = tuple[str, str, tuple[int, ...], int]
"""(name, dtype such as "bfloat16", shape, first byte)."""


class WeightsInterrupted(EngineError):
    """A transfer ended early because another of its processes is gone. It can be tried again."""


class WeightSource(Protocol):
    """A version of the weights that is being sent to this process."""

    def connect(self) -> None:
        """Wait until the senders are there. May block."""

    def tensors(self) -> Generator[tuple[str, Tensor]]:
        """Yield each tensor. Copy and drop it before asking for the next one."""


@dataclass(frozen=True, slots=True)
class Member:
    """The place of a process in a group."""

    group: str
    """Name of the group, never used twice."""
    store: str
    """host:port of a TCPStore through which the members meet."""
    rank: int
    size: int
    senders: int
    """Ranks below this one send, in turns."""
    backend: Literal["gloo", "nccl"]
    is_new: bool
    """Whether the group is to be made now. Otherwise the process must be a member already."""


class _Group:
    """This process's end of a group."""

    def __init__(self, member: Member) -> None:
        self.name = member.group
        self.device = torch.device("cuda" if member.backend == "nccl" else "cpu")
        with _interruptions():
            self._store = open_store(member.store, member.group)
            self._store.set(f"ready {member.rank}", "")
        ready = [f"ready {rank}" for rank in range(member.size)]
        self._until(lambda: self._store.check(ready), "the other members of the group")
        with _interruptions():
            self._processes: Any = _make_group(self._store, member)

    def start(self, tensor: Tensor, source: int) -> Any:
        """Start a broadcast from rank `source`, in place. `finish` must follow before the tensor is used."""
        with _interruptions():
            return self._processes.broadcast(tensor, source)

    def finish(self, work: Any) -> None:
        self._until(work.is_completed, "a broadcast")
        with _interruptions():
            work.wait()

    def receive(self, count: int, dtype: torch.dtype, source: int) -> Tensor:
        tensor = torch.empty(count, dtype=dtype, device=self.device)
        self.finish(self.start(tensor, source))
        return tensor

    def close(self) -> None:
        """Leave the group, which makes the others fail if they wait for this process."""
        with contextlib.suppress(RuntimeError):
            self._processes.abort()

    def _until(self, condition: Callable[[], bool], awaited: str) -> None:
        deadline, pause = time.monotonic() + TIMEOUT_S, 0.0005
        while True:
            with _interruptions():
                if condition():
                    return
                aborted = pause >= POLL_INTERVAL_S and self._store.check([ABORTED])
            if aborted:
                raise WeightsInterrupted("a member of the group is gone")
            if time.monotonic() > deadline:
                raise WeightsInterrupted(f"waited {TIMEOUT_S:.0f} s for {awaited}")
            time.sleep(pause)
            pause = min(2 * pause, POLL_INTERVAL_S)


def _make_group(store: dist.Store, member: Member) -> Any:
    timeout = timedelta(seconds=TIMEOUT_S)
    if member.backend == "gloo":
        return dist.ProcessGroupGloo(store, member.rank, member.size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * timeout  # later than `_until` gives up
    os.environ[NCCL_ERROR_HANDLING] = "0"  # read when a group is made, and those of FSDP and vLLM exist already
    return dist.ProcessGroupNCCL(store, member.rank, member.size, options)


@contextlib.contextmanager
def _interruptions() -> Iterator[None]:
    """Turn errors of torch.distributed into WeightsInterrupted."""
    try:
        yield
    except RuntimeError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise WeightsInterrupted(f"a member of the group is gone ({reason[:300]})") from error


_current: _Group | None = None
"""The group of this process."""


def open_store(address: str, group: str) -> dist.PrefixStore:
    host, _, port = address.rpartition(":")
    timeout = timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    return dist.PrefixStore(group, store)


def abort_group(address: str, group: str) -> None:
    """End a group: every member that waits for another raises. Does nothing if its store is gone."""
    with contextlib.suppress(RuntimeError):
        open_store(address, group).set(ABORTED, "")


def join(member: Member) -> _Group:
    """Return the group, made now unless this process is a member already. Leaves the one before."""
    global _current
    if _current is not None and _current.name == member.group:
        return _current
    leave()
    if not member.is_new:
        raise WeightsInterrupted("this process was restarted after the group had been made")
    _current = _Group(member)
    return _current


def leave() -> None:
    global _current
    group, _current = _current, None
    if group is not None:
        group.close()


@dataclass(frozen=True, slots=True)
class BroadcastWeights:
    """A version of the weights that ranks will broadcast to this process."""

    member: Member
    version: int

    def connect(self) -> None:
        join(self.member)

    def tensors(self) -> Generator[tuple[str, Tensor]]:
        """Yield each tensor, on the group's device. Raises WeightsInterrupted if a member is gone."""
        try:
            yield from self._received(join(self.member))
        except BaseException:
            leave()
            raise

    def _received(self, group: _Group) -> Iterator[tuple[str, Tensor]]:
        for number in itertools.count():
            source = number % self.member.senders
            data_bytes, header_bytes = group.receive(2, torch.int64, source).tolist()
            if not header_bytes:
                return
            header = group.receive(header_bytes, torch.uint8, source)
            data = group.receive(data_bytes, torch.uint8, source)
            version, entries = json.loads(bytes(header.tolist()))
            if version != self.version:
                raise WeightsInterrupted(f"needed weights {self.version}, the learner sends weights {version}")
            for name, dtype, shape, start in entries:
                yield name, tensor_view(data, (name, dtype, tuple(shape), start))
            wait_for_copies()


@torch.no_grad()
def send_weights(
    named: Iterable[tuple[str, Tensor]], member: Member, version: int, bucket_bytes: int
) -> dict[str, str]:
    """Broadcast all tensors in buckets of `bucket_bytes`, or of the largest tensor's size. Every tensor is gathered
    even if the group fails, because gathering takes every rank. Returns {group's name: why} if it failed."""
    gathering = iter(named)
    try:
        send_in_buckets(gathering, bucket_bytes, _Sender(join(member), member.senders, version))
    except WeightsInterrupted as error:
        leave()
        for _ in gathering:
            pass
        return {member.group: str(error)}
    except BaseException:
        leave()
        raise
    return {}


class _Sender:
    """Two buffers: a bucket is gathered into one while the other is broadcast."""

    def __init__(self, group: _Group, senders: int, version: int) -> None:
        self._group, self._senders, self._version = group, senders, version
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=group.device) for _ in range(2)]
        self._entries: list[Entry] = []
        self._size = 0
        self._sending: list[tuple[Any, Tensor]] = []
        """Broadcasts under way, with what they read."""
        self._numbers = itertools.count()

    def reserve(self, size: int) -> None:
        if len(self._buffers[0]) < size:
            self._buffers[0] = torch.empty(size, dtype=torch.uint8, device=self._group.device)

    def write(self, tensor: Tensor, entry: Entry) -> None:
        tensor_view(self._buffers[0], entry).copy_(tensor.detach(), non_blocking=True)
        self._entries.append(entry)
        self._size = entry[3] + padded_bytes(tensor)

    def flush(self) -> None:
        """Start to broadcast the bucket. Returns after the one before has been sent."""
        if self._entries:
            header = json.dumps([self._version, self._entries]).encode()
            self._start(header, self._buffers[0][: self._size])
            self._buffers.reverse()
            self._entries = []

    def end(self) -> None:
        """Tell the engines that they have all tensors. Returns after everything has been sent."""
        self._start(b"", torch.empty(0))
        self._finish()

    def _start(self, header: bytes, data: Tensor) -> None:
        self._finish()
        source, device = next(self._numbers) % self._senders, self._group.device
        messages = [torch.tensor([len(data), len(header)], device=device)]
        if header:
            messages += [torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device), data]
        self._sending = [(self._group.start(message, source), message) for message in messages]

    def _finish(self) -> None:
        for work, _ in self._sending:
            self._group.finish(work)
        self._sending = []


def untied_state(model: Any) -> dict[str, Tensor]:
    """Return a model's state. Tied tensors (a head that is the embedding) are in it once, as in a saved model."""
    all_names = dict(model.named_parameters(remove_duplicate=False)).keys()
    tied = all_names - dict(model.named_parameters()).keys()
    return {name: value.detach() for name, value in model.state_dict().items() if name not in tied}


def whole_state(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor on this device) of a model's state. Every rank must read all of them."""
    for name, value in untied_state(model).items():
        yield name, value.full_tensor() if isinstance(value, DTensor) else value


def place_in_buckets(named: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[tuple[Entry, Tensor, bool]]:
    """Yield (entry, tensor, whether it begins a new bucket). A bucket has at most `max_bytes`, or one larger tensor."""
    end: int | None = None
    for name, tensor in named:
        begins = end is None or end + padded_bytes(tensor) > max_bytes
        start = 0 if end is None or begins else end
        yield (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start), tensor, begins
        end = start + padded_bytes(tensor)


def send_in_buckets(named: Iterable[tuple[str, Tensor]], bucket_bytes: int, sender: Any) -> None:
    """Send all tensors through the buffer of a `sender`, of `bucket_bytes` or of the largest tensor's size."""
    for entry, tensor, begins in place_in_buckets(named, bucket_bytes):
        if begins:
            sender.flush()
            sender.reserve(max(bucket_bytes, padded_bytes(tensor)))
        sender.write(tensor, entry)
    sender.flush()
    sender.end()


def tensor_view(memory: Tensor, entry: Entry) -> Tensor:
    """Return the entry's tensor as a view of these bytes, or an empty tensor."""
    _, dtype_name, shape, start = entry
    dtype = getattr(torch, dtype_name)
    count = torch.Size(shape).numel() * dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=dtype, device=memory.device)
    return memory[start : start + count].view(dtype).view(shape)


def padded_bytes(tensor: Tensor) -> int:
    """Return the tensor's size, rounded up to the alignment of the next one."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


def wait_for_copies() -> None:
    """Wait until asynchronous copies to and from the device are done."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
