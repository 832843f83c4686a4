"""Tiny models in folders, and what transformers says of them, for tests of the vLLM engines."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentgym_rl.training.scratch import build_tokenizer
from agentgym_rl.types import Completion

WORDS = " ".join(f"w{n}" for n in range(100))
SMALL: dict[str, Any] = {"dtype": "float32", "max_sessions": 16, "max_context": 512, "eager": True}


def make_model(seed: int) -> Any:
    """Tied embeddings, and long enough for whole blocks of vLLM's cache (128 tokens on a CPU)."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(build_tokenizer([WORDS], [WORDS])),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            initializer_range=0.2,  # wide enough that replies depend on the whole prompt
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        return LlamaForCausalLM(config).eval()


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    build_tokenizer([WORDS], [WORDS]).save_pretrained(folder)
    return folder


def prompt(length: int, vocabulary: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(5, vocabulary) for _ in range(length)]


@torch.no_grad()
def scored(model: Any, prompt_ids: list[int], reply: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probabilities of a reply by transformers."""
    logits = model(torch.tensor([prompt_ids + reply])).logits[0, len(prompt_ids) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(reply)[:, None])[:, 0].tolist()


def gap(model: Any, prompt_ids: list[int], completion: Completion, temperature: float = 1.0) -> float:
    """The largest difference from transformers."""
    expected = scored(model, prompt_ids, completion.token_ids, temperature)
    return max(abs(a - b) for a, b in zip(expected, completion.logprobs, strict=True))


@torch.no_grad()
def greedy(model: Any, prompt_ids: list[int], count: int) -> list[int]:
    ids = list(prompt_ids)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt_ids) :]


def descendants(pid: int) -> list[int]:
    """Processes below this one that still run, by /proc."""
    below: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            below.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found: list[int] = []
    todo = [pid]
    while todo:
        children = below.get(todo.pop(), [])
        found += children
        todo += children
    return found


def vllm_processes(pid: int) -> list[int]:
    """Those of vLLM below this one, the scheduler of an engine before its workers. vLLM names them VLLM::EngineCore and
    the like, but setproctitle cannot where the first variable of the environment was set again: then they are called as
    multiprocessing starts them. Ray hands workers their variables in any order, and vLLM sets some when imported."""
    return [child for child in descendants(pid) if any(name in title(child) for name in ("VLLM", "spawn_main"))]


def title(pid: int) -> str:
    """Return the title of a process, or an empty string if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
