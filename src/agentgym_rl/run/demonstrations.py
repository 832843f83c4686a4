"""What `[data]` of a recipe names: read from files or played, as conversations and as samples."""

from __future__ import annotations

from collections.abc import Sequence

from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.config import Config
from agentgym_rl.errors import ConfigError
from agentgym_rl.run import build
from agentgym_rl.run.console import Console
from agentgym_rl.run.log import RunLog
from agentgym_rl.run.start import play_demonstrations
from agentgym_rl.training.conversations import (
    Conversation,
    find_files,
    is_trajectory_file,
    read_conversations,
    read_trajectory_files,
)
from agentgym_rl.types import EnvPool, Sample, Trajectory

Demonstration = Trajectory | Conversation


async def load_demonstrations(
    config: Config, pool: EnvPool, items: build.Items, log: RunLog, console: Console
) -> list[Demonstration]:
    """Everything `[data]` names, to imitate."""
    data = config.data
    assert data is not None
    found: list[Demonstration] = []
    paths = find_files(data.files)
    trajectories = load_trajectories(config, items, console)
    found += [t for t in trajectories if data.keep == "all" or t.success]
    for path in paths:
        if not is_trajectory_file(path):
            found += [c for c in read_conversations(path) if any(c.trained)]
    if paths:
        console.note(f"{len(found)} conversations from {len(paths)} files")
    if data.play is not None:
        found += await play_demonstrations(
            config, pool, items, log, console, data.play, data.episodes, data.max_turns, data.mistakes, "data"
        )
    if not found:
        raise ConfigError("data: nothing to imitate was found: no success among the trajectories, no trained reply")
    return found


def load_trajectories(config: Config, items: build.Items, console: Console) -> list[Trajectory]:
    """Episodes of the trajectory files that `[data]` names, less those of held-out items."""
    held_out = {(env, item) for env, subsets in items.held_out.items() for some in subsets.values() for item in some}
    paths = [path for path in find_files(config.data.files if config.data else ()) if is_trajectory_file(path)]
    read = [t for t in read_trajectory_files(paths) if any(t.imitated)]
    kept = [t for t in read if (t.task.env, t.task.item) not in held_out]
    if len(kept) < len(read):
        console.warn(f"{len(read) - len(kept)} of {len(read)} episodes are of held-out items and left out")
    return kept


def to_samples(found: Sequence[Demonstration], renderer: Renderer, max_context: int, console: Console) -> list[Sample]:
    """Samples to imitate; what is longer than `max_context` tokens could never have been played and is left out."""
    samples = [to_sample(one, renderer) for one in found]
    kept = [s for s in samples if len(s.token_ids) <= max_context]
    if len(kept) < len(samples):
        console.warn(
            f"{len(samples) - len(kept)} of {len(samples)} conversations are longer than "
            f"agent.max_context = {max_context} tokens and left out"
        )
    return kept


def to_sample(one: Demonstration, renderer: Renderer) -> Sample:
    """The ids of an episode as they were sampled, where this tokenizer sampled them; else as the template writes it."""
    if isinstance(one, Conversation):
        sample = renderer.demonstration(one.messages, one.trained)
        sample.trajectory_id = one.item_id
        return sample
    if _sampled_with(renderer, one):
        return Sample(one.token_ids, one.loss_mask, trajectory_id=one.id)
    sample = renderer.demonstration(one.messages, one.imitated)
    sample.trajectory_id = one.id
    return sample


def _sampled_with(renderer: Renderer, trajectory: Trajectory) -> bool:
    """True when the ids the episode holds are those this renderer deals in."""
    messages = trajectory.messages
    replies = [i for i, m in enumerate(messages) if m.role == "assistant"]
    if any(messages[i].logprobs is None or not messages[i].token_ids for i in replies):
        return False
    before = [token for m in messages[: replies[0]] for token in m.token_ids]
    return before == renderer.prompt(messages[: replies[0]]) and all(
        renderer.decode(messages[i].token_ids) == messages[i].content for i in replies
    )
