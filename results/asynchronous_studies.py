"""The studies of asynchronous groups: success and time by bound of staleness."""

from __future__ import annotations

from dataclasses import replace

from jobs import PRETRAINED, Job
from qwen_studies import QWEN_SIZES

STALENESS_BOUNDS = (0, 1, 2, 4)
"""Steps that groups may be old at most, in the study of asynchronous groups."""

LONG_EPISODES = ("horizon.kind=fixed", "horizon.turns=[50]", "agent.max_context=6144")
"""Settings under which the slowest episode of a step takes many times as long as the median."""
ASYNCHRONOUS_STEPS = {
    "1.5B": ("rl.steps=48", "eval.every=24", "eval.episodes=204", "rl.kl_coef=0.01"),
    "0.5B": ("rl.steps=60", "eval.every=20", "eval.episodes=204", "rl.optimizer.lr=6e-6"),
}
"""Settings by size of the model, with 32 episodes a step. With 1.5B, learning is half of a synchronous step."""


def asynchronous(seeds: list[int] | None) -> list[Job]:
    """Return the quickstart with each bound of staleness."""
    return [
        stale(bound, Job(name="quickstart", arm="", task="babyai", seed=seed, recipe="quickstart.toml"))
        for seed in (seeds if seeds is not None else range(3))
        for bound in STALENESS_BOUNDS
    ]


def asynchronous_textcraft(seeds: list[int] | None) -> list[Job]:
    """Return SmolLM2-135M on TextCraft with each bound of staleness: an imitation and 60 steps. It needs one GPU."""
    settings = (f"model.path={{{PRETRAINED}}}", "rl.steps=60", "horizon.steps_per_stage=20", "eval.every=60")
    recipe = Job(name="smollm2-textcraft", arm="", task="textcraft", seed=0, recipe="smollm2/textcraft.toml")
    return [
        stale(bound, replace(recipe, seed=seed, arguments=settings))
        for seed in (seeds if seeds is not None else range(3))
        for bound in STALENESS_BOUNDS
    ]


def asynchronous_smollm2(seeds: list[int] | None) -> list[Job]:
    """Return SmolLM2-135M on BabyAI with 50 turns and 64 episodes a step, from an imitation of 96 episodes: synchronous
    and with a bound of staleness. It needs one GPU."""
    jobs: list[Job] = []
    for seed in seeds if seeds is not None else range(1):
        start = Job(name=f"async-sft-135M-{seed}", arm="SFT", task="babyai", seed=seed)
        imitation = (f"model.path={{{QWEN_SIZES['135M']}}}", "data.episodes=96", "sft.epochs=1", "eval.max_turns=50")
        jobs.append(replace(start, recipe="evidence/smollm2-babyai-sft.toml", arguments=imitation))
        steps = ("rl.groups_per_step=8", "rl.steps=60", "eval.every=60", "eval.max_turns=50")
        run = Job(
            name="smollm2-long-babyai", arm="", task="babyai", seed=seed, recipe="evidence/smollm2-babyai-rl.toml"
        )
        run = replace(run, arguments=(f"model.path={{{start.name}}}", *LONG_EPISODES, *steps))
        jobs += [stale(bound, run) for bound in (0, 2)]
    return jobs


def asynchronous_long(seeds: list[int] | None) -> list[Job]:
    """Return Qwen2.5-Coder-0.5B on BabyAI with 50 turns and 16 episodes a step, from the base model: synchronous and
    with a bound of staleness. It needs one GPU, which no other process uses.

    Most episodes end early, and a synchronous step waits for the longest one. The records of
    results/asynchronous-long-first, with 1.5B, started from an imitation, which already had the success that the runs
    race to.
    """
    steps = ("rl.groups_per_step=2", "rl.steps=120", "eval.episodes=48", "eval.every=0", "eval.max_turns=50")
    rate = ("rl.optimizer.lr=2e-6", "rl.keep_cache=true", "agent.concurrency=48")
    arguments = (f"model.path={{{QWEN_SIZES['0.5B']}}}", *LONG_EPISODES, *rate, *steps)
    run = Job(name="qwen-long-babyai", arm="", task="babyai", seed=0, recipe="qwen/babyai.toml", arguments=arguments)
    chosen = seeds if seeds is not None else range(3)
    return [stale(bound, replace(run, seed=seed)) for seed in chosen for bound in (0, 4)]


def qwen_asynchronous(seeds: list[int] | None) -> list[Job]:
    """Return Qwen2.5-Coder after a short imitation on BabyAI with 50 turns and 32 episodes a step: synchronous and with
    a bound of staleness. It needs one GPU."""
    jobs: list[Job] = []
    for seed in seeds if seeds is not None else range(1):
        for size, steps in ASYNCHRONOUS_STEPS.items():
            label, task = ("", "babyai") if size == "1.5B" else (f"-{size}", f"babyai, {size}")
            start = Job(name=f"async-sft{label}-{seed}", arm="SFT", task="babyai", seed=seed)
            imitation = (f"model.path={{{QWEN_SIZES[size]}}}", "data.episodes=192", "sft.epochs=1")
            jobs.append(replace(start, recipe="qwen/babyai-sft.toml", arguments=imitation))
            run = Job(name=f"qwen-async-babyai{label}", arm="", task=task, seed=seed, recipe="qwen/babyai.toml")
            play = ("rl.keep_cache=true", "rl.groups_per_step=4", "agent.concurrency=256")
            run = replace(run, arguments=(f"model.path={{{start.name}}}", *LONG_EPISODES, *play, *steps))
            jobs += [stale(bound, run) for bound in (0, 4)]
    return jobs


def stale(bound: int, job: Job) -> Job:
    """Return the job with a bound of staleness, in its name and its arm."""
    name = f"{job.name}-staleness-{bound}-{job.seed}"
    arguments = (*job.arguments, f"rl.max_staleness={bound}")
    return replace(job, name=name, arm=f"max_staleness {bound}", arguments=arguments)
