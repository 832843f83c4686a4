"""Text of each token id, read from a tokenizer.json without loading a tokenizer.

The texts are for display only. A token with a part of a character appears as a replacement character.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """Texts by token id."""

    def __init__(self, tokenizer: dict[str, Any]) -> None:
        model = tokenizer.get("model", {})
        vocab = model.get("vocab", {})
        # Unigram lists [piece, score] in order; the others map piece -> id.
        pairs = vocab.items() if isinstance(vocab, dict) else ((piece[0], i) for i, piece in enumerate(vocab))
        pieces = {number: piece for piece, number in pairs}
        byte_level = "ByteLevel" in {_type(tokenizer.get("decoder")), *_types(tokenizer.get("pre_tokenizer"))}
        show = _from_byte_level if byte_level else _from_pieces
        self._texts = {number: show(piece) for number, piece in pieces.items()}
        self._texts |= {token["id"]: token["content"] for token in tokenizer.get("added_tokens", [])}
        if model.get("type") == "WordLevel":  # words contain no space, but need one between them
            special = {token["id"] for token in tokenizer.get("added_tokens", [])}
            self._texts = {n: text if n in special else f" {text}" for n, text in self._texts.items()}

    def text(self, token: Any) -> str:
        return self._texts.get(token, f"⟨{token}⟩") if isinstance(token, int) else "⟨?⟩"

    def texts(self, tokens: list[int]) -> list[str]:
        return [self.text(token) for token in tokens]


def find_tokenizer(run: Path, config: dict[str, Any]) -> Path | None:
    """Return the tokenizer.json of a run: from its newest checkpoint, its reference or its model's folder."""
    checkpoints = sorted((run / "checkpoints").glob("step_*/model"), reverse=True)
    folders = [*checkpoints, run / "reference", run / "model"]
    model_path = config.get("model", {}).get("path") if isinstance(config.get("model"), dict) else None
    if isinstance(model_path, str):
        folders.append(Path(model_path))
    return next((path for folder in folders if (path := folder / "tokenizer.json").is_file()), None)


def load_vocabulary(path: Path) -> Vocabulary | None:
    """Load a vocabulary. Return None if the file cannot be read."""
    try:
        return Vocabulary(orjson.loads(path.read_bytes()))
    except (OSError, ValueError, AttributeError, KeyError, TypeError, IndexError):
        return None


def _type(part: Any) -> str:
    return part.get("type", "") if isinstance(part, dict) else ""


def _types(part: Any) -> set[str]:
    if not isinstance(part, dict):
        return set()
    inner = part.get("pretokenizers", [])
    return {_type(part), *(_type(inner_part) for inner_part in inner)}


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE. Printable bytes map to themselves, others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


_ALPHABET = _byte_alphabet()


def _from_byte_level(piece: str) -> str:
    if all(character in _ALPHABET for character in piece):
        return bytes(_ALPHABET[character] for character in piece).decode("utf-8", errors="replace")
    return piece


def _from_pieces(piece: str) -> str:
    if match := _BYTE.fullmatch(piece):
        return bytes([int(match[1], 16)]).decode("utf-8", errors="replace")
    return piece.replace("▁", " ")
