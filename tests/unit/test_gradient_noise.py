"""Gradient signal and noise by horizon, with a tiny real model and episodes written by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "results"))
import gradient_noise  # noqa: E402


def row(item: int, rewards: list[float]) -> dict[str, Any]:
    """Return an episode: an observation of three tokens and a reply of two in every turn."""
    messages = []
    for turn in range(len(rewards)):
        messages.append({"role": "user", "token_ids": [1, 2, 3 + turn], "logprobs": None})
        messages.append({"role": "assistant", "token_ids": [10 + item, 11 + turn], "logprobs": [-0.1, -0.2]})
    return {"env": "maze", "item": item, "messages": messages, "rewards": rewards, "stop": "done"}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **shape))


def test_an_episode_is_cut_after_the_last_allowed_reply() -> None:
    ids, sampled, reward = gradient_noise.cut(row(0, [0.0, 0.5, 1.0]), 2)
    assert ids == [1, 2, 3, 10, 11, 1, 2, 4, 10, 12]
    assert sampled == ([False] * 3 + [True] * 2) * 2
    assert reward == 0.5
    assert len(gradient_noise.cut(row(0, [0.0, 0.5, 1.0]), 9)[0]) == 15


def test_a_group_gradient_is_that_of_the_grpo_objective(model: LlamaForCausalLM) -> None:
    group = [row(0, [0.0, 1.0]), row(0, [0.0, 0.0])]
    assert gradient_noise.group_gradient(model, group, 1) == (None, 10, 4), "nothing differs within one turn"
    gradient, processed, sampled = gradient_noise.group_gradient(model, group, 2)
    assert (processed, sampled) == (20, 8)
    assert gradient is not None
    assert gradient.norm() < 1e-4, "equal texts with advantages +1 and -1 cancel"
    longer = [row(0, [0.0, 1.0]), row(0, [0.0, 0.0, 0.0])]
    gradient, *_ = gradient_noise.group_gradient(model, longer, 3)
    assert gradient is not None
    third = torch.tensor([gradient_noise.cut(longer[1], 3)[0]])
    logprobs = model(third).logits.log_softmax(-1)
    model.zero_grad(set_to_none=True)
    (logprobs[0, 12, third[0, 13]] + logprobs[0, 13, third[0, 14]]).backward()  # what remains: minus times minus
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert torch.allclose(gradient, expected, atol=1e-4)


def test_signal_and_noise_are_unbiased_and_the_jackknife_is_finite() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.zeros(50)
    truth[0] = 2.0
    signals, noises = [], []
    for _ in range(300):
        gradients = truth + torch.randn(12, 50, generator=generator)
        signal, noise = gradient_noise.signal_and_noise(gradients @ gradients.T)
        signals.append(signal)
        noises.append(noise)
    assert sum(signals) / 300 == pytest.approx(4.0, abs=0.3)
    assert sum(noises) / 300 == pytest.approx(50.0, rel=0.03)
    ratio, error = gradient_noise.ratio_with_error((gradients @ gradients.T).double(), 500.0)
    assert ratio == pytest.approx(2 * signals[-1] / noises[-1], rel=1e-4)
    assert 0 < error < 1


def test_groups_without_contrast_cost_tokens_and_give_no_signal(model: LlamaForCausalLM) -> None:
    groups = gradient_noise.groups_of([row(i, [0.0, float(k)] + [0.0] * k) for i in range(3) for k in range(2)])
    assert [len(group) for group in groups] == [2, 2, 2]
    short, long = (gradient_noise.measure(model, groups, turns) for turns in (1, 3))
    assert (short["groups_with_contrast"], short["ratio_per_1000_tokens"]) == (0, 0.0)
    assert long["groups_with_contrast"] == 3
    assert long["processed_tokens_per_group"] > short["processed_tokens_per_group"] == 10
    assert long["ratio_per_1000_tokens"] != 0.0
