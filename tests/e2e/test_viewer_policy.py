"""A trained model in the playground, and the command that starts it all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from envs_for_tests import Counting
from runs_for_tests import counting_config, quiet

from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.errors import ConfigError
from agentgym_rl.train import train
from agentgym_rl.types import EnvSession, Message
from agentgym_rl.view import LocalWorlds, export, load_policy
from agentgym_rl.viewer.playground import Playground


class CountingWorlds(LocalWorlds):
    async def open(self, env: str, style: str = "act", turns_per_attempt: int | None = None) -> EnvSession:
        return await LocalPool({"counting": Counting}).open("counting")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    asyncio.run(train(counting_config(), folder, console=quiet(), pool=LocalPool({"counting": Counting})))
    return folder


async def test_a_run_plays_on_from_what_was_played_by_hand(run: Path) -> None:
    worlds = CountingWorlds(load_policy(str(run)))
    assert worlds.limits.max_new_tokens == 4  # as it was trained
    playground = Playground(worlds)
    game = await playground.open("counting", 3)
    await playground.act(game["session"], "up")
    game = await playground.let_play(game["session"], "model")
    game = await playground.let_play(game["session"], "model")
    assert [turn["by"] for turn in game["turns"]] == ["you", "model", "model"]
    messages: list[Message] = playground._games[game["session"]].messages
    replies = [message for message in messages if message.role == "assistant"]
    assert [bool(reply.token_ids) for reply in replies] == [False, True, True]
    assert all(reply.logprobs for reply in replies[1:])
    await playground.close_all()


def test_the_export_command_writes_a_file_of_a_real_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said: list[str] = []
    export([run], tmp_path / "out.html", episodes=20, pictures=True, announce=said.append)
    assert (tmp_path / "out.html").read_bytes().startswith(b"<!doctype html>")
    assert "of 1 runs" in said[0]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="nothing to export"):
        export([tmp_path / "empty"], tmp_path / "x.html", episodes=1, pictures=False, announce=said.append)
    with pytest.raises(ConfigError, match="cannot be written"):
        export([run], tmp_path / "no" / "x.html", episodes=1, pictures=False, announce=said.append)
