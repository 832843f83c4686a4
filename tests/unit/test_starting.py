"""The model a run starts from."""

from __future__ import annotations

import torch

from agentgym_rl.config import Config
from agentgym_rl.starting import untrained, words_of
from agentgym_rl.types import Message


def test_a_model_from_nothing_in_bf16_keeps_its_rotary_frequencies() -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2}
    made = {}
    for dtype in ("float32", "bfloat16"):
        raw = {
            "model": {"scratch": shape, "dtype": dtype, "device": "cpu"},
            "environments": [{"name": "keydoor"}],
            "warm_start": {"policy": "random"},
        }
        conversation = [Message("user", "the door is shut"), Message("assistant", "open the door")]
        made[dtype] = untrained(Config.model_validate(raw), words_of([conversation]))
    whole, half = made["float32"], made["bfloat16"]
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert torch.equal(half.model.rotary_emb.inv_freq, whole.model.rotary_emb.inv_freq)
    assert torch.equal(half.lm_head.weight, whole.lm_head.weight.bfloat16())
    assert half.lm_head.weight is half.get_input_embeddings().weight
