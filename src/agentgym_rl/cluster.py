"""A run's workers on a Ray cluster: what each process is made of, and the handles that a run calls.

The functions here run inside the actors of scale/ray_app.py, which knows nothing of recipes.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoTokenizer

from agentgym_rl import serving, wiring
from agentgym_rl.agent.engines.base import Engine
from agentgym_rl.agent.engines.vllm import Probe, probe_model
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.config import Config
from agentgym_rl.console import Console
from agentgym_rl.errors import ConfigError
from agentgym_rl.scale.plan import Plan
from agentgym_rl.scale.ranks import ProcessRanks, whole_state
from agentgym_rl.scale.shards import like_learner, load_shards, save_shards, spread
from agentgym_rl.scale.weights import InPlace, Receiver
from agentgym_rl.training.batch import Batch, split_batch
from agentgym_rl.training.checkpoint import SHARDS, save_state, staged
from agentgym_rl.training.learner import freeze
from agentgym_rl.training.ranks import balanced
from agentgym_rl.training.rl_learner import by_turn
from agentgym_rl.types import Collect, Group, Limits, Sample, Task
from agentgym_rl.workers import make_engine, make_learner

FOUND = ("old_logprobs", "entropies", "reference_logprobs", "values", "last_value")
"""What a learner fills in of a sample."""
Found = list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Job:
    """A group to play."""

    task: Task
    limits: Limits
    seed: int
    index: int
    """Its place among the tasks of the step: ids and seeds are what one process would give."""
    prefix: str
    group_size: int
    temperature: float


class Rank:
    """A learner's rank, inside its actor."""

    def __init__(self, config: Config, folder: Path, reference_dir: Path, rank: int, size: int) -> None:
        torch.set_num_threads(config.threads or 1)
        device, dtype = wiring.choose_device(config.model)
        lora = config.model.lora is not None
        # Sharded weights are loaded on the host, in float32: they are the optimizer's masters, passes run in `dtype`.
        changes = {} if lora else {"device": "cpu", "dtype": "float32"}
        model, self._tokenizer = wiring.load_from(folder, config.model.model_copy(update=changes))
        ranks = ProcessRanks(device, shard=not lora, dtype=dtype)
        self._learner = make_learner(config, model, reference_dir, ranks)
        self._model, self._rank, self._dtype, self._engine = model, rank, dtype, config.engine
        self._shares = config.scale is not None and config.scale.layout == "colocated"

    def assess(self, samples: list[Sample]) -> Found:
        self._learner.assess(samples)
        self._leave_the_device()
        return [_found(sample) for sample in samples]

    def learn(self, batch: Batch, seed: int) -> tuple[dict[str, float], float, Found]:
        count = len(batch.samples)
        metrics = self._learner.learn(batch, seed)
        self._leave_the_device()
        return metrics, self._learner.kl_coef, [_found(sample) for sample in batch.samples[:count]]

    def kl_coef(self) -> float:
        return self._learner.kl_coef

    def num_parameters(self) -> int:
        return self._model.num_parameters()

    def whole_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """In the type that engines have; every rank must read all of it."""
        for name, tensor in whole_state(self._model):
            yield name, tensor.to(self._dtype) if tensor.is_floating_point() else tensor
        self._leave_the_device()

    def probe(self) -> Probe | None:
        """For vLLM, which may leave part of the weights behind without a word; takes every rank."""
        if self._engine.kind == "native":
            return None
        dtype = self._dtype if self._engine.dtype == "auto" else getattr(torch, self._engine.dtype)
        probe = probe_model(self._model, dtype, sent_dtype=self._dtype)
        self._leave_the_device()
        return probe

    def save(self, folder: str) -> None:
        """This rank's part of the learner's state, and from the first rank the model."""
        # Gathered first: that takes every rank, and one that fails to write leaves the others waiting.
        whole = {name: tensor.cpu() if self._rank == 0 else None for name, tensor in self.whole_state()}
        save_shards(Path(folder) / SHARDS, self._learner.state())
        if self._rank == 0:
            self._model.save_pretrained(Path(folder) / "model", state_dict=whole)
            self._tokenizer.save_pretrained(Path(folder) / "model")

    def restore(self, folder: str, state: dict[str, Any] | None) -> float:
        """From shards, or from the `state` that a run of one process wrote."""
        learner, critic = self._learner, self._learner.critic
        optimizers = {"optimizer": learner._parameters}
        parameters = {}
        if critic is not None:
            optimizers["critic.optimizer"] = critic._parameters
            parameters["critic.parameters"] = dict(critic.model.named_parameters())
        like = like_learner(optimizers, parameters)
        shards = Path(folder) / SHARDS
        learner.restore(load_shards(shards, like) if shards.is_dir() else spread(state or {}, like))
        return learner.kl_coef

    def _leave_the_device(self) -> None:
        """To the engine it is shared with: torch keeps what was freed for itself until it is told."""
        if self._shares:
            give_memory_back()


class Player:
    """An environment host's sessions and how it plays, inside its actor."""

    def __init__(self, config: Config, folder: Path, engine: Engine) -> None:
        self._config, self._engine = config, engine
        self._pool = wiring.EnvironmentsPool(config.environments, config.agent)
        self._renderer = Renderer(AutoTokenizer.from_pretrained(folder), config.model.chat_template)

    @property
    def num_open(self) -> int:
        return self._pool.num_open

    async def play(self, job: Job) -> Group:
        policies = wiring.engine_policies(self._engine, self._renderer, self._config.agent, job.temperature)
        collect = wiring.make_collector(self._config, self._pool, policies, job.group_size, job.prefix)
        (group,) = await collect([job.task], job.limits, job.seed, job.index)
        return group

    async def close(self) -> None:
        await self._pool.close()


def make_rank(config: Config, folder: Path, reference_dir: Path, rank: int, size: int) -> Rank:
    return Rank(config, folder, reference_dir, rank, size)


def make_seat(config: Config, folder: Path) -> Receiver:
    """An engine with weights of its own."""
    if config.engine.kind == "vllm":
        return serving.vllm_seat(config, folder)
    torch.set_num_threads(config.threads or 1)
    model, tokenizer = wiring.load_from(folder, config.model)
    model = freeze(model)
    return InPlace(make_engine(config, model, Renderer(tokenizer, config.model.chat_template)), model)


def make_player(config: Config, folder: Path, engine: Engine) -> Player:
    return Player(config, folder, engine)


class LearnerHandle:
    """What `train_rl` calls a learner: hands each rank its share and puts together what they find."""

    def __init__(self, app: Any, config: Config) -> None:
        self._app, self._rl, self._size = app, config.rl, app.plan.learners
        self.kl_coef = config.rl.kl_coef
        self._shared_device = config.scale is not None and config.scale.layout == "colocated"

    def assess(self, samples: list[Sample]) -> None:
        self._have_the_device()
        shares = balanced([len(s.token_ids) for s in samples], self._size)
        found = self._app.on_ranks("assess", [([samples[i] for i in share],) for share in shares])
        for share, some in zip(shares, found, strict=True):
            _fill([samples[i] for i in share], some)

    def learn(self, batch: Batch, seed: int) -> dict[str, float]:
        self._have_the_device()
        shares, indices = split_batch(batch, self._size, self._rl.minibatches, seed)
        results = self._app.on_ranks("learn", [(share, seed) for share in shares])
        for known, (_, _, found) in zip(indices, results, strict=True):
            _fill([batch.samples[i] for i in known], found)
        metrics, self.kl_coef, _ = results[0]
        return metrics | by_turn(batch.samples)

    def _have_the_device(self) -> None:
        if self._shared_device:
            self._app.rest_engines()


class Cluster:
    """A run's workers (workers.Workers) as actors on a Ray cluster."""

    def __init__(self, config: Config, app: Any, folder: Path) -> None:
        self._config, self._app = config, app
        self.learner = LearnerHandle(app, config)
        self.room: int = app.room
        self.num_parameters: int = app.on_ranks("num_parameters", [()] * app.plan.learners)[0]

    @classmethod
    async def start(cls, config: Config, folder: Path, reference_dir: Path, console: Console) -> Cluster:
        try:
            from agentgym_rl.scale.ray_app import RayApp, folder_is_shared
        except ModuleNotFoundError as error:
            raise ConfigError(
                "[scale] needs the package ray, which is not installed: pip install 'agentgym-rl[scale]'"
            ) from error
        plan = plan_of(config)
        give_memory_back()  # of a warm start in this process; the device is one of the cluster's
        console.stage(
            "Cluster", f"{plan.learners} learners, {plan.engines} engines, {plan.env_hosts} environment hosts"
        )
        app = RayApp(plan)
        folder, reference_dir = _absolute(folder), _absolute(reference_dir)
        try:
            await app.start(
                partial(make_rank, config, folder, reference_dir),
                partial(make_seat, config, folder),
                partial(make_player, config, folder),
            )
            if folder.is_dir() and not folder_is_shared(folder):
                raise ConfigError(f"every node of the cluster must see {folder}: use a file system that all share")
            console.note(f"on {'GPUs' if app.plan.device == 'cuda' else 'CPUs'}, {config.model.dtype}")
            made = cls(config, app, folder)
            await app.publish(0)
        except BaseException:
            await app.close()
            raise
        return made

    @property
    def version(self) -> int:
        return self._app.version

    def collector(self, prefix: str, group_size: int | None, temperature: float) -> Collect:
        config = self._config
        sizes = {env.name: group_size or env.group_size or config.rl.group_size for env in config.environments}

        async def collect(tasks: list[Task], limits: Limits, seed: int) -> list[Group]:
            jobs = [Job(t, limits, seed, i, prefix, sizes[t.env], temperature) for i, t in enumerate(tasks)]
            return list(await asyncio.gather(*(self._app.play(job) for job in jobs)))

        return collect

    async def publish(self, version: int) -> None:
        await self._app.publish(version)

    def save(self, root: Path, step: int, state: dict[str, Any], keep: int) -> None:
        with staged(root, step, keep) as folder:
            self._app.on_ranks("save", [(str(folder.absolute()),)] * self._app.plan.learners)
            save_state(folder, step, state | {"learner": None})

    async def restore(self, folder: Path, saved: dict[str, Any]) -> None:
        arguments = [(str(_absolute(folder)), saved["learner"])] * self._app.plan.learners
        self.learner.kl_coef = (await asyncio.to_thread(self._app.on_ranks, "restore", arguments))[0]

    async def events(self) -> list[dict[str, Any]]:
        return await self._app.events()

    async def close(self) -> None:
        await self._app.close()


def plan_of(config: Config) -> Plan:
    scale = config.scale
    assert scale is not None
    groups = [env.group_size or config.rl.group_size for env in config.environments]
    device: Literal["cpu", "cuda", "auto"] = "auto"
    if scale.address is None or config.model.device != "auto":  # else the driver may have no GPU where nodes do
        device = "cuda" if wiring.choose_device(config.model)[0].startswith("cuda") else "cpu"
    return Plan(
        learners=scale.learners,
        engines=scale.engines,
        env_hosts=scale.env_hosts,
        layout=scale.layout,
        device=device,
        learner_cpus=scale.learner_cpus,
        engine_cpus=scale.engine_cpus,
        env_host_cpus=scale.env_host_cpus,
        groups_per_host=max(1, config.agent.concurrency // scale.env_hosts // max(groups)),
        address=scale.address,
        object_store_mb=scale.object_store_mb,
        bucket_mb=scale.bucket_mb,
        worker_timeout_s=scale.worker_timeout_s,
    )


def give_memory_back() -> None:
    """Of the device: what nothing in this process uses, for others that work on it."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _absolute(folder: Path) -> Path:
    """A hub name stays what it is."""
    return folder.absolute() if folder.expanduser().is_dir() else folder


def _found(sample: Sample) -> tuple[Any, ...]:
    return tuple(getattr(sample, name) for name in FOUND)


def _fill(samples: list[Sample], found: Found) -> None:
    for sample, values in zip(samples, found, strict=True):
        for name, value in zip(FOUND, values, strict=True):
            setattr(sample, name, value)
