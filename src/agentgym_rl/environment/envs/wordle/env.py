"""Wordle as a text game."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from agentgym_rl.environment.envs.wordle import solver, words
from agentgym_rl.environment.envs.wordle.picture import draw
from agentgym_rl.environment.plain_text import plain_action
from agentgym_rl.environment.tools import Tool
from agentgym_rl.errors import EnvError
from agentgym_rl.types import Step

INSTRUCTION = f"""\
You play Wordle. An English word of five letters is hidden, and you have {words.MAX_GUESSES} guesses to find it. Each \
turn, reply with one English word of five letters and nothing else, for example: crane.

After each guess every letter gets a mark:
- g: the letter is in the word, at this place.
- y: the letter is in the word, at another place.
- b: the letter is not in the word, or not once more than already marked g or y.

Words that are not in the word list are refused and cost no guess."""

_NUM_CANDIDATES_OFFERED = 2
_NUM_OTHERS_OFFERED = 6
_MAX_CHARS = 200


class _Refused(Exception):
    """The text is not a valid guess. The message is the game's answer."""


TOOLS = (
    Tool(
        "guess",
        "Guess the hidden word.",
        "{word}",
        {"word": {"type": "string", "description": "An English word of five letters."}},
    ),
)


class Wordle:
    """1,150 hidden words. Implements TextEnv."""

    name: ClassVar[str] = "wordle"
    instruction: ClassVar[str] = INSTRUCTION
    splits: ClassVar[Mapping[str, range]] = words.SPLITS
    subsets: ClassVar[tuple[str, ...]] = words.SUBSETS
    cheap: ClassVar[bool] = True

    def __init__(self) -> None:
        self._item = -1
        self._answer = ""
        self._history: solver.History = ()
        self._playing = False

    @classmethod
    def tools(cls) -> Sequence[Tool]:
        return TOOLS

    @classmethod
    def subsets_of(cls, item: int) -> tuple[str, ...]:
        return words.subsets_of_word(_hidden_word(item))

    def reset(self, item: int) -> str:
        self._answer = _hidden_word(item)
        self._item = item
        self._history = ()
        self._playing = True
        return f"A word of five letters is hidden. You have {words.MAX_GUESSES} guesses."

    def step(self, text: str) -> Step:
        self._require_playing()
        try:
            guess = _read_guess(text)
        except _Refused as refusal:
            left = words.MAX_GUESSES - len(self._history)
            return Step(f"{refusal} {_guesses_left(left)}", info={"valid": False})
        marks = words.marks(guess, self._answer)
        self._history = (*self._history, (guess, marks))
        left = words.MAX_GUESSES - len(self._history)
        success = guess == self._answer
        self._playing = not success and left > 0
        ending = "You found the word." if success else f"The word was {self._answer}."
        shown = f"Guess {len(self._history)}: {' '.join(guess)}\nMarks:   {' '.join(marks)}"
        if self._playing:
            return Step(f"{shown}\n{_guesses_left(left)}", info={"valid": True})
        return Step(f"{shown}\n{ending}", float(success), True, {"valid": True, "success": success})

    def close(self) -> None:
        self._playing = False

    def actions(self) -> list[str]:
        """Return a few words that fit all marks and a few random ones, sorted. Equal states give equal words."""
        if not self._playing:
            return []
        rng = random.Random(self.state_key())
        fitting = solver.candidates(self._history)
        offered = rng.sample(fitting, min(len(fitting), _NUM_CANDIDATES_OFFERED))
        return sorted({*offered, *rng.sample(words.answers(), _NUM_OTHERS_OFFERED)})

    def oracle(self) -> str:
        """Return the guess of a solver that does not know the word. Its success rate is on the environment's page."""
        self._require_playing()
        return solver.best_guess(self._history)

    def vocabulary(self) -> list[str]:
        """Return the words that may be hidden, given the marks so far."""
        return list(solver.candidates(self._history))

    def state_key(self) -> str:
        """Return `12|crane,slate`: the item and the guesses, sorted because their order does not matter."""
        return f"{self._item}|" + ",".join(sorted(guess for guess, _ in self._history))

    def render(self) -> str:
        """Return an SVG of the board and the keyboard."""
        if self._item < 0:
            raise EnvError("wordle has nothing to draw yet: call reset first")
        return draw(self._item, self._history, self._answer if not self._playing else None)

    def _require_playing(self) -> None:
        if not self._playing:
            raise EnvError("wordle needs a running episode: call reset first")


def _hidden_word(item: int) -> str:
    hidden = words.hidden_words()
    if not 0 <= item < len(hidden):
        raise IndexError(f"wordle has items 0 to {len(hidden) - 1}, got {item}")
    return hidden[item]


def _guesses_left(left: int) -> str:
    return "You have 1 guess left." if left == 1 else f"You have {left} guesses left."


def _read_guess(text: str) -> str:
    """Return `crane` for `crane`, `C R A N E`, `"Crane".` and the like."""
    if len(text) > _MAX_CHARS:
        raise _Refused(f"Could not read {len(text)} characters. Guess one word of five letters.")
    guess = text.strip().strip("\"'`. ").lower()
    if re.fullmatch(r"[a-z](?: [a-z]){4}", guess):
        guess = guess.replace(" ", "")
    if not re.fullmatch(r"[a-z]{5}", guess):
        raise _Refused(f"Could not read {plain_action(text)} as a guess. Guess one word of five letters, a to z.")
    if guess not in words.allowed():
        raise _Refused(f"{guess} is not in the word list.")
    return guess
