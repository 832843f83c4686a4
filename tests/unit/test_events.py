"""Worker events are polled and reported during a run and when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_for_tests import events_of
from runs_for_tests import counting_config, train_counting

from agentgym_rl.config import Config
from agentgym_rl.errors import WorkerLost
from agentgym_rl.run import events
from agentgym_rl.run.backend import LocalBackend
from agentgym_rl.run.events import EventPoller
from agentgym_rl.training.rl_learner import RLLearner
from agentgym_rl.training.sft import SFT


class Workers:
    """Workers with a new event at every poll."""

    def __init__(self) -> None:
        self.num_polls = 0
        self.reported: list[str] = []
        self.fail: Exception | None = None
        self.answer = asyncio.Event()
        self.answer.set()
        self.first_poll, self.third_report = asyncio.Event(), asyncio.Event()
        """Set at the first poll and at the third report."""

    async def events(self) -> list[dict[str, Any]]:
        self.num_polls += 1
        number = self.num_polls
        self.first_poll.set()
        await self.answer.wait()
        if self.fail is not None:
            raise self.fail
        return [{"kind": "engine_lost", "message": f"engine {number} died"}]

    def report(self, kind: str, message: str) -> None:
        self.reported.append(message)
        if len(self.reported) == 3:
            self.third_report.set()


async def test_events_are_polled_during_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "POLL_INTERVAL_S", 0.0)
    workers = Workers()
    async with EventPoller(workers.events, workers.report), asyncio.timeout(60):
        await workers.third_report.wait()


@pytest.mark.parametrize("error", [WorkerLost("a rank died"), asyncio.CancelledError()])
async def test_the_last_events_are_reported_before_a_run_ends(error: BaseException) -> None:
    workers = Workers()
    with pytest.raises(type(error)):
        async with EventPoller(workers.events, workers.report):
            raise error
    assert workers.reported == ["engine 1 died"]


async def test_a_poll_in_flight_when_a_run_stops_is_reported() -> None:
    workers = Workers()
    workers.answer.clear()

    async def run() -> None:
        async with EventPoller(workers.events, workers.report) as poller:
            await poller.now()

    task = asyncio.create_task(run())
    await asyncio.wait_for(workers.first_poll.wait(), 60)
    task.cancel()
    await asyncio.sleep(0)
    workers.answer.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert workers.reported == ["engine 1 died", "engine 2 died"]


async def test_a_failed_poll_ends_a_run_but_does_not_replace_its_error() -> None:
    workers = Workers()
    workers.fail = WorkerLost("no worker answers")
    with pytest.raises(WorkerLost, match="no worker answers"):
        async with EventPoller(workers.events, workers.report):
            pass
    with pytest.raises(WorkerLost, match="rank 1 of 2 died"):
        async with EventPoller(workers.events, workers.report):
            raise WorkerLost("rank 1 of 2 died")


def sft_config() -> Config:
    common = counting_config().model_dump(include={"threads", "model", "environments", "agent", "eval"})
    return Config.model_validate(common | {"method": "sft", "data": {"play": "random", "episodes": 16}})


@pytest.mark.parametrize(
    ("make_config", "learner", "method"), [(counting_config, RLLearner, "learn"), (sft_config, SFT, "step")]
)
async def test_the_events_of_a_step_that_ends_a_run_are_logged(
    make_config: Callable[[], Config], learner: type, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lose an environment host in the first step, then a learner in the same step."""
    pending: list[dict[str, Any]] = []

    async def events(self: LocalBackend) -> list[dict[str, Any]]:
        return [pending.pop() for _ in list(pending)]

    def die(*_: Any) -> Any:
        pending.append({"kind": "env_host_lost", "message": "environment host 0 died"})
        raise WorkerLost("learner rank 1 of 2 died")

    monkeypatch.setattr(LocalBackend, "events", events)
    monkeypatch.setattr(learner, method, die)
    with pytest.raises(WorkerLost, match="rank 1 of 2"):
        await train_counting(make_config(), tmp_path / "run")
    assert events_of(tmp_path / "run") == ["env_host_lost", "worker_lost"]
