"""The model a run starts from: loaded or made from scratch, and warmed up by imitation if the recipe says so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentgym_rl.agent.context_management import ASK, LEFT_OUT, SUMMARISED
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.config import ModelConfig, WarmStartConfig
from agentgym_rl.errors import ConfigError
from agentgym_rl.run.backend import Trainer
from agentgym_rl.run.collectors import ProgramDemonstrations, make_external
from agentgym_rl.run.console import Console
from agentgym_rl.run.context import RunContext
from agentgym_rl.run.demonstrations import (
    Demonstration,
    longest_sample,
    play_demonstrations,
    to_samples,
)
from agentgym_rl.run.load_model import choose_device, load_from
from agentgym_rl.training.lora import add_adapter
from agentgym_rl.training.model import load_tokenizer, positions_of
from agentgym_rl.training.ranks import SINGLE_PROCESS, Ranks
from agentgym_rl.training.scratch import build_model, build_tokenizer, write_calls
from agentgym_rl.training.sft import SFT
from agentgym_rl.types import Message, Sample


@dataclass(slots=True)
class Start:
    """Tokenizer and warm-start data of a model that has learned nothing yet."""

    tokenizer: Any
    samples: list[Sample]
    """Samples to imitate first; empty without a warm start."""


async def starting_model(context: RunContext, conversations: Sequence[list[Message]] = ()) -> tuple[Any, Any]:
    """Return the (model, tokenizer) that training starts from, in this process; arguments as for `prepare`."""
    config, console = context.config, context.console
    start = await prepare(context, conversations)
    model = make_untrained_model(config.model, config.seed, start.tokenizer)
    if config.model.scratch is not None:
        console.note(describe_scratch(model.num_parameters(), start))
    if config.warm_start is not None:
        await imitate(SFT(model, start.samples, config.warm_start.sft, config.seed), console)
    return model.eval(), start.tokenizer


async def prepare(context: RunContext, conversations: Sequence[list[Message]] = ()) -> Start:
    """Return the model's tokenizer, and the warm start's episodes as samples.

    Without a warm start, a tokenizer from scratch takes its words from `conversations`.
    """
    config = context.config
    tokenizer = None if config.model.path is None else load_tokenizer(config.model.path)
    warm, played = config.warm_start, []
    if warm is not None:
        context.console.stage("Warm start", f"{warm.episodes} episodes of {warm.policy} play")
        played = await _warm_start_demonstrations(context, warm)
        conversations = [demonstration.messages for demonstration in played]
    if tokenizer is None:
        texts = () if config.agent.context == "full" else (ASK, LEFT_OUT, SUMMARISED)
        tokenizer = word_tokenizer([*conversations, [Message("user", text) for text in texts]])
    renderer = Renderer(tokenizer, config.model.chat_template, thoughts=config.agent.thoughts)
    if warm is None:
        return Start(tokenizer, [])
    max_tokens, reason = longest_sample(config.longest_context(), _positions(config.model))
    train_thoughts = config.agent.train_thoughts
    samples = to_samples(played, renderer, max_tokens, reason, context.console, train_thoughts=train_thoughts)
    if not samples:
        raise ConfigError(
            f"warm_start: no episode has a token to train on and at most {reason} = {max_tokens} tokens: lower "
            "warm_start.max_turns, raise agent.max_context, or choose a model that reads more"
        )
    return Start(tokenizer, samples)


def _positions(model: ModelConfig) -> int | None:
    """Return the tokens that the recipe's model reads at a time, or None if there is no limit."""
    if model.scratch is not None:
        return model.scratch.max_context
    assert model.path is not None
    return positions_of(model.path)


async def _warm_start_demonstrations(context: RunContext, warm: WarmStartConfig) -> list[Demonstration]:
    """Return the episodes to imitate: of the environments, or of the program that plays them."""
    external = make_external(context.config.agent) if warm.through_program else None
    program = None if external is None else ProgramDemonstrations(external, warm.policy)
    try:
        played = await play_demonstrations(
            context,
            "warmstart",
            warm.policy,
            episodes=warm.episodes,
            max_turns=warm.max_turns,
            mistakes=warm.mistakes,
            wrong_thoughts=warm.wrong_thoughts,
            program=program,
        )
    finally:
        if program is not None:
            await program.close()
    if program is None:
        return [trajectory for trajectory in played if trajectory.num_turns]
    return [conversation for trajectory in played for conversation in program.conversations(trajectory)]


async def imitate(trainer: Trainer, console: Console) -> None:
    """Make all updates of the warm start, in this process or on a cluster's ranks."""
    with console.progress("imitation", trainer.total) as advance:
        while trainer.updates < trainer.total:
            advance(1, f"loss {trainer.step()['loss']:.3f}")
            await asyncio.sleep(0)  # a point at which the run can be stopped


def make_untrained_model(settings: ModelConfig, seed: int, tokenizer: Any, ranks: Ranks = SINGLE_PROCESS) -> Any:
    """Return the model of the recipe, with adapters that change nothing yet, or random weights for `tokenizer`."""
    if settings.path is not None:
        model, _ = load_from(settings.path, settings, ranks)
        if settings.lora is not None:
            add_adapter(model, settings.lora, seed)
        return model
    assert settings.scratch is not None
    device, dtype = choose_device(settings)
    model = build_model(settings.scratch, tokenizer, seed).to(device)
    # Only parameters: the rotary embedding's frequencies stay in float32, as in a model that is loaded.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    ranks.prepare_model(model)
    return model


def word_tokenizer(conversations: Sequence[list[Message]]) -> Any:
    """Return a tokenizer whose vocabulary is the words of `conversations`."""
    messages = [message for conversation in conversations for message in conversation]
    texts = [f"{m.content}\n{write_calls(m.tool_calls or ())}".strip() for m in messages]
    return build_tokenizer(texts, [text for text, m in zip(texts, messages, strict=True) if m.role == "assistant"])


def describe_scratch(num_parameters: int, start: Start) -> str:
    """Return a line about a model made from scratch."""
    return f"a model of {num_parameters / 1e6:.2f}M parameters and {len(start.tokenizer)} words, from scratch"
