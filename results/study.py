"""Runs the experiments of docs/results/evidence.md, whole or in pieces; the same command goes on where it was stopped.

    python results/study.py staged-horizon interaction --seeds 0 1 2 --jobs 8 --limit-s 540

Each run and each evaluation is a command of its own (`agentgym-rl train`, `agentgym-rl eval`) in a folder under --work.
What is finished leaves a small JSON under results/<study>/. When the time is up the others write a checkpoint and stop.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies import PLACEHOLDER, PRETRAINED, STUDIES, Job

from agentgym_rl.evaluation.compare import load_side

ROOT = Path(__file__).parents[1]
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
CURVES = (
    "tokens/total",
    "success/mean",
    "reward/mean",
    "turns/mean",
    "truncated/rate",
    "truncated/horizon_rate",
    "actions/invalid_rate",
    "actions/repeated_rate",
    "replies/dependence",
    "groups/zero_variance",
    "entropy/mean",
    "kl/reference",
    "grad/norm",
    "mismatch/abs",
    "clip/fraction",
    "staleness/mean",
    "time/rollout_s",
    "time/learn_s",
    "time/step_s",
)
"""Columns of metrics.jsonl that are kept, with the horizon of every environment."""


class Study:
    """Jobs, where they are kept, and which of them are done."""

    def __init__(
        self, name: str, jobs: Sequence[Job], work: Path, results: Path, device: str, pretrained: str = HUB_NAME
    ) -> None:
        self.name, self.jobs, self.device, self.pretrained = name, list(jobs), device, pretrained
        self.work, self.results = work, results / name
        self.work.mkdir(parents=True, exist_ok=True)
        self.results.mkdir(parents=True, exist_ok=True)

    def folder(self, job: str) -> Path:
        return self.work / job

    def is_done(self, job: str) -> bool:
        return (self.results / f"{job}.json").is_file() and self._has_finished(job)

    def ready(self, running: Sequence[str], failed: Sequence[str]) -> Job | None:
        """The next job that may begin: not done, not tried, and what it needs is there."""
        for job in self.jobs:
            if job.name in running or job.name in failed or self.is_done(job.name):
                continue
            if all(self.is_done(name) for name in job.needs):
                return job
        return None

    def command(self, job: Job) -> list[str]:
        """Words of the form {name} stand for what another job left behind: to evaluate its run, to train its model."""
        folder = str(self.folder(job.name))
        if job.kind == "eval":
            filled = [re.sub(PLACEHOLDER, lambda found: self._agent(found[1]), word) for word in job.words]
            return [*AGENTGYM, "eval", *filled, "--out", folder, "--name", job.name, "--device", self.device]
        filled = [re.sub(PLACEHOLDER, lambda found: str(self._last_model(found[1])), word) for word in job.words]
        fixed = [f"run_dir={folder}", f"name={job.name}", f"seed={job.seed}", f"model.device={self.device}"]
        resume = ["--resume"] if (self.folder(job.name) / "config.toml").is_file() else []
        return [*AGENTGYM, "train", str(ROOT / "recipes" / job.recipe), *filled, *fixed, *resume]

    def _agent(self, name: str) -> str:
        return self.pretrained if name == PRETRAINED else str(self.folder(name))

    def _last_model(self, name: str) -> str | Path:
        if name == PRETRAINED:
            return self.pretrained
        checkpoints = sorted((self.folder(name) / "checkpoints").glob("step_*"))
        if not checkpoints:
            raise SystemExit(f"run {name} has no checkpoint in {self.work}: remove its JSON to run it again")
        return checkpoints[-1] / "model"

    def has_ended(self, job: Job) -> bool:
        """A command that ended well may yet have been stopped, by a SIGTERM that was not ours."""
        return job.kind == "eval" or (self.folder(job.name) / "summary.json").is_file()

    def _has_finished(self, name: str) -> bool:
        """A result is enough where nothing that still has to run needs the folder behind it."""
        waiting = (j for j in self.jobs if name in j.needs and not (self.results / f"{j.name}.json").is_file())
        return self.folder(name).is_dir() or next(waiting, None) is None

    def require_starts(self) -> None:
        """Jobs that are compared start from the same weights: what some have started from is not trained anew."""
        for job in self.jobs:
            recorded = {j.name: (self.results / f"{j.name}.json").is_file() for j in self.jobs if job.name in j.needs}
            begun, waiting = ([n for n, there in recorded.items() if there is wanted] for wanted in (True, False))
            if begun and waiting and not self.folder(job.name).is_dir():
                raise SystemExit(
                    f"{waiting[0]} needs the run {job.name}, which is not in {self.work}, and {begun[0]} has started "
                    f"from it: bring its folder back, or remove the records of all that started from it"
                )

    def begun_at(self, job: Job) -> Path:
        """A file with the commit whose code runs it: by the time it ends there may be others."""
        return self.work / f"{job.name}.commit"

    def record(self, job: Job) -> dict[str, Any]:
        """What is kept of a finished job."""
        kept = {
            "study": self.name,
            "job": job.name,
            "arm": job.arm,
            "task": job.task,
            "seed": job.seed,
            "commit": self.begun_at(job).read_text() if self.begun_at(job).is_file() else commit(),
            "hardware": hardware(self.device),
            "command": " ".join(["agentgym-rl", job.kind, job.recipe, *job.words]),
        }
        folder = self.folder(job.name)
        if job.kind == "eval":
            found = json.loads((folder / "eval.json").read_text())
            results = {"config": _short(found["config"]), "results": found["results"], "outcomes": outcomes(folder)}
            return kept | {"seconds": found["seconds"], **results}
        summary = json.loads((folder / "summary.json").read_text())
        metrics = folder / "metrics.jsonl"  # a run of no steps has none
        rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
        names = [n for n in (rows[-1] if rows else {}) if n in CURVES or n.startswith("horizon/")]
        findings = folder / "doctor.jsonl"
        return (
            kept
            | {k: v for k, v in summary.items() if k not in ("name", "seed")}
            | {
                "config": _without_places(tomllib.loads((folder / "config.toml").read_text()), job),
                "curves": {name: [_rounded(row.get(name)) for row in rows] for name in names},
                "findings": [json.loads(x) for x in findings.read_text().splitlines()] if findings.is_file() else [],
            }
        )

    def keep(self, job: Job) -> None:
        """Write the record. What was learned from is not needed any more, and is large."""
        for path in (self.folder(job.name) / "trajectories").glob("learned_*.jsonl"):
            path.unlink()
        path = self.results / f"{job.name}.json"
        path.with_suffix(".part").write_text(json.dumps(self.record(job), separators=(",", ":")) + "\n")
        path.with_suffix(".part").rename(path)


AGENTGYM = [sys.executable, "-c", "from agentgym_rl.cli import main; main()"]


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _without_places(config: dict[str, Any], job: Job) -> dict[str, Any]:
    """A run's config as the job gave it: where a machine keeps runs and models says nothing to others."""
    given = [word.partition("=")[2] for word in job.words if word.startswith("model.path=")]
    model = config["model"] | ({"path": given[-1]} if given else {})
    return {name: value for name, value in config.items() if name != "run_dir"} | {"model": model}


def _short(config: dict[str, Any]) -> dict[str, Any]:
    """An evaluation's config with the number of items in place of their list, and without the place of a model."""
    tasks = [task | {"items": len(task["items"])} for task in config["tasks"]]
    agent = {name: value for name, value in config["agent"].items() if name != "path"}
    return config | {"tasks": tasks, "agent": agent}


def outcomes(folder: Path) -> dict[str, dict[str, str]]:
    """By turns allowed and item: a 1 for each sample that succeeded, a 0 for each that did not; failed ones are on no
    side. With it any two agents can be compared item by item."""
    turns = json.loads((folder / "eval.json").read_text())["config"]["turns"]
    return {
        str(allowed): {
            f"{env}/{item}": "".join(str(int(o.success)) for o in samples)
            for (env, item), samples in load_side(folder, allowed).outcomes.items()
        }
        for allowed in turns
    }


def with_needs(jobs: Sequence[Job], words: Sequence[str]) -> list[Job]:
    """Jobs with one of the words in their names, and all that they need, in the order of the study."""
    by_name = {job.name: job for job in jobs}
    wanted: set[str] = set()
    left = [job.name for job in jobs if any(word in job.name for word in words)]
    while left:
        name = left.pop()
        if name not in wanted:
            wanted.add(name)
            left += by_name[name].needs
    return [job for job in jobs if job.name in wanted]


def commit() -> str:
    """Of the code that ran; AGENTGYM_COMMIT where there is no repository."""
    if given := os.environ.get("AGENTGYM_COMMIT"):
        return given
    asked = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True)
    return asked.stdout.strip() or "unknown"


def hardware(device: str) -> str:
    import torch

    cpu = f"{os.cpu_count()} cores, {platform.machine()}"
    return f"{torch.cuda.get_device_name()}, {cpu}" if device.startswith("cuda") else cpu


def run(studies: Sequence[Study], jobs: int, limit_s: float) -> int:
    """Keep `jobs` commands running until all are done or the time is up; the number of jobs that failed.

    Earlier studies come first. A job that is in several is run once, and each of them keeps a record.
    """
    for study in studies:
        study.require_starts()
    ends_at = time.monotonic() + limit_s
    running: dict[str, tuple[Study, Job, subprocess.Popen[bytes], float]] = {}
    failed: list[str] = []
    try:
        while True:
            while len(running) < jobs and time.monotonic() <= ends_at:
                if (found := _next(studies, list(running), failed)) is None:
                    break
                study, job = found
                running[job.name] = (study, job, start(study, job), time.monotonic())
                say(f"{job.name}: started")
            if not running or time.monotonic() > ends_at:
                break
            time.sleep(0.2)
            for name, (study, job, process, since) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                took = f"{time.monotonic() - since:.0f} s"
                if process.returncode == 0 and study.has_ended(job):
                    for other in studies:
                        for same in (one for one in other.jobs if one.name == name):
                            other.keep(same)
                    say(f"{name}: done in {took}")
                else:
                    failed.append(name)
                    how = f"failed with {process.returncode}" if process.returncode else "stopped by somebody else"
                    say(f"{name}: {how} after {took}, see {study.work / name}.log")
    finally:
        stop([process for _, _, process, _ in running.values()])
    for study in studies:
        left = [job.name for job in study.jobs if not study.is_done(job.name)]
        done = f"{study.name}: {len(study.jobs) - len(left)} of {len(study.jobs)} done"
        say(done + (f", left: {', '.join(left)}" if left else ""))
    return len(failed)


def _next(studies: Sequence[Study], running: Sequence[str], failed: Sequence[str]) -> tuple[Study, Job] | None:
    """The first job that may begin, and its study. One that another study has run is only written down."""
    for study in studies:
        while job := study.ready(running, failed):
            if not study.has_ended(job) or job.kind == "eval":
                return study, job
            study.keep(job)
    return None


def start(study: Study, job: Job) -> subprocess.Popen[bytes]:
    """In a process group of its own, with one thread: there are many of them."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    study.begun_at(job).write_text(commit())
    with (study.work / f"{job.name}.log").open("ab") as log:
        return subprocess.Popen(
            study.command(job), stdout=log, stderr=log, env=environment, cwd=ROOT, start_new_session=True
        )


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """SIGTERM, upon which a run writes a checkpoint; and after a minute SIGKILL."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", choices=sorted(STUDIES), metavar="study", help=", ".join(STUDIES))
    parser.add_argument("--seeds", nargs="+", type=int, help="default: those of the protocol")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="jobs with one of these in their names")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="commands at once")
    parser.add_argument("--limit-s", type=float, default=1e9, help="stop after this many seconds, with checkpoints")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--model", default=HUB_NAME, help="where rl-over-base finds SmolLM2-135M-Instruct: a folder")
    parser.add_argument("--work", type=Path, default=Path("runs/evidence"), help="where runs are kept")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent)
    parser.add_argument("--list", action="store_true", help="print the commands and end")
    options = parser.parse_args()
    found = {name: STUDIES[name](options.seeds) for name in dict.fromkeys(options.studies)}
    if options.only:
        found = {name: with_needs(jobs, options.only) for name, jobs in found.items()}
    if options.list:
        for job in {job.name: job for jobs in found.values() for job in jobs}.values():
            print(f"{job.name}: agentgym-rl {job.kind} {job.recipe} {' '.join(job.words)}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is stopped, too
    work, device = options.work.absolute(), options.device
    studies = [Study(name, jobs, work, options.results, device, options.model) for name, jobs in found.items()]
    raise SystemExit(1 if run(studies, options.jobs, options.limit_s) else 0)


if __name__ == "__main__":
    main()
