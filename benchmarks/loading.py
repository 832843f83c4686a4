"""Measure the host memory that ranks need to load a model, beside the bytes of its bf16 weights, and the time.

    python benchmarks/loading.py [--model 7b | 1.5b | tiny] [--ranks 4] [--folder FOLDER] [--out FILE]
    python benchmarks/loading.py --device cuda --model 7b --ranks 1    a GPU for each rank; also the GPU's peak

Random weights of the model's shape are written in files of about 400 MB, one file at a time. Each rank makes the
model on the meta device, shards it and reads its part. The peak is taken over samples of all ranks at once:
`anonymous` is memory that only the processes hold (RSS less what is mapped from files or shared), `pss` also counts
mapped pages of the files, which the kernel can drop, each once per node. What ranks hold before they load (Python,
torch) is subtracted, and reported as `before`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from agentgym_rl.scale.process_group import ProcessRanks, join
from agentgym_rl.training.meta import fill, make_empty

MODELS = {"7b": "qwen2.5-7b", "1.5b": "qwen2.5-1.5b", "tiny": "tiny"}
"""Names of shapes in gpu_parts/common.py."""
MAX_FILE_BYTES = 400 << 20
SAMPLE_INTERVAL_S = 0.1
"""Seconds between samples: each reads the page tables of all ranks."""


def write_model(folder: Path, name: str) -> int:
    """Write a model of random bf16 weights, a file at a time; return the bytes of its weights."""
    from common import CLASSES, SHAPES

    config = SHAPES[MODELS[name]]
    config.architectures, config.dtype = [CLASSES[config.model_type].__name__], torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    files: list[list[str]] = [[]]
    room = MAX_FILE_BYTES
    for tensor, shape in shapes.items():
        if files[-1] and 2 * shape.numel() > room:
            files.append([])
            room = MAX_FILE_BYTES
        files[-1].append(tensor)
        room -= 2 * shape.numel()
    noise = torch.empty(1 << 20, dtype=torch.bfloat16).normal_(std=0.02)
    for i, names in enumerate(files, start=1):
        path = folder / f"model-{i:05d}-of-{len(files):05d}.safetensors"
        if not path.is_file():
            tensors = {n: noise.repeat(-(-shapes[n].numel() // len(noise)))[: shapes[n].numel()] for n in names}
            save_file({n: t.view(shapes[n]) for n, t in tensors.items()}, path, {"format": "pt"})
    return 2 * sum(shape.numel() for shape in shapes.values())


def run_rank(rank: int, size: int, address: str, kind: str, folder: str, ready: Any, loaded: Any, ends: Any) -> None:
    torch.set_num_threads(1)
    device = "cpu" if kind == "cpu" else f"cuda:{rank}"
    join(rank, size, address, device)
    ranks = ProcessRanks(device)
    ready.wait()  # the parent takes what every rank holds already
    ready.wait()
    started = time.perf_counter()
    model = make_empty(folder, torch.bfloat16)
    ranks.prepare_model(model)
    fill(model, folder, device)
    if kind == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    loaded.put((seconds, torch.cuda.max_memory_allocated() if kind == "cuda" else 0))
    ends.wait()
    torch.distributed.destroy_process_group()


def held(pids: list[int]) -> tuple[int, int]:
    """Return (bytes of anonymous memory, proportional set size) of processes."""
    sums = {"Pss:": 0, "Anonymous:": 0}
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            key, *rest = line.split()
            if key in sums:
                sums[key] += int(rest[0]) << 10
    return sums["Anonymous:"], sums["Pss:"]


def measure(folder: Path, size: int, kind: str) -> dict[str, Any]:
    """Load the model of a folder on `size` ranks and return bytes and seconds."""
    context = multiprocessing.get_context("spawn")
    ready, ends, loaded = context.Barrier(size + 1), context.Event(), context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    arguments = (size, address, kind, str(folder), ready, loaded, ends)
    processes = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(size)]
    for process in processes:
        process.start()
    pids = [process.pid for process in processes if process.pid]
    ready.wait()
    before = held(pids)
    ready.wait()
    peak = before
    results: list[tuple[float, int]] = []
    while len(results) < size:
        now = held(pids)
        peak = max(peak[0], now[0]), max(peak[1], now[1])
        while not loaded.empty():
            results.append(loaded.get())
        if any(process.exitcode for process in processes):
            raise RuntimeError("a rank failed")
        time.sleep(SAMPLE_INTERVAL_S)
    after = held(pids)
    ends.set()
    for process in processes:
        process.join()
    names = ("anonymous", "pss")
    return {
        "before": dict(zip(names, before, strict=True)),
        "peak": dict(zip(names, peak, strict=True)),
        "after": dict(zip(names, after, strict=True)),
        "seconds": round(max(seconds for seconds, _ in results), 2),
        "device_bytes": max(num_bytes for _, num_bytes in results),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="1.5b")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--folder", type=Path, help="where to write the model, or to find it; by default a temporary folder"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent / "gpu_parts"))
    folder = args.folder or Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    try:
        weights = write_model(folder, args.model)
        found = {"model": args.model, "ranks": args.ranks, "bf16_bytes": weights, "cpus": os.cpu_count()}
        found |= {"device": args.device} | measure(folder, args.ranks, args.device)
    finally:
        if args.folder is None:
            shutil.rmtree(folder)
    for kind in ("anonymous", "pss"):
        loading = found["peak"][kind] - found["before"][kind]
        found[f"{kind}_ratio"] = round(loading / weights, 3)
        print(
            f"{kind}: {loading / 1e9:.2f} GB more than before at the peak, {found[f'{kind}_ratio']} x the "
            f"{weights / 1e9:.2f} GB of the weights in bf16 ({found['before'][kind] / 1e9:.2f} GB before)"
        )
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
