"""A judge: a chat model that is asked about episodes, with a cache on disk and limits on time and cost."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import orjson

from agentgym_rl.agent.engines.base import Engine
from agentgym_rl.agent.engines.openai import Answer, ChatClient, ContextOverflow, Tokens
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.errors import EngineError
from agentgym_rl.training.reward_settings import JudgeSettings
from agentgym_rl.types import Message, Sampling

CHARS_PER_TOKEN = 4
"""Characters that count as one token if the server reports no counts."""
MAX_PAUSE_S = 60.0
"""Longest pause that a server may ask for."""

Parsed = TypeVar("Parsed")


class UnreadableAnswer(ValueError):
    """The judge's answer has no score. The text says what was needed."""


class JudgeChat(Protocol):
    """The interface of a judge's model, which calls `on_request` before every request."""

    async def complete(
        self, messages: list[Message], sampling: Sampling, *, on_request: Callable[[], None]
    ) -> Answer: ...


class LocalChat:
    """A chat over an engine in this process."""

    def __init__(self, engine: Engine, renderer: Renderer, max_context: int) -> None:
        self._engine, self._renderer, self._max_context = engine, renderer, max_context

    async def complete(self, messages: list[Message], sampling: Sampling, *, on_request: Callable[[], None]) -> Answer:
        """Return the model's next message."""
        prompt = self._renderer.prompt(messages)
        free = self._max_context - len(prompt)
        if free < 1:
            raise ContextOverflow(
                f"the judge reads at most {self._max_context} tokens, got a prompt of {len(prompt)}: lower "
                "judge.max_chars"
            )
        on_request()
        session = _key(messages)
        max_new_tokens, stops = min(sampling.max_new_tokens, free), self._renderer.stop_token_ids
        sampling = Sampling(max_new_tokens, sampling.temperature, stop_token_ids=stops, seed=0)
        try:
            completion = await self._engine.generate(prompt, sampling, session)
        finally:
            await self._engine.release(session)
        tokens = Tokens(len(prompt), len(completion.token_ids), reported=True)
        return Answer(self._renderer.decode(completion.token_ids), completion.finish == "length", tokens)

    async def close(self) -> None:
        await self._engine.close()


class Judge:
    """Asks a chat model, retries, and keeps every answer in `cache_path`, so that no question is paid for twice.

    The cache is also what makes a resumed run exact: it gets the answers that the killed process got.
    """

    def __init__(self, chat: JudgeChat, name: str, settings: JudgeSettings, cache_path: Path) -> None:
        """`name` identifies the model in the cache."""
        self.settings = settings
        self._chat, self._name, self._path = chat, name, cache_path
        # `tokens` and `calls` count the requests of all processes of the run, those without an answer included.
        self._answers, self.tokens, self.calls = _read_cache(cache_path)
        self._expected_tokens = 0
        """Estimated tokens of the questions that wait for an answer."""
        self._asking: dict[str, asyncio.Lock] = {}
        self._slots = asyncio.Semaphore(settings.concurrency)

    async def ask(self, messages: list[Message], parse: Callable[[str], Parsed]) -> tuple[Parsed, str]:
        """Return what `parse` reads in the answer, and the answer. Raise EngineError if there is none.

        An answer that `parse` refuses with UnreadableAnswer is returned to the judge with the reason. If none can be
        read they are forgotten, so that a resumed run asks again.
        """
        settings = self.settings
        limit_s, problem, unread = settings.timeout_s * (settings.retries + 1), "", list[str]()
        async with self._slots:
            try:
                async with asyncio.timeout(limit_s):
                    for _ in range(settings.retries + 1):
                        text = await self._answer(messages)
                        try:
                            return parse(text), text
                        except UnreadableAnswer as error:
                            problem = str(error)
                            unread.append(self._key_of(messages))
                        messages = [*messages, Message("assistant", text), Message("user", f"{problem} Answer again.")]
            except TimeoutError:
                raise EngineError(f"the judge gave no answer within {limit_s:g} s") from None
        self._forget(unread)
        raise EngineError(f"the judge's answer cannot be read: {problem} It answered {text[-200:]!r}")

    async def _answer(self, messages: list[Message]) -> str:
        key = self._key_of(messages)
        async with self._asking.setdefault(key, asyncio.Lock()):
            if key not in self._answers:
                await self._request(key, messages)
        self._asking.pop(key, None)
        return self._answers[key]

    async def _request(self, key: str, messages: list[Message]) -> None:
        """Ask the model and keep its answer. A request without an answer counts with the tokens of its prompt."""
        prompt_tokens, requests = _estimate_tokens(messages), 0
        expected = prompt_tokens + self.settings.max_new_tokens
        self._require_tokens(expected)

        def count_request() -> None:
            nonlocal requests
            self._require_call()
            if requests:  # the one before failed
                self._require_tokens(prompt_tokens)
                self.tokens += prompt_tokens
            requests += 1
            self.calls += 1

        self._expected_tokens += expected
        sampling = Sampling(self.settings.max_new_tokens, self.settings.temperature)
        try:
            answer = await self._chat.complete(messages, sampling, on_request=count_request)
        except BaseException:
            if requests:
                self.tokens += prompt_tokens
                self._append(key, None, requests, requests * prompt_tokens)
            raise
        finally:
            self._expected_tokens -= expected
        estimate = prompt_tokens + _estimate_tokens([Message("assistant", answer.content)])
        tokens = answer.context_tokens if answer.tokens.reported else estimate
        self.tokens += tokens
        self._answers[key] = answer.content
        self._append(key, answer.content, requests, (requests - 1) * prompt_tokens + tokens)

    def _key_of(self, messages: list[Message]) -> str:
        return _key(messages, self._name, self.settings.temperature, self.settings.max_new_tokens)

    def _require_call(self) -> None:
        if self.calls >= self.settings.max_calls:
            raise EngineError(f"the budget is spent: judge.max_calls = {self.settings.max_calls}, raise it and resume")

    def _require_tokens(self, expected: int) -> None:
        """Raise EngineError if a question of so many tokens could exceed the budget, with those under way."""
        limit = self.settings.max_total_tokens
        if 0 < limit < self.tokens + self._expected_tokens + expected:
            raise EngineError(
                f"the budget is spent: {self.tokens} tokens, {self._expected_tokens} under way, up to {expected} for "
                f"this question, judge.max_total_tokens = {limit}, raise it and resume"
            )

    def _append(self, key: str, answer: str | None, requests: int, tokens: int) -> None:
        """Append a line to the cache. None says that there is no usable answer."""
        row = {"key": key, "model": self._name, "requests": requests, "tokens": tokens, "answer": answer}
        with self._path.open("ab") as file:
            file.write(orjson.dumps(row) + b"\n")

    def _forget(self, keys: list[str]) -> None:
        for key in keys:
            if self._answers.pop(key, None) is not None:
                self._append(key, None, 0, 0)

    async def close(self) -> None:
        if isinstance(self._chat, ChatClient | LocalChat):
            await self._chat.close()


def make_chat_client(settings: JudgeSettings) -> ChatClient:
    """Return the client of the API at `judge.url`."""
    assert settings.url is not None
    assert settings.model is not None
    return ChatClient(
        settings.url,
        settings.model,
        api_key_variable=settings.api_key_variable,
        timeout_s=settings.timeout_s,
        retries=settings.retries,
        max_wait_s=MAX_PAUSE_S,
        setting="judge.url",
    )


def _key(messages: list[Message], *parts: object) -> str:
    """Return the name of a question in the cache."""
    text = json.dumps([list(map(str, parts)), [[m.role, m.content] for m in messages]])
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _estimate_tokens(messages: list[Message]) -> int:
    return -(-sum(len(message.content) for message in messages) // CHARS_PER_TOKEN)


def _read_cache(path: Path) -> tuple[dict[str, str], int, int]:
    """Return (answers by key, tokens, requests), with requests that got no usable answer in the last two only.

    A torn last line, which a kill leaves, is removed. Lines of earlier versions have no number of requests.
    """
    if not path.is_file():
        return {}, 0, 0
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    rows = [orjson.loads(line) for line in whole.splitlines()]
    answers = {row["key"]: row["answer"] for row in rows}
    known = {key: answer for key, answer in answers.items() if answer is not None}
    return (
        known,
        sum(row["tokens"] for row in rows),
        sum(row.get("requests", row["answer"] is not None) for row in rows),
    )
