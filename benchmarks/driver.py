"""Measure the serial work of a cluster's step: the driver's, and that of rank 0 when it publishes weights.

    python benchmarks/driver.py [--episodes 128] [--tokens 8192] [--turns 30] [--ranks 360] [--of 8192]
    python benchmarks/driver.py --episodes 8192 --repeats 1        # 64M tokens, all of them; 3 GB of memory

The rest of a step is spread over ranks, engines and hosts, so this serial work bounds how far a run can scale.
Episodes are synthetic: `tokens` each over `turns` turns, a tenth of them sampled, four characters per token, replies of
words. Each part is the function that a run calls. Groups are divided as on the hosts (training/stored.py); the ranks'
results are made here. Its CPU seconds (without disk waits) are scaled to `--of` episodes. Cutting weights into buckets
is measured from host memory to host memory, without the copy from a device.
"""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from agentgym_rl.common.garbage import rare_collections
from agentgym_rl.run.log import RunLog, learned_line
from agentgym_rl.run.rank_handles import RankResult, SampleResult, fill
from agentgym_rl.training import stored
from agentgym_rl.training.batch import Batch, estimate, gather, split_batch
from agentgym_rl.training.horizon import make_horizon
from agentgym_rl.training.metrics import DEPENDENCE_GROUPS, episode_metrics
from agentgym_rl.training.rl_learner import means
from agentgym_rl.training.settings import HorizonSettings, RLSettings
from agentgym_rl.transport.buckets import place_in_buckets, tensor_view
from agentgym_rl.types import Group, Limits, Message, Sample, StopReason, Task, Trajectory

GROUP_SIZE = 8
SAMPLED_SHARE = 0.1
STATE_BYTES = 1 << 30


def synthetic_episode(number: int, tokens: int, turns: int, rng: random.Random) -> Trajectory:
    per_turn, sampled = tokens // turns, max(1, int(tokens // turns * SAMPLED_SHARE))
    messages = []
    for _ in range(turns):
        prompt = rng.choices(range(150_000), k=per_turn - sampled)
        reply = rng.choices(range(150_000), k=sampled)
        said = " ".join(f"w{token % 997}" for token in reply)
        messages += [
            Message("user", f"{number // GROUP_SIZE:04}" + "seen" * (len(prompt) - 1), prompt),
            Message("assistant", said, reply, [-rng.random() for _ in reply], 0),
        ]
    task = Task("made-up", number // GROUP_SIZE)
    rewards = [0.0] * (turns - 1) + [float(rng.random() < 0.5)]
    infos: list[dict[str, Any]] = [{"valid": True, "state_key": str(n)} for n in range(turns)]
    return Trajectory(f"t{number}", task, messages, rewards, infos, StopReason.DONE, horizon=turns)


def play(options: argparse.Namespace) -> list[tuple[bytes, Any, Any]]:
    """Return the parts of every group as hosts send them: the light group, pickled, its contents and its text."""
    rng, parts = random.Random(0), []
    for first in range(0, options.episodes, GROUP_SIZE):
        episodes = [synthetic_episode(first + n, options.tokens, options.turns, rng) for n in range(GROUP_SIZE)]
        compare = first // GROUP_SIZE < DEPENDENCE_GROUPS * options.episodes / options.of
        group, keep = Group(episodes[0].task, episodes), {"keep_tail": False, "keep_infos": False}
        light, contents, text = stored.store(group, **keep, compare=compare)
        parts.append((pickle.dumps(light, 5), contents, text))
    return parts


def results_of_ranks(shares: list[Batch], indices: list[list[int]]) -> list[bytes]:
    """Return what every rank sends back after learning, pickled."""
    results = []
    for share, known in zip(shares, indices, strict=True):
        samples: list[SampleResult] = []
        for sample, _ in zip(share.samples, known, strict=True):
            count = sample.stored.num_actions
            values = [-0.12345] * count
            scored = Sample([], [], advantages=sample.advantages, old_logprobs=values, entropies=values)
            samples.append(learned_line(sample.trajectory_id, [scored]))
        sums = {f"entropy/turn_{turn}": (1.0, 2) for turn in range(1, 9)}
        results.append(pickle.dumps(RankResult({"loss": 0.0}, 0.0, sums, samples), 5))
    return results


def driver(options: argparse.Namespace, folder: Path, parts: list[tuple[bytes, Any, Any]]) -> dict[str, float]:
    """Return the seconds of each part of a step, in order."""
    settings = RLSettings()
    limits = {"made-up": Limits(options.turns, options.tokens, 2 * options.tokens)}
    horizons = {"made-up": make_horizon(HorizonSettings())}
    log = RunLog.create(folder / "run", {})
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        started = time.process_time()
        result = work()
        seconds[name] = time.process_time() - started
        return result

    def unpickle() -> list[Group]:
        return [
            stored.attach(pickle.loads(light), contents, text, n) for n, (light, contents, text) in enumerate(parts)
        ]

    with rare_collections():
        groups = timed("unpickle light groups", unpickle)

    def write() -> None:
        for group in groups:
            log.write_lines(1, group.lines())

    timed("write trajectories", write)
    timed("metrics", lambda: episode_metrics(groups, horizons))
    with rare_collections():
        batch = timed("gather, estimate", lambda: estimate(gather(groups, settings, limits), settings))
    shares, indices = timed("split over ranks", lambda: split_batch(batch, options.ranks, settings.minibatches, 0))
    timed("pickle shares", lambda: [pickle.dumps(share, 5) for share in shares])
    rows = results_of_ranks(shares, indices)

    def read_results() -> None:
        results = [pickle.loads(row) for row in rows]
        for known, result in zip(indices, results, strict=True):
            fill([batch.samples[i] for i in known], result.samples)
        means([result.turn_sums for result in results])

    timed("results of ranks", read_results)
    timed("write learned samples", lambda: log.write_learned(1, batch.samples))
    log.close()
    return seconds


def bucket_rate() -> float:
    """Return the rate in GB/s of copying a state in host memory into buckets."""
    state = {str(n): torch.zeros(1 << 24, dtype=torch.bfloat16) for n in range(STATE_BYTES >> 25)}
    buffer = torch.zeros(256 << 20, dtype=torch.uint8)
    started = time.process_time()
    for entry, tensor, _ in place_in_buckets(state.items(), len(buffer)):
        tensor_view(buffer, entry).copy_(tensor)
    return STATE_BYTES / 1e9 / (time.process_time() - started)


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    runs, parts = [], play(options)
    gc.freeze()  # the hosts' work is not the driver's to collect
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(driver(options, Path(folder), parts))
    seconds = {name: min(run[name] for run in runs) for name in runs[0]}
    factor = options.of / options.episodes
    scaled = {name: factor * value for name, value in seconds.items()}
    tokens = options.of * options.tokens
    print(f"{options.of} episodes, {tokens / 1e6:.0f}M tokens, {options.ranks} ranks, in CPU seconds")
    for name, value in scaled.items():
        print(f"    {name:28} {value:6.2f}")
    print(f"    {'total':28} {sum(scaled.values()):6.2f}")
    settings = {name: getattr(options, name) for name in ("episodes", "tokens", "turns", "ranks", "repeats", "of")}
    results: dict[str, Any] = {"settings": settings, "seconds": scaled}
    if options.weights:
        results["buckets_gb_per_s"] = rate = max(bucket_rate() for _ in range(options.repeats))
        print(f"buckets: {rate:.1f} GB/s")
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=128, help="measured episodes, a multiple of 8")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of an episode")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=360)
    parser.add_argument("--repeats", type=int, default=3, help="repetitions; each part's lowest time counts")
    parser.add_argument("--of", type=int, default=8192, help="episodes of a step")
    parser.add_argument("--no-weights", dest="weights", action="store_false", help="leave out the buckets")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    main(parser.parse_args())
