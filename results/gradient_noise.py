"""Signal-to-noise ratio of the GRPO gradient under shorter and longer horizons, from the same episodes.

    RUN=runs/collapse/fixed-64-calm-maze-0
    agentgym-rl eval --agent $RUN@100 --env maze --subset size4 --split train --limit 32 --samples 8 \\
        --turns 64 --out runs/noise/100
    python results/gradient_noise.py $RUN/checkpoints/step_000100/model runs/noise/100 --turns 8,16,32,64 \\
        --out results/gradient-noise/fixed-64-calm-0-100.json

No agent knows its horizon, so the first 8 turns of an episode of 64 are those of an episode of 8: every horizon is
measured on prefixes of the same episodes, which makes the comparison paired. With g_i the gradient of group i,

    signal = (|sum g|^2 - sum |g_i|^2) / (n (n - 1))     unbiased estimate of |E g|^2
    noise  = mean |g_i|^2 - signal                       variance of one group's gradient
    ratio per 1,000 tokens = signal / noise / (processed tokens of a group / 1,000)

Processed tokens include observations. A group whose episodes end alike has no gradient and still costs its tokens. The
standard error is a jackknife over groups.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from behaviour import Row, read_rows
from torch import Tensor

MAX_BYTES = 8 << 30
"""Memory for the gradients of all groups, which are kept to compare them with each other."""
EPSILON = 1e-6


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


def group_gradient(model: Any, group: Sequence[Row], turns: int) -> tuple[Tensor | None, int, int]:
    """Return (gradient of minus the GRPO objective summed over tokens, processed tokens, sampled tokens).

    The gradient is None if all episodes have the same reward.
    """
    episodes = [cut(row, turns) for row in group]
    rewards = torch.tensor([reward for *_, reward in episodes])
    processed, sampled_tokens = (sum(len(e[0]) for e in episodes), sum(sum(e[1]) for e in episodes))
    if rewards.max() - rewards.min() < EPSILON:
        return None, processed, sampled_tokens
    advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + EPSILON)
    model.zero_grad(set_to_none=True)
    for (ids, sampled, _), advantage in zip(episodes, advantages.tolist(), strict=True):
        tokens = torch.tensor([ids], device=model.device)
        positions = torch.tensor(sampled, device=model.device).nonzero().squeeze(-1)
        logits = model(tokens).logits[0, positions - 1].float()
        logprobs = logits.log_softmax(-1).gather(-1, tokens[0, positions, None])
        (-advantage * logprobs.sum()).backward()
    parts = [p.grad.flatten().float().cpu() for p in model.parameters() if p.grad is not None]
    return torch.cat(parts), processed, sampled_tokens


def signal_and_noise(gram: Tensor) -> tuple[float, float]:
    """Return (signal, noise) from the inner products of all groups' gradients."""
    n = len(gram)
    squares = float(gram.diagonal().sum())
    signal = (float(gram.sum()) - squares) / (n * (n - 1))
    return signal, squares / n - signal


def ratio_with_error(gram: Tensor, tokens_per_group: float) -> tuple[float, float]:
    """Return signal / noise per 1,000 tokens and its jackknife standard error."""
    scale = 1000.0 / tokens_per_group

    def ratio(matrix: Tensor) -> float:
        signal, noise = signal_and_noise(matrix)
        return scale * signal / noise if noise else 0.0

    n = len(gram)
    without = [ratio(gram[keep][:, keep]) for i in range(n) if len(keep := [j for j in range(n) if j != i]) > 1]
    center = statistics.fmean(without)
    return ratio(gram), ((n - 1) / n * sum((value - center) ** 2 for value in without)) ** 0.5


def measure(model: Any, groups: Sequence[Sequence[Row]], turns: int) -> dict[str, float]:
    """Return the ratio under a horizon and what it is made of."""
    size = sum(p.numel() for p in model.parameters())
    if 4 * size * len(groups) > MAX_BYTES:
        raise SystemExit(
            f"{len(groups)} gradients of {size:,} parameters exceed {MAX_BYTES >> 30} GiB: use fewer groups"
        )
    results = [group_gradient(model, group, turns) for group in groups]
    sampled = statistics.fmean(r[2] for r in results)
    processed = statistics.fmean(r[1] for r in results)
    kept = [gradient for gradient, *_ in results if gradient is not None]
    gram = torch.zeros(len(groups), len(groups), dtype=torch.float64)
    if kept:
        matrix = torch.stack(kept) / sampled  # a mean over sampled tokens, as in training
        rows = torch.tensor([i for i, (gradient, *_) in enumerate(results) if gradient is not None])
        gram[rows[:, None], rows] = (matrix @ matrix.T).double()
    signal, noise = signal_and_noise(gram)
    ratio, error = ratio_with_error(gram, processed)
    values = {
        "turns": turns,
        "groups": len(groups),
        "groups_with_contrast": len(kept),
        "signal": signal,
        "noise": noise,
    }
    return values | {"processed_tokens_per_group": processed, "ratio_per_1000_tokens": ratio, "standard_error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the weights that played the episodes")
    parser.add_argument("evaluation", type=Path, help="folder of `agentgym-rl eval` with several samples per item")
    parser.add_argument("--turns", default="8,16,32,64")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(options.device)
    rows = [row for path in sorted((options.evaluation / "trajectories").glob("*.jsonl")) for row in read_rows(path)]
    measured = [measure(model, groups_of(rows), int(turns)) for turns in options.turns.split(",")]
    print("| turns | groups with contrast | processed tokens a group | signal / noise per 1,000 tokens |")
    print("|---|---|---|---|")
    for m in measured:
        contrast = f"{m['groups_with_contrast']} of {m['groups']}"
        ratio = f"{m['ratio_per_1000_tokens']:.2e} ± {m['standard_error']:.1e}"
        print(f"| {m['turns']} | {contrast} | {m['processed_tokens_per_group']:,.0f} | {ratio} |")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        record = {"model": options.model.parent.name, "evaluation": options.evaluation.name, "horizons": measured}
        options.out.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
