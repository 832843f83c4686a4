"""Demonstrations with injected mistakes, so that recoveries are imitated, too.

An agent that has seen only perfect play does not know what to do after a refusal. So some turns play another action
than the oracle's, the oracle continues from there, and the loss skips those turns (`DART
<https://arxiv.org/abs/1703.09327>`_ injects noise into a supervisor's play for the same reason).
"""

from __future__ import annotations

import random
from collections.abc import Callable

from agentgym_rl.agent.policy import stable_seed
from agentgym_rl.environment.wire import NotSupported
from agentgym_rl.types import EnvSession, Step, ToolCall

Solutions = dict[int, dict[str, None]]
"""Item -> the distinct actions that its oracle took, in order."""


class MistakeSession:
    """A session whose oracle makes a mistake in a share of its turns, marked by `info["mistake"]` of the answer.

    Half of the mistakes are other possible actions (`actions()`, if there is such a list), mostly useless ones. The
    other half are actions that the oracle takes at another time of this item, which are often refused. `solutions`
    collects the oracle's actions, so that they are all known for an item that was played before. The oracle's thought
    stays in front of the wrong action.
    """

    def __init__(self, env: EnvSession, share: float, seed: int, solutions: Solutions) -> None:
        self.name = env.name
        self.instruction = env.instruction
        self.tools = env.tools
        self._env = env
        self._share = share
        self._seed = seed
        self._solutions = solutions
        self._solution: dict[str, None] = {}
        self._random = random.Random(seed)
        self._resets = 0
        self._made_mistake = False

    async def reset(self, item: int) -> Step:
        self._resets += 1  # other attempts of one episode make other mistakes
        self._random = random.Random(stable_seed(self._seed, item, self._resets))
        self._solution = self._solutions.setdefault(item, {})
        self._made_mistake = False
        return await self._env.reset(item)

    async def step(self, text: str) -> Step:
        return self._marked(await self._env.step(text))

    async def call(self, calls: list[ToolCall]) -> Step:
        return self._marked(await self._env.call(calls))

    def call_of(self, action: str) -> ToolCall:
        return self._env.call_of(action)

    def _marked(self, step: Step) -> Step:
        made_mistake, self._made_mistake = self._made_mistake, False
        if made_mistake:
            step.info = {**step.info, "mistake": True}
        return step

    async def advice(self) -> tuple[str, str]:
        thought, action = await self._env.advice()
        self._solution[action] = None
        if self._random.random() >= self._share:
            return thought, action
        kinds = [[other for other in actions if other != action] for actions in (await self.actions(), self._solution)]
        kinds = [kind for kind in kinds if kind]
        if not kinds:  # there is no other action
            return thought, action
        self._made_mistake = True
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


def inject_mistakes(share: float, seed: int, solutions: Solutions) -> Callable[[EnvSession], EnvSession]:
    """Return a function that wraps sessions. A seed gives every item mistakes of its own, the same every time."""
    return lambda session: MistakeSession(session, share, seed, solutions)
