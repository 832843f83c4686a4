"""Who does the work of a run: everything in this process, or (cluster.py) actors on many machines.

A run knows neither: it plays through `collect`, learns through `learner`, and asks for new weights to be published.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

from agentgym_rl.agent.engines.native import NativeEngine
from agentgym_rl.agent.engines.replicas import Replicas
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.config import Config
from agentgym_rl.errors import ConfigError
from agentgym_rl.run import backend_vllm, build
from agentgym_rl.training import lora
from agentgym_rl.training.checkpoint import SHARDS, save_checkpoint
from agentgym_rl.training.critic import ValueModel
from agentgym_rl.training.dpo import DPO, Preference, prefer
from agentgym_rl.training.learner import freeze
from agentgym_rl.training.model import Lent
from agentgym_rl.training.ranks import ALONE, Ranks
from agentgym_rl.training.rl import Learner
from agentgym_rl.training.rl_learner import RLLearner
from agentgym_rl.training.settings import DPOSettings, SFTSettings
from agentgym_rl.training.sft import SFT
from agentgym_rl.types import Collect, EnvPool, Sample, Trajectory

Heard = Callable[[Trajectory], None]
"""Told of every episode as it ends."""


class Trainer(Protocol):
    """Updates on data that is there."""

    total: int
    """Updates in all."""

    @property
    def updates(self) -> int:
        """Updates made."""
        ...

    def step(self) -> dict[str, float]:
        """The next update."""
        ...


class Workers(Protocol):
    """What a run is done by. Either by `learner`, for RL, or by a `trainer` at a time."""

    room: int
    """Tokens of an episode that an engine can hold."""
    num_parameters: int
    renderer: Renderer

    @property
    def learner(self) -> Learner: ...

    @property
    def version(self) -> int:
        """Of the weights that were published last."""
        ...

    def collector(self, prefix: str, group_size: int | None, temperature: float, heard: Heard | None = None) -> Collect:
        """Plays groups of `group_size`, or of the size each environment wants."""
        ...

    def trainer(self, data: list[Any], settings: SFTSettings | DPOSettings, seed: int | str) -> Trainer:
        """Goes on with the model as it is: SFT on samples, or DPO on preferences."""
        ...

    def forget_trainer(self) -> None:
        """The data and the optimizer."""
        ...

    def prefer(self, pairs: list[tuple[Sample, Sample]], max_tokens: int) -> list[Preference]:
        """Pairs with what the model as it is makes of them."""
        ...

    def go_back(self, folder: Path) -> None:
        """The model is that of `folder` again, and the trainer forgotten."""
        ...

    async def publish(self, version: int) -> None:
        """From now on episodes are played with the learner's weights."""
        ...

    def save(self, root: Path, step: int, state: dict[str, Any], keep: int) -> None:
        """A checkpoint of `state`, the model and the learner."""
        ...

    async def restore(self, folder: Path, saved: dict[str, Any]) -> None:
        """The learner, or the trainer that was just made, as a checkpoint has it; the model was loaded from there
        already."""
        ...

    async def events(self) -> list[dict[str, Any]]:
        """What happened to workers since the last call: {"kind", "message", ...}."""
        ...

    async def close(self) -> None: ...


class OneProcess:
    """Learner, engine and environments in this process; a native engine shares the learner's parameters, a `vllm` that
    was started for the same model is lent them, or given them through files in `handover`. Without a `reference_dir`
    nothing is learned by RL."""

    def __init__(
        self,
        config: Config,
        pool: EnvPool,
        model: Any,
        tokenizer: Any,
        reference_dir: Path | None,
        vllm: backend_vllm.Vllm | None = None,
        handover: Path | None = None,
    ) -> None:
        self._config, self._pool, self._model, self._tokenizer = config, pool, model, tokenizer
        self.learner: Any = None if reference_dir is None else make_learner(config, model, reference_dir)
        self.renderer = Renderer(tokenizer, config.model.chat_template)
        self._vllm, self._handover = vllm, handover
        if vllm is None:
            # Under overlap the learner changes its weights while episodes are played: the engine has a copy of its own.
            played = freeze(copy.deepcopy(model)) if config.rl.overlap else model
            self._engine: backend_vllm.RunEngine = make_engine(config, played, self.renderer)
        else:
            self._engine = vllm
        self.room = self._engine.max_context
        self.num_parameters: int = model.num_parameters()

    @property
    def version(self) -> int:
        return self._engine.version

    def collector(self, prefix: str, group_size: int | None, temperature: float, heard: Heard | None = None) -> Collect:
        policies = build.engine_policies(self._engine, self.renderer, self._config, temperature)
        return build.collect_each(self._config, self._pool, policies, group_size, prefix, on_trajectory=heard)

    def trainer(self, data: list[Any], settings: SFTSettings | DPOSettings, seed: int | str) -> Trainer:
        self.learner = make_trainer(self._model, data, settings, seed)
        return self.learner

    def forget_trainer(self) -> None:
        self.learner = None

    def prefer(self, pairs: list[tuple[Sample, Sample]], max_tokens: int) -> list[Preference]:
        return prefer(self._model, pairs, max_tokens)

    def go_back(self, folder: Path) -> None:
        self.forget_trainer()
        before, _ = build.load_from(folder, self._config.model)
        self._model.load_state_dict(before.state_dict())

    async def publish(self, version: int) -> None:
        if self._vllm is None:
            await self._engine.update_weights(self._model.state_dict() if self._config.rl.overlap else None, version)
        else:
            assert self._handover is not None
            await backend_vllm.publish(self._vllm, self._config, self._model, self._tokenizer, version, self._handover)

    def save(self, root: Path, step: int, state: dict[str, Any], keep: int) -> None:
        whole = self.learner is not None and self._config.checkpoint.optimizer
        learner = self.learner.state() if whole else None
        save_checkpoint(root, step, self._model, self._tokenizer, state | {"learner": learner}, keep)

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
        self.learner.restore(state)

    async def events(self) -> list[dict[str, Any]]:
        return self._vllm.drain_events() if isinstance(self._vllm, Replicas) else []

    async def close(self) -> None:
        await self._engine.close()


def make_engine(config: Config, model: Any, renderer: Renderer) -> NativeEngine:
    return NativeEngine(
        model,
        decode=renderer.decode,
        max_sessions=config.sessions_per_engine(),
        max_context=build.longest_context(config),
    )


def make_learner(config: Config, model: Any, reference_dir: Path, ranks: Ranks = ALONE) -> RLLearner:
    """The learner of one process, or of one rank of several."""
    reference = _reference(model, reference_dir, config, ranks)
    return RLLearner(model, config.rl, config.agent.temperature, reference, _critic(model, config), ranks)


def make_trainer(
    model: Any, data: list[Any], settings: SFTSettings | DPOSettings, seed: int | str, ranks: Ranks = ALONE
) -> SFT | DPO:
    """Of one process, or of one rank of several."""
    if isinstance(settings, SFTSettings):
        return SFT(model, data, settings, seed, ranks)
    return DPO(model, data, settings, seed, ranks)


def _reference(model: Any, folder: Path, config: Config, ranks: Ranks) -> Lent | None:
    """The model RL started from, frozen; None where no KL term needs it. With LoRA it costs no second copy."""
    if not config.rl.kl_coef:
        return None
    if config.model.lora is None:
        frozen = freeze(build.load_from(folder, config.model)[0])
        ranks.place(frozen)
        return lambda: nullcontext(frozen)
    if config.warm_start is None:
        return lambda: lora.adapter(model, None)
    lora.load_adapter(model, folder, lora.REFERENCE)
    return lambda: lora.adapter(model, lora.REFERENCE)


def _critic(model: Any, config: Config) -> ValueModel | None:
    """PPO's critic: a copy of the decoder, or with LoRA one more adapter on the same."""
    if config.rl.algorithm != "ppo":
        return None
    if config.model.lora is None:
        return ValueModel(copy.deepcopy(model.get_decoder()), model.config.hidden_size)
    lora.copy_adapter(model, config.model.lora, lora.CRITIC)
    return ValueModel(model.get_decoder(), model.config.hidden_size, lambda: lora.adapter(model, lora.CRITIC))
