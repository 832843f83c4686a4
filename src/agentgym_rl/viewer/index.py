"""Index of episodes: their position on disk and their properties, in an SQLite file in the user's cache folder.

Trajectory files only grow, so each read continues where the last one stopped. A replaced file (a step played again
after a kill) is read again from the start. Nothing is written below the viewed folders. Several viewers may share the
index, because a chunk is read and recorded in one transaction.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sqlite3
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agentgym_rl.types import StopReason, Task, Trajectory
from agentgym_rl.viewer.discovery import open_inside
from agentgym_rl.viewer.encode import read_object

VERSION = 6
"""Version of the tables and of their content. An index of another version is rebuilt."""
MAX_SAFE_INTEGER = (1 << 53) - 1
"""Largest integer that JavaScript represents exactly."""
CHUNK_BYTES = 4 << 20
"""Bytes read and recorded per transaction. Smaller chunks report progress more often and block others for less time."""
POLL_INTERVAL_S = 1.0
"""Seconds between polls for new episodes."""
MAX_PROBLEMS = 3
"""Problems shown per run."""
TAIL_BYTES = 256
"""Bytes before the read position that are kept as a checksum, to detect a file replaced by a longer one."""

_TABLES = """
CREATE TABLE runs (run INTEGER PRIMARY KEY, path TEXT UNIQUE);
CREATE TABLE files (
  file INTEGER PRIMARY KEY, run INTEGER, stem TEXT, inode INTEGER, size INTEGER, modified INTEGER,
  read INTEGER, lines INTEGER, broken INTEGER, tail INTEGER, UNIQUE (run, stem));
CREATE TABLE episodes (
  run INTEGER, file INTEGER, line INTEGER, start INTEGER, length INTEGER, step INTEGER, kind TEXT, trajectory TEXT,
  team TEXT, env TEXT, item INTEGER, subset TEXT, stop TEXT, success INTEGER, reward REAL, turns INTEGER,
  horizon INTEGER, sampled INTEGER, seconds REAL, parent TEXT, shared INTEGER,
  PRIMARY KEY (file, line)) WITHOUT ROWID;
CREATE INDEX episodes_by_step ON episodes (run, step DESC, kind DESC, env, file, line);
CREATE INDEX episodes_by_task ON episodes (env, item);
CREATE TABLE cells (
  run INTEGER, file INTEGER, kind TEXT, step INTEGER, env TEXT, subset TEXT, stop TEXT, success INTEGER,
  horizon INTEGER, episodes INTEGER, reward REAL, turns INTEGER,
  PRIMARY KEY (run, file, kind, step, env, subset, stop, success, horizon)) WITHOUT ROWID;
CREATE TABLE learned (
  run INTEGER, file INTEGER, line INTEGER, start INTEGER, length INTEGER, trajectory TEXT, advantage REAL,
  PRIMARY KEY (file, line)) WITHOUT ROWID;
CREATE INDEX learned_by_trajectory ON learned (run, trajectory);
"""
_KINDS = {"step": "train", "eval": "eval", "warmstart": "warmstart"}
_MEMBER = re.compile(r"(.+)-\d+-\d+")
SubsetsOf = Callable[[str, int], tuple[str, ...]]


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "agentgym-rl"


class Index:
    """The SQLite file. Each thread has its own connection; `close` closes all of them."""

    def __init__(self, path: Path | None = None) -> None:
        self.note = ""
        """Message to the user if the cache folder cannot be used, or an empty string."""
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self.path = path or self._default_path()
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._guard = threading.Lock()
        self._prepare()

    def _default_path(self) -> Path:
        folder = cache_folder()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            self._temporary = tempfile.TemporaryDirectory(prefix="agentgym-rl-")
            self.note = f"{folder} cannot be written ({error.strerror}): the index is rebuilt at every start"
            folder = Path(self._temporary.name)
        return folder / "viewer.sqlite3"

    def _prepare(self) -> None:
        try:
            version = self.connection.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.DatabaseError:  # damaged or not a database: the index can be rebuilt
            version = -1
        if version != VERSION:
            self._rebuild(version)

    def _rebuild(self, version: int) -> None:
        if version != 0:
            self.close_connections()
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        connection = self.connection
        with write(connection):
            if connection.execute("PRAGMA user_version").fetchone()[0] == VERSION:  # another viewer was first
                return
            for statement in filter(str.strip, _TABLES.split(";")):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {VERSION}")

    @property
    def connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = sqlite3.connect(self.path, timeout=60.0, isolation_level=None, check_same_thread=False)
            connection.row_factory = sqlite3.Row
            self._local.connection = connection
            with self._guard:
                self._connections.append(connection)
            with contextlib.suppress(sqlite3.DatabaseError):
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = OFF")  # a cache: rebuilt if a power failure damages it
        return connection

    def run_number(self, path: Path) -> int:
        key = _path_key(path.resolve())
        row = self.connection.execute("SELECT run FROM runs WHERE path = ?", (key,)).fetchone()
        if row is None:
            self.connection.execute("INSERT OR IGNORE INTO runs (path) VALUES (?)", (key,))
            row = self.connection.execute("SELECT run FROM runs WHERE path = ?", (key,)).fetchone()
        return int(row["run"])

    def forget_missing(self) -> None:
        """Delete the rows of runs that no longer exist."""
        for row in self.connection.execute("SELECT run, path FROM runs").fetchall():
            if not Path(os.fsdecode(row["path"])).is_dir():
                with write(self.connection):
                    for table in ("episodes", "cells", "learned", "files", "runs"):
                        self.connection.execute(f"DELETE FROM {table} WHERE run = ?", (row["run"],))

    def close_connections(self) -> None:
        with self._guard:
            for connection in self._connections:
                connection.close()
            self._connections.clear()
        self._local = threading.local()

    def close(self) -> None:
        self.close_connections()
        if self._temporary is not None:
            self._temporary.cleanup()


def _path_key(path: Path) -> str | bytes:
    """Return a path as text, or as bytes if it is not valid UTF-8, which Linux allows."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return os.fsencode(path)
    return str(path)


@contextlib.contextmanager
def write(connection: sqlite3.Connection) -> Iterator[None]:
    """Run a transaction that holds the write lock from its start, so that what it reads remains valid."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def trajectory_files(run: Path) -> list[os.DirEntry[str]]:
    try:
        entries = [e for e in os.scandir(run / "trajectories") if e.name.endswith(".jsonl") and e.is_file()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(entries, key=lambda entry: entry.name)


def unread_bytes(index: Index, run: Path) -> tuple[int, int]:
    """Return (bytes of trajectory files, bytes not indexed yet)."""
    number = index.run_number(run)
    known = {
        row["stem"]: row for row in index.connection.execute("SELECT * FROM files WHERE run = ?", (number,)).fetchall()
    }
    total = unread = 0
    for entry in trajectory_files(run):
        stat = entry.stat()
        total += stat.st_size
        row = known.get(entry.name.removesuffix(".jsonl"))
        if row is None or row["inode"] != stat.st_ino or row["size"] > stat.st_size:
            unread += stat.st_size
        elif row["size"] != stat.st_size or row["modified"] != stat.st_mtime_ns:
            unread += max(1, stat.st_size - row["read"])
    return total, unread


class Reader:
    """Reader of one run's trajectory files into the index, one chunk at a time."""

    def __init__(self, index: Index, run: Path, subsets_of: SubsetsOf) -> None:
        self._index = index
        self._run = run
        self._subsets_of = subsets_of
        self.problems: list[str] = []
        """Files that could not be read, with the reason."""

    def advance(self) -> Iterator[int]:
        """Update the index. Yield the number of bytes read after every chunk."""
        number = self._index.run_number(self._run)
        entries = trajectory_files(self._run)
        self._drop_missing(number, {entry.name.removesuffix(".jsonl") for entry in entries})
        for entry in entries:
            more = True
            while more:
                try:
                    read, more = self._chunk(number, Path(entry.path))
                except sqlite3.Error:  # an error of the index itself: a full disk, or a lock timeout
                    raise
                except Exception as error:  # an error of this file: continue with the others
                    self.problems.append(f"{entry.name!r} cannot be read: {_reason(error)}")
                    break
                if read:
                    yield read

    def _drop_missing(self, number: int, stems: set[str]) -> None:
        connection = self._index.connection
        rows = connection.execute("SELECT file, stem FROM files WHERE run = ?", (number,)).fetchall()
        gone = [row["file"] for row in rows if row["stem"] not in stems]
        if gone:
            with write(connection):
                for file in gone:
                    self._forget(connection, file)

    @staticmethod
    def _forget(connection: sqlite3.Connection, file: int) -> None:
        for table in ("episodes", "cells", "learned", "files"):
            connection.execute(f"DELETE FROM {table} WHERE file = ?", (file,))

    def _chunk(self, number: int, path: Path) -> tuple[int, bool]:
        """Read one chunk. Return (bytes read, whether more remains)."""
        connection = self._index.connection
        stem = path.name.removesuffix(".jsonl")
        try:
            stat = path.stat()
        except OSError:
            return 0, False
        query = "SELECT * FROM files WHERE run = ? AND stem = ?"
        row = connection.execute(query, (number, stem)).fetchone()
        current = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if row is not None and (row["inode"], row["size"], row["modified"]) == current:
            return 0, False
        with write(connection), open_inside(self._run, path) as file:
            row = connection.execute(query, (number, stem)).fetchone()
            if row is not None and not _continues(file, row, stat):
                self._forget(connection, row["file"])
                row = None
            start = row["read"] if row else 0
            file.seek(start)
            chunk = _whole_lines(file)
            if row is None:
                insert = "INSERT INTO files (run, stem, read, lines, broken) VALUES (?, ?, 0, 0, 0)"
                connection.execute(insert, (number, stem))
                row = connection.execute(query, (number, stem)).fetchone()
            lines, broken = self._record(connection, number, row["file"], stem, start, row["lines"], chunk)
            end = start + len(chunk)
            file.seek(max(0, end - TAIL_BYTES))
            tail = zlib.crc32(file.read(end - max(0, end - TAIL_BYTES)))
            # The size is recorded only at the end of the file. Until then every poll continues to read.
            done = end >= stat.st_size or not chunk
            connection.execute(
                "UPDATE files SET inode = ?, size = ?, modified = ?, read = ?, lines = ?, broken = ?, tail = ? "
                "WHERE file = ?",
                (
                    stat.st_ino,
                    stat.st_size if done else end,
                    stat.st_mtime_ns if done else 0,
                    end,
                    lines,
                    row["broken"] + broken,
                    tail,
                    row["file"],
                ),
            )
        return len(chunk), not done

    def _record(
        self, connection: sqlite3.Connection, run: int, file: int, stem: str, start: int, lines: int, chunk: bytes
    ) -> tuple[int, int]:
        """Insert the rows of complete lines. Return (lines in the file so far, unreadable lines of this chunk)."""
        learned = stem.startswith("learned_")
        rows: list[tuple[Any, ...]] = []
        broken = 0
        for raw in chunk.splitlines(keepends=True):
            try:
                value = read_object(raw)
                row = _learned_row(value) if learned else self._episode_row(value, stem)
            except Exception:  # a line may contain anything: count it and continue
                broken += 1
            else:
                rows.append((run, file, lines, start, len(raw), *row))
            lines += 1
            start += len(raw)
        table, columns = ("learned", 7) if learned else ("episodes", 21)
        marks = ", ".join("?" * columns)
        connection.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", rows)
        if not learned:
            connection.executemany(
                "INSERT INTO cells VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "episodes = episodes + excluded.episodes, reward = reward + excluded.reward, "
                "turns = turns + excluded.turns",
                _cells(rows),
            )
        return lines, broken

    def _episode_row(self, row: dict[str, Any], stem: str) -> tuple[Any, ...]:
        prefix, _, digits = stem.rpartition("_")
        step = _integer(row.get("step", int(digits) if digits.isdigit() else 0))
        env, item, name = str(row["env"]), _integer(row["item"]), str(row["id"])
        stop = StopReason(row["stop"]) if row.get("stop") else None
        trajectory = Trajectory(name, Task(env, item), [], row["rewards"], row["infos"], stop)
        trajectory.passive_reward = float(row.get("passive_reward") or 0.0)
        sampled = sum(_sampled_tokens(message) for message in row["messages"])
        team = match[1] if (match := _MEMBER.fullmatch(name)) else f"{env}/{item}"
        return (
            step,
            str(row.get("kind") or _KINDS.get(prefix, "eval")),
            name,
            team,
            env,
            item,
            ", ".join(self._subsets_of(env, item)),
            str(stop) if stop else "",
            int(trajectory.success),
            trajectory.reward,
            trajectory.num_turns,
            _integer(row.get("horizon") or 0),
            sampled,
            float(row.get("seconds") or 0.0),
            str(row.get("parent") or ""),
            _integer(row.get("shared_turns") or 0),
        )


def _cells(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return counts and sums of rows of `episodes` by the columns of the filters, computed once for all pages."""
    cells: dict[tuple[Any, ...], list[float]] = {}
    for run, file, _, _, _, step, kind, _, _, env, _, subset, stop, success, reward, turns, horizon, *_ in rows:
        sums = cells.setdefault((run, file, kind, step, env, subset, stop, success, horizon), [0, 0.0, 0])
        sums[0] += 1
        sums[1] += reward if math.isfinite(reward) else 0.0
        sums[2] += turns
    return [(*cell, *sums) for cell, sums in cells.items()]


def _integer(value: Any) -> int:
    if abs(number := int(value)) > MAX_SAFE_INTEGER:
        raise OverflowError(f"needs an integer of at most {MAX_SAFE_INTEGER} (JavaScript's limit), got {number}")
    return number


def _sampled_tokens(message: dict[str, Any]) -> int:
    """Return the number of sampled tokens of a message. Raise TypeError if the pages cannot show it."""
    logprobs, ids = message.get("logprobs") or [], message.get("token_ids") or []
    if not isinstance(message["role"], str) or not isinstance(message["content"], str):
        raise TypeError("a message needs a role and a content")
    if not isinstance(logprobs, list) or not isinstance(ids, list):
        raise TypeError("token ids and log-probabilities must be lists")
    return len(logprobs)


def _learned_row(row: dict[str, Any]) -> tuple[str, float | None]:
    advantages = row["advantages"]
    return str(row["id"]), sum(advantages) / len(advantages) if advantages else None


def _reason(error: Exception) -> str:
    """Return an error's message without paths, because an export may contain it."""
    return (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"


def _continues(file: Any, row: sqlite3.Row, stat: os.stat_result) -> bool:
    """Return whether the file still begins with the content that was read."""
    if row["inode"] != stat.st_ino or row["read"] > stat.st_size:
        return False
    start = max(0, row["read"] - TAIL_BYTES)
    file.seek(start)
    return zlib.crc32(file.read(row["read"] - start)) == row["tail"]


def _whole_lines(file: Any) -> bytes:
    """Read complete lines, about CHUNK_BYTES of them. A longer line is read whole."""
    chunk: bytes = file.read(CHUNK_BYTES)
    end = chunk.rfind(b"\n") + 1
    if end == 0 and len(chunk) == CHUNK_BYTES:
        return chunk + line if (line := file.readline()).endswith(b"\n") else b""
    return chunk[:end]


class Indexer:
    """A thread that keeps the index of the given runs up to date."""

    def __init__(self, index: Index, subsets_of: SubsetsOf, runs: Callable[[], list[Path]]) -> None:
        self._index = index
        self._subsets_of = subsets_of
        self._runs = runs
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="viewer-index", daemon=True)
        self.total_bytes = 0
        self.unread_bytes = 0
        self.stamp = 0
        """Counter that grows whenever something was read."""
        self.problem = ""
        """Reason why nothing can be indexed, or an empty string."""
        self.problems: dict[Path, str] = {}
        """Reasons why files of a run cannot be read, by run."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10.0)

    def progress(self) -> dict[str, Any]:
        return {"total": self.total_bytes, "unread": self.unread_bytes, "stamp": self.stamp, "problem": self.problem}

    def _work(self) -> None:
        is_cleaned = False
        while not self._stop.is_set():
            try:
                if not is_cleaned:
                    self._index.forget_missing()
                    is_cleaned = True
                self.update()
                self.problem = ""
            except Exception as error:  # a full disk, or a folder that was removed: shown, and retried
                self.problem = f"{type(error).__name__}: {error}"
            self._stop.wait(POLL_INTERVAL_S)

    def update(self) -> None:
        """Read new episodes of every run once. An unreadable run does not affect the others."""
        runs = self._runs()
        sizes = {}
        for run in runs:
            with self._record_problem(run):
                sizes[run] = unread_bytes(self._index, run)
        self.total_bytes = sum(total for total, _ in sizes.values())
        self.unread_bytes = sum(unread for run, (_, unread) in sizes.items() if run not in self.problems)
        changed = False
        for run, (_, unread) in sizes.items():
            with self._record_problem(run):
                changed |= self._read(run, unread)
            if self._stop.is_set():
                return
        self.unread_bytes = 0
        # Last, so that a client that reacts to it gets the final counts.
        self.stamp += changed

    def _read(self, run: Path, unread: int) -> bool:
        """Index one run. Return whether anything changed."""
        number = self._index.run_number(run)
        files = self._index.connection.execute("SELECT count(*) FROM files WHERE run = ?", (number,)).fetchone()[0]
        if not unread and files == len(trajectory_files(run)):
            return self.problems.pop(run, None) is not None
        problem_before, stamp_before = self.problems.get(run), self.stamp
        reader = Reader(self._index, run, self._subsets_of)
        for read in reader.advance():
            self.unread_bytes = max(0, self.unread_bytes - read)
            self.stamp += 1
            if self._stop.is_set():
                return False
            time.sleep(0)  # let the server answer requests between two chunks
        if reader.problems:
            self.problems[run] = "; ".join(reader.problems[:MAX_PROBLEMS])
        else:
            self.problems.pop(run, None)
        # A file that remains unreadable is retried at every poll, which is not a change.
        return self.problems.get(run) != problem_before or self.stamp != stamp_before or problem_before is None

    @contextlib.contextmanager
    def _record_problem(self, run: Path) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.problems[run] = f"its trajectories cannot be read: {_reason(error)}"
