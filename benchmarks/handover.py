"""Measure weight transfer from a learner's process to an engine's on the same machine: seconds and GB/s per version.

    python benchmarks/handover.py [--model qwen2.5-1.5b | smollm2-135m | tiny] [--versions 5] [--out FILE]

The state has the model's shape in bfloat16, on the CUDA device if there is one, else on the host.
`ipc`: an engine on the learner's device opens buckets through CUDA IPC (on a CPU: shared memory).
`broadcast`: the learner broadcasts buckets over gloo, because NCCL refuses two processes on one device.
Sender and reader work at the same time, so there is one number for both. The reader is a separate process. It copies
everything into its own tensors, which must equal the learner's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from vllm_weights import BUCKET_BYTES, make_model

from agentgym_rl.agent.engines.native.adapter import load_tensors
from agentgym_rl.transport import broadcast, device
from agentgym_rl.transport.broadcast import BroadcastWeights, Member
from agentgym_rl.transport.device import DeviceWeights, open_endpoint

State = dict[str, torch.Tensor]
Send = Callable[[State, int], None]
"""Sends a version of a state to the reader, which reports the time."""


def make_state(name: str, device: str) -> State:
    with torch.device("meta"):
        model = make_model(name)
    torch.manual_seed(0)
    return {n: torch.randn(p.shape, dtype=torch.bfloat16, device=device) for n, p in model.named_parameters()}


def checksum(state: State) -> float:
    """Return a number that changes if a tensor does."""
    return sum(float(tensor.view(-1)[:: 1 + tensor.numel() // 1000].double().sum()) for tensor in state.values())


def run_reader(connection: Any, device: str) -> None:
    """Receive states in an engine's process and report the time of each."""
    torch.zeros(1, device=device)
    own: State = {n: torch.zeros(s, dtype=torch.bfloat16, device=device) for n, s in connection.recv().items()}
    while True:
        try:
            weights: BroadcastWeights | DeviceWeights | None = connection.recv()
        except EOFError:
            return
        if weights is None:
            connection.send(open_endpoint())
            continue
        started = time.perf_counter()
        load_tensors(own, weights.tensors())
        connection.send((time.perf_counter() - started, checksum(own)))


def require_sent(failed: dict[str, str]) -> None:
    for why in failed.values():
        raise SystemExit(f"the engine did not get them: {why}")


def by_ipc(engine: Any) -> Send:
    def send(state: State, version: int) -> None:
        engine.send(None)
        endpoint = engine.recv()
        engine.send(DeviceWeights(endpoint, version))
        require_sent(device.send_weights(state.items(), version, [endpoint], BUCKET_BYTES))

    return send


def by_broadcast(engine: Any) -> Send:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def send(state: State, version: int) -> None:
        address = f"127.0.0.1:{store.port}"
        sender, receiver = (Member("group", address, rank, 2, 1, "gloo", is_new=version == 0) for rank in range(2))
        engine.send(BroadcastWeights(receiver, version))
        require_sent(broadcast.send_weights(state.items(), sender, version, BUCKET_BYTES))

    return send


def measure(state: State, kind: str, versions: int, make_send: Callable[[Any], Send]) -> list[float]:
    context = multiprocessing.get_context("spawn")
    engine, reader_end = context.Pipe()
    reader = context.Process(target=run_reader, args=(reader_end, kind), daemon=True)
    reader.start()
    reader_end.close()
    engine.send({name: tensor.shape for name, tensor in state.items()})
    send, rows = make_send(engine), []
    for version in range(versions):
        for tensor in state.values():
            tensor.mul_(-1.5)
        if kind == "cuda":
            torch.cuda.synchronize()
        send(state, version)
        seconds, received = engine.recv()
        if received != checksum(state):
            raise SystemExit(
                f"the reader's checksum is {received}, the learner's {checksum(state)}: they must be equal"
            )
        rows.append(seconds)
    engine.close()
    reader.join(60)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "smollm2-135m", "qwen2.5-1.5b"), default="smollm2-135m")
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    state = make_state(options.model, kind)
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values()) / 1e9
    print(f"{options.model}, {size:.3g} GB, bfloat16, {kind}")
    results: dict[str, Any] = {"model": options.model, "gigabytes": size, "device": kind}
    for name, make_send in (("ipc", by_ipc), ("broadcast", by_broadcast)):
        results[name] = measure(state, kind, options.versions, make_send)
        for version, seconds in enumerate(results[name]):
            print(f"{name:9} version {version}   {seconds:.3f} s  {size / seconds:5.1f} GB/s", flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
