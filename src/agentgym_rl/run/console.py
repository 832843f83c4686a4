"""Console output of a run: headings, one line per step, a progress bar with the time left, tables at the end.

On a terminal a bar stays below the lines. Elsewhere (a pipe, a log file) the same lines are printed plainly, without
control codes, and carry the time left themselves.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO

from rich import box
from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from agentgym_rl.common.intervals import wilson_interval
from agentgym_rl.common.screen import Screen

MISSING = "–"
PLAIN_WIDTH = 100
HEADER_EVERY = 25
PLAIN_PROGRESS_EVERY_S = 20.0
ETA_OVER_STEPS = 20


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the step lines."""

    title: str
    width: int
    """Characters, the gap on its left included."""
    show: Callable[[Mapping[str, Any]], str]
    style: str = ""
    rank: int = 0
    """Columns of the highest rank are dropped first on a narrow terminal."""


class _PipeSafeScreen(Screen):
    """Stops printing when the reader of a pipe exits, so that the run continues after `| head`."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
            sys.stderr.write("agentgym-rl: the output is no longer read; the run continues without it\n")


class Console:
    """Console of a run. `file` is stdout by default; a terminal is recognised."""

    def __init__(self, file: TextIO | None = None, *, rich_console: RichConsole | None = None) -> None:
        self.rich = rich_console or _PipeSafeScreen(file=file, highlight=False)
        if not self.rich.is_terminal:
            self.rich.width = PLAIN_WIDTH
        stream = self.rich.file
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="replace")  # a character that cannot be shown must not end a run
        self._steps: _Steps | None = None
        self._display: Progress | None = None

    def stage(self, name: str, detail: str = "") -> None:
        """Print a heading."""
        heading = Text.assemble("\n", ("●", "cyan"), " ", (name, "bold"), ("  " + detail if detail else "", "dim"))
        self.rich.print(heading, soft_wrap=True)

    def note(self, text: str) -> None:
        self.rich.print(Text("  " + text, "dim"), soft_wrap=True)

    def warn(self, text: str) -> None:
        self.rich.print(Text.assemble(("  ! ", "bold yellow"), text), soft_wrap=True)

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[Callable[..., None]]:
        """Show a progress bar over something other than training steps. Yield `advance(count=1, note="")`.

        with console.progress("warm start", 300) as advance:
            advance(1, "loss 0.71")
        """
        started = reported = time.monotonic()
        done, last_note = 0, ""
        with self._bar() as bar:
            task = bar.add_task(label, total=total, note="", left="", finishes_at=None)

            def advance(count: int = 1, note: str = "") -> None:
                nonlocal done, last_note, reported
                done, last_note, now = done + count, note or last_note, time.monotonic()
                left = duration((now - started) / done * (total - done)) + " left" if 0 < done < total else ""
                bar.update(task, completed=done, note=last_note, left=left)
                if not self.rich.is_terminal and done < total and now - reported > PLAIN_PROGRESS_EVERY_S:
                    reported = now
                    self.note("  ".join(filter(None, (f"{label} {done}/{total}", last_note, left))))

            yield advance
            bar.remove_task(task)
        took = duration(time.monotonic() - started)
        if self._steps is None:  # lines between steps keep the table unbroken if possible
            self.note("  ".join(filter(None, (f"{label} {done}/{total}", last_note, f"in {took}"))))

    @contextmanager
    def steps(self, total: int, *, start: int = 0, label: str = "training", method: str = "rl") -> Iterator[None]:
        """Show training: call `step` for each finished step inside. `start` steps were done earlier.

        `method` chooses the columns.
        """
        with self._bar() as bar:
            task = bar.add_task(label, total=total, completed=start, note="", left="", finishes_at=None)
            self._steps = _Steps(self.rich, bar, task, total, start, method)
            try:
                yield
            finally:
                self._steps = None

    def evaluation(
        self, step: int, success: float, episodes: int, measure: tuple[str, str] = ("success", "episodes")
    ) -> None:
        """Print one line for an evaluation after `step` steps. `measure`: what the share is called, and of what."""
        low, high = wilson_interval(min(success * episodes, episodes), episodes)
        line = Text.assemble(
            ("  ◆ ", "magenta"),
            (f"held-out {measure[0]} {_percent(success)}", "bold magenta"),
            (f"  95% interval {100 * low:.0f}–{100 * high:.0f}, {episodes} {measure[1]}, after step {step}", "dim"),
        )
        self.rich.print(line, soft_wrap=True)

    def attempts(self, shares: Mapping[str, float]) -> None:
        """Print one line for the success of each attempt of an evaluation (`training.metrics.attempt_metrics`)."""
        names = {"wrong_to_right": "wrong → right", "right_to_wrong": "right → wrong", "sampled_twice": "sampled twice"}
        parts = [f"{names.get(name, name.replace('success_', 'attempt '))} {_percent(v)}" for name, v in shares.items()]
        self.rich.print(Text(f"    {', '.join(parts)}", "dim"), soft_wrap=True)

    def step(self, step: int, metrics: Mapping[str, Any], total: int | None = None) -> None:
        """Print one line for a finished step, inside `steps`. `step` counts from 1; `total` is the latest estimate."""
        if self._steps is None:
            raise RuntimeError("Console.step needs to run inside `with console.steps(total)`, and does not")
        self._steps.show(step, metrics, total)

    def table_before_after(
        self,
        before: Mapping[str, Any],
        after: Mapping[str, Any],
        measure: tuple[str, str] = ("success", "episodes"),
    ) -> None:
        """Print success, or another `measure`, by subset, with 95% intervals and the change in points.

        Both are `{"success": 0.12, "episodes": 200, "subsets": {"GoTo": {"success": ..., "episodes": ...}}}`.
        """
        table = _table(f"held-out {measure[0]}", measure[1], "before", "after", "change")
        names = list(dict.fromkeys([*before.get("subsets", {}), *after.get("subsets", {})]))
        for name in names:
            _before_after_row(table, name, before["subsets"].get(name), after["subsets"].get(name))
        if names:
            table.add_section()
        _before_after_row(table, "all", before, after, style="bold")
        self.rich.print(table)
        self.note(f"{measure[0]} with its 95% interval; change in percentage points")

    def horizon_stages(self, stages: Sequence[Mapping[str, Any]]) -> None:
        """Print the horizon's stages, as `log.horizon_stages` returns them."""
        named = len({stage.get("env") for stage in stages}) > 1
        table = _table("horizon", *(("environment",) if named else ()), "steps", "success", "turns used")
        for stage in stages:
            table.add_row(
                f"{stage['turns']:g} turns",
                *((str(stage.get("env", "")),) if named else ()),
                f"{stage['first_step']}–{stage['last_step']}",
                _percent(stage.get("success")),
                _fixed(stage.get("turns_used"), 1),
            )
        self.rich.print(table)

    def diagnosis(self, diagnosis: Mapping[str, Any]) -> None:
        """Print signals, findings and verdict, as `training.doctor.diagnose` returns them."""
        table = _table("signal", "first", "best", "last")
        for name, values in diagnosis["signals"].items():
            table.add_row(name, *(_formatted(values[column], "{:.3g}".format) for column in ("first", "best", "last")))
        self.rich.print(table)
        self.note("means over the first, the best and the last 5 steps; signals: docs/reference/run-directory.md")
        for finding in diagnosis["findings"]:
            severe = finding["severity"] == "severe"
            until = "" if finding["until"] is None else f", until step {finding['until']}"
            self.rich.print()
            self.rich.print(
                Text.assemble(
                    ("  ! ", "bold red" if severe else "bold yellow"),
                    (finding["rule"], "bold"),
                    (f"  {finding['severity']}, noticed at step {finding['step']}{until}", "dim"),
                ),
                soft_wrap=True,
            )
            self.rich.print(Text(f"    {finding['message']}"), soft_wrap=True)
        style = "bold green" if diagnosis["healthy"] else "bold red"
        self.rich.print(Text.assemble("\n", (f"  {diagnosis['verdict']}", style)), soft_wrap=True)

    def files(self, lines: Mapping[str, object]) -> None:
        """Print where to look next: a name and a path or command each."""
        width = max(map(len, lines), default=0)
        self.rich.print()
        for name, value in lines.items():
            self.rich.print(Text.assemble(("  " + name.ljust(width), "dim"), "  ", str(value)), soft_wrap=True)

    @contextmanager
    def _bar(self) -> Iterator[Progress]:
        """Yield the display of progress bars, an open one if there is one: a terminal holds only one."""
        if self._display is not None:
            yield self._display
            return
        columns = (
            SpinnerColumn(style="cyan"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=28, complete_style="cyan", finished_style="cyan"),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[note]}", style="cyan", markup=False),
            _TimeLeft(),
        )
        # Four refreshes a second: more would take CPU time from the run.
        display = Progress(
            *columns, console=self.rich, transient=True, disable=not self.rich.is_terminal, refresh_per_second=4
        )
        with display:
            self._display = display
            try:
                yield display
            finally:
                self._display = None


class _TimeLeft(ProgressColumn):
    """Estimate of the time left, counting down between updates if `finishes_at` is set."""

    def render(self, task: Task) -> Text:
        finishes_at = task.fields["finishes_at"]
        if finishes_at is None or task.finished:
            return Text(task.fields["left"], "dim")
        return Text(duration(max(0.0, finishes_at - time.monotonic())) + " left", "dim")


class _Steps:
    """Lines and progress bar of one span of training."""

    def __init__(self, console: RichConsole, bar: Progress, task: Any, total: int, start: int, method: str) -> None:
        self._console, self._bar, self._task, self._total = console, bar, task, total
        self._columns = _columns(total, console.width, method, with_time_left=not console.is_terminal)
        self._lines = 0
        self._seconds: deque[float] = deque(maxlen=ETA_OVER_STEPS)
        self._successes: deque[float] = deque(maxlen=24)
        self._last = time.monotonic()
        self._last_step = start
        self._horizon: str | None = None

    def show(self, step: int, metrics: Mapping[str, Any], total: int | None) -> None:
        now = time.monotonic()
        self._seconds.append((now - self._last) / max(1, step - self._last_step))
        self._last, self._last_step = now, step
        total = self._total if total is None else total
        left_s = sum(self._seconds) / len(self._seconds) * (total - step)
        self._say_horizon(metrics)
        if self._lines % HEADER_EVERY == 0:
            titles = "".join(column.title.rjust(column.width) for column in self._columns)
            self._console.print(Text(titles, "dim"), soft_wrap=True)
        self._lines += 1
        row = {**metrics, "step": step, "left_s": left_s}
        cells = [(column.show(row).rjust(column.width), column.style) for column in self._columns]
        self._console.print(Text.assemble(*cells), soft_wrap=True)
        self._print_failures(metrics)
        if _is_number(metrics.get("success/mean")):
            self._successes.append(metrics["success/mean"])
        self._bar.update(
            self._task,
            completed=step,
            total=total,
            note=sparkline(self._successes),
            finishes_at=now + left_s,
            left="",
        )

    def _say_horizon(self, metrics: Mapping[str, Any]) -> None:
        """Print a line of its own for a change of the horizon."""
        horizon = _horizon(metrics)
        if self._horizon not in (None, horizon) and horizon != MISSING:
            line = Text.assemble(("  ▸ ", "cyan"), (f"horizon {self._horizon} → {horizon} turns", "bold cyan"))
            self._console.print(line, soft_wrap=True)
        self._horizon = horizon if horizon != MISSING else self._horizon

    def _print_failures(self, metrics: Mapping[str, Any]) -> None:
        troubles = []
        if errors := metrics.get("episodes/error"):
            troubles.append(f"{errors:g} {'episode' if errors == 1 else 'episodes'} failed and dropped")
        if timeouts := metrics.get("episodes/timeout"):
            troubles.append(f"{timeouts:g} {'episode' if timeouts == 1 else 'episodes'} ran out of time")
        nonfinite = [name for name, value in metrics.items() if isinstance(value, float) and not _is_number(value)]
        if nonfinite:
            troubles.append(f"not finite: {', '.join(nonfinite)}")
        if troubles:
            self._console.print(Text("  ! " + "; ".join(troubles), "yellow"), soft_wrap=True)


def duration(seconds: float) -> str:
    """Return a duration as `42 s`, `7:05` or `2:03:10`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, hours = whole // 60 % 60, whole // 3600
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def sparkline(rates: Sequence[float] | deque[float]) -> str:
    """Return rates between 0 and 1 as one character each."""
    blocks = "▁▂▃▄▅▆▇█"
    return "".join(blocks[min(7, int(max(0.0, rate) * 8))] for rate in rates)


def _columns(total: int, width: int, method: str, *, with_time_left: bool) -> list[Column]:
    columns = [Column("step", max(5, len(str(total)) + 1), lambda m: str(m["step"]), "bold"), *_COLUMNS[method]]
    if with_time_left:
        columns.append(Column("left", 8, lambda m: duration(m["left_s"])))
        return columns
    while sum(column.width for column in columns) > width and any(column.rank for column in columns):
        columns.remove(max(columns, key=lambda column: column.rank))
    return columns


def _table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1), border_style="dim")
    for index, title in enumerate(titles):
        table.add_column(title, justify="right" if index else "left", no_wrap=True)
    return table


def _before_after_row(
    table: Table, name: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, style: str = ""
) -> None:
    counts = list(dict.fromkeys(str(side["episodes"]) for side in (before, after) if side))
    change = Text(MISSING, "dim")
    if before and after and before["episodes"] and after["episodes"]:
        points = round(100 * (after["success"] - before["success"]), 1)
        change = Text(f"{points:+.1f}" if points else "0.0", "green" if points > 0 else "red" if points < 0 else "dim")
    table.add_row(name, " / ".join(counts), _with_interval(before), _with_interval(after), change, style=style)


def _with_interval(side: Mapping[str, Any] | None) -> Text:
    if not side or not side["episodes"]:
        return Text(MISSING, "dim")
    successes = min(side["success"] * side["episodes"], side["episodes"])
    low, high = wilson_interval(successes, side["episodes"])
    interval = f"{100 * low:.0f}–{100 * high:.0f}".rjust(8)
    return Text.assemble(f"{100 * side['success']:.1f}%", (interval, "not bold dim"))


def _horizon(metrics: Mapping[str, Any]) -> str:
    """Return `4`, or `6·13` if environments differ, or `6–30` if there are many."""
    values = [value for name, value in metrics.items() if name == "horizon" or name.startswith("horizon/")]
    turns = sorted({int(value) for value in values if _is_number(value)})
    if not turns:
        return MISSING
    return "·".join(map(str, turns)) if len(turns) < 3 else f"{turns[0]}–{turns[-1]}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and value == value and abs(value) != float("inf")


def _formatted(value: Any, render: Callable[[float], str]) -> str:
    if value is None:
        return MISSING
    return render(value) if _is_number(value) else str(value)


def _fixed(value: Any, digits: int) -> str:
    return _formatted(value, lambda number: f"{number:.{digits}f}")


def _percent(value: Any) -> str:
    """Return a percentage with one decimal where it helps: `4.2%`, `41.7%`, `100%`."""
    return _formatted(value, lambda number: "100%" if number == 1 else f"{100 * number:.1f}%")


def _format_small(value: Any) -> str:
    """Return four decimals for values near 0, in scientific notation if that would show only zeros."""
    return _formatted(value, lambda number: f"{number:.0e}" if 0 < abs(number) < 5e-5 else f"{number:.4f}"[:6])


def _count(value: Any) -> str:
    return _formatted(value, lambda number: f"{number:.0f}" if number < 9999.5 else f"{number / 1000:.1f}k")


def _seconds(value: Any) -> str:
    return _formatted(value, lambda number: f"{number:.1f}s" if number < 99.95 else f"{number:.0f}s")


_EPISODES = (
    Column("reward", 8, lambda m: _fixed(m.get("reward/mean"), 3)),
    Column("success", 8, lambda m: _percent(m.get("success/mean")), "bold green"),
    Column("turns", 6, lambda m: _fixed(m.get("turns/mean"), 1)),
    Column("horizon", 8, _horizon, "cyan"),
    Column("trunc", 7, lambda m: _percent(m.get("truncated/rate")), rank=2),
    Column("invalid", 8, lambda m: _percent(m.get("actions/invalid_rate")), rank=3),
    Column("tok/s", 7, lambda m: _count(m.get("tokens/sampled_per_s")), "dim", rank=5),
    Column("KL", 7, lambda m: _format_small(m.get("kl/reference")), rank=4),
    Column("entropy", 8, lambda m: _fixed(m.get("entropy/mean"), 3), rank=1),
    Column("clip", 6, lambda m: _percent(m.get("clip/fraction")), rank=6),
    Column("rollout", 8, lambda m: _seconds(m.get("time/rollout_s")), "dim", rank=8),
    Column("learn", 6, lambda m: _seconds(m.get("time/learn_s")), "dim", rank=7),
)
_LEARNING = (
    Column("loss", 9, lambda m: _fixed(m.get("loss"), 4), "bold"),
    Column("entropy", 9, lambda m: _fixed(m.get("entropy/mean"), 3), rank=2),
    Column("grad", 8, lambda m: _fixed(m.get("grad/norm"), 3), rank=3),
    Column("lr", 9, lambda m: _formatted(m.get("lr"), "{:.1e}".format), "dim", rank=4),
)
_PREFERENCES = (
    Column("accuracy", 10, lambda m: _percent(m.get("dpo/accuracy")), "bold green"),
    Column("margin", 8, lambda m: _fixed(m.get("dpo/margin"), 3)),
    Column("chosen", 8, lambda m: _fixed(m.get("dpo/chosen_reward"), 3), rank=1),
    Column("rejected", 10, lambda m: _fixed(m.get("dpo/rejected_reward"), 3), rank=1),
)
_SCORES = (
    Column("accuracy", 10, lambda m: _percent(m.get("reward_model/accuracy")), "bold green"),
    Column("margin", 8, lambda m: _fixed(m.get("reward_model/margin"), 3)),
    Column("chosen", 8, lambda m: _fixed(m.get("reward_model/chosen"), 3), rank=1),
    Column("rejected", 10, lambda m: _fixed(m.get("reward_model/rejected"), 3), rank=1),
)
_TRAINED = (
    Column("tokens", 8, lambda m: _count(m.get("tokens/trained")), "dim", rank=5),
    Column("epoch", 7, lambda m: _fixed(m.get("epoch"), 0), "dim", rank=6),
)
_COLUMNS: dict[str, tuple[Column, ...]] = {
    "rl": _EPISODES,
    "distill": _EPISODES,
    "sft": (*_LEARNING, *_TRAINED),
    "agentevol": (*_LEARNING, *_TRAINED),
    "dagger": (*_LEARNING, *_TRAINED),
    "dpo": (*_LEARNING, *_PREFERENCES),
    "reward_model": (_LEARNING[0], *_SCORES, *_LEARNING[2:]),
}
"""Columns of a step's line beside its number, by training method."""
