"""An index in a folder: built once from a corpus file, mapped into memory, shared by all sessions of a process.

manifest.json     what is in here; written last, so a folder without it is unfinished
passages.jsonl    the passages, and offsets.npy where each begins
bm25/             the tantivy index
vectors.npy       with --dense: one vector a passage
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
"""Up to here a BM25 query stays within a few milliseconds; with more, searches leave the event loop."""
Kind = Literal["auto", "bm25", "dense", "hybrid"]
Progress = Callable[[str, int, int], None]
"""(what is being done, how much is done, of how much)."""


def build_index(
    corpus: Path, folder: Path, encoder: EncoderSettings | None = None, progress: Progress = lambda *_: None
) -> int:
    """Index `corpus` into `folder`, which must not exist; the number of passages. Nothing is left behind on failure."""
    if folder.exists():
        raise ConfigError(f"index folder {folder} exists already: remove it or choose another with --out")
    if not corpus.is_file():
        raise ConfigError(f"corpus {corpus}: no such file")
    model = Encoder(encoder) if encoder else None  # first: a wrong name is found before the long work
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.unfinished")
    (unfinished / "bm25").mkdir(parents=True)
    try:
        num_passages = _write_words(corpus, unfinished, progress)
        if model:
            for done in write_vectors(unfinished, model, MappedPassages(unfinished)):
                progress("vectors", done, num_passages)
        manifest: dict[str, Any] = {"format": FORMAT, "passages": num_passages, "corpus": corpus.name}
        if encoder:
            manifest["encoder"] = encoder.to_dict()
        (unfinished / "manifest.json").write_bytes(orjson.dumps(manifest, option=orjson.OPT_INDENT_2))
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return num_passages


def _write_words(corpus: Path, folder: Path, progress: Progress) -> int:
    size = max(1, corpus.stat().st_size)
    words, passages = BM25Writer(folder / "bm25"), PassageWriter(folder)
    try:
        for passage, num_read in read_corpus(corpus):
            words.add(passage)
            if passages.add(passage) % 1000 == 0:
                progress("words", num_read, size)
    except BaseException:
        words.abandon()
        raise
    words.close()
    num_passages = passages.close()
    if not num_passages:
        raise ConfigError(f"corpus {corpus} holds no passage")
    progress("words", size, size)
    return num_passages


@lru_cache(maxsize=16)
def open_retriever(place: str, kind: Kind = "auto") -> Retriever:
    """The retriever of an index folder, or of a service's address; one and the same for all who ask in this process.

    `auto` is hybrid where the index has vectors, and BM25 where not.
    """
    if place.startswith(("http://", "https://")):
        return RemoteRetriever(place)
    folder = Path(place)
    manifest = read_manifest(folder)
    passages = MappedPassages(folder)
    dense = "encoder" in manifest
    if kind in ("dense", "hybrid") and not dense:
        raise ConfigError(f"index {folder} has no vectors: build it with --dense MODEL")
    words = BM25Retriever.open(folder / "bm25", passages, cheap=len(passages) <= CHEAP_PASSAGES)
    if kind == "bm25" or not dense:
        return words
    vectors = np.load(folder / VECTORS_FILE, mmap_mode="r")
    meaning = DenseRetriever(Encoder(EncoderSettings(**manifest["encoder"])), vectors, passages)
    return meaning if kind == "dense" else HybridRetriever([words, meaning])


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
