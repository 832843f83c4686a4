"""The model a run starts from: loaded or made from nothing, and warmed up by imitation if the recipe says so."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.config import Config
from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.run import build
from agentgym_rl.run.backend import Trainer
from agentgym_rl.run.console import Console
from agentgym_rl.run.heldout import spread
from agentgym_rl.run.log import Kind, RunLog
from agentgym_rl.run.mistakes import Solutions, erring
from agentgym_rl.training.checkpoint import list_checkpoints, load_state, missing_from, put_back
from agentgym_rl.training.lora import add_adapter
from agentgym_rl.training.model import load_tokenizer
from agentgym_rl.training.rl import derive_seed
from agentgym_rl.training.scratch import build_model, build_tokenizer
from agentgym_rl.training.sft import SFT
from agentgym_rl.types import EnvPool, Message, Sample, StopReason, Task, Trajectory


def resume_point(log: RunLog, console: Console) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest complete checkpoint of a resumed run and its state, or None if there is no checkpoint.

    Incomplete ones that are newer are renamed, so that they do not count any more, and a line says so.
    """
    root = log.checkpoints_dir
    put_back(root)
    incomplete: dict[Path, str] = {}
    for folder in reversed(list_checkpoints(root) if log.resumed else []):
        problem = missing_from(folder)
        if problem:
            incomplete[folder] = problem
            continue
        saved = load_state(folder)
        for broken, why in incomplete.items():
            message = f"{broken.name} is not complete ({why}) and is kept as broken_{broken.name}: using {folder.name}"
            shutil.rmtree(root / f"broken_{broken.name}", ignore_errors=True)
            broken.rename(root / f"broken_{broken.name}")
            log.log_event("checkpoint_incomplete", message, step=saved["step"])
            console.warn(message)
        console.stage("Resuming", f"after step {saved['step']}")
        return folder, saved
    if incomplete:
        listed = "; ".join(f"{folder.name}: {why}" for folder, why in incomplete.items())
        raise ConfigError(
            f"no checkpoint in {root} is complete ({listed}): restore one, or remove them to start from the beginning"
        )
    return None


@dataclass(slots=True)
class Start:
    """What there is before a model has learned anything."""

    tokenizer: Any
    lessons: list[Sample]
    """What it imitates first; none without a warm start."""


async def starting_point(
    config: Config,
    pool: EnvPool,
    items: build.Items,
    log: RunLog,
    console: Console,
    conversations: Iterable[list[Message]] = (),
) -> tuple[Any, Any]:
    """(model, tokenizer) that training starts from, in this process; the rest is as for `prepare`."""
    start = await prepare(config, pool, items, log, console, conversations)
    model = untrained(config, start.tokenizer)
    if config.model.scratch is not None:
        console.note(from_nothing(model.num_parameters(), start))
    if config.warm_start is not None:
        await imitate(SFT(model, start.lessons, config.warm_start.sft, config.seed), console)
    return model.eval(), start.tokenizer


async def prepare(
    config: Config,
    pool: EnvPool,
    items: build.Items,
    log: RunLog,
    console: Console,
    conversations: Iterable[list[Message]] = (),
) -> Start:
    """The model's tokenizer, and the warm start's episodes as samples. Without one, `conversations` are where a
    tokenizer from nothing has its words from."""
    tokenizer = None if config.model.path is None else load_tokenizer(config.model.path)
    warm, played = config.warm_start, []
    if warm is not None:
        console.stage("Warm start", f"{warm.episodes} episodes of {warm.policy} play")
        played = await play_demonstrations(
            config, pool, items, log, console, warm.policy, warm.episodes, warm.max_turns, warm.mistakes, "warmstart"
        )
        conversations = [trajectory.messages for trajectory in played]
    if tokenizer is None:
        tokenizer = words_of(conversations)
    renderer = Renderer(tokenizer, config.model.chat_template)
    return Start(tokenizer, [renderer.demonstration(t.messages, t.imitated) for t in played if t.num_turns])


async def imitate(trainer: Trainer, console: Console) -> None:
    """All updates of the warm start, by this process or by a cluster's ranks."""
    with console.progress("imitation", trainer.total) as advance:
        while trainer.updates < trainer.total:
            advance(1, f"loss {trainer.step()['loss']:.3f}")
            await asyncio.sleep(0)  # where the run may be stopped


def untrained(config: Config, tokenizer: Any) -> Any:
    """The model that the recipe names, with adapters that change nothing yet; or random weights for `tokenizer`."""
    if config.model.path is not None:
        model, _ = build.load_from(config.model.path, config.model)
        if config.model.lora is not None:
            add_adapter(model, config.model.lora, config.seed)
        return model
    assert config.model.scratch is not None
    device, dtype = build.choose_device(config.model)
    model = build_model(config.model.scratch, tokenizer, config.seed).to(device)
    # Parameters alone: the frequencies of the rotary embedding stay in float32, as they are in a model that is loaded.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def words_of(conversations: Iterable[list[Message]]) -> Any:
    """A tokenizer that knows their words."""
    messages = [message for conversation in conversations for message in conversation]
    replies = [m.content for m in messages if m.role == "assistant"]
    return build_tokenizer([m.content for m in messages], replies)


def from_nothing(num_parameters: int, start: Start) -> str:
    return f"a model of {num_parameters / 1e6:.2f}M parameters and {len(start.tokenizer)} words, from nothing"


async def play_demonstrations(
    config: Config,
    pool: EnvPool,
    items: build.Items,
    log: RunLog,
    console: Console,
    policy: str,
    episodes: int,
    max_turns: int,
    mistakes: float,
    kind: Kind,
) -> list[Trajectory]:
    """Training items as `policy` plays them: of the oracle its successes, of others all that did not fail.

    The oracle plays an item once; random play comes round to it again until there are enough episodes. With `mistakes`
    the oracle plays all of them without any first, which is not kept: then it is known what it does at other times.
    """
    share = -(-episodes // len(config.environments))
    played: list[Trajectory] = []
    with console.progress(f"{policy} play", share * len(config.environments) * (2 if mistakes else 1)) as advance:
        collector = partial(
            build.make_collector,
            config,
            pool,
            build.demonstrators(policy),
            1,
            f"{kind}-",
            on_trajectory=lambda _: advance(),
        )
        for env in config.environments:
            limits = build.limits_of(config.agent, max_turns, env=env)
            chosen = spread(items.train[env.name], share, f"{config.seed}/{kind}")
            tasks = [Task(env.name, item) for some in chosen.values() for item in some]
            if policy == "random":  # the oracle would do the same again
                tasks = list(islice(cycle(tasks), max(share, len(tasks))))
            seed = derive_seed(config.seed, kind, env.name)
            collect = collector()
            if mistakes:
                solutions: Solutions = {}
                await collector(inner=erring(0.0, seed, solutions))(tasks, limits, seed)
                collect = collector(inner=erring(mistakes, seed, solutions))
            groups = await collect(tasks, limits, seed)
            played += [t for g in groups for t in g.trajectories]
    for trajectory in played:
        log.write_trajectory(0, trajectory, kind)
    usable = [t for t in played if t.stop is not StopReason.ERROR]
    what = "warm start" if kind == "warmstart" else kind
    if not usable:
        raise EnvError(f"{what}: all {len(played)} episodes failed; the first: {played[0].error}")
    if policy != "oracle":
        return usable
    if mistakes:
        console.note(_told(played))
    found = [t for t in usable if t.success and any(t.imitated)]
    if not found:
        advice = "allow more turns" + (", or fewer mistakes" if mistakes else "")
        raise EnvError(f"{what}: of {len(played)} episodes the oracle won none in {max_turns} turns: {advice}")
    return found


def _told(played: list[Trajectory]) -> str:
    turns = [info for trajectory in played for info in trajectory.infos]
    wrong = sum(info.get("mistake", False) for info in turns)
    refused = sum(info.get("mistake", False) and info.get("valid") is False for info in turns)
    return (
        f"{wrong} of {len(turns)} turns were mistakes, {refused} of them refused; "
        f"{sum(t.success for t in played)} of {len(played)} episodes succeeded all the same"
    )
