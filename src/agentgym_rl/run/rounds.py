"""Rounds of an offline run: how each gets its data, and how the data is kept in the run directory.

    <root>/rounds/round_001.jsonl    a first line about the round, then one line per sample or pair

Token ids are written as they are trained on. `trained` lists the spans `[start, length]` that the loss is taken on,
`left_out`, if present, the replies that are not imitated. The file appears when it is complete, so a run that was
killed reads it instead of playing the round again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson

from agentgym_rl.agent.renderer import Renderer
from agentgym_rl.agent.styles import STYLES
from agentgym_rl.common.files import write_atomically
from agentgym_rl.environment.formats import NO_ACTION, action_format
from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.run.backend import Backend
from agentgym_rl.run.collectors import limits_of
from agentgym_rl.run.context import RunContext
from agentgym_rl.run.demonstrations import (
    Demonstration,
    fitting_pairs,
    fitting_samples,
    load_demonstrations,
    load_preferences,
    load_trajectories,
    longest_sample,
    repeated_tokens,
    segment_samples,
    to_sample,
    to_samples,
    to_transcript,
)
from agentgym_rl.run.mistakes import corrected
from agentgym_rl.training.agentevol import select_episodes
from agentgym_rl.training.dagger import agreement, labelled
from agentgym_rl.training.dpo import Pair, Preference, build_pairs
from agentgym_rl.training.metrics import episode_metrics
from agentgym_rl.training.offline_settings import RewardModelSettings
from agentgym_rl.training.reward_model import split_pairs
from agentgym_rl.training.rl import derive_seed
from agentgym_rl.types import Group, Sample

RETRAINED = ("agentevol", "dagger")
"""Methods whose every round starts from the base model, which the run directory keeps."""


@dataclass(slots=True)
class Round:
    """One round of data and the updates on it."""

    number: int
    """From 1."""
    first_step: int
    """Step of its first update."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the episodes played for it; logged with its first step."""
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    """Samples to imitate, by source: `expert`, `explored` or `labelled`."""
    pairs: list[Preference] = field(default_factory=list)
    held_out: list[Preference] = field(default_factory=list)
    """Pairs that a reward model is not trained on."""


def round_path(root: Path, number: int) -> Path:
    return root / "rounds" / f"round_{number:03d}.jsonl"


def write_round(root: Path, current: Round) -> None:
    lines: list[dict[str, Any]] = [
        {"round": current.number, "first_step": current.first_step, "metrics": current.metrics}
    ]
    lines += [{"source": source, **_to_row(s)} for source, samples in current.samples.items() for s in samples]
    lines += [_pair_row(pair) for pair in current.pairs]
    lines += [_pair_row(pair) | {"held_out": True} for pair in current.held_out]
    path = round_path(root, current.number)
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, b"".join(orjson.dumps(line) + b"\n" for line in lines))


def read_round(root: Path, number: int) -> Round:
    head, *rows = [orjson.loads(line) for line in round_path(root, number).read_bytes().splitlines()]
    current = Round(head["round"], head["first_step"], head["metrics"])
    for row in rows:
        if "source" in row:
            current.samples.setdefault(row["source"], []).append(_from_row(row))
        else:
            chosen, rejected = row["chosen"], row["rejected"]
            references = (chosen["reference"], rejected["reference"])
            pairs = current.held_out if row.get("held_out") else current.pairs
            pairs.append(Preference(_from_row(chosen), _from_row(rejected), *references))
    return current


def _pair_row(pair: Preference) -> dict[str, Any]:
    return {
        "chosen": _to_row(pair.chosen) | {"reference": pair.chosen_reference},
        "rejected": _to_row(pair.rejected) | {"reference": pair.rejected_reference},
    }


def _to_row(sample: Sample) -> dict[str, Any]:
    spans, position = [], 0
    for trained, run in groupby(sample.loss_mask):
        length = len(list(run))
        if trained:
            spans.append([position, length])
        position += length
    row = {"id": sample.trajectory_id, "token_ids": sample.token_ids, "trained": spans}
    return row | ({"left_out": sample.left_out} if sample.left_out else {})


def _from_row(row: dict[str, Any]) -> Sample:
    mask = [False] * len(row["token_ids"])
    for start, length in row["trained"]:
        mask[start : start + length] = [True] * length
    left_out = [(start, length) for start, length in row.get("left_out", ())]
    return Sample(row["token_ids"], mask, trajectory_id=row["id"], left_out=left_out)


def correct_thought(renderer: Renderer, reply: str, advice: str) -> tuple[list[int], int] | None:
    """Return the ids of a reply that corrects its own thought, and how many of them are the wrong part."""
    text = corrected(reply, advice)
    if text is None:
        return None
    ids = renderer.reply_ids(text[0])
    return ids, renderer.num_tokens(ids, text[0][: text[1]])


class RoundMaker:
    """Makes the rounds of a run with the current model: reads data, plays episodes, builds pairs."""

    def __init__(
        self, context: RunContext, backend: Backend, demonstrations: Sequence[Demonstration] | None = None
    ) -> None:
        """`demonstrations`: the recipe's `[data]`, if it has been read already."""
        self.context, self.backend, self._demonstrations = context, backend, demonstrations
        self.config, self.log, self.console = context.config, context.log, context.console
        self.max_tokens, self.reason = longest_sample(self.config.longest_context(), backend.max_context)
        """Most tokens of a sample, and the name of this limit."""

    @property
    def count(self) -> int:
        """Number of rounds of the run."""
        config = self.config
        if settings := config.agentevol or config.dagger:
            return settings.rounds + (config.data is not None)  # the first one clones the expert
        return config.dpo.rounds if config.dpo is not None else 1

    async def make(self, number: int, first_step: int) -> Round:
        """Return round `number`, whose first update is step `first_step`."""
        method = {
            "sft": self._imitation,
            "dpo": self._preferences,
            "agentevol": self._evolution,
            "dagger": self._corrections,
            "reward_model": self._preferences,
        }
        return await method[self.config.method](Round(number, first_step))

    async def _imitation(self, current: Round) -> Round:
        current.samples["expert"] = await self._expert()
        return current

    async def _evolution(self, current: Round) -> Round:
        settings = self.config.agentevol
        assert settings is not None
        if current.number == 1 and self.config.data is not None:
            self.console.stage("Round 1", "imitates the expert's data")
            return await self._imitation(current)
        self.console.stage(f"Round {current.number} of {self.count}", f"explores {settings.tasks} items")
        groups = await self._play(current, settings.tasks, settings.group_size, settings.max_turns)
        kept = select_episodes(groups, settings, f"{self.config.seed}/round{current.number}")
        earlier = read_round(self.log.root, current.number - 1).samples if current.number > 1 else {}
        renderer, train_thoughts = self.backend.renderer, self.config.agent.train_thoughts
        explored = [s for t in kept for s in segment_samples(t, renderer, train_thoughts=train_thoughts)]
        if settings.history == "all":
            explored = [*earlier.get("explored", []), *explored]
        current.samples = {"expert": earlier.get("expert", []), "explored": explored}
        current.metrics |= {"round/kept": float(len(kept)), "round/expert": float(len(current.samples["expert"]))}
        if not any(current.samples.values()):
            raise ConfigError(
                f"round {current.number}: no episode of {settings.tasks} items reached a reward of "
                f"{settings.min_reward:g} and there is no expert data: play more items (agentevol.tasks), lower "
                "agentevol.min_reward or give [data]"
            )
        self.console.note(f"kept {len(kept)} episodes; {current.metrics['round/expert']:g} of the expert's")
        return current

    async def _corrections(self, current: Round) -> Round:
        config, settings = self.config, self.config.dagger
        assert settings is not None
        cloned = config.data is not None
        if current.number == 1 and cloned:
            self.console.stage("Round 1", "imitates the expert's data")
            return await self._imitation(current)
        share = settings.share(current.number - cloned)
        self.console.stage(
            f"Round {current.number} of {self.count}",
            f"plays {settings.tasks} items; the oracle advises, and plays {share:.0%} of the turns",
        )
        groups = await self._play(current, settings.tasks, settings.group_size, settings.max_turns, share)
        played = [t for group in groups for t in group.usable]
        parse_reply = action_format(STYLES[config.agent.style].action_format).parse
        renderer = self.backend.renderer
        corrections: list[tuple[list[int], int] | None] = []

        def parse(reply: str) -> str:
            action = parse_reply(reply)
            return "" if action == NO_ACTION else action

        def correct(reply: str, advice: str) -> tuple[list[int], int] | None:
            corrections.append(correct_thought(renderer, reply, advice))
            return corrections[-1]

        corrector = correct if settings.correct_thoughts else None
        skip = None if config.agent.train_thoughts else renderer.thought_length
        samples = [
            sample
            for t in played
            for sample in labelled(t, renderer.reply_ids, parse, corrector, skip, repeated_tokens(t, renderer))
        ]
        kept = fitting_samples(samples, self.max_tokens, self.reason, self.console)
        agreed = agreement((m for t in played for m in t.messages), parse)
        earlier = read_round(self.log.root, current.number - 1).samples if current.number > 1 else {}
        current.samples = {
            "expert": earlier.get("expert", []),
            "labelled": [*earlier.get("labelled", []), *kept],
        }
        current.metrics |= {
            "round/labelled": float(len(kept)),
            "round/agreement": agreed,
            "round/expert": float(len(current.samples["expert"])),
        }
        if not any(current.samples.values()):
            raise ConfigError(
                f"round {current.number}: the oracle advised no turn of {len(played)} episodes within {self.reason} = "
                f"{self.max_tokens} tokens: raise dagger.tasks, dagger.max_turns or agent.max_context, or choose a "
                "model that reads more"
            )
        self.console.note(f"the agent agreed with the oracle in {100 * agreed:.1f}% of its own turns")
        if settings.correct_thoughts:
            made = sum(correction is not None for correction in corrections)
            current.metrics["round/corrected"] = float(made)
            self.console.note(f"{made} of {len(corrections)} other replies had a thought to correct")
        return current

    async def _preferences(self, current: Round) -> Round:
        config, settings = self.config, self.config.dpo or self.config.reward_model
        assert settings is not None
        method = config.method
        self.console.stage(f"Round {current.number} of {self.count}", "builds pairs")
        groups = [Group(t.task, [t]) for t in load_trajectories(self.context)]
        if settings.sample_groups:
            groups += await self._play(current, settings.sample_groups, settings.group_size, settings.max_turns)
        judges = isinstance(settings, RewardModelSettings)
        pairs = build_pairs(groups, settings, f"{config.seed}/round{current.number}", spread_endings=judges)
        if current.number == 1 and settings.preferences:
            preferred = load_preferences(self.context, settings.preferences)
            current.metrics["round/preferred"] = float(len(preferred))
            self.console.note(f"{len(preferred)} pairs that people chose")
            pairs += preferred
        if not pairs:
            own_sizes = all(env.group_size for env in config.environments)
            group_size = "group_size of the environments" if own_sizes else f"{method}.group_size"
            raise ConfigError(
                f"round {current.number}: no two episodes of one item have rewards {settings.min_gap:g} apart: sample "
                f"more ({method}.sample_groups, {group_size}), lower {method}.min_gap, or start from a model "
                "that succeeds at times"
            )
        pairs, samples = self._fitting(pairs, current.number)
        items = len({better.task for better, _ in pairs})
        current.metrics |= {"round/pairs": float(len(pairs)), "round/items": float(items)}
        if isinstance(settings, RewardModelSettings):
            kept, held_out = split_pairs(pairs, settings.held_out, config.seed)
            self.console.note(f"{len(kept)} pairs to train on; {len(held_out)} of other items are held out")
            current.pairs, current.held_out = (
                [Preference(samples[id(a)], samples[id(b)], 0.0, 0.0) for a, b in side] for side in (kept, held_out)
            )
            return current
        self.console.note(f"{len(pairs)} pairs of {items} items; their reference log-probabilities are computed once")
        halves = [(samples[id(a)], samples[id(b)]) for a, b in pairs]
        current.pairs = self.backend.make_preferences(halves, settings.optimizer.micro_batch_tokens)
        return current

    def _fitting(self, pairs: list[Pair], number: int) -> tuple[list[Pair], dict[int, Sample]]:
        """Return the pairs whose episodes the model can read, and the samples of these by `id` of the episode."""
        renderer, train_thoughts = self.backend.renderer, self.config.agent.train_thoughts
        judges = self.config.reward_model is not None
        make_sample = to_transcript if judges else partial(to_sample, train_thoughts=train_thoughts)
        kept, samples = fitting_pairs(
            pairs, partial(make_sample, renderer=renderer), self.max_tokens, self.reason, self.console
        )
        if not kept:
            raise ConfigError(
                f"round {number}: each of {len(pairs)} pairs has an episode without a token to train on or longer than "
                f"{self.reason} = {self.max_tokens} tokens: raise agent.max_context, choose a model that reads "
                "more, or set agent.train_thoughts = true"
            )
        return kept, samples

    async def _expert(self) -> list[Sample]:
        demonstrations = self._demonstrations
        if demonstrations is None:
            demonstrations = await load_demonstrations(self.context)
        self._demonstrations = None
        samples = to_samples(
            demonstrations,
            self.backend.renderer,
            self.max_tokens,
            self.reason,
            self.console,
            train_thoughts=self.config.agent.train_thoughts,
        )
        if not samples:
            raise ConfigError(
                f"data: no conversation has a token to train on and at most {self.reason} = {self.max_tokens} tokens: "
                "raise agent.max_context, choose a model that reads more, or give shorter conversations"
            )
        return samples

    async def _play(
        self, current: Round, tasks: int, group_size: int, max_turns: int, oracle_share: float | None = None
    ) -> list[Group]:
        """Play groups of training items and write them as episodes of the round's first step."""
        config = self.config
        source = self.context.items.task_source(config.environments, config.seed)
        chosen = source.take(current.number * tasks)[-tasks:]
        prefix, seed = f"round{current.number}-", derive_seed(config.seed, "round", current.number)
        sizes = {env.name: env.group_size or group_size for env in config.environments}
        groups: list[Group] = []
        started = time.perf_counter()
        with self.console.progress("episodes", sum(sizes[task.env] for task in chosen)) as advance:
            for env in config.environments:
                tasks_of = [task for task in chosen if task.env == env.name]
                if not tasks_of:  # drawn by weight, an environment may have none
                    continue
                collect = self.backend.collector(
                    prefix, sizes[env.name], config.agent.temperature, lambda _: advance(), oracle_share
                )
                limits = limits_of(config.agent, max_turns, self.backend.max_context, env)
                groups += await collect(tasks_of, limits, derive_seed(seed, env.name))
        for group in groups:
            for trajectory in group.trajectories:
                self.log.write_trajectory(current.first_step, trajectory)
        current.metrics = episode_metrics(groups)
        if not current.metrics["episodes/usable"]:
            failures = [t.error for g in groups for t in g.trajectories]
            raise EnvError(f"round {current.number}: all {len(failures)} episodes failed; the first: {failures[0]}")
        current.metrics["time/rollout_s"] = time.perf_counter() - started
        usable, success = current.metrics["episodes/usable"], current.metrics["success/mean"]
        self.console.note(f"{100 * success:.1f}% of {usable:g} episodes were a success")
        return groups
