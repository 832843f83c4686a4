"""Models made without memory and filled from safetensors: whole, or on each rank its own shards.

A rank reads only the parts of the files that it holds, straight into the memory where they stay. If files have other
tensors than the model, because transformers converts them, every rank loads the whole model first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from agentgym_rl.common.model_loading import loading_lock
from agentgym_rl.training.locate_model import REWARD_HEAD

NameInFiles = Callable[[str], str | None]
"""The name in a model's files of a tensor, or None for one that is not in them and starts at 0."""


def make_empty(folder: str, dtype: torch.dtype) -> Any:
    """Return the model of a folder with parameters on the meta device. Its buffers are computed, on the CPU."""
    with loading_lock, _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    if (Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device as it is made. Its memory has not been touched by then."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def load_whole(name: str, dtype: torch.dtype) -> Any:
    """Return the model of a folder or hub name with all its weights, as transformers loads it."""
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # for our own error message
    with loading_lock:
        model, loading = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)
    _require_all_weights(loading)
    return model


def _require_all_weights(loading: dict[str, Any]) -> None:
    """Raise ValueError if weights do not fit config.json: transformers would fill in random ones."""
    if mismatched := sorted(loading["mismatched_keys"], key=str):
        name, *shapes = mismatched[0]
        actual, needed = (tuple(shape) for shape in shapes[:2])
        raise ValueError(f"its weights do not fit its config.json: {name} needs the shape {needed}, got {actual}")
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(f"its weights lack {len(missing)} tensors that config.json asks for, such as {missing[0]}")


@torch.no_grad()
def fill(model: Any, folder: str, device: str, *, host: bool = False, name_in_files: NameInFiles | None = None) -> None:
    """Give a model of `make_empty`, sharded or whole, the weights of a folder. Every rank calls this.

    Raises ValueError if files and model differ. `host`: parameters stay on the host (offload), buffers do not.
    `name_in_files` is for a model that takes only some of the tensors.
    """
    if not any(Path(folder).glob("*.safetensors")):
        raise ValueError("ranks read weights from *.safetensors, and there are none: save it again with transformers")
    reader = HuggingFaceStorageReader(folder)
    metadata = reader.read_metadata()
    of_reward_head = {i.fqn for i, place in metadata.storage_data.items() if place.relative_path.endswith(REWARD_HEAD)}
    in_files: dict[str, Any] = metadata.state_dict_metadata
    in_files = {name: about.size for name, about in in_files.items() if name not in of_reward_head}
    state: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    for names, tensor in _by_tensor(model.state_dict(keep_vars=True)):
        known = [name_in_files(name) for name in names] if name_in_files is not None else names
        make = torch.zeros_like if known[0] is None else torch.empty_like
        value = make(tensor, device="cpu" if host else device)
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        state |= dict.fromkeys(names, value)
        if known[0] is not None:
            name = next((n for n in known if n in in_files), known[0])
            if name in in_files and in_files[name] != tensor.shape:
                needed, actual = tuple(tensor.shape), tuple(in_files[name])
                raise ValueError(
                    f"its weights do not fit its config.json: {name} needs the shape {needed}, got {actual}"
                )
            wanted[name] = value.detach()
    if wanted.keys() - in_files.keys():
        # As transformers loads some families (Pythia, mixtures of experts), it renames tensors or joins them.
        _copy(load_whole(folder, next(iter(wanted.values())).dtype).state_dict(), wanted)
    else:
        if name_in_files is None:
            _require_no_others(model, in_files.keys() - state.keys())
        dcp.load(wanted, storage_reader=reader, no_dist=not dist.is_initialized())
    model.load_state_dict(state, assign=True)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer if buffer is None else buffer.to(device)


def _copy(whole: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Copy whole tensors into those of the same names, of which a rank may hold a shard."""
    for name, target in wanted.items():
        source = whole[name].to(target.dtype)
        if isinstance(target, DTensor):  # every rank has read all
            source = distribute_tensor(source, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(source)


def _by_tensor(state: dict[str, Tensor]) -> list[tuple[list[str], Tensor]]:
    """Return (names, tensor) of each tensor. A tied one has several names."""
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    return [(same, state[same[0]]) for same in names.values()]


def _require_no_others(model: Any, others: set[str]) -> None:
    """Raise ValueError if files hold tensors that the model has no place for. Buffers may be computed instead."""
    computed = {name for name, _ in model.named_buffers()}
    ignored = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    extra = sorted(n for n in others - computed if not any(re.search(pattern, n) for pattern in ignored))
    if extra:
        raise ValueError(
            f"its files hold {len(extra)} tensors that config.json has no place for, such as {extra[0]}: load and save "
            "the model once with transformers"
        )
