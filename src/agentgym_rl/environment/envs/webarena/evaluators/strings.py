"""Comparing texts as WebArena does: without case, outer spaces and one pair of quotes around the whole."""

from __future__ import annotations

import re
from urllib.parse import parse_qs, urlsplit

OR = " |OR| "
_MARKS = r"\s;@#$%&?!*()\[\]{}<>\"`“”«»„‘’"
"""Spaces, and marks that are words of their own wherever they stand."""
_ALONE_AFTER = rf"(?:(?<![^{_MARKS}])|(?<=(?<!\w)')|(?<=--)|(?<=\.\.))"
_ALONE_BEFORE = rf"(?=(?:'[smd]?)?(?:$|[{_MARKS}]|--|\.\.|[,:](?!\d))|\.[{_MARKS}']*$)"
"""A comma or colon before a digit belongs to a number, a full stop ends a word only at the end of the answer."""


def clean(text: str) -> str:
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    return text.lower()


def exact_match(reference: str, answer: str) -> bool:
    return clean(reference) == clean(answer)


def must_include(reference: str, answer: str, whole_word: bool = False) -> bool:
    """`whole_word`: a reference of one letter or digit must be a word of the answer: 0 is not found in 10, 0th or -0.

    The words are those of NLTK's tokenizer, which WebArena uses.
    """
    wanted, given = clean(reference), clean(answer)
    if whole_word and len(wanted) == 1 and wanted.isalnum():
        return re.search(_ALONE_AFTER + wanted + _ALONE_BEFORE, given) is not None
    return wanted in given


def any_included(reference: str, answer: str) -> bool:
    """`a |OR| b`: one of them."""
    return any(must_include(part, answer) for part in reference.split(OR))


def url_match(reference: str, url: str) -> bool:
    """GOLD in PRED: the address contains one of the references and has every query value that they ask for."""
    references = [_parts(part) for part in reference.split(OR)]
    place, query = _parts(url)
    if not any(wanted in place for wanted, _ in references):
        return False
    wanted_values: dict[str, set[str]] = {}
    for _, asked in references:
        for key, values in asked.items():
            wanted_values.setdefault(key, set()).update(values)
    return all(any(value in query.get(key, ()) for value in values) for key, values in wanted_values.items())


def same_url(reference: str, url: str) -> bool:
    """EXACT: the same page with the same query, in any order. The first page of a list may be asked for by number."""
    (place, query), (wanted_place, wanted_query) = _parts(url), _parts(reference)
    place, wanted_place = place.rstrip("/"), wanted_place.rstrip("/")
    if query.get("page") == ["1"] and "page" not in wanted_query:
        del query["page"]
    return (place, query) == (wanted_place, wanted_query)


def _parts(url: str) -> tuple[str, dict[str, list[str]]]:
    split = urlsplit(url.strip().rstrip("/"))
    return split.netloc + split.path, parse_qs(split.query)
