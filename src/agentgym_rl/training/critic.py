"""PPO's critic: a decoder with a scalar head that estimates the value of a state.

Shapes: A action tokens, B rows of a micro-batch, H hidden size.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from agentgym_rl.training.learner import Updater
from agentgym_rl.training.losses import value_loss
from agentgym_rl.training.microbatch import MicroBatch
from agentgym_rl.training.model import ModelContext, hidden_states, states_at_end, states_before_actions
from agentgym_rl.training.ranks import SINGLE_PROCESS, Ranks
from agentgym_rl.training.settings import CriticSettings


class ValueModel(nn.Module):
    """A decoder with a linear head that starts at 0, so that a new critic returns 0 everywhere."""

    def __init__(self, decoder: nn.Module, hidden_size: int, switch: ModelContext = nullcontext) -> None:
        super().__init__()
        self.switch = switch
        """Context in which the decoder is the critic's. With LoRA the policy shares it (see lora.py)."""
        self.decoder = decoder
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.head.to(next(decoder.parameters()).device)

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return (values of the states before the action tokens, A; values of the states after the last tokens, B)."""
        hidden = hidden_states(self.decoder, micro)
        positions = (states_before_actions(hidden, micro), states_at_end(hidden, micro))
        before, after = (self.head(states.to(self.head.weight.dtype)).squeeze(-1) for states in positions)
        return before, after


class Critic(Updater):
    """Trains values by regression on returns."""

    def __init__(
        self, model: ValueModel, settings: CriticSettings, total_updates: int, ranks: Ranks = SINGLE_PROCESS
    ) -> None:
        with model.switch():
            super().__init__(model, settings.optimizer, total_updates, ranks)
        self._bound = settings.clip

    @torch.no_grad()
    def values(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        self.model.eval()
        with self.model.switch():
            return self.model(micro)

    def learn(self, part: list[MicroBatch]) -> dict[str, float]:
        """Make one update. Return metrics as weighted sums, like the policy's."""
        with self.model.switch():
            metrics = self.update(part, self._loss)
        names = {
            "loss": "value/loss",
            "grad/norm": "value/grad_norm",
            "value/error": "value/error",
            "covered": "covered",
            "skipped": "skipped",
        }
        return {names[name]: value for name, value in metrics.items() if name in names}

    def _loss(self, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        values_A, _ = self.model(micro)
        loss_A = value_loss(values_A, micro.values_A, micro.returns_A, self._bound)
        error = (micro.weights_A * (values_A - micro.returns_A).abs()).sum()
        return (micro.weights_A * loss_A).sum(), {"value/error": error, "covered": micro.weights_A.sum()}

    def state(self) -> dict[str, Any]:
        with self.model.switch():
            trained = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        return {**super().state(), "parameters": trained}

    def restore(self, state: dict[str, Any]) -> None:
        # First, because master weights of an earlier version are rounded to the model's type in another way below.
        self.model.load_state_dict(state["parameters"], strict=False)
        super().restore({"masters": state["parameters"]} | state)
