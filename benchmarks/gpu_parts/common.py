"""Helpers of the parts: model shapes, timing, ceilings and reports."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _qwen2(
    hidden: int, intermediate: int, *, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool
) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=tied,
        **NO_TOKENS,
    )


SHAPES: dict[str, Any] = {
    "smollm2-135m": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        **NO_TOKENS,
    ),
    "qwen2.5-1.5b": _qwen2(1536, 8960, layers=28, heads=12, kv_heads=2, vocabulary=151936, tied=True),
    "qwen2.5-7b": _qwen2(3584, 18944, layers=28, heads=28, kv_heads=4, vocabulary=152064, tied=False),
    "qwen2.5-32b": _qwen2(5120, 27648, layers=64, heads=40, kv_heads=8, vocabulary=152064, tied=False),
    "tiny": LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        **NO_TOKENS,
    ),
}
"""Weights are random, because speed does not depend on them. `tiny` is for a smoke test without a GPU."""
CLASSES = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM}


def make_model(name: str, device: str) -> Any:
    """Return a model with random weights, in bf16 on CUDA and in float32 elsewhere."""
    torch.manual_seed(0)
    config = SHAPES[name]
    before = torch.get_default_dtype()
    # Never in float32 first: 32B parameters would not fit. Rotary frequencies are computed in float32 all the same.
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    try:
        with torch.device(device):
            return CLASSES[config.model_type](config).eval()
    finally:
        torch.set_default_dtype(before)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(run: Callable[[], Any], device: str, warm: int, repeats: int) -> list[float]:
    """Return the seconds of each repeat."""
    for _ in range(warm):
        run()
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return times


def ceilings(device: str) -> dict[str, float]:
    """Measure bytes per second of a copy (read and written) and operations per second of a large matrix product."""
    num_bytes, side = (1 << 32, 8192) if device == "cuda" else (1 << 24, 256)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copy_s = statistics.median(timed(lambda: target.copy_(source), device, 2, 10))
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product_s = statistics.median(timed(lambda: a @ b, device, 5, 20))
    return {"bytes_per_s": 2 * num_bytes / copy_s, "operations_per_s": 2.0 * side**3 / product_s}


class Report:
    """Results of a part, appended to a file one by one, so that a part that times out keeps its results."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, part: str, case: str, who: str, **numbers: Any) -> None:
        """Add the numbers of the runner `who` in `case`."""
        line = {"part": part, "case": case, "who": who, **numbers}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        shown = ", ".join(f"{key} {_short(value)}" for key, value in numbers.items() if not isinstance(value, list))
        print(f"{part} / {case} / {who}: {shown}", flush=True)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def part_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every part."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=Path, required=True, help="append results to this file")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    return parser
