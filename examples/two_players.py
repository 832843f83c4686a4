"""A game of two roles: a caller says a word, an echo repeats it. Each role has its own policy and its own episode.

python two_players.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import ClassVar

from agentgym_rl.agent.policy import OraclePolicy, RandomPolicy
from agentgym_rl.agent.team import Player, TeamCollector
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.types import Limits, Step, Task

WORDS = ("red", "green", "blue")


class Echo:
    """Both roles win if the second repeats what the first said."""

    name: ClassVar[str] = "echo"
    instruction: ClassVar[str] = "Two players say the same word: red, green or blue."
    roles: ClassVar[Mapping[str, str]] = {"caller": "Say a word.", "echo": "Repeat the word that you hear."}
    splits: ClassVar[Mapping[str, range]] = {"train": range(80), "test": range(80, 100)}
    subsets: ClassVar[tuple[str, ...]] = ()
    cheap: ClassVar[bool] = True

    def __init__(self) -> None:
        self._item, self._word = 0, ""

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return ()

    def reset(self, item: int) -> str:
        if not 0 <= item < 100:
            raise IndexError(f"echo has items 0 to 99, got {item}")
        self._item, self._word = item, ""
        return f"Game {item}. Say red, green or blue."

    def role(self) -> str:
        """Return the role whose turn it is."""
        return "echo" if self._word else "caller"

    def step(self, text: str) -> Step:
        """Play the action of that role. The observation is for the role that acts next, the last one for both."""
        if not self._word:
            self._word = text.strip() or "nothing"
            return Step(f"The caller says: {self._word}")
        won = float(text.strip() == self._word)
        rewards = {"caller": won, "echo": won}
        return Step("The end.", won, True, {"success": bool(won), "rewards": rewards})

    def actions(self) -> list[str]:
        return list(WORDS)

    def oracle(self) -> str:
        return self._word or WORDS[self._item % 3]

    def close(self) -> None:
        pass


async def main() -> None:
    """Play four games of a careful echo and four of a careless one, and print every episode."""
    pool = LocalPool({"echo": Echo})
    limits = Limits(max_turns=1, max_new_tokens=8, max_context=512)
    careful = {"caller": Player("random", RandomPolicy), "echo": Player("oracle", lambda env, seed: OraclePolicy(env))}
    careless = {"caller": Player("random", RandomPolicy), "echo": Player("random", RandomPolicy)}
    for players in (careful, careless):
        collector = TeamCollector(lambda seed, index, players=players: players, pool, RandomPolicy, 4, 8)
        for group in await collector([Task("echo", 0)], limits, seed=0):
            for t in group.trajectories:
                said = next(message.content for message in t.messages if message.role == "assistant")
                print(f"{t.role:6} {t.player:6} reward {t.reward:g}  {said}")
    await pool.close()


if __name__ == "__main__":
    asyncio.run(main())
