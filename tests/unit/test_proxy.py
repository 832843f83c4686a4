"""The proxy over a tiny real model, called by the real openai SDK: exact tokens, tools, streams, hostile clients."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import httpx
import openai
import pytest
import torch
from exactness_for_tests import require_exact
from openai import AsyncOpenAI
from scripted_engine_for_tests import ScriptedEngine, scripted_logprob
from tokenizers_for_tests import byte_level_bpe, split_segmentation, thinking_tokenizer
from training_for_tests import counting_player, slow_logprobs

from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.agent.proxy.app import Proxy
from agentgym_rl.agent.proxy.chat import RecordedModel
from agentgym_rl.agent.proxy.sessions import ProxySession
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.segments import stitch
from agentgym_rl.errors import EngineError
from agentgym_rl.training.scratch import build_model
from agentgym_rl.training.settings import ScratchSettings
from agentgym_rl.types import Completion, Limits, Message, Sampling, Task, ToolCall, Trajectory

LIMITS = Limits(max_turns=5, max_new_tokens=400, max_context=4000)
TASK: dict[str, Any] = {"env": "counting", "instruction": "", "observation": "Begin.", "tools": []}
COUNT = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Count.",
        "parameters": {"type": "object", "properties": {"way": {"type": "string"}}},
    },
}

renderer_of = cache(lambda style: Renderer(byte_level_bpe(style), style))


@cache
def byte_model() -> tuple[Any, Renderer]:
    """Return a model with random weights that writes any bytes."""
    settings = ScratchSettings(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2)
    renderer = renderer_of("chatml")
    return build_model(settings, renderer.tokenizer, 0).eval(), renderer


@asynccontextmanager
async def proxied(
    engine: Any, renderer: Renderer, limits: Limits = LIMITS
) -> AsyncIterator[tuple[Proxy, ProxySession]]:
    """Start a proxy with one session."""
    proxy = Proxy()
    await proxy.start()
    session = ProxySession(RecordedModel(engine, renderer, Sampling(400, seed=1), limits, "s"), TASK)
    proxy.sessions.open(session, claimable=False)
    try:
        yield proxy, session
    finally:
        proxy.sessions.end(session)
        await session.model.close()
        await proxy.close()


def sdk(proxy: Proxy, session: ProxySession, **changed: Any) -> AsyncOpenAI:
    links = proxy.links(session)
    options = {"base_url": links["base_url"], "api_key": links["api_key"], "max_retries": 2} | changed
    return AsyncOpenAI(**options)


def recorded(session: ProxySession) -> Trajectory:
    return Trajectory("t", Task("counting", 0), stitch(session.model.calls))


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_a_real_model_and_the_recorded_tokens_agree() -> None:
    model, tokenizer = counting_player()
    renderer = Renderer(tokenizer)
    engine = NativeEngine(model, decode=renderer.decode, max_sessions=2, max_context=400)
    async with proxied(engine, renderer, Limits(8, 6, 400)) as (proxy, session), sdk(proxy, session) as client:
        messages: list[Any] = [user("The counter is at 2 .")]
        for _ in range(3):
            answer = await client.chat.completions.create(model="any", messages=messages)
            choice = answer.choices[0]
            assert choice.finish_reason in ("stop", "length")
            messages += [choice.message.model_dump(exclude_none=True), user("The counter is at 3 .")]
        calls = session.model.calls
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
            len(calls[-1].prompt_ids),
            len(calls[-1].token_ids),
        )
        trajectory = recorded(session)
    await engine.close()
    assert trajectory.num_segments == 1, "a conversation that grows is one segment"
    assert [t for t, trained in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if trained] == [
        token for call in calls for token in call.token_ids
    ]
    with torch.no_grad():
        learned = [0.0, *(p.item() for p in slow_logprobs(model, trajectory.token_ids))]
    pairs = zip(learned, trajectory.logprobs, trajectory.loss_mask, strict=True)
    assert max(abs(a - b) for a, b, trained in pairs if trained) < 1e-4


REWRITES: dict[str, Any] = {
    "unchanged": lambda text: text,
    "outer space": lambda text: f" {text}\n",
    "inner space": "  ".join,
    "added text": lambda text: f"{text}\n\n{text}",
    "dropped text": lambda text: text.strip()[1:],
}
"""How a client repeats a reply in the next request."""


@pytest.mark.parametrize("rewrite", REWRITES)
async def test_rewritten_history_is_a_segment_on_which_learner_and_engine_agree(rewrite: str) -> None:
    model, renderer = byte_model()
    engine = NativeEngine(model, decode=renderer.decode, max_sessions=2, max_context=600)
    async with proxied(engine, renderer, Limits(8, 12, 600)) as (proxy, session), sdk(proxy, session) as client:
        messages: list[Any] = [user("Count.")]
        for _ in range(3):
            answer = await client.chat.completions.create(model="m", messages=messages)
            text = answer.choices[0].message.content or "x"
            messages += [{"role": "assistant", "content": REWRITES[rewrite](text)}, user("And then?")]
        calls, trajectory = session.model.calls, recorded(session)
    await engine.close()
    prompts = [call.prompt_ids for call in calls]
    assert trajectory.num_segments == (1 if rewrite in ("unchanged", "outer space") else 3)
    sampled = sorted(tuple(call.token_ids) for call in calls)
    assert sum(sum(segment.loss_mask) for segment in trajectory.segments) == sum(map(len, sampled))
    for segment in trajectory.segments:
        ends = [i + 1 for i, trained in enumerate(segment.loss_mask) if trained]
        assert segment.token_ids[: ends[0] - 1] in prompts, "the first trained token follows an exact prompt"
        with torch.no_grad():
            learned = [0.0, *(p.item() for p in slow_logprobs(model, segment.token_ids))]
        pairs = zip(learned, segment.logprobs, segment.loss_mask, strict=True)
        assert max(abs(a - b) for a, b, trained in pairs if trained) < 1e-4


@pytest.mark.parametrize(
    ("arguments", "segments"),
    [
        ('{"way": "up", "steps": 2}', 1),
        ('{ "way":"up",\n "steps":2 }', 1),
        ('{"steps": 2, "way": "up"}', 2),
        ('{"way": "up ", "steps": 2}', 2),
        ('{"way": "up"}', 2),
    ],
)
async def test_calls_with_other_arguments_or_order_start_a_segment(arguments: str, segments: int) -> None:
    """Space between JSON tokens does not count: templates write calls from their values."""
    renderer = renderer_of("qwen")
    call = ToolCall("count", {"way": "up", "steps": 2}, "call00000")
    engine = ScriptedEngine([renderer.reply_ids("", [call]), renderer.reply_ids("Bye.")])
    async with proxied(engine, renderer) as (proxy, session), sdk(proxy, session) as client:
        messages: list[Any] = [user("Go.")]
        await client.chat.completions.create(model="m", messages=messages, tools=[COUNT])
        function = {"name": "count", "arguments": arguments}
        rows = [{"id": "call00000", "type": "function", "function": function}]
        messages += [{"role": "assistant", "content": None, "tool_calls": rows}]
        messages += [{"role": "tool", "tool_call_id": "call00000", "content": "At 2."}]
        await client.chat.completions.create(model="m", messages=messages, tools=[COUNT])
        trajectory = recorded(session)
    assert trajectory.num_segments == segments
    rendered = renderer.tokenizer.decode(engine.prompts[1])
    assert json.dumps(json.loads(arguments)) in rendered, "the model sees what the client sent"
    last = trajectory.segments[-1]
    assert last.token_ids == [*engine.prompts[1], *renderer.reply_ids("Bye.")]


@pytest.mark.parametrize("style", ["chatml", "llama3", "qwen"])
async def test_sampled_ids_survive_tool_turns_whatever_their_spelling(style: str) -> None:
    renderer = renderer_of(style)
    written = [renderer.reply_ids("", [ToolCall("count", {"way": way}, f"call{i:05d}")]) for i, way in enumerate("ab")]
    odd = [
        [*split_segmentation(renderer.tokenizer, renderer.tokenizer.decode(ids[:-1])), renderer.end_of_turn]
        for ids in written
    ]
    assert odd != written
    engine = ScriptedEngine([*odd, renderer.reply_ids("Done.")])
    async with proxied(engine, renderer) as (proxy, session), sdk(proxy, session) as client:
        messages: list[Any] = [{"role": "system", "content": "Count."}, user("Begin.")]
        for way in "ab":
            answer = await client.chat.completions.create(model="m", messages=messages, tools=[COUNT])
            message = answer.choices[0].message
            assert answer.choices[0].finish_reason == "tool_calls"
            assert message.content is None
            (call,) = message.tool_calls or ()
            assert (call.function.name, call.function.arguments) == ("count", f'{{"way": "{way}"}}')
            messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "At 3."}]
        answer = await client.chat.completions.create(model="m", messages=messages, tools=[COUNT])
        assert answer.choices[0].message.content == "Done."
        trajectory = recorded(session)
    assert trajectory.num_segments == 1
    assert [call.token_ids for call in session.model.calls[:2]] == odd
    assert engine.prompts[-1] == trajectory.token_ids[: len(engine.prompts[-1])]
    assert session.model.calls[0].logprobs == [scripted_logprob(token) for token in odd[0]]


@pytest.mark.parametrize("template", ["qwen3", "r1"])
async def test_a_thinking_template_drops_earlier_thoughts_of_a_session(template: str) -> None:
    renderer = Renderer(thinking_tokenizer(template))
    replies = [renderer.reply_ids(f"<think>\nIdea {k}.\n</think>\n\nup") for k in range(3)]
    engine = ScriptedEngine(replies)
    async with proxied(engine, renderer) as (proxy, session), sdk(proxy, session) as client:
        messages: list[Any] = [user("Go.")]
        for k in range(3):
            answer = await client.chat.completions.create(model="m", messages=messages)
            assert f"Idea {k}" in (answer.choices[0].message.content or "")
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}, user("And then?")]
    for k, prompt in enumerate(engine.prompts):
        whole = renderer.tokenizer.apply_chat_template(
            messages[: 1 + 2 * k], add_generation_prompt=True, return_dict=False
        )
        assert prompt == whole
        assert "Idea" not in renderer.tokenizer.decode(prompt)
    trajectory = recorded(session)
    assert trajectory.num_segments == 3
    completions = [Completion(ids, [scripted_logprob(token) for token in ids], "stop", 0) for ids in replies]
    require_exact(trajectory, list(zip(engine.prompts, completions, strict=True)))


async def test_streams_have_the_same_text_calls_and_usage() -> None:
    renderer = renderer_of("qwen")
    replies = [renderer.reply_ids("Well.", [ToolCall("count", {"way": "up"}, "call00000")]), renderer.reply_ids("Bye.")]
    async with (
        proxied(ScriptedEngine(replies), renderer) as (proxy, session),
        sdk(proxy, session) as client,
        client.chat.completions.stream(model="m", messages=[user("Go.")], tools=[COUNT]) as stream,
    ):
        final = await stream.get_final_completion()
        message = final.choices[0].message
        assert message.content == "Well."
        assert [c.function.arguments for c in message.tool_calls or ()] == ['{"way": "up"}']
        assert final.choices[0].finish_reason == "tool_calls"
        chunks = await client.chat.completions.create(
            model="m", messages=[user("Go.")], stream=True, stream_options={"include_usage": True}
        )
        received = [chunk async for chunk in chunks]
        assert "".join(c.choices[0].delta.content or "" for c in received if c.choices) == "Bye."
        assert received[-1].usage is not None
        assert received[-1].usage.completion_tokens == len(replies[1])


async def test_a_stream_begins_with_the_role_and_ends_with_done() -> None:
    renderer = renderer_of("chatml")
    engine = ScriptedEngine([renderer.reply_ids("north")])
    async with proxied(engine, renderer) as (proxy, session), httpx.AsyncClient(timeout=60) as client:
        links = proxy.links(session)
        headers = {"Authorization": f"Bearer {links['api_key']}"}
        body = {"messages": [user("Go.")], "stream": True}
        answer = await client.post(f"{links['base_url']}/chat/completions", json=body, headers=headers)
    *rows, last = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert last == "[DONE]"
    deltas = [json.loads(row)["choices"][0]["delta"] for row in rows]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "north"}, {}]


async def test_streamed_calls_arrive_whole_and_continue_the_tokens() -> None:
    renderer = renderer_of("qwen")
    calls = [ToolCall("count", {"way": "up"}, "call00000"), ToolCall("count", {"way": "down"}, "call00001")]
    engine = ScriptedEngine(
        [renderer.reply_ids("Well.", calls), renderer.reply_ids("", calls), renderer.reply_ids("x")]
    )
    async with proxied(engine, renderer) as (proxy, session), sdk(proxy, session) as client:
        messages: list[Any] = [user("Go.")]
        for content in ("Well.", ""):
            text, pieces = "", dict[int, dict[str, str]]()
            async for chunk in await client.chat.completions.create(
                model="m", messages=messages, tools=[COUNT], stream=True
            ):
                delta = chunk.choices[0].delta
                text += delta.content or ""
                for piece in delta.tool_calls or ():
                    call = pieces.setdefault(piece.index, {"id": piece.id or "", "name": "", "arguments": ""})
                    call["name"] += piece.function.name or ""  # type: ignore[union-attr]
                    call["arguments"] += piece.function.arguments or ""  # type: ignore[union-attr]
            assert (text, chunk.choices[0].finish_reason) == (content, "tool_calls")
            assert [(c["name"], json.loads(c["arguments"])) for c in pieces.values()] == [
                ("count", {"way": "up"}),
                ("count", {"way": "down"}),
            ]
            assert len({c["id"] for c in pieces.values()}) == 2
            rows = [{"id": c["id"], "type": "function", "function": c} for c in pieces.values()]
            messages.append({"role": "assistant", "content": text, "tool_calls": rows})
            messages += [{"role": "tool", "tool_call_id": c["id"], "content": "At 3."} for c in pieces.values()]
        await client.chat.completions.create(model="m", messages=messages, tools=[COUNT])
        assert recorded(session).num_segments == 1


async def test_responses_stream_calls_by_their_events() -> None:
    renderer = renderer_of("qwen")
    engine = ScriptedEngine([renderer.reply_ids("Well.", [ToolCall("count", {"way": "up"}, "call00000")])])
    tools: list[Any] = [{"type": "function", **COUNT["function"], "strict": False}]  # type: ignore[dict-item]
    async with proxied(engine, renderer) as (proxy, session), sdk(proxy, session) as client:
        stream = await client.responses.create(model="m", input="Go.", tools=tools, stream=True)
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Well."
    assert "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta") == '{"way": "up"}'
    final = events[-1]
    assert final.type == "response.completed"
    assert [item.type for item in final.response.output] == ["message", "function_call"]


async def test_the_responses_api_plays_calls_and_continues_the_tokens() -> None:
    renderer = renderer_of("qwen")
    replies = [renderer.reply_ids("", [ToolCall("count", {"way": "up"}, "call00000")]), renderer.reply_ids("Bye.")]
    async with proxied(ScriptedEngine(replies), renderer) as (proxy, session), sdk(proxy, session) as client:
        tools: list[Any] = [{"type": "function", **COUNT["function"], "strict": False}]  # type: ignore[dict-item]
        items: list[Any] = [user("Go.")]
        first = await client.responses.create(model="m", instructions="Count.", input=items, tools=tools)
        (call,) = first.output
        assert call.type == "function_call"
        items += [call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "At 1."}]
        async with client.responses.stream(model="m", instructions="Count.", input=items, tools=tools) as stream:
            final = await stream.get_final_response()
        assert final.output_text == "Bye."
        assert recorded(session).num_segments == 1
        form: Any = {"format": {"type": "json_object"}}
        image: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,"}]}]
        for unsupported, reason in (
            ({"input": "x", "previous_response_id": "resp_1"}, "responses are not stored"),
            ({"input": "x", "text": form}, "is not supported"),
            ({"input": "x", "tools": [{"type": "web_search"}]}, "other tools are not supported"),
            ({"input": image}, "reads only text"),
        ):
            with pytest.raises(openai.BadRequestError, match=reason):
                await client.responses.create(model="m", **unsupported)


async def test_text_and_calls_of_a_response_are_one_reply_when_they_are_repeated() -> None:
    renderer = renderer_of("qwen")
    calls = [ToolCall("count", {"way": way}, f"call{i:05d}") for i, way in enumerate(("up", "down"))]
    reply = renderer.reply_ids("Well.", calls)
    engine = ScriptedEngine([reply, renderer.reply_ids("Bye.")])
    async with proxied(engine, renderer) as (proxy, session), sdk(proxy, session) as client:
        tools: list[Any] = [{"type": "function", **COUNT["function"], "strict": False}]  # type: ignore[dict-item]
        items: list[Any] = [user("Go.")]
        first = await client.responses.create(model="m", input=items, tools=tools)
        assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
        items += [item.model_dump() for item in first.output]
        items += [{"type": "function_call_output", "call_id": call.id, "output": "At 1."} for call in calls]
        await client.responses.create(model="m", input=items, tools=tools)
    assert engine.prompts[1][: len(engine.prompts[0]) + len(reply)] == [*engine.prompts[0], *reply]
    assert recorded(session).num_segments == 1


async def test_a_changed_history_starts_a_segment_with_the_shared_prefix() -> None:
    renderer = renderer_of("chatml")
    replies = [renderer.reply_ids(text) for text in ("north", "south", "west")]
    engine = ScriptedEngine(replies)
    async with proxied(engine, renderer) as (proxy, session), sdk(proxy, session) as client:
        for messages in (
            [user("Go.")],
            [user("Go."), {"role": "assistant", "content": "I said something else"}, user("And?")],
            [user("Go."), {"role": "assistant", "content": " north\n"}, user("And?")],
        ):
            await client.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]
    trajectory = recorded(session)
    first, second = trajectory.segments
    assert first.token_ids == [*engine.prompts[2], *replies[2]]
    assert second.token_ids == [*engine.prompts[1], *replies[1]]
    assert sum(first.loss_mask) == len(replies[0]) + len(replies[2])
    assert sum(second.loss_mask) == len(replies[1])


@pytest.mark.parametrize("by_key", [False, True])
async def test_equal_conversations_of_two_sessions_keep_their_own_tokens(by_key: bool) -> None:
    renderer = renderer_of("chatml")
    spellings = [renderer.encode("north"), split_segmentation(renderer.tokenizer, "north")]
    assert spellings[0] != spellings[1]
    engines = [ScriptedEngine([[*ids, renderer.end_of_turn]] * 2) for ids in spellings]
    async with proxied(engines[0], renderer) as (proxy, first):
        second = ProxySession(RecordedModel(engines[1], renderer, Sampling(400), LIMITS, "s"), TASK)
        proxy.sessions.open(second, claimable=False)
        address: dict[str, Any] = {"base_url": f"{proxy.url}/v1"} if by_key else {}
        messages: list[Any] = [user("Go.")]
        async with sdk(proxy, first, **address) as client, sdk(proxy, second, **address) as other_client:
            for _ in range(2):
                for caller in (client, other_client):
                    answer = await caller.chat.completions.create(model="m", messages=messages)
                    assert answer.choices[0].message.content == "north"
                messages += [{"role": "assistant", "content": "north"}, user("And?")]
        proxy.sessions.end(second)
    for session, engine, ids in zip((first, second), engines, spellings, strict=True):
        trajectory = recorded(session)
        assert trajectory.num_segments == 1
        assert trajectory.token_ids == [*engine.prompts[1], *ids, renderer.end_of_turn]
        sampled = [t for t, trained in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if trained]
        assert sampled == [*ids, renderer.end_of_turn] * 2


class Updated(ScriptedEngine):
    """An engine whose weights are updated before the last token of a reply."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        completion = await super().generate(prompt_ids, sampling, session)
        return replace(completion, versions=[self.version] * (len(completion.token_ids) - 1) + [self.version + 1])


async def test_a_reply_sampled_by_two_versions_is_recorded_with_both() -> None:
    renderer = renderer_of("chatml")
    reply = renderer.reply_ids("north")
    engine = Updated([reply])
    engine.version = 4
    async with proxied(engine, renderer) as (proxy, session), sdk(proxy, session) as client:
        await client.chat.completions.create(model="m", messages=[user("Go.")])  # type: ignore[list-item]
    assert recorded(session).segments[0].versions == [4] * (len(reply) - 1) + [5]
    assert recorded(session).versions == [4, 5]


class Broken(ScriptedEngine):
    """An engine that loses the log-probability of the last token."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Completion:
        completion = await super().generate(prompt_ids, sampling, session)
        return replace(completion, logprobs=completion.logprobs[:-1])


async def test_a_reply_without_a_logprob_for_each_token_is_not_recorded() -> None:
    renderer = renderer_of("chatml")
    engine = Broken([renderer.reply_ids("north")])
    async with proxied(engine, renderer) as (proxy, session), sdk(proxy, session) as client:
        with pytest.raises(openai.InternalServerError, match="one finite log-probability a token"):
            await client.chat.completions.create(model="m", messages=[user("Go.")])  # type: ignore[list-item]
    assert session.model.calls == []
    assert isinstance(session.model.failure, EngineError)


NORTH = {"role": "assistant", "content": "north"}
SECOND_REQUESTS: dict[str, tuple[list[Any], bool, int]] = {
    "continued": ([user("Go."), NORTH, user("And?")], True, 1),
    "two messages": ([user("Go."), NORTH, user("And?"), user("Well?")], True, 1),
    "system message": ([user("Go."), NORTH, {"role": "system", "content": "Reply."}], True, 1),
    "another task": ([user("Stay."), NORTH, user("And?")], True, 2),
    "space in the task": ([user(" Go.\n"), NORTH, user("And?")], True, 2),
    "without tools": ([user("Go."), NORTH, user("And?")], False, 2),
}
"""Messages after a first request `Go.` with tools, whether they come with the tools, and segments of both requests."""


@pytest.mark.parametrize("name", SECOND_REQUESTS)
async def test_a_prompt_is_what_the_client_sent_with_replies_as_sampled(name: str) -> None:
    renderer = renderer_of("chatml")
    messages, with_tools, segments = SECOND_REQUESTS[name]
    odd = [*split_segmentation(renderer.tokenizer, "north"), renderer.end_of_turn]
    engine = ScriptedEngine([odd] * 2)
    async with proxied(engine, renderer) as (proxy, session), sdk(proxy, session) as client:
        await client.chat.completions.create(model="m", messages=[user("Go.")], tools=[COUNT])  # type: ignore[list-item]
        more: dict[str, Any] = {"tools": [COUNT]} if with_tools else {}
        await client.chat.completions.create(model="m", messages=messages, **more)
    first, second = engine.prompts
    whole = renderer.prompt([Message(m["role"], m["content"]) for m in messages], [COUNT] if with_tools else [])
    assert renderer.tokenizer.decode(second) == renderer.tokenizer.decode(whole)
    assert recorded(session).num_segments == segments
    assert (second[: len(first) + len(odd)] == first + odd) is (segments == 1)


@pytest.mark.parametrize(("end", "added"), [("", "<|im_end|>"), ("<|im_end|>", ""), ("<|endoftext|>", "")])
async def test_a_reply_without_an_end_gets_one_that_is_not_trained(end: str, added: str) -> None:
    renderer = renderer_of("chatml")
    reply = renderer.encode(f"north{end}")
    engine = ScriptedEngine([reply] * 3)
    async with proxied(engine, renderer) as (proxy, session), sdk(proxy, session) as client:
        messages: list[Any] = [user("Go.")]
        for _ in range(3):
            await client.chat.completions.create(model="m", messages=messages)
            messages += [{"role": "assistant", "content": "north"}, user("And?")]
    following = [*renderer.encode(added), *renderer.follow_up("And?")]
    assert engine.prompts[1] == [*engine.prompts[0], *reply, *following]
    assert engine.prompts[2] == [*engine.prompts[1], *reply, *following]
    trajectory = recorded(session)
    mask = [True] * len(reply) + [False] * len(following)
    assert trajectory.loss_mask == [False] * len(engine.prompts[0]) + mask * 2 + [True] * len(reply)


async def test_a_system_message_may_be_the_last() -> None:
    """Pydantic AI asks for a retry that way."""
    renderer = renderer_of("chatml")
    engine = ScriptedEngine([renderer.reply_ids(""), renderer.reply_ids("north")])
    async with proxied(engine, renderer) as (proxy, session), sdk(proxy, session) as client:
        messages: list[Any] = [user("Go.")]
        await client.chat.completions.create(model="m", messages=messages)
        messages += [{"role": "assistant", "content": ""}, {"role": "system", "content": "Reply."}]
        answer = await client.chat.completions.create(model="m", messages=messages)
    assert answer.choices[0].message.content == "north"
    assert "Reply." in renderer.tokenizer.decode(engine.prompts[1])
    assert recorded(session).num_segments == 1


async def test_limits_and_stop_strings_are_kept() -> None:
    renderer = renderer_of("chatml")
    engine = ScriptedEngine([renderer.reply_ids("one two STOP")] * 3)
    async with (
        proxied(engine, renderer, Limits(5, 400, 80)) as (proxy, session),
        sdk(proxy, session) as client,
    ):
        answer = await client.chat.completions.create(model="m", messages=[user("Go.")], stop="STOP", temperature=0.1)
        assert answer.choices[0].message.content == "one two "
        assert engine.samplings[0].temperature == 1.0, "the run decides the temperature"
        assert engine.samplings[0].max_new_tokens == 80 - len(engine.prompts[0])
        assert session.model.calls[0].token_ids == renderer.reply_ids("one two STOP")
        answer = await client.chat.completions.create(model="m", messages=[user("Go.")], max_tokens=2)
        assert answer.choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=[user("word " * 200)])
        assert caught.value.code == "context_length_exceeded"
        assert session.model.overflowed


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": "hello"}, "must be a list"),
        ({"messages": [{"content": "x"}]}, "not valid"),
        ({"messages": [{"role": "pirate", "content": "x"}]}, "role must be one of"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "the last message"),
        ({"messages": [user("x")], "n": 2}, "n = 2 is not supported"),
        ({"messages": [user("x")], "stop": 5}, "stop must be a text or a list"),
        ({"messages": [user("x")], "stream": True, "stream_options": "x"}, "stream_options must be an object"),
        ({"messages": [user("x")], "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [user("x")], "max_tokens": -1}, "positive integer"),
        ({"messages": [user("x")], "tools": [{"type": "web_search"}]}, "a tool must be"),
        ({"messages": [user("x")], "max_completion_tokens": 0}, "positive integer"),
        ({"messages": [user("x")], "stop": [1]}, "stop must be"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads only text"),
        ([], "JSON object"),
    ],
)
async def test_bad_requests_get_400_with_a_reason(body: Any, reason: str) -> None:
    async with (
        proxied(ScriptedEngine([]), renderer_of("chatml")) as (proxy, session),
        httpx.AsyncClient(timeout=60) as client,
    ):
        links = proxy.links(session)
        headers = {"Authorization": f"Bearer {links['api_key']}"}
        answer = await client.post(f"{links['base_url']}/chat/completions", json=body, headers=headers)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]
    assert not session.model.calls


PATHS = [("GET", ""), ("POST", "/step"), ("POST", "/end"), ("GET", "/v1/models")]
PATHS += [("POST", "/v1/chat/completions"), ("POST", "/v1/responses")]


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_every_path_refuses_wrong_keys_unknown_and_ended_sessions(method: str, path: str) -> None:
    async with proxied(Stuck([]), renderer_of("chatml")) as (proxy, session), httpx.AsyncClient(timeout=60) as client:
        key = {"Authorization": f"Bearer {session.key}"}

        async def answer(identifier: str, headers: Any) -> tuple[int, str]:
            answer = await client.request(method, f"{proxy.url}/sessions/{identifier}{path}", headers=headers)
            return answer.status_code, answer.json()["error"]["code"]

        wrong: tuple[Any, ...] = (
            {"Authorization": "Bearer sk-wrong"},
            {"Authorization": "Basic x"},
            {"Authorization": "Bearer \u00e9".encode()},
            {},
        )
        for headers in wrong:
            assert await answer(session.id, headers) == (401, "invalid_api_key")
        assert await answer("0" * 16, key) == (404, "session_not_found")
        proxy.sessions.end(session)
        assert await answer(session.id, key) == (410, "session_ended")
        for headers in wrong:
            assert await answer(session.id, headers) == (401, "invalid_api_key")


async def test_wrong_keys_unknown_and_ended_sessions_are_refused() -> None:
    renderer = renderer_of("chatml")
    engine = ScriptedEngine([renderer.reply_ids("north")] * 2)
    async with proxied(engine, renderer) as (proxy, session):
        ask: dict[str, Any] = {"model": "m", "messages": [user("Go.")]}
        with pytest.raises(openai.AuthenticationError):
            await sdk(proxy, session, api_key="sk-wrong").chat.completions.create(**ask)
        with pytest.raises(openai.AuthenticationError):
            await sdk(proxy, session, base_url=f"{proxy.url}/v1", api_key="sk-other").chat.completions.create(**ask)
        with pytest.raises(openai.NotFoundError):
            await sdk(proxy, session, base_url=f"{proxy.url}/sessions/none/v1").chat.completions.create(**ask)
        by_key = sdk(proxy, session, base_url=f"{proxy.url}/v1")
        await by_key.chat.completions.create(**ask)
        assert [model.id async for model in await by_key.models.list()] == ["policy"]
        proxy.sessions.end(session)
        for client in (sdk(proxy, session), by_key):
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(**ask)
            assert (caught.value.status_code, caught.value.code) == (410, "session_ended")
        assert len(session.model.calls) == len(engine.prompts) == 1, "the SDK did not repeat a refused call"
        assert len(proxy.sessions) == 0


async def test_pages_of_other_sites_and_large_bodies_are_refused() -> None:
    async with (
        proxied(ScriptedEngine([]), renderer_of("chatml")) as (proxy, session),
        httpx.AsyncClient(timeout=60) as client,
    ):
        links = proxy.links(session)
        url, headers = f"{links['base_url']}/chat/completions", {"Authorization": f"Bearer {links['api_key']}"}
        assert (await client.post(url, json={}, headers=headers | {"Origin": "http://evil.example"})).status_code == 403
        assert (await client.post(url, json={}, headers=headers | {"Host": "evil.example"})).status_code == 421
        assert (await client.post(url, content=b" " * (1 << 25), headers=headers)).status_code == 413
        assert (await client.post(url, content=b"[" * 100_000, headers=headers)).status_code == 400


class Stuck(ScriptedEngine):
    """An engine that never replies."""

    async def generate(self, *args: Any) -> Any:
        await asyncio.Event().wait()


async def test_a_call_that_runs_when_its_episode_ends_gets_410() -> None:
    async with proxied(Stuck([]), renderer_of("chatml")) as (proxy, session), sdk(proxy, session) as client:
        calls = [
            asyncio.create_task(client.chat.completions.create(model="m", messages=[user("Go.")]))  # type: ignore[arg-type]
            for _ in range(2)
        ]
        while session.model._generating is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        proxy.sessions.end(session)
        await session.model.close()
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, openai.APIStatusError)
            assert error.status_code == 410


class Slow(ScriptedEngine):
    """An engine whose first call never ends."""

    def __init__(self, replies: Any) -> None:
        super().__init__(replies)
        self.cancelled = 0

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Any:
        if not self.cancelled:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1
        return await super().generate(prompt_ids, sampling, session)


async def test_a_call_that_its_client_gave_up_is_cancelled_and_not_recorded() -> None:
    renderer = renderer_of("chatml")
    engine = Slow([renderer.reply_ids("north")])
    async with proxied(engine, renderer) as (proxy, session), sdk(proxy, session, timeout=1.0) as client:
        answer = await client.chat.completions.create(model="m", messages=[user("Go.")])
        assert answer.choices[0].message.content == "north", "the SDK sent the request again"
        assert engine.cancelled == len(session.model.calls) == 1


async def test_a_client_that_dies_in_the_middle_of_a_request_leaves_nothing() -> None:
    renderer = renderer_of("chatml")
    async with proxied(ScriptedEngine([renderer.reply_ids("north")]), renderer) as (proxy, session):
        before = set(asyncio.all_tasks())
        links = proxy.links(session)
        port = int(proxy.url.rpartition(":")[2])
        for body in (b"", b'{"messages": [{"role"'):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"POST /sessions/{session.id}/v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
            head += f"Authorization: Bearer {links['api_key']}\r\nContent-Length: 4000\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.transport.abort()
        async with asyncio.timeout(60):
            while set(asyncio.all_tasks()) - before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not session.model.calls
        async with sdk(proxy, session) as client:
            answer = await client.chat.completions.create(model="m", messages=[user("Go.")])
        assert answer.choices[0].message.content == "north"


async def test_a_client_that_dies_while_it_waits_for_an_episode_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentgym_rl.agent.proxy.app.CLAIM_TIMEOUT_S", 1000.0)
    renderer, proxy = renderer_of("chatml"), Proxy()
    await proxy.start()
    before = set(asyncio.all_tasks())
    port = int(proxy.url.rpartition(":")[2])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST /sessions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 2\r\n\r\n{{}}".encode())
    await until(lambda: set(asyncio.all_tasks()) - before)
    writer.transport.abort()
    await until(lambda: not set(asyncio.all_tasks()) - before)
    model = RecordedModel(ScriptedEngine([]), renderer, Sampling(9), LIMITS, "s")
    gone, waiting = ProxySession(model, TASK), ProxySession(model, TASK)
    for session in (gone, waiting):
        proxy.sessions.open(session, claimable=True)
    proxy.sessions.end(gone)
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{proxy.url}/sessions")
    assert answer.json()["id"] == waiting.id
    proxy.sessions.end(waiting)
    await proxy.close()


async def test_every_client_claims_an_episode_of_its_own_oldest_first() -> None:
    proxy = Proxy()
    await proxy.start()
    model = RecordedModel(ScriptedEngine([]), renderer_of("chatml"), Sampling(9), LIMITS, "s")
    sessions = [ProxySession(model, TASK) for _ in range(3)]
    for session in sessions:
        proxy.sessions.open(session, claimable=True)
    async with httpx.AsyncClient(timeout=60) as client:
        claimed = [(await client.post(f"{proxy.url}/sessions")).json()["id"] for _ in sessions]
    assert claimed == [session.id for session in sessions]
    for session in sessions:
        proxy.sessions.end(session)
    await proxy.close()


async def test_a_session_that_ends_unclaimed_is_forgotten() -> None:
    proxy = Proxy()
    session = ProxySession(RecordedModel(ScriptedEngine([]), renderer_of("chatml"), Sampling(9), LIMITS, "s"), TASK)
    proxy.sessions.open(session, claimable=True)
    proxy.sessions.end(session)
    left = weakref.ref(session.model)
    del session
    gc.collect()
    assert left() is None


class Echo(ScriptedEngine):
    """Replies with the last tokens of the prompt, after a pause in which other sessions are served."""

    def __init__(self) -> None:
        super().__init__([])

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Any:
        await asyncio.sleep(0.01)
        self.sessions[session] = self.sessions.get(session, 0) + 1
        ids = prompt_ids[-ECHOED:]
        return Completion(ids, [scripted_logprob(token) for token in ids], "length", 0)


ECHOED = 40
NO_LIMITS = httpx.Limits(max_connections=None, keepalive_expiry=None)
"""A client that closes idle connections by itself loses requests in a busy event loop."""


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.long)])
async def test_many_sessions_at_once_do_not_mix_and_leave_nothing(count: int) -> None:
    """Every session makes three calls of a growing conversation, then every second one is ended in a fourth."""
    renderer, engine, proxy = renderer_of("chatml"), Echo(), Proxy()
    await proxy.start()
    before, descriptors = set(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
    limits = Limits(5, ECHOED, 4000)
    sessions = [ProxySession(RecordedModel(engine, renderer, Sampling(9), limits, f"s{i}"), TASK) for i in range(count)]
    for session in sessions:
        proxy.sessions.open(session, claimable=False)
    async with AsyncExitStack() as stack:
        # One client for all would spend its time in searching its pool of connections.
        options: dict[str, Any] = {"limits": NO_LIMITS, "timeout": 280, "verify": False}
        clients = [await stack.enter_async_context(httpx.AsyncClient(**options)) for _ in range(-(-count // 25))]

        async def play(number: int, session: ProxySession) -> list[int]:
            client = clients[number // 25]
            links = proxy.links(session)
            headers = {"Authorization": f"Bearer {links['api_key']}"}
            messages: list[dict[str, Any]] = []
            statuses = []
            for turn in range(3):
                messages.append(user(f"I am number {number} in turn {turn}."))
                url = f"{links['base_url']}/chat/completions"
                answer = await client.post(url, json={"messages": messages}, headers=headers)
                statuses.append(answer.status_code)
                messages.append(answer.json()["choices"][0]["message"])
            last = asyncio.create_task(client.post(url, json={"messages": messages[:1]}, headers=headers))
            if number % 2:
                proxy.sessions.end(session)
                await session.model.close()
            statuses.append((await last).status_code)
            return statuses

        statuses = await asyncio.gather(*(play(i, s) for i, s in enumerate(sessions)))
    assert {tuple(row) for row in statuses[::2]} == {(200, 200, 200, 200)}
    assert {tuple(row) for row in statuses[1::2]} == {(200, 200, 200, 410)}
    for number, session in enumerate(sessions):
        calls = session.model.calls[:3]
        assert [call.prompt for call in calls] == [f"I am number {number} in turn {turn}." for turn in range(3)]
        assert all(call.token_ids == call.prompt_ids[-ECHOED:] for call in calls)
        assert f"number {number} in" in renderer.tokenizer.decode(calls[0].token_ids)
        assert {message.segment for message in stitch(calls)} == {0}
        proxy.sessions.end(session)
        await session.model.close()
    assert len(proxy.sessions) == len(engine.sessions) == 0
    async with asyncio.timeout(60):
        while set(asyncio.all_tasks()) - before or len(os.listdir("/proc/self/fd")) > descriptors:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await proxy.close()
