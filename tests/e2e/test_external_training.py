"""The examples of external agents train: a function, a command, other libraries, their own judge, `proxy`'s clients."""

from __future__ import annotations

import json
import socket
import sys
import threading
from pathlib import Path

import pytest
from runs_for_tests import Process

from agentgym_rl.agent.proxy.client import Episode
from agentgym_rl.common.intervals import wilson_interval
from agentgym_rl.run.log import read_metrics
from agentgym_rl.types import StopReason, Trajectory

EXAMPLES = Path(__file__).parents[2] / "examples" / "proxy"
SMALL = (
    *(
        "threads=1",
        "warm_start.episodes=32",
        "warm_start.sft.epochs=2",
        "rl.steps=2",
        "rl.groups_per_step=2",
        "rl.group_size=2",
        "eval.episodes=2",
    ),
    *("rl.zero_variance=keep", "horizon.turns=[3]", "eval.max_turns=2", "agent.concurrency=4"),
)


@pytest.fixture(autouse=True)
def examples_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def episodes(folder: Path) -> list[Trajectory]:
    """Return the training episodes, after checks that hold for every run."""
    metrics = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2]
    assert all(row["mismatch/abs"] < 1e-4 for row in metrics), "learner and engine agree on every recorded token"
    lines = [line for path in sorted((folder / "trajectories").glob("step_*.jsonl")) for line in path.open()]
    played = [Trajectory.from_json(line) for line in lines]
    assert {t.error for t in played} == {None}
    assert all(any(segment.loss_mask) for t in played for segment in t.segments)
    return played


@pytest.mark.parametrize(
    "program",
    [
        "openai_agent:play",
        pytest.param(f'["{sys.executable}", "{EXAMPLES / "openai_agent.py"}"]', marks=pytest.mark.long),
    ],
    ids=["function", "command"],
)
def test_a_program_with_the_openai_sdk_trains_token_exactly(program: str, tmp_path: Path) -> None:
    arguments = ["train", str(EXAMPLES / "keydoor.toml"), f"run_dir={tmp_path / 'run'}", f"agent.program={program}"]
    process = Process([*arguments, *SMALL], tmp_path / "output")
    assert process.wait() == 0, (tmp_path / "output").read_text()
    played = episodes(tmp_path / "run")
    assert {t.num_segments for t in played} == {1}
    assert {t.stop for t in played} <= {StopReason.DONE, StopReason.MAX_TURNS}


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "package", "linear"),
    [("pydantic_agent", "pydantic_ai", True), ("smolagents_agent", "smolagents", False)],
)
def test_agents_of_other_libraries_train_token_exactly(
    program: str, package: str, linear: bool, tmp_path: Path
) -> None:
    pytest.importorskip(package)
    folder = tmp_path / "run"
    arguments = ["train", str(EXAMPLES / "keydoor_tools.toml"), f"run_dir={folder}", f"agent.program={program}:play"]
    process = Process([*arguments, *SMALL, "warm_start.sft.epochs=8"], tmp_path / "output")
    assert process.wait() == 0, (tmp_path / "output").read_text()
    played = episodes(folder)
    assert {t.stop for t in played} <= {StopReason.DONE, StopReason.MAX_TURNS, StopReason.MAX_CONTEXT}
    assert any(t.num_turns > 1 for t in played), "the model calls tools"
    several = [t.num_segments for t in played if sum(m.logprobs is not None for m in t.messages) > 1]
    assert several
    assert all((count == 1) == linear for count in several), "smolagents rewrites its history"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("program", "recipe"),
    [("openai_agent", "keydoor"), ("pydantic_agent", "keydoor_tools"), ("smolagents_agent", "keydoor_tools")],
)
def test_a_model_learns_through_a_program(program: str, recipe: str, tmp_path: Path) -> None:
    arguments = [
        "train",
        str(EXAMPLES / f"{recipe}.toml"),
        f"run_dir={tmp_path / 'run'}",
        "threads=1",
        "eval.samples=3",
    ]
    process = Process([*arguments, f"agent.program={program}:play"], tmp_path / "output")
    assert process.wait(3500) == 0, (tmp_path / "output").read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    before, after = summary["before"], summary["after"]
    _, highest_before = wilson_interval(before["success"] * before["episodes"], before["episodes"])
    lowest_after, _ = wilson_interval(after["success"] * after["episodes"], after["episodes"])
    assert lowest_after > highest_before, (before, after)


@pytest.mark.long
def test_an_agent_that_judges_itself_trains_on_all_its_calls(tmp_path: Path) -> None:
    arguments = ["train", str(EXAMPLES / "keydoor.toml"), f"run_dir={tmp_path / 'run'}"]
    process = Process([*arguments, "agent.program=judged_agent:play", *SMALL], tmp_path / "output")
    assert process.wait() == 0, (tmp_path / "output").read_text()
    for trajectory in episodes(tmp_path / "run"):
        assert (trajectory.stop, trajectory.num_turns) == (StopReason.DONE, 1)
        assert sum(m.logprobs is not None for m in trajectory.messages) == 2


@pytest.mark.long
def test_clients_of_the_proxy_command_play_the_episodes_of_a_run(tmp_path: Path) -> None:
    import openai_agent  # type: ignore[import-not-found]

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = ["proxy", str(EXAMPLES / "keydoor.toml"), f"run_dir={tmp_path / 'run'}", *SMALL, "--port", str(port)]
    process = Process(arguments, tmp_path / "output")
    played: list[str] = []

    def client() -> None:
        for episode in Episode.claim_all(f"http://127.0.0.1:{port}"):
            openai_agent.play(episode)
            played.append(episode.url)

    thread = threading.Thread(target=client, daemon=True)
    thread.start()
    assert process.wait() == 0, (tmp_path / "output").read_text()
    thread.join(60)
    assert not thread.is_alive(), "the client ends with the run"
    output = (tmp_path / "output").read_text()
    assert f"http://127.0.0.1:{port}" in output
    assert "Traceback" not in output
    assert len(episodes(tmp_path / "run")) + 4 == len(played)
