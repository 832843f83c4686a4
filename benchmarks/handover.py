"""Weights from a learner's process to an engine's on the same machine: seconds and GB/s, version by version.

    python benchmarks/handover.py [--model qwen2.5-1.5b | smollm2-135m | tiny] [--versions 5] [--out FILE]

A state of the model's shape in bfloat16, on the CUDA device if there is one, else on the host. `node` is what engines
on the learner's node get: memory that the learner writes and the engine's process maps. `lent` is what an engine gets
that shares the learner's device: buckets that it opens there through CUDA IPC, or on a CPU in memory that it maps; both
work at the same time, so there is one figure for both. `buckets` is what those on other nodes get, less the network:
the learner cuts buckets, which are copied once as into an object store, and the engine puts them into such memory for
vLLM's worker. Reading is a process of its own that copies everything into tensors on its own device, which must be what
the learner has.
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
from vllm_weights import BUCKET_BYTES, Store, make_model

from agentgym_rl.transport import host_memory
from agentgym_rl.transport.buckets import Staging, buckets, load_buckets, load_device_weights
from agentgym_rl.transport.device import DeviceWeights, open_endpoint, send_weights
from agentgym_rl.transport.host_memory import HostMemories, HostMemory, HostWeights

State = dict[str, torch.Tensor]
Send = Callable[[State], dict[str, float]]
"""Hands a state to the engine's process, which then says how long it read; gives the seconds before that."""


def make_state(name: str, device: str) -> State:
    with torch.device("meta"):
        model = make_model(name)
    torch.manual_seed(0)
    return {n: torch.randn(p.shape, dtype=torch.bfloat16, device=device) for n, p in model.named_parameters()}


def total(state: State) -> float:
    """Another if a tensor is."""
    return sum(float(tensor.view(-1)[:: 1 + tensor.numel() // 1000].double().sum()) for tensor in state.values())


def read(connection: Any, device: str) -> None:
    """An engine's process."""
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
        connection.send((time.perf_counter() - started, total(own), host_memory.page_lock_error()))


def node(engine: Any) -> Send:
    memories = HostMemories()

    def send(state: State) -> dict[str, float]:
        started = time.perf_counter()
        weights = memories.fill(state.items())
        engine.send(weights)
        if weights.page_lock_error:
            print(weights.page_lock_error)
        return {"write": time.perf_counter() - started}

    return send


def lent(engine: Any) -> Send:
    def send(state: State) -> dict[str, float]:
        engine.send(None)
        endpoint = engine.recv()
        engine.send(DeviceWeights(endpoint, 0))
        for why in send_weights(state.items(), 0, [endpoint], BUCKET_BYTES).values():
            raise SystemExit(f"the engine was not lent them: {why}")
        return {}

    return send


def in_buckets(engine: Any) -> Send:
    memory, staging, store = HostMemory(), Staging(), Store()

    def send(state: State) -> dict[str, float]:
        started = time.perf_counter()
        cut = buckets(state.items(), BUCKET_BYTES, staging=staging)
        stored = [store.put(number, bucket) for number, bucket in enumerate(cut)]
        halfway = time.perf_counter()
        weights = memory.fill(pair for bucket in stored for pair in bucket.tensors())
        engine.send(weights)
        return {"cut": halfway - started, "put": time.perf_counter() - halfway}

    return send


def measure(state: State, device: str, versions: int, way: Callable[[Any], Send]) -> list[dict[str, float]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    reader = context.Process(target=read, args=(theirs, device), daemon=True)
    reader.start()
    theirs.close()
    ours.send({name: tensor.shape for name, tensor in state.items()})
    send, rows = way(ours), []
    for _ in range(versions):
        for tensor in state.values():
            tensor.mul_(-1.5)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = send(state)
        seconds["read"], found, refused = ours.recv()
        if found != total(state):
            raise SystemExit(f"what was read adds up to {found}, not to {total(state)}: it is not what was written")
        if refused:
            print(refused)
        rows.append(seconds)
    ours.close()
    reader.join(60)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "smollm2-135m", "qwen2.5-1.5b"), default="smollm2-135m")
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    state = make_state(options.model, device)
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values()) / 1e9
    print(f"{options.model}, {size:.3g} GB, bfloat16, {device}")
    found: dict[str, Any] = {"model": options.model, "gigabytes": size, "device": device}
    for name, way in (("lent", lent), ("node", node), ("buckets", in_buckets)):
        found[name] = measure(state, device, options.versions, way)
        for version, row in enumerate(found[name]):
            parts = "  ".join(f"{part} {seconds:.3f} s" for part, seconds in row.items())
            whole = sum(row.values())
            print(f"{name:8} version {version}   {whole:.3f} s  {size / whole:5.1f} GB/s   {parts}", flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
