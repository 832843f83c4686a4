"""Weights broadcast by ranks to engines, between real processes: equal to one process, and no endless wait when one
dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes_for_tests import CONTEXT
from ranks_for_tests import learner, on_ranks, steps
from training_for_tests import tiny_model

from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.agent.engines.native.adapter import NativeAdapter, load_tensors
from agentgym_rl.errors import EngineError
from agentgym_rl.scale.process_group import ProcessRanks
from agentgym_rl.training import lora
from agentgym_rl.training.ranks import SINGLE_PROCESS
from agentgym_rl.transport import broadcast
from agentgym_rl.transport.broadcast import (
    BroadcastWeights,
    Member,
    WeightsInterrupted,
    abort_group,
    send_weights,
    whole_state,
)
from agentgym_rl.types import Sampling

WAIT_S = 120.0


def state(seed: float) -> dict[str, torch.Tensor]:
    return {
        "a": torch.full((3, 5), seed),
        "b": torch.arange(7).to(torch.bfloat16) * seed,
        "c": torch.empty(0, 2),
        "d": torch.tensor(seed),
        "e": torch.full((2, 3), seed).t(),
        "f": torch.full((40, 30), seed),
    }


class Store:
    """A TCPStore of this process, and members of groups that meet there."""

    def __init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.address = f"127.0.0.1:{self._store.port}"

    def members(self, group: str, senders: int, engines: int, **changes: Any) -> list[Member]:
        size = senders + engines
        common = {"senders": senders, "backend": "gloo", "is_new": True} | changes
        return [Member(group, self.address, rank, size, **common) for rank in range(size)]


@pytest.fixture
def store() -> Store:
    return Store()


def serve_member(connection: Any) -> None:
    """Send or load on command. A member dies at the tensor named `dies_at`."""
    torch.set_num_threads(1)
    own: dict[str, torch.Tensor] = {}
    while True:
        try:
            member, version, values, bucket_bytes, dies_at = connection.recv()
        except EOFError:
            return
        if values is not None:
            reports = send_weights(deadly(values.items(), dies_at), member, version, bucket_bytes)
            connection.send(reports)
            continue
        own = own or {name: torch.zeros_like(tensor) for name, tensor in state(0.0).items()}
        try:
            load_tensors(own, deadly(BroadcastWeights(member, version).tensors(), dies_at))
            connection.send({name: tensor.float().tolist() for name, tensor in own.items()})
        except EngineError as error:
            connection.send(f"{type(error).__name__}: {error}")


def deadly(named: Iterable[tuple[str, torch.Tensor]], dies_at: str) -> Generator[tuple[str, torch.Tensor]]:
    for name, tensor in named:
        if name == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        yield name, tensor


@contextmanager
def processes(count: int) -> Iterator[list[Any]]:
    """Yield connections to processes that serve as members."""
    pipes = [CONTEXT.Pipe() for _ in range(count)]
    started = [CONTEXT.Process(target=serve_member, args=(child,), daemon=True) for _, child in pipes]
    for process, (_, child) in zip(started, pipes, strict=True):
        process.start()
        child.close()
    try:
        yield [parent for parent, _ in pipes]
    finally:
        for process, (parent, _) in zip(started, pipes, strict=True):
            parent.close()
            process.kill()
            process.join()


def answer(connection: Any) -> Any:
    assert connection.poll(WAIT_S), "a member did not answer"
    return connection.recv()


def listed(seed: float) -> dict[str, Any]:
    return {name: tensor.float().tolist() for name, tensor in state(seed).items()}


@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
def test_versions_arrive_unchanged_in_a_group_that_is_used_again(store: Store, bucket_bytes: int) -> None:
    with processes(4) as connections:
        for version in range(3):
            members = store.members("g", 2, 2, is_new=version == 0)
            for connection, member in zip(connections, members, strict=True):
                values = state(version + 1.0) if member.rank < 2 else None
                connection.send((member, version, values, bucket_bytes, ""))
            answers = [answer(connection) for connection in connections]
            assert answers == [{}, {}, listed(version + 1.0), listed(version + 1.0)]


def test_a_dead_engine_interrupts_the_group_and_a_new_group_sends_to_the_rest(store: Store) -> None:
    with processes(4) as connections:
        for connection, member in zip(connections, store.members("first", 2, 2), strict=True):
            dies_at = "d" if member.rank == 3 else ""
            connection.send((member, 0, state(1.0) if member.rank < 2 else None, 64, dies_at))
        with pytest.raises(EOFError):
            answer(connections[3])
        abort_group(store.address, "first")  # as the driver does
        for connection in connections[:2]:
            assert "is gone" in answer(connection)["first"]
        assert answer(connections[2]).startswith("WeightsInterrupted: a member of the group is gone")
        for connection, member in zip(connections[:3], store.members("second", 2, 1), strict=True):
            connection.send((member, 0, state(1.0) if member.rank < 2 else None, 64, ""))
        assert [answer(connection) for connection in connections[:3]] == [{}, {}, listed(1.0)]


def test_an_engine_fails_if_a_sender_dies_and_can_join_the_next_group(store: Store) -> None:
    with processes(3) as connections:
        for connection, member in zip(connections, store.members("first", 2, 1), strict=True):
            connection.send((member, 0, state(1.0) if member.rank < 2 else None, 64, "d" if member.rank == 1 else ""))
        assert "is gone" in answer(connections[0])["first"]
        assert "WeightsInterrupted" in answer(connections[2])
        for connection, member in zip((connections[0], connections[2]), store.members("second", 1, 1), strict=True):
            connection.send((member, 1, state(2.0) if member.rank < 1 else None, 64, ""))
        assert answer(connections[0]) == {}
        assert answer(connections[2]) == listed(2.0)


def test_a_member_that_waits_for_others_ends_when_the_group_is_aborted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = store.members("never complete", 1, 1)[0]
    abort_group(store.address, first.group)
    gathering = iter(state(1.0).items())
    assert send_weights(gathering, first, 0, 64) == {first.group: "a member of the group is gone"}
    assert list(gathering) == [], "every rank gathers everything"
    with pytest.raises(WeightsInterrupted, match="restarted after the group had been made"):
        BroadcastWeights(Member(*("other", store.address, 1, 2, 1), "gloo", is_new=False), 0).connect()
    monkeypatch.setattr(broadcast, "TIMEOUT_S", 0.2)
    with pytest.raises(WeightsInterrupted, match="waited 0 s for the other members of the group"):
        BroadcastWeights(store.members("nobody else", 1, 1)[1], 0).connect()


async def test_an_interrupted_native_engine_samples_no_token_until_it_has_a_version(store: Store) -> None:
    model, other = tiny_model(1), tiny_model(2)
    adapter = NativeAdapter(NativeEngine(model, max_sessions=2), model)
    pending = asyncio.create_task(adapter.engine.generate([1, 2, 3], Sampling(200, seed=3), "s"))
    await asyncio.sleep(0)
    for version, dies_at in ((1, "lm_head.weight"), (2, "")):
        first, second = store.members(f"group {version}", 1, 1)
        with processes(1) as (sender,):
            sender.send((first, version, dict(whole_state(other)), 1000, dies_at))
            if dies_at:
                with pytest.raises(WeightsInterrupted):
                    await adapter.load(BroadcastWeights(second, version), version)
                assert adapter.version == -1
                with pytest.raises(EngineError, match="weights 1 are incomplete"):
                    await pending
            else:
                await adapter.load(BroadcastWeights(second, version), version)
                assert answer(sender) == {}
    expected = await NativeEngine(other, max_sessions=2).generate([1, 2, 3], Sampling(6, seed=3), "t")
    found = await adapter.engine.generate([1, 2, 3], Sampling(6, seed=3), "t")
    assert (found.version, found.token_ids) == (2, expected.token_ids)
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-6)
    await adapter.engine.close()


# Ranks that learn and then broadcast, compared with one process.


def sent_state(name: str, made: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights for engines, as run/rank.py does for native engines."""
    yield from lora.merged(made.model, whole_state(made.model)) if "lora" in name else whole_state(made.model)


CASES = {2: ("grpo", "bf16, sharded", "lora"), 4: ("grpo", "lora", "hsdp")}
"""Cases by number of ranks. hsdp: two copies of two shards, of which the first copy sends."""


def member_of(case: str, size: int, address: str, rank: int = 0, engine: int | None = None) -> Member | None:
    """Return the member for a rank or an engine, or None if the rank does not send."""
    senders = {"lora": 1, "hsdp": 2}.get(case, size)
    if engine is None and rank >= senders:
        return None
    return Member(case, address, rank if engine is None else senders + engine, senders + 2, senders, "gloo", True)


def receive_cases(engine: int, size: int, address: str, folder: Path) -> None:
    torch.set_num_threads(1)
    for case in CASES[size]:
        member = member_of(case, size, address, engine=engine)
        assert member is not None
        got = {name: tensor.clone() for name, tensor in BroadcastWeights(member, 1).tensors()}
        torch.save(got, folder / f"{case} {engine}.pt")


def learn_and_broadcast(ranks: ProcessRanks, folder: Path) -> dict[str, str]:
    """Learn a step of each case on ranks, then send the weights to two engines, which are separate processes."""
    torch.set_num_threads(1)
    address, failed = (folder.parent / "address").read_text(), {}
    for case in CASES[ranks.size]:
        own = ProcessRanks(shard="lora" not in case, shard_ranks=2 if case == "hsdp" else None)
        made = learned(case, own)
        if member := member_of(case, ranks.size, address, ranks.rank):
            failed |= send_weights(sent_state(case, made), member, 1, 4096)
    return failed


def learned(case: str, ranks: Any) -> Any:
    name = "grpo" if case == "hsdp" else case
    made = learner(name, ranks)
    steps(name, made, 1)
    return made


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_engines_have_the_weights_that_one_process_would_give_them(size: int, store: Store, tmp_path: Path) -> None:
    (tmp_path / "address").write_text(store.address)
    arguments = [(engine, size, store.address, tmp_path) for engine in range(2)]
    engines = [CONTEXT.Process(target=receive_cases, args=values, daemon=True) for values in arguments]
    for engine in engines:
        engine.start()
    assert on_ranks(size, learn_and_broadcast, tmp_path, timeout_s=300.0) == {}
    for engine in engines:
        engine.join(WAIT_S)
        assert engine.exitcode == 0
    for case in CASES[size]:
        expected = dict(sent_state(case, learned(case, SINGLE_PROCESS)))
        tolerance = {"rtol": 1e-2, "atol": 1e-2} if "bf16" in case else {"rtol": 0.0, "atol": 1e-5}
        first, second = (torch.load(tmp_path / f"{case} {engine}.pt", weights_only=True) for engine in range(2))
        torch.testing.assert_close(first, expected, **tolerance)
        assert all(torch.equal(first[name], second[name]) for name in expected)
