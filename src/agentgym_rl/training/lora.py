"""LoRA through peft: small trained matrices next to frozen weights, saved in peft's format.

The adapters are inside the transformers model, whose class does not change, so engine and learner need no special
code. All models share the frozen weights: the reference is the model with its adapters off (after a warm start, with a
frozen copy of them), and the critic is one more adapter.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from agentgym_rl.errors import ConfigError
from agentgym_rl.training.settings import LoraSettings

POLICY, REFERENCE, CRITIC = "default", "reference", "critic"
"""Names of the adapters. `default` is peft's name for an unnamed one."""


def require_peft() -> None:
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("model.lora needs the package peft, which is not installed: pip install 'agentgym-rl[lora]'")


def add_adapter(model: Any, settings: LoraSettings, seed: int, name: str = POLICY) -> None:
    """Add an adapter that starts as the identity. It is active and trainable; everything else is frozen."""
    require_peft()
    from peft import LoraConfig

    targets = settings.target_modules
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,  # the learner must compute the distribution that was sampled from
        target_modules="all-linear" if targets == ("all-linear",) else list(targets),
        base_model_name_or_path=str(model.config._name_or_path),
    )
    with torch.random.fork_rng(), _quiet():
        torch.manual_seed(seed)
        try:
            model.add_adapter(config, name)
        except ValueError as error:
            raise ConfigError(f"model.lora.target_modules = {list(targets)}: {str(error).splitlines()[0]}") from error


def load_adapter(model: Any, folder: Path, name: str = POLICY) -> None:
    """Load the adapter of a folder under a name. The policy's is trainable and remains active."""
    require_peft()
    with _quiet():
        try:
            model.load_adapter(str(folder), name, is_trainable=name == POLICY)
            fits = _matrices(model, name).keys() == _matrix_names_in_file(folder)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"the adapter in {folder} cannot be loaded: {str(error).splitlines()[0]}") from error
        except RuntimeError as error:
            if "ignore_mismatched_sizes" not in str(error):
                raise
            fits = False
    if not fits:
        raise ConfigError(f"the adapter in {folder} is for a model of another shape: set model.path to its base model")
    model.set_adapter(POLICY)


def _matrices(model: Any, name: str) -> dict[str, torch.Tensor]:
    """Return an adapter's matrices by their names in its file."""
    named = model.named_parameters()
    return {part.replace(f".{name}", ""): p for part, p in named if "lora_" in part and f".{name}" in part}


def _matrix_names_in_file(folder: Path) -> set[str]:
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        return {key.removeprefix("base_model.model.") for key in file.keys() if "lora_" in key}  # noqa: SIM118


def copy_adapter(model: Any, settings: LoraSettings, name: str) -> None:
    """Add a copy of the policy's adapter under a name. The policy's remains active."""
    add_adapter(model, settings, 0, name)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for key, parameter in parameters.items():
            if f".{name}." in key:
                parameter.copy_(parameters[key.replace(f".{name}.", f".{POLICY}.")])
    model.set_adapter(POLICY)


def matrices(model: Any) -> dict[str, torch.Tensor]:
    """Return the matrices of all adapters by their names in the model."""
    return {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}


def copy_with_own_adapters(model: Any) -> Any:
    """Return a copy of the model that shares all frozen tensors with it and has a copy of the trained adapter."""
    frozen = [*(p for p in model.parameters() if not p.requires_grad), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in frozen})


@torch.no_grad()
def restore_adapter(model: Any, folder: Path) -> None:
    """Copy the adapter of a folder into the policy's, in place."""
    saved = load_file(folder / "adapter_model.safetensors")
    for name, parameter in _matrices(model, POLICY).items():
        parameter.copy_(saved[f"base_model.model.{name}"])


@torch.no_grad()
def policy_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the policy's adapter, named as in peft's files. B is scaled: read them with alpha = rank."""
    for name, parameter in _matrices(model, POLICY).items():
        layer, _, matrix = name.partition(".lora_")
        is_b = matrix.partition(".")[0].endswith("B")
        scale = model.get_submodule(layer).scaling[POLICY] if is_b else 1.0
        yield f"base_model.model.{name}", parameter.detach() * scale


@torch.no_grad()
def merged(model: Any, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's state with the policy's adapter merged into the weights.

    Merged weights are float32: rounded to bfloat16, a small update would not change most of them.
    """
    for name, tensor in named:
        path, base, leaf = name.rpartition(".base_layer.")
        if not base:
            if "lora_" not in name:
                yield name, tensor
            continue
        layer = model.get_submodule(path)
        added = layer.get_delta_weight(POLICY).float() if leaf == "weight" else 0.0
        yield f"{path}.{leaf}", tensor.float() + added


def merged_model(model: Any) -> Any:
    """Return an equivalent model without adapters, with float32 weights where adapters were merged."""
    config = copy.deepcopy(model.config)
    tied = model.get_input_embeddings(), model.get_output_embeddings()
    if any(hasattr(layer, "base_layer") for layer in tied):
        config.tie_word_embeddings = False  # only one of them has an adapter, so they differ now
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(dict(merged(model, model.state_dict().items())), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain.eval()


@torch.no_grad()
def rounding_loss(model: Any, dtype: torch.dtype) -> float:
    """Return the rounding error of merged weights in `dtype`, relative to the adapters' change (0.1 is 10%)."""
    added = lost = 0.0
    for layer in model.modules():
        if hasattr(layer, "base_layer") and hasattr(layer, "get_delta_weight"):
            delta = layer.get_delta_weight(POLICY).float()
            exact = layer.base_layer.weight.float() + delta
            added += float(delta.pow(2).sum())
            lost += float((exact.to(dtype).float() - exact).pow(2).sum())
    return math.sqrt(lost / added) if added else 0.0


@contextmanager
def adapter(model: Any, name: str | None) -> Iterator[Any]:
    """Yield the model with another adapter active, or none. Only the active adapter gets gradients."""
    if name is None:
        model.disable_adapters()
    else:
        model.set_adapter(name)
    try:
        yield model
    finally:
        if name is None:
            model.enable_adapters()
        model.set_adapter(POLICY)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings about several adapters in one model, which are intended here.

    Transformers reports the matrices of the other adapters as missing from a file. `load_adapter` checks them itself.
    """
    logger = logging.getLogger("transformers.integrations.peft")
    level = logger.level
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
