"""A single-turn environment of verifiers: sums, with an evaluation set and a rubric of two functions."""

from __future__ import annotations

import re
from typing import Any

import verifiers as vf
from datasets import Dataset


def rows(first: int, number: int) -> Dataset:
    return Dataset.from_list(
        [{"question": f"What is {n} + {n + 1}?", "answer": str(2 * n + 1)} for n in range(first, first + number)]
    )


def load_environment(num_rows: int = 8, rubric: str = "exact") -> vf.Environment:
    def exact(completion: Any, answer: str) -> float:
        return float(str(completion[-1]["content"]).strip() == answer)

    async def short(completion: Any) -> float:
        return float(re.fullmatch(r"\s*[0-9]{1,3}\s*", str(completion[-1]["content"])) is not None)

    def broken(completion: Any) -> float:
        raise RuntimeError("no such file")

    async def judged(judge: Any, prompt: Any, completion: Any, answer: str) -> float:
        return float("yes" in await judge(prompt, completion, answer))

    def ranked(completions: list[Any]) -> list[float]:
        return [0.0 for _ in completions]

    rubrics = {
        "exact": lambda: vf.Rubric(funcs=[exact, short], weights=[1.0, 0.5]),
        "broken": lambda: vf.Rubric(funcs=[exact, broken]),
        "judged": lambda: vf.Rubric(funcs=[judged]),
        "ranked": lambda: vf.Rubric(funcs=[ranked]),
        "keyed": lambda: vf.JudgeRubric(),
    }
    return vf.SingleTurnEnv(
        dataset=rows(0, num_rows),
        eval_dataset=rows(100, 3),
        system_prompt="Answer with a number only.",
        rubric=rubrics[rubric](),
    )
