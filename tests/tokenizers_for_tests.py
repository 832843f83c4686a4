"""Small real tokenizers, trained on the spot: byte-level BPE with the special tokens of each chat format."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = {
    "chatml": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama3": [
        *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        *("<|eom_id|>", "<|python_tag|>"),
    ],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[TOOL_RESULTS]"],
}
_BEGIN_END = {"llama3": ("<|begin_of_text|>", "<|end_of_text|>"), "mistral": ("<s>", "</s>")}

# How Llama-3 and Qwen cut text into words: runs of newlines stay together, whatever follows them.
_MODERN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_LINES = [
    "system user assistant Thought: I need to go north. Action: go north",
    "get 1 oak log, craft 4 oak planks using 1 oak log. Got 1 oak log. Could not find stick.",
    "You are in a room. There is a red ball 2 steps in front of you and 1 steps to your left.",
    "<think>\nNorth is up.\n</think>\n\nnorth\n\n\nsouth\n\neast",
    "go go go north north south ball ball the the there here north go",
] * 4


@cache
def byte_level_bpe(style: str, vocab_size: int = 420) -> Any:
    """A tokenizer that can write any text, with merges learned from a few lines (newline runs and words among them)."""
    special = SPECIAL_TOKENS[style]
    tokenizer = Tokenizer(models.BPE())
    if style == "chatml":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        words = pre_tokenizers.Split(Regex(_MODERN_WORDS), behavior="isolated")
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_LINES, trainer)
    begin, end = _BEGIN_END.get(style, (None, "<|endoftext|>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=begin,
        eos_token=end,
        pad_token=end,
        additional_special_tokens=special,
    )


@cache
def word_level() -> Any:
    """A tokenizer that is not lossless: unknown words become <unk>, spacing is lost, so encode(decode(x)) != x."""
    words = ["go", "north", "south", "get", "drop", "ball", "system", "user", "assistant"]
    special = ["<unk>", "<pad>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: i for i, token in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=special[2:],
    )


def split_segmentation(tokenizer: Any, text: str) -> list[int]:
    """Ids that decode to `text` and that the tokenizer itself would never produce: one per byte, nothing merged."""
    [(piece, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return list(tokenizer.convert_tokens_to_ids(list(piece)))


# Qwen3: the thoughts of replies before the last user message are dropped. The last reply gets an empty thought if it
# has none. Between tool results, thoughts are kept.
QWEN3 = """\
{%- set last = namespace(user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else '') + '\\n\\n# Tools\\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'system' and tools -%}
{%- elif m.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' -}}
{%- elif m.role != 'assistant' -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- else -%}
{%- set thought, answer = '', m.content -%}
{%- if '</think>' in answer -%}
{%- set thought = m.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set answer = m.content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > last.user and (loop.last or thought) -%}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' + answer.lstrip('\\n') -}}
{%- else -%}
{{- answer -}}
{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{{- ('\\n' if answer or not loop.first else '') + '<tool_call>\\n{"name": "' + call.function.name -}}
{{- '", "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""

# DeepSeek-R1: the thought of every reply is dropped, and the generation prompt opens a thought.
R1 = """\
{{- '<|begin|>' -}}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{- m.content -}}
{%- elif m.role == 'user' -%}{{- '<|User|>' + m.content -}}
{%- else -%}{{- '<|Assistant|>' + m.content.split('</think>')[-1] + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|Assistant|><think>\\n' -}}{%- endif -%}
"""

THINKING = {
    "qwen3": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], QWEN3),
    "r1": (["<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>"], R1),
}


@cache
def thinking_tokenizer(name: str) -> Any:
    """A tokenizer with the template of a thinking model; `<think>` and `</think>` are tokens that are not special."""
    special, template = THINKING[name]
    base = byte_level_bpe("qwen")
    tokenizer = Tokenizer.from_str(base.backend_tokenizer.to_str())
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(["<think>", "</think>"])
    end = special[0] if name == "qwen3" else "<|end|>"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token=end,
        chat_template=template,
        additional_special_tokens=special,
    )
