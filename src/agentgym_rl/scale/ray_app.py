"""The Ray actors of a run: starts, finds and restarts them. Only this file imports ray.

    driver          runs training.rl.train_rl with handles in place of learner and engine, and sends groups to hosts
    learners        one rank each; all of them run the same call at the same time
    engines         sample; a restarted engine waits for weights
    env hosts       play whole groups with agent.rollout.rollout, next to their sessions; each turn is one call to an
                    engine, always the same one for a trajectory as long as it lives
    shared state    events and worker failures

run/backend_ray.py passes functions that make a rank's learner, an engine and a host's player. A prompt is the whole
conversation, so a call that an engine's death interrupted is sent unchanged to another engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from agentgym_rl.agent.engines.base import EngineAdapter
from agentgym_rl.agent.engines.routing import SessionRouter
from agentgym_rl.errors import ConfigError, EngineError, WorkerLost
from agentgym_rl.scale.host_scheduler import HostScheduler
from agentgym_rl.scale.publisher import VISIBLE_DEVICES, EngineLost, EngineReplica, LearnerRank, Publisher
from agentgym_rl.scale.readiness import wait_for_head, wait_for_nodes
from agentgym_rl.scale.resource_plan import Plan, bundles
from agentgym_rl.scale.shared_state import SharedState
from agentgym_rl.scale.watch import POLL_INTERVAL_S, Nodes, Threads, connecting, keep_sigterm_handler
from agentgym_rl.transport import broadcast
from agentgym_rl.types import Completion, Sampling

NAMESPACE = "agentgym-rl"
"""Namespace in which actors find each other by name: a handle passed at start may be invalid after a restart."""
RETRY_INTERVAL_S = 0.25
"""Seconds between polls of a worker that is being restarted."""
CLOSE_TIMEOUT_S = 10.0
"""Seconds that a worker has to close its resources."""
MAX_DEATHS = 5
"""Give up on a call after this many workers died while running it."""


class RemoteEngine:
    """Several engines as one: a group's trajectories use one engine unless it has many (agent/engines/routing.py).

    If that engine dies, its trajectories move to others and their calls are sent again.
    """

    def __init__(self, replicas: list[Any], state: Any, timeout_s: float, *routing: int) -> None:
        self._replicas, self._state, self._timeout_s = replicas, state, timeout_s
        self._router = SessionRouter(len(replicas), *routing)
        self._down: dict[int, asyncio.Task[None]] = {}
        """Replicas that died, with the task that waits for each to return."""
        self.version = self._oldest = 0

    def at_least(self, version: int) -> RemoteEngine:
        """Return a copy whose engines fetch `version` first if they missed it."""
        clone = copy.copy(self)
        clone._oldest = version
        return clone

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        deaths = 0
        while True:
            index = self._router.engine_of(session, prompt_ids, self._down)
            try:
                completion = await self._replicas[index].generate.remote(prompt_ids, sampling, session, self._oldest)
            except RayActorError as error:
                self._router.remove(session)
                deaths += 1
                await self._replica_lost(index, error, deaths)
                continue
            except RayTaskError as error:
                raise EngineError(f"engine {index}: {error.cause}") from error
            self.version = completion.version
            return completion

    async def release(self, session: str) -> None:
        index = self._router.remove(session)
        if index is not None and index not in self._down:
            self._replicas[index].release.remote(session)  # not awaited

    async def _replica_lost(self, index: int, error: RayActorError, deaths: int) -> None:
        if index not in self._down:
            self._down[index] = asyncio.create_task(self._wait_for_replica(index))
            message = "died; its unfinished requests are sampled again by another engine or after its restart"
            await self._state.report.remote(f"engine {index}", "engine_lost", message)
        if deaths >= MAX_DEATHS:
            raise EngineError(f"{deaths} engines in a row died while they had one prompt: {error}") from error
        await asyncio.sleep(RETRY_INTERVAL_S)  # other engines of a lost node are known by then
        deadline = time.monotonic() + self._timeout_s
        while len(self._down) == len(self._replicas):
            if time.monotonic() > deadline:
                raise EngineError(f"no engine came back within {self._timeout_s:g} s: {error}") from error
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def _wait_for_replica(self, index: int) -> None:
        await wait_until_answered(self._replicas[index].wait_for_weights)
        del self._down[index]


def free_address(_: Any) -> str:
    """Return host:port of this node at which ranks can meet."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"


def about_actor(state: str) -> tuple[Any, bool]:
    """Return (the run's SharedState, whether this actor was restarted)."""
    return ray.get_actor(state, NAMESPACE), ray.get_runtime_context().was_current_actor_reconstructed


def node_id() -> str:
    return ray.get_runtime_context().get_node_id()


async def wait_until_answered(method: Any) -> None:
    """Return after a method of an actor has returned, in a restarted process if the actor is dead."""
    while True:
        try:
            await method.remote()
        except RayActorError:
            await asyncio.sleep(RETRY_INTERVAL_S)
        else:
            return


async def first_call(name: str, call: Any) -> Any:
    """Return the result of an actor's first call. Raises WorkerLost with a one-line reason if it cannot start."""
    try:
        return await call.remote()
    except RayActorError as error:
        if not error.actor_init_failed:
            raise
        reason = str(error).strip().splitlines()[-1].partition(": ")[2]  # the last line of the traceback
        raise WorkerLost(f"{name} could not be created: {reason}") from None
    except RayTaskError as error:
        raise WorkerLost(f"{name} could not start: {error.cause}") from error


class EnvHost:
    """An actor that plays groups. `make(engine)` returns an object with `play(job)`, `num_open` and `close()`."""

    def __init__(self, make: Callable[[Any], Any], engines: list[str], state: str, *routing: Any) -> None:
        replicas = [ray.get_actor(name, NAMESPACE) for name in engines]
        self._player = make(RemoteEngine(replicas, ray.get_actor(state, NAMESPACE), *routing))

    async def play(self, job: Any) -> Any:
        return await self._player.play(job)

    async def num_open(self) -> int:
        return self._player.num_open

    async def close(self) -> None:
        await self._player.close()


class RayApp:
    """The actors of one run. Learners start first, the others when there is a model. `close` ends them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.learners: list[Any] = []
        self.engines: list[Any] = []
        self.hosts: list[Any] = []
        self.max_context = 0
        self._groups: list[Any] = []
        self._placements: dict[str, list[dict[str, Any]]] = {}
        self._started_ray = False
        self._events: list[dict[str, Any]] = []
        self._scheduler = HostScheduler(plan.env_hosts, plan.episodes_per_host, plan.worker_timeout_s)
        self._down: dict[int, asyncio.Task[None]] = {}
        """Hosts that died, with the task that waits for each to return."""
        self._threads, self._nodes, self.weights = Threads(), Nodes(), Publisher(self)
        self.store, self.submitting, self.learned = "", threading.Lock(), False

    async def connect(self, report: Callable[[str], None] = lambda text: None) -> None:
        """Join or start a cluster, wait for its nodes, and choose the device by its resources."""
        if not ray.is_initialized():
            await wait_for_head(self.plan, self._join, report)
        self.plan = await wait_for_nodes(self.plan, ray.nodes, report)

    async def start_learners(self, make_learner: Callable[[int, int], Any]) -> None:
        """Reserve the resources of all actors and start the learners."""
        plan = self.plan
        placements = self._placements = await self._threads.run(self._reserve)
        self.learners = [
            ray.remote(LearnerRank)
            .options(**placements["learner"][rank], max_restarts=0, max_concurrency=1)
            .remote(make_learner, rank, plan.learners)
            for rank in range(plan.learners)
        ]
        self.store = await self.learners[0].__ray_call__.remote(free_address)
        calls = [rank.begin.remote(self.store, plan.device, ray.get) for rank in self.learners]
        await self._threads.run(self._finish, calls)

    async def start_players(self, make_engine: Callable[[], EngineAdapter], make_player: Callable[[Any], Any]) -> None:
        plan, placements, prefix = self.plan, self._placements, uuid.uuid4().hex[:8]
        state, engines = f"{prefix}-state", [f"{prefix}-engine-{i}" for i in range(self.plan.engines)]
        restart: dict[str, Any] = {"max_restarts": -1, "max_task_retries": 0}
        common: dict[str, Any] = {"namespace": NAMESPACE}
        # On the driver's node, so that it lives as long as the run when other nodes fail.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"name": state, **common, "num_cpus": 0, "scheduling_strategy": here}
        self.state: Any = ray.remote(SharedState).options(**options).remote()
        visible = [""] * plan.engines
        if plan.device == "cuda" and plan.layout == "colocated" and plan.devices_per_engine > 1:
            calls = [rank.__ray_call__.remote(lambda _: os.environ[VISIBLE_DEVICES]) for rank in self.learners]
            devices, size = await self.results_of(calls), plan.devices_per_engine
            visible = [",".join(devices[i : i + size]) for i in range(0, plan.learners, size)]
        self.engines = [
            ray.remote(EngineReplica)
            .options(name=name, **common, **placements["engine"][i], **restart, max_concurrency=10_000)
            .remote(make_engine, partial(about_actor, state), i, visible[i])
            for i, name in enumerate(engines)
        ]
        self.hosts = [
            ray.remote(EnvHost)
            .options(**placements["env_host"][i], **restart, max_concurrency=10_000)
            .remote(make_player, engines, state, plan.worker_timeout_s, *plan.routing_of(i))
            for i in range(plan.env_hosts)
        ]
        try:
            ready = (first_call(f"environment host {i}", host.__ray_ready__) for i, host in enumerate(self.hosts))
            await asyncio.gather(*ready)
            starts = (first_call(f"engine {i}", engine.begin) for i, engine in enumerate(self.engines))
            self.max_context = min(await asyncio.gather(*starts))
        except RayActorError:
            await self.call_state("__ray_ready__")
            raise
        self._nodes.changes(ray.nodes())

    def _join(self) -> None:
        plan = self.plan
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if plan.address is None:
            store = plan.object_store_mb
            options |= {
                "address": "local",
                "include_dashboard": False,
                "num_cpus": max(os.cpu_count() or 1, plan.total_cpus()),
                "object_store_memory": None if store is None else store << 20,
            }
        else:
            options["address"] = plan.address
        # Ray starts workers at a low priority, at which other processes of the machine would starve them.
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.setdefault("RAY_gcs_rpc_server_connect_timeout_s", "60")  # Ray's 5 s are too short on a busy machine
        with connecting(plan.address), keep_sigterm_handler():
            ray.init(**options)
        self._started_ray = True

    def _reserve(self) -> dict[str, list[dict[str, Any]]]:
        """Return options that put each actor into its bundle."""
        shortage = self.plan.shortage(ray.cluster_resources())
        if shortage and self.plan.address is None:  # a cluster started for this run gets no more nodes
            raise ConfigError(f"{shortage}: ask for fewer, use layout = 'colocated', or set scale.address to a cluster")
        options: dict[str, list[dict[str, Any]]] = {}
        for roles, strategy in self.plan.placement():
            requested = bundles(roles)
            group = placement_group(requested, strategy=strategy)
            self._groups.append(group)
            if not self._threads.until(group.wait, self.plan.worker_timeout_s):
                total = {kind: ray.cluster_resources().get(kind, 0.0) for kind in ("CPU", "GPU")}
                free = {kind: ray.available_resources().get(kind, 0.0) for kind in ("CPU", "GPU")}
                raise WorkerLost(
                    f"the cluster cannot reserve {len(requested)} x {requested[0]} ({', '.join(roles)}) within "
                    f"{self.plan.worker_timeout_s:g} s: {self.plan.shortage(total) or f'{free} of {total} are free'}; "
                    "ask for fewer, or add nodes"
                )
            for role, needs in roles.items():
                per_bundle = len(needs) // len(requested)
                options[role] = [
                    {
                        "num_cpus": need.get("CPU", 0.0),
                        "num_gpus": need.get("GPU", 0.0),
                        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, i // per_bundle),
                    }
                    for i, need in enumerate(needs)
                ]
        return options

    # Learners: the same call on all ranks at once.

    def on_ranks(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Call `method(*arguments[rank])` on every rank. Raises WorkerLost as soon as a rank dies."""
        with self.submitting:
            self.learned = self.learned or method == "learn"
            calls = self.start_on_ranks("call", [(method, *values) for values in arguments])
        return self._finish(calls)

    def on_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call `method(*arguments)` on every rank. Large arguments are sent once to each node."""
        return self.on_ranks(method, [tuple(ray.put(argument) for argument in arguments)] * len(self.learners))

    async def wait_for_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call `on_all` in a thread, so that the run can be stopped meanwhile."""
        return await self._threads.run(self.on_all, method, *arguments)

    def ask_engines(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Return the answers of all engines that are alive and answer in time."""
        answers = []
        for call in [getattr(engine, method).remote(*arguments) for engine in self.engines]:
            with contextlib.suppress(RayActorError, GetTimeoutError):
                answers.append(ray.get(call, timeout=timeout_s))
        return answers

    def _finish(self, refs: list[Any]) -> list[Any]:
        waiting = list(refs)
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1, timeout=POLL_INTERVAL_S)
            self._threads.require_open()
            try:
                ray.get(done)
            except (RayActorError, RayTaskError) as error:
                raise self._failure(refs, error) from error
        return ray.get(refs)

    def _failure(self, refs: list[Any], error: Exception) -> Exception:
        """Return the error to raise. The other ranks may report a broken connection first: find the one that died."""
        ray.wait(refs, num_returns=len(refs), timeout=CLOSE_TIMEOUT_S)
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

    def start_on_ranks(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        return [getattr(rank, method).remote(*values) for rank, values in zip(self.learners, arguments, strict=True)]

    async def results_of(self, calls: list[Any]) -> list[Any]:
        return await self._threads.run(self._finish, calls)

    def start_on_engine(self, index: int, method: str, *arguments: Any) -> Any:
        return getattr(self.engines[index], method).remote(*arguments)

    async def engine_result(self, index: int, call: Any) -> Any:
        try:
            return await call
        except RayActorError as error:
            await self.call_state("__ray_ready__")
            raise EngineLost(str(error)) from error
        except RayTaskError as error:
            raise EngineError(f"engine {index}: {error.cause}") from error

    async def wait_for_engine(self, index: int) -> None:
        await wait_until_answered(self.engines[index].__ray_ready__)

    async def wait_for_loss(self, index: int) -> None:
        with contextlib.suppress(RayActorError):
            await self.engines[index].wait_for_death.remote()

    async def abort_group(self, group: str) -> None:
        await asyncio.to_thread(broadcast.abort_group, self.store, group)

    # Groups: driver -> host.

    async def play(self, job: Any, episodes: int) -> tuple[Any, Any]:
        """Play a group on the host with the fewest episodes. If the host dies, another plays the group from the start;
        the dead host's episodes are lost, so no episode is in a batch twice. Return (the result, its reference)."""
        deaths = 0
        while True:
            async with self._scheduler.host(episodes) as index:
                try:
                    call = self.hosts[index].play.remote(job)
                    # This copies the result to the driver's node, so that the loss of the host's node loses no group.
                    answer = asyncio.wrap_future(call.future())
                    return await self.weights.background.unless_one_fails(answer), call
                except (RayActorError, ObjectLostError) as error:
                    await self.call_state("__ray_ready__")
                    self._host_lost(index)
                    deaths += 1
                    if deaths >= MAX_DEATHS:
                        message = f"{deaths} environment hosts in a row died while they played one group"
                        raise WorkerLost(f"{message}, the last was host {index}: {error}") from error
                except RayTaskError as error:
                    raise (error.cause if isinstance(error.cause, Exception) else error) from None
            await asyncio.sleep(RETRY_INTERVAL_S)  # other hosts of a lost node are known by then

    def _host_lost(self, index: int) -> None:
        if self._scheduler.mark_lost(index):
            self._down[index] = asyncio.create_task(self._wait_for_host(index))
            self._events.append(
                {"kind": "env_host_lost", "message": f"environment host {index} died; its groups are played again"}
            )

    async def _wait_for_host(self, index: int) -> None:
        await wait_until_answered(self.hosts[index].__ray_ready__)
        self._events.append({"kind": "env_host_started", "message": f"environment host {index} was restarted"})
        await self._scheduler.mark_back(index)

    async def events(self) -> list[dict[str, Any]]:
        nodes = self._nodes.changes(await asyncio.to_thread(ray.nodes))
        events, self._events = self._events, []
        return nodes + events + await self.call_state("drain")

    async def call_state(self, method: str, *arguments: Any) -> Any:
        """Call the shared state. Engines and hosts call it too, so their calls may fail because it died."""
        try:
            return await getattr(self.state, method).remote(*arguments)
        except RayActorError as error:
            raise WorkerLost(
                "the actor that tells engines of new weights died: run the same command with --resume"
            ) from error

    async def close(self) -> None:
        """Close the actors' resources, end them and release their reservations."""
        waiting = (*self._down.values(), *self.weights.background.tasks)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)  # their errors have been reported already
        if not ray.is_initialized():
            return
        await self._threads.close()
        closing = [actor.close.remote() for actor in (*self.hosts, *self.engines)]
        if closing:
            await asyncio.to_thread(ray.wait, closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        for actor in (*self.hosts, *self.engines, *self.learners, *([self.state] if hasattr(self, "state") else [])):
            ray.kill(actor)
        for group in self._groups:
            remove_placement_group(group)
        if self._started_ray:
            await asyncio.to_thread(ray.shutdown)


async def on_other_nodes(timeout_s: float, function: Callable[[str], Any], path: str) -> dict[str, Any]:
    """Return `function(path)` of every node but the driver's, by the node's address and id."""
    nodes = [node for node in await asyncio.to_thread(ray.nodes) if node["Alive"] and node["NodeID"] != node_id()]
    task: Any = ray.remote(num_cpus=0)(function)
    strategies = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    calls = asyncio.gather(*(task.options(scheduling_strategy=strategy).remote(path) for strategy in strategies))
    try:
        answers = await asyncio.wait_for(calls, timeout_s)
    except (RayError, TimeoutError) as error:
        raise WorkerLost(f"not every node answered within {timeout_s:g} s: {error}") from error
    names = [f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})" for node in nodes]
    return dict(zip(names, answers, strict=True))
