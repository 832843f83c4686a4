"""The command `train`: check a recipe, make its run directory, run it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from agentgym_rl.config import Config, completed
from agentgym_rl.run import preflight
from agentgym_rl.run.console import Console
from agentgym_rl.run.context import RunContext
from agentgym_rl.run.environments_pool import EnvironmentsPool
from agentgym_rl.run.items import all_items
from agentgym_rl.run.launch import launch
from agentgym_rl.run.load_model import choose_device
from agentgym_rl.run.log import RunLog
from agentgym_rl.run.stopping import (
    Stop,
    disk_space_or_error,
    remove_failed_start,
    stop_before_run_directory,
    stop_before_training,
)
from agentgym_rl.types import EnvPool

_OPTIMIZERS = ("rl", "rl.critic", "sft", "warm_start.sft", "dpo", "reward_model")
_MEMORY = ("micro_batch_tokens", "checkpoint_activations", "offload_activations", "offload_moments", "capture_passes")
MAY_CHANGE_ON_RESUME = (
    *(f"{section}.optimizer.{name}" for section in _OPTIMIZERS for name in _MEMORY),
    "rl.steps",
    "rl.token_budget",
    "dpo.rounds",
    "agentevol.rounds",
    "dagger.rounds",
    "eval",
    "checkpoint",
    "threads",
    "trackers",
    "agent.concurrency",
    "agent.open_ahead",
    "agent.opening",
    "agent.program_start",
    "agent.proxy_host",
    "agent.proxy_port",
    "run_dir",
    "judge.max_calls",
    "judge.max_total_tokens",
    "judge.timeout_s",
    "judge.retries",
    "judge.concurrency",
    "judge.url",
    "scale",
    "engine",
)


async def train(
    config: Config,
    folder: Path,
    *,
    resume: bool = False,
    console: Console | None = None,
    pool: EnvPool | None = None,
) -> dict[str, Any]:
    """Run the whole recipe in `folder` and return its summary.

    A `pool` handed in is played instead of the recipe's own environments and is left open: their names, splits and
    subsets must be in it, and it reads actions in the format of the recipe's style.
    """
    started, stop, console = time.monotonic(), Stop(), console or Console()
    if config.threads:
        torch.set_num_threads(config.threads)
    with stop.listening(), stop.ending_with(lambda: stop_before_run_directory(console, stop.by)):
        playing = pool or EnvironmentsPool(config.environments, config.agent)
        try:
            # Before the run directory is made: a recipe that cannot run leaves nothing behind.
            preflight.require_recipe(config, environments=pool is None)
            choose_device(config.model)
            preflight.require_engine(config.model, config.engine, config.scale)
            if config.scale is not None:
                from agentgym_rl.run.backend_ray import plan_of

                plan_of(config)
            items = await all_items(playing, config.environments)
            if pool is None:
                await preflight.require_served_team(config.team, config.environments)
            with (
                disk_space_or_error(folder),
                remove_failed_start(folder),
                RunLog.create(
                    folder,
                    config.resolved(),
                    resume=resume,
                    may_change=MAY_CHANGE_ON_RESUME,
                    completed=completed,
                    trackers=config.trackers,
                    say=console.warn,
                ) as log,
                disk_space_or_error(folder),  # so that status.json has that line too
            ):
                context = RunContext(
                    config=config, pool=playing, items=items, log=log, console=console, stop=stop, started=started
                )
                stop.before_exit = lambda: log.set_status("stopped", error="ended at once by Ctrl-C")
                with stop.ending_with(lambda: stop_before_training(context)):
                    run, saved = await launch(context)
                    return await run.run(saved)
        finally:
            if pool is None:
                await playing.close()
