"""Compare the gradients of GRPO under shorter and longer horizons, from the same episodes.

    RUN=runs/collapse/fixed-64-calm-maze-0
    agentgym-rl eval --agent $RUN@100 --env maze --subset size4 --split train --limit 2000 --samples 8 \\
        --turns 64 --out runs/noise/100
    python results/gradient_noise.py $RUN/checkpoints/step_000100/model runs/noise/100 --turns 8,16,32,64 --jobs 14 \\
        --out results/gradient-noise/fixed-64-calm-0-100.json

No agent knows its horizon, so the first 8 turns of an episode of 64 are those of an episode of 8: every horizon is
measured on prefixes of the same episodes, which makes the comparison paired. With g_i the gradient of group i, G their
sum, and g', G' those under the longest horizon,

    signal = (|G|^2 - sum |g_i|^2) / (n (n - 1))              unbiased estimate of |E g|^2
    noise  = mean |g_i|^2 - signal                            variance of one group's gradient
    shared = (G . G' - sum g_i . g'_i) / (n (n - 1))          unbiased estimate of E g . E g'
    ratio per 1,000 tokens = signal / noise / (processed tokens of a group / 1,000)
    agreement = shared / sqrt(signal' (signal + noise / m))   expected cosine between the gradient of an update and the
                                                              true one under the longest horizon

An update has as many groups m as its tokens allow: those of UPDATE_GROUPS groups under the longest horizon. The ratio
asks how well a horizon's own gradient is known, the agreement whether an update along it helps under the longest one.
Processed tokens include observations. A group whose episodes end alike has no gradient and still costs its tokens.
Standard errors are a jackknife over groups; the record has what it needs (`Products`).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from behaviour import Row, read_rows
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

MAX_BYTES = 8 << 30
"""Memory for the gradients of all groups under two horizons, which are kept to compare them with each other."""
EPSILON = 1e-6
UPDATE_GROUPS = 8
"""Groups of an update under the longest horizon, as in recipes/evidence/maze-rl.toml."""


MAX_PADDING = 1.25
"""Longest over shortest episode of a batch."""

Weighted = tuple[list[int], list[bool], float]
"""Token ids of an episode, which of them were sampled, and their weight in the loss."""


def cut(row: Row, turns: int) -> tuple[list[int], list[bool], float]:
    """Return token ids up to the end of the last allowed reply, which of them were sampled, and the reward so far."""
    ids: list[int] = []
    sampled: list[bool] = []
    replies, end = 0, 0
    for message in row["messages"]:
        is_reply = message["logprobs"] is not None
        if is_reply and replies == turns:
            break
        ids += message["token_ids"]
        sampled += [is_reply] * len(message["token_ids"])
        if is_reply:
            replies, end = replies + 1, len(ids)
    return ids[:end], sampled[:end], sum(row["rewards"][:turns])


def groups_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the episodes of each item with two or more of them."""
    by_item: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        by_item[row["env"], row["item"]].append(row)
    return [group for group in by_item.values() if len(group) > 1]


def read_groups(evaluation: Path) -> list[list[Row]]:
    """Return the groups of an evaluation's episodes."""
    return groups_of([row for path in sorted((evaluation / "trajectories").glob("*.jsonl")) for row in read_rows(path)])


def group_gradient(model: Any, group: Sequence[Row], turns: int, aggregate: str) -> tuple[Tensor | None, int]:
    """Return (gradient of minus the GRPO objective, processed tokens). `aggregate` is that of the recipe.

    The gradient is None if all episodes have the same reward. Its scale has no meaning.
    """
    episodes = [cut(row, turns) for row in group]
    rewards = torch.tensor([reward for *_, reward in episodes])
    processed = sum(len(ids) for ids, *_ in episodes)
    if rewards.max() - rewards.min() < EPSILON:
        return None, processed
    advantages = ((rewards - rewards.mean()) / (rewards.std(correction=0) + EPSILON)).tolist()
    weights = [-a / (1 if aggregate == "token" else sum(s)) for a, (_, s, _) in zip(advantages, episodes, strict=True)]
    model.zero_grad(set_to_none=True)
    for batch in _similar_lengths([(ids, sampled, w) for (ids, sampled, _), w in zip(episodes, weights, strict=True)]):
        tokens = _padded([ids for ids, *_ in batch]).to(model.device)  # to the right: a causal model needs no mask
        each = torch.tensor([weight for *_, weight in batch])
        weight = (_padded([sampled for _, sampled, _ in batch]) * each[:, None]).to(model.device)
        logprobs = model(tokens).logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        (logprobs * weight[:, 1:]).sum().backward()
    return torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None]).cpu(), processed


def _similar_lengths(episodes: Sequence[Weighted]) -> list[list[Weighted]]:
    """Return the episodes in batches with little padding, because attention over it would take most of the time."""
    batches: list[list[Weighted]] = []
    for episode in sorted(episodes, key=lambda each: len(each[0])):
        if not batches or len(episode[0]) > MAX_PADDING * len(batches[-1][0][0]):
            batches.append([])
        batches[-1].append(episode)
    return batches


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


Estimate = Callable[[int | None], float]
"""Returns an estimate from all groups (None) or without one."""


@dataclass(frozen=True)
class Products:
    """Inner products of the gradients of n groups under one horizon, with each other and with the longest horizon's."""

    own: list[float]
    """g_i . g_i of each group."""
    with_sum: list[float]
    """g_i . G"""
    with_longest: list[float]
    """g_i . g'_i"""
    with_longest_sum: list[float]
    """g_i . G'"""
    longest_with_sum: list[float]
    """g'_i . G"""

    @cached_property
    def totals(self) -> tuple[float, float, float, float]:
        """Sums over the groups of own, with_sum, with_longest and with_longest_sum."""
        return sum(self.own), sum(self.with_sum), sum(self.with_longest), sum(self.with_longest_sum)

    def signal_and_noise(self, left_out: int | None = None) -> tuple[float, float]:
        """Return (signal, noise), of all groups or without one."""
        n, (squares, total, *_) = len(self.own), self.totals
        if left_out is not None:
            n, total = n - 1, total - 2 * self.with_sum[left_out] + self.own[left_out]
            squares -= self.own[left_out]
        signal = (total - squares) / (n * (n - 1))
        return signal, squares / n - signal

    def shared(self, left_out: int | None = None) -> float:
        """Return the estimate of E g . E g', of all groups or without one."""
        n, (*_, same, total) = len(self.own), self.totals
        if left_out is not None:
            n, same = n - 1, same - self.with_longest[left_out]
            total += self.with_longest[left_out] - self.with_longest_sum[left_out] - self.longest_with_sum[left_out]
        return (total - same) / (n * (n - 1))


def products(gradients: Tensor, longest: Tensor) -> Products:
    """Return the inner products of gradients [n, P], in float64 because n products are added up."""
    total, longest_total = gradients.sum(0, dtype=torch.float64), longest.sum(0, dtype=torch.float64)

    def rows(a: Tensor, b: Tensor) -> list[float]:
        values = [float(x.double() @ y.double()) for x, y in zip(a, b.expand_as(a), strict=True)]
        return [float(f"{value:.8g}") for value in values]

    return Products(
        own=rows(gradients, gradients),
        with_sum=rows(gradients, total),
        with_longest=rows(gradients, longest),
        with_longest_sum=rows(gradients, longest_total),
        longest_with_sum=rows(longest, total),
    )


def ratio(of: Products, tokens_per_group: float, left_out: int | None = None) -> float:
    """Return signal / noise per 1,000 processed tokens."""
    signal, noise = of.signal_and_noise(left_out)
    return 1000.0 / tokens_per_group * signal / noise if noise else 0.0


def agreement(of: Products, longest: Products, groups: float, left_out: int | None = None) -> float:
    """Return the expected cosine between a gradient of `groups` groups and the true one under the longest horizon.

    It is not a number if there is no estimate of the true one.
    """
    (signal, noise), (truth, _) = of.signal_and_noise(left_out), longest.signal_and_noise(left_out)
    square = truth * (signal + noise / groups)
    return of.shared(left_out) / math.sqrt(square) if truth > 0 and square > 0 else math.nan


def with_error(estimate: Estimate, n: int) -> tuple[float, float]:
    """Return an estimate and its jackknife standard error."""
    without = [estimate(index) for index in range(n)]
    center = statistics.fmean(without)
    return estimate(None), math.sqrt((n - 1) / n * sum((value - center) ** 2 for value in without))


Gradients = list[tuple[Tensor | None, int]]
"""Gradient and processed tokens of each group."""


def measure(horizons: Sequence[int], gradients_under: Callable[[int], Gradients]) -> list[dict[str, Any]]:
    """Return the inner products under each horizon, from the shortest to the longest."""
    longest: Tensor | None = None
    measured = []
    for turns in sorted(horizons, reverse=True):
        results = gradients_under(turns)
        present = (gradient for gradient, _ in results if gradient is not None)
        zeros = torch.zeros_like(next(present, torch.zeros(1) if longest is None else longest[0]))
        if (needed := 8 * len(zeros) * len(results)) > MAX_BYTES:
            raise SystemExit(f"the gradients of two horizons need {needed >> 30} GiB: use fewer groups")
        gradients = torch.stack([zeros if gradient is None else gradient for gradient, _ in results])
        longest = gradients if longest is None else longest
        measured.append(
            {
                "turns": turns,
                "groups_with_contrast": sum(gradient is not None for gradient, _ in results),
                "processed_tokens_per_group": statistics.fmean(processed for _, processed in results),
                **asdict(products(gradients, longest)),
            }
        )
    return measured[::-1]


_worker: dict[str, Any] = {}
"""Model and groups of a worker process."""


def _start_worker(model: Path, evaluation: Path, device: str) -> None:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    _worker["model"] = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
    _worker["groups"] = read_groups(evaluation)


def _in_worker(turns: int, aggregate: str, index: int) -> tuple[Any, int]:
    gradient, processed = group_gradient(_worker["model"], _worker["groups"][index], turns, aggregate)
    return None if gradient is None else gradient.numpy(), processed


def estimates(horizons: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the estimates of each horizon that `measure` returned, with their standard errors. `gain` is the agreement
    less that of the longest horizon."""
    by_turns = [Products(**{field.name: row[field.name] for field in fields(Products)}) for row in horizons]
    longest, tokens = by_turns[-1], UPDATE_GROUPS * horizons[-1]["processed_tokens_per_group"]
    rows = []
    for row, own in zip(horizons, by_turns, strict=True):
        agrees = partial(agreement, own, longest, tokens / row["processed_tokens_per_group"])
        least = partial(agreement, longest, longest, UPDATE_GROUPS)
        measured = {
            "ratio": partial(ratio, own, row["processed_tokens_per_group"]),
            "agreement": agrees,
            "gain": partial(_difference, agrees, least),
        }
        rows.append(
            {
                "turns": row["turns"],
                "contrast": row["groups_with_contrast"] / len(own.own),
                "tokens": row["processed_tokens_per_group"],
                **{name: with_error(estimate, len(own.own)) for name, estimate in measured.items()},
            }
        )
    return rows


def _difference(first: Estimate, second: Estimate, left_out: int | None) -> float:
    return first(left_out) - second(left_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the weights that played the episodes")
    parser.add_argument("evaluation", type=Path, help="folder of `agentgym-rl eval` with several samples per item")
    parser.add_argument("--turns", default="8,16,32,64")
    parser.add_argument("--aggregate", choices=("token", "trajectory"), default="trajectory", help="as in the recipe")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with one thread")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    indices = range(len(read_groups(options.evaluation)))
    workers = options.jobs, get_context("spawn"), _start_worker, (options.model, options.evaluation, options.device)
    with ProcessPoolExecutor(*workers) as pool:

        def gradients_under(turns: int) -> Gradients:
            results = pool.map(partial(_in_worker, turns, options.aggregate), indices, chunksize=4)
            return [(None if gradient is None else torch.from_numpy(gradient), tokens) for gradient, tokens in results]

        horizons = measure([int(turns) for turns in options.turns.split(",")], gradients_under)
    columns = ("turns", "groups with contrast", "processed tokens a group", "signal / noise per 1,000 tokens")
    print(f"| {' | '.join((*columns, 'agreement', 'less the longest'))} |")
    print("|---|---|---|---|---|---|")
    for row in estimates(horizons):
        numbers = "{:.2e} ± {:.1e} | {:.3f} ± {:.3f} | {:+.3f} ± {:.3f}".format(
            *row["ratio"], *row["agreement"], *row["gain"]
        )
        print(f"| {row['turns']} | {100 * row['contrast']:.0f}% | {row['tokens']:,.0f} | {numbers} |")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        names = {"model": options.model.parent.name, "evaluation": options.evaluation.name}
        options.out.write_text(json.dumps(names | {"aggregate": options.aggregate, "horizons": horizons}) + "\n")


if __name__ == "__main__":
    main()
