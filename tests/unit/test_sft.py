"""Supervised fine-tuning: the tokens of the loss, and that the loss goes down."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tokenizers_for_tests import byte_level_bpe
from training_for_tests import slow_logprobs, tiny_model

from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.errors import ConfigError
from agentgym_rl.training.device import packed
from agentgym_rl.training.learner import Imitator
from agentgym_rl.training.settings import OptimizerSettings, SFTSettings
from agentgym_rl.training.sft import SFT
from agentgym_rl.types import Message, Sample

STILL = SFTSettings(optimizer=OptimizerSettings(lr=0.0, max_grad_norm=0.0))
CONVERSATION = [
    Message("system", "Walk."),
    Message("user", "A wall."),
    Message("assistant", "go north"),
    Message("user", "A door."),
    Message("assistant", "open"),
    Message("user", "You are out."),
]
SAMPLES = [
    Sample([1, 2, 3, 4, 5], [False, False, True, True, False]),
    Sample([6, 7, 8], [False, True, False]),
    Sample([9, 10, 11, 12, 13, 14], [False, True, True, False, True, True]),
]
torch.set_num_threads(1)


def losses(settings: SFTSettings, samples: list[Sample], seed: int = 0) -> list[float]:
    trainer = SFT(tiny_model(), samples, settings, seed)
    return [trainer.step()["loss"] for _ in range(trainer.total)]


def mean_loss(samples: list[Sample]) -> float:
    model = tiny_model()
    values = [
        -value.item()
        for sample in samples
        for value, trained in zip(slow_logprobs(model, sample.token_ids), sample.loss_mask[1:], strict=True)
        if trained
    ]
    return math.fsum(values) / len(values)


def test_loss_on_replies_is_the_mean_over_their_tokens() -> None:
    assert losses(STILL, SAMPLES) == [pytest.approx(mean_loss(SAMPLES), abs=1e-5)]


def test_loss_on_everything_covers_all_but_the_first_token() -> None:
    everything = [replace(s, loss_mask=[False] + [True] * (len(s.token_ids) - 1)) for s in SAMPLES]
    result = losses(replace(STILL, loss_on="everything"), SAMPLES)
    assert result == [pytest.approx(mean_loss(everything), abs=1e-5)]
    assert result != losses(STILL, SAMPLES)
    assert SAMPLES[0].loss_mask == [False, False, True, True, False]  # the input does not change


def test_a_demonstration_trains_only_replies_and_their_end_tokens() -> None:
    renderer = Renderer(byte_level_bpe("chatml"), "chatml")
    sample = renderer.demonstration(CONVERSATION)
    trained = [token for token, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on]
    assert trained == [*renderer.reply_ids("go north"), *renderer.reply_ids("open")]
    assert trained.count(renderer.end_of_turn) == 2
    other = [token for token, on in zip(sample.token_ids, sample.loss_mask, strict=True) if not on]
    assert "go" not in renderer.tokenizer.decode(other)


def test_logits_of_observations_get_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "MAX_READ_SHARE", 0.0)  # the last layer computes the states of all tokens
    model = tiny_model()
    imitator = Imitator(model, STILL.optimizer, 1)
    outputs: list[torch.Tensor] = []

    def keep(module: object, arguments: object, output: torch.Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    model.model.norm.register_forward_hook(keep)
    imitator.imitate([SAMPLES[0]])
    gradient = outputs[0].grad
    assert gradient is not None
    assert (gradient.abs().sum(-1) > 0).tolist() == [False, True, True, False, False]


def test_the_loss_goes_down() -> None:
    settings = SFTSettings(epochs=40, batch_size=2, optimizer=OptimizerSettings(lr=1e-2))
    result = losses(settings, SAMPLES)
    assert len(result) == 80  # the last batch of each pass is smaller
    assert result[-1] < 0.3 * result[0]


def test_the_order_comes_from_the_seed_and_differs_between_passes() -> None:
    settings = replace(STILL, epochs=3, batch_size=1)
    assert losses(settings, SAMPLES, seed=1) == losses(settings, SAMPLES, seed=1)
    assert losses(settings, SAMPLES, seed=1) != losses(settings, SAMPLES, seed=2)
    passes = losses(settings, SAMPLES, seed=1)
    assert sorted(passes[:3]) == pytest.approx(sorted(passes[3:6]))
    assert len({tuple(passes[i : i + 3]) for i in (0, 3, 6)}) > 1


def test_micro_batches_change_nothing() -> None:
    whole = losses(STILL, SAMPLES)
    cut = replace(STILL, optimizer=replace(STILL.optimizer, micro_batch_tokens=1))
    assert losses(cut, SAMPLES) == pytest.approx(whole, abs=1e-6)


def test_nothing_to_imitate_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs at least one demonstration"):
        SFT(tiny_model(), [Sample([1, 2], [False, False])], STILL, 0)
