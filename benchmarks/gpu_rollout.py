"""How fast many multi-turn episodes are sampled on one GPU, against peers and the memory-bandwidth bound.

    python benchmarks/gpu_rollout.py [--models smollm2-135m qwen2.5-1.5b] [--episodes 256 512] [--peers transformers]

Synthetic episodes: a prompt of 256 tokens, 8 turns, 64 new tokens forced a turn, observations of 64 tokens. Ours goes
through NativeEngine.generate, one asyncio task an episode, keys and values kept between turns, log-probabilities
returned; time is wall time of the whole rollout, the host's share included. Weights are random: speed does not depend
on them. The first run of each size compiles and captures, and is reported apart.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.types import Sampling

NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def smollm2_135m() -> Any:
    config = LlamaConfig(
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
    return LlamaForCausalLM(config)


def qwen25_15b() -> Any:
    config = Qwen2Config(
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
    return Qwen2ForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {"smollm2-135m": smollm2_135m, "qwen2.5-1.5b": qwen25_15b}


@dataclass(frozen=True, slots=True)
class Load:
    """What every episode does."""

    episodes: int
    prompt: int
    turns: int
    new: int
    observation: int
    group: int
    """Episodes that start on the same prompt."""

    @property
    def new_tokens(self) -> int:
        return self.episodes * self.turns * self.new

    @property
    def context(self) -> int:
        return self.prompt + self.turns * (self.new + self.observation)

    def prompts(self, vocabulary: int) -> list[list[int]]:
        firsts = [_ids(index, self.prompt, vocabulary) for index in range(-(-self.episodes // self.group))]
        return [firsts[index // self.group] for index in range(self.episodes)]

    def observations(self, vocabulary: int) -> list[list[list[int]]]:
        return [
            [_ids(1000 * (turn + 1) + index, self.observation, vocabulary) for index in range(self.episodes)]
            for turn in range(self.turns)
        ]


def _ids(seed: int, count: int, vocabulary: int) -> list[int]:
    return random.Random(seed).choices(range(vocabulary), k=count)


async def play(engine: NativeEngine, load: Load, prompts: list[list[int]], observations: list[list[list[int]]]) -> None:
    async def episode(index: int) -> None:
        name, ids = str(index), prompts[index]
        for turn in range(load.turns):
            completion = await engine.generate(ids, Sampling(load.new, seed=index * 100 + turn), name)
            if len(completion.token_ids) != load.new:
                raise RuntimeError(f"a reply of {load.new} tokens was forced, {len(completion.token_ids)} came")
            ids = ids + completion.token_ids + observations[turn][index]
        await engine.release(name)

    await asyncio.gather(*(episode(index) for index in range(load.episodes)))


def ours(model: Any, load: Load, repeats: int) -> dict[str, float]:
    vocabulary = model.config.vocab_size
    prompts, observations = load.prompts(vocabulary), load.observations(vocabulary)
    engine = NativeEngine(model, max_sessions=load.episodes, max_context=load.context)
    seconds = []
    for repeat in range(1 + repeats):
        if repeat == 1:  # the garbage collector need not walk through the model's modules again and again
            gc.collect()
            gc.freeze()
        engine.reset_stats()
        started = time.perf_counter()
        asyncio.run(play(engine, load, prompts, observations))
        seconds.append(time.perf_counter() - started)
    stats = engine.stats()
    asyncio.run(engine.close())
    best = min(seconds[1:])
    return {
        "tokens_per_s": load.new_tokens / best,
        "seconds": best,
        "all_seconds": seconds[1:],  # type: ignore[dict-item]
        "first_seconds": seconds[0],
        "engine_busy_share": stats["busy_seconds"] / seconds[-1],
        "prompt_tokens_computed": stats["prompt_tokens_computed"],
    }


@torch.no_grad()
def transformers_generate(model: Any, load: Load) -> dict[str, float]:
    """Lock-step: one batch, each turn one generate() that continues the same cache. No log-probabilities are kept."""
    vocabulary = model.config.vocab_size
    prompts, observations = load.prompts(vocabulary), load.observations(vocabulary)

    def run(turns: int, new: int) -> float:
        cache = DynamicCache()
        ids = torch.tensor(prompts, device=model.device)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for turn in range(turns):
            ids = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=new,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
            )
            ids = torch.cat([ids, torch.tensor(observations[turn], device=model.device)], dim=1)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    run(1, 4)
    seconds = run(load.turns, load.new)
    return {"tokens_per_s": load.new_tokens / seconds, "seconds": seconds}


PEERS: dict[str, Callable[[Any, Load], dict[str, float]]] = {"transformers": transformers_generate}
"""A peer takes a model on the device and a load; its result has at least tokens_per_s. Another peer is another row."""


def ceilings() -> dict[str, float]:
    """Bytes copied a second (read and written) and bf16 operations a second of a large product, measured."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy_s = _seconds(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_s = _seconds(lambda: a @ b)
    return {"bytes_per_s": 2 * (1 << 32) / copy_s, "operations_per_s": 2 * 8192**3 / product_s}


def _seconds(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return sorted(times)[len(times) // 2]


def bounds(model: Any, load: Load, limits: dict[str, float]) -> dict[str, float]:
    """Tokens a second that memory allows (weights, keys and values read once a step and once a prefill) and, apart,
    that arithmetic allows (every computed token through every matrix, prompts not through the head)."""
    config = model.config
    head = config.vocab_size * config.hidden_size
    body = sum(p.numel() for p in model.parameters()) - head
    head_dim = config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 2
    num_bytes = operations = 0.0
    cached, firsts = 0, -(-load.episodes // load.group)
    for turn in range(load.turns):
        sequences = firsts if turn == 0 else load.episodes
        fresh = load.prompt if turn == 0 else load.observation
        num_bytes += 2 * body + sequences * (cached + fresh) * token_bytes
        operations += 2.0 * body * sequences * fresh
        cached += fresh
        for _ in range(load.new):
            num_bytes += 2 * (body + head) + load.episodes * cached * token_bytes
            operations += 2.0 * (body + head) * load.episodes
            cached += 1
    memory_s, arithmetic_s = num_bytes / limits["bytes_per_s"], operations / limits["operations_per_s"]
    return {
        "memory_tokens_per_s": load.new_tokens / memory_s,
        "arithmetic_tokens_per_s": load.new_tokens / arithmetic_s,
    }


def profile(model: Any, load: Load, out: Path) -> None:
    """Where the device's time goes, kernel by kernel, over one whole rollout."""
    engine = NativeEngine(model, max_sessions=load.episodes, max_context=load.context)
    vocabulary = model.config.vocab_size
    prompts, observations = load.prompts(vocabulary), load.observations(vocabulary)
    asyncio.run(play(engine, load, prompts, observations))
    activities = [torch.profiler.ProfilerActivity.CUDA]
    started = time.perf_counter()
    with torch.profiler.profile(activities=activities) as recorded:
        asyncio.run(play(engine, load, prompts, observations))
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - started
    events = [event for event in recorded.key_averages() if event.self_device_time_total > 0]
    busy = sum(event.self_device_time_total for event in events) / 1e6
    lines = [f"wall {elapsed:.3f} s, kernels {busy:.3f} s"]
    for event in sorted(events, key=lambda event: -event.self_device_time_total)[:24]:
        total = event.self_device_time_total
        lines.append(f"{total / 1e3:10.1f} ms {event.count:7d} x {total / event.count:8.1f} us  {event.key[:90]}")
    out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines), flush=True)
    asyncio.run(engine.close())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--episodes", nargs="+", type=int, default=[256, 512])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--observation", type=int, default=64)
    parser.add_argument("--group", type=int, default=1, help="episodes that share a prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--profile", type=Path, help="also write kernel times of the first load of each model here")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    limits = ceilings()
    print(
        f"copy {limits['bytes_per_s'] / 1e12:.2f} TB/s, bf16 {limits['operations_per_s'] / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    results = []
    for name in options.models:
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = MODELS[name]().to(torch.bfloat16).eval()
        for episodes in options.episodes:
            load = Load(episodes, options.prompt, options.turns, options.new, options.observation, options.group)
            if options.profile is not None and episodes == options.episodes[0]:
                profile(model, load, options.profile.with_suffix(f".{name}.txt"))
            row: dict[str, Any] = {"model": name, "load": asdict(load), "bounds": bounds(model, load, limits)}
            row["ours"] = ours(model, load, options.repeats)
            for peer in options.peers:
                gc.collect()
                torch.cuda.empty_cache()
                row[peer] = PEERS[peer](model, load)
            results.append(row)
            speed, bound = row["ours"]["tokens_per_s"], row["bounds"]["memory_tokens_per_s"]
            ratios = ", ".join(f"{speed / row[peer]['tokens_per_s']:.1f}x {peer}" for peer in options.peers)
            print(
                f"{name} x {episodes}: {speed / 1e3:.1f}k tokens/s ({row['ours']['seconds']:.2f} s, first "
                f"{row['ours']['first_seconds']:.1f} s), {speed / bound:.0%} of the bandwidth bound "
                f"{bound / 1e3:.0f}k (arithmetic {row['bounds']['arithmetic_tokens_per_s'] / 1e3:.0f}k) {ratios}",
                flush=True,
            )
        del model
        gc.collect()
        torch.cuda.empty_cache()
    if options.out is not None:
        options.out.write_text(json.dumps({"ceilings": limits, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
