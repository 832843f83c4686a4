"""Every algorithm on one small game, over several seeds: how well and how fast each learns on a CPU.

    python benchmarks/algorithms.py [--seeds 0 1 2] [--arms ppo grpo] [--jobs 2] [--folder runs/algorithms]

All arms of a seed start from the same model, which has imitated random play in KeyDoor (recipes/keydoor/cpu.toml),
and then learn from about as many episodes. Success is measured on held-out layouts; the best possible is 100%.
Finished runs are kept: the same command goes on where it was stopped. Writes results.json, results.md and curves.png.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import multiprocessing
import os
import re
import statistics
import tomllib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console as Terminal
from rich.markdown import Markdown
from rich.progress import Progress

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes/keydoor/cpu.toml"
START = "start"
ONLINE = ["rl.minibatches=2", "rl.optimizer.lr=1e-3"]
CRITIC = ["rl.critic.optimizer.lr=2e-3", "rl.critic.warmup_steps=2", "rl.group_size=1", "rl.gae_lambda=0.95"]

ARMS: dict[str, list[str]] = {
    "GRPO": [*ONLINE],
    "Dr. GRPO": [*ONLINE, "rl.normalize_std=false", "rl.aggregate='constant'", "rl.aggregate_length=16"],
    "DAPO": [*ONLINE, "rl.clip_high=0.28", "rl.resample_rounds=1", "rl.overlong='mask'"],
    "GSPO": [*ONLINE, "rl.loss='gspo'", "rl.aggregate='trajectory'", "rl.clip_low=0.05", "rl.clip_high=0.05"],
    "CISPO": [*ONLINE, "rl.loss='cispo'", "rl.clip_low=1.0", "rl.clip_high=2.0"],
    "GiGPO": [*ONLINE, "rl.credit='anchor'", "rl.turn_discount=0.9"],
    "GRPO, turns": [*ONLINE, "rl.credit='turns'", "rl.turn_discount=0.9"],
    "GRPO, overlap": [*ONLINE, "rl.overlap=1"],
    "RLOO": [*ONLINE, "rl.algorithm='rloo'"],
    "REINFORCE++": [*ONLINE, "rl.algorithm='reinforce++'", "rl.group_size=1"],
    "REINFORCE++ baseline": [*ONLINE, "rl.algorithm='reinforce++-baseline'"],
    "PPO": [*ONLINE, "rl.algorithm='ppo'", "rl.bootstrap=false", *CRITIC],
    "PPO, turns": [*ONLINE, "rl.algorithm='ppo'", "rl.credit='turns'", "rl.turn_discount=0.9", *CRITIC],
    "PPO, two levels": [*ONLINE, "rl.algorithm='ppo'", "rl.credit='two_level'", "rl.turn_discount=0.9", *CRITIC],
}
"""Overrides of the recipe. Arms without groups play as many episodes, of as many tasks."""
for _name in ("SFT of the oracle", "AgentEvol", "DPO"):
    ARMS[_name] = []

OFFLINE: dict[str, dict[str, Any]] = {
    "SFT of the oracle": {
        "method": "sft",
        "data": {"play": "oracle", "episodes": 400, "max_turns": 6},
        "sft": {"epochs": 6, "batch_size": 16, "optimizer": {"lr": 2e-3, "warmup_steps": 5}},
    },
    "AgentEvol": {
        "method": "agentevol",
        "sft": {"epochs": 3, "batch_size": 16, "optimizer": {"lr": 2e-3, "warmup_steps": 5}},
        "agentevol": {"rounds": 5, "group_size": 4, "history": "all", "keep_per_item": 2},
    },
    "DPO": {
        "method": "dpo",
        "dpo": {
            "beta": 1.0,
            "rounds": 5,
            "group_size": 8,
            "pairs_per_item": 4,
            "batch_size": 16,
            "optimizer": {"lr": 3e-4, "warmup_steps": 3},
        },
    },
}
"""Sections in place of [rl] and [horizon]; the number of episodes comes from the budget."""


def recipe_of(arm: str, start: Path | None, easy: bool, steps: int, episodes: int) -> dict[str, Any]:
    """The arm as a recipe: `steps` times `episodes` episodes, from the model in `start` or (None) from nothing."""
    raw = tomllib.loads(RECIPE.read_text())
    turns = 4 if easy else 6
    if easy:
        raw["environments"][0]["subsets"] = ["near"]
        raw["warm_start"] |= {"max_turns": turns, "episodes": 248}  # every layout once
        raw["warm_start"]["sft"] |= {"epochs": 16, "optimizer": {"lr": 4e-3, "warmup_steps": 20, "decay": "cosine"}}
    raw["horizon"]["turns"] = [turns]
    raw["eval"] |= {"max_turns": turns, "every": 10}
    if start is None:
        raw["rl"]["steps"] = 0
        return raw
    raw["model"] = {"path": str(start)}
    del raw["warm_start"]
    if arm not in OFFLINE:
        raw["rl"]["steps"] = steps
        return raw
    del raw["rl"], raw["horizon"]
    raw |= copy.deepcopy(OFFLINE[arm])
    raw["eval"]["every"] = 0
    for name, per_round in (("agentevol", "tasks"), ("dpo", "sample_groups")):
        if name in raw:
            section = raw[name]
            section[per_round] = steps * episodes // section["rounds"] // section["group_size"]
            section["max_turns"] = turns
    return raw


def overrides_of(arm: str, episodes: int, changes: Sequence[str] = ()) -> list[str]:
    """The arm's settings and what is changed in them, with as many groups as make up `episodes` a step."""
    if arm in OFFLINE:
        return list(changes)
    chosen = [*ARMS[arm], *changes]
    size = next((int(o.partition("=")[2]) for o in chosen if o.startswith("rl.group_size=")), 8)
    return [*chosen, f"rl.group_size={size}", f"rl.groups_per_step={episodes // size}"]


Job = tuple[str, int, Path, bool, int, int, Sequence[str]]
"""(arm, seed, folder, easy, steps, episodes a step, changes of the arm's settings)."""


def play(job: Job) -> dict[str, Any]:
    """One run, or what is left of it, in a process of its own."""
    arm, seed, folder, easy, steps, episodes, changes = job
    os.environ["OMP_NUM_THREADS"] = "1"
    from agentgym_rl.commands.train import train
    from agentgym_rl.config import load_config
    from agentgym_rl.run.console import Console

    start = folder / f"start-{seed}"
    slug = re.sub(r"[^a-z0-9]+", "-", arm.lower().replace("++", "-plus-plus")).strip("-")
    root = start if arm == START else folder / f"{slug}-{seed}"
    recipe = folder / f"{root.name}.toml"
    base = None if arm == START else start / "checkpoints/step_000000/model"
    recipe.write_text(tomli_w.dumps(recipe_of(arm, base, easy, steps, episodes)))
    chosen = [] if arm == START else overrides_of(arm, episodes, changes)
    config = load_config(recipe, [*chosen, f"seed={seed}", "threads=1", "model.device=cpu", f"name={root.name}"])
    if not (root / "summary.json").is_file():
        with (folder / f"{root.name}.log").open("a") as log:
            console = Console(log)
            asyncio.run(train(config, root, resume=True, console=console))
    return {"arm": arm, "seed": seed, "easy": easy, **json.loads((root / "summary.json").read_text())}


def play_all(seeds: list[int], jobs: list[Job], processes: int) -> list[dict[str, Any]]:
    """Starting models first, then the jobs, as many at once as there are processes."""
    (folder, easy) = jobs[0][2:4]
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    done: list[dict[str, Any]] = []
    with Progress(console=TERMINAL) as bar, ProcessPoolExecutor(processes, mp_context=context) as pool:
        task = bar.add_task("starting models", total=len(seeds))
        for _ in pool.map(play, [(START, seed, folder, easy, 0, 0, ()) for seed in seeds]):
            bar.advance(task)
        task = bar.add_task("runs", total=len(jobs))
        for result in pool.map(play, jobs):
            done.append(result)
            bar.update(task, advance=1, description=f"{result['arm']} {result['after']['success']:.0%}")
    return done


def table(results: list[dict[str, Any]]) -> str:
    """Markdown, a row per arm: success at the end with lowest and highest seed, first evaluation at 90%, time."""
    lines = [
        "| arm | held-out success (lowest–highest seed) | step of the first 90% | seconds a run |",
        "|---|---|---|---|",
    ]
    for arm in dict.fromkeys(r["arm"] for r in results):
        runs = [r for r in results if r["arm"] == arm]
        final = [r["after"]["success"] for r in runs]
        reached = [next((e["step"] for e in r["evaluations"] if e["success"] >= 0.9), None) for r in runs]
        when = "–" if None in reached or arm in OFFLINE else f"{statistics.median(reached):g}"  # type: ignore[type-var]
        spread = f"{statistics.fmean(final):.1%} ({min(final):.1%}–{max(final):.1%})"
        lines.append(f"| {arm} | {spread} | {when} | {statistics.fmean(r['seconds'] for r in runs):.0f} |")
    return "\n".join(lines) + "\n"


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Held-out success against episodes played: the mean over seeds and every seed."""
    from matplotlib.figure import Figure

    arms = [arm for arm in dict.fromkeys(r["arm"] for r in results) if arm not in OFFLINE]
    columns = 4
    figure = Figure(figsize=(12, 2.3 * -(-len(arms) // columns)), dpi=140, facecolor="white", layout="constrained")
    axes = list(figure.subplots(-(-len(arms) // columns), columns, sharex=True, sharey=True, squeeze=False).flat)
    for place, arm in zip(axes, arms, strict=False):
        runs = [r["evaluations"] for r in results if r["arm"] == arm]
        for run in runs:
            place.plot([e["step"] for e in run], [e["success"] for e in run], color="#9fc9c5", linewidth=1)
        steps = [e["step"] for e in runs[0]]
        mean = [statistics.fmean(run[i]["success"] for run in runs) for i in range(len(steps))]
        place.plot(steps, mean, color="#0f766e", linewidth=2)
        place.set_title(arm, fontsize=10, loc="left", color="#1f2933")
        place.set_ylim(0, 1.02)
        place.grid(color="#e4e7eb")
        place.spines[["top", "right"]].set_visible(False)
    for place in axes[len(arms) :]:
        place.set_visible(False)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("held-out success", fontsize=9)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=max(1, os.cpu_count() or 1))
    parser.add_argument("--folder", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--episodes", type=int, default=256, help="a step; offline methods get as many in all")
    parser.add_argument("--easy", action="store_true", help="only layouts of three turns, four to solve them in")
    options = parser.parse_args()
    rest = (options.folder, options.easy, options.steps, options.episodes, ())
    jobs: list[Job] = [(arm, seed, *rest) for seed in options.seeds for arm in options.arms]
    results = play_all(options.seeds, jobs, options.jobs)
    (options.folder / "results.json").write_text(json.dumps(results, indent=1))
    text = table(results)
    (options.folder / "results.md").write_text(text)
    plot(results, options.folder / "curves.png")
    TERMINAL.print(Markdown(text))


TERMINAL = Terminal()
if __name__ == "__main__":
    main()
