"""benchmarks/rounding.py: its forward pass equals the model's except for rounding."""

from __future__ import annotations

import pytest
import torch
from scripts_for_tests import load_script
from training_for_tests import VOCABULARY, tiny_model


@torch.no_grad()
def test_the_pass_is_the_models_with_rounding_and_noise_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model(1), torch.arange(3, 23) % VOCABULARY
    llama = load_script("benchmarks/rounding.py", monkeypatch).Llama(model)

    def logits(noise: float, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return llama.logits(ids, noise, float32_stream=False, generator=generator)

    exact, rounded = model(ids[None]).logits[0], logits(0.0, 0)
    difference = (rounded - exact).abs().mean() / exact.std()
    assert 1e-5 < difference < 0.02
    assert torch.equal(rounded, logits(0.0, 1))
    assert not torch.equal(logits(1e-3, 0), logits(1e-3, 1))
