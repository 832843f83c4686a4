"""The memory of a teacher, a judge and a reward model that are loaded in a process of the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_memory import SHAPES, write_shape
from tokenizers_for_tests import byte_level_bpe
from training_for_tests import tiny_model

from agentgym_rl.config import Config, ModelConfig
from agentgym_rl.errors import ConfigError
from agentgym_rl.run import memory_demand
from agentgym_rl.run.load_model import base_of_adapters, load_frozen
from agentgym_rl.run.memory_demand import demand_of, diagnose_recipe, shape_of_folder
from agentgym_rl.scale.memory import (
    GIB,
    PROCESS_BYTES,
    Demand,
    engine_memory,
    learner_memory,
    on_each_device,
    on_each_host,
    scoring_bytes,
    warm_start_memory,
)
from agentgym_rl.training.locate_model import REWARD_HEAD

STUDENT, TEACHER = SHAPES["1.5B"], SHAPES["7B"]
ALONE = Demand(STUDENT, 2, teacher=TEACHER, warm_start={})
RANKS = replace(ALONE, learners=8, engines=8, distributed=True, colocated=False)
RUBRIC = {"kind": "rubric", "rubric": "Short."}


def recipe(folder: Path, **sections: Any) -> Config:
    model = folder / "model"
    if not model.exists():
        write_shape(model)
    own = {"path": str(model), "dtype": "bfloat16"} | sections.pop("model", {})
    return Config.model_validate({"model": own, "environments": [{"name": "keydoor"}], **sections})


def distilled(folder: Path, teacher: Path, **more: Any) -> Config:
    return recipe(folder, method="distill", rl={"kl_coef": 0.0, "distill": {"teacher": str(teacher), **more}})


def test_a_teacher_is_held_beside_the_learner() -> None:
    with_teacher, without = learner_memory(ALONE).parts, learner_memory(replace(ALONE, teacher=None)).parts
    assert with_teacher == without | {"teacher": 2 * TEACHER.count}
    assert warm_start_memory(ALONE).parts == learner_memory(replace(ALONE, teacher=None)).parts
    assert on_each_host(ALONE, 1)["host, loading"].parts == {"weights": 2 * TEACHER.count}


def test_the_pass_of_a_large_teacher_may_need_more_than_the_learners() -> None:
    saving = replace(ALONE, offload_activations=True)
    parts, without = learner_memory(saving).parts, learner_memory(replace(saving, teacher=None)).parts
    tokens = saving.micro_batch_tokens
    more = scoring_bytes(TEACHER, tokens, 2) - scoring_bytes(STUDENT, tokens, 2)
    assert parts["activations"] - without["activations"] == more > 0


def test_a_teacher_is_sharded_over_ranks_unless_the_student_has_adapters() -> None:
    parts = learner_memory(RANKS).parts
    assert parts["teacher"] == 2 * TEACHER.count // 8
    assert parts["gathered"] == 2 * (2 * TEACHER.layer_parameters + TEACHER.embedding_parameters)
    adapters = replace(RANKS, trained=1000)
    assert learner_memory(adapters).parts["teacher"] == 2 * TEACHER.count
    offloaded = replace(RANKS, offload=True)
    assert learner_memory(offloaded).parts["teacher"] == 0
    shards = [on_each_host(d, 8)["host of learners, running"] for d in (offloaded, replace(offloaded, teacher=None))]
    more = shards[0].parts["shards of 8 ranks"] - shards[1].parts["shards of 8 ranks"]
    assert more == 8 * (2 * TEACHER.count // 8)
    assert on_each_host(RANKS, 8)["host of learners, loading"].parts["teacher"] == 2 * TEACHER.count


def test_a_teacher_with_adapters_is_whole_on_every_rank_while_it_loads() -> None:
    trained = replace(RANKS, teacher_has_adapters=True)
    loading = on_each_device(trained)["learner, loading the teacher"].parts
    assert loading["teacher"] == 2 * TEACHER.count
    assert loading["weights"] == 2 * STUDENT.count // 8
    assert on_each_host(trained, 8)["host of learners, loading"].parts["teacher"] == 8 * 2 * TEACHER.count
    assert "learner, loading the teacher" not in on_each_device(RANKS)
    assert "device, loading the teacher" not in on_each_device(replace(ALONE, teacher_has_adapters=True))


def test_a_recipe_counts_its_teacher_and_none_at_a_url(tmp_path: Path) -> None:
    teacher = write_shape(tmp_path / "teacher")
    demand = demand_of(distilled(tmp_path, teacher))
    assert demand.teacher == shape_of_folder(str(teacher), "rl.distill.teacher")
    assert not demand.teacher_has_adapters
    lines, _ = diagnose_recipe(distilled(tmp_path, teacher), 80)
    assert f"    {'learner teacher':26} {2 * TEACHER.count / GIB:8.2f} GiB" in lines
    assert demand_of(distilled(tmp_path, teacher, url="http://127.0.0.1:1/v1")).teacher is None
    run = tmp_path / "run" / "checkpoints" / "step_000007" / "model"
    run.mkdir(parents=True)
    (run / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(teacher)}))
    adapted = demand_of(distilled(tmp_path, tmp_path / "run"))
    assert (adapted.teacher, adapted.teacher_has_adapters) == (demand.teacher, True)
    with pytest.raises(ConfigError, match=r"rl\.distill\.teacher = .*nowhere"):
        demand_of(distilled(tmp_path, tmp_path / "nowhere"))


@pytest.mark.parametrize("text", ["{}", '{"base_model_name_or_path": null}', "[]", "{"])
def test_adapters_of_a_teacher_must_name_their_base_model(text: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"adapter_config\.json must name the model .*, got none: add its folder"):
        base_of_adapters(tmp_path)
    with pytest.raises(ConfigError, match="adapter_config"):
        demand_of(distilled(tmp_path, tmp_path))


def test_a_teacher_is_loaded_as_it_is_counted(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    byte_level_bpe("chatml").save_pretrained(tmp_path)
    settings = ModelConfig(path="unused/student", dtype="bfloat16", device="cpu")
    teacher, _ = load_frozen(str(tmp_path), "rl.distill.teacher", settings)
    loaded = sum(parameter.numel() * parameter.element_size() for parameter in teacher.parameters())
    assert loaded == learner_memory(Demand(STUDENT, 2, teacher=shape_of_folder(str(tmp_path), "x"))).parts["teacher"]


def judged(folder: Path, judge: dict[str, Any], **sections: Any) -> Config:
    return recipe(folder, rewards=[RUBRIC], judge=judge, **sections)


def test_a_judge_in_the_process_costs_its_weights_and_its_cache(tmp_path: Path) -> None:
    path = str(write_shape(tmp_path / "judge"))
    judge = {"path": path, "dtype": "bfloat16", "concurrency": 4, "max_chars": 8000, "max_new_tokens": 100}
    cache = engine_memory(Demand(TEACHER, 2, sessions=4, context=4000 + 1024 + 100)).parts["KV cache"]
    wanted = {"judge weights": 2 * TEACHER.count, "judge KV cache": cache, "judge growing cache": cache // 28}
    demand = demand_of(judged(tmp_path, judge))
    assert demand.driver == {"device": wanted}
    parts = on_each_device(demand)["device"].parts
    assert {name: parts[name] for name in parts if name.startswith(("judge", "driver"))} == wanted
    assert not demand_of(judged(tmp_path, {"url": "http://127.0.0.1:1/v1", "model": "x"})).driver


def test_a_judge_is_counted_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(write_shape(tmp_path / "judge"))

    def demand(device: str, **sections: Any) -> Demand:
        return demand_of(judged(tmp_path, {"path": path, "device": device}, **sections), gpu=sections == {})

    assert list(demand("cuda:1").driver) == ["cuda:1"]
    lines, fits = diagnose_recipe(judged(tmp_path, {"path": path, "device": "cuda:1"}), 16)
    assert not fits
    assert any(line.startswith("cuda:1: ") and "does not fit" in line for line in lines), lines
    on_host = demand("cpu")
    assert list(on_host.driver) == ["host"]
    assert on_each_host(on_host, 1)["host, running"].parts["judge weights"] == 4 * TEACHER.count
    monkeypatch.setattr(memory_demand, "_cuda_bytes", lambda: None)
    assert list(demand("auto", model={"device": "cpu"}).driver) == ["device"]
    monkeypatch.setattr(memory_demand, "_cuda_bytes", lambda: 80 * GIB)
    assert list(demand("auto", model={"device": "cpu"}).driver) == ["cuda:0"]


def test_the_driver_loads_its_largest_model_on_the_host_first(tmp_path: Path) -> None:
    path = str(write_shape(tmp_path / "judge"))
    size = 4 * TEACHER.count  # of the judge, in float32; the agent is as large, in bfloat16
    for device in ("auto", "cuda:1"):
        alone = demand_of(judged(tmp_path, {"path": path, "device": device}))
        assert on_each_host(alone, 1)["host, loading"].parts == {"weights": size}
    on_host = demand_of(judged(tmp_path, {"path": path, "device": "cpu"}))
    assert on_each_host(on_host, 1)["host, loading"].parts == {"weights": size // 2}
    ranks = demand_of(judged(tmp_path, {"path": path}, scale={"learners": 2, "engines": 2}))
    assert on_each_host(ranks, 8)["host, loading"].parts == {"pages of files": size // 2, "model of the driver": size}


def test_any_device_of_a_cluster_may_have_the_judge_of_its_driver(tmp_path: Path) -> None:
    path = str(write_shape(tmp_path / "judge"))
    config = judged(tmp_path, {"path": path}, scale={"learners": 2, "engines": 2})
    demand = demand_of(config)
    for memory in on_each_device(demand).values():
        assert memory.parts["judge weights"] == 4 * TEACHER.count
        assert memory.parts["driver process"] == PROCESS_BYTES
    colocated = on_each_device(replace(demand, colocated=True))
    assert all("judge KV cache" in memory.parts for memory in colocated.values())
    on_cpus = demand_of(config, gpu=False)
    on_cpus = replace(on_cpus, driver={"device": demand.driver["device"]})
    assert not any("judge weights" in memory.parts for memory in on_each_device(on_cpus).values())
    assert on_each_host(on_cpus, 8)["host, running"].parts["judge weights"] == 4 * TEACHER.count


def test_a_reward_model_is_counted_in_the_type_of_its_file(tmp_path: Path) -> None:
    folder = write_shape(tmp_path / "scorer")
    (folder / REWARD_HEAD).touch()
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"dtype": "bfloat16"}))
    reward = {"kind": "reward_model", "path": str(folder), "name": "preferred"}
    parts = demand_of(recipe(tmp_path, rewards=[reward])).driver["device"]
    assert parts["preferred weights"] == 2 * TEACHER.count
    assert parts["preferred activations"] == scoring_bytes(TEACHER, 16384, 2)
    for dtype in ("float16", "float64", "float8_e4m3fn", "unknown"):
        (folder / "config.json").write_text(json.dumps(raw | {"dtype": dtype}))
        parts = demand_of(recipe(tmp_path, rewards=[reward])).driver["device"]
        assert parts["preferred weights"] == 4 * TEACHER.count, "other types than bfloat16 are loaded as float32"
