"""Measure the serial work of a cluster's step: the driver's, and that of rank 0 when it publishes weights.

    python benchmarks/driver.py [--episodes 128] [--tokens 8192] [--turns 30] [--ranks 360] [--of 8192]

The rest of a step is spread over ranks, engines and hosts, so this serial work bounds how far a run can scale.
Episodes are synthetic: `tokens` each over `turns` turns, a tenth of them sampled, four characters per token. Each part
is the function that a run calls. Its CPU seconds (without disk waits) are scaled to `--of` episodes. Cutting weights
into buckets is measured from host memory to host memory, without the copy from a device.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from agentgym_rl.run.log import RunLog
from agentgym_rl.training.batch import estimate, gather, split_batch
from agentgym_rl.training.horizon import make_horizon
from agentgym_rl.training.metrics import episode_metrics
from agentgym_rl.training.rl_learner import by_turn
from agentgym_rl.training.settings import HorizonSettings, RLSettings
from agentgym_rl.transport.buckets import place_in_buckets, tensor_view
from agentgym_rl.types import Group, Limits, Message, StopReason, Task, Trajectory

GROUP_SIZE = 8
SAMPLED_SHARE = 0.1
STATE_BYTES = 1 << 30


def synthetic_episode(number: int, tokens: int, turns: int, rng: random.Random) -> Trajectory:
    per_turn, sampled = tokens // turns, max(1, int(tokens // turns * SAMPLED_SHARE))
    messages = []
    for _ in range(turns):
        prompt = [rng.randrange(150_000) for _ in range(per_turn - sampled)]
        reply = [rng.randrange(150_000) for _ in range(sampled)]
        messages += [
            Message("user", "seen" * len(prompt), prompt),
            Message("assistant", "said" * len(reply), reply, [-rng.random() for _ in reply], 0),
        ]
    task = Task("made-up", number // GROUP_SIZE)
    rewards = [0.0] * (turns - 1) + [float(rng.random() < 0.5)]
    infos: list[dict[str, Any]] = [{"valid": True, "state_key": str(n)} for n in range(turns)]
    return Trajectory(f"t{number}", task, messages, rewards, infos, StopReason.DONE, horizon=turns)


def driver(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return the seconds of each part of a step, in order."""
    rng = random.Random(0)
    episodes = [synthetic_episode(n, options.tokens, options.turns, rng) for n in range(options.episodes)]
    played = [Group(episodes[n].task, episodes[n : n + GROUP_SIZE]) for n in range(0, len(episodes), GROUP_SIZE)]
    pickled = [pickle.dumps(group, 5) for group in played]
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

    groups = timed("unpickle groups", lambda: [pickle.loads(group) for group in pickled])
    trajectories = [t for group in groups for t in group.trajectories]

    def write() -> None:
        for trajectory in trajectories:
            log.write_trajectory(1, trajectory)

    timed("write trajectories", write)
    timed("metrics", lambda: episode_metrics(groups, horizons))
    batch = timed("gather, estimate", lambda: estimate(gather(groups, settings, limits), settings))
    shares, _ = timed("split over ranks", lambda: split_batch(batch, options.ranks, settings.minibatches, 0))
    timed("pickle shares", lambda: [pickle.dumps(share, 5) for share in shares])
    for sample in batch.samples:  # the results of the ranks
        sample.old_logprobs = sample.reference_logprobs = sample.entropies = [-rng.random() for _ in sample.logprobs]
    rows = [pickle.dumps((s.old_logprobs, s.entropies, s.reference_logprobs), 5) for s in batch.samples]
    timed("unpickle results of ranks", lambda: [pickle.loads(row) for row in rows])
    timed("metrics by turn", lambda: by_turn(batch.samples))
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
    runs = []
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(driver(options, Path(folder)))
    seconds = {name: min(run[name] for run in runs) for name in runs[0]}
    factor = options.of / options.episodes
    scaled = {name: factor * value for name, value in seconds.items()}
    tokens = options.of * options.tokens
    print(f"{options.of} episodes, {tokens / 1e6:.0f}M tokens, {options.ranks} ranks, in CPU seconds")
    for name, value in scaled.items():
        print(f"    {name:28} {value:6.1f}")
    print(f"    {'total':28} {sum(scaled.values()):6.1f}")
    rate = max(bucket_rate() for _ in range(options.repeats))
    print(f"buckets: {rate:.1f} GB/s")
    if options.out:
        options.out.write_text(json.dumps({"seconds": scaled, "buckets_gb_per_s": rate}, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=128, help="measured episodes, a multiple of 8")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of an episode")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=360)
    parser.add_argument("--repeats", type=int, default=3, help="repetitions; each part's lowest time counts")
    parser.add_argument("--of", type=int, default=8192, help="episodes of a step")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    main(parser.parse_args())
