"""CUDA kernels in Triton's interpreter, for machines without CUDA. See kernels_interpreted.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="there is none for this system")

SCRIPT = Path(__file__).parents[1] / "kernels_interpreted.py"
QUICK = ("short_reply", "logits")
LONG = [
    ("llama",),
    ("drafts", "layers"),
    ("qwen3", "float16"),
    ("wide", "out_of_memory", "slept"),
    ("bucketed", "moved_weights"),
    ("guessed_replies",),
]
CHECKS = [QUICK, *(pytest.param(names, marks=[pytest.mark.long, pytest.mark.timeout(1200)]) for names in LONG)]


@pytest.mark.parametrize("names", CHECKS, ids=[" ".join(names) for names in (QUICK, *LONG)])
def test_interpreted(names: tuple[str, ...]) -> None:
    command = [sys.executable, str(SCRIPT), *names]
    ran = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.splitlines() == [f"{name}: good" for name in names]
