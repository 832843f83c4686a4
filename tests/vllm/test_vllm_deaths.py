"""A process killed outright: vLLM's own end with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from vllm_for_tests import alive, vllm_processes


@pytest.mark.timeout(900)
def test_vllm_ends_with_the_process_that_started_it(folders: dict[str, Path]) -> None:
    paths = os.pathsep.join(str(Path(__file__).parents[i]) for i in (0, 1))
    owner = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("owner_for_tests.py"), folders["A"]],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    assert "started\n" in owner.stdout
    processes = vllm_processes(owner.pid)
    assert processes
    owner.kill()
    owner.wait()
    give_up_at = time.monotonic() + 60
    while left := [pid for pid in processes if alive(pid)]:
        assert time.monotonic() < give_up_at, f"still there: {left}"
        time.sleep(0.2)
