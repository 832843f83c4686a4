"""LoRA: small trained matrices beside frozen weights, through peft and saved in its format.

The adapters live inside the transformers model, which stays the class it was: engine and learner need not know. The
frozen weights serve everyone: the reference is the model with its adapters off (or, after a warm start, with a frozen
copy of them), a critic is one more adapter.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from agentgym_rl.errors import ConfigError
from agentgym_rl.training.settings import LoraSettings

POLICY, REFERENCE, CRITIC = "default", "reference", "critic"
"""peft calls an adapter that nobody named `default`."""


def require_peft() -> None:
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("model.lora needs the package peft, which is not installed: pip install 'agentgym-rl[lora]'")


def add_adapter(model: Any, settings: LoraSettings, seed: int, name: str = POLICY) -> None:
    """A new adapter, which changes nothing yet; it is active and trainable, everything else is frozen."""
    require_peft()
    from peft import LoraConfig

    targets = settings.target_modules
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,  # the learner must see the distribution that was sampled from
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
    """The adapter that a folder holds under a name; the policy's is trainable and stays active."""
    require_peft()
    with _quiet():
        try:
            model.load_adapter(str(folder), name, is_trainable=name == POLICY)
            fits = _names_in(model, name) == _names_in_file(folder)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"the adapter in {folder} cannot be loaded: {str(error).splitlines()[0]}") from error
        except RuntimeError as error:
            if "ignore_mismatched_sizes" not in str(error):
                raise
            fits = False
    if not fits:
        raise ConfigError(f"the adapter in {folder} is for a model of another shape: model.path is not what it was")
    model.set_adapter(POLICY)


def _names_in(model: Any, name: str) -> set[str]:
    """Of an adapter's matrices, as a file calls them."""
    parts = (part for part, _ in model.named_parameters() if "lora_" in part and f".{name}" in part)
    return {part.replace(f".{name}", "") for part in parts}


def _names_in_file(folder: Path) -> set[str]:
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        return {key.removeprefix("base_model.model.") for key in file.keys() if "lora_" in key}  # noqa: SIM118


def copy_adapter(model: Any, settings: LoraSettings, name: str) -> None:
    """One more adapter that begins as the policy's; the policy's stays active."""
    add_adapter(model, settings, 0, name)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for key, parameter in parameters.items():
            if f".{name}." in key:
                parameter.copy_(parameters[key.replace(f".{name}.", f".{POLICY}.")])
    model.set_adapter(POLICY)


def require_mergeable(model: Any) -> None:
    """ConfigError where `merged` cannot be right: of two layers that share their weights only one has an adapter."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if model.config.tie_word_embeddings and any(hasattr(end, "base_layer") for end in ends):
        raise ConfigError(
            "model.lora.target_modules: with [scale] vLLM is sent weights with the adapters inside, and this model's "
            "head shares its weights with the embedding: leave both out, or use engine.kind = 'native'"
        )


@torch.no_grad()
def merged(model: Any, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's state as one without adapters has it: what the policy's adds is in the weights.

    Those are float32: rounded to bfloat16 most of them would not change at all by a small update.
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
    """Return a model without adapters that computes what this one does, with the weights in their type."""
    config = copy.deepcopy(model.config)
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if any(hasattr(end, "base_layer") for end in ends):
        config.tie_word_embeddings = False  # what they shared, only one of them adapts
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(dict(merged(model, model.state_dict().items())), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain.eval()


@torch.no_grad()
def rounding_loss(model: Any, dtype: torch.dtype) -> float:
    """Return how far merged weights in `dtype` are from exact ones, relative to what the adapters add (0.1 is 10%)."""
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
    """The model under another adapter, or under none, for a while. Gradients are taken by the active one only."""
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
    """Several adapters in one model are what is wanted here; peft warns of them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        yield
