"""Dense retrieval: exact search over an encoder's vectors in one memory-mapped file.

Any encoder folder that transformers can load works. The code uses only methods of tensors, so that torch is imported
with the model and not with this module.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentgym_rl.common.model_loading import loading_lock
from agentgym_rl.environment.envs.searchqa.passages import Passage, PassageStore
from agentgym_rl.errors import ConfigError

VECTORS_FILE = "vectors.npy"
ENCODE_BATCH = 32
_BLOCK = 64 * ENCODE_BATCH
MAX_TOKENS = 256
"""Tokens of a passage or query that the encoder reads. Passages of about 100 words fit."""
_ROWS_PER_BLOCK = 65_536


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """Settings shared by passages and queries, saved with the index."""

    model: str
    """Hugging Face folder or hub name."""
    query_prefix: str = ""
    passage_prefix: str = ""
    """Prefixes that the model expects: "query: " and "passage: " for E5, none for MiniLM."""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


class Encoder:
    """Encoder of texts as unit vectors: the mean of the last hidden states, or the first one if the folder says so.

    Runs on the GPU if there is one.
    """

    def __init__(self, settings: EncoderSettings) -> None:
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import is_torch_cuda_available, logging

        logging.disable_progress_bar()  # it would overwrite the bar of `agentgym-rl index`
        self.settings = settings
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(settings.model)
            with loading_lock:
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
        """Return float32 [texts, dimension], each row of length 1."""
        with self._lock:  # padding changes the tokenizer's state
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
    """Return whether 1_Pooling/config.json of a sentence encoder selects the first token's state."""
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
        return [[self._passages[index] for index in row] for row in nearest(self._vectors, self._embed(queries), k)]

    def _embed(self, queries: Sequence[str]) -> np.ndarray:
        starts = range(0, len(queries), ENCODE_BATCH)
        return np.concatenate([self._encoder.queries(queries[start : start + ENCODE_BATCH]) for start in starts])


def nearest(vectors: np.ndarray, queries: np.ndarray, k: int) -> list[list[int]]:
    """Return for each query the indices of the `k` vectors with the largest inner product, best first."""
    best_scores = np.empty((len(queries), 0), dtype=np.float32)
    best_indices = np.empty((len(queries), 0), dtype=np.int64)
    for start in range(0, len(vectors), _ROWS_PER_BLOCK):
        scores = queries @ vectors[start : start + _ROWS_PER_BLOCK].T
        indices = np.broadcast_to(np.arange(start, start + scores.shape[1]), scores.shape)
        best_scores = np.concatenate([best_scores, scores], axis=1)
        best_indices = np.concatenate([best_indices, indices], axis=1)
        if best_scores.shape[1] > k:
            top = np.argpartition(-best_scores, k - 1, axis=1)[:, :k]
            best_scores = np.take_along_axis(best_scores, top, axis=1)
            best_indices = np.take_along_axis(best_indices, top, axis=1)
    order = np.lexsort((best_indices, -best_scores), axis=1)
    ordered_indices: list[list[int]] = np.take_along_axis(best_indices, order, axis=1).tolist()
    return ordered_indices


def write_vectors(folder: Path, encoder: Encoder, passages: PassageStore) -> Iterator[int]:
    """Write the vectors of all passages into the folder. Yield the number of finished passages."""
    shape = (len(passages), encoder.dimension)
    vectors = np.lib.format.open_memmap(folder / VECTORS_FILE, mode="w+", dtype=np.float32, shape=shape)
    for start in range(0, len(passages), _BLOCK):
        # Batch passages of similar length, to compute less padding.
        block = [(index, passages[index]) for index in range(start, min(start + _BLOCK, len(passages)))]
        block.sort(key=lambda entry: len(entry[1].contents))
        for offset in range(0, len(block), ENCODE_BATCH):
            indices, texts = zip(*block[offset : offset + ENCODE_BATCH], strict=True)
            vectors[list(indices)] = encoder.passages(texts)
            yield start + offset + len(indices)
    vectors.flush()
