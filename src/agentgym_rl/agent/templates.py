"""Chat templates that never rewrite earlier turns, for models whose own template does or is missing."""

from __future__ import annotations

from pathlib import Path

from agentgym_rl.errors import ConfigError

CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""

# ChatML with the default system message that Qwen2.5 was tuned with; reasoning in earlier replies is kept.
QWEN = (
    """\
{%- if messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
"""
    + CHATML
)

TEMPLATES: dict[str, str] = {"chatml": CHATML, "llama3": LLAMA3, "qwen": QWEN}


def resolve_template(chat_template: str | None) -> str | None:
    """Return the Jinja text of a built-in, a file or Jinja text. None (the tokenizer's own) remains None."""
    if chat_template is None or "{%" in chat_template or "{{" in chat_template:
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
