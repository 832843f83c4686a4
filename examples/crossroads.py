"""An environment of your own, up to a trained agent. docs/get-started/your-environment.md walks through it."""

import random

from agentgym_rl.types import Step

WAYS = ("left", "right", "straight")
SIGNS = {"a red star": "left", "a blue moon": "right", "a green sun": "straight"}


class Crossroads:
    """Follow the signs at a row of crossroads; what a sign means has to be learned."""

    name = "crossroads"
    instruction = "At each crossroads you see a sign. Reply with left, right or straight. A wrong turn ends the walk."
    splits = {"train": range(500), "test": range(500, 600)}  # noqa: RUF012
    subsets = ()
    cheap = True

    def __init__(self, length: int = 3) -> None:
        self.length = length

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return ()

    def reset(self, item: int) -> str:
        if not 0 <= item < 600:
            raise IndexError(f"crossroads has items 0 to 599, got {item}")
        self.item, self.passed = item, 0
        self.signs = random.Random(item).choices(list(SIGNS), k=self.length)  # the item decides everything
        return f"You see {self.signs[0]}."

    def step(self, text: str) -> Step:
        way = text.strip().lower()
        if way not in WAYS:  # never trust the model's text
            return Step("Reply with left, right or straight.", info={"valid": False})
        if way != SIGNS[self.signs[self.passed]]:
            return Step("A dead end.", done=True, info={"valid": True, "success": False})
        self.passed += 1
        if self.passed == self.length:
            return Step("You arrive.", 1 / self.length, True, {"valid": True, "success": True})
        return Step(f"You see {self.signs[self.passed]}.", 1 / self.length, info={"valid": True})

    def close(self) -> None: ...

    # Optional: random play and `play` list actions, demonstrations need an oracle, the viewer draws a picture.
    def actions(self) -> list[str]:
        return list(WAYS)

    def oracle(self) -> str:
        return SIGNS[self.signs[self.passed]]

    def state_key(self) -> str:
        return f"{self.item}|{self.passed}"

    def render(self) -> str:
        colours = [sign.split()[1] if n >= self.passed else "lightgray" for n, sign in enumerate(self.signs)]
        dots = [f'<circle cx="{30 + 40 * n}" cy="30" r="12" fill="{colour}"/>' for n, colour in enumerate(colours)]
        size = f'width="{40 * self.length + 20}" height="60"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(dots)}</svg>'
