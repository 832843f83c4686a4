"""Tools of an environment: JSON schemas for the agent, and the text action that each call stands for.

An environment lists its tools (`HasTools`); one that does not has the tool `act`, which takes any action as text. A
call is checked against its schema and becomes the environment's text action, so `step` is the same for both.

    Tool("get", "Take items.", "get {count} {item}", {"count": {"type": "integer"}, "item": {"type": "string"}})
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentgym_rl.errors import EnvError
from agentgym_rl.types import Step, ToolCall

MAX_CALLS = 8
"""Calls of one reply that are played. Further ones are answered with an error."""
_MAX_QUOTED = 80
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str, int, float),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}
"""Python types that an argument of each JSON type may have. A number does as text, too."""


class BadCall(Exception):
    """A call that cannot be played. The agent sees the text."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that the agent may call."""

    name: str
    description: str
    action: str = ""
    """Text action with a placeholder for each parameter, such as `get {count} {item}`; lists are joined by commas.
    Empty: the action is the call itself, `{"name": ..., "arguments": {...}}`."""
    parameters: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """JSON schema of each parameter, in order. One with a `default` may be left out."""
    keywords: Mapping[str, Any] = field(default_factory=dict)
    """Further keywords of the schema of all arguments: `required`, if parameters without a default are optional too,
    `$defs`, `additionalProperties`."""

    @classmethod
    def from_schema(cls, name: str, description: str, schema: Mapping[str, Any], action: str = "") -> Tool:
        """Return the tool whose arguments have a JSON schema, such as that of another package's function."""
        parameters = {key: dict(value) if isinstance(value, Mapping) else {} for key, value in _properties(schema)}
        keywords = {key: value for key, value in schema.items() if key not in ("type", "properties")}
        keywords = {"required": [], **keywords}
        if keywords["required"] == _without_default(parameters):
            del keywords["required"]
        return cls(name, description, action, parameters, keywords)

    @property
    def required(self) -> list[str]:
        """Names of the parameters that a call must have."""
        return list(self.keywords.get("required", _without_default(self.parameters)))

    def schema(self) -> dict[str, Any]:
        """Return the tool as chat templates and chat APIs take it."""
        parameters = {"type": "object", "properties": dict(self.parameters), "required": self.required}
        function = {"name": self.name, "description": self.description, "parameters": {**parameters, **self.keywords}}
        return {"type": "function", "function": function}

    def to_wire(self) -> dict[str, Any]:
        """Return the schema with the text action, as GET /info has it."""
        return {**self.schema(), "action": self.action}

    @classmethod
    def from_wire(cls, row: Any, where: str) -> Tool:
        """Return the tool that `to_wire` wrote."""
        try:
            function = row["function"]
            return cls.from_schema(function["name"], function["description"], function["parameters"], row["action"])
        except (KeyError, TypeError, AttributeError) as error:
            raise EnvError(f"{where} must list tools as JSON schemas with an action, got {row!r:.80}") from error

    def action_of(self, arguments: Mapping[str, Any]) -> str:
        """Return the text action of a call. Raise BadCall if the arguments do not fit the schema."""
        is_open = bool(self.keywords.get("additionalProperties"))
        if not is_open and (unknown := [name for name in arguments if name not in self.parameters]):
            known = ", ".join(self.parameters) or "no arguments"
            raise BadCall(f"{self.name} has no argument {_quote(unknown[0])}: it takes {known}")
        defaults = {name: schema["default"] for name, schema in self.parameters.items() if "default" in schema}
        values = {**defaults, **arguments}
        if missing := [name for name in self.required if name not in values]:
            raise BadCall(f"{self.name} needs the argument {', '.join(missing)}")
        for name, schema in self.parameters.items():
            if name in values:
                values[name] = _read(self, name, values.pop(name), schema)  # in the order of the parameters
        if not self.action:
            return json.dumps({"name": self.name, "arguments": values}, ensure_ascii=False)
        return _PLACEHOLDER.sub(lambda match: _text(values.get(match[1], "")), self.action).strip()

    def arguments_of(self, action: str) -> dict[str, Any] | None:
        """Return the arguments with which a call of this tool stands for a text action; None if it cannot."""
        if not self.action:
            return _structured_arguments(self.name, action)
        if (match := self._pattern().fullmatch(action.strip())) is None:
            return None
        values = match.groupdict()
        return {name: _parse(values[name], schema) for name, schema in self.parameters.items() if name in values}

    def _pattern(self) -> re.Pattern[str]:
        parts: list[str] = []
        position = 0
        for match in _PLACEHOLDER.finditer(self.action):
            parts.append(re.escape(self.action[position : match.start()]))
            parts.append(f"(?P<{match[1]}>{_value_pattern(self.parameters[match[1]])})")
            position = match.end()
        parts.append(re.escape(self.action[position:]))
        return re.compile("".join(parts), re.DOTALL)


ACT = Tool(
    "act",
    "Take one action in the environment and see what happens.",
    "{action}",
    {"action": {"type": "string", "description": "The action, written as the instruction says."}},
)
"""The tool of an environment that lists none."""


def call_of(tools: Sequence[Tool], action: str, env: str, takes_messages: bool = False) -> ToolCall | None:
    """Return the call that stands for a text action; None if the action is a message."""
    for tool in tools:
        if (arguments := tool.arguments_of(action)) is not None:
            return ToolCall(tool.name, arguments)
    if takes_messages:
        return None
    names = ", ".join(tool.name for tool in tools)
    raise EnvError(f"{env} has no tool for the action {_quote(action)}: its tools are {names}")


async def play_calls(
    tools: Sequence[Tool], calls: Sequence[ToolCall], step: Callable[[str], Awaitable[Step]], state: dict[str, Any]
) -> Step:
    """Play the calls of one reply in order and return them as one step, with a result per call.

    A call that cannot be played is answered with the reason, and the step counts as invalid. `state` is the info of
    the present state, for a reply of which no call is played.
    """
    if not calls:
        names = ", ".join(tool.name for tool in tools)
        return Step(f"The reply has no tool call. Call one of: {names}.", info={**state, "valid": False})
    by_name = {tool.name: tool for tool in tools}
    results: list[str] = []
    rewards: list[float] = []
    info, done, valid = state, False, True
    for number, call in enumerate(calls):
        if done:
            results.append("Not played: the episode has ended.")
            continue
        try:
            if number >= MAX_CALLS:
                raise BadCall(f"a reply may have {MAX_CALLS} calls, this is number {number + 1}")
            played = await step(_action_of(call, by_name))
        except BadCall as error:
            valid = False
            results.append(f"Invalid call: {error}.")
            continue
        results.append(played.observation)
        rewards.append(played.reward)
        info, done = played.info, played.done
        valid &= played.info.get("valid", True)
    if not valid:
        info = {**info, "valid": False}
    return Step("\n".join(results), math.fsum(rewards), done, info, results)


def _action_of(call: ToolCall, by_name: Mapping[str, Tool]) -> str:
    if call.error:
        raise BadCall(call.error)
    if call.name not in by_name:
        raise BadCall(f"there is no tool {_quote(call.name)}, only {', '.join(by_name)}")
    return by_name[call.name].action_of(call.arguments)


def _properties(schema: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    return (schema.get("properties") or {}).items()


def _without_default(parameters: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [name for name, schema in parameters.items() if "default" not in schema]


def _kinds(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the JSON types that a value may have; empty if any will do."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return (kind,)
    if isinstance(kind, list):
        return tuple(kind)
    choices = [_kinds(choice) for choice in schema.get("anyOf") or schema.get("oneOf") or ()]
    return () if () in choices else tuple(kind for kinds in choices for kind in kinds)


def _read(tool: Tool, name: str, value: Any, schema: Mapping[str, Any]) -> Any:
    """Return an argument as its schema wants it. A number or list that came as text (XML calls) is read from it."""
    kinds = _kinds(schema)
    if isinstance(value, str) and kinds and "string" not in kinds:
        value = _parse(value, schema)
    fits = not kinds or any(_fits(value, kind) for kind in kinds)
    if fits and isinstance(value, list) and tool.action:  # a text action joins the parts by commas
        fits = all(isinstance(part, str | int | float) for part in value)
    if not fits:
        needed = " or ".join(map(_article, kinds)) or "a list of texts or numbers"
        raise BadCall(f"{tool.name} needs {needed} as {name}, got {_quote(json.dumps(value, ensure_ascii=False))}")
    choices = schema.get("enum")
    if choices and value not in choices:
        raise BadCall(f"{tool.name} needs one of {', '.join(map(str, choices))} as {name}, got {_quote(str(value))}")
    return value


def _fits(value: Any, kind: str) -> bool:
    if kind == "null":
        return value is None
    if kind not in _TYPES:
        return True
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _parse(value: str, schema: Mapping[str, Any]) -> Any:
    """Return the value that a text stands for; the text itself if it is none of that type."""
    kinds = _kinds(schema)
    if not kinds or "string" in kinds:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return [part.strip() for part in value.split(",")] if "array" in kinds else value


def _text(value: Any) -> str:
    return ", ".join(str(part).strip() for part in value) if isinstance(value, list) else str(value).strip()


def _value_pattern(schema: Mapping[str, Any]) -> str:
    if choices := schema.get("enum"):
        return "|".join(re.escape(str(choice)) for choice in choices)
    if schema.get("type") == "integer":
        return "-?[0-9]+"
    return ".*?" if schema.get("default") == "" else ".+?"


def _structured_arguments(name: str, action: str) -> dict[str, Any] | None:
    try:
        call = json.loads(action)
    except ValueError:
        return None
    match call:
        case {"name": str(called), "arguments": dict(arguments)} if called == name:
            return arguments
    return None


def _article(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _quote(text: str) -> str:
    return repr(text if len(text) <= _MAX_QUOTED else f"{text[: _MAX_QUOTED - 3]}...")
