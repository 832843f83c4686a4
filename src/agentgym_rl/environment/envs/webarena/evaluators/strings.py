"""WebArena's text comparison: ignores case, outer spaces and one pair of surrounding quotes."""

from __future__ import annotations

import re
from urllib.parse import parse_qs, urlsplit

OR = " |OR| "
_SEPARATORS = r"\s;@#$%&?!*()\[\]{}<>\"`“”«»„‘’"
"""Spaces, and marks that always separate words."""
_WORD_START = rf"(?:(?<![^{_SEPARATORS}])|(?<=(?<!\w)')|(?<=--)|(?<=\.\.))"
_WORD_END = rf"(?=(?:'[smd]?)?(?:$|[{_SEPARATORS}]|--|\.\.|[,:](?!\d))|\.[{_SEPARATORS}']*$)"
"""A comma or colon before a digit belongs to a number. A full stop ends a word only at the end of the answer."""


def clean(text: str) -> str:
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    return text.lower()


def exact_match(reference: str, answer: str) -> bool:
    return clean(reference) == clean(answer)


def must_include(reference: str, answer: str, whole_word: bool = False) -> bool:
    """Return whether the answer contains the reference.

    With `whole_word` a reference of one letter or digit must be a word (by NLTK's rules): 0 is not in 10, 0th or -0.
    """
    wanted, given = clean(reference), clean(answer)
    if whole_word and len(wanted) == 1 and wanted.isalnum():
        return re.search(_WORD_START + wanted + _WORD_END, given) is not None
    return wanted in given


def any_included(reference: str, answer: str) -> bool:
    """Return whether the answer contains one alternative of `a |OR| b`."""
    return any(must_include(part, answer) for part in reference.split(OR))


def url_match(reference: str, url: str) -> bool:
    """Return whether the address contains a reference and has all required query values (GOLD in PRED)."""
    references = [_parts(part) for part in reference.split(OR)]
    place, query = _parts(url)
    if not any(wanted in place for wanted, _ in references):
        return False
    wanted_values: dict[str, set[str]] = {}
    for _, wanted_query in references:
        for key, values in wanted_query.items():
            wanted_values.setdefault(key, set()).update(values)
    return all(any(value in query.get(key, ()) for value in values) for key, values in wanted_values.items())


def same_url(reference: str, url: str) -> bool:
    """Return whether both are the same page and query, in any order (EXACT). `page=1` may be given or left out."""
    (place, query), (wanted_place, wanted_query) = _parts(url), _parts(reference)
    place, wanted_place = place.rstrip("/"), wanted_place.rstrip("/")
    if query.get("page") == ["1"] and "page" not in wanted_query:
        del query["page"]
    return (place, query) == (wanted_place, wanted_query)


def _parts(url: str) -> tuple[str, dict[str, list[str]]]:
    split = urlsplit(url.strip().rstrip("/"))
    return split.netloc + split.path, parse_qs(split.query)
