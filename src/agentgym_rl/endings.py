"""How a run gets by without room on the disk for its checkpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agentgym_rl.console import Console
from agentgym_rl.disk import room
from agentgym_rl.errors import AgentGymError, DiskFull
from agentgym_rl.runlog import RunLog
from agentgym_rl.training.checkpoint import list_checkpoints, no_room

LOOK_S = 5.0
"""Between looks whether there is room for a run's last checkpoint."""
PATIENCE_S = 3600.0
"""How long a run whose work is done waits for that."""


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
