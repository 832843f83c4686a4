"""The backend of a run on a Ray cluster: the contents of each process, and the handles that a run calls.

The functions here run inside the actors of scale/ray_app.py, which knows nothing of recipes.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoTokenizer

from agentgym_rl.agent.engines.base import EngineAdapter
from agentgym_rl.agent.engines.native.adapter import NativeAdapter
from agentgym_rl.agent.engines.vllm import Probe, probe_model
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.templates import resolve_template
from agentgym_rl.config import AgentConfig, Config, EnvironmentConfig
from agentgym_rl.errors import ConfigError
from agentgym_rl.run import backend_vllm
from agentgym_rl.run.backend import (
    OnTrajectory,
    Trainer,
    about_renderer,
    load_output_head,
    load_value_model,
    make_learner,
    make_trainer,
)
from agentgym_rl.run.collectors import engine_policies, make_collector, make_stages
from agentgym_rl.run.context import RunContext
from agentgym_rl.run.environments_pool import EnvironmentsPool
from agentgym_rl.run.load_model import choose_device, load_from
from agentgym_rl.run.local_engine import make_native_engine
from agentgym_rl.run.rank_handles import (
    LearnerHandle,
    RankResult,
    SampleResult,
    TrainerHandle,
    claim_device,
    result_of_learning,
    result_of_score,
)
from agentgym_rl.run.start import Start, describe_scratch, imitate, make_untrained_model
from agentgym_rl.run.system import SystemMonitor
from agentgym_rl.run.teams import Team, absolute_players, team_of_host
from agentgym_rl.scale.folders import require_same, require_shared
from agentgym_rl.scale.process_group import ProcessRanks, untied_state, whole_state
from agentgym_rl.scale.publisher import shares_device_memory
from agentgym_rl.scale.resource_plan import Plan
from agentgym_rl.scale.shards import ShardWriter, like_learner, load_shards, require_written, shard_state
from agentgym_rl.training import lora, stored
from agentgym_rl.training.batch import Batch
from agentgym_rl.training.checkpoint import SHARDS, commit, removed_on_error, save_state, stage
from agentgym_rl.training.dpo import Preference, make_preferences
from agentgym_rl.training.learner import freeze
from agentgym_rl.training.metrics import DEPENDENCE_GROUPS
from agentgym_rl.training.offline_settings import PairSettings, RewardModelSettings
from agentgym_rl.training.ranks import EmptyFirst
from agentgym_rl.training.reward_model import RewardTrainer, save_head
from agentgym_rl.training.rl_learner import turn_sums
from agentgym_rl.training.settings import SFTSettings, TreeSettings
from agentgym_rl.types import CollectFrom, Group, Limits, Sample, Task


@dataclass(frozen=True, slots=True)
class Job:
    """A group to play."""

    task: Task
    limits: Limits
    seed: int
    index: int
    """Index among the tasks of the step, so that ids and seeds are those of a run in one process."""
    prefix: str
    group_size: int
    temperature: float
    version: int
    """Version of the weights that it is played with."""
    oracle_share: float | None = None
    tree: TreeSettings | None = None
    stored: bool = False
    """Whether the group is divided into the parts of training/stored.py."""
    keep_tail: bool = False
    """Whether samples keep the tokens after the last reply, for a critic."""
    keep_infos: bool = False
    """Whether the driver needs the infos of all turns: states to compare, or attempts."""
    measured: bool = False
    """Whether the group is that of an evaluation, in a game of several roles."""
    snapshots: tuple[int, ...] = ()
    """Steps of the snapshots that roles are played with."""


class Rank:
    """One learner rank, inside its actor. All ranks must call every method together."""

    def __init__(self, config: Config, rank: int, size: int) -> None:
        assert config.scale is not None
        torch.set_num_threads(config.threads or int(config.scale.learner_cpus) or 1)
        device, self._dtype = choose_device(config.model)
        adapters = config.model.lora is not None
        self._config, self._rank, scale = config, rank, config.scale
        self._ranks = ProcessRanks(
            device,
            shard=not adapters,
            shard_ranks=scale.shard_ranks,
            offload=scale.offload and not adapters,
            reduce_once=scale.reduce_gradients == "update",
        )
        self.fetch: Callable[[Any], Any] = _without_store
        """Reads an object of the cluster's store; set by the actor."""
        self._writer = ShardWriter(background=config.checkpoint.background)
        self._system = SystemMonitor()
        self._folder = ""
        """Folder of the model that was loaded last."""
        self._model: Any = None
        self._tokenizer: Any = None
        self._learner: Any = None
        """RL learner or trainer."""
        self._shares = config.scale.layout == "colocated"
        self._merges = adapters and config.engine.kind == "vllm"
        """Whether to send merged weights: vLLM takes adapters only from disk, which nodes need not share."""
        self._sent_dtype = torch.float32 if self._merges else self._dtype
        """Type of the weights sent to engines. A config whose vLLM would round merged weights is refused."""

    def make_untrained_model(self, folder: str) -> int:
        """Make the recipe's untrained model with the tokenizer of `folder`; return its number of parameters."""
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = make_untrained_model(self._config.model, self._config.seed, self._tokenizer, self._ranks)
        if self._merges:
            lora.require_mergeable(self._model)
        return self._model.num_parameters()

    def load(self, folder: str, reference_dir: str | None = None) -> None:
        """Load the model in `folder`, and make an RL learner if there is a reference."""
        self._folder = folder
        self._learner = self._model = None
        release_memory()
        self._model, self._tokenizer = load_from(folder, self._config.model, self._ranks)
        if self._merges:
            lora.require_mergeable(self._model)
        if reference_dir is not None:
            config, folder_of_reference = self._config, Path(reference_dir)
            self._learner = make_learner(
                self._model,
                self._tokenizer,
                config.rl,
                config.model,
                config.agent.temperature,
                folder_of_reference,
                self._ranks,
                warm=config.warm_start is not None,
                critic_dir=Path(folder),
            )

    def make_trainer(self, data: list[Any], settings: SFTSettings | PairSettings, seed: int | str) -> int:
        """Make a trainer on `data`; return its number of updates."""
        scored = None
        if isinstance(settings, RewardModelSettings) and self._ranks.shard:
            # The model is sharded as a language model, and cannot be sharded once more with another head.
            self._model = None
            release_memory()
            scored, self._model = load_value_model(self._folder, self._config.model, self._ranks)
            load_output_head(self._model, self._folder, self._config.model, self._ranks)
        self._learner = make_trainer(self._model, data, settings, seed, self._ranks, scored)
        return self._learner.total

    def step(self) -> dict[str, float]:
        return self._learner.step()

    def release_trainer(self) -> None:
        """Free the trainer. In bfloat16 the weights are those that engines have from now on."""
        self._learner = None
        self._release_device()

    def make_preferences(self, pairs: list[tuple[Sample, Sample]], max_tokens: int) -> list[Preference]:
        preferences = make_preferences(self._model, pairs, max_tokens, self._ranks)
        return preferences if self._rank == 0 else []

    def scores(self, samples: list[Sample]) -> list[float]:
        scores = self._learner.scores(samples)
        self._release_device()
        return scores

    def score(self, samples: list[Sample], policy_only: bool) -> list[SampleResult]:
        stored.load(samples, self.fetch)
        self._learner.score(samples, policy_only=policy_only)
        self._release_device()
        return [result_of_score(sample, policy_only) for sample in samples]

    def learn(self, batch: Batch, seed: int) -> RankResult:
        samples = list(batch.samples)
        stored.load(samples, self.fetch)
        metrics = self._learner.learn(batch, seed) | self._system.gpu()
        self._release_device()
        return RankResult(
            metrics, self._learner.kl_coef, turn_sums(samples), [result_of_learning(sample) for sample in samples]
        )

    def num_parameters(self) -> int:
        return self._model.num_parameters()

    def whole_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights for engines, in their type. Every rank must read all of them."""
        named = lora.merged(self._model, self._policy()) if self._merges else self._policy()
        for name, tensor in named:
            yield name, tensor.to(self._sent_dtype) if tensor.is_floating_point() else tensor
        self._release_device()

    def probe(self) -> Probe | None:
        """Return a probe for vLLM, which may miss part of an update silently. All ranks take part."""
        engine = self._config.engine
        if engine.kind == "native":
            return None
        dtype = self._dtype if engine.dtype == "auto" else getattr(torch, engine.dtype)
        merge = partial(lora.merged, self._model) if self._merges else None
        probe = probe_model(self._model, dtype, sent_dtype=self._sent_dtype, merge=merge)
        self._release_device()
        return probe

    def save(self, folder: str) -> None:
        """Write this rank's part of the learner's state and of the model, or begin to. `finish_saving` follows."""
        if self._learner is not None:
            self._writer.save_shards(Path(folder) / SHARDS, self._learner.state())
        head = self._learner.head() if isinstance(self._learner, RewardTrainer) else {}  # all ranks take part
        self._write_model(Path(folder) / "model")
        if head and self._rank == 0:
            save_head(head, about_renderer(self._config), Path(folder) / "model")

    def is_saved(self) -> bool:
        return self._writer.done

    def finish_saving(self) -> None:
        self._writer.finish()

    def export(self, folder: str) -> None:
        """Write the model alone."""
        self._write_model(Path(folder))
        self._writer.finish()

    def _policy(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the policy's weights as they are learned."""
        for name, tensor in whole_state(self._model):
            if not any(f".{learners_own}." in name for learners_own in (lora.REFERENCE, lora.CRITIC)):
                yield name, tensor

    def _write_model(self, folder: Path) -> None:
        """Write weights as engines have them, or adapters as they are learned."""
        model = self._model
        if self._ranks.shard:
            # All ranks gather every tensor, before a rank that fails to write could leave the others waiting.
            sizes = {name: tensor.numel() for name, tensor in untied_state(model).items()}
            self._writer.save_model(folder, sizes, self.whole_state())
        if self._rank == 0:
            if self._ranks.shard:
                model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
                model.config.dtype = self._dtype
                model.config.save_pretrained(folder)
                if model.can_generate():
                    model.generation_config.save_pretrained(folder)
            else:
                model.save_pretrained(folder, state_dict={name: tensor.cpu() for name, tensor in self._policy()})
            self._tokenizer.save_pretrained(folder)

    def restore(self, folder: str, state: dict[str, Any] | None) -> tuple[int, float]:
        """Restore from shards, or from the `state` of a run in one process; return (updates made, KL weight)."""
        learner = self._learner
        like, shards = like_learner(learner), Path(folder) / SHARDS
        learner.restore(load_shards(shards, like) if shards.is_dir() else shard_state(state or {}, like))
        return learner.updates, getattr(learner, "kl_coef", 0.0)

    def _release_device(self) -> None:
        """Return freed memory to the engine on the same device: torch keeps it otherwise."""
        if self._shares:
            release_memory()


class Player:
    """Sessions and collectors of one environment host, inside its actor."""

    def __init__(
        self,
        environments: tuple[EnvironmentConfig, ...],
        agent: AgentConfig,
        make_renderer: Callable[[], Renderer],
        variables: dict[str, str],
        seeded: bool,
        make_team: Callable[[], Team] | None,
        engine: Any,
    ) -> None:
        """`variables`: environment variables of the driver that the recipe names."""
        os.environ.update(variables)
        self._agent, self._seeded, self._engine = agent, seeded, engine
        self._pool, self._stages = EnvironmentsPool(environments, agent), make_stages(agent, environments)
        self._renderer = make_renderer()
        self._team = None if make_team is None else make_team()

    @property
    def num_open(self) -> int:
        return self._pool.num_open

    async def play(self, job: Job) -> list[Group] | tuple[Any, ...]:
        """Return the group, that of each role in a game of several, or the group's parts (training/stored.py)."""
        engine = self._engine.at_least(job.version)
        policies = engine_policies(
            engine,
            self._renderer,
            self._agent,
            job.temperature,
            seeded=self._seeded,
            oracle_share=job.oracle_share,
        )
        options: dict[str, Any] = {"tree": job.tree}
        if self._team is not None:
            await self._team.follow(job.snapshots)
            options = self._team.collector_options(policies, job.temperature, measured=job.measured)
        collect = make_collector(self._agent, self._pool, policies, job.group_size, job.prefix, self._stages, **options)
        groups = await collect([job.task], job.limits, job.seed, job.index)
        if not job.stored:
            return groups
        (group,) = groups
        keep = {"keep_tail": job.keep_tail, "keep_infos": job.keep_infos, "compare": job.index < DEPENDENCE_GROUPS}
        return await asyncio.to_thread(stored.store, group, **keep)

    async def close(self) -> None:
        if self._team is not None:
            await self._team.close()
        await self._pool.close()


def make_engine_adapter(config: Config, folder: Path) -> EngineAdapter:
    """Return an engine with weights of its own, behind the interface that weights are sent through."""
    if config.engine.kind == "vllm":
        # It gets the weights of a model with adapters merged.
        base = folder if config.model.lora is None else Path(str(config.model.path))
        return backend_vllm.VllmAdapter(backend_vllm.make_vllm(config, base))
    assert config.scale is not None
    torch.set_num_threads(config.threads or int(config.scale.engine_cpus) or 1)
    model, tokenizer = load_from(folder, config.model, EmptyFirst())
    model = freeze(model)
    renderer = Renderer(tokenizer, config.model.chat_template, thoughts=config.agent.thoughts)
    sizes = config.sessions_per_engine(), config.longest_context()
    return NativeAdapter(make_native_engine(model, renderer, *sizes, config.rl.keep_cache), model)


def _load_renderer(folder: Path, config: Config) -> Renderer:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Renderer(tokenizer, config.model.chat_template, thoughts=config.agent.thoughts)


def config_for_workers(config: Config, device: str) -> Config:
    """Return the recipe for processes on other machines: full paths, the text of the driver's files, one device."""
    model = config.model
    changes = {
        "device": device,
        "path": None if model.path is None else str(_absolute(Path(model.path))),
        "chat_template": resolve_template(model.chat_template),
    }
    # Only the driver asks which items there are.
    environments = tuple(env.model_copy(update={"items": {}}) for env in config.environments)
    team = None if config.team is None else absolute_players(config.team)
    updates = {"model": model.model_copy(update=changes), "environments": environments, "team": team}
    return config.model_copy(update=updates)


def named_variables(config: Config) -> dict[str, str]:
    """Return the environment variables that the recipe names, for the processes that read them.

    They are not given to Ray as variables of the job, which it would write into its logs.
    """
    names = [env.token_variable for env in config.environments]
    names += [config.team.api_key_variable] if config.team is not None else []
    return {name: os.environ[name] for name in names if name is not None and name in os.environ}


class RayBackend:
    """The backend of a run as actors on a Ray cluster."""

    def __init__(self, context: RunContext, app: Any, folder: Path) -> None:
        config = context.config
        self._config, self._app = config, app
        self._saving: Callable[[], None] | None = None
        """Ends the checkpoint that ranks are writing."""
        self.learner: Any = LearnerHandle(app, config.rl) if config.online else None
        self.renderer = _load_renderer(folder, config)
        self.max_context: int = app.max_context
        self.num_parameters: int = app.on_all("num_parameters")[0]
        self.team = None if config.team is None else Team(config, _league_dir(context), self._export)

    @classmethod
    async def start(
        cls, context: RunContext, folder: Path, reference_dir: Path | None = None, start: Start | None = None
    ) -> RayBackend:
        """Start ranks, engines and environment hosts with the model in `folder`.

        With a `start`, ranks make the model and write it there first. RL's reference is the model in `reference_dir`,
        or that of `folder`.
        """
        config, console, run_dir = context.config, context.console, context.log.root
        try:
            from agentgym_rl.scale.ray_app import RayApp, on_other_nodes
        except ModuleNotFoundError as error:
            raise ConfigError(
                "[scale] needs the package ray, which is not installed: pip install 'agentgym-rl[scale]'"
            ) from error
        plan = plan_of(config)
        console.stage(
            "Cluster", f"{plan.learners} learners, {plan.engines} engines, {plan.env_hosts} environment hosts"
        )
        app = RayApp(plan)
        if start is not None:
            start.tokenizer.save_pretrained(folder)
        folder, reference_dir = _absolute(folder), _absolute(reference_dir or folder)
        try:
            await app.connect(console.note)
            worker_config = config_for_workers(config, app.plan.device)
            await app.start_learners(partial(Rank, worker_config))
            ask = partial(on_other_nodes, plan.worker_timeout_s)
            await require_shared(_absolute(run_dir), ask)
            for place in sorted({folder, reference_dir, _absolute(Path(config.model.path or folder))}):
                if place.is_dir() and not place.is_relative_to(_absolute(run_dir)):
                    await require_same(place, ask)
            console.note(f"on {'GPUs' if app.plan.device == 'cuda' else 'CPUs'}, {config.model.dtype}")
            if start is not None:
                await _make_starting_model(app, context, folder, start)
            await asyncio.gather(
                app.wait_for_all("load", str(folder), str(reference_dir) if config.online else None),
                app.start_players(
                    partial(make_engine_adapter, worker_config, folder),
                    partial(
                        Player,
                        worker_config.environments,
                        worker_config.agent,
                        partial(_load_renderer, folder, worker_config),
                        named_variables(config),
                        config.engine.seeded,
                        None if config.team is None else partial(team_of_host, worker_config, _league_dir(context)),
                    ),
                ),
            )
            backend = cls(context, app, folder)
            console.note(f"weights go to engines {await app.weights.publish(0)}")
        except BaseException:
            await app.close()
            raise
        return backend

    @property
    def version(self) -> int:
        return self._app.weights.version

    def collector(
        self,
        prefix: str,
        group_size: int | None,
        temperature: float,
        on_trajectory: OnTrajectory | None = None,
        oracle_share: float | None = None,
        *,
        keep_tokens: bool = False,
    ) -> CollectFrom:
        sizes = self._config.group_sizes(group_size)
        tree = self._config.rl.tree if group_size is None else None

        async def collect(tasks: list[Task], limits: Limits, seed: int, first: int = 0, /) -> list[Group]:
            rl, attempts = self._config.rl, self._config.agent.style == "reflect"
            keep = (keep_tokens and self.team is None, rl.algorithm == "ppo", rl.credit == "anchor" or attempts)
            team = (group_size is not None, () if self.team is None else self.team.snapshots)
            more = (temperature, self.version, oracle_share, tree, *keep, *team)
            jobs = [Job(t, limits, seed, i, prefix, sizes[t.env], *more) for i, t in enumerate(tasks, first)]
            return [group for groups in await asyncio.gather(*(play(job) for job in jobs)) for group in groups]

        async def play(job: Job) -> list[Group]:
            parts, references = await self._app.play(job, job.group_size, 3 if job.stored else 1)
            groups = [parts[0]] if job.stored else parts[0]
            if job.stored:
                stored.attach(parts[0], parts[1], parts[2], references[1])
            if on_trajectory is not None:
                for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
                    on_trajectory(trajectory)
            return groups

        return collect

    def trainer(self, data: list[Any], settings: SFTSettings | PairSettings, seed: int | str) -> Trainer:
        self.learner = TrainerHandle(self._app, data, settings, seed)
        return self.learner

    def release_trainer(self) -> None:
        self.learner = None
        self._app.on_all("release_trainer")

    def make_preferences(self, pairs: list[tuple[Sample, Sample]], max_tokens: int) -> list[Preference]:
        claim_device(self._app)
        return self._app.on_all("make_preferences", pairs, max_tokens)[0]

    def scores(self, samples: list[Sample]) -> list[float]:
        claim_device(self._app)
        return self._app.on_all("scores", samples)[0]

    def load_model(self, folder: Path) -> None:
        self.learner = None
        self._app.on_all("load", str(folder.absolute()))

    def _export(self, folder: Path) -> None:
        self._app.on_all("export", str(folder.absolute()))

    async def publish(self, version: int) -> None:
        if version != self.version:
            await self._app.weights.publish(version)

    def save(self, root: Path, step: int, state: dict[str, Any], keep: int) -> None:
        self.finish_saving()
        folder = stage(root, step)
        with removed_on_error(folder):
            self._app.on_all("save", str(folder.absolute()))
            save_state(folder, step, state | {"learner": None})
        self._saving = partial(self._commit, folder, self.learner is not None, root, step, keep)
        if not self._config.checkpoint.background:
            self.finish_saving()

    def finish_saving(self, *, wait: bool = True) -> None:
        if self._saving is not None and (wait or all(self._app.on_all("is_saved"))):
            commit_checkpoint, self._saving = self._saving, None
            commit_checkpoint()

    def _commit(self, folder: Path, shards: bool, root: Path, step: int, keep: int) -> None:
        with removed_on_error(folder):
            self._app.on_all("finish_saving")
            require_written(folder, shards=shards)
            commit(root, step, keep)

    async def restore(self, folder: Path, saved: dict[str, Any]) -> None:
        restored = await self._app.wait_for_all("restore", str(_absolute(folder)), saved["learner"])
        self.learner.restored(*restored[0])

    async def events(self) -> list[dict[str, Any]]:
        return await self._app.events()

    async def close(self) -> None:
        await self._app.close()


async def _make_starting_model(app: Any, context: RunContext, folder: Path, start: Start) -> None:
    """Make the model that training starts from on the ranks, and write it into `folder`."""
    config, console = context.config, context.console
    (num_parameters, *_) = await app.wait_for_all("make_untrained_model", str(folder))
    if config.model.scratch is not None:
        console.note(describe_scratch(num_parameters, start))
    if config.warm_start is not None:
        await imitate(TrainerHandle(app, start.samples, config.warm_start.sft, config.seed), console)
    await app.wait_for_all("export", str(folder))


def plan_of(config: Config) -> Plan:
    scale = config.scale
    assert scale is not None
    device: Literal["cpu", "cuda", "auto"] = "auto"
    if scale.address is None or config.model.device != "auto":  # else the driver may have no GPU where nodes do
        device = "cuda" if choose_device(config.model)[0].startswith("cuda") else "cpu"
    plan = Plan(
        learners=scale.learners,
        engines=scale.engines,
        env_hosts=scale.env_hosts,
        layout=scale.layout,
        device=device,
        learner_cpus=scale.learner_cpus,
        engine_cpus=scale.engine_cpus,
        env_host_cpus=scale.env_host_cpus,
        episodes_per_host=max(1, config.agent.sessions // scale.env_hosts),
        address=scale.address,
        object_store_mb=scale.object_store_mb,
        bucket_mb=scale.bucket_mb,
        worker_timeout_s=scale.worker_timeout_s,
        devices_per_engine=config.engine.tensor_parallel,
        senders=1 if config.model.lora is not None else scale.shard_ranks or scale.learners,
        sessions_per_engine=config.sessions_per_engine(),
        nodes=scale.nodes or 0,
    )
    shares_device_memory(plan)  # raises for an unknown value
    return plan


def _league_dir(context: RunContext) -> Path:
    return context.log.root.absolute() / "league"


def release_memory() -> None:
    """Release unused device memory to other processes."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _absolute(folder: Path) -> Path:
    """Return an absolute path. A hub name stays as it is."""
    place = folder.expanduser()
    return place.absolute() if place.is_dir() else folder


def _without_store(reference: Any) -> Any:
    raise RuntimeError(f"{reference!r} is in an object store, and this rank is no actor of a cluster")
