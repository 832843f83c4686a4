"""Run the experiments of docs/results/evidence.md. The same command resumes a study that was stopped.

    python results/study.py staged-horizon interaction --seeds 0 1 2 --jobs 8 --limit-s 540

Each run and each evaluation is one command (`agentgym-rl train`, `agentgym-rl eval`) with a folder under --work.
A finished job leaves a small JSON under results/<study>/, an evaluation also its episodes (results/episodes.py). At the
time limit the others write a checkpoint and stop. A job that fails is reported and does not stop the others.

Several jobs on one GPU take turns unless CUDA's MPS runs: start `nvidia-cuda-mps-control -d` before them. Three runs
of a 1.5B model reserve 115 to 123 GB (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True). SearchQA has longer contexts:
two such runs fit a GPU of 140 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from behaviour import MEANINGS, behaviour, blocks, by_step, read_episodes
from episodes import keep_episodes
from jobs import PLACEHOLDER, PRETRAINED, Job
from studies import STUDIES

from agentgym_rl.evaluation.compare import load_side

ROOT = Path(__file__).parents[1]
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
CURVES = (
    "tokens/total",
    "success/mean",
    "reward/mean",
    "turns/mean",
    "turns/median",
    "turns/max",
    "truncated/rate",
    "truncated/horizon_rate",
    "actions/invalid_rate",
    "actions/repeated_rate",
    "replies/dependence",
    "groups/zero_variance",
    "entropy/mean",
    "kl/reference",
    "kl/teacher",
    "round/agreement",
    "grad/norm",
    "mismatch/abs",
    "clip/fraction",
    "staleness/mean",
    "tokens/per_episode",
    "segments/per_episode",
    "episodes/usable",
    "time/rollout_s",
    "time/learn_s",
    "time/step_s",
)
"""Columns of metrics.jsonl that a record keeps, besides the horizon of every environment and judged rewards."""
STEPS_PER_BLOCK = 5
"""Training steps averaged into one value of a behaviour metric. Stages have a multiple of it."""


class Study:
    """Jobs of one study, their folders and their records."""

    def __init__(
        self,
        name: str,
        jobs: Sequence[Job],
        work: Path,
        results: Path,
        device: str,
        pretrained: str | Mapping[str, str] = HUB_NAME,
    ) -> None:
        """Make the folders. `pretrained` is the path of {pretrained}, or has a path for each such placeholder."""
        self.name, self.jobs, self.device = name, list(jobs), device
        self.pretrained = {PRETRAINED: pretrained} if isinstance(pretrained, str) else dict(pretrained)
        self.work, self.results = work, results / name
        self.work.mkdir(parents=True, exist_ok=True)
        self.results.mkdir(parents=True, exist_ok=True)

    def folder(self, job: str) -> Path:
        return self.work / job

    def is_done(self, job: str) -> bool:
        return (self.results / f"{job}.json").is_file() and self._has_needed_folder(job)

    def ready(self, running: Sequence[str], failed: Sequence[str]) -> Job | None:
        """Return the next job that is neither done nor tried and whose needs are done, or None."""
        for job in self.jobs:
            if job.name in running or job.name in failed or self.is_done(job.name):
                continue
            if all(self.is_done(name) for name in job.needs):
                return job
        return None

    def command(self, job: Job) -> list[str]:
        """Return the command with each {name} replaced: by the run's folder to evaluate, by its model to train."""
        folder = str(self.folder(job.name))
        if job.kind == "eval":
            filled = [re.sub(PLACEHOLDER, lambda match: self._agent(match[1]), word) for word in job.arguments]
            return [*AGENTGYM, "eval", *filled, "--out", folder, "--name", job.name, "--device", self.device]
        filled = [re.sub(PLACEHOLDER, lambda match: str(self._last_model(match[1])), a) for a in job.arguments]
        fixed = [f"run_dir={folder}", f"name={job.name}", f"seed={job.seed}", f"model.device={self.device}"]
        resume = ["--resume"] if (self.folder(job.name) / "config.toml").is_file() else []
        return [*AGENTGYM, "train", str(ROOT / "recipes" / job.recipe), *filled, *fixed, *resume]

    def _agent(self, name: str) -> str:
        return self._pretrained(name) if name.startswith(PRETRAINED) else str(self.folder(name))

    def _pretrained(self, name: str) -> str:
        if name not in self.pretrained:
            size = name.removeprefix(f"{PRETRAINED}-")
            raise FileNotFoundError(f"no model for {{{name}}}: give --model {size}=FOLDER")
        return self.pretrained[name]

    def _last_model(self, name: str) -> str | Path:
        if name.startswith(PRETRAINED):
            return self._pretrained(name)
        checkpoints = sorted((self.folder(name) / "checkpoints").glob("step_*"))
        if not checkpoints:
            raise FileNotFoundError(f"run {name} has no checkpoint in {self.work}: remove its JSON to run it again")
        return checkpoints[-1] / "model"

    def _model_names(self, job: Job) -> dict[str, str]:
        """Return the placeholder of each model that the job is given, by its path."""
        names = {name for argument in job.arguments for name in re.findall(PLACEHOLDER, argument)}
        return {str(self._last_model(name)): f"{{{name}}}" for name in sorted(names)}

    def has_ended(self, job: Job) -> bool:
        """Return whether the job is complete. A run stopped by a foreign SIGTERM exits with 0 but has no summary."""
        return job.kind == "eval" or (self.folder(job.name) / "summary.json").is_file()

    def _has_needed_folder(self, name: str) -> bool:
        """Return whether the folder exists or no job without a record needs it."""
        waiting = (j for j in self.jobs if name in j.needs and not (self.results / f"{j.name}.json").is_file())
        return self.folder(name).is_dir() or next(waiting, None) is None

    def require_shared_starts(self) -> None:
        """Refuse to train a starting model again: compared jobs must start from the same weights."""
        for job in self.jobs:
            recorded = {j.name: (self.results / f"{j.name}.json").is_file() for j in self.jobs if job.name in j.needs}
            begun, waiting = ([n for n, done in recorded.items() if done is wanted] for wanted in (True, False))
            if begun and waiting and not self.folder(job.name).is_dir():
                raise SystemExit(
                    f"{waiting[0]} needs the run {job.name}, which is not in {self.work}, and {begun[0]} has started "
                    f"from it: restore its folder, or remove the records of all jobs that started from it"
                )

    def commit_file(self, job: Job) -> Path:
        """Return the file with the commit at the job's start. The checkout may change before the job ends."""
        return self.work / f"{job.name}.commit"

    def record(self, job: Job) -> dict[str, Any]:
        """Return the record of a finished job."""
        commit_file = self.commit_file(job)
        kept = {
            "study": self.name,
            "job": job.name,
            "arm": job.arm,
            "task": job.task,
            "seed": job.seed,
            "commit": commit_file.read_text() if commit_file.is_file() else current_commit(),
            "hardware": hardware(self.device),
            "command": " ".join(["agentgym-rl", job.kind, job.recipe, *job.arguments]),
        }
        folder = self.folder(job.name)
        if job.kind == "eval":
            report = json.loads((folder / "eval.json").read_text())
            results = {"config": _short(report["config"]), "results": report["results"], "outcomes": outcomes(folder)}
            episodes = [e for path in sorted((folder / "trajectories").glob("*.jsonl")) for e in read_episodes(path)]
            return kept | {"seconds": report["seconds"], **results, "behaviour": behaviour(episodes)}
        summary = json.loads((folder / "summary.json").read_text())
        metrics = folder / "metrics.jsonl"  # absent after a run of no steps
        rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
        recorded = dict.fromkeys(name for row in rows for name in row)  # some only have values in the first of a round
        names = [name for name in recorded if name in CURVES or name.startswith(("horizon/", "judged/"))]
        findings = folder / "doctor.jsonl"
        return (
            kept
            | {k: v for k, v in summary.items() if k not in ("name", "seed")}
            | {
                "config": _without_paths(
                    tomllib.loads((folder / "config.toml").read_text()), job, self._model_names(job)
                ),
                "curves": {name: [_rounded(row.get(name)) for row in rows] for name in names},
                "findings": [json.loads(x) for x in findings.read_text().splitlines()] if findings.is_file() else [],
                "behaviour": {
                    "step": _columns(blocks(by_step(folder, "step"), STEPS_PER_BLOCK)),
                    "eval": _columns(by_step(folder, "eval")),
                },
            }
        )

    def write_record(self, job: Job) -> None:
        """Write the record and the episodes of an evaluation, and delete what was learned from, which is large."""
        for path in (self.folder(job.name) / "trajectories").glob("learned_*.jsonl"):
            path.unlink()
        path = self.results / f"{job.name}.json"
        if job.kind == "eval" and job.keep:
            keep_episodes(self.folder(job.name), path)
        path.with_suffix(".part").write_text(json.dumps(self.record(job), separators=(",", ":")) + "\n")
        path.with_suffix(".part").rename(path)


AGENTGYM = [sys.executable, "-c", "from agentgym_rl.cli import main; main()"]


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _columns(steps: dict[int, dict[str, float | None]]) -> dict[str, list[Any]]:
    """Return the behaviour metrics of some steps as one list per metric, and the list of steps."""
    metrics = {name: [_rounded(values[name]) for values in steps.values()] for name in MEANINGS}
    return {"step": list(steps), **metrics} if steps else {}


def _without_paths(config: dict[str, Any], job: Job, names: Mapping[str, str]) -> dict[str, Any]:
    """Return a run's config without the machine's paths: no `run_dir`, and models as the job named them.

    `names` has the placeholder of each path.
    """
    given = [argument.partition("=")[2] for argument in job.arguments if argument.startswith("model.path=")]
    model = config["model"] | ({"path": given[-1]} if given else {})
    kept = {name: value for name, value in config.items() if name != "run_dir"} | {"model": model}
    return {name: _renamed(value, names) for name, value in kept.items()}


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _renamed(part, names) for key, part in value.items()}
    return names.get(value, value) if isinstance(value, str) else value


def _short(config: dict[str, Any]) -> dict[str, Any]:
    """Return an evaluation's config with the number of items in place of their list, and without paths."""
    questions = os.environ.get("AGENTGYM_SEARCHQA_DATA", "")
    tasks = [task | {"items": len(task["items"])} for task in config["tasks"]]
    tasks = [task | {"data": task["data"].replace(questions, Path(questions).name)} for task in tasks]
    agent = {name: value for name, value in config["agent"].items() if name != "path"}
    return config | {"tasks": tasks, "agent": agent}


def outcomes(folder: Path) -> dict[str, dict[str, str]]:
    """Return outcomes by turn limit and item: 1 for each success, 0 for each other sample. Failed episodes are left
    out. Any two agents can be compared item by item with it."""
    turns = json.loads((folder / "eval.json").read_text())["config"]["turns"]
    return {
        str(allowed): {
            f"{env}/{item}": "".join(str(int(o.success)) for o in samples)
            for (env, item), samples in load_side(folder, allowed).outcomes.items()
        }
        for allowed in turns
    }


def with_needs(jobs: Sequence[Job], words: Sequence[str]) -> list[Job]:
    """Return the jobs with one of `words` in their names and all jobs they need, in the order of the study."""
    by_name = {job.name: job for job in jobs}
    wanted: set[str] = set()
    queue = [job.name for job in jobs if any(word in job.name for word in words)]
    while queue:
        name = queue.pop()
        if name not in wanted:
            wanted.add(name)
            queue += by_name[name].needs
    return [job for job in jobs if job.name in wanted]


def current_commit() -> str:
    """Return the commit of the code: AGENTGYM_COMMIT, or that of the git checkout."""
    if given := os.environ.get("AGENTGYM_COMMIT"):
        return given
    described = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True)
    return described.stdout.strip() or "unknown"


def hardware(device: str) -> str:
    import torch

    cpu = f"{os.cpu_count()} cores, {platform.machine()}"
    return f"{torch.cuda.get_device_name()}, {cpu}" if device.startswith("cuda") else cpu


def run(studies: Sequence[Study], jobs: int, limit_s: float) -> int:
    """Keep `jobs` commands running until all are done or the time is up, and return the number of failed jobs.

    Earlier studies come first. A job of several studies runs once, and each of them gets a record.
    """
    for study in studies:
        study.require_shared_starts()
    deadline = time.monotonic() + limit_s
    running: dict[str, tuple[Study, Job, subprocess.Popen[bytes], float]] = {}
    failed: list[str] = []
    try:
        while True:
            while len(running) < jobs and time.monotonic() <= deadline:
                if (next_job := _next(studies, list(running), failed)) is None:
                    break
                study, job = next_job
                try:
                    running[job.name] = (study, job, start(study, job), time.monotonic())
                    say(f"{job.name}: started")
                except OSError as error:
                    failed.append(job.name)
                    say(f"{job.name}: did not start: {error}")
            if not running or time.monotonic() > deadline:
                break
            time.sleep(0.2)
            for name, (study, job, process, since) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                took = f"{time.monotonic() - since:.0f} s"
                if process.returncode == 0 and study.has_ended(job):
                    written = [_written(other, same) for other in studies for same in other.jobs if same.name == name]
                    failed += [] if all(written) else [name]
                    say(f"{name}: done in {took}")
                else:
                    failed.append(name)
                    ending = f"failed with {process.returncode}" if process.returncode else "stopped by a signal"
                    say(f"{name}: {ending} after {took}, see {study.work / name}.log")
    finally:
        stop([process for _, _, process, _ in running.values()])
    for study in studies:
        remaining = [job.name for job in study.jobs if not study.is_done(job.name)]
        done = f"{study.name}: {len(study.jobs) - len(remaining)} of {len(study.jobs)} done"
        say(done + (f", left: {', '.join(remaining)}" if remaining else ""))
    return len(failed)


def _next(studies: Sequence[Study], running: Sequence[str], failed: list[str]) -> tuple[Study, Job] | None:
    """Return the first job that may start, and its study. A run that another study finished only gets a record.

    A job whose record cannot be written is added to `failed`.
    """
    for study in studies:
        while job := study.ready(running, failed):
            if not study.has_ended(job) or job.kind == "eval":
                return study, job
            if not _written(study, job):
                failed.append(job.name)
    return None


def _written(study: Study, job: Job) -> bool:
    """Write the record of a finished job. Report a failure: the job's folder remains, and the other jobs go on."""
    try:
        study.write_record(job)
    except Exception as error:
        say(f"{job.name}: no record, {type(error).__name__}: {error}; its folder is {study.folder(job.name)}")
        return False
    return True


def start(study: Study, job: Job) -> subprocess.Popen[bytes]:
    """Start the job's command in its own process group, with one thread because many jobs run at once."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    study.commit_file(job).write_text(current_commit())
    with (study.work / f"{job.name}.log").open("ab") as log:
        return subprocess.Popen(
            study.command(job), stdout=log, stderr=log, env=environment, cwd=ROOT, start_new_session=True
        )


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM, on which a run writes a checkpoint, and SIGKILL after a minute."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def say(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, flush=True)


def pretrained_models(options: Sequence[str]) -> dict[str, str]:
    """Return the path of each placeholder: `FOLDER` is that of {pretrained}, `0.5B=FOLDER` of {pretrained-0.5B}."""
    models = {PRETRAINED: HUB_NAME}
    for option in options:
        size, equals, path = option.rpartition("=")
        models[f"{PRETRAINED}-{size}" if equals else PRETRAINED] = path
    return models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", choices=sorted(STUDIES), metavar="study", help=", ".join(STUDIES))
    parser.add_argument("--seeds", nargs="+", type=int, help="default: the seeds of docs/results/evidence-protocol.md")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="run only jobs with WORD in the name")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="parallel commands")
    parser.add_argument("--limit-s", type=float, default=1e9, help="stop after this many seconds, with checkpoints")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        *("--model", "-m"),
        action="append",
        default=[],
        metavar="[SIZE=]FOLDER",
        help="folder or hub name of the pretrained model, or with SIZE= of one of several (135M, 0.5B)",
    )
    parser.add_argument("--work", type=Path, default=Path("runs/evidence"), help="folder of the runs")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent)
    parser.add_argument("--list", action="store_true", help="print the commands and end")
    options = parser.parse_args()
    jobs_of = {name: STUDIES[name](options.seeds) for name in dict.fromkeys(options.studies)}
    if options.only:
        jobs_of = {name: with_needs(jobs, options.only) for name, jobs in jobs_of.items()}
    if options.list:
        for job in {job.name: job for jobs in jobs_of.values() for job in jobs}.values():
            print(f"{job.name}: agentgym-rl {job.kind} {job.recipe} {' '.join(job.arguments)}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `run` stops its jobs
    work, device, models = options.work.absolute(), options.device, pretrained_models(options.model)
    studies = [Study(name, jobs, work, options.results, device, models) for name, jobs in jobs_of.items()]
    raise SystemExit(1 if run(studies, options.jobs, options.limit_s) else 0)


if __name__ == "__main__":
    main()
