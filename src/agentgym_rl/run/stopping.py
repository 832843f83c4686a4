"""Ends of a run other than its last step: a request to stop, a failed start, a full disk."""

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
from typing import TYPE_CHECKING, Any, NoReturn

from agentgym_rl.errors import AgentGymError, DiskFull
from agentgym_rl.run.console import Console
from agentgym_rl.run.disk import free_space
from agentgym_rl.training.checkpoint import disk_full_reason, list_checkpoints

if TYPE_CHECKING:
    from agentgym_rl.run.context import RunContext

POLL_INTERVAL_S = 5.0
"""Seconds between attempts to write the last checkpoint on a full disk."""
DISK_TIMEOUT_S = 3600.0
"""Seconds that a finished run waits for space for its last checkpoint."""

STOPPING = "stopping, and saving what was learned; press Ctrl-C again to end at once"
RESUME_EARLIER = "--resume continues from the one before"
ENDED_AT_ONCE = "ended at once: --resume continues from the last checkpoint"


class Stopped(BaseException):
    """The run was asked to stop (SIGTERM or Ctrl-C), has saved its state, and can be resumed."""


class Stop:
    """Handles SIGTERM and Ctrl-C for a run.

    The listening task is cancelled if `may_cancel` allows it at that moment. Otherwise it checks `asked` between steps.
    A second Ctrl-C ends the process at once.
    """

    def __init__(self) -> None:
        self.asked = False
        self.by = ""
        """First request: SIGTERM or Ctrl-C."""
        self.may_cancel: Callable[[], bool] = lambda: True
        self.before_exit: Callable[[], object] = lambda: None
        """Called before the process is ended at once."""
        self._cancelled = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals while the context is open."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel() -> None:
            if not self._cancelled and self.may_cancel():
                self._cancelled = True
                task.cancel()

        def handle(number: int, frame: Any) -> None:
            if number == signal.SIGINT and self.asked:
                self._end_at_once()
            self.by = self.by or ("Ctrl-C" if number == signal.SIGINT else "SIGTERM")
            self.asked = True
            loop.call_soon_threadsafe(cancel)
            if number == signal.SIGINT:
                _say(STOPPING)

        before: dict[signal.Signals, Any] = {}
        try:
            # Not the loop's own handlers, which do not run while a model is loaded or an update is made.
            for number in (signal.SIGTERM, signal.SIGINT):
                before[number] = signal.signal(number, handle)
        except ValueError:  # not the main thread
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)

    def _end_at_once(self) -> None:
        """End with SIGINT, as the shell expects of a program that Ctrl-C ends. An interactive Python continues."""
        if hasattr(sys, "ps1"):
            raise KeyboardInterrupt
        with suppress(Exception):
            self.before_exit()
        if os.isatty(1):
            os.write(1, b"\x1b[?25h")  # a progress bar hides the cursor
        _say(ENDED_AT_ONCE)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)

    @contextmanager
    def ending_with(self, end: Callable[[], NoReturn]) -> Iterator[None]:
        """Call `end` if the task was cancelled by a signal. It saves the state of the run and raises Stopped."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._cancelled or task is None:
                raise
            task.uncancel()
            end()


def _say(text: str) -> None:
    """Write to stderr without Python's buffers: a signal may interrupt a write to them."""
    with suppress(OSError):
        os.write(2, f"\nagentgym-rl: {text}\n".encode())


def stop_with_checkpoint(
    write: Callable[[], None] | None, step: int, context: RunContext, *, resumable: bool = True
) -> NoReturn:
    """Write a checkpoint and raise Stopped. `write` is None if the step has a checkpoint already.

    `resumable`: whether the run can be resumed from the checkpoint.
    """
    request = f"stopped by {context.stop.by} after step {step}"
    written = write is None or try_checkpoint(write, step, context)
    if not written:
        request += " without a checkpoint of it"
    kept = list_checkpoints(context.log.checkpoints_dir)
    if not resumable and kept:
        _stopped(
            context,
            step,
            f"{request}: checkpoint.optimizer = false saves no optimizer to continue with, start a new run with "
            f"model.path={kept[-1] / 'model'}",
        )
    _stopped(context, step, f"{request}: " + ("continue with --resume" if written else RESUME_EARLIER))


def stop_before_run_directory(console: Console, by: str) -> NoReturn:
    """Raise Stopped before there is anything to save."""
    message = f"stopped by {by} before there was a run directory"
    console.warn(message)
    raise Stopped(message)


def stop_before_training(context: RunContext) -> NoReturn:
    """Raise Stopped without a new checkpoint. An interrupted warm start is repeated on resume."""
    kept = list_checkpoints(context.log.checkpoints_dir) if context.log.resumed else []
    request = f"stopped by {context.stop.by} before"
    if kept:
        step = int(kept[-1].name.rpartition("_")[2])
        _stopped(context, step, f"{request} training continued after step {step}: continue with --resume")
    _stopped(context, 0, f"{request} its first checkpoint: --resume starts from the beginning")


def _stopped(context: RunContext, step: int, message: str) -> NoReturn:
    context.warn("stopped", message, step=step)
    raise Stopped(message)


@contextmanager
def remove_failed_start(folder: Path) -> Iterator[None]:
    """Remove a new run directory if the run fails before it has played anything. Other hidden files remain."""
    resumed = (folder / "config.toml").is_file()
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except Exception:
        played = any(path.is_file() for name in ("trajectories", "checkpoints") for path in (folder / name).rglob("*"))
        if not resumed and not played:
            for path in (*folder.glob("[!.]*"), *folder.glob(".lock"), *folder.glob(".*.tmp")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            for path in created:
                with suppress(OSError):  # another process may have written there meanwhile
                    path.rmdir()
        raise


@contextmanager
def disk_space_or_error(folder: Path) -> Iterator[None]:
    """Turn an error of a full disk into one line that says what to do."""
    try:
        yield
    except AgentGymError:
        raise
    except Exception as error:
        reason = disk_full_reason(error)
        if reason is None:
            raise
        raise DiskFull(
            f"no space on the disk of {folder} ({reason}; {free_space(folder)}): free some space and run the "
            "same command with --resume"
        ) from error


def try_checkpoint(write: Callable[[], None], step: int, context: RunContext) -> bool:
    """Write a checkpoint and return whether the disk had space for it. If not, record it; earlier ones remain."""
    try:
        write()
    except Exception as error:
        reason = disk_full_reason(error)
        if reason is None:
            raise
        kept = list_checkpoints(context.log.checkpoints_dir)
        message = (
            f"no space for the checkpoint of step {step} ({reason}; {free_space(context.log.root)}): "
            f"{kept[-1].name if kept else 'none'} stays the last, free some space"
        )
        context.warn("checkpoint_failed", message, step=step)
        return False
    return True


async def last_checkpoint(write: Callable[[], None], step: int, context: RunContext) -> None:
    """Write the checkpoint of a finished run, and wait for space if the disk is full."""
    if try_checkpoint(write, step, context):
        return
    context.console.warn(f"waiting up to {DISK_TIMEOUT_S / 60:.0f} minutes for space: nothing else is left to do")
    deadline = time.monotonic() + DISK_TIMEOUT_S
    while not context.stop.asked:
        await asyncio.sleep(POLL_INTERVAL_S)
        try:
            write()
        except Exception as error:
            if disk_full_reason(error) is None or time.monotonic() > deadline:
                raise
        else:
            context.console.note(f"there was space for the checkpoint of step {step}")
            return
