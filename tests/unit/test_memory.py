"""The memory arithmetic: against models that are counted, published sizes, and a recipe at the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from training_for_tests import tiny_model

from agentgym_rl.config import Config, load_config
from agentgym_rl.fits import too_large
from agentgym_rl.scale.memory import (
    GIB,
    SHAPES,
    Demand,
    Shape,
    activation_bytes,
    engine_memory,
    learner_memory,
    on_each_device,
    table,
)
from agentgym_rl.scale.plan import Plan


def test_parameters_are_counted_as_the_model_counts_them() -> None:
    config = tiny_model().config
    shape = Shape(
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.vocab_size,
    )
    assert shape.count == tiny_model().num_parameters()


@pytest.mark.parametrize(("name", "published"), [("1.5B", 1.54e9), ("7B", 7.62e9), ("32B", 32.8e9)])
def test_published_sizes(name: str, published: float) -> None:
    assert SHAPES[name].count == pytest.approx(published, rel=0.01)


def test_sharding_divides_what_is_kept_and_nothing_else() -> None:
    alone = Demand(SHAPES["7B"], 2, learners=1, distributed=True)
    eight = replace(alone, learners=8)
    for part in ("weights", "gradients", "optimizer"):
        assert learner_memory(eight).parts[part] == pytest.approx(learner_memory(alone).parts[part] / 8, rel=1e-6)
    assert learner_memory(eight).parts["gathered"] == learner_memory(alone).parts["gathered"]
    assert learner_memory(eight).parts["activations"] == learner_memory(alone).parts["activations"]


def test_a_learner_alone_keeps_ten_or_sixteen_bytes_a_parameter_and_gradients() -> None:
    count = SHAPES["1.5B"].count
    for dtype, wanted in ((4, 16), (2, 12)):
        parts = learner_memory(Demand(SHAPES["1.5B"], dtype)).parts
        assert parts["weights"] + parts["gradients"] + parts["optimizer"] == wanted * count


def test_the_cache_is_keys_and_values_of_every_layer() -> None:
    # Qwen2.5-7B: 2 x 28 layers x 4 heads x 128 wide x 2 bytes = 57344 bytes a token.
    memory = engine_memory(Demand(SHAPES["7B"], 2, distributed=True, sessions=64, context=8192))
    assert memory.parts["KV cache"] == 57344 * 64 * 8192
    assert memory.parts["weights"] == 2 * SHAPES["7B"].count
    assert engine_memory(Demand(SHAPES["7B"], 2)).parts["weights"] == 0


def test_what_fits() -> None:
    small = Demand(SHAPES["1.5B"], 2, micro_batch_tokens=8192, sessions=128, context=4096)
    large = Demand(SHAPES["32B"], 2, learners=8, distributed=True, colocated=False)
    assert table(on_each_device(small), 80 * GIB)[1]
    lines, fits = table(on_each_device(large), 80 * GIB)
    assert not fits
    assert any("does not fit" in line for line in lines)
    assert activation_bytes(replace(large, checkpoint_activations=True)) < activation_bytes(large) / 5


def test_a_pair_on_one_device_takes_turns() -> None:
    pair = Demand(SHAPES["7B"], 2, learners=8, distributed=True, sessions=64, micro_batch_tokens=8192)
    found = on_each_device(pair)
    learner, engine = learner_memory(pair), engine_memory(pair)
    assert found["device, learning"].total == learner.total + engine.parts["weights"]
    passing = learner.parts["activations"] + learner.parts["gathered"]
    assert found["device, playing"].total == learner.total - passing + engine.total
    assert max(m.total for m in found.values()) < learner.total + engine.total


def test_a_pair_on_one_device_cannot_work_at_the_same_time() -> None:
    recipe = {"model": {"path": "anywhere"}, "environments": [{"name": "keydoor"}]}
    with pytest.raises(ValueError, match=r"takes turns on a device, rl\.overlap plays while the learner works"):
        Config.model_validate(recipe | {"scale": {"layout": "colocated"}, "rl": {"overlap": 1}})
    Config.model_validate(recipe | {"scale": {"layout": "colocated"}})


def test_the_command_says_so_with_its_exit_code(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    raw = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    (model / "config.json").write_text(json.dumps(raw | {"num_key_value_heads": 4, "vocab_size": 152064}))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'[model]\npath = "{model}"\ndtype = "bfloat16"\n[[environments]]\nname = "keydoor"\n')
    command = [sys.executable, "-c", "from agentgym_rl.cli import main; main()", "doctor", str(recipe)]
    found = subprocess.run([*command, "--device-gib", "80"], capture_output=True, text=True)
    assert found.returncode == 1, found.stderr
    assert "7.62B parameters" in found.stdout
    assert "does not fit" in found.stdout
    scaled = ["scale.learners=8", "scale.engines=8", "agent.concurrency=64", "rl.optimizer.micro_batch_tokens=8192"]
    found = subprocess.run([*command, *scaled, "--device-gib", "80"], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "sharded over 8 learners" in found.stdout
    config = load_config(recipe, ["model.device=cpu", "agent.concurrency=1024", "agent.max_context=100000000"])
    assert "does not fit" in (too_large(config) or ""), "a run says so before it starts"
    assert too_large(load_config(recipe, ["model.path=/not/there"])) is None


def test_placement_puts_pairs_into_one_bundle_and_learners_together() -> None:
    common = {"learner_cpus": 2.0, "engine_cpus": 1.0, "env_host_cpus": 0.5, "groups_per_host": 1, "address": None}
    more = {"object_store_mb": None, "bucket_mb": 1, "worker_timeout_s": 1.0}
    apart = Plan(learners=2, engines=3, env_hosts=4, layout="disaggregated", device="cuda", **common, **more)
    assert [(list(roles), strategy) for roles, strategy in apart.placement()] == [
        (["learner"], "PACK"),
        (["engine"], "SPREAD"),
        (["env_host"], "SPREAD"),
    ]
    assert apart.cpus_in_all() == 2 * 2 + 3 + 2
    pairs = Plan(learners=2, engines=2, env_hosts=1, layout="colocated", device="cuda", **common, **more)
    (roles, strategy), _ = pairs.placement()
    assert strategy == "PACK"
    assert roles["learner"][0]["GPU"] + roles["engine"][0]["GPU"] == 1.0
    assert pairs.lacking({"GPU": 2, "CPU": 99}) is None
    assert "need 2 GPUs, a learner and an engine on each; there are 1" in (pairs.lacking({"GPU": 1, "CPU": 99}) or "")
    assert "need 5 GPUs; there are 0" in (apart.lacking({"CPU": 99}) or "")
