"""Loading the model of a run on the device and in the type of the recipe."""

from __future__ import annotations

import json
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


def load_teacher(path: str, tokenizer: Any, settings: ModelConfig) -> Any:
    """Return the model of a folder, a hub name or a run's last checkpoint, with the tokenizer of the agent."""
    from agentgym_rl.training import lora
    from agentgym_rl.training.checkpoint import list_checkpoints
    from agentgym_rl.training.model import load_model

    folder = Path(path)
    if (folder / "checkpoints").is_dir():
        checkpoints = list_checkpoints(folder / "checkpoints")
        if not checkpoints:
            raise ConfigError(f"rl.distill.teacher = {path!r}: the run has no checkpoint yet")
        folder = checkpoints[-1] / "model"
    device, dtype = choose_device(settings)
    adapters = folder / "adapter_config.json"
    if adapters.is_file():
        base = json.loads(adapters.read_text(encoding="utf-8"))["base_model_name_or_path"]
        teacher, own = load_model(base, device=device, dtype=dtype)
        lora.load_adapter(teacher, folder)
    else:
        teacher, own = load_model(str(folder) if folder.is_dir() else path, device=device, dtype=dtype)
    if own.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"rl.distill.teacher = {path!r}: it scores the ids that the agent samples, so it needs the agent's "
            f"tokenizer; the vocabularies differ ({len(own.get_vocab())} and {len(tokenizer.get_vocab())} tokens)"
        )
    return teacher
