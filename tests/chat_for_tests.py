"""A real HTTP server on loopback that speaks the OpenAI chat protocol and plays BabyAI a little, well or badly."""

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
    """Goes to the red ball when it sees one. `faults` are what it does instead, one a request, until they are used up.

    A fault is "429", "500", "malformed", "hang", "no usage" or "401".
    """

    def __init__(self) -> None:
        self.url = ""
        self.faults: list[str] = []
        self.always: str | None = None
        """A fault of every request."""
        self.together = 0
        """Nobody is answered before so many have been there at once."""
        self.hold_after: int | None = None
        """Whoever comes after so many requests waits until this is None."""
        self.num_requests = 0
        self.most_at_once = 0
        self._now = 0
        self.app = FastAPI()
        self.app.post("/v1/chat/completions")(self.answer)

    async def answer(self, request: Request) -> Any:
        body = await request.json()
        self.num_requests += 1
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            mine = self.num_requests
            # Set from the thread of the test, so no event of this loop.
            while self.most_at_once < self.together or mine > (self.hold_after or math.inf):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            fault = self.always or (self.faults.pop(0) if self.faults else "")
            await asyncio.sleep(60 if fault == "hang" else 0)
            return _misbehave(fault) or self._reply(body, fault)
        finally:
            self._now -= 1

    def _reply(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        seen = body["messages"][-1]["content"]
        ball = re.search(r"go to red ball \d+", seen)
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


def _misbehave(fault: str) -> Response | None:
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
def chat_server() -> Iterator[ChatServer]:
    """In a thread of the test process, where the test can look at it and tell it what to do."""
    chat = ChatServer()
    listener = socket.create_server(("127.0.0.1", 0))
    chat.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    server = uvicorn.Server(uvicorn.Config(chat.app, log_level="error", timeout_graceful_shutdown=0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        give_up_at = time.monotonic() + 60
        while not server.started:
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        yield chat
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
