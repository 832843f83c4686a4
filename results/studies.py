"""Jobs of the experiments in docs/results/evidence.md: arms, tasks and starting models."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

PLACEHOLDER = r"{([\w.-]+)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One command. In `arguments`, {name} is replaced by the run of that name if the job evaluates, and by its last
    model if the job trains; {pretrained} is replaced by the path of SmolLM2-135M-Instruct."""

    name: str
    arm: str
    task: str
    seed: int
    kind: Literal["train", "eval"] = "train"
    recipe: str = ""
    """Recipe of a `train` job, relative to recipes/."""
    arguments: tuple[str, ...] = ()
    """Settings of a `train` job, options of an `eval` job."""

    @property
    def needs(self) -> list[str]:
        """Return the names of the jobs that must finish first."""
        return [name for a in self.arguments for name in re.findall(PLACEHOLDER, a) if name != PRETRAINED]


HORIZONS: dict[str, tuple[str, ...]] = {
    "fixed-short": ("horizon.kind=fixed", "horizon.turns=[{short}]", "eval.every=40"),
    "fixed-long": ("horizon.kind=fixed", "horizon.turns=[{long}]", "eval.every=12"),
    "staged": ("horizon.kind=stepwise", "horizon.turns=[{short}, {middle}, {long}]", "eval.every=16"),
    "adaptive": ("horizon.kind=adaptive", "horizon.turns=[{short}, {middle}, {long}]", "eval.every=16"),
}
"""Arms of claim B; TASKS has the turns. With short horizons a token budget has more steps, so `eval.every` differs to
give every arm about eight evaluations."""

TASKS = {"babyai": {"short": 4, "middle": 8, "long": 16}, "textcraft": {"short": 4, "middle": 8, "long": 16}}
"""Turns of the short, middle and long horizon, by environment."""

PRETRAINED = "pretrained"
"""Placeholder of the pretrained model, which no job trains."""


def fill(settings: tuple[str, ...], numbers: dict[str, int]) -> tuple[str, ...]:
    return tuple(setting.format(**numbers) for setting in settings)


def subsets(*names: str) -> tuple[str, ...]:
    return tuple(option for name in names for option in ("--subset", name))


SIX_SUBSETS = subsets("GoTo", "Pickup", "ActionObjDoor", "FindObjS7", "OneRoomS20", "SynthLoc")
HELD_OUT = {
    "babyai": (*SIX_SUBSETS, "--limit", "50"),
    "textcraft": (*subsets("depth1", "depth2", "depth3"), "--samples", "4"),
}
"""Evaluation options of claim A: 300 episodes on 300 items, and 388 episodes on 97 items."""
SMOLLM2_HELD_OUT = {
    task: (*items, "--turns", "16", "--dtype", "bfloat16", "--concurrency", "128") for task, items in HELD_OUT.items()
}
NO_EXAMPLES, RANDOM = "base, no examples", "random play"
PLAIN = ("--style", "act", "--temperature", "0.7", "--max-new-tokens", "32", "--max-context", "4096")
"""Options for the model without a run: the settings of the runs, but only the environment's own instruction."""

STAGED = fill(HORIZONS["staged"], TASKS["babyai"])
MANY_ROOMS = subsets("GoToObjMazeS7", "FindObjS7", "Open", "PickupLevel17", "UnlockLocalDist", "OneRoomS20")
TURNS = ("--turns", "2,4,8,16,32", "--samples", "4", "--limit", "50", "--concurrency", "128")

SIZES = {
    "1M": {"hidden_size": 128, "intermediate_size": 384, "num_layers": 4, "num_heads": 4},
    "5M": {"hidden_size": 256, "intermediate_size": 768, "num_layers": 6, "num_heads": 4},
    "25M": {"hidden_size": 512, "intermediate_size": 1536, "num_layers": 8, "num_heads": 8},
}
"""Shapes of the models trained from scratch, by their number of parameters without embeddings."""
RATES = {"1M": (3e-3, 3e-4), "5M": (2e-3, 2e-4), "25M": (1e-3, 1e-4)}
"""Learning rates of SFT and RL. Wider models need smaller rates."""


def base(task: str, size: str, seed: int) -> Job:
    """Return the job that trains a task's starting model by imitation (recipes/evidence/<task>-base.toml)."""
    shape = tuple(f"model.scratch.{name}={value}" for name, value in SIZES[size].items())
    return Job(
        name=f"base-{task}-{size}-{seed}",
        arm="base",
        task=task,
        seed=seed,
        recipe=f"evidence/{task}-base.toml",
        arguments=(*shape, f"sft.optimizer.lr={RATES[size][0]}"),
    )


def trained(task: str, arm: str, size: str, seed: int, arguments: tuple[str, ...], name: str = "") -> Job:
    start = base(task, size, seed).name
    return Job(
        name=f"{name or arm}-{task}-{size}-{seed}",
        arm=arm,
        task=task,
        seed=seed,
        recipe=f"evidence/{task}-rl.toml",
        arguments=(f"model.path={{{start}}}", f"rl.optimizer.lr={RATES[size][1]}", *arguments),
    )


FAR_ROOMS = ("KeyInBox", "Unlock", "UnlockPickupDist", "GoToImpUnlock", "OneRoomS20", "SynthLoc")
"""Levels on which the oracle needs six to ten turns (median) and at most four turns in a fifth of the episodes."""
MIDDLE = ("horizon.kind=fixed", "horizon.turns=[{middle}]", "eval.every=20")
"""Control arm: separates a growing horizon from a medium one."""


FAR_HELD_OUT = (*subsets(*FAR_ROOMS), "--limit", "50", "--samples", "4", "--turns", "16", "--concurrency", "128")
SETTINGS = {
    "lr x 3": ("rl.optimizer.lr=9e-4",),
    "credit by turns": ("rl.credit=turns", "rl.turn_discount=0.95"),
}
"""Settings that may change how a long horizon does, compared with those of claim B."""


def in_far_rooms(job: Job) -> Job:
    """Return the job on the far-room levels, with its own name and task."""
    levels = ", ".join(f'"{name}"' for name in FAR_ROOMS)
    arguments = tuple(re.sub("{base-babyai-(.+?)}", r"{base-far-rooms-\1}", argument) for argument in job.arguments)
    return replace(
        job,
        name=job.name.replace("babyai", "far-rooms"),
        task="far rooms",
        arguments=(*arguments, f'environments=[{{name="babyai", subsets=[{levels}]}}]'),
    )


def evaluated(name: str, agent: str, arm: str, task: str, seed: int, arguments: tuple[str, ...]) -> Job:
    """Return an evaluation of `agent`: the name of a job, or PRETRAINED."""
    options = ("--agent", f"{{{agent}}}", "--env", task, *arguments)
    return Job(name=name, arm=arm, task=task, seed=seed, kind="eval", arguments=options)


def chance(name: str, task: str, arguments: tuple[str, ...]) -> Job:
    """Return an evaluation of uniformly random play among the actions that the environment lists."""
    options = ("--agent", "random", "--env", task, *arguments)
    return Job(name=name, arm=RANDOM, task=task, seed=0, kind="eval", arguments=options)


def smollm2(task: str, arm: str, kind: str, start: str, seed: int, *arguments: str) -> Job:
    """Return a run of claim A (recipes/evidence/smollm2-<task>-<kind>.toml)."""
    short = arm.lower().replace(" ", "").replace("+", "-")
    recipe = f"evidence/smollm2-{task}-{kind}.toml"
    settings = (f"model.path={{{start}}}", *arguments)
    return Job(name=f"smollm2-{short}-{task}-{seed}", arm=arm, task=task, seed=seed, recipe=recipe, arguments=settings)


def rl_over_base(seeds: list[int] | None) -> list[Job]:
    """Return the jobs of claim A: a pretrained model before training, after SFT, RL and both, with one prompt."""
    jobs: list[Job] = []
    for seed in seeds if seeds is not None else range(1):
        for task in HELD_OUT:
            imitated = smollm2(task, "SFT", "sft", PRETRAINED, seed)
            runs = [
                imitated,
                smollm2(task, "RL", "rl", PRETRAINED, seed),
                smollm2(task, "SFT + RL", "rl", imitated.name, seed),
                # A run without training steps: it records the prompt for the evaluation of the base model.
                smollm2(task, "base", "rl", PRETRAINED, seed, "rl.steps=0", "eval.episodes=6"),
            ]
            arguments = SMOLLM2_HELD_OUT[task]
            jobs += runs
            jobs += [evaluated(f"eval-{job.name}", job.name, job.arm, task, seed, arguments) for job in runs]
            plain = f"eval-smollm2-plain-{task}-{seed}"
            jobs.append(evaluated(plain, PRETRAINED, NO_EXAMPLES, task, seed, (*arguments, *PLAIN)))
            if seed == 0:
                jobs.append(chance(f"eval-random-{task}", task, (*HELD_OUT[task], "--turns", "16")))
    return jobs


def staged_horizon(seeds: list[int] | None) -> list[Job]:
    """Return the jobs of claim B: four horizons with the same starting model and budget of sampled tokens."""
    jobs: list[Job] = []
    for task, numbers in TASKS.items():
        for seed in seeds if seeds is not None else range(6):
            jobs.append(base(task, "1M", seed))
            for arm, arguments in HORIZONS.items():
                jobs.append(trained(task, arm, "1M", seed, fill(arguments, numbers)))
    return jobs


def interaction(seeds: list[int] | None) -> list[Job]:
    """Return the jobs of claim C: three sizes, before and after RL, with 2 to 32 turns."""
    jobs: list[Job] = []
    for seed in seeds if seeds is not None else range(3):
        for size in SIZES:
            start, agent = base("babyai", size, seed), trained("babyai", "staged", size, seed, STAGED)
            jobs += [start, agent]
            for run in (start, agent):
                arguments = (*MANY_ROOMS, *TURNS)
                jobs.append(evaluated(f"turns-{run.name}", run.name, f"{run.arm} {size}", "babyai", seed, arguments))
        if seed == 0:
            jobs.append(chance("turns-random", "babyai", (*MANY_ROOMS, *TURNS)))
    return jobs


def ablations(seeds: list[int] | None) -> list[Job]:
    """Return the staged arm's jobs, each with one changed setting."""
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
        for arm, arguments in changes.items():
            # "staged" is a job of claim B too, so it runs once.
            name = arm.replace(",", "").replace(" ", "-") if arguments else "staged"
            jobs.append(trained("babyai", arm, "1M", seed, (*STAGED, *arguments), name))
    return jobs


def horizon_conditions(seeds: list[int] | None) -> list[Job]:
    """Return claim B on tasks that rarely end within a short horizon, with four samples per item at the end."""
    jobs: list[Job] = []
    for seed in seeds if seeds is not None else range(6):
        jobs.append(in_far_rooms(base("babyai", "1M", seed)))
        arms = {arm: HORIZONS[arm] for arm in ("fixed-short", "fixed-long", "staged")} | {"fixed-middle": MIDDLE}
        for arm, arguments in arms.items():
            run = in_far_rooms(trained("babyai", arm, "1M", seed, fill(arguments, TASKS["babyai"])))
            jobs += [run, evaluated_in_far_rooms(run)]
    jobs.append(replace(chance("eval-random-far-rooms", "babyai", FAR_HELD_OUT), task="far rooms"))
    return jobs


def evaluated_in_far_rooms(run: Job) -> Job:
    job = evaluated(f"eval-{run.name}", run.name, run.arm, "babyai", run.seed, FAR_HELD_OUT)
    return replace(job, task=run.task)


def horizon_settings(seeds: list[int] | None) -> list[Job]:
    """Return the long and staged far-room arms under other settings, from the same starting models."""
    jobs: list[Job] = []
    for seed in seeds if seeds is not None else range(3):
        jobs.append(in_far_rooms(base("babyai", "1M", seed)))
        for setting, changed in SETTINGS.items():
            for arm in ("fixed-long", "staged"):
                arguments = (*fill(HORIZONS[arm], TASKS["babyai"]), *changed)
                name = f"{arm}-{setting.replace(' ', '-')}"
                run = in_far_rooms(trained("babyai", arm, "1M", seed, arguments, name))
                run = replace(run, task=f"far rooms, {setting}")
                jobs += [run, evaluated_in_far_rooms(run)]
    return jobs


def horizons_of_smollm2(seeds: list[int] | None) -> list[Job]:
    """Return claim B with a pretrained model after SFT, on the task that models from scratch do not learn."""
    jobs: list[Job] = []
    budget = ("rl.steps=1000", "rl.token_budget=1_500_000")
    for seed in seeds if seeds is not None else range(1, 4):  # seed 0 is used by claim A
        start = smollm2("textcraft", "SFT", "sft", PRETRAINED, seed)
        jobs.append(start)
        for arm, every in {"fixed-short": 40, "fixed-long": 12, "staged": 16}.items():
            arguments = (*fill(HORIZONS[arm][:2], TASKS["textcraft"]), f"eval.every={every}", *budget)
            run = smollm2("textcraft", arm, "rl", start.name, seed, *arguments)
            jobs += [
                run,
                evaluated(f"eval-{run.name}", run.name, arm, "textcraft", seed, SMOLLM2_HELD_OUT["textcraft"]),
            ]
    return jobs


QWEN = {
    "textcraft": {"short": 10, "middle": 20, "long": 30, "per_stage": 70},
    "babyai": {"short": 6, "middle": 13, "long": 20, "per_stage": 70},
}
"""Horizons of the paper and steps per stage, by environment."""
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
"""Settings of recipes/qwen for the base model, which has no run."""


def on_suite(name: str, agent: str, arm: str, task: str, seed: int, *arguments: str) -> Job:
    """Return an evaluation on the published number of items and turns, with four samples per item."""
    suite = ("--suite", "agentgym-27", "--env", task, "--turns", str(QWEN[task]["long"]), "--samples", "4")
    options = ("--agent", agent, *suite, "--dtype", "bfloat16", "--concurrency", "128")
    return Job(name=name, arm=arm, task=task, seed=seed, kind="eval", arguments=(*options, *arguments))


def qwen(task: str, seeds: list[int] | None) -> list[Job]:
    """Return the jobs of the paper's table for one task: Qwen2.5-Coder-1.5B-Instruct, base and four horizons."""
    jobs = [
        on_suite(f"eval-qwen-base-{task}", f"{{{PRETRAINED}}}", "base", task, 0, *QWEN_BASE),
        on_suite(f"eval-random-{task}-27", "random", RANDOM, task, 0),
    ]
    for arm, arguments in QWEN_HORIZONS.items():
        for seed in seeds if seeds is not None else range(3):
            settings = (f"model.path={{{PRETRAINED}}}", *fill(arguments, QWEN[task]))
            name = f"qwen-{arm}-{task}-{seed}"
            run = Job(name=name, arm=arm, task=task, seed=seed, recipe=f"qwen/{task}.toml", arguments=settings)
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
