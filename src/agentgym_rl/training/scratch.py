"""A small model from nothing: a word tokenizer over the texts an environment speaks, and a Llama of any size."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentgym_rl.errors import ConfigError
from agentgym_rl.training.settings import ScratchSettings

UNKNOWN, START, END = "<|unknown|>", "<|im_start|>", "<|im_end|>"

# ChatML without line breaks, which the tokenizer does not know.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} {{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
_WORD = r"[^\W\d_]+|\d"
"""Words and single digits; punctuation and line breaks are dropped."""


def build_tokenizer(texts: Iterable[str]) -> Any:
    """One token per word and per phrase of words that never part (`in front of you`), so that sequences are short.

    Decoding joins tokens by single spaces: enough for actions, which are words.
    """
    lines = [re.findall(_WORD, clause) for text in texts for clause in re.split(r"[^\w ]", text)]
    if not any(lines):
        raise ConfigError("a tokenizer needs texts to learn its words from, got none")
    phrases = _phrases(lines)
    vocabulary = sorted({word for line in lines for word in line} | {"system", "user", "assistant"})
    tokens = [UNKNOWN, START, END, *vocabulary, *phrases]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNKNOWN))
    longest_first = sorted(phrases, key=lambda p: (-len(p), p))
    pattern = "|".join([*(rf"\b{re.escape(phrase)}\b" for phrase in longest_first), _WORD])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True)
    tokenizer.add_special_tokens([UNKNOWN, START, END])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        eos_token=END,
        pad_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _phrases(lines: list[list[str]]) -> list[str]:
    """Glue neighbouring words while one of the two hardly ever appears without the other."""
    while True:
        singles = Counter(word for line in lines for word in line)
        pairs = Counter(pair for line in lines for pair in pairwise(line) if all(w[0].isalpha() for w in pair))
        glued = [
            (count, a, b)
            for (a, b), count in pairs.items()
            if count >= 20 and a != b and count >= 0.995 * min(singles[a], singles[b])
        ]
        if not glued:
            return sorted(word for word in singles if " " in word)
        _, first, second = min(glued, key=lambda row: (-row[0], row[1], row[2]))
        lines = [_glue(line, first, second) for line in lines]


def _glue(line: list[str], first: str, second: str) -> list[str]:
    result: list[str] = []
    for word in line:
        if result and result[-1] == first and word == second:
            result[-1] = f"{first} {second}"
        else:
            result.append(word)
    return result


def build_model(settings: ScratchSettings, tokenizer: Any, seed: int) -> Any:
    """Random weights from `seed`, fp32; the global random state is left as it was."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_heads,
        max_position_embeddings=settings.max_context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
