"""How the embedded tasks' questions are graded: the answer says the right thing and nothing that competes with it.

WebArena's must_include finds 7.99 in $137.99 and is content with a list of everything on the page. Here a number has to
be the only one, and of several choices only the right one may be named. What the question itself says may be repeated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

UNITS: dict[str, tuple[str, ...]] = {
    "$": ("$", "usd", "dollar", "dollars"),
    "m": ("m", "metre", "metres", "meter", "meters"),
    "min": ("min", "mins", "minute", "minutes"),
    "g": ("g", "gram", "grams"),
}
"""Unit of a reference -> how it may be written."""
_OTHER_UNITS = frozenset(
    (
        *("€", "£", "¥", "eur", "euro", "euros", "gbp", "pound", "pounds", "cent", "cents"),
        *("km", "kilometre", "kilometres", "kilometer", "kilometers", "mile", "miles", "feet", "yards"),
        *("h", "hr", "hrs", "hour", "hours", "s", "sec", "second", "seconds", "day", "days"),
        *("kg", "kilogram", "kilograms", "mg", "oz", "lb", "lbs"),
    )
)
_NUMBER = re.compile(r"(\$?)(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?([a-z$]*)")


def number(value: str, unit: str, answer: str, question: str) -> bool:
    """Whether the answer's only number is `value`, in `unit` or without one: $7.99, 7.99 dollars, "It is 7.99."."""
    asked = set(_words(question))
    words = ["", *_words(answer), ""]
    found = [place for place, word in enumerate(words) if re.search(r"\d", word)]
    given = [place for place in found if words[place] not in asked or _equals(words[place], value, unit)]
    if len(given) != 1 or not _equals(words[given[0]], value, unit):
        return False
    foreign = _OTHER_UNITS.union(*(names for key, names in UNITS.items() if key != unit))
    return foreign.isdisjoint((words[given[0] - 1], words[given[0] + 1]))


def _words(text: str) -> list[str]:
    return [word.strip("()[]\"'`*.,;:!?") for word in text.lower().split()]


def _equals(word: str, value: str, unit: str) -> bool:
    match = _NUMBER.fullmatch(word)
    if match is None or (match[1] and unit != "$") or (match[4] and match[4] not in UNITS[unit]):
        return False
    return Decimal(match[2].replace(",", "") + (match[3] or "")) == Decimal(value)


def one_of(right: str, choices: Sequence[str], answer: str, question: str) -> bool:
    """Whether the answer names `right` and none of the other `choices`, each as a whole: oak is not in oaken."""
    asked = question.lower()
    others = {choice.lower() for choice in choices if choice.lower() not in asked}
    known = sorted({right.lower(), *others}, key=len, reverse=True)  # the longest that fits: moss green before green
    pattern = "|".join(re.escape(choice) for choice in known)
    # Points, colons and the like belong to addresses, numbers and names only where something follows or precedes.
    whole = rf"(?<![\w@+/-])(?<!\w[.:])(?<!\d )(?:{pattern})(?![\w@+/-])(?![.:]\w)(?! \d)"
    return set(re.findall(whole, answer.lower())) == {right.lower()}
