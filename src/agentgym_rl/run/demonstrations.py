"""Demonstrations: conversations read from files, and episodes that an oracle or random play plays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, groupby, islice

from agentgym_rl.agent.renderer import Renderer, Tools
from agentgym_rl.agent.segments import num_repeated
from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.run.collectors import ProgramDemonstrations, demonstrators, limits_of, make_collector, make_stages
from agentgym_rl.run.console import Console
from agentgym_rl.run.context import RunContext
from agentgym_rl.run.heldout import sample_per_subset
from agentgym_rl.run.log import Kind
from agentgym_rl.run.mistakes import Solutions, inject_mistakes
from agentgym_rl.run.teams import demonstrating_cast
from agentgym_rl.training.conversations import (
    Conversation,
    find_files,
    is_trajectory_file,
    read_conversations,
    read_trajectory_files,
)
from agentgym_rl.training.dpo import Pair
from agentgym_rl.training.preferences import find_preferences, read_preferences
from agentgym_rl.training.rl import derive_seed
from agentgym_rl.types import Message, Sample, StopReason, Task, Trajectory

Demonstration = Trajectory | Conversation


async def load_demonstrations(context: RunContext) -> list[Demonstration]:
    """Return everything that `[data]` names: read from files, played, or both."""
    data = context.config.data
    assert data is not None
    demonstrations: list[Demonstration] = []
    paths = find_files(data.files)
    trajectories = load_trajectories(context)
    demonstrations += [t for t in trajectories if data.keep == "all" or t.success]
    for path in paths:
        if not is_trajectory_file(path):
            demonstrations += [c for c in read_conversations(path) if any(c.trained)]
    if paths:
        context.console.note(f"{len(demonstrations)} conversations from {len(paths)} files")
    if data.play is not None:
        demonstrations += await play_demonstrations(
            context,
            "data",
            data.play,
            episodes=data.episodes,
            max_turns=data.max_turns,
            mistakes=data.mistakes,
            wrong_thoughts=data.wrong_thoughts,
        )
    if not demonstrations:
        raise ConfigError("data: nothing to imitate was found: no success among the trajectories, no trained reply")
    return demonstrations


def load_trajectories(context: RunContext) -> list[Trajectory]:
    """Return the episodes of the trajectory files that `[data]` names, without those of held-out items."""
    data, held_out = context.config.data, _held_out(context)
    paths = [path for path in find_files(data.files if data else ()) if is_trajectory_file(path)]
    read = [t for t in read_trajectory_files(paths) if any(t.imitated)]
    kept = [t for t in read if (t.task.env, t.task.item) not in held_out]
    if len(kept) < len(read):
        context.console.warn(f"{len(read) - len(kept)} of {len(read)} episodes are of held-out items and left out")
    return kept


def load_preferences(context: RunContext, patterns: Sequence[str]) -> list[tuple[Trajectory, Trajectory]]:
    """Return the (better, worse) episodes that people chose, without those of held-out items."""
    held_out = _held_out(context)
    read = [(p.chosen, p.rejected) for p in read_preferences(find_preferences(patterns))]
    trained = [pair for pair in read if all(any(t.imitated) for t in pair)]
    kept = [pair for pair in trained if (pair[0].task.env, pair[0].task.item) not in held_out]
    if len(kept) < len(read):
        context.console.warn(
            f"{len(read) - len(kept)} of {len(read)} preferences are of held-out items or have no reply, and left out"
        )
    return kept


def _held_out(context: RunContext) -> set[tuple[str, int]]:
    return {
        (env, item) for env, subsets in context.items.held_out.items() for items in subsets.values() for item in items
    }


def to_samples(
    demonstrations: Sequence[Demonstration],
    renderer: Renderer,
    max_tokens: int,
    reason: str,
    console: Console,
    *,
    train_thoughts: bool = True,
) -> list[Sample]:
    """Return samples to imitate, without those longer than `max_tokens`, which no agent could play.

    A text with more characters than so many tokens can have is left out before it is tokenised. `reason` says what the
    number of tokens is.
    """
    max_chars = max_tokens * renderer.max_token_chars
    short = [d for d in demonstrations if _longest(d, whole=renderer.linear) <= max_chars]
    samples = [s for d in short for s in segment_samples(d, renderer, train_thoughts=train_thoughts)]
    return fitting_samples(samples, max_tokens, reason, console, not_tokenised=len(demonstrations) - len(short))


def fitting_samples(
    samples: Sequence[Sample], max_tokens: int, reason: str, console: Console, *, not_tokenised: int = 0
) -> list[Sample]:
    """Return the samples of at most `max_tokens`. Warn how many are longer, with texts that were `not_tokenised`."""
    kept = [sample for sample in samples if len(sample.token_ids) <= max_tokens]
    total = len(samples) + not_tokenised
    if len(kept) < total:
        console.warn(
            f"{total - len(kept)} of {total} conversations are longer than {reason} = {max_tokens} tokens and left out"
        )
    return kept


def longest_sample(max_context: int, positions: int | None) -> tuple[int, str]:
    """Return the most tokens of a sample, and what sets the limit: the recipe, or the `positions` of the model."""
    if positions is not None and positions < max_context:
        return positions, "the model's context"
    return max_context, "agent.max_context"


def _longest(demonstration: Demonstration, *, whole: bool) -> int:
    """Return the characters of the conversation, or of its longest message if its segments do not hold all of it."""
    lengths = [len(message.content) for message in demonstration.messages]
    return sum(lengths) if whole else max(lengths)


def segment_samples(demonstration: Demonstration, renderer: Renderer, *, train_thoughts: bool = True) -> list[Sample]:
    """Return a sample per segment: ids as sampled if this tokenizer sampled them, else as the template renders them.

    Without `train_thoughts` the loss skips the thought of every reply.
    """
    if isinstance(demonstration, Conversation):
        samples = renderer.demonstrations(
            demonstration.messages, demonstration.trained, demonstration.tools, train_thoughts=train_thoughts
        )
        name = demonstration.item_id
    elif _sampled_with(renderer, demonstration):
        demonstration = _with_untrained_tokens(demonstration, renderer, train_thoughts)
        spans = _untrained_spans(demonstration, renderer)
        return [
            Sample(segment.token_ids, segment.loss_mask, trajectory_id=demonstration.id, left_out=left_out)
            for segment, left_out in zip(demonstration.segments, spans, strict=True)
            if any(segment.loss_mask)
        ]
    else:
        rows = zip(demonstration.messages, demonstration.imitated, demonstration.unimitated_chars, strict=True)
        messages, imitated, skipped = zip(*(row for row in rows if not row[0].purpose), strict=True)
        samples = renderer.demonstrations(
            list(messages), list(imitated), demonstration.tools, skipped, train_thoughts=train_thoughts
        )
        name = demonstration.id
    for sample in samples:
        sample.trajectory_id = name
    return [sample for sample in samples if any(sample.loss_mask)]


def _with_untrained_tokens(trajectory: Trajectory, renderer: Renderer, train_thoughts: bool) -> Trajectory:
    """Return an episode whose replies are trained on from their first imitated token."""

    def untrained(message: Message, imitated: bool, skipped_chars: int) -> int:
        if message.is_reply and not imitated:
            return len(message.token_ids)
        skipped = renderer.num_tokens(message.token_ids, message.content[:skipped_chars]) if skipped_chars else 0
        thought = message.untrained if train_thoughts else renderer.thought_length(message.token_ids)
        return max(skipped, thought)

    rows = zip(trajectory.messages, trajectory.imitated, trajectory.unimitated_chars, strict=True)
    messages = [row[0] if row[0].logprobs is None else replace(row[0], untrained=untrained(*row)) for row in rows]
    return replace(trajectory, messages=messages)


def repeated_tokens(trajectory: Trajectory, renderer: Renderer) -> list[int]:
    """Return how many tokens at the start of each segment repeat the conversation before its first observation."""
    counts: list[int] = []
    observation: list[Message] = []
    for message in trajectory.messages:
        observation.append(message)
        if message.segment == len(counts):
            count = message.prefix[1] if message.prefix else 0
            new_ids = renderer.observation_ids(observation) if counts else message.token_ids
            counts.append(count + num_repeated(message.token_ids, new_ids))
        if message.role == "assistant":
            observation = []
    return counts


def _untrained_spans(trajectory: Trajectory, renderer: Renderer) -> list[list[tuple[int, int]]]:
    """Return (start, length) of the tokens without a loss in each segment: repeated ones, and skipped sampled ones."""
    repeated = repeated_tokens(trajectory, renderer)
    spans: list[list[tuple[int, int]]] = []
    lengths: list[int] = []
    for message in trajectory.messages:
        if message.segment == len(lengths):
            count = repeated[len(spans)]
            spans.append([(0, count)] if count else [])
            lengths.append(message.prefix[1] if message.prefix else 0)
        if message.untrained:
            spans[message.segment].append((lengths[message.segment], message.untrained))
        lengths[message.segment] += len(message.token_ids)
    return spans


def to_sample(demonstration: Demonstration, renderer: Renderer, *, train_thoughts: bool = True) -> Sample | None:
    """Return the only sample of a demonstration, or None if no token of it is trained on."""
    samples = segment_samples(demonstration, renderer, train_thoughts=train_thoughts)
    if not samples:
        return None
    if len(samples) != 1:
        raise ConfigError(
            f"preferences need episodes of one segment, got one of {len(samples)}: set agent.context = 'full' and "
            "agent.thoughts = 'keep'"
        )
    return samples[0]


def to_transcript(trajectory: Trajectory, renderer: Renderer) -> Sample:
    """Return the sample that a reward model scores: the whole episode including the last observation.

    It has no generation prompt. If the last reply was cut off, there is no observation after it and the sample ends
    with the reply. Sampled ids are not used: the texts are tokenized again, so that episodes of any policy are read in
    the same way.
    """
    messages = [message for message in trajectory.messages if not message.purpose]
    ids = renderer.transcript(messages, trajectory.tools)
    return Sample(ids, [False] * len(ids), trajectory_id=trajectory.id)


def fitting_pairs(
    pairs: Sequence[Pair],
    make_sample: Callable[[Trajectory], Sample | None],
    max_tokens: int,
    reason: str,
    console: Console,
) -> tuple[list[Pair], dict[int, Sample]]:
    """Return (pairs, the samples of their episodes by `id`) without pairs of an episode longer than `max_tokens`.

    Pairs of an episode without a sample are left out, too. `reason` says what the number of tokens is.
    """
    episodes = {id(trajectory): trajectory for pair in pairs for trajectory in pair}
    made = {key: make_sample(trajectory) for key, trajectory in episodes.items()}
    samples = {key: sample for key, sample in made.items() if sample is not None}
    trained = [pair for pair in pairs if all(id(trajectory) in samples for trajectory in pair)]
    if len(trained) < len(pairs):
        console.warn(
            f"{len(pairs) - len(trained)} of {len(pairs)} pairs have an episode without a token to train on, such as "
            "one unfinished thought with agent.train_thoughts = false, and are left out"
        )
    fitting = {key: sample for key, sample in samples.items() if len(sample.token_ids) <= max_tokens}
    kept = [pair for pair in trained if all(id(trajectory) in fitting for trajectory in pair)]
    if len(kept) < len(trained):
        console.warn(
            f"{len(trained) - len(kept)} of {len(pairs)} pairs have an episode longer than {reason} = {max_tokens} "
            "tokens and are left out"
        )
    return kept, fitting


def _sampled_with(renderer: Renderer, trajectory: Trajectory) -> bool:
    """Return whether the ids that the episode holds are those of this renderer's tokenizer."""
    messages = trajectory.messages
    replies = [i for i, m in enumerate(messages) if m.role == "assistant"]
    if any(messages[i].logprobs is None or not messages[i].token_ids for i in replies):
        return False
    before = [token for m in messages[: replies[0]] for token in m.token_ids]
    return (
        before == renderer.prompt(messages[: replies[0]], trajectory.tools)
        and all(_text_of(renderer, messages[i].token_ids, trajectory.tools) == messages[i].text for i in replies)
        and _has_observations_of(renderer, messages[replies[0] :])
    )


def _has_observations_of(renderer: Renderer, messages: Sequence[Message]) -> bool:
    """Return whether the observations have the ids of this renderer. Small vocabularies may agree on replies only.

    Segments that start anew, and templates that rewrite earlier turns, hold other ids than those of the observations.
    """
    if not renderer.linear or any(m.segment or m.purpose for m in messages):
        return True
    for is_reply, block in groupby(messages, lambda message: message.role == "assistant"):
        observations = list(block)
        ids = [token for message in observations for token in message.token_ids]
        if is_reply or not ids:  # an observation that nobody answers has none
            continue
        expected = renderer.observation_ids(observations)
        if ids not in (expected, [renderer.end_of_turn, *expected]):  # a stop string leaves the end of the turn out
            return False
    return True


def _text_of(renderer: Renderer, token_ids: list[int], tools: Tools) -> str:
    content, calls = renderer.read_reply(token_ids, tools)
    return Message("assistant", content, tool_calls=calls).text


async def play_demonstrations(
    context: RunContext,
    kind: Kind,
    policy: str,
    *,
    episodes: int,
    max_turns: int,
    mistakes: float,
    wrong_thoughts: float = 0.0,
    program: ProgramDemonstrations | None = None,
) -> list[Trajectory]:
    """Play training items; return the oracle's successes, or all episodes of random play that did not fail.

    The oracle plays an item once. Random play repeats items until there are enough episodes. With `mistakes` or
    `wrong_thoughts` the oracle first plays every item without any, to learn which actions and thoughts it has at other
    times; those episodes are not kept. With a `program` the policy plays through it.
    """
    config, console = context.config, context.console
    share = -(-episodes // len(config.environments))
    played: list[Trajectory] = []
    errs = bool(mistakes or wrong_thoughts)
    roles = 1 if config.team is None else len(config.team.roles)
    total = share * len(config.environments) * roles * (2 if errs else 1)
    with console.progress(f"{policy} play", total) as advance:
        collector = partial(
            make_collector,
            config.agent,
            context.pool,
            program or demonstrators(policy),
            1,
            f"{kind}-",
            make_stages(config.agent, config.environments),
            on_trajectory=lambda trajectory: advance(int(trajectory.stop is not StopReason.ERROR)),
            cast=demonstrating_cast(config.team, policy),
        )
        for env in config.environments:
            limits = limits_of(config.agent, max_turns, env=env)
            chosen = sample_per_subset(context.items.train[env.name], share, f"{config.seed}/{kind}")
            tasks = [Task(env.name, item) for subset in chosen.values() for item in subset]
            if policy == "random":  # the oracle would do the same again
                tasks = list(islice(cycle(tasks), max(share, len(tasks))))
            seed = derive_seed(config.seed, kind, env.name)
            collect = collector()
            if errs:
                solutions: Solutions = {}
                await collector(inner=inject_mistakes(0.0, seed, solutions))(tasks, limits, seed)
                collect = collector(inner=inject_mistakes(mistakes, seed, solutions, wrong_thoughts))
            groups = await collect(tasks, limits, seed)
            played += [t for g in groups for t in g.trajectories]
    for trajectory in played:
        context.log.write_trajectory(0, trajectory, kind)
    usable = [t for t in played if t.stop is not StopReason.ERROR]
    label = "warm start" if kind == "warmstart" else kind
    if not usable:
        raise EnvError(f"{label}: all {len(played)} episodes failed; the first: {played[0].error}")
    failed = [t for t in played if t.stop is StopReason.ERROR]
    if failed:
        context.warn(
            "episodes_failed",
            f"{label}: {len(failed)} of {len(played)} episodes failed and are not used; the first, of "
            f"{failed[0].task.env}: {failed[0].error}",
            step=0,
        )
    if policy != "oracle":
        return usable
    if mistakes:
        console.note(_mistakes_line(played))
    if wrong_thoughts:
        console.note(_wrong_thoughts_line(played, label))
    successes = [t for t in usable if t.success and any(t.imitated)]
    if not successes:
        advice = "allow more turns" + (", or fewer mistakes" if mistakes else "")
        raise EnvError(f"{label}: of {len(played)} episodes the oracle won none in {max_turns} turns: {advice}")
    return successes


def _wrong_thoughts_line(played: list[Trajectory], label: str) -> str:
    turns = [info for trajectory in played for info in trajectory.infos]
    wrong = sum("wrong_thought" in info for info in turns)
    if not wrong:
        raise ConfigError(
            f"{label}: wrong_thoughts needs an oracle that gives different thoughts, and none of {len(turns)} turns "
            "had another thought to start with: leave wrong_thoughts out"
        )
    return f"{wrong} of {len(turns)} turns start with a wrong thought"


def _mistakes_line(played: list[Trajectory]) -> str:
    turns = [info for trajectory in played for info in trajectory.infos]
    wrong = sum(info.get("mistake", False) for info in turns)
    refused = sum(info.get("mistake", False) and info.get("valid") is False for info in turns)
    return (
        f"{wrong} of {len(turns)} turns were mistakes, {refused} of them refused; "
        f"{sum(t.success for t in played)} of {len(played)} episodes succeeded all the same"
    )
