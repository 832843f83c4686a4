"""Demonstrations with injected mistakes, so that recoveries are imitated, too.

An agent that has seen only perfect play does not know what to do after a refusal. So some turns play another action
than the oracle's, the oracle continues from there, and the loss skips those turns (`DART
<https://arxiv.org/abs/1703.09327>`_ injects noise into a supervisor's play for the same reason).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from agentgym_rl.agent.policy import stable_seed
from agentgym_rl.agent.session_wrapper import SessionWrapper
from agentgym_rl.environment.wire import NotSupported
from agentgym_rl.types import EnvSession, Step, ToolCall

Solutions = dict[int, dict[str, str]]
"""Item -> the distinct actions that its oracle took, in order, each with the last thought before it."""
CORRECTION = "Wait, that is wrong."
"""Text between a wrong thought and the right one. The loss starts with it."""
_THOUGHT = re.compile(r"\s*(?:\**Thought ?:\**)?\s*(.*?)\s*(?<!\w)\**Action ?:", re.DOTALL)
"""Beginning of a reply with a thought, as `formats.parse_react` accepts it."""


class MistakeSession(SessionWrapper):
    """A session whose oracle makes a mistake in a share of its turns, marked by `info["mistake"]` of the answer.

    Half of the mistakes are other possible actions (`actions()`, if there is such a list), mostly useless ones. The
    other half are actions that the oracle takes at another time of this item, which are often refused. `solutions`
    collects the oracle's actions, so that they are all known for an item that was played before. The oracle's thought
    stays in front of the wrong action.

    In `thought_share` of the other turns the thought errs: one that the oracle has at another time of this item comes
    first, then a correction, the right thought and the right action. `info["wrong_thought"]` is what the loss skips.
    """

    def __init__(
        self, env: EnvSession, share: float, seed: int, solutions: Solutions, thought_share: float = 0.0
    ) -> None:
        super().__init__(env)
        self._share = share
        self._seed = seed
        self._solutions = solutions
        self._thought_share = thought_share
        self._solution: dict[str, str] = {}
        self._random = random.Random(seed)
        self._thoughts_random = random.Random(seed)
        self._resets = 0
        self._made_mistake = False
        self._wrong_thought = ""

    async def reset(self, item: int) -> Step:
        self._resets += 1  # other attempts of one episode make other mistakes
        self._random = random.Random(stable_seed(self._seed, item, self._resets))
        self._thoughts_random = random.Random(stable_seed(self._seed, item, self._resets, "thoughts"))
        self._solution = self._solutions.setdefault(item, {})
        self._made_mistake, self._wrong_thought = False, ""
        return await self._env.reset(item)

    async def step(self, text: str) -> Step:
        return self._marked(await self._env.step(text))

    async def call(self, calls: list[ToolCall], message: str = "") -> Step:
        return self._marked(await self._env.call(calls, message))

    def _marked(self, step: Step) -> Step:
        made_mistake, self._made_mistake = self._made_mistake, False
        if made_mistake:
            step.info = {**step.info, "mistake": True}
        if self._wrong_thought:
            step.info = {**step.info, "wrong_thought": self._wrong_thought}
        self._wrong_thought = ""
        return step

    async def advice(self) -> tuple[str, str]:
        thought, action = await self._env.advice()
        self._solution[action] = thought
        if self._random.random() >= self._share:
            return self._doubted(thought), action
        kinds = [[other for other in actions if other != action] for actions in (await self.actions(), self._solution)]
        kinds = [kind for kind in kinds if kind]
        if not kinds:  # there is no other action
            return thought, action
        self._made_mistake = True
        return thought, self._random.choice(self._random.choice(kinds))

    def _doubted(self, thought: str) -> str:
        """Return the thought, in a share of the turns behind a wrong one and a correction."""
        others = [other for other in dict.fromkeys(self._solution.values()) if other and other != thought]
        if self._thoughts_random.random() >= self._thought_share or not others or not thought:
            return thought
        self._wrong_thought = self._thoughts_random.choice(others)
        return f"{self._wrong_thought} {CORRECTION} {thought}"

    async def oracle(self) -> str:
        return (await self.advice())[1]

    async def actions(self) -> list[str]:
        try:
            return await self._env.actions()
        except NotSupported:
            return []


def inject_mistakes(
    share: float, seed: int, solutions: Solutions, thought_share: float = 0.0
) -> Callable[[EnvSession], EnvSession]:
    """Return a function that wraps sessions. A seed gives every item mistakes of its own, the same every time."""
    return lambda session: MistakeSession(session, share, seed, solutions, thought_share)


def corrected(reply: str, advice: str) -> tuple[str, int] | None:
    """Return the oracle's reply behind the agent's own thought and a correction, and the characters before those.

    None if one of the two has no thought, or both have the same.
    """
    own, right = _THOUGHT.match(reply), _THOUGHT.match(advice)
    if own is None or right is None or own[1] in ("", right[1]):
        return None
    start = f"Thought: {own[1]}"
    return f"{start} {CORRECTION} {advice[right.start(1) :]}", len(start)
