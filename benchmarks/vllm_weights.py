"""What it takes to give vLLM the learner's weights: seconds by folder and in memory, beside the rollout they serve.

    python benchmarks/vllm_weights.py [--model smollm2-135m | qwen2.5-1.5b | tiny] [--rounds 3] [--episodes 64]

Random weights of the model's shape; each round changes them, and the engine must then agree with the learner,
which is part of the time. The rollout is one turn of so many episodes: a prompt of 256 tokens and 64 new ones.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from agentgym_rl.agent.engines.vllm import VllmEngine, probe_model
from agentgym_rl.types import Sampling

PROMPT_TOKENS, NEW_TOKENS = 256, 64


def make_model(name: str) -> Any:
    common: dict[str, Any] = {"tie_word_embeddings": True, "max_position_embeddings": 2048}
    if name == "tiny":
        shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=512, num_key_value_heads=1, **shape, **common))
    if name == "smollm2-135m":
        shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
        return LlamaForCausalLM(LlamaConfig(vocab_size=49152, num_key_value_heads=3, **shape, **common))
    shape = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=151936, num_key_value_heads=2, **shape, **common))


@torch.no_grad()
def change(model: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.01)


async def timed(work: Any) -> float:
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


async def measure(model: Any, engine: VllmEngine, root: Path, rounds: int, episodes: int) -> dict[str, float]:
    async def by_folder() -> None:
        model.save_pretrained(root / "new")
        await engine.update_weights(root / "new", engine.version + 1, probe=probe_model(model))

    async def in_memory() -> None:
        await engine.update_weights(model.state_dict(), engine.version + 1, probe=probe_model(model))

    async def rollout() -> None:
        sampling = Sampling(NEW_TOKENS, seed=0)
        prompts = [[(7 * n + e) % 500 for n in range(PROMPT_TOKENS)] for e in range(episodes)]
        await asyncio.gather(*(engine.generate(ids, sampling, str(e)) for e, ids in enumerate(prompts)))

    await rollout()  # the first one warms up
    seconds: dict[str, list[float]] = {"by folder": [], "in memory": [], "rollout": []}
    for _ in range(rounds):
        for name, work in (("by folder", by_folder), ("in memory", in_memory), ("rollout", rollout)):
            if name != "rollout":
                change(model)
            seconds[name].append(await timed(work()))
    return {name: statistics.median(values) for name, values in seconds.items()}


async def main(arguments: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    model = make_model(arguments.model).to(device, dtype).eval()
    size = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e9
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model.save_pretrained(root / "start")
        engine = VllmEngine(
            root / "start",
            dtype=str(dtype).removeprefix("torch."),
            max_context=512,
            memory_share=arguments.memory_share,
            eager=device == "cpu",
        )
        try:
            print(f"start        {await timed(engine.start()):8.2f} s   {arguments.model}, {size:.2f} GB, {device}")
            found = await measure(model, engine, root, arguments.rounds, arguments.episodes)
        finally:
            await engine.close()
    for name, value in found.items():
        share = "" if name == "rollout" else f"   {value / found['rollout']:.0%} of a rollout, {size / value:.2f} GB/s"
        print(f"{name:12} {value:8.2f} s{share}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "smollm2-135m", "qwen2.5-1.5b"), default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--memory-share", type=float, default=0.4)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    asyncio.run(main(parser.parse_args()))
