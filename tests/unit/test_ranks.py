"""Two and four ranks learn the same as one process: losses, metrics and parameters, for every way to split."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes_for_tests import CONTEXT, exit_code_if_preloaded
from ranks_for_tests import CASES, ON_FOUR, alone, everything, learner, on_ranks, steps, weights
from torch.distributed.tensor import DTensor, distribute_tensor
from training_for_tests import tiny_model

from agentgym_rl.config import Config
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.backend_ray import RayBackend
from agentgym_rl.run.rank import Rank
from agentgym_rl.scale.shards import ShardWriter, like_learner, load_shards, require_written
from agentgym_rl.training.batch import Batch, shuffled_parts, split_batch
from agentgym_rl.training.ranks import SINGLE_PROCESS, Ranks, balanced_shares
from agentgym_rl.training.scratch import build_tokenizer
from agentgym_rl.training.settings import OptimizerSettings, SFTSettings
from agentgym_rl.transport.broadcast import whole_state
from agentgym_rl.types import Sample

pytestmark = pytest.mark.timeout(900)  # four processes on two cores, and whatever else they do

TOLERANCES = {"bf16, sharded": 0.1, "bf16, whole copies": 0.1, "bf16, lora": 0.01, "bf16, lora, ppo": 0.01}
"""An update of all weights follows the signs of gradients; those that rounding turns move by 0.002 at once."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return alone(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("two")
    return on_ranks(2, everything, folder), folder


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("four")
    return on_ranks(4, everything, folder), folder


def assert_same(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    metrics, parameters = found
    expected_metrics, expected_parameters = wanted
    assert [m.keys() for m in metrics] == [m.keys() for m in expected_metrics]
    for mine, theirs in zip(metrics, expected_metrics, strict=True):
        for name, value in theirs.items():
            assert mine[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
    assert parameters.keys() == expected_parameters.keys()
    for name, value in expected_parameters.items():
        torch.testing.assert_close(
            parameters[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("size", "name"),
    [
        *(("two", name) for name in ("sft", "dpo", "reward_model", *CASES)),
        *(pytest.param("four", name, marks=pytest.mark.long) for name in ("sft", "dpo", "reward_model", *ON_FOUR)),
    ],
)
def test_ranks_learn_what_one_process_learns(size: str, name: str, expected: Any, request: Any) -> None:
    found, _ = request.getfixturevalue(size)
    assert_same(found[name], expected[name], TOLERANCES.get(name, 1e-5))


def differences_after_updates(ranks: Any, folder: Path) -> dict[str, float]:
    """Return how far the trained parameters of any rank are from the first one's after updates, at most, by case."""
    found = {}
    for name in ("bf16, whole copies", "bf16, lora", "bf16, lora, ppo"):
        ranks.shard = False
        made = learner(name, ranks)
        before = [p.detach().clone() for p in made._parameters]
        steps(name, made, 2)
        assert not all(torch.equal(p, b) for p, b in zip(made._parameters, before, strict=True)), "nothing learned"
        updaters = [made, made.critic] if made.critic else [made]
        trained = torch.cat([p.detach().float().flatten() for updater in updaters for p in updater._parameters])
        parts = [torch.empty_like(trained) for _ in range(ranks.size)]
        torch.distributed.all_gather(parts, trained)
        found[name] = max(float((part - parts[0]).abs().max()) for part in parts[1:])
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_hold_equal_parameters_in_bf16_after_several_micro_batches(size: int, tmp_path: Path) -> None:
    assert set(on_ranks(size, differences_after_updates, tmp_path).values()) == {0.0}


def error_if_ranks_differ(ranks: Any, folder: Path) -> str:
    ranks.shard = False
    equal, torn = torch.ones(4, dtype=torch.bfloat16), torch.full((2,), float("nan"))
    ranks.require_equal([("equal", equal), ("NaN on both", torn)])
    equal[2] += 0.01 * ranks.rank
    with pytest.raises(RuntimeError) as caught:
        ranks.require_equal([("NaN on both", torn), ("weight", equal)])
    return str(caught.value)


def test_ranks_that_hold_different_parameters_end_the_run(tmp_path: Path) -> None:
    message = on_ranks(2, error_if_ranks_differ, tmp_path)
    assert message.startswith("1 of 2 trained parameters differ between the 2 learner ranks after an update")
    assert "such as weight: " in message


def test_the_compared_updates_are_not_trivial(expected: Any) -> None:
    """Several updates change the weights, and some clip the gradient."""
    for name in CASES:
        metrics, _ = expected[name]
        assert all(m["grad/norm"] > 0 for m in metrics), name
        assert metrics[0]["loss"] != metrics[1]["loss"], name
    assert any(m["grad/norm"] > 0.5 for m in expected["grpo"][0])


def resume(ranks: Ranks, folder: Path, source: Path) -> Any:
    """A ppo learner from what other ranks wrote, and its third step."""
    made = learner("ppo", SINGLE_PROCESS if ranks.size == 1 else ranks)
    load_weights(made.model, torch.load(source / "policy.pt", weights_only=True))
    made.restore(load_shards(source / "shards", like_learner(made)))
    return steps("ppo", made, 1), weights(made)


@torch.no_grad()
def load_weights(model: Any, state: dict[str, torch.Tensor]) -> None:
    """Copy whole tensors into a model in place. Each rank copies its shard."""
    own = model.state_dict()
    for name, value in state.items():
        target = own[name]
        if isinstance(target, DTensor):
            value = distribute_tensor(value.to(target.device, target.dtype), target.device_mesh, target.placements)
        target.copy_(value)


@pytest.mark.parametrize(
    ("writers", "readers"),
    [("two", 1), *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in (("two", 4), ("four", 2), ("four", 1)))],
)
def test_a_sharded_checkpoint_loads_at_another_world_size(
    writers: str, readers: int, expected: Any, request: Any, tmp_path: Path
) -> None:
    _, source = request.getfixturevalue(writers)
    found = (
        resume(SINGLE_PROCESS, tmp_path, source)
        if readers == 1
        else on_ranks(readers, partial(resume, source=source), tmp_path)
    )
    assert_same(found, expected["ppo, another step"])


def test_shards_on_a_disk_that_the_driver_cannot_read_are_refused(two: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere does not exist on .*: the run directory must be on a file system"):
        ShardWriter().save_shards(tmp_path / "nowhere" / "shards", {"weight": torch.ones(2)})
    shutil.copytree(two[1] / "shards", tmp_path / "shards")
    with pytest.raises(ConfigError, match=r"model/config.json needs at least 1 bytes that ranks wrote, got 0"):
        require_written(tmp_path, shards=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    require_written(tmp_path, shards=True)
    of_the_second = next((tmp_path / "shards" / "tensors").glob("__1_*.distcp"))
    of_the_second.write_bytes(of_the_second.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=f"{of_the_second.name} needs .* all nodes see"):
        require_written(tmp_path, shards=True)
    for lost in (of_the_second, of_the_second.with_name(".metadata"), tmp_path / "shards" / "rest.pt"):
        lost.unlink()
        with pytest.raises(ConfigError, match=f"{lost.name} needs at least .* got 0"):
            require_written(tmp_path, shards=True)


class Elsewhere:
    """Ranks that write to the disk of another node."""

    def on_all(self, method: str, *folders: str) -> None:
        assert method in ("save", "finish_saving")
        assert all(Path(folder).is_dir() for folder in folders)


def test_a_checkpoint_written_on_another_disk_does_not_replace_the_last_one(tmp_path: Path) -> None:
    (tmp_path / "step_000001").mkdir()
    cluster = RayBackend.__new__(RayBackend)
    cluster._app, cluster.learner, cluster._saving = Elsewhere(), None, None
    cluster._config = Config.model_validate({"model": {"path": "anywhere"}, "environments": [{"name": "keydoor"}]})
    with pytest.raises(ConfigError, match=r"config.json needs at least 1 bytes .*, got 0.* all nodes see"):
        cluster.save(tmp_path, 2, {}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def published_names(ranks: Ranks, folder: Path) -> list[str]:
    """Return the names published by a learner with adapters for policy, reference and critic, after its warm start."""
    tiny_model().save_pretrained(folder / "model")
    words = build_tokenizer(["up down"])
    words.save_pretrained(folder / "start")
    words.save_pretrained(folder / "model")
    config = Config.model_validate(
        {
            "model": {"path": str(folder / "model"), "lora": {"rank": 2}, "device": "cpu"},
            "environments": [{"name": "keydoor"}],
            "warm_start": {},
            "rl": {"algorithm": "ppo", "kl_coef": 0.1},
            "scale": {"learners": ranks.size},
        }
    )
    made = Rank(config, ranks.rank, ranks.size)
    made.make_untrained_model(str(folder / "start"))
    lesson = Sample([1, 2, 3, 4], [False, True, True, True])
    assert made.make_trainer([lesson], SFTSettings(optimizer=OptimizerSettings(lr=0.1)), 0) == 1
    assert made.step()["grad/norm"] > 0
    made.export(str(folder / "start"))
    made.load(str(folder / "start"), str(folder / "start"))
    moved = [tensor for name, tensor in made.whole_state() if "lora_B" in name]
    assert any(tensor.any() for tensor in moved), "what was imitated is what RL starts from"
    return [name for name, _ in made.whole_state()]


def test_engines_get_the_policys_adapters_and_not_those_of_critic_or_reference(tmp_path: Path) -> None:
    names = on_ranks(1, published_names, tmp_path)
    assert any(".default." in name for name in names)
    assert not [name for name in names if ".reference." in name or ".critic." in name]


def resumed_in_bf16(ranks: Ranks, folder: Path) -> dict[str, dict[str, float]]:
    """Return the differences of parameters between a learner and one that loaded its checkpoint; "rounds" is of a
    checkpoint between two."""
    tiny_model().bfloat16().save_pretrained(folder / "model")
    build_tokenizer(["up down"]).save_pretrained(folder / "model")
    lessons = [Sample([1, 2, 3, 4], [False, True, True, True])]
    settings = SFTSettings(epochs=4, optimizer=OptimizerSettings(lr=1e-5))
    found: dict[str, dict[str, float]] = {}
    for case in ("sharded", "rounds", "lora"):
        model = {"path": str(folder / "model"), "device": "cpu", "dtype": "bfloat16"}
        model |= {"lora": {"rank": 2}} if case == "lora" else {}
        sections = {"environments": [{"name": "keydoor"}], "scale": {"learners": ranks.size}}
        config = Config.model_validate({"model": model, **sections})
        made, again = (Rank(config, ranks.rank, ranks.size) for _ in range(2))
        made.make_untrained_model(str(folder / "model"))
        made.make_trainer(lessons, settings, 0)
        for _ in range(3):
            made.step()
        if case == "rounds":
            made.release_trainer()
        (folder / case).mkdir()
        made.save(str(folder / case))
        made.finish_saving()
        require_written(folder / case, shards=case != "rounds")
        again.load(str(folder / case / "model"))
        if case != "rounds":
            again.make_trainer(lessons, settings, 0)
            assert again.restore(str(folder / case), None) == (3, 0.0)
        loaded = dict(whole_state(again._model))
        found[case] = {name: float((t - loaded[name]).abs().max()) for name, t in whole_state(made._model)}
    return found


def test_a_bf16_checkpoint_keeps_updates_too_small_for_bf16(tmp_path: Path) -> None:
    for case, apart in on_ranks(1, resumed_in_bf16, tmp_path).items():
        assert max(apart.values()) == 0.0, case


def test_processes_are_forked_with_everything_imported() -> None:
    """Without this, each process of every test takes seconds to start."""
    process = CONTEXT.Process(target=exit_code_if_preloaded)
    process.start()
    process.join(300)
    assert process.exitcode == 0


def test_shares_are_balanced_and_each_sample_is_in_exactly_one() -> None:
    shares = balanced_shares([9, 1, 1, 1, 5, 4], 2)
    assert sorted(i for share in shares for i in share) == [0, 1, 2, 3, 4, 5]
    assert [sum([9, 1, 1, 1, 5, 4][i] for i in share) for share in shares] in ([11, 10], [10, 11])
    assert balanced_shares([3], 3) == [[0], [], []]


def test_a_batch_is_split_within_each_mini_batch() -> None:
    samples = [Sample([0] * n, [False] * n, trajectory_id=str(n)) for n in range(2, 12)]
    batch = Batch(samples=samples, weights=[float(n) for n in range(10)], groups=3)
    shares, indices = split_batch(batch, 3, 2, seed=5)
    assert sorted(i for some in indices for i in some) == list(range(10))
    for number, part in enumerate(shuffled_parts(10, 2, 5)):
        taken = [indices[r][i] for r in range(3) for i in shares[r].parts[number]]
        assert sorted(taken) == sorted(part)
    for share, known in zip(shares, indices, strict=True):
        assert [s.trajectory_id for s in share.samples] == [samples[i].trajectory_id for i in known]
        assert share.weights == [batch.weights[i] for i in known]
