"""Frames around observations: the same text as rendering, for templates that look into observations too."""

from __future__ import annotations

import copy
import random

import pytest
from tokenizers_for_tests import byte_level_bpe

from agentgym_rl.agent.renderer import Renderer

CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}CONTENT{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
CONTENT = {
    "trims": "{{ m.content | trim }}",
    "searches": "{% if m.role == 'user' and '/quiet' in m.content %}Hush. {% endif %}{{ m.content }}",
    "starts": "{% if m.content.startswith('Note') %}* {% endif %}{{ m.content }}",
    "capitals": "{{ m.content if m.role != 'user' else m.content | upper }}",
    "cuts": "{{ m.content[:5000] }}",
    "tabs": r"{{ m.content if m.role != 'user' else m.content.replace('\t', '    ') }}",
    "spaces": "{{ m.content if m.role != 'user' else m.content.replace('  ', ' ') }}",
    "joins": "{% if m.role == 'user' and '/no_' ~ 'think' in m.content %}* {% endif %}{{ m.content }}",
    "counts": "{% if m.role == 'user' and m.content.split('\\n') | length > 9 %}* {% endif %}{{ m.content }}",
    "twice": "{{ m.content }}{% if m.role == 'user' %} ({{ m.content }}){% endif %}",
}
"""Templates that look into observations."""
STYLES = ["chatml", "llama3", "qwen"]
FRAMED = {*STYLES, "trims", "cuts"}
WORDS = [
    "Note",
    "a",
    "/quiet",
    "/no_think",
    "\t",
    "  ",
    "a\n" * 9,
    "x" * 6000,
    "Door",
    "user",
    "assistant",
    "system",
    "7",
    "é",
    "\n",
    " ",
    "<",
    "|",
    "<|im_end|>",
    "{",
]


def renderer_of(name: str) -> Renderer:
    if name in STYLES:
        return Renderer(byte_level_bpe(name), name)
    return Renderer(byte_level_bpe("chatml"), CHATML.replace("CONTENT", CONTENT[name]))


@pytest.mark.parametrize("name", [*STYLES, *CONTENT])
def test_the_text_around_an_observation_is_that_of_rendering(name: str) -> None:
    renderer, choose = renderer_of(name), random.Random(0)
    for generation_prompt in (True, False):
        for _ in range(60):
            observation = "".join(choose.choices(WORDS, k=choose.randrange(8)))
            rendered = renderer._render_follow_up(observation, generation_prompt)
            assert renderer._follow_up_text(observation, generation_prompt) == rendered
        assert (renderer._frames.find(generation_prompt, "A door.") is not None) == (name in FRAMED)  # type: ignore[union-attr]


def test_a_template_may_search_an_observation_for_one_of_its_arguments() -> None:
    searches = "{% if m.role == 'user' and m.content == word %}* {% endif %}{{ m.content }}"
    renderer = Renderer(byte_level_bpe("chatml"), CHATML.replace("CONTENT", searches), word="halt")
    assert renderer._follow_up_text("halt") == renderer._render_follow_up("halt", True)


def test_a_template_that_drops_the_history_at_a_word_has_no_frame() -> None:
    template = "{% if '/new' in messages[-1].content %}{% set messages = messages[-1:] %}{% endif %}" + CHATML
    renderer = Renderer(byte_level_bpe("chatml"), template.replace("CONTENT", "{{ m.content }}"))
    assert renderer._follow_up_text("a door") == renderer._render_follow_up("a door", True)


def test_a_control_token_of_one_character_is_split_before_the_template_trims() -> None:
    tokenizer = copy.deepcopy(byte_level_bpe("chatml"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["~"]})
    renderer = Renderer(tokenizer, CHATML.replace("CONTENT", CONTENT["trims"]))
    for observation in ("a~", "~a", "a ~ b"):
        assert renderer._follow_up_text(observation) == renderer._render_follow_up(observation, True)


@pytest.mark.parametrize("observation", ["", " a", "a\n", "a <b>", "[1] a", "{a}", "a|b", "x" * 9000])
def test_an_observation_that_is_not_plain_is_rendered(observation: str) -> None:
    assert renderer_of("chatml")._frames.find(True, observation) is None  # type: ignore[union-attr]
