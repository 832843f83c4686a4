"""Loading the model of a run on the device and in the type of the recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym_rl.config import ModelConfig
from agentgym_rl.errors import ConfigError
from agentgym_rl.training.locate_model import folder_of, require_folder

if TYPE_CHECKING:
    import torch

    from agentgym_rl.training.ranks import Ranks


def choose_device(settings: ModelConfig) -> tuple[str, torch.dtype]:
    """Return (device, dtype). `auto` is CUDA if there is a device, else the CPU."""
    import torch

    device = settings.device if settings.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"model.device = {device!r} needs a CUDA device, none is here: use 'cpu', or 'auto'")
    return device, getattr(torch, settings.dtype)


def load_from(folder: str | Path, settings: ModelConfig, ranks: Ranks | None = None) -> tuple[Any, Any]:
    """Return (model, tokenizer) of a folder, or of the recipe's model with the adapters in the folder."""
    from agentgym_rl.training import lora
    from agentgym_rl.training.model import load_model
    from agentgym_rl.training.ranks import SINGLE_PROCESS

    device, dtype = choose_device(settings)
    if settings.lora is not None and (Path(folder) / "adapter_config.json").is_file():
        assert settings.path is not None
        base, tokenizer = load_model(settings.path, device=device, dtype=dtype, ranks=ranks or SINGLE_PROCESS)
        lora.load_adapter(base, Path(folder))
        return base, tokenizer
    return load_model(str(folder), device=device, dtype=dtype, ranks=ranks or SINGLE_PROCESS)


def base_of_adapters(folder: Path) -> str | None:
    """Return the folder or hub name of the model that a folder's adapters were trained on; None without adapters."""
    adapters = folder / "adapter_config.json"
    if not adapters.is_file():
        return None
    try:
        base = json.loads(adapters.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str) or not base:
        raise ConfigError(
            f"{adapters} must name the model that the adapters were trained on (base_model_name_or_path), got none: "
            "add its folder or hub name"
        )
    return base


def loaded_dtype(folder: Path) -> str:
    """Return the type to load a folder's weights in: bfloat16 if its config.json says so, float32 for any other."""
    config = folder / "config.json"
    raw = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return "bfloat16" if (raw.get("dtype") or raw.get("torch_dtype")) == "bfloat16" else "float32"


def load_frozen(path: str, setting: str, settings: ModelConfig, ranks: Ranks | None = None) -> tuple[Any, Any]:
    """Return (model, tokenizer) of a folder, a hub name or a run's last checkpoint, with its adapters if it has any."""
    from agentgym_rl.training import lora
    from agentgym_rl.training.learner import freeze
    from agentgym_rl.training.model import load_model
    from agentgym_rl.training.ranks import SINGLE_PROCESS

    folder = folder_of(path, setting)
    device, dtype = choose_device(settings)
    base = base_of_adapters(folder)
    if base is not None:
        model, tokenizer = load_model(base, device=device, dtype=dtype)  # whole on each rank, as adapters are
        lora.load_adapter(model, folder)
    else:
        name = str(folder) if folder.is_dir() else path
        require_folder(name, setting)
        model, tokenizer = load_model(name, device=device, dtype=dtype, ranks=ranks or SINGLE_PROCESS)
    return freeze(model), tokenizer


def load_teacher(path: str, tokenizer: Any, settings: ModelConfig, ranks: Ranks) -> Any:
    """Return the frozen teacher of distillation. Raise ConfigError if its tokenizer is not the agent's."""
    teacher, own = load_frozen(path, "rl.distill.teacher", settings, ranks)
    require_same_tokenizer(own, tokenizer, path)
    return teacher


def require_same_tokenizer(teachers: Any, tokenizer: Any, path: str) -> None:
    """Raise ConfigError if a teacher's ids mean other tokens than the agent's."""
    if teachers.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"rl.distill.teacher = {path!r}: it scores the ids that the agent samples, so it needs the agent's "
            f"tokenizer; the vocabularies differ ({len(teachers.get_vocab())} and {len(tokenizer.get_vocab())} tokens)"
        )
