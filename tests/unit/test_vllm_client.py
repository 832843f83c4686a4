"""The client of a vLLM server against a real HTTP server that speaks its protocol over the native engine; and what is
refused where there is no vLLM. tests/vllm has the same client against vLLM itself."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from runs_for_tests import quiet
from scripted_engine_for_tests import ScriptedEngine
from tokenizers_for_tests import byte_level_bpe
from transformers import LlamaConfig, LlamaForCausalLM
from vllm_for_tests import vllm_processes

from agentgym_rl.agent.engines import replicas as replicas_module
from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.agent.engines.replicas import Replicas
from agentgym_rl.agent.engines.vllm import Probe, VllmServer, probe_model, requirements
from agentgym_rl.agent.engines.vllm import server as vllm_server_module
from agentgym_rl.agent.engines.vllm.probe import TOLERANCE, checksum, parameter_checksums
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.commands.train import train
from agentgym_rl.common.model_loading import loading_lock
from agentgym_rl.config import Config
from agentgym_rl.errors import ConfigError, EngineError
from agentgym_rl.run.collectors import engine_policies
from agentgym_rl.run.preflight import require_engine
from agentgym_rl.training.device.optimizer import make_optimizer
from agentgym_rl.training.settings import OptimizerSettings
from agentgym_rl.types import Limits, Sampling

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def make_model(seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        shape = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
        ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        return LlamaForCausalLM(LlamaConfig(**shape, **heads, **ends, initializer_range=0.3)).eval()


class Server:
    """`raw` reports log-probabilities from before temperature; `develops` has the endpoints that change weights."""

    def __init__(self, *, raw: bool = False, develops: bool = True) -> None:
        self.raw, self.url = raw, ""
        self.model = make_model()
        self.calls: list[str] = []
        self.salts: set[str] = set()
        self.ignores = False
        """New weights are acknowledged and not taken."""
        self.faults = 0
        """So many requests are answered with 503."""
        self.answered = 0
        """Replies of more than the one token that scoring asks for."""
        self.adapters: set[str] = set()
        self.lost_answers = 0
        """So many changes of adapters are made and answered with 504, as by a proxy that timed out."""
        self.app = FastAPI()
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/completions")(self.complete)
        if develops:
            self.app.post("/v1/{action}_lora_adapter")(self.change_adapters)
            self.app.post("/{path}")(self.develop)

    async def models(self) -> dict[str, Any]:
        adapters = [{"id": name, "parent": "tiny"} for name in sorted(self.adapters)]
        return {"data": [{"id": "tiny", "max_model_len": 60}, *adapters]}

    async def change_adapters(self, action: str, request: Request) -> Response:
        """Load or unload an adapter with vLLM's refusals."""
        name = (await request.json())["lora_name"]
        self.calls.append(action)
        if (name in self.adapters) == (action == "load"):
            return Response(f"The lora adapter {name!r} ...", 400 if action == "load" else 404)
        self.adapters ^= {name}
        if self.lost_answers:
            self.lost_answers -= 1
            return Response("timed out", 504)
        return Response("Success")

    async def complete(self, request: Request) -> Any:
        if self.faults:
            self.faults -= 1
            return Response("busy", 503)
        body = await request.json()
        self.salts.add(body["cache_salt"])
        ids = body["prompt"]
        self.answered += body["max_tokens"] > 1
        sampling = Sampling(
            body["max_tokens"], body["temperature"], stop_token_ids=tuple(body.get("stop_token_ids", ()))
        )
        done = await NativeEngine(self.model).generate(ids, sampling, "s")
        plain = self.scored(ids + done.token_ids)
        logprobs = plain[len(ids) - 1 :] if self.raw else done.logprobs
        choice = {"finish_reason": done.finish, "token_ids": done.token_ids, "logprobs": {"token_logprobs": logprobs}}
        rows = zip(plain, ids[1:], strict=False)
        choice["prompt_logprobs"] = [None, *({str(token): {"logprob": value}} for value, token in rows)]
        return {"choices": [choice]}

    async def develop(self, path: str, request: Request) -> Any:
        self.calls.append(path)
        if path == "collective_rpc":
            body = await request.json()
            if body["method"] == "agentgym_checksums":
                return {"results": [parameter_checksums(self.model, *body["args"])]}
            assert body["method"] == "agentgym_load_folder"
            if not self.ignores:
                with loading_lock:  # a second server, or the learner, may load in another thread
                    self.model = LlamaForCausalLM.from_pretrained(body["args"][0]).eval()
        return {"success": True}

    @torch.no_grad()
    def scored(self, ids: list[int]) -> list[float]:
        table = torch.log_softmax(self.model(torch.tensor([ids])).logits[0, :-1], -1)
        return table.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


@contextlib.contextmanager
def running(**options: Any) -> Iterator[Server]:
    server = Server(**options)
    listener = socket.create_server(("127.0.0.1", 0))
    server.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    served = uvicorn.Server(uvicorn.Config(server.app, log_level="error"))
    thread = threading.Thread(target=served.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not served.started:
        time.sleep(0.01)
    try:
        yield server
    finally:
        served.should_exit = True
        thread.join(10)


async def test_replies_come_with_ids_logprobs_and_a_version(tmp_path: Path) -> None:
    with running() as server:
        client = VllmServer(f"{server.url}/v1")
        with pytest.raises(EngineError, match="not started"):
            await client.generate(PROMPT, Sampling(1), "s")
        await client.start()
        assert client.max_context == 60
        server.faults = 2
        done = await client.generate(PROMPT, Sampling(5, temperature=0.5), "s")
        again = server.scored(PROMPT + done.token_ids)[len(PROMPT) - 1 :]
        assert max(abs(a - b) for a, b in zip(again, done.logprobs, strict=True)) > 1e-3  # after temperature
        assert (done.version, done.finish, len(done.token_ids)) == (0, "length", 5)
        other = make_model(1)
        other.save_pretrained(tmp_path / "other")
        salts = set(server.salts)
        await client.update_weights(tmp_path / "other", 4, probe=probe_model(other))
        assert server.calls == ["pause", "collective_rpc", "reset_prefix_cache", "resume", "collective_rpc"]
        assert (await client.generate(PROMPT, Sampling(2), "s")).version == 4
        assert len(server.salts - salts) == 1
        with pytest.raises(EngineError, match="does not hold these weights"):
            await client.update_weights(tmp_path / "other", 5, probe=probe_model(make_model()))
        with pytest.raises(EngineError, match="failed to load weights 5"):
            await client.generate(PROMPT, Sampling(2), "s")
        await client.update_weights(tmp_path / "other", 6, probe=probe_model(other))
        assert (await client.generate(PROMPT, Sampling(2), "s")).version == 6
        await client.close()


async def test_an_adapter_whose_answer_was_lost_is_loaded_once(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with running() as server:
        client = VllmServer(server.url)
        await client.start()
        server.lost_answers = 1
        await client.update_weights(tmp_path, 1)
        (first,) = server.adapters
        server.lost_answers = 2  # of loading the second and of unloading the first
        await client.update_weights(tmp_path, 2)
        assert server.calls == ["load", "load", "load", "load", "unload", "unload"]
        assert len(server.adapters - {first}) == len(server.adapters) == 1
        await client.update_weights(tmp_path, 2)  # the same version again is loaded again
        assert len(server.adapters) == 1
        assert client._adapter in server.adapters
        await client.close()


async def test_an_adapter_that_is_refused_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with running(develops=False) as server:
        client = VllmServer(server.url)
        await client.start()
        with pytest.raises(
            EngineError, match=r"/v1/load_lora_adapter refused: HTTP 404 .*; adapters need a server with"
        ):
            await client.update_weights(tmp_path, 1)
        await client.close()


async def test_a_reply_to_a_request_that_arrives_after_an_update_is_of_the_new_weights(tmp_path: Path) -> None:
    class LateClient(VllmServer):
        async def _complete(self, prompt_ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
            if self.version == 0:
                await self.update_weights(tmp_path / "other", 1)
            return await super()._complete(prompt_ids, body)

    make_model(1).save_pretrained(tmp_path / "other")
    with running() as server:
        client = LateClient(server.url)
        await client.start()
        reply = await client.generate(PROMPT, Sampling(3), "s")
        assert reply.version == 1
        assert server.answered == 2, "the first reply is not used"
        await client.close()


async def test_a_restarted_server_serves_nothing_before_it_has_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(replicas_module, "monotonic", lambda: now)
    monkeypatch.setattr(vllm_server_module, "RETRIES", 0)
    other = make_model(1)
    other.save_pretrained(tmp_path / "other")
    with running() as first, running() as second:
        replicas = Replicas([VllmServer(first.url), VllmServer(second.url)])
        await replicas.start()
        await replicas.update_weights(tmp_path / "other", 1, probe=probe_model(other))
        first.faults = 1
        await replicas.generate(PROMPT, Sampling(2), "s0")
        await replicas.release("s0")
        first.model = make_model()  # as it was when it was started
        for number in range(1, 4):
            now += 100.0
            await replicas.generate(PROMPT, Sampling(2), f"s{number}")
            await replicas.release(f"s{number}")
        assert not first.faults
        assert first.answered == 0
        await replicas.update_weights(tmp_path / "other", 2, probe=probe_model(other))
        await replicas.generate(PROMPT, Sampling(2), "s4")
        assert first.answered == 1
        await replicas.close()


async def test_a_skipped_update_is_detected_however_small_it_was(tmp_path: Path) -> None:
    """A few steps of AdamW at 1e-6 in bf16: the probe's tokens are scored alike, within what is allowed."""
    make_model().bfloat16().save_pretrained(tmp_path / "start")
    learner = LlamaForCausalLM.from_pretrained(tmp_path / "start", dtype=torch.bfloat16)
    with running() as server:
        server.model = make_model().bfloat16()
        client = VllmServer(server.url)
        await client.start()
        learner.save_pretrained(tmp_path / "one")
        await client.update_weights(tmp_path / "one", 1, probe=probe_model(learner))
        optimizer = make_optimizer(list(learner.parameters()), OptimizerSettings(lr=1e-6, warmup_steps=0))
        for _ in range(20):  # few numbers cross to the next that bf16 has
            learner(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        learner.save_pretrained(tmp_path / "two")
        probe = probe_model(learner)
        probe.check(await client.score(probe.token_ids), 2)  # log-probabilities do not tell
        server.ignores = True
        with pytest.raises(EngineError, match=r"engine's .* is bfloat16 \w+, the learner's is bfloat16 \w+"):
            await client.update_weights(tmp_path / "two", 2, probe=probe)
        await client.close()


def test_a_learner_whose_positions_were_rounded_is_refused() -> None:
    model = make_model().bfloat16()
    with pytest.raises(EngineError, match=r"rotary_emb\.inv_freq must be float32, got bfloat16.*from_pretrained"):
        probe_model(model)
    model = make_model()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    assert probe_model(model).tolerance == TOLERANCE[torch.bfloat16]


def test_checksums_depend_on_bits_and_positions_and_skip_padding() -> None:
    tensor = torch.randn(6, 4, dtype=torch.bfloat16)
    other = tensor.clone()
    other[3, 2] = torch.nextafter(other[3, 2], torch.tensor(9.0, dtype=torch.bfloat16))
    swapped = tensor[[1, 0, 2, 3, 4, 5]]
    assert len({checksum(t) for t in (tensor, other, swapped, tensor.float())}) == 4
    model = make_model()
    probe = probe_model(model, torch.bfloat16)
    engine = make_model().bfloat16()
    engine.resize_token_embeddings(64)
    found = parameter_checksums(engine, probe.shapes)
    assert found.keys() == probe.checksums.keys()
    probe.check_checksums([found, found], 1)
    with pytest.raises(EngineError, match=r"engine\.dtype"):
        probe.check_checksums([parameter_checksums(model, probe.shapes)], 1)
    with pytest.raises(EngineError, match="cannot be checked"):
        probe.check_checksums([parameter_checksums(torch.nn.Linear(2, 2), probe.shapes)], 1)


async def test_a_server_that_cannot_serve_training_is_refused_with_a_reason(tmp_path: Path) -> None:
    with running(raw=True, develops=False) as server:
        client = VllmServer(server.url)
        await client.start()
        assert (
            len((await client.generate(PROMPT, Sampling(3), "s")).token_ids) == 3
        )  # at temperature 1 both are the same
        with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
            await client.generate(PROMPT, Sampling(3, temperature=0.5), "s")
        with pytest.raises(EngineError, match="folder that both sides see"):
            await client.update_weights({}, 1)
        make_model().save_pretrained(tmp_path / "same")
        with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
            await client.update_weights(tmp_path / "same", 1)
        await client.close()
    with pytest.raises(EngineError, match="failed 4 times"):
        await VllmServer("http://127.0.0.1:9").start()
    with pytest.raises(EngineError, match="must look like http"):
        VllmServer("host:8000")


def test_a_missing_or_unsupported_vllm_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "PACKAGES", ("a-package-nobody-has",))
    with pytest.raises(EngineError, match=r"needs vLLM 0\.22 to 0\.32, which is not installed"):
        requirements.require_vllm()
    monkeypatch.setattr(requirements, "PACKAGES", ("torch",))
    with pytest.raises(EngineError, match=r"needs vLLM 0\.22 to 0\.32, found torch"):
        requirements.require_vllm()


def test_a_probe_tells_weights_apart() -> None:
    probe = probe_model(make_model())
    assert probe.check(probe.logprobs, 1) == 0
    with pytest.raises(EngineError, match="differ from the learner's"):
        probe.check(probe_model(make_model(1)).logprobs, 1)
    with pytest.raises(EngineError, match="differ from the learner's"):
        probe.check([float("nan")] * len(probe.logprobs), 1)
    with pytest.raises(EngineError, match="gave 1"):
        Probe([1, 2, 3], [-1.0, -1.0]).check([-1.0], 1)


def test_only_unsharded_tensors_of_a_split_model_are_compared() -> None:
    model = make_model()
    embedding = model.get_input_embeddings().weight
    shapes = {
        name: list(p.shape) for name, p in model.named_parameters() if "embed" in name or name.endswith("norm.weight")
    }
    assert parameter_checksums(model, shapes).keys() == shapes.keys()
    embedding.output_dim = 0  # as vLLM marks it
    assert parameter_checksums(model, shapes).keys() == shapes.keys()
    assert parameter_checksums(model, shapes, split=True).keys() == {name for name in shapes if "norm" in name} != set()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"engine": {"urls": ["http://a"]}}, "read by kind = 'vllm'"),
        ({"engine": {"kind": "vllm", "urls": ["http://a"], "eager": True}}, "the servers decide"),
        ({"engine": {"kind": "vllm", "replicas": 2}, "scale": {}}, "starts vLLM itself"),
        ({"engine": {"kind": "vllm", "urls": ["http://a"]}, "scale": {}}, "starts vLLM itself: remove engine.urls"),
        ({"engine": {"tensor_parallel": 2}, "scale": {}}, "read by kind = 'vllm'"),
        ({"engine": {"kind": "vllm", "tensor_parallel": 2}}, "given several devices by .scale."),
        (
            {"engine": {"kind": "vllm", "tensor_parallel": 2}, "scale": {"layout": "colocated"}},
            "2 learners per engine, got 1",
        ),
        ({"engine": {"kind": "vllm"}, "method": "sft", "data": {"play": "oracle"}}, "plays for method = 'rl'"),
    ],
)
def test_a_recipe_with_ignored_settings_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Config.model_validate({"model": {"path": "m"}, "environments": [{"name": "babyai"}], **changes})


async def test_a_vllm_that_cannot_start_is_refused_before_the_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config_of(heads: int = 2, **sections: Any) -> Config:
        shape = {"hidden_size": 48, "intermediate_size": 32, "num_layers": 1, "num_heads": heads}
        raw = {"model": {"scratch": shape}, "environments": [{"name": "keydoor"}], "warm_start": {"episodes": 8}}
        return Config.model_validate(raw | {"engine": {"kind": "vllm"}} | sections)

    def check(config: Config) -> None:
        require_engine(config.model, config.engine, config.scale)

    def missing() -> str:
        raise EngineError("engine.kind = 'vllm' needs vLLM, which is not installed")

    monkeypatch.setattr(requirements, "require_vllm", missing)
    for config in (config_of(), config_of(scale={})):
        with pytest.raises(ConfigError, match="which is not installed"):
            await train(config, tmp_path / "run", console=quiet())
        assert not (tmp_path / "run").exists()
    check(config_of(scale={"address": "auto"}))  # that is for the nodes to have
    monkeypatch.setattr(requirements, "require_vllm", lambda: "0.32.0")
    split = {"engine": {"kind": "vllm", "tensor_parallel": 3}, "scale": {"layout": "disaggregated"}}
    with pytest.raises(ConfigError, match="tensor_parallel = 3 does not divide the model's heads, 2 and 2 of keys"):
        check(config_of(**split))
    check(config_of(heads=6, **split))


@pytest.mark.parametrize("seeded", [True, False])
async def test_requests_have_seeds_unless_the_recipe_says_otherwise(seeded: bool) -> None:
    engine = {"kind": "vllm", "seeded": seeded}
    config = Config.model_validate({"model": {"path": "m"}, "environments": [{"name": "babyai"}], "engine": engine})
    asked, session = ScriptedEngine([[1], [1]]), SimpleNamespace(instruction="", tools=())
    make = engine_policies(
        asked, Renderer(byte_level_bpe("chatml"), "chatml"), config.agent, 1.0, seeded=config.engine.seeded
    )
    for seed in (7, 8):
        await make(session, seed).reply([], "Where to?", Limits(1, 4, 200))  # type: ignore[arg-type]
    seeds = {sampling.seed for sampling in asked.samplings}
    assert (None in seeds, len(seeds)) == ((False, 2) if seeded else (True, 1))


def test_a_saved_config_can_be_read_again() -> None:
    for engine in ({}, {"kind": "vllm", "memory_share": 0.5}):
        config = Config.model_validate({"model": {"path": "m"}, "environments": [{"name": "babyai"}], "engine": engine})
        assert Config.model_validate(config.resolved()) == config


@pytest.mark.parametrize(("rank", "room"), [(1, 8), (4, 8), (8, 8), (9, 16), (300, 320), (512, 512)])
def test_adapter_ranks_are_rounded_up_to_those_of_vllm(rank: int, room: int) -> None:
    assert requirements.max_lora_rank(rank) == room


def test_adapters_that_are_too_large_for_vllm_are_refused() -> None:
    with pytest.raises(EngineError, match=r"up to rank 512, got 513: set a smaller model\.lora\.rank"):
        requirements.max_lora_rank(513)


def test_vllm_processes_are_found_even_without_a_process_title() -> None:
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    process.start()
    try:
        give_up_at = time.monotonic() + 30  # it is a copy of this one until it runs a program of its own
        while process.pid not in vllm_processes(os.getpid()):
            assert time.monotonic() < give_up_at
            time.sleep(0.05)
    finally:
        process.kill()
        process.join()
