"""Encoding word by word gives the ids of the whole text, or is not used."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from agentgym_rl.agent.word_encoder import _MAX_WORDS, TokenTexts, WordEncoder

CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
WORDS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "qwen": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(
                    rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
                    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
                ),
                "isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "prefix": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "sentences": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[^.\n]+[.\n]*"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "metaspace": pre_tokenizers.Metaspace(),
    "thousands": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d+(?: \d{3})+| ?[^\s\d]+|\s+(?!\S)|\s|\d+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}
"""Pre-tokenizers; in the last four a space does not always start a word."""
EXACT = ("gpt2", "smollm", "qwen")
SENTENCES = [
    "There is a red ball 1 2 steps in front of you and 3 steps to your left.",
    "Your goal: don't pick up the grey key, I'll do it.\nYou carry nothing. ",
    "[2 Observation]  needed to get from:\n\n  1 oak log\t(x, y) == {'a': 10.25}\r\n",
    "1 000 000 of 2 000 000",
    "café → naïve \u00a0 日本語 x\u0301 y",
]


def tokenizer_with(words: str, *added: AddedToken) -> Any:
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = WORDS[words]
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, initial_alphabet=alphabet)
    backend.train_from_iterator(SENTENCES * 20, trainer)
    backend.add_special_tokens([AddedToken("<|im_start|>", normalized=False), AddedToken("<|im_end|>"), *added])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


def texts(count: int) -> list[str]:
    choose = random.Random(1)
    pieces = [*" ".join(SENTENCES).split(" "), " ", "", "\n", "\t", "\x1c", "'s", "<|im_end|>", "<|im_start|>user\n"]
    return [" ".join(choose.choices(pieces, k=choose.randrange(40))) for _ in range(count)]


@pytest.mark.parametrize("words", WORDS)
def test_ids_are_those_of_the_whole_text(words: str) -> None:
    tokenizer = tokenizer_with(words)
    encoder = WordEncoder(tokenizer, tokenizer.backend_tokenizer)
    assert encoder._is_exact == (words in EXACT)
    for text in [*texts(400), *SENTENCES, "x" * 500 + " y", " ", "", "a ", " a"]:
        whole = tokenizer.encode(text, add_special_tokens=False)
        assert encoder.encode(text) == whole
        assert encoder.encode(text) == whole  # from the words it knows by now


def test_words_that_only_some_pairs_join_are_encoded_whole() -> None:
    tokenizer = tokenizer_with("thousands")
    encoder = WordEncoder(tokenizer, tokenizer.backend_tokenizer)
    for text in ["a 1", "a 000", "a 1 000 b"]:
        assert encoder.encode(text) == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("words", EXACT)
def test_a_text_that_begins_with_spaces_teaches_the_right_words(words: str) -> None:
    tokenizer = tokenizer_with(words)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    encoder = WordEncoder(tokenizer, tokenizer.backend_tokenizer)
    for text in [" \x01a b", " 1 b", "", "q \x01a", "q 1"]:
        assert encoder.encode(text) == tokenizer.encode(text, add_special_tokens=False)


def test_added_tokens_are_not_known_from_a_backend_that_splits_them() -> None:
    tokenizer = tokenizer_with("gpt2")
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    encoder = WordEncoder(tokenizer, backend)
    backend.encode_special_tokens = False
    for text in ("a <|im_start|> b", "a <|im_end|> b"):
        assert encoder.encode(text) == list(backend.encode(text, add_special_tokens=False).ids)


def test_a_pre_tokenizer_written_in_python_is_encoded_whole() -> None:
    class Pairs:
        def pre_tokenize(self, text: Any) -> None:
            text.split(lambda _, part: [part[i : i + 2] for i in range(0, len(str(part)), 2)])

    tokenizer = tokenizer_with("gpt2")
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Pairs())
    assert WordEncoder(tokenizer, backend).encode("a b c") == list(backend.encode("a b c").ids)


@pytest.mark.parametrize(
    "added", [AddedToken("<two words>"), AddedToken("<mark>", lstrip=True), AddedToken("mark", single_word=True)]
)
def test_added_tokens_that_reach_beyond_a_word_are_encoded_whole(added: AddedToken) -> None:
    tokenizer = tokenizer_with("gpt2", added)
    encoder = WordEncoder(tokenizer, tokenizer.backend_tokenizer)
    assert not encoder._is_exact
    text = f"a {added.content} b"
    assert encoder.encode(text) == tokenizer.encode(text, add_special_tokens=False)


def test_known_words_are_not_encoded_again_and_their_number_is_bounded() -> None:
    tokenizer = tokenizer_with("qwen")
    backend, calls = tokenizer.backend_tokenizer, []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(backend, name)

    encoder = WordEncoder(tokenizer, Counted())
    ids = encoder.encode(SENTENCES[0])
    calls.clear()
    assert encoder.encode(SENTENCES[0]) == ids
    assert set(calls) == {"get_vocab_size"}
    ids[0] = -1
    assert encoder.encode(SENTENCES[0])[0] != -1
    for start in range(0, _MAX_WORDS, 1000):
        encoder.encode(" ".join(f"x{number}" for number in range(start, start + 1000)))
    assert len(encoder._later) <= _MAX_WORDS + 1000
    assert encoder.encode(SENTENCES[0]) == tokenizer.encode(SENTENCES[0], add_special_tokens=False)


@pytest.mark.parametrize("words", WORDS)
def test_tokens_have_the_text_of_the_whole(words: str) -> None:
    tokenizer, choose = tokenizer_with(words, AddedToken("<note>", special=False)), random.Random(2)
    if words == "metaspace":
        tokenizer.backend_tokenizer.decoder = decoders.Metaspace()
    backend = tokenizer.backend_tokenizer
    token_texts = TokenTexts(tokenizer, backend)
    size = backend.get_vocab_size()
    replies = [choose.choices(range(size + 2), k=choose.randrange(12)) for _ in range(300)]
    replies += [backend.encode(text).ids for text in SENTENCES]
    for token_ids in replies:
        assert token_texts.decode(token_ids) == backend.decode(token_ids, skip_special_tokens=True)
    assert bool(token_texts) == (words != "metaspace")
