"""Loading of models: several threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from training_for_tests import tiny_model
from transformers import LlamaForCausalLM

from agentgym_rl.training.model import load_model
from agentgym_rl.training.scratch import build_tokenizer


def test_threads_that_load_at_once_leave_weight_tying_on(tmp_path: Path) -> None:
    """`from_pretrained` replaces a method of all models meanwhile, so two calls at once must not overlap."""
    model = tiny_model()
    config = type(model.config)(**(model.config.to_dict() | {"tie_word_embeddings": True}))
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    build_tokenizer(["go north"], ["go north"]).save_pretrained(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        loads = [threads.submit(load_model, str(tmp_path), device="cpu", dtype=torch.float32) for _ in range(16)]
        loaded = [load.result()[0] for load in loads]
    for tied in (*loaded, LlamaForCausalLM(config)):
        assert tied.lm_head.weight is tied.model.embed_tokens.weight
