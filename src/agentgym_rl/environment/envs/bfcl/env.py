"""BFCL's multi-turn tasks as a game: the user makes several requests, the agent calls functions of simulated APIs."""

from __future__ import annotations

import decimal
import hashlib
import json
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

from agentgym_rl.environment.envs.bfcl import scenarios
from agentgym_rl.environment.envs.tool_tasks import HOW_TO_CALL, ToolTask, write_call
from agentgym_rl.environment.tools import Tool
from agentgym_rl.types import Step

_RULES = """\
You act for a user who makes several requests, one after the other. Do each with the functions that you have, then \
write a message to the user: it ends your work on this request, and the next request follows. If a request cannot be \
done because a function or a detail is missing, say so in a message. Do not ask for permission."""
TOOL_INSTRUCTION = f"{_RULES}\n\nA reply without a call is a message to the user."
INSTRUCTION = f"{_RULES}\n\n{HOW_TO_CALL}"

MAX_EXPONENT = 1000
"""Largest exponent and number of digits in a call of the mathematical functions, which compute as long as it takes."""
MAX_NUMBER = 10**15
_FAILED = "Error during execution: "


class Apis:
    """The simulated APIs of one conversation, in one state."""

    def __init__(self, task: scenarios.Task) -> None:
        from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING, STATELESS_CLASSES

        self.instances: dict[str, Any] = {}
        for name in task.classes:
            instance = getattr(import_module(CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in STATELESS_CLASSES:
                initial = deepcopy(task.initial.get(name, {}))
                instance._load_scenario(initial, long_context=task.category == "long_context")
            self.instances[name] = instance

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the result of a function as BFCL writes it: text, JSON of a dict, or an error."""
        instance = next(api for api in reversed(self.instances.values()) if hasattr(api, name))
        try:
            if type(instance).__name__ == "MathAPI":
                _check_numbers(arguments)
            with decimal.localcontext():  # a function sets the precision of all later arithmetic
                result = getattr(instance, name)(**arguments)
        except Exception as error:
            return f"{_FAILED}{error}"
        if isinstance(result, dict):
            try:
                return json.dumps(result)
            except (TypeError, ValueError):
                return str(result)
        return str(result)

    def state(self) -> str:
        """Return a digest of the public state, which is compared with that of the reference."""
        digest = hashlib.sha256()
        for name, instance in self.instances.items():
            public = {key: value for key, value in vars(instance).items() if not key.startswith("_")}
            digest.update(f"{name}{public!r}".encode(errors="replace"))
        return digest.hexdigest()[:16]


class Bfcl(ToolTask):
    """800 conversations: 200 scenarios in four variants. Subclasses set `splits`."""

    name: ClassVar[str] = "bfcl"
    instruction: ClassVar[str] = INSTRUCTION
    tool_instruction: ClassVar[str] = TOOL_INSTRUCTION
    subsets: ClassVar[tuple[str, ...]] = (*scenarios.CATEGORIES, *scenarios.DOMAINS)

    @classmethod
    def tools(cls) -> Sequence[Tool]:
        return scenarios.all_tools()

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        if not 0 <= item < len(scenarios.tasks()):
            raise IndexError(f"bfcl has items 0 to {len(scenarios.tasks()) - 1}, got {item}")
        task = scenarios.tasks()[item]
        return tuple(name for name in (task.category, task.domain) if name)

    def item_tools(self) -> list[str]:
        names = [name for api in self._task.classes for name in scenarios.class_tools(api)]
        held_back = {name for turn, later in self._task.held_back.items() if turn > self._turn for name in later}
        return [name for name in dict.fromkeys(names) if name not in held_back]

    def start(self, item: int) -> str:
        self._task = scenarios.tasks()[item]
        self._apis, self._reference = Apis(self._task), Apis(self._task)
        self._turn = 0
        self._turn_calls = 0
        """Calls since the user's last message."""
        self._results: list[str] = []
        """Results of all calls."""
        return self._request()

    def _request(self) -> str:
        """Return the user's message of the present turn, with the functions that come with it."""
        if self._turn not in self._task.held_back:
            return self._task.requests[self._turn]
        from bfcl_eval.constants.default_prompts import DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC as PROMPT

        names = self._task.held_back[self._turn]
        tools = (
            tool for api in self._task.classes for tool in scenarios.class_tools(api).values() if tool.name in names
        )
        schemas = [json.dumps(tool.schema()["function"], ensure_ascii=False) for tool in tools]
        return "\n".join([*schemas, PROMPT])

    def play(self, tool: str, arguments: dict[str, Any]) -> Step:
        result = self._apis.call(tool, arguments)
        self._turn_calls += 1
        self._results.append(result)
        return Step(result, info={"valid": not result.startswith(_FAILED)})

    def message(self, text: str) -> Step:
        problem = self._problem()
        self._turn += 1
        self._turn_calls = 0
        if problem or self._turn == len(self._task.requests):
            verdict = problem or "All requests were done."
            info = {"valid": True, "success": not problem, "requests_done": self._turn - bool(problem)}
            return Step(verdict, float(not problem), True, info)
        return Step(self._request(), info={"valid": True})

    def _problem(self) -> str:
        """Play the reference of this turn and return what BFCL's checkers find, or an empty string."""
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import response_checker, state_checker

        solution = self._task.solution[self._turn]
        expected = [self._reference.call(name, arguments) for name, arguments in solution]
        if not solution:  # nothing can be done in this turn; what was called shows in the next check
            return ""
        where = f"Request {self._turn + 1} of {len(self._task.requests)} was not done: "
        if not self._turn_calls:
            return f"{where}no function was called."
        for verdict in (
            state_checker(self._apis.instances, self._reference.instances),
            response_checker(self._results, expected, self._turn),
        ):
            if not verdict["valid"]:
                return where + str(verdict["error_message"])
        return ""

    def oracle(self) -> str:
        """Return the next call of the reference, then a message."""
        self.require_playing()
        solution = self._task.solution[self._turn]
        if self._turn_calls < len(solution):
            return write_call(*solution[self._turn_calls])
        return "Done." if solution else "I cannot do this yet: a function or a detail that I need is missing."

    def state_key(self) -> str:
        """Return the item, the turn, the state of the APIs, and the calls so far, which count for the verdict."""
        results = hashlib.sha256("\n".join(self._results).encode(errors="replace")).hexdigest()[:16]
        return f"{self._item}|{self._turn}|{self._turn_calls > 0}|{self._apis.state()}|{results}"


def _check_numbers(arguments: Any) -> None:
    """Raise for arguments that would take the mathematical functions very long."""
    for name, value in arguments.items():
        values = value if isinstance(value, list) else [value]
        limit = MAX_EXPONENT if name in ("exponent", "precision", "decimal_places") else MAX_NUMBER
        if any(isinstance(number, int | float) and abs(number) > limit for number in values):
            raise ValueError(f"{name} must be at most {limit:g}")


@cache
def load_bfcl() -> type[Bfcl]:
    """Return the environment. Its splits are known once the package's data is read."""
    return type("Bfcl", (Bfcl,), {"splits": scenarios.splits(), "__doc__": Bfcl.__doc__, "__module__": __name__})
