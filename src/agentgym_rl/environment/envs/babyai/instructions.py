"""Faster versions of minigrid's instructions. Only `levels.py` imports it, when minigrid is there."""

from __future__ import annotations

from typing import Any

from minigrid.envs.babyai.core import verifier

from agentgym_rl.environment.envs.babyai.moves import front_of


class GoToInstr(verifier.GoToInstr):
    """Minigrid's instruction without arrays. It keeps its name, by which the oracle finds a plan."""

    def verify_action(self, _: int) -> str:
        """Return the state after a move: whether the agent faces a target."""
        return "success" if front_of(self.env) in self.desc.obj_poss else "continue"


def use_fast_instructions(instruction: Any) -> None:
    """Change the class of the mission's parts. Minigrid's own classes stay as they are, for other code of the process.

    Pickles and copies keep the class.
    """
    if hasattr(instruction, "instr_a"):
        use_fast_instructions(instruction.instr_a)
        use_fast_instructions(instruction.instr_b)
    elif type(instruction) is verifier.GoToInstr:
        instruction.__class__ = GoToInstr
