"""The memory arithmetic: against models that are counted, published sizes, and a recipe at the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from training_for_tests import tiny_model

from agentgym_rl.config import Config, load_config
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.memory_demand import _adapter_parameters, demand_of, diagnose_recipe, too_large
from agentgym_rl.scale.memory import (
    GIB,
    HEAD_CHUNK_BYTES,
    LOADING_BYTES,
    PART_PARAMETERS,
    PROCESS_BYTES,
    TEMPORARY_PARTS,
    Demand,
    Shape,
    activation_bytes,
    engine_memory,
    learner_memory,
    on_each_device,
    on_each_host,
    table,
    warm_start_memory,
)
from agentgym_rl.scale.resource_plan import Plan, bundles
from agentgym_rl.training.device import optimizer
from agentgym_rl.training.device.head import CHUNK_NUMBERS

SHAPES = {
    "1.5B": Shape(1536, 8960, 28, 12, 2, 151_936, tied=True),
    "7B": Shape(3584, 18944, 28, 28, 4, 152_064),
    "32B": Shape(5120, 27648, 64, 40, 8, 152_064),
}
"""The Qwen2.5 family."""


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


def test_sharding_divides_only_the_persistent_parts() -> None:
    alone = Demand(SHAPES["7B"], 2, learners=1, distributed=True)
    eight = replace(alone, learners=8)
    for part in ("weights", "gradients", "optimizer"):
        assert learner_memory(eight).parts[part] == pytest.approx(learner_memory(alone).parts[part] / 8, rel=1e-6)
    for part in ("gathered", "whole gradients", "summed gradients", "activations"):
        assert learner_memory(eight).parts[part] == learner_memory(alone).parts[part] > 0


def test_a_learner_alone_keeps_ten_or_sixteen_bytes_a_parameter_and_gradients() -> None:
    count = SHAPES["1.5B"].count
    for dtype, wanted in ((4, 16), (2, 12)):
        parts = learner_memory(Demand(SHAPES["1.5B"], dtype)).parts
        assert parts["weights"] + parts["gradients"] + parts["optimizer"] == wanted * count


def test_the_cache_is_keys_and_values_of_every_layer() -> None:
    # Qwen2.5-7B: 2 x 28 layers x 4 heads x 128 wide x 2 bytes = 57344 bytes a token.
    memory = engine_memory(Demand(SHAPES["7B"], 2, distributed=True, sessions=64, context=8192))
    assert memory.parts["KV cache"] == 57344 * 64 * 8192
    assert memory.parts["growing cache"] == 57344 * 64 * 8192 // 28, "one layer is there twice for a moment"
    assert memory.parts["weights"] == 2 * SHAPES["7B"].count
    assert engine_memory(Demand(SHAPES["7B"], 2)).parts["weights"] == 0


def test_what_fits() -> None:
    small = Demand(SHAPES["1.5B"], 2, micro_batch_tokens=8192, sessions=128, context=4096)
    large = Demand(SHAPES["32B"], 2, learners=8, distributed=True, colocated=False)
    assert table(on_each_device(small, 80 * GIB), 80 * GIB)[1]
    lines, fits = table(on_each_device(large, 80 * GIB), 80 * GIB)
    assert not fits
    assert any("does not fit" in line for line in lines)
    assert activation_bytes(replace(large, checkpoint_activations=True)) < activation_bytes(large) / 5


def test_a_pair_on_one_device_takes_turns() -> None:
    pair = Demand(SHAPES["7B"], 2, learners=8, distributed=True, sessions=64, micro_batch_tokens=8192, reference=True)
    found = on_each_device(pair)
    learner, engine = learner_memory(pair), engine_memory(pair)
    cache = engine.parts["KV cache"] + engine.parts["growing cache"]
    assert found["device, learning"].total == learner.total + engine.total - cache
    passing = sum(learner.parts[name] for name in TEMPORARY_PARTS)
    embedding = 152_064 * 3584
    assert found["device, playing"].total == learner.total - passing + engine.total + 4 * embedding
    assert max(m.total for m in found.values()) < learner.total + engine.total
    assert "device, loading" not in found, "a reference is read in parts"
    sleeping = on_each_device(replace(pair, engine="vllm", memory_share=0.5), 80 * GIB)
    assert sleeping["device, learning"].total == learner.total + PROCESS_BYTES, "vLLM gives everything back"
    assert sleeping["device, playing"].total == learner.total - passing + 40 * GIB + PROCESS_BYTES + 8 * embedding
    on_cpus, adapters = replace(pair, gpu=False), replace(pair, trained=1000)
    assert "learner weights on their way" not in on_each_device(on_cpus)["device, playing"].parts
    assert on_each_device(adapters)["device, playing"].parts["learner weights on their way"] == 2 * embedding


def test_vllm_takes_its_share_of_the_whole_device() -> None:
    beside = Demand(SHAPES["1.5B"], 2, engine="vllm", memory_share=0.9, checkpoint_activations=True)
    assert learner_memory(beside).total < 30 * GIB
    assert not table(on_each_device(beside, 80 * GIB), 80 * GIB)[1]
    assert table(on_each_device(replace(beside, memory_share=0.5), 80 * GIB), 80 * GIB)[1]
    assert not table(on_each_device(replace(beside, memory_share=0.4, replicas=2), 80 * GIB), 80 * GIB)[1]
    assert table(on_each_device(replace(beside, engine="elsewhere"), 80 * GIB), 80 * GIB)[1]
    lines, fits = table(on_each_device(replace(beside, memory_share=0.04), 80 * GIB), 80 * GIB)
    assert not fits
    assert any("memory_share = 0.04 is 3.2 GiB, and vLLM needs 4.1 GiB" in line for line in lines)
    alone = Demand(SHAPES["7B"], 2, learners=8, distributed=True, colocated=False, engine="vllm", memory_share=0.95)
    assert table({"engine": engine_memory(alone, 80 * GIB)}, 80 * GIB)[1], "a budget that is kept needs no reserve"
    all_of_it = engine_memory(replace(alone, memory_share=0.99), 80 * GIB)
    assert not table({"engine": all_of_it}, 80 * GIB)[1], "CUDA is up before vLLM looks for its share"


def test_a_cache_of_a_given_size_must_hold_one_episode_beside_the_weights() -> None:
    given = Demand(
        SHAPES["7B"],
        2,
        learners=8,
        distributed=True,
        colocated=False,
        engine="vllm",
        cache_bytes=GIB // 10,
        context=8192,
    )
    lines, fits = table(on_each_device(given, 80 * GIB), 80 * GIB)
    assert not fits
    wanted = "does not fit .*: engine.kv_cache_gib = 0.1 cannot hold one episode of 8192 tokens, which takes 0.438 GiB"
    assert any(re.search(wanted, line) for line in lines), lines
    assert engine_memory(replace(given, cache_bytes=GIB // 2), 80 * GIB).problem == ""
    assert table({"engine": engine_memory(replace(given, cache_bytes=50 * GIB), 80 * GIB)}, 80 * GIB)[1]
    large = engine_memory(replace(given, cache_bytes=64 * GIB), 80 * GIB)
    assert large.total < 81 * GIB
    assert not table({"engine": large}, 80 * GIB)[1], "beyond its share it keeps to nothing"


def test_a_recipe_whose_model_reads_less_than_an_episode_needs_no_more_cache(tmp_path: Path) -> None:
    model = write_shape(tmp_path / "model")
    recipe = {"model": {"path": str(model), "dtype": "bfloat16"}, "environments": [{"name": "keydoor"}]}
    config = Config.model_validate(recipe | {"engine": {"kind": "vllm", "kv_cache_gib": 0.1}, "scale": {}})
    lines, _ = diagnose_recipe(config, 80)
    assert any("one episode of 8192 tokens, which takes 0.438 GiB" in line for line in lines)
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": 1024}))
    lines, _ = diagnose_recipe(config, 80)
    assert not any("kv_cache_gib" in line for line in lines), lines


def test_a_vllm_over_several_devices_has_a_part_of_weights_and_heads_on_each() -> None:
    demand = Demand(SHAPES["32B"], 2, learners=16, distributed=True, colocated=False, engine="vllm", context=16384)
    demand = replace(demand, memory_share=0.8)
    assert "vLLM needs 66.0 GiB" in engine_memory(demand, 80 * GIB).problem
    two, eight = (engine_memory(replace(demand, tensor_parallel=n), 80 * GIB) for n in (2, 8))
    assert (two.problem, eight.problem) == ("", "")
    small = replace(demand, memory_share=0.05)
    needs = [engine_memory(replace(small, tensor_parallel=n), 80 * GIB).problem.split("needs ")[1] for n in (2, 8)]
    assert [need.partition(" GiB")[0] for need in needs] == ["33.5", "9.1"]
    # More devices than key/value heads: each has one of them, whole.
    cache = replace(demand, cache_bytes=1, tensor_parallel=8)
    assert engine_memory(cache, 80 * GIB).problem == engine_memory(replace(cache, tensor_parallel=16), 80 * GIB).problem
    nodes = on_each_host(replace(demand, engines=4, tensor_parallel=4, colocated=True), 8)
    assert "2 sleeping vLLMs" in nodes["host, running"].parts


@pytest.mark.parametrize(
    ("devices", "per_node", "why"),
    [
        (4, 8, ""),
        (28, 28, ""),
        (14, 16, "does not divide the model's heads, 28 and 4 of keys"),  # 14 is no multiple of 4
        (3, 8, "does not divide the model's heads, 28 and 4 of keys"),
        (4, 2, "an engine is on one node, of 2 GPUs"),
    ],
)
def test_a_vllm_must_be_divisible_and_have_its_devices_on_one_node(
    devices: int, per_node: int, why: str, tmp_path: Path
) -> None:
    model = {"path": str(write_shape(tmp_path / "model")), "dtype": "bfloat16"}
    engine = {"kind": "vllm", "memory_share": 0.9, "tensor_parallel": devices}
    scale = {"address": "auto", "learners": 8}
    raw = {"model": model, "environments": [{"name": "keydoor"}], "engine": engine, "scale": scale}
    config = Config.model_validate(raw | {"rl": {"optimizer": {"checkpoint_activations": True}}})
    lines, fits = diagnose_recipe(config, 141, gpus_per_node=per_node)
    found = [line for line in lines if line.startswith("engine, over its devices: does not fit")]
    assert fits == (not why), lines
    assert len(found) == bool(why)
    assert all(line.endswith(why) for line in found)


@pytest.mark.parametrize("share", [1.0, 1.5])
def test_vllm_cannot_have_a_whole_device(share: float) -> None:
    recipe = {"model": {"path": "anywhere"}, "environments": [{"name": "keydoor"}]}
    with pytest.raises(ValueError, match=rf"memory_share = {share:g} must be below 1: vLLM starts only where"):
        Config.model_validate(recipe | {"engine": {"kind": "vllm", "memory_share": share}})


def test_a_warm_start_is_sharded_like_a_learner_and_has_its_own_passes() -> None:
    eight = Demand(
        SHAPES["7B"], 2, learners=8, distributed=True, colocated=False, checkpoint_activations=True, sessions=64
    )
    eight = replace(eight, reference=True, warm_start={"micro_batch_tokens": 4096, "checkpoint_activations": True})
    warm = on_each_device(eight, 80 * GIB)
    assert table(warm, 80 * GIB)[1]
    learner, imitating = learner_memory(eight).parts, warm["learner, warm start"].parts
    assert imitating["optimizer"] == learner["optimizer"] == 6 * SHAPES["7B"].count // 8
    assert "reference" not in imitating
    assert imitating["activations"] < learner["activations"]
    large = replace(eight, warm_start={"micro_batch_tokens": 65536, "checkpoint_activations": False})
    assert not table({"learner, warm start": warm_start_memory(large)}, 80 * GIB)[1], "whatever RL would need"
    assert "device, warm start" in on_each_device(replace(eight, colocated=True))
    assert "device, warm start" in on_each_device(
        Demand(SHAPES["1.5B"], 2, warm_start={"micro_batch_tokens": 4096, "checkpoint_activations": True})
    )
    cpu = on_each_host(replace(eight, gpu=False), 16)
    assert cpu["host, warm start"].total == 8 * warm_start_memory(replace(eight, gpu=False)).total


def test_hosts_read_the_files_once_and_hold_no_weights_that_are_sent() -> None:
    apart = Demand(SHAPES["32B"], 2, learners=32, engines=8, distributed=True, colocated=False, reference=True)
    count = SHAPES["32B"].count
    found = on_each_host(apart, 8)
    assert found["host of learners, loading"].total == 2 * count < 1.3 * 2 * count
    assert found["host of learners, running"].total == 2 * count // 4, "a quarter of the ranks write a quarter"
    assert on_each_host(replace(apart, engine="vllm"), 40)["host, running"].total == 2 * count
    largest = 2 * SHAPES["32B"].vocabulary * SHAPES["32B"].hidden
    assert on_each_device(apart)["engine"].parts["weights on their way"] == largest
    vllm = on_each_device(replace(apart, engine="vllm", memory_share=0.9), 141 * GIB)["engine"]
    assert vllm.parts["weights on their way"] == 3 * largest
    pairs = replace(apart, learners=8, colocated=True)
    assert on_each_host(pairs, 4)["host, loading"].total == 2 * count
    on_cpus = on_each_host(replace(pairs, gpu=False), 4)["host, loading"].total
    assert on_cpus == (2 * 4 // 8 + 2 * 4) * count + 8 * LOADING_BYTES, "half of the ranks' shards, four engines"
    sleeping = on_each_host(replace(pairs, engine="vllm"), 8)["host, running"]
    assert sleeping.parts["8 sleeping vLLMs"] == 8 * 2 * count
    assert sleeping.total == (1 + 8) * 2 * count
    two_nodes = on_each_host(replace(pairs, engine="vllm"), 4)["host, running"]
    assert two_nodes.total == 4 * 2 * count + count, "half of the ranks hold half of a checkpoint"
    assert on_each_host(pairs, 8)["host, running"].total == 2 * count
    assert not table(found, 50 * GIB)[1]
    assert table(found, None)[1], "not known to be too large"
    machine = on_each_host(replace(pairs, gpu=False), 8)["host, running"]
    assert machine.parts["8 ranks"] == 8 * learner_memory(replace(pairs, gpu=False)).total


def test_loading_is_estimated_as_it_was_measured() -> None:
    measured = json.loads((Path(__file__).parents[2] / "results/benchmarks/loading.json").read_text())
    peak = measured["peak"]["pss"] - measured["before"]["pss"]
    assert peak < 1.3 * measured["bf16_bytes"]
    alike = Demand(SHAPES["1.5B"], 2, learners=4, distributed=True, engine="elsewhere", gpu=False)
    assert on_each_host(alike, 4)["host, loading"].total == pytest.approx(peak, rel=0.1)
    large = replace(alike, shape=SHAPES["32B"], learners=8)
    assert on_each_host(large, 8)["host, loading"].total < 1.3 * 2 * SHAPES["32B"].count


@pytest.mark.parametrize(
    ("size", "rank", "who"), [("7B", 0, "ours"), ("7B", 0, "ours, offloaded"), ("32B", 16, "ours")]
)
def test_a_step_of_a_large_model_is_estimated_as_it_was_measured(size: str, rank: int, who: str) -> None:
    lines = json.loads((Path(__file__).parents[2] / "results/benchmarks/gpu_large.json").read_text())["measured"]
    lines = [line for line in lines if f"-{size.lower()}" in line["case"] and line["who"] == who]
    (measured,) = [line["memory_gib"] for line in lines]
    step = Demand(SHAPES[size], 2, checkpoint_activations=True, micro_batch_tokens=4096, sessions=64, context=4096)
    if who == "ours, offloaded":
        step = replace(step, offload_moments=True, offload_activations=True)
    if rank:
        step = replace(step, trained=_adapter_parameters(SHAPES[size], rank))
    estimate = on_each_device(step)["device"].total / GIB
    assert estimate == pytest.approx(measured["allocator"], rel=0.1)
    assert estimate == pytest.approx(measured["doctor"], rel=0.01), "the arithmetic has changed since"


def test_settings_that_save_memory_are_counted() -> None:
    plain = Demand(SHAPES["32B"], 2, learners=16, distributed=True, colocated=False, reference=True, critic=True)
    parts, count = learner_memory(plain).parts, SHAPES["32B"].count
    copies = learner_memory(replace(plain, shard_ranks=8)).parts
    assert copies["weights"] == 2 * parts["weights"] == 2 * count // 8, "two copies, each over eight ranks"
    once = learner_memory(replace(plain, reduce_once=True)).parts
    assert once["whole gradients"] - parts["whole gradients"] == 4 * count
    offloaded = replace(plain, offload=True)
    on_device, names = learner_memory(offloaded).parts, ("weights", "gradients", "optimizer", "reference", "critic")
    assert all(on_device[name] == 0 < parts[name] for name in names)
    on_host = on_each_host(offloaded, 8)["host of learners, running"].parts["shards of 8 ranks"]
    assert on_host == 8 * sum(parts[name] for name in names)
    moments = replace(Demand(SHAPES["7B"], 2), offload_moments=True)
    embedding = SHAPES["7B"].vocabulary * SHAPES["7B"].hidden  # larger than a part
    passing = activation_bytes(moments) + 2 * HEAD_CHUNK_BYTES
    assert learner_memory(moments).parts["optimizer"] == max(0, 6 * embedding - passing)
    few = replace(moments, micro_batch_tokens=512, checkpoint_activations=True)
    assert 0 < learner_memory(few).parts["optimizer"] < 6 * embedding
    assert on_each_host(moments, 1)["host, running"].parts["moments of 1 ranks"] == 6 * SHAPES["7B"].count
    saving = replace(plain, checkpoint_activations=True)
    moved = replace(saving, offload_activations=True)
    assert activation_bytes(moved) < activation_bytes(saving) < activation_bytes(plain)
    on_host = on_each_host(moved, 8)["host of learners, running"].parts["activations of 8 ranks"]
    assert on_host == 8 * activation_bytes(saving)
    copied = on_each_host(replace(plain, background=True), 8)["host of learners, running"].parts
    assert copied["copies for checkpoints of 8 ranks"] == 8 * (6 * count // 16 + 2 * count // 16)
    adapters = Demand(SHAPES["32B"], 2, trained=1000, background=True)
    assert on_each_host(adapters, 1)["host, running"].parts == {"copies for checkpoints of 1 ranks": 8000 + 4000}


def test_each_optimizer_of_a_recipe_is_counted_with_its_own_settings(tmp_path: Path) -> None:
    model = {"path": str(write_shape(tmp_path / "model"))}
    recipe = {"model": model, "environments": [{"name": "keydoor"}]}
    saving = {"offload_moments": True, "offload_activations": True, "micro_batch_tokens": 4096}
    warm = {"sft": {"optimizer": {"micro_batch_tokens": 8192}}}
    demand = demand_of(Config.model_validate(recipe | {"rl": {"optimizer": saving}, "warm_start": warm}))
    plain = demand_of(Config.model_validate(recipe | {"rl": {"optimizer": {"micro_batch_tokens": 8192}}}))
    assert warm_start_memory(demand).total == learner_memory(replace(plain, reference=False)).total
    assert learner_memory(demand).total < learner_memory(plain).total
    scored = {"method": "reward_model", "reward_model": {"sample_groups": 1, "optimizer": saving}}
    judge = demand_of(Config.model_validate(recipe | scored))
    assert (judge.micro_batch_tokens, judge.offload_moments, judge.offload_activations) == (4096, True, True)
    for own, critic, counted in ((4096, 1024, 4096), (1024, 4096, 4096)):
        optimizers = [{"optimizer": {"micro_batch_tokens": tokens}} for tokens in (own, critic)]
        for algorithm, tokens in (("ppo", counted), ("grpo", own)):
            rl = {**optimizers[0], "critic": optimizers[1], "algorithm": algorithm}
            assert demand_of(Config.model_validate(recipe | {"rl": rl})).micro_batch_tokens == tokens


def test_the_sizes_are_those_of_the_code() -> None:
    assert 4 * CHUNK_NUMBERS["cuda"] == HEAD_CHUNK_BYTES
    assert optimizer.PART_PARAMETERS == PART_PARAMETERS


def test_a_pair_on_one_device_cannot_work_at_the_same_time() -> None:
    recipe = {"model": {"path": "anywhere"}, "environments": [{"name": "keydoor"}]}
    with pytest.raises(ValueError, match=r"rl\.overlap and rl\.max_staleness have episodes under way"):
        Config.model_validate(recipe | {"scale": {"layout": "colocated"}, "rl": {"overlap": 1}})
    Config.model_validate(recipe | {"scale": {"layout": "colocated"}})


def test_the_guide_says_what_the_code_says(tmp_path: Path) -> None:
    docs = Path(__file__).parents[2] / "docs"
    guide = "\n".join((docs / name).read_text() for name in ("guides/memory.md", "how-it-works/thousand-gpus.md"))
    flat = " ".join(guide.split())
    model = write_shape(tmp_path / "model")
    common = {"name": "7B", "model": {"path": str(model), "dtype": "bfloat16"}, "environments": [{"name": "keydoor"}]}
    config = Config.model_validate(
        common
        | {"agent": {"concurrency": 768, "max_context": 8192}, "rl": {"optimizer": {"checkpoint_activations": True}}}
        | {"scale": {"address": "auto", "learners": 8, "engines": 8}}
    )
    lines, fits = diagnose_recipe(config, 80, 1000)
    assert fits
    assert "\n".join(f"    {line}" for line in lines) in guide
    one = Demand(SHAPES["1.5B"], 2, reference=True, checkpoint_activations=True, context=4096)
    many = replace(one, distributed=True, colocated=False)
    seven = replace(many, shape=SHAPES["7B"], learners=8, sessions=120, context=8192)
    large = replace(many, shape=SHAPES["32B"], learners=32, sessions=16, context=16384)
    assert row("1.5B", "1, in one process", one, "shared + {cache:.0f} (256 episodes of 4k)") in guide
    assert row("7B", "8", seven, "{weights:.1f} + {cache:.1f} (120 of 8k)") in guide
    assert row("32B", "32", large, "{weights:.0f} + {cache:.0f} (16 of 16k): not in 80 GiB") in guide
    pair = on_each_device(replace(seven, colocated=True, sessions=32))
    learning, playing = (pair[f"device, {what}"].total / GIB for what in ("learning", "playing"))
    both = (learner_memory(seven).total + engine_memory(replace(seven, sessions=32)).total) / GIB
    said = f"takes {learning:.1f} GiB while it learns and {playing:.1f} GiB while it plays 32 episodes of 8k"
    assert f"{said}, where without turns it would take {both:.1f} GiB" in flat
    sizes = {n: learner_memory(replace(large, learners=n)) for n in range(8, 17)}
    fewest = min(n for n, memory in sizes.items() if memory.fits(80 * GIB))
    each, sixteen, eight = (f"{sizes[n].total / GIB:.0f} GiB" for n in (fewest, 16, 8))
    assert f"at least {fewest} devices of 80 GiB ({each} each; {sixteen} with 16, {eight} with 8)" in flat
    halves = replace(large, engine="vllm", memory_share=0.9, tensor_parallel=2)
    cache = (0.9 * 80 * GIB - halves.engine_bytes * halves.shape.count / 2) / GIB - 1
    assert f"leaves {cache:.0f} GiB of cache on each, {cache // 2:.0f} episodes of 16k tokens" in flat
    assert "takes 2 GiB" in engine_memory(replace(halves, cache_bytes=1), 80 * GIB).problem
    beside_servers = on_each_device(replace(one, shape=SHAPES["32B"], engine="elsewhere", context=16384))["device"]
    assert f"at 32B it would take {beside_servers.total / GIB:.0f} GiB there" in flat
    warm = (
        warm_start_memory(
            replace(seven, warm_start={"micro_batch_tokens": 16384, "checkpoint_activations": True})
        ).total
        / GIB
    )
    assert f"{warm:.1f} GiB at 7B on 8 with micro-batches of 16k" in flat
    sleeping = on_each_host(replace(seven, colocated=True, engines=8, engine="vllm"), 8)["host, running"].parts
    assert f"{sleeping['8 sleeping vLLMs'] / GIB:.0f} GiB more for a node of 8 at 7B" in flat
    host = on_each_host(large, 8)["host of learners, loading"].total / GIB
    assert f"{host:,.0f} GiB for a node of 8 ranks at 32B" in flat
    passing = sum(learner_memory(seven).parts[name] for name in OF_A_PASS) / GIB
    assert f"at 7B these three are {passing:.1f} GiB" in flat
    thousand = replace(large, learners=360, engines=640, micro_batch_tokens=32768)
    assert f"a device holds {learner_memory(thousand).total / GIB:.0f} GiB" in flat
    assert f"16 episodes at once fit ({engine_memory(thousand).total / GIB:.0f} GiB" in flat
    assert table({"engine": engine_memory(thousand)}, 141 * GIB)[1]
    hosts = {kind: f"{memory.total / GIB:,.0f} GiB" for kind, memory in on_each_host(thousand, 8).items()}
    assert f"{hosts['host of learners, loading']} of memory for a node of 8 ranks" in flat
    assert f"{hosts['host of learners, running']} afterwards. Engine nodes" in flat
    assert f"need {hosts['host of engines, loading']} while they load." in flat


OF_A_PASS = ("gathered", "whole gradients", "summed gradients")


def row(name: str, learners: str, d: Demand, engine: str) -> str:
    parts, of_engine = learner_memory(d).parts, engine_memory(d).parts
    kept = sum(parts[part] for part in ("weights", "gradients", "optimizer"))
    passing = sum(parts.get(part, 0) for part in OF_A_PASS)
    numbers = [kept, passing, parts["reference"], parts["activations"], learner_memory(d).total]
    said = engine.format(weights=of_engine["weights"] / GIB, cache=of_engine["KV cache"] / GIB)
    cells = [name, learners, *(f"{n / GIB:.1f}" if n else "–" for n in numbers), said]
    return f"| {' | '.join(cells)} |"


def write_shape(folder: Path) -> Path:
    """A folder with the config.json of a 7B model and nothing else."""
    folder.mkdir()
    raw = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    (folder / "config.json").write_text(json.dumps(raw | {"num_key_value_heads": 4, "vocab_size": 152064}))
    return folder


def test_a_small_model_is_counted_in_millions() -> None:
    lines, _ = diagnose_recipe(load_config(Path(__file__).parents[2] / "recipes/quickstart.toml", []), device_gib=8)
    assert lines[0] == "quickstart: 0.414M parameters, float32"


def test_the_command_reports_it_with_its_exit_code(tmp_path: Path) -> None:
    model = write_shape(tmp_path / "model")
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
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(raw | {"num_experts": 128}))
    found = subprocess.run([*command, "--device-gib", "80"], capture_output=True, text=True)
    assert found.returncode == 2
    assert "is a mixture of experts, whose memory is not known here" in " ".join(found.stderr.split())


def test_placement_puts_pairs_into_one_bundle_and_learners_together() -> None:
    common = {"learner_cpus": 2.0, "engine_cpus": 1.0, "env_host_cpus": 0.5, "episodes_per_host": 1, "address": None}
    more = {"object_store_mb": None, "bucket_mb": 1, "worker_timeout_s": 1.0}
    apart = Plan(learners=2, engines=3, env_hosts=4, layout="disaggregated", device="cuda", **common, **more)
    assert [(list(roles), strategy) for roles, strategy in apart.placement()] == [
        (["learner"], "PACK"),
        (["engine"], "SPREAD"),
        (["env_host"], "SPREAD"),
    ]
    assert apart.total_cpus() == 2 * 2 + 3 + 2
    pairs = Plan(learners=2, engines=2, env_hosts=1, layout="colocated", device="cuda", **common, **more)
    (roles, strategy), _ = pairs.placement()
    assert strategy == "PACK"
    assert roles["learner"][0]["GPU"] + roles["engine"][0]["GPU"] == 1.0
    assert pairs.shortage({"GPU": 2, "CPU": 99}) is None
    assert "need 2 GPUs, a learner and an engine on each; there are 1" in (pairs.shortage({"GPU": 1, "CPU": 99}) or "")
    assert "need 5 GPUs; there are 0" in (apart.shortage({"CPU": 99}) or "")
    wide = replace(apart, devices_per_engine=4)
    assert wide.placement()[1][0]["engine"] == [{"CPU": 1.0, "GPU": 4.0}] * 3, "of one node each: a bundle is"
    assert "need 14 GPUs; there are 13" in (wide.shortage({"GPU": 13, "CPU": 99}) or "")
    shared = replace(pairs, learners=8, devices_per_engine=4)
    assert bundles(shared.placement()[0][0]) == [{"CPU": 9.0, "GPU": 4.0}] * 2, (
        "an engine and the learners it shares with"
    )
    assert bundles(pairs.placement()[0][0]) == [{"CPU": 3.0, "GPU": 1.0}] * 2
    undecided = replace(pairs, device="auto", address="auto")
    assert undecided.resolved_for({"GPU": 16.0, "CPU": 99.0}) == replace(pairs, address="auto"), (
        "whatever the driver has"
    )
    assert undecided.resolved_for({"CPU": 99.0}).device == "cpu"
    assert pairs.resolved_for({"CPU": 99.0}) is pairs


async def test_a_missing_cluster_is_reported_in_one_line() -> None:
    from agentgym_rl.run.backend_ray import plan_of
    from agentgym_rl.scale.ray_app import RayApp

    recipe = {"model": {"path": "anywhere"}, "environments": [{"name": "keydoor"}]}
    with pytest.raises(ValueError, match="must be on a node of the cluster"):
        Config.model_validate(recipe | {"scale": {"address": "ray://head:10001"}})
    plan = plan_of(Config.model_validate(recipe | {"scale": {"address": "127.0.0.1:1"}}))
    assert plan.device == "auto", "it is the nodes' that counts"
    with pytest.raises(
        ConfigError, match=r"scale\.address = '127\.0\.0\.1:1': no Ray cluster answers there"
    ) as refused:
        await RayApp(plan).connect()
    assert "\n" not in str(refused.value)
