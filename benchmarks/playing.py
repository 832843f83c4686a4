"""Measure playing: stages of slow environments, and the cost of the agent loop against an earlier commit.

    python benchmarks/playing.py stages [--env sciworld] [--concurrency 32] [--episodes 128] [--out stages.json]
    python benchmarks/playing.py chains [--env babyai] [--against fce85af] [--out chains.json]

stages: episodes of an environment with slow resets, with the default stages of a run and with one slot for a whole
episode. The engine is simulated: a reply takes `--reply-s`, however many are asked for. Give it 16 cores.
chains: processor time of a turn on the host with a scripted engine (environment, rendering, tokenising, the loop), by
this checkout and by an earlier commit, in processes of their own that take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ACTIONS = ("look around", "inventory", "open door to kitchen", "look around", "examine door")
"""Actions that are valid in every room of SciWorld and end no episode."""
CHAIN_EPISODES, CHAIN_TURNS, CHAIN_ROUNDS = 128, 16, 4
CHAIN_ACTIONS = {
    "keydoor": ("look",),
    "babyai": ("turn left", "move forward", "turn right", "move forward"),
    "textcraft": ("inventory",),
}
"""Actions of every episode, in turn. They are always possible."""
CHAIN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2.5 cuts a text into words."""


class SimulatedEngine:
    """Replies after a fixed time, and integrates over time how many replies are in flight."""

    def __init__(self, reply_s: float) -> None:
        self.reply_s, self.replies, self.in_flight = reply_s, 0, 0
        self.reply_seconds = self.idle_s = 0.0
        self._changed = time.perf_counter()

    async def reply(self) -> None:
        self._count(1)
        await asyncio.sleep(self.reply_s)
        self._count(-1)
        self.replies += 1

    def _count(self, change: int) -> None:
        now = time.perf_counter()
        self.reply_seconds += self.in_flight * (now - self._changed)
        self.idle_s += (now - self._changed) * (self.in_flight == 0)
        self._changed = now
        self.in_flight += change


async def play_stages(arguments: argparse.Namespace, staged: bool) -> dict[str, float]:
    """Play all episodes once. Return the seconds, and how busy the engine was."""
    from agentgym_rl.agent.collect import Collector
    from agentgym_rl.agent.policy import ScriptedPolicy
    from agentgym_rl.agent.stages import Stages
    from agentgym_rl.config import AgentConfig, EnvironmentConfig
    from agentgym_rl.environment import catalog
    from agentgym_rl.environment.pool import LocalPool
    from agentgym_rl.run.collectors import make_stages
    from agentgym_rl.types import EnvSession, Limits, StopReason, Task

    engine = SimulatedEngine(arguments.reply_s)

    class TimedPolicy(ScriptedPolicy):
        async def reply_text(self, observation: str) -> str:
            await engine.reply()
            return await super().reply_text(observation)

    def make_policy(session: EnvSession, seed: int) -> TimedPolicy:
        turns = 1 + seed % (2 * arguments.turns - 1)  # lengths from 1 to twice the mean, as episodes have them
        return TimedPolicy((ACTIONS * turns)[:turns], session.instruction)

    env, concurrency = arguments.env, arguments.concurrency
    agent = AgentConfig(concurrency=concurrency, opening=arguments.opening, open_ahead=arguments.open_ahead)
    stages = make_stages(agent, (EnvironmentConfig(name=env),)) if staged else Stages(concurrency)
    pool = LocalPool({env: catalog.load(env)}, max_sessions=2 * concurrency + 16, timeout_s=600)
    collect = Collector(pool, make_policy, 1, stages, retries=0)
    items = await pool.items(env, "train")
    tasks = [Task(env, items[i * len(items) // arguments.episodes]) for i in range(arguments.episodes)]
    started = time.perf_counter()
    try:
        groups = await collect(tasks, Limits(2 * arguments.turns, 64, 4096), 0)
    finally:
        await pool.close()
    seconds = time.perf_counter() - started
    # A script that ends before its episode does is recorded as an error of the engine; any other is a real one.
    failed = [t.error for g in groups for t in g.trajectories if t.stop is StopReason.ERROR]
    if real := [error for error in failed if not (error or "").startswith("EngineError: the script")]:
        raise SystemExit(f"{len(real)} episodes failed, the first with {real[0]}")
    return {
        "seconds": seconds,
        "replies": engine.replies,
        "replies_per_s": engine.replies / seconds,
        "mean_in_flight": engine.reply_seconds / seconds,
        "idle_share": engine.idle_s / seconds,
    }


def run_stages(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return both ways of playing, each the median of the rounds by replies per second."""
    warm_up = argparse.Namespace(**(vars(arguments) | {"episodes": 2 * (os.cpu_count() or 1)}))
    asyncio.run(play_stages(warm_up, staged=True))
    rounds: dict[str, list[dict[str, float]]] = {"one slot": [], "stages": []}
    for _ in range(arguments.rounds):
        for name in rounds:
            rounds[name].append(asyncio.run(play_stages(arguments, staged=name == "stages")))
    rows = {
        name: sorted(results, key=lambda row: row["replies_per_s"])[len(results) // 2]
        for name, results in rounds.items()
    }
    for name, row in rows.items():
        print(
            f"{name:10} {row['seconds']:7.1f} s  {row['replies_per_s']:7.1f} replies/s  "
            f"{row['mean_in_flight']:5.1f} in flight  engine idle {row['idle_share']:.0%}"
        )
    ratio = rows["stages"]["replies_per_s"] / rows["one slot"]["replies_per_s"]
    print(f"stages against one slot: {ratio:.2f} x")
    return {"settings": vars(arguments), "cores": os.cpu_count(), "rows": rows, "ratio": ratio}


async def play_chains(env: str) -> None:
    """Play CHAIN_EPISODES episodes with a scripted engine, as a run in the style react does."""
    from agentgym_rl.agent.collect import Collector
    from agentgym_rl.agent.policy import EnginePolicy
    from agentgym_rl.agent.renderer import Renderer
    from agentgym_rl.environment import catalog
    from agentgym_rl.environment.pool import LocalPool
    from agentgym_rl.types import Completion, EnvSession, Limits, Sampling, Task

    concurrency: Any = CHAIN_EPISODES
    try:
        from agentgym_rl.agent.stages import Stages

        concurrency = Stages(CHAIN_EPISODES, 16, {env: 4})
    except ImportError:
        pass  # the earlier commit has none
    env_class = catalog.load(env)
    replies = [f"Thought: This is the next step.\nAction: {action}<|im_end|>" for action in CHAIN_ACTIONS[env]]
    game = env_class()
    tokenizer = train_tokenizer([env_class.instruction, *(game.reset(item) for item in range(32)), *replies])
    renderer = Renderer(tokenizer, "chatml")
    reply_ids = [tokenizer.encode(reply, add_special_tokens=False) for reply in replies]

    class ScriptedEngine:
        version = 0

        def __init__(self) -> None:
            self._turns: Counter[str] = Counter()

        async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
            await asyncio.sleep(0)
            ids = reply_ids[self._turns[session] % len(reply_ids)]
            self._turns[session] += 1
            return Completion(token_ids=list(ids), logprobs=[-0.5] * len(ids), finish="stop", version=0)

        async def release(self, session: str) -> None: ...

    engine: Any = ScriptedEngine()

    def make_policy(session: EnvSession, seed: int) -> EnginePolicy:
        return EnginePolicy(engine, renderer, Sampling(64, 1.0, seed=seed), instruction=session.instruction)

    pool = LocalPool({env: env_class}, max_sessions=2 * CHAIN_EPISODES, action_format="react")
    collect = Collector(pool, make_policy, 8, concurrency)
    limits = Limits(CHAIN_TURNS, 64, 1 << 20)
    times = []
    for number in range(CHAIN_ROUNDS + 1):
        count = CHAIN_EPISODES // 8
        tasks = [Task(env, item) for item in range(number * count, number * count + count)]
        started = time.process_time()
        groups = await collect(tasks, limits, number)
        seconds = time.process_time() - started
        episodes = [t for group in groups for t in group.trajectories]
        if errors := [t.error for t in episodes if t.error]:
            raise SystemExit(f"an episode failed: {errors[0]}")
        times.append(seconds / sum(t.num_turns for t in episodes))
    print(json.dumps(times[1:]))  # the first one fills caches


def train_tokenizer(texts: list[str]) -> Any:
    """Return a byte-level tokenizer with the chat tokens of Qwen2.5 and words of these texts."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(CHAIN_WORDS), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[2], pad_token=special[0])


def run_chains(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return processor time per turn of both commits, and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["git", "-C", str(ROOT), "archive", arguments.against, "src"]
        archive = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        sources = {arguments.against: Path(folder) / "src", "this checkout": ROOT / "src"}
        times: dict[str, list[float]] = {name: [] for name in sources}
        for number in range(arguments.rounds):
            for name in list(sources)[:: 1 if number % 2 else -1]:
                child = [sys.executable, __file__, "play-chains", "--env", arguments.env]
                environment = os.environ | {"PYTHONPATH": str(sources[name]), "OMP_NUM_THREADS": "1"}
                played = subprocess.run(child, check=True, stdout=subprocess.PIPE, env=environment)
                times[name] += json.loads(played.stdout)
    best = {name: 1e6 * min(values) for name, values in times.items()}
    medians = {name: 1e6 * statistics.median(values) for name, values in times.items()}
    for name, value in best.items():
        print(f"{name:14} {value:6.0f} us of processor time a turn at best, {medians[name]:6.0f} in the median")
    ratio = best["this checkout"] / best[arguments.against]
    print(f"this checkout against {arguments.against}: {ratio:.3f} x")
    return {"env": arguments.env, "against": arguments.against, "best_us": best, "median_us": medians, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["stages", "chains", "play-chains"])
    parser.add_argument("--env", help="default: sciworld for stages, keydoor for chains")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--opening", type=int, default=None, help="as agent.opening")
    parser.add_argument("--open-ahead", type=int, default=None, help="as agent.open_ahead")
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--turns", type=int, default=8, help="mean turns of an episode")
    parser.add_argument("--reply-s", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", default="fce85af")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.env = arguments.env or ("sciworld" if arguments.part == "stages" else "keydoor")
    if arguments.part == "play-chains":
        asyncio.run(play_chains(arguments.env))
        return
    result = (run_stages if arguments.part == "stages" else run_chains)(arguments)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
