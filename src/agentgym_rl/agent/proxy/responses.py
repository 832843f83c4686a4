"""The common part of OpenAI's Responses API: text, function calls and their outputs, all sent with every request."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from agentgym_rl.agent.proxy.chat import (
    ChatReply,
    ChatRequest,
    bad_request,
    read_limit,
    read_messages,
    read_tools,
    require_text,
)
from agentgym_rl.common.chat_messages import to_openai


def read_response_request(body: dict[str, Any]) -> ChatRequest:
    """Return the request of a body of `/responses`. Raise RequestError if it is none or cannot be served."""
    for name in ("previous_response_id", "conversation", "prompt"):
        if body.get(name) is not None:
            raise bad_request(f"{name} is not supported, responses are not stored: send all items as input")
    text = body.get("text") or {}
    if not isinstance(text, dict) or text.get("format") not in (None, {"type": "text"}):
        raise bad_request(f"text = {text!r:.80} is not supported: leave it out")
    rows: list[dict[str, Any]] = []
    if body.get("instructions"):
        rows.append({"role": "system", "content": body["instructions"]})
    items = body.get("input")
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise bad_request(f"input must be a text or a list of items, got {items!r:.80}")
    for item in items:
        _append(rows, item)
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(t, dict) and t.get("type") == "function" for t in tools):
        raise bad_request("tools must be a list of functions, other tools are not supported")
    shown = [] if body.get("tool_choice") == "none" else read_tools([{"function": tool} for tool in tools])
    return ChatRequest(read_messages(rows), shown, read_limit(body.get("max_output_tokens")))


def _append(rows: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Add an item to the messages. Calls belong to the assistant's message before them."""
    match item.get("type", "message"):
        case "message":
            rows.append({"role": item.get("role"), "content": _text(item.get("content"))})
        case "function_call":
            if not rows or rows[-1]["role"] != "assistant":
                rows.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            rows[-1].setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": function})
        case "function_call_output":
            rows.append({"role": "tool", "content": _text(item.get("output")), "tool_call_id": item.get("call_id")})
        case "reasoning":
            pass
        case other:
            raise bad_request(f"input items of type {other!r:.80} are not supported")


def _text(content: Any) -> Any:
    require_text(content)
    return "".join(str(part.get("text", "")) for part in content) if isinstance(content, list) else content


def response_object(reply: ChatReply, model: str) -> dict[str, Any]:
    """Return a reply as a response: a message if it has text, and its calls."""
    row = to_openai(reply.message)
    output: list[dict[str, Any]] = []
    if row["content"] or not row.get("tool_calls"):
        part = {"type": "output_text", "text": row["content"], "annotations": []}
        output.append(
            {"type": "message", "id": _id("msg"), "status": "completed", "role": "assistant", "content": [part]}
        )
    for call in row.get("tool_calls", ()):
        item = {"type": "function_call", "id": _id("fc"), "call_id": call["id"], "status": "completed"}
        output.append(item | call["function"])
    cut = reply.finish_reason == "length"
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "model": model,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        },
    }


def response_events(response: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed response, which is complete by then."""
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {**response, "status": "in_progress", "output": []}}
    ]
    for index, item in enumerate(response["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        is_text = item["type"] == "message"
        empty = {**item, "content": []} if is_text else {**item, "arguments": ""}
        events.append({"type": "response.output_item.added", "output_index": index, "item": empty})
        if is_text:
            part, place = item["content"][0], {**place, "content_index": 0}
            events += [
                {"type": "response.content_part.added", **place, "part": {**part, "text": ""}},
                {"type": "response.output_text.delta", **place, "delta": part["text"], "logprobs": []},
                {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []},
                {"type": "response.content_part.done", **place, "part": part},
            ]
        else:
            arguments = item["arguments"]
            events += [
                {"type": "response.function_call_arguments.delta", **place, "delta": arguments},
                {
                    "type": "response.function_call_arguments.done",
                    **place,
                    "name": item["name"],
                    "arguments": arguments,
                },
            ]
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    last = "response.incomplete" if response["status"] == "incomplete" else "response.completed"
    events.append({"type": last, "response": response})
    yield from ({**event, "sequence_number": number} for number, event in enumerate(events))


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
