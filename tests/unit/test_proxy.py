"""The proxy over a tiny real model, called by the real openai SDK: exact tokens, tools, streams, hostile clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import httpx
import openai
import pytest
import torch
from openai import AsyncOpenAI
from scripted_engine_for_tests import ScriptedEngine, scripted_logprob
from tokenizers_for_tests import byte_level_bpe, split_segmentation
from training_for_tests import counting_player, slow_logprobs

from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.agent.proxy.app import Proxy
from agentgym_rl.agent.proxy.chat import RecordedModel
from agentgym_rl.agent.proxy.sessions import ProxySession
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.segments import stitch
from agentgym_rl.types import Limits, Sampling, Task, ToolCall, Trajectory

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
        with pytest.raises(openai.BadRequestError, match="responses are not stored"):
            await client.responses.create(model="m", input="x", previous_response_id="resp_1")


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
        ({"messages": [user("x")], "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [user("x")], "max_tokens": -1}, "positive integer"),
        ({"messages": [user("x")], "tools": [{"type": "web_search"}]}, "a tool must be"),
        ({"messages": [user("x")], "stop": [1]}, "stop must be"),
        ([], "JSON object"),
    ],
)
async def test_bad_requests_get_400_with_a_reason(body: Any, reason: str) -> None:
    async with proxied(ScriptedEngine([]), renderer_of("chatml")) as (proxy, session), httpx.AsyncClient() as client:
        links = proxy.links(session)
        headers = {"Authorization": f"Bearer {links['api_key']}"}
        answer = await client.post(f"{links['base_url']}/chat/completions", json=body, headers=headers)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]
    assert not session.model.calls


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
    async with proxied(ScriptedEngine([]), renderer_of("chatml")) as (proxy, session), httpx.AsyncClient() as client:
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


async def test_many_sessions_do_not_mix() -> None:
    renderer = renderer_of("chatml")
    engine = ScriptedEngine([renderer.reply_ids("north")])
    proxy = Proxy()
    await proxy.start()
    sessions = [ProxySession(RecordedModel(engine, renderer, Sampling(400), LIMITS, f"s{i}"), TASK) for i in range(200)]
    for session in sessions:
        proxy.sessions.open(session, claimable=False)
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=100), timeout=120) as client:

        async def call(number: int, session: ProxySession) -> int:
            body = {"messages": [user(f"I am {number}.")]}
            links = proxy.links(session)
            headers = {"Authorization": f"Bearer {links['api_key']}"}
            return (await client.post(f"{links['base_url']}/chat/completions", json=body, headers=headers)).status_code

        assert set(await asyncio.gather(*(call(i, s) for i, s in enumerate(sessions)))) == {200}
    for number, session in enumerate(sessions):
        (recorded_call,) = session.model.calls
        assert recorded_call.prompt == f"I am {number}."
        proxy.sessions.end(session)
        await session.model.close()
    await proxy.close()
    assert len(proxy.sessions) == len(engine.sessions) == 0
