"""The same learning by one process or by several ranks, small enough to compare number by number."""

from __future__ import annotations

import socket
import time
import traceback
import warnings
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes_for_tests import CONTEXT
from training_for_tests import counting_conversations, tiny_model, trajectory, varied_groups

from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.scale.process_group import ProcessRanks, join
from agentgym_rl.scale.shards import ShardWriter
from agentgym_rl.training.batch import estimate, gather, split_batch
from agentgym_rl.training.critic import ValueModel
from agentgym_rl.training.dpo import DPO, Preference, make_preferences
from agentgym_rl.training.learner import freeze
from agentgym_rl.training.lora import CRITIC, adapter, add_adapter, copy_adapter
from agentgym_rl.training.microbatch import micro_batches
from agentgym_rl.training.offline_settings import DPOSettings, RewardModelSettings
from agentgym_rl.training.ranks import SINGLE_PROCESS, Ranks
from agentgym_rl.training.reward_model import RewardTrainer
from agentgym_rl.training.rl_learner import RLLearner, by_turn
from agentgym_rl.training.scratch import build_tokenizer
from agentgym_rl.training.settings import (
    CriticSettings,
    DistillSettings,
    LoraSettings,
    OptimizerSettings,
    RLSettings,
    SFTSettings,
)
from agentgym_rl.training.sft import SFT
from agentgym_rl.transport.broadcast import whole_state
from agentgym_rl.types import Sample

SGD_LIKE = {"lr": 0.001, "betas": (0.0, 0.999), "micro_batch_tokens": 60, "max_grad_norm": 0.5}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"kl_coef": 0.1, "entropy_coef": 0.01, "minibatches": 2, "zero_variance": "keep"},
    "gspo, one update": {"loss": "gspo", "kl_coef": 0.0, "aggregate": "trajectory"},
    "ppo": {"algorithm": "ppo", "credit": "turns", "turn_discount": 0.9, "minibatches": 2, "kl_coef": 0.1},
    "ppo, KL in the reward": {"algorithm": "ppo", "kl_in": "reward", "kl_coef": 0.05, "kl_target": 0.02},
    "fewer samples than ranks": {"minibatches": 3, "kl_coef": 0.1},
    "whole copies": {"minibatches": 2, "kl_coef": 0.0},
    "lora": {"minibatches": 2, "kl_coef": 0.0},
    "bf16, sharded": {"kl_coef": 0.1},
    "bf16, whole copies": {"kl_coef": 0.0},
    "bf16, lora": {"kl_coef": 0.0},
    "bf16, lora, ppo": {"algorithm": "ppo", "kl_coef": 0.0},
    "distill": {"kl_coef": 0.1, "distill": DistillSettings(teacher="another tiny model", reward_weight=0.5)},
}
ON_FOUR = ("grpo", "ppo", "fewer samples than ranks", "lora", "bf16, sharded", "bf16, lora", "bf16, lora, ppo")
"""Four processes on two cores take their time."""


def rl(name: str) -> RLSettings:
    # In bf16 an update adds up over several micro-batches on every rank.
    optimizer = OptimizerSettings(**SGD_LIKE | ({"micro_batch_tokens": 30} if "bf16" in name else {}))
    return RLSettings(
        steps=4, group_size=2, optimizer=optimizer, critic=CriticSettings(optimizer=optimizer), **CASES[name]
    )


def learner(name: str, ranks: Ranks) -> RLLearner:
    model, critic = tiny_model(2), None
    if "bf16" in name:
        model = model.bfloat16()
    if "lora" in name:
        add_adapter(model, LoraSettings(rank=2), 0)
    if "lora, ppo" in name:
        copy_adapter(model, LoraSettings(rank=2), CRITIC)
        critic = ValueModel(model.get_decoder(), model.config.hidden_size, lambda: adapter(model, CRITIC))
    teacher = None
    if name == "distill":
        other = freeze(tiny_model(5))
        ranks.prepare_model(other)
        teacher = lambda: nullcontext(other)  # noqa: E731
    return RLLearner(model, rl(name), 0.7, critic=critic, ranks=ranks, teacher=teacher)


def steps(name: str, made: RLLearner, count: int) -> list[dict[str, float]]:
    """Metrics of some steps on the same groups; every rank takes its share and gives back what it found."""
    settings, ranks = rl(name), made.ranks
    found = []
    for step in range(count):
        groups = varied_groups()[:1] if "fewer" in name else varied_groups()
        batch = gather(groups, settings)
        if settings.algorithm == "ppo" or settings.kl_in == "reward" or settings.distill is not None:
            local_indices = ranks.local_indices([len(s.token_ids) for s in batch.samples])
            made.score([batch.samples[i] for i in local_indices])
            exchange(batch.samples, local_indices, ranks)
        batch = estimate(batch, settings, made.kl_coef)
        shares, indices = split_batch(batch, ranks.size, settings.minibatches, step)
        if "bf16" in name and ranks.size < 4:  # among four there are too few samples
            limit = settings.optimizer.micro_batch_tokens
            assert len(micro_batches(shares[ranks.rank].samples, shares[ranks.rank].weights, limit, "cpu")) > 1
        metrics = made.learn(shares[ranks.rank], step)
        exchange(batch.samples, indices[ranks.rank], ranks)
        found.append(metrics | by_turn(batch.samples))
    return found


def exchange(samples: list[Sample], local_indices: list[int], ranks: Ranks) -> None:
    """Every rank's samples, as its learner filled them in, to every other rank."""
    if ranks.size == 1:
        return
    parts: list[Any] = [None] * ranks.size
    torch.distributed.all_gather_object(parts, [(i, samples[i]) for i in local_indices])
    for i, sample in (pair for part in parts for pair in part):
        samples[i] = sample


def weights(made: Any) -> dict[str, torch.Tensor]:
    return {name: value.cpu().float().clone() for name, value in whole_state(made.model)}


def sft_steps(ranks: Ranks) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    conversations = counting_conversations(13)
    tokenizer = build_tokenizer([m.content for messages in conversations for m in messages])
    samples = [Renderer(tokenizer).demonstration(messages) for messages in conversations]
    settings = SFTSettings(epochs=1, batch_size=5, optimizer=OptimizerSettings(**SGD_LIKE))
    trainer = SFT(tiny_model(3, len(tokenizer)), samples, settings, 0, ranks)
    found = [trainer.step() for _ in range(trainer.total)]
    return found, weights(trainer)


def dpo_steps(ranks: Ranks) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Two rounds on one model, with what it makes of the pairs before each; in the last batch some ranks have none."""
    model = tiny_model(4)
    settings = DPOSettings(batch_size=4, optimizer=OptimizerSettings(**SGD_LIKE), sample_groups=1)
    found = []
    for seed in range(2):
        episodes = [trajectory(10 * seed + i) for i in range(10)]
        halves = [Sample(t.token_ids, t.loss_mask, trajectory_id=t.id) for t in episodes]
        pairs = make_preferences(model, list(zip(halves[::2], halves[1::2], strict=True)), 60, ranks)
        known = {str(i): p.chosen_reference + 10 * p.rejected_reference for i, p in enumerate(pairs)}
        trainer = DPO(model, pairs, settings, seed, ranks)
        found += [known, *(trainer.step() for _ in range(trainer.total))]
    return found, weights(trainer)


def reward_model_steps(ranks: Ranks) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Return metrics and scores of a reward model; in the last batch some ranks have no pair."""
    settings = RewardModelSettings(batch_size=4, epochs=2, optimizer=OptimizerSettings(**SGD_LIKE), sample_groups=1)
    halves = [Sample(t.token_ids, t.loss_mask, trajectory_id=t.id) for t in map(trajectory, range(10))]
    pairs = [Preference(a, b, 0.0, 0.0) for a, b in zip(halves[::2], halves[1::2], strict=True)]
    trainer = RewardTrainer(tiny_model(4), pairs, settings, 0, ranks)
    found = [trainer.step() for _ in range(trainer.total)]
    scores = {str(i): score for i, score in enumerate(trainer.scores(halves))}
    head = {f"head.{name}": float(value.sum()) for name, value in trainer.head().items()}
    return [*found, scores, head], weights(trainer)


def everything(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """All cases; ppo's learner is also written to `folder` in shards after its second step."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"sft": sft_steps(ranks), "dpo": dpo_steps(ranks)}
    found["reward_model"] = reward_model_steps(ranks)
    for name in ON_FOUR if ranks.size == 4 else CASES:
        if isinstance(ranks, ProcessRanks):
            ranks.shard = "whole copies" not in name and "lora" not in name
        made = learner(name, ranks)
        metrics = steps(name, made, 2)
        found[name] = (metrics, weights(made))
        if name == "ppo":
            ShardWriter().save_shards(folder / "shards", made.state())
            policy = weights(made)
            if ranks.rank == 0:
                torch.save(policy, folder / "policy.pt")
            metrics = metrics + steps(name, made, 1)
            found["ppo, another step"] = (metrics[2:], weights(made))
    return found


def _rank(rank: int, size: int, address: str, function: Any, folder: Path, timeout_s: float) -> None:
    try:
        join(rank, size, address, timeout_s=timeout_s)
        result = function(ProcessRanks(), folder)
        if rank == 0:
            torch.save(result, folder / "result.pt")
    except BaseException:
        (folder / f"error{rank}.txt").write_text(traceback.format_exc())
        raise
    finally:
        with suppress(Exception):  # the group is already gone if a rank died
            dist.destroy_process_group()


def on_ranks(size: int, function: Any, folder: Path, timeout_s: float = 800.0) -> Any:
    """Return the result of `function(ranks, folder)` on rank 0 of `size` processes.

    Gloo's own thread was once seen to crash (a null pointer in libpython, torch 2.13): where a rank died of a signal
    they are all started once more.
    """
    for attempt in ("first", "second"):
        target = folder / attempt
        target.mkdir()
        processes = _started(size, function, target, timeout_s)
        stuck = [process for process in processes if process.is_alive()]
        for process in stuck:
            process.kill()
        errors = "\n".join(path.read_text() for path in sorted(target.glob("error*.txt")))
        assert not stuck, f"{len(stuck)} of {size} ranks did not come to an end\n{errors}"
        crashed = [process.exitcode for process in processes if (process.exitcode or 0) < 0]
        if crashed and attempt == "first":
            warnings.warn(f"{len(crashed)} of {size} ranks crashed, another try:\n{errors}", stacklevel=2)
            continue
        assert not crashed, f"{len(crashed)} of {size} ranks crashed twice\n{errors}"
        assert not errors, errors
        break
    for path in target.iterdir():
        path.rename(folder / path.name)
    return torch.load(folder / "result.pt", weights_only=True)


def _started(size: int, function: Any, folder: Path, timeout_s: float) -> list[Any]:
    """The processes, ended or not."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    processes = [
        CONTEXT.Process(target=_rank, args=(r, size, address, function, folder, timeout_s)) for r in range(size)
    ]
    for process in processes:
        process.start()
    give_up_at = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, give_up_at - time.monotonic()))
    return processes


def alone(folder: Path) -> dict[str, Any]:
    return everything(SINGLE_PROCESS, folder)
