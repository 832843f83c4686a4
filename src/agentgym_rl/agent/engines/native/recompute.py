"""The way for every other decoder: whole sequences through the model's own forward at every step. Slow, and right."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from agentgym_rl.agent.engines.native.runner import Row

PASS_TOKENS = 8192
"""Padded tokens in one forward pass."""


class RecomputeRunner:
    """Keeps no keys and values, so it needs to know nothing of a model's attention. Padding is on the right, where a
    causal model's earlier positions cannot see it."""

    keeps_cache = False

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def forward(self, rows: list[Row]) -> tuple[torch.Tensor, int]:
        places = sorted(range(len(rows)), key=lambda place: len(rows[place].token_ids))
        logits: list[torch.Tensor] = [torch.empty(0)] * len(rows)
        while places:
            width = len(rows[places[-1]].token_ids)
            size = max(1, PASS_TOKENS // width)
            chunk, places = places[-size:], places[:-size]
            for place, row_logits in zip(chunk, self._pass([rows[p].token_ids for p in chunk], width), strict=True):
                logits[place] = row_logits
        return torch.stack(logits), sum(len(row.token_ids) for row in rows)

    def _pass(self, sequences: list[list[int]], width: int) -> torch.Tensor:
        lengths = torch.tensor([len(ids) for ids in sequences], device=self._device)
        token_ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in sequences], device=self._device)
        mask = (torch.arange(width, device=self._device) < lengths.unsqueeze(1)).long()
        options: dict[str, Any] = {}
        ends, column = torch.unique(lengths - 1, return_inverse=True)
        if self._keeps_logits:
            options["logits_to_keep"] = ends
        else:
            column = lengths - 1
        logits = self._model(input_ids=token_ids, attention_mask=mask, use_cache=False, **options).logits
        return logits[torch.arange(len(sequences), device=self._device), column].float()

    def clear(self, slot: int) -> None:
        """Nothing is kept."""

    def free(self) -> None:
        """Nothing is kept."""

    def resize(self, max_slots: int) -> None:
        """Nothing is kept."""
