"""Tests that need vLLM: `make test-vllm` runs them in an environment of their own; elsewhere they are skipped.

A start of vLLM takes a minute of both cores, so tests share one engine and one server. VLLM_TEST_MODEL names a Hugging
Face folder for the server to serve instead of a tiny random model.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from vllm_for_tests import make_model, save

from agentgym_rl.agent.engines.vllm.requirements import require_vllm
from agentgym_rl.errors import EngineError

try:
    require_vllm()
except EngineError:
    collect_ignore_glob = ["test_*.py"]

# Of vLLM's own processes too. Compiling a sampler in C++ takes longer than all tests together.
for name, value in {
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}.items():
    os.environ.setdefault(name, value)


@pytest.fixture(scope="session")
def models() -> dict[str, Any]:
    return {name: make_model(seed) for seed, name in enumerate("ABC")}


@pytest.fixture(scope="session")
def folders(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save(model, root / name) for name, model in models.items()}
