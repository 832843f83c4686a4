"""Files that survive a kill: atomic replacement, and a lock for the one process that writes a folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import BinaryIO

from agentgym_rl.errors import ConfigError

if sys.platform != "win32":
    import fcntl


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """Replace the content of `path` by these parts, one after the other. A reader sees the old content or the new one,
    never a mixture, even after a kill."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def lock_folder(folder: Path) -> BinaryIO | None:
    """Lock `folder` for this process and return the lock file. Close it to release the lock.

    The system also releases the lock when the process ends, however it ends. Raise ConfigError if another process
    holds it. Return None on Windows and on file systems without locks, such as those of some clusters.
    """
    if sys.platform == "win32":
        return None
    file = (folder / ".lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(
            f"another process is writing to {folder}: wait for it, stop it, or choose another folder"
        ) from error
    except OSError:
        file.close()
        return None
    return file
