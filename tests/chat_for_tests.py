"""A real HTTP server on loopback with the OpenAI chat protocol. It plays BabyAI and can inject faults."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response

PROMPT_TOKENS, COMPLETION_TOKENS, CACHED_TOKENS = 100, 10, 40


class ChatServer:
    """A chat model that goes to a visible red ball. Each of `faults` replaces one answer.

    A fault is "429", "500", "malformed", "hang", "no usage" or "401".
    """

    def __init__(self) -> None:
        self.url = ""
        self.faults: list[str] = []
        self.always: str | None = None
        """Fault of every request."""
        self.wait_for_concurrent = 0
        """Requests that must be pending at once before the first is answered."""
        self.hold_after: int | None = None
        """Number of requests after which further ones wait until this is None."""
        self.num_requests = 0
        self.max_concurrent = 0
        self._concurrent = 0
        self.app = FastAPI()
        self.app.post("/v1/chat/completions")(self.answer)

    async def answer(self, request: Request) -> Any:
        body = await request.json()
        self.num_requests += 1
        self._concurrent += 1
        self.max_concurrent = max(self.max_concurrent, self._concurrent)
        try:
            number = self.num_requests
            # The test sets these from another thread, so an asyncio event cannot be used.
            while self.max_concurrent < self.wait_for_concurrent or number > (self.hold_after or math.inf):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            fault = self.always or (self.faults.pop(0) if self.faults else "")
            await asyncio.sleep(60 if fault == "hang" else 0)
            return _faulty_response(fault) or self._reply(body, fault)
        finally:
            self._concurrent -= 1

    def _reply(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        observation = body["messages"][-1]["content"]
        ball = re.search(r"go to red ball \d+", observation)
        row: dict[str, Any] = {
            "choices": [
                {
                    "message": {"role": "assistant", "content": ball[0] if ball else "turn left"},
                    "finish_reason": "stop",
                }
            ]
        }
        if fault != "no usage":
            row["usage"] = {
                "prompt_tokens": PROMPT_TOKENS,
                "completion_tokens": COMPLETION_TOKENS,
                "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
            }
        return row


def _faulty_response(fault: str) -> Response | None:
    if fault == "429":
        return Response("slow down", 429, {"Retry-After": "0.2"})
    if fault == "500":
        return Response("oops", 500, {"Retry-After": "0"})
    if fault == "401":
        return Response("who are you?", 401)
    if fault == "malformed":
        return Response('{"choices": [{"mess', media_type="application/json")
    return None


@contextlib.contextmanager
def chat_server(chat: ChatServer | None = None) -> Iterator[ChatServer]:
    """Run the server in a thread of the test process, so that the test can inspect and control it."""
    chat = chat or ChatServer()
    listener = socket.create_server(("127.0.0.1", 0))
    chat.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    server = uvicorn.Server(uvicorn.Config(chat.app, log_level="error", timeout_graceful_shutdown=0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield chat
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
