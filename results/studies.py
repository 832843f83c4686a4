"""What docs/results/evidence.md promises to run, as jobs: which arms, on which tasks, from which starting models."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

PLACEHOLDER = r"{([\w.-]+)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One command. In `words`, {name} stands for the run of that name, or for its last model where one is trained; and
    {pretrained} for SmolLM2-135M-Instruct, wherever that is kept."""

    name: str
    arm: str
    task: str
    seed: int
    kind: Literal["train", "eval"] = "train"
    recipe: str = ""
    """Below recipes/, for `train`."""
    words: tuple[str, ...] = ()
    """Settings of `train`, options of `eval`."""

    @property
    def needs(self) -> list[str]:
        """Jobs that have to be done before."""
        return [name for word in self.words for name in re.findall(PLACEHOLDER, word) if name != PRETRAINED]


HORIZONS: dict[str, tuple[str, ...]] = {
    "fixed-short": ("horizon.kind=fixed", "horizon.turns=[{short}]", "eval.every=40"),
    "fixed-long": ("horizon.kind=fixed", "horizon.turns=[{long}]", "eval.every=12"),
    "staged": ("horizon.kind=stepwise", "horizon.turns=[{short}, {middle}, {long}]", "eval.every=16"),
    "adaptive": ("horizon.kind=adaptive", "horizon.turns=[{short}, {middle}, {long}]", "eval.every=16"),
}
"""The arms of claim B; the numbers are the task's. A step of few turns samples fewer tokens, so a budget has more
steps: evaluations are spaced for about eight in every arm."""

TASKS = {"babyai": {"short": 4, "middle": 8, "long": 16}, "textcraft": {"short": 4, "middle": 8, "long": 16}}
"""Horizons, by environment."""

PRETRAINED = "pretrained"
"""Stands for a model that no job makes."""


def subsets(*names: str) -> tuple[str, ...]:
    return tuple(word for name in names for word in ("--subset", name))


SIX_SUBSETS = subsets("GoTo", "Pickup", "ActionObjDoor", "FindObjS7", "OneRoomS20", "SynthLoc")
HELD_OUT = {
    "babyai": (*SIX_SUBSETS, "--limit", "50"),
    "textcraft": (*subsets("depth1", "depth2", "depth3"), "--samples", "4"),
}
"""What claim A is evaluated on: 300 episodes of as many items, 388 of 97."""
SMOLLM2_HELD_OUT = {
    task: (*items, "--turns", "16", "--dtype", "bfloat16", "--concurrency", "128") for task, items in HELD_OUT.items()
}
NO_EXAMPLES, RANDOM = "base, no examples", "random play"
PLAIN = ("--style", "act", "--temperature", "0.7", "--max-new-tokens", "32", "--max-context", "4096")
"""A model that no run has settings for: as the others, but with the environment's own instruction and nothing else."""

STAGED = tuple(w.format(**TASKS["babyai"]) for w in HORIZONS["staged"])
MANY_ROOMS = subsets("GoToObjMazeS7", "FindObjS7", "Open", "PickupLevel17", "UnlockLocalDist", "OneRoomS20")
TURNS = ("--turns", "2,4,8,16,32", "--samples", "4", "--limit", "50", "--concurrency", "128")

SIZES = {
    "1M": {"hidden_size": 128, "intermediate_size": 384, "num_layers": 4, "num_heads": 4},
    "5M": {"hidden_size": 256, "intermediate_size": 768, "num_layers": 6, "num_heads": 4},
    "25M": {"hidden_size": 512, "intermediate_size": 1536, "num_layers": 8, "num_heads": 8},
}
"""Shapes of the models from nothing, by their number of parameters without embeddings."""
RATES = {"1M": (3e-3, 3e-4), "5M": (2e-3, 2e-4), "25M": (1e-3, 1e-4)}
"""Learning rates of imitation and of RL: wider models bear smaller ones."""


def base(task: str, size: str, seed: int) -> Job:
    """The starting model of a task: imitation of play by recipes/evidence/<task>-base.toml."""
    shape = tuple(f"model.scratch.{name}={value}" for name, value in SIZES[size].items())
    return Job(
        name=f"base-{task}-{size}-{seed}",
        arm="base",
        task=task,
        seed=seed,
        recipe=f"evidence/{task}-base.toml",
        words=(*shape, f"sft.optimizer.lr={RATES[size][0]}"),
    )


def trained(task: str, arm: str, size: str, seed: int, words: tuple[str, ...], name: str = "") -> Job:
    start = base(task, size, seed).name
    return Job(
        name=f"{name or arm}-{task}-{size}-{seed}",
        arm=arm,
        task=task,
        seed=seed,
        recipe=f"evidence/{task}-rl.toml",
        words=(f"model.path={{{start}}}", f"rl.optimizer.lr={RATES[size][1]}", *words),
    )


FAR_ROOMS = ("KeyInBox", "Unlock", "UnlockPickupDist", "GoToImpUnlock", "OneRoomS20", "SynthLoc")
"""Levels that the oracle needs six to ten turns for in the median, and can end in four in an episode of five."""
MIDDLE = ("horizon.kind=fixed", "horizon.turns=[{middle}]", "eval.every=20")
"""Tells a horizon that grows from one of medium length."""


FAR_HELD_OUT = (*subsets(*FAR_ROOMS), "--limit", "50", "--samples", "4", "--turns", "16", "--concurrency", "128")
SETTINGS = {
    "lr x 3": ("rl.optimizer.lr=9e-4",),
    "credit by turns": ("rl.credit=turns", "rl.turn_discount=0.95"),
}
"""Under which a long horizon may do worse, or better, than under those of claim B."""


def in_far_rooms(job: Job) -> Job:
    """The same job on other levels, under a name and a task of its own."""
    levels = ", ".join(f'"{name}"' for name in FAR_ROOMS)
    words = tuple(re.sub("{base-babyai-(.+?)}", r"{base-far-rooms-\1}", word) for word in job.words)
    return replace(
        job,
        name=job.name.replace("babyai", "far-rooms"),
        task="far rooms",
        words=(*words, f'environments=[{{name="babyai", subsets=[{levels}]}}]'),
    )


def evaluated(name: str, agent: str, arm: str, task: str, seed: int, words: tuple[str, ...]) -> Job:
    """`agent` is a job, or the pretrained model."""
    options = ("--agent", f"{{{agent}}}", "--env", task, *words)
    return Job(name=name, arm=arm, task=task, seed=seed, kind="eval", words=options)


def chance(name: str, task: str, words: tuple[str, ...]) -> Job:
    """Any of the actions that the environment names, each as likely: what is reached without reading anything."""
    options = ("--agent", "random", "--env", task, *words)
    return Job(name=name, arm=RANDOM, task=task, seed=0, kind="eval", words=options)


def smollm2(task: str, arm: str, kind: str, start: str, seed: int, *words: str) -> Job:
    """A run of claim A by recipes/evidence/smollm2-<task>-<kind>.toml."""
    short = arm.lower().replace(" ", "").replace("+", "-")
    recipe = f"evidence/smollm2-{task}-{kind}.toml"
    settings = (f"model.path={{{start}}}", *words)
    return Job(name=f"smollm2-{short}-{task}-{seed}", arm=arm, task=task, seed=seed, recipe=recipe, words=settings)


def rl_over_base(seeds: list[int] | None) -> list[Job]:
    """Claim A: a pretrained model as it is, after imitation, after RL, after both; one prompt for all of them."""
    jobs: list[Job] = []
    for seed in seeds if seeds is not None else range(1):
        for task in HELD_OUT:
            imitated = smollm2(task, "SFT", "sft", PRETRAINED, seed)
            runs = [
                imitated,
                smollm2(task, "RL", "rl", PRETRAINED, seed),
                smollm2(task, "SFT + RL", "rl", imitated.name, seed),
                # Nothing is learned in this one: it holds the model in the prompt that it is evaluated in.
                smollm2(task, "base", "rl", PRETRAINED, seed, "rl.steps=0", "eval.episodes=6"),
            ]
            words = SMOLLM2_HELD_OUT[task]
            jobs += runs
            jobs += [evaluated(f"eval-{job.name}", job.name, job.arm, task, seed, words) for job in runs]
            plain = f"eval-smollm2-plain-{task}-{seed}"
            jobs.append(evaluated(plain, PRETRAINED, NO_EXAMPLES, task, seed, (*words, *PLAIN)))
            if seed == 0:
                jobs.append(chance(f"eval-random-{task}", task, (*HELD_OUT[task], "--turns", "16")))
    return jobs


def staged_horizon(seeds: list[int] | None) -> list[Job]:
    """Claim B: four horizons from the same starting model, to the same number of sampled tokens."""
    jobs: list[Job] = []
    for task, numbers in TASKS.items():
        for seed in seeds if seeds is not None else range(6):
            jobs.append(base(task, "1M", seed))
            for arm, words in HORIZONS.items():
                jobs.append(trained(task, arm, "1M", seed, tuple(w.format(**numbers) for w in words)))
    return jobs


def interaction(seeds: list[int] | None) -> list[Job]:
    """Claim C: three sizes, before and after RL, each under 2 to 32 turns."""
    jobs: list[Job] = []
    for seed in seeds if seeds is not None else range(3):
        for size in SIZES:
            start, agent = base("babyai", size, seed), trained("babyai", "staged", size, seed, STAGED)
            jobs += [start, agent]
            for run in (start, agent):
                words = (*MANY_ROOMS, *TURNS)
                jobs.append(evaluated(f"turns-{run.name}", run.name, f"{run.arm} {size}", "babyai", seed, words))
        if seed == 0:
            jobs.append(chance("turns-random", "babyai", (*MANY_ROOMS, *TURNS)))
    return jobs


def ablations(seeds: list[int] | None) -> list[Job]:
    """What is changed, one thing at a time, against the staged arm."""
    changes: dict[str, tuple[str, ...]] = {
        "unchanged": (),
        "group of 4": ("rl.group_size=4", "rl.groups_per_step=32"),
        "group of 16": ("rl.group_size=16", "rl.groups_per_step=8"),
        "credit by turns": ("rl.credit=turns", "rl.turn_discount=0.95"),
        "anchor states": ("rl.credit=anchor", "rl.turn_discount=0.95"),
        "overlap, corrected": ("rl.overlap=1", "rl.importance=token"),
        "overlap, uncorrected": ("rl.overlap=1", "rl.importance=none"),
        "temperature 0.7": ("agent.temperature=0.7",),
        "temperature 1.3": ("agent.temperature=1.3",),
    }
    jobs: list[Job] = []
    for seed in seeds if seeds is not None else range(3):
        jobs.append(base("babyai", "1M", seed))
        for arm, words in changes.items():
            name = arm.replace(",", "").replace(" ", "-") if words else "staged"  # claim B's: it is not run again
            jobs.append(trained("babyai", arm, "1M", seed, (*STAGED, *words), name))
    return jobs


def horizon_conditions(seeds: list[int] | None) -> list[Job]:
    """When claim B holds: on tasks that a short horizon hardly reaches, evaluated four times an item at the end."""
    jobs: list[Job] = []
    for seed in seeds if seeds is not None else range(6):
        jobs.append(in_far_rooms(base("babyai", "1M", seed)))
        arms = {arm: HORIZONS[arm] for arm in ("fixed-short", "fixed-long", "staged")} | {"fixed-middle": MIDDLE}
        for arm, words in arms.items():
            run = in_far_rooms(trained("babyai", arm, "1M", seed, tuple(w.format(**TASKS["babyai"]) for w in words)))
            jobs += [run, far_evaluated(run)]
    jobs.append(replace(chance("eval-random-far-rooms", "babyai", FAR_HELD_OUT), task="far rooms"))
    return jobs


def far_evaluated(run: Job) -> Job:
    at_end = evaluated(f"eval-{run.name}", run.name, run.arm, "babyai", run.seed, FAR_HELD_OUT)
    return replace(at_end, task=run.task)


def horizon_settings(seeds: list[int] | None) -> list[Job]:
    """The long and the staged horizon in far rooms once more, under other settings, from the same starting models."""
    jobs: list[Job] = []
    for seed in seeds if seeds is not None else range(3):
        jobs.append(in_far_rooms(base("babyai", "1M", seed)))
        for setting, changed in SETTINGS.items():
            for arm in ("fixed-long", "staged"):
                words = (*(w.format(**TASKS["babyai"]) for w in HORIZONS[arm]), *changed)
                name = f"{arm}-{setting.replace(' ', '-')}"
                run = in_far_rooms(trained("babyai", arm, "1M", seed, words, name))
                run = replace(run, task=f"far rooms, {setting}")
                jobs += [run, far_evaluated(run)]
    return jobs


def horizons_of_smollm2(seeds: list[int] | None) -> list[Job]:
    """Claim B with a pretrained model, after imitation, on the task that models from nothing could not learn."""
    jobs: list[Job] = []
    budget = ("rl.steps=1000", "rl.token_budget=1_500_000")
    for seed in seeds if seeds is not None else range(1, 4):  # claim A has shown what becomes of 0
        start = smollm2("textcraft", "SFT", "sft", PRETRAINED, seed)
        jobs.append(start)
        for arm, every in {"fixed-short": 40, "fixed-long": 12, "staged": 16}.items():
            words = (*(w.format(**TASKS["textcraft"]) for w in HORIZONS[arm][:2]), f"eval.every={every}", *budget)
            run = smollm2("textcraft", arm, "rl", start.name, seed, *words)
            jobs += [
                run,
                evaluated(f"eval-{run.name}", run.name, arm, "textcraft", seed, SMOLLM2_HELD_OUT["textcraft"]),
            ]
    return jobs


QWEN = {
    "textcraft": {"short": 10, "middle": 20, "long": 30, "per_stage": 70},
    "babyai": {"short": 6, "middle": 13, "long": 20, "per_stage": 70},
}
"""Horizons of the paper and steps of a stage, by environment."""
QWEN_HORIZONS = {
    "staged": ("horizon.kind=stepwise", "horizon.turns=[{short}, {middle}, {long}]"),
    "fixed-long": ("horizon.kind=fixed", "horizon.turns=[{long}]"),
    "fixed-short": ("horizon.kind=fixed", "horizon.turns=[{short}]"),
    "adaptive": (
        "horizon.kind=adaptive",
        "horizon.turns=[{short}, {middle}, {long}]",
        "horizon.steps_per_stage={per_stage}",
    ),
}
QWEN_BASE = ("--style", "react", "--temperature", "1", "--max-new-tokens", "128", "--max-context", "4096")
"""Settings of recipes/qwen, for the model that no run has settings for."""


def on_suite(name: str, agent: str, arm: str, task: str, seed: int, *words: str) -> Job:
    """Evaluate on the published number of items and turns, four samples an item."""
    suite = ("--suite", "agentgym-27", "--env", task, "--turns", str(QWEN[task]["long"]), "--samples", "4")
    options = ("--agent", agent, *suite, "--dtype", "bfloat16", "--concurrency", "128")
    return Job(name=name, arm=arm, task=task, seed=seed, kind="eval", words=(*options, *words))


def qwen(task: str, seeds: list[int] | None) -> list[Job]:
    """The paper's table for one scenario: Qwen2.5-Coder-1.5B-Instruct before and after RL, under four horizons."""
    jobs = [
        on_suite(f"eval-qwen-base-{task}", f"{{{PRETRAINED}}}", "base", task, 0, *QWEN_BASE),
        on_suite(f"eval-random-{task}-27", "random", RANDOM, task, 0),
    ]
    for arm, words in QWEN_HORIZONS.items():
        for seed in seeds if seeds is not None else range(3):
            settings = (f"model.path={{{PRETRAINED}}}", *(w.format(**QWEN[task]) for w in words))
            name = f"qwen-{arm}-{task}-{seed}"
            run = Job(name=name, arm=arm, task=task, seed=seed, recipe=f"qwen/{task}.toml", words=settings)
            jobs += [run, on_suite(f"eval-{name}", f"{{{name}}}", arm, task, seed)]
    return jobs


STUDIES: dict[str, Callable[[list[int] | None], list[Job]]] = {
    "rl-over-base": rl_over_base,
    "staged-horizon": staged_horizon,
    "horizon-conditions": horizon_conditions,
    "horizon-settings": horizon_settings,
    "horizon-smollm2": horizons_of_smollm2,
    "interaction": interaction,
    "ablations": ablations,
    "qwen-textcraft": partial(qwen, "textcraft"),
    "qwen-babyai": partial(qwen, "babyai"),
}
