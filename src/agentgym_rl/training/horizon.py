"""ScalingInter-RL: schedules of the number of turns an episode may take.

A horizon counts *finished* steps, so that a run can resume at any step of a stage. `turns` applies to the next step,
and `advance` is called once after each finished step. Steps count from 0: stepwise with `turns=(2, 4, 8)` and
`steps_per_stage=10` plays steps 0-9 with 2 turns, 10-19 with 4 and every later step with 8.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from statistics import fmean
from typing import Any, Protocol

from agentgym_rl.training.settings import HorizonSettings


class Horizon(Protocol):
    """A schedule of turns for one environment."""

    @property
    def turns(self) -> int:
        """Turns of the next step."""

    @property
    def stage(self) -> int:
        """Stage of the next step, from 0."""

    def advance(self, success: float | None, truncated: float | None) -> None:
        """Count a finished step. `truncated` is the share of its episodes that ended at the horizon.

        Both are None if the step had no usable episode of this environment.
        """

    def state(self) -> dict[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...


class _Counted:
    """Base of schedules that depend only on the number of finished steps."""

    def __init__(self) -> None:
        self.finished = 0

    def advance(self, success: float | None, truncated: float | None) -> None:
        self.finished += 1

    def state(self) -> dict[str, Any]:
        return {"finished": self.finished}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.finished = state["finished"]


class StepwiseHorizon(_Counted):
    """`turns[k]` for the k-th block of `steps_per_stage` steps; the last stage lasts until the end."""

    def __init__(self, turns: tuple[int, ...], steps_per_stage: int) -> None:
        super().__init__()
        self._turns, self._steps_per_stage = turns, steps_per_stage

    @property
    def stage(self) -> int:
        return min(self.finished // self._steps_per_stage, len(self._turns) - 1)

    @property
    def turns(self) -> int:
        return self._turns[self.stage]


class LinearHorizon(_Counted):
    """From `first` turns at step 0 to `last` at step `steps`, rounded down; `last` afterwards."""

    def __init__(self, first: int, last: int, steps: int) -> None:
        super().__init__()
        self._first, self._last, self._steps = first, last, steps

    @property
    def turns(self) -> int:
        return self._first + (self._last - self._first) * min(self.finished, self._steps) // self._steps

    @property
    def stage(self) -> int:
        return self.turns - self._first


class AdaptiveHorizon:
    """Grows when success has stalled while episodes still end at the horizon.

    The next stage begins when all of these hold: the stage has lasted at least two windows; the mean success of the
    last window exceeds the one before by less than `min_gain`; and in the last window at least `min_truncated` of the
    episodes ended at the horizon. A stage also ends after `max_steps`, if not 0. The last stage never ends. A step
    without a usable episode of this environment does not count.
    """

    def __init__(
        self, turns: tuple[int, ...], window: int, min_gain: float, min_truncated: float, max_steps: int
    ) -> None:
        self._turns = turns
        self._window, self._min_gain, self._min_truncated, self._max_steps = window, min_gain, min_truncated, max_steps
        self.stage = 0
        self._history: list[tuple[float, float]] = []

    @property
    def turns(self) -> int:
        return self._turns[self.stage]

    def advance(self, success: float | None, truncated: float | None) -> None:
        if success is None or truncated is None or self.stage == len(self._turns) - 1:
            return
        self._history.append((success, truncated))
        if self._stage_is_over():
            self.stage += 1
            self._history = []

    def _stage_is_over(self) -> bool:
        if self._max_steps and len(self._history) >= self._max_steps:
            return True
        if len(self._history) < 2 * self._window:
            return False
        before, last = self._history[-2 * self._window : -self._window], self._history[-self._window :]
        gain = fmean(s for s, _ in last) - fmean(s for s, _ in before)
        return gain < self._min_gain and fmean(t for _, t in last) >= self._min_truncated

    def state(self) -> dict[str, Any]:
        return {"stage": self.stage, "history": [list(pair) for pair in self._history]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.stage = state["stage"]
        self._history = [(success, truncated) for success, truncated in state["history"]]


def turns_after(horizon: Horizon, steps: int) -> int:
    """Return the turns of the step that follows `steps` further ones. An adaptive schedule does not know them yet and
    returns its present ones."""
    later = copy.copy(horizon)
    for _ in range(steps):
        later.advance(None, None)
    return later.turns


def make_horizon(settings: HorizonSettings) -> Horizon:
    """Return the schedule that `settings` describe."""
    turns = tuple(settings.turns)
    if settings.kind == "linear":
        return LinearHorizon(turns[0], turns[1], settings.steps_per_stage)
    if settings.kind == "adaptive":
        return AdaptiveHorizon(
            turns, settings.window, settings.min_gain, settings.min_truncated, settings.steps_per_stage
        )
    return StepwiseHorizon(turns, settings.steps_per_stage if settings.kind == "stepwise" else 1)
