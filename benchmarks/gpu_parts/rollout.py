"""Part rollout: many concurrent multi-turn episodes.

Ours uses NativeEngine.generate with one asyncio task per episode, keeps keys and values between turns and returns log-
probabilities. The time is the wall time of the whole rollout, including the host. The first run of each size compiles
and captures, and is reported separately. With --lora the same loads are also played with adapters of that rank on every
projection; `share_of_full` is their speed divided by the speed without. transformers generates one batch in lock-step,
with one generate() per turn that continues the same cache, and keeps no log-probabilities.
"""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path
from typing import Any

import torch
from common import Report, ceilings, make_model, part_parser, synchronize
from loads import Load, load_of
from transformers import DynamicCache

from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.training.lora import add_adapter
from agentgym_rl.training.settings import LoraSettings
from agentgym_rl.types import Sampling


async def play(engine: NativeEngine, load: Load, prompts: list[list[int]], observations: list[list[list[int]]]) -> None:
    async def episode(index: int) -> None:
        name, ids = str(index), prompts[index]
        for turn in range(load.turns):
            completion = await engine.generate(ids, Sampling(load.new, seed=index * 100 + turn), name)
            if len(completion.token_ids) != load.new:
                raise RuntimeError(f"a reply must have {load.new} tokens, got {len(completion.token_ids)}")
            ids = ids + completion.token_ids + observations[turn][index]
        await engine.release(name)

    await asyncio.gather(*(episode(index) for index in range(load.episodes)))


def ours(model: Any, load: Load, repeats: int) -> dict[str, Any]:
    vocabulary = model.config.vocab_size
    prompts, observations = load.prompts(vocabulary), load.observations(vocabulary)
    engine = NativeEngine(model, max_sessions=load.episodes, max_context=load.context)
    seconds = []
    for repeat in range(1 + repeats):
        if repeat == 1:  # keep the garbage collector from scanning the model's modules repeatedly
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
        "all_seconds": seconds[1:],
        "first_seconds": seconds[0],
        "engine_busy_share": stats["busy_seconds"] / seconds[-1],
        "prompt_tokens_computed": stats["prompt_tokens_computed"],
    }


@torch.no_grad()
def transformers_generate(model: Any, load: Load, device: str) -> dict[str, Any]:
    vocabulary = model.config.vocab_size
    prompts, observations = load.prompts(vocabulary), load.observations(vocabulary)

    def run(turns: int, new: int) -> float:
        cache = DynamicCache()
        ids = torch.tensor(prompts, device=device)
        synchronize(device)
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
            ids = torch.cat([ids, torch.tensor(observations[turn], device=device)], dim=1)
        synchronize(device)
        return time.perf_counter() - started

    run(1, 4)
    seconds = run(load.turns, load.new)
    return {"tokens_per_s": load.new_tokens / seconds, "seconds": seconds}


def bounds(model: Any, load: Load, limits: dict[str, float]) -> dict[str, float]:
    """Return the tokens per second that memory bandwidth allows (weights, keys and values read once per step and
    prefill) and that arithmetic allows (every computed token through every matrix, prompts without the head)."""
    config = model.config
    head = config.vocab_size * config.hidden_size
    body = sum(p.numel() for p in model.parameters()) - head
    head_dim = config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 2
    num_bytes = operations = 0.0
    cached = 0
    for turn in range(load.turns):
        fresh = load.prompt if turn == 0 else load.observation
        num_bytes += 2 * body + load.episodes * (cached + fresh) * token_bytes
        operations += 2.0 * body * load.episodes * fresh
        cached += fresh
        for _ in range(load.new):
            num_bytes += 2 * (body + head) + load.episodes * cached * token_bytes
            operations += 2.0 * (body + head) * load.episodes
            cached += 1
    memory_s, arithmetic_s = num_bytes / limits["bytes_per_s"], operations / limits["operations_per_s"]
    return {
        "tokens_per_s": load.new_tokens / memory_s,
        "arithmetic_tokens_per_s": load.new_tokens / arithmetic_s,
    }


def profile(model: Any, load: Load, out: Path) -> None:
    """Append the kernel times of one rollout to `out`."""
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
    lines = [f"{load.episodes} episodes: wall {elapsed:.3f} s, kernels {busy:.3f} s"]
    for event in sorted(events, key=lambda event: -event.self_device_time_total)[:24]:
        total = event.self_device_time_total
        lines.append(f"{total / 1e3:10.1f} ms {event.count:7d} x {total / event.count:8.1f} us  {event.key[:90]}")
    with out.open("a") as file:
        file.write("\n".join(lines) + "\n")
    asyncio.run(engine.close())


def main() -> None:
    parser = part_parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--episodes", nargs="+", type=int, required=True)
    parser.add_argument("--peers", nargs="*", default=[])
    parser.add_argument("--lora", type=int, help="also measure adapters of this rank")
    parser.add_argument("--profile", type=Path, help="append kernel times of each load to this file")
    options = parser.parse_args()
    report, device = Report(options.lines), options.device
    limits = ceilings(device)
    report.add("machine", "ceilings", "measured", **limits)
    model = make_model(options.model, device)
    loads = [load_of(episodes, tiny=options.model == "tiny") for episodes in options.episodes]
    full = {}
    for load in loads:
        case = f"{options.model} x {load.episodes}"
        report.add("rollout", case, "bound", **bounds(model, load, limits))
        numbers = ours(model, load, repeats=3)
        full[load.episodes] = numbers["tokens_per_s"]
        report.add("rollout", case, "ours", **numbers)
    for load in loads if "transformers" in options.peers else ():
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        numbers = transformers_generate(model, load, device)
        report.add("rollout", f"{options.model} x {load.episodes}", "transformers", **numbers)
    for load in loads if options.profile and device == "cuda" else ():
        profile(model, load, options.profile)
    if options.lora:  # last, because adapters stay in the model
        add_adapter(model, LoraSettings(rank=options.lora, alpha=2.0 * options.lora), 0)
        for load in loads:
            numbers = ours(model.eval(), load, repeats=3)
            share = numbers["tokens_per_s"] / full[load.episodes]
            case = f"{options.model} x {load.episodes}"
            report.add("rollout", case, f"lora {options.lora}", share_of_full=share, **numbers)


if __name__ == "__main__":
    main()
