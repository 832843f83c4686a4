"""Chat templates that never rewrite earlier turns, for models whose own template does or is missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from agentgym_rl.common.thoughts import CLOSE, OPEN
from agentgym_rl.errors import ConfigError

# Tool calls as Hermes models and Qwen2.5 were tuned on them. Expects `system`, the text of the system message or "".
_HERMES_SYSTEM = """\
{{- '<|im_start|>system\\n' -}}
{%- if system -%}{{- system + '\\n\\n' -}}{%- endif -%}
{{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' -}}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' -}}
{{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, ' -}}
{{- '"arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' -}}
"""
_HERMES_CALLS = """\
{%- for call in message['tool_calls'] or [] -%}
{%- if message['content'] or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' -}}
{{- call['function']['arguments'] | tojson + '}\\n</tool_call>' -}}
{%- endfor -%}
"""
_TOOL_RESULT = """\
{%- if loop.first or messages[loop.index0 - 1]['role'] != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
"""


def _chatml(default_system: str) -> str:
    """Return ChatML with Hermes tools. The default system message is written if the conversation has none."""
    quoted = default_system.replace("'", "\\'")
    return (
        "{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else '" + quoted + "' -%}\n"
        "{%- if tools -%}\n" + _HERMES_SYSTEM + "{%- elif system or messages[0]['role'] == 'system' -%}\n"
        "{{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' -}}\n{%- endif -%}\n"
        "{%- for message in messages -%}\n"
        "{%- if message['role'] == 'tool' -%}\n"
        + _TOOL_RESULT
        + "{%- elif not loop.first or message['role'] != 'system' -%}\n"
        "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] -}}\n"
        + _HERMES_CALLS
        + "{{- '<|im_end|>\\n' -}}\n"
        "{%- endif -%}\n"
        "{%- endfor -%}\n"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}\n"
    )


CHATML = _chatml("")
# ChatML with the default system message that Qwen2.5 was tuned with; reasoning in earlier replies is kept.
QWEN = _chatml("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")

LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- set role = 'ipython' if message['role'] == 'tool' else message['role'] -%}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' -}}
{%- if tools and loop.first and role == 'system' -%}{{- 'Environment: ipython\\n' -}}{%- endif -%}
{%- if tools and role == 'user' and loop.index0 == (messages[0]['role'] == 'system') | int -%}
{{- 'Given the following functions, please respond with a JSON for a function call with its proper arguments that ' -}}
{{- 'best answers the given prompt.\\n\\nRespond in the format {"name": function name, "parameters": dictionary of ' -}}
{{- 'argument name and its value}. Do not use variables.\\n\\n' -}}
{%- for tool in tools -%}{{- tool | tojson(indent=4) + '\\n\\n' -}}{%- endfor -%}
{%- endif -%}
{{- message['content'] | trim -}}
{%- for call in message['tool_calls'] or [] -%}
{%- if message['content'] and loop.first -%}{{- '<|python_tag|>' -}}{%- elif not loop.first -%}{{- '; ' -}}{%- endif -%}
{{- '{"name": "' + call['function']['name'] + '", "parameters": ' + call['function']['arguments'] | tojson + '}' -}}
{%- endfor -%}
{{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""

# Mistral's format since Nemo. Its own templates move tools or the system message to the last user message.
MISTRAL = """\
{{- bos_token -}}
{%- set first = (messages[0]['role'] == 'system') | int -%}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{%- if tools and loop.index0 == first -%}
{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' -}}
{%- endif -%}
{{- '[INST]' -}}
{%- if first and loop.index0 == 1 -%}{{- messages[0]['content'] + '\\n\\n' -}}{%- endif -%}
{{- message['content'] + '[/INST]' -}}
{%- elif message['role'] == 'tool' -%}
{{- '[TOOL_RESULTS]{"content": ' + message['content'] | tojson + ', "call_id": "' -}}
{{- message['tool_call_id'] + '"}[/TOOL_RESULTS]' -}}
{%- elif message['role'] == 'assistant' -%}
{{- message['content'] -}}
{%- for call in message['tool_calls'] or [] -%}
{{- '[TOOL_CALLS][' if loop.first else ', ' -}}
{{- '{"name": "' + call['function']['name'] + '", "arguments": ' + call['function']['arguments'] | tojson -}}
{{- ', "id": "' + call['id'] + '"}' -}}
{%- if loop.last -%}{{- ']' -}}{%- endif -%}
{%- endfor -%}
{{- eos_token -}}
{%- endif -%}
{%- endfor -%}
"""

TEMPLATES: dict[str, str] = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "qwen": QWEN}


def template_advice() -> str:
    """Return what to do about a template that cannot be used, for an error."""
    return f"set model.chat_template to one of {', '.join(sorted(TEMPLATES))} or to the path of a Jinja file"


TOOL_USE = "tool_use"
"""Name of the template that some tokenizers have for conversations with tools."""


def resolve_template(chat_template: str | None) -> str | None:
    """Return the Jinja text of a built-in, a file or Jinja text. The tokenizer's own (None, `tool_use`) remain so."""
    if chat_template is None or chat_template == TOOL_USE:
        return chat_template
    if "{%" in chat_template or "{{" in chat_template:
        return chat_template
    if chat_template in TEMPLATES:
        return TEMPLATES[chat_template]
    try:
        return Path(chat_template).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"model.chat_template needs one of {', '.join(sorted(TEMPLATES))} or the path of a Jinja file, "
            f"got {chat_template!r}, which cannot be read ({error.strerror})"
        ) from None


_MARKUP = re.compile(r"\W+\w.*\W")


def control_tokens(tokenizer: Any, turns: str) -> re.Pattern[str]:
    """Return a pattern of the tokens that no message may contain: special tokens, and those that mark turns. The tags
    of thoughts may be in messages.

    `turns` is a conversation as the template writes it. DeepSeek-R1 marks turns by tokens that are not special.
    """

    def is_control(token: Any) -> bool:
        text = str(token)
        is_markup = text in turns and _MARKUP.fullmatch(text) is not None
        return text not in (OPEN, CLOSE) and (token.special or is_markup)

    texts = {str(token) for token in tokenizer.added_tokens_decoder.values() if is_control(token)}
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")
