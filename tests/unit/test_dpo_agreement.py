"""DPO gives the loss and gradients of TRL's own trainer. Needs the extra `trl`; skipped without it.

TRL's padding, masks, log-probabilities and reference are its own code: only the tokens and which of them were sampled
are handed to it.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from training_for_tests import counting_player

from agentgym_rl.training.dpo import DPO, make_preferences
from agentgym_rl.training.settings import DPOSettings, OptimizerSettings
from agentgym_rl.types import Sample

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
torch.set_num_threads(1)


def sample(rng: random.Random, vocabulary: int) -> Sample:
    """Return an episode of 2 to 4 turns of random lengths."""
    ids: list[int] = []
    mask: list[bool] = []
    for _ in range(rng.randint(2, 4)):
        for length, sampled in ((rng.randint(1, 6), False), (rng.randint(1, 4), True)):
            ids += [rng.randrange(vocabulary) for _ in range(length)]
            mask += [sampled] * length
    return Sample(ids, mask)


def padded(halves: list[Sample]) -> dict[str, Any]:
    """Return samples in the format of TRL's collator: chosen ones first."""
    longest = max(len(s.token_ids) for s in halves)

    def pad(rows: list[list[int]]) -> torch.Tensor:
        return torch.tensor([row + [0] * (longest - len(row)) for row in rows])

    return {
        "input_ids": pad([s.token_ids for s in halves]),
        "attention_mask": pad([[1] * len(s.token_ids) for s in halves]),
        "completion_mask": pad([list(map(int, s.loss_mask)) for s in halves]),
    }


@pytest.mark.parametrize(("kind", "normalize"), [("sigmoid", False), ("sigmoid_norm", True)])
def test_loss_and_gradients_agree(tmp_path: Path, kind: str, normalize: bool) -> None:
    model, tokenizer = counting_player()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    reference = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    rng = random.Random(0)
    pairs = [(sample(rng, len(tokenizer)), sample(rng, len(tokenizer))) for _ in range(6)]

    theirs = copy.deepcopy(model)
    row = {"prompt": "Goal: 4. You are at 0.", "chosen": "up", "rejected": "down"}
    peer = trl.DPOTrainer(
        model=theirs,
        ref_model=copy.deepcopy(reference),
        args=trl.DPOConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
            beta=0.3, loss_type=kind,
        ),
        train_dataset=datasets.Dataset.from_list([row] * 4),
        processing_class=tokenizer,
    )  # fmt: skip
    peer.model.train()
    loss = peer._compute_loss(peer.model, padded([a for a, _ in pairs] + [b for _, b in pairs]), False)
    loss.backward()

    caught: list[torch.Tensor] = []
    still = OptimizerSettings(lr=0.0, max_grad_norm=0.0, micro_batch_tokens=120)
    settings = DPOSettings(beta=0.3, normalize_length=normalize, optimizer=still, sample_groups=1)
    preferences = make_preferences(reference, pairs, 200)
    trainer = DPO(model, preferences, settings, 0)
    trainer._optimizer.register_step_pre_hook(lambda *_: caught.extend(p.grad.clone() for p in model.parameters()))
    metrics = trainer.update_on(preferences)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    for (name, parameter), mine in zip(theirs.named_parameters(), caught, strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-3, atol=1e-6, msg=name)
