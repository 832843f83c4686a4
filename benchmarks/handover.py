"""Weights from a learner's process to an engine's on the same machine: seconds and GB/s, version by version.

    python benchmarks/handover.py [--model qwen2.5-1.5b | smollm2-135m | tiny] [--versions 5] [--out FILE]

A state of the model's shape in bfloat16, on the CUDA device if there is one, else on the host. `node` is what engines
on the learner's node get: memory that the learner writes and the engine's process maps. `buckets` is what those on
other nodes get, less the network: the learner cuts buckets, which are copied once as into an object store, and the
engine puts them into such memory for vLLM's worker. Reading is a process of its own that copies everything into tensors
on its own device, which must be what the learner has.
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

from agentgym_rl.agent.engines import handover
from agentgym_rl.agent.engines.handover import HostMemories, HostMemory, HostWeights
from agentgym_rl.scale.weights import Staging, buckets, load_buckets

State = dict[str, torch.Tensor]


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
    own: State = {}
    torch.zeros(1, device=device)
    while True:
        try:
            weights: HostWeights = connection.recv()
        except EOFError:
            return
        own = own or {n: torch.zeros(s, dtype=torch.bfloat16, device=device) for n, _, s, _ in weights.entries}
        started = time.perf_counter()
        with weights.held() as held:
            load_buckets(own, [held])
        connection.send((time.perf_counter() - started, total(own), handover.refused()))


def node() -> Callable[[State], tuple[dict[str, float], HostWeights]]:
    memories = HostMemories()

    def send(state: State) -> tuple[dict[str, float], HostWeights]:
        started = time.perf_counter()
        weights = memories.fill(state.items())
        return {"write": time.perf_counter() - started}, weights

    return send


def in_buckets() -> Callable[[State], tuple[dict[str, float], HostWeights]]:
    memory, staging, store = HostMemory(), Staging(), Store()

    def send(state: State) -> tuple[dict[str, float], HostWeights]:
        started = time.perf_counter()
        cut = buckets(state.items(), BUCKET_BYTES, staging=staging)
        stored = [store.put(number, bucket) for number, bucket in enumerate(cut)]
        halfway = time.perf_counter()
        weights = memory.fill(pair for bucket in stored for pair in bucket.tensors())
        return {"cut": halfway - started, "put": time.perf_counter() - halfway}, weights

    return send


def measure(state: State, device: str, versions: int, way: Callable[[], Any]) -> list[dict[str, float]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    reader = context.Process(target=read, args=(theirs, device), daemon=True)
    reader.start()
    theirs.close()
    send, rows = way(), []
    for _ in range(versions):
        for tensor in state.values():
            tensor.mul_(-1.5)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds, weights = send(state)
        ours.send(weights)
        seconds["read"], found, refused = ours.recv()
        if found != total(state):
            raise SystemExit(f"what was read adds up to {found}, not to {total(state)}: it is not what was written")
        for remark in filter(None, (weights.refused, refused)):
            print(remark)
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
    for name, way in (("node", node), ("buckets", in_buckets)):
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
