"""A search index in a folder: built once from a corpus file, memory-mapped, shared by all sessions of a process.

manifest.json     contents of the folder; written last, so a folder without it is incomplete
passages.jsonl    the passages; offsets.npy holds the start of each
bm25/             the tantivy index
vectors.npy       with --dense: one vector per passage
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson

from agentgym_rl.environment.envs.searchqa.dense import (
    VECTORS_FILE,
    DenseRetriever,
    Encoder,
    EncoderSettings,
    write_vectors,
)
from agentgym_rl.environment.envs.searchqa.passages import MappedPassages, PassageWriter, read_corpus
from agentgym_rl.environment.envs.searchqa.remote import RemoteRetriever
from agentgym_rl.environment.envs.searchqa.retrieval import BM25Retriever, BM25Writer, HybridRetriever, Retriever
from agentgym_rl.errors import ConfigError

FORMAT = 1
CHEAP_PASSAGES = 100_000
"""Largest index whose BM25 queries take at most a few milliseconds. Larger ones are searched off the event loop."""
Kind = Literal["auto", "bm25", "dense", "hybrid"]
Progress = Callable[[str, int, int], None]
"""Called with (phase, amount done, total amount)."""


def build_index(
    corpus: Path, folder: Path, encoder: EncoderSettings | None = None, progress: Progress = lambda *_: None
) -> int:
    """Index `corpus` into `folder`, which must not exist, and return the number of passages. Clean up on failure."""
    if folder.exists():
        raise ConfigError(f"index folder {folder} exists already: remove it or choose another with --out")
    if not corpus.is_file():
        raise ConfigError(f"corpus {corpus}: no such file")
    model = Encoder(encoder) if encoder else None  # first, so that a wrong name fails before the long work
    partial_folder = folder.with_name(f".{folder.name}.{os.getpid()}.unfinished")
    try:
        (partial_folder / "bm25").mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"index folder {folder} cannot be made ({error.strerror or error}): choose another"
        ) from error
    try:
        num_passages = _write_bm25(corpus, partial_folder, progress)
        if model:
            for done in write_vectors(partial_folder, model, MappedPassages(partial_folder)):
                progress("vectors", done, num_passages)
        manifest: dict[str, Any] = {"format": FORMAT, "passages": num_passages, "corpus": corpus.name}
        if encoder:
            manifest["encoder"] = encoder.to_dict()
        (partial_folder / "manifest.json").write_bytes(orjson.dumps(manifest, option=orjson.OPT_INDENT_2))
        partial_folder.rename(folder)
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)
    return num_passages


def _write_bm25(corpus: Path, folder: Path, progress: Progress) -> int:
    size = max(1, corpus.stat().st_size)
    bm25_writer, passages = BM25Writer(folder / "bm25"), PassageWriter(folder)
    try:
        for passage, num_read in read_corpus(corpus):
            bm25_writer.add(passage)
            if passages.add(passage) % 1000 == 0:
                progress("words", num_read, size)
    except BaseException:
        bm25_writer.abandon()
        raise
    bm25_writer.close()
    num_passages = passages.close()
    if not num_passages:
        raise ConfigError(f"corpus {corpus} has no passages")
    progress("words", size, size)
    return num_passages


@lru_cache(maxsize=16)
def open_retriever(location: str, kind: Kind = "auto") -> Retriever:
    """Return the retriever of an index folder or a service's address, shared by all callers in this process.

    `auto` is hybrid if the index has vectors, otherwise BM25.
    """
    if location.startswith(("http://", "https://")):
        return RemoteRetriever(location)
    folder = Path(location)
    manifest = read_manifest(folder)
    passages = MappedPassages(folder)
    has_vectors = "encoder" in manifest
    if kind in ("dense", "hybrid") and not has_vectors:
        raise ConfigError(f"index {folder} has no vectors: build it with --dense MODEL")
    bm25 = BM25Retriever.open(folder / "bm25", passages, cheap=len(passages) <= CHEAP_PASSAGES)
    if kind == "bm25" or not has_vectors:
        return bm25
    vectors = np.load(folder / VECTORS_FILE, mmap_mode="r")
    dense = DenseRetriever(Encoder(EncoderSettings(**manifest["encoder"])), vectors, passages)
    return dense if kind == "dense" else HybridRetriever([bm25, dense])


def titles_by_id(folder: Path) -> dict[str, str]:
    """Return the titles of an index's passages."""
    passages = MappedPassages(folder)
    return {passage.id: passage.title for passage in (passages[index] for index in range(len(passages)))}


def read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / "manifest.json"
    if not file.is_file():
        raise ConfigError(
            f"{folder} is not a search index: build one with `agentgym-rl index CORPUS.jsonl --out {folder}`"
        )
    manifest: dict[str, Any] = orjson.loads(file.read_bytes())
    if manifest.get("format") != FORMAT:
        raise ConfigError(
            f"index {folder} has format {manifest.get('format')}, this version reads {FORMAT}: rebuild it"
        )
    return manifest
