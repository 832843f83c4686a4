"""Part learner: one update, compared with a plain transformers step and the ceiling of the matrix units.

Two kinds of work, with random weights and tokens, passes of at most 8192 tokens:
- equal: 8 samples of 1024 tokens, every token trained, one update. Packing and skipping observations gain nothing.
- episodes: 48 samples of 2 to 8 turns (a prompt of 256 tokens, then 64 sampled and 64 observed per turn), one update.
  Tokens are counted without padding.

The plain step is ordinary transformers code: samples in their given order, padded to the longest of a batch,
`model(..., labels=...)`, accumulated and clipped gradients, torch's fused AdamW on bf16 weights without a master copy.
Ours is `Imitator.imitate`, from Python lists to updated weights. Both run in bf16; the median of the repeats counts.

The share of the ceiling counts only the necessary work: 6 flops per parameter and token for the layers, the head for
trained tokens, and causal attention, divided by the rate of a large bf16 product in the same run.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Report, ceilings, make_model, part_parser, timed

from agentgym_rl.training.learner import Imitator
from agentgym_rl.training.settings import OptimizerSettings
from agentgym_rl.types import Sample

MICRO_BATCH_TOKENS = 8192
Step = Callable[[], Any]


def samples_of(work: str, vocabulary: int, *, tiny: bool) -> list[Sample]:
    rng = random.Random(0)
    divisor = 16 if tiny else 1
    if work == "equal":
        masks = [[False] + [True] * (1024 // divisor - 1) for _ in range(8)]
    else:
        prompt, turn = 256 // divisor, 64 // divisor
        masks = [[False] * prompt + ([True] * turn + [False] * turn) * rng.randint(2, 8) for _ in range(48)]
    return [Sample([rng.randrange(vocabulary) for _ in mask], mask) for mask in masks]


def needed_flops(model: Any, samples: list[Sample]) -> float:
    """Return the flops of forward and backward without recomputation and padding."""
    config = model.config
    head = config.vocab_size * config.hidden_size
    layers = sum(p.numel() for p in model.model.layers.parameters())
    heads_width = config.num_attention_heads * model.model.layers[0].self_attn.head_dim
    tokens, trained = sum(len(s.token_ids) for s in samples), sum(sum(s.loss_mask) for s in samples)
    attention = sum(2.0 * len(s.token_ids) ** 2 for s in samples) * heads_width * config.num_hidden_layers
    return 6.0 * layers * tokens + 6.0 * head * trained + 3.0 * attention


def plain_step(model: Any, samples: list[Sample]) -> Step:
    longest, device = max(len(s.token_ids) for s in samples), model.device
    size = max(1, MICRO_BATCH_TOKENS // longest)
    batches = [samples[i : i + size] for i in range(0, len(samples), size)]
    trained = sum(sum(s.loss_mask) for s in samples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    model.train()

    def step() -> float:
        total = torch.zeros((), device=device)
        for batch in batches:
            width = max(len(s.token_ids) for s in batch)
            ids = torch.tensor([s.token_ids + [0] * (width - len(s.token_ids)) for s in batch], device=device)
            labels = [[t if on else -100 for t, on in zip(s.token_ids, s.loss_mask, strict=True)] for s in batch]
            labels = [row + [-100] * (width - len(row)) for row in labels]
            mask = torch.tensor([[1] * len(s.token_ids) + [0] * (width - len(s.token_ids)) for s in batch])
            loss = model(
                input_ids=ids,
                attention_mask=None if width * len(batch) == int(mask.sum()) else mask.to(device),
                labels=torch.tensor(labels, device=device),
                num_items_in_batch=trained,
                use_cache=False,
            ).loss
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    return step


def our_step(model: Any, samples: list[Sample], **options: Any) -> Step:
    settings = OptimizerSettings(lr=1e-6, micro_batch_tokens=MICRO_BATCH_TOKENS, max_grad_norm=1.0, **options)
    imitator = Imitator(model, settings, 1000)
    return lambda: imitator.imitate(samples)["loss"]


STEPS: dict[str, Callable[[Any, list[Sample]], Step]] = {
    "transformers": plain_step,
    "ours": our_step,
    "ours, captured": partial(our_step, capture_passes=True),
    "ours, checkpointed": partial(our_step, checkpoint_activations=True),
}


def measure(name: str, runner: str, work: str, ceiling: float, device: str, repeats: int) -> dict[str, Any]:
    model = make_model(name, device)
    samples = samples_of(work, model.config.vocab_size, tiny=name == "tiny")
    step = STEPS[runner](model, samples)
    first = time.perf_counter()
    loss = step()
    first = time.perf_counter() - first
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = timed(step, device, warm=3, repeats=repeats)
    seconds, tokens = statistics.median(times), sum(len(s.token_ids) for s in samples)
    numbers = {
        "tokens_per_s": tokens / seconds,
        "share_of_ceiling": needed_flops(model, samples) / seconds / ceiling,
        "peak_gb": torch.cuda.max_memory_reserved() / 1e9 if device == "cuda" else float("nan"),
        "allocated_gb": torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else float("nan"),
        "step_s": seconds,
        "spread_s": max(times) - min(times),
        "first_step_s": first,
        "tokens": tokens,
        "trained": sum(sum(s.loss_mask) for s in samples),
        "first_loss": loss,
    }
    del model, step
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return numbers


def profile(name: str, work: str, out: Path) -> None:
    """Append the kernel times of our step to `out`."""
    model = make_model(name, "cuda")
    step = our_step(model, samples_of(work, model.config.vocab_size, tiny=False))
    for _ in range(3):
        step()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        torch.cuda.synchronize()
    table = profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=70)
    with out.open("a") as file:
        file.write(f"{name}, {work}\n{table}\n")


def main() -> None:
    parser = part_parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--work", nargs="+", choices=["equal", "episodes"], default=["equal", "episodes"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--peers", nargs="*", default=[])
    parser.add_argument("--profile", type=Path, help="append our step's kernels to this file")
    options = parser.parse_args()
    report, device = Report(options.lines), options.device
    ceiling = ceilings(device)["operations_per_s"]
    for work in options.work:
        for runner in STEPS:
            if runner == "transformers" and runner not in options.peers:
                continue
            if runner == "ours, checkpointed" and work != "equal":
                continue
            numbers = measure(options.model, runner, work, ceiling, device, options.repeats)
            report.add("learner", f"{options.model} / {work}", runner, **numbers)
        if options.profile and device == "cuda":
            profile(options.model, work, options.profile)


if __name__ == "__main__":
    main()
