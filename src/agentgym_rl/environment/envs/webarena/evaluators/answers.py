"""How the embedded tasks' questions are graded: the answer says the right thing and nothing that competes with it.

WebArena's must_include finds 7.99 in $137.99 and is content with a list of everything on the page. Here a number has to
be the only one, beside nothing but its unit and harmless words, and of several choices only the right one may be named.
What the question itself says may be repeated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

UNITS: dict[str, frozenset[str]] = {
    "$": frozenset({"usd", "us", "dollar", "dollars"}),
    "m": frozenset({"m", "metre", "metres", "meter", "meters"}),
    "min": frozenset({"min", "mins", "minute", "minutes"}),
    "g": frozenset({"g", "gram", "grams", "gramme", "grammes"}),
}
"""Unit of a reference -> how it may be written, besides the sign $."""
_BEFORE = frozenset(
    (
        *("the", "it", "it's", "its", "is", "are", "was", "be", "that's", "this", "has", "have", "a", "an", "of", "at"),
        *("for", "only", "just", "exactly", "about", "approximately", "roughly", "around", "costs", "cost", "price"),
        *("priced", "total", "totals", "totalled", "totaled", "totalling", "amount", "sum", "answer", "equals", "paid"),
        *("takes", "take", "took", "distance", "length", "duration", "time", "walk", "walking", "weighs", "weight"),
    )
)
"""What may stand right before the number besides words of the question."""
_AFTER = frozenset(
    (
        *(
            "on",
            "in",
            "by",
            "for",
            "from",
            "to",
            "between",
            "at",
            "is",
            "was",
            "according",
            "as",
            "total",
            "altogether",
        ),
        *(
            "away",
            "long",
            "only",
            "exactly",
            "approximately",
            "including",
            "included",
            "incl",
            "with",
            "walking",
            "walk",
        ),
    )
)
_NOT_FROM_THE_QUESTION = frozenset({"and", "by", "foot", "from", "one", "or", "than", "to", "two", "with"}).union(
    *UNITS.values()
)
"""Words of the questions that make something else of a number: 450 foot."""
_NEGATIONS = frozenset(
    ("not", "no", "never", "neither", "nor", "cannot", "minus", "negative", "except", "without", "rather", "unknown")
)
_NUMBER_WORDS = frozenset(
    (
        *(
            "zero",
            "two",
            "three",
            "four",
            "five",
            "six",
            "seven",
            "eight",
            "nine",
            "ten",
            "eleven",
            "twelve",
            "fifteen",
        ),
        *("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety", "hundred", "thousand"),
        *("million", "billion", "hundreds", "thousands", "millions", "dozen", "half", "quarter", "double", "twice"),
    )
)
_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d+(?:\.\d+)?")
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_MARKS = "\"'`*_"
"""What a word may be wrapped in."""
_PLAIN = str.maketrans(
    {**dict.fromkeys("“”„«»", '"'), **dict.fromkeys("‘’", "'"), **dict.fromkeys("–−‒‑", "-"), "—": " - "}
)


def number(value: str, unit: str, answer: str, question: str) -> bool:
    """Whether the answer's only number is `value`, in `unit` or without one: $7.99, 7.99 dollars, "It is 7.99."."""
    text, asked = _plain(answer), _plain(question)
    text = re.sub(r"\b(?:comes?|came|amounts?|amounted|equal) to\b", "is", text)
    if _says(_NEGATIONS | _NUMBER_WORDS, text, asked):
        return False
    asked_numbers = {_amount(match[0]) for match in _NUMBER.finditer(asked)}
    matches = list(_NUMBER.finditer(text))
    given = [
        match for match in matches if _amount(match[0]) not in asked_numbers or _amount(match[0]) == Decimal(value)
    ]
    if len(given) != 1 or _amount(given[0][0]) != Decimal(value):
        return False
    words = frozenset(word for word in _WORD.findall(asked) if len(word) > 2 or word.isdigit()) - _NOT_FROM_THE_QUESTION
    harmless = words | UNITS[unit]
    before, after = text[: given[0].start()], text[given[0].end() :]
    return _fits_before(before, unit, harmless | _BEFORE) and _fits_after(after, unit, harmless | _AFTER)


def number_only(value: str, answer: str) -> bool:
    """Whether the answer is the number and nothing else: 82, "82", **82**, 82."""
    text = _plain(answer).strip(f"{_MARKS} ").removesuffix(".").strip(f"{_MARKS} ")
    return _NUMBER.fullmatch(text) is not None and _amount(text) == Decimal(value)


def one_of(right: str, choices: Sequence[str], answer: str, question: str) -> bool:
    """Whether the answer names `right` and none of the other `choices`, each as a whole: oak is not in oaken."""
    text, asked = _plain(answer), _plain(question)
    if _says(_NEGATIONS, text, asked):
        return False
    others = {choice.lower() for choice in choices if choice.lower() not in asked}
    known = sorted({right.lower(), *others}, key=len, reverse=True)  # the longest that fits: moss green before green
    pattern = "|".join(f"({_spellings(choice)})" for choice in known)
    # Points, colons and the like belong to addresses, numbers and names only where something follows or precedes.
    whole = rf"(?<![\w+/-])(?<!\w[.:@])(?:{pattern})(?![\w@+/-])(?![.:]\w)"
    return {known[match.lastindex - 1] for match in re.finditer(whole, text) if match.lastindex} == {right.lower()}


def _spellings(choice: str) -> str:
    """A pattern for a choice: telephone numbers and opening hours are also written with other marks in them."""
    text = choice.translate(_PLAIN)
    if re.fullmatch(r"[\d ]+", text):
        pattern = r"[ .)-]{0,2}".join(text.split())
    elif re.fullmatch(r"[\d:]+-[\d:]+", text):
        pattern = r" ?(?:-|to) ?".join(text.split("-"))
    else:
        pattern = re.escape(text)
    # A number beside a number makes another one; beside a name it is a house's or a distance.
    before, after = r"(?<!\d )" if text[0].isdigit() else "", r"(?! \d)" if text[-1].isdigit() else ""
    return before + pattern + after


def _plain(text: str) -> str:
    """In lower case, with plain quotes, dashes and spaces; a new line ends a sentence."""
    text = re.sub(r"\s*\n\s*", " ; ", text.strip().lower().translate(_PLAIN))
    return re.sub(r"\s+", " ", text)


def _amount(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))


def _says(wanted: frozenset[str], text: str, question: str) -> bool:
    """Whether a text has one of these words, other than between the same two words as in the question."""
    words, asked = (["", *_WORD.findall(each), ""] for each in (text, question))
    quoted = set(zip(asked, asked[1:], asked[2:], strict=False))
    return any(
        (word in wanted or word.endswith("n't")) and (before, word, after) not in quoted
        for before, word, after in zip(words, words[1:], words[2:], strict=False)
    )


def _fits_before(text: str, unit: str, harmless: frozenset[str]) -> bool:
    """Whether what stands before a number leaves it what it is."""
    if unit == "$":
        text = text.rstrip(" ").removesuffix("$") if text.rstrip(" ").endswith("$") else text
    bare = text.rstrip(f"{_MARKS} ([{{~")
    if not bare or bare[-1] in ";:=|!?)]}":
        return True
    if bare[-1] in ".,":
        return text.endswith(" ")  # .450 and 1,450 are other numbers
    if bare[-1] == "-":  # a dash between a name and its number, or else a minus
        return text.endswith(" ") and re.search(r"[^\W_][\"')]* -$", bare) is not None
    word = re.search(rf"{_WORD.pattern}$", bare)
    if word is None:
        return False
    return word[0] in (harmless if bare != text or unit == "$" else UNITS[unit])


def _fits_after(text: str, unit: str, harmless: frozenset[str]) -> bool:
    """Whether what stands after a number is its unit, a harmless word or the end."""
    if unit == "$":
        text = text.removeprefix("$")
    joined = re.match(r"-?([^\W\d_]+)", text)
    if joined:
        return joined[1] in UNITS[unit]
    bare = text.lstrip(f"{_MARKS} ()[]}}")
    if not bare or bare[0] in ";|!?":
        return True
    if bare[0] in ".,:":
        return not re.match(r"[.,:]\w", bare)
    if bare[0] == "-":
        return text.startswith(" ") and bare.startswith("- ")
    word = _WORD.match(bare)
    return word is not None and word[0] in harmless
