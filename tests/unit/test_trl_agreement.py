"""The same numbers as TRL's own trainers, where it has the formula. Needs the extra `trl`; skipped without it.

TRL's padding, masks and loss are its own code: only the tokens, advantages and old log-probabilities are handed to it.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training_for_tests import Catching, counting_player, group, slow_logprobs, tiny_model

from agentgym_rl.training.advantages import ESTIMATORS, Episode
from agentgym_rl.training.batch import Batch, estimate, gather
from agentgym_rl.training.learner import freeze
from agentgym_rl.training.settings import OptimizerSettings, RLSettings
from agentgym_rl.types import Sample

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

MADE = [group(1, [0.0, 1.0, 1.0, 0.5]), group(2, [1.0, 0.0, 0.0, 0.0])]
PLAIN = OptimizerSettings(lr=0.0, max_grad_norm=0.0, micro_batch_tokens=60)
REWARDS = [0.0, 1.0, 1.0, 0.5, 1.0, 0.0, 0.25, 0.0]
torch.set_num_threads(1)


def trainer(folder: Path, kind: str, model: Any, rewards: Any = None, **options: Any) -> Any:
    """A real trainer of TRL on the CPU; nothing is trained with it."""
    _, tokenizer = counting_player()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    config = getattr(trl, f"{kind}Config")(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=6,
        **options,
    )
    made = getattr(trl, f"{kind}Trainer")(
        model=model,
        reward_funcs=rewards or (lambda completions, **_: [0.0] * len(completions)),
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["Goal: 4. You are at 0."] * 8}),
        processing_class=tokenizer,
    )
    made.current_gradient_accumulation_steps = 1
    made.model.train()
    return made


@pytest.mark.parametrize(
    ("kind", "algorithm", "options", "normalize_std"),
    [
        ("GRPO", "grpo", {"scale_rewards": "group"}, True),
        ("GRPO", "grpo", {"scale_rewards": "none"}, False),
        ("RLOO", "rloo", {}, True),
    ],
)
def test_advantages_agree(
    tmp_path: Path, kind: str, algorithm: Any, options: dict[str, Any], normalize_std: bool
) -> None:
    """TRL samples completions of a real tiny model and computes advantages from what the reward function says."""
    model, _ = counting_player()
    peer = trainer(tmp_path, kind, model, lambda completions, **_: REWARDS[: len(completions)], beta=0.0, **options)
    found = peer._generate_and_score_completions([{"prompt": "Goal: 4. You are at 0."} for _ in REWARDS])
    episodes = [Episode(i // 4, [r], [1]) for i, r in enumerate(REWARDS)]
    rl = RLSettings(algorithm=algorithm, normalize_std=normalize_std)
    expected = [advantage for (advantage,) in ESTIMATORS[algorithm](episodes, rl).advantages]
    # TRL adds 1e-4 to the standard deviation, this project 1e-6.
    assert found["advantages"].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-6)


def drifted(model: Any, samples: list[Sample], temperature: float) -> None:
    """Give every sample old log-probabilities some way off, so that some ratios are clipped at either end."""
    for sample in samples:
        exact = slow_logprobs(model, sample.token_ids, temperature)
        places = [i for i, trained in enumerate(sample.loss_mask) if trained]
        sample.old_logprobs = [exact[i - 1].item() + 0.4 * math.sin(7.0 * i) for i in places]
        sample.logprobs = list(sample.old_logprobs)


def inputs_of(samples: list[Sample], reference: Any, temperature: float) -> dict[str, Any]:
    """TRL's layout: what comes before the first reply on the left, all else on the right, observations masked."""
    firsts = [s.loss_mask.index(True) for s in samples]
    left, right = max(firsts), max(len(s.token_ids) - f for s, f in zip(samples, firsts, strict=True))
    rows: dict[str, list[list[float]]] = {}
    for sample, first in zip(samples, firsts, strict=True):
        prompt, completion = sample.token_ids[:first], sample.token_ids[first:]
        before, behind = [0] * (left - first), [0] * (right - len(completion))
        old, known = iter(sample.old_logprobs), slow_logprobs(reference, sample.token_ids, temperature)
        trained = sample.loss_mask[first:]
        row = {
            "prompt_ids": before + prompt,
            "prompt_mask": before + [1] * first,
            "completion_ids": completion + behind,
            "completion_mask": [1] * len(completion) + behind,
            "tool_mask": [int(t) for t in trained] + behind,
            "old_per_token_logps": [next(old) if t else 0.0 for t in trained] + [0.0] * len(behind),
            "ref_per_token_logps": [p.item() for p in known[first - 1 :]] + [0.0] * len(behind),
        }
        for name, values in row.items():
            rows.setdefault(name, []).append(values)
    found: dict[str, Any] = {name: torch.tensor(values) for name, values in rows.items()}
    found["advantages"] = torch.tensor([s.advantages[0] for s in samples])
    found["num_items_in_batch"] = torch.tensor(float(sum(sum(s.loss_mask) for s in samples)))
    return found


LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, {"aggregate": "trajectory"}),
    # Without the ratio that newer versions of TRL multiply the KL term by.
    "grpo with k3": (
        {"loss_type": "grpo", "beta": 0.2, "use_bias_correction_kl": False},
        {"aggregate": "trajectory", "kl_coef": 0.2},
    ),
    "token mean": ({"loss_type": "bnpo"}, {"aggregate": "token"}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"aggregate": "token", "clip_high": 0.28}),
    "dr. grpo": ({"loss_type": "dr_grpo"}, {"aggregate": "constant", "aggregate_length": 6}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.03, "epsilon_high": 0.04},
        {"loss": "gspo", "aggregate": "trajectory", "clip_low": 0.03, "clip_high": 0.04},
    ),
    # TRL's epsilon_high is the bound itself, and it sets no lower one.
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.2}, {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.2}),
}


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_losses_and_gradients_agree_on_ragged_multi_turn_episodes(tmp_path: Path, name: str) -> None:
    temperature = 0.7
    theirs, ours = LOSSES[name]
    settings: dict[str, Any] = {"kl_coef": 0.0, "importance": "none", **ours}
    rl = replace(RLSettings(optimizer=PLAIN, zero_variance="keep"), **settings)
    batch: Batch = estimate(gather(MADE, rl), rl)
    reference = freeze(tiny_model(2))
    drifted(tiny_model(1), batch.samples, temperature)
    model = tiny_model(1)
    model.save_pretrained(tmp_path / "model")  # TRL loads a reference model from where the model came from
    model.config._name_or_path = str(tmp_path / "model")
    peer = trainer(tmp_path, "GRPO", model, temperature=temperature, **{"beta": 0.0, **theirs})
    loss = peer._compute_loss(peer.model, inputs_of(batch.samples, reference, temperature))
    loss.backward()
    learner = Catching(tiny_model(1), rl, temperature, lambda: nullcontext(reference))
    metrics = learner.learn(batch, 0)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert metrics["clip/fraction"] > 0.05
    for parameter_name, parameter in peer.model.named_parameters():
        torch.testing.assert_close(learner.gradients[0][parameter_name], parameter.grad, atol=2e-5, rtol=1e-3)
