"""How a run ends other than by being done: it is asked to stop, or there is no room on the disk."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from agentgym_rl.errors import AgentGymError, DiskFull
from agentgym_rl.run.console import Console
from agentgym_rl.run.disk import room
from agentgym_rl.run.log import RunLog
from agentgym_rl.training.checkpoint import list_checkpoints, no_room

LOOK_S = 5.0
"""Between looks whether there is room for a run's last checkpoint."""
PATIENCE_S = 3600.0
"""How long a run whose work is done waits for that."""


STOPPING = "stopping, and saving what was learned; press Ctrl-C again to end at once"
ENDED_AT_ONCE = "ended at once: --resume goes on from the last checkpoint"


class Stopped(BaseException):
    """The run was asked to stop (SIGTERM or Ctrl-C), has written down where it stands, and can be resumed."""


class Stop:
    """SIGTERM and Ctrl-C as a run hears of them. The task that listens is cancelled where it waits, if it `may_leave`
    then; else it looks at `asked` when it is done with what it does. A Ctrl-C after that ends the process at once."""

    def __init__(self) -> None:
        self.asked = False
        self.by = ""
        """What asked first: SIGTERM or Ctrl-C."""
        self.may_leave: Callable[[], bool] = lambda: True
        self.last_words: Callable[[], object] = lambda: None
        """Called before the process is ended at once."""
        self._left = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def leave() -> None:
            if not self._left and self.may_leave():
                self._left = True
                task.cancel()

        def heard(number: int, frame: Any) -> None:
            if number == signal.SIGINT and self.asked:
                self._end_at_once()
            self.by = self.by or ("Ctrl-C" if number == signal.SIGINT else "SIGTERM")
            self.asked = True
            loop.call_soon_threadsafe(leave)
            if number == signal.SIGINT:
                _say(STOPPING)

        before: dict[signal.Signals, Any] = {}
        try:
            # Not the loop's own handlers: those are deaf while a model is loaded or an update made.
            for number in (signal.SIGTERM, signal.SIGINT):
                before[number] = signal.signal(number, heard)
        except ValueError:  # not the main thread
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)

    def _end_at_once(self) -> None:
        """Die of SIGINT, as the shell expects of a program that Ctrl-C ends; an interactive Python lives on."""
        if hasattr(sys, "ps1"):
            raise KeyboardInterrupt
        with suppress(Exception):
            self.last_words()
        if os.isatty(1):
            os.write(1, b"\x1b[?25h")  # a bar hides the cursor
        _say(ENDED_AT_ONCE)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)

    @contextmanager
    def ending_with(self, end: Callable[[], NoReturn]) -> Iterator[None]:
        """Where a task that left comes out; `end` writes down where the run stands and raises Stopped."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._left or task is None:
                raise
            task.uncancel()
            end()


def _say(text: str) -> None:
    """To stderr, past Python's own buffers: a signal may have come while they were being written to."""
    with suppress(OSError):
        os.write(2, f"\nagentgym-rl: {text}\n".encode())


def stopped(log: RunLog, console: Console, step: int, message: str) -> NoReturn:
    log.log_event("stopped", message, step=step)
    console.warn(message)
    raise Stopped(message)


def stop_with_checkpoint(
    write: Callable[[], None] | None, step: int, log: RunLog, console: Console, by: str
) -> NoReturn:
    """`write` is None if there is a checkpoint of the step already."""
    if write is None or try_checkpoint(write, step, log, console):
        stopped(log, console, step, f"stopped by {by} after step {step}: go on with --resume")
    message = f"stopped by {by} after step {step} without a checkpoint of it: --resume goes on from the last"
    stopped(log, console, step, message)


def stop_before_there_is_a_run(console: Console, by: str) -> NoReturn:
    message = f"stopped by {by} before there was a run directory"
    console.warn(message)
    raise Stopped(message)


def stop_before_training(log: RunLog, console: Console, by: str) -> NoReturn:
    """There is nothing new to keep: a warm start that was broken off is made again."""
    kept = list_checkpoints(log.checkpoints_dir) if log.resumed else []
    if kept:
        step = int(kept[-1].name.rpartition("_")[2])
        stopped(log, console, step, f"stopped by {by} before it went on after step {step}: go on with --resume")
    stopped(log, console, 0, f"stopped by {by} before its first checkpoint: --resume starts from the beginning")


@contextmanager
def nothing_left_of_a_failed_start(folder: Path) -> Iterator[None]:
    """Remove a new run directory if the run fails before it has played anything. Hidden files of others stay."""
    resumed = (folder / "config.toml").is_file()
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except Exception:
        played = any(path.is_file() for name in ("trajectories", "checkpoints") for path in (folder / name).rglob("*"))
        if not resumed and not played:
            for path in (*folder.glob("[!.]*"), *folder.glob(".lock"), *folder.glob(".*.tmp")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            for path in made:
                with suppress(OSError):  # somebody else may have put something there meanwhile
                    path.rmdir()
        raise


@contextmanager
def room_or_error(folder: Path) -> Iterator[None]:
    """A disk too full for what a run cannot do without ends it with one line."""
    try:
        yield
    except AgentGymError:
        raise
    except Exception as error:
        said = no_room(error)
        if said is None:
            raise
        raise DiskFull(
            f"no room on the disk of {folder} ({said}; {room(folder)}): free some space and run the same command with "
            "--resume"
        ) from error


def try_checkpoint(write: Callable[[], None], step: int, log: RunLog, console: Console) -> bool:
    """Whether there was room for it. If not, that is said, and the checkpoints before it stay."""
    try:
        write()
    except Exception as error:
        said = no_room(error)
        if said is None:
            raise
        kept = list_checkpoints(log.checkpoints_dir)
        message = (
            f"no room for the checkpoint of step {step} ({said}; {room(log.root)}): "
            f"{kept[-1].name if kept else 'none'} stays the last, free some space"
        )
        log.log_event("checkpoint_failed", message, step=step)
        console.warn(message)
        return False
    return True


async def last_checkpoint(
    write: Callable[[], None], step: int, log: RunLog, console: Console, asked_to_stop: Callable[[], bool]
) -> None:
    """The one with all that was learned is worth waiting for."""
    if try_checkpoint(write, step, log, console):
        return
    console.warn(f"waiting up to {PATIENCE_S / 60:.0f} minutes for room: nothing else is left to do")
    give_up_at = time.monotonic() + PATIENCE_S
    while not asked_to_stop():
        await asyncio.sleep(LOOK_S)
        try:
            write()
        except Exception as error:
            if no_room(error) is None or time.monotonic() > give_up_at:
                raise
        else:
            console.note(f"there was room for the checkpoint of step {step}")
            return
