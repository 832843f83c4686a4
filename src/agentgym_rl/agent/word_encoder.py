"""Encodes texts word by word and remembers the words, with the ids of the whole text. Decodes tokens likewise.

Byte-level tokenizers divide a text into words before they look for tokens, and in theirs a space only starts a word. So
a text has the ids of its words one after the other. Observations repeat words, and a lookup takes a fraction of the
time of encoding. Texts that are not ASCII, or have a space after white space, are encoded whole.
"""

from __future__ import annotations

import json
import random
import re
import string
from itertools import chain, islice
from typing import Any

from agentgym_rl.common.thoughts import CLOSE, OPEN
from agentgym_rl.errors import ConfigError

_MAX_WORDS = 1 << 16
"""Words remembered. With more of them all are forgotten."""
_MAX_WORD_CHARS = 64
_NEW_WORDS = 32
"""Words learned from one text. A text with more new ones is encoded whole."""
_SPACE_AFTER_SPACE = re.compile(r"\s ")
_PROBES = 32


class WordEncoder:
    """Ids of texts by a tokenizer's Rust backend, without added tokens."""

    def __init__(self, tokenizer: Any, backend: Any) -> None:
        self._backend = backend
        self._first: dict[str, list[int]] = {}
        """Ids of words at the start of a text."""
        self._later: dict[str, list[int]] = {}
        """Ids of words after a space, with that space."""
        self._vocab_size = 0 if backend is None else backend.get_vocab_size()
        self._is_exact = backend is not None and _has_separate_words(tokenizer, backend) and self._agrees(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. Raise ConfigError if tokens were added, which remembered ids would not have."""
        if self._backend.get_vocab_size() != self._vocab_size:
            raise ConfigError(
                f"the tokenizer had {self._vocab_size} tokens when its renderer was made, it has "
                f"{self._backend.get_vocab_size()} now: add tokens before you make a Renderer"
            )
        if not self._is_exact or not text.isascii() or _SPACE_AFTER_SPACE.search(text):
            return self._whole(text)
        first, *later = text.split(" ")
        try:
            return [*self._first[first], *chain.from_iterable(map(self._later.__getitem__, later))]
        except KeyError:
            return self._learn(text, first, later)

    def _whole(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _learn(self, text: str, first: str, later: list[str]) -> list[int]:
        """Return the ids of a text with new words, and remember them."""
        if len(self._first) + len(self._later) > _MAX_WORDS:
            self._first.clear()
            self._later.clear()
        new = dict.fromkeys(word for word in later if word not in self._later)
        for word in islice(new, _NEW_WORDS):
            self._word(self._later, word, f" {word}")
        if len(new) > _NEW_WORDS:
            return self._whole(text)
        ids = list(self._word(self._first, first, first))
        for word in later:
            ids += self._word(self._later, word, f" {word}")
        return ids

    def _word(self, known: dict[str, list[int]], word: str, text: str) -> list[int]:
        ids = known.get(word)
        if ids is None:
            ids = self._whole(text)
            if len(word) <= _MAX_WORD_CHARS:
                known[word] = ids
        return ids

    def _agrees(self, tokenizer: Any) -> bool:
        """Return whether words and whole texts have the same ids in random texts, new and known ones."""
        choose = random.Random(0)
        special = [str(token) for token in tokenizer.added_tokens_decoder.values()][:16]
        pieces = [
            *" " * 24,
            *"\n\t'.,;:!?-_\"()[]{}<>/\\|@#$%&*+=~`0123456789aAbzZ",
            "'s",
            "the",
            "Obj",
            "\r\n",
            *special,
        ]
        self._is_exact = True
        for _ in range(_PROBES):
            text = _SPACE_AFTER_SPACE.sub(" a", "".join(choose.choices(pieces, k=60)))
            if any(self.encode(text) != self._whole(text) for _ in ("new", "known")):
                return False
        # The backend may have been left splitting added tokens, which `encode` is not called with.
        self._first.clear()
        self._later.clear()
        return True


class TokenTexts(dict[int, str]):
    """Texts of tokens, without special ones. If all of a text is ASCII, a byte-level tokenizer's text is theirs.

    The tags of thoughts remain, although some tokenizers have them as special: a thought without them is an action.
    """

    def __init__(self, tokenizer: Any, backend: Any) -> None:
        super().__init__()
        self._tokenizer, self._backend = tokenizer, backend
        self._joins = backend is not None and type(backend.decoder).__name__ == "ByteLevel"
        added = tokenizer.added_tokens_decoder
        special = {*tokenizer.all_special_ids, *(token for token, text in added.items() if text.special)}
        self._hidden = special - {token for token, text in added.items() if str(text) in (OPEN, CLOSE)}

    def __missing__(self, token: int) -> str:
        hidden = token in self._hidden
        text = self[token] = "" if hidden else str(self._backend.decode([token], skip_special_tokens=False))
        return text

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of `token_ids`."""
        if self._joins:
            text = "".join(map(self.__getitem__, token_ids))
            if text.isascii():
                return text
        shown = [token for token in token_ids if token not in self._hidden]
        if self._backend is not None:
            return str(self._backend.decode(shown, skip_special_tokens=False))
        return str(self._tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def backend_of(tokenizer: Any) -> Any:
    """Return the tokenizer's Rust backend if the class adds nothing to it, else None. It takes half the time of the
    Python methods around it."""
    from transformers import PreTrainedTokenizerFast

    methods = ("encode", "_encode_plus", "decode", "_decode")
    kind: Any = type(tokenizer)
    same = all(getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name, ()) for name in methods)
    return tokenizer.backend_tokenizer if same else None


def _has_separate_words(tokenizer: Any, backend: Any) -> bool:
    """Return whether a space always starts a word in ASCII texts, by the kind of the tokenizer."""
    if type(backend.model).__name__ != "BPE" or backend.model.dropout or backend.pre_tokenizer is None:
        return False
    if type(backend.normalizer).__name__ not in ("NoneType", "NFC", "NFD", "NFKC", "NFKD"):
        return False
    added = tokenizer.added_tokens_decoder.values()
    if any(token.lstrip or token.rstrip or token.single_word or re.search(r"\s", str(token)) for token in added):
        return False
    try:
        state = json.loads(backend.pre_tokenizer.__getstate__())
    except Exception:  # a pre-tokenizer written in Python, which has no state; tokenizers raises no narrower type
        return False
    steps = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    looks_back = any("(?<" in step["pattern"].get("Regex", "(?<") for step in steps if step["type"] == "Split")
    prefixes = any(step.get("add_prefix_space") for step in steps)
    if "ByteLevel" not in kinds or not {*kinds} <= {"Split", "Digits", "ByteLevel"} or looks_back or prefixes:
        return False
    return _divides_at_spaces(backend.pre_tokenizer)


def _divides_at_spaces(pre_tokenizer: Any) -> bool:
    """Return whether all pairs of short words are divided as each of them alone. BLOOM does not divide ". ."."""

    def divide(text: str) -> list[str]:
        return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]

    words = [*string.punctuation, "a", "Ab", "0", "000"]
    alone = {word: divide(f" {word}") for word in words}
    for first in words:
        text = "".join(f" {first} {second}" for second in words)
        if divide(text) != [piece for second in words for word in (first, second) for piece in alone[word]]:
            return False
    return True
