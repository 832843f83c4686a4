"""A reward model: a decoder with a scalar head at the last token, which scores whole episodes.

Shapes: P pairs of a micro-batch, 2 for chosen and rejected, B samples of a micro-batch.

The probability that people prefer episode a to b is sigmoid(r(a) - r(b)), as Bradley and Terry (1952) have it. The head
is kept beside the model, in `reward_head.safetensors` of its folder.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import logsigmoid

from agentgym_rl.errors import ConfigError
from agentgym_rl.training.critic import ValueModel
from agentgym_rl.training.dpo import Pair, PairTrainer, Preference
from agentgym_rl.training.learner import idle_passes
from agentgym_rl.training.locate_model import REWARD_HEAD
from agentgym_rl.training.microbatch import MicroBatch, micro_batches
from agentgym_rl.training.offline_settings import RewardModelSettings
from agentgym_rl.training.ranks import SINGLE_PROCESS, Ranks
from agentgym_rl.types import Sample, Task

SCORED_TEXT = "with the last observation"
"""Text of an episode that a head scores, as it is recorded beside the head."""


def split_pairs(pairs: Sequence[Pair], share: float, seed: int | str) -> tuple[list[Pair], list[Pair]]:
    """Return (pairs to train on, held-out pairs). All pairs of an item are on one side; `share` is that of the items.

    The seed chooses the items. At least one is held out and one is trained on.
    """
    items: list[Task] = sorted({better.task for better, _ in pairs}, key=lambda task: (task.env, task.item))
    if len(items) < 2:
        raise ConfigError(
            f"a reward model needs pairs of at least 2 items, one of them held out, got pairs of {len(items)}: choose "
            "between more episodes, or raise reward_model.sample_groups"
        )
    count = min(len(items) - 1, max(1, round(share * len(items))))
    held_out = set(random.Random(f"{seed}/held out").sample(items, count))
    return [p for p in pairs if p[0].task not in held_out], [p for p in pairs if p[0].task in held_out]


class RewardTrainer(PairTrainer):
    """Trains a new head and the model under it: loss = -log sigmoid(r+ - r-) + center_coef * (r+ + r-)^2.

    The second term keeps scores around 0 (Eisenstein et al. 2023, arXiv 2312.09244); pairs alone leave their mean open.
    """

    def __init__(
        self,
        model: Any,
        pairs: list[Preference],
        settings: RewardModelSettings,
        seed: int | str,
        ranks: Ranks = SINGLE_PROCESS,
        scored: ValueModel | None = None,
    ) -> None:
        """`scored` is the value model over the model's decoder, which a rank makes before its model is sharded."""
        self._center_coef = settings.center_coef
        scored = scored or ValueModel(model.get_decoder(), model.config.hidden_size)
        scored.head.bias.requires_grad_(False)  # a pair's gradients cancel in it: only rounding would move it
        super().__init__(scored, pairs, settings, seed, ranks)

    def _loss(self, micro: MicroBatch, pairs: list[Preference], batch_size: int) -> tuple[Tensor, dict[str, Tensor]]:
        _, scores_B = self.model(micro)
        if not pairs:  # a pass that keeps this rank in step with the others
            return 0.0 * scores_B.sum(), {}
        order_B = torch.tensor(micro.indices, device=scores_B.device)
        scores_P2 = torch.empty_like(scores_B).index_copy(0, order_B, scores_B).view(len(pairs), 2)
        margin_P = scores_P2[:, 0] - scores_P2[:, 1]
        loss_P = -logsigmoid(margin_P) + self._center_coef * scores_P2.sum(1).square()
        metrics = {
            "reward_model/accuracy": (margin_P > 0).float(),
            "reward_model/margin": margin_P,
            "reward_model/chosen": scores_P2[:, 0],
            "reward_model/rejected": scores_P2[:, 1],
        }
        return loss_P.sum() / batch_size, {name: values_P.sum() / batch_size for name, values_P in metrics.items()}

    def scores(self, samples: list[Sample]) -> list[float]:
        """Return the score of each sample."""
        return scores_of(self.model, samples, self.settings.micro_batch_tokens, self.ranks)

    def head(self) -> dict[str, Tensor]:
        """Return the whole head. All ranks must call this together."""
        named = self.model.head.named_parameters()
        return {name: self.ranks.full_tensor(p.detach()).cpu().clone() for name, p in named}

    def state(self) -> dict[str, Any]:
        return {**super().state(), "head": {name: p.detach() for name, p in self.model.head.named_parameters()}}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.model.head.load_state_dict(state["head"])


@torch.no_grad()
def scores_of(model: ValueModel, samples: list[Sample], max_tokens: int, ranks: Ranks = SINGLE_PROCESS) -> list[float]:
    """Return the score of each sample. Ranks compute shares and exchange results."""
    model.eval()
    local = ranks.local_indices([len(s.token_ids) for s in samples])
    batches = micro_batches([samples[i] for i in local], [1.0] * len(local), max_tokens, model.device)
    by_index: dict[str, float] = {}
    for micro in batches:
        _, scores_B = model(micro)
        by_index |= {str(local[i]): score for i, score in zip(micro.indices, scores_B.tolist(), strict=True)}
    for micro in idle_passes(len(batches), ranks, model.device):
        model(micro)
    by_index = ranks.sum_over_ranks(by_index)
    return [by_index[str(i)] for i in range(len(samples))]


def accuracy(scores: Sequence[float]) -> float:
    """Return the share of pairs in the right order, given the scores of chosen and rejected in turn. A tie is half."""
    pairs = list(zip(scores[::2], scores[1::2], strict=True))
    return sum((chosen > rejected) + 0.5 * (chosen == rejected) for chosen, rejected in pairs) / len(pairs)


def save_head(head: dict[str, Tensor], about: dict[str, str], folder: Path) -> None:
    """Write the head into a model's folder, with what is needed to render episodes as in training."""
    save_file(head, folder / REWARD_HEAD, metadata={**about, "text": SCORED_TEXT})


def load_head(model: Any, folder: Path) -> tuple[ValueModel, dict[str, str]]:
    """Return the model of a folder as a reward model, and what `save_head` wrote about it."""
    reward_model = ValueModel(model.get_decoder(), model.config.hidden_size)
    with safe_open(folder / REWARD_HEAD, framework="pt") as file:
        about = file.metadata()
        if about.get("text") != SCORED_TEXT:
            raise ConfigError(
                f"{folder}: this reward model was trained by an earlier version, on episodes without their last "
                "observation: train it again"
            )
        reward_model.head.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        return reward_model.requires_grad_(False).eval(), about
