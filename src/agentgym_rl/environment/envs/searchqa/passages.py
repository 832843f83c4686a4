"""Passages with a title and a text: read from a corpus file, kept in memory or mapped from disk."""

from __future__ import annotations

import contextlib
import gzip
import mmap
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson

from agentgym_rl.errors import ConfigError

PASSAGES_FILE = "passages.jsonl"
OFFSETS_FILE = "offsets.npy"


@dataclass(frozen=True, slots=True)
class Passage:
    """One document of a corpus, or a piece of one."""

    id: str
    """Id in the corpus; unique."""
    title: str
    text: str

    @property
    def contents(self) -> str:
        return f"{self.title}\n{self.text}"


class PassageStore(Protocol):
    """Passages by their index in the corpus."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Passage: ...


def passage_from(row: Any, index: int) -> Passage:
    """Return the passage of `{"id", "contents": "\\"Title\\"\\nText"}` or `{"title", "text"}`.

    `index` is the default id. Raises ValueError if a key is missing.
    """
    if not isinstance(row, dict):
        raise ValueError(f"a passage is an object, got {type(row).__name__}")
    passage_id = str(row.get("id", row.get("_id", index)))
    if isinstance(row.get("contents"), str):
        title, _, text = row["contents"].partition("\n")
        return Passage(passage_id, title.strip().strip('"'), text.strip())
    text = row.get("text", row.get("paragraph_text"))
    if isinstance(text, str) and isinstance(row.get("title", ""), str):
        return Passage(passage_id, row.get("title", "").strip(), text.strip())
    raise ValueError(f"a passage has `contents`, or `title` and `text`, as strings; got the keys {sorted(row)[:8]}")


def read_corpus(path: Path) -> Iterator[tuple[Passage, int]]:
    """Yield the passages of a .jsonl file or of a .json list, each with the number of bytes read so far."""
    if not path.is_file():
        raise ConfigError(f"corpus {path}: no such file")
    num_read = 0
    if path.name.endswith((".json", ".json.gz")):
        rows = parse_json(read_bytes(path), path)
        if not isinstance(rows, list):
            raise ConfigError(f"corpus {path}: a .json corpus is one list of passages, got {type(rows).__name__}")
        size = path.stat().st_size
        for index, row in enumerate(rows):
            yield _parse_passage(row, index, f"{path}, entry {index}"), size * (index + 1) // len(rows)
        return
    index = 0
    with path.open("rb") as file, _explain_damage(path):
        lines = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
        for number, line in enumerate(lines, start=1):
            num_read = file.tell() if path.suffix == ".gz" else num_read + len(line)
            if line.strip():
                yield _parse_passage(parse_json(line, path, number), index, f"{path}, line {number}"), num_read
                index += 1


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, unpacked if its name ends in .gz."""
    with _explain_damage(path):
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


@contextlib.contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    """Turn the errors of unpacking a file into a ConfigError."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} is no gzip file, or is damaged or cut off: {error}") from error


def parse_json(data: bytes, path: Path, line: int | None = None) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        location = f"{path}, line {line}" if line else f"{path}"
        raise ConfigError(f"{location} is not JSON: {error}") from error


def _parse_passage(row: Any, index: int, location: str) -> Passage:
    try:
        return passage_from(row, index)
    except ValueError as error:
        raise ConfigError(f"{location}: {error}") from error


class PassageWriter:
    """Writer of passages and their offsets."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = (folder / PASSAGES_FILE).open("wb")
        self._offsets = array("q", [0])  # tens of millions in a large corpus

    def add(self, passage: Passage) -> int:
        """Write a passage and return its index."""
        line = orjson.dumps([passage.id, passage.title, passage.text], option=orjson.OPT_APPEND_NEWLINE)
        self._file.write(line)
        self._offsets.append(self._offsets[-1] + len(line))
        return len(self._offsets) - 2

    def close(self) -> int:
        """Finish the files and return the number of passages."""
        self._file.close()
        np.save(self._folder / OFFSETS_FILE, np.frombuffer(self._offsets, dtype=np.int64))
        return len(self._offsets) - 1


class MappedPassages:
    """Memory-mapped passages on disk, shared by all sessions and loaded on access."""

    def __init__(self, folder: Path) -> None:
        self._offsets = np.load(folder / OFFSETS_FILE, mmap_mode="r")
        with (folder / PASSAGES_FILE).open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Passage:
        return Passage(*orjson.loads(self._data[self._offsets[index] : self._offsets[index + 1]]))
