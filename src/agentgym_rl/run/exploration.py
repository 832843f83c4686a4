"""How a round of an offline run comes by what it learns from: data read, episodes played, pairs built."""

from __future__ import annotations

import time
from dataclasses import dataclass

from agentgym_rl.config import Config
from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.run import build
from agentgym_rl.run.backend import Workers
from agentgym_rl.run.console import Console
from agentgym_rl.run.demonstrations import Demonstration, load_demonstrations, load_trajectories, to_sample, to_samples
from agentgym_rl.run.log import RunLog
from agentgym_rl.run.rounds import Round, read_round
from agentgym_rl.training.agentevol import keep
from agentgym_rl.training.dpo import build_pairs
from agentgym_rl.training.metrics import episode_metrics
from agentgym_rl.training.rl import derive_seed
from agentgym_rl.training.tasks import TaskSource
from agentgym_rl.types import EnvPool, Group, Sample


@dataclass(slots=True)
class Explorer:
    """Makes the rounds of a run with the model as it stands."""

    config: Config
    pool: EnvPool
    items: build.Items
    log: RunLog
    console: Console
    workers: Workers
    loaded: list[Demonstration] | None = None
    """`[data]`, where it had to be read before there was a model."""

    @property
    def num_rounds(self) -> int:
        config = self.config
        if config.agentevol is not None:
            return config.agentevol.rounds + (config.data is not None)  # the first one clones the expert
        return config.dpo.rounds if config.dpo is not None else 1

    async def make(self, number: int, first_step: int) -> Round:
        method = {"sft": self._imitation, "dpo": self._preferences, "agentevol": self._evolution}
        return await method[self.config.method](Round(number, first_step))

    async def _imitation(self, made: Round) -> Round:
        made.samples["expert"] = await self._expert()
        return made

    async def _evolution(self, made: Round) -> Round:
        settings = self.config.agentevol
        assert settings is not None
        if made.number == 1 and self.config.data is not None:
            self.console.stage("Round 1", "imitates the expert's data")
            return await self._imitation(made)
        self.console.stage(f"Round {made.number} of {self.num_rounds}", f"explores {settings.tasks} items")
        groups = await self._play(made, settings.tasks, settings.group_size, settings.max_turns)
        kept = keep(groups, settings, f"{self.config.seed}/round{made.number}")
        earlier = read_round(self.log.root, made.number - 1).samples if made.number > 1 else {}
        explored = [to_sample(t, self.workers.renderer) for t in kept]
        if settings.history == "all":
            explored = [*earlier.get("explored", []), *explored]
        made.samples = {"expert": earlier.get("expert", []), "explored": explored}
        made.metrics |= {"round/kept": float(len(kept)), "round/expert": float(len(made.samples["expert"]))}
        if not any(made.samples.values()):
            raise ConfigError(
                f"round {made.number}: no episode of {settings.tasks} items reached a reward of "
                f"{settings.min_reward:g} and there is no expert data: play more items (agentevol.tasks), lower "
                "agentevol.min_reward or give [data]"
            )
        self.console.note(f"kept {len(kept)} episodes; {made.metrics['round/expert']:g} of the expert's")
        return made

    async def _preferences(self, made: Round) -> Round:
        config, settings = self.config, self.config.dpo
        assert settings is not None
        self.console.stage(f"Round {made.number} of {settings.rounds}", "builds pairs")
        groups = [Group(t.task, [t]) for t in load_trajectories(config, self.items, self.console)]
        if settings.sample_groups:
            groups += await self._play(made, settings.sample_groups, settings.group_size, settings.max_turns)
        pairs = build_pairs(groups, settings, f"{config.seed}/round{made.number}")
        if not pairs:
            raise ConfigError(
                f"round {made.number}: no two episodes of one item have rewards {settings.min_gap:g} apart: sample "
                "more (dpo.sample_groups, dpo.group_size), lower dpo.min_gap, or start from a model that succeeds "
                "at times"
            )
        items = len({better.task for better, _ in pairs})
        made.metrics |= {"round/pairs": float(len(pairs)), "round/items": float(items)}
        self.console.note(f"{len(pairs)} pairs of {items} items; their reference log-probabilities are computed once")
        renderer = self.workers.renderer
        halves = [(to_sample(a, renderer), to_sample(b, renderer)) for a, b in pairs]
        made.pairs = self.workers.prefer(halves, settings.optimizer.micro_batch_tokens)
        return made

    async def _expert(self) -> list[Sample]:
        config = self.config
        found = self.loaded
        if found is None:
            found = await load_demonstrations(config, self.pool, self.items, self.log, self.console)
        self.loaded = None
        samples = to_samples(found, self.workers.renderer, build.longest_context(config), self.console)
        if not samples:
            raise ConfigError("data: every conversation is longer than agent.max_context: raise it")
        return samples

    async def _play(self, made: Round, tasks: int, group_size: int, max_turns: int) -> list[Group]:
        """Groups of training items, written down as episodes of the round's first step."""
        config = self.config
        source = TaskSource(
            {env: [i for some in subsets.values() for i in some] for env, subsets in self.items.train.items()},
            config.seed,
            {env.name: env.weight for env in config.environments},
        )
        chosen = source.take(made.number * tasks)[-tasks:]
        prefix, seed = f"round{made.number}-", derive_seed(config.seed, "round", made.number)
        sizes = {env.name: env.group_size or group_size for env in config.environments}
        groups: list[Group] = []
        started = time.perf_counter()
        with self.console.progress("episodes", sum(sizes[task.env] for task in chosen)) as advance:
            for env in config.environments:
                tasks_of = [task for task in chosen if task.env == env.name]
                if not tasks_of:  # drawn by weight, an environment may have none
                    continue
                collect = self.workers.collector(prefix, sizes[env.name], config.agent.temperature, lambda _: advance())
                limits = build.limits_of(config.agent, max_turns, self.workers.room, env)
                groups += await collect(tasks_of, limits, derive_seed(seed, env.name))
        for group in groups:
            for trajectory in group.trajectories:
                self.log.write_trajectory(made.first_step, trajectory)
        made.metrics = episode_metrics(groups)
        if not made.metrics["episodes/usable"]:
            failures = [t.error for g in groups for t in g.trajectories]
            raise EnvError(f"round {made.number}: all {len(failures)} episodes failed; the first: {failures[0]}")
        made.metrics["time/rollout_s"] = time.perf_counter() - started
        usable, success = made.metrics["episodes/usable"], made.metrics["success/mean"]
        self.console.note(f"{100 * success:.1f}% of {usable:g} episodes were a success")
        return groups
