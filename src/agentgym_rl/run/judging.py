"""The sources of rewards of a run, with the judge that the recipe names."""

from __future__ import annotations

from pathlib import Path

from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.config import Config, ModelConfig
from agentgym_rl.rewards.judge import Judge, LocalChat, make_chat_client
from agentgym_rl.rewards.rewards import Rewards
from agentgym_rl.run.load_model import load_from
from agentgym_rl.training.reward_settings import JudgeSettings

CACHE_NAME = "judge.jsonl"
"""File of a run directory with every answer of the judge."""


def make_rewards(config: Config, root: Path, cache_name: str = CACHE_NAME) -> Rewards | None:
    """Return the recipe's sources of rewards, or None if it has none. Answers of the judge are kept in `root`."""
    if not config.rewards:
        return None
    return Rewards(config.rewards, None if config.judge is None else make_judge(config.judge, root / cache_name))


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
    # Text has more than two characters a token; what is longer all the same is an error that names max_chars.
    tokens = settings.max_chars // 2 + 1024 + settings.max_new_tokens
    engine = NativeEngine(model.eval(), decode=renderer.decode, max_sessions=settings.concurrency, max_context=tokens)
    return LocalChat(engine, renderer, engine.max_context)
