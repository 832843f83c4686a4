"""Jobs of the paper's table with Qwen2.5-Coder: the scenarios, generalisation, and interaction against parameters."""

from __future__ import annotations

from dataclasses import replace

from jobs import PRETRAINED, RANDOM, Job, fill

QWEN = {
    "textcraft": {"short": 10, "middle": 20, "long": 30, "per_stage": 50},
    "babyai": {"short": 6, "middle": 13, "long": 20, "per_stage": 50},
    "searchqa": {"short": 5, "middle": 8, "long": 10, "per_stage": 50},
    "sciworld": {"short": 10, "middle": 20, "long": 30, "per_stage": 40},
    "webarena": {"short": 8, "middle": 12, "long": 15, "per_stage": 30},
}
"""Horizons of the paper and steps per stage, by environment."""
TOGETHER = ("textcraft", "babyai", "searchqa", "sciworld")
"""Environments of recipes/qwen/together.toml. WebArena needs a browser beside the GPU."""
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
QWEN_PLAY = {
    "textcraft": ("--style", "react", "--max-new-tokens", "128", "--max-context", "4096"),
    "babyai": ("--style", "react", "--max-new-tokens", "128", "--max-context", "4096"),
    "searchqa": ("--style", "act", "--max-new-tokens", "192", "--max-context", "6144"),
    "sciworld": ("--style", "react", "--max-new-tokens", "128", "--max-context", "6144"),
    "webarena": ("--style", "react", "--max-new-tokens", "128", "--max-context", "12288"),
}
"""Settings of recipes/qwen, for models without a run and for agents of another environment."""
QWEN_SAMPLES = {"textcraft": 4, "babyai": 4, "searchqa": 2, "sciworld": 2, "webarena": 4}
"""Samples per item. The suite has 100, 90, 300 (no TriviaQA, no Bamboogle) and 200 items, and the built-in sites 43."""
SMALL_SEEDS = tuple(range(3, 11))
"""Seeds of the 0.5B model's horizons. Those before were known when the rule was written."""
ADAPTIVE_SEEDS = SMALL_SEEDS[:3]
INTERACTION_SEEDS = {("babyai", "0.5B"): 3}
"""Seeds of the agents after RL in claim C, by task and size, where there is more than one."""
QWEN_SIZES = {"135M": f"{PRETRAINED}-135M", "0.5B": f"{PRETRAINED}-0.5B", "1.5B": PRETRAINED}
"""Placeholders of the models of claim C: SmolLM2-135M-Instruct and Qwen2.5-Coder-0.5B- and -1.5B-Instruct."""


def on_suite(name: str, agent: str, arm: str, task: str, seed: int, *arguments: str, turns: str = "") -> Job:
    """Return an evaluation on the published number of items and turns, with several samples per item."""
    slow = (agent, task) == ("random", "sciworld")  # the JVM of each episode lists every action of every turn
    at_once = 32 if task == "webarena" else 128  # a browser of more pages takes longer than an action may
    samples, concurrency = (1, 4) if slow else (QWEN_SAMPLES[task], at_once)
    limits = ("--turns", turns or str(QWEN[task]["long"]), "--samples", str(samples))
    options = ("--agent", agent, "--suite", "agentgym-27", "--env", task, *limits)
    engine = ("--dtype", "bfloat16", "--concurrency", str(concurrency))
    return Job(name=name, arm=arm, task=task, seed=seed, kind="eval", arguments=(*options, *engine, *arguments))


def base_on_suite(name: str, model: str, arm: str, task: str, turns: str = "") -> Job:
    """Return an evaluation of a pretrained model, which has no run and therefore no settings of its own."""
    return on_suite(name, f"{{{model}}}", arm, task, 0, *QWEN_PLAY[task], "--temperature", "1", turns=turns)


def qwen_run(task: str, arm: str, seed: int, size: str = "1.5B") -> Job:
    """Return a run of GRPO with recipes/qwen/<task>.toml under the horizon of an arm."""
    settings = (f"model.path={{{QWEN_SIZES[size]}}}", *fill(QWEN_HORIZONS[arm], QWEN[task]))
    name = f"qwen-{arm}-{task}-{seed}" if size == "1.5B" else f"qwen-{arm}-{task}-{size}-{seed}"
    return Job(name=name, arm=arm, task=task, seed=seed, recipe=f"qwen/{task}.toml", arguments=settings)


def qwen_first(seeds: list[int] | None) -> list[Job]:
    """Return the first run of the 1.5B model, on TextCraft. It had 176 of 210 steps, 70 per stage."""
    jobs = [
        base_on_suite("eval-qwen-base-textcraft", PRETRAINED, "base", "textcraft"),
        on_suite("eval-random-textcraft-27", "random", RANDOM, "textcraft", 0),
    ]
    for seed in seeds if seeds is not None else range(1):
        name = "qwen-first-textcraft" + (f"-{seed}" if seed else "")
        run = qwen_run("textcraft", "staged", seed)
        run = replace(run, name=name, arguments=(*run.arguments, "horizon.steps_per_stage=70", "rl.steps=176"))
        jobs += [run, on_suite(f"eval-{name}", f"{{{name}}}", run.arm, "textcraft", seed)]
    return jobs


def qwen(task: str, num_seeds: int, seeds: list[int] | None) -> list[Job]:
    """Return the jobs of the paper's table for one task: Qwen2.5-Coder-1.5B-Instruct, base, SFT and four horizons."""
    jobs = [
        base_on_suite(f"eval-qwen-base-{task}", PRETRAINED, "base", task),
        on_suite(f"eval-random-{task}-27", "random", RANDOM, task, 0),
    ]
    chosen = seeds if seeds is not None else list(range(num_seeds))
    runs = [qwen_run(task, arm, seed) for arm in QWEN_HORIZONS for seed in chosen]
    for seed in chosen:
        name, settings = f"qwen-sft-{task}-{seed}", (f"model.path={{{PRETRAINED}}}",)
        runs.append(Job(name=name, arm="SFT", task=task, seed=seed, recipe=f"qwen/{task}-sft.toml", arguments=settings))
    for run in runs:
        jobs += [run, on_suite(f"eval-{run.name}", f"{{{run.name}}}", run.arm, task, run.seed)]
    return jobs


def qwen_small(seeds: list[int] | None) -> list[Job]:
    """Return claim B's arms with Qwen2.5-Coder-0.5B on BabyAI, for the rule of results/qwen-babyai-0.5B/PROTOCOL.md."""
    jobs: list[Job] = []
    for seed in seeds if seeds is not None else SMALL_SEEDS:
        for arm in QWEN_HORIZONS:
            if arm != "adaptive" or seed in ADAPTIVE_SEEDS:
                run = qwen_run("babyai", arm, seed, "0.5B")
                jobs += [run, on_suite(f"eval-{run.name}", f"{{{run.name}}}", arm, "babyai", seed)]
    return jobs


def qwen_generalisation(seeds: list[int] | None) -> list[Job]:
    """Return evaluations of each staged agent on the scenarios it never saw, and of one agent trained on all of them.

    The settings of play are those of the evaluated scenario.
    """
    jobs: list[Job] = []
    for seed in seeds if seeds is not None else range(1):
        recipe, settings = "qwen/together.toml", (f"model.path={{{PRETRAINED}}}",)
        together = Job(name=f"qwen-together-{seed}", arm="together", task="all", seed=seed, recipe=recipe)
        jobs.append(replace(together, arguments=settings))
        jobs += [_on_scenario(together, task) for task in TOGETHER]
        for trained_on in TOGETHER:
            run = qwen_run(trained_on, "staged", seed)
            jobs.append(run)
            jobs += [_on_scenario(run, task) for task in TOGETHER if task != trained_on]
    return jobs


def _on_scenario(run: Job, task: str) -> Job:
    arm = "together" if run.task == "all" else f"trained on {run.task}"
    style = () if run.task == "all" else QWEN_PLAY[task]
    return on_suite(f"transfer-{run.name}-to-{task}", f"{{{run.name}}}", arm, task, run.seed, *style)


def qwen_interaction(seeds: list[int] | None) -> list[Job]:
    """Return the jobs of claim C with real models: three sizes, before and after RL, with 2 to 32 turns."""
    jobs: list[Job] = []
    for task in ("textcraft", "babyai"):
        turns = "2,4,8,16,32"
        jobs.append(on_suite(f"turns-random-{task}-27", "random", RANDOM, task, 0, turns=turns))
        for size, model in QWEN_SIZES.items():
            jobs.append(base_on_suite(f"turns-qwen-base-{task}-{size}", model, f"base {size}", task, turns))
            for seed in seeds if seeds is not None else range(INTERACTION_SEEDS.get((task, size), 1)):
                run = qwen_run(task, "staged", seed, size)
                arm, name = f"staged {size}", f"turns-qwen-staged-{task}-{size}-{seed}"
                jobs += [run, on_suite(name, f"{{{run.name}}}", arm, task, seed, turns=turns)]
    return jobs
