"""A model from scratch: its tokens, its chat template, its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2 import Environment
from transformers import AutoTokenizer

from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.errors import ConfigError
from agentgym_rl.training.scratch import build_model, build_tokenizer, write_calls
from agentgym_rl.training.settings import ScratchSettings
from agentgym_rl.types import ToolCall

TEXTS = [
    "Your goal: go to the red ball. There is a red ball 1 right in front of you 3 steps away.",
    "Your goal: go to the grey key. There is a grey key 2 right in front of you 5 steps away.",
    "turn left",
    "move forward",
    "go to red ball 1",
    "pick up grey key 2",
] * 30


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(TEXTS)


def test_every_source_text_can_be_tokenized(tokenizer: Any) -> None:
    for text in set(TEXTS):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.unk_token_id not in ids
        plain = "".join(c for c in text if c.isalnum() or c == " ").split()
        assert tokenizer.decode(ids).split() == plain


def test_actions_come_back_word_for_word(tokenizer: Any) -> None:
    for action in ("turn left", "go to red ball 1", "pick up grey key 2"):
        assert tokenizer.decode(tokenizer.encode(action, add_special_tokens=False)) == action


def test_phrases_make_sequences_short(tokenizer: Any) -> None:
    words = sum(len(text.split()) for text in TEXTS)
    assert sum(len(tokenizer.encode(t, add_special_tokens=False)) for t in TEXTS) < 0.7 * words


def test_single_digits_stay_single(tokenizer: Any) -> None:
    five, two = (tokenizer.encode(d, add_special_tokens=False) for d in "52")
    assert len(five) == len(two) == 1
    assert tokenizer.encode("52", add_special_tokens=False) == five + two


def test_an_unknown_word_is_one_unknown_token(tokenizer: Any) -> None:
    assert tokenizer.encode("xylophone", add_special_tokens=False) == [tokenizer.unk_token_id]


def test_the_same_texts_in_any_order_give_the_same_tokenizer(tokenizer: Any) -> None:
    assert build_tokenizer(reversed(TEXTS)).get_vocab() == tokenizer.get_vocab()


def test_it_is_the_same_after_saving(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    before, after = Renderer(tokenizer), Renderer(loaded)
    for text in set(TEXTS):
        assert after.encode(text) == before.encode(text)
        assert after.decode(after.reply_ids(text)) == before.decode(before.reply_ids(text))
        assert after.follow_up(text) == before.follow_up(text)
    assert after.stop_token_ids == before.stop_token_ids


def test_its_chat_template_works_with_the_renderer(tokenizer: Any) -> None:
    renderer = Renderer(tokenizer)
    assert renderer.end_of_turn == tokenizer.eos_token_id
    assert renderer.decode(renderer.reply_ids("turn left")) == "turn left"


def test_tool_calls_of_a_message_do_not_compile_the_template_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Environment, "compile")
    assert write_calls([]) == ""
    written = "<tool_call> <function=get> <parameter=count> 2 </parameter> </function> </tool_call>"
    assert write_calls([ToolCall("get", {"count": 2})]) == written


def test_a_tokenizer_without_texts_is_refused() -> None:
    for texts in ([], ["", "..."]):
        with pytest.raises(ConfigError, match="needs texts"):
            build_tokenizer(texts)


def test_weights_come_from_the_seed_and_nothing_else(tokenizer: Any) -> None:
    settings = ScratchSettings(hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2)
    torch.manual_seed(5)
    expected_draw = torch.rand(())
    torch.manual_seed(5)
    first = build_model(settings, tokenizer, 1)
    assert torch.rand(()) == expected_draw  # the global state did not change
    again, other = build_model(settings, tokenizer, 1), build_model(settings, tokenizer, 2)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.model.embed_tokens.weight, other.model.embed_tokens.weight)


def test_the_model_has_the_shape_of_the_settings(tokenizer: Any) -> None:
    settings = ScratchSettings(hidden_size=24, intermediate_size=40, num_layers=3, num_heads=2, max_context=99)
    config = build_model(settings, tokenizer, 0).config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (24, 40, 3)
    assert (config.num_attention_heads, config.max_position_embeddings) == (2, 99)
    assert config.vocab_size == len(tokenizer)
