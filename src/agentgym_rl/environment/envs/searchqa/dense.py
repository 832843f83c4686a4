"""Finding passages by meaning: an encoder's vectors in one memory-mapped file, searched exactly.

Any encoder folder that transformers can load will do. Tensors are only handled through their own methods, so that
torch is loaded with the model and not with this module.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentgym_rl.environment.envs.searchqa.passages import Passage, PassageStore
from agentgym_rl.errors import ConfigError

VECTORS_FILE = "vectors.npy"
ENCODE_BATCH = 32
_BLOCK = 64 * ENCODE_BATCH
MAX_TOKENS = 256
"""Tokens of a passage or query that are looked at: passages of about 100 words fit."""
_ROWS_AT_ONCE = 65_536


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """What has to be the same for passages and queries; kept with the index."""

    model: str
    """Hugging Face folder or hub name."""
    query_prefix: str = ""
    passage_prefix: str = ""
    """What the model wants before a text: "query: " and "passage: " for E5, nothing for MiniLM."""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


class Encoder:
    """Texts to unit vectors: the mean of the last hidden states, or the first one where the folder says so.

    Runs on the GPU where there is one.
    """

    def __init__(self, settings: EncoderSettings) -> None:
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import is_torch_cuda_available, logging

        logging.disable_progress_bar()  # it would draw through the index's own
        self.settings = settings
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(settings.model)
            self._model: Any = AutoModel.from_pretrained(settings.model)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(
                f"dense retrieval needs a Hugging Face encoder at {settings.model!r}: a folder with config, weights "
                f"and tokenizer, or a hub name ({reason})"
            ) from error
        self._device = "cuda" if is_torch_cuda_available() else "cpu"
        self._model.eval().requires_grad_(False).to(self._device)
        self._first_token = _pools_first_token(Path(settings.model))
        self._lock = threading.Lock()

    @property
    def dimension(self) -> int:
        return int(self._model.config.hidden_size)

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        return self._encode([self.settings.query_prefix + text for text in texts])

    def passages(self, passages: Sequence[Passage]) -> np.ndarray:
        return self._encode([self.settings.passage_prefix + passage.contents for passage in passages])

    def _encode(self, texts: list[str]) -> np.ndarray:
        """float32 [texts, dimension], each of length 1."""
        with self._lock:  # the tokenizer's padding is state
            batch = self._tokenizer(texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
            batch = batch.to(self._device)
            hidden = self._model(**batch).last_hidden_state
        if self._first_token:
            vectors = hidden[:, 0]
        else:
            mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            vectors = (hidden * mask).sum(1) / mask.sum(1)
        vectors = vectors.float().cpu().numpy()
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)


def _pools_first_token(folder: Path) -> bool:
    """Sentence encoders say in 1_Pooling/config.json which state is theirs."""
    file = folder / "1_Pooling" / "config.json"
    return file.is_file() and bool(json.loads(file.read_text()).get("pooling_mode_cls_token"))


class DenseRetriever:
    """Exact search by inner product over the vectors of all passages."""

    cheap = False

    def __init__(self, encoder: Encoder, vectors: np.ndarray, passages: PassageStore) -> None:
        if vectors.shape != (len(passages), encoder.dimension):
            raise ConfigError(
                f"dense retrieval needs {len(passages)} vectors of {encoder.dimension} numbers, got "
                f"{' x '.join(map(str, vectors.shape))}: build the index again with this model"
            )
        self._encoder = encoder
        self._vectors = vectors
        self._passages = passages

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        if not queries:
            return []
        return [[self._passages[place] for place in row] for row in nearest(self._vectors, self._query(queries), k)]

    def _query(self, queries: Sequence[str]) -> np.ndarray:
        starts = range(0, len(queries), ENCODE_BATCH)
        return np.concatenate([self._encoder.queries(queries[start : start + ENCODE_BATCH]) for start in starts])


def nearest(vectors: np.ndarray, queries: np.ndarray, k: int) -> list[list[int]]:
    """For each query the places of the `k` vectors with the largest inner product, best first."""
    best_scores = np.empty((len(queries), 0), dtype=np.float32)
    best_places = np.empty((len(queries), 0), dtype=np.int64)
    for start in range(0, len(vectors), _ROWS_AT_ONCE):
        scores = queries @ vectors[start : start + _ROWS_AT_ONCE].T
        places = np.broadcast_to(np.arange(start, start + scores.shape[1]), scores.shape)
        best_scores = np.concatenate([best_scores, scores], axis=1)
        best_places = np.concatenate([best_places, places], axis=1)
        if best_scores.shape[1] > k:
            kept = np.argpartition(-best_scores, k - 1, axis=1)[:, :k]
            best_scores = np.take_along_axis(best_scores, kept, axis=1)
            best_places = np.take_along_axis(best_places, kept, axis=1)
    order = np.lexsort((best_places, -best_scores), axis=1)
    places_in_order: list[list[int]] = np.take_along_axis(best_places, order, axis=1).tolist()
    return places_in_order


def write_vectors(folder: Path, encoder: Encoder, passages: PassageStore) -> Iterator[int]:
    """Encode all passages into the folder's vectors file; yields how many are done."""
    shape = (len(passages), encoder.dimension)
    vectors = np.lib.format.open_memmap(folder / VECTORS_FILE, mode="w+", dtype=np.float32, shape=shape)
    for start in range(0, len(passages), _BLOCK):
        # Of similar length together: padding is computed too.
        block = [(place, passages[place]) for place in range(start, min(start + _BLOCK, len(passages)))]
        block.sort(key=lambda entry: len(entry[1].contents))
        for offset in range(0, len(block), ENCODE_BATCH):
            places, texts = zip(*block[offset : offset + ENCODE_BATCH], strict=True)
            vectors[list(places)] = encoder.passages(texts)
            yield start + offset + len(places)
    vectors.flush()
