"""vLLM beside a learner: seconds to start, to take new weights each way, to sleep and wake, and how far apart they are.

    python benchmarks/vllm_weights.py [--model qwen2.5-1.5b | smollm2-135m | tiny] [--rounds 5] [--episodes 64]
    python benchmarks/vllm_weights.py --eager --vllm-only     without CUDA graphs

Random weights of the model's shape. Each update changes every tensor, and log-probabilities move several times as far
as engine and learner may differ; the engine must then have the learner's bits and agree with it, which is part of the
time, and it must have moved. A step is a rollout (two turns of every episode: prompts of 256 tokens, replies of 64) and
a plain forward and backward pass over what was played; updates are given as shares of it. `memory` lends the state of
this process (CUDA IPC). The others are what a cluster does: `lent` where a rank and an engine share a device, bucket by
bucket through CUDA IPC, `node` where all are on one node, `buckets` elsewhere. The first two of each are slower, they
make what later ones use again, so figures are medians of the rest. On CUDA vLLM also sleeps: its memory before, while
and after, and how far log-probabilities are from what they were. Adapters need an engine with room for them, so they
come last, on one that is started eagerly. On a CPU everything runs in float32, lent memory is shared memory of the
machine, and nothing sleeps.

How far an engine is from the learner is told apart: at the start, after the first update by each way, after a sleep;
for a reply's first token (what a prompt's pass gave) and later ones (decoded, with CUDA graphs unless `--eager`); for
the first turn and the second, whose prompt is partly in the prefix cache; and for the same tokens scored as a prompt,
which decodes nothing and reads no cache. Beside it stands how far the learner is from itself in float32. The command
ends with code 1, all said and written, if a mean is above 0.1 in bfloat16 or 0.001 in float32.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import importlib.util
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

import numpy
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.agent.engines.vllm import Probe, VllmEngine, probe_model
from agentgym_rl.agent.engines.vllm.probe import TOLERANCE
from agentgym_rl.agent.engines.vllm.requirements import require_vllm
from agentgym_rl.errors import EngineError
from agentgym_rl.run.backend_vllm import VllmAdapter
from agentgym_rl.scale.process_group import whole_state
from agentgym_rl.transport.buckets import Bucket, NativeAdapter, Staging, buckets
from agentgym_rl.transport.device import DeviceWeights, send_weights
from agentgym_rl.transport.host_memory import HostMemories
from agentgym_rl.types import Sampling

PROMPT_TOKENS, NEW_TOKENS, TURNS = 256, 64, 2
CONTEXT = TURNS * (PROMPT_TOKENS + NEW_TOKENS)
PASS_TOKENS = 8192
"""Of one forward and backward pass."""
BUCKET_BYTES = 256 << 20
WAYS = ("files", "memory", "lent", "node", "buckets")
COMPARED = 8
"""Episodes whose log-probabilities are compared."""
FACTOR, NORM_FACTOR = 1.03125, 1.5
"""Of an update. The last norm alone moves log-probabilities by half a unit and keeps their order; were all tensors to
grow by as much, a random network of 28 layers would be chaotic, and two right passes in bfloat16 0.15 apart."""

Report = dict[str, Any]
Work = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Reply:
    """What an engine sampled in one turn."""

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
    """Biases begin as zeros, which no factor changes."""
    for parameter in model.parameters():
        if not parameter.any():
            parameter.normal_(std=0.02)
    return model


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """Parameters alone, as where a model is loaded: `model.to(dtype)` rounds its rotary frequencies, too, and no engine
    does, so that its tokens would be at other places than theirs."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@torch.no_grad()
def change(model: Any, back: bool) -> None:
    """There, or `back` again, lest the model grow without bound."""
    for name, parameter in model.named_parameters():
        factor = NORM_FACTOR if name == "model.norm.weight" else FACTOR
        parameter.mul_(1 / factor if back else factor)


class Store:
    """As much of an object store as matters here: memory that was used before, where what is put is copied to."""

    def __init__(self) -> None:
        self._places: list[numpy.ndarray] = []

    def put(self, number: int, bucket: Bucket) -> Bucket:
        if number == len(self._places):
            self._places.append(bucket.data.copy())
        place = self._places[number]
        place[:] = bucket.data
        return Bucket(bucket.entries, place)


class Moves:
    """Whether updates reach the engine: scores before and after each must be three times as far apart as agreement
    allows."""

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
        moved = apart(before, self._last)
        self.least = min(self.least, moved)
        if not moved > self._needed:
            raise EngineError(
                f"an update by {way} should move log-probabilities by more than {self._needed:g} a token, "
                f"they moved by {moved:.3g}: it was not made, or changes too little to be seen"
            )


def apart(first: list[float], second: list[float]) -> float:
    """Mean absolute difference of log-probabilities."""
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
    """Every turn of every episode."""

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
    """Forward and backward over as many tokens as the episodes have; the gradients are thrown away."""
    rows = max(1, PASS_TOKENS // CONTEXT)
    device = model.get_input_embeddings().weight.device
    for first in range(0, episodes, rows):
        ids = torch.randint(0, 500, (min(rows, episodes - first), CONTEXT), device=device)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)


@torch.no_grad()
def by_model(model: Any, reply: Reply) -> list[float]:
    """What a model says of a reply."""
    whole = torch.tensor([reply.prompt_ids + reply.token_ids], device=model.get_input_embeddings().weight.device)
    first = len(reply.prompt_ids)
    logits = model(input_ids=whole, use_cache=False).logits[0, first - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(1, whole[0, first:, None])[:, 0].tolist()


async def compare(model: Any, engine: Any, episodes: int) -> Report:
    """Mean and largest differences of log-probabilities, by what sets them apart."""
    played = await rollout(engine, min(COMPARED, episodes), Sampling(NEW_TOKENS, seed=0))
    off: dict[str, list[float]] = {}

    def note(name: str, first: list[float], second: list[float]) -> None:
        off.setdefault(name, []).extend(abs(a - b) for a, b in zip(first, second, strict=True))

    exact = in_dtype(copy.deepcopy(model), torch.float32) if model.dtype != torch.float32 else None
    for reply in played:
        mine, its = by_model(model, reply), reply.logprobs
        note("sampled - learner", its, mine)
        note(f"turn {reply.turn + 1}, first token - learner", its[:1], mine[:1])
        note(f"turn {reply.turn + 1}, later tokens - learner", its[1:], mine[1:])
        if isinstance(engine, VllmEngine):  # one after the other: on a CPU it dies of several at once
            scored = (await engine.score(reply.prompt_ids + reply.token_ids))[len(reply.prompt_ids) - 1 :]
            note("scored - learner", scored, mine)
            note("sampled - scored", its, scored)
        if exact is not None:
            note("learner - itself in float32", mine, by_model(exact, reply))
    return {name: {"mean": statistics.fmean(some), "max": max(some)} for name, some in sorted(off.items())}


def too_far(differences: dict[str, Report], dtype: torch.dtype) -> list[str]:
    """Where engine and learner, or an engine and itself, are further apart than rounding explains."""
    limit = TOLERANCE[dtype]
    return [
        f"{when}: {name} is {row['mean']:.3g} on average, allowed {limit:g}"
        for when, rows in differences.items()
        for name, row in rows.items()
        if not row["mean"] <= limit and "itself" not in name  # NaN is no agreement
    ]


async def updates(
    model: Any,
    engine: VllmEngine,
    root: Path,
    options: argparse.Namespace,
    differ: Callable[[str, Report], None],
) -> Report:
    """Seconds of each way, of a rollout, and of a pass over it. Tells `differ` how far apart engine and learner are."""
    adapter, memories, staging, store = VllmAdapter(engine), HostMemories(), Staging(), Store()

    async def by_folder() -> None:
        model.save_pretrained(root / "new")
        await engine.update_weights(root / "new", engine.version + 1, probe=probe_model(model))

    async def in_memory() -> None:
        await engine.update_weights(model.state_dict(), engine.version + 1, probe=probe_model(model))

    async def in_buckets() -> None:
        """As on a cluster, but for the network: the learner's rank cuts, the engine's adapter puts together."""
        cut = buckets(whole_state(model), BUCKET_BYTES, staging=staging)
        stored = [store.put(number, bucket) for number, bucket in enumerate(cut)]
        note(await adapter.load(stored, engine.version + 1, probe_model(model)))

    async def on_the_node() -> None:
        """As on a cluster of one node: the learner's rank writes memory, vLLM's worker maps it."""
        weights = memories.fill(whole_state(model))
        note(weights.page_lock_error)
        note(await adapter.load([weights], engine.version + 1, probe_model(model)))

    async def on_the_device() -> None:
        """As on a cluster where they share it: the learner's rank lends, vLLM's worker copies."""
        version = engine.version + 1
        probe, endpoint = probe_model(model), await adapter.open_endpoint()
        lending = asyncio.create_task(
            asyncio.to_thread(send_weights, whole_state(model), version, [endpoint], BUCKET_BYTES)
        )
        loading = asyncio.create_task(adapter.load(DeviceWeights(endpoint, version), version, probe))
        if failed := await lending:
            raise RuntimeError(f"vLLM was not lent weights: {failed}")
        await loading

    def note(remark: str) -> None:
        if remark and remark not in remarks:
            remarks.append(remark)

    async def play() -> None:
        await rollout(engine, options.episodes, Sampling(NEW_TOKENS, seed=0))

    async def passes() -> None:
        await asyncio.to_thread(learn, model, options.episodes)

    differ("at the start", await compare(model, engine, options.episodes))
    await play()  # the first one warms up
    await passes()
    works = (by_folder, in_memory, on_the_device, on_the_node, in_buckets)
    ways: dict[str, Work] = dict(zip(WAYS, works, strict=True))
    remarks: list[str] = []
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
    found = {name: statistics.median(values[2:] or values) for name, values in seconds.items()}
    new_tokens, stats = options.episodes * TURNS * NEW_TOKENS, engine.stats()
    return {
        "seconds": found,
        "each": seconds,
        "new_tokens_per_s": new_tokens / found["rollout"],
        "prompt_tokens_reused": stats["prompt_tokens_reused"] / stats["prompt_tokens"],
        "moved_least": moves.least,
        "remarks": remarks,
    }


async def sleeping(engine: VllmEngine, token_ids: list[int]) -> Report:
    """Seconds to give memory back and to take it again, and how far log-probabilities are from what they were. Replies
    would not do: random weights make tokens nearly alike, and in bf16 a tie may fall either way."""

    def used() -> float:
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**30

    before, awake = await engine.score(token_ids), used()
    sleep_s = await timed(engine.sleep())
    asleep = used()
    wake_s = await timed(engine.wake())
    off = apart(before, await engine.score(token_ids))
    gib = {"awake": awake, "asleep": asleep, "awake again": used()}
    return {"sleep_s": sleep_s, "wake_s": wake_s, "device_gib": gib, "logprobs_apart": off}


async def native(model: Any, options: argparse.Namespace) -> Report:
    """The project's own engine: weights in place from buckets, and its distance from the learner."""
    adapter = NativeAdapter(NativeEngine(model, max_sessions=options.episodes, max_context=CONTEXT), model)
    seconds = []
    for version in range(1, options.rounds + 1):
        made = list(buckets(whole_state(model), BUCKET_BYTES))
        seconds.append(await timed(adapter.load(made, version)))
    found = await compare(model, adapter.engine, options.episodes)
    await adapter.engine.close()
    return {"load_buckets_s": statistics.median(seconds), "differences": found}


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
    found = {"start_s": start_s, "update_s": statistics.median(seconds), "moved_least": moves.least}
    return found | {"differences": differences}


def say(found: Report) -> None:
    seconds = found["seconds"]
    step = seconds["rollout"] + seconds["learn"]
    reused = f"{found['prompt_tokens_reused']:.0%} of prompts found in the cache"
    print(f"rollout      {seconds['rollout']:8.2f} s   {found['new_tokens_per_s']:,.0f} new tokens/s, {reused}")
    print(f"learn        {seconds['learn']:8.2f} s   forward and backward over what was played")
    for remark in found["remarks"]:
        print(remark)
    for name in WAYS:
        rate, first = found["gigabytes"] / seconds[name], found["each"][name][0]
        share = seconds[name] / (step + seconds[name])
        print(f"{name:12} {seconds[name]:8.2f} s   {share:.1%} of a step, {rate:.2f} GB/s, the first {first:.2f} s")


class Record:
    """What was found, on the terminal and on disk as soon as it is known: what comes later may fail."""

    def __init__(self, out: Path | None, about: Report) -> None:
        self._out = out
        self.found: Report = about | {"differences": {}}

    def keep(self, name: str, value: Report) -> None:
        rest = {key: entry for key, entry in value.items() if key != "differences"}
        if name == "updates":
            self.found.update(value)
            say(self.found)
        else:
            self.found[name] = rest
            print(f"{name:12} {json.dumps(rest)}", flush=True)
        self._write()
        if "differences" in value:
            self.differ(name, value["differences"])

    def differ(self, when: str, rows: Report) -> None:
        self.found["differences"][when] = rows
        for name, row in rows.items():
            print(f"{when:14} {name:30} mean {row['mean']:.2g}  max {row['max']:.2g}", flush=True)
        self._write()

    def _write(self) -> None:
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._out.write_text(json.dumps(self.found, indent=2) + "\n")


async def main(options: argparse.Namespace) -> list[str]:
    """What is wrong."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    model = in_dtype(without_zeros(make_model(options.model)).to(device), dtype).eval()
    size = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e9
    eager = options.eager or device == "cpu"
    about = {"model": options.model, "device": device, "vllm": require_vllm(), "gigabytes": size, "eager": eager}
    record = Record(options.out, about)
    how = "eager" if eager else "CUDA graphs"
    print(f"{options.model}, {size:.2f} GB, {dtype}, {device}, vLLM {about['vllm']}, {how}", flush=True)
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
    return too_far(record.found["differences"], dtype)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "smollm2-135m", "qwen2.5-1.5b"), default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--memory-share", type=float, default=0.4)
    parser.add_argument("--kv-gib", type=float, help="set vLLM's cache, for a GPU that others use as well")
    parser.add_argument("--eager", action="store_true", help="run vLLM without CUDA graphs")
    parser.add_argument("--vllm-only", action="store_true", help="leave out the native engine and the adapters")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not torch.cuda.is_available():
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # vLLM would have its sampler compiled in C++
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    wrong = asyncio.run(main(parser.parse_args()))
    for line in wrong:
        print(f"too far apart  {line}")
    sys.exit(1 if wrong else 0)
