"""DAgger: the oracle's advice beside each reply, and the samples that imitate it."""

from __future__ import annotations

from functools import partial

import pytest
from scripted_engine_for_tests import ScriptedEngine
from test_rollout import Corridor
from tokenizers_for_tests import byte_level_bpe, thinking_tokenizer

from agentgym_rl.agent.advised import AdvisedPolicy
from agentgym_rl.agent.policy import EnginePolicy
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.rollout import rollout
from agentgym_rl.common.thoughts import without_thought
from agentgym_rl.environment.formats import parse_react
from agentgym_rl.run.mistakes import CORRECTION, corrected
from agentgym_rl.run.rounds import correct_thought
from agentgym_rl.training.dagger import agreement, labelled
from agentgym_rl.training.offline_settings import DaggerSettings
from agentgym_rl.types import Limits, Message, Sample, Sampling, StopReason, Task, Trajectory

LIMITS = Limits(max_turns=4, max_new_tokens=64, max_context=512)


def reply_ids(text: str) -> list[int]:
    return [ord(letter) for letter in text] + [0]


def test_agreeing_replies_share_a_sample_and_other_states_get_their_own() -> None:
    messages = [
        Message("user", "a", [1, 2]),
        Message("assistant", "Thought: mine\nAction: go", [3, 4], [-1.0, -1.0], advice="Action: go"),
        Message("user", "b", [5]),
        Message("assistant", "Action: stay", [6, 7], [-1.0, -1.0], advice="Action: x"),
        Message("user", "c", [8]),
        Message("assistant", "Action: go", [9], advice="Action: go"),
    ]
    trajectory = Trajectory("t", Task("corridor", 0), messages)
    agreed, correction = labelled(trajectory, reply_ids, parse_react)
    assert agreed.token_ids == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert agreed.loss_mask == [False, False, True, True, False, False, False, False, True]
    assert agreed.left_out == [(5, 2)]
    assert correction.token_ids == [1, 2, 3, 4, 5, *reply_ids("Action: x")]
    assert correction.loss_mask == [False] * 5 + [True] * len(reply_ids("Action: x"))
    assert correction.left_out == [(0, 5)]
    assert agreement(messages, parse_react) == 0.5  # the last reply is the oracle's own


def test_untrained_thoughts_are_skipped_in_labels_and_in_agreeing_replies() -> None:
    renderer = Renderer(thinking_tokenizer("qwen3"))
    thoughts = [f"<think>\n{text}\n</think>\n\n" for text in ("mine", "wrong", "the oracle's")]
    sampled, other, advised = (
        renderer.reply_ids(thought + action) for thought, action in zip(thoughts, ("up", "down", "up"), strict=True)
    )
    advice = f"{thoughts[2]}up"
    messages = [
        Message("user", "a", [1, 2]),
        Message("assistant", f"{thoughts[0]}up", sampled, [-1.0] * len(sampled), advice=advice),
        Message("user", "b", [5]),
        Message("assistant", f"{thoughts[1]}down", other, [-1.0] * len(other), advice=advice),
        Message("user", "c", [8]),
        Message("assistant", advice, advised, advice=advice),
    ]
    trajectory = Trajectory("t", Task("corridor", 0), messages)
    parse = without_thought
    trained = labelled(trajectory, renderer.reply_ids, parse, num_untrained=renderer.thought_length)
    action = renderer.tokenizer.decode(sampled[renderer.thought_length(sampled) :])
    assert action.strip().startswith("up")
    assert [loss_text(sample, renderer) for sample in trained] == [2 * action, action]
    assert (2, renderer.thought_length(sampled)) in trained[0].left_out
    with_thoughts = [loss_text(sample, renderer) for sample in labelled(trajectory, renderer.reply_ids, parse)]
    assert [text.count("</think>") for text in with_thoughts] == [2, 1]


def loss_text(sample: Sample, renderer: Renderer) -> str:
    ids = [token for token, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on]
    return renderer.tokenizer.decode(ids)


def test_two_replies_without_an_action_do_not_agree() -> None:
    messages = [
        Message("user", "a", [1]),
        Message("assistant", "1 blaze rod", [2, 3], [-1.0, -1.0], advice="I went the wrong way."),
    ]
    (correction,) = labelled(Trajectory("t", Task("corridor", 0), messages), reply_ids, lambda reply: "")
    assert correction.token_ids == [1, *reply_ids("I went the wrong way.")]
    assert agreement(messages, lambda reply: "") == 0.0
    acted = Message("assistant", "go", [2], [-1.0], advice="go")
    assert agreement([*messages, acted], lambda reply: "go" if reply == "go" else "") == 1.0


def test_an_episode_without_advice_gives_no_samples() -> None:
    messages = [Message("user", "a", [1]), Message("assistant", "go", [2], [-1.0])]
    assert labelled(Trajectory("t", Task("corridor", 0), messages), reply_ids, str) == []


@pytest.mark.parametrize("oracle_share", [0.0, 1.0])
async def test_the_oracle_advises_every_turn_and_plays_its_share(oracle_share: float) -> None:
    renderer = Renderer(byte_level_bpe("chatml"), "chatml")
    engine = ScriptedEngine(["stay"] * 4, encode=renderer.reply_ids)
    corridor = Corridor()
    policy = AdvisedPolicy(EnginePolicy(engine, renderer, Sampling(64)), corridor, renderer, oracle_share, seed=0)
    trajectory = await rollout(Task("corridor", 0), corridor, policy, LIMITS, id="t")
    replies = [m for m in trajectory.messages if m.role == "assistant"]
    advice = await Corridor().oracle()
    assert [m.advice for m in replies] == [advice] * len(replies)
    if oracle_share:
        assert trajectory.success
        assert all(m.logprobs is None and m.token_ids == renderer.reply_ids(advice) for m in replies)
    else:
        assert trajectory.stop is StopReason.MAX_TURNS
        assert [m.content for m in replies] == ["stay"] * 4
    ids = [token for message in trajectory.messages for token in message.token_ids]
    rendered = renderer.prompt(trajectory.messages[:1])
    assert ids[: len(rendered)] == rendered
    again = Trajectory.from_json(trajectory.to_json())
    assert [m.advice for m in again.messages] == [m.advice for m in trajectory.messages]


async def test_an_oracle_reply_that_does_not_fit_ends_the_episode() -> None:
    renderer = Renderer(byte_level_bpe("chatml"), "chatml")
    corridor = Corridor()
    inner = EnginePolicy(ScriptedEngine([], encode=renderer.reply_ids), renderer, Sampling(64))
    policy = AdvisedPolicy(inner, corridor, renderer, 1.0, seed=0)
    start = await corridor.reset(0)
    observation = start.observation if hasattr(start, "observation") else start
    opening = renderer.prompt([Message("user", str(observation))])
    limits = Limits(max_turns=4, max_new_tokens=64, max_context=len(opening) + 1)
    trajectory = await rollout(Task("corridor", 0), corridor, policy, limits, id="t")
    assert trajectory.stop is StopReason.MAX_CONTEXT
    assert trajectory.num_turns == 0


def test_the_share_of_the_oracle_decays_by_round() -> None:
    settings = DaggerSettings(oracle_share=0.5, oracle_decay=0.5)
    assert [settings.share(n) for n in (1, 2, 3)] == [0.5, 0.25, 0.125]
    assert DaggerSettings(oracle_decay=0.0).share(1) == 0.5
    with pytest.raises(ValueError, match="oracle_share must lie in"):
        DaggerSettings(oracle_share=1.5)


def test_a_correction_starts_with_the_thought_that_led_to_another_action() -> None:
    renderer = Renderer(byte_level_bpe("chatml"), "chatml")
    own, advice = "Thought: I need planks.\nAction: craft door", "Thought: Planks are missing.\nAction: craft planks"
    messages = [
        Message("user", "a", [1, 2]),
        Message("assistant", own, renderer.reply_ids(own), [-1.0] * len(renderer.reply_ids(own)), advice=advice),
    ]
    trajectory = Trajectory("t", Task("corridor", 0), messages)
    plain, doubted = labelled(trajectory, renderer.reply_ids, parse_react, partial(correct_thought, renderer))
    assert renderer.decode(plain.token_ids[2:]) == advice
    assert renderer.decode(doubted.token_ids[2:]) == (
        f"Thought: I need planks. {CORRECTION} Planks are missing.\nAction: craft planks"
    )
    trained = [token for token, on in zip(doubted.token_ids, doubted.loss_mask, strict=True) if on]
    assert renderer.decode(trained) == f" {CORRECTION} Planks are missing.\nAction: craft planks"
    assert doubted.left_out == [(0, len(doubted.token_ids) - len(trained))]
    assert parse_react(renderer.decode(doubted.token_ids[2:])) == "craft planks"
    assert corrected("Action: x", advice) is None
    for written in ("Thought : I need planks . Action : craft door", "\nI need planks.\nAction: craft door"):
        text = corrected(written, advice)
        assert text is not None
        assert text[0].startswith("Thought: I need planks")
        assert text[0].endswith(f" {CORRECTION} Planks are missing.\nAction: craft planks")
    assert corrected(advice, advice) is None
