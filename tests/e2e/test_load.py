"""A small run of the load benchmark: many concurrent sessions, hundreds of episodes, no growth."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import load


@pytest.mark.long
def test_concurrent_sessions_are_held_and_episodes_leave_no_session_open(capsys: pytest.CaptureFixture[str]) -> None:
    small = {
        "sessions": 200,
        "episodes": 512,
        "concurrency": 32,
        "group-size": 4,
        "curve": 8,
        "seconds": 0.3,
        "repeats": 1,
    }
    code = load.main([text for name, value in small.items() for text in (f"--{name}", str(value))])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "200 concurrent sessions" in printed
    assert "run: 512 episodes" in printed


def samples(bytes_per_episode: float = 0.0, **at_the_end: int) -> list[load.Sample]:
    """Return the samples of a run of 20,000 episodes with allocator noise."""
    run: list[load.Sample] = []
    for step in range(1, 101):
        memory = 60_000_000 + int(200 * step * bytes_per_episode) + 300_000 * (step * 7 % 5)
        now = load.Usage(memory, open_files=40, threads=3)
        run.append(load.Sample(200 * step, float(step), player=now, server=now))
    run[-1] = replace(run[-1], server=replace(run[-1].server, **at_the_end))
    return run


def test_growth_is_distinguished_from_noise() -> None:
    assert load.check_growth(samples())[1] == []
    assert load.check_growth(samples(100))[1] == []  # 1.5 MB in total: less than allocator noise
    _, problems = load.check_growth(samples(1000))
    assert [p.split(" grows")[0] for p in problems] == ["the player's memory", "the server's memory"]
    assert load.check_growth(samples(open_files=41))[1] == [
        "the server had 40 open_files after the warm-up and 41 at the end"
    ]
    assert load.check_growth(samples(threads=4))[1] == ["the server had 3 threads after the warm-up and 4 at the end"]


@pytest.mark.parametrize(
    ("hard", "holds", "allowed", "warned"),
    [(2000, 0, 1256, False), (500, 0, 500, True), (2000, 44, 1300, False), (1256, 1, 1256, True)],
)
def test_the_open_files_limit_is_raised_or_a_warning_is_printed(
    hard: int, holds: int, allowed: int, warned: bool
) -> None:
    program = (
        "import resource; from agentgym_rl.environment.open_files import allow_open_files as allow;"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (100, {hard}));"
        f"print(allow(1000, {holds}), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert completed.stdout.split() == [str(allowed)] * 2
    assert ("raise the hard limit" in completed.stderr) == warned
