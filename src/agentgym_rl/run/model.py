"""Loading the model of a run on the device and in the type of the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym_rl.config import ModelConfig
from agentgym_rl.errors import ConfigError

if TYPE_CHECKING:
    import torch


def choose_device(settings: ModelConfig) -> tuple[str, torch.dtype]:
    """Return (device, dtype). `auto` is CUDA if there is a device, else the CPU."""
    import torch

    device = settings.device if settings.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"model.device = {device!r} needs a CUDA device, none is here: use 'cpu', or 'auto'")
    return device, getattr(torch, settings.dtype)


def load_from(folder: str | Path, settings: ModelConfig) -> tuple[Any, Any]:
    """Return (model, tokenizer) of a folder, or of the recipe's model with the adapters in the folder."""
    from agentgym_rl.training import lora
    from agentgym_rl.training.model import load_model

    device, dtype = choose_device(settings)
    if settings.lora is not None and (Path(folder) / "adapter_config.json").is_file():
        assert settings.path is not None
        base, tokenizer = load_model(settings.path, device=device, dtype=dtype)
        lora.load_adapter(base, Path(folder))
        return base, tokenizer
    return load_model(str(folder), device=device, dtype=dtype)
