"""Writing to a disk that may be full: files are replaced whole, lines are appended whole, and what there is no room for
waits in memory until there is."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
KEPT_BYTES = 64 << 20
"""Of episodes that wait for room; of more, the oldest are given up. Metrics and events are small and all kept."""
RETRY_S = 1.0
"""Between looks whether there is room, while lines keep coming."""


@dataclass(frozen=True, slots=True)
class Waiting:
    data: bytes
    append: bool
    """Else it is the whole file."""
    spare: bool
    """May be given up when too much waits."""


class PatientWriter:
    """Writes files; what the disk has no room for it keeps, in order, and writes when there is room again.

    `told` is called once when a disk turns out to be full, with what the system said.
    """

    def __init__(self, told: Callable[[str], None]) -> None:
        self._told = told
        self._waiting: dict[Path, deque[Waiting]] = {}
        self._next_try = 0.0
        self.full = False
        """Since a write failed, until `has_room` finds nothing waiting."""
        self.given_up = 0
        """Lines of episodes that were not written since then."""

    def append(self, path: Path, line: bytes, *, spare: bool = False) -> None:
        self._write(path, Waiting(line, append=True, spare=spare))

    def replace(self, path: Path, data: bytes, *, spare: bool = False) -> None:
        self.forget(path)
        self._write(path, Waiting(data, append=False, spare=spare))

    def forget(self, path: Path) -> None:
        """What waits for a file that begins afresh, or is gone, is of no use."""
        self._waiting.pop(path, None)

    def waiting(self, path: Path) -> list[bytes]:
        """What is not yet on disk of a file."""
        return [one.data for one in self._waiting.get(path, ())]

    def unwritten(self) -> list[Path]:
        return list(self._waiting)

    def no_room(self, said: str) -> None:
        """Something could not be written, here or elsewhere in the run."""
        if not self.full:
            self.full, self.given_up = True, 0
            self._told(said)

    def has_room(self) -> bool:
        """Writes what waits; True if nothing does any more."""
        for path in list(self._waiting):
            queue = self._waiting[path]
            while queue and self._written(path, queue[0]):
                queue.popleft()
            if not queue:
                del self._waiting[path]
        self._next_try = time.monotonic() + RETRY_S
        return not self._waiting

    def _write(self, path: Path, one: Waiting) -> None:
        if not self._waiting and self._written(path, one):
            return
        self._waiting.setdefault(path, deque()).append(one)
        if one.spare:
            self._give_up_some()
        if time.monotonic() >= self._next_try:
            self.has_room()

    def _written(self, path: Path, one: Waiting) -> bool:
        try:
            (append if one.append else write_atomically)(path, one.data)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self.no_room(error.strerror or str(error))
            return False
        return True

    def _give_up_some(self) -> None:
        size = sum(len(one.data) for queue in self._waiting.values() for one in queue if one.spare)
        for path in list(self._waiting):
            queue = self._waiting[path]
            while size > KEPT_BYTES and queue and queue[0].spare:
                lost = queue.popleft().data
                size -= len(lost)
                self.given_up += lost.count(b"\n")
            if not queue:
                del self._waiting[path]


def append(path: Path, line: bytes) -> None:
    """Add a whole line or nothing. In one write, so that it is there even if the process is killed next."""
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            written = file.write(line)
            if written != len(line):  # the disk took a part and would refuse the rest
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            file.truncate(before)
            if not before:
                path.unlink()
            raise


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, so that a reader or a kill sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_in_place(path: Path, text: bytes) -> None:
    """Over the blocks a small file has already, for a disk that has no others; blanks fill up what it had more."""
    with path.open("r+b", buffering=0) as file:
        old = file.readall()
        if file.seek(0) or file.write(text.ljust(len(old))) < len(text):  # a part would be no JSON
            file.seek(0)
            file.write(old)
            file.truncate(len(old))


def free_space(folder: Path) -> str:
    """How much is left on the disk of a folder, in words."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    return f"{free / 2**30:.1f} GiB free" if free >= 2**30 else f"{free / 2**20:.1f} MiB free"
