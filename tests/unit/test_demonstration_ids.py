"""Ids of stored episodes are kept only if they are those of the tokenizer that reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.run.demonstrations import to_sample
from agentgym_rl.training.scratch import build_tokenizer
from agentgym_rl.types import Message, StopReason, Task, Trajectory

OBSERVATION = "windy hill"


def exchanged(tokenizer: Any, folder: Path, first: str, second: str) -> Any:
    """Return the tokenizer with two words exchanged."""
    tokenizer.save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return AutoTokenizer.from_pretrained(folder)


def played(renderer: Renderer, *, stopped_by_text: bool = False) -> Trajectory:
    """Return an episode of two replies, the first of which a stop string may have ended."""
    opening = renderer.opening([Message("system", "play"), Message("user", "start")])
    replies = [[*renderer.encode("up"), renderer.end_of_turn], [*renderer.encode("down"), renderer.end_of_turn]]
    follow_up = renderer.follow_up(OBSERVATION)
    if stopped_by_text:
        replies[0].pop()
        follow_up = [renderer.end_of_turn, *follow_up]
    messages = [
        *opening,
        Message("assistant", "up", replies[0], [-0.5] * len(replies[0])),
        Message("user", OBSERVATION, follow_up),
        Message("assistant", "down", replies[1], [-0.5] * len(replies[1])),
        Message("user", "the end"),
    ]
    return Trajectory("train-1", Task("hills", 1), messages, [0.0, 1.0], [{}, {}], StopReason.DONE)


@pytest.mark.parametrize("stopped_by_text", [False, True])
def test_ids_of_the_same_tokenizer_are_kept(stopped_by_text: bool) -> None:
    renderer = Renderer(build_tokenizer(["play", "start up down", "windy hill"]))
    trajectory = played(renderer, stopped_by_text=stopped_by_text)
    assert to_sample(trajectory, renderer).token_ids == [
        token for message in trajectory.messages for token in message.token_ids
    ]


def test_a_tokenizer_that_differs_in_an_observation_renders_the_episode_again(tmp_path: Path) -> None:
    """Prompt and replies have the same ids under both."""
    tokenizer = build_tokenizer(["play", "start", "up", "down", "windy", "hill"])
    trajectory = played(Renderer(tokenizer))
    other = Renderer(exchanged(tokenizer, tmp_path, "windy", "hill"))
    stored = [token for message in trajectory.messages for token in message.token_ids]
    sample = to_sample(trajectory, other)
    assert sample.token_ids[: len(stored)] != stored
    words = [other.tokenizer.convert_ids_to_tokens(token) for token in sample.token_ids]
    assert words.index("windy") < words.index("hill")
