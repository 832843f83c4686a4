"""benchmarks/gpu.py: its table and the handling of failed measurements. The measurements themselves need a GPU."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from processes_for_tests import alive
from scripts_for_tests import ROOT, load_script
from servers_for_tests import wait_until
from torch.autograd import DeviceType


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script("benchmarks/gpu.py", monkeypatch)


def test_ratios_are_ours_over_each_peer_of_the_same_case(gpu: ModuleType) -> None:
    lines = [
        {"part": "machine", "case": "ceilings", "who": "measured", "bytes_per_s": 1.0},
        *(
            {"part": "rollout", "case": case, "who": who, "tokens_per_s": speed}
            for case, who, speed in (
                ("a x 256", "bound", 4000.0),
                ("a x 256", "ours", 3000.0),
                ("a x 256", "vllm", 500.0),
                ("a x 512", "vllm", 100.0),
            )
        ),
    ]
    rows = gpu.table(lines, {"rollout-a": {"outcome": "timed out after 9 s", "seconds": 9.0}}).splitlines()
    cells = {
        tuple(c.strip() for c in row.split("|")[2:4]): row.split("|")[5:7] for row in rows if row.startswith("| roll")
    }
    assert [c.strip() for c in cells["a x 256", "vllm"]] == ["6.00", "12% of bound"]
    assert cells["a x 256", "ours"][1].strip() == "75% of bound"
    assert cells["a x 512", "vllm"][0].strip() == ""  # no result of ours to compare with
    assert rows[-1] == "rollout-a: timed out after 9 s, 9 s"


def test_adapters_are_compared_with_the_rollout_without(gpu: ModuleType) -> None:
    options = {"parts": ["rollout"], "peers": [], "tiny": True, "profile": False, "out": Path("out")}
    (job,) = gpu.jobs_of(argparse.Namespace(**options, lora=16))
    assert job.arguments[-2:] == ["--lora", "16"]
    (job,) = gpu.jobs_of(argparse.Namespace(**options, lora=None))
    assert "--lora" not in job.arguments
    lines = [
        {"part": "rollout", "case": "a x 4", "who": "ours", "tokens_per_s": 1000.0},
        {"part": "rollout", "case": "a x 4", "who": "lora 16", "tokens_per_s": 800.0, "share_of_full": 0.8},
    ]
    row = gpu.table(lines, {}).splitlines()[-1]
    assert [cell.strip() for cell in row.split("|")[3:7]] == [
        "lora 16",
        "800.0 tokens/s",
        "1.25",
        "80% of the speed without adapters",
    ]


def test_ways_of_vllm_and_offloaded_state_are_jobs_of_their_own(gpu: ModuleType) -> None:
    common = {"out": Path("out"), "tiny": False, "profile": False, "lora": None, "vllm_path": None}
    rollout = {"parts": ["rollout"], "peers": ["vllm"], "models": ["qwen2.5-7b"], "episodes": [256]}
    sys.path.insert(0, str(ROOT / "benchmarks" / "gpu_parts"))
    try:
        jobs = gpu.jobs_of(argparse.Namespace(**common, **rollout, vllm_ways=["batch", "seeded"]))
    finally:
        sys.path.pop(0)
    assert [job.name for job in jobs] == [f"rollout-qwen2.5-7b{way}" for way in ("", "-vllm-batch", "-vllm-seeded")]
    assert [job.arguments[-2:] for job in jobs[1:]] == [["--episodes", "256"], ["--asynchronous", "--seeded"]]
    large = {"parts": ["large"], "peers": [], "models": [], "episodes": [], "large_models": ["qwen2.5-7b"]}
    plain, moved = gpu.jobs_of(argparse.Namespace(**common, **large, offload=True))
    assert plain.name == "large-qwen2.5-7b"
    assert moved.arguments[-2:] == ["rl.optimizer.offload_moments=true", "rl.optimizer.offload_activations=true"]
    assert [job.name for job in gpu.jobs_of(argparse.Namespace(**common, **large, offload=False))] == [plain.name]


def test_a_failed_measurement_keeps_its_results(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpu_parts").mkdir()
    (tmp_path / "gpu_parts" / "breaks.py").write_text(
        "import sys\nopen(sys.argv[2], 'a').write('{\"part\": \"rollout\"}\\n')\nraise SystemExit(3)\n"
    )
    monkeypatch.setattr(gpu, "HERE", tmp_path)
    options = argparse.Namespace(out=tmp_path, limit_s=120, vllm_python=None)
    failed = gpu.run_job(gpu.Job("one", "breaks.py", []), options)
    assert failed["outcome"] == "failed with exit code 3, see one.log"
    assert gpu.read_lines(tmp_path / "lines.jsonl") == [json.loads('{"part": "rollout"}')]
    skipped = gpu.run_job(gpu.Job("two", "breaks.py", [], needs=tmp_path / "taught.json"), options)
    assert skipped["outcome"] == "left out: taught.json is missing"


def test_a_stop_ends_the_processes_of_a_peer_and_keeps_the_results(tmp_path: Path) -> None:
    (tmp_path / "gpu_parts").mkdir()
    (tmp_path / "gpu_parts" / "starts_another.py").write_text(
        "import subprocess, sys, time\n"
        "open(sys.argv[2], 'a').write('{\"part\": \"machine\"}\\n')\n"
        "other = subprocess.Popen(['sleep', '300'])\n"
        f"open({str(tmp_path / 'other')!r}, 'w').write(f'{{other.pid}}\\n')\n"
        "time.sleep(300)\n"
    )
    driver = (
        "import sys; sys.path.insert(0, 'benchmarks'); import gpu; from pathlib import Path\n"
        f"gpu.HERE = Path({str(tmp_path)!r}); gpu.jobs_of = lambda _: [gpu.Job('one', 'starts_another.py', [])]\n"
        "gpu.main()"
    )
    command = [sys.executable, "-c", driver, "--tiny", "--out", str(tmp_path / "out")]
    pid_file = tmp_path / "other"
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as benchmark:
        wait_until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
        benchmark.terminate()
        _, errors = benchmark.communicate(timeout=60)
    assert "stopped by SIGTERM" in errors
    wait_until(lambda: not alive(int(pid_file.read_text())))
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results == {"measured": [{"part": "machine"}], "runs": {"one": {"outcome": "stopped", "seconds": 0.0}}}


def test_kernel_times_of_a_step_are_split_by_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu_parts"))
    step = load_script("benchmarks/gpu_parts/step.py", monkeypatch)

    def event(start: float, end: float, where: DeviceType = DeviceType.CUDA) -> SimpleNamespace:
        spent = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        return SimpleNamespace(time_range=spent, device_type=where)

    events = [event(5e6, 5.1e6), event(5e6, 9e6, DeviceType.CPU), event(5.9e6, 6.1e6), event(6.5e6, 6.9e6)]
    assert step.busy_seconds(SimpleNamespace(events=lambda: events), 1.0) == pytest.approx((0.3, 0.4))
    clock = step.Clock()
    clock.around(time.sleep)(0.01)
    clock.end_step()
    clock.end_step()
    assert clock.by_step[0] >= 0.01 > clock.by_step[1] == 0.0


def test_run_plays_every_recipe_with_both_source_trees(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["gpu.py", "--parts", "run", "--run-episodes", "128", "--against", "other", "--out", str(tmp_path)]
    )
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu_parts"))
    jobs = gpu.jobs_of(gpu.parse())
    assert [job.name for job in jobs] == ["run-textcraft", "run-textcraft-against", "run-babyai", "run-babyai-against"]
    assert jobs[1].paths == [str(Path("other").resolve() / "src")]
    assert jobs[1].script == str(Path("other").resolve() / "benchmarks" / "gpu_parts" / "run.py")
    assert jobs[0].paths == []
    assert jobs[1].arguments == [*jobs[0].arguments, "--who", "against"]


def test_busy_time_counts_overlapping_kernels_once_and_host_time_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu_parts"))
    run = load_script("benchmarks/gpu_parts/run.py", monkeypatch)
    ms = 1_000_000
    busy = run.busy_share([(5 * ms, 7 * ms), (0, 4 * ms), (1 * ms, 2 * ms), (27 * ms, 28 * ms)])
    assert (busy["busy_s"], busy["span_s"]) == pytest.approx((0.007, 0.028))
    assert busy["gaps_s"] == pytest.approx({"<10ms": 0.001, "more": 0.02})
    kernels = run.longest([("norm", 0.5), ("product", 0.75), ("norm", 0.5)])
    assert kernels == [{"name": "norm", "s": 1.0, "runs": 2}, {"name": "product", "s": 0.75, "runs": 1}]

    def frame(*files: str) -> SimpleNamespace | None:
        innermost = None
        for file in files:
            innermost = SimpleNamespace(f_code=SimpleNamespace(co_filename=file), f_back=innermost)
        return innermost

    assert run.part_of(frame("agentgym_rl/agent/rollout.py", "agentgym_rl/agent/renderer.py", "json.py")) == "render"
    assert run.part_of(frame("agentgym_rl/agent/engines/native/engine.py")) == "engine"
    assert run.part_of(frame("asyncio/base_events.py", "selectors.py")) == "idle"
    assert run.part_of(None) == "other"


@pytest.mark.long
def test_every_part_runs_with_tiny_sizes(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "benchmarks/gpu.py", "--tiny", "--peers", "transformers", "--out", str(tmp_path)]
    command += ["--parts", "rollout", "learner", "step", "run"]
    subprocess.run(command, cwd=root, check=True, timeout=900, env=os.environ | {"OMP_NUM_THREADS": "1"})
    measured = json.loads((tmp_path / "results.json").read_text())["measured"]
    assert {line["part"] for line in measured} >= {"rollout", "learner", "step", "run"}
    assert {line["who"] for line in measured if line["part"] == "rollout"} >= {"ours", "transformers", "bound"}
