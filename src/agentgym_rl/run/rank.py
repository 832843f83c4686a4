"""One learner rank of a cluster: its share of the model, its learner or trainer, and its part of every checkpoint.

`Rank` runs inside an actor of scale/ray_app.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from agentgym_rl.agent.engines.vllm import Probe, probe_model
from agentgym_rl.config import Config
from agentgym_rl.run.backend import (
    about_renderer,
    load_output_head,
    load_value_model,
    make_learner,
    make_trainer,
)
from agentgym_rl.run.load_model import choose_device, load_from
from agentgym_rl.run.log import learned_line
from agentgym_rl.run.start import make_untrained_model
from agentgym_rl.run.system import SystemMonitor, devices_of
from agentgym_rl.scale.process_group import ProcessRanks
from agentgym_rl.scale.shards import ShardWriter, like_learner, load_shards, shard_state
from agentgym_rl.training import lora, stored
from agentgym_rl.training.batch import Batch
from agentgym_rl.training.checkpoint import SHARDS
from agentgym_rl.training.dpo import Preference, make_preferences
from agentgym_rl.training.offline_settings import PairSettings, RewardModelSettings
from agentgym_rl.training.reward_model import RewardTrainer, save_head
from agentgym_rl.training.rl_learner import turn_sums
from agentgym_rl.training.settings import SFTSettings
from agentgym_rl.transport.broadcast import untied_state, whole_state
from agentgym_rl.types import Sample

SCORED_FIELDS = ("old_logprobs", "entropies", "reference_logprobs", "teacher_logprobs", "values", "last_value")
"""Fields of a sample that a learner fills in."""
SampleResult = dict[str, Any] | bytes
"""Fields of a sample, or the line of the log if the driver needs no more."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """Result of a rank's `learn`."""

    metrics: dict[str, float]
    kl_coef: float
    turn_sums: dict[str, tuple[float, int]]
    """Sums of the metrics by turn, over this rank's samples."""
    samples: list[SampleResult]


def result_of_score(sample: Sample, policy_only: bool) -> SampleResult:
    """Return the scores of a sample. Metrics of the policy also compare them with what was stored."""
    names = (*SCORED_FIELDS, "logprobs", "turn_index") if policy_only and sample.stored else SCORED_FIELDS
    return {name: getattr(sample, name) for name in names}


def result_of_learning(sample: Sample) -> SampleResult:
    """Return the line of the log for a stored sample that is a whole episode, else the sample's scores."""
    if sample.stored is not None and not sample.order:
        return learned_line(sample.trajectory_id, [sample])
    return result_of_score(sample, policy_only=False)


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
        self._system = SystemMonitor(devices_of(device))
        self._folder = ""
        """Folder of the model that was loaded last."""
        self._model: Any = None
        self._tokenizer: Any = None
        self._learner: Any = None
        """RL learner or trainer."""
        self._shares = config.scale.layout == "colocated"
        self._sends_adapter = adapters and config.engine.kind == "vllm"
        """Whether engines get the adapter alone: vLLM has loaded the frozen weights."""

    def make_untrained_model(self, folder: str) -> int:
        """Make the recipe's untrained model with the tokenizer of `folder`; return its number of parameters."""
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = make_untrained_model(self._config.model, self._config.seed, self._tokenizer, self._ranks)
        return self._model.num_parameters()

    def load(self, folder: str, reference_dir: str | None = None) -> None:
        """Load the model in `folder`, and make an RL learner if there is a reference."""
        self._folder = folder
        self._learner = self._model = None
        release_memory()
        self._model, self._tokenizer = load_from(folder, self._config.model, self._ranks)
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
        return self._learner.step() | self._system.metrics()

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
        metrics = self._learner.learn(batch, seed) | self._system.metrics()
        self._release_device()
        return RankResult(
            metrics, self._learner.kl_coef, turn_sums(samples), [result_of_learning(sample) for sample in samples]
        )

    def num_parameters(self) -> int:
        return self._model.num_parameters()

    def whole_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights for engines, in their type, or the adapter. Every rank must read all of them."""
        if self._sends_adapter:
            yield from lora.policy_tensors(self._model)
        else:
            for name, tensor in self._policy():
                yield name, tensor.to(self._dtype) if tensor.is_floating_point() else tensor
        self._release_device()

    def probe(self) -> Probe | None:
        """Return a probe for vLLM, which may miss part of an update silently. All ranks take part."""
        engine = self._config.engine
        if engine.kind == "native":
            return None
        dtype = self._dtype if engine.dtype == "auto" else getattr(torch, engine.dtype)
        adapter = lora.policy_tensors(self._model) if self._sends_adapter else ()
        device = self._ranks.device(self._model)
        probe = probe_model(self._model, dtype, sent_dtype=self._dtype, adapter=adapter, device=device)
        self._release_device()
        return probe

    def save(self, folder: str) -> None:
        """Write this rank's part of the learner's state and of the model, or begin to. `finish_saving` follows."""
        if self._learner is not None:
            self._writer.save_shards(Path(folder) / SHARDS, self._learner.state())
        head = self._learner.head() if isinstance(self._learner, RewardTrainer) else {}  # all ranks take part
        self._write_model(Path(folder) / "model")
        if head and self._rank == 0:
            save_head(head, about_renderer(self._config.model, self._config.agent), Path(folder) / "model")

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


def release_memory() -> None:
    """Release unused device memory to other processes."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _without_store(reference: Any) -> Any:
    raise RuntimeError(f"{reference!r} is in an object store, and this rank is no actor of a cluster")
