"""Ray: where the processes of a run are started, found, and started again. Only this file imports ray.

    driver          runs training.rl.train_rl with handles in place of learner and engine, and asks hosts for groups
    learners        one rank each; all of them do the same call at the same time
    engines         sample; when one dies it is started again and fetches the current weights from the board
    env hosts       play whole groups with agent.rollout.rollout, next to their sessions; each turn is one call to an
                    engine, always the same one for a trajectory as long as it lives
    board           which weights are current, and what has befallen engines

What they do is handed in by cluster.py: a function that makes a rank's learner, an engine, a host's player. A prompt is
the whole conversation, so a call that an engine's death cut off is sent to another engine as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from agentgym_rl.errors import ConfigError, EngineError, WorkerLost
from agentgym_rl.scale.host_scheduler import Turns
from agentgym_rl.scale.plan import Plan, bundles
from agentgym_rl.scale.process_group import join, leave
from agentgym_rl.scale.publisher import EngineGone, Publisher
from agentgym_rl.scale.routing import Homes
from agentgym_rl.scale.shared_state import Board, Published
from agentgym_rl.scale.watch import LOOK_S, Nodes, Threads, reaching, sigterm_stays_ours, unless_one_fails
from agentgym_rl.transport.buckets import Receiver, Staging, buckets
from agentgym_rl.transport.device import Door, device_id, lend
from agentgym_rl.transport.host_memory import HostMemories
from agentgym_rl.types import Completion, Group, Sampling

NAMESPACE = "agentgym-rl"
"""Actors find each other by name: a handle among what an actor is made with may be gone when it is made again."""
RETRY_S = 0.25
"""Between looks at a worker that is being started again."""
POLITE_S = 10.0
"""Granted to a worker to close what it holds."""
MOST_DEATHS = 5
"""Of workers under one and the same call: it may be what they die of. How long ago it was first made says nothing."""


class LearnerRank:
    """One rank. `make(rank, size)` gives an object with the methods that `call` names."""

    def __init__(self, make: Callable[[int, int], Any], rank: int, size: int) -> None:
        self._make, self._rank, self._size = make, rank, size
        self._work: Any = None
        self._memories, self._staging = HostMemories(), Staging()

    def address(self) -> str:
        """Where the ranks can meet, for the first of them."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def begin(self, address: str, device: str) -> None:
        if device == "cuda":
            device = "cuda:0"  # Ray shows this process its own device only
        # However long ranks wait for each other: that one died is heard of from Ray.
        join(self._rank, self._size, address, device)
        self._work = self._make(self._rank, self._size)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._work, method)(*arguments)

    def put_weights(self, version: int, bucket_bytes: int, one_node: bool, probe: Any = None) -> Published | None:
        """The whole state from rank 0, for engines on its node or anywhere; the others take part in it."""
        first, whole = self._rank == 0, self._work.whole_state()
        host = self._memories.fill(whole) if first and one_node else None
        made = buckets(whole, bucket_bytes, keep=first, staging=self._staging)  # of what was not read yet
        refs = [ray.put(bucket) for bucket in made]
        probe = self._work.probe() if probe is None else probe
        return Published(version, node_id(), host, refs, probe) if first else None

    def device(self) -> str:
        return device_id()

    def lend(self, version: int, bucket_bytes: int, doors: list[Door]) -> dict[str, str]:
        """The whole state to engines on this device. Says which doors were not served, and why."""
        return lend(self._work.whole_state(), version, doors, bucket_bytes)

    def node(self) -> str:
        return node_id()

    def close(self) -> None:
        leave()

    def pid(self) -> int:
        return os.getpid()


class EngineReplica:
    """An engine. `make()` gives its Receiver (transport/buckets.py), whose `engine` samples."""

    def __init__(self, make: Callable[[], Receiver], board: str, index: int) -> None:
        self._seat: Any = make()
        self._board = ray.get_actor(board, NAMESPACE)
        self._name = f"engine {index}"
        self._fresh = asyncio.Event()
        self._loading: asyncio.Lock | None = None
        self._resting = False
        self._door: Door | None = None
        self._seat.engine.version = -1  # whatever it was made with, it has not been told to use it

    async def begin(self) -> int:
        """Fetch the current weights if there are any; returns how many tokens it can hold."""
        await self._fetch()
        return self._seat.engine.max_context

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str, least: int = 0) -> Completion:
        """With version `least` of the weights or a later one."""
        if not self._fresh.is_set() or self._seat.version < least:
            await self._fetch()
        await self._fresh.wait()
        async with self._or_again():
            if self._resting:  # a step that learned nothing brings no weights
                await self._wake()
            return await self._seat.engine.generate(prompt_ids, sampling, session)

    async def release(self, session: str) -> None:
        await self._seat.engine.release(session)

    async def load(self, published: Published) -> int:
        """Take a version, unless it has it or there is a newer one by now; returns the version it has."""
        version = published.version
        self._loading = self._loading or asyncio.Lock()
        async with self._loading, self._or_again():
            if version > self._seat.version and published.is_for(self._door):
                again = not self._fresh.is_set() and ray.get_runtime_context().was_current_actor_reconstructed
                if again:  # perhaps nobody needed it while it was away
                    self._board.report.remote(self._name, "engine_lost", "died")
                async with published.arrived(node_id()) as arrived:
                    if arrived is None:
                        return self._seat.version
                    if hopeless := await self._board.loading.remote(self._name):
                        raise EngineError(hopeless)
                    if slow := await self._seat.load(arrived, version, published.probe):
                        self._board.report.remote(self._name, "weights_slow", slow)
                self._board.loaded.remote(self._name)
                self._resting = False
                if again:
                    message = f"was started again and has version {version} of the weights"
                    self._board.report.remote(self._name, "engine_started", message)
                self._fresh.set()
        return self._seat.version

    async def expect(self, version: int) -> Door:
        """Be ready to be lent it by a rank on the same device."""
        self._loading = self._loading or asyncio.Lock()
        async with self._loading, self._or_again():
            if version <= self._seat.version:
                raise EngineError(f"has version {self._seat.version} of the weights, {version} is not newer")
            self._door = await self._seat.expect()
            self._resting = False
            return self._door

    async def rest(self) -> None:
        """Leave the device to the learner it is shared with, until weights or a request come."""
        self._loading = self._loading or asyncio.Lock()
        async with self._loading, self._or_again():
            await self._seat.rest()
            self._resting = True

    async def _wake(self) -> None:
        self._loading = self._loading or asyncio.Lock()
        async with self._loading:
            if self._resting:
                await self._seat.wake()
                self._resting = False

    @contextlib.asynccontextmanager
    async def _or_again(self) -> AsyncIterator[None]:
        """An engine around processes of its own (vLLM's) may outlive them. Then this process ends too, so that Ray
        starts another, and whoever waits for an answer finds a dead engine like any other."""
        try:
            yield
        except Exception as error:
            if self._seat.died:
                message = f"lost the processes it samples with and is started again ({error})"
                await self._board.report.remote(self._name, "engine_lost", message)
                await self._board.failed.remote(self._name, str(error))
                os._exit(1)
            raise

    async def _fetch(self) -> None:
        tried = -1
        while (published := await self._board.published.remote()) is not None:
            if published.coming:
                await asyncio.sleep(RETRY_S)
                continue
            if await self.load(published) >= published.version:
                return
            if published.version == tried:
                raise EngineError(f"weights {tried} cannot be read on node {node_id()}, they are on {published.node}")
            tried = published.version

    async def node(self) -> str:
        return node_id()

    async def close(self) -> None:
        await self._seat.engine.close()

    async def pid(self) -> int:
        return os.getpid()


class RemoteEngine:
    """Engines behind one: every trajectory stays with one of them, the one with fewest when it came.

    When that dies its trajectories move to others and their calls are sent again.
    """

    def __init__(self, replicas: list[Any], board: Any, timeout_s: float, first: int = 0) -> None:
        self._replicas, self._board, self._timeout_s = replicas, board, timeout_s
        self._homes = Homes(len(replicas), first)
        self._down: dict[int, asyncio.Task[None]] = {}
        """Replicas that died, and who waits for each to be back."""
        self.version = self._least = 0

    def at_least(self, version: int) -> RemoteEngine:
        """The same engines. One that was out of the driver's reach when `version` was published fetches it first."""
        same = copy.copy(self)
        same._least = version
        return same

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        deaths = 0
        while True:
            index = self._homes.of(session, self._down)
            try:
                completion = await self._replicas[index].generate.remote(prompt_ids, sampling, session, self._least)
            except RayActorError as error:
                self._homes.leave(session)
                deaths += 1
                await self._lost(index, error, deaths)
                continue
            except RayTaskError as error:
                raise EngineError(f"engine {index}: {error.cause}") from error
            self.version = completion.version
            return completion

    async def release(self, session: str) -> None:
        index = self._homes.leave(session)
        if index is not None and index not in self._down:
            self._replicas[index].release.remote(session)  # nobody waits for it

    async def update_weights(self, source: Any, version: int) -> None:
        raise EngineError("a host's engines are given their weights by the learners, not by the host")

    async def close(self) -> None:
        self._homes.clear()

    async def _lost(self, index: int, error: RayActorError, deaths: int) -> None:
        if index not in self._down:
            self._down[index] = asyncio.create_task(self._back(index))
            message = "died; what it was sampling is sampled again by another, or by itself when it is back"
            await self._board.report.remote(f"engine {index}", "engine_lost", message)
        if deaths >= MOST_DEATHS:
            raise EngineError(f"{deaths} engines in a row died of one prompt, or while they had it: {error}") from error
        await asyncio.sleep(RETRY_S)  # others of its node die with it, and are heard of by then
        give_up_at = time.monotonic() + self._timeout_s
        while len(self._down) == len(self._replicas):
            if time.monotonic() > give_up_at:
                raise EngineError(f"no engine came back within {self._timeout_s:g} s: {error}") from error
            await asyncio.sleep(RETRY_S)

    async def _back(self, index: int) -> None:
        await answers(self._replicas[index])
        del self._down[index]


def node_id() -> str:
    return ray.get_runtime_context().get_node_id()


async def answers(actor: Any) -> None:
    """Returns when an actor that died is there again."""
    while True:
        try:
            await actor.pid.remote()
        except RayActorError:
            await asyncio.sleep(RETRY_S)
        else:
            return


async def made(name: str, call: Any) -> Any:
    """What an actor's first call gives. One that cannot be made at all is not waited for: it says why in a line."""
    try:
        return await call.remote()
    except RayActorError as error:
        if not error.actor_init_failed:
            raise
        reason = str(error).strip().splitlines()[-1].partition(": ")[2]  # under Ray's words and a traceback
        raise WorkerLost(f"{name} could not be made: {reason}") from None
    except RayTaskError as error:
        raise WorkerLost(f"{name} could not begin: {error.cause}") from error


class EnvHost:
    """Plays groups. `make(engine)` gives an object with `play(job)`, `num_open` and `close()`."""

    def __init__(
        self, make: Callable[[Any], Any], engines: list[str], board: str, timeout_s: float, first: int
    ) -> None:
        replicas = [ray.get_actor(name, NAMESPACE) for name in engines]
        self._player = make(RemoteEngine(replicas, ray.get_actor(board, NAMESPACE), timeout_s, first))

    async def play(self, job: Any) -> Group:
        return await self._player.play(job)

    async def num_open(self) -> int:
        return self._player.num_open

    async def close(self) -> None:
        await self._player.close()

    async def pid(self) -> int:
        return os.getpid()


class RayApp:
    """The actors of one run: learners are started first, the others when there is a model. `close` ends them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.learners: list[Any] = []
        self.engines: list[Any] = []
        self.hosts: list[Any] = []
        self.room = 0
        self._groups: list[Any] = []
        self._places: dict[str, list[dict[str, Any]]] = {}
        self._started_ray = False
        self._events: list[dict[str, Any]] = []
        self._turns = Turns(plan.env_hosts, plan.episodes_per_host, plan.worker_timeout_s)
        self._down: dict[int, asyncio.Task[None]] = {}
        """Hosts that died, and who waits for each to be back."""
        self._threads, self._nodes, self.weights = Threads(), Nodes(), Publisher(self)

    def connect(self) -> None:
        """Join the cluster, or start one, and decide by what it has."""
        if not ray.is_initialized():
            self._join()
        self.plan = self.plan.decided(ray.cluster_resources())

    async def start_learners(self, make_learner: Callable[[int, int], Any]) -> None:
        """And reserve the places of all."""
        plan = self.plan
        places = self._places = await self._threads.run(self._reserve)
        self.learners = [
            ray.remote(LearnerRank)
            .options(**places["learner"][rank], max_restarts=0, max_concurrency=1)
            .remote(make_learner, rank, plan.learners)
            for rank in range(plan.learners)
        ]
        address = await self.learners[0].address.remote()
        begun = [rank.begin.remote(address, plan.device) for rank in self.learners]
        await self._threads.run(self._finish, begun)

    async def start_players(self, make_engine: Callable[[], Receiver], make_player: Callable[[Any], Any]) -> None:
        plan, places = self.plan, self._places
        again: dict[str, Any] = {"max_restarts": -1, "max_task_retries": 0}
        names = {role: f"{uuid.uuid4().hex[:8]}-{role}" for role in ("board", "engine")}
        named = {"namespace": NAMESPACE}
        # Beside the driver: it lives as long as the run does, whatever becomes of other nodes.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        board = ray.remote(Board).options(name=names["board"], **named, num_cpus=0, scheduling_strategy=here)
        self.board: Any = board.remote()
        self.engines = [
            ray.remote(EngineReplica)
            .options(name=f"{names['engine']}-{i}", **named, **places["engine"][i], **again, max_concurrency=10_000)
            .remote(make_engine, names["board"], i)
            for i in range(plan.engines)
        ]
        engines = [f"{names['engine']}-{i}" for i in range(plan.engines)]
        self.hosts = [
            ray.remote(EnvHost)
            .options(**places["env_host"][i], **again, max_concurrency=10_000)
            .remote(make_player, engines, names["board"], plan.worker_timeout_s, i * plan.engines // plan.env_hosts)
            for i in range(plan.env_hosts)
        ]
        try:
            await asyncio.gather(*(made(f"environment host {i}", host.pid) for i, host in enumerate(self.hosts)))
            rooms = await asyncio.gather(*(made(f"engine {i}", engine.begin) for i, engine in enumerate(self.engines)))
        except RayActorError:
            await self.on_board("pid")
            raise
        self.room = min(rooms)
        self._nodes.changes(ray.nodes())
        beside = await self.learners[0].node.remote()
        nodes = await asyncio.gather(*(engine.node.remote() for engine in self.engines))
        self.weights.one_node = set(nodes) == {beside} and hasattr(os, "memfd_create")

    def _join(self) -> None:
        plan = self.plan
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if plan.address is None:
            store = plan.object_store_mb
            options |= {
                "address": "local",
                "include_dashboard": False,
                "num_cpus": max(os.cpu_count() or 1, plan.cpus_in_all()),
                "object_store_memory": None if store is None else store << 20,
            }
        else:
            options["address"] = plan.address
        # Ray starts workers at a low priority, where anything else on the machine would starve them.
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.setdefault("RAY_gcs_rpc_server_connect_timeout_s", "60")  # 5 are few on a machine that is busy
        with reaching(plan.address), sigterm_stays_ours():
            ray.init(**options)
        self._started_ray = True

    def _reserve(self) -> dict[str, list[dict[str, Any]]]:
        """Options that put each actor into its bundle. Learners sit close together; the rest is spread."""
        lacking = self.plan.lacking(ray.cluster_resources())
        if lacking and self.plan.address is None:  # no node will be added to what was started for this run
            raise ConfigError(f"{lacking}: ask for fewer, use layout = 'colocated', or set scale.address to a cluster")
        found: dict[str, list[dict[str, Any]]] = {}
        for roles, strategy in self.plan.placement():
            together = bundles(roles)
            group = placement_group(together, strategy=strategy)
            self._groups.append(group)
            if not self._threads.until(group.wait, self.plan.worker_timeout_s):
                total = {kind: ray.cluster_resources().get(kind, 0.0) for kind in ("CPU", "GPU")}
                free = {kind: ray.available_resources().get(kind, 0.0) for kind in ("CPU", "GPU")}
                raise WorkerLost(
                    f"the cluster has no room for {len(together)} x {together[0]} ({', '.join(roles)}) after "
                    f"{self.plan.worker_timeout_s:g} s: {self.plan.lacking(total) or f'{free} of {total} are free'}; "
                    "ask for fewer, or add nodes"
                )
            for role, needs in roles.items():
                found[role] = [
                    {
                        "num_cpus": need.get("CPU", 0.0),
                        "num_gpus": need.get("GPU", 0.0),
                        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, i),
                    }
                    for i, need in enumerate(needs)
                ]
        return found

    # Learners: the same call on all ranks at once.

    def on_ranks(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """`method(*arguments[rank])` on every rank. A rank that dies takes the run with it, at once."""
        refs = [rank.call.remote(method, *some) for rank, some in zip(self.learners, arguments, strict=True)]
        return self._finish(refs)

    def on_all(self, method: str, *arguments: Any) -> list[Any]:
        """The same on every rank; what is large travels once to each node."""
        return self.on_ranks(method, [tuple(ray.put(argument) for argument in arguments)] * len(self.learners))

    async def wait_for_all(self, method: str, *arguments: Any) -> list[Any]:
        """Likewise, where the run may be stopped meanwhile."""
        return await self._threads.run(self.on_all, method, *arguments)

    def rest_engines(self) -> None:
        """Before ranks learn on devices that they share with engines; nothing is played meanwhile."""
        for ref in [engine.rest.remote() for engine in self.engines]:
            with contextlib.suppress(RayActorError):  # one that died holds nothing, and asks for weights when back
                ray.get(ref)

    def _finish(self, refs: list[Any]) -> list[Any]:
        waiting = list(refs)
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1, timeout=LOOK_S)
            self._threads.require_open()
            try:
                ray.get(done)
            except (RayActorError, RayTaskError) as error:
                raise self._why(refs, error) from error
        return ray.get(refs)

    def _why(self, refs: list[Any], error: Exception) -> Exception:
        """One rank's death shows on the others as a broken connection, perhaps first: find the one that died."""
        ray.wait(refs, num_returns=len(refs), timeout=POLITE_S)
        dead = []
        for rank, ref in enumerate(refs):
            try:
                ray.get(ref, timeout=0.1)
            except RayActorError:
                dead.append(rank)
            except (RayTaskError, GetTimeoutError):
                continue
        if dead:
            ranks = ", ".join(map(str, dead))
            return WorkerLost(f"learner rank {ranks} of {len(refs)} died: run the same command with --resume")
        return error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, Exception) else error

    # Weights: learner -> engines (scale/publisher.py).

    def ask_ranks(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        return [getattr(rank, method).remote(*some) for rank, some in zip(self.learners, arguments, strict=True)]

    async def answers_of(self, asked: list[Any]) -> list[Any]:
        return await self._threads.run(self._finish, asked)

    async def ask_engine(self, index: int, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self.engines[index], method).remote(*arguments)
        except RayActorError as error:
            await self.on_board("pid")
            raise EngineGone(str(error)) from error
        except RayTaskError as error:
            raise EngineError(f"engine {index}: {error.cause}") from error

    async def engine_back(self, index: int) -> None:
        await answers(self.engines[index])

    # Groups: driver -> host.

    async def play(self, job: Any, episodes: int) -> Group:
        """One group of so many, by the host with fewest. If its host dies it is played again from the start by another:
        what the dead one had of it is nowhere, so nothing is twice in a batch."""
        deaths = 0
        while True:
            async with self._turns.host(episodes) as index:
                try:
                    return await unless_one_fails(self.hosts[index].play.remote(job), self.weights.tasks)
                except RayActorError as error:
                    await self.on_board("pid")
                    self._host_lost(index)
                    deaths += 1
                    if deaths >= MOST_DEATHS:
                        message = f"{deaths} environment hosts in a row died of one group, or while they had it"
                        raise WorkerLost(f"{message}, {index} at last: {error}") from error
                except RayTaskError as error:
                    raise (error.cause if isinstance(error.cause, Exception) else error) from None
            await asyncio.sleep(RETRY_S)  # others of its node die with it, and are heard of by then

    def _host_lost(self, index: int) -> None:
        if self._turns.lost(index):
            self._down[index] = asyncio.create_task(self._host_back(index))
            message = f"environment host {index} died; the groups it had are played again"
            self._events.append({"kind": "env_host_lost", "message": message})

    async def _host_back(self, index: int) -> None:
        await answers(self.hosts[index])
        self._events.append({"kind": "env_host_started", "message": f"environment host {index} was started again"})
        await self._turns.back(index)

    async def events(self) -> list[dict[str, Any]]:
        nodes = self._nodes.changes(await asyncio.to_thread(ray.nodes))
        events, self._events = self._events, []
        return nodes + events + await self.on_board("drain")

    async def on_board(self, method: str, *arguments: Any) -> Any:
        """What it answers. Engines and hosts call it too: to whoever calls them its death looks like theirs."""
        try:
            return await getattr(self.board, method).remote(*arguments)
        except RayActorError as error:
            raise WorkerLost(
                "the board died, by which engines learn of new weights: run the same command with --resume"
            ) from error

    async def close(self) -> None:
        """Close what actors hold, end them, give their places back."""
        waiting = (*self._down.values(), *self.weights.tasks())
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)  # what they failed of has been told, or something worse
        if not ray.is_initialized():
            return
        await self._threads.close()
        polite = [actor.close.remote() for actor in (*self.hosts, *self.engines)]
        if polite:
            await asyncio.to_thread(ray.wait, polite, num_returns=len(polite), timeout=POLITE_S)
        for actor in (*self.hosts, *self.engines, *self.learners, *([self.board] if hasattr(self, "board") else [])):
            ray.kill(actor)
        for group in self._groups:
            remove_placement_group(group)
        if self._started_ray:
            await asyncio.to_thread(ray.shutdown)


async def on_other_nodes(timeout_s: float, function: Callable[[str], Any], path: str) -> dict[str, Any]:
    """What `function(path)` gives on every node but the driver's, by the node's address and id."""
    nodes = [node for node in await asyncio.to_thread(ray.nodes) if node["Alive"] and node["NodeID"] != node_id()]
    task: Any = ray.remote(num_cpus=0)(function)
    places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    calls = asyncio.gather(*(task.options(scheduling_strategy=place).remote(path) for place in places))
    try:
        found = await asyncio.wait_for(calls, timeout_s)
    except (RayError, TimeoutError) as error:
        raise WorkerLost(f"not every node answered within {timeout_s:g} s: {error}") from error
    return {f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})": one for node, one in zip(nodes, found, strict=True)}
