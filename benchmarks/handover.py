"""Measure weight transfer from a learner's process to an engine's on the same machine: seconds and GB/s per version.

    python benchmarks/handover.py [--model qwen2.5-1.5b | smollm2-135m | tiny] [--versions 5] [--out FILE]

The state has the model's shape in bfloat16, on the CUDA device if there is one, else on the host.
`node`: engines on the learner's node map host memory that the learner writes.
`ipc`: an engine on the learner's device opens buckets through CUDA IPC (on a CPU: shared memory). Sender and reader
work at the same time, so there is one number for both.
`buckets`: engines on other nodes, without the network. The learner cuts buckets, one copy stands for the object store,
and the engine writes them to host memory for vLLM's worker.
The reader is a separate process. It copies everything into its own tensors, which must equal the learner's.
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
from agentgym_rl.transport.host_memory import HostMemories, HostMemory, HostWeights
from vllm_weights import BUCKET_BYTES, Store, make_model

from agentgym_rl.transport import host_memory
from agentgym_rl.transport.buckets import Staging, buckets, load_buckets, load_device_weights
from agentgym_rl.transport.device import DeviceWeights, open_endpoint, send_weights

State = dict[str, torch.Tensor]
Send = Callable[[State], dict[str, float]]
"""Sends a state to the reader, which reports its own time, and returns the seconds of the sender's parts."""


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
            weights: HostWeights | DeviceWeights | None = connection.recv()
        except EOFError:
            return
        if weights is None:
            connection.send(open_endpoint())
            continue
        started = time.perf_counter()
        if isinstance(weights, DeviceWeights):
            load_device_weights(own, weights)
        else:
            with weights.locked() as held:
                load_buckets(own, [held])
        connection.send((time.perf_counter() - started, checksum(own), host_memory.page_lock_error()))


def by_host_memory(engine: Any) -> Send:
    memories = HostMemories()

    def send(state: State) -> dict[str, float]:
        started = time.perf_counter()
        weights = memories.fill(state.items())
        engine.send(weights)
        if weights.page_lock_error:
            print(weights.page_lock_error)
        return {"write": time.perf_counter() - started}

    return send


def by_ipc(engine: Any) -> Send:
    def send(state: State) -> dict[str, float]:
        engine.send(None)
        endpoint = engine.recv()
        engine.send(DeviceWeights(endpoint, 0))
        for why in send_weights(state.items(), 0, [endpoint], BUCKET_BYTES).values():
            raise SystemExit(f"the engine did not get them: {why}")
        return {}

    return send


def by_buckets(engine: Any) -> Send:
    memory, staging, store = HostMemory(), Staging(), Store()

    def send(state: State) -> dict[str, float]:
        started = time.perf_counter()
        cut = buckets(state.items(), BUCKET_BYTES, staging=staging)
        stored = [store.put(number, bucket) for number, bucket in enumerate(cut)]
        cut_at = time.perf_counter()
        weights = memory.fill(pair for bucket in stored for pair in bucket.tensors())
        engine.send(weights)
        return {"cut": cut_at - started, "put": time.perf_counter() - cut_at}

    return send


def measure(state: State, device: str, versions: int, make_send: Callable[[Any], Send]) -> list[dict[str, float]]:
    context = multiprocessing.get_context("spawn")
    engine, reader_end = context.Pipe()
    reader = context.Process(target=run_reader, args=(reader_end, device), daemon=True)
    reader.start()
    reader_end.close()
    engine.send({name: tensor.shape for name, tensor in state.items()})
    send, rows = make_send(engine), []
    for _ in range(versions):
        for tensor in state.values():
            tensor.mul_(-1.5)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = send(state)
        seconds["read"], received, refused = engine.recv()
        if received != checksum(state):
            raise SystemExit(
                f"the reader's checksum is {received}, the learner's {checksum(state)}: they must be equal"
            )
        if refused:
            print(refused)
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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    state = make_state(options.model, device)
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values()) / 1e9
    print(f"{options.model}, {size:.3g} GB, bfloat16, {device}")
    results: dict[str, Any] = {"model": options.model, "gigabytes": size, "device": device}
    for name, make_send in (("ipc", by_ipc), ("node", by_host_memory), ("buckets", by_buckets)):
        results[name] = measure(state, device, options.versions, make_send)
        for version, row in enumerate(results[name]):
            parts = "  ".join(f"{part} {seconds:.3f} s" for part, seconds in row.items())
            total = sum(row.values())
            print(f"{name:8} version {version}   {total:.3f} s  {size / total:5.1f} GB/s   {parts}", flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
