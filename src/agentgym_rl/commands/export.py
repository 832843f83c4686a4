"""`agentgym-rl export --merge`: a checkpoint's adapters inside the weights of the model they were trained on."""

from __future__ import annotations

from pathlib import Path

import torch

from agentgym_rl.commands.load_agent import AgentOptions, find_agent, load_weights
from agentgym_rl.errors import ConfigError
from agentgym_rl.training.checkpoint import export
from agentgym_rl.training.lora import merged_model, rounding_loss


def export_merged(run: Path, step: int | None, folder: Path, dtype: str) -> str:
    """Write the merged model of a checkpoint as a Hugging Face folder; return a line about what `dtype` costs.

    Base and adapters are added in float32 whatever the run was trained in.
    """
    if not (run / "config.toml").is_file():
        raise ConfigError(f"--merge needs a run directory, {run} is none (config.toml is missing)")
    candidate = find_agent(AgentOptions(str(run) if step is None else f"{run}@{step}", device="cpu", dtype="float32"))
    assert candidate.model is not None
    if candidate.model.lora is None:
        raise ConfigError(f"{run} was trained without adapters, there is nothing to merge: leave out --merge")
    if folder.exists():
        raise ConfigError(f"{folder} exists already: choose another folder")
    model, tokenizer = load_weights(candidate)
    type_ = getattr(torch, dtype)
    lost = rounding_loss(model, type_)
    export(merged_model(model).to(type_), tokenizer, folder)
    rounding = f"; rounding changes what the adapters add by {100 * lost:.2g}%" if lost else ""
    return f"merged in {dtype}{rounding}"
