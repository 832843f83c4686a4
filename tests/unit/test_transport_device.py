"""Weights sent from a learner to engines on its device, in the form that needs no GPU: the tensors that arrive, and the
outcome when a process dies."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes_for_tests import CONTEXT
from ranks_for_tests import on_ranks
from receiver_for_tests import receiver
from training_for_tests import tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.agent.engines.native.adapter import NativeAdapter, load_tensors
from agentgym_rl.errors import EngineError
from agentgym_rl.scale.process_group import ProcessRanks
from agentgym_rl.transport import device
from agentgym_rl.transport.broadcast import whole_state
from agentgym_rl.transport.device import DeviceWeights, Endpoint, device_id, open_endpoint, send_weights
from agentgym_rl.types import Sampling


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide CUDA even if other tests of this process use it: a process cannot share device memory with itself."""
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)


def a_state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(3, 5, generator=generator),
        "b": torch.randn(7, generator=generator).to(torch.bfloat16),
        "c": torch.empty(0, 2),
        "d": torch.randn((), generator=generator),
        "e": torch.randn(40, 30, generator=generator),
        "f": torch.randn(2, 3, generator=generator).t(),
    }


def equals(received: Any, state: dict[str, torch.Tensor]) -> bool:
    """Return whether the received bytes equal the state bit for bit."""
    assert not isinstance(received, str), received
    wanted = {name: t.contiguous().view(-1).view(torch.uint8).tolist() for name, t in state.items()}
    return {name: values.tolist() for name, values in received.items()} == wanted


def open_buffers() -> list[str]:
    """Return the shared buffers that this process has open."""
    buffers = []
    for file in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(file)
        except FileNotFoundError:
            continue  # the file of this listing itself
        if "agentgym-rl-shared" in target:
            buffers.append(target)
    return buffers


def test_another_process_gets_every_version_bit_for_bit_with_any_bucket_size() -> None:
    with receiver(a_state(0)) as engine:
        for version, bucket_bytes in enumerate((1, 200, 4096, 1 << 20)):
            state, endpoint = a_state(version), engine.open_endpoint()
            assert endpoint.device == device_id()
            engine.begin(endpoint, version)
            assert send_weights(state.items(), version, [endpoint], bucket_bytes) == {}
            assert equals(engine.result(), state)
    assert not open_buffers()


def test_a_bucket_is_written_after_the_previous_one_was_copied() -> None:
    gathered: list[int] = []

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(12):
            gathered.append(number)
            yield str(number), torch.full((16,), float(number))  # 64 bytes: four in a bucket

    endpoint = open_endpoint()
    sender = threading.Thread(target=send_weights, args=(named(), 3, [endpoint], 256), daemon=True)
    sender.start()
    for number, (name, tensor) in enumerate(DeviceWeights(endpoint, 3).tensors()):
        assert name == str(number)
        assert tensor.tolist() == [float(number)] * 16
        assert max(gathered) <= number // 4 * 4 + 4, "one tensor beyond the bucket is gathered, and none written"
        del tensor
    sender.join(60)
    assert gathered == list(range(12))
    assert not open_buffers()


async def test_a_native_engine_samples_with_device_weights_and_a_tied_head_is_sent_once() -> None:
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    learner, model = LlamaForCausalLM(config), LlamaForCausalLM(config)
    assert "lm_head.weight" not in dict(whole_state(learner))
    adapter, wanted = NativeAdapter(NativeEngine(model, max_sessions=2), model), NativeEngine(learner, max_sessions=2)
    (endpoint,) = await adapter.open_endpoints()
    sending = asyncio.create_task(asyncio.to_thread(send_weights, whole_state(learner), 7, [endpoint], 1000))
    await asyncio.sleep(0)
    await adapter.load(DeviceWeights(endpoint, 7), 7)
    assert await sending == {}
    assert torch.equal(model.lm_head.weight, learner.lm_head.weight)
    sampling = Sampling(6, temperature=1.0, seed=3)
    completion, expected = [await e.generate([1, 2, 3], sampling, "s") for e in (adapter.engine, wanted)]
    assert (completion.token_ids, completion.logprobs, completion.version) == (expected.token_ids, expected.logprobs, 7)
    await adapter.engine.close()
    await wanted.close()


def test_a_killed_engine_is_skipped_and_the_others_get_every_tensor() -> None:
    state, gathered = a_state(1), []

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in state.items():
            gathered.append(name)
            yield name, tensor

    with receiver(state) as first, receiver(state) as second, receiver(state) as absent:
        endpoints = [first.open_endpoint(), second.open_endpoint(), absent.open_endpoint()]
        absent.process.kill()
        absent.process.join(60)
        first.begin(endpoints[0], 5, dies_at="b")
        second.begin(endpoints[1], 5)
        failed = send_weights(named(), 5, endpoints, 64)
        assert failed.keys() == {endpoints[0].name, endpoints[2].name}
        assert "the connection failed (ConnectionRefused" in failed[endpoints[2].name]
        assert equals(second.result(), state)
        first.process.join(60)
        assert not first.process.is_alive()
        for endpoint in (endpoints[0], endpoints[2]):
            gathered.clear()
            assert send_weights(named(), 6, [endpoint], 64).keys() == {endpoint.name}
            assert gathered == list(state), "gathering takes every rank, whether or not its engine is there"
    assert not open_buffers()


def send_and_die(endpoint: Endpoint) -> None:
    def named() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(4)
        yield "b", torch.ones(4)
        yield "c", torch.ones(4)
        os._exit(9)

    send_weights(named(), 2, [endpoint], 64)


async def test_an_engine_whose_learner_died_has_no_version_until_a_complete_load() -> None:
    model = tiny_model(1)
    adapter = NativeAdapter(NativeEngine(model, max_sessions=2), model)
    adapter.engine.version = 1
    own = {name: torch.zeros(4) for name in "abcd"}
    adapter._model = type("Model", (), {"state_dict": lambda self: own})()
    (endpoint,) = await adapter.open_endpoints()
    process = CONTEXT.Process(target=send_and_die, args=(endpoint,))
    process.start()
    with pytest.raises(EngineError, match="the learner was gone before it had sent all of weights 2"):
        await adapter.load(DeviceWeights(endpoint, 2), 2)
    assert adapter.version == -1
    assert own["a"].all(), "it was already partly overwritten"
    process.join(60)
    assert process.exitcode == 9
    (endpoint,) = await adapter.open_endpoints()
    sender = threading.Thread(
        target=send_weights, args=({n: torch.full((4,), 2.0) for n in own}.items(), 3, [endpoint], 64)
    )
    sender.start()
    await adapter.load(DeviceWeights(endpoint, 3), 3)
    sender.join(60)
    assert adapter.version == 3
    assert all(tensor.tolist() == [2.0] * 4 for tensor in own.values())


def test_a_tensor_is_freed_without_garbage_collection_when_an_engine_dies() -> None:
    state, clones = a_state(3), []

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in state.items():
            clone = tensor.clone()
            clones.append(weakref.ref(clone))
            yield name, clone
            del clone

    gc.disable()
    try:
        with receiver(state) as engine:
            endpoint = engine.open_endpoint()
            engine.begin(endpoint, 1, dies_at="f")
            assert send_weights(named(), 1, [endpoint], 64).keys() == {endpoint.name}
            assert len(clones) == len(state)
            assert [clone() for clone in clones] == [None] * len(clones)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("sent", "version", "message"),
    [
        ({"a": torch.ones(2), "b": torch.ones(4)}, 4, r"b has shape \(4,\), needed \(3,\)"),
        ({"a": torch.ones(2), "c": torch.ones(3)}, 4, "unexpected c"),
        ({"a": torch.ones(2)}, 4, "missing b"),
        ({"a": torch.ones(2), "b": torch.ones(3)}, 5, "needed weights 4, the learner sends weights 5"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_the_sender_does_not_hang(
    sent: dict[str, torch.Tensor], version: int, message: str
) -> None:
    own = {"a": torch.zeros(2), "b": torch.zeros(3)}
    endpoint, failed = open_endpoint(), []
    sender = threading.Thread(
        target=lambda: failed.append(send_weights(sent.items(), version, [endpoint], 1)), daemon=True
    )
    sender.start()
    with pytest.raises(EngineError, match=message):
        load_tensors(own, DeviceWeights(endpoint, 4).tensors())
    sender.join(60)
    assert not sender.is_alive()
    assert bool(failed[0]) == ("missing" not in message)
    assert not own["b"].any()


def test_an_endpoint_serves_one_version_and_only_clients_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="this process does not listen for weights 1"):
        next(DeviceWeights(Endpoint("elsewhere", "00", device_id()), 1).tensors())
    old = open_endpoint()
    endpoint = open_endpoint()
    with pytest.raises(EngineError, match="does not listen for weights 1"):
        next(DeviceWeights(old, 1).tensors())
    assert "ConnectionRefused" in send_weights([], 1, [old], 1)[old.name], "the endpoint is closed"
    monkeypatch.setattr(device, "AUTH_TIMEOUT_S", 0.1)
    failed: list[dict[str, str]] = []

    def connect_as_others() -> None:
        with socket.socket(socket.AF_UNIX) as hangs_up, socket.socket(socket.AF_UNIX) as slow:
            hangs_up.connect(endpoint.name)
            hangs_up.close()
            slow.connect(endpoint.name)
            slow.send(endpoint.key[:3].encode())
            failed.append(send_weights([], 1, [endpoint._replace(key="00")], 1))
            failed.append(send_weights([("a", torch.ones(3))], 1, [endpoint], 1))

    others = threading.Thread(target=connect_as_others)
    others.start()
    assert [(name, tensor.tolist()) for name, tensor in DeviceWeights(endpoint, 1).tensors()] == [("a", [1.0] * 3)]
    others.join(60)
    assert [list(names) for names in failed] == [[endpoint.name], []]
    with monkeypatch.context() as as_another_user:
        endpoint = open_endpoint()
        as_another_user.setattr("os.geteuid", lambda: -1)
        assert "PermissionError" in send_weights([], 1, [endpoint], 1)[endpoint.name]


def test_a_sender_that_disconnects_fails_and_a_late_close_keeps_the_new_endpoint() -> None:
    endpoint = open_endpoint()
    with socket.socket(socket.AF_UNIX) as sender:
        sender.connect(endpoint.name)
        sender.sendall(endpoint.key.encode())
    with pytest.raises(EngineError, match="was gone before it had sent all of weights"):
        next(DeviceWeights(endpoint, 1).tensors())
    second = open_endpoint()
    stale = DeviceWeights(second, 2).tensors()
    others = threading.Thread(target=send_weights, args=([("a", torch.ones(3))], 2, [second], 1))
    others.start()
    next(stale)
    third = open_endpoint()
    stale.close()
    others.join(60)
    assert device._listening is not None
    assert device._listening[0] == third


def test_an_engine_that_does_not_answer_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "ANSWER_TIMEOUT_S", 0.2)
    endpoint = open_endpoint()  # but nothing accepts connections
    assert "TimeoutError('no answer" in send_weights(a_state(0).items(), 1, [endpoint], 64)[endpoint.name]
    state = a_state(1)
    with receiver(state) as stays, receiver(state) as hangs:
        endpoints = [stays.open_endpoint(), hangs.open_endpoint()]
        monkeypatch.setattr(device, "ANSWER_TIMEOUT_S", 3.0)
        stays.begin(endpoints[0], 1)
        hangs.begin(endpoints[1], 1)

        def named() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in state.items():
                if name == "e":
                    os.kill(hangs.process.pid, signal.SIGSTOP)
                yield name, tensor

        assert "TimeoutError" in send_weights(named(), 1, endpoints, 64).pop(endpoints[1].name)
        assert equals(stays.result(), state)
        hangs.process.kill()


def test_torch_still_has_the_ipc_fields_that_are_used_here() -> None:
    """Only the names are checked; tests/gpu checks their behaviour."""
    assert {"storage_device", "ref_counter_handle", "ref_counter_offset"} < device.IPC_FIELDS.keys()
    assert device.IPC_FIELDS["tensor_cls"] == 0
    assert callable(torch.UntypedStorage._release_ipc_counter)
    assert callable(torch.cuda.memory._set_allocator_settings)


def send_on_ranks(ranks: ProcessRanks, folder: Path) -> list[Any]:
    """Send three versions from each rank to an engine in its process. The last rank's engine rejects the second."""
    learner, engine = tiny_model(1), tiny_model(2)
    ranks.prepare_model(learner)
    results = []
    for version in range(3):
        with torch.no_grad():
            for parameter in learner.parameters():
                parameter.mul_(-1.5)
        endpoint, failed = open_endpoint(), []
        broken = version == 1 and ranks.rank == ranks.size - 1

        def take(
            endpoint: Endpoint = endpoint, version: int = version, broken: bool = broken, failed: Any = failed
        ) -> None:
            own = engine.state_dict()
            if broken:
                own.pop("model.norm.weight")
            try:
                load_tensors(own, DeviceWeights(endpoint, version).tensors())
            except EngineError as error:
                failed.append(str(error))

        taker = threading.Thread(target=take)
        taker.start()
        left_out = send_weights(whole_state(learner), version, [endpoint], 3000)
        taker.join(300)
        whole = dict(whole_state(learner))
        same = all(torch.equal(tensor, whole[name]) for name, tensor in engine.state_dict().items())
        mine = (same, len(left_out), failed)
        every: list[Any] = [None] * ranks.size
        torch.distributed.all_gather_object(every, mine)
        results.append(every)
    return results


@pytest.mark.timeout(900)
def test_two_ranks_send_to_two_engines_and_a_failure_does_not_block_the_other(tmp_path: Path) -> None:
    fine = (True, 0, [])
    first, second, third = on_ranks(2, send_on_ranks, tmp_path)
    assert first == third == [fine, fine]
    assert second[0] == fine
    same, left_out, why = second[1]
    assert (same, left_out) == (False, 1)
    assert why == ["the weights do not fit the engine's model: unexpected model.norm.weight"]


def test_a_learner_that_never_connects_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "ANSWER_TIMEOUT_S", 0.05)
    weights = DeviceWeights(open_endpoint(), 3)
    with pytest.raises(EngineError, match="the learner with weights 3 did not connect within 0 s"):
        load_tensors({}, weights.tensors())


def test_other_allocator_settings_survive_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[str] = []
    monkeypatch.setattr("torch.cuda.memory._set_allocator_settings", settings.append)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128,expandable_segments:True")
    with device._fixed_segments():
        assert settings == ["max_split_size_mb:128,expandable_segments:True,expandable_segments:False"]
    assert settings[1:] == ["max_split_size_mb:128,expandable_segments:True"]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")  # has precedence if both are set
    with device._fixed_segments():
        assert len(settings) == 2
