"""An environment that is served and trained over HTTP: guess a number. For one in process, see crossroads.py.

python examples/number_guessing.py                        the oracle plays three items
python examples/number_guessing.py serve                  serve it on http://127.0.0.1:36001
agentgym-rl train examples/number_guessing.toml           train a small model on that server
"""

import sys

from agentgym_rl.environment.server import bind, run
from agentgym_rl.types import Step


class NumberGuessing:
    name = "number_guessing"
    instruction = "I think of a number from 1 to 100. Reply with a number each turn; I say higher, lower or right."
    splits = {"train": range(80), "test": range(80, 100)}  # noqa: RUF012 - disjoint items
    subsets = ("low", "high")
    cheap = True  # a step takes microseconds, so no thread is needed

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return ("low",) if cls.number(item) <= 50 else ("high",)

    @staticmethod
    def number(item: int) -> int:
        if not 0 <= item < 100:
            raise IndexError(f"number_guessing has items 0 to 99, got {item}")
        return item * 37 % 100 + 1  # the item determines the whole game, in every process

    def reset(self, item: int) -> str:
        self.item, self.secret, self.low, self.high = item, self.number(item), 1, 100
        return "I have a number from 1 to 100."

    def step(self, text: str) -> Step:
        text = "".join(text.split())  # small models write spaces between digits
        if not (text.isascii() and text.isdigit() and len(text) <= 3):  # never trust the model's text
            return Step("Reply with a number.", info={"valid": False})
        guess = int(text)
        if guess == self.secret:
            return Step("Right.", reward=1.0, done=True, info={"valid": True, "success": True})
        if guess < self.secret:
            self.low = max(self.low, guess + 1)
            return Step("Higher.", info={"valid": True})
        self.high = min(self.high, guess - 1)
        return Step("Lower.", info={"valid": True})

    def close(self) -> None: ...

    # Optional methods: demonstrations, random play, credit by state, a picture.
    def oracle(self) -> str:
        return str((self.low + self.high) // 2)

    def actions(self) -> list[str]:
        return [str(number) for number in range(self.low, self.high + 1)]

    def state_key(self) -> str:
        return f"{self.item}|{self.low}-{self.high}"

    def render(self) -> str:
        bar = f'<rect x="{4 * self.low}" y="10" width="{4 * (self.high - self.low + 1)}" height="30" fill="#3a6ea5"/>'
        return f'<svg xmlns="http://www.w3.org/2000/svg" width="420" height="50">{bar}</svg>'


def main() -> None:
    if sys.argv[1:] == ["serve"]:
        run({NumberGuessing.name: NumberGuessing}, bind("127.0.0.1", 36001))
        return
    env = NumberGuessing()
    for item in (0, 1, 80):
        print(f"item {item}: {env.reset(item)}")
        step = Step("")
        while not step.done:
            action = env.oracle()
            step = env.step(action)
            print(f"  > {action:3}  {step.observation}")


if __name__ == "__main__":
    main()
