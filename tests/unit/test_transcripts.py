"""The text that a reward model scores ends with the last observation, for episodes of any policy."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from tokenizers_for_tests import byte_level_bpe, split_segmentation

from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.run.demonstrations import to_sample, to_transcript
from agentgym_rl.types import Message, StopReason, Task, ToolCall, Trajectory

STYLES = ["chatml", "llama3", "mistral", "qwen"]
WON, LOST = "You have the treasure.", "Behind the red door is a trap."
TOOL = {
    "type": "function",
    "function": {"name": "count", "description": "Count.", "parameters": {"type": "object", "properties": {}}},
}


@cache
def renderer_of(style: str, thoughts: str = "template") -> Renderer:
    return Renderer(byte_level_bpe(style), style, thoughts=thoughts)  # type: ignore[arg-type]


def played(renderer: Renderer, last: str | None, stop: StopReason, *, odd: bool = False) -> Trajectory:
    """Return a sampled episode of two replies. The last observation has ids if the episode was truncated.

    With `odd` the replies have other ids than their texts would get.
    """

    def reply(text: str, *, ends: bool = True) -> Message:
        ids = split_segmentation(renderer.tokenizer, text) if odd else renderer.encode(text)
        ids = [*ids, renderer.end_of_turn] if ends else ids
        return Message("assistant", text, ids, [-0.5] * len(ids))

    messages = [
        *renderer.opening([Message("system", "Play."), Message("user", "Two doors.")]),
        reply("take red key"),
        Message("user", "You carry a key.", renderer.follow_up("You carry a key.")),
        reply("open red door", ends=last is not None),
    ]
    if last is not None:
        messages.append(Message("user", last, [] if stop is StopReason.DONE else renderer.follow_up(last)))
    return Trajectory("train-1", Task("doors", 1), messages, [0.0, 0.0], [{}, {}], stop)


def written(trajectory: Trajectory) -> Trajectory:
    """Return the episode as an API or a person would have played it."""
    return replace(trajectory, messages=[Message(m.role, m.content) for m in trajectory.messages])


def text_of(renderer: Renderer, trajectory: Trajectory) -> str:
    ids = to_transcript(trajectory, renderer).token_ids
    return str(renderer.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("style", STYLES)
def test_it_ends_with_the_last_observation_however_the_episode_ended(style: str) -> None:
    renderer = renderer_of(style)
    done, truncated = (played(renderer, LOST, stop) for stop in (StopReason.DONE, StopReason.MAX_TURNS))
    text = text_of(renderer, done)
    assert text_of(renderer, truncated) == text
    assert text == renderer._render(done.messages, generation_prompt=False)
    won = text_of(renderer, played(renderer, WON, StopReason.DONE))
    assert won == text.replace(LOST, WON) != text
    assert to_sample(truncated, renderer).token_ids == truncated.token_ids  # imitation and DPO keep sampled ids


@pytest.mark.parametrize("style", STYLES)
def test_sampled_and_written_episodes_have_the_same_ids(style: str) -> None:
    renderer = renderer_of(style)
    for stop in (StopReason.DONE, StopReason.MAX_TURNS):
        episode, odd = (played(renderer, LOST, stop, odd=odd) for odd in (False, True))
        assert odd.token_ids != episode.token_ids
        ids = to_transcript(episode, renderer).token_ids
        assert to_transcript(odd, renderer).token_ids == ids
        assert to_transcript(written(odd), renderer).token_ids == ids


def test_a_reply_without_an_answer_is_the_end() -> None:
    renderer = renderer_of("chatml")
    cut = played(renderer, None, StopReason.LENGTH)
    assert text_of(renderer, cut).endswith("open red door<|im_end|>")
    assert to_transcript(written(cut), renderer).token_ids == to_transcript(cut, renderer).token_ids


def test_summaries_and_dropped_thoughts_leave_one_whole_text() -> None:
    """An episode of several segments is scored whole, too."""
    renderer = renderer_of("chatml", "drop")
    assert not renderer.linear
    episode = played(renderer, LOST, StopReason.DONE)
    episode.messages[2] = Message("assistant", "<think>\nred\n</think>\n\ntake red key")
    episode.messages.insert(4, Message("user", "Summarise.", purpose="summary"))
    text = text_of(renderer, episode)
    assert text == text_of(renderer, played(renderer_of("chatml"), LOST, StopReason.DONE))
    assert text.endswith(f"{LOST}<|im_end|>\n")


@pytest.mark.parametrize("style", STYLES)
def test_results_of_tools_are_the_last_observation(style: str) -> None:
    renderer = Renderer(byte_level_bpe(style), style)

    def episode(result: str) -> Trajectory:
        messages = [
            Message("system", "Play."),
            Message("user", "Count."),
            Message("assistant", "", tool_calls=[ToolCall("count", {}, "call00000")]),
            Message("tool", result, tool_call_id="call00000"),
        ]
        return Trajectory("t", Task("counter", 1), messages, [0.0], [{}], StopReason.DONE, tools=[TOOL])

    text = text_of(renderer, episode(LOST))
    assert text.count(LOST) == 1
    assert text_of(renderer, episode(WON)) == text.replace(LOST, WON)
    assert text == renderer._render(episode(LOST).messages, generation_prompt=False, tools=[TOOL])
