"""A real `vllm serve` on this machine through its client: ids and log-probabilities, weights by folder."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from envs_for_tests import Counting
from runs_for_tests import counting_config, quiet
from transformers import AutoModelForCausalLM
from vllm_for_tests import gap, greedy, prompt, scored

from agentgym_rl.agent.engines.vllm import VllmServer, probe_model
from agentgym_rl.agent.engines.vllm.requirements import EXTENSION
from agentgym_rl.agent.styles import STYLES
from agentgym_rl.commands.train import train
from agentgym_rl.config import Config
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.run.log import read_metrics
from agentgym_rl.training.lora import add_adapter
from agentgym_rl.training.settings import LoraSettings
from agentgym_rl.types import Sampling

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def served(folders: dict[str, Path]) -> Path:
    return Path(os.environ.get("VLLM_TEST_MODEL") or folders["A"])


@pytest.fixture(scope="module")
def address(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(served), "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512", "--max-num-seqs", "16"]
    command += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"]
    command += ["--enforce-eager", "--logprobs-mode", "processed_logprobs", "--worker-extension-cls", EXTENSION]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            command,
            env=os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 900
        while True:
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(1)
        yield url
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture(scope="module")
def model(served: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(served, dtype="float32").eval()


@pytest_asyncio.fixture(loop_scope="session")
async def server(address: str) -> AsyncIterator[VllmServer]:
    client = VllmServer(address, max_context=400)
    await client.start()
    yield client
    await client.close()


async def test_ids_and_logprobs_are_those_of_transformers(server: VllmServer, model: Any) -> None:
    assert server.max_context == 400
    ids = prompt(40, model.config.vocab_size)
    asked = [Sampling(8, temperature=0), Sampling(8, seed=3), Sampling(8, temperature=0.6, seed=2**62)]
    # The client's first reply at such a temperature tries the server out by scoring a prompt. On a CPU, with room for
    # adapters, vLLM dies of scored prompts beside other requests: alone first.
    await server.generate(ids, asked[2], "tried")
    done = await asyncio.gather(*(server.generate(ids, s, str(i)) for i, s in enumerate(asked)))
    for sampling, completion in zip(asked, done, strict=True):
        assert gap(model, ids, completion, sampling.temperature or 1.0) < 1e-4
    whole = greedy(model, ids, 8)
    assert done[0].token_ids == whole
    assert (await server.generate(ids, asked[1], "again")).token_ids == done[1].token_ids
    stopped = await server.generate(ids, Sampling(8, temperature=0, stop_token_ids=(whole[2],)), "s")
    assert (stopped.token_ids, stopped.finish) == (whole[: whole.index(whole[2]) + 1], "stop")
    assert max(abs(a - b) for a, b in zip(await server.score(ids), scored(model, ids[:1], ids[1:]), strict=True)) < 1e-4
    full = await server.generate(prompt(398, model.config.vocab_size), Sampling(8), "f")
    assert (len(full.token_ids), full.finish) == (2, "length")


async def test_adapters_are_loaded_by_version(server: VllmServer, model: Any, served: Path, tmp_path: Path) -> None:
    adapted = AutoModelForCausalLM.from_pretrained(served, dtype="float32").eval()
    add_adapter(adapted, LoraSettings(rank=4, alpha=8.0), 0)
    ids, sampling = prompt(200, model.config.vocab_size), Sampling(8, seed=1)
    for number in (1, 2, 3):  # one more than the server has places for: the one before makes room
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.3)
        adapted.save_pretrained(tmp_path / str(number))
        await server.update_weights(tmp_path / str(number), number, probe=probe_model(adapted))
        reply = await server.generate(ids, sampling, "a")
        assert (reply.version, gap(adapted, ids, reply) < 1e-4) == (number, True)
        assert gap(model, ids, reply) > 0.1
    another = VllmServer(server.url, max_context=400)
    await another.start()
    assert gap(model, ids, await another.generate(ids, sampling, "a")) < 1e-4, "the weights below are as they were"
    await another.close()


def run_config(address: str, served: Path, steps: int) -> Config:
    """Adapters learn while the next step is played. A random model earns no reward, so only its entropy changes."""
    rl = {"kl_coef": 0.0, "entropy_coef": 0.1, "zero_variance": "keep", "optimizer": {"lr": 0.05}}
    return counting_config(
        model={"path": str(served), "lora": {"rank": 4}},
        warm_start=None,
        engine={"kind": "vllm", "urls": [address]},
        rl={"steps": steps, "groups_per_step": 2, "group_size": 4, "overlap": 1, **rl},
        horizon={"kind": "fixed", "turns": [2]},
        eval={"episodes": 4, "max_turns": 2},
    )


async def test_a_run_with_adapters_overlaps_and_is_resumed(address: str, served: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for steps in (2, 4):
        config = run_config(address, served, steps)
        pool = LocalPool({"counting": Counting}, action_format=STYLES[config.agent.style].action_format)
        summary = await train(config, folder, console=quiet(), pool=pool, resume=steps > 2)
        await pool.close()
        assert summary["steps"] == steps
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["staleness/max"] for row in rows] == [0, 1, 0, 1], "after a resume nothing is played in advance yet"
    # What the server sampled with is what the learner has, also after a resume; or had, one version earlier.
    assert [row["mismatch/abs"] < 1e-4 for row in rows] == [True, False, True, False]
    assert all(row["grad/norm"] > 0 for row in rows)
    assert [p.name for p in (folder / "engine").iterdir()] == ["weights_4"]


async def test_weights_are_taken_from_a_folder(server: VllmServer, model: Any, tmp_path: Path) -> None:
    ids, sampling = prompt(300, model.config.vocab_size), Sampling(8, temperature=0)
    before = await server.generate(ids, sampling, "a")
    assert gap(model, ids, before) < 1e-4
    for parameter in model.parameters():
        parameter.data.mul_(1.1)
    model.save_pretrained(tmp_path / "new")
    await server.update_weights(tmp_path / "new", 7, probe=probe_model(model))
    after = await server.generate(ids, sampling, "a")
    assert (before.version, after.version) == (0, 7)
    assert gap(model, ids, after) < 1e-4
    expected = scored(model, ids, before.token_ids)
    assert max(abs(a - b) for a, b in zip(expected, before.logprobs, strict=True)) > 1e-2
