"""Studies that need a GPU, with the jobs as they are but small: a tiny model, two steps, one item."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from test_recipes import TINY_QWEN

sys.path.insert(0, str(Path(__file__).parents[1] / "results"))
import study
from jobs import Job
from records import read_records
from studies import STUDIES

EVALUATION = ("--limit", "1", "--samples", "1", "--turns", "2", "--max-new-tokens", "8", "--dtype", "float32")


def jobs_of(name: str) -> list[Job]:
    """Return the jobs of a study with seed 0."""
    return STUDIES[name]([0])


def small(job: Job) -> Job:
    """Return the job with settings for a tiny model without a chat template."""
    names_model = any("{pretrained" in argument for argument in job.arguments)
    if job.kind == "eval":
        more = (*EVALUATION, *(("--chat-template", "chatml") if names_model else ()))
    elif "sft" in job.recipe:
        more = (*TINY_QWEN["all"], *TINY_QWEN["sft"], "model.chat_template=chatml")
    else:
        more = (*TINY_QWEN["all"], *TINY_QWEN["rl"], "rl.token_budget=0", "model.chat_template=chatml")
    if any(argument.startswith("rl.tree=") for argument in job.arguments):
        more = (*more, "rl.group_size=8")
    return replace(job, arguments=(*job.arguments, *more))


def run_small(name: str, jobs: Sequence[Job], model: Path, folder: Path) -> dict[str, Any]:
    """Run the jobs of a study with `model` in place of every pretrained one. Return their records by name."""
    models = study.pretrained_models([str(model), f"0.5B={model}", f"135M={model}"])
    runner = study.Study(name, [small(job) for job in jobs], folder / "work", folder / "results", "cpu", models)
    assert study.run([runner], jobs=2, limit_s=1700.0) == 0
    records = {record["job"]: record for record in read_records(folder / "results", name)}
    assert records.keys() == {job.name for job in jobs}
    return records
