"""Demonstrations that go wrong at times: what is imitated then includes how to go on after a mistake.

An agent that has seen perfect play only does not know what to do after a refusal. So something else than the oracle's
action is played in some turns, the oracle goes on from where that led, and those turns are not imitated (`DART
<https://arxiv.org/abs/1703.09327>`_ injects noise into a supervisor's play to the same end).
"""

from __future__ import annotations

import random
from collections.abc import Callable

from agentgym_rl.agent.policy import stable_seed
from agentgym_rl.environment.wire import NotSupported
from agentgym_rl.types import EnvSession, Step

Solutions = dict[int, dict[str, None]]
"""Item -> the different actions its oracle was seen to take, in that order."""


class ErringSession:
    """A session whose oracle errs in a share of its turns; `info["mistake"]` of the answer says so.

    One half of the mistakes are other actions that make sense now (`actions()`, where there is such a list): possible,
    and mostly useless. The other half are what the oracle does at another time of this item, too early or once more:
    often refused. Every action of the oracle is noted in `solutions`, so that of an item that was played through before
    all are known. The oracle's thought stays before the wrong action.
    """

    def __init__(self, env: EnvSession, share: float, seed: int, solutions: Solutions) -> None:
        self.name = env.name
        self.instruction = env.instruction
        self._env = env
        self._share = share
        self._seed = seed
        self._solutions = solutions
        self._solution: dict[str, None] = {}
        self._random = random.Random(seed)
        self._resets = 0
        self._erred = False

    async def reset(self, item: int) -> Step:
        self._resets += 1  # a style of several attempts does not repeat its mistakes
        self._random = random.Random(stable_seed(self._seed, item, self._resets))
        self._solution = self._solutions.setdefault(item, {})
        self._erred = False
        return await self._env.reset(item)

    async def step(self, text: str) -> Step:
        erred, self._erred = self._erred, False
        step = await self._env.step(text)
        if erred:
            step.info = {**step.info, "mistake": True}
        return step

    async def advice(self) -> tuple[str, str]:
        thought, action = await self._env.advice()
        self._solution[action] = None
        if self._random.random() >= self._share:
            return thought, action
        kinds = [[each for each in some if each != action] for some in (await self.actions(), self._solution)]
        kinds = [kind for kind in kinds if kind]
        if not kinds:  # there is nothing else to do
            return thought, action
        self._erred = True
        return thought, self._random.choice(self._random.choice(kinds))

    async def oracle(self) -> str:
        return (await self.advice())[1]

    async def actions(self) -> list[str]:
        try:
            return await self._env.actions()
        except NotSupported:
            return []

    async def render(self) -> str | bytes:
        return await self._env.render()

    async def close(self) -> None:
        await self._env.close()


def erring(share: float, seed: int, solutions: Solutions) -> Callable[[EnvSession], EnvSession]:
    """Makes sessions of one environment err; one seed gives every item its own mistakes, the same ones every time."""
    return lambda session: ErringSession(session, share, seed, solutions)
