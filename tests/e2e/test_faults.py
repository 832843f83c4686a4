"""Training with failing environments: failures are recorded, retried, dropped and counted, and the run continues."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from envs_for_tests import Counting, Fuse, Raising, Treacherous
from runs_for_tests import comparable_trajectories, counting_config, quiet
from servers_for_tests import server_in_thread, server_process, wait_until

from agentgym_rl.commands.train import train
from agentgym_rl.environment.pool import LocalPool, RemotePool
from agentgym_rl.errors import EnvError
from agentgym_rl.run.log import read_metrics
from agentgym_rl.types import EnvSession

RETRIES = 1
AGENT = {"instruction": "", "max_new_tokens": 4, "max_context": 200, "concurrency": 64, "retries": RETRIES}


class TwoPools:
    """A remote and a local pool behind one interface."""

    def __init__(self, remote: RemotePool, local: LocalPool) -> None:
        self.pools: dict[str, Any] = {"counting": remote, "fuse": local}

    async def open(self, env: str) -> EnvSession:
        return await self.pools[env].open(env)

    async def items(self, env: str, split: str, subset: str | None = None) -> list[int]:
        return await self.pools[env].items(env, split, subset)

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self.pools.values()))


@pytest.fixture(scope="module")
def treacherous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run in an environment that raises, hangs, answers garbage or fails once, by item."""
    folder = tmp_path_factory.mktemp("treacherous") / "run"
    pool = LocalPool({"treacherous": Treacherous}, timeout_s=1.0)
    config = counting_config(
        environments=[{"name": "treacherous"}],
        agent=AGENT,
        rl__groups_per_step=10,
        rl__steps=2,
        eval__episodes=10,
        warm_start__episodes=100,
    )
    Treacherous.release.clear()
    Treacherous.failed_once.clear()

    async def run() -> None:
        await train(config, folder, console=quiet(), pool=pool)
        assert pool.num_open == 0
        await pool.close()

    try:
        asyncio.run(run())
    finally:
        Treacherous.release.set()
    wait_until(lambda: Treacherous.num_alive == 0)  # hung environments are closed once they return
    return folder


def rows_of(folder: Path, prefix: str) -> list[dict[str, Any]]:
    return [row for name, rows in comparable_trajectories(folder).items() if name.startswith(prefix) for row in rows]


def test_the_run_finishes(treacherous: Path) -> None:
    assert json.loads((treacherous / "status.json").read_text())["state"] == "finished"
    assert [row["step"] for row in read_metrics(treacherous / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize(
    ("kind", "error"), [("raises", "ZeroDivisionError"), ("hangs", "EnvTimeout"), ("garbage", "EnvError")]
)
@pytest.mark.parametrize("prefix", ["warmstart", "eval", "step"])
def test_every_failure_is_recorded_with_its_reason(treacherous: Path, prefix: str, kind: str, error: str) -> None:
    rows = [row for row in rows_of(treacherous, prefix) if Treacherous.kind_of(row["item"]) == kind]
    assert rows
    for row in rows:
        assert row["stop"] == "error"
        assert sum(row["rewards"]) == 0
    assert any(error in row["error"] for row in rows)


def test_failures_are_retried_up_to_the_limit(treacherous: Path) -> None:
    attempts: Counter[str] = Counter()
    outcome: dict[str, str] = {}
    for row in rows_of(treacherous, "step"):
        episode, _, attempt = row["id"].rpartition("-")
        assert int(attempt) == attempts[episode], "attempts are recorded in order"
        attempts[episode] += 1
        outcome[episode] = row["stop"]
        if Treacherous.kind_of(row["item"]) in ("raises", "hangs", "garbage"):
            assert row["stop"] == "error"
    assert max(attempts.values()) == 1 + RETRIES
    for episode, stop in outcome.items():
        assert attempts[episode] == 1 + RETRIES or stop != "error"
    # The warm start plays every training item, so every item's single failure happens there.
    once = [row for row in rows_of(treacherous, "warmstart") if Treacherous.kind_of(row["item"]) == "fails once"]
    assert any("ConnectionError" in (row["error"] or "") for row in once)
    assert any(row["stop"] != "error" and row["id"].endswith("-1") for row in once), "a second attempt succeeds"


def test_failures_are_counted_and_dropped_from_the_batch(treacherous: Path) -> None:
    for row in read_metrics(treacherous / "metrics.jsonl"):
        episodes = comparable_trajectories(treacherous)[f"step_{row['step']:06d}.jsonl"]
        failed = sum(e["stop"] == "error" for e in episodes)
        assert (row["episodes/error"], row["episodes/usable"]) == (failed, len(episodes) - failed)
        assert failed > 0
        assert row["samples"] <= len(episodes) - failed
        (event,) = [e for e in read_metrics(treacherous / "events.jsonl") if f"of step {row['step']} " in e["message"]]
        assert event["kind"] == "episodes_failed"
        assert event["message"].startswith(f"{failed} of {len(episodes)} attempts")
        good = [e for e in episodes if e["stop"] != "error"]
        assert row["reward/mean"] == pytest.approx(sum(sum(e["rewards"]) for e in good) / len(good))


def test_evaluation_counts_only_completed_episodes(treacherous: Path) -> None:
    summary = json.loads((treacherous / "summary.json").read_text())
    good = [e for e in comparable_trajectories(treacherous)["eval_000000.jsonl"] if e["stop"] != "error"]
    assert 0 < summary["before"]["episodes"] == len(good) < 10


async def test_a_run_whose_episodes_all_fail_ends_with_one_clear_error(tmp_path: Path) -> None:
    class AlwaysRaising(Raising):
        num_alive = 0

        def step(self, text: str) -> Any:
            raise OSError("disk on fire")

    pool = LocalPool({"counting": AlwaysRaising})
    with pytest.raises(EnvError, match=r"warm start: all .* episodes failed; the first: .*disk on fire"):
        await train(counting_config(agent=AGENT), tmp_path / "run", console=quiet(), pool=pool)
    assert (pool.num_open, AlwaysRaising.num_alive) == (0, 0)
    rows = rows_of(tmp_path / "run", "warmstart")
    assert {row["stop"] for row in rows} == {"error"}
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"
    assert [event["kind"] for event in read_metrics(tmp_path / "run" / "events.jsonl")] == ["failed"]


@pytest.mark.long
async def test_a_killed_server_fails_its_episodes_and_training_continues_with_the_other(tmp_path: Path) -> None:
    """Kill the server during RL. The run learns from the episodes of the other environment."""
    environments = [{"name": "counting"}, {"name": "fuse"}]
    config = counting_config(environments=environments, agent=AGENT, rl__groups_per_step=8, rl__steps=3)
    with server_process("Counting") as (url, process):
        pool = TwoPools(RemotePool({"counting": url}), LocalPool({"fuse": Fuse}))
        # Late enough that the warm start, the first evaluation and part of RL are done (see the assertions).
        Fuse.steps_left, Fuse.blow = 48 * 3 // 2 + 6 * 4 + 40, process.kill
        await train(config, tmp_path / "run", console=quiet(), pool=pool)
        assert process.wait() == -9
        assert [p.num_open for p in pool.pools.values()] == [0, 0]
        await pool.close()
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert metrics[-1]["episodes/error"] > 0
    assert metrics[-1]["episodes/usable"] > 0
    rows = rows_of(tmp_path / "run", "step")
    failed = [row for row in rows if row["stop"] == "error"]
    assert {row["env"] for row in failed} == {"counting"}
    assert any(row["rewards"] for row in failed), "some failed in the middle of an episode"
    assert all("127.0.0.1" in row["error"] for row in failed)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["after"]["subsets"]["counting/counting"]["episodes"] == 0
    assert summary["after"]["subsets"]["fuse/fuse"]["episodes"] == 6


async def test_a_run_over_http_leaves_no_session_open(tmp_path: Path) -> None:
    with server_in_thread({"counting": Counting}) as server:
        environments = [{"name": "counting", "url": server.url}]
        config = counting_config(environments=environments, agent=AGENT, rl__steps=1)
        summary = await train(config, tmp_path / "run", console=quiet())
        assert server.sessions.num_open == 0
    assert summary["after"]["episodes"] == 6
    assert Counting.num_alive == 0


async def test_an_unreachable_server_is_one_clear_error(tmp_path: Path) -> None:
    environments = [{"name": "counting", "url": "http://127.0.0.1:9"}]
    with pytest.raises(EnvError, match=r"127\.0\.0\.1:9"):
        await train(counting_config(environments=environments, agent=AGENT), tmp_path / "run", console=quiet())
    assert not (tmp_path / "run").exists()
