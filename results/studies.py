"""Jobs of the experiments in docs/results/evidence-protocol.md: arms, tasks and starting models."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from asynchronous_studies import (
    asynchronous,
    asynchronous_long,
    asynchronous_smollm2,
    asynchronous_textcraft,
    qwen_asynchronous,
)
from jobs import PRETRAINED, Job, chance, evaluated, fill, subsets
from qwen_studies import (
    QWEN,
    QWEN_HORIZONS,
    QWEN_SIZES,
    base_on_suite,
    on_suite,
    qwen,
    qwen_first,
    qwen_generalisation,
    qwen_interaction,
    qwen_run,
    qwen_small,
)

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

SIX_SUBSETS = subsets("GoTo", "Pickup", "ActionObjDoor", "FindObjS7", "OneRoomS20", "SynthLoc")
HELD_OUT = {
    "babyai": (*SIX_SUBSETS, "--limit", "50"),
    "textcraft": (*subsets("depth1", "depth2", "depth3"), "--samples", "4"),
}
"""Evaluation options of claim A: 300 episodes on 300 items, and 388 episodes on 97 items."""
SMOLLM2_HELD_OUT = {
    task: (*items, "--turns", "16", "--dtype", "bfloat16", "--concurrency", "128") for task, items in HELD_OUT.items()
}
NO_EXAMPLES = "base, no examples"
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
"""Levels on which the oracle needs five to ten turns (median by level). It ends a quarter of the items within four."""
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


TEACHER = ("model.lora.rank=32", "rl.optimizer.lr=1e-4", "rl.steps=50", "eval.every=50")
"""Settings of a teacher, which only trains under the shortest horizon, where most is learned."""
STUDENT = (
    *("rl.token_budget=1_000_000", "rl.steps=1000", "rl.groups_per_step=32", "rl.group_size=2"),
    *("rl.optimizer.lr=1e-5", "rl.kl_coef=0.0", "eval.every=1000", "eval.episodes=32"),
)
"""Settings of a student. A teacher scores every token, so half as many episodes as in RL make a step."""
STUDENT_HORIZONS = {
    "staged": (*QWEN_HORIZONS["staged"], "horizon.steps_per_stage=12"),
    "fixed-long": QWEN_HORIZONS["fixed-long"],
}
LOCAL_JUDGE = (
    f"judge={{path='{{{PRETRAINED}}}', dtype='bfloat16', concurrency=64, max_chars=8000, max_new_tokens=128, "
    "max_calls=20_000}"
)
"""The judge in the process of the run, instead of the API that recipes/searchqa/judged.toml names."""
JUDGED_ONLY_TO_LOOK = (
    "rewards=[{kind='environment'}, {kind='rubric', rubric='The answer follows from a passage.', weight=0.0}]"
)
"""Rewards of the arm that the judge scores but does not pay."""


def distillation(task: str, seeds: list[int]) -> list[Job]:
    """Return a 1.5B teacher trained as adapters and 0.5B students of it, fixed against staged horizons."""
    plain = qwen_run(task, "fixed-short", 0)
    teacher = replace(plain, name=f"qwen-lora-{task}-0", arm="teacher", arguments=(*plain.arguments, *TEACHER))
    student = QWEN_SIZES["0.5B"]
    jobs = [
        teacher,
        on_suite(f"eval-{teacher.name}", f"{{{teacher.name}}}", teacher.arm, task, 0),
        base_on_suite(f"eval-qwen-base-{task}-0.5B", student, "base 0.5B", task),
    ]
    taught = (f"model.path={{{student}}}", "method=distill", f"rl.distill.teacher={{{teacher.name}}}")
    for seed in seeds:
        for arm, horizon in STUDENT_HORIZONS.items():
            run = Job(name=f"distill-{arm}-{task}-{seed}", arm=arm, task=task, seed=seed, recipe=f"qwen/{task}.toml")
            run = replace(run, arguments=(*taught, *fill(horizon, QWEN[task]), *STUDENT))
            jobs += [run, on_suite(f"eval-{run.name}", f"{{{run.name}}}", arm, task, seed)]
    return jobs


DAGGER_ARMS = {
    "DAgger": ("thoughts", "dagger.correct_thoughts=true"),
    "DAgger, actions only": ("actions", "dagger.correct_thoughts=false"),
    "DAgger, wrong thoughts": ("wrong-thoughts", "warm_start.wrong_thoughts=0.2"),
}
"""Name of the jobs and setting by arm. The last one has wrong thoughts and their corrections in its demonstrations."""


def teachers(seeds: list[int] | None) -> list[Job]:
    """Return distillation on two tasks (three seeds), DAgger with SmolLM2-135M on TextCraft (two), and a 1.5B judge of
    0.5B answers (one)."""
    chosen = seeds if seeds is not None else list(range(3))
    jobs = [job for task in ("textcraft", "babyai") for job in distillation(task, chosen)]
    held_out = (*subsets("depth1", "depth2"), "--samples", "4", "--turns", "12", *SMOLLM2_HELD_OUT["textcraft"][-4:])
    for seed in chosen[:2]:
        for arm, (label, setting) in DAGGER_ARMS.items():
            name = f"dagger-{label}-{seed}"
            run = Job(name=name, arm=arm, task="textcraft", seed=seed, recipe="smollm2/textcraft_dagger.toml")
            jobs.append(replace(run, arguments=(f"model.path={{{QWEN_SIZES['135M']}}}", setting)))
            jobs.append(evaluated(f"eval-{name}", name, arm, "textcraft", seed, held_out))
    for seed in chosen[:1]:
        length = ("rl.steps=40", "rl.optimizer.lr=3e-6", "eval.every=20")
        judge = (f"model.path={{{QWEN_SIZES['0.5B']}}}", LOCAL_JUDGE, *length)
        for arm, rewards in {"judged": (), "exact match": (JUDGED_ONLY_TO_LOOK,)}.items():
            name = f"searchqa-{arm.replace(' ', '-')}-{seed}"
            run = Job(name=name, arm=arm, task="searchqa", seed=seed, recipe="searchqa/judged.toml")
            jobs.append(replace(run, arguments=(*judge, *rewards)))
            jobs.append(on_suite(f"eval-{name}", f"{{{name}}}", arm, "searchqa", seed))
    return jobs


COLLAPSE_ARMS = {
    "fixed-64": ("horizon.kind=fixed", "horizon.turns=[64]"),
    "fixed-16": ("horizon.kind=fixed", "horizon.turns=[16]"),
    "staged": ("horizon.kind=stepwise", "horizon.turns=[16, 32, 64]", "horizon.steps_per_stage=100"),
    "too-short": ("horizon.kind=stepwise", "horizon.turns=[4, 16, 64]", "horizon.steps_per_stage=100"),
}
COLLAPSE_CONDITIONS: dict[str, tuple[str, ...]] = {
    "calm": (),
    "paper-like": (
        *("rl.kl_coef=0", "rl.optimizer.lr=5e-4", "rl.minibatches=4"),
        *("rl.overlap=1", "rl.importance=none"),
    ),
}
"""Settings of a condition. The calm one is recipes/evidence/maze-rl.toml itself."""
MAZE_HELD_OUT = (*subsets("size4"), "--samples", "5", "--turns", "64", "--concurrency", "128")
"""1,000 episodes on the 200 held-out items of size 4."""


def collapse(seeds: list[int] | None) -> list[Job]:
    """Return the jobs of results/collapse/PROTOCOL.md: four horizons, two conditions, the same starting models."""
    jobs: list[Job] = []
    for seed in seeds if seeds is not None else range(12):
        start = Job(name=f"base-maze-{seed}", arm="base", task="maze", seed=seed, recipe="evidence/maze-base.toml")
        jobs.append(start)
        for condition, changed in COLLAPSE_CONDITIONS.items():
            for arm, arguments in COLLAPSE_ARMS.items():
                settings = (f"model.path={{{start.name}}}", *arguments, *changed)
                run = Job(name=f"{arm}-{condition}-maze-{seed}", arm=arm, task=f"maze, {condition}", seed=seed)
                run = replace(run, recipe="evidence/maze-rl.toml", arguments=settings)
                evaluation = evaluated(f"eval-{run.name}", run.name, arm, "maze", seed, MAZE_HELD_OUT)
                jobs += [run, replace(evaluation, task=run.task, keep=seed == 0)]
    return jobs


LONG_CONTEXTS = {"truncation": "full", "window": "window", "summary": "summary"}
"""Values of `agent.context`, by arm."""


def long_context(seeds: list[int] | None) -> list[Job]:
    """Return the jobs of the study of long contexts: tours of 200 turns in 2,048 tokens, with three contexts."""
    jobs: list[Job] = []
    for seed in seeds if seeds is not None else range(3):
        recipe = "evidence/long-maze-base.toml"
        start = Job(name=f"base-long-maze-{seed}", arm="base", task="maze", seed=seed, recipe=recipe)
        jobs.append(start)
        for arm, context in LONG_CONTEXTS.items():
            arguments = (f"model.path={{{start.name}}}", f"agent.context={context}")
            run = Job(name=f"{arm}-long-maze-{seed}", arm=arm, task="maze", seed=seed, arguments=arguments)
            jobs.append(replace(run, recipe="evidence/long-maze-rl.toml"))
    return jobs


TREE_ARMS: dict[str, tuple[str, ...]] = {
    "chains": (),
    "trees": ("rl.tree={roots=4, branches=1, depth=1}",),
}
"""Eight episodes of each task: from the first turn, or four and a continuation of each from a random turn."""
QWEN_TREE_BUDGET = {"textcraft": 1_200_000, "searchqa": 320_000}
"""Sampled tokens of a run, about 20 steps of chains."""


def trees(seeds: list[int] | None) -> list[Job]:
    """Return KeyDoor by chains and by trees, from one starting model and with the same budget of sampled tokens."""
    start = Job(name="base-keydoor", arm="base", task="keydoor", seed=0, recipe="evidence/keydoor-base.toml")
    return [start] + [
        Job(
            name=f"{arm}-keydoor-{seed}",
            arm=arm,
            task="keydoor",
            seed=seed,
            recipe="evidence/keydoor-rl.toml",
            arguments=(f"model.path={{{start.name}}}", *arguments),
        )
        for seed in (seeds if seeds is not None else range(3))
        for arm, arguments in TREE_ARMS.items()
    ]


def qwen_trees(seeds: list[int] | None) -> list[Job]:
    """Return TextCraft and SearchQA by chains and by trees with the 1.5B model, under a horizon of the first stage. It
    needs one GPU."""
    jobs: list[Job] = []
    for task, budget in QWEN_TREE_BUDGET.items():
        length = ("rl.steps=1000", f"rl.token_budget={budget}", "rl.kl_coef=0", "eval.every=6")
        for seed in seeds if seeds is not None else range(3):
            run = qwen_run(task, "fixed-short", seed)
            for arm, arguments in TREE_ARMS.items():
                settings = (*run.arguments, *length, *arguments)
                jobs.append(replace(run, name=f"{arm}-{task}-{seed}", arm=arm, arguments=settings))
    return jobs


AGAINST_GRPO: dict[str, dict[str, tuple[str, ...]]] = {
    "keydoor": {
        "plain": (),
        "widest groups": ("rl.groups_per_step=16", "rl.keep_groups=0.25"),
    },
    "lock": {
        "plain": ("rl.correction.first_stage_steps=0", "rl.correction.hold=0", "rl.correction.bonus=0"),
        "self-correction": (),
    },
    "nim": {
        "plain": ("team.roles.second.policy=random",),
        "self-play": (),
    },
}
"""Settings by task and arm: GRPO, and a method that changes the groups, the reward or the opponent."""
AGAINST_GRPO_TASKS = {
    "keydoor": ("evidence/keydoor-rl.toml", ("model.path={base-keydoor}",)),
    "lock": ("../examples/lock.toml", ("environments.0.name=examples.lock:Lock", "eval.every=8", "eval.samples=2")),
    "nim": ("nim/league.toml", ("team.roles.second.eval_policy=oracle",)),
}
"""Recipe and common settings of each task."""


def against_grpo(seeds: list[int] | None) -> list[Job]:
    """Return three methods beside plain GRPO on small games, on a CPU."""
    jobs = [Job(name="base-keydoor", arm="base", task="keydoor", seed=0, recipe="evidence/keydoor-base.toml")]
    for task, arms in AGAINST_GRPO.items():
        recipe, common = AGAINST_GRPO_TASKS[task]
        for seed in seeds if seeds is not None else range(8):
            for arm, arguments in arms.items():
                name = f"{arm.replace(' ', '-')}-{task}-{seed}"
                run = Job(name=name, arm=arm, task=task, seed=seed, recipe=recipe, arguments=(*common, *arguments))
                jobs.append(run)
    return jobs


DEBATE_ARMS = {
    "alone": ("environments.0.kwargs.rounds=0",),
    "quotes at random": ("team.roles.alpha.policy=random", "team.roles.beta.policy=random"),
    "quotes for its answer": ("team.roles.alpha.policy=oracle", "team.roles.beta.policy=oracle"),
}
"""Settings of each arm: no debaters, debaters that quote any passage, and debaters that quote for their answer."""


def debate(seeds: list[int] | None) -> list[Job]:
    """Return judges of invented kingdoms, alone and with debaters that do not learn, on a CPU."""
    return [
        Job(
            name=f"{arm.replace(' ', '-')}-debate-{seed}",
            arm=arm,
            task="debate",
            seed=seed,
            recipe="evidence/debate-judge.toml",
            arguments=arguments,
        )
        for seed in (seeds if seeds is not None else range(3))
        for arm, arguments in DEBATE_ARMS.items()
    ]


def qwen_debate(seeds: list[int] | None) -> list[Job]:
    """Return a judge that hears two debaters and one that hears none, trained alike. It needs one GPU."""
    length = (f"model.path={{{PRETRAINED}}}", "rl.steps=60", "eval.every=15")
    return [
        Job(
            name=f"qwen-debate-{arm}-{seed}",
            arm=arm,
            task="debate",
            seed=seed,
            recipe="qwen/debate.toml",
            arguments=(*length, f"environments.0.kwargs.rounds={rounds}"),
        )
        for seed in (seeds if seeds is not None else range(3))
        for arm, rounds in {"debate": 1, "alone": 0}.items()
    ]


STUDIES: dict[str, Callable[[list[int] | None], list[Job]]] = {
    "rl-over-base": rl_over_base,
    "staged-horizon": staged_horizon,
    "horizon-conditions": horizon_conditions,
    "horizon-settings": horizon_settings,
    "horizon-smollm2": horizons_of_smollm2,
    "interaction": interaction,
    "ablations": ablations,
    "qwen-first": qwen_first,
    "qwen-textcraft": partial(qwen, "textcraft", 3),
    "qwen-babyai": partial(qwen, "babyai", 3),
    "qwen-babyai-0.5B": qwen_small,
    "qwen-searchqa": partial(qwen, "searchqa", 3),
    "qwen-sciworld": partial(qwen, "sciworld", 2),
    "qwen-webarena": partial(qwen, "webarena", 1),
    "qwen-generalisation": qwen_generalisation,
    "qwen-interaction": qwen_interaction,
    "teachers": teachers,
    "collapse": collapse,
    "long-context": long_context,
    "asynchronous": asynchronous,
    "asynchronous-textcraft": asynchronous_textcraft,
    "asynchronous-long": asynchronous_long,
    "asynchronous-smollm2": asynchronous_smollm2,
    "qwen-asynchronous": qwen_asynchronous,
    "trees": trees,
    "qwen-trees": qwen_trees,
    "against-grpo": against_grpo,
    "debate": debate,
    "qwen-debate": qwen_debate,
}
