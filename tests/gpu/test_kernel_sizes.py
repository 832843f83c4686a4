"""Kernels compiled for chips that are not here: what they ask for must fit the shared memory of smaller cards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from agentgym_rl.agent.engines.native.cuda import adapter_kernels, matmul_kernels  # noqa: E402
from agentgym_rl.agent.engines.native.cuda.joint_weights import WIDE_HEADS_BYTES  # noqa: E402

pytestmark = pytest.mark.gpu

CHIPS = {"RTX 4090": (89, 101_376), "A100": (80, 166_912), "H100": (90, 232_448)}
"""Compute capability, and bytes of shared memory that one program may have."""
POINTERS = {
    **dict.fromkeys(("scaled", "weight", "bias", "q_norm", "k_norm", "query", "keys", "values", "out", "x"), "*bf16"),
    **dict.fromkeys(("hidden", "norm_weight", "adapter_a", "adapter_b", "product"), "*bf16"),
    **dict.fromkeys(("squares", "cos", "sin"), "*fp32"),
    **dict.fromkeys(("slots", "positions"), "*i64"),
    "done": "*i8",
}


def shared_bytes(kernel: Any, capability: int, num_stages: int, **constants: Any) -> int:
    """Return the resources of a compiled kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    kinds = {
        n: "constexpr" if n in constants else POINTERS.get(n, "fp32" if n.endswith("eps") else "i64") for n in names
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if kinds[name][0] in "*i"}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=places, attrs=aligned)
    options = {"num_warps": 4, "num_stages": num_stages}
    return int(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared)


def adapter_case(chip: str, *sizes: int) -> Any:
    """Return a case of a kernel with adapters. `make test` compiles these for the smallest chip only."""
    return pytest.param(chip, *sizes, marks=() if chip == "RTX 4090" else pytest.mark.long)


@pytest.mark.parametrize(
    ("chip", "size", "head_dim", "rank"),
    [
        *((chip, *sizes, 0) for chip in CHIPS for sizes in [(64, 16), (576, 64), (1024, 128), (1024, 256)]),
        *(adapter_case(c, *sizes) for c in CHIPS for sizes in [(576, 64, 16), (1024, 64, 64), (1024, 128, 64)]),
    ],
)
def test_products_fit_the_chip(chip: str, size: int, head_dim: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-0.6B is 1024 wide and has heads of 128: with all four stages it would ask for 144 KiB."""
    capability, most = CHIPS[chip]
    monkeypatch.setattr(matmul_kernels, "shared_memory", lambda device: most)
    x = torch.empty(1, size, dtype=torch.bfloat16)
    rows, block_k = matmul_kernels.block_rows_for(x.dtype), matmul_kernels._block_k(size, x.dtype)
    parts = -(-size // matmul_kernels.PARTS_BLOCK)
    common = {"SIZE": size, "PARTS": parts, "BLOCK_ROWS": rows, "BLOCK_K": block_k, "RANK": rank, "CHAIN": False}
    asked = shared_bytes(
        matmul_kernels.qkv_kernel,
        capability,
        matmul_kernels._stages(x, rows, head_dim + rank, block_k, 4 if head_dim < 256 else 2, rank * head_dim),
        **common,
        HEADS=4,
        KV_HEADS=2,
        HEAD_DIM=head_dim,
        HAS_BIAS=False,
        HAS_NORM=True,
    )
    assert 0 < asked <= most
    asked = shared_bytes(
        matmul_kernels.gate_up_kernel,
        capability,
        matmul_kernels._stages(x, rows, 128 + 2 * rank, block_k, held=2 * rank * 64),
        **common,
        INNER=3 * size,
        BLOCK_COLUMNS=64,
    )
    assert 0 < asked <= most
    asked = shared_bytes(
        matmul_kernels.add_product_kernel,
        capability,
        matmul_kernels._stages(
            x, rows, matmul_kernels.PARTS_BLOCK + rank, block_k, held=rank * matmul_kernels.PARTS_BLOCK
        ),
        INNER=size,
        SIZE=size,
        RANK=rank,
        HAS_BIAS=True,
        BLOCK_ROWS=rows,
        BLOCK_COLUMNS=matmul_kernels.PARTS_BLOCK,
        BLOCK_K=block_k,
        CHAIN=False,
    )
    assert 0 < asked <= most


@pytest.mark.parametrize(
    ("chip", "head_dim", "rank"),
    [adapter_case(chip, *sizes) for chip in CHIPS for sizes in [(128, 16), (128, 128), (256, 128)]],
)
def test_kernels_of_adapters_fit_the_chip(chip: str, head_dim: int, rank: int) -> None:
    capability, most = CHIPS[chip]
    if head_dim == 256 and most < WIDE_HEADS_BYTES:
        pytest.skip("heads of 256 are not captured there")
    size = 2048
    common = {"RANK": rank, "BLOCK_ROWS": matmul_kernels.block_rows_for(torch.bfloat16), "CHAIN": False}
    heads = {"HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": head_dim, "HAS_BIAS": True, "HAS_NORM": True, "HAS_DONE": True}
    columns = {"BLOCK_COLUMNS": adapter_kernels.BLOCK_COLUMNS}
    for kernel, constants in (
        (adapter_kernels.adapted_heads_kernel, heads),
        (adapter_kernels.adapted_silu_kernel, {**columns, "INNER": 3 * size}),
        (adapter_kernels.add_adapted_kernel, {**columns, "SIZE": size, "HAS_BIAS": True}),
    ):
        assert 0 < shared_bytes(kernel, capability, 3, **common, **constants) <= most


def test_a_large_chip_keeps_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_kernels, "shared_memory", lambda device: CHIPS["H100"][1])
    x = torch.empty(1, 1024, dtype=torch.bfloat16)
    assert matmul_kernels._stages(x, 64, 128, 128) == 4
    monkeypatch.setattr(matmul_kernels, "shared_memory", lambda device: CHIPS["RTX 4090"][1])
    assert matmul_kernels._stages(x, 64, 128, 128) == 2
