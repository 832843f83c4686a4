"""Measure rollouts, updates and whole RL steps on one GPU, with peers measured in the same run.

    python benchmarks/gpu.py --model-folder SmolLM2-135M-Instruct --out FOLDER
    python benchmarks/gpu.py --parts rollout --models smollm2-135m --peers transformers vllm --out FOLDER
    python benchmarks/gpu.py --tiny --out FOLDER        small sizes on a CPU: a smoke test without useful speeds

rollout   256 and 512 concurrent episodes: a prompt of 256 tokens, 8 turns, 64 forced new tokens per turn, observations
          of 64 tokens. Ours, transformers in lock-step, vLLM in three ways, and the bound by memory bandwidth. --lora R
          adds ours with adapters of rank R. (gpu_parts/rollout.py)
learner   an update on 8k and 43k tokens against the plain transformers step and the matrix units' ceiling.
          (gpu_parts/learner.py)
step      a whole RL step on TextCraft, GRPO on a real chat model, against TRL's GRPOTrainer. Needs --model-folder, a
          folder of a chat model such as SmolLM2-135M-Instruct. (gpu_parts/step.py)
run       whole RL steps of the recipes qwen/textcraft and qwen/babyai with --model-folder or random 1.5B weights:
          tokens/s of rollouts, the device's busy share and the host's time by part. --against CHECKOUT measures
          another commit in the same run, with its own run.py (79ddf8f or later). Not among the default parts.
          (gpu_parts/run.py)
large     whole GRPO steps of random weights on one device, 64 episodes of 4k tokens: 7B, every parameter, and 32B with
          adapters. Peak memory beside the doctor's estimate. --offload repeats 7B with moments and activations on the
          host. Not among the default parts. (gpu_parts/run.py)

Every measurement is a separate process with --limit-s seconds. The table reports one that fails or times out, and the
others continue. FOLDER gets a log of each measurement, and results.json and table.md, rewritten after each. If vLLM or
TRL is not installed, its measurement fails: leave it out with --peers, or give those processes a folder of packages
with --vllm-path and --trl-path.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PARTS = ("rollout", "learner", "step")
"""Default parts."""
MODELS = ("smollm2-135m", "qwen2.5-1.5b")
LARGE_MODELS = ("qwen2.5-7b", "qwen2.5-32b")
PEERS = ("transformers", "vllm", "trl")
VLLM_WAYS = {"batch": [], "async": ["--asynchronous"], "seeded": ["--asynchronous", "--seeded"]}
"""Arguments of vllm_peer.py by value of --vllm-ways."""
RECIPES = ("textcraft", "babyai")
HERE = Path(__file__).parent
METRIC = dict.fromkeys(("rollout", "learner", "run", "large"), "tokens_per_s") | {"step": "episodes_per_s"}
LARGE_SPEEDS = {"rollout": "tokens_per_s", "learner": "learner_tokens_per_s"}
UNITS = {"tokens_per_s": "tokens/s", "episodes_per_s": "episodes/s"}


@dataclass(slots=True)
class Job:
    """One measurement in its own process."""

    name: str
    script: str
    """In gpu_parts, or an absolute path."""
    arguments: list[str]
    paths: list[str] = field(default_factory=list)
    """Folders put before PYTHONPATH."""
    needs: Path | None = None
    """File that another job writes."""


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Return the jobs in order of value if time runs out: ours and the cheap peers first."""
    parts, peers = options.parts, options.peers
    device = ["--device", "cpu" if options.tiny else "cuda"]
    models = ["tiny"] if options.tiny else options.models
    episodes = ["4", "8"] if options.tiny else [str(n) for n in options.episodes]
    in_process = [peer for peer in peers if peer == "transformers"]
    jobs, later = [], []
    for model in models:
        common = ["--model", model, *device, "--peers", *in_process]
        if "rollout" in parts:
            profile = ["--profile", str(options.out / "kernels.txt")] if options.profile else []
            adapters = ["--lora", str(options.lora)] if options.lora else []
            arguments = [*common, "--episodes", *episodes, *adapters, *profile]
            jobs.append(Job(f"rollout-{model}", "rollout.py", arguments))
            if "vllm" in peers:
                eager = ["--dtype", "float32", "--eager"] if options.tiny else []
                batch = ["--model", model, "--config", _config(model), "--episodes", *episodes, *eager]
                paths = _paths(options.vllm_path)
                for way in options.vllm_ways:
                    name = f"rollout-{model}-vllm-{way}"
                    later.append(Job(name, "vllm_peer.py", [*batch, *VLLM_WAYS[way]], paths))
        if "learner" in parts:
            profile = ["--profile", str(options.out / "kernels.txt")] if options.profile else []
            jobs.append(Job(f"learner-{model}", "learner.py", [*common, *profile]))
    if "step" in parts:
        folder = ["--model-folder", str(options.model_folder)] if options.model_folder else []
        steps = ["--steps", "3"] if options.tiny else []
        small = ["--tiny"] if options.tiny else []
        jobs.append(Job("step", "step.py", [*device, *folder, *small, *steps, "--work", str(options.out)]))
        if "trl" in peers:
            taught = options.out / "taught.json"
            arguments = [*device, "--taught", str(taught), *steps]
            jobs.append(Job("step-trl", "trl_peer.py", arguments, _paths(options.trl_path), taught))
            if "vllm" in peers and not options.tiny:
                paths = _paths(options.trl_path, options.vllm_path)
                later.append(Job("step-trl-vllm", "trl_peer.py", [*arguments, "--vllm"], paths, taught))
    if "run" in parts:
        jobs += _run_jobs(options, device)
    if "large" in parts:
        jobs += [_large_job(model, device, options) for model in options.large_models]
        if options.offload:
            jobs.append(_large_job("qwen2.5-7b", device, options, offload=True))
    return jobs + later


def _run_jobs(options: argparse.Namespace, device: list[str]) -> list[Job]:
    """Return a job for each recipe and source tree. Both trees play a recipe one after the other."""
    sizes = ["--tiny", "--episodes", "4", "--turns", "2", "--steps", "1"] if options.tiny else []
    if not options.tiny:
        sizes = ["--episodes", *(str(n) for n in options.run_episodes)]
        sizes += ["--model-folder", str(options.model_folder)] if options.model_folder else []
    jobs = []
    for recipe in options.recipes:
        common = [*device, "--recipe", recipe, *sizes]
        jobs.append(Job(f"run-{recipe}", "run.py", common))
        if options.against is not None:
            other = options.against.resolve()
            script = str(other / "benchmarks" / "gpu_parts" / "run.py")
            jobs.append(Job(f"run-{recipe}-against", script, [*common, "--who", "against"], [str(other / "src")]))
    return jobs


def _paths(*folders: Path | None) -> list[str]:
    return [str(folder) for folder in folders if folder is not None]


def _large_job(model: str, device: list[str], options: argparse.Namespace, *, offload: bool = False) -> Job:
    settings = ["rl.optimizer.checkpoint_activations=true", "rl.optimizer.micro_batch_tokens=4096"]
    if offload:
        settings += ["rl.optimizer.offload_moments=true", "rl.optimizer.offload_activations=true"]
    sizes = ["--episodes", "64", "--turns", "60", "--reply-tokens", "96", "129", "--warm", "0", "--steps", "1"]
    if options.tiny:
        sizes = ["--tiny", "--episodes", "4", "--turns", "2", "--steps", "1"]
    adapters = ["--lora", "16"] if "32b" in model else []
    shape = [] if options.tiny else ["--model", model]
    runner = ["--who", "ours, offloaded"] if offload else []
    common = [*device, "--part", "large", "--recipe", "babyai", *shape, *adapters, *sizes, *runner, "--set", *settings]
    return Job(f"large-{model}{'-offload' * offload}", "run.py", common)


def _config(model: str) -> str:
    from common import CLASSES, SHAPES

    config = SHAPES[model].to_dict()
    return json.dumps({**config, "architectures": [CLASSES[config["model_type"]].__name__], "dtype": "bfloat16"})


def run_job(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Run the job and return {"outcome", "seconds"}."""
    if job.needs is not None and not job.needs.exists():
        return {"outcome": f"left out: {job.needs.name} is missing", "seconds": 0.0}
    before = [*job.paths, str(HERE.parent / "src")]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([*before, *filter(None, [os.environ.get("PYTHONPATH")])])
    python = str(options.vllm_python) if job.script == "vllm_peer.py" and options.vllm_python else sys.executable
    command = [python, str(HERE / "gpu_parts" / job.script), "--lines", str(options.out / "lines.jsonl")]
    started = time.monotonic()
    with (options.out / f"{job.name}.log").open("w") as log:
        # In a new process session, so that a peer's worker processes end with it.
        child = subprocess.Popen(
            [*command, *job.arguments], stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            code = child.wait(options.limit_s)
            outcome = "done" if code == 0 else f"failed with exit code {code}, see {job.name}.log"
        except subprocess.TimeoutExpired:
            outcome = f"timed out after {options.limit_s} s"
        finally:
            _end_session(child)
    return {"outcome": outcome, "seconds": round(time.monotonic() - started, 1)}


def _end_session(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, 9)
    except ProcessLookupError:
        return
    child.wait()


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_results(out: Path, outcomes: dict[str, dict[str, Any]]) -> None:
    lines = read_lines(out / "lines.jsonl")
    (out / "results.json").write_text(json.dumps({"measured": lines, "runs": outcomes}, indent=1) + "\n")
    (out / "table.md").write_text(table(lines, outcomes))


def table(lines: list[dict[str, Any]], outcomes: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown row for each case and runner, with the ratio of our speed to the runner's."""
    rows = ["| part | case | runner | speed | ours ÷ runner | details |", "|---|---|---|---|---|---|"]
    cases = dict.fromkeys((line["part"], line["case"]) for line in lines if line["part"] in METRIC)
    for part, case in cases:
        runners = {line["who"]: line for line in lines if (line["part"], line["case"]) == (part, case)}
        metric = METRIC[part]
        best = max((line[metric] for name, line in runners.items() if name.startswith("ours")), default=None)
        for name, line in runners.items():
            ratio = "" if best is None or name.startswith("ours") else f"{best / line[metric]:.2f}"
            speed = f"{line[metric]:,.{0 if line[metric] >= 1000 else 1}f} {UNITS[metric]}"
            rows.append(f"| {part} | {case} | {name} | {speed} | {ratio} | {_details(part, line, runners)} |")
    for name, outcome in outcomes.items():
        rows.append(f"\n{name}: {outcome['outcome']}, {outcome['seconds']:.0f} s")
    return "\n".join(rows) + "\n"


def _details(part: str, line: dict[str, Any], runners: dict[str, dict[str, Any]]) -> str:
    if part == "rollout":
        bound = runners.get("bound")
        details = [f"{line['share_of_full']:.0%} of the speed without adapters"] if "share_of_full" in line else []
        if bound is not None and line is not bound:
            details.append(f"{line['tokens_per_s'] / bound['tokens_per_s']:.0%} of bound")
        return ", ".join(details)
    if part == "learner":
        return f"{line['share_of_ceiling']:.0%} of ceiling, {line['allocated_gb']:.1f} GB"
    if part == "large":
        memory, ceiling = line["memory_gib"], line["ceilings"]
        timing = f"step {line['step_s']:.1f} s, rollout {line['rollout_s']:.1f} s, learn {line['learn_s']:.1f} s"
        if not ceiling:
            return timing
        shares = [line[name] / ceiling[f"{kind}_tokens_per_s"] for kind, name in LARGE_SPEEDS.items()]
        return (
            f"{timing}; {shares[0]:.0%} and {shares[1]:.0%} of the ceilings of rollout and learner; peak "
            f"{memory['allocator']:.1f} GiB, doctor {memory['doctor']:.1f} GiB"
        )
    if part == "run":
        host = ", ".join(f"{name} {seconds:.2f}" for name, seconds in line["host_s"].items())
        busy = f"GPU busy {line['busy']:.0%}, " if "busy" in line else ""
        return f"step {line['step_s']:.2f} s, rollout {line['rollout_s']:.2f} s, {busy}host s: {host}"
    details = [
        f"rollout {line['rollout_s']:.2f} s, learn {line['learn_s']:.2f} s",
        f"{line['sampled_tokens']:.0f} tokens sampled, {line['turns']:.1f} turns, success {line['success']:.0%}",
    ]
    if "environments_s" in line:  # peers do not measure it
        details.append(f"environments {line['environments_s']:.2f} s")
    if "kernels_playing_s" in line:
        details.append(f"kernels {line['kernels_playing_s']:.2f} + {line['kernels_learning_s']:.2f} s")
    return ", ".join(details)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="new or empty folder")
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, "run", "large"), default=list(PARTS))
    parser.add_argument(
        "--models",
        nargs="+",
        choices=(*MODELS, *LARGE_MODELS),
        default=list(MODELS),
        help="models of rollout and learner",
    )
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--episodes", nargs="+", type=int, default=[256, 512], help="episodes of rollout")
    parser.add_argument("--lora", type=int, metavar="R", help="also measure rollout with adapters of rank R")
    parser.add_argument("--model-folder", type=Path, help="folder of the chat model of step and run")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="recipes of run")
    parser.add_argument("--large-models", nargs="+", choices=LARGE_MODELS, default=list(LARGE_MODELS))
    parser.add_argument("--offload", action="store_true", help="also measure large with state on the host")
    parser.add_argument("--vllm-ways", nargs="+", choices=VLLM_WAYS, default=list(VLLM_WAYS), help="ways of vLLM")
    parser.add_argument("--run-episodes", nargs="+", type=int, default=[128, 256], help="episodes of run")
    parser.add_argument("--against", type=Path, help="another checkout, also measured by run")
    parser.add_argument("--limit-s", type=int, default=300, help="time limit of a measurement")
    parser.add_argument("--vllm-path", type=Path, help="folder of packages with vLLM")
    parser.add_argument("--vllm-python", type=Path, help="separate Python interpreter for vLLM")
    parser.add_argument("--trl-path", type=Path, help="folder of packages with TRL")
    parser.add_argument("--profile", action="store_true", help="also write kernel times to kernels.txt")
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU")
    options = parser.parse_args()
    if "step" in options.parts and options.model_folder is None and not options.tiny:
        parser.error("the part step needs --model-folder, a folder of a chat model; or leave it out with --parts")
    return options


def main() -> None:
    options = parse()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if any(options.out.iterdir()):
        sys.exit(f"--out {options.out} is not empty: name a new folder")
    sys.path.insert(0, str(HERE / "gpu_parts"))
    # End a peer's processes on exit too, because they would keep the device's memory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    outcomes: dict[str, dict[str, Any]] = {}
    for job in jobs_of(options):
        print(f"{job.name} ...", flush=True)
        outcomes[job.name] = {"outcome": "stopped", "seconds": 0.0}
        try:
            outcomes[job.name] = run_job(job, options)
        finally:
            write_results(options.out, outcomes)
        print(f"{job.name}: {outcomes[job.name]['outcome']}, {outcomes[job.name]['seconds']:.0f} s", flush=True)
    print("\n" + (options.out / "table.md").read_text())
    if failed := [name for name, run in outcomes.items() if not run["outcome"].startswith(("done", "left out"))]:
        sys.exit(f"not done: {', '.join(failed)}")


if __name__ == "__main__":
    main()
