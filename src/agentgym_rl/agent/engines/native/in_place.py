"""Loads and evaluates a model that is shared with a learner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from agentgym_rl.errors import EngineError


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Set every module to evaluation mode (no dropout) and restore each one's flag afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def load_in_place(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Copy a whole state dict into the model's own tensors, or nothing if it does not match.

    A name may be missing only if its tensor is tied to one that is present (an lm_head tied to the embedding).
    """
    own = model.state_dict()
    loaded = {own[name].data_ptr() for name in state if name in own}
    problems = [f"unexpected {name}" for name in state if name not in own]
    problems += [
        f"missing {name}" for name, value in own.items() if name not in state and value.data_ptr() not in loaded
    ]
    problems += [
        f"{name} has shape {tuple(value.shape)}, needed {tuple(own[name].shape)}"
        for name, value in state.items()
        if name in own and value.shape != own[name].shape
    ]
    if problems:
        shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
        raise EngineError(f"The state dict does not fit {type(model).__name__}: {shown}. Nothing was loaded.")
    with torch.no_grad():
        for name, value in state.items():
            own[name].copy_(value)
