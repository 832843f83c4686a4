"""Direct preference optimisation on pairs of whole episodes.

Shapes: P pairs of a micro-batch, 2 for chosen and rejected, A action tokens in it. The log-probability of an episode is
the sum over the tokens sampled in *all* of its turns. Observations are context only.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from agentgym_rl.errors import ConfigError
from agentgym_rl.training.learner import Updater, idle_passes
from agentgym_rl.training.microbatch import MicroBatch, micro_batches
from agentgym_rl.training.model import action_logprobs, check_plain_head
from agentgym_rl.training.offline_settings import DPOSettings, PairSettings
from agentgym_rl.training.ranks import SINGLE_PROCESS, Ranks
from agentgym_rl.types import Group, Sample, StopReason, Task, Trajectory

Pair = tuple[Trajectory, Trajectory]
"""The better and the worse of two episodes of one item."""


@dataclass(slots=True)
class Preference:
    """Two episodes of one item, the first with the higher reward, and their log-probabilities under the reference."""

    chosen: Sample
    rejected: Sample
    chosen_reference: float
    """Sum of the reference model's log-probabilities over the sampled tokens of the chosen episode."""
    rejected_reference: float

    @property
    def num_tokens(self) -> int:
        return len(self.chosen.token_ids) + len(self.rejected.token_ids)


def build_pairs(
    groups: Iterable[Group], settings: PairSettings, seed: int | str, *, spread_endings: bool = False
) -> list[Pair]:
    """Return (better, worse) episodes of one item with rewards at least `min_gap` apart, up to `pairs_per_item` each.

    Groups of the same item count as one. The choice depends on the episodes and the seed, not on their order. With
    `spread_endings` the endings of the worse episodes take turns, so that a common one does not displace the others.
    """
    by_task: dict[Task, list[Trajectory]] = {}
    for group in groups:
        by_task.setdefault(group.task, []).extend(t for t in group.usable if t.num_turns)
    pairs: list[Pair] = []
    for task in sorted(by_task, key=lambda task: (task.env, task.item)):
        episodes = sorted(by_task[task], key=lambda t: (t.id, [m.content for m in t.messages]))
        # Rewards are sums of decimals: a gap of 0.3 may come out as 0.29999.
        candidates = [(a, b) for a, b in product(episodes, episodes) if a.reward - b.reward >= settings.min_gap - 1e-9]
        count = min(settings.pairs_per_item, len(candidates))
        source = random.Random(f"{seed}/{task.key}")
        if spread_endings:
            pairs += _spread(source.sample(candidates, len(candidates)))[:count]
        else:
            pairs += source.sample(candidates, count)
    return pairs


def _spread(pairs: list[Pair]) -> list[Pair]:
    """Return the pairs in turns by the ending of the worse episode. Those that the environment ended come first."""
    turns: Counter[StopReason | None] = Counter()
    keyed = []
    for pair in pairs:
        ending = pair[1].stop
        keyed.append((turns[ending], ending is not StopReason.DONE, pair))
        turns[ending] += 1
    return [pair for *_, pair in sorted(keyed, key=lambda row: row[:2])]


def dpo_loss(
    policy_P2: Tensor, reference_P2: Tensor, beta: float, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return (loss P, implicit rewards P2) of pairs. Column 0 is the chosen episode, 1 the rejected one.

    r(y) = beta (log pi(y) - log ref(y));  h = r(chosen) - r(rejected)
    loss = -(1 - e) log sigmoid(h) - e log sigmoid(-h)

    Rafailov et al. 2023 (arXiv 2305.18290); e is the label smoothing of Mitchell's conservative DPO (2023).
    """
    rewards_P2 = beta * (policy_P2 - reference_P2)
    margin_P = rewards_P2[:, 0] - rewards_P2[:, 1]
    loss_P = -(1.0 - label_smoothing) * logsigmoid(margin_P) - label_smoothing * logsigmoid(-margin_P)
    return loss_P, rewards_P2


def pair_batches(
    pairs: list[Preference], max_tokens: int, device: torch.device | str
) -> list[tuple[MicroBatch, list[Preference]]]:
    """Return micro-batches that hold both halves of a pair, because its loss needs both.

    Sample 2i is the chosen half of the i-th pair, 2i + 1 the rejected one. At most `max_tokens` tokens, or one pair.
    """
    chunks: list[list[Preference]] = []
    free_tokens = 0
    for pair in sorted(pairs, key=lambda pair: pair.num_tokens, reverse=True):
        if chunks and pair.num_tokens <= free_tokens:
            chunks[-1].append(pair)
        else:
            chunks.append([pair])
            free_tokens = max_tokens
        free_tokens -= pair.num_tokens
    batches = []
    for chunk in chunks:
        halves = [sample for pair in chunk for sample in (pair.chosen, pair.rejected)]
        (micro,) = micro_batches(halves, [1.0] * len(halves), sum(pair.num_tokens for pair in chunk), device)
        batches.append((micro, chunk))
    return batches


@torch.no_grad()
def sequence_logprobs(model: Any, samples: list[Sample], max_tokens: int, ranks: Ranks = SINGLE_PROCESS) -> list[float]:
    """Return the summed log-probability of each sample's trained tokens. Ranks compute shares and exchange results."""
    check_plain_head(model, ranks)
    ranks.prepare_model(model)
    device = ranks.device(model.eval())
    mine = ranks.local_indices([len(s.token_ids) for s in samples])
    batches = micro_batches([samples[i] for i in mine], [1.0] * len(mine), max_tokens, device)
    by_index: dict[str, float] = {}
    for micro in batches:
        logprobs_A, _ = action_logprobs(model, micro, temperature=1.0)
        sums = torch.zeros(len(micro.indices), device=device).index_add_(0, micro.rows_A, logprobs_A)
        by_index |= {str(mine[index]): value for index, value in zip(micro.indices, sums.tolist(), strict=True)}
    for micro in idle_passes(len(batches), ranks, device):
        action_logprobs(model, micro, temperature=1.0)
    by_index = ranks.sum_over_ranks(by_index)
    return [by_index[str(i)] for i in range(len(samples))]


def make_preferences(
    model: Any, pairs: list[tuple[Sample, Sample]], max_tokens: int, ranks: Ranks = SINGLE_PROCESS
) -> list[Preference]:
    """Return the pairs with the log-probabilities of `model`, the reference, which is not needed afterwards."""
    halves = [sample for pair in pairs for sample in pair]
    logprobs = sequence_logprobs(model, halves, max_tokens, ranks)
    return [Preference(*pair, logprobs[2 * i], logprobs[2 * i + 1]) for i, pair in enumerate(pairs)]


class PairTrainer(Updater):
    """`epochs` passes over pairs in a seeded order. To resume, only the number of updates is needed."""

    def __init__(
        self,
        model: Any,
        pairs: list[Preference],
        settings: PairSettings,
        seed: int | str,
        ranks: Ranks = SINGLE_PROCESS,
    ) -> None:
        if not pairs:
            raise ConfigError(f"{type(self).__name__} needs at least one pair of episodes, got none")
        self._pairs, self._seed = pairs, seed
        self._batch_size = settings.batch_size
        self._updates_per_epoch = -(-len(pairs) // settings.batch_size)
        self.total = settings.epochs * self._updates_per_epoch
        super().__init__(model, settings.optimizer, self.total, ranks)

    def step(self) -> dict[str, float]:
        """Make the next update."""
        epoch, place = divmod(self.updates, self._updates_per_epoch)
        order = list(self._pairs)
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        size = self._batch_size
        batch = order[place * size : (place + 1) * size]
        return self.update_on(batch) | {"epoch": epoch + 1.0, "pairs": float(len(batch))}

    def update_on(self, pairs: list[Preference]) -> dict[str, float]:
        """Make one update on the mean loss of `pairs`, of which every rank takes its share."""
        mine = [pairs[i] for i in self.ranks.local_indices([pair.num_tokens for pair in pairs])]
        batches = pair_batches(mine, self.settings.micro_batch_tokens, self.device)
        batches += [(micro, []) for micro in idle_passes(len(batches), self.ranks, self.device)]
        pairs_of = {id(micro): chunk for micro, chunk in batches}
        return self.update([micro for micro, _ in batches], lambda m: self._loss(m, pairs_of[id(m)], len(pairs)))

    def _loss(self, micro: MicroBatch, pairs: list[Preference], batch_size: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the share of a batch's loss and metrics that a micro-batch of `pairs` has. It may have none."""
        raise NotImplementedError


class DPO(PairTrainer):
    """Direct preference optimisation of a policy."""

    def __init__(
        self, model: Any, pairs: list[Preference], settings: DPOSettings, seed: int | str, ranks: Ranks = SINGLE_PROCESS
    ) -> None:
        check_plain_head(model)
        self._dpo = settings
        super().__init__(model, pairs, settings, seed, ranks)

    def _loss(self, micro: MicroBatch, pairs: list[Preference], batch_size: int) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs_A, entropy_A = action_logprobs(self.model, micro, temperature=1.0)
        device = logprobs_A.device
        half_A = torch.tensor(micro.indices, device=device)[micro.rows_A]
        policy_P2 = logprobs_A.new_zeros(2 * len(pairs)).index_add(0, half_A, logprobs_A).view(len(pairs), 2)
        references = [(p.chosen_reference, p.rejected_reference) for p in pairs]
        reference_P2 = torch.tensor(references, device=device).view(len(pairs), 2)
        if self._dpo.normalize_length:
            lengths_P2 = torch.bincount(half_A, minlength=2 * len(pairs)).view(len(pairs), 2)
            policy_P2, reference_P2 = policy_P2 / lengths_P2, reference_P2 / lengths_P2
        loss_P, rewards_P2 = dpo_loss(policy_P2, reference_P2, self._dpo.beta, self._dpo.label_smoothing)
        chosen_P, rejected_P = rewards_P2[:, 0], rewards_P2[:, 1]
        metrics = {
            "dpo/accuracy": (chosen_P > rejected_P).float(),
            "dpo/margin": chosen_P - rejected_P,
            "dpo/chosen_reward": chosen_P,
            "dpo/rejected_reward": rejected_P,
            "dpo/chosen_logprob": policy_P2[:, 0],
            "dpo/rejected_logprob": policy_P2[:, 1],
        }
        share = {name: values_P.sum() / batch_size for name, values_P in metrics.items()}
        # Every pair has the same weight, and so does every token within an episode.
        entropy_P = entropy_A.new_zeros(2 * len(pairs)).index_add(0, half_A, entropy_A)
        counts_P = torch.bincount(half_A, minlength=2 * len(pairs))
        share["entropy/mean"] = (entropy_P / counts_P).sum() / (2 * batch_size)
        return loss_P.sum() / batch_size, share
