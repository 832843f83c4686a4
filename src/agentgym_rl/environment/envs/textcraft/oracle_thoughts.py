"""The oracle's reasoning, in words that a small model can learn to write by copying.

Have 1 birch log, 4 birch planks. birch door using 6 birch planks. birch planks using 1 birch logs makes 4, for 2 craft
once. Missing nothing.

A name comes before `using` as in the listed commands, so that a recipe can be found and copied by its name. Every
number was seen before or follows from earlier numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agentgym_rl.environment.envs.textcraft.planner import Plan


def think(plan: Plan, held: Mapping[str, int]) -> str:
    """Return the thought: the inventory, the recipes from the goal's to the next one, and the missing raw items."""
    sentences = [f"Have {_listed(held.items())}."]
    for name, (recipe, times) in plan.crafts.items():
        amounts = ""
        if plan.lacking[name] > 1:
            often = "once" if times == 1 else f"{times} times"
            amounts = f" makes {recipe.count}, for {plan.lacking[name]} craft {often}"
        sentences.append(f"{name} using {_listed(recipe.needs)}{amounts}.")
    return " ".join([*sentences, f"Missing {_listed(plan.gets.items())}."])


def _listed(parts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{count} {name}" for name, count in parts) or "nothing"
