"""Reward models: the loss against a slow version, held-out items, exact resumes, and the folder that is a judge."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_for_tests import counting_conversations, counting_player, tiny_model, trajectory

from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.errors import ConfigError
from agentgym_rl.rewards.rewards import Rewards
from agentgym_rl.run.demonstrations import to_transcript
from agentgym_rl.run.judging import make_scorer
from agentgym_rl.training.checkpoint import export
from agentgym_rl.training.critic import ValueModel
from agentgym_rl.training.dpo import Preference
from agentgym_rl.training.locate_model import REWARD_HEAD, find_reward_model
from agentgym_rl.training.lora import add_adapter
from agentgym_rl.training.offline_settings import RewardModelSettings
from agentgym_rl.training.reward_model import (
    SCORED_TEXT,
    RewardTrainer,
    accuracy,
    load_head,
    save_head,
    scores_of,
    split_pairs,
)
from agentgym_rl.training.reward_settings import RewardSettings
from agentgym_rl.training.settings import LoraSettings, OptimizerSettings
from agentgym_rl.types import Group, Sample, StopReason, Task, Trajectory

torch.set_num_threads(1)


def sample(seed: int) -> Sample:
    episode = trajectory(seed)
    return Sample(episode.token_ids, episode.loss_mask, trajectory_id=episode.id)


def preferences(count: int) -> list[Preference]:
    return [Preference(sample(2 * i), sample(2 * i + 1), 0.0, 0.0) for i in range(count)]


def settings(**changes: Any) -> RewardModelSettings:
    optimizer = OptimizerSettings(lr=1e-2, micro_batch_tokens=changes.pop("micro_batch_tokens", 60))
    return RewardModelSettings(**{"batch_size": 3, "epochs": 2, "sample_groups": 1, "optimizer": optimizer} | changes)


def slow_score(model: ValueModel, example: Sample) -> float:
    hidden = model.decoder(input_ids=torch.tensor([example.token_ids])).last_hidden_state[0, -1]
    return model.head(hidden).item()


def test_the_loss_is_that_of_bradley_and_terry_with_scores_around_zero() -> None:
    pairs = preferences(5)
    trainer = RewardTrainer(tiny_model(), pairs, settings(center_coef=0.1), 0)
    assert trainer.step()["loss"] == pytest.approx(math.log(2))  # the head starts at 0
    trainer.step()
    scores = [(slow_score(trainer.model, p.chosen), slow_score(trainer.model, p.rejected)) for p in pairs]
    metrics = trainer.update_on(pairs)
    losses = [math.log1p(math.exp(-(a - b))) + 0.1 * (a + b) ** 2 for a, b in scores]
    assert metrics["loss"] == pytest.approx(sum(losses) / 5, rel=1e-4)
    assert metrics["reward_model/accuracy"] == pytest.approx(sum(a > b for a, b in scores) / 5)
    assert metrics["reward_model/margin"] == pytest.approx(sum(a - b for a, b in scores) / 5, rel=1e-3)


def test_it_learns_the_pairs_and_results_do_not_depend_on_micro_batches() -> None:
    rows = []
    for tokens in (1, 10_000):
        trainer = RewardTrainer(tiny_model(), preferences(6), settings(epochs=20, micro_batch_tokens=tokens), 0)
        metrics = [trainer.step() for _ in range(trainer.total)]
        rows.append(metrics[1])
        found = trainer.scores([half for p in preferences(6) for half in (p.chosen, p.rejected)])
        assert accuracy(found) == 1.0
        assert abs(sum(found)) / len(found) < 0.5 * max(map(abs, found))
    assert rows[0] == pytest.approx(rows[1], rel=1e-3, abs=1e-5)


def test_it_learns_to_rank_pairs_that_it_has_not_seen() -> None:
    """The better episode ends in one of two tokens, after any context."""
    rng = random.Random(0)

    def half(last: int) -> Sample:
        ids = [rng.randrange(8, 23) for _ in range(rng.randint(3, 9))] + [last]
        return Sample(ids, [False] * (len(ids) - 1) + [True])

    pairs = [Preference(half(5), half(6), 0.0, 0.0) for _ in range(80)]
    trainer = RewardTrainer(tiny_model(), pairs[:60], settings(epochs=3, batch_size=10, micro_batch_tokens=1000), 0)
    unseen = [sample for pair in pairs[60:] for sample in (pair.chosen, pair.rejected)]
    assert accuracy(trainer.scores(unseen)) == 0.5
    while trainer.updates < trainer.total:
        trainer.step()
    assert accuracy(trainer.scores(unseen)) >= 0.95


def test_a_restored_trainer_continues_exactly() -> None:
    whole = RewardTrainer(tiny_model(), preferences(7), settings(), "s")
    expected = [whole.step() for _ in range(whole.total)]
    model = tiny_model()
    first = RewardTrainer(model, preferences(7), settings(), "s")
    rows = [first.step() for _ in range(2)]
    state = copy.deepcopy(first.state())
    second = RewardTrainer(model, preferences(7), settings(), "s")
    second.restore(state)
    assert rows + [second.step() for _ in range(second.total - 2)] == expected
    assert all(torch.equal(value, whole.head()[name]) for name, value in second.head().items())


@pytest.mark.parametrize("adapters", [False, True])
def test_a_saved_head_scores_as_the_trained_one(adapters: bool, tmp_path: Path) -> None:
    model = tiny_model()
    if adapters:
        add_adapter(model, LoraSettings(rank=2), 0)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    trainer = RewardTrainer(model, preferences(4), settings(), 0)
    while trainer.updates < trainer.total:
        trainer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if name in before)
    save_head(trainer.head(), {"chat_template": "", "thoughts": "keep"}, tmp_path)
    loaded, about = load_head(model, tmp_path)
    examples = [sample(i) for i in range(8)]
    assert scores_of(loaded, examples, 1000) == pytest.approx(trainer.scores(examples))
    assert about == {"chat_template": "", "thoughts": "keep", "text": SCORED_TEXT}
    assert find_reward_model(str(tmp_path)) == tmp_path


def counting_judge(folder: Path, **changes: Any) -> tuple[RewardSettings, ValueModel, Renderer]:
    """Write a reward model that nobody trained; return it as a source of rewards, loaded, and with its renderer."""
    model, tokenizer = counting_player()
    for name, value in changes.items():
        setattr(model.config, name, value)
    export(model, tokenizer, folder)
    head = {"weight": torch.linspace(-1, 1, model.config.hidden_size)[None], "bias": torch.zeros(1)}
    save_head(head, {"chat_template": "", "thoughts": "template"}, folder)
    scored, _ = load_head(model, folder)
    return (
        RewardSettings(kind="reward_model", path=str(folder), weight=0.5, device="cpu"),
        scored,
        Renderer(tokenizer),
    )


def counting_group(count: int) -> Group:
    group = Group(Task("counting", 0), [])
    for number, messages in enumerate(counting_conversations(count)):
        turns = sum(m.role == "assistant" for m in messages)
        infos: list[dict[str, Any]] = [{} for _ in range(turns)]
        group.trajectories.append(
            Trajectory(f"t{number}", group.task, messages, [0.25] * turns, infos, StopReason.DONE)
        )
    return group


async def test_a_folder_with_a_head_is_a_judge_of_groups(tmp_path: Path) -> None:
    source, scored, renderer = counting_judge(tmp_path)
    group = counting_group(3)
    rewards = Rewards([source], None, {source.source: make_scorer(source)})
    await rewards.score([group])
    for episode in group.trajectories:
        own, learned = episode.verdicts
        ids = renderer.prompt(episode.messages)  # with what the environment said last
        prompt = renderer.follow_up("You are at 0.")[len(renderer.follow_up("You are at 0.", False)) :]
        score = slow_score(scored, Sample(ids[: -len(prompt)], []))
        assert learned.scores == pytest.approx([0.0] * (episode.num_turns - 1) + [1 / (1 + math.exp(-score))], rel=1e-4)
        assert own.scores == [0.25] * episode.num_turns
        assert episode.training_reward == pytest.approx(sum(own.scores) + 0.5 * sum(learned.scores))
    assert len({sum(t.verdicts[1].scores) for t in group.trajectories}) > 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_a_reward_model_of_any_type_scores(dtype: str, tmp_path: Path) -> None:
    source, *_ = counting_judge(tmp_path)
    group = counting_group(3)
    expected = make_scorer(source)(group)
    counting_player()[0].to(getattr(torch, dtype)).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == dtype
    assert make_scorer(source)(group) == pytest.approx(expected, rel=2e-2)


async def test_only_an_episode_that_is_too_long_for_the_judge_has_no_score(tmp_path: Path) -> None:
    group = counting_group(4)
    short = group.trajectories[1]
    short.messages, short.rewards, short.infos = short.messages[:3], short.rewards[:1], short.infos[:1]
    lengths = [len(to_transcript(t, Renderer(counting_player()[1])).token_ids) for t in group.trajectories]
    source, *_ = counting_judge(tmp_path, max_position_embeddings=max(lengths) - 1)
    await Rewards([source], None, {source.source: make_scorer(source)}).score([group])
    unscored = [bool(t.judge_error) for t in group.trajectories]
    assert unscored == [True, False, True, True]


def test_a_head_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    """It was trained on texts without the last observation, and would score others."""
    source, *_ = counting_judge(tmp_path)
    save_file(load_file(tmp_path / REWARD_HEAD), tmp_path / REWARD_HEAD, metadata={"chat_template": ""})
    with pytest.raises(ConfigError, match="trained by an earlier version"):
        make_scorer(source)


def test_items_are_held_out_whole() -> None:
    episodes = [trajectory(i) for i in range(40)]
    for i, episode in enumerate(episodes):
        episode.task = Task("toy", i // 4)
    pairs = [(episodes[i], episodes[i + 1]) for i in range(0, 40, 2)]
    kept, held_out = split_pairs(pairs, 0.3, 0)
    assert (len(kept), len(held_out)) == (14, 6)
    assert not {a.task for a, _ in kept} & {a.task for a, _ in held_out}
    assert split_pairs(pairs, 0.3, 0) == (kept, held_out)
    assert split_pairs(pairs, 0.3, 1) != (kept, held_out)
    assert [len(side) for side in split_pairs(pairs[:4], 0.01, 0)] == [2, 2]
    with pytest.raises(ConfigError, match="pairs of at least 2 items, one of them held out, got pairs of 1"):
        split_pairs(pairs[:2], 0.3, 0)


def test_settings_and_folders_that_are_no_reward_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no reward model"):
        find_reward_model(str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="the run has no checkpoint yet"):
        find_reward_model(str(tmp_path))
    with pytest.raises(ValueError, match=r"held_out lie in \(0, 1\)"):
        settings(held_out=1.0)
    with pytest.raises(ValueError, match="kind = 'reward_model' needs path"):
        RewardSettings(kind="reward_model")
    with pytest.raises(ValueError, match="device is not read by kind = 'format'"):
        RewardSettings(kind="format", pattern="x", device="cpu")
    with pytest.raises(ConfigError, match="at least one pair"):
        RewardTrainer(tiny_model(), [], settings(), 0)
