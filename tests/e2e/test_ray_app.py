"""Ray actors, placement and shared devices, with workers that only record calls; then whole runs that start in another
folder than Ray."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import scripted_engine_for_tests
import torch
from cluster_for_tests import PATIENT, events_of, tokens
from envs_for_tests import Counting
from runs_for_tests import counting_config, quiet
from scripted_engine_for_tests import ScriptedEngine
from servers_for_tests import server_in_thread
from training_for_tests import counting_conversations

from agentgym_rl.agent.engines.vllm import VllmEngine
from agentgym_rl.commands.train import train
from agentgym_rl.errors import ConfigError, EngineError, WorkerLost
from agentgym_rl.run.backend_ray import RayBackend
from agentgym_rl.run.log import read_metrics, read_trajectories
from agentgym_rl.run.start import word_tokenizer
from agentgym_rl.scale.resource_plan import Plan
from agentgym_rl.training.scratch import build_model
from agentgym_rl.training.settings import ScratchSettings
from agentgym_rl.transport.device import DEVICE_WEIGHTS_VARIABLE, Endpoint, open_endpoint
from agentgym_rl.types import Sampling

ray = pytest.importorskip("ray")
for module in (sys.modules[__name__], scripted_engine_for_tests):  # a worker does not find the folder of the tests
    ray.cloudpickle.register_pickle_by_value(module)


class Rank:
    """A rank with one weight that never changes."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank

    def whole_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", torch.tensor([1.0, 2.0])

    def probe(self) -> str:
        return "a probe"


class RecordingAdapter:
    """Records its calls. It loses its processes at the second version, until it is restarted."""

    def __init__(self) -> None:
        self.engine: Any = ScriptedEngine([[7, 8]] * 9)
        self.engine.max_context = 100
        self.notes: list[str] = []

    @property
    def version(self) -> int:
        return self.engine.version

    died = False

    async def start(self) -> None:
        return None

    async def load(self, source: Any, version: int, probe: Any = None) -> None:
        if version == 2 and not ray.get_runtime_context().was_current_actor_reconstructed:
            self.died = True
            raise EngineError("its own processes are gone")
        ((name, tensor),) = source.tensors()
        self.notes.append(f"{name} {tensor.tolist()} of version {version} with {probe}")
        self.engine.version = version

    async def sleep(self) -> None:
        self.notes.append("sleep")

    async def wake(self) -> None:
        self.notes.append("wake")


class SendingRank(Rank):
    """Has several weights with another value in each version. The last rank dies if a file exists."""

    def __init__(self, deadly: Path, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._deadly, self._last, self._value = deadly, rank == size - 1, 0.0

    def learn(self) -> None:
        self._value += 1.0

    def whole_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(4):
            if number == 3 and self._last and self._deadly.exists():
                os._exit(1)
            yield str(number), torch.full((1000,), self._value + number)  # 4,000 bytes


class SentAdapter(RecordingAdapter):
    """Dies in the middle of a transfer, while a file does not exist."""

    def __init__(self, once: Path) -> None:
        super().__init__()
        self._once = once

    async def open_endpoints(self) -> list[Endpoint]:
        self.notes.append("open_endpoints")
        return [open_endpoint()]

    async def load(self, source: Any, version: int, probe: Any = None) -> None:
        self.engine.version = -1
        values = []
        for name, tensor in source.tensors():
            values.append(f"{name}={tensor[0]:g}")
            assert (tensor == tensor[0]).all()
            del tensor
            if name == "1":
                die_unless(self._once)
        self.notes.append(f"{' '.join(values)} as version {version} with {probe}")
        self.engine.version = version


class DyingAdapter(RecordingAdapter):
    """Dies at its second version, however often it is restarted."""

    async def load(self, source: Any, version: int, probe: Any = None) -> None:
        if version == 1:
            self.died = True
            raise EngineError("its worker ran out of memory")
        await super().load(source, version, probe)


class FragileAdapter(RecordingAdapter):
    """Dies at the prompt [0], once per file."""

    def __init__(self, once: Path) -> None:
        super().__init__()
        self.engine.generate = partial(self._generate, once, self.engine.generate)

    async def _generate(self, once: Path, generate: Any, prompt_ids: list[int], *rest: Any) -> Any:
        if prompt_ids == [0]:
            die_unless(once)
        return await generate(prompt_ids, *rest)


def die_unless(once: Path) -> None:
    """Exit unless the file exists, and create it: one of several concurrent processes dies."""
    try:
        once.touch(exist_ok=False)
    except FileExistsError:
        return
    os._exit(1)


class Player:
    num_open = 0

    async def play(self, job: Path) -> int:
        die_unless(job)
        return os.getpid()

    async def close(self) -> None:
        return None


def make_player(engine: Any) -> Player:
    return Player()


class Reporting(Player):
    """Reports an event to the shared state before it plays."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def play(self, job: Path) -> int:
        await self._engine._state.report.remote("a host", "plays", "a group")
        return await super().play(job)


def plan(**changes: Any) -> Plan:
    common = {"learners": 2, "engines": 2, "env_hosts": 1, "layout": "colocated", "device": "cpu", "address": None}
    cpus = {"learner_cpus": 1.0, "engine_cpus": 1.0, "env_host_cpus": 1.0}
    rest = {"episodes_per_host": 1, "object_store_mb": 100, "bucket_mb": 1, "worker_timeout_s": 300.0}
    return Plan(**(common | cpus | rest | changes))


@pytest.fixture(scope="module", autouse=True)
def on_this_machine() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in PATIENT.items():
            patch.setenv(name, value)
        options: dict[str, Any] = {"address": "local", "include_dashboard": False, "log_to_driver": False}
        ray.init(num_cpus=6, object_store_memory=100 << 20, **options)
        yield
        ray.shutdown()


async def started(
    of: Plan, make_engine: Any = RecordingAdapter, make_player: Any = make_player, make_rank: Any = Rank
) -> Any:
    from agentgym_rl.scale.ray_app import RayApp

    app = RayApp(of)
    try:
        await app.connect()
        await app.start_learners(make_rank)
        await app.start_players(make_engine, make_player)
    except BaseException:
        await app.close()
        raise
    return app


async def bundle(actor: Any) -> tuple[str, int]:
    """Return (placement group, bundle index) of an actor."""
    ids = await actor.__ray_call__.remote(lambda _: ray._private.worker.global_worker.core_worker.resource_ids())
    (name,) = [key for key in ids if key.startswith("CPU_group_") and key.count("_") == 3]
    return name.rpartition("_")[2], int(name.split("_")[2])


def seconds_for_other_ranks(_: Any) -> float:
    group = torch.distributed.distributed_c10d._get_default_group()
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


async def notes(app: Any) -> list[list[str]]:
    calls = [engine.__ray_call__.remote(lambda actor: actor._adapter.notes) for engine in app.engines]
    return list(await asyncio.gather(*calls))


@pytest.mark.long
async def test_an_engine_sleeps_while_its_learner_works_and_restarts_after_its_death() -> None:
    app = await started(plan())
    try:
        places = [await bundle(actor) for actor in (*app.learners, *app.engines)]
        assert places[:2] == places[2:], "the n-th engine sits with the n-th learner"
        assert places[0] != places[1]
        waits_s = await app.learners[0].__ray_call__.remote(seconds_for_other_ranks)
        assert waits_s > app.plan.worker_timeout_s, "a rank that died is heard of, one that works is waited for"
        await app.weights.publish(0)
        await asyncio.to_thread(app.ask_engines, "sleep")
        said = await app.engines[0].generate.remote([1], Sampling(4), "a")
        assert (said.token_ids, said.version) == ([7, 8], 0)
        await asyncio.to_thread(app.ask_engines, "sleep")
        await app.weights.publish(1)
        await app.engines[0].generate.remote([1], Sampling(4), "a")
        first, second = (f"weight [1.0, 2.0] of version {version} with a probe" for version in (0, 1))
        assert await notes(app) == [[first, "sleep", "wake", "sleep", second], [first, "sleep", "sleep", second]]
        # Engines that outlive the processes they sample with are started again, and take what they missed.
        await app.weights.publish(2)
        await asyncio.gather(*app.weights.outdated.values())
        assert (await app.engines[0].generate.remote([1], Sampling(4), "a")).version == 2
        assert await notes(app) == [["weight [1.0, 2.0] of version 2 with a probe"]] * 2
        kinds = sorted(event["kind"] for event in await app.events())
        assert kinds == ["engine_lost", "engine_lost", "engine_started", "engine_started"]
    finally:
        await app.close()


@pytest.mark.long
@pytest.mark.parametrize("way", ["device", "broadcast"])
async def test_an_engine_that_dies_in_a_transfer_is_restarted_and_sent_the_weights(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEVICE_WEIGHTS_VARIABLE, "always" if way == "device" else "never")
    once, deadly = tmp_path / "once", tmp_path / "deadly"
    app = await started(plan(senders=2), partial(SentAdapter, once), make_rank=partial(SendingRank, deadly))
    try:
        once.touch()
        assert (
            await app.weights.publish(0)
            == {
                "device": "on the device that each shares with a learner",
                "broadcast": "as a broadcast of 2 learners over gloo",
            }[way]
        )
        await asyncio.to_thread(app.ask_engines, "sleep")
        await asyncio.to_thread(app.on_all, "learn")
        once.unlink()
        await app.weights.publish(1)  # one of the engines, whichever came first, dies in the middle of it
        await asyncio.gather(*app.weights.outdated.values())
        said = await asyncio.gather(*(engine.generate.remote([1], Sampling(4), "a", 1) for engine in app.engines))
        assert [completion.version for completion in said] == [1, 1]
        await asyncio.to_thread(app.on_all, "learn")
        await app.weights.publish(2)
        sent = [f"0={v} 1={v + 1} 2={v + 2} 3={v + 3} as version {v} with a probe" for v in range(3)]
        every = [[note for note in taken if note != "open_endpoints"] for taken in await notes(app)]
        assert sorted(every, key=len) == [sent[1:], [sent[0], "sleep", *sent[1:]]]
        assert [event["kind"] for event in await app.events()] == ["engine_lost", "engine_started"]
        deadly.touch()
        with pytest.raises(WorkerLost, match="learner rank 1 of 2 died: run the same command with --resume"):
            await app.weights.publish(3)
    finally:
        await app.close()


@pytest.mark.long
async def test_an_engine_lost_while_ranks_learn_gets_the_next_version_when_they_have_learned(tmp_path: Path) -> None:
    """Ranks hold no copy of the version before, so that the engine has their weights before they are published."""
    (tmp_path / "once").touch()
    of = plan(layout="disaggregated", senders=2)
    app = await started(of, partial(SentAdapter, tmp_path / "once"), make_rank=partial(SendingRank, tmp_path / "no"))
    try:
        await app.weights.publish(0)
        os.kill(await app.engines[0].__ray_call__.remote(lambda _: os.getpid()), signal.SIGKILL)
        await app.wait_for_all("learn")
        await app.wait_for_engine(0)
        early = await app.engines[0].generate.remote([1], Sampling(4), "a", 0)
        other = await app.engines[1].generate.remote([1], Sampling(4), "a", 0)
        assert (early.version, other.version, app.weights.version) == (1, 0, 0)
        await app.weights.publish(1)
        last = "0=1 1=2 2=3 3=4 as version 1 with a probe"
        assert await notes(app) == [[last, last], ["0=0 1=1 2=2 3=3 as version 0 with a probe", last]]
    finally:
        await app.close()


@pytest.mark.long
async def test_an_engine_that_dies_at_every_load_ends_the_run_with_the_cause() -> None:
    app = await started(plan(learners=1, engines=1), DyingAdapter)
    try:
        assert await app.weights.publish(0) == "as a broadcast of the first learner over gloo"
        await app.weights.publish(1)  # it is down, and may come back
        while not app.weights.outdated[0].done():
            await asyncio.wait([app.weights.outdated[0]])
        why = "engine 0 died 3 times in a row while loading weights: its worker ran out"
        for call in (app.play(None, 1), app.weights.publish(2)):
            with pytest.raises(EngineError, match=why):
                await call
    finally:
        await app.close()


@pytest.mark.long
async def test_a_call_to_a_dead_shared_state_ends_the_run(tmp_path: Path) -> None:
    """Also if an engine or a host that is alive reports its death."""
    app = await started(plan(learners=1, engines=1), make_player=Reporting)
    try:
        await app.weights.publish(0)
        (tmp_path / "group").touch()
        assert (await app.play(tmp_path / "group", 1))[0]
        os.kill(await app.state.__ray_call__.remote(lambda _: os.getpid()), signal.SIGKILL)
        for call in (app.play(tmp_path / "group", 1), app.events()):
            with pytest.raises(
                WorkerLost,
                match=r"^the actor that tells engines of new weights died: run the same command with --resume$",
            ):
                await asyncio.wait_for(call, 120)
        assert not app._down
        assert not app.weights.outdated
    finally:
        await app.close()


@pytest.mark.long
async def test_a_death_long_after_a_call_started_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill an environment host or an engine while another is alive. Only a call that kills every worker fails."""
    from agentgym_rl.scale import ray_app

    of = plan(learners=1, env_hosts=2, layout="disaggregated")
    app = await started(of, partial(FragileAdapter, tmp_path / "prompt"))
    try:
        await app.weights.publish(0)
        app.plan = replace(of, worker_timeout_s=0.0)  # since the call began that is over, whenever a worker dies
        assert (await app.play(tmp_path / "group", 1))[0], "the living worker plays it"
        engines = ray_app.RemoteEngine(app.engines, app.state, timeout_s=0.0)
        # Version 1 is asked for before it is published.
        later = asyncio.create_task(engines.at_least(1).generate([1], Sampling(4), "a"))
        assert (await engines.generate([1], Sampling(4), "a")).version == 0
        await app.weights.publish(1)
        assert (await later).version == 1
        assert (await engines.generate([0], Sampling(4), "a")).token_ids == [7, 8]
        monkeypatch.setattr(ray_app, "MAX_DEATHS", 1)
        (tmp_path / "prompt").unlink()
        with pytest.raises(WorkerLost, match="1 environment hosts in a row died while they played one group"):
            await app.play(tmp_path / "another", 1)
        with pytest.raises(EngineError, match="1 engines in a row died while they had one prompt"):
            await engines.generate([0], Sampling(4), "a")
        kinds = {event["kind"] for event in await app.events()}
        assert kinds >= {"env_host_lost", "engine_lost"}
    finally:
        await app.close()


async def test_what_cannot_be_placed_is_refused_with_a_reason() -> None:
    with pytest.raises(ConfigError, match=r"20 learners, 1 engines and 1 .* need 22 CPUs; there are 6: ask for fewer"):
        await started(plan(learners=20, engines=1, layout="disaggregated"))
    with pytest.raises(ConfigError, match="need 2 GPUs, a learner and an engine on each; there are 0"):
        await started(plan(device="cuda"))
    with pytest.raises(WorkerLost, match=r"cannot reserve 20 x .*learner.* within 0.1 s: 20 learners.* need 22 CPUs"):
        await started(plan(learners=20, engines=1, layout="disaggregated", address="there", worker_timeout_s=0.1))


@pytest.mark.long
async def test_an_engine_that_cannot_start_gives_the_reason_in_one_line() -> None:
    with pytest.raises(
        WorkerLost, match=r"engine 0 could not be created: .*needs vLLM 0.22 to 0.32, which is not installed"
    ) as refused:
        await started(plan(learners=1, engines=1), partial(VllmEngine, "anywhere"))
    assert "\n" not in str(refused.value)


SMALL_MODEL = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 2}


def write_what_a_recipe_names(folder: Path) -> None:
    tokenizer = word_tokenizer(counting_conversations(50))
    build_model(ScratchSettings(**SMALL_MODEL), tokenizer, 0).save_pretrained(folder / "mine")
    tokenizer.save_pretrained(folder / "mine")
    (folder / "chat.jinja").write_text(tokenizer.chat_template)
    (folder / "train.json").write_text(json.dumps(list(range(40))))


@pytest.mark.long
async def test_a_bfloat16_run_on_shared_devices_with_workers_in_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks send to two native engines. The recipe has relative paths and a token that only the driver has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COUNTING_TOKEN", "secret")  # after Ray was started, as on a cluster
    monkeypatch.setenv(DEVICE_WEIGHTS_VARIABLE, "always")
    write_what_a_recipe_names(tmp_path)
    seen: list[tuple[Any, ...]] = []
    close = RayBackend.close

    async def look_and_close(self: RayBackend) -> None:
        rank, engine = self._app.learners[1], self._app.engines[1]
        assert len(self._app.weights._rank_devices) == 2, "ranks looked for engines on their device"
        seen.append(await rank.__ray_call__.remote(lambda r: (r._work._config.model.device, torch.get_num_threads())))
        seen.append(await engine.__ray_call__.remote(lambda e: (e._adapter._model.dtype, torch.get_num_threads())))
        await close(self)

    monkeypatch.setattr(RayBackend, "close", look_and_close)
    with server_in_thread({"counting": Counting}, token="secret") as server:
        env = {"name": "counting", "url": f"{server.url}/counting", "token_variable": "COUNTING_TOKEN"}
        cpus = {"learner_cpus": 2.0, "engine_cpus": 0.5, "env_host_cpus": 0.5}
        config = counting_config(
            threads=0,
            model={"path": "mine", "chat_template": "chat.jinja", "dtype": "bfloat16"},
            environments=[env | {"items": {"train": "train.json", "test": "100-119"}}],
            scale={"learners": 2, "engines": 2, "layout": "colocated", "worker_timeout_s": 500.0, **cpus},
            rl__zero_variance="keep",
        )
        summary = await train(config, Path("run"), console=quiet())
        assert server.sessions.num_open == 0
    assert summary["steps"] == 2
    assert seen == [("cpu", 2), (torch.bfloat16, 1)]
    rows = read_metrics(Path("run", "metrics.jsonl"))
    assert all(row["grad/norm"] > 0 and row["mismatch/abs"] < 0.05 for row in rows)
    assert [row["staleness/max"] for row in rows] == [0.0, 0.0]
    played = [t for n in (1, 2) for t in read_trajectories(Path("run", "trajectories", f"step_{n:06d}.jsonl"))]
    assert {m.version for t in played for m in t.messages if m.role == "assistant"} == {0, 1}
    assert not any(t.error for t in played)


@pytest.mark.long
async def test_overlap_on_a_cluster_is_that_of_one_process(tmp_path: Path) -> None:
    """Engines with their own weights play the next step while ranks learn."""
    with server_in_thread({"counting": Counting}) as server:
        environments = [{"name": "counting", "url": f"{server.url}/counting"}]
        changes = {"environments": environments, "rl__steps": 4, "rl__overlap": 1, "rl__zero_variance": "keep"}
        for name, scale in (("alone", None), ("cluster", {"learners": 2, "worker_timeout_s": 500.0})):
            await train(counting_config(scale=scale, **changes), tmp_path / name, console=quiet())
    expected, found = tokens(tmp_path / "alone"), tokens(tmp_path / "cluster")
    assert found == expected
    assert {f"step_{step:06d}.jsonl" for step in (1, 2, 3, 4)} < expected.keys()
    rows = read_metrics(tmp_path / "cluster" / "metrics.jsonl")
    assert [row["staleness/max"] for row in rows] == [0.0, 1.0, 1.0, 1.0]
    assert events_of(tmp_path / "cluster") == []
