"""Ranks that load, hold and save a model in parts learn what one process learns."""

from __future__ import annotations

import itertools
import json
import tarfile
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_for_tests import SGD_LIKE, on_ranks
from safetensors.torch import load_file, save_file
from test_ranks import assert_same
from torch.distributed.tensor import DTensor
from training_for_tests import tiny_model
from transformers import AutoModelForCausalLM, GPTNeoXConfig, Qwen3MoeConfig

from agentgym_rl.config import Config
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.backend import make_trainer
from agentgym_rl.run.rank import Rank
from agentgym_rl.scale.process_group import ProcessRanks
from agentgym_rl.scale.shards import load_shards, require_written
from agentgym_rl.training.checkpoint import export, on_host
from agentgym_rl.training.device.host_activations import HostActivations
from agentgym_rl.training.device.optimizer import make_optimizer, step
from agentgym_rl.training.dpo import Preference
from agentgym_rl.training.learner import Imitator
from agentgym_rl.training.meta import fill, make_empty
from agentgym_rl.training.model import load_model
from agentgym_rl.training.offline_settings import RewardModelSettings
from agentgym_rl.training.ranks import SINGLE_PROCESS, EmptyFirst, Ranks
from agentgym_rl.training.scratch import build_tokenizer
from agentgym_rl.training.settings import OptimizerSettings, SFTSettings
from agentgym_rl.transport.broadcast import whole_state
from agentgym_rl.types import Sample

pytestmark = pytest.mark.timeout(900)

WAYS: dict[str, dict[str, Any]] = {
    "from meta": {},
    "reduce once": {"reduce_once": True},
    "on the host": {"offload": True},
    "two copies": {"shard_ranks": 2},
    "two copies, reduce once": {"shard_ranks": 2, "reduce_once": True},
}
"""Options of the ranks."""
HOST = {"offload_activations": True, "offload_moments": True, "checkpoint_activations": True}
LESSONS = [Sample([i, *range(2, 9), i + 1], [False] * 4 + [True] * 5) for i in range(1, 12)]


def write_model(folder: Path, *, tied: bool = False, dtype: torch.dtype = torch.float32, files: str = "20KB") -> None:
    model = tiny_model(3)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.to(dtype).save_pretrained(folder, max_shard_size=files)
    build_tokenizer(["up down"]).save_pretrained(folder)


def lessons_on(ranks: Ranks, folder: Path, **changes: Any) -> Any:
    """Return the metrics of two updates on a model that ranks load, and its weights."""
    model, _ = load_model(str(folder), device="cpu", dtype=torch.float32, ranks=ranks)
    imitator = Imitator(model, OptimizerSettings(**SGD_LIKE | {"micro_batch_tokens": 20} | changes), 2, ranks)
    metrics = [imitator.imitate(LESSONS) for _ in range(2)]
    if ranks.size > 1:
        own = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
        assert own <= model.num_parameters() / 1.9, "a rank holds its part alone"
    return metrics, {name: value.clone() for name, value in whole_state(model)}


def all_ways(ranks: Ranks, folder: Path, models: dict[str, Path]) -> dict[str, Any]:
    torch.set_num_threads(1)
    ways = {name: way for name, way in WAYS.items() if ranks.size == 4 or "shard_ranks" not in way}
    found = {name: lessons_on(ProcessRanks(**way), models["untied"]) for name, way in ways.items()}
    found["host activations and moments"] = lessons_on(ProcessRanks(), models["untied"], **HOST)
    found["tied"] = lessons_on(ProcessRanks(), models["tied"])
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for name in ("untied", "tied"):
        write_model(folder / name, tied=name == "tied")
    return {name: folder / name for name in ("untied", "tied")}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_every_way_to_hold_a_model_learns_what_one_process_learns(
    size: int, models: dict[str, Path], tmp_path: Path
) -> None:
    expected = {name: lessons_on(SINGLE_PROCESS, models[name]) for name in models}
    assert expected["untied"][0][0]["loss"] != expected["untied"][0][1]["loss"]
    found = on_ranks(size, partial(all_ways, models=models), tmp_path)
    assert len(found) == (7 if size == 4 else 5)
    for name, result in found.items():
        assert_same(result, expected["tied" if name == "tied" else "untied"])


def test_an_empty_model_is_filled_as_transformers_loads_it(models: dict[str, Path]) -> None:
    for name, folder in models.items():
        model = make_empty(str(folder), torch.bfloat16)
        assert all(p.is_meta for p in model.parameters())
        fill(model, str(folder), "cpu")
        expected, _ = load_model(str(folder), device="cpu", dtype=torch.bfloat16)
        assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == (name == "tied")
        assert not any(p.is_meta for p in (*model.parameters(), *model.buffers()))
        state, buffers = model.state_dict(), dict(model.named_buffers())
        assert all(torch.equal(value, state[key]) for key, value in expected.state_dict().items())
        assert all(torch.equal(value, buffers[key]) for key, value in expected.named_buffers())


SIZES = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_key_value_heads": 1}
CONVERTED = {
    "pythia": GPTNeoXConfig(**SIZES),
    "experts": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8),
}
"""Families whose tensors transformers renames or joins as it loads them."""


def converted_on(ranks: Ranks, folder: Path, source: Path) -> dict[str, Any]:
    """Return the weights that ranks load, the loss of an update, and whether what they save is what they hold."""
    torch.set_num_threads(1)
    found = {}
    for name in CONVERTED:
        made = rank_of(ranks, source / name, "float32")
        made.load(str(source / name))
        loaded = dict(made.whole_state())
        made.make_trainer(LESSONS, SFT, 0)
        loss = made.step()["loss"]
        checkpoint = folder / f"{name}-saved"
        checkpoint.mkdir(exist_ok=True)
        made.save(str(checkpoint))
        made.finish_saving()
        torch.distributed.barrier()
        again, _ = load_model(str(checkpoint / "model"), device="cpu", dtype=torch.float32)
        found[name] = (loaded, loss, same(dict(made.whole_state()), dict(whole_state(again))))
    return found


def test_ranks_load_and_save_families_whose_tensors_transformers_converts(tmp_path: Path) -> None:
    expected = {}
    for name, config in CONVERTED.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(tmp_path / name)
        build_tokenizer(["up down"]).save_pretrained(tmp_path / name)
        files = load_file(tmp_path / name / "model.safetensors")
        assert files.keys() != model.state_dict().keys(), "the case that is tested"
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        expected[name] = weights, make_trainer(model, LESSONS, SFT, 0).step()["loss"]
    for name, (loaded, loss, saved) in on_ranks(2, partial(converted_on, source=tmp_path), tmp_path).items():
        assert same(loaded, expected[name][0])
        assert loss == pytest.approx(expected[name][1], rel=1e-5)
        assert saved


BROKEN = {
    "missing": r"its weights lack 1 tensors that config.json asks for, such as model.norm.weight",
    "extra": r"its files hold 1 tensors that config.json has no place for, such as value.weight: load and save",
    "shape": r"do not fit its config.json: model.norm.weight needs the shape \(16,\), got \(4,\)",
    "none": r"ranks read weights from \*.safetensors, and there are none",
}


@pytest.mark.parametrize("fault", BROKEN)
def test_files_that_do_not_fit_the_model_are_refused_in_one_line(fault: str, tmp_path: Path) -> None:
    write_model(tmp_path, files="1GB")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    if fault == "missing":
        del tensors["model.norm.weight"]
    tensors |= {"extra": {"value.weight": torch.ones(2)}, "shape": {"model.norm.weight": torch.ones(4)}}.get(fault, {})
    path.unlink()
    if fault != "none":
        save_file(tensors, path, {"format": "pt"})

    with pytest.raises(ConfigError, match=BROKEN[fault]) as caught:
        load_model(str(tmp_path), device="cpu", dtype=torch.float32, ranks=EmptyFirst())
    assert "\n" not in str(caught.value)


def rank_of(ranks: Ranks, folder: Path, dtype: str, **sections: Any) -> Rank:
    model = {"path": str(folder), "device": "cpu", "dtype": dtype}
    sections = {"environments": [{"name": "keydoor"}], "scale": {"learners": ranks.size}} | sections
    return Rank(Config.model_validate({"model": model, **sections}), ranks.rank, ranks.size)


PPO = {"rl": {"algorithm": "ppo", "kl_coef": 0.1}}
SFT = SFTSettings(epochs=9, batch_size=4, optimizer=OptimizerSettings(lr=1e-3))


def saved_in_background(ranks: Ranks, folder: Path, source: Path) -> Any:
    """Save while the next update is made; return the weights and masters at the time of saving, and the next losses."""
    torch.set_num_threads(1)
    found = {}
    for dtype in ("float32", "bfloat16"):
        made = rank_of(ranks, source, dtype, checkpoint={"background": True})
        made.make_untrained_model(str(source))
        made.make_trainer(LESSONS, SFT, 0)
        for _ in range(3):
            made.step()
        weights = {name: value.clone() for name, value in whole_state(made._model)}
        if ranks.rank == 0:
            (folder / dtype).mkdir()
        torch.distributed.barrier()
        made.save(str(folder / dtype))
        losses = [made.step()["loss"] for _ in range(2)]
        made.finish_saving()
        assert made.is_saved()
        torch.distributed.barrier()
        found[dtype] = {"weights": weights, "losses": losses}
        if dtype == "bfloat16":
            assert made._learner._optimizer._low, "masters are kept"
    return found


def resumed(ranks: Ranks, folder: Path, source: Path) -> Any:
    torch.set_num_threads(1)
    found = {}
    for dtype in ("float32", "bfloat16"):
        made = rank_of(ranks, source / dtype / "model", dtype)
        made.load(str(source / dtype / "model"))
        made.make_trainer(LESSONS, SFT, 0)
        weights = {name: value.clone() for name, value in whole_state(made._model)}
        assert made.restore(str(source / dtype), None)[0] == 3
        found[dtype] = {"weights": weights, "losses": [made.step()["loss"] for _ in range(2)]}
    return found


def test_a_checkpoint_written_in_the_background_is_resumed_by_any_number_of_ranks(
    models: dict[str, Path], tmp_path: Path
) -> None:
    for name in ("two", "four"):
        (tmp_path / name).mkdir()
    written = on_ranks(2, partial(saved_in_background, source=models["tied"]), tmp_path / "two")
    again = on_ranks(4, partial(resumed, source=tmp_path / "two"), tmp_path / "four")
    for dtype in ("float32", "bfloat16"):
        folder = tmp_path / "two" / dtype
        require_written(folder, shards=True)
        index = json.loads((folder / "model" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
        tolerance = 1e-5 if dtype == "float32" else 0.02
        assert again[dtype]["losses"] == pytest.approx(written[dtype]["losses"], rel=tolerance)
        model, _ = load_model(str(folder / "model"), device="cpu", dtype=getattr(torch, dtype))  # by transformers
        for loaded in (again[dtype]["weights"], dict(whole_state(model))):
            assert loaded.keys() == written[dtype]["weights"].keys()
            assert all(torch.equal(value, loaded[name]) for name, value in written[dtype]["weights"].items())


def learned_alone(dtype: str, source: Path) -> Any:
    """Return the state and the model of three updates in one process, and the next losses."""
    model, tokenizer = load_model(str(source), device="cpu", dtype=getattr(torch, dtype))
    trainer = make_trainer(model, LESSONS, SFT, 0)
    for _ in range(3):
        trainer.step()
    state, weights = on_host(trainer.state()), on_host(model.state_dict())
    return state, weights, [trainer.step()["loss"] for _ in range(2)], model, tokenizer


def resumed_from_alone(ranks: Ranks, folder: Path, source: Path, scales: list[dict[str, Any]]) -> Any:
    torch.set_num_threads(1)
    found = {}
    for dtype in ("float32", "bfloat16"):
        for number, scale in enumerate(scales):
            state = torch.load(source / dtype / "state.pt", weights_only=True)
            made = rank_of(ranks, source / dtype, dtype, scale={"learners": ranks.size, **scale})
            made.load(str(source / dtype))
            made.make_trainer(LESSONS, SFT, 0)
            assert made.restore(str(source / dtype), state)[0] == 3
            own = [t.to_local() for t in tensors_of(made._learner.state()) if isinstance(t, DTensor)]
            assert own
            assert all(t.untyped_storage().nbytes() == t.nbytes for t in own), "whole tensors are not kept"
            found[f"{dtype} {number}"] = [made.step()["loss"] for _ in range(2)]
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_resume_what_one_process_saved(size: int, models: dict[str, Path], tmp_path: Path) -> None:
    expected = {}
    for dtype in ("float32", "bfloat16"):
        state, weights, expected[dtype], model, tokenizer = learned_alone(dtype, models["untied"])
        export(model, tokenizer, tmp_path / dtype, weights)
        torch.save(state, tmp_path / dtype / "state.pt")
    scales = [{}, {"offload": True}, {"shard_ranks": size // 2}]
    found = on_ranks(size, partial(resumed_from_alone, source=tmp_path, scales=scales), tmp_path)
    assert len(found) == 6
    for name, losses in found.items():
        dtype = name.split()[0]
        assert losses == pytest.approx(expected[dtype], rel=1e-5 if dtype == "float32" else 0.02), name


def learned_with_critic(ranks: Ranks, folder: Path, source: Path) -> dict[str, bool]:
    """Return whether a rank's critic starts as the policy's decoder with a head of zeros, in both types."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        made = rank_of(ranks, source, dtype, **PPO)
        made.load(str(source), str(source))
        critic = dict(whole_state(made._learner.critic.model))
        policy = dict(whole_state(made._model))
        same = [torch.equal(value, critic[f"decoder.{n[6:]}"]) for n, value in policy.items() if n.startswith("model.")]
        found[dtype] = all(same) and len(same) > 10 and not critic["head.weight"].any()
        sample = Sample([1, 2, 3], [False, True, True], [-1.0, -1.0])
        made.score([sample], False)
        found[f"{dtype} values"] = sample.values == [0.0, 0.0]
    return found


def test_the_critic_of_ranks_starts_as_a_copy_of_the_policy(models: dict[str, Path], tmp_path: Path) -> None:
    assert set(on_ranks(2, partial(learned_with_critic, source=models["untied"]), tmp_path).values()) == {True}


def reward_models(ranks: Ranks, folder: Path, sources: dict[str, Path]) -> dict[str, bool]:
    """Return whether reward models on ranks train the loaded model, and whether they are resumed as they were saved."""
    found = {}
    settings = RewardModelSettings(batch_size=2, epochs=2, optimizer=OptimizerSettings(lr=1e-2), sample_groups=1)
    samples = [Sample([1, 2, 3, 4 + i], [False, True, True, True], trajectory_id=str(i)) for i in range(4)]
    pairs = [Preference(a, b, 0.0, 0.0) for a, b in itertools.pairwise(samples)]
    for kind in ("tied", "untied"):
        made, again = (rank_of(ranks, sources[kind], "float32") for _ in range(2))
        made.load(str(sources[kind]))
        loaded = dict(made.whole_state())
        made.make_trainer(pairs, settings, 0)
        found[f"{kind}: starts as loaded"] = same(loaded, dict(made.whole_state()))
        for _ in range(3):
            made.step()
        found[f"{kind}: moves"] = not same(loaded, dict(made.whole_state()))
        (folder / kind).mkdir(exist_ok=True)
        made.save(str(folder / kind))
        made.finish_saving()
        again.load(str(folder / kind / "model"))
        again.make_trainer(pairs, settings, 0)
        again.restore(str(folder / kind), None)
        found[f"{kind}: resumes"] = same(dict(made.whole_state()), dict(again.whole_state()))
        found[f"{kind}: scores"] = made.scores(samples) == again.scores(samples) != [0.0] * 4
    return found


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def test_a_reward_model_on_ranks_starts_from_a_sharded_model_and_resumes(
    models: dict[str, Path], tmp_path: Path
) -> None:
    found = on_ranks(2, partial(reward_models, sources=models), tmp_path)
    assert [name for name, holds in found.items() if not holds] == []


def old_checkpoint(folder: Path) -> Path:
    with tarfile.open(Path(__file__).parents[1] / "data" / "bf16_checkpoint_of_two_ranks.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "old"


OLD_LESSONS = [Sample([1, 2, 3, 4], [False, True, True, True]), Sample([4, 3, 2, 1], [False, True, True, True])]
OLD_LOSSES = [3.181444525718689, 3.1704559326171875]
"""The next two losses of the ranks that wrote the checkpoint."""


def resumed_from_old(ranks: Ranks, folder: Path, source: Path) -> list[float]:
    made = rank_of(ranks, source / "model", "bfloat16")
    made.load(str(source / "model"))
    made.make_trainer(OLD_LESSONS, SFTSettings(epochs=6, batch_size=2, optimizer=OptimizerSettings(lr=1e-4)), 0)
    made.restore(str(source), None)
    return [made.step()["loss"] for _ in range(2)]


def test_a_bf16_checkpoint_of_ranks_of_an_earlier_version_loads(tmp_path: Path) -> None:
    source = old_checkpoint(tmp_path)
    assert on_ranks(2, partial(resumed_from_old, source=source), tmp_path) == pytest.approx(OLD_LOSSES, rel=1e-3)
    model, _ = load_model(str(source / "model"), device="cpu", dtype=torch.bfloat16)
    alone = Imitator(model, OptimizerSettings(lr=1e-4), 6)
    state = load_shards(source / "shards", lambda name, shape: None)
    masters = state["masters"]
    alone.restore(state)
    for name, master in zip(alone._names, alone._optimizer.master(), strict=True):
        assert torch.equal(master, masters[name]), "every bit of the master weights"
    assert alone.imitate(OLD_LESSONS)["loss"] == pytest.approx(OLD_LOSSES[0], rel=1e-3)


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 5, (torch.bfloat16,) * 5, (torch.bfloat16, torch.float32) * 3])
def test_moments_pass_through_the_device_in_parts(dtypes: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of a part are copies, as on another device, and come back to the host."""
    monkeypatch.setattr("agentgym_rl.training.device.optimizer.PART_PARAMETERS", 40)
    largest, present = 0, 0
    move = torch.Tensor.to

    def counted(tensor: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal largest, present
        copied = move(tensor, *arguments, **options).clone()
        if arguments and isinstance(arguments[0], torch.device):
            present += tensor.numel()
            largest = max(largest, present)
            weakref.finalize(copied, freed, tensor.numel())
        return copied

    def freed(count: int) -> None:
        nonlocal present
        present -= count

    made = []
    for offload in (False, True):
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(4 + i, 5).to(dtype)) for i, dtype in enumerate(dtypes)]
        settings = OptimizerSettings(lr=0.1, offload_moments=offload)
        optimizer = make_optimizer(parameters, settings)
        if offload:
            monkeypatch.setattr(torch.Tensor, "to", counted)
        for _ in range(3):
            for parameter in parameters[1:]:  # the first is not trained in these steps
                parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
            step(optimizer, settings)
        monkeypatch.setattr(torch.Tensor, "to", move)
        made.append([*parameters, *tensors_of(optimizer.state_dict())])
    assert len(made[0]) == len(made[1]) > len(dtypes)
    assert all(torch.equal(plain, passed) for plain, passed in zip(*made, strict=True))
    assert 0 < largest <= 3 * 45, "three numbers for each parameter of a part"


def tensors_of(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    items = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_of(item)]


def test_host_activations_leave_weights_where_they_are() -> None:
    weight, x = torch.nn.Parameter(torch.randn(64, 64)), torch.randn(128, 64, requires_grad=True)
    packed: list[Any] = []

    class Counting(HostActivations):
        def __init__(self) -> None:
            super().__init__()
            pack = self.pack_hook
            self.pack_hook = lambda tensor: packed.append(pack(tensor)) or packed[-1]

    with Counting():
        loss = torch.tanh(x @ weight.t()).sum()
    loss.backward()
    moved = [saved for saved in packed if isinstance(saved, tuple)]
    assert {tuple(host.shape) for _, host in moved} == {(128, 64)}, "the input and the output, not the weight"
    x2 = x.detach().requires_grad_()
    torch.tanh(x2 @ weight.detach().t()).sum().backward()
    assert torch.equal(x.grad, x2.grad)
