"""CUDA kernels in Triton's interpreter, for machines without CUDA. See kernels_interpreted.py and
adapters_interpreted.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet

triton = pytest.importorskip("triton", reason="there is none for this system")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from agentgym_rl.agent.engines.native.cuda.attention_kernels import decode_attention_kernel, decode_launch  # noqa: E402

CONSUMER_CARD, CONSUMER_BYTES = GPUTarget("cuda", 86, 32), 99 << 10
"""An Ampere card with the least shared memory of one program."""
SCRIPTS = Path(__file__).parents[1]
QUICK = ("short_reply", "split_prefill", "shared_prefixes", "logits")
LONG = [
    ("llama", "narrow_heads"),
    ("drafts", "layers"),
    ("qwen3", "float16"),
    ("wide", "out_of_memory", "slept"),
    ("bucketed", "moved_weights"),
    ("guessed_replies",),
]
ADAPTERS = [
    ("wrapped",),
    ("adapters_of_rank_4", "roles"),
    ("adapters_of_rank_16", "adapters_that_change"),
    ("adapters_of_rank_64", "adapters_of_some"),
    ("adapters_of_wide_models",),
]


def long_checks(names: list[tuple[str, ...]]) -> list[ParameterSet]:
    marks = [pytest.mark.long, pytest.mark.timeout(1200)]
    return [pytest.param(each, id=" ".join(each), marks=marks) for each in names]


@pytest.mark.parametrize("names", [pytest.param(QUICK, id=" ".join(QUICK)), *long_checks(LONG)])
def test_interpreted(names: tuple[str, ...]) -> None:
    interpret("kernels_interpreted.py", names)


@pytest.mark.parametrize("names", long_checks(ADAPTERS))
def test_interpreted_adapters(names: tuple[str, ...]) -> None:
    pytest.importorskip("peft")
    interpret("adapters_interpreted.py", names)


def interpret(script: str, names: tuple[str, ...]) -> None:
    command = [sys.executable, str(SCRIPTS / script), *names]
    ran = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.splitlines() == [f"{name}: good" for name in names]


@pytest.mark.parametrize(("head_dim", "group"), [(128, 1), (128, 8), (128, 16), (64, 16), (16, 1)])
def test_decode_attention_fits_the_shared_memory_of_consumer_cards(head_dim: int, group: int) -> None:
    """Compiled for the card, with 16 tokens of a row. A launch that does not fit ends the run."""
    rows, kernel = 16 * group, decode_attention_kernel
    constants = {"GROUP": group, "HEAD_DIM": head_dim, "BLOCK_GROUP": rows, "BLOCK_LENGTH": 64}
    constants |= {"SPLITS": 4, "WIDTH": 16, "CHAIN": False}
    types = dict.fromkeys(kernel.arg_names, "i64") | dict.fromkeys(constants, "constexpr") | {"scale_log2": "fp32"}
    types |= dict.fromkeys(("query", "keys", "values", "out"), "*bf16") | {"slots": "*i64", "positions": "*i64"}
    types |= {"partial_out": "*fp32", "partial_stats": "*fp32", "done": "*i1"}
    places = {name: kernel.arg_names.index(name) for name in types}
    aligned = [name for name, kind in types.items() if kind.startswith("*") or kind == "i64"]
    source = ASTSource(
        kernel,
        types,
        {(places[name],): value for name, value in constants.items()},
        {(places[name],): [["tt.divisibility", 16]] for name in aligned},
    )
    launch = decode_launch(rows, head_dim, torch.bfloat16)
    assert triton.compile(source, target=CONSUMER_CARD, options=launch).metadata.shared <= CONSUMER_BYTES
