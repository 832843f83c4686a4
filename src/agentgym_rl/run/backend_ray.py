"""The backend of a run on a Ray cluster: the contents of each process, and the handles that a run calls.

The functions here run inside the actors of scale/ray_app.py, which knows nothing of recipes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoTokenizer

from agentgym_rl.agent.engines.base import EngineAdapter
from agentgym_rl.agent.engines.native.adapter import NativeAdapter
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.templates import resolve_template
from agentgym_rl.config import AgentConfig, Config, EnvironmentConfig, ModelConfig, TeamConfig
from agentgym_rl.errors import ConfigError
from agentgym_rl.run import backend_vllm
from agentgym_rl.run.backend import (
    OnTrajectory,
    Trainer,
)
from agentgym_rl.run.collectors import engine_policies, make_collector, make_stages
from agentgym_rl.run.context import RunContext
from agentgym_rl.run.environments_pool import EnvironmentsPool
from agentgym_rl.run.load_model import choose_device, load_from
from agentgym_rl.run.local_engine import make_native_engine
from agentgym_rl.run.rank import Rank, RankResult, SampleResult
from agentgym_rl.run.start import Start, describe_scratch, imitate
from agentgym_rl.run.system import ENGINE_NAMES, join_metrics, metrics_of_process
from agentgym_rl.run.teams import Team, absolute_players, team_of_host
from agentgym_rl.scale.folders import require_same, require_shared
from agentgym_rl.scale.publisher import shares_device_memory
from agentgym_rl.scale.resource_plan import Plan
from agentgym_rl.scale.shards import require_written
from agentgym_rl.training import stored
from agentgym_rl.training.batch import Batch, split_batch
from agentgym_rl.training.checkpoint import commit, removed_on_error, save_state, stage
from agentgym_rl.training.dpo import Preference
from agentgym_rl.training.learner import freeze
from agentgym_rl.training.metrics import DEPENDENCE_GROUPS
from agentgym_rl.training.offline_settings import PairSettings
from agentgym_rl.training.ranks import EmptyFirst, balanced_shares
from agentgym_rl.training.rl_learner import means
from agentgym_rl.training.settings import RLSettings, SFTSettings, TreeSettings
from agentgym_rl.types import CollectFrom, Group, Limits, Sample, Task

ENGINE_METRICS_TIMEOUT_S = 1.0
"""Seconds that an engine has to report the load of its machine. One that is being restarted does not."""


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
    """Whether the group is returned as the arrays of training/stored.py."""
    keep_tail: bool = False
    """Whether samples keep the tokens after the last reply, for a critic."""
    keep_infos: bool = False
    """Whether the driver needs the infos of all turns: states to compare, or attempts."""
    measured: bool = False
    """Whether the group is that of an evaluation, in a game of several roles."""
    snapshots: tuple[int, ...] = ()
    """Steps of the snapshots that roles are played with."""


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

    async def play(self, job: Job) -> list[Group] | stored.Arrays:
        """Return the group, that of each role in a game of several, or the group's arrays (training/stored.py)."""
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
        # With adapters it reads the frozen weights here, and is sent the adapter alone.
        base = folder if config.model.lora is None else Path(str(config.model.path))
        return backend_vllm.VllmAdapter(backend_vllm.make_vllm(config, base))
    assert config.scale is not None
    torch.set_num_threads(config.threads or int(config.scale.engine_cpus) or 1)
    model, tokenizer = load_from(folder, config.model, EmptyFirst())
    model = freeze(model)
    renderer = Renderer(tokenizer, config.model.chat_template, thoughts=config.agent.thoughts)
    sizes = config.sessions_per_engine(), config.longest_context()
    return NativeAdapter(make_native_engine(model, renderer, *sizes, config.rl.keep_cache), model)


def _load_renderer(folder: Path, model: ModelConfig, agent: AgentConfig) -> Renderer:
    return Renderer(AutoTokenizer.from_pretrained(folder), model.chat_template, thoughts=agent.thoughts)


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


def named_variables(environments: Iterable[EnvironmentConfig], team: TeamConfig | None) -> dict[str, str]:
    """Return the environment variables that the recipe names, for the processes that read them.

    They are not given to Ray as variables of the job, which it would write into its logs.
    """
    names = [env.token_variable for env in environments]
    names += [team.api_key_variable] if team is not None else []
    return {name: os.environ[name] for name in names if name is not None and name in os.environ}


class TrainerHandle:
    """A `Trainer` on ranks: every rank has all data and takes its share of a batch."""

    def __init__(self, app: Any, data: list[Any], settings: SFTSettings | PairSettings, seed: int | str) -> None:
        self._app = app
        claim_device(app)
        self.total: int = app.on_all("make_trainer", data, settings, seed)[0]
        self.updates = 0

    def step(self) -> dict[str, float]:
        claim_device(self._app)
        results = self._app.on_all("step")
        self.updates += 1
        return results[0] | join_metrics(results)

    def restored(self, updates: int, kl_coef: float) -> None:
        self.updates = updates


class LearnerHandle:
    """The learner of `train_rl` on ranks: gives each rank its share and joins their results."""

    def __init__(self, app: Any, settings: RLSettings) -> None:
        self._app, self._rl, self._size = app, settings, app.plan.learners
        self.kl_coef = settings.kl_coef

    def score(self, samples: list[Sample], *, policy_only: bool = False) -> None:
        claim_device(self._app)
        shares = balanced_shares([s.num_tokens for s in samples], self._size)
        rank_results = self._app.on_ranks("score", [([samples[i] for i in share], policy_only) for share in shares])
        for share, results in zip(shares, rank_results, strict=True):
            fill([samples[i] for i in share], results)

    def learn(self, batch: Batch, seed: int) -> dict[str, float]:
        claim_device(self._app)
        shares, indices = split_batch(batch, self._size, self._rl.minibatches, seed)
        results: list[RankResult] = self._app.on_ranks("learn", [(share, seed) for share in shares])
        for known, result in zip(indices, results, strict=True):
            fill([batch.samples[i] for i in known], result.samples)
        self.kl_coef = results[0].kl_coef
        system = system_metrics(self._app, [result.metrics for result in results])
        return results[0].metrics | system | means([result.turn_sums for result in results])

    def restored(self, updates: int, kl_coef: float) -> None:
        self.kl_coef = kl_coef


def claim_device(app: Any) -> None:
    """Free the device for ranks if they share it with engines. Call only while no episode is played."""
    if app.plan.layout == "colocated":
        app.ask_engines("sleep")


def system_metrics(app: Any, ranks: list[dict[str, float]]) -> dict[str, float]:
    """Return the `system/` metrics of ranks, and of engines that have machines or GPUs of their own."""
    if app.plan.layout == "colocated":
        return join_metrics(ranks)
    engines = app.ask_engines("__ray_call__", metrics_of_process, timeout_s=ENGINE_METRICS_TIMEOUT_S)
    return join_metrics([*ranks, *({ENGINE_NAMES.get(name, name): v for name, v in e.items()} for e in engines)])


def fill(samples: list[Sample], results: list[SampleResult]) -> None:
    """Give samples what the ranks found out about them."""
    for sample, result in zip(samples, results, strict=True):
        if isinstance(result, bytes):
            sample.stored.learned_line = result
            continue
        for name, value in result.items():
            setattr(sample, name, value)


class RayBackend:
    """The backend of a run as actors on a Ray cluster."""

    def __init__(self, context: RunContext, app: Any, folder: Path) -> None:
        config = context.config
        self._config, self._app = config, app
        self._saving: Callable[[], None] | None = None
        """Ends the checkpoint that ranks are writing."""
        self.learner: Any = LearnerHandle(app, config.rl) if config.online else None
        self.renderer = _load_renderer(folder, config.model, config.agent)
        self.max_context: int = app.max_context
        self.num_parameters: int = app.on_all("num_parameters")[0]
        self.team: Team | None = None
        if config.team is not None:
            players = config.team, config.agent, config.model, config.longest_context()
            self.team = Team(*players, _league_dir(context), self._export)

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
                        partial(_load_renderer, folder, worker_config.model, worker_config.agent),
                        named_variables(config.environments, config.team),
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
            result, reference = await self._app.play(job, job.group_size)
            groups = [stored.unpack(result, reference)] if job.stored else result
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

    def learning(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()  # engines have weights of their own

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


def _absolute(folder: Path) -> Path:
    """Return an absolute path. A hub name stays as it is."""
    place = folder.expanduser()
    return place.absolute() if place.is_dir() else folder
