"""CUDA's kernels are tested on a machine without CUDA, too: interpreted. See kernels_interpreted.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="there is none for this system")

SCRIPT = Path(__file__).parents[1] / "kernels_interpreted.py"
CHECKS = [
    ("llama", "qwen3", "float16", "layers", "logits"),
    ("wide", "out_of_memory", "slept", "bucketed", "moved_weights"),
    ("drafts",),
]


@pytest.mark.parametrize("names", CHECKS, ids=" ".join)
def test_interpreted(names: tuple[str, ...]) -> None:
    command = [sys.executable, str(SCRIPT), *names]
    ran = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.splitlines() == [f"{name}: good" for name in names]
