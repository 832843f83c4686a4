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
    assert gradient_noise.group_gradient(model, group, 1, "token") == (None, 10), "nothing differs within one turn"
    gradient, processed = gradient_noise.group_gradient(model, group, 2, "token")
    assert processed == 20
    assert gradient is not None
    assert gradient.norm() < 1e-4, "equal texts with advantages +1 and -1 cancel"
    longer = [row(0, [0.0, 1.0]), row(0, [0.0, 0.0, 0.0])]
    gradient, _ = gradient_noise.group_gradient(model, longer, 3, "token")
    assert gradient is not None
    third = torch.tensor([gradient_noise.cut(longer[1], 3)[0]])
    logprobs = model(third).logits.log_softmax(-1)
    model.zero_grad(set_to_none=True)
    (logprobs[0, 12, third[0, 13]] + logprobs[0, 13, third[0, 14]]).backward()  # what remains: minus times minus
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert torch.allclose(gradient, expected, atol=1e-4)
    averaged, _ = gradient_noise.group_gradient(model, longer, 3, "trajectory")
    assert averaged is not None
    assert not torch.allclose(averaged / averaged.norm(), gradient / gradient.norm(), atol=1e-2)


def drawn(truth: torch.Tensor, groups: int, generator: torch.Generator) -> torch.Tensor:
    return truth + torch.randn(groups, len(truth), generator=generator)


def test_signal_noise_and_shared_are_unbiased() -> None:
    generator = torch.Generator().manual_seed(0)
    truth, other = torch.zeros(50), torch.zeros(50)
    truth[0], other[:2] = 2.0, torch.tensor([1.5, 1.5])
    signals, noises, shared = [], [], []
    for _ in range(300):
        gradients = drawn(truth, 12, generator)
        of = gradient_noise.products(gradients, gradients + drawn(other - truth, 12, generator))
        signal, noise = of.signal_and_noise()
        signals.append(signal)
        noises.append(noise)
        shared.append(of.shared())
    assert sum(signals) / 300 == pytest.approx(4.0, abs=0.3)
    assert sum(noises) / 300 == pytest.approx(50.0, rel=0.03)
    assert sum(shared) / 300 == pytest.approx(3.0, abs=0.3), "groups share their noise, which must not count"


def test_leaving_a_group_out_is_the_same_as_never_having_it() -> None:
    generator = torch.Generator().manual_seed(1)
    gradients, longest = (drawn(torch.ones(5), 6, generator) for _ in range(2))
    whole, kept = gradient_noise.products(gradients, longest), [0, 1, 3, 4, 5]
    part = gradient_noise.products(gradients[kept], longest[kept])
    assert whole.signal_and_noise(2) == pytest.approx(part.signal_and_noise())
    assert whole.shared(2) == pytest.approx(part.shared())


def test_agreement_is_the_cosine_that_an_update_reaches_on_average() -> None:
    generator = torch.Generator().manual_seed(2)
    short, long = torch.zeros(30), torch.zeros(30)
    short[0], long[:2] = 3.0, torch.tensor([3.0, 4.0])
    of = gradient_noise.products(drawn(short, 2000, generator), drawn(long, 2000, generator))
    longest = gradient_noise.products(*[drawn(long, 2000, generator)] * 2)
    update = drawn(short, 4000, generator).unflatten(0, (1000, 4)).mean(1)
    cosine = torch.cosine_similarity(update, long.expand_as(update)).mean()
    assert gradient_noise.agreement(of, longest, 4) == pytest.approx(float(cosine), abs=0.03)
    assert gradient_noise.agreement(of, longest, 1e9) == pytest.approx(0.6, abs=0.03)
    value, error = gradient_noise.with_error(lambda out: gradient_noise.agreement(of, longest, 4, out), 200)
    assert 0 < error < value


def test_groups_without_contrast_cost_tokens_and_give_no_signal(model: LlamaForCausalLM) -> None:
    groups = gradient_noise.groups_of([row(i, [0.0, float(k)] + [0.0] * k) for i in range(3) for k in range(2)])
    assert [len(group) for group in groups] == [2, 2, 2]
    measured = gradient_noise.measure(
        [3, 1], lambda turns: [gradient_noise.group_gradient(model, group, turns, "token") for group in groups]
    )
    assert [(each["turns"], each["groups_with_contrast"]) for each in measured] == [(1, 0), (3, 3)]
    short, long = gradient_noise.estimates(measured)
    assert short["ratio"] == (0.0, 0.0)
    assert long["tokens"] > short["tokens"] == 10
    assert long["ratio"][0] != 0.0
