"""The fallback for other decoders: computes whole sequences with the model's own forward at every step."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from agentgym_rl.agent.engines.native.runner import Row

PASS_TOKENS = 8192
"""Padded tokens in one forward pass."""


class RecomputeRunner:
    """Runs without a KV cache, so it works with any attention. Padding is on the right, where a causal model's earlier
    positions cannot see it."""

    keeps_cache = False

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def forward(self, rows: list[Row]) -> tuple[torch.Tensor, int]:
        indices = sorted(range(len(rows)), key=lambda index: len(rows[index].token_ids))
        logits: list[torch.Tensor] = [torch.empty(0)] * len(rows)
        while indices:
            width = len(rows[indices[-1]].token_ids)
            size = max(1, PASS_TOKENS // width)
            chunk, indices = indices[-size:], indices[:-size]
            for index, row_logits in zip(chunk, self._pass([rows[i].token_ids for i in chunk], width), strict=True):
                logits[index] = row_logits
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
        """Do nothing: there is no cache."""

    def free(self) -> None:
        """Do nothing: there is no cache."""

    def resize(self, max_slots: int) -> None:
        """Do nothing: there is no cache."""
