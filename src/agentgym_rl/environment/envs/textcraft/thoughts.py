"""Why the oracle does what it does, in words that a small model can learn to write by copying.

Have 1 birch log, 4 birch planks. birch door using 6 birch planks. birch planks using 1 birch logs makes 4, for 2 craft
once. Missing nothing.

Names stand before `using` as in the listed commands, so that a recipe is found and copied by its name. Every number is
one that was seen, or follows from numbers written before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agentgym_rl.environment.envs.textcraft.planner import Plan


def think(plan: Plan, held: Mapping[str, int]) -> str:
    """What is held; the recipes still to be followed, the goal's first and the next one last; what is still to get."""
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
