"""Action formats: the action of a reply, and replies without an action."""

import pytest

from agentgym_rl.environment.formats import FORMATS, NO_ACTION, action_format
from agentgym_rl.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "reply", "action"),
    [
        ("plain", "  get 1 oak log\n", "get 1 oak log"),
        ("react", "Thought: I need wood.\nAction: get 1 oak log", "get 1 oak log"),
        ("react", "Thought: I need wood. Action: get 1 oak log", "get 1 oak log"),
        ("react", "Thought:\nwood\n\nAction:\nget 1 oak log\n", "get 1 oak log"),
        ("react", "Action: get 1 oak log", "get 1 oak log"),
        ("react", "**Thought:** hm\n**Action:** inventory", "inventory"),
        ("react", "**Action**: inventory\n**Observation**: You have a diamond.", "inventory"),
        ("react", "**Action: inventory**", "inventory"),
        ("react", "**Action:** say **now**", "say **now**"),
        ("react", "Action: get 1 oak log\nThought: no, rather\nAction: inventory", "inventory"),
        ("react", "Action: inventory\nObservation: You have a diamond.\nThought: done", "inventory"),
        ("react", "Action: first line\nsecond line", "first line\nsecond line"),
        ("react", "get 1 oak log", NO_ACTION),
        ("react", "Thought: I do nothing. Action:", NO_ACTION),
        ("react", "Thought: the Reaction: of oxygen", NO_ACTION),
        ("react", "", NO_ACTION),
        ("function_call", '{"name": "get", "arguments": {"item": "1 oak log"}}', "get 1 oak log"),
        ("function_call", '<tool_call>\n{"name": "inventory", "arguments": {}}\n</tool_call>', "inventory"),
        ("function_call", 'I go.\n```json\n{"name": "turn_left"}\n```', "turn left"),
        ("function_call", '{"name": "craft", "arguments": {"n": 2, "using": ["1 a", "2 b"]}}', "craft 2 1 a, 2 b"),
        ("function_call", '{"type": "function", "function": {"name": "go", "arguments": "{\\"to\\": 3}"}}', "go 3"),
        ("function_call", '{"name": "a", "arguments": {}} {"name": "b", "arguments": {}}', "b"),
        ("function_call", 'Let {x} be. {"name": "go", "arguments": {"to": "the {door}"}}', "go the {door}"),
        ("function_call", '{"name": "a", "arguments": {}} and {broken', "a"),
        ("function_call", '{"name": "get", "arguments": {"item": {"nested": 1}}}', NO_ACTION),
        ("function_call", '{"name": 3, "arguments": {}}', NO_ACTION),
        ("function_call", '{"name": "", "arguments": {}}', NO_ACTION),
        ("function_call", '{"name": "get", "arguments": "not json"}', NO_ACTION),
        ("function_call", "get 1 oak log", NO_ACTION),
        ("function_call", "__import__('os').system('false')", NO_ACTION),
        ("function_call", "{" * 100_000, NO_ACTION),
        ("function_call", '{"a":' * 100_000, NO_ACTION),
        ("code", "I craft.\n```\ncraft 1 stick using 2 planks\n```", "craft 1 stick using 2 planks"),
        ("code", "```python\nfirst\n```\nno:\n```python\nsecond()\nthird()\n```\n", "second()\nthird()"),
        ("code", "```\nunfinished", NO_ACTION),
        ("code", "```\n```", NO_ACTION),
        ("code", "craft 1 stick", NO_ACTION),
    ],
)
def test_the_action_of_a_reply_is_parsed(name, reply, action):
    assert FORMATS[name].parse(reply) == action


def test_every_format_but_plain_parses_the_example_in_its_explanation():
    assert FORMATS["plain"].explain == ""
    assert FORMATS["react"].parse(FORMATS["react"].explain) == "the action"
    assert FORMATS["code"].parse(FORMATS["code"].explain) == "the action"
    example = FORMATS["function_call"].explain.splitlines()[1]
    assert FORMATS["function_call"].parse(example) == "look at lamp"


def test_an_unknown_format_is_a_config_error():
    with pytest.raises(
        ConfigError, match=r"unknown action format 'xml': known are plain, tool, react, function_call, code"
    ):
        action_format("xml")
