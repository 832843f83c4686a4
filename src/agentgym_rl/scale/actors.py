"""The actors of a run: what a learner's rank, an engine and an environment host are inside their processes.

What they do is handed in by cluster.py: a function that makes a rank's learner, an engine, a host's player. A prompt is
the whole conversation, so a call that an engine's death cut off is sent to another engine as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from agentgym_rl.agent.engines.vllm.handover import HostMemory
from agentgym_rl.errors import EngineError, WorkerLost
from agentgym_rl.scale.board import Published
from agentgym_rl.scale.ranks import join, leave
from agentgym_rl.scale.weights import Receiver, buckets, shared
from agentgym_rl.types import Completion, Group, Sampling

NAMESPACE = "agentgym-rl"
"""Actors find each other by name: a handle among what an actor is made with may be gone when it is made again."""
RETRY_S = 0.25
"""Between looks at a worker that is being started again."""


class LearnerRank:
    """One rank. `make(rank, size)` gives an object with the methods that `call` names."""

    def __init__(self, make: Callable[[int, int], Any], rank: int, size: int) -> None:
        self._make, self._rank, self._size = make, rank, size
        self._work: Any = None
        self._lent: list[HostMemory] = []

    def address(self) -> str:
        """Where the ranks can meet, for the first of them."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def begin(self, address: str, device: str, timeout_s: float) -> None:
        if device == "cuda":
            device = "cuda:0"  # Ray shows this process its own device only
        join(self._rank, self._size, address, device, timeout_s)
        self._work = self._make(self._rank, self._size)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._work, method)(*arguments)

    def put_weights(self, version: int, bucket_bytes: int, one_node: bool) -> Published | None:
        """The whole state from rank 0, for engines on its node or anywhere; the others take part in it."""
        first = self._rank == 0
        whole, memory = self._work.whole_state(), HostMemory() if first and one_node else None
        made = buckets(whole if memory is None else shared(whole, memory), bucket_bytes, keep=first and not one_node)
        refs, probe = [ray.put(bucket) for bucket in made], self._work.probe()
        if memory is not None:
            self._lent.append(memory)
        host = None if memory is None else memory.weights()
        return Published(version, node_id(), host, refs, probe) if first else None

    def keep_last_weights(self) -> None:
        """Nobody is told of older ones any more."""
        for memory in self._lent[:-1]:
            memory.close()
        del self._lent[:-1]

    def node(self) -> str:
        return node_id()

    def close(self) -> None:
        leave()

    def pid(self) -> int:
        return os.getpid()


class EngineReplica:
    """An engine. `make()` gives its Receiver (scale/weights.py), whose `engine` samples."""

    def __init__(self, make: Callable[[], Receiver], board: str, index: int) -> None:
        self._seat: Any = make()
        self._board = ray.get_actor(board, NAMESPACE)
        self._index = index
        self._fresh = asyncio.Event()
        self._loading: asyncio.Lock | None = None
        self._resting = False
        self._seat.engine.version = -1  # whatever it was made with, it has not been told to use it

    async def begin(self) -> int:
        """Fetch the current weights if there are any; returns how many tokens it can hold."""
        await self._fetch()
        return self._seat.engine.max_context

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        if not self._fresh.is_set():
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
            if version > self._seat.version:
                async with published.arrived(node_id()) as arrived:
                    if arrived is None:
                        return self._seat.version
                    await self._seat.load(arrived, version, published.probe)
                self._resting = False
                if not self._fresh.is_set() and ray.get_runtime_context().was_current_actor_reconstructed:
                    message = f"was started again and has version {version} of the weights"
                    self._board.report.remote(f"engine {self._index}", "engine_started", message)
                self._fresh.set()
        return self._seat.version

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
        except Exception:
            if self._seat.died:
                message = "lost the processes it samples with and is started again"
                await self._board.report.remote(f"engine {self._index}", "engine_lost", message)
                os._exit(1)
            raise

    async def _fetch(self) -> None:
        tried = -1
        while (published := await self._board.published.remote()) is not None:
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
        self._first = first
        """Where this host begins among equally busy ones: if all began with the same, that had most."""
        self._home: dict[str, int] = {}
        self._down: dict[int, asyncio.Task[None]] = {}
        """Replicas that died, and who waits for each to be back."""
        self.version = 0

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        give_up_at = time.monotonic() + self._timeout_s
        while True:
            index = self._home.get(session)
            if index is None:
                index = self._home[session] = self._least_busy()
            try:
                completion = await self._replicas[index].generate.remote(prompt_ids, sampling, session)
            except RayActorError as error:
                self._home.pop(session, None)
                await self._lost(index, error, give_up_at)
                continue
            except RayTaskError as error:
                raise EngineError(f"engine {index}: {error.cause}") from error
            self.version = completion.version
            return completion

    async def release(self, session: str) -> None:
        index = self._home.pop(session, None)
        if index is not None and index not in self._down:
            self._replicas[index].release.remote(session)  # nobody waits for it

    async def update_weights(self, source: Any, version: int) -> None:
        raise EngineError("a host's engines are given their weights by the learners, not by the host")

    async def close(self) -> None:
        self._home.clear()

    def _least_busy(self) -> int:
        counts = [0] * len(self._replicas)
        for index in self._home.values():
            counts[index] += 1
        up = [i for i in range(len(counts)) if i not in self._down] or list(range(len(counts)))
        return min(up, key=lambda i: (counts[i], (i - self._first) % len(counts)))

    async def _lost(self, index: int, error: RayActorError, give_up_at: float) -> None:
        if index not in self._down:
            self._down[index] = asyncio.create_task(self._back(index))
            message = "died; what it was sampling is sampled again by another, or by itself when it is back"
            await self._board.report.remote(f"engine {index}", "engine_lost", message)
        while len(self._down) == len(self._replicas) or time.monotonic() > give_up_at:
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
