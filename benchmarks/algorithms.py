"""Compare every algorithm on one small game over several seeds: final success and learning speed on a CPU.

    python benchmarks/algorithms.py [--seeds 0 1 2] [--arms ppo grpo] [--jobs 2] [--folder runs/algorithms]

All arms of a seed start from the same model, trained to imitate random play in KeyDoor (recipes/keydoor/cpu.toml),
and learn from about the same number of episodes. Success is measured on held-out layouts; the best possible is 100%.
The same command resumes a stopped comparison: finished runs are kept. Writes results.json, results.md and curves.png.
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
"""Overrides of the recipe. Arms without groups play the same number of episodes, one per task."""
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
"""Sections that replace [rl] and [horizon]. The budget sets the number of episodes."""


def recipe_of(arm: str, start: Path | None, easy: bool, steps: int, episodes: int) -> dict[str, Any]:
    """Return the arm's recipe: `steps` times `episodes` episodes, from the model in `start` or (None) from scratch."""
    raw = tomllib.loads(RECIPE.read_text())
    turns = 4 if easy else 6
    if easy:
        raw["environments"][0]["subsets"] = ["near"]
        raw["warm_start"] |= {"max_turns": turns, "episodes": 248}  # each layout once
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
    """Return the arm's settings with `changes`, and the number of groups that gives `episodes` per step."""
    if arm in OFFLINE:
        return list(changes)
    overrides = [*ARMS[arm], *changes]
    size = next((int(o.partition("=")[2]) for o in overrides if o.startswith("rl.group_size=")), 8)
    return [*overrides, f"rl.group_size={size}", f"rl.groups_per_step={episodes // size}"]


Job = tuple[str, int, Path, bool, int, int, Sequence[str]]
"""(arm, seed, folder, easy, steps, episodes per step, changes of the arm's settings)."""


def play(job: Job) -> dict[str, Any]:
    """Play or resume one run in this process and return its summary."""
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
    overrides = [] if arm == START else overrides_of(arm, episodes, changes)
    config = load_config(recipe, [*overrides, f"seed={seed}", "threads=1", "model.device=cpu", f"name={root.name}"])
    if not (root / "summary.json").is_file():
        with (folder / f"{root.name}.log").open("a") as log:
            console = Console(log)
            asyncio.run(train(config, root, resume=True, console=console))
    return {"arm": arm, "seed": seed, "easy": easy, **json.loads((root / "summary.json").read_text())}


def play_all(seeds: list[int], jobs: list[Job], processes: int) -> list[dict[str, Any]]:
    """Train the starting models, then play the jobs, in parallel processes, and return the summaries."""
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
    """Return a Markdown row per arm: final success with its range over seeds, first evaluation at 90%, and time."""
    lines = [
        "| arm | held-out success (lowest–highest seed) | step of the first 90% | seconds per run |",
        "|---|---|---|---|",
    ]
    for arm in dict.fromkeys(r["arm"] for r in results):
        runs = [r for r in results if r["arm"] == arm]
        final = [r["after"]["success"] for r in runs]
        reached = [next((e["step"] for e in r["evaluations"] if e["success"] >= 0.9), None) for r in runs]
        median = "–" if None in reached or arm in OFFLINE else f"{statistics.median(reached):g}"  # type: ignore[type-var]
        summary = f"{statistics.fmean(final):.1%} ({min(final):.1%}–{max(final):.1%})"
        lines.append(f"| {arm} | {summary} | {median} | {statistics.fmean(r['seconds'] for r in runs):.0f} |")
    return "\n".join(lines) + "\n"


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Draw held-out success against steps: the mean over seeds and every seed."""
    from matplotlib.figure import Figure

    arms = [arm for arm in dict.fromkeys(r["arm"] for r in results) if arm not in OFFLINE]
    columns = 4
    figure = Figure(figsize=(12, 2.3 * -(-len(arms) // columns)), dpi=140, facecolor="white", layout="constrained")
    panels = list(figure.subplots(-(-len(arms) // columns), columns, sharex=True, sharey=True, squeeze=False).flat)
    for axes, arm in zip(panels, arms, strict=False):
        runs = [r["evaluations"] for r in results if r["arm"] == arm]
        for run in runs:
            axes.plot([e["step"] for e in run], [e["success"] for e in run], color="#9fc9c5", linewidth=1)
        steps = [e["step"] for e in runs[0]]
        mean = [statistics.fmean(run[i]["success"] for run in runs) for i in range(len(steps))]
        axes.plot(steps, mean, color="#0f766e", linewidth=2)
        axes.set_title(arm, fontsize=10, loc="left", color="#1f2933")
        axes.set_ylim(0, 1.02)
        axes.grid(color="#e4e7eb")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(arms) :]:
        axes.set_visible(False)
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
    parser.add_argument("--episodes", type=int, default=256, help="per step; offline methods get the same total")
    parser.add_argument("--easy", action="store_true", help="only layouts of three turns, with a limit of four")
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
