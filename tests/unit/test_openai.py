"""The chat client against a real server on loopback that speaks the OpenAI protocol, well and badly."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from email.utils import formatdate
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from test_rollout import TASK, Corridor
from test_user_messages import Desk

from agentgym_rl.agent.engines.openai import ChatClient, ContextOverflow, Meter, Prices, Refused, Tokens
from agentgym_rl.agent.policy import ChatPolicy
from agentgym_rl.agent.rollout import rollout
from agentgym_rl.agent.styles import STYLES
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.environment.tools import ACT
from agentgym_rl.errors import ConfigError, EngineError
from agentgym_rl.types import Limits, Message, Sampling, StopReason, Task

LIMITS = Limits(max_turns=6, max_new_tokens=32, max_context=4000)
SAMPLING = Sampling(max_new_tokens=32, temperature=0.5, top_p=0.9, stop=("END",), seed=3)
ASK = [Message("user", "hello")]


def completion(content: Any = "go", finish: str = "stop", **usage: int) -> dict[str, Any]:
    return {
        "choices": [{"message": {"role": "assistant", "content": content}, "finish_reason": finish}],
        "usage": usage or {"prompt_tokens": 10, "completion_tokens": 2},
    }


class Api:
    """Answers with what is queued in `next`, then with `usual`; remembers what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.app = FastAPI()
        self.app.post("/v1/chat/completions")(self.answer)
        self.forget()

    def forget(self) -> None:
        self.next: list[Any] = []
        self.usual: Any = completion()
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.times: list[float] = []

    async def answer(self, request: Request) -> Any:
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("authorization"))
        self.times.append(time.monotonic())
        answer = self.next.pop(0) if self.next else self.usual
        if isinstance(answer, float):
            await asyncio.sleep(answer)
            return completion("late")
        return answer


@pytest.fixture(scope="module")
def served() -> Iterator[Api]:
    """One server for all tests: each would wait longer for the end of its own than for anything else."""
    api = Api()
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(api.app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    api.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/"
    yield api
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture
def api(served: Api) -> Api:
    served.forget()
    return served


@pytest.fixture
async def client(api: Api) -> AsyncIterator[ChatClient]:
    client = ChatClient(api.url, "tiny", api_key_variable=None, timeout_s=5, retries=2, max_wait_s=5)
    yield client
    await client.close()


def chat_policy(client: ChatClient) -> ChatPolicy:
    return ChatPolicy(client, SAMPLING, instruction=Corridor.instruction)


TOOL_CALL = {"id": "call_abc", "type": "function", "function": {"name": "act", "arguments": '{"action": "go"}'}}


def calling(*calls: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    answer = completion(content, "tool_calls")
    answer["choices"][0]["message"]["tool_calls"] = list(calls)
    return answer


async def test_an_agent_with_tools_uses_those_of_the_api(api: Api, client: ChatClient) -> None:
    broken = {"id": "call_bad", "type": "function", "function": {"name": "act", "arguments": '{"action": go'}}
    api.next = [calling(TOOL_CALL, content="On."), calling(broken, TOOL_CALL), completion("I go."), calling(TOOL_CALL)]
    env = Corridor(tools=[ACT.schema()])
    policy = ChatPolicy(client, SAMPLING, instruction=Corridor.instruction, tools=env.tools)
    trajectory = await rollout(TASK, env, policy, LIMITS, id="t")
    assert trajectory.success
    assert env.heard == ["go", "go", "go"]
    assert all(asked["tools"] == [ACT.schema()] for asked in api.asked)
    assert api.asked[1]["messages"][2:] == [
        {"role": "assistant", "content": "On.", "tool_calls": [TOOL_CALL]},
        {"role": "tool", "content": "You are in room 1 of 3.", "tool_call_id": "call_abc"},
    ]
    malformed, second = api.asked[2]["messages"][-2:]
    assert "not valid JSON" in malformed["content"]
    assert (malformed["tool_call_id"], second["tool_call_id"]) == ("call_bad", "call_abc")
    assert api.asked[2]["messages"][4]["tool_calls"] == [broken, TOOL_CALL], "the model sees its own mistake"
    assert api.asked[3]["messages"][-1] == {
        "role": "user",
        "content": "The reply has no tool call. Call one of: act.",
    }
    assert [info.get("valid") for info in trajectory.infos] == [True, False, False, True]


def asking(name: str, number: int) -> dict[str, Any]:
    function = {"name": name, "arguments": '{"place": "Oslo"}'}
    return calling({"id": f"call_{number}", "type": "function", "function": function})


async def test_a_chat_api_is_offered_the_tools_of_each_state(api: Api, client: ChatClient) -> None:
    api.next = [asking("train", 0), completion("Booked."), asking("hotel", 1), completion("Booked, too.")]
    pool = LocalPool({"desk": Desk}, action_format="tool")
    session = STYLES["tool"].wrap(await pool.open("desk"))
    policy = ChatPolicy(client, Sampling(100), instruction=session.instruction, tools=session.tools)
    trajectory = await rollout(Task("desk", 0), session, policy, LIMITS, id="t")
    await pool.close()
    assert trajectory.success
    assert trajectory.stop is StopReason.DONE
    offered = [[tool["function"]["name"] for tool in asked["tools"]] for asked in api.asked]
    assert offered == [["train"], ["train"], ["train", "hotel"], ["train", "hotel"]]
    assert api.asked[-1]["messages"][-3:] == [
        {"role": "user", "content": "And a hotel. You may now call hotel(place)."},
        {"role": "assistant", "content": "", "tool_calls": asking("hotel", 1)["choices"][0]["message"]["tool_calls"]},
        {"role": "tool", "content": "Booked hotel Oslo.", "tool_call_id": "call_1"},
    ]


async def test_an_agent_without_tools_sends_none(api: Api, client: ChatClient) -> None:
    await rollout(TASK, Corridor(), chat_policy(client), LIMITS, id="t")
    assert all("tools" not in asked for asked in api.asked)


async def test_an_episode_over_the_wire(api: Api, client: ChatClient) -> None:
    trajectory = await rollout(TASK, Corridor(), chat_policy(client), LIMITS, id="t")
    assert trajectory.success
    assert trajectory.token_ids == []
    assert not any(trajectory.loss_mask)
    first, second, third = api.asked
    assert first["model"] == "tiny"
    assert first["messages"] == [
        {"role": "system", "content": Corridor.instruction},
        {"role": "user", "content": "Item 7. You are in room 0 of 3."},
    ]
    assert second["messages"] == [
        *first["messages"],
        {"role": "assistant", "content": "go"},
        {"role": "user", "content": "You are in room 1 of 3."},
    ]
    assert (first["temperature"], first["top_p"], first["stop"], first["max_tokens"]) == (0.5, 0.9, ["END"], 32)
    assert len({ask["seed"] for ask in (first, second, third)}) == 3
    usage = client.usage
    assert (usage.requests, usage.retries, usage.prompt_tokens, usage.completion_tokens) == (3, 0, 30, 6)


async def test_the_key_comes_from_the_environment(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_KEY", "s3cret")
    client = ChatClient(api.url, "tiny", api_key_variable="TINY_KEY", retries=0)
    api.next = [Response("go away", 401)]
    with pytest.raises(EngineError, match="refused: HTTP 401 'go away'") as caught:
        await client.complete(ASK, SAMPLING)
    assert "s3cret" not in str(caught.value)
    assert api.keys == ["Bearer s3cret"]
    await client.close()
    monkeypatch.delenv("TINY_KEY")
    with pytest.raises(ConfigError, match=r"\$TINY_KEY, which is not set"):
        ChatClient(api.url, "tiny", api_key_variable="TINY_KEY")


async def test_without_a_key_none_is_sent(api: Api, client: ChatClient) -> None:
    await client.complete(ASK, SAMPLING)
    assert api.keys == [None]


async def test_429_waits_as_long_as_requested(api: Api, client: ChatClient) -> None:
    api.next = [Response("slow down", 429, {"Retry-After": "0.4"}), Response("again", 429, {"Retry-After": "0"})]
    answer = await client.complete(ASK, SAMPLING)
    assert answer.content == "go"
    assert 0.4 <= api.times[1] - api.times[0] < 3
    assert (client.usage.requests, client.usage.retries) == (3, 2)


async def test_retry_after_may_be_a_date(api: Api, client: ChatClient) -> None:
    api.next = [Response("slow down", 503, {"Retry-After": formatdate(time.time() + 2, usegmt=True)})]
    await client.complete(ASK, SAMPLING)
    assert 0.9 <= api.times[1] - api.times[0] < 4  # dates have whole seconds


async def test_a_requested_pause_beyond_the_maximum_fails(api: Api, client: ChatClient) -> None:
    api.next = [Response("tomorrow", 429, {"Retry-After": "86400"})]
    with pytest.raises(EngineError, match="asks to wait 86400 s"):
        await client.complete(ASK, SAMPLING)
    assert len(api.asked) == 1


NOW = {"Retry-After": "0"}


@pytest.mark.parametrize("status", [429, 500, 501, 503, 520, 599])
async def test_retries_end_and_the_episode_is_an_error(api: Api, client: ChatClient, status: int) -> None:
    api.usual = Response("overloaded", status, NOW)
    trajectory = await rollout(TASK, Corridor(), chat_policy(client), LIMITS, id="t")
    assert trajectory.stop is StopReason.ERROR
    assert f"failed 3 times, the last: HTTP {status} 'overloaded'" in (trajectory.error or "")
    assert len(api.asked) == 3


async def test_a_server_that_always_asks_for_no_wait_is_not_hammered(api: Api, client: ChatClient) -> None:
    past = formatdate(0, usegmt=True)  # as a clock that is late says
    api.next = [Response("slow down", 429, {"Retry-After": wait}) for wait in (past, "0")]
    await client.complete(ASK, SAMPLING)
    assert len(api.times) == 3
    assert api.times[2] - api.times[1] >= 0.9


async def test_500_without_a_hint_backs_off(api: Api, client: ChatClient) -> None:
    api.next = [Response("oops", 500)]
    assert (await client.complete(ASK, SAMPLING)).content == "go"
    assert 0.4 <= api.times[1] - api.times[0] < 3


@pytest.mark.parametrize(
    "answer",
    [
        Response('{"choices": [', media_type="application/json"),
        {"choices": []},
        {"object": "error"},
        ["go"],
        completion(content=5),
        Response("[" * 100_000, media_type="application/json"),
        Response("plain", headers={"Content-Encoding": "gzip"}),
    ],
)
async def test_malformed_answers_are_tried_again(api: Api, answer: Any) -> None:
    client = ChatClient(api.url, "tiny", api_key_variable=None, retries=0)
    api.next = [answer]
    with pytest.raises(EngineError, match=r"failed 1 time, the last: (not a chat completion|DecodingError)"):
        await client.complete(ASK, SAMPLING)
    await client.close()
    client = ChatClient(api.url, "tiny", api_key_variable=None, retries=1)
    api.next = [answer]
    assert (await client.complete(ASK, SAMPLING)).content == "go"
    assert client.usage.prompt_tokens == 10  # what could not be read was not counted
    await client.close()


async def test_a_server_that_does_not_answer_or_does_not_exist(api: Api) -> None:
    client = ChatClient(api.url, "tiny", api_key_variable=None, timeout_s=0.2, retries=0)
    api.next = [4.0]
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"no answer within 0.2 s"):
        await client.complete(ASK, SAMPLING)
    assert time.monotonic() - started < 3.9
    await client.close()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    absent = ChatClient(f"http://127.0.0.1:{port}/v1", "tiny", api_key_variable=None, retries=9)
    with pytest.raises(EngineError, match=r"cannot be reached \(ConnectError.*check the address \(--base-url\)"):
        await absent.complete(ASK, SAMPLING)
    assert absent.usage.requests == 3  # not ten
    await absent.close()


async def test_refusals_from_the_first_request_on_are_a_fatal_error(api: Api, client: ChatClient) -> None:
    api.next = [Response("who are you?", 401)] * 3
    for count in range(3):
        assert not client.fatal_error, count
        with pytest.raises(EngineError, match="check --key-variable, no key was sent"):
            await client.complete(ASK, SAMPLING)
    assert client.fatal_error.endswith("refused: HTTP 401 'who are you?': check --key-variable, no key was sent")
    answered = ChatClient(api.url, "tiny", api_key_variable=None)
    await answered.complete(ASK, SAMPLING)
    api.next = [Response("not this text", 403)] * 4
    for _ in range(4):
        with pytest.raises(EngineError, match="HTTP 403"):
            await answered.complete(ASK, SAMPLING)
    assert not answered.fatal_error  # an episode's own trouble: others were answered
    await answered.close()


async def test_a_refusal_after_other_failures_is_not_fatal(api: Api) -> None:
    client = ChatClient(api.url, "tiny", api_key_variable=None, retries=0)
    api.next = [Response("busy", 503), Response("busy", 503), Response("not this text", 403)]
    for _ in range(3):
        with pytest.raises(EngineError):
            await client.complete(ASK, SAMPLING)
    assert not client.fatal_error
    assert (client.answers, client.failures) == (0, 3)
    assert "refused: HTTP 403 'not this text'" in client.last_error
    await client.close()


async def test_a_refused_request_is_not_retried(api: Api, client: ChatClient) -> None:
    api.next = [Response("no such model", 404)]
    with pytest.raises(EngineError, match="refused: HTTP 404 'no such model'"):
        await client.complete(ASK, SAMPLING)
    assert len(api.asked) == 1


async def test_endings(api: Api, client: ChatClient) -> None:
    api.next = [completion(), completion("I think", "length")]
    trajectory = await rollout(TASK, Corridor(), chat_policy(client), LIMITS, id="t")
    assert (trajectory.stop, trajectory.num_turns) == (StopReason.LENGTH, 2)

    # By the server's own count there is room for 5 more tokens, then for none.
    api.next = [
        completion(prompt_tokens=3990, completion_tokens=5),
        completion(prompt_tokens=3998, completion_tokens=2),
    ]
    trajectory = await rollout(TASK, Corridor(), chat_policy(client), LIMITS, id="t")
    assert (trajectory.stop, trajectory.num_turns) == (StopReason.MAX_CONTEXT, 2)
    assert api.asked[-1]["max_tokens"] == 5

    api.next = [completion(prompt_tokens=3990, completion_tokens=5), completion("I th", "length")]
    trajectory = await rollout(TASK, Corridor(), chat_policy(client), LIMITS, id="t")
    assert (trajectory.stop, trajectory.num_turns) == (StopReason.MAX_CONTEXT, 2)

    api.next = [Response('{"error": {"code": "context_length_exceeded"}}', 400)]
    trajectory = await rollout(TASK, Corridor(), chat_policy(client), LIMITS, id="t")
    assert (trajectory.stop, trajectory.num_turns) == (StopReason.MAX_CONTEXT, 0)
    api.next = [Response('{"error": {"code": "context_length_exceeded"}}', 400)]
    with pytest.raises(ContextOverflow):
        await client.complete(ASK, SAMPLING)


LONG = (
    "This model's maximum context length is 4096 tokens. However, you requested 4500 tokens",
    "The decoder prompt (length 5000) is longer than the maximum model length of 4096",
    "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
    "the request exceeds the available context size, try increasing it (exceed_context_size_error)",
    "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000",
    "The input token count (5000) exceeds the maximum number of tokens allowed (4096).",
    "prompt is too long: 205000 tokens > 200000 maximum",
    "This model's maximum prompt length is 131072 but the request contains 140000 tokens.",
)
OTHER = (
    "Invalid request: max_tokens is too large: 100000. This model supports at most 4096 completion tokens",
    "you must provide a model parameter",
    "temperature must be at most 2",
)


@pytest.mark.parametrize("text", LONG)
@pytest.mark.parametrize("status", [400, 422])
async def test_a_context_overflow_is_recognized_in_every_servers_wording(
    api: Api, client: ChatClient, text: str, status: int
) -> None:
    api.next = [Response(json.dumps({"error": {"message": text}}), status), Response("too large", 413)]
    for _ in range(2):
        with pytest.raises(ContextOverflow):
            await client.complete(ASK, SAMPLING)


@pytest.mark.parametrize("text", OTHER)
async def test_other_refusals_are_errors(api: Api, client: ChatClient, text: str) -> None:
    api.next = [Response(json.dumps({"error": {"message": text}}), 400)]
    with pytest.raises(Refused):
        await client.complete(ASK, SAMPLING)


async def test_content_in_parts_and_implausible_usage(api: Api, client: ChatClient) -> None:
    parts = [{"type": "text", "text": "go "}, {"type": "image_url", "image_url": {}}, {"type": "text", "text": "up"}]
    usage = {"prompt_tokens": 10**400, "completion_tokens": 3}
    row = {"choices": [{"message": {"content": parts}, "finish_reason": "stop"}], "usage": usage}
    api.next = [Response(json.dumps(row), media_type="application/json")]
    answer = await client.complete(ASK, SAMPLING)
    assert (answer.content, answer.tokens.reported) == ("go up", False)


async def test_odd_contents(api: Api, client: ChatClient) -> None:
    api.next = [
        completion(content=None),
        Response('{"choices": [{"message": {"content": "a\\ud800b"}}]}', media_type="application/json"),
    ]
    assert (await client.complete(ASK, SAMPLING)).content == ""
    answer = await client.complete(ASK, SAMPLING)
    assert (answer.content, answer.cut, answer.context_tokens) == ("a?b", False, 0)


async def test_a_reply_that_was_cut_in_its_hidden_thought_has_no_content(api: Api, client: ChatClient) -> None:
    cut = completion(finish="length")
    cut["choices"][0]["message"] = {"role": "assistant", "reasoning": "I wonder"}
    api.next = [cut]
    answer = await client.complete(ASK, SAMPLING)
    assert (answer.content, answer.cut, len(api.asked)) == ("", True, 1)
    api.next = [{"choices": [{"message": {"reasoning": "I wonder"}}]}]
    assert (await client.complete(ASK, SAMPLING)).content == "go"  # asked again: that was no message


async def test_one_429_makes_all_requests_wait(api: Api, client: ChatClient) -> None:
    api.next = [Response("slow down", 429, {"Retry-After": "0.5"})]
    first = asyncio.create_task(client.complete(ASK, SAMPLING))
    while not client.usage.retries:  # noqa: ASYNC110 - the client has nothing to wait for
        await asyncio.sleep(0.005)
    await asyncio.gather(first, *(client.complete(ASK, SAMPLING) for _ in range(3)))
    assert len(api.times) == 5
    assert min(api.times[1:]) - api.times[0] >= 0.5


async def test_retry_after_in_milliseconds_and_invalid(api: Api, client: ChatClient) -> None:
    api.next = [Response("", 429, {"Retry-After-Ms": "300", "Retry-After": "3000"})]
    await client.complete(ASK, SAMPLING)
    assert 0.3 <= api.times[1] - api.times[0] < 3
    api.next = [Response("", 429, {"Retry-After": "soon"})]
    await client.complete(ASK, SAMPLING)
    assert 0.4 <= api.times[3] - api.times[2] < 3  # as if it had not said


async def test_an_exhausted_quota_is_not_retried(api: Api, client: ChatClient) -> None:
    api.next = [Response('{"error": {"code": "insufficient_quota"}}', 429)]
    with pytest.raises(EngineError, match="refused: HTTP 429"):
        await client.complete(ASK, SAMPLING)
    assert len(api.asked) == 1


async def test_requests_per_minute_are_spaced_out(api: Api) -> None:
    client = ChatClient(api.url, "tiny", api_key_variable=None, requests_per_minute=600)
    started = time.monotonic()
    await asyncio.gather(*(client.complete(ASK, SAMPLING) for _ in range(5)))
    assert sorted(api.times)[2] - started >= 0.2
    assert sorted(api.times)[4] - started >= 0.4
    await client.close()


async def test_requests_are_spaced_out_after_a_pause_too(api: Api) -> None:
    client = ChatClient(api.url, "tiny", api_key_variable=None, requests_per_minute=600)
    api.next = [Response("slow down", 429, {"Retry-After": "0.5"})]
    await asyncio.gather(*(client.complete(ASK, SAMPLING) for _ in range(6)))
    first, *_, last = api.times
    waited = sum(at - first >= 0.5 for at in api.times)
    assert waited >= 4
    assert last - first >= 0.5 + 0.1 * (waited - 2)
    await client.close()


@pytest.mark.parametrize(
    "usage", [None, 5, {}, {"prompt_tokens": "many", "completion_tokens": 1}, {"prompt_tokens": -1}]
)
async def test_incomplete_usage_is_counted_as_unreported(api: Api, client: ChatClient, usage: Any) -> None:
    api.next = [{**completion("paid for"), "usage": usage}]
    answer = await client.complete(ASK, SAMPLING)
    assert (answer.content, answer.tokens) == ("paid for", Tokens())
    assert (client.usage.unreported, client.usage.prompt_tokens) == (1, 0)


async def test_an_episode_has_a_meter_of_its_own(api: Api, client: ChatClient) -> None:
    cached = {"prompt_tokens": 50, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 30}}
    api.next = [{**completion(), "usage": cached}]
    meter, other = Meter(client), Meter(client)
    await meter.complete(ASK, SAMPLING)
    await other.complete(ASK, SAMPLING)
    assert meter.answers == [Tokens(50, 4, 30, reported=True)]
    assert other.answers == [Tokens(10, 2, 0, reported=True)]
    assert client.usage.prompt_tokens == 60
    assert Prices(2.0, 10.0, 0.5).cost(meter.answers[0]) == pytest.approx((20 * 2 + 30 * 0.5 + 4 * 10) / 1e6)
    assert Prices(2.0, 10.0).cost(meter.answers[0]) == pytest.approx((50 * 2 + 4 * 10) / 1e6)


@pytest.mark.parametrize(
    "address", ["api.openai.com/v1", "http://[bad", "http://", "http://a b/v1", "http://host:99999/v1", "http://h:x/v1"]
)
def test_invalid_addresses(address: str) -> None:
    with pytest.raises(ConfigError, match="must look like https"):
        ChatClient(address, "tiny", api_key_variable=None)


@pytest.mark.parametrize("address", ["http://[::1]:8000/v1", "http://127.0.0.1/v1", "https://my_box.example-1.org"])
async def test_valid_addresses(address: str) -> None:
    await ChatClient(address, "tiny", api_key_variable=None).close()


def test_a_key_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("ключ", "two\nlines"):
        monkeypatch.setenv("TINY_KEY", key)
        with pytest.raises(ConfigError, match=r"\$TINY_KEY must be one line of printable ASCII") as caught:
            ChatClient("http://127.0.0.1/v1", "tiny", api_key_variable="TINY_KEY")
        assert key not in str(caught.value)


async def test_the_field_for_the_token_limit_can_be_named(api: Api) -> None:
    client = ChatClient(api.url, "tiny", api_key_variable=None, max_tokens_field="max_completion_tokens")
    await client.complete(ASK, Sampling(max_new_tokens=8))
    assert api.asked[0]["max_completion_tokens"] == 8
    assert not {"max_tokens", "stop", "seed"} & set(api.asked[0])
    await client.close()
