"""An environment with tools. docs/guides/tools.md explains it.

python examples/tool_calls.py                                                  # the oracle plays three items by calls
PYTHONPATH=examples agentgym-rl serve tool_calls:Shop --port 36002             # serve it over HTTP, tools included
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import ClassVar

from agentgym_rl.agent.policy import OraclePolicy
from agentgym_rl.agent.rollout import rollout
from agentgym_rl.agent.styles import STYLES
from agentgym_rl.environment.pool import LocalPool
from agentgym_rl.environment.tools import Tool
from agentgym_rl.types import Limits, Step, Task

GOODS = ("apple", "bread", "cheese")


class Shop:
    """Buy what the list says."""

    name: ClassVar[str] = "shop"
    instruction: ClassVar[str] = "Put what the list says into the basket, then check out."
    splits: ClassVar[Mapping[str, range]] = {"train": range(0, 80), "test": range(80, 100)}
    subsets: ClassVar[tuple[str, ...]] = ()
    cheap: ClassVar[bool] = True

    @classmethod
    def tools(cls) -> Sequence[Tool]:
        """Return the tools. Each has the text action that a call stands for."""
        return (
            Tool(
                "add",
                "Put goods into the basket.",
                "add {count} {item}",
                {"item": {"type": "string", "enum": list(GOODS)}, "count": {"type": "integer", "default": 1}},
            ),
            Tool("check_out", "Pay and leave.", "check out"),
        )

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return ()

    def reset(self, item: int) -> str:
        if not 0 <= item < 100:
            raise IndexError(f"shop has no item {item}: it has 0..99")
        self.wanted = {name: count for i, name in enumerate(GOODS) if (count := item // 3**i % 3)} or {"apple": 1}
        self.basket: dict[str, int] = {}
        return "The list: " + ", ".join(f"{count} {name}" for name, count in self.wanted.items())

    def step(self, text: str) -> Step:
        if text == "check out":
            success = self.basket == self.wanted
            return Step("You have left the shop.", float(success), done=True, info={"success": success})
        match text.split():
            case ["add", count, name] if name in GOODS and count.isdecimal():
                self.basket[name] = self.basket.get(name, 0) + int(count)
                return Step("The basket: " + ", ".join(f"{n} {name}" for name, n in self.basket.items()))
        return Step("Nothing happens.", info={"valid": False})

    def oracle(self) -> str:
        missing = [name for name in self.wanted if name not in self.basket]
        return f"add {self.wanted[missing[0]]} {missing[0]}" if missing else "check out"

    def close(self) -> None:
        pass


async def main() -> None:
    pool = LocalPool({"shop": Shop}, action_format="tool")
    for item in (5, 13, 26):
        session = STYLES["tool"].wrap(await pool.open("shop"))
        limits = Limits(max_turns=8, max_new_tokens=1, max_context=1)
        episode = await rollout(Task("shop", item), session, OraclePolicy(session), limits, id=f"shop-{item}")
        for message in episode.messages[1:]:
            print("  >" if message.role == "assistant" else f"{message.role}:", message.text)
        print(f"reward {episode.reward:g}\n")
        await session.close()
    await pool.close()


if __name__ == "__main__":
    asyncio.run(main())
