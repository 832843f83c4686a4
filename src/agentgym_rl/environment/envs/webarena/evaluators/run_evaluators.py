"""Runs a task's evaluators in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agentgym_rl.environment.envs.webarena.evaluators import answers, llm_judge
from agentgym_rl.environment.envs.webarena.evaluators.strings import (
    clean,
    exact_match,
    must_include,
    same_url,
    url_match,
)
from agentgym_rl.environment.envs.webarena.tasks.task_config import TaskConfig
from agentgym_rl.errors import ConfigError

CheckPages = Callable[[list[Mapping[str, Any]]], bool]
"""Checks the targets of program_html in the browser."""
CheckData = Callable[[list[Mapping[str, Any]]], bool]
"""Compares the embedded sites' data with the wanted changes."""


def evaluate(task: TaskConfig, answer: str, url: str, check_pages: CheckPages, check_data: CheckData) -> bool:
    """Return whether the episode that ended with `answer` at `url` solved the task."""
    evaluation = task.evaluation
    for kind in evaluation["eval_types"]:
        if kind == "string_match":
            success = string_match(task, answer)
        elif kind == "url_match":
            matches = same_url if evaluation.get("url_note") == "EXACT" else url_match
            success = matches(evaluation["reference_url"], url)
        elif kind == "program_html":
            success = check_pages(evaluation["program_html"])
        elif kind == "changed_data":
            success = check_data(evaluation["changed_data"])
        else:
            raise ConfigError(f"unknown evaluator {kind!r} in task {task.task_id}")
        if not success:
            return False
    return True


def string_match(task: TaskConfig, answer: str) -> bool:
    bare = clean(answer)  # comparing removes a second pair of quotes, as WebArena does
    for approach, wanted in task.evaluation["reference_answers"].items():
        if approach == "exact_match":
            matches = exact_match(wanted, bare)
        elif approach == "must_include":
            matches = all(must_include(each, bare, whole_word=len(wanted) == 1) for each in wanted)
        elif approach == "fuzzy_match":
            matches = _fuzzy(task, wanted, answer)
        elif approach == "number":
            matches = answers.number(wanted["value"], wanted["unit"], answer, task.intent)
        elif approach == "number_only":
            matches = answers.number_only(wanted, answer)
        elif approach == "one_of":
            matches = answers.one_of(wanted["right"], wanted["choices"], answer, task.intent)
        else:
            raise ConfigError(f"unknown string_match approach {approach!r} in task {task.task_id}")
        if not matches:
            return False
    return True


def _fuzzy(task: TaskConfig, wanted: str | list[str], answer: str) -> bool:
    """Return whether the answer covers all references. For N/A it may give the reason instead."""
    if wanted == "N/A":
        if exact_match("N/A", clean(answer)):
            return True
        return llm_judge.same_reason(task.intent, task.evaluation.get("string_note") or "it cannot be done", answer)
    references = [wanted] if isinstance(wanted, str) else wanted
    return llm_judge.same_meaning(task.intent, references, answer)
