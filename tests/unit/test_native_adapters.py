"""LoRA adapters beside the joint matrices of captured steps: buffers and reasons. The kernels: test_kernels.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

peft = pytest.importorskip("peft")

from agentgym_rl.agent.engines.native.cuda.adapters import JointAdapter, write_adapter_rows  # noqa: E402
from agentgym_rl.agent.engines.native.cuda.joint_weights import (  # noqa: E402
    addresses,
    joint_adapter,
    layer_weights,
    ranks,
    weight_modules,
    why_not_captured,
)
from agentgym_rl.errors import EngineError  # noqa: E402
from agentgym_rl.training.lora import copy_with_own_adapters  # noqa: E402

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_model(dtype: torch.dtype = torch.float32) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return LlamaForCausalLM(LlamaConfig(**SHAPE)).to(dtype).eval()


def adapted(dtype: torch.dtype = torch.float32, name: str = "default", **settings: Any) -> Any:
    model = make_model(dtype)
    add(model, name, **settings)
    return model


def add(model: Any, name: str, **settings: Any) -> None:
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ALL} | settings
    model.add_adapter(peft.LoraConfig(**settings), name)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if f".{name}." in key:
                parameter.normal_(generator=torch.Generator().manual_seed(len(key)))


def product(adapter: JointAdapter, x: torch.Tensor) -> list[torch.Tensor]:
    """Return what the kernels compute: x times the joint matrix, then the part of each projection times its B."""
    write_adapter_rows([adapter])
    both = x @ adapter.joint.t()
    outputs, inner = both[:, : len(adapter.b)], both[:, len(adapter.b) :]
    sizes = [len(each.base_layer.weight) for each in adapter._projections]
    parts = zip(outputs.split(sizes, 1), inner.split(adapter.rank, 1), adapter.b.split(sizes), strict=True)
    return [output + low @ b.t() for output, low, b in parts]


@pytest.mark.parametrize("settings", [{}, {"r": 20, "use_rslora": True}, {"rank_pattern": {"k_proj": 9}}])
def test_buffers_give_the_outputs_of_peft(settings: dict[str, Any]) -> None:
    model = adapted(**settings)
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    for modules, width in (
        ((attention.q_proj, attention.k_proj, attention.v_proj), 64),
        ((attention.o_proj,), 64),
        ((mlp.gate_proj, mlp.up_proj), 64),
        ((mlp.down_proj,), 48),
    ):
        adapter = joint_adapter(modules)
        assert adapter is not None
        adapter.load()
        x = torch.randn(5, width, generator=torch.Generator().manual_seed(1))
        for got, module in zip(product(adapter, x), modules, strict=True):
            torch.testing.assert_close(got, module(x), atol=1e-4, rtol=1e-5)


def test_a_projection_without_an_adapter_gets_zeros() -> None:
    model = adapted(target_modules=["q_proj", "v_proj"])
    layer = layer_weights(model.model.layers[0])
    assert [layer.out_adapter, layer.gate_up_adapter, layer.down_adapter] == [None] * 3
    adapter = layer.qkv_adapter
    assert adapter is not None
    adapter.load()
    assert adapter.rank == 16
    assert not adapter.b[64:96].any()
    assert not adapter.own_a[16:32].any()
    assert adapter.b[:64, :4].any(1).all()
    assert not adapter.b[:, 4:].any()


def test_weights_remain_parameters_and_move_once() -> None:
    model = adapted(torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert why_not_captured(model) is None, "adapters are float32"
    layers = [layer_weights(layer) for layer in model.model.layers]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    projection = model.model.layers[0].mlp.down_proj
    assert layers[0].down.data_ptr() == projection.base_layer.weight.data_ptr()
    assert layers[0].down_adapter is not None
    assert layers[0].down_adapter.joint.data_ptr() == layers[0].down.data_ptr()
    assert layers[0].down_adapter.b.dtype == torch.bfloat16
    moved = addresses(weight_modules(model))
    again = [layer_weights(layer) for layer in model.model.layers]
    assert addresses(weight_modules(model)) == moved
    assert layers[0].qkv.data_ptr() == again[0].qkv.data_ptr()


def test_engines_that_share_frozen_weights_take_turns_in_the_same_rows() -> None:
    first = adapted()
    second = copy_with_own_adapters(first)
    with torch.no_grad():
        for name, parameter in second.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    models = (first, second)
    adapters = [layer_weights(model.model.layers[0]).down_adapter for model in models]
    x = torch.randn(3, 48)
    for adapter in adapters:
        assert adapter is not None
        adapter.load()
    for index in (0, 1, 1, 0):
        adapter = adapters[index]
        assert adapter is not None
        expected = models[index].model.layers[0].mlp.down_proj(x)
        torch.testing.assert_close(product(adapter, x)[0], expected, atol=1e-5, rtol=1e-5)
    assert adapters[0] is not None
    assert adapters[1] is not None
    assert adapters[0].joint.data_ptr() == adapters[1].joint.data_ptr()


def test_ranks_change_with_what_the_buffers_must_hold() -> None:
    model = adapted()
    assert set(ranks(model)) == {16}
    add(model, "other", r=12, target_modules=["q_proj"])
    assert set(ranks(model)) == {16}
    model.set_adapter(["default", "other"])
    assert sorted(set(ranks(model))) == [16], "4 and 12 columns"
    add(model, "large", r=33, target_modules=["q_proj"])
    assert ranks(model)[0] == 64
    assert ranks(make_model()) == (0,) * 14


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"lora_bias": True, "target_modules": ["q_proj"]}, "biases"),
        ({"r": 129}, "256 columns"),
        ({"target_modules": ["q_proj", "lm_head"]}, "an adapter, perhaps"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "Embedding"),
        ({"modules_to_save": ["lm_head"]}, "ModulesToSave"),
    ],
)
def test_adapters_that_cannot_be_captured_give_the_reason(settings: dict[str, Any], reason: str) -> None:
    model = make_model()
    if settings.get("lora_bias"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "target_modules": ALL} | settings))
    assert reason in (why_not_captured(wrapped) or "")


def test_other_kinds_of_adapters_give_the_reason() -> None:
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    assert "PeftModelForCausalLM" in (why_not_captured(peft.get_peft_model(make_model(), prompts)) or "")
    model = adapted()
    model.model.layers[1].mlp.up_proj.lora_A["default"].register_forward_hook(lambda *_: None)
    assert "hooks" in (why_not_captured(model) or "")
    wrapped = peft.get_peft_model(make_model(), peft.LoraConfig(r=4, target_modules=ALL))
    assert why_not_captured(wrapped) is None
    adapter = layer_weights(wrapped.get_base_model().model.layers[0]).down_adapter
    wrapped.merge_adapter()
    assert "merged" in (why_not_captured(wrapped) or "")
    assert adapter is not None
    with pytest.raises(EngineError, match="merged"):
        adapter.load()
