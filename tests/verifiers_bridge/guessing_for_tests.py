"""A multi-turn environment of verifiers without an evaluation set: guess a number in at most five turns, with hints."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


class Guessing(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        guess, number = _number(messages), int(state["answer"])
        text = "Reply with a number." if guess is None else "Higher." if number > guess else "Lower."
        return [{"role": "user", "content": text}]

    @vf.stop
    async def guessed(self, state: Any) -> bool:
        turns = state["trajectory"]
        return bool(turns) and _number(turns[-1]["completion"]) == int(state["answer"])


def _number(messages: Any) -> int | None:
    text = str(messages[-1]["content"]).strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 5 else None


def load_environment(fails: bool = False) -> vf.Environment:
    def found(completion: Any, answer: str) -> float:
        return float(str(completion[-1]["content"]).strip() == answer)

    class Failing(Guessing):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            raise KeyError("lost")

    numbers = [{"question": "Guess my number from 1 to 9.", "answer": str(n)} for n in range(1, 10)]
    kind = Failing if fails else Guessing
    return kind(dataset=Dataset.from_list(numbers), rubric=vf.Rubric(funcs=[found]), max_turns=5)


def load_tools() -> vf.Environment:
    def add(first: int, second: int) -> int:
        """Add two numbers."""
        return first + second

    return vf.ToolEnv(tools=[add], dataset=Dataset.from_list([{"question": "1 + 1?", "answer": "2"}]))
