"""LoRA through peft: trained and saved parameters, and frozen weights shared by reference and critic."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training_for_tests import group, slow_logprobs, tiny_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.agent.engines.vllm import probe_model
from agentgym_rl.agent.engines.vllm.probe import parameter_checksums
from agentgym_rl.config import Config
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.backend import LocalBackend
from agentgym_rl.run.environments_pool import EnvironmentsPool
from agentgym_rl.training import lora
from agentgym_rl.training.batch import estimate, gather
from agentgym_rl.training.checkpoint import on_host
from agentgym_rl.training.critic import ValueModel
from agentgym_rl.training.locate_model import require_folder
from agentgym_rl.training.rl_learner import RLLearner
from agentgym_rl.training.scratch import build_tokenizer
from agentgym_rl.training.settings import LoraSettings, OptimizerSettings, RLSettings
from agentgym_rl.types import Sampling

SETTINGS = LoraSettings(rank=4, alpha=8.0)
RL = RLSettings(kl_coef=0.1, optimizer=OptimizerSettings(lr=1e-2))
GROUPS = [group(1, [0.0, 1.0, 1.0]), group(2, [1.0, 0.0])]
torch.set_num_threads(1)


def adapted(seed: int = 0) -> Any:
    model = tiny_model()
    lora.add_adapter(model, SETTINGS, seed)
    return model


def learn(learner: RLLearner, rl: RLSettings = RL, steps: int = 2) -> dict[str, float]:
    for step in range(steps):
        batch = gather(GROUPS, rl)
        if rl.algorithm == "ppo":
            learner.score(batch.samples)
        metrics = learner.learn(estimate(batch, rl), step)
    return metrics


def test_a_new_adapter_changes_nothing_and_is_all_that_is_trained() -> None:
    model, plain = adapted(), tiny_model()
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    learner = RLLearner(model, RL, 1.0, lambda: lora.adapter(model, None))
    learn(learner)
    for name, before in plain.named_parameters():
        stem, _, leaf = name.rpartition(".")
        parameters = dict(model.named_parameters())
        now = parameters.get(name, parameters.get(f"{stem}.base_layer.{leaf}"))
        assert now is not None
        assert torch.equal(now, before), name
    assert not torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_frozen_weights_take_no_optimizer_memory() -> None:
    model = adapted()
    learner = RLLearner(model, RL, 1.0, lambda: lora.adapter(model, None))
    learn(learner)
    kept = sum(t.numel() for s in learner.state()["optimizer"]["state"].values() for t in s.values() if t.numel() > 1)
    assert kept == 2 * model.num_parameters(only_trainable=True) < 2 * tiny_model().num_parameters()


def test_the_reference_is_the_model_without_its_adapter() -> None:
    model, plain = adapted(), tiny_model().eval()
    without_adapter = lambda: lora.adapter(model, None)  # noqa: E731
    learner = RLLearner(model, RL, 1.0, without_adapter)
    assert learn(learner, steps=3)["kl/reference"] > 0
    batch = gather(GROUPS, RL)
    learner.score(batch.samples)
    sample = batch.samples[0]
    exact = [p.item() for p in slow_logprobs(plain, sample.token_ids)]
    places = [i for i, trained in enumerate(sample.loss_mask) if trained]
    assert sample.reference_logprobs == pytest.approx([exact[i - 1] for i in places], abs=1e-5)
    assert any(p.requires_grad for p in model.parameters())  # the adapter is active again


def test_after_a_warm_start_the_reference_is_a_frozen_adapter(tmp_path: Path) -> None:
    model = adapted()
    learn(RLLearner(model, RLSettings(kl_coef=0.0, optimizer=OptimizerSettings(lr=1e-1)), 1.0))
    warm = copy.deepcopy(model).eval()
    model.save_pretrained(tmp_path)
    lora.load_adapter(model, tmp_path, lora.REFERENCE)
    learner = RLLearner(model, RL, 1.0, lambda: lora.adapter(model, lora.REFERENCE))
    learn(learner)
    ids = torch.tensor([[1, 2, 3, 4]])
    with lora.adapter(model, lora.REFERENCE) as reference:
        torch.testing.assert_close(reference(input_ids=ids).logits, warm(input_ids=ids).logits)
    assert not torch.allclose(model(input_ids=ids).logits, warm(input_ids=ids).logits, atol=1e-4)


def test_a_critic_is_one_more_adapter() -> None:
    model = adapted()
    lora.copy_adapter(model, SETTINGS, lora.CRITIC)
    rl = RLSettings(algorithm="ppo", kl_coef=0.0, optimizer=OptimizerSettings(lr=0.0))
    size = model.config.hidden_size
    critic = ValueModel(model.get_decoder(), size, lambda: lora.adapter(model, lora.CRITIC))
    learner = RLLearner(model, rl, 1.0, critic=critic)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    learn(learner, rl, steps=3)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all(f".{lora.CRITIC}." in name for name in moved)  # the policy's rate is 0
    saved = learner.state()["critic"]["parameters"]
    assert saved.keys() == {"head.weight", "head.bias"} | {
        f"decoder.{name.removeprefix('model.')}" for name in before if f".{lora.CRITIC}." in name
    }


def test_adapters_are_saved_in_peft_format_and_load_by_name(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    lora.add_adapter(model, SETTINGS, 0)
    learn(RLLearner(model, RL, 1.0, lambda: lora.adapter(model, None)))
    model.save_pretrained(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["r"] == 4
    assert all("lora_" in key for key in load_file(tmp_path / "adapter/adapter_model.safetensors"))
    ids = torch.tensor([[1, 2, 3, 4]])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


@pytest.mark.parametrize("change", [{"hidden_size": 32}, {"num_hidden_layers": 1}])
def test_adapters_of_another_model_are_refused(change: dict[str, int], tmp_path: Path) -> None:
    adapted().save_pretrained(tmp_path)
    config = tiny_model().config
    config.update(change)
    with pytest.raises(ConfigError, match="for a model of another shape"):
        lora.load_adapter(LlamaForCausalLM(config), tmp_path)


def test_incomplete_adapters_are_refused(tmp_path: Path) -> None:
    adapted().save_pretrained(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        lora.load_adapter(tiny_model(), tmp_path)
    with pytest.raises(ConfigError, match="holds adapters without their base model"):
        require_folder(str(tmp_path))


def test_an_adapter_can_be_merged_into_the_weights() -> None:
    model, plain = adapted(), tiny_model()
    learn(RLLearner(model, RL, 1.0, lambda: lora.adapter(model, None)))
    lora.copy_adapter(model, SETTINGS, lora.CRITIC)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = dict(lora.merged(model, model.state_dict().items()))
    assert state.keys() == plain.state_dict().keys()
    ids = torch.tensor([[1, 2, 3, 4]])
    unlike = plain(input_ids=ids).logits
    plain.load_state_dict(state)
    torch.testing.assert_close(plain(input_ids=ids).logits, model.eval()(input_ids=ids).logits, atol=1e-5, rtol=0)
    assert not torch.allclose(plain(input_ids=ids).logits, unlike, atol=1e-3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "lm_head"), ("embed_tokens",)])
def test_sent_adapters_are_those_of_a_saved_file_with_scaled_b(targets: tuple[str, ...], tmp_path: Path) -> None:
    model, settings = tiny_model(), LoraSettings(rank=4, alpha=12.0, target_modules=targets)
    lora.add_adapter(model, settings, 0)
    lora.copy_adapter(model, settings, lora.CRITIC)
    small_update(model, 0.1)
    model.save_pretrained(tmp_path)
    saved = {n: t for n, t in load_file(tmp_path / "adapter_model.safetensors").items() if "lora_" in n}
    sent = dict(lora.policy_tensors(model))
    assert sent.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(sent[name], 3.0 * tensor if "_B" in name else tensor), name


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "lm_head"), ("embed_tokens",)])
@pytest.mark.parametrize("tied", [True, False])
def test_a_merged_model_is_saved_and_computes_the_same(tied: bool, targets: tuple[str, ...], tmp_path: Path) -> None:
    config = copy.deepcopy(tiny_model().config)
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    lora.add_adapter(model, LoraSettings(rank=4, alpha=8.0, target_modules=targets), 0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    ids = torch.tensor([[1, 2, 3, 4]])
    lora.merged_model(model).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not any("lora" in name for name in loaded.state_dict())
    torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-5, rtol=1e-5)
    with lora.adapter(model, None):
        assert not torch.allclose(loaded(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-2)


def test_rounding_loss_is_relative_to_the_change_of_the_adapters() -> None:
    model = adapted()
    assert lora.rounding_loss(model, torch.bfloat16) == 0.0, "they add nothing yet"
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.constant_(parameter, 1e-6)
    assert lora.rounding_loss(model, torch.bfloat16) > 0.9
    assert lora.rounding_loss(model, torch.float32) < 0.05


async def test_the_engine_samples_from_the_adapted_model() -> None:
    model = adapted()
    learn(RLLearner(model, RLSettings(kl_coef=0.0, optimizer=OptimizerSettings(lr=1e-1)), 1.0))
    engine = NativeEngine(model, max_sessions=2, max_context=64)
    completion = await engine.generate([1, 2, 3], Sampling(max_new_tokens=6, seed=1), "s")
    await engine.close()
    exact = slow_logprobs(model.eval(), [1, 2, 3, *completion.token_ids])[2:]
    assert completion.logprobs == pytest.approx([p.item() for p in exact], abs=1e-5)
    plain = slow_logprobs(tiny_model(), [1, 2, 3, *completion.token_ids])[2:]
    assert completion.logprobs != pytest.approx([p.item() for p in plain], abs=1e-2)


def test_a_missing_target_module_is_named_in_the_error() -> None:
    with pytest.raises(ConfigError, match=r"target_modules = .*nowhere"):
        lora.add_adapter(tiny_model(), LoraSettings(target_modules=("nowhere",)), 0)


def adapted_in_bf16() -> Any:
    """Return the model as it is loaded in bf16, with float32 rotary frequencies."""
    model = adapted()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def small_update(model: Any, size: float = 1e-5) -> None:
    """Set the matrices that start at 0 to the size of an early update."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(size)


def test_merged_weights_keep_small_updates_of_a_bf16_model() -> None:
    model = adapted_in_bf16()
    before = {name: tensor.clone() for name, tensor in lora.merged(model, model.state_dict().items())}
    small_update(model)
    moved = []
    for name, tensor in lora.merged(model, model.state_dict().items()):
        if "proj" in name:
            assert tensor.dtype is torch.float32
            moved.append(float((tensor != before[name]).float().mean()))
    assert len(moved) == 7 * model.config.num_hidden_layers
    assert min(moved) > 0.9
    after = lora.merged(model, model.state_dict().items())
    rounded = [float((before[name].bfloat16() != tensor.bfloat16()).float().mean()) for name, tensor in after]
    assert max(rounded) < 0.5, "the update must be so small that bf16 loses it"


def test_the_weight_probe_detects_small_updates_of_adapters() -> None:
    model = adapted_in_bf16()
    probes = []
    for size in (0.0, 1e-5):
        small_update(model, size)
        probes.append(probe_model(model, torch.bfloat16, adapter=lora.policy_tensors(model)))
    old, new = probes
    changed = {name for name in new.checksums if old.checksums[name] != new.checksums[name]}
    assert changed == {name for name in new.checksums if name.endswith("lora_B.weight")}
    assert {name.split(".")[-3] for name in changed} == {"o_proj", "down_proj"}
    frozen = parameter_checksums(model, new.shapes)
    assert "model.layers.0.self_attn.o_proj.weight" in frozen
    new.check_checksums([frozen], 2)


@pytest.mark.parametrize(("model", "engine"), [("bfloat16", "auto"), ("float32", "bfloat16"), ("bfloat16", "float32")])
def test_vllm_takes_adapters_of_ranks_in_every_type(model: str, engine: str) -> None:
    recipe = {
        "model": {"path": "somewhere", "dtype": model, "lora": {"rank": 2}},
        "environments": [{"name": "keydoor"}],
        "engine": {"kind": "vllm", "dtype": engine},
        "scale": {},
    }
    Config.model_validate(recipe)


def test_a_checkpoint_in_the_background_copies_adapters_and_no_frozen_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []

    def recording(state: dict[str, Any]) -> dict[str, Any]:
        copied.extend(state)
        return on_host(state)

    monkeypatch.setattr("agentgym_rl.run.backend.on_host", recording)
    recipe = {"model": {"path": "anywhere", "lora": {"rank": 4, "alpha": 8.0}}, "checkpoint": {"background": True}}
    config = Config.model_validate(recipe | {"environments": [{"name": "keydoor"}]})
    model = adapted()
    backend = LocalBackend(config, EnvironmentsPool((), config.agent), model, build_tokenizer(["up down"]), None)
    backend.save(tmp_path, 1, {}, keep=1)
    with torch.no_grad():
        expected = {name: tensor.clone() for name, tensor in lora.matrices(model).items()}
        for tensor in lora.matrices(model).values():
            tensor.add_(1.0)  # the next update
    backend.finish_saving()
    names = [name for name in copied if name.startswith("model.")]
    assert names
    assert all("lora_" in name for name in names)
    saved = load_file(tmp_path / "step_000001" / "model" / "adapter_model.safetensors")
    for name, tensor in saved.items():
        own = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
        assert torch.equal(tensor, expected[own]), name
