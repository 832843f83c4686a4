"""Broadcasts with tensors on a device. NCCL between several devices needs several GPUs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes_for_tests import beside

from agentgym_rl.transport import broadcast
from agentgym_rl.transport.broadcast import BroadcastWeights, Member, send_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_device(seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of several types and shapes, one of them empty and one not contiguous."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return {
        "a": torch.randn(4096, 2049, device="cuda", generator=generator).to(torch.bfloat16),
        "b": torch.randn(7, device="cuda", generator=generator),
        "c": torch.empty(0, 2, device="cuda"),
        "d": torch.randn(33, 5, device="cuda", generator=generator).t(),
    }


def receive(connection: Any, device: str) -> None:
    while True:
        try:
            member, version = connection.recv()
        except EOFError:
            return
        named = BroadcastWeights(member, version).tensors()
        connection.send({name: tensor.to(device).cpu().float().numpy() for name, tensor in named})


def test_a_learner_and_an_engine_on_one_device_exchange_weights_over_gloo() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with beside(receive, "cuda") as (connection, _):
        for version in range(3):
            common = ("group", f"127.0.0.1:{store.port}")
            first, second = (Member(*common, rank, 2, 1, "gloo", is_new=version == 0) for rank in range(2))
            connection.send((second, version))
            assert send_weights(on_device(version).items(), first, version, 1 << 20) == {}
            assert connection.poll(300)
            found = connection.recv()
            assert list(found) == list(on_device(version))
            for name, tensor in on_device(version).items():
                assert torch.equal(torch.from_numpy(found[name]), tensor.cpu().float())
    broadcast.leave()


def test_nccl_makes_a_group_sends_and_is_aborted_without_an_end_of_the_process() -> None:
    """A group of one: all that NCCL does on one device."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    member = Member("nccl", f"127.0.0.1:{store.port}", 0, 1, 1, "nccl", is_new=True)
    for version in range(2):
        assert send_weights(on_device(version).items(), member, version, 1 << 20) == {}
    group = broadcast.join(member)
    tensor = torch.arange(5.0, device="cuda")
    group.finish(group.start(tensor, 0))
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    closing = threading.Thread(target=broadcast.leave)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
