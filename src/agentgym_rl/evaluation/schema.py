"""Schema of a finished eval.json, checked before tables are built: the file may come from another user."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat, TypeAdapter, ValidationError

from agentgym_rl.errors import ConfigError
from agentgym_rl.evaluation.plan import TaskPlan


class _Part(BaseModel):
    """A JSON object that may have further keys; tables ignore them."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Rate(_Part):
    value: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat


class _Total(_Part):
    items: int
    episodes: int
    errors: int
    unplayed: int
    unreported: int
    causes: dict[str, int]
    cost_usd: FiniteFloat | None


class _Cell(_Total):
    success: _Rate | None
    reward: _Rate | None = None
    turns: FiniteFloat | None = None
    truncated: FiniteFloat | None = None
    success_errors_as_failures: FiniteFloat | None = None
    prompt_tokens: FiniteFloat | None
    sampled_tokens: FiniteFloat | None


class _Overall(_Part):
    success: _Rate
    scenarios: list[str]
    own_data: bool


class _Result(_Part):
    max_turns: int | None
    tasks: dict[str, _Cell | None]
    scenarios: dict[str, _Cell | None]
    overall: _Overall | None
    total: _Total


class _Agent(_Part):
    name: str


class _Config(_Part):
    agent: _Agent
    turns: list[int] | None
    samples: int
    tasks: list[dict[str, Any]]


class _Evaluation(_Part):
    config: _Config
    settings: dict[str, Any]
    results: list[_Result]


_PLAN = TypeAdapter(TaskPlan)


def require_valid(path: Path, row: Mapping[str, Any]) -> None:
    """Raise ConfigError, with the place of the error, if no table can be built from `row`, the content of `path`."""
    try:
        evaluation = _Evaluation.model_validate(row)
        for plan in evaluation.config.tasks:
            _PLAN.validate_python(plan)
            if unknown := plan.keys() - TaskPlan.__dataclass_fields__.keys():
                raise ConfigError(f"{path} is damaged (config.tasks: unknown {min(unknown)}): evaluate again")
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path} is damaged ({place}: {first['msg']}): evaluate again") from error
    if not evaluation.results:
        raise ConfigError(f"{path} is damaged (results: needs at least one, got none): evaluate again")
