"""Distillation from a teacher behind an HTTP API: the same as from one in this process, and clear errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs_for_tests import comparable_metrics, quiet
from teacher_for_tests import teacher_server
from tokenizers_for_tests import byte_level_bpe
from training_for_tests import tiny_model

from agentgym_rl.commands.train import train
from agentgym_rl.config import Config, load_config
from agentgym_rl.errors import ConfigError, EngineError

RECIPE = Path(__file__).parents[2] / "recipes" / "keydoor" / "distill.toml"
FEW = (
    *("threads=1", "rl.steps=2", "rl.groups_per_step=2", "rl.optimizer.lr=0.01", "eval.episodes=1", "eval.max_turns=1"),
    *("horizon.turns=[1, 2]", "horizon.steps_per_stage=1", "agent.max_context=1024", "model.chat_template=chatml"),
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return another model with the tokenizer of the student."""
    folder = tmp_path_factory.mktemp("teacher")
    model = tiny_model(3, 420)
    model.config.max_position_embeddings = 2048
    model.save_pretrained(folder)
    byte_level_bpe("qwen").save_pretrained(folder)
    return folder


def taught(student: Path, teacher: Path, *overrides: str) -> Config:
    return load_config(RECIPE, [f"model.path={student}", f"rl.distill.teacher={teacher}", *FEW, *overrides])


async def test_a_teacher_behind_an_api_teaches_what_one_in_this_process_does(
    tiny_qwen: Path, teacher: Path, tmp_path: Path
) -> None:
    await train(taught(tiny_qwen, teacher), tmp_path / "here", console=quiet())
    expected = comparable_metrics(tmp_path / "here")
    assert all(row["kl/teacher"] > 0 and row["grad/norm"] > 0 for row in expected)
    with teacher_server(teacher) as server:
        for api in ("prompt_logprobs", "echo"):
            server.faults = ["500", "malformed"]
            there = (f"rl.distill.url={server.url}", f"rl.distill.api={api}")
            await train(taught(tiny_qwen, teacher, *there), tmp_path / api, console=quiet())
            assert not server.faults
            rows = comparable_metrics(tmp_path / api)
            assert [row.keys() for row in rows] == [row.keys() for row in expected]
            for row, wanted in zip(rows, expected, strict=True):
                for name in ("kl/teacher", "loss", "grad/norm", "tokens/total", "entropy/mean"):
                    assert row[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-5), (api, name)
    assert {body["model"] for body in server.asked} == {str(teacher)}


async def test_a_server_with_other_tokens_is_refused(tiny_qwen: Path, teacher: Path, tmp_path: Path) -> None:
    """Two of 420 tokens are exchanged."""
    with teacher_server(teacher) as server:
        server.tokenizer = _Exchanged(server.tokenizer)
        config = taught(tiny_qwen, teacher, f"rl.distill.url={server.url}")
        with pytest.raises(ConfigError, match=r"needs the agent's tokenizer: id 70 is '.*' here and '.*' there"):
            await train(config, tmp_path / "run", console=quiet())
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("401", r"refused: HTTP 401 .*: check"),
        ("500", "failed 1 time, the last: HTTP 500"),
        ("malformed", "not a completion"),
        ("hang", r"no answer within 0\.5 s"),
        ("no scores", "must return the log-probability of each of the"),
        ("gone", r"cannot be reached .* check the address \(rl\.distill\.url\)"),
    ],
)
async def test_a_teacher_that_does_not_answer_ends_the_run_with_the_reason(
    fault: str, message: str, tiny_qwen: Path, teacher: Path, tmp_path: Path
) -> None:
    with teacher_server(teacher) as server:
        if fault == "no scores":
            server._reply = lambda body, fault: {"choices": [{"text": ""}]}  # type: ignore[method-assign]
        elif fault != "gone":
            server.always = fault
        timeout_s = 0.5 if fault == "hang" else 60
        url = server.url if fault != "gone" else "http://127.0.0.1:1/v1"
        overrides = (f"rl.distill.url={url}", "rl.distill.retries=0", f"rl.distill.timeout_s={timeout_s}")
        with pytest.raises(EngineError, match=message):
            await train(taught(tiny_qwen, teacher, *overrides), tmp_path / "run", console=quiet())
    assert not list((tmp_path / "run" / "checkpoints").glob("*")), "it is asked before the first evaluation"


def test_a_teacher_behind_an_api_needs_temperature_one(tiny_qwen: Path, teacher: Path) -> None:
    url = "rl.distill.url=http://127.0.0.1:1/v1"
    with pytest.raises(ConfigError, match=r"probabilities at temperature 1, agent\.temperature is 0\.7"):
        taught(tiny_qwen, teacher, url, "agent.temperature=0.7")
    with pytest.raises(ConfigError, match="api and api_key_variable are for a teacher at url"):
        taught(tiny_qwen, teacher, "rl.distill.api=echo")
    config = taught(tiny_qwen, teacher, url, "rl.distill.api_key_variable=GITHUB_TOKEN")
    with pytest.raises(ConfigError, match="would send this variable of yours"):
        config.require_allowed_variables()


class _Exchanged:
    """A tokenizer with two tokens exchanged."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode([{70: 71, 71: 70}.get(ids[0], ids[0])])
