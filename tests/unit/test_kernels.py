"""CUDA kernels in Triton's interpreter, for machines without CUDA. See kernels_interpreted.py and
adapters_interpreted.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

pytest.importorskip("triton", reason="there is none for this system")

SCRIPTS = Path(__file__).parents[1]
QUICK = ("short_reply", "split_prefill", "shared_prefixes", "logits")
LONG = [
    ("llama",),
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
