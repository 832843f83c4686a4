"""A run on a two-node Ray cluster is the run of one process until rounding turns a token, also when an engine is
killed; it is resumed elsewhere.

`make faults` has the rest of what can go wrong.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cluster_for_tests import (
    SCALE,
    SMALL,
    Command,
    ForkedCommand,
    duplicates,
    events_of,
    leaked,
    steps_of,
    tokens,
    two_nodes,
    workers,
)
from judge_for_tests import judge_server
from runs_for_tests import comparable_metrics, comparable_trajectories, final_weights, quiet, trainer_state
from safetensors.torch import load_file

from agentgym_rl.config import Config
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.backend_ray import RayBackend
from agentgym_rl.scale.folders import require_same, require_shared
from agentgym_rl.training.checkpoint import list_checkpoints

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(900)
LONG = "rl.steps=400"
AGENTEVOL = (Path(__file__).parents[2] / "recipes" / "keydoor" / "tiny-agentevol.toml").read_text()
NIM = (Path(__file__).parents[2] / "recipes" / "nim" / "tiny.toml").read_text()
KEYDOOR = Path(__file__).parents[2] / "recipes" / "keydoor"
OFFLINE = {
    "dagger": ("dagger.rounds=1", "dagger.tasks=8", "sft.batch_size=16"),
    "reward_model": ("reward_model.batch_size=8", "reward_model.optimizer={lr=0.001}"),
}
GENTLE = (
    "threads=1",
    "warm_start.episodes=128",
    "warm_start.sft.epochs=6",
    "warm_start.sft.optimizer={lr=0.001}",  # at a higher one rounding alone makes another model of it
    "sft.optimizer={lr=0.0003}",
    "sft.batch_size=6",
    "agentevol.min_reward=0",
    "checkpoint.every=3",
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    run = ForkedCommand(folder)
    assert run.wait() == 0, run.output.read_text()
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with two_nodes() as made:
        yield made


@pytest.fixture(scope="module")
def stopped(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which an engine was killed and the driver then told to stop."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    options = (LONG, "checkpoint.background=true", "scale.reduce_gradients=update")
    run = Command(folder, *SCALE, f"scale.address={cluster.address}", *options)
    try:
        run.until(lambda: (folder / "trajectories" / "eval_000000.jsonl").exists())
        os.kill(workers("engine")[0], signal.SIGKILL)
        run.until(lambda: "engine_lost" in events_of(folder) and steps_of(folder)[-1:] >= [4])
        assert run.stop() == 0, run.output.read_text()
    finally:
        run.end()
    return folder


@pytest.mark.long
def test_it_plays_and_learns_what_one_process_does(alone: Path, stopped: Path) -> None:
    """Token for token on two learners, two engines and two hosts, with an engine lost on the way. In four steps: sums
    over ranks round differently, which one day turns a token."""
    expected, found = tokens(alone), tokens(stopped)
    for name in ("eval_000000.jsonl", *(f"step_{step:06d}.jsonl" for step in (1, 2, 3, 4))):
        assert found[name] == expected[name], name
    wanted = comparable_metrics(alone)
    assert any(row["success/mean"] > 0 for row in wanted)
    assert all(row["grad/norm"] > 0 for row in wanted)
    for mine, theirs in zip(comparable_metrics(stopped), wanted, strict=False):
        assert mine.keys() == theirs.keys()
        for name in ("loss", "grad/norm", "kl/reference", "entropy/mean", "reward/mean", "samples", "staleness/max"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


@pytest.mark.long
def test_the_log_records_the_events_and_no_process_is_left(stopped: Path) -> None:
    assert events_of(stopped)[0] == "engine_lost"
    after = events_of(stopped)[events_of(stopped).index("stopped") + 1 :]
    assert after in ([], ["engine_started"]), "the new engine may come up meanwhile"
    assert "died" in (stopped.parent / "run.out").read_text()
    assert json.loads((stopped / "status.json").read_text())["state"] == "stopped"
    assert steps_of(stopped) == list(range(1, len(steps_of(stopped)) + 1))
    assert duplicates(stopped) == 0
    assert leaked() == 0


@pytest.mark.long
def test_a_checkpoint_of_several_ranks_is_resumed_by_one_process(stopped: Path) -> None:
    last = list_checkpoints(stopped / "checkpoints")[-1]
    step = int(last.name.rpartition("_")[2])
    assert step == steps_of(stopped)[-1]
    assert (last / "shards").is_dir()
    before = final_weights(stopped)
    run = ForkedCommand(stopped, f"rl.steps={step + 1}", "--resume")
    assert run.wait() == 0, run.output.read_text()
    assert steps_of(stopped) == list(range(1, step + 2))
    state = torch.load(list_checkpoints(stopped / "checkpoints")[-1] / "trainer.pt", weights_only=True)
    assert state["learner"]["updates"] == 2 * (step + 1)
    after = final_weights(stopped)
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.long
def test_the_death_of_the_shared_state_ends_a_run_like_that_of_a_rank(cluster: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = Command(folder, *SCALE, f"scale.address={cluster.address}", LONG)
    try:
        run.until_step(1)
        (shared_state,) = workers("shared_state")
        os.kill(shared_state, signal.SIGKILL)
        assert run.wait() == 1, run.output.read_text()
    finally:
        run.end()
    said = run.output.read_text()
    assert "Traceback" not in said, said
    assert "agentgym-rl: the actor that tells engines of new weights died" in said
    assert "run the same command with --resume" in " ".join(said.split())
    assert events_of(folder) == ["worker_lost"]
    assert leaked() == 0
    last = list_checkpoints(folder / "checkpoints")[-1]
    again = ForkedCommand(folder, f"rl.steps={int(last.name.rpartition('_')[2]) + 1}", "--resume")
    assert again.wait() == 0, again.output.read_text()
    assert steps_of(folder) == list(range(1, steps_of(folder)[-1] + 1))


@pytest.mark.long
async def test_folders_that_differ_on_another_node_are_refused(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentgym_rl.scale.ray_app import on_other_nodes

    monkeypatch.chdir(tmp_path)
    own = Path("/proc/self/cwd")  # a folder that every process has, and each another one
    recipe = {"model": {"path": "no/model", "device": "cpu"}, "environments": [{"name": "keydoor"}]}
    config = Config.model_validate(recipe | {"scale": {"address": cluster.address, "learners": 1, "engines": 1}})
    context = SimpleNamespace(config=config, console=quiet(), log=SimpleNamespace(root=own))
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        with pytest.raises(ConfigError, match=r"must see the run directory /proc/self/cwd, .* does not: set run_dir"):
            await RayBackend.start(context, Path("no/model"))  # type: ignore[arg-type]
        ask = partial(on_other_nodes, 300.0)
        await require_shared(tmp_path, ask)
        assert os.listdir(tmp_path) == []
        (tmp_path / "config.json").write_text("{}")
        await require_same(tmp_path, ask)
        with pytest.raises(ConfigError, match=r"must see the model in /proc/self/cwd, .* has another or none"):
            await require_same(own, ask)
    finally:
        ray.shutdown()


@pytest.mark.long
def test_agentevol_on_a_cluster_matches_one_process_and_is_resumed_by_one(cluster: Any, tmp_path: Path) -> None:
    """A warm start, exploration, imitation from the base again; told to stop in a later round."""
    whole = ForkedCommand(tmp_path / "alone" / "run", *GENTLE, text=AGENTEVOL)
    run = Command(
        tmp_path / "cluster" / "run",
        *(*SCALE, f"scale.address={cluster.address}", *GENTLE, "agentevol.rounds=200"),
        text=AGENTEVOL,
    )
    try:
        run.until_step(10)  # held-out items were played after the second round
        assert run.stop() == 0, run.output.read_text()
    finally:
        run.end()
    assert whole.wait() == 0, whole.output.read_text()
    assert leaked() == 0
    found, expected = tokens(run.folder), tokens(whole.folder)
    assert {name for name in expected if "step" in name}, "something was explored"
    for name, episodes in expected.items():
        assert found[name] == episodes, name
    for mine, theirs in zip(comparable_metrics(run.folder), comparable_metrics(whole.folder), strict=False):
        assert mine.keys() == theirs.keys()
        for name in ("loss", "grad/norm", "entropy/mean", "lr", "round", "samples", "tokens/trained"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-2), name
    step = steps_of(run.folder)[-1]
    assert list_checkpoints(run.folder / "checkpoints")[-1].name == f"step_{step:06d}"
    rounds_done = trainer_state(run.folder)["rounds_done"]
    again = ForkedCommand(run.folder, *GENTLE, f"agentevol.rounds={rounds_done + 1}", "--resume", text=AGENTEVOL)
    assert again.wait() == 0, again.output.read_text()
    steps = steps_of(run.folder)
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > step
    summary = json.loads((run.folder / "summary.json").read_text())
    assert [one["round"] for one in summary["rounds"]] == list(range(1, rounds_done + 3))


@pytest.mark.long
def test_judged_rewards_on_a_cluster_match_one_process(cluster: Any, tmp_path: Path) -> None:
    """The driver judges: the verdicts of the first step and the update on them are the same. Later, rounding over ranks
    may turn a token."""
    with judge_server("turn left") as server:
        rewards = 'rewards=[{kind="ranking", rubric="Turn left."}, {kind="length", tokens=2, weight=0.5}]'
        judged = (rewards, f'judge={{url="{server.url}", model="judge"}}', "rl.steps=2")
        whole = ForkedCommand(tmp_path / "alone" / "run", *judged)
        assert whole.wait() == 0, whole.output.read_text()
        run = ForkedCommand(tmp_path / "cluster" / "run", *SCALE, f"scale.address={cluster.address}", *judged)
        assert run.wait() == 0, run.output.read_text()
    assert tokens(run.folder)["step_000001.jsonl"] == tokens(whole.folder)["step_000001.jsonl"]
    mine, theirs = (
        {name: [row.get("verdicts") for row in rows] for name, rows in comparable_trajectories(folder).items()}
        for folder in (run.folder, whole.folder)
    )
    assert mine["step_000001.jsonl"] == theirs["step_000001.jsonl"]
    assert all(len(verdicts) == 3 for verdicts in mine["step_000002.jsonl"])
    found, expected = comparable_metrics(run.folder)[0], comparable_metrics(whole.folder)[0]
    assert found["judged/ranking"] > 0
    for name in ("judged/ranking", "judged/length", "judged/total", "judged/failed", "loss", "grad/norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name


@pytest.mark.long
def test_trees_on_a_cluster_match_one_process(cluster: Any, tmp_path: Path) -> None:
    tree = ("rl.tree={roots=2, branches=1, depth=1}", "rl.steps=1")
    whole = ForkedCommand(tmp_path / "alone" / "run", *tree)
    assert whole.wait() == 0, whole.output.read_text()
    run = ForkedCommand(tmp_path / "cluster" / "run", *SCALE, f"scale.address={cluster.address}", *tree)
    assert run.wait() == 0, run.output.read_text()
    mine, theirs = (comparable_trajectories(folder)["step_000001.jsonl"] for folder in (run.folder, whole.folder))
    assert any(row.get("parent") for row in mine)
    assert [(row["id"], row.get("parent")) for row in mine] == [(row["id"], row.get("parent")) for row in theirs]
    assert tokens(run.folder)["step_000001.jsonl"] == tokens(whole.folder)["step_000001.jsonl"]


@pytest.mark.long
def test_a_league_on_a_cluster_matches_one_process_and_is_resumed(cluster: Any, tmp_path: Path) -> None:
    """Hosts play past selves, of which the ranks write the snapshots. Later, rounding over ranks may turn a token."""
    league = ("threads=1", "eval.episodes=4", "rl.groups_per_step=4", "checkpoint.every=1")
    whole = ForkedCommand(tmp_path / "alone" / "run", *league, "rl.steps=2", text=NIM)
    assert whole.wait() == 0, whole.output.read_text()
    spread = (*SCALE, f"scale.address={cluster.address}", *league)
    for steps in (("rl.steps=2",), ("rl.steps=3", "--resume")):
        run = ForkedCommand(tmp_path / "cluster" / "run", *spread, *steps, text=NIM)
        assert run.wait() == 0, run.output.read_text()
    for name in ("eval_000000.jsonl", "step_000001.jsonl"):
        assert tokens(run.folder)[name] == tokens(whole.folder)[name], name
    rows, expected = comparable_metrics(run.folder), comparable_metrics(whole.folder)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for name in ("elo/learner", "loss", "grad/norm", "reward/mean", "tokens/sampled"):
        assert rows[0][name] == pytest.approx(expected[0][name], rel=1e-3, abs=1e-5), name
    assert len({row["elo/learner"] for row in rows}) == 3
    episodes = [row for name, rows in comparable_trajectories(run.folder).items() if "step" in name for row in rows]
    assert {row["player"] for row in episodes} > {"learner", "past@0"}
    assert max(path.name for path in (run.folder / "league").iterdir()) == "step_000003"
    assert trainer_state(run.folder)["ratings"]["learner"] == rows[-1]["elo/learner"]
    assert leaked() == 0


@pytest.mark.long
def test_asynchronous_groups_on_a_cluster_stop_resume_and_keep_their_bound(cluster: Any, tmp_path: Path) -> None:
    asynchronous = (*SCALE, f"scale.address={cluster.address}", "scale.layout=disaggregated", "rl.max_staleness=2")
    run = Command(tmp_path / "run", *asynchronous, LONG)
    try:
        run.until_step(4)
        assert run.stop() == 0, run.output.read_text()
    finally:
        run.end()
    step = steps_of(run.folder)[-1]
    assert len(trainer_state(run.folder)["rl"]["queued"]) > 0
    again = ForkedCommand(run.folder, *asynchronous, f"rl.steps={step + 3}", "--resume")
    assert again.wait() == 0, again.output.read_text()
    assert steps_of(run.folder) == list(range(1, step + 4))
    ages = [row["staleness/max"] for row in comparable_metrics(run.folder) if "staleness/max" in row]
    assert 0 < max(ages) <= 2
    assert duplicates(run.folder) == 0
    assert leaked() == 0


@pytest.mark.long
@pytest.mark.parametrize("method", OFFLINE)
def test_an_offline_method_on_a_cluster_matches_one_process(method: str, cluster: Any, tmp_path: Path) -> None:
    text = (KEYDOOR / f"tiny-{method}.toml").read_text()
    if method == "dagger":  # without an expert, so that its first round is played
        text = text[: text.index("[data]")] + text[text.index("[dagger]") :]
    common = ("threads=1", "warm_start.sft.optimizer={lr=0.003}", "checkpoint.every=2", *OFFLINE[method])
    whole = ForkedCommand(tmp_path / "alone" / "run", *common, text=text)
    assert whole.wait() == 0, whole.output.read_text()
    run = ForkedCommand(tmp_path / "cluster" / "run", *SCALE, f"scale.address={cluster.address}", *common, text=text)
    assert run.wait() == 0, run.output.read_text()
    found, expected = tokens(run.folder), tokens(whole.folder)
    for name in ("eval_000000.jsonl", "step_000001.jsonl"):
        assert found.get(name) == expected.get(name), name
    assert expected["step_000001.jsonl"]
    rows, wanted = comparable_metrics(run.folder), comparable_metrics(whole.folder)
    assert len(rows) == len(wanted) > 1
    for row, alone_row in zip(rows, wanted, strict=True):
        assert row.keys() == alone_row.keys()
        for name in ("loss", "grad/norm", "lr", "round"):
            assert row[name] == pytest.approx(alone_row[name], rel=1e-2, abs=1e-4), name
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (run.folder, whole.folder)]
    assert summaries[0]["rounds"][0]["round"] == summaries[1]["rounds"][0]["round"] == 1
    if method == "reward_model":
        assert summaries[0]["after"]["success"] == pytest.approx(summaries[1]["after"]["success"], abs=0.15)
        heads = [
            load_file(folder / "reward_head.safetensors") for folder in map(last_model, (run.folder, whole.folder))
        ]
        torch.testing.assert_close(heads[0], heads[1], rtol=1e-2, atol=1e-3)
        # The cluster's checkpoint is resumed by one process, in the middle of the round.
        shutil.rmtree(list_checkpoints(run.folder / "checkpoints")[-1])
        again = ForkedCommand(run.folder, *common, "--resume", text=text)
        assert again.wait() == 0, again.output.read_text()
        resumed = load_file(last_model(run.folder) / "reward_head.safetensors")
        torch.testing.assert_close(resumed, heads[0], rtol=1e-2, atol=1e-3)


def last_model(folder: Path) -> Path:
    return list_checkpoints(folder / "checkpoints")[-1] / "model"


def distillation(teacher: Path) -> tuple[str, tuple[str, ...]]:
    """Return a recipe and options. The teacher is a trained model, the student the one that it started from."""
    start = (
        SMALL[: SMALL.index("[model.scratch]")] + SMALL[SMALL.index("[[environments]]") : SMALL.index("[warm_start]")]
    )
    options = ("method=distill", f"model.path={teacher / 'reference'}", f"rl.distill.teacher={teacher}")
    return start + SMALL[SMALL.index("[horizon]") :], (*options, "rl.distill.reward_weight=0.5")


@pytest.mark.long
@pytest.mark.parametrize("method", ["distill", "dagger"])
def test_a_killed_and_resumed_run_over_ranks_equals_an_uninterrupted_one(
    method: str, alone: Path, cluster: Any, tmp_path: Path
) -> None:
    """DAgger learns from ids alone. Log-probabilities of one episode at a time do not depend on timing."""
    if method == "distill":
        text, options = distillation(alone)
        options = (*options, "rl.steps=5", "scale.engines=1", "agent.concurrency=1")
    else:
        text = (KEYDOOR / "tiny-dagger.toml").read_text()
        gentle = ("threads=1", "warm_start.sft.optimizer={lr=0.003}")
        options = (*gentle, "dagger.rounds=2", "dagger.tasks=8", "sft.batch_size=16")
    options = (*SCALE, f"scale.address={cluster.address}", *options, "checkpoint.every=2")
    whole = ForkedCommand(tmp_path / "whole" / "run", *options, text=text)
    assert whole.wait() == 0, whole.output.read_text()
    killed = Command(tmp_path / "killed" / "run", *options, text=text)
    try:
        killed.until_step(3)
    finally:
        killed.end()
    assert leaked() == 0
    assert len(steps_of(killed.folder)) < len(steps_of(whole.folder))
    resumed = ForkedCommand(killed.folder, *options, "--resume", text=text)
    assert resumed.wait() == 0, resumed.output.read_text()
    assert tokens(killed.folder) == tokens(whole.folder)
    weights, expected = final_weights(killed.folder), final_weights(whole.folder)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.long
def test_distillation_on_a_cluster_matches_one_process(alone: Path, cluster: Any, tmp_path: Path) -> None:
    text, taught = distillation(alone)
    taught = (*taught, "rl.steps=2")
    whole = ForkedCommand(tmp_path / "alone" / "run", *taught, text=text)
    assert whole.wait() == 0, whole.output.read_text()
    run = ForkedCommand(tmp_path / "cluster" / "run", *SCALE, f"scale.address={cluster.address}", *taught, text=text)
    assert run.wait() == 0, run.output.read_text()
    assert tokens(run.folder)["step_000001.jsonl"] == tokens(whole.folder)["step_000001.jsonl"]
    found, expected = comparable_metrics(run.folder)[0], comparable_metrics(whole.folder)[0]
    assert expected["kl/teacher"] > 0
    for name in ("kl/teacher", "loss", "grad/norm", "reward/mean"):
        assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
