"""Grading of the embedded tasks' questions: the answer must be right and name no alternative.

WebArena's must_include finds 7.99 in $137.99 and accepts a list of everything on the page. Here a number must be the
only one, next to nothing but its unit and harmless words. Of several choices, only the right one may be named. Words of
the question may be repeated.
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
"""Accepted spellings of each unit, besides the sign $."""
_WORDS_BEFORE = frozenset(
    (
        *("the", "it", "it's", "its", "is", "are", "was", "be", "that's", "this", "has", "have", "a", "an", "of", "at"),
        *("for", "only", "just", "exactly", "about", "approximately", "roughly", "around", "costs", "cost", "price"),
        *("priced", "total", "totals", "totalled", "totaled", "totalling", "amount", "sum", "answer", "equals", "paid"),
        *("takes", "take", "took", "distance", "length", "duration", "time", "walk", "walking", "weighs", "weight"),
    )
)
"""Words allowed right before the number, besides words of the question."""
_WORDS_AFTER = frozenset(
    (
        *("on", "in", "by", "for", "from", "to", "between", "at", "is", "was", "according", "as", "total", "walk"),
        *("altogether", "away", "long", "only", "exactly", "approximately", "including", "included", "incl", "with"),
        "walking",
    )
)
_EXCLUDED_WORDS = frozenset({"and", "by", "foot", "from", "one", "or", "than", "to", "two", "with"}).union(
    *UNITS.values()
)
"""Words of the questions that change the meaning of a number next to them: 450 foot."""
_NEGATIONS = frozenset(
    ("not", "no", "never", "neither", "nor", "cannot", "minus", "negative", "except", "without", "rather", "unknown")
)
_NUMBER_WORDS = frozenset(
    (
        *("zero", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
        *("fifteen", "dozen", "half", "quarter", "double", "twice"),
        *("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety", "hundred", "thousand"),
        *("million", "billion", "hundreds", "thousands", "millions"),
    )
)
_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d+(?:\.\d+)?")
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_MARKS = "\"'`*_"
"""Marks that may surround a word."""
_PLAIN_MARKS = str.maketrans(
    {**dict.fromkeys("“”„«»", '"'), **dict.fromkeys("‘’", "'"), **dict.fromkeys("–−‒‑", "-"), "—": " - "}
)


def number(value: str, unit: str, answer: str, question: str) -> bool:
    """Return whether the answer's only number is `value`, with or without `unit`: $7.99, 7.99 dollars, It is 7.99."""
    text, asked = _normalise(answer), _normalise(question)
    text = re.sub(r"\b(?:comes?|came|amounts?|amounted|equal) to\b", "is", text)
    if _contains_any(_NEGATIONS | _NUMBER_WORDS, text, asked):
        return False
    asked_numbers = {_amount(match[0]) for match in _NUMBER.finditer(asked)}
    matches = list(_NUMBER.finditer(text))
    candidates = [
        match for match in matches if _amount(match[0]) not in asked_numbers or _amount(match[0]) == Decimal(value)
    ]
    if len(candidates) != 1 or _amount(candidates[0][0]) != Decimal(value):
        return False
    words = frozenset(word for word in _WORD.findall(asked) if len(word) > 2 or word.isdigit()) - _EXCLUDED_WORDS
    harmless = words | UNITS[unit]
    before, after = text[: candidates[0].start()], text[candidates[0].end() :]
    return _fits_before(before, unit, harmless | _WORDS_BEFORE) and _fits_after(after, unit, harmless | _WORDS_AFTER)


def number_only(value: str, answer: str) -> bool:
    """Return whether the answer is the number and nothing else: 82, "82", **82**, 82."""
    text = _normalise(answer).strip(f"{_MARKS} ").removesuffix(".").strip(f"{_MARKS} ")
    return _NUMBER.fullmatch(text) is not None and _amount(text) == Decimal(value)


def one_of(right: str, choices: Sequence[str], answer: str, question: str) -> bool:
    """Return whether the answer names `right` and no other choice, as whole words: oak is not in oaken."""
    text, asked = _normalise(answer), _normalise(question)
    if _contains_any(_NEGATIONS, text, asked):
        return False
    others = {choice.lower() for choice in choices if choice.lower() not in asked}
    names = sorted({right.lower(), *others}, key=len, reverse=True)  # match the longest first: moss green before green
    pattern = "|".join(f"({_spellings(choice)})" for choice in names)
    # A dot, colon or @ is part of an address, number or name only if a word touches it on both sides.
    whole = rf"(?<![\w+/-])(?<!\w[.:@])(?:{pattern})(?![\w@+/-])(?![.:]\w)"
    return {names[match.lastindex - 1] for match in re.finditer(whole, text) if match.lastindex} == {right.lower()}


def _spellings(choice: str) -> str:
    """Return a pattern for a choice. Phone numbers and opening hours may use other separators."""
    text = choice.translate(_PLAIN_MARKS)
    if re.fullmatch(r"[\d ]+", text):
        pattern = r"[ .)-]{0,2}".join(text.split())
    elif re.fullmatch(r"[\d:]+-[\d:]+", text):
        pattern = r" ?(?:-|to) ?".join(text.split("-"))
    else:
        pattern = re.escape(text)
    # A number next to a number is another number. Next to a name it is a house number or a distance.
    before, after = r"(?<!\d )" if text[0].isdigit() else "", r"(?! \d)" if text[-1].isdigit() else ""
    return before + pattern + after


def _normalise(text: str) -> str:
    """Return the text in lower case with plain quotes, dashes and spaces. A line break ends a sentence."""
    text = re.sub(r"\s*\n\s*", " ; ", text.strip().lower().translate(_PLAIN_MARKS))
    return re.sub(r"\s+", " ", text)


def _amount(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))


def _contains_any(wanted: frozenset[str], text: str, question: str) -> bool:
    """Return whether a text has one of these words, except between the same two words as in the question."""
    words, asked = (["", *_WORD.findall(each), ""] for each in (text, question))
    quoted = set(zip(asked, asked[1:], asked[2:], strict=False))
    return any(
        (word in wanted or word.endswith("n't")) and (before, word, after) not in quoted
        for before, word, after in zip(words, words[1:], words[2:], strict=False)
    )


def _fits_before(text: str, unit: str, harmless: frozenset[str]) -> bool:
    """Return whether the text before a number leaves its meaning unchanged."""
    if unit == "$":
        text = text.rstrip(" ").removesuffix("$") if text.rstrip(" ").endswith("$") else text
    bare = text.rstrip(f"{_MARKS} ([{{~")
    if not bare or bare[-1] in ";:=|!?)]}":
        return True
    if bare[-1] in ".,":
        return text.endswith(" ")  # .450 and 1,450 are other numbers
    if bare[-1] == "-":  # a dash between a name and its number, not a minus
        return text.endswith(" ") and re.search(r"[^\W_][\"')]* -$", bare) is not None
    word = re.search(rf"{_WORD.pattern}$", bare)
    if word is None:
        return False
    return word[0] in (harmless if bare != text or unit == "$" else UNITS[unit])


def _fits_after(text: str, unit: str, harmless: frozenset[str]) -> bool:
    """Return whether a number is followed by its unit, a harmless word or the end."""
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
