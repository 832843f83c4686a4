"""Measure vLLM with a learner: seconds to start, load weights each way, sleep and wake, and their differences.

    python benchmarks/vllm_weights.py [--model qwen2.5-1.5b | smollm2-135m | tiny] [--rounds 5] [--episodes 64]
    python benchmarks/vllm_weights.py --eager --vllm-only     without CUDA graphs

Weights are random, in the model's shape. Each update changes every tensor and moves log-probabilities several times as
far as engine and learner may differ. The check that the engine has the learner's bits is part of the time. A step is a
rollout (two turns per episode: prompts of 256 tokens, replies of 64) and a plain forward and backward pass over its
tokens; updates are also given as shares of a step. `memory` shares the state of this process (CUDA IPC). The others are
those of a cluster: `ipc` if a rank and an engine share a device (buckets through CUDA IPC), `broadcast` otherwise
(over gloo here, because NCCL refuses two processes on one device). The first two updates of each allocate buffers, so
results are medians of the rest. On CUDA vLLM also sleeps: its memory before, during and after, and the change of
log-probabilities. Adapters need an engine that reserves memory for them, so they come last, on an eager engine. On a
CPU everything runs in float32, CUDA IPC is replaced by shared memory, and vLLM does not sleep.

Differences between engine and learner are reported at the start, after the first update each way, and after a sleep:
for a reply's first token (prefill) and later ones (decoded, with CUDA graphs unless `--eager`), for the first turn and
the second (prompt partly in the prefix cache), and for the same tokens scored as a prompt (no decoding, no cache). For
comparison, the learner's difference from itself in float32 is reported too. The command exits with code 1, after all
results are written, if a mean is above 0.1 in bfloat16 or 0.001 in float32.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import importlib.util
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.agent.engines.native.adapter import load_tensors
from agentgym_rl.agent.engines.vllm import Probe, VllmEngine, probe_model
from agentgym_rl.agent.engines.vllm.probe import TOLERANCE
from agentgym_rl.agent.engines.vllm.requirements import require_vllm
from agentgym_rl.errors import EngineError
from agentgym_rl.run.backend_vllm import VllmAdapter
from agentgym_rl.transport import broadcast
from agentgym_rl.transport.broadcast import BroadcastWeights, Member, wait_for_copies, whole_state
from agentgym_rl.transport.device import DeviceWeights, send_weights
from agentgym_rl.types import Sampling

PROMPT_TOKENS, NEW_TOKENS, TURNS = 256, 64, 2
CONTEXT = TURNS * (PROMPT_TOKENS + NEW_TOKENS)
PASS_TOKENS = 8192
"""Tokens of one forward and backward pass."""
BUCKET_BYTES = 256 << 20
WAYS = ("files", "memory", "ipc", "broadcast")
COMPARED = 8
"""Episodes whose log-probabilities are compared."""
FACTOR, NORM_FACTOR = 1.03125, 1.5
"""Factors of an update, for all tensors and for the last norm. The norm alone moves log-probabilities by half a unit.
If all tensors grew by its factor, two correct bfloat16 passes of a random network of 28 layers would differ by 0.15."""

Report = dict[str, Any]
Work = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Reply:
    """Tokens that an engine sampled in one turn."""

    turn: int
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]


def make_model(name: str) -> Any:
    common: dict[str, Any] = {"tie_word_embeddings": True, "max_position_embeddings": 2048}
    if name == "tiny":
        shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=512, num_key_value_heads=1, **shape, **common))
    if name == "smollm2-135m":
        shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
        return LlamaForCausalLM(LlamaConfig(vocab_size=49152, num_key_value_heads=3, **shape, **common))
    shape = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=151936, num_key_value_heads=2, **shape, **common))


@torch.no_grad()
def without_zeros(model: Any) -> Any:
    """Replace zero tensors such as biases by noise, because no factor changes a zero."""
    for parameter in model.parameters():
        if not parameter.any():
            parameter.normal_(std=0.02)
    return model


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """Convert the parameters only, as loading a model does. `model.to(dtype)` also rounds the rotary frequencies, which
    no engine does, so positions would differ."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@torch.no_grad()
def change(model: Any, back: bool) -> None:
    """Multiply every tensor by its factor, or divide (`back`), so that the model does not grow without bound."""
    for name, parameter in model.named_parameters():
        factor = NORM_FACTOR if name == "model.norm.weight" else FACTOR
        parameter.mul_(1 / factor if back else factor)


class Moves:
    """Check that updates reach the engine: each must move scores by more than three times the tolerance."""

    def __init__(self, engine: VllmEngine, probe: Probe) -> None:
        self._engine, self._probe = engine, probe
        self._needed = 3 * probe.tolerance
        self._last: list[float] = []
        self.least = float("inf")

    async def begin(self) -> None:
        self._last = await self._engine.score(self._probe.token_ids)

    async def require(self, way: str) -> None:
        before = self._last
        await self.begin()
        moved = mean_difference(before, self._last)
        self.least = min(self.least, moved)
        if not moved > self._needed:
            raise EngineError(
                f"an update by {way} should move log-probabilities by more than {self._needed:g} per token, "
                f"they moved by {moved:.3g}: the engine did not apply it, or it is too small to be seen"
            )


def mean_difference(first: list[float], second: list[float]) -> float:
    """Return the mean absolute difference of log-probabilities."""
    return statistics.fmean(abs(a - b) for a, b in zip(first, second, strict=True))


async def timed(work: Awaitable[Any]) -> float:
    synchronize()
    started = time.perf_counter()
    await work
    synchronize()
    return time.perf_counter() - started


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


async def rollout(engine: Any, episodes: int, sampling: Sampling) -> list[Reply]:
    """Play all episodes and return the reply of every turn."""

    async def episode(number: int) -> list[Reply]:
        ids: list[int] = []
        turns = []
        for turn in range(TURNS):
            ids = ids + [(7 * n + 13 * number + turn) % 500 for n in range(PROMPT_TOKENS)]
            reply = await engine.generate(ids, sampling, str(number))
            turns.append(Reply(turn, ids, reply.token_ids, reply.logprobs))
            ids = ids + reply.token_ids
        await engine.release(str(number))
        return turns

    played = await asyncio.gather(*(episode(n) for n in range(episodes)))
    return [reply for turns in played for reply in turns]


def learn(model: Any, episodes: int) -> None:
    """Run forward and backward over the episodes' number of tokens and discard the gradients."""
    rows = max(1, PASS_TOKENS // CONTEXT)
    device = model.get_input_embeddings().weight.device
    for first in range(0, episodes, rows):
        ids = torch.randint(0, 500, (min(rows, episodes - first), CONTEXT), device=device)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)


@torch.no_grad()
def model_logprobs(model: Any, reply: Reply) -> list[float]:
    """Return the model's log-probabilities of a reply."""
    whole = torch.tensor([reply.prompt_ids + reply.token_ids], device=model.get_input_embeddings().weight.device)
    first = len(reply.prompt_ids)
    logits = model(input_ids=whole, use_cache=False).logits[0, first - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(1, whole[0, first:, None])[:, 0].tolist()


async def compare(model: Any, engine: Any, episodes: int) -> Report:
    """Return mean and largest differences of log-probabilities, by kind of token."""
    played = await rollout(engine, min(COMPARED, episodes), Sampling(NEW_TOKENS, seed=0))
    differences: dict[str, list[float]] = {}

    def note(name: str, first: list[float], second: list[float]) -> None:
        differences.setdefault(name, []).extend(abs(a - b) for a, b in zip(first, second, strict=True))

    exact = in_dtype(copy.deepcopy(model), torch.float32) if model.dtype != torch.float32 else None
    for reply in played:
        learner, sampled = model_logprobs(model, reply), reply.logprobs
        note("sampled - learner", sampled, learner)
        note(f"turn {reply.turn + 1}, first token - learner", sampled[:1], learner[:1])
        note(f"turn {reply.turn + 1}, later tokens - learner", sampled[1:], learner[1:])
        if isinstance(engine, VllmEngine):  # one at a time: on a CPU vLLM crashes with several
            scored = (await engine.score(reply.prompt_ids + reply.token_ids))[len(reply.prompt_ids) - 1 :]
            note("scored - learner", scored, learner)
            note("sampled - scored", sampled, scored)
        if exact is not None:
            note("learner - itself in float32", learner, model_logprobs(exact, reply))
    return {name: {"mean": statistics.fmean(d), "max": max(d)} for name, d in sorted(differences.items())}


def too_far(differences: dict[str, Report], dtype: torch.dtype) -> list[str]:
    """Return the comparisons whose difference is larger than rounding explains."""
    limit = TOLERANCE[dtype]
    return [
        f"{when}: {name} is {row['mean']:.3g} on average, allowed {limit:g}"
        for when, rows in differences.items()
        for name, row in rows.items()
        if not row["mean"] <= limit and "itself" not in name  # NaN counts as too far
    ]


async def updates(
    model: Any,
    engine: VllmEngine,
    root: Path,
    options: argparse.Namespace,
    differ: Callable[[str, Report], None],
) -> Report:
    """Seconds of each way, of a rollout, and of a pass over it. Tells `differ` how far apart engine and learner are."""
    adapter = VllmAdapter(engine)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    groups = itertools.count()

    async def by_folder() -> None:
        model.save_pretrained(root / "new")
        await engine.update_weights(root / "new", engine.version + 1, probe=probe_model(model))

    async def in_memory() -> None:
        await engine.update_weights(model.state_dict(), engine.version + 1, probe=probe_model(model))

    async def by_broadcast() -> None:
        """Update as on a cluster: the rank broadcasts buckets. The group of the first update is used again."""
        version, is_new = engine.version + 1, next(groups) == 0
        address, probe = f"127.0.0.1:{store.port}", probe_model(model)
        sender, receiver = (Member("group", address, rank, 2, 1, "gloo", is_new) for rank in range(2))
        sending = asyncio.create_task(
            asyncio.to_thread(broadcast.send_weights, whole_state(model), sender, version, BUCKET_BYTES)
        )
        await adapter.load(BroadcastWeights(receiver, version), version, probe)
        if failed := await sending:
            raise RuntimeError(f"vLLM did not get the weights: {failed}")

    async def on_the_device() -> None:
        """Update as on a shared device: the rank shares its buckets, vLLM's worker copies them."""
        version = engine.version + 1
        probe, (endpoint,) = probe_model(model), await adapter.open_endpoints()
        sending = asyncio.create_task(
            asyncio.to_thread(send_weights, whole_state(model), version, [endpoint], BUCKET_BYTES)
        )
        loading = asyncio.create_task(adapter.load(DeviceWeights(endpoint, version), version, probe))
        if failed := await sending:
            raise RuntimeError(f"vLLM did not get the weights: {failed}")
        await loading

    async def play() -> None:
        await rollout(engine, options.episodes, Sampling(NEW_TOKENS, seed=0))

    async def passes() -> None:
        await asyncio.to_thread(learn, model, options.episodes)

    differ("at the start", await compare(model, engine, options.episodes))
    await play()  # warm-up
    await passes()
    functions = (by_folder, in_memory, on_the_device, by_broadcast)
    ways: dict[str, Work] = dict(zip(WAYS, functions, strict=True))
    seconds: dict[str, list[float]] = {name: [] for name in (*ways, "rollout", "learn")}
    moves, back = Moves(engine, probe_model(model)), False
    await moves.begin()
    for number in range(options.rounds):
        for name, work in ways.items():
            change(model, back)
            back = not back
            seconds[name].append(await timed(work()))
            await moves.require(name)
            if number == 0:
                differ(f"after {name}", await compare(model, engine, options.episodes))
        seconds["rollout"].append(await timed(play()))
        seconds["learn"].append(await timed(passes()))
    results = {name: statistics.median(values[2:] or values) for name, values in seconds.items()}
    new_tokens, stats = options.episodes * TURNS * NEW_TOKENS, engine.stats()
    return {
        "seconds": results,
        "each": seconds,
        "new_tokens_per_s": new_tokens / results["rollout"],
        "prompt_tokens_reused": stats["prompt_tokens_reused"] / stats["prompt_tokens"],
        "moved_least": moves.least,
    }


async def sleeping(engine: VllmEngine, token_ids: list[int]) -> Report:
    """Return the seconds to release and restore memory and the change of log-probabilities. Replies are not compared:
    with random weights tokens are almost equally likely, and in bf16 a tie may break either way."""

    def used() -> float:
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**30

    before, awake = await engine.score(token_ids), used()
    sleep_s = await timed(engine.sleep())
    asleep = used()
    wake_s = await timed(engine.wake())
    difference = mean_difference(before, await engine.score(token_ids))
    gib = {"awake": awake, "asleep": asleep, "awake again": used()}
    return {"sleep_s": sleep_s, "wake_s": wake_s, "device_gib": gib, "logprobs_apart": difference}


async def native(model: Any, options: argparse.Namespace) -> Report:
    """The project's own engine: its distance from the learner, and a copy of the weights in place."""
    engine = NativeEngine(model, max_sessions=options.episodes, max_context=CONTEXT)
    state = {name: tensor.clone() for name, tensor in whole_state(model)}
    seconds = []
    for _ in range(options.rounds):
        started = time.perf_counter()
        load_tensors(model.state_dict(), (pair for pair in state.items()))
        wait_for_copies()
        seconds.append(time.perf_counter() - started)
    found = await compare(model, engine, options.episodes)
    await engine.close()
    return {"load_s": statistics.median(seconds), "differences": found}


async def adapters(model: Any, root: Path, arguments: dict[str, Any], rounds: int) -> Report:
    from agentgym_rl.training.lora import add_adapter
    from agentgym_rl.training.settings import LoraSettings

    model.save_pretrained(root / "base")
    engine = VllmEngine(root / "base", lora_rank=16, **(arguments | {"eager": True}))
    seconds = []
    try:
        start_s = await timed(engine.start())
        add_adapter(model, LoraSettings(rank=16), 0)
        moves = Moves(engine, probe_model(model))
        await moves.begin()
        for version in range(1, rounds + 1):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        parameter.normal_(std=0.05)
            folder = root / f"adapter_{version}"

            async def update(folder: Path = folder, version: int = version) -> None:
                model.save_pretrained(folder)
                await engine.update_weights(folder, version, probe=probe_model(model))

            seconds.append(await timed(update()))
            await moves.require("adapters")
        differences = await compare(model, engine, 4)
    finally:
        await engine.close()
    results = {"start_s": start_s, "update_s": statistics.median(seconds), "moved_least": moves.least}
    return results | {"differences": differences}


def print_updates(results: Report) -> None:
    seconds = results["seconds"]
    step = seconds["rollout"] + seconds["learn"]
    reused = f"{results['prompt_tokens_reused']:.0%} of prompts found in the cache"
    print(f"rollout      {seconds['rollout']:8.2f} s   {results['new_tokens_per_s']:,.0f} new tokens/s, {reused}")
    print(f"learn        {seconds['learn']:8.2f} s   forward and backward over the rollout's tokens")
    for name in WAYS:
        rate, first = results["gigabytes"] / seconds[name], results["each"][name][0]
        share = seconds[name] / (step + seconds[name])
        print(f"{name:12} {seconds[name]:8.2f} s   {share:.1%} of a step, {rate:.2f} GB/s, first {first:.2f} s")


class Record:
    """Results, printed and written to disk as soon as they are known, because a later part may fail."""

    def __init__(self, out: Path | None, about: Report) -> None:
        self._out = out
        self.results: Report = about | {"differences": {}}

    def keep(self, name: str, value: Report) -> None:
        rest = {key: entry for key, entry in value.items() if key != "differences"}
        if name == "updates":
            self.results.update(value)
            print_updates(self.results)
        else:
            self.results[name] = rest
            print(f"{name:12} {json.dumps(rest)}", flush=True)
        self._write()
        if "differences" in value:
            self.differ(name, value["differences"])

    def differ(self, when: str, rows: Report) -> None:
        self.results["differences"][when] = rows
        for name, row in rows.items():
            print(f"{when:14} {name:30} mean {row['mean']:.2g}  max {row['max']:.2g}", flush=True)
        self._write()

    def _write(self) -> None:
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._out.write_text(json.dumps(self.results, indent=2) + "\n")


async def main(options: argparse.Namespace) -> list[str]:
    """Run all measurements and return the problems."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    model = in_dtype(without_zeros(make_model(options.model)).to(device), dtype).eval()
    size = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e9
    eager = options.eager or device == "cpu"
    about = {"model": options.model, "device": device, "vllm": require_vllm(), "gigabytes": size, "eager": eager}
    record = Record(options.out, about)
    mode = "eager" if eager else "CUDA graphs"
    print(f"{options.model}, {size:.2f} GB, {dtype}, {device}, vLLM {about['vllm']}, {mode}", flush=True)
    arguments: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "max_context": CONTEXT + NEW_TOKENS,
        "max_sessions": options.episodes,
        "memory_share": options.memory_share,
        "kv_cache_bytes": None if options.kv_gib is None else int(options.kv_gib * 2**30),
        "eager": eager,
    }
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model.save_pretrained(root / "start")
        sleeps: dict[str, Any] = {"options": {"enable_sleep_mode": True}} if device == "cuda" else {}
        engine = VllmEngine(root / "start", **arguments, **sleeps)
        try:
            record.keep("start", {"seconds": await timed(engine.start())})
            record.keep("updates", await updates(model, engine, root, options, record.differ))
            if engine.can_sleep:
                record.keep("sleep", await sleeping(engine, probe_model(model).token_ids))
                record.differ("after a sleep", await compare(model, engine, options.episodes))
        finally:
            await engine.close()
        if not options.vllm_only:
            record.keep("native", await native(model, options))
            if importlib.util.find_spec("peft") is None:
                print("adapters     left out: the package peft is not installed")
            else:
                record.keep("adapters", await adapters(model, root, arguments, options.rounds))
    return too_far(record.results["differences"], dtype)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "smollm2-135m", "qwen2.5-1.5b"), default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--memory-share", type=float, default=0.4)
    parser.add_argument("--kv-gib", type=float, help="size of vLLM's cache, for a shared GPU")
    parser.add_argument("--eager", action="store_true", help="run vLLM without CUDA graphs")
    parser.add_argument("--vllm-only", action="store_true", help="skip the native engine and the adapters")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not torch.cuda.is_available():
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # otherwise vLLM compiles its sampler in C++
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    problems = asyncio.run(main(parser.parse_args()))
    for problem in problems:
        print(f"too far apart  {problem}")
    sys.exit(1 if problems else 0)
