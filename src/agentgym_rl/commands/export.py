"""`agentgym-rl export --merge`: merge a checkpoint's adapters into the weights of the model they were trained on."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from agentgym_rl.commands.load_agent import AgentOptions, find_agent, load_weights
from agentgym_rl.errors import ConfigError
from agentgym_rl.training.checkpoint import export
from agentgym_rl.training.locate_model import REWARD_HEAD
from agentgym_rl.training.lora import merged_model, rounding_loss


def export_merged(run: Path, step: int | None, folder: Path, dtype: str, role: str | None = None) -> str:
    """Write the merged model of a checkpoint as a Hugging Face folder. Return a line about its rounding loss.

    `role` is the one whose own adapters are merged, if the run has any. The head of a reward model is copied.

    Base and adapters are added in float32, independent of the dtype of the run.
    """
    if not (run / "config.toml").is_file():
        raise ConfigError(f"--merge needs a run directory, {run} is not one (config.toml is missing)")
    spec = str(run) if step is None else f"{run}@{step}"
    candidate = find_agent(AgentOptions(spec, role, device="cpu", dtype="float32"))
    assert candidate.model is not None
    if candidate.model.lora is None:
        raise ConfigError(f"{run} was trained without adapters and has nothing to merge: leave out --merge")
    if folder.exists():
        raise ConfigError(f"{folder} exists already: choose another folder")
    model, tokenizer = load_weights(candidate)
    torch_dtype = getattr(torch, dtype)
    loss = rounding_loss(model, torch_dtype)
    export(merged_model(model).to(torch_dtype), tokenizer, folder)
    head = Path(candidate.weights) / REWARD_HEAD
    if head.is_file():
        shutil.copyfile(head, folder / REWARD_HEAD)
    rounding = f"; rounding changes the adapters' contribution by {100 * loss:.2g}%" if loss else ""
    return f"merged in {dtype}{rounding}"
