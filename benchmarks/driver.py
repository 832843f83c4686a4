"""Measure the serial work of a cluster's step: the driver's, and that of rank 0 when it publishes weights.

    python benchmarks/driver.py [--episodes 128] [--tokens 8192] [--turns 30] [--ranks 360] [--of 8192]
    python benchmarks/driver.py --episodes 8192 --repeats 1        # 64M tokens, all of them; 6 GB of memory

The rest of a step is spread over ranks, engines and hosts, so this serial work bounds how far a run can scale.
Episodes are synthetic: `tokens` each over `turns` turns, a tenth of them sampled, four characters per token, replies of
words. Each part is the function that a run calls. An environment host, which is an actor of Ray, returns groups as
arrays (training/stored.py) through the object store; the ranks' results are made here. CPU seconds (without disk waits)
are those of the driver's own thread, which does one thing after the other; what Ray's threads in the same process need
beside it is a number of its own. Both are scaled to `--of` episodes. Cutting weights into buckets is measured from host
memory to host memory, without the copy from a device.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import pickle
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch

from agentgym_rl.common.garbage import rare_collections
from agentgym_rl.run.backend_ray import fill
from agentgym_rl.run.log import RunLog, learned_line
from agentgym_rl.run.rank import RankResult, SampleResult
from agentgym_rl.scale.ray_app import NAMESPACE, EnvHost, RayApp
from agentgym_rl.scale.resource_plan import Plan
from agentgym_rl.scale.shared_state import SharedState
from agentgym_rl.training import stored
from agentgym_rl.training.batch import Batch, estimate, gather, split_batch
from agentgym_rl.training.horizon import make_horizon
from agentgym_rl.training.metrics import DEPENDENCE_GROUPS, episode_metrics
from agentgym_rl.training.rl_learner import means
from agentgym_rl.training.settings import HorizonSettings, RLSettings
from agentgym_rl.transport.broadcast import place_in_buckets, tensor_view
from agentgym_rl.types import Group, Limits, Message, Sample, StopReason, Task, Trajectory

GROUP_SIZE = 8
SAMPLED_SHARE = 0.1
STATE_BYTES = 1 << 30
BESIDE = "Ray's threads beside it"


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


class Player:
    """Player of the environment host. It has played every group before the first is asked for."""

    num_open = 0

    def __init__(self, options: argparse.Namespace, engine: Any) -> None:
        rng, keep = random.Random(0), {"keep_tail": False, "keep_infos": False}
        self._played = []
        for first in range(0, options.episodes, GROUP_SIZE):
            episodes = [synthetic_episode(first + n, options.tokens, options.turns, rng) for n in range(GROUP_SIZE)]
            compare = first // GROUP_SIZE < DEPENDENCE_GROUPS * options.episodes / options.of
            self._played.append(stored.store(Group(episodes[0].task, episodes), **keep, compare=compare))

    async def play(self, index: int) -> stored.Arrays:
        return self._played[index]

    async def close(self) -> None: ...


async def start_host(options: argparse.Namespace) -> RayApp:
    """Return a cluster of this machine with one environment host."""
    plan = Plan(
        learners=1,
        engines=1,
        env_hosts=1,
        layout="disaggregated",
        device="cpu",
        learner_cpus=1.0,
        engine_cpus=1.0,
        env_host_cpus=1.0,
        episodes_per_host=options.episodes,
        address=None,
        object_store_mb=None,
        bucket_mb=1,
        worker_timeout_s=600.0,
    )
    app = RayApp(plan)
    await app.connect()
    app.state = ray.remote(SharedState).options(name="state", namespace=NAMESPACE, num_cpus=0).remote()
    app.hosts = [ray.remote(EnvHost).options(max_concurrency=1000).remote(partial(Player, options), [], "state", 600.0)]
    await app.hosts[0].__ray_ready__.remote()
    return app


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


def driver(options: argparse.Namespace, folder: Path, app: RayApp, runner: asyncio.Runner) -> dict[str, float]:
    """Return the seconds of each part of a step, in order."""
    settings = RLSettings()
    limits = {"made-up": Limits(options.turns, options.tokens, 2 * options.tokens)}
    horizons = {"made-up": make_horizon(HorizonSettings())}
    log = RunLog.create(folder / "run", {})
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        started, process_started = time.thread_time(), time.process_time()
        result = work()
        seconds[name] = time.thread_time() - started
        seconds[BESIDE] = seconds.get(BESIDE, 0.0) + time.process_time() - process_started - seconds[name]
        return result

    async def arrive() -> list[tuple[stored.Arrays, Any]]:
        return await asyncio.gather(*(app.play(n, GROUP_SIZE) for n in range(options.episodes // GROUP_SIZE)))

    with rare_collections():
        arrived = timed("arrive from hosts", lambda: runner.run(arrive()))
        groups = timed("unpack light groups", lambda: [stored.unpack(*result) for result in arrived])

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
    runs = []
    with asyncio.Runner() as runner:
        app = runner.run(start_host(options))
        gc.freeze()  # what is imported is not the step's to collect
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as folder:
                runs.append(driver(options, Path(folder), app, runner))
        runner.run(app.close())
    seconds = {name: min(run[name] for run in runs) for name in runs[0]}
    factor = options.of / options.episodes
    scaled = {name: factor * value for name, value in seconds.items()}
    beside = scaled.pop(BESIDE)
    tokens = options.of * options.tokens
    print(f"{options.of} episodes, {tokens / 1e6:.0f}M tokens, {options.ranks} ranks, in CPU seconds")
    for name, value in scaled.items():
        print(f"    {name:28} {value:6.2f}")
    print(f"    {'total':28} {sum(scaled.values()):6.2f}")
    print(f"    {BESIDE:28} {beside:6.2f}")
    settings = {name: getattr(options, name) for name in ("episodes", "tokens", "turns", "ranks", "repeats", "of")}
    results: dict[str, Any] = {"settings": settings, "seconds": scaled, "seconds_beside": beside}
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
