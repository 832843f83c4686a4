"""A job of an experiment: one command of `agentgym-rl`, with the pieces that several studies use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

PLACEHOLDER = r"{([\w.-]+)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One command. In `arguments`, {name} is replaced by the run of that name if the job evaluates, and by its last
    model if the job trains; {pretrained} and {pretrained-SIZE} are replaced by the paths of --model."""

    name: str
    arm: str
    task: str
    seed: int
    kind: Literal["train", "eval"] = "train"
    recipe: str = ""
    """Recipe of a `train` job, relative to recipes/."""
    arguments: tuple[str, ...] = ()
    """Settings of a `train` job, options of an `eval` job."""
    keep: bool = True
    """Keep the episodes of an `eval` job beside its record (results/episodes.py)."""

    @property
    def needs(self) -> list[str]:
        """Return the names of the jobs that must finish first."""
        names = [name for a in self.arguments for name in re.findall(PLACEHOLDER, a)]
        return [name for name in names if not name.startswith(PRETRAINED)]


RANDOM = "random play"
PRETRAINED = "pretrained"
"""Placeholder of the pretrained model, which no job trains. Studies of several sizes have one for each."""


def fill(settings: tuple[str, ...], numbers: dict[str, int]) -> tuple[str, ...]:
    return tuple(setting.format(**numbers) for setting in settings)


def subsets(*names: str) -> tuple[str, ...]:
    return tuple(option for name in names for option in ("--subset", name))


def evaluated(name: str, agent: str, arm: str, task: str, seed: int, arguments: tuple[str, ...]) -> Job:
    """Return an evaluation of `agent`: the name of a job, or PRETRAINED."""
    options = ("--agent", f"{{{agent}}}", "--env", task, *arguments)
    return Job(name=name, arm=arm, task=task, seed=seed, kind="eval", arguments=options)


def chance(name: str, task: str, arguments: tuple[str, ...]) -> Job:
    """Return an evaluation of uniformly random play among the actions that the environment lists."""
    options = ("--agent", "random", "--env", task, *arguments)
    return Job(name=name, arm=RANDOM, task=task, seed=0, kind="eval", arguments=options)
