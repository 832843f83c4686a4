"""Complete evaluations with real environments, a real HTTP server, a tiny real model and a real kill."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_for_tests import CACHED_TOKENS, COMPLETION_TOKENS, PROMPT_TOKENS, ChatServer, chat_server
from runs_for_tests import TINY, Process, counting_config, quiet
from servers_for_tests import server_in_thread
from training_for_tests import slow_logprobs
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentgym_rl.agent.engines.openai import Prices
from agentgym_rl.commands.evaluate import Request, evaluate
from agentgym_rl.commands.load_agent import AgentOptions, find_agent, fingerprint, load_weights
from agentgym_rl.commands.report import report
from agentgym_rl.commands.train import train
from agentgym_rl.environment import catalog
from agentgym_rl.errors import ConfigError, EngineError
from agentgym_rl.evaluation.compare import load_side
from agentgym_rl.evaluation.folder import read_records
from agentgym_rl.run.console import Console
from agentgym_rl.run.log import read_trajectories
from agentgym_rl.training.checkpoint import export
from agentgym_rl.training.scratch import build_model, build_tokenizer
from agentgym_rl.training.settings import ScratchSettings

GO_TO_BALL = {"env": "babyai", "subsets": ("GoToRedBallNoDists",), "limit": 6, "turns": (4,)}


@pytest.fixture(scope="module")
def chat_module() -> Iterator[ChatServer]:
    with chat_server() as chat:
        yield chat


@pytest.fixture
def chat(chat_module: ChatServer) -> ChatServer:
    chat_module.faults, chat_module.always = [], None
    chat_module.wait_for_concurrent, chat_module.hold_after = 0, None
    chat_module.num_requests = chat_module.max_concurrent = 0
    return chat_module


def chat_agent(chat: ChatServer, **changes: Any) -> AgentOptions:
    options = AgentOptions(
        "openai:tiny",
        base_url=chat.url,
        key_variable=None,
        style="act",
        request_timeout_s=60.0,
        prices=Prices(2.0, 10.0, 0.5),
    )
    return replace(options, **changes)


async def run(
    tmp_path: Path, agent: AgentOptions | str, console: Console | None = None, **changes: Any
) -> dict[str, Any]:
    """Evaluate and return the metrics of the only scenario."""
    options = AgentOptions(agent) if isinstance(agent, str) else agent
    row = await evaluate(Request(options, out=tmp_path / "out", **{**GO_TO_BALL, **changes}), console or quiet())
    (cell,) = row["results"][-1]["scenarios"].values()
    return cell


@pytest.mark.parametrize(("env", "limit"), [("textcraft", 8), ("babyai", 8)])
async def test_the_oracle_solves_everything(env: str, limit: int, tmp_path: Path) -> None:
    subsets = {"textcraft": ("depth1", "depth4"), "babyai": ("GoTo", "SynthLoc")}[env]
    cell = await run(tmp_path, "oracle", env=env, subsets=subsets, limit=limit, turns=())
    played = 11 if env == "textcraft" else 16  # there are three goals of depth 4
    assert (cell["items"], cell["episodes"], cell["errors"]) == (played, played, 0)
    assert cell["success"]["value"] == 1.0
    assert 0.7 < cell["success"]["low"] < 0.9
    assert cell["success"]["high"] == 1.0
    assert (cell["prompt_tokens"], cell["cost_usd"]) == (None, None)


async def test_random_play_is_reproducible_and_worse_than_the_oracle(tmp_path: Path) -> None:
    first = await run(tmp_path / "a", "random", limit=12, samples=2)
    assert 0 < first["success"]["value"] < 1
    assert first["avg@2"] == first["success"]
    assert first["pass@2"]["value"] > first["pass@1"]["value"] == pytest.approx(first["success"]["value"])
    again = await run(tmp_path / "b", "random", limit=12, samples=2, concurrency=1)
    assert {**again, "seconds": 0} == {**first, "seconds": 0}
    other = await run(tmp_path / "c", "random", limit=12, samples=2, seed=1)
    assert other["reward"] != first["reward"] or other["turns"] != first["turns"]


async def test_each_of_several_horizons_matches_an_evaluation_of_its_own(tmp_path: Path) -> None:
    whole = await evaluate(
        Request(AgentOptions("random"), out=tmp_path / "out", **{**GO_TO_BALL, "limit": 15, "turns": (1, 3, 6)}),
        quiet(),
    )
    rates = []
    for result in whole["results"]:
        alone = await run(tmp_path / str(result["max_turns"]), "random", limit=15, turns=(result["max_turns"],))
        (cell,) = result["scenarios"].values()
        assert cell == alone
        rates.append(cell["success"]["value"])
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]
    assert (tmp_path / "out" / "turns.png").read_bytes().startswith(b"\x89PNG")
    assert "by turns allowed" in (tmp_path / "out" / "report.md").read_text()


def untrained() -> tuple[Any, Any]:
    """Return (model, tokenizer) of a tiny untrained model."""
    tokenizer = build_tokenizer(
        ["turn left, turn right, move forward, go to red ball 1, you see a red ball 2 steps away"]
    )
    shape = ScratchSettings(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2)
    return build_model(shape, tokenizer, 0), tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    export(*untrained(), folder)
    return folder


async def test_a_model_folder_and_checkpoints_of_a_run_are_evaluated(model: Path, tmp_path: Path) -> None:
    agent = AgentOptions(str(model), style="act", max_new_tokens=4, max_context=900)
    cell = await run(tmp_path, agent, limit=3, turns=(2,))
    assert (cell["episodes"], cell["errors"]) == (3, 0)
    trajectories = list(read_trajectories(tmp_path / "out" / "trajectories" / "babyai.jsonl"))
    sampled = sum(len(m.logprobs) for t in trajectories for m in t.messages if m.logprobs is not None)
    assert cell["sampled_tokens"] == pytest.approx(sampled / 3)
    first = trajectories[0]
    opening, observation = first.messages[0].token_ids, first.messages[1].token_ids
    record = read_records(tmp_path / "out")[first.task.env, first.task.item, 0][0]
    assert record.tokens is not None
    assert record.tokens[0].prompt == len(opening) + len(observation) > 100

    folder = tmp_path / "trained"
    for step in (2, 5):
        export(*untrained(), folder / "checkpoints" / f"step_{step:06d}" / "model")
    (folder / "config.toml").write_text(TINY)
    row = await evaluate(
        Request(AgentOptions(str(folder)), out=tmp_path / "last", **{**GO_TO_BALL, "limit": 1}), quiet()
    )
    assert row["config"]["agent"]["name"] == "trained@5"
    assert row["config"]["max_new_tokens"] == 6  # from the run's config
    line = json.loads((tmp_path / "last" / "trajectories" / "babyai.jsonl").read_text().splitlines()[0])
    assert (line["step"], line["kind"]) == (5, "eval")
    row = await evaluate(
        Request(AgentOptions(f"{folder}@2"), out=tmp_path / "second", **{**GO_TO_BALL, "limit": 1}), quiet()
    )
    assert row["config"]["agent"]["step"] == 2
    with pytest.raises(ConfigError, match="no checkpoint of step 3: it has 2, 5"):
        await run(tmp_path / "third", f"{folder}@3")


@pytest.fixture(scope="module")
def adapted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train adapters on `model` for one step after a warm start."""
    folder = tmp_path_factory.mktemp("runs") / "adapted"
    config = counting_config(
        model={"path": str(model), "lora": {"rank": 4, "alpha": 8}},
        environments=[{"name": "babyai", "subsets": ["GoToRedBallNoDists"]}],
        warm_start__episodes=8,
        agent__max_context=900,
        eval={"episodes": 2, "max_turns": 1, "temperature": 1.0},
        rl__steps=1,
        rl__zero_variance="keep",  # so that there is something to learn, independent of the rewards
        rl__entropy_coef=0.1,
    )
    asyncio.run(train(config, folder, console=quiet()))
    return folder


@pytest.mark.long
async def test_a_run_that_trained_adapters_plays_with_them(adapted: Path, model: Path, tmp_path: Path) -> None:
    row = await evaluate(Request(AgentOptions(str(adapted)), out=tmp_path / "out", **GO_TO_BALL), quiet())
    checkpoint = adapted / "checkpoints" / "step_000001" / "model"
    agent = row["config"]["agent"]
    assert agent["name"] == "adapted@1"
    assert (agent["weights"], agent["base"]) == (fingerprint(checkpoint), fingerprint(model))
    first, *_ = read_trajectories(tmp_path / "out" / "trajectories" / "babyai.jsonl")
    at = next(i for i, message in enumerate(first.messages) if message.role == "assistant")
    opening, reply = [i for message in first.messages[:at] for i in message.token_ids], first.messages[at]
    assert reply.logprobs

    def logprobs_of(folder: Path) -> list[float]:
        logprobs = slow_logprobs(AutoModelForCausalLM.from_pretrained(folder), opening + reply.token_ids)
        return [p.item() for p in logprobs[len(opening) - 1 :]]

    assert reply.logprobs == pytest.approx(logprobs_of(checkpoint), abs=1e-4)
    assert reply.logprobs != pytest.approx(logprobs_of(model), abs=0.1)
    start = find_agent(AgentOptions(f"{adapted}@0"))
    assert start.identity["base"] == agent["base"]
    assert start.identity["weights"] != agent["weights"]


@pytest.mark.long
def test_merged_export_contains_the_adapters(adapted: Path, model: Path, tmp_path: Path) -> None:
    ids = torch.tensor([[1, 2, 3, 4]])
    merged = {}
    for dtype, words in (
        ("float32", "merged in float32\n"),
        ("bfloat16", "rounding changes the adapters' contribution"),
    ):
        process = Process(
            ["export", str(adapted), str(tmp_path / dtype), "--merge", "--dtype", dtype], tmp_path / "output"
        )
        assert process.wait() == 0, process.output.read_text()
        assert words in process.output.read_text()
        merged[dtype] = AutoModelForCausalLM.from_pretrained(tmp_path / dtype)
    played, _ = load_weights(find_agent(AgentOptions(str(adapted))))
    base = AutoModelForCausalLM.from_pretrained(model)
    torch.testing.assert_close(merged["float32"](input_ids=ids).logits, played(input_ids=ids).logits, atol=1e-5, rtol=0)
    assert not torch.allclose(merged["float32"](input_ids=ids).logits, base(input_ids=ids).logits, atol=1e-3)
    assert {str(weight.dtype) for weight in merged["bfloat16"].parameters()} == {"torch.bfloat16"}
    find_agent(AgentOptions(str(tmp_path / "float32")))  # a complete model with its tokenizer
    assert AutoTokenizer.from_pretrained(tmp_path / "float32").decode([5]) == AutoTokenizer.from_pretrained(
        model
    ).decode([5])
    for arguments, words in (
        ([str(adapted), str(tmp_path / "float32"), "--merge"], "exists already"),
        ([str(model), str(tmp_path / "new"), "--merge"], "needs a run directory"),
        ([str(adapted), str(tmp_path / "new"), "--dtype", "bfloat16"], "read by --merge"),
        ([str(adapted), str(tmp_path / "new"), "--merge", "--step", "9"], "no checkpoint of step 9"),
    ):
        process = Process(["export", *arguments], tmp_path / "output")
        assert process.wait() == 2
        assert words in process.output.read_text()


def test_the_base_model_of_adapters_must_not_change(adapted: Path, tmp_path: Path) -> None:
    config = (adapted / "config.toml").read_text()
    base = Path(str(find_agent(AgentOptions(str(adapted))).model.path))  # type: ignore[union-attr]
    elsewhere = tmp_path / "base"
    shutil.copytree(base, elsewhere)
    run = tmp_path / "run"
    shutil.copytree(adapted, run)
    (run / "config.toml").write_text(config.replace(str(base), str(elsewhere)))
    original = find_agent(AgentOptions(str(run)))
    assert original.identity["base"] == fingerprint(base), "independent of its path"

    weights = bytearray((elsewhere / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (elsewhere / "model.safetensors").write_bytes(weights)
    assert find_agent(AgentOptions(str(run))).identity["base"] != original.identity["base"]

    _, tokenizer = untrained()
    shape = ScratchSettings(hidden_size=16, intermediate_size=48, num_layers=2, num_heads=2)
    shutil.rmtree(elsewhere)
    export(build_model(shape, tokenizer, 0), tokenizer, elsewhere)
    with pytest.raises(ConfigError, match=r"trained with adapters.* for a model of another shape"):
        load_weights(find_agent(AgentOptions(str(run))))

    shutil.rmtree(elsewhere)
    with pytest.raises(ConfigError, match=rf"run was trained with adapters.*model.path = '{elsewhere}'.*missing"):
        find_agent(AgentOptions(str(run)))
    with pytest.raises(ConfigError, match=r"holds adapters without their base model: name the run"):
        find_agent(AgentOptions(str(run / "checkpoints" / "step_000001" / "model")))


def test_a_run_is_played_in_its_training_dtype_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(*untrained(), tmp_path / "checkpoints" / "step_000002" / "model")
    (tmp_path / "config.toml").write_text(
        TINY.replace("[model.scratch]", '[model]\ndtype = "bfloat16"\n[model.scratch]')
    )

    def dtypes() -> list[str]:
        candidates = (AgentOptions(str(tmp_path)), AgentOptions(str(tmp_path), dtype="float32"))
        return [model.dtype for options in candidates if (model := find_agent(options).model) is not None]

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert dtypes() == ["float32", "float32"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert dtypes() == ["bfloat16", "float32"]


def test_any_local_model_can_be_played_with_a_window(model: Path) -> None:
    plain, window = (find_agent(AgentOptions(str(model), context=context)) for context in (None, "window"))
    assert (plain.playing.context, window.playing.context) == ("full", "window")
    assert window.identity == {**plain.identity, "context": "window"}
    with pytest.raises(ConfigError, match="'window' needs a local model"):
        find_agent(AgentOptions("openai:tiny", context="window"))
    with pytest.raises(ConfigError, match="--context needs full, window or summary, got 'long'"):
        Request(AgentOptions(str(model), context="long"), env="maze")


def test_changed_weights_change_the_fingerprint(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    assert fingerprint(copy) == fingerprint(model)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert fingerprint(copy) != fingerprint(model)


async def test_tokens_and_cost_of_an_api_agent_are_counted(chat: ChatServer, tmp_path: Path) -> None:
    chat.wait_for_concurrent = 3
    cell = await run(tmp_path, chat_agent(chat), concurrency=3)
    assert (cell["episodes"], cell["errors"], cell["unreported"]) == (6, 0, 0)
    assert cell["success"]["value"] > 0.5
    assert chat.max_concurrent == 3
    assert cell["prompt_tokens"] == pytest.approx(PROMPT_TOKENS * chat.num_requests / 6)
    assert cell["sampled_tokens"] == pytest.approx(COMPLETION_TOKENS * chat.num_requests / 6)
    cost_per_request = (PROMPT_TOKENS - CACHED_TOKENS) * 2.0 + CACHED_TOKENS * 0.5 + COMPLETION_TOKENS * 10.0
    assert cell["cost_usd"] == pytest.approx(chat.num_requests * cost_per_request / 1e6)


async def test_temporary_api_faults_are_retried(chat: ChatServer, tmp_path: Path) -> None:
    """Retries recover from every fault. An answer without usage is reported."""
    chat.faults = ["429", "500", "malformed", "hang", "no usage"]
    cell = await run(tmp_path, chat_agent(chat, request_timeout_s=3), limit=3)
    assert (cell["episodes"], cell["errors"], cell["unreported"]) == (3, 0, 1)
    assert cell["prompt_tokens"] is None  # unknown for one answer
    assert "≥" in (tmp_path / "out" / "report.md").read_text()


async def test_errors_are_counted_separately_and_retried_by_a_rerun(chat: ChatServer, tmp_path: Path) -> None:
    agent = chat_agent(chat, request_retries=0)
    chat.faults = ["500"] * 4
    output = io.StringIO()
    cell = await run(tmp_path, agent, Console(output), limit=6, retries=1, concurrency=1)
    assert (cell["items"], cell["episodes"], cell["errors"]) == (6, 4, 2)
    solved = round(cell["success"]["value"] * 4)
    assert cell["success_errors_as_failures"] == pytest.approx(solved / 6)
    text = (tmp_path / "out" / "report.md").read_text()
    assert "2 episodes ended as errors" in text
    assert "tiny: 2 × EngineError: " in text
    assert "2 of 6 episodes ended as errors, with: EngineError: " in output.getvalue()
    assert "failed 1 time, the last: HTTP 500 'oops'" in output.getvalue()
    lines = (tmp_path / "out" / "trajectories" / "babyai.jsonl").read_text().splitlines()
    assert len(lines) == 8  # two attempts at each failed episode, one at the others
    requests = chat.num_requests
    cell = await run(tmp_path, agent, limit=6, retries=1, concurrency=1)  # the same command plays the failed ones again
    assert (cell["episodes"], cell["errors"]) == (6, 0)
    assert chat.num_requests > requests
    rows = list(map(json.loads, (tmp_path / "out" / "trajectories" / "babyai.jsonl").read_text().splitlines()))
    assert [row["attempt"] for row in rows if row["item"] == rows[0]["item"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("fault", "words", "max_requests"),
    [
        ("401", "refused: HTTP 401 'who are you\\?': check --key-variable", 8),
        ("malformed", "the last 20 episodes all failed, the last one with: EngineError", 40),
    ],
)
async def test_an_api_that_always_fails_stops_the_evaluation(
    fault: str, words: str, max_requests: int, chat: ChatServer, tmp_path: Path
) -> None:
    chat.always = fault
    with pytest.raises(EngineError, match=words):
        await run(tmp_path, chat_agent(chat, request_retries=0), limit=40, retries=0, concurrency=4)
    assert json.loads((tmp_path / "out" / "eval.json").read_text())["state"] == "failed"
    assert chat.num_requests <= max_requests


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run an evaluation, of which tests damage a copy."""
    folder = tmp_path_factory.mktemp("whole")
    asyncio.run(run(folder, "random"))
    return folder / "out"


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        (("config", "agent"), None, "config.agent"),
        (("config",), [], "not an evaluation of this version"),
        (("config", "tasks"), None, "config.tasks"),
        (("config", "tasks", 0, "colour"), "red", "config.tasks: unknown colour"),
        (("config", "tasks", 0, "items"), 7, "items"),
        (("results",), "x", "results"),
        (("results",), [], "at least one"),
        (("results", 0, "total", "errors"), "many", "results.0.total.errors"),
        (
            ("results", 0, "scenarios", "BabyAI", "success", "value"),
            math.nan,
            "success.value: Input should be a finite",
        ),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
async def test_a_damaged_evaluation_is_reported_in_one_line(
    path: tuple[Any, ...], value: Any, place: str, whole: Path, tmp_path: Path
) -> None:
    row = json.loads((whole / "eval.json").read_text())
    node = row
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    shutil.copytree(whole, tmp_path / "copy")
    (tmp_path / "copy" / "eval.json").write_text(json.dumps(row))
    for read in (lambda folder: report([folder], None, None), lambda folder: load_side(folder)):
        with pytest.raises(ConfigError, match=f"{re.escape(place)}.*(again|another folder)"):
            read(tmp_path / "copy")


async def test_an_episode_outside_the_tasks_is_reported_in_one_line(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "copy")
    (file,) = (tmp_path / "copy" / "trajectories").iterdir()
    line = json.loads(file.read_text().splitlines()[0])
    line["item"] = 999999
    with file.open("a") as stream:
        stream.write(json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match="babyai item 999999, which is not among its tasks"):
        load_side(tmp_path / "copy")


async def test_an_episode_times_out(chat: ChatServer, tmp_path: Path) -> None:
    """An evaluation without a finished episode fails and says why."""
    chat.always = "hang"
    with pytest.raises(EngineError, match=r"all 2 episodes .*, with: EpisodeTimeout: .* 0\.3 s: fix that"):
        await run(tmp_path, chat_agent(chat), limit=2, retries=0, episode_timeout_s=0.3)
    row = json.loads((tmp_path / "out" / "eval.json").read_text())
    (cell,) = row["results"][-1]["scenarios"].values()
    assert (cell["episodes"], cell["errors"], cell["success"]) == (0, 2, None)
    assert row["state"] == "failed"


async def test_an_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "below", Path("/proc/nowhere"), Path("/dev/null")):
        with pytest.raises(ConfigError, match=f"{out}.*choose another"):
            await evaluate(Request(AgentOptions("random"), out=out, **GO_TO_BALL), quiet())


async def test_default_folders_of_different_evaluations_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    few: dict[str, Any] = {"env": "keydoor", "limit": 2}

    async def folders_after(**changes: Any) -> set[str]:
        await evaluate(Request(AgentOptions("random"), **{**few, **changes}), quiet())
        return set(os.listdir("evals"))

    expected = {"random-keydoor"}
    assert await folders_after() == expected
    assert await folders_after(concurrency=1) == expected, "the same evaluation resumes in its folder"
    expected |= {"random-keydoor-turns-1-2"}
    assert await folders_after(turns=(1, 2)) == expected
    expected |= {"random-keydoor-near-turns-1-2"}
    assert await folders_after(subsets=("near",), turns=(1, 2)) == expected
    expected |= {"random-keydoor-2"}
    assert await folders_after(limit=1) == expected
    assert await folders_after(limit=1) == expected
    assert await folders_after() == expected
    expected |= {"random-keydoor-3"}
    assert await folders_after(limit=3) == expected


async def test_a_rerun_with_other_settings_is_rejected(tmp_path: Path) -> None:
    await run(tmp_path, "random")
    for changes, words in (
        ({"seed": 3}, r"seed \(saved 0, given 3\)"),
        ({"limit": 5}, "items"),
        ({"turns": (9,)}, "turns"),
        ({"samples": 2}, r"samples \(saved 1, given 2\)"),
    ):
        with pytest.raises(ConfigError, match=f"with other settings: .*{words}.*--out"):
            await run(tmp_path, "random", **changes)
    with pytest.raises(ConfigError, match=r"agent\.name \(saved 'random', given 'oracle'\)"):
        await run(tmp_path, "oracle")
    await run(tmp_path, "random", concurrency=2, retries=0)  # settings that do not change the results may change
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="holds no evaluation"):
        await evaluate(Request(AgentOptions("random"), out=tmp_path / "full", **GO_TO_BALL), quiet())


async def test_the_suite_names_missing_and_own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 27 tasks have a column. Tasks without data have a reason, and own data are marked."""
    from agentgym_rl.commands.evaluate import make_plans
    from agentgym_rl.commands.load_agent import find_agent

    request = Request(AgentOptions("oracle"), suite="agentgym-27")
    for variable in ("AGENTGYM_SEARCHQA_DATA", "AGENTGYM_SEARCHQA_INDEX", "SHOPPING"):
        monkeypatch.delenv(variable, raising=False)
    plans = make_plans(request, find_agent(request.agent))
    published = [plan for plan in plans if not plan.own_data]
    assert len(published) == 27
    counts = Counter(plan.scenario for plan in plans for _ in plan.items)
    assert 35 < counts.pop("Web, built-in sites") <= 50  # some sites have fewer test tasks than published
    assert counts == {
        "Search, built-in questions": 150,
        "TextCraft": 100,
        "BabyAI": 90,
        "SciWorld": 200,
    }
    assert all(plan.missing for plan in plans if plan.scenario in ("WebArena", "Deep search"))
    # The names are the same without the suite, so that both results share a column.
    for env, subset, key in (
        ("textcraft", "depth1", "TextCraft/Depth 1"),
        ("searchqa", "hop2", "Search, built-in questions/two hops"),
        ("maze", None, "maze/test"),
    ):
        single = Request(AgentOptions("oracle"), env=env, subsets=(subset,) if subset else ())
        assert [plan.key for plan in make_plans(single, find_agent(single.agent))] == [key]
    assert {plan.max_turns for plan in plans if plan.scenario == "SciWorld"} == {30}

    for site in ("SHOPPING", "SHOPPING_ADMIN", "REDDIT", "GITLAB", "MAP"):
        monkeypatch.setenv(site, "http://127.0.0.1:9")
    questions = tmp_path / "hotpotqa_test.jsonl"
    questions.write_text('{"question": "Where?", "golden_answers": ["here"]}\n')
    (tmp_path / "corpus.jsonl").write_text('{"id": "0", "contents": "\\"Here\\"\\nIt is here."}\n')
    from agentgym_rl.environment.envs.searchqa import build_index

    build_index(tmp_path / "corpus.jsonl", tmp_path / "index")
    monkeypatch.setenv("AGENTGYM_SEARCHQA_DATA", str(questions))
    monkeypatch.setenv("AGENTGYM_SEARCHQA_INDEX", str(tmp_path / "index"))
    plans = make_plans(request, find_agent(request.agent))
    assert len(plans) == 27
    assert not any(plan.own_data for plan in plans)
    by_key = {plan.key: plan for plan in plans}
    assert by_key["Deep search/HotpotQA"].items == (0,)
    assert str(questions) in by_key["Deep search/HotpotQA"].data
    assert "its questions are needed" in by_key["Deep search/NQ"].missing
    assert len(by_key["WebArena/Shopping"].items) == 15
    assert by_key["WebArena/Shopping"].items[0] >= 1000  # the published list


async def test_a_killed_evaluation_resumes(tmp_path: Path, chat: ChatServer) -> None:
    """SIGKILL, then the same command: finished episodes are kept and none is played twice."""
    chat.hold_after = 21  # enough for six concurrent episodes of three turns, too few for 24
    out = tmp_path / "out"
    command = ["eval", "--agent", "openai:tiny", "--base-url", chat.url, "--key-variable", "", "--style", "act"]
    command += ["--env", "babyai", "--subset", "GoToRedBallNoDists", "--limit", "24", "--turns", "3", "--out", str(out)]
    lines = out / "trajectories" / "babyai.jsonl"
    process = Process([*command, "--concurrency", "2"], tmp_path / "first")
    process.kill_when(lambda: lines.exists() and lines.read_bytes().count(b"\n") >= 6)
    chat.hold_after = None
    whole = lines.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    with lines.open("ab") as file:
        file.write(b'{"step": 0, "kind": "eval", "samp')  # a line torn by a kill
    assert json.loads((out / "eval.json").read_text())["state"] == "running"

    process = Process(command, tmp_path / "second")
    assert process.wait() == 0, process.output.read_text()
    assert f"{kept.count(chr(10).encode())} episodes are finished" in process.output.read_text()
    assert lines.read_bytes().startswith(kept)
    played = [(t.task.item, t.id) for t in read_trajectories(lines)]
    assert len(played) == len(set(played)) == len({item for item, _ in played}) == 24
    row = json.loads((out / "eval.json").read_text())
    assert row["state"] == "finished"
    assert row["results"][0]["scenarios"]["BabyAI"]["episodes"] == 24
    requests = chat.num_requests
    options = {**GO_TO_BALL, "limit": 24, "turns": (3,)}
    again = await evaluate(Request(chat_agent(chat, prices=None), out=out, **options), quiet())
    assert chat.num_requests == requests  # no episode remained
    assert again["results"] == row["results"]


async def test_report_and_compare_commands_on_two_evaluations(tmp_path: Path) -> None:
    for name in ("oracle", "random"):
        options = {"suite": "agentgym-27", "env": "babyai", "limit": 5, "turns": (1, 8)}
        request = Request(AgentOptions(name), out=tmp_path / name, **options)
        await evaluate(request, quiet())
    process = Process(["report", str(tmp_path / "oracle"), str(tmp_path / "random"), "--compare", "published"],
                      tmp_path / "table")  # fmt: skip
    assert process.wait() == 0
    table = process.output.read_text()
    assert "oracle" in table
    assert "ScalingInter-7B ‡" in table
    assert "published, not measured here" in table
    process = Process(["compare", str(tmp_path / "random"), str(tmp_path / "oracle"), "--json"], tmp_path / "compared")
    assert process.wait() == 0
    compared = json.loads(process.output.read_text())
    assert compared["notes"] == []
    mcnemar = compared["all"]["mcnemar"]
    assert mcnemar["only_first"] + mcnemar["only_second"] + mcnemar["both"] + mcnemar["neither"] == 30
    assert mcnemar["only_first"] < mcnemar["only_second"]
    assert mcnemar["p"] < 0.01
    assert compared["all"]["success"]["low"] > 0
    process = Process(["compare", str(tmp_path / "random"), str(tmp_path / "oracle")], tmp_path / "words")
    assert process.wait() == 0
    assert "oracle beats random in success" in process.output.read_text()
    process = Process(["compare", str(tmp_path / "random"), str(tmp_path / "nowhere")], tmp_path / "none")
    assert process.wait() == 2
    assert "holds no evaluation" in process.output.read_text()


async def test_an_environment_server_lists_its_test_items(tmp_path: Path) -> None:
    local = await run(tmp_path, "oracle")
    with server_in_thread({"babyai": catalog.load("babyai")}) as server:
        remote = await run(tmp_path / "remote", "oracle", url=f"{server.url}/babyai")
        with pytest.raises(ConfigError, match="no subset 'Chess'"):
            await run(tmp_path / "none", "oracle", url=f"{server.url}/babyai", subsets=("Chess",))
    played = [sorted(key for key in read_records(folder / "out")) for folder in (tmp_path, tmp_path / "remote")]
    assert played[0] == played[1]
    assert len(played[0]) == 6
    assert remote["success"] == local["success"]
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"env": None}, "nothing to evaluate: give --suite"),
        ({"lists": Path("lists")}, "--lists has the items of a suite"),
        ({"suite": "agentgym-28"}, "unknown suite 'agentgym-28'"),
        ({"suite": "agentgym-27"}, "a suite has its own items"),
        ({"suite": "agentgym-27", "env": "maze", "subsets": ()}, "agentgym-27 has no 'maze'"),
        ({"compare_published": True, "env": "maze", "subsets": ()}, "published results cover .*, not maze"),
        ({"env": "chess"}, "unknown environment 'chess'"),
        ({"subsets": ("Chess",)}, "no subset 'Chess'"),
        ({"items": "3"}, "not both"),
        ({"subsets": (), "items": "999999999"}, "no item 999999999"),
        ({"url": "agentgym+http://127.0.0.1:9"}, "AgentGym server needs --items"),
    ],
)
async def test_an_invalid_request_is_reported_and_leaves_no_folder(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        await run(tmp_path, "random", **changes)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ("nobody", "is neither oracle"),
        ("./nowhere", "is neither oracle"),
        ("openai:", "needs a model name"),
        (AgentOptions("owner/model", dtype="int3"), "--dtype: .*, got 'int3'"),
        (AgentOptions("owner/model", device="tpu"), "--device: .*, got 'tpu'"),
        (AgentOptions("random", name="a\nb"), "one line of printable text"),
    ],
)
async def test_an_invalid_agent_is_reported(agent: AgentOptions | str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        await run(tmp_path, agent)
    assert not (tmp_path / "out").exists()


async def test_a_misspelled_run_is_corrected(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "config.toml").touch()
    with pytest.raises(ConfigError, match=r"did you mean '.*/first'\?$"):
        await run(tmp_path, str(tmp_path / "frist"))


async def test_the_report_fits_a_narrow_terminal(tmp_path: Path) -> None:
    from rich.console import Console as RichConsole

    screen = io.StringIO()
    rich = RichConsole(file=screen, width=80, highlight=False, force_terminal=True, color_system=None)
    request = Request(AgentOptions("oracle"), out=tmp_path / "out", **GO_TO_BALL)
    await evaluate(request, Console(rich_console=rich))
    lines = [line for line in screen.getvalue().splitlines() if "\x1b" not in line and str(tmp_path) not in line]
    assert any("oracle" in line and "100.0" in line for line in lines)
    assert max(map(len, lines)) <= 80
