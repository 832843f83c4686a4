"""The processes and weights that do the work of a run: all in this process, or (backend_ray.py) actors on a cluster.

A run calls its backend through one protocol: it plays through `collector`, learns through `learner` or `trainer`, and
asks for new weights to be published.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from agentgym_rl.agent.engines.replicas import Replicas
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.templates import resolve_template
from agentgym_rl.config import AgentConfig, Config, ModelConfig
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.collectors import collect_each, engine_policies, make_external
from agentgym_rl.run.load_model import choose_device, load_from, load_teacher
from agentgym_rl.run.local_engine import MakeEngine, native_engine
from agentgym_rl.run.teams import Team
from agentgym_rl.training import lora
from agentgym_rl.training.checkpoint import SHARDS, export, on_host, random_state, save_checkpoint
from agentgym_rl.training.critic import ValueModel
from agentgym_rl.training.dpo import DPO, Preference, make_preferences
from agentgym_rl.training.learner import freeze
from agentgym_rl.training.locate_model import find_model, local_folder
from agentgym_rl.training.meta import fill, make_empty
from agentgym_rl.training.model import ModelContext
from agentgym_rl.training.offline_settings import DPOSettings, PairSettings
from agentgym_rl.training.ranks import SINGLE_PROCESS, Ranks
from agentgym_rl.training.reward_model import RewardTrainer, save_head
from agentgym_rl.training.rl import Learner
from agentgym_rl.training.rl_learner import RLLearner
from agentgym_rl.training.role_learners import RoleLearners
from agentgym_rl.training.settings import RLSettings, SFTSettings
from agentgym_rl.training.sft import SFT
from agentgym_rl.types import CollectFrom, EnvPool, Sample, Trajectory

OnTrajectory = Callable[[Trajectory], None]
"""Called with every episode as it ends."""


class Trainer(Protocol):
    """Updates on data that is complete before the first of them."""

    total: int
    """Number of updates."""

    @property
    def updates(self) -> int:
        """Number of updates made so far."""

    def step(self) -> dict[str, float]:
        """Make the next update and return its metrics."""


class Backend(Protocol):
    """Plays and learns for a run: with `learner` for RL, with one `trainer` at a time for offline methods."""

    max_context: int
    """Tokens of an episode that an engine can hold."""
    num_parameters: int
    renderer: Renderer
    team: Team | None
    """Players of the other roles, in a game of several; else None."""

    @property
    def learner(self) -> Learner | RoleLearners: ...

    @property
    def version(self) -> int:
        """Version of the weights that were published last."""

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
        """Return a function that plays groups of `group_size`; without one, groups as the recipe trains on them.

        With `oracle_share` the oracle advises every turn and plays that share of them. With `keep_tokens` the processes
        that play may keep the tokens of an episode for the learners (training/stored.py).
        """

    def trainer(self, data: list[Any], settings: SFTSettings | PairSettings, seed: int | str) -> Trainer:
        """Return a trainer of the present model: SFT on samples, DPO or a reward model on preferences."""

    def release_trainer(self) -> None:
        """Free the trainer's data and optimizer."""

    def make_preferences(self, pairs: list[tuple[Sample, Sample]], max_tokens: int) -> list[Preference]:
        """Return pairs with their log-probabilities under the present model."""

    def scores(self, samples: list[Sample]) -> list[float]:
        """Return the scores that the reward model in training gives."""

    def load_model(self, folder: Path) -> None:
        """Load the model of `folder` and forget the trainer."""

    def learning(self) -> AbstractAsyncContextManager[None]:
        """Return a context for an update and its publication. Episodes of later steps may be under way in it."""

    async def publish(self, version: int) -> None:
        """Give engines the learner's weights, which episodes are played with from now on."""

    def save(self, root: Path, step: int, state: dict[str, Any], keep: int) -> None:
        """Write a checkpoint of `state`, the model and the learner."""

    def finish_saving(self, *, wait: bool = True) -> None:
        """Complete a checkpoint that is being written in the background. Without `wait`, only if it can be at once."""

    async def restore(self, folder: Path, saved: dict[str, Any]) -> None:
        """Restore the learner, or the trainer that was just made, from a checkpoint. The model is loaded already."""

    async def events(self) -> list[dict[str, Any]]:
        """Return what happened to workers since the last call: {"kind", "message", ...}."""

    async def close(self) -> None:
        """Free everything."""


class LocalBackend:
    """Learner, engine and environments in this process.

    A native engine shares the learner's parameters. A `vllm` that was started for the same model gets them in memory,
    or through files in `weights_dir`. Without a `reference_dir` there is no RL learner. Snapshots of the learner, which
    other roles are played with, are in `league_dir`.
    """

    def __init__(
        self,
        config: Config,
        pool: EnvPool,
        model: Any,
        tokenizer: Any,
        reference_dir: Path | None,
        make_engine: MakeEngine | None = None,
        league_dir: Path | None = None,
    ) -> None:
        self._config, self._pool, self._model, self._tokenizer = config, pool, model, tokenizer
        self._writer = ThreadPoolExecutor(1)
        self._saving: Future[Any] | None = None
        """The checkpoint that is being written in the background."""
        self.learner: Any = None
        # Before the learner adds adapters of its own to the model.
        self._role_models = {role: lora.copy_with_own_adapters(model) for role in config.adapter_roles}
        if reference_dir is not None:
            self.learner = self._make_learner(reference_dir)
        self.renderer = Renderer(tokenizer, config.model.chat_template, thoughts=config.agent.thoughts)
        sizes = config.sessions_per_engine(), config.longest_context()
        make_native = partial(native_engine, config.rl, *sizes)
        local = (make_engine or make_native(model))(self.renderer)
        self._engine, self._publish, self.learning = local.engine, local.publish, local.learning
        self._role_engines = {r: make_native(m)(self.renderer) for r, m in self._role_models.items()}
        self._external = make_external(config.agent)
        self.max_context = self._engine.max_context
        self.team: Team | None = None
        if config.team is not None:
            assert league_dir is not None
            players = config.team, config.agent, config.model, config.longest_context()
            self.team = Team(*players, league_dir, partial(export, model, tokenizer))
        self.num_parameters: int = model.num_parameters()

    def _make_learner(self, reference_dir: Path) -> RLLearner | RoleLearners:
        """Return the learner of the model, or those of roles with adapters of their own."""
        config = self._config
        make = partial(
            make_learner,
            tokenizer=self._tokenizer,
            rl=config.rl,
            settings=config.model,
            temperature=config.agent.temperature,
            reference_dir=reference_dir,
            warm=config.warm_start is not None,
        )
        if not self._role_models:
            return make(self._model)
        shared = make(self._model) if config.team is not None and config.team.learner_roles else None
        return RoleLearners({role: make(model) for role, model in self._role_models.items()}, shared)

    @property
    def version(self) -> int:
        return self._engine.version

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
        config = self._config
        make_policies = partial(
            engine_policies,
            renderer=self.renderer,
            agent=config.agent,
            temperature=temperature,
            seeded=config.engine.seeded,
            oracle_share=oracle_share,
            external=self._external,
        )
        policies = make_policies(self._engine)
        team: dict[str, Any] = {}
        if self.team is not None:
            measured = group_size is not None
            own = {role: make_policies(local.engine) for role, local in self._role_engines.items()}
            team = self.team.collector_options(policies, temperature, own, measured=measured)
        return collect_each(
            config.agent,
            config.environments,
            self._pool,
            policies,
            config.group_sizes(group_size),
            prefix,
            on_trajectory=on_trajectory,
            tree=config.rl.tree if group_size is None else None,
            **team,
        )

    def trainer(self, data: list[Any], settings: SFTSettings | PairSettings, seed: int | str) -> Trainer:
        self.learner = make_trainer(self._model, data, settings, seed)
        return self.learner

    def release_trainer(self) -> None:
        self.learner = None

    def make_preferences(self, pairs: list[tuple[Sample, Sample]], max_tokens: int) -> list[Preference]:
        return make_preferences(self._model, pairs, max_tokens)

    def scores(self, samples: list[Sample]) -> list[float]:
        return self.learner.scores(samples)

    def load_model(self, folder: Path) -> None:
        self.release_trainer()
        before, _ = load_from(folder, self._config.model)
        self._model.load_state_dict(before.state_dict())

    async def publish(self, version: int) -> None:
        for publish in (self._publish, *(local.publish for local in self._role_engines.values())):
            await publish(version)

    def save(self, root: Path, step: int, state: dict[str, Any], keep: int) -> None:
        with_optimizer = self.learner is not None and self._config.checkpoint.optimizer
        learner = self.learner.state() if with_optimizer else None
        add_files: Callable[[Path], None] | None = None
        if isinstance(self.learner, RewardTrainer):
            add_files = partial(save_head, self.learner.head(), about_renderer(self._config.model, self._config.agent))
        elif self._role_models:
            add_files = self._role_writer()
        write = partial(save_checkpoint, root, step, self._model, self._tokenizer, add_files=add_files)
        if not self._config.checkpoint.background:
            write(state | {"learner": learner}, keep)
            return
        self.finish_saving()
        copied = on_host(state | {"learner": learner, "random": random_state()})
        weights = self._model.state_dict() if self._config.model.lora is None else lora.matrices(self._model)
        self._saving = self._writer.submit(write, copied, keep, on_host(weights))

    def _role_writer(self) -> Callable[[Path], None]:
        """Return a function that writes the present adapters of each role to a folder of its own."""
        weights = {role: on_host(lora.matrices(model)) for role, model in self._role_models.items()}

        def write(folder: Path) -> None:
            for role, model in self._role_models.items():
                export(model, self._tokenizer, folder / role, weights[role])

        return write

    def finish_saving(self, *, wait: bool = True) -> None:
        if self._saving is not None and (wait or self._saving.done()):
            saving, self._saving = self._saving, None
            saving.result()

    async def restore(self, folder: Path, saved: dict[str, Any]) -> None:
        state = saved["learner"]
        if (folder / SHARDS).is_dir():  # written by several ranks
            from agentgym_rl.scale.shards import load_shards

            state = load_shards(folder / SHARDS, lambda name, shape: None)
        if state is None:
            raise ConfigError(
                f"{folder} was saved with checkpoint.optimizer = false and cannot be resumed from: start a new run "
                "with model.path set to its folder `model`"
            )
        for role, model in self._role_models.items():
            lora.restore_adapter(model, folder / "model" / role)
        self.learner.restore(state)

    async def events(self) -> list[dict[str, Any]]:
        return self._engine.drain_events() if isinstance(self._engine, Replicas) else []

    async def close(self) -> None:
        self._writer.shutdown()
        for part in self._external or ():
            await part.close()
        if self.team is not None:
            await self.team.close()
        for local in self._role_engines.values():
            await local.engine.close()
        await self._engine.close()


def make_learner(
    model: Any,
    tokenizer: Any,
    rl: RLSettings,
    settings: ModelConfig,
    temperature: float,
    reference_dir: Path,
    ranks: Ranks = SINGLE_PROCESS,
    *,
    warm: bool,
    critic_dir: Path | None = None,
) -> RLLearner:
    """Return the RL learner of one process, or of one rank of several. `warm`: a warm start changed the reference.

    A rank reads its critic from `critic_dir`, because it cannot copy a sharded policy.
    """
    reference = _reference(model, reference_dir, settings, ranks, warm=warm) if rl.kl_coef else None
    teacher = _teacher(tokenizer, rl, settings, ranks)
    critic = _critic(model, settings, ranks, critic_dir) if rl.algorithm == "ppo" else None
    return RLLearner(model, rl, temperature, reference, critic, ranks, teacher)


def _teacher(tokenizer: Any, rl: RLSettings, settings: ModelConfig, ranks: Ranks) -> ModelContext | None:
    """Return the frozen teacher of distillation, unless an API scores for it (see teaching.py)."""
    if rl.distill is None or rl.distill.url is not None:
        return None
    teacher = load_teacher(rl.distill.teacher, tokenizer, settings, ranks)
    ranks.prepare_model(teacher)
    return lambda: nullcontext(teacher)


def make_trainer(
    model: Any,
    data: list[Any],
    settings: SFTSettings | PairSettings,
    seed: int | str,
    ranks: Ranks = SINGLE_PROCESS,
    scored: ValueModel | None = None,
) -> SFT | DPO | RewardTrainer:
    """Return the trainer of one process, or of one rank of several. `scored`: see RewardTrainer."""
    if isinstance(settings, SFTSettings):
        return SFT(model, data, settings, seed, ranks)
    if isinstance(settings, DPOSettings):
        return DPO(model, data, settings, seed, ranks)
    return RewardTrainer(model, data, settings, seed, ranks, scored)


def about_renderer(model: ModelConfig, agent: AgentConfig) -> dict[str, str]:
    """Return how the run renders episodes, for the folder of a reward model."""
    return {"chat_template": resolve_template(model.chat_template) or "", "thoughts": agent.thoughts}


def _reference(model: Any, folder: Path, settings: ModelConfig, ranks: Ranks, *, warm: bool) -> ModelContext:
    """Return the frozen model that RL started from. With LoRA it needs no second copy."""
    if settings.lora is None:
        frozen = freeze(load_from(folder, settings, ranks)[0])
        return lambda: nullcontext(frozen)
    if not warm:
        return lambda: lora.adapter(model, None)
    lora.load_adapter(model, folder, lora.REFERENCE)
    return lambda: lora.adapter(model, lora.REFERENCE)


def _critic(model: Any, settings: ModelConfig, ranks: Ranks, folder: Path | None) -> ValueModel:
    """Return PPO's critic: a copy of the decoder, or with LoRA one more adapter on the same decoder."""
    if settings.lora is None and ranks.from_meta:
        return load_value_model(str(folder), settings, ranks)[0]
    if settings.lora is None:
        return ValueModel(copy.deepcopy(model.get_decoder()), model.config.hidden_size)
    lora.copy_adapter(model, settings.lora, lora.CRITIC)
    return ValueModel(model.get_decoder(), model.config.hidden_size, lambda: lora.adapter(model, lora.CRITIC))


def load_value_model(folder: str, settings: ModelConfig, ranks: Ranks) -> tuple[ValueModel, Any]:
    """Return a rank's value model with the decoder of a folder, and the language model around that decoder.

    The value model is sharded as a whole; the language model's own head is left on the meta device.
    """
    device, dtype = choose_device(settings)
    path = local_folder(find_model(folder))
    model = make_empty(path, dtype)
    scored = ValueModel(model.get_decoder(), model.config.hidden_size)
    ranks.prepare_model(scored)
    fill(scored, path, device, host=ranks.offload, name_in_files=partial(_decoder_name, model.base_model_prefix))
    return scored, model


def load_output_head(model: Any, folder: str, settings: ModelConfig, ranks: Ranks) -> None:
    """Give a language model of `load_value_model` its head: the tied embeddings, or what the folder holds."""
    head = model.get_output_embeddings()
    if model.config.tie_word_embeddings:
        head.weight = model.get_input_embeddings().weight
        return
    (prefix,) = (name for name, module in model.named_modules() if module is head)
    path = local_folder(find_model(folder))
    fill(head, path, choose_device(settings)[0], host=ranks.offload, name_in_files=lambda name: f"{prefix}.{name}")


def _decoder_name(prefix: str, name: str) -> str | None:
    """Return the name in a model's files of a critic's tensor: that of its decoder's, or None for its head's."""
    return f"{prefix}.{name.removeprefix('decoder.')}" if name.startswith("decoder.") else None
