"""What is searched: passages with a title and a text, read from a corpus file, kept in memory or mapped from disk."""

from __future__ import annotations

import mmap
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
    """As the corpus names it; unique in it."""
    title: str
    text: str

    @property
    def contents(self) -> str:
        return f"{self.title}\n{self.text}"


class PassageStore(Protocol):
    """Passages by their place in the corpus."""

    def __len__(self) -> int: ...
    def __getitem__(self, place: int, /) -> Passage: ...


def passage_from(row: Any, place: int) -> Passage:
    """From `{"id", "contents": "\\"Title\\"\\nText"}` or `{"title", "text"}`; the place is the id where none is given.

    Raises ValueError with what is missing.
    """
    if not isinstance(row, dict):
        raise ValueError(f"a passage is an object, got {type(row).__name__}")
    name = str(row.get("id", row.get("_id", place)))
    if isinstance(row.get("contents"), str):
        title, _, text = row["contents"].partition("\n")
        return Passage(name, title.strip().strip('"'), text.strip())
    text = row.get("text", row.get("paragraph_text"))
    if isinstance(text, str) and isinstance(row.get("title", ""), str):
        return Passage(name, row.get("title", "").strip(), text.strip())
    raise ValueError(f"a passage has `contents`, or `title` and `text`, as strings; got the keys {sorted(row)[:8]}")


def read_corpus(path: Path) -> Iterator[tuple[Passage, int]]:
    """Passages of a .jsonl file, or of a .json file that is one list, each with the bytes of the file read so far."""
    if not path.is_file():
        raise ConfigError(f"corpus {path}: no such file")
    num_read = 0
    if path.suffix == ".json":
        rows = parse_json(path.read_bytes(), path)
        if not isinstance(rows, list):
            raise ConfigError(f"corpus {path}: a .json corpus is one list of passages, got {type(rows).__name__}")
        size = path.stat().st_size
        for place, row in enumerate(rows):
            yield _checked(row, place, f"{path}, entry {place}"), size * (place + 1) // len(rows)
        return
    place = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            num_read += len(line)
            if line.strip():
                yield _checked(parse_json(line, path, number), place, f"{path}, line {number}"), num_read
                place += 1


def parse_json(data: bytes, path: Path, line: int | None = None) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        where = f"{path}, line {line}" if line else f"{path}"
        raise ConfigError(f"{where} is not JSON: {error}") from error


def _checked(row: Any, place: int, where: str) -> Passage:
    try:
        return passage_from(row, place)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


class PassageWriter:
    """Writes passages one after the other, and where each begins."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = (folder / PASSAGES_FILE).open("wb")
        self._offsets = array("q", [0])  # tens of millions in a large corpus

    def add(self, passage: Passage) -> int:
        """The passage's place."""
        line = orjson.dumps([passage.id, passage.title, passage.text], option=orjson.OPT_APPEND_NEWLINE)
        self._file.write(line)
        self._offsets.append(self._offsets[-1] + len(line))
        return len(self._offsets) - 2

    def close(self) -> int:
        """Finish; the number of passages."""
        self._file.close()
        np.save(self._folder / OFFSETS_FILE, np.frombuffer(self._offsets, dtype=np.int64))
        return len(self._offsets) - 1


class MappedPassages:
    """Passages on disk, mapped into memory: any number of sessions share them, and only what is read is loaded."""

    def __init__(self, folder: Path) -> None:
        self._offsets = np.load(folder / OFFSETS_FILE, mmap_mode="r")
        with (folder / PASSAGES_FILE).open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, place: int) -> Passage:
        return Passage(*orjson.loads(self._data[self._offsets[place] : self._offsets[place + 1]]))
