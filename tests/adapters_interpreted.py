"""LoRA adapters in captured steps, in Triton's interpreter, against the forward pass of peft's modules.

TRITON_INTERPRET=1 python tests/adapters_interpreted.py [NAME ...]
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from kernels_interpreted import captured, gap, make, prompt, run
from peft import LoraConfig, get_peft_model

from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.agent.engines.native.cuda import forward_passes
from agentgym_rl.agent.engines.native.cuda.joint_weights import why_not_captured
from agentgym_rl.training.lora import copy_with_own_adapters
from agentgym_rl.types import Completion, Sampling

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
QUERY_VALUE = ("q_proj", "v_proj")
LLAMA: dict[str, Any] = {
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"head_dim": 32, "attention_bias": True},
}


def adapter_settings(rank: int, targets: Sequence[str], **more: Any) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=rank / 2, target_modules=list(targets), lora_dropout=0.1, **more)


@torch.no_grad()
def randomize(model: Any, seed: int) -> Any:
    """Give adapters values that change every output: peft starts with B = 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            scale = parameter.shape[1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()


def adapted(kind: str, rank: int, targets: Sequence[str] = ALL, *, settings: Any = None, **shape: Any) -> Any:
    model = make(kind, **(LLAMA | shape if kind == "llama" else shape))
    model.add_adapter(adapter_settings(rank, targets, **(settings or {})), "default")
    return randomize(model, rank)


async def largest_gap(device: NativeEngine, model: Any, lengths: Sequence[int], name: str) -> float:
    """Return the largest difference of replies to prompts of these lengths, in two turns at once."""

    async def play(index: int) -> float:
        ids, gaps = prompt(lengths[index], index), []
        for turn in range(2):
            completion = await device.generate(ids, Sampling(2, seed=index), f"{name}{index}")
            gaps.append(gap(model, ids, completion))
            ids = ids + completion.token_ids + prompt(3, turn)
        return max(gaps)

    return max(await asyncio.gather(*(play(index) for index in range(len(lengths)))))


async def adapters_agree(model: Any) -> None:
    """Check one row and several, then weights that an optimizer changed, which must need no new capture."""
    assert why_not_captured(model) is None
    device = captured(model, 4, 128)
    steps: Any = device._runner
    assert await largest_gap(device, model, (20,), "one") < 1e-4
    assert await largest_gap(device, model, (1, 17, 6), "several") < 1e-4
    captures, buffers = set(steps._graphs), steps._captured
    ids = prompt(12)
    before = await device.generate(ids, Sampling(2, seed=1), "before")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    model(torch.tensor([ids]), labels=torch.tensor([ids])).loss.backward()
    optimizer.step()
    await device.update_weights(None, 1)
    assert gap(model, ids, before) > 1e-2, "the step changed too little to be seen"
    assert await largest_gap(device, model, (12, 3), "updated") < 1e-4
    assert steps._captured is buffers
    assert set(steps._graphs) >= captures
    await device.close()


async def adapters_of_rank_4() -> None:
    await adapters_agree(adapted("llama", 4))


async def adapters_of_rank_16() -> None:
    await adapters_agree(adapted("qwen3", 16, num_attention_heads=2, num_key_value_heads=1, head_dim=64))


async def adapters_of_rank_64() -> None:
    await adapters_agree(adapted("llama", 64, num_hidden_layers=1))


async def adapters_of_some() -> None:
    await adapters_agree(adapted("llama", 16, QUERY_VALUE, settings={"use_rslora": True}))
    ranks = {"rank_pattern": {"down_proj": 20}, "alpha_pattern": {"up_proj": 3}}
    await adapters_agree(adapted("llama", 4, ("k_proj", "up_proj", "down_proj"), settings=ranks, num_hidden_layers=1))


async def adapters_of_wide_models() -> None:
    """Check the path whose matrix products come from the library, and a rank that only it supports."""
    with patch.object(forward_passes, "NARROW", 0):
        await adapters_agree(adapted("llama", 16))
        await adapters_agree(adapted("qwen3", 4, num_attention_heads=2, num_key_value_heads=1, head_dim=32))
        await adapters_agree(adapted("llama", 16, QUERY_VALUE))
    model = adapted("llama", 100, num_hidden_layers=1)
    device = captured(model, 4, 64)
    assert await largest_gap(device, model, (9, 1), "a") < 1e-4
    steps: Any = device._runner
    assert not steps._captured._narrow


async def adapters_that_change() -> None:
    """Check two adapters of different ranks, one at a time, both and none; then one that was added later."""
    model = adapted("llama", 4, num_hidden_layers=1)
    model.add_adapter(adapter_settings(16, ("q_proj", "o_proj", "down_proj")), "other")
    randomize(model, 5)
    model.set_adapter("default")
    device = captured(model, 4, 64)
    steps: Any = device._runner
    ids = prompt(14)
    replies: dict[str, Completion] = {}

    async def check(name: str) -> None:
        await device.update_weights(None, len(replies))
        replies[name] = await device.generate(ids, Sampling(3, seed=1), name)
        assert gap(model, ids, replies[name]) < 1e-4, name

    await check("default")
    buffers = steps._captured
    model.set_adapter("other")
    await check("other")
    model.disable_adapters()
    await check("none")
    model.enable_adapters()
    model.set_adapter("default")
    await check("default again")
    assert steps._captured is buffers, "adapters of known ranks need no new capture"
    assert replies["default"].logprobs == replies["default again"].logprobs
    assert len({tuple(reply.logprobs) for reply in replies.values()}) == 3
    model.set_adapter(["default", "other"])
    await check("both")
    model.add_adapter(adapter_settings(40, ("gate_proj",)), "late")
    randomize(model, 6)
    await check("late")
    assert steps._captured is not buffers


async def roles() -> None:
    """Check engines of models that share frozen weights: each one's adapters, while both play."""
    first = adapted("llama", 4, num_hidden_layers=1)
    second = randomize(copy_with_own_adapters(first), 9)
    frozen = [m.model.layers[0].mlp.down_proj.base_layer.weight for m in (first, second)]
    assert frozen[0] is frozen[1]
    engines = [captured(model, 2, 64) for model in (first, second)]
    for version in range(2):
        for name in "abc":
            gaps = await asyncio.gather(
                *(largest_gap(e, m, (9, 4), name) for e, m in zip(engines, (first, second), strict=True))
            )
            assert max(gaps) < 1e-4, gaps
        if version == 0:
            runners: list[Any] = [engine._runner for engine in engines]
            down = [runner._captured._layers[0].down_adapter for runner in runners]
            assert down[0].joint.data_ptr() == down[1].joint.data_ptr() == frozen[0].data_ptr()
            assert down[0].b.data_ptr() != down[1].b.data_ptr()
            randomize(second, 10)
            await engines[1].update_weights(None, 1)


async def wrapped() -> None:
    """Check a model that peft wrapped."""
    model: Any = get_peft_model(make("llama", **LLAMA | {"num_hidden_layers": 1}), adapter_settings(4, ALL))
    randomize(model, 1)
    assert why_not_captured(model) is None
    assert await largest_gap(captured(model, 4, 64), model, (7, 2), "a") < 1e-4


if __name__ == "__main__":
    run(
        adapters_of_rank_4,
        adapters_of_rank_16,
        adapters_of_rank_64,
        adapters_of_some,
        adapters_of_wide_models,
        adapters_that_change,
        roles,
        wrapped,
    )
