"""Sharded checkpoints of a learner: each rank writes its part, any number of ranks can read them.

<folder>/tensors/     torch.distributed.checkpoint: optimizer moments, a critic's parameters
<folder>/rest.pt      the rest of the state, and the names of the tensors
<model>/              a Hugging Face folder with a file of whole tensors from each rank
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import MappingKey, tree_leaves_with_path, tree_map, tree_map_with_path

from agentgym_rl.errors import ConfigError
from agentgym_rl.training.checkpoint import SHARDS
from agentgym_rl.training.ranks import balanced_shares
from agentgym_rl.training.reward_model import RewardTrainer

SEPARATOR = "\x1f"
"""Separator of the keys of a nested dict. No parameter has it in its name."""
_TENSOR_MARKER = "\x1ftensor"
NEEDS_SHARED_DISK = "the run directory must be on a file system that all nodes see"


class ShardWriter:
    """Writes this rank's part of checkpoints, one at a time. In the `background` it writes copies, in a thread."""

    def __init__(self, *, background: bool = False) -> None:
        self._background = background
        # A group of its own: in the background its messages must not mix with those of updates.
        self._group = dist.new_group(backend="gloo") if background else None
        self._thread = ThreadPoolExecutor(1)
        self._writes: list[Future[Any]] = []

    def save_shards(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write a nested dict. Every rank calls this with its own shards. The parent folder must exist: a rank that
        created it might do so on a disk that no other rank sees."""
        rest, tensors = _split(state)
        if not folder.parent.is_dir():
            raise ConfigError(f"{folder.parent} does not exist on {socket.gethostname()}: {NEEDS_SHARED_DISK}")
        folder.mkdir(exist_ok=True)
        if tensors:
            options: dict[str, Any] = {"storage_writer": FileSystemWriter(folder / "tensors")}
            options |= {"process_group": self._group, "no_dist": not dist.is_initialized()}
            if self._background:
                self._writes.append(dcp.async_save(dict(tensors), **options))  # type: ignore[arg-type]
            else:
                dcp.save(dict(tensors), **options)
        # Last, because it may fail on this rank alone while no other rank waits for it.
        if _rank() == 0:
            torch.save({"rest": rest, "names": sorted(tensors)}, folder / "rest.pt")

    def save_model(self, folder: Path, sizes: Mapping[str, int], whole: Iterable[tuple[str, Tensor]]) -> None:
        """Write the tensors of a model, each from one rank, so that no rank holds all of them.

        `sizes`: elements of each tensor. `whole` yields all tensors on every rank.
        """
        names = list(sizes)
        size = dist.get_world_size() if dist.is_initialized() else 1
        shares = [[names[i] for i in share] for share in balanced_shares(list(sizes.values()), size) if share]
        files = [f"model-{i + 1:05d}-of-{len(shares):05d}.safetensors" for i in range(len(shares))]
        files = files if len(files) > 1 else ["model.safetensors"]
        mine = set(shares[_rank()]) if _rank() < len(shares) else set()
        kept, total = {}, 0
        for name, tensor in whole:
            total += tensor.nbytes
            if name in mine:
                kept[name] = tensor.detach().to("cpu", copy=self._background).contiguous()
        folder.mkdir(exist_ok=True)
        if _rank() == 0 and len(files) > 1:
            placed = {name: file for file, share in zip(files, shares, strict=True) for name in share}
            index = {"metadata": {"total_size": total}, "weight_map": placed}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
        if kept:
            write = self._thread.submit(save_file, kept, folder / files[_rank()], {"format": "pt"})
            self._writes.append(write)
            if not self._background:
                self.finish()

    @property
    def done(self) -> bool:
        return all(write.done() for write in self._writes)

    def finish(self) -> None:
        """Wait until everything is written. Raise the error of what could not be."""
        writes, self._writes = self._writes, []
        for write in writes:
            write.result()


def require_written(checkpoint: Path, *, shards: bool) -> None:
    """Raise ConfigError if this process does not see every rank's files in full length."""
    model = checkpoint / "model"
    needed = {} if (model / "adapter_config.json").is_file() else {model / "config.json": 1}
    index = model / "model.safetensors.index.json"
    if index.is_file():
        needed |= {model / name: 1 for name in json.loads(index.read_text())["weight_map"].values()}
    if shards:
        rest, tensors = checkpoint / SHARDS / "rest.pt", checkpoint / SHARDS / "tensors"
        needed[rest] = 1
        if rest.is_file() and torch.load(rest, weights_only=True)["names"]:
            needed |= {tensors / name: length for name, length in _lengths(tensors).items()}
    for path, length in needed.items():
        size = path.stat().st_size if path.is_file() else 0
        if size < length:
            raise ConfigError(f"{path} needs at least {length} bytes that ranks wrote, got {size}: {NEEDS_SHARED_DISK}")


def _lengths(tensors: Path) -> dict[str, int]:
    """Return the minimum size of each file according to the checkpoint's metadata."""
    lengths = {".metadata": 1}
    if (tensors / ".metadata").is_file():
        for part in FileSystemReader(tensors).read_metadata().storage_data.values():
            lengths[part.relative_path] = max(lengths.get(part.relative_path, 0), part.offset + part.length)
    return lengths


def load_shards(folder: Path, like: Callable[[str, torch.Size], Tensor | None]) -> dict[str, Any]:
    """Load what `save_shards` wrote. `like(name, shape)` returns a tensor with the wanted sharding, or None."""
    if not (folder / "rest.pt").is_file():
        raise ConfigError(f"{folder} holds no sharded state: rest.pt is missing")
    saved = torch.load(folder / "rest.pt", weights_only=True)
    reader = FileSystemReader(folder / "tensors")
    tensors: dict[str, Any] = {}
    if saved["names"]:
        metadata = reader.read_metadata().state_dict_metadata
        for name in saved["names"]:
            meta = metadata[name]
            assert isinstance(meta, TensorStorageMetadata)
            model, dtype = like(name, meta.size), meta.properties.dtype
            empty = torch.empty(meta.size, dtype=dtype) if model is None else torch.empty_like(model, dtype=dtype)
            tensors[name] = empty.detach()
        dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    return _join(saved["rest"], tensors)


def shard_state(state: Mapping[str, Any], like: Callable[[str, torch.Size], Tensor | None]) -> dict[str, Any]:
    """Shard a state of whole tensors, as one process writes it, over the ranks."""
    rest, tensors = _split(state)
    for name, value in tensors.items():
        model = like(name, value.shape)
        if isinstance(model, DTensor):
            # Every rank has the whole state. Sent, int16 (lower halves) would be refused by gloo and NCCL.
            place = model.device_mesh, model.placements
            tensors[name] = distribute_tensor(value.to(model.device), *place, src_data_rank=None)
    return _join(rest, tensors)


def like_learner(learner: Any) -> Callable[[str, torch.Size], Tensor | None]:
    """Return a `like` for a learner's state. An optimizer's tensors are sharded as the parameter with that index, if it
    has their shape; parameters are sharded as they are."""
    places: dict[str, list[Tensor] | dict[str, Tensor]] = {}  # in the state, such as critic.optimizer
    critic = getattr(learner, "critic", None)
    for place, updater in {"optimizer": learner, "critic.optimizer": critic}.items():
        if updater is not None:
            lists = getattr(updater._optimizer, "tensors_of_state", {})
            places |= {f"{place}.{key}": tensors for key, tensors in lists.items()}
            places[place] = updater._parameters
    places["masters"] = dict(learner.model.named_parameters())  # of an earlier version
    if critic is not None:
        places["critic.parameters"] = dict(critic.model.named_parameters())
    if isinstance(learner, RewardTrainer):
        places["head"] = dict(learner.model.head.named_parameters())

    def like(name: str, shape: torch.Size) -> Tensor | None:
        for place, trained in places.items():
            prefix = SEPARATOR.join((*place.split("."), ""))
            if name.startswith(prefix):
                key = name.removeprefix(prefix)
                if isinstance(trained, dict):
                    return trained.get(key)
                indices = [int(part) for part in key.split(SEPARATOR) if part.isdigit()]
                candidates = [trained[i] for i in indices if i < len(trained)]
                return candidates[0] if candidates and candidates[0].shape == shape else None
        return None

    return like


def _split(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return (the nested state with a marker in place of each tensor, the tensors by their names)."""
    named = {_name(path): value for path, value in tree_leaves_with_path(state) if isinstance(value, Tensor)}
    rest = tree_map(lambda value: _TENSOR_MARKER if isinstance(value, Tensor) else value, state)
    return rest, {name: tensor.detach() for name, tensor in named.items()}


def _join(rest: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the nested state with its tensors."""
    return tree_map_with_path(
        lambda path, value: tensors[_name(path)] if isinstance(value, str) and value == _TENSOR_MARKER else value, rest
    )


def _name(path: tuple[Any, ...]) -> str:
    return SEPARATOR.join(str(key.key if isinstance(key, MappingKey) else key.idx) for key in path)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
