"""A small model from scratch: a word tokenizer for the texts of an environment, and a Llama of any size."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from jinja2 import Template
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentgym_rl.errors import ConfigError
from agentgym_rl.training.settings import ScratchSettings
from agentgym_rl.types import ToolCall

UNKNOWN, START, END = "<|unknown|>", "<|im_start|>", "<|im_end|>"

# ChatML without line breaks, which the tokenizer drops, and with tool calls as Qwen3-Coder writes them. The tools'
# schemas would be the same in every episode, so only their names are shown.
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tool {% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}<|im_end|>"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }} {{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %} <tool_call> <function={{ call['function']['name'] }}>"
    "{% for name, value in call['function']['arguments'].items() %} <parameter={{ name }}> "
    "{{ value if value is string else value | tojson }} </parameter>{% endfor %} </function> </tool_call>{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
_TEMPLATE = Template(CHAT_TEMPLATE)
_TAG = re.compile(r"</?(?:tool_call|function|parameter)(?:=[\w-]+)?>")
"""Tags of tool calls. Each is one token."""
MIN_PAIR_SHARE = 0.0005
"""Smallest share of all words at which a pair becomes one token."""
Lines = Counter[tuple[str, ...]]
"""Words of each clause and its count. It is short, because environments repeat their texts."""
_WORD = r"[^\W\d_]+|\d"
"""Words and single digits."""


def build_tokenizer(texts: Iterable[str], replies: Iterable[str] = ()) -> Any:
    """Return a tokenizer with a token per word and per fixed phrase (`in front of you`), for short sequences.

    It knows only the punctuation that `replies` use, because the model has to write it. Decoding joins tokens by single
    spaces, which is enough for actions.
    """
    replies = list(replies)
    tags = sorted({tag for reply in replies for tag in _TAG.findall(reply)})
    plain = [_TAG.sub("\n", reply) for reply in replies]
    marks = sorted({mark for reply in plain for mark in reply if not (mark.isalnum() or mark.isspace())})
    clauses = Counter(clause for text in texts for clause in re.split(r"[^\w ]", _TAG.sub("\n", text)))
    lines: Lines = Counter()
    for clause, count in clauses.items():
        lines[tuple(re.findall(_WORD, clause))] += count
    if not any(lines):
        raise ConfigError("a tokenizer needs texts to take its words from, got none")
    phrases = _phrases(lines)
    vocabulary = sorted({word for line in lines for word in line} | {"system", "user", "assistant"})
    if tags:
        vocabulary = sorted({*vocabulary, "tool"})
    tokens = [UNKNOWN, START, END, *vocabulary, *phrases, *marks, *tags]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNKNOWN))
    longest_first = sorted(phrases, key=lambda p: (-len(p), p))
    pattern = "|".join(
        [
            *map(re.escape, tags),
            *(rf"\b{re.escape(phrase)}\b" for phrase in longest_first),
            _WORD,
            *map(re.escape, marks),
        ]
    )
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


def write_calls(calls: Iterable[ToolCall]) -> str:
    """Return tool calls as the template writes them."""
    written = [{"function": {"name": call.name, "arguments": call.arguments}} for call in calls]
    text = _TEMPLATE.render(messages=[{"role": "", "content": "", "tool_calls": written}])
    return text.removeprefix(START).removesuffix(END).strip()


def _phrases(lines: Lines) -> list[str]:
    """Join neighbouring words if one hardly ever appears without the other, then frequent pairs of single words.

    The second kind (`red ball`) makes a name one token.
    """
    for choose in (_inseparable_pair, _frequent_pair):
        while pair := choose(lines):
            joined: Lines = Counter()
            for line, count in lines.items():
                joined[_join(line, pair)] += count
            lines = joined
    return sorted({word for line in lines for word in line if " " in word})


def _inseparable_pair(lines: Lines) -> tuple[str, str] | None:
    """Return the most frequent pair of which one word appears almost only next to the other."""
    singles: Counter[str] = Counter()
    for line, times in lines.items():
        for word in line:
            singles[word] += times
    candidates = [
        (-count, a, b)
        for (a, b), count in _pairs(lines).items()
        if count >= 20 and a != b and count >= 0.995 * min(singles[a], singles[b])
    ]
    return min(candidates)[1:] if candidates else None


def _frequent_pair(lines: Lines) -> tuple[str, str] | None:
    """Return the most frequent pair of single words, if it is frequent enough."""
    least = MIN_PAIR_SHARE * sum(len(line) * times for line, times in lines.items())
    candidates = [(-n, a, b) for (a, b), n in _pairs(lines).items() if n >= least and " " not in a and " " not in b]
    return min(candidates)[1:] if candidates else None


def _pairs(lines: Lines) -> Counter[tuple[str, str]]:
    """Count neighbouring words, without digits."""
    counts: Counter[tuple[str, str]] = Counter()
    for line, times in lines.items():
        for pair in pairwise(line):
            if pair[0][0].isalpha() and pair[1][0].isalpha():
                counts[pair] += times
    return counts


def _join(line: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    if pair[0] not in line:
        return line
    result: list[str] = []
    for word in line:
        if result and (result[-1], word) == pair:
            result[-1] = f"{result[-1]} {word}"
        else:
            result.append(word)
    return tuple(result)


def build_model(settings: ScratchSettings, tokenizer: Any, seed: int) -> Any:
    """Return a model with random fp32 weights from `seed`. The global random state does not change."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_heads,
        max_position_embeddings=settings.max_context,
        tie_word_embeddings=True,
        # The usual 0.02 is for wide models: a narrow one would spend most of its training on uniform attention.
        initializer_range=settings.hidden_size**-0.5,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
