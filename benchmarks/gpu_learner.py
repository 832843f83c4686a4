"""How fast the learner learns on one GPU, against the plain transformers step and the matrix units' ceiling.

    python benchmarks/gpu_learner.py [--models smollm2-135m qwen2.5-1.5b] [--work equal episodes] [--out FILE]

Two kinds of work, with random weights and tokens, a micro-batch of 8192 tokens at most:
- equal: 8 samples of 1024 tokens, every token trained, one update. Nothing to gain from packing or from leaving
  observations out.
- episodes: 48 samples of 2 to 8 turns (a prompt of 256 tokens, then 64 sampled and 64 observed a turn), one update.
  Tokens are counted without padding.

Plain is what one writes with transformers: samples in the order they come, padded to the longest of a batch,
`model(..., labels=...)`, gradients added up, clipped, torch's fused AdamW on bf16 weights without a master. Ours is
`Imitator.imitate`, from lists of Python numbers to updated weights. Both in bf16, median of the repeats.

The share of the ceiling counts what has to be computed and no more: 6 flops a parameter and token for the layers, the
head for trained tokens, causal attention; over the rate of a large bf16 product in the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from agentgym_rl.training.learner import Imitator
from agentgym_rl.training.settings import OptimizerSettings
from agentgym_rl.types import Sample

MICRO_BATCH_TOKENS = 8192
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SMOLLM2_135M = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    **NO_TOKENS,
)
QWEN25_15B = Qwen2Config(
    vocab_size=151936,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
    **NO_TOKENS,
)
MODELS: dict[str, Callable[[], Any]] = {
    "smollm2-135m": lambda: LlamaForCausalLM(SMOLLM2_135M),
    "qwen2.5-1.5b": lambda: Qwen2ForCausalLM(QWEN25_15B),
}


def samples_of(work: str, vocabulary: int) -> list[Sample]:
    rng = random.Random(0)
    if work == "equal":
        masks = [[False] + [True] * 1023 for _ in range(8)]
    else:
        masks = [[False] * 256 + ([True] * 64 + [False] * 64) * rng.randint(2, 8) for _ in range(48)]
    return [Sample([rng.randrange(vocabulary) for _ in mask], mask) for mask in masks]


def needed_flops(model: Any, samples: list[Sample]) -> float:
    """Forward and backward, nothing twice and no padding."""
    config = model.config
    head = config.vocab_size * config.hidden_size
    layers = sum(p.numel() for p in model.model.layers.parameters())
    heads_width = config.num_attention_heads * model.model.layers[0].self_attn.head_dim
    tokens, trained = (sum(map(len, some)) for some in zip(*((s.token_ids, _on(s)) for s in samples), strict=True))
    attention = sum(2.0 * len(s.token_ids) ** 2 for s in samples) * heads_width * config.num_hidden_layers
    return 6.0 * layers * tokens + 6.0 * head * trained + 3.0 * attention


def _on(sample: Sample) -> list[bool]:
    return [on for on in sample.loss_mask if on]


def matmul_ceiling() -> float:
    """Flops a second of an 8192 x 8192 x 8192 product in bf16, on random numbers."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = timed(lambda: a @ b, warm=5, repeats=20)
    return 2.0 * 8192**3 / statistics.median(times)


def timed(run: Callable[[], Any], warm: int, repeats: int) -> list[float]:
    for _ in range(warm):
        run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times


def plain_step(model: Any, samples: list[Sample]) -> Callable[[], Any]:
    longest = max(len(s.token_ids) for s in samples)
    size = max(1, MICRO_BATCH_TOKENS // longest)
    batches = [samples[i : i + size] for i in range(0, len(samples), size)]
    trained = sum(len(_on(s)) for s in samples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    model.train()

    def step() -> float:
        total = torch.zeros((), device="cuda")
        for batch in batches:
            width = max(len(s.token_ids) for s in batch)
            ids = torch.tensor([s.token_ids + [0] * (width - len(s.token_ids)) for s in batch], device="cuda")
            labels = [[t if on else -100 for t, on in zip(s.token_ids, s.loss_mask, strict=True)] for s in batch]
            labels = [row + [-100] * (width - len(row)) for row in labels]
            mask = torch.tensor([[1] * len(s.token_ids) + [0] * (width - len(s.token_ids)) for s in batch])
            loss = model(
                input_ids=ids,
                attention_mask=None if width * len(batch) == int(mask.sum()) else mask.to("cuda"),
                labels=torch.tensor(labels, device="cuda"),
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


def our_step(model: Any, samples: list[Sample], *, checkpoint: bool = False) -> Callable[[], Any]:
    settings = OptimizerSettings(
        lr=1e-6, micro_batch_tokens=MICRO_BATCH_TOKENS, max_grad_norm=1.0, checkpoint_activations=checkpoint
    )
    imitator = Imitator(model, settings, 1000)
    return lambda: imitator.imitate(samples)["loss"]


def measure(
    name: str, make: Callable[[Any, list[Sample]], Callable[[], Any]], work: str, ceiling: float, repeats: int
) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = MODELS[name]().to(torch.bfloat16)
    samples = samples_of(work, model.config.vocab_size)
    step = make(model, samples)
    first = time.perf_counter()
    loss = step()
    first = time.perf_counter() - first
    torch.cuda.reset_peak_memory_stats()
    times = timed(step, warm=2, repeats=repeats)
    seconds, tokens = statistics.median(times), sum(len(s.token_ids) for s in samples)
    found = {
        "tokens": tokens,
        "trained": sum(len(_on(s)) for s in samples),
        "step_s": seconds,
        "spread_s": max(times) - min(times),
        "first_step_s": first,
        "tokens_per_s": tokens / seconds,
        "share_of_ceiling": needed_flops(model, samples) / seconds / ceiling,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "first_loss": loss,
    }
    del model, step
    gc.collect()
    torch.cuda.empty_cache()
    return found


def profile(name: str, work: str) -> None:
    """Where the time of our step goes, by kernel."""
    with torch.device("cuda"):
        model = MODELS[name]().to(torch.bfloat16)
    step = our_step(model, samples_of(work, model.config.vocab_size))
    for _ in range(3):
        step()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as found:
        step()
        torch.cuda.synchronize()
    print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=70))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--work", nargs="+", choices=["equal", "episodes"], default=["equal", "episodes"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="print our step's kernels instead")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.profile:
        for name in options.models:
            for work in options.work:
                print(f"{name}, {work}")
                profile(name, work)
        return
    ceiling = matmul_ceiling()
    print(f"bf16 matmul ceiling: {ceiling / 1e12:.0f} TFLOP/s")
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "ceiling_flops": ceiling, "runs": {}}
    for name in options.models:
        for work in options.work:
            ways: dict[str, Callable[..., Any]] = {
                "plain": plain_step,
                "ours": our_step,
                "ours, checkpointed": lambda m, s: our_step(m, s, checkpoint=True),
            }
            found: dict[str, Any] = {}
            results["runs"][f"{name}/{work}"] = found
            for way, make in ways.items():
                if way == "ours, checkpointed" and work != "equal":
                    continue
                row = found[way] = measure(name, make, work, ceiling, options.repeats)
                ratio = row["tokens_per_s"] / found["plain"]["tokens_per_s"]
                memory = row["peak_gb"] / found["plain"]["peak_gb"]
                print(
                    f"{name:13} {work:9} {way:19} {row['tokens_per_s']:9.0f} tokens/s ({ratio:4.2f}x)"
                    f"  {row['share_of_ceiling']:5.1%} of the ceiling  {row['peak_gb']:5.1f} GB ({memory:4.2f}x)"
                    f"  loss {row['first_loss']:.3f}",
                    flush=True,
                )
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
