"""The jobs of the study of teachers run two steps with a tiny Qwen2 model on a CPU."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from judge_for_tests import judge_server
from runs_for_tests import Process
from studies_for_tests import run_small
from test_recipes import TINY_QWEN
from transformers import AutoTokenizer

from agentgym_rl.agent.templates import CHATML
from agentgym_rl.run.log import read_metrics

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "results"))
import studies  # noqa: E402

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SMALL = {
    "distill": [*TINY_QWEN["rl"], "rl.token_budget=0"],
    "dagger": [
        *("warm_start.episodes=4", "warm_start.sft.batch_size=4", "dagger.rounds=1", "dagger.tasks=2"),
        *("sft.batch_size=4", "sft.epochs=2", "dagger.max_turns=2", "dagger.oracle_share=0.5"),
    ],
    "rl": TINY_QWEN["rl"],
}
JOBS = {job.name: job for job in studies.teachers([0])}


def run(name: str, model: Path, tmp_path: Path, *more: str) -> Path:
    """Run a job with every pretrained model replaced by the tiny one."""
    job, folder = JOBS[name], tmp_path / name
    arguments = [re.sub(r"{pretrained[\w.-]*}", str(model), argument) for argument in job.arguments]
    arguments = [argument.replace("bfloat16", "float32") for argument in arguments]
    method = "distill" if "method=distill" in arguments else "dagger" if "dagger" in name else "rl"
    fixed = [f"run_dir={folder}", "model.chat_template=chatml", *TINY_QWEN["all"], *SMALL[method], *more]
    process = Process(["train", str(ROOT / "recipes" / job.recipe), *arguments, *fixed], tmp_path / f"{name}.out")
    assert process.wait(280) == 0, process.output.read_text()
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")][:2] == [1, 2]
    assert json.loads((folder / "summary.json").read_text())["after"]["episodes"] > 0
    return folder


def test_a_student_learns_from_adapters_of_a_larger_model(tiny_qwen: Path, tmp_path: Path) -> None:
    teacher = run("qwen-lora-textcraft-0", tiny_qwen, tmp_path)
    folder = max((teacher / "checkpoints").glob("step_*")) / "model"
    assert (folder / "adapter_config.json").is_file()
    for name in ("distill-staged-textcraft-0", "distill-fixed-long-textcraft-0"):
        student = run(name, tiny_qwen, tmp_path, f"rl.distill.teacher={folder}")
        assert "kl/teacher" in read_metrics(student / "metrics.jsonl")[0]


def test_distillation_goes_from_the_teacher_to_records_without_paths(tiny_qwen: Path, tmp_path: Path) -> None:
    written = run_small("teachers", studies.distillation("textcraft", [0]), tiny_qwen, tmp_path)
    for arm in ("staged", "fixed-long"):
        student = written[f"distill-{arm}-textcraft-0"]
        assert student["config"]["rl"]["distill"]["teacher"] == "{qwen-lora-textcraft-0}"
        # Teacher and student are the same tiny model, up to adapters that have learned nothing.
        assert student["curves"]["kl/teacher"] == pytest.approx([0.0] * student["steps"], abs=1e-3)
    assert str(tmp_path) not in json.dumps(written)
    assert str(tiny_qwen) not in json.dumps(written)


@pytest.mark.parametrize("name", ["dagger-thoughts-0", "dagger-wrong-thoughts-0"])
def test_dagger_with_corrected_thoughts_runs(name: str, tiny_qwen: Path, tmp_path: Path) -> None:
    folder = run(name, tiny_qwen, tmp_path)
    first = read_metrics(folder / "metrics.jsonl")[0]
    assert first["round/labelled"] > 0
    assert "round/corrected" in first


def test_a_judge_of_answers_pays_or_only_looks(
    tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("AGENTGYM_SEARCHQA_DATA", "AGENTGYM_SEARCHQA_INDEX"):
        monkeypatch.delenv(variable, raising=False)
    with judge_server("an answer") as server:
        judge = f"judge={{url='{server.url}', model='judge'}}"
        for name in ("searchqa-judged-0", "searchqa-exact-match-0"):
            folder = run(name, tiny_qwen, tmp_path, judge)
            assert "judged/rubric" in read_metrics(folder / "metrics.jsonl")[0]


def test_a_judge_in_this_process_is_asked(tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of random weights gives no score that can be read, so the run ends after its first step."""
    for variable in ("AGENTGYM_SEARCHQA_DATA", "AGENTGYM_SEARCHQA_INDEX"):
        monkeypatch.delenv(variable, raising=False)
    judge = tmp_path / "judge"
    shutil.copytree(tiny_qwen, judge)
    tokenizer = AutoTokenizer.from_pretrained(judge)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(judge)
    with pytest.raises(AssertionError, match="could be judged"):
        run(
            "searchqa-judged-0", tiny_qwen, tmp_path, f"judge.path={judge}", "judge.retries=0", "judge.max_new_tokens=8"
        )
