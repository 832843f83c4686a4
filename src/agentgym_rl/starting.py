"""The model a run starts from: loaded or made from nothing, and warmed up by imitation if the recipe says so."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import cycle, islice
from typing import Any

from agentgym_rl import wiring
from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.config import Config
from agentgym_rl.console import Console
from agentgym_rl.errors import EnvError
from agentgym_rl.heldout import spread
from agentgym_rl.runlog import Kind, RunLog
from agentgym_rl.training.lora import add_adapter
from agentgym_rl.training.rl import derive_seed
from agentgym_rl.training.scratch import build_model, build_tokenizer
from agentgym_rl.training.sft import SFT
from agentgym_rl.types import EnvPool, Message, StopReason, Task, Trajectory


async def starting_point(
    config: Config, pool: EnvPool, items: wiring.Items, log: RunLog, console: Console
) -> tuple[Any, Any]:
    """(model, tokenizer) that training starts from."""
    if config.model.path is not None:
        model, tokenizer = wiring.load_from(config.model.path, config.model)
        if config.model.lora is not None:
            add_adapter(model, config.model.lora, config.seed)
    warm = config.warm_start
    if warm is None:
        return model, tokenizer
    console.stage("Warm start", f"{warm.episodes} episodes of {warm.policy} play")
    demonstrations = await play_demonstrations(
        config, pool, items, log, console, warm.policy, warm.episodes, warm.max_turns, "warmstart"
    )
    if config.model.scratch is not None:
        model, tokenizer = from_nothing(config, (t.messages for t in demonstrations), console)
    renderer = Renderer(tokenizer, config.model.chat_template)
    samples = [renderer.demonstration(t.messages) for t in demonstrations if t.num_turns]
    trainer = SFT(model, samples, warm.sft, config.seed)
    with console.progress("imitation", trainer.total) as advance:
        while trainer.updates < trainer.total:
            advance(1, f"loss {trainer.step()['loss']:.3f}")
            await asyncio.sleep(0)  # where the run may be stopped
    model.eval()
    return model, tokenizer


def from_nothing(config: Config, conversations: Iterable[list[Message]], console: Console) -> tuple[Any, Any]:
    """(model, tokenizer): random weights, and a tokenizer that knows the words of `conversations`."""
    assert config.model.scratch is not None
    messages = [message for conversation in conversations for message in conversation]
    replies = [m.content for m in messages if m.role == "assistant"]
    tokenizer = build_tokenizer([m.content for m in messages], replies)
    device, dtype = wiring.choose_device(config.model)
    model = build_model(config.model.scratch, tokenizer, config.seed).to(device)
    # Parameters alone: the frequencies of the rotary embedding stay in float32, as they are in a model that is loaded.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    console.note(f"a model of {model.num_parameters() / 1e6:.2f}M parameters and {len(tokenizer)} words, from nothing")
    return model, tokenizer


async def play_demonstrations(
    config: Config,
    pool: EnvPool,
    items: wiring.Items,
    log: RunLog,
    console: Console,
    policy: str,
    episodes: int,
    max_turns: int,
    kind: Kind,
) -> list[Trajectory]:
    """Training items as `policy` plays them: of the oracle its successes, of others all that did not fail.

    The oracle plays an item once; random play comes round to it again until there are enough episodes.
    """
    share = -(-episodes // len(config.environments))
    played: list[Trajectory] = []
    with console.progress(f"{policy} play", share * len(config.environments)) as advance:
        collect = wiring.make_collector(
            config, pool, wiring.demonstrators(policy), 1, f"{kind}-", on_trajectory=lambda _: advance()
        )
        for env in config.environments:
            limits = wiring.limits_of(config.agent, max_turns, env=env)
            chosen = spread(items.train[env.name], share, f"{config.seed}/{kind}")
            tasks = [Task(env.name, item) for some in chosen.values() for item in some]
            if policy == "random":  # the oracle would do the same again
                tasks = list(islice(cycle(tasks), max(share, len(tasks))))
            groups = await collect(tasks, limits, derive_seed(config.seed, kind, env.name))
            played += [t for g in groups for t in g.trajectories]
    for trajectory in played:
        log.write_trajectory(0, trajectory, kind)
    usable = [t for t in played if t.stop is not StopReason.ERROR]
    if not usable:
        what = "warm start" if kind == "warmstart" else kind
        raise EnvError(f"{what}: all {len(played)} episodes failed; the first: {played[0].error}")
    return [t for t in usable if t.success] if policy == "oracle" else usable
