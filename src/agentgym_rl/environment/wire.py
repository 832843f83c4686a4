"""The wire format between server and client: request bodies, answers, and the status code of each error.

Bodies are checked by hand because they have three fields and /step is the hot path of every rollout.
Unknown fields are ignored, as in AgentGym's servers.
"""

from __future__ import annotations

from typing import Any

import orjson

from agentgym_rl.errors import ConfigError, EnvError, EnvTimeout, EnvUnavailable
from agentgym_rl.types import MAX_REWARD, Step


class BadRequest(EnvError):
    """A malformed body, or an item that the environment does not have."""


class NotPlaying(EnvError):
    """The session was not reset, or its episode is over."""


class NotSupported(EnvError):
    """The environment does not implement this optional method."""


class TooLarge(BadRequest):
    """A request over the size limit."""


class NoSuchSession(EnvUnavailable):
    """An unknown session id, or the id of a closed session."""


class Full(EnvUnavailable):
    """The server has reached its limit of sessions."""


STATUS: dict[type[Exception], int] = {
    NoSuchSession: 404,
    NotPlaying: 409,
    TooLarge: 413,
    BadRequest: 422,
    ConfigError: 422,
    Full: 429,
    EnvError: 500,
    NotSupported: 501,
    EnvUnavailable: 503,
    EnvTimeout: 504,
}
"""HTTP status code of each error. The client maps the codes back to errors."""

_ERRORS: dict[int, type[Exception]] = {code: error for error, code in STATUS.items() if error is not ConfigError}
_ERRORS[401] = ConfigError


def error_body(error: Exception) -> bytes:
    return orjson.dumps({"detail": str(error) or type(error).__name__})


def error_from(status: int, body: bytes, where: str) -> Exception:
    """Return the exception that a client raises for an answer other than 200."""
    try:
        detail = orjson.loads(body)["detail"]
    except (ValueError, TypeError, KeyError):
        detail = body[:200].decode(errors="replace")
    return _ERRORS.get(status, EnvError)(f"{where} answered {status}: {detail}")


# Requests, as the server reads them.


def read_body(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body must be JSON: {error}") from None
    if type(body) is not dict:
        raise BadRequest(f"the body must be a JSON object, got {type(body).__name__}")
    return body


def integer(body: dict[str, Any], field: str) -> int:
    value = body.get(field)
    if type(value) is not int:  # a bool is an int to isinstance
        raise BadRequest(f"{field!r} must be an integer, got {_describe_field(body, field)}")
    return value


def text(body: dict[str, Any], field: str) -> str:
    value = body.get(field)
    if type(value) is not str:
        raise BadRequest(f"{field!r} must be a string, got {_describe_field(body, field)}")
    return value


def owner(raw: bytes) -> str:
    """Return the owner in the body of /create, or an empty string. Everything else in the body is ignored."""
    try:
        body = orjson.loads(raw) if raw else None
    except orjson.JSONDecodeError:
        return ""
    name = body.get("owner") if isinstance(body, dict) else None
    return name if isinstance(name, str) else ""


def _describe_field(body: dict[str, Any], field: str) -> str:
    return f"{body[field]!r:.80}" if field in body else "nothing"


# Answers: written by the server, read by the client.


def step_answer(step: Step, score: float, session_id: int | None = None) -> dict[str, Any]:
    answer = {
        "observation": step.observation,
        "reward": step.reward,
        "score": score,
        "done": step.done,
        "info": step.info,
    }
    if session_id is not None:
        answer["id"] = session_id
    return answer


def dump(answer: Any) -> bytes:
    try:
        return orjson.dumps(answer)
    except TypeError as error:
        raise EnvError(f"the environment's answer cannot be written as JSON: {error}") from error


def read_answer(raw: bytes, where: str) -> Any:
    try:
        answer = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise EnvError(f"{where} must answer with JSON, got {raw[:80]!r} ({error})") from None
    if isinstance(answer, dict) and "error" in answer:  # older servers report errors as 200
        raise EnvError(f"{where} answered with an error: {answer['error']}")
    return answer


def read_step(answer: Any, where: str) -> Step:
    if not isinstance(answer, dict):
        raise EnvError(f"{where} must answer with an object, got {type(answer).__name__}")
    try:
        step = Step(answer["observation"], answer["reward"], answer["done"], answer.get("info") or {})
    except KeyError as error:
        raise EnvError(f"{where} must answer with observation, reward and done, but {error} is missing") from None
    return checked_step(step, where)


def checked_step(step: Any, where: str) -> Step:
    """Return `step` after checking its types: a string, a finite number, a bool, a JSON object."""
    if not isinstance(step, Step):
        form = "agentgym_rl.Step(observation, reward, done, info)"
        raise EnvError(f"{where} must return a Step, got {type(step).__name__}: return {form}")
    if not isinstance(step.observation, str):
        raise EnvError(f"{where} must return a string as observation, got {type(step.observation).__name__}")
    if isinstance(step.reward, bool) or not isinstance(step.reward, int | float):
        raise EnvError(f"{where} must return a float as reward, got {type(step.reward).__name__}: write float(reward)")
    if not abs(step.reward) <= MAX_REWARD:  # `not ... <=` rather than `>`, so that NaN is rejected too
        raise EnvError(f"{where} must return a finite reward of at most ±{MAX_REWARD:g}, got {step.reward!r:.80}")
    if not isinstance(step.done, bool):
        raise EnvError(f"{where} must return a bool as done, got {type(step.done).__name__}")
    if not isinstance(step.info, dict):
        raise EnvError(f"{where} must return a dict as info, got {type(step.info).__name__}")
    if step.info:
        try:
            orjson.dumps(step.info)
        except TypeError as error:
            raise EnvError(f"{where} must return an info that JSON can represent: {error}") from error
    return step
