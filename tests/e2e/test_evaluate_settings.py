"""Settings that decide what an evaluation measures: chat template, opponent, arguments, a run's own limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_for_tests import ChatServer, chat_server
from runs_for_tests import TINY, quiet

from agentgym_rl.commands.evaluate import Request, evaluate
from agentgym_rl.commands.load_agent import AgentOptions
from agentgym_rl.errors import ConfigError
from agentgym_rl.evaluation.compare import compare, load_side
from agentgym_rl.evaluation.folder import read_evaluation
from agentgym_rl.evaluation.report import entry_of, notes
from agentgym_rl.training.checkpoint import export
from agentgym_rl.training.scratch import build_model, build_tokenizer
from agentgym_rl.training.settings import ScratchSettings

SHAPE = ScratchSettings(hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2)


LOUD = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m['role'] + '\\nLOUD: ' + m['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\nLOUD: ' -}}{%- endif -%}
"""


def write_model(folder: Path, seed: int) -> None:
    tokenizer = build_tokenizer(["take 1, take 2, take 3, go north, go south"])
    export(build_model(SHAPE, tokenizer, seed), tokenizer, folder)


@pytest.fixture
def model(tmp_path: Path) -> AgentOptions:
    write_model(tmp_path / "model", 0)
    return AgentOptions(str(tmp_path / "model"), style="act", max_new_tokens=4, max_context=900)


async def evaluated(agent: AgentOptions, out: Path, **changes: Any) -> dict[str, Any]:
    return await evaluate(Request(agent, out=out, **{"limit": 4, "turns": (2,), **changes}), quiet())


async def test_another_chat_template_is_another_evaluation(model: AgentOptions, tmp_path: Path) -> None:
    await evaluated(model, tmp_path / "own", env="keydoor")
    loud = tmp_path / "loud.jinja"
    loud.write_text(LOUD)
    for given in ("chatml", str(loud)):
        with pytest.raises(ConfigError, match=r"agent\.chat_template"):
            await evaluated(replace(model, chat_template=given), tmp_path / "own", env="keydoor")
    await evaluated(replace(model, chat_template="chatml"), tmp_path / "named", env="keydoor")
    with pytest.raises(ConfigError, match=r"agent\.chat_template"):
        await evaluated(replace(model, chat_template=str(loud)), tmp_path / "named", env="keydoor")


async def test_an_opponent_with_other_weights_is_another_evaluation(model: AgentOptions, tmp_path: Path) -> None:
    game = {"env": "nim", "opponent": model.spec, "limit": 2}
    row = await evaluated(AgentOptions("oracle"), tmp_path / "game", **game)
    assert row["config"]["opponent"] == model.spec
    write_model(Path(model.spec), 1)
    with pytest.raises(ConfigError, match="opponent_weights"):
        await evaluated(AgentOptions("oracle"), tmp_path / "game", **game)
    other = await evaluated(AgentOptions("oracle"), tmp_path / "other", **game)
    (note,) = compare(load_side(tmp_path / "game"), load_side(tmp_path / "other"))["notes"]
    assert note.startswith("different opponent: oracle (A) had ")
    assert all(digest in note for e in (row, other) for digest in e["config"]["opponent_weights"].values())


@pytest.fixture
def chat() -> Iterator[ChatServer]:
    with chat_server() as server:
        yield server


async def test_an_opponent_is_asked_where_the_agent_is(chat: ChatServer, tmp_path: Path) -> None:
    agent = AgentOptions("oracle", base_url=chat.url, key_variable=None)
    row = await evaluated(agent, tmp_path / "game", env="nim", opponent="openai:tiny", limit=2)
    assert chat.num_requests > 0
    assert row["settings"]["base_url"] == chat.url


@pytest.mark.parametrize(
    ("env", "settings", "name", "texts"),
    [
        ("nim", ({"opponent": "random"}, {"opponent": "oracle"}), "opponent", ('"random"', '"oracle"')),
        ("nim", ({"role": "first"}, {"role": "second"}), "role", ('"first"', '"second"')),
        (
            "debate",
            ({"kwargs": {"rounds": 0}}, {"kwargs": {"rounds": 1}}),
            "arguments of the environment",
            ('{"kwargs": {"rounds": 0}, "source": null}', '{"kwargs": {"rounds": 1}, "source": null}'),
        ),
    ],
)
async def test_a_comparison_says_that_the_games_differ(
    env: str, settings: tuple[dict[str, Any], dict[str, Any]], name: str, texts: tuple[str, str], tmp_path: Path
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, changes in zip(folders, settings, strict=True):
        await evaluated(AgentOptions("oracle"), folder, env=env, **changes)
    compared = compare(*map(load_side, folders))
    assert f"different {name}: oracle (A) had {texts[0]}, oracle (B) had {texts[1]}" in compared["notes"]
    assert any(f"differ in {name};" in line for line in notes([entry_of(read_evaluation(f)) for f in folders]))
    again = compare(load_side(folders[0]), load_side(folders[0]))
    assert again["notes"] == []


async def test_a_run_is_played_with_its_own_limits_of_the_environment(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_model(run / "checkpoints" / "step_000001" / "model", 0)
    own = 'name = "babyai"\nmax_new_tokens = 3\nmax_context = 300\n'
    (run / "config.toml").write_text(TINY.replace('name = "babyai"\n', own))
    row = await evaluated(AgentOptions(str(run)), tmp_path / "own", env="babyai", turns=())
    assert (row["config"]["max_new_tokens"], row["config"]["tasks"][0]["max_context"]) == (3, 300)
    given = AgentOptions(str(run), max_new_tokens=2, max_context=200)
    row = await evaluated(given, tmp_path / "given", env="babyai", turns=(1,))
    assert (row["config"]["max_new_tokens"], row["config"]["tasks"][0]["max_context"]) == (2, 200)
