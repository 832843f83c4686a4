"""Episodes that branch: every sampled token is trained once, after exactly the tokens it was sampled after."""

from __future__ import annotations

import copy
import io
import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from envs_for_tests import Counting
from exactness_for_tests import require_exact
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine_for_tests import ScriptedEngine
from tokenizers_for_tests import byte_level_bpe, thinking_tokenizer
from training_for_tests import few

from agentgym_rl.agent.context_management import ASK, FULL, LEFT_OUT, SUMMARISED, Context, summary_request, view
from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.agent.policy import EnginePolicy
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.rollout import rollout
from agentgym_rl.agent.segments import Call, Stitcher, assign_segment, match_segment, segment_tokens, stitch
from agentgym_rl.agent.styles import STYLES
from agentgym_rl.agent.templates import LLAMA3
from agentgym_rl.common.thoughts import without_thought
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.environment.tools import Tool
from agentgym_rl.run.console import Console
from agentgym_rl.run.demonstrations import (
    _untrained_spans,
    fitting_pairs,
    repeated_tokens,
    segment_samples,
    to_sample,
)
from agentgym_rl.training.batch import to_samples
from agentgym_rl.training.conversations import Conversation
from agentgym_rl.training.dagger import labelled
from agentgym_rl.training.microbatch import micro_batches
from agentgym_rl.training.model import action_logprobs
from agentgym_rl.training.scratch import build_model
from agentgym_rl.training.settings import OptimizerSettings, ScratchSettings, SFTSettings
from agentgym_rl.training.sft import SFT
from agentgym_rl.types import Completion, Limits, Message, Sample, Sampling, StopReason, Task, ToolCall, Trajectory

TASK = Task("counting", 3)
torch.set_num_threads(1)


class Recorder:
    """An engine that records every call."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.calls: list[tuple[list[int], Completion]] = []

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        completion = await self._engine.generate(prompt_ids, sampling, session)
        self.calls.append((list(prompt_ids), completion))
        return completion

    async def release(self, session: str) -> None:
        await self._engine.release(session)


class Staying(Counting):
    """Counts for ever, so that an episode has as many turns as it may."""

    def step(self, text: str) -> Any:
        return replace(super().step(text), done=False)


def thoughtful(messages: list[Message]) -> list[Message]:
    return [
        replace(m, content=f"<think>\nI say {m.content}.\n</think>\n\n{m.content}") if m.role == "assistant" else m
        for m in messages
    ]


def conversations(count: int) -> list[list[Message]]:
    rng, played = random.Random(0), []
    for _ in range(count):
        env = Counting()
        messages = [Message("user", env.reset(rng.randrange(100)))]
        for _ in range(3):
            action = rng.choice(env.actions())
            messages += [Message("assistant", action), Message("user", env.step(action).observation)]
        env.close()
        played.append(messages)
    return played


@cache
def _player(template: str) -> Any:
    renderer = renderer_of(template)
    model = build_model(
        ScratchSettings(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2), renderer.tokenizer, 0
    )
    played = conversations(12)
    if template != "chatml":
        played = [thoughtful(messages) for messages in played]
    samples = [sample for messages in played for sample in renderer.demonstrations(messages)]
    settings = SFTSettings(epochs=10, batch_size=4, optimizer=OptimizerSettings(lr=1e-2))
    trainer = SFT(model, samples, settings, 0)
    while trainer.updates < trainer.total:
        trainer.step()
    return model.eval()


def renderer_of(template: str, **options: Any) -> Renderer:
    if template == "chatml":
        return Renderer(byte_level_bpe("chatml"), "chatml", **options)
    return Renderer(thinking_tokenizer(template), **options)


CASES = [
    pytest.param("qwen3", {}, Context(), {}, 2000, id="qwen3"),
    pytest.param("r1", {}, Context(), {}, 2000, id="r1"),
    pytest.param("qwen3", {"thoughts": "drop"}, Context(), {"train_thoughts": False}, 2000, id="untrained thoughts"),
    pytest.param("chatml", {}, Context("window", 2), {}, 220, id="window"),
    pytest.param("qwen3", {}, Context("window", 2), {}, 260, id="qwen3 window"),
    pytest.param("chatml", {}, Context("summary", 1, 24), {}, 420, id="summary"),
    pytest.param("r1", {}, Context("summary", 0, 24), {}, 420, id="r1 summary"),
]


@pytest.mark.parametrize(("template", "options", "context", "policy", "max_context"), CASES)
async def test_trained_ids_are_sampled_ids_and_engine_and_learner_agree(
    template: str, options: dict[str, Any], context: Context, policy: dict[str, Any], max_context: int
) -> None:
    model, renderer = copy.deepcopy(_player(template)), renderer_of(template, **options)
    engine = NativeEngine(model, decode=renderer.decode, max_sessions=4, max_context=max_context)
    pool = LocalPool({"counting": Staying})
    trajectories = []
    for item in range(3):
        recorder, session = Recorder(engine), await pool.open("counting")
        player = EnginePolicy(
            recorder,
            renderer,
            Sampling(max_new_tokens=40, seed=item),
            instruction=session.instruction,
            context=context,
            **policy,
        )
        limits = Limits(max_turns=12, max_new_tokens=40, max_context=max_context)
        trajectory = await rollout(Task("counting", item), session, player, limits, id=str(item))
        await session.close()
        assert trajectory.stop is not StopReason.ERROR, trajectory.error
        require_exact(trajectory, recorder.calls)
        assert all(len(segment.token_ids) <= max_context for segment in trajectory.segments)
        assert Trajectory.from_json(trajectory.to_json()).messages == trajectory.messages
        trajectories.append(trajectory)
    assert max(t.num_turns for t in trajectories) > 4
    assert max(t.num_segments for t in trajectories) > 1
    if context.kind == "summary":
        asked = [m for t in trajectories for m in t.messages if m.purpose]
        assert asked
        assert all((m.content == ASK) == (m.role == "user") for m in asked)
        assert all(m.logprobs is not None for m in asked if m.role == "assistant")
    samples = [sample for t in trajectories for sample in to_samples(t)]
    for micro in micro_batches(samples, [1.0] * len(samples), 4000):
        learner_A, _ = action_logprobs(model, micro, 1.0)
        assert (learner_A - micro.logprobs_A).abs().max() < 1e-4
    await engine.close()


async def scripted(
    template: str,
    replies: list[str],
    limits: Limits,
    options: dict[str, Any] | None = None,
    env: type[Counting] = Staying,
    **policy: Any,
) -> tuple[Trajectory, Recorder, Renderer]:
    renderer = renderer_of(template, **(options or {}))
    recorder = Recorder(ScriptedEngine(replies, encode=renderer.reply_ids))
    session = await LocalPool({"counting": env}).open("counting")
    player = EnginePolicy(recorder, renderer, Sampling(1), instruction=session.instruction, **policy)
    trajectory = await rollout(TASK, session, player, limits, id="t")
    await session.close()
    assert trajectory.stop is not StopReason.ERROR, trajectory.error
    require_exact(trajectory, recorder.calls)
    return trajectory, recorder, renderer


THOUGHT = "<think>\nUp is right.\n</think>\n\nup"
LIMITS = Limits(max_turns=4, max_new_tokens=60, max_context=4000)


@pytest.mark.parametrize("template", ["qwen3", "r1"])
async def test_a_shipped_thinking_template_renders_every_prompt(template: str) -> None:
    trajectory, recorder, renderer = await scripted(template, [THOUGHT] * 4, LIMITS)
    assert trajectory.num_segments == 5  # one per reply and one for the observation after the last
    assert [info["valid"] for info in trajectory.infos] == [True] * 4  # the environment gets the action alone
    for k, (prompt_ids, _) in enumerate(recorder.calls):
        messages = [{"role": m.role, "content": m.content} for m in trajectory.messages[: 2 + 2 * k]]
        whole = renderer.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert prompt_ids == whole
        assert "Up is right" not in renderer.tokenizer.decode(prompt_ids)


@pytest.mark.parametrize("template", ["qwen3", "r1"])
async def test_thoughts_can_be_kept_so_that_an_episode_stays_linear(template: str) -> None:
    trajectory, recorder, renderer = await scripted(template, [THOUGHT] * 4, LIMITS, {"thoughts": "keep"})
    assert trajectory.num_segments == 1
    assert renderer.tokenizer.decode(recorder.calls[-1][0]).count("Up is right") == 3


async def test_thoughts_can_be_dropped_from_a_template_that_keeps_them() -> None:
    linear, _, _ = await scripted("chatml", [THOUGHT] * 4, LIMITS)
    assert linear.num_segments == 1
    trajectory, recorder, renderer = await scripted("chatml", [THOUGHT] * 4, LIMITS, {"thoughts": "drop"})
    assert trajectory.num_segments == 5
    assert "Up is right" not in renderer.tokenizer.decode(recorder.calls[-1][0])


async def test_replies_without_thoughts_extend_the_segment_of_a_thinking_template() -> None:
    ids = renderer_of("qwen3").encode("up<|im_end|>")
    trajectory, _, _ = await scripted("qwen3", [ids] * 4, LIMITS)  # type: ignore[list-item]
    assert trajectory.num_segments == 1


async def test_untrained_thoughts_have_no_loss() -> None:
    trajectory, _, renderer = await scripted("qwen3", [THOUGHT] * 4, LIMITS, train_thoughts=False)
    trained = [
        token
        for segment in trajectory.segments
        for token, kept in zip(segment.token_ids, segment.loss_mask, strict=True)
        if kept
    ]
    assert renderer.tokenizer.decode(trained) == "\n\nup<|im_end|>" * 4
    assert renderer.thought_length(renderer.encode("up")) == 0
    assert renderer.thought_length(renderer.encode("<think>\nnever closed")) == len(
        renderer.encode("<think>\nnever closed")
    )
    ids = renderer.encode("<think>\nup\n</think>\nor down\n</think>\n\nup again and again<|im_end|>")
    thought = renderer.tokenizer.decode(ids[: renderer.thought_length(ids)])
    assert thought == "<think>\nup\n</think>\nor down\n</think>", "up to the last end of a thought"
    opened = renderer_of("r1").encode("still thinking")
    assert renderer_of("r1").thought_length(opened) == len(opened)


@pytest.mark.parametrize("template", ["qwen3", "r1"])
async def test_demonstrations_have_the_ids_of_play(template: str) -> None:
    trajectory, _, renderer = await scripted(template, [THOUGHT] * 4, LIMITS)
    played = [(s.token_ids, s.loss_mask) for s in to_samples(trajectory)]
    shown = [Message(m.role, m.content) for m in trajectory.messages]
    assert [(s.token_ids, s.loss_mask) for s in renderer.demonstrations(shown)] == played


@pytest.mark.parametrize("template", ["qwen3", "r1"])
async def test_imitation_skips_thoughts_as_play_does(template: str) -> None:
    untrained, _, renderer = await scripted(template, [THOUGHT] * 4, LIMITS, train_thoughts=False)
    wanted = [(s.token_ids, s.loss_mask) for s in to_samples(untrained)]
    trained, _, _ = await scripted(template, [THOUGHT] * 4, LIMITS)
    shown = Conversation("counting_3", [Message(m.role, m.content) for m in trained.messages], trained.imitated)
    written = replace(trained, messages=[replace(m, token_ids=[], logprobs=None) for m in trained.messages])
    for demonstration in (trained, shown, written):
        found = segment_samples(demonstration, renderer, train_thoughts=False)
        assert [(s.token_ids, s.loss_mask) for s in found] == wanted
        assert [(s.token_ids, s.loss_mask) for s in segment_samples(demonstration, renderer)] != wanted


@pytest.mark.parametrize("thoughts", ["template", "keep"])
async def test_a_loss_on_everything_skips_sampled_thoughts_too(thoughts: str) -> None:
    trajectory, _, renderer = await scripted("qwen3", [THOUGHT] * 4, LIMITS, {"thoughts": thoughts})
    model = build_model(ScratchSettings(hidden_size=16, num_layers=1, num_heads=2), renderer.tokenizer, 0)
    for train_thoughts in (True, False):
        samples = segment_samples(trajectory, renderer, train_thoughts=train_thoughts)
        trainer = SFT(model, samples, SFTSettings(loss_on="everything"), 0)
        trained = [t for s in trainer._samples for t, on in zip(s.token_ids, s.loss_mask, strict=True) if on]
        text = renderer.tokenizer.decode(trained)
        assert "You are at" in text
        assert text.count("Up is right") == (4 if train_thoughts else 0)


MISTAKE = "<think>\nIt seems best.\n</think>\n\ndown"


def texts_with_loss_on_everything(samples: list[Sample], renderer: Renderer) -> list[str]:
    model = build_model(ScratchSettings(hidden_size=16, num_layers=1, num_heads=2), renderer.tokenizer, 0)
    trained = SFT(model, samples, SFTSettings(loss_on="everything"), 0)._samples
    rows = [[token for token, on in zip(s.token_ids, s.loss_mask, strict=True) if on] for s in trained]
    return [renderer.tokenizer.decode(ids) for ids in rows]


@pytest.mark.parametrize("options", [{}, {"thoughts": "drop"}], ids=["template", "drop"])
@pytest.mark.parametrize("template", ["qwen3", "r1"])
@pytest.mark.parametrize("sampled", [True, False])
async def test_a_reply_that_is_not_imitated_has_no_loss_in_any_segment(
    template: str, options: dict[str, Any], sampled: bool
) -> None:
    replies = [THOUGHT, MISTAKE, THOUGHT, MISTAKE, THOUGHT]
    trajectory, _, renderer = await scripted(template, replies, replace(LIMITS, max_turns=5), options)
    for turn in (1, 3):
        trajectory.infos[turn]["mistake"] = True
    assert trajectory.num_segments > 2
    if not sampled:
        trajectory.messages = [replace(m, token_ids=[], logprobs=None) for m in trajectory.messages]
    samples = segment_samples(trajectory, renderer)
    assert all(renderer.tokenizer.decode(s.token_ids).count("down") > k for k, s in enumerate(samples))
    texts = texts_with_loss_on_everything(samples, renderer)
    assert len(texts) == 3
    assert all(text.count("Up is right") == 1 for text in texts)
    assert all(text.count("You are at") == 1 for text in texts), "an observation has its loss where it is new"
    assert all("down" not in text.partition("You are")[2] and "seems" not in text for text in texts)


def test_results_that_the_template_cannot_render_apart_have_no_loss_in_later_segments() -> None:
    renderer = renderer_of("r1")
    roles = [("user", "Goal: 5."), ("assistant", THOUGHT), ("tool", "You are at 1."), ("assistant", THOUGHT)]
    samples = renderer.demonstrations([Message(role, content) for role, content in roles])  # type: ignore[arg-type]
    assert len(samples) == 2
    reply = renderer.tokenizer.decode(renderer.reply_ids(THOUGHT))
    assert texts_with_loss_on_everything(samples, renderer)[1] == reply


@pytest.mark.parametrize("template", ["qwen3", "r1"])
async def test_a_reply_that_the_oracle_corrects_has_no_loss_in_any_segment(template: str) -> None:
    replies = [THOUGHT, MISTAKE, THOUGHT, THOUGHT]
    trajectory, _, renderer = await scripted(template, replies, LIMITS)
    trajectory.messages = [replace(m, advice=THOUGHT if m.is_reply else "") for m in trajectory.messages]
    repeated = repeated_tokens(trajectory, renderer)
    samples = labelled(trajectory, renderer.reply_ids, without_thought, repeated=repeated)
    texts = texts_with_loss_on_everything(samples, renderer)
    assert len(texts) == 4
    assert all(text.count("Up is right") == 1 for text in texts)
    assert all("down" not in text.partition("You are")[2] and "seems" not in text for text in texts)


async def test_a_thought_that_a_cut_context_repeats_has_no_loss() -> None:
    context = {"context": Context("window", 2), "train_thoughts": False}
    limits = Limits(max_turns=8, max_new_tokens=60, max_context=300)
    trajectory, _, renderer = await scripted("chatml", [THOUGHT] * 8, limits, **context)
    samples = segment_samples(trajectory, renderer, train_thoughts=False)
    assert len(samples) > 2
    assert any(renderer.tokenizer.decode(sample.token_ids).count("Up is right") > 2 for sample in samples[1:])
    assert all("Up is right" not in text for text in texts_with_loss_on_everything(samples, renderer))


@pytest.mark.parametrize("count", [2, 3, 5, 6])
def test_a_segment_has_no_loss_on_what_it_repeats(count: int) -> None:
    renderer = renderer_of("chatml")
    history, observation = renderer.encode("up"), renderer.follow_up("You are at 1.")
    messages = [
        Message("user", "", [1, 2]),
        Message("assistant", "", [3, 4, 5, 6], [0.0] * 4, untrained=3),
        Message("user", "You are at 1.", [*history, *observation], segment=1, prefix=(0, count)),
        Message("assistant", "", [8, 9], [0.0] * 2, segment=1, untrained=1),
    ]
    trajectory = Trajectory("t", Task("corridor", 0), messages)
    repeated = count + len(history)
    assert _untrained_spans(trajectory, renderer) == [[(2, 3)], [(0, repeated), (repeated + len(observation), 1)]]


async def test_a_pair_with_an_unfinished_thought_is_left_out_if_thoughts_are_not_trained() -> None:
    short, limits = {"thoughts": "keep"}, Limits(max_turns=1, max_new_tokens=20, max_context=4000)
    cut = renderer_of("qwen3").encode("<think>\nUp is")
    unfinished, _, renderer = await scripted("qwen3", [cut], limits, short)  # type: ignore[list-item]
    finished, _, _ = await scripted("qwen3", [THOUGHT], limits, short)
    pairs = [(finished, unfinished), (finished, finished)]
    for train_thoughts, num_kept in ((True, 2), (False, 1)):
        output = io.StringIO()
        make_sample = partial(to_sample, renderer=renderer, train_thoughts=train_thoughts)
        kept, samples = fitting_pairs(pairs, make_sample, 4000, "agent.max_context", Console(output))
        assert kept == pairs[-num_kept:]
        assert all(any(samples[id(trajectory)].loss_mask) for pair in kept for trajectory in pair)
        assert ("1 of 2 pairs have an episode without a token to train on" in output.getvalue()) != train_thoughts


async def test_a_window_keeps_the_task_and_the_last_turns() -> None:
    limits = Limits(max_turns=30, max_new_tokens=20, max_context=200)
    trajectory, recorder, renderer = await scripted("chatml", ["up"] * 30, limits, context=Context("window", 2))
    assert trajectory.stop is StopReason.MAX_TURNS
    assert trajectory.num_turns == 30
    assert trajectory.num_segments > 2
    cut = next(m for m in trajectory.messages if m.dropped_turns)
    prompt = next(p for p, _ in recorder.calls if LEFT_OUT in renderer.tokenizer.decode(p))
    text = renderer.tokenizer.decode(prompt)
    task, dropped = trajectory.messages[1].content, cut.dropped_turns
    assert f"{task}\n\n{LEFT_OUT}\n\nYou are at {dropped}." in text
    assert text.count("<|im_start|>assistant\nup<|im_end|>") == 2
    assert cut.content == f"You are at {dropped + 2}."
    # Between cuts the context grows: far fewer segments than turns.
    assert trajectory.num_segments < trajectory.num_turns / 2


@pytest.mark.parametrize("kind", ["full", "window", "summary"])
async def test_200_turns_are_played_in_a_context_of_2048_tokens(kind: Any) -> None:
    limits = Limits(max_turns=200, max_new_tokens=20, max_context=2048)
    trajectory, _, _ = await scripted("chatml", ["up"] * 250, limits, context=Context(kind, 8, 24))
    assert all(len(segment.token_ids) <= 2048 for segment in trajectory.segments)
    if kind == "full":
        assert trajectory.stop is StopReason.MAX_CONTEXT
        assert trajectory.num_turns < 150
        return
    assert (trajectory.num_turns, trajectory.stop) == (200, StopReason.MAX_TURNS)
    assert sum(len(message.token_ids) for message in trajectory.messages) > 4000
    assert 2 < trajectory.num_segments < 10
    shown = sum(message.purpose == "summary" for message in trajectory.messages)
    assert bool(shown) is (kind == "summary")


async def test_a_summary_replaces_the_conversation() -> None:
    limits = Limits(max_turns=12, max_new_tokens=20, max_context=420)
    replies = ["up"] * 6 + ["I counted up."] + ["up"] * 20
    trajectory, _, renderer = await scripted("chatml", replies, limits, context=Context("summary", 0, 24))
    purposes = [(m.role, m.purpose) for m in trajectory.messages if m.purpose]
    assert purposes[:2] == [("user", "summary"), ("assistant", "summary")]
    at = next(i for i, m in enumerate(trajectory.messages) if m.dropped_turns)
    first = trajectory.messages[at]
    turns = trajectory.turns
    assert turns[at - 1] == turns[at] == first.dropped_turns  # its credit is that of the next reply
    seen = renderer.tokenizer.decode(segment_tokens(trajectory.messages, first.segment))
    summary = trajectory.messages[at - 1].content
    assert f"{trajectory.messages[1].content}\n\n{SUMMARISED}\n{summary}\n\n{first.content}" in seen
    assert "Your context is nearly full" not in seen


@pytest.mark.parametrize("template", ["chatml", "qwen3", "r1"])
async def test_the_model_sees_the_request_for_a_summary_only_while_it_answers(template: str) -> None:
    limits = Limits(max_turns=40, max_new_tokens=20, max_context=420)
    trajectory, recorder, renderer = await scripted(template, ["up"] * 60, limits, context=Context("summary", 1, 24))
    sampled = [m for m in trajectory.messages if m.logprobs is not None]
    asked = [ASK in renderer.tokenizer.decode(prompt_ids) for prompt_ids, _ in recorder.calls]
    assert asked == [m.purpose == "summary" for m in sampled]
    assert sum(asked) > 1


async def test_thoughts_that_are_kept_remain_in_a_cut_context() -> None:
    limits = Limits(max_turns=12, max_new_tokens=60, max_context=400)
    trajectory, recorder, renderer = await scripted(
        "qwen3", [THOUGHT] * 12, limits, {"thoughts": "keep"}, context=Context("window", 2)
    )
    assert trajectory.num_segments > 1
    cut = [prompt for prompt, _ in recorder.calls if LEFT_OUT in renderer.tokenizer.decode(prompt)]
    assert cut
    assert all(renderer.tokenizer.decode(prompt).count(THOUGHT) >= 2 for prompt in cut)


async def test_without_space_for_a_reply_after_a_cut_the_episode_ends() -> None:
    limits = Limits(max_turns=12, max_new_tokens=20, max_context=70)
    trajectory, _, _ = await scripted("chatml", ["up"] * 12, limits, context=Context("window", 2))
    assert trajectory.stop in (StopReason.MAX_CONTEXT, StopReason.LENGTH)


@pytest.mark.parametrize("kind", ["window", "summary"])
async def test_the_context_is_cut_only_if_a_whole_reply_does_not_fit(kind: Any) -> None:
    _, recorder, renderer = await scripted("chatml", ["up"] * 2, replace(LIMITS, max_turns=2))
    needed = len(recorder.calls[1][0]) + 20
    if kind == "summary":
        needed += 24 + 1 + len(renderer.follow_up(ASK))  # the request follows an end of turn, which may be missing
    for max_context, segments in ((needed, 1), (needed - 1, 2)):
        limits = Limits(max_turns=2, max_new_tokens=20, max_context=max_context)
        trajectory, _, _ = await scripted("chatml", ["up"] * 3, limits, context=Context(kind, 1, 24))
        assert (trajectory.num_turns, trajectory.num_segments) == (2, segments)


@pytest.mark.parametrize("kind", ["window", "summary"])
async def test_without_a_turn_to_leave_out_the_first_reply_is_cut(kind: Any) -> None:
    _, recorder, _ = await scripted("chatml", ["up"], replace(LIMITS, max_turns=1))
    limits = Limits(max_turns=2, max_new_tokens=20, max_context=len(recorder.calls[0][0]) + 3)
    trajectory, recorder, _ = await scripted("chatml", ["up and up and up"], limits, context=Context(kind, 1, 24))
    assert (trajectory.stop, trajectory.num_turns) == (StopReason.MAX_CONTEXT, 1)
    assert len(recorder.calls[0][1].token_ids) == 3


async def test_a_window_keeps_fewer_turns_if_they_do_not_fit() -> None:
    limits = Limits(max_turns=30, max_new_tokens=20, max_context=200)
    trajectory, recorder, _ = await scripted("chatml", ["up"] * 30, limits, context=Context("window", 30))
    assert trajectory.num_turns == 30
    assert all(len(prompt_ids) + 20 <= 200 for prompt_ids, _ in recorder.calls)
    cuts = [(turn, m.dropped_turns) for m, turn in zip(trajectory.messages, trajectory.turns, strict=True)]
    kept = [turn - dropped for turn, dropped in cuts if dropped]
    assert min(kept) > 0


class Talkative(Staying):
    """Answers with more than the context can hold."""

    def step(self, text: str) -> Any:
        return replace(super().step(text), observation="You are somewhere. " * 200)


@pytest.mark.parametrize("template", ["chatml", "qwen3"])
async def test_a_last_observation_that_does_not_fit_has_no_tokens(template: str) -> None:
    limits = Limits(max_turns=1, max_new_tokens=20, max_context=420)
    trajectory, _, _ = await scripted(template, ["up"], limits, env=Talkative)
    assert trajectory.stop is StopReason.MAX_TURNS
    assert trajectory.messages[-1].content.startswith("You are somewhere.")
    assert trajectory.messages[-1].token_ids == []


async def test_a_summary_is_trained_even_if_no_reply_fits_after_it() -> None:
    limits = Limits(max_turns=4, max_new_tokens=20, max_context=420)
    trajectory, recorder, _ = await scripted(
        "chatml", ["up", "I counted."], limits, env=Talkative, context=Context("summary", 1, 24)
    )
    assert (trajectory.stop, trajectory.num_turns, len(recorder.calls)) == (StopReason.MAX_CONTEXT, 1, 2)
    assert [m.content for m in trajectory.messages if m.logprobs is not None] == ["up", "I counted."]


async def test_a_summary_has_at_most_the_tokens_that_are_left_in_the_context() -> None:
    _, recorder, renderer = await scripted("chatml", ["up"], replace(LIMITS, max_turns=1))
    [(prompt_ids, completion)] = recorder.calls
    asked = [*prompt_ids, *completion.token_ids, *renderer.follow_up(ASK)]
    limits = Limits(max_turns=4, max_new_tokens=20, max_context=len(asked) + 5)
    replies = ["up", "I counted up and up again.", *["up"] * 6]
    trajectory, recorder, _ = await scripted("chatml", replies, limits, context=Context("summary", 1, 24))
    assert recorder.calls[1][0] == asked
    assert len(recorder.calls[1][1].token_ids) == 5
    assert all(len(segment.token_ids) <= limits.max_context for segment in trajectory.segments)


async def test_without_space_for_a_summary_turns_are_left_out() -> None:
    _, recorder, renderer = await scripted("chatml", ["up"], replace(LIMITS, max_turns=1))
    [(prompt_ids, completion)] = recorder.calls
    asked = len(prompt_ids) + len(completion.token_ids) + len(renderer.follow_up(ASK))
    limits = Limits(max_turns=3, max_new_tokens=20, max_context=asked)
    trajectory, recorder, _ = await scripted("chatml", ["up"] * 3, limits, context=Context("summary", 1, 24))
    assert (trajectory.stop, trajectory.num_turns) == (StopReason.MAX_TURNS, 3)
    assert LEFT_OUT in renderer.tokenizer.decode(recorder.calls[1][0])
    assert not any(m.purpose for m in trajectory.messages)


def test_a_summary_that_is_cut_in_its_thought_is_shown_without_the_tag() -> None:
    messages = [
        Message("user", "Count."),
        Message("assistant", "up", [1], [0.0]),
        Message("user", ASK, purpose="summary"),
        Message("assistant", "<think>\nI counted up and", [1], [0.0], purpose="summary"),
        Message("user", "You are at 1.", dropped_turns=1),
    ]
    assert [m.content for m in view(messages)] == [f"Count.\n\n{SUMMARISED}\nI counted up and\n\nYou are at 1."]


class Tooled(Staying):
    @classmethod
    def tools(cls) -> list[Tool]:
        return [Tool("count", "Count one up or down.", "{way}", {"way": {"type": "string", "enum": ["up", "down"]}})]


async def scripted_tools(
    renderer: Renderer, reply: str, limits: Limits, context: Context = FULL
) -> tuple[Trajectory, Recorder]:
    ids = [*renderer.encode(reply), renderer.end_of_turn]
    recorder = Recorder(ScriptedEngine([ids] * 40))
    session = STYLES["tool"].wrap(await LocalPool({"counting": Tooled}, action_format="tool").open("counting"))
    player = EnginePolicy(
        recorder, renderer, Sampling(1), instruction=session.instruction, tools=session.tools, context=context
    )
    trajectory = await rollout(TASK, session, player, limits, id="t")
    await session.close()
    assert trajectory.stop is StopReason.MAX_TURNS, trajectory.error
    assert all(info["valid"] for info in trajectory.infos)
    require_exact(trajectory, recorder.calls)
    return trajectory, recorder


CALL = '<tool_call>\n{"name": "count", "arguments": {"way": "up"}}\n</tool_call>'


@pytest.mark.parametrize("kind", ["window", "summary"])
async def test_the_context_of_tool_turns_is_cut_exactly(kind: Any) -> None:
    renderer = Renderer(byte_level_bpe("qwen"), "qwen")
    limits = Limits(max_turns=16, max_new_tokens=90, max_context=1400)
    trajectory, recorder = await scripted_tools(renderer, CALL, limits, Context(kind, 2, 90))
    assert trajectory.num_segments > 1
    last = renderer.tokenizer.decode(recorder.calls[-1][0])
    assert (LEFT_OUT if kind == "window" else SUMMARISED) in last
    assert '"name": "count"' in last  # the tools remain
    summaries = [m for m in trajectory.messages if m.purpose and m.role == "assistant"]
    assert all(m.tool_calls is None and m.content == CALL for m in summaries), "a call in a summary is text"


ONE_CALL = LLAMA3.replace(
    "{%- for call in message['tool_calls'] or [] -%}",
    "{%- if message['tool_calls'] and message['tool_calls'] | length > 1 -%}"
    "{{- raise_exception('This model only supports single tool-calls at once!') -}}{%- endif -%}"
    "{%- for call in message['tool_calls'] or [] -%}",
)
"""Refuses a reply with several calls, as the template of Llama 3.1 does. Its models write several all the same."""


@pytest.mark.parametrize("kind", ["window", "summary"])
async def test_several_calls_of_llama_3_are_kept_in_a_cut_context(kind: Any) -> None:
    assert ONE_CALL != LLAMA3
    renderer = Renderer(byte_level_bpe("llama3"), ONE_CALL)
    calls = [ToolCall("count", {"way": way}, f"call{i:05d}") for i, way in enumerate(("up", "down"))]
    reply = '{"name": "count", "parameters": {"way": "up"}}; {"name": "count", "parameters": {"way": "down"}}'
    assert renderer.reply_ids("", calls) == [*renderer.encode(reply), renderer.end_of_turn]
    limits = Limits(max_turns=12, max_new_tokens=120, max_context=1900)
    trajectory, recorder = await scripted_tools(renderer, reply, limits, Context(kind, 2, 90))
    assert trajectory.num_segments > 1
    last = renderer.tokenizer.decode(recorder.calls[-1][0])
    assert (LEFT_OUT if kind == "window" else SUMMARISED) in last
    assert last.count(f"{reply}<|eot_id|>") >= 2


RESULTS_FOLLOW_CALLS = """\
{%- for message in messages -%}
{%- if loop.previtem is defined and loop.previtem.tool_calls and message.role != 'tool' -%}
{{- raise_exception('results must follow calls') -}}
{%- endif -%}
{%- endfor -%}
"""
"""Refuses any other message after calls, as the template of Mistral Nemo does."""


async def test_a_summary_after_calls_is_asked_for_as_their_results() -> None:
    tokenizer = thinking_tokenizer("qwen3")
    renderer = Renderer(tokenizer, RESULTS_FOLLOW_CALLS + tokenizer.chat_template)
    limits = Limits(max_turns=16, max_new_tokens=160, max_context=2200)
    for calls in (1, 2):
        trajectory, recorder = await scripted_tools(
            renderer, "\n".join([CALL] * calls), limits, Context("summary", 2, 90)
        )
        asked = [(m.role, m.content) for m in trajectory.messages if m.purpose and m.role != "assistant"]
        assert asked[:calls] == [*[("tool", "")] * (calls - 1), ("tool", ASK)]
        assert SUMMARISED in renderer.tokenizer.decode(recorder.calls[-1][0])


def test_a_call_in_a_thought_without_end_is_not_made() -> None:
    renderer, tools = Renderer(thinking_tokenizer("qwen3")), [tool.schema() for tool in Tooled.tools()]
    closed, unclosed = f"<think>\nUp.\n</think>\n\n{CALL}", f"<think>\nI could write {CALL}"
    assert renderer.read_reply(renderer.encode(closed), tools)[1] == [ToolCall("count", {"way": "up"})]
    assert renderer.read_reply(renderer.encode(unclosed), tools)[1] == []
    assert renderer.thought_length(renderer.encode(unclosed)) == len(renderer.encode(unclosed))


async def test_a_thinking_template_keeps_thoughts_between_tool_results() -> None:
    renderer = Renderer(thinking_tokenizer("qwen3"))
    assert not renderer.linear
    trajectory, recorder = await scripted_tools(
        renderer, f"<think>\nUp.\n</think>\n\n{CALL}", replace(LIMITS, max_new_tokens=120)
    )
    assert trajectory.num_segments == 1
    assert renderer.tokenizer.decode(recorder.calls[-1][0]).count("<think>\nUp.\n</think>") == 3


def test_the_view_after_a_cut() -> None:
    chat = [Message("system", "s"), Message("user", "task")]
    for k in range(4):
        chat += [Message("assistant", f"a{k}"), Message("user", f"o{k + 1}")]
    assert view(chat) == chat
    chat[-1].dropped_turns = 3
    shown = view(chat)
    assert [m.role for m in shown] == ["system", "user", "assistant", "user"]
    assert [m.content for m in shown] == ["s", f"task\n\n{LEFT_OUT}\n\no3", "a3", "o4"]


def test_the_view_after_a_cut_has_all_results_of_its_first_turn() -> None:
    chat = [Message("user", "task"), Message("assistant", "a0")]
    chat += [Message("tool", "r1"), Message("tool", "r2"), Message("assistant", "a1"), Message("user", "o2")]
    chat[-1].dropped_turns = 1
    shown = [(m.role, m.content) for m in view(chat)]
    assert shown == [("user", f"task\n\n{LEFT_OUT}\n\nr1\n\nr2"), ("assistant", "a1"), ("user", "o2")]


def test_the_view_after_two_summaries_has_the_last_without_its_thought() -> None:
    chat = [Message("user", "task")]
    for k in range(2):
        summary = f"<think>\nThought {k}.\n</think>\n\nSummary {k}.\n"
        chat += [Message("assistant", f"a{k}"), Message("user", ASK, purpose="summary")]
        chat += [Message("assistant", summary, purpose="summary"), Message("user", f"o{k + 1}", dropped_turns=k + 1)]
    assert [m.content for m in view(chat)] == [f"task\n\n{SUMMARISED}\nSummary 1.\n\no2"]


def test_a_summary_is_asked_for_as_the_result_of_every_call() -> None:
    calls = [ToolCall("count", {}, "call00003"), ToolCall("count", {}, "call00004")]
    for made, expected in (
        (None, [("user", ASK, "")]),
        ([], [("user", ASK, "")]),
        (calls[:1], [("tool", ASK, "call00003")]),
        (calls, [("tool", "", "call00003"), ("tool", ASK, "call00004")]),
    ):
        request = summary_request([Message("user", "task"), Message("assistant", "", tool_calls=made)])
        assert [(m.role, m.content, m.tool_call_id) for m in request] == expected
        assert {m.purpose for m in request} == {"summary"}


def test_calls_of_a_sub_agent_are_a_segment_of_their_own() -> None:
    main = [1, 2, 3]
    calls = [
        Call(main, [4], [-0.1]),
        Call([1, 9, 9], [8], [-0.2]),  # a sub-agent with another prompt
        Call([1, 9, 9, 8, 7], [6], [-0.3]),  # it goes on
        Call([*main, 4, 5], [5], [-0.4]),  # back in the main context
        Call(main, [7], [-0.5]),  # the first prompt again
    ]
    messages = stitch(calls)
    assert [m.segment for m in messages] == [0, 0, 1, 1, 1, 1, 0, 0, 2, 2]
    assert [m.prefix for m in messages if m.prefix] == [(0, 1), (0, 3)]
    segments = Trajectory("t", TASK, messages, [0.0] * 5, [{}] * 5).segments
    assert [s.token_ids for s in segments] == [[1, 2, 3, 4, 5, 5], [1, 9, 9, 8, 7, 6], [1, 2, 3, 7]]
    assert [s.order for s in segments] == [[0, 3], [1, 2], [4]]
    assert next(s.turn_index for s in segments) == [-1, -1, -1, 0, -1, 3]


def test_a_reply_without_logprobs_is_not_trained() -> None:
    """Replies of an oracle, of another player or of a parent in a tree have ids, because later turns follow them."""
    messages = [Message("user", "o", [1]), Message("assistant", "a", [2, 3]), Message("user", "o", [4])]
    messages.append(Message("assistant", "a", [5], [-0.5], version=2))
    [segment] = Trajectory("t", TASK, messages, [0.0] * 2, [{}] * 2).segments
    assert segment.loss_mask == [False] * 4 + [True]
    assert (segment.turn_index, segment.versions, segment.order) == ([-1] * 4 + [1], [2], [0])


def test_a_linear_trajectory_of_calls_is_one_segment() -> None:
    calls = [Call([1], [2], [-0.1]), Call([1, 2, 3], [4], [-0.2]), Call([1, 2, 3, 4, 5], [6], [-0.3])]
    [segment] = Trajectory("t", TASK, stitch(calls)).segments
    assert segment.token_ids == [1, 2, 3, 4, 5, 6]
    assert segment.loss_mask == [False, True] * 3


@few(200)
@given(st.data())
def test_stitched_segments_hold_every_call_exactly(data: st.DataObject) -> None:
    calls: list[Call] = []
    for _ in range(data.draw(st.integers(1, 8))):
        base: list[int] = []
        if calls and data.draw(st.booleans()):
            earlier = data.draw(st.sampled_from(calls))
            base = [*earlier.prompt_ids, *earlier.token_ids]
            base = base[: data.draw(st.integers(0, len(base)))] if data.draw(st.booleans()) else base
        prompt = base + data.draw(st.lists(st.integers(0, 2), min_size=not base, max_size=3))
        sampled = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
        calls.append(Call(prompt, sampled, [-float(len(calls) + 1)] * len(sampled)))
    messages = stitch(calls)
    stitcher = Stitcher()
    assert [message for call in calls for message in stitcher.add(call)] == messages
    trajectory = Trajectory.from_json(Trajectory("t", TASK, messages, [0.0] * len(calls), [{}] * len(calls)).to_json())
    segments = trajectory.segments
    require_exact(trajectory, [(c.prompt_ids, Completion(c.token_ids, c.logprobs, "stop", 0)) for c in calls])
    for k, segment in enumerate(segments):
        assert segment_tokens(messages, k) == segment.token_ids
    for a in range(len(segments)):
        for b in range(a + 1, len(segments)):  # a segment that continued another would have been merged
            first = next(m for m in messages if m.segment == b)
            whole = segment_tokens(messages[: messages.index(first)], a)
            prompt = [*segments[first.prefix[0]].token_ids[: first.prefix[1]], *first.token_ids]  # type: ignore[index]
            assert prompt[: len(whole)] != whole


def test_tokens_of_a_segment_follow_every_branch_before_it() -> None:
    messages = [
        Message("user", "", [1, 2, 3, 4]),
        Message("user", "", [5, 6], segment=1, prefix=(0, 3)),
        Message("user", "", [7], segment=2, prefix=(1, 2)),  # its prefix is shorter than its parent's
        Message("user", "", [8], segment=3, prefix=(2, 1)),
        Message("user", "", [9], segment=4, prefix=(1, 4)),
        Message("user", "", [10], segment=1),  # appended after others have branched off
    ]
    expected = [[1, 2, 3, 4], [1, 2, 3, 5, 6, 10], [1, 2, 7], [1, 8], [1, 2, 3, 5, 9]]
    assert [segment_tokens(messages, k) for k in range(5)] == expected
    assert [segment.token_ids for segment in Trajectory("t", TASK, messages).segments] == expected


def test_a_prompt_that_starts_a_segment_gets_a_number_of_its_own() -> None:
    """The last message need not be in the newest segment."""
    messages = stitch([Call([1, 2], [3], [-0.1]), Call([1, 9], [8], [-0.2]), Call([1, 2, 3, 4], [5], [-0.3])])
    assert [m.segment for m in messages] == [0, 0, 1, 1, 0, 0]
    message = assign_segment(messages, Message("user", "o"), [1, 2, 3, 7])
    assert (message.segment, message.prefix, message.token_ids) == (2, (0, 3), [7])
    continued = assign_segment(messages, Message("user", "o"), [1, 2, 3, 4, 5, 6])
    assert (continued.segment, continued.prefix, continued.token_ids) == (0, None, [6])


@pytest.mark.parametrize(
    ("prompt_ids", "prefix"),
    [
        ([1, 9], (0, 1)),
        ([1, 2, 9], (0, 2)),  # segment 1 has these tokens from segment 0
        ([1, 2, 4, 9], (1, 3)),  # one token is segment 1's own
        ([1, 2, 4, 5, 9], (1, 4)),
    ],
)
def test_a_new_segment_branches_off_the_oldest_one_with_its_prefix(
    prompt_ids: list[int], prefix: tuple[int, int]
) -> None:
    messages = stitch([Call([1, 2], [3], [-0.1]), Call([1, 2, 4, 5], [6], [-0.2])])
    message = assign_segment(messages, Message("user", "o"), prompt_ids)
    assert (message.segment, message.prefix) == (2, prefix)
    assert segment_tokens([*messages, message], 2) == prompt_ids
    assert Trajectory("t", TASK, [*messages, message]).segments[2].token_ids == prompt_ids


@pytest.mark.parametrize("length", range(10))
def test_a_new_segment_starts_with_the_longest_prefix(length: int) -> None:
    tokens, prompt_ids = [1] * length + [2] * (10 - length), [1] * length + [3] * 4
    match = match_segment({0: tokens}, prompt_ids, 1)
    assert (match.segment, match.prefix, match.added_ids) == (1, (0, length), [3] * 4)


def test_the_example_of_the_guide_runs() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "long-context.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    subprocess.run([sys.executable, "-c", example], check=True, timeout=240)


def test_place_prefers_the_longest_match() -> None:
    assert match_segment({0: [1, 2], 1: [1, 2, 3]}, [1, 2, 3, 4], 2).segment == 1
    assert match_segment({}, [1], 0).added_ids == [1]


def test_trajectories_of_earlier_versions_load() -> None:
    row = {
        **{"id": "a", "env": "toy", "item": 1, "rewards": [1.0], "infos": [{}], "stop": "done", "error": None},
        **{"horizon": 3, "seconds": 0.1},
        "messages": [
            {"role": "user", "content": "o", "token_ids": [1], "logprobs": None, "version": None},
            {"role": "assistant", "content": "a", "token_ids": [2], "logprobs": [-0.5], "version": 0},
        ],
    }
    trajectory = Trajectory.from_json(json.dumps(row))
    assert (trajectory.num_segments, trajectory.token_ids, trajectory.loss_mask) == (1, [1, 2], [False, True])
    assert json.loads(trajectory.to_json()) == row


def test_a_linear_view_of_several_segments_is_refused() -> None:
    trajectory = Trajectory("t", TASK, stitch([Call([1], [2], [-0.1]), Call([3], [4], [-0.1])]))
    with pytest.raises(ValueError, match="2 segments"):
        _ = trajectory.token_ids
