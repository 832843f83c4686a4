"""benchmarks/vllm_weights.py: its update and its limits of differences. The rest needs vLLM."""

from __future__ import annotations

import copy
from types import ModuleType

import pytest
import torch
from scripts_for_tests import load_script
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentgym_rl.agent.engines.native import NativeEngine


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script("benchmarks/vllm_weights.py", monkeypatch)


def test_an_update_changes_every_tensor_and_the_next_one_reverts_it(benchmark: ModuleType) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=512, num_key_value_heads=1, tie_word_embeddings=True, **shape)
    model = benchmark.in_dtype(benchmark.without_zeros(Qwen2ForCausalLM(config)), torch.bfloat16)  # Qwen2 has biases
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} == {torch.float32}
    before = copy.deepcopy(model.state_dict())
    benchmark.change(model, back=False)
    after = copy.deepcopy(model.state_dict())
    assert not [name for name in before if torch.equal(before[name], after[name])]
    benchmark.change(model, back=True)
    for name, tensor in model.state_dict().items():
        assert not torch.equal(tensor, after[name])
        assert torch.allclose(tensor, before[name], rtol=0.02)


async def test_differences_are_reported_by_kind_and_only_the_engines_are_limited(benchmark: ModuleType) -> None:
    torch.manual_seed(0)
    model = benchmark.make_model("tiny").eval()
    engine = NativeEngine(model, max_sessions=2, max_context=benchmark.CONTEXT)
    differences = await benchmark.compare(model, engine, 2)
    await engine.close()
    assert list(differences) == ["sampled - learner"] + [
        f"turn {turn}, {which} - learner" for turn in (1, 2) for which in ("first token", "later tokens")
    ]
    assert benchmark.too_far({"now": differences}, torch.float32) == []
    differences["turn 2, first token - learner"]["mean"] = float("nan")
    differences["learner - itself in float32"] = {"mean": 5.0, "max": 5.0}
    (line,) = benchmark.too_far({"now": differences}, torch.bfloat16)
    assert line == "now: turn 2, first token - learner is nan on average, allowed 0.1"
