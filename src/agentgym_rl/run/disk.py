"""Writes to a disk that may be full. Files are replaced whole and lines appended whole; data without space waits in
memory until there is some."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentgym_rl.common.files import write_atomically

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
MAX_PENDING_BYTES = 64 << 20
"""Most bytes of episodes that wait for space; beyond it the oldest are dropped. Metrics and events are all kept."""
RETRY_S = 1.0
"""Seconds between attempts to write to a full disk."""


@dataclass(frozen=True, slots=True)
class PendingWrite:
    """Data that waits for space on the disk."""

    data: Sequence[bytes | memoryview]
    """Parts of the data."""
    append: bool
    """Whether to append to the file; else `data` replaces it."""
    droppable: bool
    """Whether it may be dropped if too much waits."""


class RetryingWriter:
    """Writes files. It keeps data that the disk has no space for, in order, and writes it later.

    `on_full` is called once when a disk turns out to be full, with the text of the system's error.
    """

    def __init__(self, on_full: Callable[[str], None]) -> None:
        self._on_full = on_full
        self._pending: dict[Path, deque[PendingWrite]] = {}
        self._next_try = 0.0
        self.full = False
        """Whether a write failed and data still waits."""
        self.num_dropped = 0
        """Lines of episodes dropped since then."""

    def append(self, path: Path, *line: bytes | memoryview, droppable: bool = False) -> None:
        """Append the parts of a line."""
        self._write(path, PendingWrite(line, append=True, droppable=droppable))

    def replace(self, path: Path, *parts: bytes, droppable: bool = False) -> None:
        """Replace the content by these parts, one after the other."""
        self.discard(path)
        self._write(path, PendingWrite(parts, append=False, droppable=droppable))

    def discard(self, path: Path) -> None:
        """Drop data that waits for a file that is started again or was removed."""
        self._pending.pop(path, None)

    def pending(self, path: Path) -> list[bytes]:
        """Return the data of a file that is not on disk yet."""
        return [b"".join(entry.data) for entry in self._pending.get(path, ())]

    def pending_paths(self) -> list[Path]:
        return list(self._pending)

    def mark_full(self, reason: str) -> None:
        """Record that a write failed, here or elsewhere in the run."""
        if not self.full:
            self.full, self.num_dropped = True, 0
            self._on_full(reason)

    def write_pending(self) -> bool:
        """Write the pending data. Return whether none is left."""
        for path in list(self._pending):
            queue = self._pending[path]
            while queue and self._written(path, queue[0]):
                queue.popleft()
            if not queue:
                del self._pending[path]
        self._next_try = time.monotonic() + RETRY_S
        return not self._pending

    def _write(self, path: Path, entry: PendingWrite) -> None:
        if not self._pending and self._written(path, entry):
            return
        entry = replace(entry, data=[b"".join(entry.data)])  # a view would keep memory of another process
        self._pending.setdefault(path, deque()).append(entry)
        if entry.droppable:
            self._drop_oldest()
        if time.monotonic() >= self._next_try:
            self.write_pending()

    def _written(self, path: Path, entry: PendingWrite) -> bool:
        try:
            if entry.append:
                append(path, *entry.data)
            else:
                write_atomically(path, *entry.data)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self.mark_full(error.strerror or str(error))
            return False
        return True

    def _drop_oldest(self) -> None:
        size = sum(len(entry.data[0]) for queue in self._pending.values() for entry in queue if entry.droppable)
        for path in list(self._pending):
            queue = self._pending[path]
            while size > MAX_PENDING_BYTES and queue and queue[0].droppable:
                lost = bytes(queue.popleft().data[0])
                size -= len(lost)
                self.num_dropped += lost.count(b"\n")
            if not queue:
                del self._pending[path]


def append(path: Path, *line: bytes | memoryview) -> None:
    """Append the parts of a whole line or nothing, in one write that survives a kill."""
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            written = os.writev(file.fileno(), line) if hasattr(os, "writev") else file.write(b"".join(line))
            if written != sum(map(len, line)):  # the disk took a part and has no space for the rest
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            file.truncate(before)
            if not before:
                path.unlink()
            raise


def write_in_place(path: Path, text: bytes) -> None:
    """Overwrite a small file in its own blocks, for a disk without free ones. Blanks pad shorter text."""
    with path.open("r+b", buffering=0) as file:
        old = file.readall()
        if file.seek(0) or file.write(text.ljust(len(old))) < len(text):  # a part would not be JSON
            file.seek(0)
            file.write(old)
            file.truncate(len(old))


def free_space(folder: Path) -> str:
    """Return the free space on the disk of a folder, in words."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    return f"{free / 2**30:.1f} GiB free" if free >= 2**30 else f"{free / 2**20:.1f} MiB free"
