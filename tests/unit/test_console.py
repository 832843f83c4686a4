"""Console output to a pipe and to a terminal."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console as RichConsole
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from agentgym_rl.common.screen import Screen
from agentgym_rl.run.console import HEADER_EVERY, Console, duration, sparkline

METRICS = {
    "reward/mean": 0.385,
    "success/mean": 0.417,
    "turns/mean": 2.25,
    "horizon/babyai": 3.0,
    "truncated/rate": 0.583,
    "actions/invalid_rate": 0.021,
    "tokens/sampled_per_s": 12345.0,
    "kl/reference": 0.0012,
    "entropy/mean": 1.234,
    "clip/fraction": 0.004,
    "time/rollout_s": 3.14,
    "time/learn_s": 123.4,
}


def plain() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(stream), stream


def terminal(width: int = 100) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    # A terminal without colours or cursor control, so that the test can read the text.
    return Console(rich_console=RichConsole(file=stream, force_terminal=True, width=width, color_system=None)), stream


def test_every_value_of_a_step_is_aligned_with_its_title() -> None:
    console, stream = plain()
    with console.steps(1000):
        console.step(1000, METRICS)
    header, line = stream.getvalue().splitlines()
    expected = {
        "step": "1000",
        "reward": "0.385",
        "success": "41.7%",
        "turns": "2.2",
        "horizon": "3",
        "trunc": "58.3%",
        "invalid": "2.1%",
        "tok/s": "12.3k",
        "KL": "0.0012",
        "entropy": "1.234",
        "clip": "0.4%",
        "rollout": "3.1s",
        "learn": "123s",
    }
    for title, value in expected.items():
        end = header.index(title) + len(title)
        assert line[:end].endswith(" " + value), (title, line)
    assert line.endswith("0 s")
    assert len(line) <= 100


def test_missing_and_nonfinite_values_are_shown_as_such() -> None:
    console, stream = plain()
    with console.steps(2):
        console.step(1, {})
        console.step(
            2, METRICS | {"kl/reference": math.nan, "reward/mean": None, "episodes/error": 2.0, "episodes/timeout": 1.0}
        )
    _, empty, broken, trouble = stream.getvalue().splitlines()
    assert empty.split()[:-2] == ["1"] + ["–"] * 12
    assert broken.split()[1] == "–"
    assert "nan" in broken
    assert "2 episodes failed and dropped; 1 episode ran out of time" in trouble
    assert "not finite: kl/reference" in trouble


def test_a_pipe_gets_lines_and_no_control_codes() -> None:
    program = f"""
from agentgym_rl.run.console import Console
console = Console()
console.stage("GRPO", "two steps")
with console.progress("warm start", 2) as advance:
    advance(); advance(1, "loss 0.5")
with console.steps(2):
    console.step(1, {METRICS})
    console.step(2, {METRICS})
console.table_before_after({{"success": 0.1, "episodes": 10}}, {{"success": 0.5, "episodes": 10}})
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "COLUMNS")}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, env=environment)
    text = result.stdout.decode()
    assert "\x1b" not in text
    assert "\r" not in text
    assert "● GRPO  two steps" in text
    assert "warm start 2/2  loss 0.5  in 0 s" in text
    assert text.count("41.7%") == 2
    assert max(map(len, text.splitlines())) <= 100
    ascii_only = environment | {"PYTHONIOENCODING": "ascii"}
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, env=ascii_only).returncode == 0


@pytest.mark.parametrize(("width", "gone"), [(100, set()), (80, {"rollout", "learn"}), (60, {"KL", "clip", "tok/s"})])
def test_a_narrow_terminal_loses_the_least_important_columns(width: int, gone: set[str]) -> None:
    console, stream = terminal(width)
    with console.steps(50):
        console.step(1, METRICS)
    header = next(line for line in stream.getvalue().splitlines() if "reward" in line).removeprefix("\x1b[2K")
    assert len(header.rstrip()) <= width
    assert {"step", "reward", "success", "turns", "horizon"} <= set(header.split())
    assert not gone & set(header.split())
    if width == 100:
        assert {"rollout", "learn", "KL", "clip", "entropy"} <= set(header.split())


def test_the_terminal_shows_a_bar_with_the_time_left() -> None:
    console, stream = terminal()
    with console.steps(50, start=10):
        console.step(11, METRICS)
        console.step(12, METRICS | {"success/mean": 0.99})
        console._display.refresh()  # type: ignore[union-attr]
    text = stream.getvalue()
    assert "12/50" in text
    assert "▄█" in text
    assert " left" in text


def test_a_bar_shows_the_current_estimate_of_steps() -> None:
    console, stream = terminal()
    with console.steps(50):
        console.step(2, METRICS, 7)
        console._display.refresh()  # type: ignore[union-attr]
        assert "2/7" in stream.getvalue()
        console.step(20, METRICS)
        console._display.refresh()  # type: ignore[union-attr]
        assert "20/50" in stream.getvalue()


def test_a_bar_inside_training_shares_the_display() -> None:
    console, stream = terminal()
    with console.steps(4):
        console.step(1, METRICS)
        with console.progress("evaluation", 8) as advance:
            advance(8)
        console.evaluation(1, 0.5, 8)
        console.step(2, METRICS)
    assert "held-out success 50.0%  95% interval 22–78, 8 episodes, after step 1" in stream.getvalue()


def test_the_header_is_repeated_and_a_new_horizon_is_announced() -> None:
    console, stream = plain()
    with console.steps(60):
        for step in range(1, 61):
            console.step(step, METRICS | {"horizon/babyai": 3 if step < 10 else 6})
    lines = stream.getvalue().splitlines()
    assert sum("reward" in line for line in lines) == math.ceil(60 / HEADER_EVERY)
    announced = [index for index, line in enumerate(lines) if "horizon 3 → 6 turns" in line]
    assert len(announced) == 1
    assert lines[announced[0] + 1].split()[0] == "10"


def test_several_environments_show_their_horizons() -> None:
    console, stream = plain()
    with console.steps(3):
        console.step(1, {"horizon/babyai": 6, "horizon/textcraft": 10})
        console.step(2, {"horizon/babyai": 6, "horizon/textcraft": 10, "horizon/sciworld": 30})
    assert " 6·10 " in stream.getvalue()
    assert " 6–30 " in stream.getvalue()


def test_a_step_outside_training_is_an_error() -> None:
    console, _ = plain()
    with pytest.raises(RuntimeError, match=r"with console\.steps"):
        console.step(1, METRICS)


def test_evaluations_before_and_after_are_shown_by_subset() -> None:
    console, stream = plain()
    console.table_before_after(
        {"success": 0.12, "episodes": 200, "subsets": {"GoTo": {"success": 0.15, "episodes": 120}}},
        {
            "success": 0.1,
            "episodes": 100,
            "subsets": {"GoTo": {"success": 1.0, "episodes": 120}, "Pickup": {"success": 0.6, "episodes": 60}},
        },
    )
    rows = {line.split()[0]: line.split() for line in stream.getvalue().splitlines() if line.split()}
    assert rows["GoTo"] == ["GoTo", "120", "15.0%", "10–22", "100.0%", "97–100", "+85.0"]
    assert rows["Pickup"] == ["Pickup", "60", "–", "60.0%", "47–71", "–"]
    assert rows["all"] == ["all", "200", "/", "100", "12.0%", "8–17", "10.0%", "6–17", "-2.0"]


def test_horizon_stages_are_shown_in_a_table() -> None:
    console, stream = plain()
    stages = [
        {"env": "babyai", "turns": 2.0, "first_step": 1, "last_step": 20, "success": 0.237, "turns_used": 1.5},
        {"env": "babyai", "turns": 4, "first_step": 21, "last_step": 40, "success": None, "turns_used": None},
    ]
    console.horizon_stages(stages)
    text = stream.getvalue()
    assert "environment" not in text
    assert [line.split() for line in text.splitlines() if "turns " in line][1:] == [
        ["2", "turns", "1–20", "23.7%", "1.5"],
        ["4", "turns", "21–40", "–", "–"],
    ]
    console.horizon_stages([*stages, {"env": "textcraft", "turns": 10, "first_step": 1, "last_step": 40}])
    assert "textcraft" in stream.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1:00"), (3725, "1:02:05")])
def test_durations_are_formatted(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sparkline_covers_its_range() -> None:
    assert sparkline([0.0, 0.5, 1.0, -0.1, 1.1]) == "▁▅█▁█"


def test_escape_sequences_of_an_environment_do_not_reach_the_terminal() -> None:
    hostile = "a\x1b]0;owned\x07b\x1b[2Jc\x9b31md\re\tf\ng\x7f"
    stream = io.StringIO()
    screen = Screen(file=stream, force_terminal=True, width=100, color_system="truecolor", highlight=False)
    console = Console(rich_console=screen)
    console.stage(hostile, hostile)
    console.note(hostile)
    console.warn(hostile)
    with console.progress(hostile, 2) as advance:
        advance(1, hostile)
    table = Table(hostile)
    table.add_row(hostile)
    screen.print(table)
    screen.print(Panel(Text(hostile), title=hostile))
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())  # remove rich's own colour and cursor codes
    assert "a]0;ownedb" in shown
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", shown)
    assert "\x1b[2J" not in stream.getvalue()
    assert "\x1b[31m" not in stream.getvalue()


def test_output_to_a_file_has_no_control_characters() -> None:
    console, stream = plain()
    console.warn("the game said \x1b[8mhidden\x1b[0m")
    assert stream.getvalue() == "  ! the game said [8mhidden[0m\n"
