"""Environments of the package verifiers (`verifiers:my-env`): rows of its datasets are items, its rubric is the reward.

verifiers plays a rollout by itself and asks an OpenAI client for every reply. Here that client is one whose replies are
the actions of `step`, so that stop conditions, the environment's answers and clean-up are verifiers' own. All rollouts
run in one thread with an event loop. Single- and multi-turn text is played; tools and judges are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import os
import queue
import re
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import verifiers
from openai import AsyncOpenAI

from agentgym_rl.environment.base import TextEnv, check_item
from agentgym_rl.environment.bridges.calls import MAX_ACTION_CHARS, shorten
from agentgym_rl.errors import ConfigError, EnvError, EnvTimeout
from agentgym_rl.types import Step

Message = tuple[str, str]
"""Role and text."""
JUDGES = {"judge", "judge_client", "judge_model"}
"""Arguments of reward functions that ask a language model."""
TEST_SHARE = 10
"""One row of so many is for testing, if an environment has no evaluation set."""

_reward_errors: ContextVar[list[Exception]] = ContextVar("reward_errors")
"""Errors of the reward functions of this rollout. verifiers itself logs them and scores 0."""


@lru_cache(maxsize=1)
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all rollouts. Its thread is a daemon: a forgotten episode ends with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers-rollouts", daemon=True).start()
    return loop


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of a rollout."""

    reward: float
    metrics: dict[str, float]
    """Score of each reward function, without weights."""
    stop: str
    """Name of the stop condition."""
    messages: list[Message]
    """Last messages of the environment; often none."""


class _Transport(httpx.AsyncBaseTransport):
    """Transport that answers chat requests with `reply`."""

    def __init__(self, reply: Callable[[list[Message]], Awaitable[str]]) -> None:
        self._reply = reply

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        asked = json.loads(await request.aread())
        message = {"role": "assistant", "content": await self._reply(_plain(asked["messages"]))}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0)
        kind = {"id": "reply", "object": "chat.completion", "created": 0, "model": "agent"}
        return httpx.Response(200, json={**kind, "choices": [choice], "usage": usage}, request=request)


class _Rollout:
    """One rollout in the event loop. The thread that plays it waits for requests and gives replies."""

    def __init__(self, environment: Any, row: Mapping[str, Any], timeout_s: float) -> None:
        self._environment = environment
        self._timeout_s = timeout_s
        self._events: queue.SimpleQueue[list[Message] | Outcome | Exception] = queue.SimpleQueue()
        self._replies: asyncio.Queue[str] = asyncio.Queue()
        self._task = asyncio.run_coroutine_threadsafe(self._play(dict(row)), _event_loop())

    def wait(self) -> list[Message] | Outcome:
        """Return the messages of the next request, or how the rollout ended."""
        try:
            event = self._events.get(timeout=self._timeout_s)
        except queue.Empty:
            self.cancel()
            raise EnvTimeout(f"verifiers took longer than {self._timeout_s:g} s to answer an action") from None
        if isinstance(event, Exception):
            raise EnvError(f"the verifiers environment failed: {type(event).__name__}: {event}") from event
        return event

    def reply(self, text: str) -> None:
        _event_loop().call_soon_threadsafe(self._replies.put_nowait, text)

    def cancel(self) -> None:
        self._task.cancel()

    async def _ask(self, messages: list[Message]) -> str:
        self._events.put(messages)
        return await self._replies.get()

    async def _play(self, row: dict[str, Any]) -> None:
        errors: list[Exception] = []
        _reward_errors.set(errors)
        try:
            async with httpx.AsyncClient(transport=_Transport(self._ask)) as http:
                options: dict[str, Any] = {"base_url": "http://agent.invalid/v1", "max_retries": 0, "timeout": None}
                openai = AsyncOpenAI(api_key="none", http_client=http, **options)
                client = verifiers.OpenAIChatCompletionsClient(openai)
                state = await self._environment.rollout(row, client, "agent", {})
            if state.get("error") is not None:
                raise state["error"]
            await self._environment.rubric.score_rollout(state)
            if errors:
                raise errors[0]
            metrics = {name: float(score) for name, score in (state["metrics"] or {}).items()}
            final = _plain(state.get("final_env_response") or [])
            stop = str(state.get("stop_condition") or "")
            self._events.put(Outcome(float(state["reward"]), metrics, stop, final))
        except Exception as error:
            self._events.put(error)


class VerifiersEnv:
    """An environment of verifiers. Subclasses set everything. Implements TextEnv."""

    name: ClassVar[str]
    instruction: ClassVar[str]
    splits: ClassVar[Mapping[str, range]]
    subsets: ClassVar[tuple[str, ...]] = ()
    cheap: ClassVar[bool] = False

    environment: ClassVar[Any]
    rows: ClassVar[tuple[Any, Any]]
    """Data sets of training and evaluation, in the order of the items."""
    success_reward: ClassVar[float]
    timeout_s: ClassVar[float]

    def __init__(self) -> None:
        self._rollout: _Rollout | None = None
        self._seen: list[Message] = []
        """Messages that the agent knows, its own among them."""

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return ()

    def reset(self, item: int) -> str:
        train, test = self.splits["train"], self.splits["test"]
        check_item(self, item)
        self.close()
        row = self.rows[0][item] if item in train else self.rows[1][item - test.start]
        rollout = _Rollout(self.environment, row, self.timeout_s)
        event = rollout.wait()
        if isinstance(event, Outcome):
            raise EnvError(f"item {item} of {self.name} ended before the first reply ({event.stop or 'no reason'})")
        self._rollout, self._seen = rollout, event
        return shorten(_text(event, self.instruction))

    def step(self, text: str) -> Step:
        rollout = self._rollout
        if rollout is None:
            raise EnvError(f"{self.name} needs a running episode: call reset first")
        if not text.strip():
            return Step("The reply is empty.", info={"valid": False})
        if len(text) > MAX_ACTION_CHARS:
            return Step(f"A reply has at most {MAX_ACTION_CHARS} characters, got {len(text)}.", info={"valid": False})
        try:
            text.encode()
        except UnicodeError:
            return Step("The reply is not valid Unicode.", info={"valid": False})
        rollout.reply(text)
        event = rollout.wait()
        if isinstance(event, Outcome):
            self._rollout = None
            success = event.reward >= self.success_reward
            info = {"valid": True, "success": success, "metrics": event.metrics, "stop": event.stop}
            return Step(shorten(_text(event.messages) or "The task is over."), event.reward, True, info)
        known = [*self._seen, ("assistant", text)]
        new = event[len(known) :] if event[: len(known)] == known else event
        self._seen = event
        return Step(shorten(_text(new) or "(nothing)"), info={"valid": True})

    def close(self) -> None:
        rollout, self._rollout = self._rollout, None
        if rollout is not None:
            rollout.cancel()


def _plain(messages: Any) -> list[Message]:
    """Return role and text of each message. Parts that are no text are named."""
    plain = []
    for message in [messages] if isinstance(messages, (str, Mapping)) else messages:
        if isinstance(message, str):
            plain.append(("user", message))
            continue
        fields = message if isinstance(message, Mapping) else message.model_dump()
        content = fields.get("content") or ""
        parts = [content] if isinstance(content, str) else [part.get("text") or f"[{part['type']}]" for part in content]
        plain.append((str(fields["role"]), "\n".join(parts)))
    return plain


def _text(messages: Sequence[Message], instruction: str = "") -> str:
    """Return messages as one observation. The system message that is the instruction is left out."""
    shown = [(role, text) for role, text in messages if not (role == "system" and text.strip() == instruction)]
    if all(role == "user" for role, _ in shown):
        return "\n\n".join(text for _, text in shown)
    return "\n\n".join(f"{role}: {text}" for role, text in shown)


def verifiers_class(
    env_id: str,
    *,
    name: str | None = None,
    instruction: str | None = None,
    num_test: int | None = None,
    success_reward: float = 1.0,
    timeout_s: float = 60.0,
    **arguments: Any,
) -> type[TextEnv]:
    """Return the environment that verifiers loads as `env_id`. Further keywords go to its `load_environment`.

    Items of `train` are the rows of its data set, those of `test` the rows of its evaluation set. Without one, the
    last `num_test` rows are for testing, by default a tenth. A success is an episode with at least `success_reward`.
    """
    where = f"environment verifiers:{env_id}"
    environment = _load(env_id, arguments, where)
    _require_text(environment, where)
    train, test = _datasets(environment, num_test, where)
    _guard_rewards(environment.rubric)
    first = _plain(train[0]["prompt"])
    system = environment.system_prompt or next((text for role, text in first if role == "system"), "")
    members = {
        "name": name or re.sub(r"[^\w.~-]+", "-", env_id),
        "instruction": (instruction or system or "Reply to the message.").strip(),
        "splits": {"train": range(len(train)), "test": range(len(train), len(train) + len(test))},
        "environment": environment,
        "rows": (train, test),
        "success_reward": success_reward,
        "timeout_s": timeout_s,
    }
    return type("VerifiersEnv", (VerifiersEnv,), members)


def _load(env_id: str, arguments: Mapping[str, Any], where: str) -> Any:
    """Return the environment of verifiers. Its module may be in the current folder."""
    missing = [name for name in ("MultiTurnEnv", "OpenAIChatCompletionsClient") if not hasattr(verifiers, name)]
    if missing:
        raise ConfigError(
            f"{where}: verifiers {verifiers.__version__} has no {missing[0]}: install a release with it, "
            "pip install 'agentgym-rl[verifiers]'"
        )
    # Its constructor would replace the handlers of SIGINT and SIGTERM, and fail outside the main thread.
    sys.modules[verifiers.Environment.__module__].signal = SimpleNamespace(  # type: ignore[attr-defined]
        SIGINT=signal.SIGINT, SIGTERM=signal.SIGTERM, signal=lambda number, handler: None
    )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return verifiers.load_environment(env_id, **arguments)
    except Exception as error:
        hint = ": it wants the key of a judge's API, whose rewards are not supported" if "api_key" in str(error) else ""
        raise ConfigError(f"{where}: {' '.join(str(error).split())}{hint}") from error


def _require_text(environment: Any, where: str) -> None:
    """Raise ConfigError for an environment that is no chat of texts or whose reward a judge gives."""
    kind = type(environment).__name__
    if not isinstance(environment, verifiers.MultiTurnEnv):
        raise ConfigError(f"{where}: only SingleTurnEnv and MultiTurnEnv are played, it is a {kind}")
    if isinstance(environment, verifiers.ToolEnv) or environment.tool_defs:
        raise ConfigError(f"{where}: {kind} calls tools, only text is played: play its tools over MCP (mcp:NAME)")
    for rubric in _rubrics(environment.rubric):
        rewards = type(rubric).__name__
        wanted = {argument for function in rubric.funcs for argument in inspect.signature(function).parameters}
        if isinstance(rubric, verifiers.JudgeRubric) or JUDGES & {*rubric.class_objects, *wanted}:
            raise ConfigError(
                f"{where}: {rewards} asks a judge model over an API, only rewards that are computed from the text are "
                "played: take another rubric, or judge episodes by [[rewards]] of the recipe"
            )
        if rubric.has_group_rewards:
            raise ConfigError(f"{where}: {rewards} compares the rollouts of a group, only rewards of one are played")


def _rubrics(rubric: Any) -> Iterator[Any]:
    """Yield the rubrics of a group, or the rubric itself."""
    inner = getattr(rubric, "rubrics", None)
    if inner is None:
        yield rubric
    else:
        for each in inner:
            yield from _rubrics(each)


def _guard_rewards(rubric: Any) -> None:
    """Record the errors of reward functions, so that a failure does not become a reward of 0."""

    def guard(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                score = function(*args, **kwargs)
                return await score if inspect.isawaitable(score) else score
            except Exception as error:
                _reward_errors.get().append(error)
                raise

        return guarded

    for each in _rubrics(rubric):
        each.funcs = [guard(function) for function in each.funcs]


def _datasets(environment: Any, num_test: int | None, where: str) -> tuple[Any, Any]:
    """Return the rows of training and of evaluation."""
    for build in (environment.get_dataset, environment.get_eval_dataset):
        with contextlib.suppress(ValueError):  # it has only the other one
            build(1)
    train, test = environment.dataset, environment.eval_dataset
    if train is None:
        train, test = test, None
    if test is None:
        num_test = max(1, len(train) // TEST_SHARE) if num_test is None else num_test
        if not 0 < num_test < len(train):
            raise ConfigError(f"{where}: it has {len(train)} rows, {num_test} for testing leave none: set num_test")
        return train.select(range(len(train) - num_test)), train.select(range(len(train) - num_test, len(train)))
    return train, test if num_test is None else test.select(range(min(num_test, len(test))))
