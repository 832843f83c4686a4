"""What befalls workers is told while a run goes on, and whatever it ends with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_for_tests import events_of
from envs_for_tests import Counting
from runs_for_tests import counting_config, quiet

from agentgym_rl.commands.train import train
from agentgym_rl.config import Config
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.errors import WorkerLost
from agentgym_rl.run import events
from agentgym_rl.run.backend import LocalBackend
from agentgym_rl.run.events import EventPoller
from agentgym_rl.training.rl_learner import RLLearner
from agentgym_rl.training.sft import SFT


class Workers:
    """To whom something new has happened whenever they are asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.told: list[str] = []
        self.fail: Exception | None = None
        self.answer = asyncio.Event()
        self.answer.set()
        self.first, self.third = asyncio.Event(), asyncio.Event()
        """Asked for the first time, told for the third."""

    async def events(self) -> list[dict[str, Any]]:
        self.asked += 1
        number = self.asked
        self.first.set()
        await self.answer.wait()
        if self.fail is not None:
            raise self.fail
        return [{"kind": "engine_lost", "message": f"engine {number} died"}]

    def tell(self, kind: str, message: str) -> None:
        self.told.append(message)
        if len(self.told) == 3:
            self.third.set()


async def test_it_asks_while_a_step_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "POLL_INTERVAL_S", 0.0)
    workers = Workers()
    async with EventPoller(workers.events, workers.tell), asyncio.timeout(60):
        await workers.third.wait()


@pytest.mark.parametrize("error", [WorkerLost("a rank died"), asyncio.CancelledError()])
async def test_however_a_run_ends_the_last_is_told_first(error: BaseException) -> None:
    workers = Workers()
    with pytest.raises(type(error)):
        async with EventPoller(workers.events, workers.tell):
            raise error
    assert workers.told == ["engine 1 died"]


async def test_an_answer_that_was_on_its_way_when_a_run_was_stopped_is_told() -> None:
    workers = Workers()
    workers.answer.clear()

    async def run() -> None:
        async with EventPoller(workers.events, workers.tell) as told:
            await told.now()

    task = asyncio.create_task(run())
    await asyncio.wait_for(workers.first.wait(), 60)
    task.cancel()
    await asyncio.sleep(0)
    workers.answer.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert workers.told == ["engine 1 died", "engine 2 died"]


async def test_workers_that_cannot_be_asked_end_a_run_but_not_with_less_than_is_known() -> None:
    workers = Workers()
    workers.fail = WorkerLost("nobody answers")
    with pytest.raises(WorkerLost, match="nobody answers"):
        async with EventPoller(workers.events, workers.tell):
            pass
    with pytest.raises(WorkerLost, match="rank 1 of 2 died"):
        async with EventPoller(workers.events, workers.tell):
            raise WorkerLost("rank 1 of 2 died")


def imitating() -> Config:
    common = counting_config().model_dump(include={"threads", "model", "environments", "agent", "eval"})
    return Config.model_validate(common | {"method": "sft", "data": {"play": "random", "episodes": 16}})


@pytest.mark.parametrize(
    ("make_config", "learner", "method"), [(counting_config, RLLearner, "learn"), (imitating, SFT, "step")]
)
async def test_the_events_of_a_step_that_ends_a_run_are_logged(
    make_config: Callable[[], Config], learner: type, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host died in the first step, and before that was over a learner did."""
    happened: list[dict[str, Any]] = []

    async def events(self: LocalBackend) -> list[dict[str, Any]]:
        return [happened.pop() for _ in list(happened)]

    def dies(*_: Any) -> Any:
        happened.append({"kind": "env_host_lost", "message": "environment host 0 died"})
        raise WorkerLost("learner rank 1 of 2 died")

    monkeypatch.setattr(LocalBackend, "events", events)
    monkeypatch.setattr(learner, method, dies)
    with pytest.raises(WorkerLost, match="rank 1 of 2"):
        await train(make_config(), tmp_path / "run", console=quiet(), pool=LocalPool({"counting": Counting}))
    assert events_of(tmp_path / "run") == ["env_host_lost", "worker_lost"]
