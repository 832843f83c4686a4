"""From a recipe to a run: the model of its last checkpoint or the one it starts from, and the backend that holds it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from agentgym_rl.errors import ConfigError
from agentgym_rl.run.backend import Backend, LocalBackend
from agentgym_rl.run.context import RunContext
from agentgym_rl.run.demonstrations import load_demonstrations
from agentgym_rl.run.load_model import load_from
from agentgym_rl.run.local_engine import START_ENGINE
from agentgym_rl.run.offline import OfflineRun
from agentgym_rl.run.rl import RLRun
from agentgym_rl.run.rounds import RETRAINED
from agentgym_rl.run.run import Run
from agentgym_rl.run.start import prepare, starting_model
from agentgym_rl.training.checkpoint import export, list_checkpoints, load_state, missing_from, restore_interrupted
from agentgym_rl.types import Message


async def launch(context: RunContext) -> tuple[Run, dict[str, Any] | None]:
    """Return the run and the state of the checkpoint it resumes from, or None for a new run."""
    config, demonstrations = context.config, None
    if config.online:
        context.log.set_status("running", steps=config.rl.steps)
    checkpoint, saved = resume_point(context) or (None, None)
    if checkpoint is None and config.model.scratch is not None and config.warm_start is None:
        # The vocabulary of a new tokenizer comes from the data.
        context.console.stage("Data")
        demonstrations = await load_demonstrations(context)
    conversations = [demonstration.messages for demonstration in demonstrations or ()]
    backend = await start_backend(context, None if checkpoint is None else checkpoint / "model", conversations)
    if config.online:
        return RLRun(context, backend), saved
    return OfflineRun(context, backend, demonstrations), saved


def resume_point(context: RunContext) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest complete checkpoint of a resumed run and its state, or None if there is no checkpoint.

    Newer checkpoints that are incomplete are renamed, so that they no longer count, and a line says so.
    """
    log, root = context.log, context.log.checkpoints_dir
    restore_interrupted(root)
    incomplete: dict[Path, str] = {}
    for folder in reversed(list_checkpoints(root) if log.resumed else []):
        problem = missing_from(folder)
        if problem:
            incomplete[folder] = problem
            continue
        saved = load_state(folder)
        for broken, reason in incomplete.items():
            kept_as = f"broken_{broken.name}"
            shutil.rmtree(root / kept_as, ignore_errors=True)
            broken.rename(root / kept_as)
            message = f"{broken.name} is not complete ({reason}) and is kept as {kept_as}: using {folder.name}"
            context.warn("checkpoint_incomplete", message, step=saved["step"])
        context.console.stage("Resuming", f"after step {saved['step']}")
        return folder, saved
    if incomplete:
        listed = "; ".join(f"{folder.name}: {reason}" for folder, reason in incomplete.items())
        raise ConfigError(
            f"no checkpoint in {root} is complete ({listed}): restore one, or remove them to start from the beginning"
        )
    return None


async def start_backend(
    context: RunContext, folder: Path | None, conversations: Sequence[list[Message]] = ()
) -> Backend:
    """Start what plays and learns, with the model in `folder`, a checkpoint's, or the one that the recipe starts from.

    The starting model is kept in the run directory if the method needs it later: as the reference of RL's KL term, or
    as the model that every round of AgentEvol starts from.
    """
    config, root = context.config, context.log.root
    reference = root / "reference" if config.online else None
    start_dir = reference or root / "base"
    changed = config.model.path is None or config.warm_start is not None
    if folder is not None and reference is not None and not changed and not reference.is_dir():
        reference = Path(str(config.model.path))  # ranks keep a starting model only if it is not that of the path
    if config.scale is not None:
        return await _start_cluster(context, folder, reference, start_dir, conversations)
    if folder is None:
        model, tokenizer = await starting_model(context, conversations)
        if config.method in RETRAINED or (config.online and config.rl.kl_coef):
            export(model, tokenizer, start_dir)
    else:
        model, tokenizer = load_from(folder, config.model)
    async with AsyncExitStack() as stack:
        make_engine = await START_ENGINE[config.engine.kind](context, model, tokenizer, stack)
        backend = LocalBackend(config, context.pool, model, tokenizer, reference, make_engine, root / "league")
        stack.pop_all()
    return backend


async def _start_cluster(
    context: RunContext,
    folder: Path | None,
    reference: Path | None,
    start_dir: Path,
    conversations: Sequence[list[Message]],
) -> Backend:
    from agentgym_rl.run.backend_ray import RayBackend

    config, model = context.config, context.config.model
    if folder is not None:
        return await RayBackend.start(context, folder, reference)
    if model.path is not None and model.lora is None and config.warm_start is None and config.method not in RETRAINED:
        return await RayBackend.start(context, Path(model.path))
    start = await prepare(context, conversations)
    return await RayBackend.start(context, start_dir, start=start)
