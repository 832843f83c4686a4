"""The sources of rewards of a run, with the judge that the recipe names."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

from agentgym_rl.agent.renderer import Renderer, Thoughts
from agentgym_rl.config import ModelConfig
from agentgym_rl.errors import ConfigError
from agentgym_rl.rewards.judge import Judge, LocalChat, make_chat_client
from agentgym_rl.rewards.rewards import Rewards, Scorer
from agentgym_rl.run.demonstrations import to_transcript
from agentgym_rl.run.load_model import load_from, load_frozen, loaded_dtype
from agentgym_rl.training.locate_model import find_reward_model
from agentgym_rl.training.reward_settings import SCORED_TOKENS, JudgeSettings, RewardSettings
from agentgym_rl.types import Group

CACHE_NAME = "judge.jsonl"
"""File of a run directory with every answer of the judge."""


def make_rewards(rewards: tuple[RewardSettings, ...], judge: JudgeSettings | None, cache: Path) -> Rewards | None:
    """Return a recipe's sources of rewards, or None if it has none. `cache` is the file of the judge's answers."""
    if not rewards:
        return None
    scorers = {reward.source: make_scorer(reward) for reward in rewards if reward.kind == "reward_model"}
    return Rewards(rewards, None if judge is None else make_judge(judge, cache), scorers)


def make_scorer(settings: RewardSettings) -> Scorer:
    """Return a function that scores groups by the reward model of a folder: sigmoid of the score, from 0 to 1.

    An episode that is longer than the model can read has no score.
    """
    from agentgym_rl.training.reward_model import load_head, scores_of

    folder = find_reward_model(settings.path)
    loaded = ModelConfig.model_validate({"path": str(folder), "device": settings.device, "dtype": loaded_dtype(folder)})
    model, tokenizer = load_frozen(str(folder), "rewards.path", loaded)
    scored, about = load_head(model, folder)
    thoughts = cast(Thoughts, about["thoughts"])
    renderer = Renderer(tokenizer, about["chat_template"] or None, thoughts=thoughts)
    longest = model.config.max_position_embeddings

    def score(group: Group) -> list[float | None]:
        samples = [to_transcript(trajectory, renderer) for trajectory in group.trajectories]
        readable = [sample for sample in samples if len(sample.token_ids) <= longest]
        if not readable:
            length = min(len(sample.token_ids) for sample in samples)
            raise ConfigError(f"the reward model reads {longest} tokens, an episode has {length}: lower max_context")
        scores = iter(scores_of(scored, readable, SCORED_TOKENS))
        return [
            1.0 / (1.0 + math.exp(-next(scores))) if len(sample.token_ids) <= longest else None for sample in samples
        ]

    return score


def make_judge(settings: JudgeSettings, cache_path: Path) -> Judge:
    """Return the judge behind an API, or the model of a folder in this process."""
    if settings.path is None:
        return Judge(make_chat_client(settings), str(settings.model), settings, cache_path)
    return Judge(_load(settings), settings.path, settings, cache_path)


def _load(settings: JudgeSettings) -> LocalChat:
    from agentgym_rl.agent.engines.native import NativeEngine

    assert settings.path is not None
    model, tokenizer = load_from(
        settings.path, ModelConfig(path=settings.path, device=settings.device, dtype=settings.dtype)
    )
    renderer = Renderer(tokenizer)
    engine = NativeEngine(
        model.eval(),
        decode=renderer.decode,
        max_sessions=settings.concurrency,
        max_context=settings.max_context,
    )
    return LocalChat(engine, renderer, engine.max_context)
