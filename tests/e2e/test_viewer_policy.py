"""A trained model in the playground, and the export command."""

from __future__ import annotations

import asyncio
import shutil
import tomllib
from pathlib import Path

import pytest
import tomli_w
from envs_for_tests import Counting
from runs_for_tests import counting_config, quiet
from training_for_tests import counting_player, slow_logprobs

from agentgym_rl.commands.train import train
from agentgym_rl.commands.view import ViewerEnvironments, export, load_policy
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.errors import ConfigError
from agentgym_rl.training.checkpoint import export as export_model
from agentgym_rl.types import EnvSession, Message
from agentgym_rl.viewer.playground import Playground


class CountingEnvironments(ViewerEnvironments):
    async def open(self, env: str, style: str = "act", turns_per_attempt: int | None = None) -> EnvSession:
        return await LocalPool({"counting": Counting}).open("counting")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    asyncio.run(train(counting_config(), folder, console=quiet(), pool=LocalPool({"counting": Counting})))
    return folder


async def test_a_run_continues_turns_played_by_hand(run: Path) -> None:
    environments = CountingEnvironments(load_policy(str(run)))
    assert environments.limits.max_new_tokens == 4  # as in training
    playground = Playground(environments)
    game = await playground.open("counting", 3)
    await playground.act(game["session"], "up")
    game = await playground.play_turn(game["session"], "model")
    game = await playground.play_turn(game["session"], "model")
    assert [turn["by"] for turn in game["turns"]] == ["you", "model", "model"]
    messages: list[Message] = playground._games[game["session"]].messages
    replies = [message for message in messages if message.role == "assistant"]
    assert [bool(reply.token_ids) for reply in replies] == [False, True, True]
    assert all(reply.logprobs for reply in replies[1:])
    await playground.close_all()


async def test_a_run_plays_with_its_evaluation_settings(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "other")
    config = tomllib.loads((run / "config.toml").read_text())
    config["model"]["chat_template"] = str(tmp_path / "chat.jinja")
    config["eval"]["temperature"] = 0.0
    (tmp_path / "other" / "config.toml").write_text(tomli_w.dumps(config))
    twice = "<|im_start|><|im_start|>"
    turns = f"{{% for m in messages %}}{twice}{{{{ m.role }}}} {{{{ m.content }}}}<|im_end|>{{% endfor %}}"
    template = f"{turns}{{% if add_generation_prompt %}}{twice}assistant {{% endif %}}"
    (tmp_path / "chat.jinja").write_text(template)
    environments = CountingEnvironments(load_policy(f"{tmp_path / 'other'}@2"))
    replies = []
    for seed in range(8):
        session = await environments.open("counting")
        policy = environments.policies["model"](session, seed)
        observation = (await session.reset(3)).observation
        replies.append(await policy.reply([], observation, environments.limits))
        await policy.close()
    prompt_ids = replies[0].observation[0].token_ids
    assert prompt_ids[0] == prompt_ids[1] != prompt_ids[2]  # from the run's template
    assert len({tuple(reply.action.token_ids) for reply in replies}) == 1  # at a temperature of 0
    with pytest.raises(ConfigError, match="--policy needs a model"):
        load_policy("oracle")


async def test_a_run_that_trained_adapters_plays_with_them(tmp_path: Path) -> None:
    model, tokenizer = counting_player()
    export_model(model, tokenizer, tmp_path / "base")
    changes = {"path": str(tmp_path / "base"), "lora": {"rank": 2}}
    config = counting_config(model=changes, rl__steps=1, warm_start__sft__optimizer={"lr": 5e-2})
    await train(config, tmp_path / "run", console=quiet(), pool=LocalPool({"counting": Counting}))
    environments = CountingEnvironments(load_policy(str(tmp_path / "run")))
    session = await environments.open("counting")
    policy = environments.policies["model"](session, 0)
    reply = await policy.reply([], (await session.reset(3)).observation, environments.limits)
    await policy.close()
    prompt_ids = [i for message in reply.observation for i in message.token_ids]
    base = [p.item() for p in slow_logprobs(model, prompt_ids + reply.action.token_ids)[len(prompt_ids) - 1 :]]
    assert reply.action.logprobs != pytest.approx(base, abs=1e-2)


def test_the_export_command_writes_one_html_file(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    messages: list[str] = []
    export([run], tmp_path / "out.html", episodes=20, pictures=True, announce=messages.append)
    assert (tmp_path / "out.html").read_bytes().startswith(b"<!doctype html>")
    assert "of 1 runs" in messages[0]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no run found"):
        export([tmp_path / "empty"], tmp_path / "x.html", episodes=1, pictures=False, announce=messages.append)
    with pytest.raises(ConfigError, match="cannot be written"):
        export([run], tmp_path / "no" / "x.html", episodes=1, pictures=False, announce=messages.append)
